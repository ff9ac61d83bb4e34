#include "tests/client/fake_priv.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/pidfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/str.h"
#include "common/proto/methods.h"
#include "tests/client/seats.h"
#include "tests/t.h"

extern char **environ;

void changed(struct fake *f)
{
    pthread_cond_broadcast(&f->changed);
}

struct worker *find(struct fake *f, const char *role, uint32_t rank)
{
    for (unsigned i = 0; i < f->n_workers; i++)
        if (f->workers[i].rank == rank && strcmp(f->workers[i].role, role) == 0)
            return &f->workers[i];
    return NULL;
}

static void worker_id(const struct worker *w, uint8_t id[28])
{
    memset(id, 0, 28);
    snprintf((char *)id, 28, "%.20s-%u", w->role, w->rank);
}

struct worker *worker_of(struct fake *f, const char *role, uint32_t rank, uint32_t world)
{
    struct worker *w = find(f, role, rank);

    if (w)
        return w;
    t_true(f->n_workers < WORKERS);
    w = &f->workers[f->n_workers++];
    *w = (struct worker){ .f = f, .rank = rank, .world = world, .pidfd = -1 };
    (void)FL_COPY(w->role, role);
    snprintf(w->name, sizeof(w->name), "%.16s-%u", role, rank);
    return w;
}

/* ---- members -------------------------------------------------------------------------------- */
struct where_pb {
    Fl__Where w;
    Fl__SeatRef who;
    uint8_t id[28];
};

static void where_fill(const struct worker *w, struct where_pb *p)
{
    static char boot[37];

    if (!*boot) {
        FILE *in = fopen("/proc/sys/kernel/random/boot_id", "re");

        t_true(in && fgets(boot, sizeof(boot), in));
        fclose(in);
    }
    fl__where__init(&p->w);
    fl__seat_ref__init(&p->who);
    worker_id(w, p->id);
    p->who.worker = (ProtobufCBinaryData){ 28, p->id };
    p->who.attempt = w->attempt;
    p->w.who = &p->who;
    p->w.role = (char *)(uintptr_t)w->role;
    p->w.rank = w->rank;
    p->w.state = w->state;
    p->w.node = "gpu-a";
    p->w.boot_id = w->f->far ? (char *)(uintptr_t) "another machine" : boot;
    p->w.tcp = (char *)(uintptr_t)w->tcp;
    p->w.unix_path = (char *)(uintptr_t)w->unix_path;
    p->w.why = (char *)(uintptr_t)w->why;
}

static size_t members_pack(struct fake *f, const char *role, uint8_t **out)
{
    static struct where_pb parts[WORKERS];
    Fl__Where *list[WORKERS];
    Fl__Members m = FL__MEMBERS__INIT;
    size_t n = 0, len;

    for (unsigned i = 0; i < f->n_workers; i++) {
        if (role && strcmp(f->workers[i].role, role) != 0)
            continue;
        where_fill(&f->workers[i], &parts[n]);
        list[n] = &parts[n].w;
        n++;
    }
    m.n_members = n;
    m.members = list;
    len = fl__members__get_packed_size(&m);
    *out = malloc(len + 1);
    return fl__members__pack(&m, *out);
}

void tell_driver(struct fake *f)
{
    struct worker *d = find(f, "driver", 0);
    uint8_t *body;
    size_t len;

    if (!d || !d->guest || !f->listed)
        return;
    len = members_pack(f, NULL, &body);
    (void)call_event(d->guest->call, FL_EV_MEMBERS, 0, (struct fl_bytes){ body, len }, NULL);
    free(body);
}

/* ---- programs ------------------------------------------------------------------------------- */
int worker_seat(struct worker *w)
{
    struct seat_words s = { .role = w->role,
                            .rank = w->rank,
                            .world = w->world,
                            .attempt = w->attempt,
                            .daemon_sock = w->f->sock,
                            .peer_sock = w->sock,
                            .run_dir = w->dir };

    snprintf(w->dir, sizeof(w->dir), "%s/%u-%s.%u", t_tmp(), w->f->number, w->name, w->attempt);
    mkdir(w->dir, 0700);
    snprintf(w->sock, sizeof(w->sock), "%s/p", w->dir);
    worker_id(w, s.worker);
    memcpy(s.key, w->f->key, sizeof(s.key));
    w->known = true;
    w->state = FURLONG_STARTING;
    return seat_fd(&s);
}

