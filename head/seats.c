#include <inttypes.h>
#include <stdlib.h>

#include "common/base/log.h"
#include "head/state.h"

enum {
    BACKOFF_MS = 1000,
    BACKOFF_MAX_MS = 30000,
    PEERS_MAX = 48 << 10, /* some 3,000 addresses; a variable holds 128 KiB */
};

static bool is_driver(const struct seat *s)
{
    return !s->rec->has_group;
}

static struct group *seat_group(const struct seat *s)
{
    return s->rec->has_group ? group_of(s->job->head, &s->rec->group) : NULL;
}

static struct role *seat_role(const struct seat *s)
{
    struct group *g = seat_group(s);

    return g ? role_of(g, s->rec->role) : NULL;
}

const Fl__LayoutRank *seat_rank(const struct seat *s)
{
    struct group *g = seat_group(s);
    const Fl__Layout *y = g ? g->rec->layout : NULL;

    for (size_t i = 0; y && i < y->n_ranks; i++)
        if (y->ranks[i]->rank == s->rec->rank && strcmp(y->ranks[i]->role, s->rec->role) == 0)
            return y->ranks[i];
    return NULL;
}

struct node *seat_node(const struct seat *s)
{
    return s->rec->at ? node_of(s->job->head, &s->rec->at->id) : NULL;
}

/* ---- making and changing ---- */

enum fl_status seat_make(struct head *h, struct job *j, struct group *g, const char *role,
                         uint32_t rank, uint32_t world, const struct fl_worker_id *id,
                         struct fl_err *err)
{
    Fl__SeatRec rec = FL__SEAT_REC__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;

    who.worker = BYTES_OF(*id);
    who.attempt = 1;
    rec.who = &who;
    rec.job = BYTES_OF(j->id);
    rec.role = (char *)(uintptr_t)role;
    rec.rank = rank;
    rec.world = world;
    rec.state = FL__SEAT_STATE__SEAT_WAITING;
    rec.has_group = g != NULL;
    if (g)
        rec.group = g->rec->id;
    rec.has_job_attempt = true;
    rec.job_attempt = j->rec->attempt;
    return head_record(h, REC_SEAT, &rec, NULL, err);
}

/* Whoever was to be ended by force has ended, or is ended with its attempt. */
static void forget_force(struct seat *s)
{
    free(s->force_why);
    s->force_why = NULL;
}

/* The next attempt of the same seat; ending: the older one is to be stopped first. */
enum fl_status seat_again(struct seat *s, uint32_t restarts, struct fl_err *err)
{
    Fl__SeatRec rec = *s->rec;
    Fl__SeatRef who = *s->rec->who;
    bool live = s->rec->state == FL__SEAT_STATE__SEAT_LIVE;

    if (live || s->rec->state != FL__SEAT_STATE__SEAT_WAITING)
        who.attempt++;
    rec.who = &who;
    rec.state = FL__SEAT_STATE__SEAT_WAITING;
    if (live) {
        rec.has_ending = true;
        rec.ending = s->rec->who->attempt;
    }
    rec.has_restarts = true;
    rec.restarts = restarts;
    rec.has_unrunnable = rec.unrunnable = false;
    rec.has_job_attempt = true;
    rec.job_attempt = s->job->rec->attempt;
    FL_TRY(head_record(s->job->head, REC_SEAT, &rec, NULL, err));
    forget_force(s);
    seat_unplug(s);
    return FL_OK;
}

static enum fl_status set_state(struct seat *s, Fl__SeatState state)
{
    Fl__SeatRec rec = *s->rec;
    struct fl_err err;

    rec.state = state;
    if (head_record(s->job->head, REC_SEAT, &rec, NULL, &err) == FL_OK)
        return FL_OK;
    head_wake_at(s->job->head, fl_loop_now_ns(s->job->head->loop) + HEAD_RETRY_MS * 1000000ull);
    return err.status;
}

