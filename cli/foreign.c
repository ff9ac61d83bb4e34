#include "cli/foreign.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "common/base/str.h"

enum {
    ASK_MS = 30000,
    AGAIN_MS = 500,
    AWAY_SAID_MS = 2000,
    STOP_MS = 10000,
    BROKEN_MAX = 3,      /* connections in a row: what lies between lets no WebSocket through */
    WHOLE_MAX = 8 << 20, /* a log that is asked for as a whole once more when the job has ended */
};

struct follow {
    const struct cli_cluster *c;
    const char *job;
    const struct foreign_follow *how;
    int signals; /* a descriptor that is readable when one has come */
    unsigned interrupts, broken;
    size_t shown, skip; /* bytes of the log; those that a new connection brings again */
    uint64_t away_since_ms;
    bool away_said;
};

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ==== Ctrl-C ======================================================================================= */
static void stop_job(struct follow *f)
{
    char path[192];
    struct fl_err err = { 0 };

    snprintf(path, sizeof(path), "/api/jobs/%s/stop", f->job);
    fprintf(stderr, "%s: stopping job %s; press Ctrl-C again to stop waiting for it\n", f->how->program, f->job);
    if (cli_call(f->c, "POST", path, NULL, STOP_MS, NULL, &err) != FL_OK)
        fprintf(stderr, "%s: job %s was not stopped: %s\n", f->how->program, f->job, err.text);
}

static enum fl_status on_signal(struct follow *f, struct fl_err *err)
{
    struct signalfd_siginfo s;

    while (read(f->signals, &s, sizeof(s)) == (ssize_t)sizeof(s))
        if (f->how->leave || f->interrupts++ > 0)
            return fl_fail(err, FL_CANCELLED, "no longer waiting for job %s, which %s", f->job,
                           f->how->leave ? "goes on" : "was asked to stop");
        else
            stop_job(f);
    return FL_OK;
}

static enum fl_status rest(struct follow *f, struct fl_err *err)
{
    struct pollfd p = { f->signals, POLLIN, 0 };

    return poll(&p, 1, AGAIN_MS) > 0 ? on_signal(f, err) : FL_OK;
}

/* ==== the log ====================================================================================== */
static enum fl_status on_piece(void *arg, unsigned status, struct fl_bytes piece)
{
    struct follow *f = arg;
    size_t again = piece.len < f->skip ? piece.len : f->skip;

    (void)status;
    f->skip -= again;
    f->shown += piece.len - again;
    if (piece.len > again)
        f->how->show(f->how->arg, (const char *)piece.data + again, piece.len - again);
    return FL_OK;
}

/* Until it is closed or breaks. */
static enum fl_status read_log(struct follow *f, struct fl_err *err)
{
    char path[192];
    struct cli_request r;

    snprintf(path, sizeof(path), "/api/jobs/%s/logs/tail", f->job);
    FL_TRY(cli_request(f->c, NULL, path, NULL, ASK_MS, &r, err));
    f->skip = f->shown;
    r.ask.piece = on_piece;
    r.ask.arg = f;
    return http_ws_read(&r.ask, f->signals, err);
}

/* Where WebSockets do not get through: the log as a whole, and what is new of it. */
static enum fl_status ask_log(struct follow *f, struct fl_err *err)
{
    char path[192];
    json_t *o;

    snprintf(path, sizeof(path), "/api/jobs/%s/logs", f->job);
    FL_TRY(cli_call(f->c, "GET", path, NULL, ASK_MS, &o, err));
    const json_t *logs = json_object_get(o, "logs");
    struct fl_bytes text = { cli_text(o, "logs"), json_string_length(logs) };

    if (strncmp(text.data, "[LOG TRUNCATED", 14) == 0)
        text.len = 0; /* its last part: where it begins is not told */
    f->skip = f->shown;
    (void)on_piece(f, 200, text);
    json_decref(o);
    return FL_OK;
}

/* ==== until it has ended =========================================================================== */
static bool passes(enum fl_status st)
{
    return st == FL_UNREACHABLE || st == FL_TIMEOUT || st == FL_INTERNAL || st == FL_CORRUPT;
}

static enum fl_status away(struct follow *f, struct fl_err *err)
{
    uint64_t now = now_ms();
    struct fl_err why = *err;

    if (!f->away_since_ms)
        f->away_since_ms = now;
    if (now - f->away_since_ms > f->how->away_max_ms)
        return fl_fail(err, FL_UNREACHABLE, "the head at %s has been away for %u s (%.120s); job %s is not watched any more", f->c->url,
                       f->how->away_max_ms / 1000, why.text, f->job);
    if (!f->away_said && now - f->away_since_ms > AWAY_SAID_MS)
        fprintf(stderr, "%s: the head at %s does not answer; the job goes on, waiting for it\n", f->how->program, f->c->url);
    f->away_said |= now - f->away_since_ms > AWAY_SAID_MS;
    return rest(f, err);
}

/* One connection, and what the head says then. *details: it has ended and all is shown. */
static enum fl_status turn(struct follow *f, json_t **details, struct fl_err *err)
{
    char path[192];
    struct fl_err log_err = { 0 };
    enum fl_status log = f->broken < BROKEN_MAX ? read_log(f, &log_err) : FL_UNSUPPORTED;
    json_t *o;

    if (log == FL_CANCELLED)
        return on_signal(f, err);
    if (log == FL_NOT_FOUND || log == FL_DENIED)
        return fl_fail(err, log, "%s", log_err.text);
    snprintf(path, sizeof(path), "/api/jobs/%s", f->job);
    enum fl_status st = cli_call(f->c, "GET", path, NULL, ASK_MS, &o, err);

    if (st != FL_OK)
        return passes(st) ? away(f, err) : st;
    bool over = cli_job_over(cli_text(o, "status"));

    f->broken = log == FL_OK ? 0 : f->broken + (log != FL_UNSUPPORTED);
    if (log == FL_UNSUPPORTED && (st = ask_log(f, err)) == FL_OK)
        log = FL_OK;
    if (st == FL_OK) {
        f->away_since_ms = 0;
        f->away_said = false;
    }
    if (over && log == FL_OK) { /* a socket that something between closed before the end looks the same */
        *details = o;
        return f->shown < WHOLE_MAX ? ask_log(f, err) : FL_OK;
    }
    json_decref(o);
    return st == FL_OK ? rest(f, err) : passes(st) ? away(f, err) : st;
}

enum fl_status foreign_follow(const struct cli_cluster *c, const char *job, const struct foreign_follow *how, json_t **details,
                              struct fl_err *err)
{
    struct follow f = { .c = c, .job = job, .how = how };
    struct fl_err none;
    enum fl_status st = FL_OK;
    json_t *o = NULL;
    sigset_t set, was;

    err = err ? err : &none;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, &was);
    f.signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (f.signals < 0)
        st = fl_fail_errno(err, "watch for signals");
    while (st == FL_OK && !o)
        st = turn(&f, &o, err);
    if (f.signals >= 0)
        close(f.signals);
    sigprocmask(SIG_SETMASK, &was, NULL);
    if (o) { /* that it has ended is known; the last look at its log may have failed */
        *details = o;
        *err = (struct fl_err){ 0 };
        return FL_OK;
    }
    return st;
}