static void worker_spawn(struct worker *w);

static void worker_again(struct fl_timer *t, uint64_t now_ns)
{
    struct worker *w = container_of(t, struct worker, again);

    (void)now_ns;
    worker_spawn(w);
}

static void worker_over(struct worker *w)
{
    if (w->restarts_left) {
        w->restarts_left--;
        w->attempt++;
        w->state = FURLONG_STARTING;
        fl_timer_arm_in(w->f->loop, &w->again, w->backoff_ms);
        w->backoff_ms *= 2;
    } else {
        w->state = FURLONG_ENDED;
    }
    tell_driver(w->f);
}

static void worker_exited(void *arg, unsigned events)
{
    struct worker *w = arg;
    siginfo_t info = { 0 };

    (void)events;
    if (waitid(P_PID, (id_t)w->pid, &info, WEXITED | WNOHANG) < 0 || info.si_pid != w->pid)
        return;
    fl_watch_destroy(w->watch);
    close(w->pidfd);
    w->watch = NULL;
    w->pidfd = -1;
    w->pid = 0;
    snprintf(w->why, sizeof(w->why), info.si_code == CLD_EXITED ? "exit code %d" : "signal %d",
             info.si_status);
    pthread_mutex_lock(&w->f->mu);
    w->f->n_running--;
    changed(w->f);
    pthread_mutex_unlock(&w->f->mu);
    worker_over(w);
}

static void worker_spawn(struct worker *w)
{
    posix_spawn_file_actions_t fa;
    char number[32];
    int fd = worker_seat(w);
    size_t n = 0;
    char *env[256];

    snprintf(number, sizeof(number), "FURLONG_SEAT_FD=%d", 100);
    for (char **e = environ; *e && n < 200; e++)
        env[n++] = *e;
    for (char **e = w->env; e && *e; e++)
        env[n++] = *e;
    env[n++] = number;
    env[n++] = "FURLONG_DAEMON_AWAY_MS=5000"; /* nothing outlives a test that died */
    env[n] = NULL;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, fd, 100);
    t_true(posix_spawn(&w->pid, w->argv[0], &fa, NULL, w->argv, env) == 0);
    posix_spawn_file_actions_destroy(&fa);
    close(fd);
    w->pidfd = pidfd_open(w->pid, 0);
    t_true(w->pidfd >= 0);
    t_true(fl_watch_create(w->f->loop, w->pidfd, POLLIN, worker_exited, w, &w->watch, NULL) ==
           FL_OK);
    pthread_mutex_lock(&w->f->mu);
    w->f->n_running++;
    pthread_mutex_unlock(&w->f->mu);
    tell_driver(w->f);
}

/* ---- what the daemon and the head answer ---------------------------------------------------- */
static void answer_with(struct call_req *req, enum fl_status st, const char *text)
{
    struct fl_err err;

    fl_fail(&err, st, "%s", text);
    call_fail(req, &err);
}

static bool head_is_away(struct guest *g, struct call_req *req)
{
    if (g->f->head_away)
        answer_with(req, FL_UNREACHABLE, "no head answers");
    return g->f->head_away;
}

static void serve_ready(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct guest *g = service;
    Fl__WorkerReady *r = fl__worker_ready__unpack(NULL, m->head.body_bytes, m->body);

    (void)FL_COPY(g->w->tcp, r->tcp);
    (void)FL_COPY(g->w->unix_path, r->unix_path);
    fl__worker_ready__free_unpacked(r, NULL);
    if (g->w->state == FURLONG_STARTING)
        g->w->state = FURLONG_LIVE;
    call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
    tell_driver(g->f);
}

static void serve_metric(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = ((struct guest *)service)->f;
    Fl__Metric *pb = fl__metric__unpack(NULL, m->head.body_bytes, m->body);
    unsigned i;

    (void)req;
    pthread_mutex_lock(&f->mu);
    for (i = 0; i < f->n_metrics && strcmp(f->metrics[i].name, pb->name) != 0; i++)
        ;
    if (i < FL_LEN(f->metrics)) {
        f->n_metrics += i == f->n_metrics;
        (void)FL_COPY(f->metrics[i].name, pb->name);
        f->metrics[i].value = pb->value;
    }
    changed(f);
    pthread_mutex_unlock(&f->mu);
    fl__metric__free_unpacked(pb, NULL);
}

