#include "worker/proc/keeper_priv.h"
#include "worker/proc/lost.h"
#include "worker/keep/form.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CONTROL_FD = 4, FIRST_UNUSED_FD = 5, MARK_ID_BYTES = 8 };

void proc_mark(char *out, size_t cap, const struct fl_seat_ref *who)
{
    char hex[2 * MARK_ID_BYTES + 1];

    fl_hex(hex, &who->id, MARK_ID_BYTES);
    snprintf(out, cap, PROC_MARK "=%s-%u", hex, who->attempt);
}

enum fl_status proc_spec_write(const struct proc_spec *s, const char *mark, struct fl_err *err)
{
    struct form f = { 0 };
    char path[FL_PATH_MAX];
    enum fl_status st;

    FL_TRY(fl_path(path, err, "%s/spec", s->dir));
    form_begin(&f, FORM_SPEC);
    form_put(&f, FORM_WORKER, &s->who.id, sizeof(s->who.id));
    form_put_u64(&f, FORM_ATTEMPT, s->who.attempt);
    for (size_t i = 0; s->argv[i]; i++)
        form_put_text(&f, FORM_ARG, s->argv[i]);
    for (size_t i = 0; s->env && s->env[i]; i++)
        form_put_text(&f, FORM_ENV, s->env[i]);
    form_put_text(&f, FORM_ENV, mark);
    form_put_text(&f, FORM_CWD, s->cwd);
    form_put_text(&f, FORM_DIR, s->dir);
    form_put_text(&f, FORM_OUT, s->out_path);
    form_put_text(&f, FORM_ERR, s->err_path);
    form_put_u64(&f, FORM_MEMORY_MAX, s->memory_max_bytes);
    form_put_u64(&f, FORM_LOG_MAX, s->log_max_bytes);
    form_put_u64(&f, FORM_TERM_MS, s->term_ms);
    form_put_u64(&f, FORM_KILL_MS, s->kill_ms);
    form_put_u64(&f, FORM_ORPHAN_MS, s->orphan_ms);
    if (s->stop_signal)
        form_put_u64(&f, FORM_STOP_SIGNAL, (uint64_t)s->stop_signal);
    form_put_u64(&f, FORM_HAS_SEAT, s->seat_fd >= 0);
    st = form_end(&f) ? fl_file_write(path, 0600, f.data, f.len, err)
                      : fl_fail(err, FL_EXHAUSTED, "command and environment of %s exceed %d MiB",
                                s->argv[0], FORM_MAX >> 20);
    form_fini(&f);
    return st;
}

enum fl_status proc_spec_who(const char *dir, struct fl_seat_ref *who, uint32_t *kill_ms,
                             struct fl_err *err)
{
    char path[FL_PATH_MAX], *raw;
    struct form_field f;
    size_t len, at = 0;
    bool found = false;

    FL_TRY(fl_path(path, err, "%s/spec", dir));
    FL_TRY(fl_file_read(path, FORM_MAX, &raw, &len, err));
    if (!form_check(raw, len, FORM_SPEC)) {
        free(raw);
        return fl_fail(err, FL_CORRUPT, "%s is no whole spec (%zu bytes)", path, len);
    }
    while (form_next(raw, len, &at, &f)) {
        if (f.tag == FORM_WORKER && f.len == sizeof(who->id)) {
            memcpy(&who->id, f.data, sizeof(who->id));
            found = true;
        } else if (f.tag == FORM_ATTEMPT) {
            who->attempt = (uint32_t)form_u64(&f);
        } else if (f.tag == FORM_KILL_MS) {
            *kill_ms = (uint32_t)form_u64(&f);
        }
    }
    free(raw);
    return found ? FL_OK : fl_fail(err, FL_CORRUPT, "%s does not say whose it is", path);
}

/* Both must lie above the numbers that they become, whatever numbers they have here. */
static int lifted(int fd)
{
    return fcntl(fd, F_DUPFD_CLOEXEC, 16);
}

static int spawn_with(const struct proc_spec *s, const char *mark, int seat, int control, int *pid)
{
    char spec[FL_PATH_MAX + 8], log[FL_PATH_MAX + 16], fault[512], fault_dir[512];
    char *argv[] = { "furlong-keep", spec, NULL };
    char *env[4] = { (char *)mark };
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t at;
    sigset_t none, all;
    int rc, n_env = 1;

    snprintf(spec, sizeof(spec), "%s/spec", s->dir);
    snprintf(log, sizeof(log), "%s/" PROC_KEEPER_LOG, s->dir);
    if (getenv("FURLONG_FAULT") &&
        snprintf(fault, sizeof(fault), "FURLONG_FAULT=%s", getenv("FURLONG_FAULT")) > 0)
        env[n_env++] = fault;
    if (getenv("FURLONG_FAULT_DIR") &&
        snprintf(fault_dir, sizeof(fault_dir), "FURLONG_FAULT_DIR=%s",
                 getenv("FURLONG_FAULT_DIR")) > 0)
        env[n_env++] = fault_dir;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&fa);
    posix_spawnattr_init(&at);
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&fa, 1, "/dev/null", O_WRONLY, 0);
    /* Not the daemon's: a keeper outlives it, and would keep whoever reads that from its end. */
    posix_spawn_file_actions_addopen(&fa, 2, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (seat >= 0)
        posix_spawn_file_actions_adddup2(&fa, seat, PROC_SEAT_FD);
    else
        posix_spawn_file_actions_addopen(&fa, PROC_SEAT_FD, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&fa, control, CONTROL_FD);
    posix_spawn_file_actions_addclosefrom_np(&fa, FIRST_UNUSED_FD);
    posix_spawnattr_setflags(&at,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&at,
                               &none); /* what the daemon blocks or ignores is its own affair */
    posix_spawnattr_setsigdefault(&at, &all);
    rc = posix_spawn(pid, s->keeper, &fa, &at, argv, env);
    posix_spawnattr_destroy(&at);
    posix_spawn_file_actions_destroy(&fa);
    return rc;
}

enum fl_status proc_spawn(const struct proc_spec *s, const char *mark, int *pid, int *control_fd,
                          struct fl_err *err)
{
    int pair[2], seat = -1, control, rc = 0;

    if (FL_FAULT("proc.socketpair") ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
        return fl_fail_errno(err, "control socket for the keeper of %s", s->argv[0]);
    control = lifted(pair[1]);
    if (s->seat_fd >= 0)
        seat = lifted(s->seat_fd);
    if (control < 0 || (s->seat_fd >= 0 && seat < 0))
        rc = errno;
    else
        rc = FL_FAULT("proc.spawn") ? EIO : spawn_with(s, mark, seat, control, pid);
    close(pair[1]);
    if (control >= 0)
        close(control);
    if (seat >= 0)
        close(seat);
    if (rc == 0) {
        *control_fd = pair[0];
        return FL_OK;
    }
    close(pair[0]);
    errno = rc;
    return fl_fail_errno(err, "start the keeper %s for %s", s->keeper, s->argv[0]);
}

void proc_say_group(const char *group)
{
    static bool said;

    if (!said)
        fl_info("workers' cgroups kind=%s", group);
    said = true;
}
