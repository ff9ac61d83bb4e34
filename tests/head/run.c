#include "tests/head/run.h"

struct fake_worker *driver_of(struct rig *r, struct fake *f, const char *id)
{
    char wanted[64];

    snprintf(wanted, sizeof(wanted), "%s", id);
    UNTIL(r, job(r, wanted)->rec->status == FL__JOB_STATUS__JOB_RUNNING);
    struct fake_worker *w = fake_worker(f, "driver", 0);
    t_true(w, "driver of %s on %s", wanted, f->name);
    return w;
}

void run_start(struct run *x, const char *name, unsigned gpus_a, unsigned gpus_b)
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

void run_end(struct run *x)
{
    fake_down(&x->a);
    if (x->b.rig)
        fake_down(&x->b);
    rig_end(&x->rig);
}

void place_start(struct run *x, const char *const flags[][2], size_t n, int64_t wait_ms,
                 struct asked *q)
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

const char *const split_1_1[4][2] = { { "actor-num-nodes", "1" },
                                      { "actor-num-gpus-per-node", "1" },
                                      { "rollout-num-gpus", "1" },
                                      { "rollout-num-gpus-per-engine", "1" } };
const char *const split_2_2[4][2] = { { "actor-num-nodes", "1" },
                                      { "actor-num-gpus-per-node", "2" },
                                      { "rollout-num-gpus", "2" },
                                      { "rollout-num-gpus-per-engine", "1" } };
const char *const colocated_2[4][2] = { { "actor-num-nodes", "1" },
                                        { "actor-num-gpus-per-node", "2" },
                                        { "rollout-num-gpus-per-engine", "1" },
                                        { "colocate", "true" } };

Fl__Layout *place(struct run *x, const char *const flags[][2], size_t n)
{
    struct asked q;

    place_start(x, flags, n, -1, &q);
    ask_wait(&x->a, &q);
    Fl__Layout *y = asked_msg(&q, &fl__layout__descriptor);
    ask_free(&q);
    return y;
}

Fl__Members *launch_try(struct run *x, const Fl__Layout *y, const char *role, uint32_t restarts,
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

Fl__Members *launch(struct run *x, const Fl__Layout *y, const char *role, uint32_t restarts)
{
    struct fl_err err = { 0 };
    Fl__Members *m = launch_try(x, y, role, restarts, &err);

    t_true(m, "%s", err.text);
    return m;
}

enum fl_status role_call(struct run *x, const Fl__Layout *y, uint32_t method, const char *role)
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

void end_group(struct run *x, const Fl__Layout *y)
{
    Fl__Group m = FL__GROUP__INIT;
    struct asked q;

    m.group = y->group;
    ask_relay(&x->a, x->driver, FL_GROUP_END, &m, &q);
    ask_wait(&x->a, &q);
    t_int_eq(q.st, FL_OK, "%s", q.err.text);
    ask_free(&q);
}

const Fl__Where *last_news(struct fake *f, const char *role, uint32_t rank)
{
    for (size_t i = f->n_events; i-- > 0;)
        for (size_t k = 0; f->events[i].members && k < f->events[i].members->n_members; k++)
            if (f->events[i].members->members[k]->rank == rank &&
                strcmp(f->events[i].members->members[k]->role, role) == 0)
                return f->events[i].members->members[k];
    return NULL;
}

void head_away(struct run *x)
{
    rig_stop_head(&x->rig);
    UNTIL(&x->rig, x->a.peer == NULL && (!x->b.rig || x->b.peer == NULL));
}