static void serve_progress(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = ((struct guest *)service)->f;
    Fl__Progress *pb = fl__progress__unpack(NULL, m->head.body_bytes, m->body);

    (void)req;
    pthread_mutex_lock(&f->mu);
    f->progress = pb->done;
    changed(f);
    pthread_mutex_unlock(&f->mu);
    fl__progress__free_unpacked(pb, NULL);
}

static void serve_find(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct guest *g = service;
    Fl__Find *pb = fl__find__unpack(NULL, m->head.body_bytes, m->body);
    struct worker *w = find(g->f, pb->role, pb->rank);
    struct where_pb p;
    uint8_t body[2048];

    pthread_mutex_lock(&g->f->mu);
    g->f->n_finds++;
    pthread_mutex_unlock(&g->f->mu);
    if (head_is_away(g, req)) {
        ;
    } else if (!w) {
        answer_with(req, FL_NOT_FOUND, "the job has no such rank");
    } else {
        where_fill(w, &p);
        call_reply(req, (struct fl_bytes){ body, fl__where__pack(&p.w, body) },
                   (struct fl_bytes){ 0 });
    }
    fl__find__free_unpacked(pb, NULL);
}

static uint32_t flag_of(const Fl__Place *p, const char *name)
{
    for (size_t i = 0; i < p->n_flags; i++)
        if (strcmp(p->flags[i]->name, name) == 0)
            return (uint32_t)atoi(p->flags[i]->value);
    return 0;
}

/* trainer=N rollout=M: so many ranks. */
static void serve_place(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct guest *g = service;
    Fl__Place *pb = fl__place__unpack(NULL, m->head.body_bytes, m->body);
    uint32_t n[2] = { flag_of(pb, "trainer"), flag_of(pb, "rollout") };
    static char *roles[2] = { "trainer", "rollout" }, *devices[1] = { "0" };
    static Fl__LayoutRank ranks[32], *list[32];
    Fl__Derived derived = FL__DERIVED__INIT, *derived_list[1] = { &derived };
    Fl__Layout y = FL__LAYOUT__INIT;
    uint8_t group[GROUP_BYTES] = { 0xab }, body[8192];
    size_t all = 0;

    fl__place__free_unpacked(pb, NULL);
    if (head_is_away(g, req))
        return;
    if (n[0] + n[1] > 32) {
        answer_with(req, FL_INVALID, "can never fit: 33 devices asked, the cluster has 32");
        return;
    }
    for (unsigned r = 0; r < 2; r++) {
        for (uint32_t i = 0; i < n[r]; i++, all++) {
            fl__layout_rank__init(&ranks[all]);
            ranks[all].role = roles[r];
            ranks[all].rank = ranks[all].local_rank = i;
            ranks[all].world = ranks[all].local_world = n[r];
            ranks[all].node = "gpu-\"a\"";
            ranks[all].address = "127.0.0.1";
            ranks[all].n_devices = 1;
            ranks[all].devices = devices;
            list[all] = &ranks[all];
        }
    }
    y.group = (ProtobufCBinaryData){ GROUP_BYTES, group };
    y.master_addr = "127.0.0.1";
    y.master_port = 29500;
    y.n_ranks = all;
    y.ranks = list;
    derived.flag = "rollout-num-gpus";
    derived.value = "1";
    derived.why = "one device is left";
    y.n_derived = 1;
    y.derived = derived_list;
    y.text = "trainer 0  gpu-a  0\n";
    call_reply(req, (struct fl_bytes){ body, fl__layout__pack(&y, body) }, (struct fl_bytes){ 0 });
}

static char **strings(size_t n, char **from)
{
    char **out = calloc(n + 1, sizeof(*out));

    for (size_t i = 0; i < n; i++)
        out[i] = strdup(from[i]);
    return out;
}

void strings_free(char **s)
{
    for (size_t i = 0; s && s[i]; i++)
        free(s[i]);
    free(s);
}

