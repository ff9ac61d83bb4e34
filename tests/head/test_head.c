/* The head above daemons that the test plays: nodes, jobs, placement, workers, logs. */
#include "tests/head/rig.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"

enum { WAIT_MS = 5000 };
#define UNTIL(r, cond) t_until((r)->loop, cond, WAIT_MS)

/* ---- nodes ------------------------------------------------------------------------------------ */

static void every_node_state_can_be_left(void **unused)
{
    (void)unused;
    for (int s = 0; s < NODE_STATES; s++) {
        bool in = s == NODE_LOST, out = false; /* what was never seen begins as LOST */

        for (size_t i = 0; i < node_edges_n; i++) {
            in |= (int)node_edges[i].to == s;
            out |= (int)node_edges[i].from == s;
            for (size_t k = 0; k < i; k++)
                t_true(node_edges[i].from != node_edges[k].from || node_edges[i].on != node_edges[k].on,
                       "two edges from %s on one event", node_state_name(node_edges[i].from));
        }
        t_true(in && out, "%s", node_state_name(s));
    }
}

static void a_node_joins_and_is_ready(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "join", NULL);
    UNTIL(&r, r.head->state == HEAD_READY); /* nobody to wait for */
    fake_up(&a, &r, "a", "10.0.0.1", 2);
    t_int_eq(a.reply->beat_ms, 1000);
    t_int_eq(a.reply->silent_ms, 15000);
    t_true(!a.reply->fenced);
    fake_down(&a);
    UNTIL(&r, r.head->nodes->state == NODE_SUSPECT);
    rig_end(&r);
}

static void names_are_unique_among_live_nodes(void **unused)
{
    struct rig r;
    struct fake a, b;

    (void)unused;
    rig_start(&r, "names", NULL);
    fake_up(&a, &r, "same", "10.0.0.1", 0);
    fake_init(&b, &r, "same", "10.0.0.2", 0);
    fake_connect(&b);
    fake_join(&b);
    t_int_eq(b.join_status, FL_EXISTS);
    t_has(b.join_text, "10.0.0.1");
    t_has(b.join_text, "10.0.0.2");
    fake_cut(&a);
    fake_join(&b);
    t_int_eq(b.join_status, FL_AGAIN, "the first is silent: the second waits");
    rig_pass(&r, 16000); /* given up */
    fake_join(&b);
    t_int_eq(b.join_status, FL_OK, "%s", b.join_text);
    fake_down(&a);
    fake_down(&b);
    rig_end(&r);
}

static void a_cloned_disk_is_refused(void **unused)
{
    struct rig r;
    struct fake a, b;

    (void)unused;
    rig_start(&r, "clone", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    fake_init(&b, &r, "b", "10.0.0.2", 0);
    b.who = a.who;
    (void)FL_COPY(b.boot_id, "boot-2");
    fake_connect(&b);
    fake_join(&b);
    t_int_eq(b.join_status, FL_EXISTS);
    t_has(b.join_text, "copied disk");
    t_true(r.head->nodes->state == NODE_READY, "the first is not disturbed");
    fake_down(&b);
    fake_init(&b, &r, "a", "10.0.0.1", 0);
    b.who = a.who;
    b.who.start = 0;
    fake_connect(&b);
    fake_join(&b);
    t_int_eq(b.join_status, FL_INVALID);
    fake_down(&b);
    fake_down(&a);
    rig_end(&r);
}

static void a_silent_node_is_fenced_once(void **unused)
{
    struct rig r;
    struct fake a;
    struct node *n;

    (void)unused;
    rig_start(&r, "silent", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    n = r.head->nodes;
    for (int i = 0; i < 30; i++) {
        rig_pass(&r, 1000);
        fake_beat(&a);
    }
    t_int_eq(n->state, NODE_READY, "beats keep it");
    rig_pass(&r, 4000);
    t_int_eq(n->state, NODE_SUSPECT);
    fake_beat(&a);
    t_int_eq(n->state, NODE_READY, "a beat brings it back");
    rig_pass(&r, 16000);
    t_int_eq(n->state, NODE_LOST);
    t_int_eq(n->rec->fate, FL__NODE_FATE__NODE_FENCED);
    UNTIL(&r, a.peer == NULL);
    fake_connect(&a);
    fake_join(&a);
    t_true(a.fenced, "it hears so");
    t_int_eq(n->state, NODE_LOST);
    a.who.start++;
    fake_cut(&a);
    a.fenced = false;
    fake_connect(&a);
    fake_join(&a);
    t_true(a.joined, "%s", a.join_text);
    UNTIL(&r, n->state == NODE_READY);
    t_int_eq(fl_metric_value(r.head->count.fenced), 1);
    fake_down(&a);
    rig_end(&r);
}

static void a_head_that_was_away_blames_nobody(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "away", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    rig_pass(&r, 1000);
    r.clock.now_ns += 3600ull * 1000000000; /* the machine slept: an hour in one turn */
    rig_turns(&r, 4);
    t_int_eq(r.head->nodes->state, NODE_READY);
    rig_pass(&r, 16000);
    t_int_eq(r.head->nodes->state, NODE_LOST, "silence of its own still counts");
    fake_down(&a);
    rig_end(&r);
}

static void a_node_that_leaves_is_not_waited_for(void **unused)
{
    struct rig r;
    struct fake a;
    struct asked q;
    Fl__Shutdown bye = FL__SHUTDOWN__INIT;

    (void)unused;
    rig_start(&r, "leave", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    ask_start(&a, FL_NODE_LEAVE, &bye, &q);
    ask_wait(&a, &q);
    t_int_eq(q.st, FL_OK);
    ask_free(&q);
    t_int_eq(r.head->nodes->state, NODE_GONE);
    fake_down(&a);
    rig_again(&r);
    UNTIL(&r, r.head->state == HEAD_READY);
    rig_end(&r);
}

static void who_has_not_joined_is_not_heard(void **unused)
{
    struct rig r;
    struct fake a;
    struct asked q;
    Fl__WorkerState w = FL__WORKER_STATE__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;

    (void)unused;
    rig_start(&r, "unjoined", NULL);
    fake_init(&a, &r, "a", "10.0.0.1", 0);
    fake_connect(&a);
    who.worker = BYTES_OF(a.who.id);
    w.who = &who;
    w.job = (ProtobufCBinaryData){ 4, (uint8_t *)"0000" };
    w.role = "driver";
    ask_start(&a, FL_WORKER_CHANGED, &w, &q);
    ask_wait(&a, &q);
    t_int_eq(q.st, FL_STALE);
    ask_free(&q);
    fake_down(&a);
    rig_end(&r);
}

/* ---- jobs ------------------------------------------------------------------------------------- */

static struct fake_worker *driver_of(struct rig *r, struct fake *f, const char *id)
{
    char wanted[64];

    snprintf(wanted, sizeof(wanted), "%s", id);
    UNTIL(r, job(r, wanted)->rec->status == FL__JOB_STATUS__JOB_RUNNING);
    struct fake_worker *w = fake_worker(f, "driver", 0);
    t_true(w, "driver of %s on %s", wanted, f->name);
    return w;
}

static void a_job_runs_on_the_heads_own_node(void **unused)
{
    struct rig r;
    struct fake a, b;

    (void)unused;
    rig_start(&r, "job", NULL);
    fake_up(&b, &r, "another", "10.0.0.2", 0);
    fake_cut(&b);
    (void)FL_COPY(b.boot_id, "boot-2");
    fake_again(&b);
    fake_up(&a, &r, "z-own", "10.0.0.1", 0);
    const Fl__EnvVar mine = { PROTOBUF_C_MESSAGE_INIT(&fl__env_var__descriptor), "COLOUR", "blue" }, *env = &mine;
    struct job_ask ask = { .env = &env, .n_env = 1, .cwd = "/tmp" };
    char *id = submit(&r, "echo 'hello world'", &ask);
    t_int_eq(strncmp(id, "raysubmit_", 10), 0);
    struct fake_worker *w = driver_of(&r, &a, id);
    t_str_eq(w->command, "/bin/sh -c echo 'hello world'");
    t_str_eq(w->cwd, "/tmp");
    t_has(w->env, "COLOUR=blue;");
    t_has(w->env, "FURLONG_ADDRESS=http://10.0.0.1:8265;");
    t_true(fake_worker(&b, "driver", 0) == NULL);
    fake_exit(&a, w, 0);
    UNTIL(&r, job(&r, id)->rec->cleaned);
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_SUCCEEDED);
    t_int_eq(job(&r, id)->rec->exit_code, 0);
    fake_down(&a);
    fake_down(&b);
    rig_end(&r);
}

static void a_failed_job_shows_its_code_and_last_lines(void **unused)
{
    struct rig r;
    struct fake a;
    uint64_t at = 0;
    char line[32];

    (void)unused;
    rig_start(&r, "fail", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    char *id = submit(&r, "exit 7", NULL);
    struct fake_worker *w = driver_of(&r, &a, id);
    for (int i = 0; i < 30; i++) {
        snprintf(line, sizeof(line), "line %d\n", i);
        at = fake_log(&a, w, 1, at, line);
    }
    fake_exit(&a, w, 7);
    UNTIL(&r, job_over(job(&r, id)));
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_FAILED);
    t_int_eq(job(&r, id)->rec->exit_code, 7);
    t_str_eq(job(&r, id)->rec->message,
             "Job entrypoint command failed with exit code 7, last available logs (truncated to 20,000 chars):\n"
             "line 20\nline 21\nline 22\nline 23\nline 24\nline 25\nline 26\nline 27\nline 28\nline 29\n");
    fake_down(&a);
    rig_end(&r);
}

static void a_stopped_job_waits_for_its_end(void **unused)
{
    struct rig r;
    struct fake a;
    struct fl_err err;
    bool live = false;

    (void)unused;
    rig_start(&r, "stop", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    char *id = submit(&r, "sleep 100", NULL);
    struct fake_worker *w = driver_of(&r, &a, id);
    t_ok(job_stop(r.head, job(&r, id), NULL, &live, &err), &err);
    t_true(live);
    UNTIL(&r, w->stop_asked);
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_RUNNING);
    fake_exit(&a, w, 143);
    UNTIL(&r, job_over(job(&r, id)));
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_STOPPED);
    t_ok(job_stop(r.head, job(&r, id), NULL, &live, &err), &err);
    t_true(!live, "it has ended already");
    fake_down(&a);
    rig_end(&r);
}

static void a_job_waits_for_a_node_and_can_be_stopped_meanwhile(void **unused)
{
    struct rig r;
    struct fake a;
    char first[64], second[64];
    bool live;

    (void)unused;
    rig_start(&r, "pending", NULL);
    snprintf(first, sizeof(first), "%s", submit(&r, "true", NULL));
    snprintf(second, sizeof(second), "%s", submit(&r, "true", NULL));
    t_int_eq(job(&r, first)->rec->status, FL__JOB_STATUS__JOB_PENDING);
    t_ok(job_stop(r.head, job(&r, first), NULL, &live, NULL), NULL);
    UNTIL(&r, job(&r, first)->rec->status == FL__JOB_STATUS__JOB_STOPPED);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    driver_of(&r, &a, second);
    t_int_eq(a.n_workers, 1);
    fake_down(&a);
    rig_end(&r);
}

static void names_of_jobs_are_checked(void **unused)
{
    struct rig r;
    struct fl_err err = { 0 };
    char id[64];
    static const struct { const char *name; enum fl_status st; } rows[] = {
        { "my-job_1.x", FL_OK }, { "my-job_1.x", FL_EXISTS }, { "", FL_INVALID }, { "../x", FL_INVALID },
        { "a/b", FL_INVALID }, { ".hidden", FL_INVALID }, { "a b", FL_INVALID },
        { "0123456789012345678901234567890123456789012345678901234567890123", FL_INVALID },
    };

    (void)unused;
    rig_start(&r, "jobnames", NULL);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct job_ask ask = { .entrypoint = "true", .submission_id = rows[i].name };
        enum fl_status st = job_submit(r.head, &ask, NULL, id, &err);

        t_int_eq(st, rows[i].st, "%s", rows[i].name);
        if (st == FL_EXISTS)
            t_str_eq(err.text, "Job with submission_id my-job_1.x already exists. Please use a different "
                               "submission_id.");
    }
    rig_end(&r);
}

