#include <stdlib.h>
#include "common/base/muster.h"
#include "worker/client/driver_priv.h"

/* One wait on all members: the muster names who is late, gone or refused. */
struct all_one {
    struct client_ask ask;
    struct asking_all *of;
    uint32_t i;
};
struct asking_all {
    struct client_sync sync;
    struct furlong_group *g;
    const char *method;
    struct fl_timer look; /* just before the muster's deadline: how far each has come */
    struct fl_muster *muster;
    struct all_one *ones;
    uint32_t budget_ms, left; /* left: asks that are not over */
    bool decided;
    enum fl_status st;
    struct fl_err err;
};

static void all_look(struct fl_timer *t, uint64_t now_ns)
{
    struct asking_all *a = container_of(t, struct asking_all, look);

    (void)now_ns;
    for (uint32_t i = 0; i < a->g->n; i++)
        fl_muster_at(a->muster, i, "%s", client_ask_phase(&a->ones[i].ask));
}

static void all_end_if_over(struct asking_all *a)
{
    if (!a->decided || a->left)
        return;
    fl_timer_cancel(&a->look);
    fl_muster_destroy(a->muster);
    client_sync_end(&a->sync, a->st, &a->err);
}

static void late_note(struct asking_all *a, uint32_t i, const struct fl_err *e)
{
    struct furlong_group *g = a->g;
    struct member *m;
    uint32_t attempt;

    pthread_mutex_lock(&g->d->mu);
    m = member_find(g->d, g->role, i);
    attempt = m ? m->at.who.attempt : 0;
    pthread_mutex_unlock(&g->d->mu);
    member_is_late(g->d, g->role, i, attempt, false, e->text);
}

static void all_decided(void *arg, enum fl_status st, const struct fl_err *e)
{
    struct asking_all *a = arg;

    for (uint32_t i = 0; i < a->g->n && st == FL_TIMEOUT; i++)
        if (fl_muster_status(a->muster, i) == FL_AGAIN)
            late_note(a, i, e);
    a->st = st;
    if (e)
        a->err = *e;
    for (uint32_t i = 0; i < a->g->n; i++)
        client_ask_cancel(&a->ones[i].ask); /* those that are not over */
    a->decided = true; /* not before: the last of them would have ended it under this loop */
    all_end_if_over(a);
}

static void one_done(struct client_ask *ask)
{
    struct all_one *one = container_of(ask, struct all_one, ask);
    struct asking_all *a = one->of;

    a->left--;
    if (a->decided)
        all_end_if_over(a);
    else
        fl_muster_in(a->muster, one->i, ask->st, ask->st == FL_OK ? NULL : &ask->err);
}

static void name_of(struct furlong_group *g, uint32_t i, char *out, size_t room)
{
    struct member *m;

    pthread_mutex_lock(&g->d->mu);
    m = member_find(g->d, g->role, i);
    (void)fl_copy(out, room, m ? m->at.name : client_peer_name(g->peers[i]));
    pthread_mutex_unlock(&g->d->mu);
}

static void all_begin(struct client_sync *s)
{
    struct asking_all *a = container_of(s, struct asking_all, sync);
    struct furlong *f = a->g->d->f;
    uint64_t due = 0;
    char name[CLIENT_NAME];
    struct fl_err err;
    enum fl_status st;

    if (a->budget_ms && a->budget_ms != FURLONG_FOREVER)
        due = fl_loop_now_ns(f->loop) + (uint64_t)a->budget_ms * 1000000;
    if (due) /* armed first, so it fires first */
        fl_timer_arm(f->loop, &a->look, due);
    st = fl_muster_create(f->loop, a->method, a->g->n, due, all_decided, a, &a->muster, &err);
    if (st != FL_OK) {
        fl_timer_cancel(&a->look);
        client_sync_end(s, st, &err);
        return;
    }
    a->left = a->g->n;
    for (uint32_t i = 0; i < a->g->n; i++) {
        name_of(a->g, i, name, sizeof(name));
        fl_muster_name(a->muster, i, "%s", name);
    }
    for (uint32_t i = 0; i < a->g->n; i++) {
        a->ones[i].ask.due_ns = due; /* travels; the muster's own deadline comes first */
        client_ask_start(&a->ones[i].ask);
    }
}

enum fl_status furlong_ask_all(struct furlong_group *g, const char *method,
                               const struct furlong_data *what, uint32_t budget_ms,
                               struct furlong_answer *each, struct fl_err *err)
{
    struct asking_all a = {
        .g = g, .method = method, .budget_ms = budget_ms, .look.fire = all_look
    };
    enum fl_status st = FL_OK;

    FL_TRY(client_here(g->d->f, err));
    group_none_late(g);
    a.ones = calloc(g->n, sizeof(*a.ones));
    if (!a.ones)
        return fl_fail(err, FL_EXHAUSTED, "no memory to ask %u of %s", g->n, g->role);
    for (uint32_t i = 0; i < g->n && st == FL_OK; i++) {
        a.ones[i] = (struct all_one){ .of = &a, .i = i, .ask.done = one_done };
        st = client_ask_pack(&a.ones[i].ask, g->peers[i], FURLONG_MAIN, method, what, err);
    }
    if (st == FL_OK)
        st = client_sync_run(g->d->f->loop, &a.sync, all_begin, err);
    for (uint32_t i = 0; i < g->n; i++) {
        free(a.ones[i].ask.body);
        if (each)
            each[i] = a.ones[i].ask.answer;
        else
            furlong_answer_free(&a.ones[i].ask.answer);
    }
    free(a.ones);
    return st;
}