static void launch_one(struct fake *f, const Fl__Launch *pb, uint32_t rank, uint32_t world)
{
    struct worker *w = worker_of(f, pb->role, rank, world);
    char **env;

    if (w->state != FURLONG_ENDED && w->known)
        return; /* a driver's later attempt */
    strings_free(w->argv);
    strings_free(w->env);
    w->argv = strings(pb->n_argv, pb->argv);
    env = calloc(pb->n_env + 1, sizeof(*env));
    for (size_t i = 0; i < pb->n_env; i++)
        t_true(asprintf(&env[i], "%s=%s", pb->env[i]->name, pb->env[i]->value) > 0);
    w->env = env;
    w->restarts_left = pb->restart_max;
    w->backoff_ms = pb->backoff_ms;
    w->again.fire = worker_again;
    w->attempt++;
    worker_spawn(w);
}

static uint32_t world_wanted(const char *role, const Fl__Launch *pb)
{
    for (size_t i = 0; i < pb->n_env; i++)
        if (strcmp(pb->env[i]->name, "FAKE_WORLD") == 0)
            return (uint32_t)atoi(pb->env[i]->value);
    (void)role;
    return 1;
}

static void reply_members(struct fake *f, struct call_req *req, const char *role)
{
    uint8_t *body;
    size_t len = members_pack(f, role, &body);

    call_reply(req, (struct fl_bytes){ body, len }, (struct fl_bytes){ 0 });
    free(body);
}

static void serve_launch(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct guest *g = service;
    Fl__Launch *pb = fl__launch__unpack(NULL, m->head.body_bytes, m->body);
    uint32_t world = world_wanted(pb->role, pb);

    if (!head_is_away(g, req)) {
        for (uint32_t i = 0; i < world; i++)
            launch_one(g->f, pb, i, world);
        reply_members(g->f, req, pb->role);
    }
    fl__launch__free_unpacked(pb, NULL);
}

void send_stop(struct worker *w, uint32_t budget_ms)
{
    Fl__WorkerStopping m = FL__WORKER_STOPPING__INIT;
    uint8_t body[64];

    m.budget_ms = budget_ms;
    if (w->guest)
        (void)call_event(w->guest->call, FL_EV_STOP, 0,
                         (struct fl_bytes){ body, fl__worker_stopping__pack(&m, body) }, NULL);
}

static void serve_role_end(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct guest *g = service;
    Fl__Role *pb = fl__role__unpack(NULL, m->head.body_bytes, m->body);

    if (!head_is_away(g, req)) {
        for (unsigned i = 0; i < g->f->n_workers; i++) {
            struct worker *w = &g->f->workers[i];

            if (strcmp(w->role, pb->role) != 0)
                continue;
            w->restarts_left = 0;
            fl_timer_cancel(&w->again);
            if (!w->pid)
                w->state = FURLONG_ENDED;
            else if (w->state == FURLONG_LIVE && w->guest)
                send_stop(w, 5000);
            else
                kill(w->pid, SIGKILL);
        }
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
        tell_driver(g->f);
    }
    fl__role__free_unpacked(pb, NULL);
}

static void serve_member_end(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct guest *g = service;
    Fl__MemberEnd *pb = fl__member_end__unpack(NULL, m->head.body_bytes, m->body);

    for (unsigned i = 0; i < g->f->n_workers; i++) {
        struct worker *w = &g->f->workers[i];

        if (!strcmp(w->role, pb->role) && w->rank == pb->rank && w->attempt == pb->attempt &&
            w->pid)
            kill(w->pid, SIGKILL);
    }
    call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
    fl__member_end__free_unpacked(pb, NULL);
}

static void serve_role_restart(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct guest *g = service;
    Fl__Role *pb = fl__role__unpack(NULL, m->head.body_bytes, m->body);

    if (!head_is_away(g, req)) {
        for (unsigned i = 0; i < g->f->n_workers; i++) {
            struct worker *w = &g->f->workers[i];

            if (strcmp(w->role, pb->role) != 0)
                continue;
            w->restarts_left++;
            if (w->pid) {
                kill(w->pid, SIGKILL);
            } else {
                w->attempt++;
                worker_spawn(w);
            }
        }
        reply_members(g->f, req, pb->role);
    }
    fl__role__free_unpacked(pb, NULL);
}

