#include "worker/client/inbox.h"
#include "worker/client/sync.h"

void inbox_init(struct inbox *b)
{
    *b = (struct inbox){ 0 };
    pthread_mutex_init(&b->mu, NULL);
    b->alive.older = b->alive.newer = &b->alive;
    for (unsigned i = 0; i < FURLONG_LANES; i++) {
        client_cond_init(&b->lanes[i].came);
        b->lanes[i].last = &b->lanes[i].first;
    }
}

void inbox_fini(struct inbox *b)
{
    for (unsigned i = 0; i < FURLONG_LANES; i++)
        pthread_cond_destroy(&b->lanes[i].came);
    pthread_mutex_destroy(&b->mu);
}

static enum fl_status lane_check(uint32_t lane, struct fl_err *err)
{
    if (lane < FURLONG_LANES)
        return FL_OK;
    return fl_fail(err, FL_INVALID, "lane %u: there are lanes 0 to %u", lane, FURLONG_LANES - 1);
}

enum fl_status inbox_put(struct inbox *b, struct furlong_call *c, struct fl_err *err)
{
    struct inbox_lane *l;
    enum fl_status st = FL_OK;

    FL_TRY(lane_check(c->lane, err));
    l = &b->lanes[c->lane];
    pthread_mutex_lock(&b->mu);
    if (b->over.status != FL_OK) {
        st = b->over.status;
        if (err)
            *err = b->over;
    } else if (l->n >= FURLONG_QUEUE_MAX) {
        st = fl_fail(err, FL_EXHAUSTED, "%u calls wait in lane %u already", l->n, c->lane);
    } else {
        c->next = NULL;
        c->waiting = true;
        *l->last = c;
        l->last = &c->next;
        l->n++;
        c->older = b->alive.older; /* the ring's end */
        c->newer = &b->alive;
        c->older->newer = b->alive.older = c;
        if (l->waiters)
            pthread_cond_signal(&l->came);
    }
    pthread_mutex_unlock(&b->mu);
    return st;
}

void inbox_close(struct inbox *b, const struct fl_err *why)
{
    pthread_mutex_lock(&b->mu);
    if (b->over.status == FL_OK)
        b->over = *why;
    for (unsigned i = 0; i < FURLONG_LANES; i++)
        pthread_cond_broadcast(&b->lanes[i].came);
    pthread_mutex_unlock(&b->mu);
}

enum fl_status inbox_take(struct inbox *b, uint32_t lane, uint32_t wait_ms,
                          struct furlong_call **out, struct fl_err *err)
{
    struct timespec until = { 0 };
    struct inbox_lane *l;
    enum fl_status st;
    bool late = wait_ms == 0;

    FL_TRY(lane_check(lane, err));
    l = &b->lanes[lane];
    if (!late)
        until = client_until(wait_ms);
    pthread_mutex_lock(&b->mu);
    while (!l->first && b->over.status == FL_OK && !late) {
        l->waiters++;
        late = !client_cond_wait(&l->came, &b->mu, wait_ms, &until);
        l->waiters--;
    }
    if (l->first) {
        *out = l->first;
        (*out)->waiting = false;
        l->first = l->first->next;
        if (!l->first)
            l->last = &l->first;
        l->n--;
        st = FL_OK;
    } else if (b->over.status != FL_OK) {
        st = b->over.status;
        if (err)
            *err = b->over;
    } else {
        st = fl_fail(err, FL_AGAIN, "nothing came in lane %u in %u ms", lane, wait_ms);
    }
    pthread_mutex_unlock(&b->mu);
    return st;
}

struct furlong_call *inbox_any(struct inbox *b)
{
    struct furlong_call *c;

    pthread_mutex_lock(&b->mu);
    c = b->alive.newer == &b->alive ? NULL : b->alive.newer;
    pthread_mutex_unlock(&b->mu);
    return c;
}

static void lane_remove(struct inbox_lane *l, struct furlong_call *c)
{
    for (struct furlong_call **at = &l->first; *at; at = &(*at)->next) {
        if (*at != c)
            continue;
        *at = c->next;
        if (!c->next)
            l->last = at;
        l->n--;
        return;
    }
}

struct furlong_call *inbox_take_of(struct inbox *b, const struct furlong_weights *set)
{
    struct furlong_call *c;

    pthread_mutex_lock(&b->mu);
    c = b->alive.newer;
    while (c != &b->alive && !(c->waiting && c->set == set))
        c = c->newer;
    if (c != &b->alive) {
        lane_remove(&b->lanes[c->lane], c);
        c->waiting = false;
    }
    pthread_mutex_unlock(&b->mu);
    return c != &b->alive ? c : NULL;
}

void inbox_forget(struct inbox *b, struct furlong_call *c)
{
    pthread_mutex_lock(&b->mu);
    if (c->waiting)
        lane_remove(&b->lanes[c->lane], c);
    c->waiting = false;
    c->older->newer = c->newer;
    c->newer->older = c->older;
    pthread_mutex_unlock(&b->mu);
}