void seat_unplug(struct seat *s)
{
    s->started = s->joined = s->stopping = false;
    free(s->tcp);
    free(s->unix_path);
    free(s->ports);
    s->tcp = s->unix_path = NULL;
    s->ports = NULL;
    s->n_ports = 0;
    s->pid = 0;
    readings_free(s);
    seat_dirty(s);
}

/* 127 and 126 are a shell's words for a command that is not there or may not be run: it would be so
 * the next time too. One that ran before, in an attempt or up to its join, is another matter: a
 * file system may come back. */
static bool never_ran(const struct seat *s, const Fl__Exit *x)
{
    return s->rec->restarts == 0 && !s->joined && x->cause == EXIT_EXITED &&
           (x->code == 126 || x->code == 127);
}

void seat_gone(struct seat *s, uint32_t attempt, const Fl__Exit *x, struct after *then)
{
    struct head *h = s->job->head;
    struct call_req *req = then ? then->req : NULL;
    Fl__SeatRec rec = *s->rec;
    Fl__Exit unknown = FL__EXIT__INIT;
    struct fl_err err;

    unknown.cause = EXIT_KEEPER_LOST;
    rec.exit = x ? (Fl__Exit *)(uintptr_t)x : &unknown;
    if (attempt == s->rec->ending) {
        if (rec.exit->cause != EXIT_STOPPED &&
            rec.exit->why) /* not by us: it had a reason of its own */
            joblog_note(s->job, "%s; attempt %u follows", rec.exit->why, s->rec->who->attempt);
        rec.has_ending = false;
        rec.ending = 0;
    } else {
        rec.state = FL__SEAT_STATE__SEAT_OVER;
        rec.has_unrunnable = true;
        rec.unrunnable = never_ran(s, rec.exit);
    }
    fl_info("worker ended role=%s rank=%u attempt=%u job=%s cause=%u code=%d signal=%d why=\"%s\"",
            s->rec->role, s->rec->rank, attempt, s->job->rec->submission_id, rec.exit->cause,
            rec.exit->code, rec.exit->signal, rec.exit->why ? rec.exit->why : "");
    struct node *at = is_driver(s) ? NULL : seat_node(s);

    if (head_record(h, REC_SEAT, &rec, then, &err) != FL_OK) {
        if (req)
            call_fail(req, &err); /* the daemon tells it again */
        return;
    }
    if (at && s->rec->exit)
        node_ended(at, s->rec->exit);
    if (s->rec->state == FL__SEAT_STATE__SEAT_OVER)
        forget_force(s);
    if (s->rec->state == FL__SEAT_STATE__SEAT_OVER || !s->rec->ending)
        seat_unplug(s);
    head_kick(h);
}

/* ---- ending ---- */

bool seat_wants_end(const struct seat *s)
{
    struct group *g = seat_group(s);
    struct role *r = seat_role(s);

    if (job_over(s->job) || (is_driver(s) && s->job->rec->stop_asked))
        return true;
    if (is_driver(s))
        return false;
    return !g || g->rec->state == FL__GROUP_STATE__GROUP_ENDING || !r || r->rec->ended;
}

static void stop_answered(struct send *t, enum fl_status st, const struct wire_msg *reply,
                          const struct fl_err *err)
{
    ProtobufCBinaryData id = { sizeof(struct fl_worker_id), t->key };
    struct seat *s = seat_of(t->head, &id);

    (void)reply;
    if (!s)
        return;
    s->calling = false;
    if (st == FL_NOT_FOUND) { /* nothing to stop: it never ran there, or its end was heard before */
        Fl__Exit x = FL__EXIT__INIT;

        x.cause = EXIT_STOPPED;
        x.why = "it was not running any more";
        if (s->rec->who->attempt == t->n || s->rec->ending == t->n)
            seat_gone(s, (uint32_t)t->n, &x, NULL);
        return;
    }
    if (s->rec->ending ? s->rec->ending != t->n : s->rec->who->attempt != t->n) {
        /* that attempt's end was heard first: the next one is not being stopped */
        head_kick(t->head);
        return;
    }
    s->stopping = st == FL_OK;
    if (st != FL_OK) {
        fl_warn("stop not taken role=%s rank=%u why=\"%s\"", s->rec->role, s->rec->rank, err->text);
        s->ready_ns = fl_loop_now_ns(t->head->loop) + HEAD_RETRY_MS * 1000000ull;
        head_wake_at(t->head, s->ready_ns);
    }
    head_kick(t->head);
}

