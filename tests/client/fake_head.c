/* What the fake's daemon, and the head behind it, answer to each method */
#include "tests/client/fake_priv.h"

#include <signal.h>
#include <stdlib.h>

#include "common/base/str.h"
#include "common/proto/methods.h"
#include "tests/t.h"

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
        fake_where_fill(w, &p);
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
    w->attempt++;
    fake_worker_spawn(w);
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
    size_t len = fake_members_pack(f, role, &body);

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
                fake_worker_spawn(w);
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

const struct call_method fake_methods[] = {
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
const size_t fake_n_methods = FL_LEN(fake_methods);