static void a_full_disk_is_said_before_work_is_taken(void **unused)
{
    struct rig r;
    struct fl_err err = { 0 };
    struct job_ask ask = { .entrypoint = "true" };
    char id[64];

    (void)unused;
    rig_start(&r, "diskfull", NULL);
    fl_fault_set("journal.room:1=fail", NULL);
    t_refused(job_submit(r.head, &ask, NULL, id, &err), FL_EXHAUSTED, &err);
    fl_fault_set(NULL, NULL);
    t_int_eq(HASH_CNT(hh, r.head->jobs), 0);
    submit(&r, "true", NULL);
    rig_end(&r);
}

static void a_driver_starts_again_as_the_next_attempt(void **unused)
{
    struct rig r;
    struct fake a;
    struct job_ask ask = { .driver_restarts = 1 };

    (void)unused;
    rig_start(&r, "again", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    char *id = submit(&r, "flaky", &ask);
    struct fake_worker *w = driver_of(&r, &a, id);
    struct fl_seat_ref first = w->who;
    fake_exit(&a, w, 1);
    rig_turns(&r, 10);
    t_int_eq(a.n_workers, 1, "not before the back-off");
    rig_pass(&r, 1100);
    UNTIL(&r, a.n_workers == 2);
    w = fake_worker(&a, "driver", 0);
    t_mem_eq(&w->who.id, &first.id, sizeof(first.id), "the same seat");
    t_int_eq(w->who.attempt, 2);
    t_int_eq(job(&r, id)->rec->attempt, 2);
    t_true(!job_over(job(&r, id)));
    fake_exit(&a, w, 3);
    UNTIL(&r, job_over(job(&r, id)));
    t_int_eq(job(&r, id)->rec->exit_code, 3);
    fake_down(&a);
    rig_end(&r);
}

static void a_start_that_cannot_be_is_the_jobs_end(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "badstart", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    a.on_start = FL_INVALID;
    char *id = submit(&r, "nothing", NULL);
    UNTIL(&r, job_over(job(&r, id)));
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_FAILED);
    t_has(job(&r, id)->rec->message, "no such program");
    fake_down(&a);
    rig_end(&r);
}

