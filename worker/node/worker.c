#include "worker/node/node_priv.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/proto/methods.h"
#include "common/proto/pb.h"
#include "worker/keep/tree.h"
#include "worker/node/devmem.h"
#include "worker/node/env.h"
#include "worker/node/package.h"
#include "worker/node/ports.h"
#include "worker/node/seat.h"
#include "worker/node/stray.h"

enum { SPEC_MAX = 8 << 20 };

struct worker *worker_find(struct node *n, const struct fl_seat_ref *who)
{
    struct worker *w;

    HASH_FIND(hh, n->workers, who, sizeof(*who), w);
    return w;
}

bool worker_holds(const struct node *n, uint64_t lease)
{
    for (struct worker *w = n->workers; w; w = w->hh.next)
        for (size_t i = 0; i < w->spec->n_leases && !w->gone; i++)
            if (w->spec->leases[i] == lease)
                return true;
    return false;
}

size_t workers_alive(const struct node *n)
{
    size_t alive = 0;

    for (struct worker *w = n->workers; w; w = w->hh.next)
        alive += !w->gone;
    return alive;
}

/* ---- what the head is told ---- */

/* As the head shall see it: an end only when all that the worker wrote is with the head, or late.
 */
static bool end_may_show(const struct worker *w)
{
    return w->gone && (w->drain_over || node_follow_done(w));
}

void worker_msg_make(const struct worker *w, struct worker_msg *m)
{
    Fl__WorkerState *s = &m->state;
    Fl__Exit *x = &m->exit;

    *s = (Fl__WorkerState)FL__WORKER_STATE__INIT;
    m->who = (Fl__SeatRef)FL__SEAT_REF__INIT;
    m->who.worker = (ProtobufCBinaryData){ sizeof(w->who.id), (uint8_t *)(uintptr_t)&w->who.id };
    m->who.attempt = w->who.attempt;
    s->who = &m->who;
    s->job = w->spec->job;
    s->role = w->spec->role;
    s->rank = w->spec->rank;
    s->phase = w->joined ? FL__WORKER_PHASE__WORKER_JOINED : FL__WORKER_PHASE__WORKER_STARTING;
    s->has_pid = w->pid > 0;
    s->pid = w->pid;
    s->tcp = w->joined ? (char *)(uintptr_t)w->tcp : NULL;
    s->unix_path = w->joined ? (char *)(uintptr_t)w->unix_path : NULL;
    s->leases = w->spec->leases;
    s->n_leases = w->spec->n_leases;
    s->ports = m->ports;
    for (size_t i = 0; i < w->spec->n_ports && i < FL_LEN(m->port); i++) {
        const char *eq = strchr(w->spec->ports[i], '=');

        m->port[i] = (Fl__Port)FL__PORT__INIT;
        m->port[i].name = m->name[i];
        snprintf(m->name[i], sizeof(m->name[i]), "%.*s", (int)strcspn(w->spec->ports[i], "="), w->spec->ports[i]);
        m->port[i].number = eq ? (uint32_t)strtoul(eq + 1, NULL, 10) : 0;
        m->ports[s->n_ports++] = &m->port[i];
    }
    if (!end_may_show(w))
        return;
    s->phase = FL__WORKER_PHASE__WORKER_GONE;
    *x = (Fl__Exit)FL__EXIT__INIT;
    x->cause = w->exit.cause;
    x->has_code = w->exit.code >= 0 && !w->exit.signal;
    x->code = w->exit.code;
    x->has_signal = w->exit.signal != 0;
    x->signal = w->exit.signal;
    x->has_lived_ms = x->has_peak_bytes = x->has_tree_ended = x->has_tree_left = true;
    x->lived_ms = w->exit.lived_ms;
    x->peak_bytes = w->exit.peak_bytes;
    x->tree_ended = w->exit.tree_ended;
    x->tree_left = w->exit.tree_left;
    x->has_device_bytes_left = w->exit.device_bytes_left != 0;
    x->device_bytes_left = w->exit.device_bytes_left;
    x->why = (char *)(uintptr_t)w->exit.why;
    x->last = (char *)(uintptr_t)w->exit.last;
    s->exit = x;
}