static void stop(struct seat *s, uint32_t attempt)
{
    struct head *h = s->job->head;
    Fl__WorkerStop m = FL__WORKER_STOP__INIT;
    Fl__SeatRef who = *s->rec->who;
    struct send t = { .done = stop_answered, .n = attempt };
    bool force = s->force_why && attempt == s->rec->who->attempt;
    struct fl_err err;

    if (s->calling || s->stopping || s->ready_ns > fl_loop_now_ns(h->loop))
        return;
    who.attempt = attempt;
    m.who = &who;
    m.cause = EXIT_STOPPED;
    m.text = force                     ? s->force_why
             : job_over(s->job)        ? "its job has ended"
             : s->job->rec->stop_asked ? "the job was stopped"
             : s->rec->ending          ? "it starts again"
                                       : "its role has ended";
    m.has_term_ms = true;
    m.term_ms = force ? 0 : h->stop_term_ms;
    memcpy(t.key, &s->id, sizeof(s->id));
    if (node_send(seat_node(s), FL_WORKER_STOP, &m, HEAD_SEND_MS, &t, &err) == FL_OK)
        s->calling = true;
}

/* ---- starting ---- */

static struct node *node_of_driver(struct head *h, struct job *j)
{
    struct group *g = j->rec->has_group ? group_of(h, &j->rec->group) : NULL;
    struct node *n, *tmp, *best = NULL;
    int best_rank = 0;

    if (j->rec->has_group) {
        struct lease *l = g && g->rec->state == FL__GROUP_STATE__GROUP_PLACED
                              ? lease_of(h, g->rec->bundles[0]->lease)
                              : NULL;
        return l && l->acked ? node_of(h, &l->rec->at->id) : NULL;
    }
    HASH_ITER (hh, h->nodes, n, tmp) { /* on the head's own host if it can be */
        if (!job_may_run_on(j, n))
            continue;
        int rank = 1 + 2 * (strcmp(n->rec->boot_id, h->boot_id) == 0) +
                   (strcmp(n->rec->address, h->node_ip) == 0);
        if (rank > best_rank || (rank == best_rank && strcmp(n->rec->name, best->rec->name) < 0)) {
            best = n;
            best_rank = rank;
        }
    }
    return best;
}

/* All leases of its rank are there and its daemon has them. */
static struct node *node_of_member(struct head *h, struct seat *s)
{
    struct group *g = seat_group(s);
    const Fl__LayoutRank *rank = seat_rank(s);
    struct node *n = NULL;

    if (!g || !rank || g->rec->state != FL__GROUP_STATE__GROUP_PLACED || g->placing)
        return NULL;
    for (size_t i = 0; i < rank->n_bundles; i++) {
        uint32_t b = rank->bundles[i];
        struct lease *l = b < g->rec->n_bundles ? lease_of(h, g->rec->bundles[b]->lease) : NULL;

        if (!l || !l->acked)
            return NULL;
        if (i == 0)
            n = node_of(h, &l->rec->at->id);
    }
    return n;
}

static void promised(struct after *a, enum fl_status st, const struct fl_err *err)
{
    ProtobufCBinaryData id = { sizeof(struct fl_worker_id), a->key };
    struct seat *s = seat_of(a->head, &id);

    (void)st, (void)err; /* a journal that cannot be written any more ends the head */
    if (s)
        s->calling = false;
    head_kick(a->head);
    free(a);
}

/* WAITING to LIVE: written down first, sent when that is on disk. */
static void promise(struct head *h, struct seat *s, struct node *n)
{
    Fl__SeatRec rec = *s->rec;
    struct after *a = after_new(h, promised);
    struct fl_err err;

    rec.state = FL__SEAT_STATE__SEAT_LIVE;
    rec.at = n->rec->who;
    memcpy(a->key, &s->id, sizeof(s->id));
    if (head_record(h, REC_SEAT, &rec, a, &err) == FL_OK)
        s->calling = true;
    else
        head_wake_at(h, fl_loop_now_ns(h->loop) + HEAD_RETRY_MS * 1000000ull);
}