static void a_job_on_a_lost_node_fails_with_its_name(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "lostjob", NULL);
    fake_up(&a, &r, "gpu-a", "10.0.0.1", 0);
    char *id = submit(&r, "sleep 100", NULL);
    driver_of(&r, &a, id);
    fake_cut(&a);
    rig_pass(&r, 16000);
    UNTIL(&r, job_over(job(&r, id)));
    t_has(job(&r, id)->rec->message, "gpu-a");
    t_has(job(&r, id)->rec->message, "fenced");
    fake_again(&a);
    t_true(a.fenced);
    t_int_eq(a.workers[0].phase, FL__WORKER_PHASE__WORKER_GONE, "it is told to end what it ran");
    fake_down(&a);
    rig_end(&r);
}

/* ---- placement -------------------------------------------------------------------------------- */

struct run { /* a job whose driver runs on a */
    struct rig rig;
    struct fake a, b;
    char job[64];
    struct fake_worker *driver;
};

static void run_start(struct run *x, const char *name, unsigned gpus_a, unsigned gpus_b)
{
    rig_start(&x->rig, name, NULL);
    fake_up(&x->a, &x->rig, "a", "10.0.0.1", gpus_a);
    if (gpus_b)
        fake_up(&x->b, &x->rig, "b", "10.0.0.2", gpus_b);
    else
        memset(&x->b, 0, sizeof(x->b));
    snprintf(x->job, sizeof(x->job), "%s", submit(&x->rig, "driver", NULL));
    x->driver = driver_of(&x->rig, &x->a, x->job);
    fake_joined(&x->a, x->driver);
}

static void run_end(struct run *x)
{
    fake_down(&x->a);
    if (x->b.rig)
        fake_down(&x->b);
    rig_end(&x->rig);
}

static void place_start(struct run *x, const char *const flags[][2], size_t n, int64_t wait_ms, struct asked *q)
{
    Fl__Place m = FL__PLACE__INIT;
    Fl__Flag f[8], *list[8];

    for (size_t i = 0; i < n; i++) {
        f[i] = (Fl__Flag)FL__FLAG__INIT;
        f[i].name = (char *)(uintptr_t)flags[i][0];
        f[i].value = (char *)(uintptr_t)flags[i][1];
        list[i] = &f[i];
    }
    m.flags = list;
    m.n_flags = n;
    m.has_wait_ms = wait_ms >= 0;
    m.wait_ms = (uint32_t)wait_ms;
    ask_relay(&x->a, x->driver, FL_GROUP_PLACE, &m, q);
}

static const char *const split_1_1[][2] = { { "actor-num-nodes", "1" }, { "actor-num-gpus-per-node", "1" },
                                            { "rollout-num-gpus", "1" }, { "rollout-num-gpus-per-engine", "1" } };
static const char *const split_2_2[][2] = { { "actor-num-nodes", "1" }, { "actor-num-gpus-per-node", "2" },
                                            { "rollout-num-gpus", "2" }, { "rollout-num-gpus-per-engine", "1" } };
static const char *const colocated_2[][2] = { { "actor-num-nodes", "1" }, { "actor-num-gpus-per-node", "2" },
                                              { "rollout-num-gpus-per-engine", "1" }, { "colocate", "true" } };

static Fl__Layout *place(struct run *x, const char *const flags[][2], size_t n)
{
    struct asked q;

    place_start(x, flags, n, -1, &q);
    ask_wait(&x->a, &q);
    Fl__Layout *y = asked_msg(&q, &fl__layout__descriptor);
    ask_free(&q);
    return y;
}

static Fl__Members *launch_try(struct run *x, const Fl__Layout *y, const char *role, uint32_t restarts,
                               struct fl_err *err)
{
    Fl__Launch m = FL__LAUNCH__INIT;
    char *argv[] = { "prog", "--x" };
    struct asked q;

    m.group = y->group;
    m.role = (char *)(uintptr_t)role;
    m.argv = argv;
    m.n_argv = 2;
    m.has_restart_max = m.has_backoff_ms = true;
    m.restart_max = restarts;
    m.backoff_ms = 200;
    ask_relay(&x->a, x->driver, FL_WORKERS_LAUNCH, &m, &q);
    ask_wait(&x->a, &q);
    Fl__Members *members = q.st == FL_OK ? asked_msg(&q, &fl__members__descriptor) : NULL;
    if (err)
        *err = q.err;
    ask_free(&q);
    return members;
}

static Fl__Members *launch(struct run *x, const Fl__Layout *y, const char *role, uint32_t restarts)
{
    struct fl_err err = { 0 };
    Fl__Members *m = launch_try(x, y, role, restarts, &err);

    t_true(m, "%s", err.text);
    return m;
}

static enum fl_status role_call(struct run *x, const Fl__Layout *y, uint32_t method, const char *role)
{
    Fl__Role m = FL__ROLE__INIT;
    struct asked q;

    m.group = y->group;
    m.role = (char *)(uintptr_t)role;
    ask_relay(&x->a, x->driver, method, &m, &q);
    ask_wait(&x->a, &q);
    enum fl_status st = q.st;
    ask_free(&q);
    return st;
}

static void end_group(struct run *x, const Fl__Layout *y)
{
    Fl__Group m = FL__GROUP__INIT;
    struct asked q;

    m.group = y->group;
    ask_relay(&x->a, x->driver, FL_GROUP_END, &m, &q);
    ask_wait(&x->a, &q);
    t_int_eq(q.st, FL_OK, "%s", q.err.text);
    ask_free(&q);
}

static void a_split_run_is_placed_and_launched(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "split", 2, 2);
    Fl__Layout *y = place(&x, split_2_2, 4);
    t_int_eq(y->n_ranks, 4);
    t_str_eq(y->master_addr, "10.0.0.1");
    t_true(y->master_port >= 15000);
    t_has(y->text, "trainer 0 of 2  a  10.0.0.1  devices 0");
    t_has(y->text, "rollout 1 of 2  b  10.0.0.2  devices 1");
    t_int_eq(x.a.n_leases, 2);
    t_int_eq(x.b.n_leases, 2);
    t_int_eq(x.b.leases[0]->state, FL__LEASE_STATE__COMMITTED);
    Fl__Members *m = launch(&x, y, "trainer", 0);
    t_int_eq(m->n_members, 2);
    t_int_eq(m->members[1]->state, MEMBER_STARTING);
    free_msg(m);
    m = launch(&x, y, "rollout", 0);
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 1) && fake_worker(&x.b, "rollout", 1));
    struct fake_worker *w = fake_worker(&x.a, "trainer", 1);
    t_str_eq(w->devices, "1");
    t_str_eq(w->command, "prog --x");
    t_int_eq(w->world, 2);
    t_int_eq(w->local_rank, 1);
    t_int_eq(w->local_world, 2);
    t_str_eq(w->master_addr, "10.0.0.1");
    t_int_eq(w->master_port, y->master_port);
    t_mem_eq(w->key, x.driver->key, 32, "one key a job");
    t_str_eq(fake_worker(&x.b, "rollout", 0)->master_addr, "10.0.0.2");
    free_msg(m);
    free_msg(y);
    run_end(&x);
}

static void colocated_ranks_share_their_leases(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "colocated", 2, 0);
    Fl__Layout *y = place(&x, colocated_2, 4);
    t_int_eq(y->n_ranks, 4);
    t_int_eq(x.a.n_leases, 2);
    free_msg(launch(&x, y, "trainer", 0));
    free_msg(launch(&x, y, "rollout", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 1) && fake_worker(&x.a, "trainer", 1));
    t_int_eq(fake_worker(&x.a, "rollout", 1)->leases[0], fake_worker(&x.a, "trainer", 1)->leases[0]);
    free_msg(y);
    run_end(&x);
}