static void tell_later(struct worker *w)
{
    w->tell_ms = w->tell_ms ? w->tell_ms * 2 : NODE_BACKOFF_MIN_MS;
    if (w->tell_ms > NODE_BACKOFF_MAX_MS)
        w->tell_ms = NODE_BACKOFF_MAX_MS;
    fl_timer_arm_in(w->node->loop, &w->tell_again, w->tell_ms);
}

static void on_told(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                    const struct fl_err *err)
{
    struct worker *w = container_of(op, struct worker, tell);

    (void)reply;
    w->telling = false;
    if (w->untold) /* being destroyed, or fenced */
        return;
    if (st != FL_OK) {
        w->dirty = true;
        if (node_uplink_joined(w->node->up)) {
            fl_warn("change of a worker not taken worker=\"%s\" why=\"%s\"", w->name, err->text);
            tell_later(w);
        }
        return; /* else the next join sends it */
    }
    w->tell_ms = 0;
    if (w->told_gone) {
        struct node *n = w->node;

        worker_destroy(w, true);
        node_worker_over(n);
    } else if (w->dirty) {
        worker_tell(w);
    }
}

static void wait_for_piece(struct worker *w)
{
    uint32_t ms = w->node->cfg.drain_ms;

    w->drained = w->out.offset + w->err.offset;
    fl_timer_arm_in(w->node->loop, &w->drain, ms ? ms : NODE_DRAIN_MS);
}

void worker_tell(struct worker *w)
{
    struct node *n = w->node;
    struct worker_msg m;
    struct fl_err err;

    if (!w->dirty || w->telling || w->untold || !node_uplink_joined(n->up))
        return;
    if (w->gone && !end_may_show(w)) { /* output first; follow.c comes back here */
        if (!w->drain.loop)
            wait_for_piece(w);
        node_follow_kick(w);
        return;
    }
    worker_msg_make(w, &m);
    w->tell.done = on_told;
    enum fl_status st = node_uplink_call(n->up, FL_WORKER_CHANGED, LANE_CONTROL,
                                         fl_loop_now_ns(n->loop) + NODE_CALL_MS * 1000000ull,
                                         &m.state.base, &w->tell, &err);

    if (st == FL_OK) {
        w->telling = true;
        w->dirty = false;
        w->told_gone = m.state.phase == FL__WORKER_PHASE__WORKER_GONE;
    } else {
        tell_later(w);
    }
}

static void on_tell_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    worker_tell(container_of(t, struct worker, tell_again));
}

static void on_drain(struct fl_timer *t, uint64_t now_ns)
{
    struct worker *w = container_of(t, struct worker, drain);

    (void)now_ns;
    if (w->out.offset + w->err.offset != w->drained && ++w->drains < NODE_DRAINS_MAX) {
        wait_for_piece(w); /* much output, or a slow head */
        return;
    }
    fl_warn("output of a worker that ended was not taken in time worker=\"%s\" waits=%u taken=%llu",
            w->name, w->drains + 1, (unsigned long long)(w->out.offset + w->err.offset));
    w->drain_over = true;
    worker_tell(w);
}

/* ---- life ---- */

static void on_started(void *arg, struct proc *p, int pid)
{
    struct worker *w = arg;
    struct tree_stat st;

    (void)p;
    w->pid = pid;
    w->keeper_pid = tree_stat(pid, &st) ? st.ppid : 0;
    w->dirty = true;
    fl_info("worker runs worker=\"%s\" pid=%d", w->name, pid);
    worker_tell(w);
}