static void start_answered(struct send *t, enum fl_status st, const struct wire_msg *reply,
                           const struct fl_err *err)
{
    ProtobufCBinaryData id = { sizeof(struct fl_worker_id), t->key };
    struct seat *s = seat_of(t->head, &id);

    (void)reply;
    if (!s)
        return;
    s->calling = false;
    head_kick(t->head);
    if (s->rec->who->attempt != t->n || s->rec->state != FL__SEAT_STATE__SEAT_LIVE)
        return;
    if (st == FL_OK) {
        s->started = true;
    } else if (st == FL_UNREACHABLE || st == FL_TIMEOUT || st == FL_AGAIN || st == FL_CANCELLED) {
        s->ready_ns = fl_loop_now_ns(t->head->loop) + HEAD_RETRY_MS * 1000000ull;
        head_wake_at(t->head, s->ready_ns); /* may have happened: asked again, and taken once */
    } else {
        Fl__Exit x = FL__EXIT__INIT;
        char why[sizeof(err->text) + 64];

        if (st == FL_CORRUPT) { /* a daemon's word for packages that it cannot use */
            x.cause = EXIT_SETUP_FAILED;
            (void)FL_COPY(why, err->text);
        } else {
            x.cause = EXIT_EXEC_FAILED;
            snprintf(why, sizeof(why), "%s %u could not be started: %s", s->rec->role, s->rec->rank,
                     err->text);
        }
        x.why = why;
        seat_gone(s, s->rec->who->attempt, &x, NULL);
    }
}

struct spec { /* a WorkerSpec and what it borrows */
    Fl__WorkerSpec m;
    Fl__SeatRef who;
    Fl__EnvVar **env, own[4], ray[6];
    char *config, *peers; /* values of some of them */
    uint64_t *leases;
    char **devices;
    char *argv[3];
};

static size_t env_put(Fl__EnvVar **list, size_t n, Fl__EnvVar *e, const char *name,
                      const char *value)
{
    *e = (Fl__EnvVar)FL__ENV_VAR__INIT;
    e->name = (char *)(uintptr_t)name;
    e->value = (char *)(uintptr_t)value;
    list[n] = e;
    return n + 1;
}

/* What Ray gives a driver, whatever its runtime_env says. Without resources of its own it sees all
 * devices of its node. */