static void the_same_question_gets_the_same_answer(void **unused)
{
    struct run x;
    struct fl_err err = { 0 };

    (void)unused;
    run_start(&x, "same", 4, 0);
    Fl__Layout *y = place(&x, split_1_1, 4), *again = place(&x, split_1_1, 4), *other;
    t_true(same_bytes(&y->group, &again->group));
    t_int_eq(x.a.n_leases, 2);
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0));
    Fl__Members *m = launch(&x, y, "trainer", 0);
    rig_turns(&x.rig, 10);
    t_int_eq(m->n_members, 1);
    t_int_eq(x.a.n_workers, 2, "no second process");
    free_msg(m);
    t_true(launch_try(&x, y, "critic", 0, &err) == NULL);
    t_has(err.text, "critic");
    end_group(&x, y);
    other = place(&x, split_1_1, 4);
    t_true(!same_bytes(&y->group, &other->group), "what has ended is not given again");
    free_msg(y);
    free_msg(again);
    free_msg(other);
    run_end(&x);
}

static void what_can_never_fit_is_refused_at_once(void **unused)
{
    struct run x;
    struct asked q;
    static const char *const big[][2] = { { "actor-num-nodes", "1" }, { "actor-num-gpus-per-node", "8" },
                                          { "rollout-num-gpus", "8" }, { "rollout-num-gpus-per-engine", "1" } };
    static const char *const odd[][2] = { { "actor-num-nodes", "many" } };

    (void)unused;
    run_start(&x, "never", 2, 2);
    place_start(&x, big, 4, -1, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_INVALID, "%s", q.err.text);
    ask_free(&q);
    place_start(&x, odd, 1, -1, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_INVALID);
    t_has(q.err.text, "actor-num-nodes");
    ask_free(&q);
    UNTIL(&x.rig, HASH_COUNT(x.rig.head->groups) == 0);
    t_int_eq(x.a.prepares + x.b.prepares, 0);
    run_end(&x);
}

static void what_does_not_fit_now_waits_for_room(void **unused)
{
    struct run x;
    struct asked q, now;

    (void)unused;
    run_start(&x, "wait", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4), *z;
    place_start(&x, colocated_2, 4, 60000, &q);
    rig_turns(&x.rig, 20);
    t_true(!q.done);
    place_start(&x, split_2_2, 4, 0, &now);
    ask_wait(&x.a, &now);
    t_true(now.st == FL_INVALID || now.st == FL_EXHAUSTED);
    ask_free(&now);
    end_group(&x, y);
    ask_wait(&x.a, &q); /* by the release, with no time passing */
    z = asked_msg(&q, &fl__layout__descriptor);
    t_int_eq(x.a.n_leases, 2);
    ask_free(&q);
    place_start(&x, split_1_1, 4, 5000, &q);
    rig_turns(&x.rig, 20);
    t_true(!q.done);
    rig_pass(&x.rig, 5200);
    fake_beat(&x.a);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_EXHAUSTED);
    ask_free(&q);
    free_msg(y);
    free_msg(z);
    run_end(&x);
}

static void a_node_that_does_not_prepare_undoes_all(void **unused)
{
    struct run x;
    struct asked q;

    (void)unused;
    run_start(&x, "undo", 2, 2);
    x.b.on_prepare = FL_EXHAUSTED;
    place_start(&x, split_2_2, 4, 10000, &q);
    UNTIL(&x.rig, x.a.releases == 1 && x.b.releases == 1);
    t_int_eq(x.a.n_leases, 0);
    t_true(!q.done, "tried again, it may be a passing thing");
    UNTIL(&x.rig, HASH_COUNT(x.rig.head->leases) == 0);
    x.b.on_prepare = FL_OK;
    rig_pass(&x.rig, 1200);
    ask_wait(&x.a, &q);
    free_msg(asked_msg(&q, &fl__layout__descriptor));
    ask_free(&q);
    t_int_eq(x.b.n_leases, 2);
    run_end(&x);
}

static void a_node_that_says_nothing_is_named(void **unused)
{
    struct run x;
    struct asked q;

    (void)unused;
    run_start(&x, "mute", 2, 2);
    x.b.mute_prepare = true;
    place_start(&x, split_2_2, 4, 4000, &q);
    UNTIL(&x.rig, x.b.prepares == 1);
    for (int i = 0; i < 6; i++) {
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
        fake_beat(&x.b);
    }
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_EXHAUSTED);
    t_has(q.err.text, "node b");
    ask_free(&q);
    run_end(&x);
}

static void a_worker_starts_again_after_back_off(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "restart", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 2));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    fake_joined(&x.a, fake_worker(&x.a, "rollout", 0));
    for (uint32_t attempt = 2; attempt <= 3; attempt++) {
        fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
        rig_turns(&x.rig, 8);
        t_int_eq(fake_worker(&x.a, "rollout", 0)->who.attempt, attempt - 1, "not at once");
        rig_pass(&x.rig, attempt == 2 ? 250 : 450);
        UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0)->who.attempt == attempt);
    }
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
    rig_pass(&x.rig, 5000);
    t_int_eq(fake_worker(&x.a, "rollout", 0)->who.attempt, 3, "twice and no more");
    struct seat *s = seat_of(x.rig.head, &BYTES_OF(fake_worker(&x.a, "rollout", 0)->who.id));
    t_int_eq(s->rec->state, FL__SEAT_STATE__SEAT_CLOSED);
    free_msg(y);
    run_end(&x);
}

static const Fl__Where *last_news(struct fake *f, const char *role, uint32_t rank)
{
    for (size_t i = f->n_events; i-- > 0;)
        for (size_t k = 0; f->events[i].members && k < f->events[i].members->n_members; k++)
            if (f->events[i].members->members[k]->rank == rank &&
                strcmp(f->events[i].members->members[k]->role, role) == 0)
                return f->events[i].members->members[k];
    return NULL;
}

static void the_driver_hears_how_its_members_fare(void **unused)
{
    struct run x;
    const Fl__Where *w;

    (void)unused;
    run_start(&x, "members", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 1));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    fake_joined(&x.a, fake_worker(&x.a, "rollout", 0));
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == MEMBER_LIVE);
    t_str_eq(w->tcp, "10.0.0.1:4000");
    t_str_eq(w->node, "a");
    t_mem_eq(&x.a.events[0].to.id, &x.driver->who.id, 28);
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == MEMBER_STARTING);
    t_has(w->why, "ended with code 9");
    rig_pass(&x.rig, 300);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->who->attempt == 2);
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0)->who.attempt == 2);
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == MEMBER_ENDED);
    free_msg(y);
    run_end(&x);
}

static void a_role_restarts_as_a_whole(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "role", 4, 0);
    Fl__Layout *y = place(&x, split_2_2, 4);
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 1));
    struct fake_worker *one = fake_worker(&x.a, "trainer", 0), *two = fake_worker(&x.a, "trainer", 1);
    t_int_eq(role_call(&x, y, FL_ROLE_RESTART, "trainer"), FL_OK);
    UNTIL(&x.rig, one->stop_asked && two->stop_asked);
    rig_turns(&x.rig, 8);
    t_true(fake_worker(&x.a, "trainer", 0) == one, "the older attempt must end first");
    fake_exit(&x.a, one, 0);
    fake_exit(&x.a, two, 0);
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0)->who.attempt == 2 && fake_worker(&x.a, "trainer", 1)->who.attempt == 2);
    t_int_eq(role_call(&x, y, FL_ROLE_END, "trainer"), FL_OK);
    one = fake_worker(&x.a, "trainer", 0);
    UNTIL(&x.rig, one->stop_asked);
    fake_exit(&x.a, one, 0);
    rig_pass(&x.rig, 3000);
    t_int_eq(fake_worker(&x.a, "trainer", 0)->who.attempt, 2, "it has ended for good");
    t_int_eq(role_call(&x, y, FL_ROLE_RESTART, "trainer"), FL_INVALID);
    t_int_eq(role_call(&x, y, FL_ROLE_RESTART, "rollout"), FL_NOT_FOUND);
    free_msg(y);
    run_end(&x);
}