/* protobuf strings are UTF-8 for whoever shows them; a program may have written anything. */
static void only_text(char *s)
{
    for (unsigned char *p = (unsigned char *)s; *p;) {
        size_t n = *p < 0x80                 ? 1
                   : *p >= 0xc2 && *p < 0xe0 ? 2
                   : *p >= 0xe0 && *p < 0xf0 ? 3
                   : *p >= 0xf0 && *p < 0xf5 ? 4
                                             : 0;
        size_t good = 1;

        while (good < n && (p[good] & 0xc0) == 0x80)
            good++;
        if (n && good == n) {
            p += n;
            continue;
        }
        *p++ = '?';
    }
}

/* Who and where in front of what the keeper says. */
static void sentence(struct worker *w, const struct proc_exit *x)
{
    char why[sizeof(x->why)];
    struct fl_str s = FL_STR_ON(w->exit.why);

    memcpy(why, x->why, sizeof(why));
    fl_str_add(&s, "%s %u on %s: ", w->spec->role, w->spec->rank, w->node->name);
    if (w->stop_asked && x->cause == PROC_EXITED)
        fl_str_add(&s, "%s; ", w->stop_text);
    fl_str_add(&s, "%s", why);
    only_text(w->exit.why);
    only_text(w->exit.last);
}

/* The tree is gone and its devices are free: only now the lease may go to somebody else. */
static void over(struct worker *w)
{
    struct node *n = w->node;

    node_devmem_drop(w);
    w->gone = true;
    fl_metric_add(n->count[NODE_ENDED], 1);
    fl_metric_set(n->count[NODE_WORKERS], (double)workers_alive(n));
    fl_info("worker ended cause=%s code=%d signal=%d lived_ms=%llu peak_mib=%llu why=\"%s\"",
            proc_cause_name(w->exit.cause), w->exit.code, w->exit.signal,
            (unsigned long long)w->exit.lived_ms, (unsigned long long)(w->exit.peak_bytes >> 20),
            w->exit.why);
    w->dirty = true;
    if (w->untold)
        worker_destroy(w, true);
    else
        worker_tell(w);
    node_leases_sweep(n->leases);
    node_ports_settle(n);
    node_serve_releases(n);
    node_worker_over(n);
}

static void on_gone(void *arg, struct proc *p, const struct proc_exit *x)
{
    struct worker *w = arg;

    (void)p;
    w->proc = NULL;
    w->exit = *x;
    w->exit.who = w->who;
    sentence(w, x);
    if (w->stop_asked && w->exit.cause == PROC_EXITED) /* it left by itself when it was told to */
        w->exit.cause = w->stop_cause;
    fl_timer_cancel(&w->stop_late);
    node_line_destroy(w->line);
    if (!node_devmem_wait(w, over))
        over(w);
}
static const struct proc_user user = { .started = on_started, .gone = on_gone };

static void stop_proc(struct worker *w, uint32_t term_ms)
{
    if (w->proc && !w->proc_stopped)
        w->node->cfg.proc->stop(w->proc, w->stop_cause, w->stop_text, term_ms);
    w->proc_stopped = true;
}

static void on_stop_late(struct fl_timer *t, uint64_t now_ns)
{
    struct worker *w = container_of(t, struct worker, stop_late);

    (void)now_ns;
    stop_proc(w, w->stop_term_ms - w->stop_term_ms / 2);
}

void worker_stop(struct worker *w, enum proc_cause cause, const char *text, uint32_t term_ms)
{
    Fl__WorkerStopping m = FL__WORKER_STOPPING__INIT;

    if (w->gone || w->stop_asked)
        return;
    w->stop_asked = true;
    w->stop_cause = cause;
    (void)FL_COPY(w->stop_text, text && *text ? text : "stopped");
    w->stop_term_ms = term_ms;
    fl_info("worker is stopped worker=\"%s\" cause=%s why=\"%s\" term_ms=%u", w->name,
            proc_cause_name(cause), w->stop_text, term_ms);
    if (w->line && term_ms >= 2) { /* half of the time for the word, half for the signal */
        m.budget_ms = term_ms / 2;
        m.why = w->stop_text;
        struct fl_bytes body = node_pack(&m.base);
        bool sent = body.data && node_line_event(w, FL_EV_STOP, body, NULL) == FL_OK;

        free((void *)(uintptr_t)body.data);
        if (sent) {
            fl_timer_arm_in(w->node->loop, &w->stop_late, term_ms / 2);
            return;
        }
    }
    stop_proc(w, term_ms);
}