static size_t spec_env_of_driver(struct spec *p, struct seat *s, size_t n)
{
    struct job *j = s->job;

    p->config = job_config_json(j);
    n = env_put(p->env, n, &p->ray[0], "RAY_ADDRESS", j->head->rpc);
    n = env_put(p->env, n, &p->ray[1], "PYTHONUNBUFFERED", "1");
    if (p->config)
        n = env_put(p->env, n, &p->ray[2], "RAY_JOB_CONFIG_JSON_ENV_VAR", p->config);
    if (job_wants_resources(j))
        return n;
    n = env_put(p->env, n, &p->ray[3], "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1");
    return env_put(p->env, n, &p->ray[4], "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "1");
}

/* Of the nodes that are there now: what a proxy shall not stand before. */
static char *peers_text(struct head *h)
{
    struct fl_str all = FL_STR_HEAP(PEERS_MAX);
    struct node *n, *tmp;
    unsigned left_out = 0;

    fl_str_add(&all, "%s", h->node_ip);
    HASH_ITER (hh, h->nodes, n, tmp) {
        if (n->state != NODE_READY || !strcmp(n->rec->address, h->node_ip))
            continue;
        if (all.len + strlen(n->rec->address) + 1 < PEERS_MAX)
            fl_str_add(&all, ",%s", n->rec->address);
        else
            left_out++;
    }
    if (left_out)
        fl_warn("a worker's NO_PROXY lacks nodes n=%u: %d bytes of addresses at most", left_out,
                PEERS_MAX);
    return must(all.data);
}

static void spec_env(struct spec *p, struct seat *s, const struct role *r)
{
    struct head *h = s->job->head;
    const Fl__JobRec *j = s->job->rec;
    size_t n_role = r ? r->rec->launch->n_env : 0, n = 0;

    p->peers = peers_text(h);
    const char *const own[][2] = { { "FURLONG_ADDRESS", h->http },
                                   { "FURLONG_PEERS", p->peers },
                                   { "RAY_ADDRESS", h->rpc },
                                   { "PYTHONUNBUFFERED", "1" } };

    p->env = must(calloc(FL_LEN(own) + FL_LEN(p->ray) + j->n_env + n_role, sizeof(*p->env)));
    for (size_t i = 0; i < FL_LEN(own); i++) /* the user's own come later and win */
        if (own[i][1][0])
            n = env_put(p->env, n, &p->own[i], own[i][0], own[i][1]);
    for (size_t i = 0; i < j->n_env; i++)
        p->env[n++] = j->env[i];
    for (size_t i = 0; i < n_role; i++)
        p->env[n++] = r->rec->launch->env[i];
    if (is_driver(s))
        n = spec_env_of_driver(p, s, n);
    p->m.env = p->env;
    p->m.n_env = n;
    p->m.working_dir = j->working_dir;
    p->m.py_modules = j->py_modules;
    p->m.n_py_modules = j->n_py_modules;
    p->m.ports = j->ports;
    p->m.n_ports = j->n_ports;
}

static void spec_add_lease(struct spec *p, struct head *h, uint64_t id)
{
    struct lease *l = lease_of(h, id);
    struct node *n = l ? node_of(h, &l->rec->at->id) : NULL;

    if (!n)
        return;
    p->leases = must(realloc(p->leases, (p->m.n_leases + 1) * sizeof(*p->leases)));
    p->leases[p->m.n_leases++] = id;
    p->devices =
        must(realloc(p->devices, (p->m.n_device_ids + l->rec->n_devices + 1) * sizeof(char *)));
    for (size_t i = 0; i < l->rec->n_devices; i++)
        if (l->rec->devices[i] < n->rec->inventory->n_devices)
            p->devices[p->m.n_device_ids++] = n->rec->inventory->devices[l->rec->devices[i]]->id;
}

static void spec_of_driver(struct spec *p, struct seat *s)
{
    const Fl__JobRec *j = s->job->rec;
    struct group *g = j->has_group ? group_of(s->job->head, &j->group) : NULL;

    p->argv[0] = "/bin/sh";
    p->argv[1] = "-c";
    p->argv[2] = j->entrypoint;
    p->m.argv = p->argv;
    p->m.n_argv = 3;
    p->m.cwd = j->cwd;
    for (size_t i = 0; g && i < g->rec->n_bundles; i++)
        spec_add_lease(p, s->job->head, g->rec->bundles[i]->lease);
}

static void spec_of_member(struct spec *p, struct seat *s, const struct role *r)
{
    struct group *g = seat_group(s);
    const Fl__LayoutRank *rank = seat_rank(s);

    p->m.argv = r->rec->launch->argv;
    p->m.n_argv = r->rec->launch->n_argv;
    p->m.cwd = r->rec->launch->cwd ? r->rec->launch->cwd : s->job->rec->cwd;
    p->m.has_retriable = true;
    p->m.retriable = s->rec->restarts < r->rec->launch->restart_max;
    if (!g || !rank)
        return;
    p->m.has_local_rank = p->m.has_local_world = p->m.has_master_port = true;
    p->m.local_rank = rank->local_rank;
    p->m.local_world = rank->local_world;
    bool engine =
        rank->has_base_port; /* each engine is a group of its own, from its first port on */
    p->m.master_addr = engine ? rank->address : g->rec->layout->master_addr;
    p->m.master_port = engine ? rank->base_port : g->rec->layout->master_port;
    for (size_t i = 0; i < rank->n_bundles; i++)
        if (rank->bundles[i] < g->rec->n_bundles)
            spec_add_lease(p, s->job->head, g->rec->bundles[rank->bundles[i]]->lease);
}

static void start(struct seat *s)
{
    struct node *n = seat_node(s);
    struct role *r = seat_role(s);
    struct spec p = { .m = FL__WORKER_SPEC__INIT };
    struct send t = { .done = start_answered, .n = s->rec->who->attempt };
    struct fl_err err;

    if (!n || n->state != NODE_READY || !n->up || (!is_driver(s) && !r))
        return;
    p.who = *s->rec->who;
    p.m.who = &p.who;
    p.m.job = s->job->rec->id;
    p.m.job_name = s->job->rec->submission_id;
    p.m.job_attempt = s->rec->job_attempt;
    p.m.role = s->rec->role;
    p.m.rank = s->rec->rank;
    p.m.world = s->rec->world;
    p.m.key = s->job->rec->key;
    p.m.run_dir = s->job->rec->run_dir;
    p.m.has_term_ms = true;
    p.m.term_ms = s->job->head->stop_term_ms;
    if (is_driver(s))
        spec_of_driver(&p, s);
    else
        spec_of_member(&p, s, r);
    spec_env(&p, s, r);
    p.m.leases = p.leases;
    p.m.device_ids = p.devices;
    memcpy(t.key, &s->id, sizeof(s->id));
    if (node_send(n, FL_WORKER_START, &p.m, HEAD_SEND_MS, &t, &err) == FL_OK)
        s->calling = true;
    free(p.config);
    free(p.peers);
    free(p.env);
    free(p.leases);
    free(p.devices);
}

/* ---- what is to be done ---- */

static const char *ending(const struct seat *s)
{
    return s->rec->exit && s->rec->exit->why ? s->rec->exit->why : "a worker has ended";
}

static void member_over(struct head *h, struct seat *s)
{
    struct role *r = seat_role(s);
    const Fl__Launch *how = r ? r->rec->launch : NULL;
    uint64_t first = how && how->backoff_ms ? how->backoff_ms : BACKOFF_MS;
    uint64_t most = how && how->backoff_max_ms ? how->backoff_max_ms : BACKOFF_MAX_MS;
    bool long_lived = s->rec->exit && s->rec->exit->lived_ms >= HEAD_FAULT_S * 1000ull;
    uint32_t n = long_lived ? 0 : s->rec->restarts; /* one a day is no reason to give up */
    struct fl_err err;

    if (how && !seat_wants_end(s) && s->rec->unrunnable) {
        if (set_state(s, FL__SEAT_STATE__SEAT_CLOSED) == FL_OK)
            joblog_note(s->job, "%s; it is not started again: its command cannot be run there",
                        ending(s));
        return;
    }
    if (seat_wants_end(s) || !how || n >= how->restart_max) {
        bool for_good = how && !seat_wants_end(s);

        if (for_good && how->restart_max && job_used_up(s, ending(s)) != FL_OK)
            return;
        if (set_state(s, FL__SEAT_STATE__SEAT_CLOSED) == FL_OK && for_good)
            joblog_note(s->job, "%s; it is not started again (%u restarts of %u)", ending(s), n,
                        how->restart_max);
        return;
    }
    if (seat_again(s, n + 1, &err) != FL_OK)
        return;
    uint64_t wait_ms = first << (n < 20 ? n : 20);
    joblog_note(s->job, "%s; it starts again as attempt %u in %.1f s", ending(s),
                s->rec->who->attempt, (double)(wait_ms < most ? wait_ms : most) / 1000);
    s->ready_ns = fl_loop_now_ns(h->loop) + (wait_ms < most ? wait_ms : most) * 1000000;
    fl_metric_add(h->count.restarts, 1);
    fl_info("worker starts again role=%s rank=%u attempt=%u in_ms=%" PRIu64 " job=%s", s->rec->role,
            s->rec->rank, s->rec->who->attempt, wait_ms < most ? wait_ms : most,
            s->job->rec->submission_id);
}

static void settle_waiting(struct head *h, struct seat *s, uint64_t now_ns)
{
    if (seat_wants_end(s)) {
        set_state(s, FL__SEAT_STATE__SEAT_CLOSED);
        return;
    }
    if (h->state != HEAD_READY)
        return;
    if (s->ready_ns > now_ns) {
        head_wake_at(h, s->ready_ns);
        return;
    }
    struct node *n = is_driver(s) ? node_of_driver(h, s->job) : node_of_member(h, s);
    if (n && n->state == NODE_READY && n->up)
        promise(h, s, n);
}

static void settle(struct head *h, struct seat *s, uint64_t now_ns)
{
    if (s->calling)
        return;
    if (s->rec->ending) {
        stop(s, s->rec->ending);
        return;
    }
    switch (s->rec->state) {
    case FL__SEAT_STATE__SEAT_WAITING:
        settle_waiting(h, s, now_ns);
        return;
    case FL__SEAT_STATE__SEAT_LIVE:
        if (seat_wants_end(s) || (s->force_why && s->started))
            stop(s, s->rec->who->attempt);
        else if (!s->started && s->ready_ns <= now_ns)
            start(s);
        else if (!s->started)
            head_wake_at(h, s->ready_ns);
        return;
    case FL__SEAT_STATE__SEAT_OVER:
        if (is_driver(s) ? job_over(s->job) : true)
            member_over(h, s); /* a driver's end is its job's: jobs.c */
        return;
    default:
        return;
    }
}

static void add_missing(const struct seat *s, struct fl_str *out)
{
    struct node *n = seat_node(s);
    const Fl__LayoutRank *rank = seat_rank(s);

    fl_str_add(out, "%s%u on %s (%s", out->len ? ", " : "", s->rec->rank,
               n ? n->rec->name : "no node yet", n ? n->rec->address : "-");
    if (rank && rank->has_base_port)
        fl_str_add(out, ":%u", rank->base_port);
    fl_str_add(out, ", %s)", s->started ? "has not joined" : "is not started");
}

/* Whoever waits for a whole role learns who is missing long before the deadline does. */
static void tell_late(struct head *h, struct group *g, struct role *r)
{
    char list[400] = "";
    struct fl_str missing = FL_STR_ON(list);
    unsigned joined = 0, shown = 0, left = 0;
    struct seat *s, *tmp;

    HASH_ITER (hh, h->seats, s, tmp) {
        if (!s->rec->has_group || seat_group(s) != g ||
            strcmp(s->rec->role, r->rec->launch->role) != 0)
            continue;
        if (s->joined || s->rec->state == FL__SEAT_STATE__SEAT_CLOSED)
            joined += s->joined;
        else if (shown++ < 4)
            add_missing(s, &missing);
        else
            left++;
    }
    r->late_told = true;
    if (shown)
        joblog_note(g->job, "%u of %u of role %s have joined after %u s; missing: %s%s", joined,
                    r->rec->world, r->rec->launch->role, h->late_ms / 1000, list,
                    left ? ", and more" : "");
}

static void settle_roles(struct head *h, uint64_t now_ns)
{
    struct group *g, *tmp;
    struct role *r;

    HASH_ITER (hh, h->groups, g, tmp)
        LL_FOREACH (g->roles, r) {
            uint64_t due = r->since_ns + h->late_ms * 1000000ull;

            if (r->late_told || r->rec->ended)
                continue;
            if (!r->since_ns) {
                r->since_ns = now_ns;
                head_wake_at(h, now_ns + h->late_ms * 1000000ull);
            } else if (now_ns >= due) {
                tell_late(h, g, r);
            } else {
                head_wake_at(h, due);
            }
        }
}

void seats_settle(struct head *h)
{
    uint64_t now = fl_loop_now_ns(h->loop);
    struct seat *s, *tmp;

    HASH_ITER (hh, h->seats, s, tmp)
        settle(h, s, now);
    settle_roles(h, now);
}

/* ---- who is where ---- */

void members_fill(struct head *h, const struct seat *s, Fl__Where *w, Fl__SeatRef *ref)
{
    struct node *n = seat_node(s);

    (void)h;
    *w = (Fl__Where)FL__WHERE__INIT;
    *ref = *s->rec->who;
    w->who = ref;
    w->role = s->rec->role;
    w->rank = s->rec->rank;
    w->state = s->rec->state == FL__SEAT_STATE__SEAT_CLOSED              ? MEMBER_ENDED
               : s->rec->state == FL__SEAT_STATE__SEAT_LIVE && s->joined ? MEMBER_LIVE
                                                                         : MEMBER_STARTING;
    if (s->rec->exit) {
        w->why = s->rec->exit->why;
        w->has_exit_code = s->rec->exit->cause == EXIT_EXITED;
        w->exit_code = (uint32_t)s->rec->exit->code;
    }
    w->has_unrunnable = w->unrunnable = w->state == MEMBER_ENDED && s->rec->unrunnable;
    if (!n)
        return;
    w->node = n->rec->name;
    w->boot_id = n->rec->boot_id;
    w->tcp = s->tcp;
    w->unix_path = s->unix_path;
}

void seat_dirty(struct seat *s)
{
    struct head *h = s->job->head;

    s->dirty = true;
    if (h->loop && h->journal)
        members_push(h);
}

static void pushed(struct after *a, enum fl_status st, const struct fl_err *err)
{
    (void)err;
    a->head->pushing = false;
    if (st == FL_OK)
        members_push_now(a->head);
    free(a);
}

/* Behind everything that was recorded so far: the driver hears of nothing that is not on disk, and
 * of no member before the answer that names it. */
void members_push(struct head *h)
{
    if (h->pushing)
        return;
    h->pushing = true;
    head_after(after_new(h, pushed));
}

/* What has changed goes to the job's driver; what cannot be sent stays dirty. */
static void push_job(struct head *h, struct job *j, unsigned n_dirty)
{
    struct seat *driver = job_driver(j), *s, *tmp;
    Fl__Members m = FL__MEMBERS__INIT;
    Fl__Deliver d = FL__DELIVER__INIT;
    struct fl_str body = FL_STR_HEAP(WIRE_MAX_BODY);
    struct fl_err err;

    if (!driver || driver->rec->state != FL__SEAT_STATE__SEAT_LIVE || !driver->started)
        return;
    Fl__Where *all = must(calloc(n_dirty, sizeof(*all)));
    Fl__SeatRef *refs = must(calloc(n_dirty, sizeof(*refs)));
    m.members = must(calloc(n_dirty, sizeof(*m.members)));
    HASH_ITER (hh, h->seats, s, tmp)
        if (s->job == j && s != driver && s->dirty && m.n_members < n_dirty) {
            members_fill(h, s, &all[m.n_members], &refs[m.n_members]);
            m.members[m.n_members] = &all[m.n_members];
            m.n_members++;
        }
    struct fl_bytes b = pack_msg(&m, &body);
    d.to = driver->rec->who;
    d.method = FL_EV_MEMBERS;
    d.body = (ProtobufCBinaryData){ b.len, (uint8_t *)(uintptr_t)b.data };
    if (node_tell(seat_node(driver), FL_DELIVER, &d, &err) == FL_OK) {
        HASH_ITER (hh, h->seats, s, tmp)
            if (s->job == j)
                s->dirty = false;
    } else {
        head_wake_at(h, fl_loop_now_ns(h->loop) + HEAD_RETRY_MS * 1000000ull);
    }
    fl_str_fini(&body);
    free(m.members);
    free(refs);
    free(all);
}

void members_push_now(struct head *h)
{
    struct job *j, *jtmp;
    struct seat *s, *stmp;

    HASH_ITER (hh, h->jobs, j, jtmp) {
        unsigned dirty = 0;

        if (job_over(j))
            continue;
        HASH_ITER (hh, h->seats, s, stmp)
            dirty += s->job == j && s->dirty && !is_driver(s);
        if (dirty)
            push_job(h, j, dirty);
    }
}