static void the_end_of_a_job_ends_its_workers_and_groups(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "jobend", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 5));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    struct fake_worker *w = fake_worker(&x.a, "rollout", 0);
    fake_exit(&x.a, x.driver, 0);
    UNTIL(&x.rig, w->stop_asked);
    t_true(job_over(job(&x.rig, x.job)) && !job(&x.rig, x.job)->rec->cleaned);
    t_int_eq(x.a.n_leases, 2, "not while something runs on them");
    fake_exit(&x.a, w, 143);
    UNTIL(&x.rig, job(&x.rig, x.job)->rec->cleaned);
    t_int_eq(x.a.n_leases, 0);
    t_int_eq(HASH_COUNT(x.rig.head->leases) + HASH_COUNT(x.rig.head->groups), 0);
    t_int_eq(x.a.n_workers, 2, "nothing started again");
    free_msg(y);
    run_end(&x);
}

static void only_the_driver_may_place(void **unused)
{
    struct run x;
    struct asked q;
    Fl__Group m = FL__GROUP__INIT;
    Fl__Find find = FL__FIND__INIT;

    (void)unused;
    run_start(&x, "may", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    struct fake_worker *w = fake_worker(&x.a, "rollout", 0);
    m.group = y->group;
    ask_relay(&x.a, w, FL_GROUP_END, &m, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_DENIED);
    ask_free(&q);
    find.role = "driver";
    ask_relay(&x.a, w, FL_DIR_FIND, &find, &q);
    ask_wait(&x.a, &q);
    Fl__Where *where = asked_msg(&q, &fl__where__descriptor);
    t_mem_eq(where->who->worker.data, &x.driver->who.id, 28);
    free_msg(where);
    ask_free(&q);
    w->who.attempt = 9; /* one that the head never started */
    ask_relay(&x.a, w, FL_DIR_FIND, &find, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_STALE);
    ask_free(&q);
    free_msg(y);
    run_end(&x);
}

static void a_lost_nodes_share_is_placed_elsewhere(void **unused)
{
    struct run x;
    struct fake c;
    const Fl__Where *w;

    (void)unused;
    run_start(&x, "elsewhere", 2, 2);
    Fl__Layout *y = place(&x, split_2_2, 4);
    free_msg(launch(&x, y, "rollout", 3));
    UNTIL(&x.rig, fake_worker(&x.b, "rollout", 1));
    fake_up(&c, &x.rig, "c", "10.0.0.3", 2);
    fake_cut(&x.b);
    for (int i = 0; i < 17; i++) {
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
        fake_beat(&c);
    }
    UNTIL(&x.rig, fake_worker(&c, "rollout", 1));
    t_int_eq(fake_worker(&c, "rollout", 0)->who.attempt, 2);
    t_str_eq(fake_worker(&c, "rollout", 0)->master_addr, "10.0.0.3");
    t_int_eq(c.n_leases, 2);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 1)) && w->node && strcmp(w->node, "c") == 0);
    t_has(w->why, "fenced");
    fake_down(&c);
    free_msg(y);
    run_end(&x);
}

static void a_driver_may_ask_for_resources(void **unused)
{
    struct rig r;
    struct fake a;
    Fl__Amount gpu = FL__AMOUNT__INIT;
    const Fl__Amount *wants = &gpu;
    struct job_ask ask = { .wants = &wants, .n_wants = 1 };

    (void)unused;
    rig_start(&r, "wants", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 2);
    gpu.name = "GPU";
    gpu.e4 = 10000;
    char first[64], second[64];
    snprintf(first, sizeof(first), "%s", submit(&r, "one", &ask));
    struct fake_worker *w = driver_of(&r, &a, first);
    t_int_eq(w->n_leases, 1);
    t_str_eq(w->devices, "0");
    gpu.e4 = 40000;
    snprintf(second, sizeof(second), "%s", submit(&r, "four", &ask));
    UNTIL(&r, job(&r, second)->rec->message);
    t_has(job(&r, second)->rec->message, "waiting for resources");
    t_int_eq(job(&r, second)->rec->status, FL__JOB_STATUS__JOB_PENDING);
    fake_exit(&a, w, 0);
    UNTIL(&r, job(&r, first)->rec->cleaned);
    t_int_eq(a.n_leases, 0);
    fake_down(&a);
    rig_end(&r);
}

/* ---- logs and steps --------------------------------------------------------------------------- */

static char *log_text(struct rig *r, const char *id)
{
    static char text[4096];
    char *got = NULL;
    size_t len;
    uint64_t from = 0;
    struct fl_err err = { 0 };

    t_ok(joblog_read(job(r, id), &from, sizeof(text) - 1, &got, &len, &err), &err);
    memcpy(text, got, len);
    text[len] = '\0';
    free(got);
    return text;
}

static void logs_are_prefixed_and_never_doubled(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "logs", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    struct fake_worker *w = fake_worker(&x.a, "rollout", 0);
    t_int_eq(fake_log(&x.a, x.driver, 1, 0, "one\n"), 4);
    t_int_eq(fake_log(&x.a, w, 1, 0, "ready\nset\n"), 10);
    t_int_eq(fake_log(&x.a, w, 2, 0, "oh\n"), 3);
    t_int_eq(fake_log(&x.a, x.driver, 1, 0, "one\n"), 4, "again: taken already");
    t_int_eq(fake_log(&x.a, x.driver, 1, 0, "one\ntwo\n"), 8, "half of it is new");
    t_int_eq(fake_log(&x.a, w, 1, 10, "no end"), 16);
    t_int_eq(fake_log(&x.a, w, 1, 16, " yet\n"), 21);
    const char *wanted = "one\n(rollout 0 a) ready\n(rollout 0 a) set\n(rollout 0 a) oh\ntwo\n"
                         "(rollout 0 a) no end yet\n";
    t_str_eq(log_text(&x.rig, x.job), wanted);
    rig_again(&x.rig);
    UNTIL(&x.rig, x.a.peer == NULL);
    fake_again(&x.a);
    t_int_eq(fake_log(&x.a, w, 1, 10, "no end"), 21, "a new head knows how far it is");
    t_str_eq(log_text(&x.rig, x.job), wanted);
    t_int_eq(fake_log(&x.a, w, 1, 500, "after a gap\n"), 512);
    fl_fault_set("joblog.write:1=fail", NULL);
    Fl__LogPush m = FL__LOG_PUSH__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    struct asked q;
    who.worker = BYTES_OF(w->who.id);
    who.attempt = w->who.attempt;
    m.who = &who;
    m.job = BYTES_OF(w->job);
    m.role = w->role;
    m.offset = 512;
    m.data = (ProtobufCBinaryData){ 5, (uint8_t *)"full\n" };
    m.has_stream = true;
    m.stream = 1;
    ask_start(&x.a, FL_LOG_PUSH, &m, &q);
    ask_wait(&x.a, &q);
    fl_fault_set(NULL, NULL);
    t_int_eq(q.st, FL_EXHAUSTED);
    ask_free(&q);
    t_int_eq(fake_log(&x.a, w, 1, 512, "full\n"), 517);
    t_has(log_text(&x.rig, x.job), "(rollout 0 a) after a gap\n(rollout 0 a) full\n");
    free_msg(y);
    run_end(&x);
}