/* ---- folders ---- */

static enum fl_status folder_file(const struct worker *w, const char *name,
                                  const ProtobufCMessage *m, struct fl_err *err)
{
    struct fl_bytes b = node_pack(m);
    char path[FL_PATH_MAX];
    enum fl_status st = fl_path(path, err, "%s/%s", w->dir, name);

    if (!b.data)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %s", name);
    if (st == FL_OK)
        st = fl_file_write(path, 0600, b.data, b.len, err);
    explicit_bzero((void *)(uintptr_t)b.data, b.len);
    free((void *)(uintptr_t)b.data);
    return st;
}

void worker_ready(struct worker *w, const Fl__WorkerReady *r)
{
    Fl__WorkerReady keep = *r;
    struct fl_err err;

    if (w->gone)
        return;
    if (!FL_COPY(w->tcp, r->tcp) || !FL_COPY(w->unix_path, r->unix_path))
        fl_warn("address of a worker is cut worker=\"%s\" tcp=%s unix=%s", w->name, w->tcp,
                w->unix_path);
    if (!w->joined)
        fl_info("worker has joined worker=\"%s\" tcp=%s", w->name, w->tcp);
    w->joined = true;
    w->dirty = true;
    if (folder_file(w, "ready", &keep.base, &err) != FL_OK)
        fl_warn("readiness not written worker=\"%s\" why=\"%s\"", w->name,
                err.text); /* told again on adoption */
    worker_tell(w);
}

static Fl__WorkerSpec *spec_copy(const Fl__WorkerSpec *s)
{
    struct fl_bytes b = node_pack(&s->base);
    Fl__WorkerSpec *copy = b.data ? fl__worker_spec__unpack(NULL, b.len, b.data) : NULL;

    if (b.data)
        explicit_bzero((void *)(uintptr_t)b.data, b.len);
    free((void *)(uintptr_t)b.data);
    return copy;
}

static enum fl_status spec_check(const Fl__WorkerSpec *s, struct fl_err *err)
{
    if (s->who->worker.len != sizeof(struct fl_worker_id) ||
        s->job.len != sizeof(struct fl_job_id) || s->key.len != NODE_KEY_BYTES)
        return fl_fail(err, FL_INVALID,
                       "worker %s %u: ids of %zu and %zu bytes, key of %zu; want %zu, %zu, %d",
                       s->role, s->rank, s->who->worker.len, s->job.len, s->key.len,
                       sizeof(struct fl_worker_id), sizeof(struct fl_job_id), NODE_KEY_BYTES);
    if (!s->n_argv || !*s->argv[0])
        return fl_fail(err, FL_INVALID, "worker %s %u has no command", s->role, s->rank);
    if (!s->world || s->rank >= s->world)
        return fl_fail(err, FL_INVALID, "worker %s: rank %u of %u", s->role, s->rank, s->world);
    if (!*s->role || strlen(s->role) > 32 || strlen(s->job_name) > 128)
        return fl_fail(err, FL_INVALID,
                       "worker of job %.80s: role \"%.40s\" has not 1 to 32 bytes, or the job's "
                       "name over 128",
                       s->job_name, s->role);
    return FL_OK;
}

/* Takes spec over, also when it fails. */
static enum fl_status worker_new(struct node *n, Fl__WorkerSpec *spec, struct worker **out,
                                 struct fl_err *err)
{
    struct worker *w = calloc(1, sizeof(*w));
    char id[FL_SHORT];

