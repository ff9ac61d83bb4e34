#include "common/base/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>
#include <unistd.h>

#include "common/base/log.h"
#include "common/base/str.h"

enum { FAULTS_MAX = 16, FAULT_NAME_MAX = 48 };
enum fault_do { FAULT_FAIL, FAULT_KILL, FAULT_STOP };
enum { STATE_OFF, STATE_UNREAD, STATE_ON };

struct fault {
    char name[FAULT_NAME_MAX];
    uint64_t nth, seen;
    enum fault_do what;
};

atomic_int fl_fault_state_ = STATE_UNREAD;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over all below */
static struct fault faults[FAULTS_MAX];
static size_t n_faults;
static unsigned armed; /* places still to be met until one fails; 0: no sweep */
static bool armed_met;
static thread_local bool spared;

static void state_update(void)
{
    atomic_store(&fl_fault_state_, n_faults || armed ? STATE_ON : STATE_OFF);
}

static enum fl_status parse_one(const char *entry, struct fault *out, struct fl_err *err)
{
    static const char *const words[] = { "fail", "kill", "stop" };
    const char *colon = strchr(entry, ':'), *equals = strchr(entry, '=');
    char number[24];
    int64_t nth;

    if (!colon || !equals || equals < colon || colon == entry)
        return fl_fail(err, FL_INVALID, "fault \"%s\": write name:nth=fail, =kill or =stop", entry);
    if ((size_t)(colon - entry) >= sizeof(out->name) || (size_t)(equals - colon) >= sizeof(number))
        return fl_fail(err, FL_INVALID, "fault \"%s\": name or number too long", entry);
    *out = (struct fault){ 0 };
    memcpy(out->name, entry, (size_t)(colon - entry));
    snprintf(number, sizeof(number), "%.*s", (int)(equals - colon - 1), colon + 1);
    if (fl_parse_i64(number, 1, INT32_MAX, &nth, err) != FL_OK)
        return fl_wrap(err, FL_INVALID, "fault \"%s\"", entry);
    out->nth = (uint64_t)nth;
    for (size_t i = 0; i < FL_LEN(words); i++)
        if (strcmp(equals + 1, words[i]) == 0) {
            out->what = (enum fault_do)i;
            return FL_OK;
        }
    return fl_fail(err, FL_INVALID, "fault \"%s\": \"%s\" is not fail, kill or stop", entry,
                   equals + 1);
}

static enum fl_status parse_all(const char *spec, struct fault out[FAULTS_MAX], size_t *n,
                                struct fl_err *err)
{
    char copy[FAULTS_MAX * (FAULT_NAME_MAX + 24)], *save = NULL;

    *n = 0;
    if (!spec)
        return FL_OK;
    if (!FL_COPY(copy, spec))
        return fl_fail(err, FL_INVALID, "faults: more than %zu bytes", sizeof(copy) - 1);
    for (char *e = strtok_r(copy, ",", &save); e; e = strtok_r(NULL, ",", &save)) {
        if (*n == FAULTS_MAX)
            return fl_fail(err, FL_INVALID, "faults: more than %d entries", FAULTS_MAX);
        FL_TRY(parse_one(e, &out[*n], err));
        (*n)++;
    }
    return FL_OK;
}

enum fl_status fl_fault_set(const char *spec, struct fl_err *err)
{
    struct fault fresh[FAULTS_MAX];
    size_t n;

    FL_TRY(parse_all(spec, fresh, &n, err));
    pthread_mutex_lock(&lock);
    memcpy(faults, fresh, n * sizeof(fresh[0]));
    n_faults = n;
    state_update();
    pthread_mutex_unlock(&lock);
    return FL_OK;
}

enum fl_status fl_fault_env(struct fl_err *err)
{
    enum fl_status st = fl_fault_set(getenv("FURLONG_FAULT"), err);

    return st == FL_OK ? st : fl_wrap(err, st, "FURLONG_FAULT");
}

static void read_env_once(void)
{
    struct fl_err err = { 0 };

    if (fl_fault_env(&err) == FL_OK)
        return;
    fl_error("fault points ignored why=\"%s\"", err.text);
    atomic_store(&fl_fault_state_, STATE_OFF);
}

/* Over all processes that share FURLONG_FAULT_DIR the first to make the file does it. */
static bool fault_claim(const struct fault *f)
{
    const char *dir = getenv("FURLONG_FAULT_DIR");
    char path[512], pid[16];

    if (!dir || !*dir)
        return true;
    snprintf(path, sizeof(path), "%s/%s:%llu", dir, f->name, (unsigned long long)f->nth);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno != EEXIST;
    int n = snprintf(pid, sizeof(pid), "%d\n", (int)getpid());
    (void)!write(fd, pid, (size_t)n); /* for a test that looks; the file alone is the claim */
    close(fd);
    return true;
}

bool fl_fault_met(const char *name)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int signal_self = 0;
    bool fail = false;

    if (atomic_load(&fl_fault_state_) == STATE_UNREAD)
        pthread_once(&once, read_env_once);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n_faults; i++) {
        struct fault *f = &faults[i];

        if (strcmp(f->name, name) != 0 || ++f->seen != f->nth || !fault_claim(f))
            continue;
        fail = f->what == FAULT_FAIL;
        signal_self = f->what == FAULT_KILL ? SIGKILL : f->what == FAULT_STOP ? SIGSTOP : 0;
    }
    if (armed && !spared && --armed == 0) {
        fail = armed_met = true;
        state_update();
    }
    pthread_mutex_unlock(&lock);
    if (signal_self) /* to this thread: no line after this one runs before it takes effect */
        (void)tgkill(getpid(), gettid(), signal_self);
    if (fail)
        errno = EIO; /* what a failed call would have left for fl_fail_errno */
    return fail;
}

void fl_fault_arm(unsigned nth)
{
    pthread_mutex_lock(&lock);
    armed = nth;
    armed_met = false;
    state_update();
    pthread_mutex_unlock(&lock);
}

bool fl_fault_spare(bool spare)
{
    bool was = spared;

    spared = spare;
    return was;
}

bool fl_fault_disarm(void)
{
    pthread_mutex_lock(&lock);
    bool met = armed_met;

    armed = 0;
    armed_met = false;
    state_update();
    pthread_mutex_unlock(&lock);
    return met;
}