static void a_kill_between_mark_and_bytes_loses_and_doubles_nothing(void **unused)
{
    struct run x;
    int status;

    (void)unused;
    run_start(&x, "logkill", 0, 0);
    fake_log(&x.a, x.driver, 1, 0, "one\n");
    joblog_close(job(&x.rig, x.job));
    pid_t pid = fork();
    if (pid == 0) {
        Fl__LogPush m = FL__LOG_PUSH__INIT;
        Fl__SeatRef who = FL__SEAT_REF__INIT;
        uint64_t next;

        who.worker = BYTES_OF(x.driver->who.id);
        who.attempt = 1;
        m.who = &who;
        m.role = "driver";
        m.offset = 4;
        m.data = (ProtobufCBinaryData){ 4, (uint8_t *)"two\n" };
        m.stream = 1;
        fl_fault_set("joblog.marked:1=kill", NULL);
        joblog_push(job_named(x.rig.head, x.job), &m, "a", &next, NULL);
        _exit(3);
    }
    t_int_eq(waitpid(pid, &status, 0), pid);
    t_true(WIFSIGNALED(status));
    t_int_eq(fake_log(&x.a, x.driver, 1, 4, "two\n"), 8);
    t_str_eq(log_text(&x.rig, x.job), "one\ntwo\n");
    run_end(&x);
}

static void steps_are_kept_in_a_ring(void **unused)
{
    struct run x;
    struct asked q;
    Fl__StepRecord m = FL__STEP_RECORD__INIT;
    char json[64];
    struct fl_err err = { 0 };

    (void)unused;
    run_start(&x, "steps", 0, 0);
    m.json = "{\"step\": 0}";
    ask_relay(&x.a, x.driver, FL_STEP_RECORD, &m, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_OK);
    ask_free(&q);
    struct job *j = job(&x.rig, x.job);
    t_refused(steps_add(j, "[1]", &err), FL_INVALID, &err);
    t_refused(steps_add(j, "{\"a\":1,\"a\":2}", &err), FL_INVALID, &err);
    for (int i = 1; i < 1500; i++) {
        snprintf(json, sizeof(json), "{\"step\": %d}", i);
        t_ok(steps_add(j, json, &err), &err);
    }
    t_int_eq(j->steps.next, 1500);
    t_true(steps_get(&j->steps, 475) == NULL);
    t_str_eq(steps_get(&j->steps, 476), "{\"step\": 476}");
    t_str_eq(steps_get(&j->steps, 1499), "{\"step\": 1499}");
    t_true(steps_get(&j->steps, 1500) == NULL);
    run_end(&x);
}

/* ---- the head comes back ---------------------------------------------------------------------- */

static void head_away(struct run *x)
{
    rig_stop_head(&x->rig);
    UNTIL(&x->rig, x->a.peer == NULL && (!x->b.rig || x->b.peer == NULL));
}

static void a_run_does_not_notice_a_new_head(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "comeback", 2, 2);
    Fl__Layout *y = place(&x, split_2_2, 4), *again;
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 1));
    uint64_t term = x.rig.head->term.head;
    head_away(&x);
    rig_open_head(&x.rig);
    t_int_eq(x.rig.head->term.head, term + 1);
    rig_turns(&x.rig, 4);
    t_int_eq(x.rig.head->state, HEAD_RECOVERING, "two nodes must report");
    fake_again(&x.a);
    rig_turns(&x.rig, 4);
    t_int_eq(x.rig.head->state, HEAD_RECOVERING, "one is missing");
    fake_again(&x.b);
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    t_int_eq(x.a.n_leases + x.b.n_leases, 4);
    t_int_eq(x.a.n_workers, 3);
    t_int_eq(x.a.workers[0].starts + x.a.workers[1].starts + x.a.workers[2].starts, 3, "nothing started twice");
    t_int_eq(x.a.stops, 0);
    again = place(&x, split_2_2, 4);
    t_true(same_bytes(&y->group, &again->group));
    fake_exit(&x.a, x.driver, 0);
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0)->stop_asked);
    fake_exit(&x.a, fake_worker(&x.a, "trainer", 0), 0);
    fake_exit(&x.a, fake_worker(&x.a, "trainer", 1), 0);
    UNTIL(&x.rig, job(&x.rig, x.job)->rec->cleaned);
    free_msg(y);
    free_msg(again);
    run_end(&x);
}

static void what_ended_meanwhile_is_heard_on_return(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "meanwhile", 0, 0);
    head_away(&x);
    rig_open_head(&x.rig);
    fake_again(&x.a);
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    fake_exit(&x.a, x.driver, 5); /* kept by the daemon until it is acknowledged */
    UNTIL(&x.rig, job_over(job(&x.rig, x.job)));
    t_int_eq(job(&x.rig, x.job)->rec->exit_code, 5);
    run_end(&x);
}

static void nothing_submitted_is_lost(void **unused)
{
    struct rig r;
    struct fake a;
    char ids[5][64];

    (void)unused;
    rig_start(&r, "submitted", NULL);
    for (int i = 0; i < 5; i++)
        snprintf(ids[i], sizeof(ids[i]), "%s", submit(&r, "true", NULL));
    rig_again(&r);
    for (int i = 0; i < 5; i++)
        t_int_eq(job(&r, ids[i])->rec->status, FL__JOB_STATUS__JOB_PENDING);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    UNTIL(&r, a.n_workers == 5);
    t_true(!FL_SAME(a.workers[0].job, a.workers[1].job), "ids are not given twice");
    fake_down(&a);
    rig_end(&r);
}

static void a_missing_node_is_given_up_by_a_new_head(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "giveup", 2, 2);
    head_away(&x);
    rig_open_head(&x.rig);
    fake_again(&x.a);
    for (int i = 0; i < 16; i++) {
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
    }
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    t_int_eq(node_find(x.rig.head, &x.b.who.id)->state, NODE_LOST);
    fake_again(&x.b);
    t_true(x.b.fenced);
    run_end(&x);
}

static void a_start_lost_on_the_way_is_sent_again(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "lostcall", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    a.mute_start = true;
    char *id = submit(&r, "true", NULL);
    UNTIL(&r, a.unanswered);
    fake_cut(&a); /* it runs, and the answer is lost */
    reply_empty(a.unanswered);
    a.unanswered = NULL;
    a.mute_start = false;
    fake_again(&a);
    UNTIL(&r, job(&r, id)->rec->status == FL__JOB_STATUS__JOB_RUNNING);
    t_int_eq(a.n_workers, 1);
    t_int_eq(a.workers[0].starts, 1, "it was listed, so it is not even asked again");
    fake_cut(&a);
    a.n_workers = 0; /* the daemon never heard of it */
    fake_again(&a);
    UNTIL(&r, a.n_workers == 1);
    t_int_eq(a.workers[0].who.attempt, 1);
    fake_down(&a);
    rig_end(&r);
}