    if (!w || !spec || FL_FAULT("node.worker")) {
        free(w);
        if (spec)
            fl__worker_spec__free_unpacked(spec, NULL);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a worker");
    }
    w->node = n;
    w->spec = spec;
    w->pushed_fd = w->out.fd = w->err.fd = w->out.watch = w->err.watch = -1;
    w->tell_again.fire = on_tell_again;
    w->drain.fire = on_drain;
    w->stop_late.fire = on_stop_late;
    memcpy(&w->who.id, spec->who->worker.data, sizeof(w->who.id));
    w->who.attempt = spec->who->attempt;
    snprintf(w->name, sizeof(w->name), "%.24s %u attempt %u of %.40s", spec->role, spec->rank,
             w->who.attempt, spec->job_name);
    enum fl_status st =
        fl_path(w->dir, err, "%s/w/%s-%u", n->dir, fl_short(id, &w->who.id), w->who.attempt);

    if (st != FL_OK) {
        worker_destroy(w, false);
        return st;
    }
    HASH_ADD(hh, n->workers, who, sizeof(w->who), w);
    if (!w->hh.tbl) {
        worker_destroy(w, false);
        return fl_fail(err, FL_EXHAUSTED, "no memory for one more worker");
    }
    *out = w;
    return FL_OK;
}

void worker_destroy(struct worker *w, bool remove_folder)
{
    struct fl_err err;

    if (!w)
        return;
    node_line_destroy(w->line);
    w->untold = true; /* a cancelled call asks for nothing more */
    if (w->telling) {
        w->told_gone = false;
        call_cancel(&w->tell);
    }
    fl_timer_cancel(&w->tell_again); /* after the call: one that fails would ask again later */
    fl_timer_cancel(&w->drain);
    fl_timer_cancel(&w->stop_late);
    node_follow_close(w);
    node_devmem_drop(w);
    if (w->proc)
        w->node->cfg.proc->forget(w->proc);
    if (w->hh.tbl)
        HASH_DEL(w->node->workers, w);
    if (remove_folder && fl_tree_remove(w->dir, &err) != FL_OK)
        fl_warn("folder of a worker not removed why=\"%s\"", err.text);
    if (w->node->up)
        node_uplink_forget_metrics(w->node->up, &w->who);
    explicit_bzero(w->spec->key.data, w->spec->key.len);
    fl__worker_spec__free_unpacked(w->spec, NULL);
    free(w);
}

/* ---- start and adopt ---- */

/* Where it starts: where it was told, else in the job's package, else where this daemon was
 * started, as with Ray. Python finds the packages before all else. */
static enum fl_status places(const struct worker *w, char cwd[FL_PATH_MAX],
                             struct fl_str *python_path, struct fl_err *err)
{
    const Fl__WorkerSpec *s = w->spec;
    bool dir = s->working_dir && *s->working_dir;
    char path[FL_PATH_MAX];

    for (size_t i = 0; i < s->n_py_modules; i++)
        if (node_package_path(w->node->packages, s->py_modules[i], path))
            fl_str_add(python_path, "%s%s", i ? ":" : "", path);
    if (dir && node_package_path(w->node->packages, s->working_dir, path))
        fl_str_add(python_path, "%s%s", python_path->len ? ":" : "", path);
    if (python_path->cut)
        return fl_fail(err, FL_INVALID, "the packages of %s make a PYTHONPATH of over 4095 bytes",
                       w->name);
    if (s->cwd && *s->cwd)
        return fl_path(cwd, err, "%s", s->cwd);
    if (dir)
        return fl_path(cwd, err, "%s", path);
    if (!getcwd(cwd, FL_PATH_MAX) || access(cwd, X_OK) < 0)
        strcpy(cwd, "/"); /* it was removed since */
    return FL_OK;
}

