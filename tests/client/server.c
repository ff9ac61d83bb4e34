#include "tests/client/server.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/t.h"
#include "worker/client/sync.h"

struct server {
    struct furlong *f;
    pthread_t main, side;
    pthread_mutex_t mu;
    pthread_cond_t changed;
    char seen[4096];
    struct furlong_call *held;
    unsigned count;
    atomic_bool end;
    enum fl_status st;
    struct fl_err err;
};

static void note(struct server *s, const struct furlong_event *ev)
{
    size_t at;

    pthread_mutex_lock(&s->mu);
    at = strlen(s->seen);
    if (ev->tags)
        snprintf(s->seen + at, sizeof(s->seen) - at, "%s%s:%u", at ? " " : "", ev->method,
                 ev->tags);
    else
        snprintf(s->seen + at, sizeof(s->seen) - at, "%s%s", at ? " " : "", ev->method);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mu);
}

static void refuse(struct furlong_call *c)
{
    struct fl_err why;

    fl_fail(&why, FL_STALE, "version 3 was asked for");
    furlong_refuse(c, &why);
}

static void number(struct furlong_call *c, unsigned n)
{
    char text[16];

    furlong_reply(c, text, (size_t)snprintf(text, sizeof(text), "%u", n));
}

static struct furlong_call *held_one(struct server *s)
{
    struct timespec until = client_until(10000);
    struct furlong_call *held;
    bool late = false;

    pthread_mutex_lock(&s->mu);
    while (!s->held && !late)
        late = !client_cond_wait(&s->changed, &s->mu, 10000, &until);
    held = s->held;
    pthread_mutex_unlock(&s->mu);
    return held;
}

static void answer_call(struct server *s, const struct furlong_event *ev)
{
    struct furlong_data same = { ev->body, ev->body_bytes, ev->blob, ev->blob_bytes };
    struct furlong_call *held;

    if (strcmp(ev->method, "echo") == 0) {
        furlong_reply_data(ev->call, &same);
    } else if (strcmp(ev->method, "refuse") == 0) {
        refuse(ev->call);
    } else if (strcmp(ev->method, "hold") == 0) {
        pthread_mutex_lock(&s->mu);
        s->held = ev->call;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->mu);
    } else if (strcmp(ev->method, "release") == 0) {
        pthread_mutex_lock(&s->mu);
        held = s->held;
        s->held = NULL;
        pthread_mutex_unlock(&s->mu);
        if (held)
            furlong_reply(held, "held", 4);
        furlong_reply(ev->call, NULL, 0);
    } else if (strcmp(ev->method, "held?") == 0) {
        number(ev->call, held_one(s) != NULL);
    } else if (strcmp(ev->method, "gone?") == 0) {
        held = held_one(s);
        for (int i = 0; held && i < 1000 && !furlong_unwanted(held); i++)
            usleep(1000); /* the cancel travels on its own */
        number(ev->call, held && furlong_unwanted(held));
    } else if (strcmp(ev->method, "leave") == 0) {
        atomic_store(&s->end, true);
    } else {
        number(ev->call, ++s->count);
    }
}

static void *serve_main(void *arg)
{
    struct server *s = arg;
    struct furlong_event ev;
    uint64_t half;

    while (!atomic_load(&s->end)) {
        s->st = furlong_next(s->f, FURLONG_MAIN, 20, &ev, &s->err);
        if (s->st == FL_AGAIN)
            continue;
        if (s->st != FL_OK)
            break;
        if (ev.what != FURLONG_CALL)
            note(s, &ev);
        half = ev.bytes / 2;
        if (ev.what == FURLONG_CALL)
            answer_call(s, &ev);
        else if (ev.what == FURLONG_SQUEEZE)
            furlong_reply(ev.call, &half, sizeof(half));
        else
            furlong_reply(ev.call, NULL, 0);
        if (ev.what == FURLONG_STOP)
            break;
    }
    return NULL;
}

static void *serve_side(void *arg)
{
    struct server *s = arg;
    struct furlong_event ev;

    while (!atomic_load(&s->end)) {
        enum fl_status st = furlong_next(s->f, 1, 20, &ev, NULL);

        if (st == FL_OK)
            answer_call(s, &ev);
        else if (st != FL_AGAIN)
            break;
    }
    return NULL;
}

struct server *server_start(struct furlong *f)
{
    struct server *s = calloc(1, sizeof(*s));

    s->f = f;
    pthread_mutex_init(&s->mu, NULL);
    client_cond_init(&s->changed);
    t_true(pthread_create(&s->main, NULL, serve_main, s) == 0);
    t_true(pthread_create(&s->side, NULL, serve_side, s) == 0);
    return s;
}

static bool ends_in(const char *text, const char *word)
{
    size_t n = strlen(text), m = strlen(word);

    return n >= m && strcmp(text + n - m, word) == 0;
}

const char *server_seen(struct server *s, const char *last_word)
{
    struct timespec until = client_until(10000);
    bool late = false;

    pthread_mutex_lock(&s->mu);
    while (!ends_in(s->seen, last_word) && !late)
        late = !client_cond_wait(&s->changed, &s->mu, 10000, &until);
    pthread_mutex_unlock(&s->mu);
    return s->seen;
}

enum fl_status server_wait(struct server *s, struct fl_err *err)
{
    enum fl_status st;

    pthread_join(s->main, NULL);
    atomic_store(&s->end, true);
    pthread_join(s->side, NULL);
    st = s->st;
    if (err)
        *err = s->err;
    furlong_leave(s->f);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->mu);
    free(s);
    return st;
}

void server_end(struct server *s)
{
    atomic_store(&s->end, true);
    (void)server_wait(s, NULL);
}