static void leases_left_prepared_are_given_back(void **unused)
{
    struct run x;
    struct asked q;

    (void)unused;
    run_start(&x, "prepared", 2, 2);
    x.b.mute_prepare = true;
    place_start(&x, split_2_2, 4, -1, &q);
    UNTIL(&x.rig, x.b.prepares == 1 && x.a.n_leases == 2);
    rig_turns(&x.rig, 4);
    head_away(&x); /* killed between prepare and commit */
    ask_free(&q);
    reply_empty(x.b.unanswered);
    x.b.unanswered = NULL;
    x.b.mute_prepare = false;
    rig_open_head(&x.rig);
    fake_again(&x.a);
    fake_again(&x.b);
    t_int_eq(x.a.n_leases, 0, "told with the answer to its join");
    Fl__Layout *y = place(&x, split_2_2, 4);
    t_int_eq(y->n_ranks, 4);
    t_int_eq(x.a.n_leases + x.b.n_leases, 4);
    free_msg(y);
    run_end(&x);
}

static void a_commit_lost_on_the_way_is_sent_again(void **unused)
{
    struct run x;
    struct asked q;

    (void)unused;
    run_start(&x, "commit", 2, 2);
    x.b.mute_commit = true;
    place_start(&x, split_2_2, 4, -1, &q);
    UNTIL(&x.rig, x.b.commits == 1);
    head_away(&x); /* decided, and only half told */
    ask_free(&q);
    reply_empty(x.b.unanswered);
    x.b.unanswered = NULL;
    x.b.mute_commit = false;
    rig_open_head(&x.rig);
    fake_again(&x.a);
    fake_again(&x.b);
    UNTIL(&x.rig, x.b.leases[0]->state == FL__LEASE_STATE__COMMITTED);
    t_int_eq(x.a.n_leases + x.b.n_leases, 4);
    Fl__Layout *y = place(&x, split_2_2, 4);
    t_int_eq(x.a.prepares + x.b.prepares, 2, "the same placement");
    free_msg(y);
    run_end(&x);
}

static void work_of_nobody_is_ended(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "nobody", NULL);
    fake_init(&a, &r, "a", "10.0.0.1", 0);
    a.n_workers = 1;
    memset(&a.workers[0].who.id, 7, 28);
    a.workers[0].who.attempt = 1;
    strcpy(a.workers[0].role, "driver");
    fake_connect(&a);
    fake_join(&a);
    t_int_eq(a.workers[0].phase, FL__WORKER_PHASE__WORKER_GONE);
    t_true(r.head->nodes->workers == NULL);
    fake_down(&a);
    rig_end(&r);
}

static void copy_state(const char *from, const char *to)
{
    char cmd[3000];

    snprintf(cmd, sizeof(cmd), "rm -rf %s && cp -r %s %s", to, from, to);
    t_int_eq(system(cmd), 0);
}

static int unknown_leases(const struct run *x)
{
    struct unknown_lease *u;
    int n;

    LL_COUNT(node_find(x->rig.head, &x->a.who.id)->leases, u, n);
    return n;
}

static int unknown_workers(const struct run *x)
{
    struct unknown_worker *u;
    int n;

    LL_COUNT(node_find(x->rig.head, &x->a.who.id)->workers, u, n);
    return n;
}

/* A cluster with a copy of its state, taken when `early` and `late` had been submitted and nothing had run. */
static void older_start(struct run *x, const char *name, char early[64], char late[64], char older[1024])
{
    char copy[64];

    rig_start(&x->rig, name, NULL);
    memset(&x->b, 0, sizeof(x->b));
    fake_up(&x->a, &x->rig, "a", "10.0.0.1", 3);
    fake_cut(&x->a);
    snprintf(early, 64, "%s", submit(&x->rig, "runs to its end", NULL));
    snprintf(late, 64, "%s", submit(&x->rig, "runs on", NULL));
    rig_stop_head(&x->rig);
    snprintf(copy, sizeof(copy), "%s-copy", name);
    snprintf(older, 1024, "%s", t_path(copy));
    copy_state(x->rig.state_dir, older);
    rig_open_head(&x->rig);
    fake_again(&x->a);
}

/* On the copy: its first term is one that the daemons have heard already. */
static void older_head(struct run *x, const char *older)
{
    uint64_t newest = x->rig.head->term.head;

    head_away(x);
    snprintf(x->rig.state_dir, sizeof(x->rig.state_dir), "%s", older);
    rig_open_head(&x->rig);
    t_int_eq(x->rig.head->term.head, newest);
    fake_connect(&x->a);
    UNTIL(&x->rig, x->rig.terms == 1);
    t_int_eq(x->rig.head->term.head, newest + 1, "the next above what was seen");
    fake_again(&x->a);
    t_true(x->a.joined, "%s", x->a.join_text);
    UNTIL(&x->rig, x->rig.head->state == HEAD_READY);
    rig_turns(&x->rig, 20);
}

static void a_copied_older_journal_says_so_and_harms_nothing(void **unused)
{
    struct run x;
    char early[64], late[64], third[64], older[1024];
    struct asked q;

    (void)unused;
    older_start(&x, "older", early, late, older);
    driver_of(&x.rig, &x.a, early);
    x.driver = driver_of(&x.rig, &x.a, late);
    fake_exit(&x.a, &x.a.workers[0], 0);
    UNTIL(&x.rig, job_over(job(&x.rig, early)));
    snprintf(third, sizeof(third), "%s", submit(&x.rig, "the copy knows nothing of it", NULL));
    UNTIL(&x.rig, job(&x.rig, third)->rec->status == FL__JOB_STATUS__JOB_RUNNING);
    x.driver = fake_worker(&x.a, "driver", 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0));
    free_msg(y);

    older_head(&x, older);
    t_int_eq(unknown_leases(&x), 2, "shown");
    t_int_eq(unknown_workers(&x), 2, "the third job's driver and its trainer");
    t_int_eq(x.a.stops, 0, "all of it runs on");
    t_int_eq(x.a.n_leases, 2);
    t_int_eq(x.a.n_workers, 4, "and nothing was started a second time");
    t_int_eq(job(&x.rig, late)->rec->status, FL__JOB_STATUS__JOB_RUNNING, "it was running: taken over");
    t_int_eq(job(&x.rig, early)->rec->status, FL__JOB_STATUS__JOB_FAILED);
    t_has(job(&x.rig, early)->rec->message, "older than the cluster");

    /* nothing is placed over it: one device of three is left */
    x.driver = &x.a.workers[1];
    place_start(&x, split_1_1, 4, 0, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_EXHAUSTED, "%s", q.err.text);
    ask_free(&q);

    /* and when the unknown work ends, its share is free */
    struct fake_worker *w = fake_worker(&x.a, "trainer", 0);
    fake_exit(&x.a, w, 0);
    UNTIL(&x.rig, x.a.releases == 1);
    t_int_eq(unknown_leases(&x), 1, "one was held by nobody");
    rig_again(&x.rig); /* what is foreign is remembered */
    UNTIL(&x.rig, x.a.peer == NULL);
    fake_again(&x.a);
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    t_int_eq(unknown_leases(&x), 1);
    t_int_eq(unknown_workers(&x), 1);
    run_end(&x);
}

/* ---- ending ----------------------------------------------------------------------------------- */