/* Of a job's command: RAY_JOB_STOP_SIGNAL of the job, or of this daemon, as in Ray. 0: SIGTERM. */
static int stop_signal(const char *const *env)
{
    static const char name[] = "RAY_JOB_STOP_SIGNAL=";
    const char *value = "";

    for (; env && *env; env++)
        if (strncmp(*env, name, sizeof(name) - 1) == 0)
            value = *env + sizeof(name) - 1;
    if (*value && strcmp(value, "SIGTERM") != 0 && strcmp(value, "SIGINT") != 0)
        fl_warn("not a valid stop signal; SIGTERM is sent RAY_JOB_STOP_SIGNAL=\"%s\"", value);
    return strcmp(value, "SIGINT") == 0 ? SIGINT : 0;
}

static enum fl_status spawn(struct worker *w, struct fl_err *err)
{
    struct node *n = w->node;
    const Fl__WorkerSpec *s = w->spec;
    char cwd[FL_PATH_MAX], python[4096];
    struct fl_str python_path = FL_STR_ON(python);
    char **env = NULL, **argv = calloc(s->n_argv + 1, sizeof(*argv));
    int seat = -1;
    enum fl_status st =
        argv ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for the command of %s", w->name);
    struct node_env_in in = { .base = (const char *const *)environ,
                              .spec = s,
                              .addr = &n->addr,
                              .node = n->name,
                              .seat_fd = PROC_SEAT_FD };

    if (st == FL_OK)
        st = places(w, cwd, &python_path, err);
    in.python_path = fl_str_text(&python_path);
    if (st == FL_OK)
        st = node_env_make(&in, &env, err);
    if (st == FL_OK)
        st = node_seat_make(n, w, &seat, err);
    for (size_t i = 0; st == FL_OK && i < s->n_argv; i++)
        argv[i] = s->argv[i];
    struct proc_spec p = {
        .who = w->who,
        .keeper = n->cfg.keeper,
        .argv = (const char *const *)argv,
        .env = (const char *const *)env,
        .cwd = cwd,
        .dir = w->dir,
        .out_path = w->out.path,
        .err_path = w->err.path,
        .memory_max_bytes = s->memory_max_bytes,
        .log_max_bytes = n->cfg.log_max_bytes,
        .term_ms = s->has_term_ms ? s->term_ms : NODE_TERM_MS,
        .kill_ms = s->has_kill_ms ? s->kill_ms : NODE_KILL_MS,
        .orphan_ms = (uint32_t)(n->cfg.orphan_s < UINT32_MAX / 1000 ? n->cfg.orphan_s * 1000 : UINT32_MAX),
        .device_uuids = (const char *const *)s->device_ids,
        .n_devices = s->n_device_ids,
        .stop_signal = strcmp(s->role, "driver") == 0 ? stop_signal((const char *const *)env) : 0,
        .seat_fd = seat,
    };

    if (st == FL_OK)
        st = n->cfg.proc->start(n->loop, &p, &user, w, &w->proc, err);
    if (seat >= 0)
        close(seat);
    node_env_free(env);
    free(argv);
    return st;
}

/* Written first: a daemon that dies between the two finds a folder whose keeper never was. */
static enum fl_status folder_make(struct worker *w, struct fl_err *err)
{
    FL_TRY(fl_tree_remove(w->dir, err)); /* of an end that was told, and a folder that stayed */
    FL_TRY(fl_mkdirs(w->dir, err));
    FL_TRY(folder_file(w, "worker", &w->spec->base, err));
    return node_follow_open(w, err);
}

enum fl_status worker_start(struct node *n, const Fl__WorkerSpec *spec, struct fl_err *err)
{
    struct worker *w;
    struct fl_seat_ref who = { .attempt = spec->who->attempt };
    enum fl_status st;