static void serve_group_end(void *service, struct call_req *req, const struct wire_msg *m)
{
    (void)m;
    if (!head_is_away(service, req))
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

static void serve_list(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct guest *g = service;

    (void)m;
    if (head_is_away(g, req))
        return;
    g->f->listed = true;
    reply_members(g->f, req, NULL);
}

static void serve_step(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct fake *f = ((struct guest *)service)->f;
    Fl__StepRecord *pb = fl__step_record__unpack(NULL, m->head.body_bytes, m->body);

    if (!head_is_away(service, req)) {
        pthread_mutex_lock(&f->mu);
        f->n_steps++;
        (void)FL_COPY(f->last_step, pb->json);
        changed(f);
        pthread_mutex_unlock(&f->mu);
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
    }
    fl__step_record__free_unpacked(pb, NULL);
}

static const struct call_method methods[] = {
    { .method = FL_WORKER_READY, .name = "ready", .serve = serve_ready },
    { .method = FL_METRIC, .name = "metric", .serve = serve_metric },
    { .method = FL_PROGRESS, .name = "progress", .serve = serve_progress },
    { .method = FL_DIR_FIND, .name = "find", .serve = serve_find },
    { .method = FL_GROUP_PLACE, .name = "place", .serve = serve_place },
    { .method = FL_WORKERS_LAUNCH, .name = "launch", .serve = serve_launch },
    { .method = FL_ROLE_END, .name = "role end", .serve = serve_role_end },
    { .method = FL_ROLE_RESTART, .name = "role restart", .serve = serve_role_restart },
    { .method = FL_GROUP_END, .name = "group end", .serve = serve_group_end },
    { .method = FL_MEMBER_END, .name = "member end", .serve = serve_member_end },
    { .method = FL_MEMBERS_LIST, .name = "members", .serve = serve_list },
    { .method = FL_STEP_RECORD, .name = "step", .serve = serve_step },
};

/* ---- streams -------------------------------------------------------------------------------- */
static void guest_end(struct guest *g)
{
    for (struct guest **at = &g->f->guests; *at; at = &(*at)->next) {
        if (*at != g)
            continue;
        *at = g->next;
        break;
    }
    if (g->w && g->w->guest == g)
        g->w->guest = NULL;
    call_peer_destroy(g->call);
    free(g);
}

static void guest_opened(void *service, const struct wire_hello *peer)
{
    struct guest *g = service;

    for (unsigned i = 0; i < g->f->n_workers; i++) {
        uint8_t id[28];

        worker_id(&g->f->workers[i], id);
        if (memcmp(id, peer->seat.id.b, 28) == 0)
            g->w = &g->f->workers[i];
    }
    g->w->guest = g;
}

static void guest_closed(void *service, const struct fl_err *why)
{
    (void)why;
    guest_end(service);
}

static const struct call_life guest_life = { .opened = guest_opened, .closed = guest_closed };

static void accepted(void *arg, struct stream *s)
{
    struct fake *f = arg;
    struct guest *g = calloc(1, sizeof(*g));

    g->f = f;
    g->next = f->guests;
    f->guests = g;
    t_true(call_peer_create(s, methods, FL_LEN(methods), &guest_life, g, &g->call, NULL) == FL_OK);
}

static enum fl_status admit(void *arg, const struct wire_hello *peer, struct fl_err *err)
{
    struct fake *f = arg;

    for (unsigned i = 0; i < f->n_workers; i++) {
        uint8_t id[28];

        worker_id(&f->workers[i], id);
        if (memcmp(id, peer->seat.id.b, 28) == 0 && f->workers[i].attempt == peer->seat.attempt &&
            f->workers[i].known)
            return FL_OK;
    }
    return fl_fail(err, FL_STALE, "this daemon did not start that seat");
}

void up(struct fake *f)
{
    struct wire_hello me = { .role = "node" };
    char target[320];
    struct stream_to at = { .target = target, .key = { f->key, sizeof(f->key) }, .admit = admit };
    struct fl_err err;

    snprintf(target, sizeof(target), "unix:%s", f->sock);
    t_ok(stream_listen(f->loop, &stream_sock, &at, &me, accepted, f, &f->server, &err), &err);
}

void down(struct fake *f)
{
    f->listed = false;
    stream_server_destroy(FL_TAKE(f->server));
    while (f->guests)
        guest_end(f->guests);
}