static void until_idle_ends_with_its_jobs(void **unused)
{
    struct rig r;
    struct fake a;
    struct head_config cfg = { .until_idle = true };

    (void)unused;
    rig_start(&r, "idle", &cfg);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    rig_pass(&r, 10000);
    fake_beat(&a);
    t_int_eq(r.ended, 0, "the first job may still come");
    char *id = submit(&r, "true", NULL);
    struct fake_worker *w = driver_of(&r, &a, id);
    fake_exit(&a, w, 0);
    UNTIL(&r, job(&r, id)->rec->cleaned);
    rig_pass(&r, 1000);
    fake_beat(&a);
    t_int_eq(r.ended, 0, "who submitted it has not read its end yet");
    rig_pass(&r, 6000);
    UNTIL(&r, a.shutdowns == 1);
    UNTIL(&r, r.ended == 1);
    fake_down(&a);
    rig_end(&r);
}

static void until_idle_does_not_wait_for_ever_for_a_first_job(void **unused)
{
    struct rig r;
    struct head_config cfg = { .until_idle = true };

    (void)unused;
    rig_start(&r, "nojob", &cfg);
    rig_pass(&r, 110000);
    t_int_eq(r.ended, 0);
    rig_pass(&r, 20000);
    t_int_eq(r.ended, 1);
    rig_end(&r);
}

static void shutdown_ends_jobs_then_daemons(void **unused)
{
    struct run x;
    struct fl_err err = { 0 };
    struct job_ask ask = { .entrypoint = "true" };
    char id[64];

    (void)unused;
    run_start(&x, "shutdown", 0, 0);
    head_shutdown(x.rig.head, "the test says so");
    t_refused(job_submit(x.rig.head, &ask, NULL, id, &err), FL_CANCELLED, &err);
    UNTIL(&x.rig, x.driver->stop_asked);
    t_int_eq(x.a.shutdowns, 0, "jobs first");
    fake_exit(&x.a, x.driver, 143);
    UNTIL(&x.rig, x.a.shutdowns == 1);
    rig_pass(&x.rig, 6000);
    UNTIL(&x.rig, x.rig.ended == 1);
    run_end(&x);
}

static void a_daemon_that_does_not_leave_is_not_waited_for_longer(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "stuck", 0, 0);
    x.a.leaves = false;
    head_shutdown(x.rig.head, "the test says so");
    for (int i = 0; i < 16; i++) { /* a driver that never ends */
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
    }
    UNTIL(&x.rig, x.a.shutdowns == 1);
    t_int_eq(x.rig.ended, 0);
    for (int i = 0; i < 16; i++) {
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
    }
    t_int_eq(x.rig.ended, 1);
    run_end(&x);
}

/* Each record that can be refused is refused once; what was asked for comes about all the same. */
static void a_journal_that_refuses_now_and_then_loses_nothing(void **unused)
{
    (void)unused;
    for (unsigned nth = 1; nth < 60; nth += 3) {
        struct rig r;
        struct fake a;
        char name[32], spec[64];
        struct job_ask ask = { .entrypoint = "true" };
        char id[64];

        snprintf(name, sizeof(name), "refuse%u", nth);
        rig_start(&r, name, NULL);
        fake_up(&a, &r, "a", "10.0.0.1", 0);
        t_ok(job_submit(r.head, &ask, NULL, id, NULL), NULL);
        snprintf(spec, sizeof(spec), "journal.queue:%u=fail", nth);
        fl_fault_set(spec, NULL);
        for (int i = 0; i < 8 && a.n_workers == 0; i++)
            rig_pass(&r, 500);
        t_int_eq(a.n_workers, 1, "nth=%u", nth);
        while (fake_exit_try(&a, &a.workers[0], 4) != FL_OK) /* as a daemon does, until acknowledged */
            rig_pass(&r, 100);
        for (int i = 0; i < 8 && !job(&r, id)->rec->cleaned; i++) {
            rig_pass(&r, 500);
            fake_beat(&a);
        }
        fl_fault_set(NULL, NULL);
        t_true(job(&r, id)->rec->cleaned, "nth=%u", nth);
        t_int_eq(job(&r, id)->rec->exit_code, 4, "nth=%u", nth);
        t_int_eq(a.n_workers, 1, "nth=%u", nth);
        fake_down(&a);
        rig_end(&r);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_node_state_can_be_left),
        cmocka_unit_test(a_node_joins_and_is_ready),
        cmocka_unit_test(names_are_unique_among_live_nodes),
        cmocka_unit_test(a_cloned_disk_is_refused),
        cmocka_unit_test(a_silent_node_is_fenced_once),
        cmocka_unit_test(a_head_that_was_away_blames_nobody),
        cmocka_unit_test(a_node_that_leaves_is_not_waited_for),
        cmocka_unit_test(who_has_not_joined_is_not_heard),
        cmocka_unit_test(a_job_runs_on_the_heads_own_node),
        cmocka_unit_test(a_failed_job_shows_its_code_and_last_lines),
        cmocka_unit_test(a_stopped_job_waits_for_its_end),
        cmocka_unit_test(a_job_waits_for_a_node_and_can_be_stopped_meanwhile),
        cmocka_unit_test(names_of_jobs_are_checked),
        cmocka_unit_test(a_full_disk_is_said_before_work_is_taken),
        cmocka_unit_test(a_driver_starts_again_as_the_next_attempt),
        cmocka_unit_test(a_start_that_cannot_be_is_the_jobs_end),
        cmocka_unit_test(a_job_on_a_lost_node_fails_with_its_name),
        cmocka_unit_test(a_split_run_is_placed_and_launched),
        cmocka_unit_test(colocated_ranks_share_their_leases),
        cmocka_unit_test(the_same_question_gets_the_same_answer),
        cmocka_unit_test(what_can_never_fit_is_refused_at_once),
        cmocka_unit_test(what_does_not_fit_now_waits_for_room),
        cmocka_unit_test(a_node_that_does_not_prepare_undoes_all),
        cmocka_unit_test(a_node_that_says_nothing_is_named),
        cmocka_unit_test(a_worker_starts_again_after_back_off),
        cmocka_unit_test(the_driver_hears_how_its_members_fare),
        cmocka_unit_test(a_role_restarts_as_a_whole),
        cmocka_unit_test(the_end_of_a_job_ends_its_workers_and_groups),
        cmocka_unit_test(only_the_driver_may_place),
        cmocka_unit_test(a_lost_nodes_share_is_placed_elsewhere),
        cmocka_unit_test(a_driver_may_ask_for_resources),
        cmocka_unit_test(logs_are_prefixed_and_never_doubled),
        cmocka_unit_test(a_kill_between_mark_and_bytes_loses_and_doubles_nothing),
        cmocka_unit_test(steps_are_kept_in_a_ring),
        cmocka_unit_test(a_run_does_not_notice_a_new_head),
        cmocka_unit_test(what_ended_meanwhile_is_heard_on_return),
        cmocka_unit_test(nothing_submitted_is_lost),
        cmocka_unit_test(a_missing_node_is_given_up_by_a_new_head),
        cmocka_unit_test(a_start_lost_on_the_way_is_sent_again),
        cmocka_unit_test(leases_left_prepared_are_given_back),
        cmocka_unit_test(a_commit_lost_on_the_way_is_sent_again),
        cmocka_unit_test(work_of_nobody_is_ended),
        cmocka_unit_test(a_copied_older_journal_says_so_and_harms_nothing),
        cmocka_unit_test(until_idle_ends_with_its_jobs),
        cmocka_unit_test(until_idle_does_not_wait_for_ever_for_a_first_job),
        cmocka_unit_test(shutdown_ends_jobs_then_daemons),
        cmocka_unit_test(a_daemon_that_does_not_leave_is_not_waited_for_longer),
        cmocka_unit_test(a_journal_that_refuses_now_and_then_loses_nothing),
    };

    return t_run("head", tests);
}