    FL_TRY(spec_check(spec, err));
    memcpy(&who.id, spec->who->worker.data, sizeof(who.id));
    if (worker_find(n, &who))
        return FL_OK; /* asked again: the first answer was lost */
    for (size_t i = 0; i < spec->n_leases; i++)
        if (!node_leases_committed(n->leases, spec->leases[i]))
            return fl_fail(err, FL_STALE, "worker %s %u: lease %llu is not committed here",
                           spec->role, spec->rank, (unsigned long long)spec->leases[i]);
    if (HASH_COUNT(n->workers) >= NODE_WORKERS_MAX)
        return fl_fail(err, FL_EXHAUSTED, "node %s runs %d workers already, which is the most; end some, or add a node",
                       n->name, NODE_WORKERS_MAX);
    FL_TRY(worker_new(n, spec_copy(spec), &w, err));
    st = node_ports_of_worker(n, w->spec, err);
    if (st == FL_OK)
        st = folder_make(w, err);
    node_devmem_before(w);
    if (st == FL_OK)
        st = spawn(w, err);
    if (st != FL_OK) {
        worker_destroy(w, true);
        return st;
    }
    fl_metric_add(n->count[NODE_STARTED], 1);
    fl_metric_set(n->count[NODE_WORKERS], (double)workers_alive(n));
    fl_info("worker starts worker=\"%s\" dir=%s", w->name, w->dir);
    node_follow_kick(w);
    return FL_OK;
}

static void adopt_ready(struct worker *w)
{
    char path[FL_PATH_MAX], *raw;
    size_t len;

    if (fl_path(path, NULL, "%s/ready", w->dir) != FL_OK ||
        fl_file_read(path, SPEC_MAX, &raw, &len, NULL) != FL_OK)
        return;
    Fl__WorkerReady *r = pb_unpack(&fl__worker_ready__descriptor, raw, len, NULL);

    free(raw);
    if (!r)
        return;
    w->joined = FL_COPY(w->tcp, r->tcp) && FL_COPY(w->unix_path, r->unix_path);
    w->pid = r->pid;
    fl__worker_ready__free_unpacked(r, NULL);
}

static enum fl_status adopt_one(struct node *n, const char *name, struct fl_err *err)
{
    char path[FL_PATH_MAX], *raw;
    struct worker *w;
    size_t len;
    enum fl_status st;

    FL_TRY(fl_path(path, err, "%s/w/%s/worker", n->dir, name));
    FL_TRY(fl_file_read(path, SPEC_MAX, &raw, &len, err));
    Fl__WorkerSpec *spec = pb_unpack(&fl__worker_spec__descriptor, raw, len, NULL);

    explicit_bzero(raw, len);
    free(raw);
    if (!spec || spec_check(spec, err) != FL_OK) {
        if (spec)
            fl__worker_spec__free_unpacked(spec, NULL);
        return fl_fail(err, FL_CORRUPT, "%s (%zu bytes) does not say what runs there", path, len);
    }
    FL_TRY(worker_new(n, spec, &w, err));
    st = node_follow_open(w, err);
    if (st == FL_OK)
        st = n->cfg.proc->adopt(n->loop, w->dir, &user, w, &w->proc, err);
    if (st != FL_OK) {
        worker_destroy(w, false);
        return st;
    }
    adopt_ready(w);
    node_ports_again(n, w->spec);
    w->dirty = true;
    fl_info("worker adopted worker=\"%s\" dir=%s", w->name, w->dir);
    return FL_OK;
}

void workers_adopt(struct node *n)
{
    char dir[FL_PATH_MAX], path[FL_PATH_MAX];
    struct dirent *e;
    struct fl_err err;
    DIR *d;

    if (fl_path(dir, &err, "%s/w", n->dir) != FL_OK || !(d = opendir(dir)))
        return; /* none was ever started */
    while ((e = readdir(d))) {
        if (e->d_name[0] == '.' || adopt_one(n, e->d_name, &err) == FL_OK)
            continue;
        fl_warn("folder of a worker is given up dir=%s why=\"%s\"", e->d_name, err.text);
        if (fl_path(path, &err, "%s/%s", dir, e->d_name) == FL_OK)
            node_stray_end(n, path, "the daemon could not read what it runs");
    }
    closedir(d);
    fl_metric_set(n->count[NODE_WORKERS], (double)workers_alive(n));
}
