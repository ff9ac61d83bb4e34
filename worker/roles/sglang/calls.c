#include "worker/roles/sglang/calls.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/loop.h"
#include "common/conf/json.h"
#include "transport/http/http.h"
#include "worker/roles/role.h"

enum {
    WANTED_MS = 1000,           /* how soon a call that nobody waits for any more is dropped */
    GENERATE_MS = 24 * 3600000, /* none of ours: the driver watches by --silence-timeout */
    ANSWER_MAX = 256 << 20
};

struct asked { /* one generate call */
    struct asked *next, *prev;
    struct calls *calls;
    struct fl_task task;
    struct http_call http;
    struct furlong_call *call;
    struct sglang_gen gen;
    bool with_logprobs;
};
struct calls_post {
    struct calls *calls;
    struct fl_task task;
    struct http_call http;
    const char *path; /* a literal */
    char *body;
    uint32_t ms;
    int done_fd;
    json_t *answer;
    enum fl_status st;
    struct fl_err err;
};
struct calls {
    struct sglang_server *server;
    struct fl_loop *loop;
    struct http_client *client;
    struct fl_watch *child;
    struct fl_timer look, wanted;
    struct http_call looking;
    unsigned missed, strikes;
    bool prompt_logprobs; /* this release tells tokens of prompts in that way alone */
    struct asked *first;
    double idle_from, idle_s;
    pthread_t thread;
    bool runs;
    atomic_uint in_flight;
    pthread_mutex_t mu; /* what follows */
    bool ended;
    struct fl_err why;
};

static void end(struct calls *c, const struct fl_err *why)
{
    pthread_mutex_lock(&c->mu);
    if (!c->ended)
        c->why = *why;
    c->ended = true;
    pthread_mutex_unlock(&c->mu);
}

bool calls_ended(struct calls *c, struct fl_err *err)
{
    pthread_mutex_lock(&c->mu);
    bool ended = c->ended;
    if (ended && err)
        *err = c->why;
    pthread_mutex_unlock(&c->mu);
    return ended;
}

struct sglang_server *calls_server(const struct calls *c)
{
    return c->server;
}

uint32_t calls_in_flight(const struct calls *c)
{
    return atomic_load(&c->in_flight);
}

static enum fl_status http_go(struct calls *c, const char *path, const char *body, uint32_t ms,
                              struct http_call *call, struct fl_err *err)
{
    char url[512];
    struct http_ask ask = { .method = body ? "POST" : "GET",
                            .url = url,
                            .headers = c->server->headers,
                            .body = { body, body ? strlen(body) : 0 },
                            .timeout_ms = ms,
                            .answer_max_bytes = ANSWER_MAX };

    snprintf(url, sizeof(url), "%s%s", c->server->url, path);
    return http_start(c->client, &ask, call, err);
}

/* ---- generate ---- */
static void asked_free(struct asked *a)
{
    if (a)
        sglang_gen_fini(&a->gen);
    free(a);
}

static void asked_out(struct asked *a)
{
    struct calls *c = a->calls;

    if (a->prev)
        a->prev->next = a->next;
    else
        c->first = a->next;
    if (a->next)
        a->next->prev = a->prev;
    if (!c->first)
        c->idle_from = role_now_s();
    asked_free(a);
    atomic_fetch_sub(&c->in_flight, 1);
}

static void asked_refuse(struct asked *a, enum fl_status st, const struct fl_err *err)
{
    role_refuse(a->call, st, err);
    asked_out(a);
}

/* Broken once: the driver asks again. Broken again and again: this server is given up. */
static enum fl_status strike(struct calls *c, enum fl_status st, struct fl_err *err)
{
    struct fl_err why = { 0 };

    if (sglang_server_lives(c->server, &why) != FL_OK) {
        end(c, &why);
        *err = why;
        return FL_UNREACHABLE;
    }
    if (++c->strikes >= SGLANG_STRIKES) {
        fl_fail(&why, st, "%d generate calls in a row failed; the last: %.180s", SGLANG_STRIKES,
                err->text);
        end(c, &why);
        return FL_UNREACHABLE;
    }
    return FL_AGAIN;
}

/* In flight: refused now, with the reason. */
static void give_up(struct calls *c, const struct fl_err *why)
{
    end(c, why);
    while (c->first)
        http_cancel(&c->first->http);
}

static void generate_go(struct asked *a);

/* A version that was not loaded here: the server was started again under this adapter, or has
 * another master. What it serves is nobody's answer; the next attempt loads it anew. */
static void generate_took(struct asked *a, json_t *o, enum fl_status st, struct fl_err *err)
{
    struct calls *c = a->calls;
    struct sglang_made made;

    if (st == FL_OK)
        st = sglang_gen_take(&a->gen, o, c->idle_s, &made, err);
    if (st == FL_UNSUPPORTED && !a->with_logprobs) {
        if (!c->prompt_logprobs)
            fl_info(
                "SGLang %s knows no return_prompt_token_ids: tokens of prompts come with their log "
                "probabilities, which it has to compute",
                c->server->version);
        c->prompt_logprobs = true;
        generate_go(a);
        return;
    }
    if (st == FL_OK) {
        c->strikes = 0;
        c->idle_s = 0;
        role_reply(a->call, made.body, made.blob, made.blob_bytes);
        free(made.blob);
        asked_out(a);
        return;
    }
    fl_warn("generate failed why=%s", err->text);
    if (st == FL_STALE) {
        asked_refuse(a, FL_UNREACHABLE, err);
        give_up(c, err);
        return;
    }
    if (st == FL_UNREACHABLE || st == FL_CORRUPT || st == FL_TIMEOUT || st == FL_UNSUPPORTED)
        st = strike(c, st, err);
    asked_refuse(a, st, err);
}

static void generate_done(struct http_call *call, enum fl_status st, struct http_answer *answer,
                          const struct fl_err *why)
{
    struct asked *a = container_of(call, struct asked, http);
    struct fl_err err = { 0 };
    json_t *o = NULL;

    if (st == FL_CANCELLED) {
        if (!calls_ended(a->calls, &err))
            fl_fail(&err, FL_CANCELLED, "the engine leaves, or nobody waits for this any more");
        asked_refuse(a, err.status, &err);
        return;
    }
    if (st == FL_OK)
        st = sglang_answer("/generate", answer->status, answer->body, answer->body_len, &o, &err);
    else
        err = *why;
    generate_took(a, o, st, &err);
    json_decref(o);
}

static void generate_go(struct asked *a)
{
    struct calls *c = a->calls;
    struct fl_err err = { 0 };
    char *body;
    enum fl_status st;

    a->with_logprobs = c->prompt_logprobs;
    a->http = (struct http_call){ .done = generate_done };
    body = FL_FAULT("sglang.body") ? NULL : sglang_gen_body(&a->gen, a->with_logprobs);
    st = body ? http_go(c, "/generate", body, GENERATE_MS, &a->http, &err)
              : fl_fail(&err, FL_EXHAUSTED, "no memory for a request");
    free(body);
    if (st != FL_OK)
        asked_refuse(a, st, &err);
}

static void generate_task(struct fl_task *t)
{
    struct asked *a = container_of(t, struct asked, task);
    struct calls *c = a->calls;

    if (!c->first && c->idle_from > 0)
        c->idle_s += role_now_s() - c->idle_from;
    a->next = c->first;
    if (c->first)
        c->first->prev = a;
    c->first = a;
    generate_go(a);
}

void calls_generate(struct calls *c, const struct furlong_event *ev,
                    const struct sglang_serves *now)
{
    struct fl_err err = { 0 };
    struct asked *a = calloc(1, sizeof(*a));
    enum fl_status st = a ? FL_OK : fl_fail(&err, FL_EXHAUSTED, "no memory for a request");

    if (st == FL_OK && calls_in_flight(c) >= SGLANG_IN_FLIGHT)
        st = fl_fail(&err, FL_AGAIN, "%d generate calls are in flight here", SGLANG_IN_FLIGHT);
    if (st == FL_OK)
        st =
            sglang_gen_read(ev->body, ev->body_bytes, ev->blob, ev->blob_bytes, now, &a->gen, &err);
    if (st != FL_OK) {
        role_refuse(ev->call, st, &err);
        free(a);
        return;
    }
    a->calls = c;
    a->call = ev->call;
    a->task.run = generate_task;
    atomic_fetch_add(&c->in_flight, 1);
    (void)fl_post(c->loop, &a->task);
}

static void on_wanted(struct fl_timer *t, uint64_t now_ns)
{
    struct calls *c = container_of(t, struct calls, wanted);

    (void)now_ns;
    for (struct asked *a = c->first, *next; a; a = next) {
        next = a->next; /* SGLang aborts what its client hangs up on */
        if (furlong_unwanted(a->call))
            http_cancel(&a->http);
    }
    fl_timer_arm_in(c->loop, t, WANTED_MS);
}

/* ---- one request for the program's thread ---- */
static void post_over(struct calls_post *p)
{
    uint64_t one = 1;

    (void)!write(p->done_fd, &one, sizeof(one)); /* an eventfd takes its first 1 always */
}

static void post_done(struct http_call *call, enum fl_status st, struct http_answer *a,
                      const struct fl_err *why)
{
    struct calls_post *p = container_of(call, struct calls_post, http);

    p->st = st;
    if (st != FL_OK)
        p->err = *why;
    else
        p->st = sglang_answer(p->path, a->status, a->body, a->body_len, &p->answer, &p->err);
    post_over(p);
}

static void post_task(struct fl_task *t)
{
    struct calls_post *p = container_of(t, struct calls_post, task);

    p->http.done = post_done;
    p->st = http_go(p->calls, p->path, p->body, p->ms, &p->http, &p->err);
    if (p->st != FL_OK)
        post_over(p);
}

enum fl_status calls_post_start(struct calls *c, const char *path, json_t *body_take, uint32_t ms,
                                struct calls_post **out, int *done_fd, struct fl_err *err)
{
    struct calls_post *p = calloc(1, sizeof(*p));
    char *body = json_dumps(body_take, JSON_COMPACT);

    json_decref(body_take);
    if (!p || !body) {
        free(p);
        free(body);
        return fl_fail(err, FL_EXHAUSTED, "%s: no memory", path);
    }
    *p = (struct calls_post){
        .calls = c, .path = path, .body = body, .ms = ms, .task.run = post_task
    };
    p->done_fd = eventfd(0, EFD_CLOEXEC);
    if (p->done_fd < 0) {
        free(p);
        free(body);
        return fl_fail_errno(err, "%s: eventfd", path);
    }
    *out = p;
    *done_fd = p->done_fd;
    (void)fl_post(c->loop, &p->task);
    return FL_OK;
}

enum fl_status calls_post_end(struct calls_post *p, json_t **out, struct fl_err *err)
{
    struct pollfd d = { .fd = p->done_fd, .events = POLLIN };

    while (poll(&d, 1, -1) != 1) /* its own deadline ends it */
        continue;
    enum fl_status st = p->st;
    if (st != FL_OK && err)
        *err = p->err;
    if (st == FL_OK)
        *out = p->answer;
    (void)close(p->done_fd);
    free(p->body);
    free(p);
    return st;
}

/* ---- the server's life ---- */
static void on_child(void *arg, unsigned events)
{
    struct calls *c = arg;
    struct fl_err why = { 0 };

    (void)events;
    fl_watch_events(c->child, 0);
    if (sglang_server_lives(c->server, &why) == FL_OK)
        fl_fail(&why, FL_UNREACHABLE, "the SGLang server is gone");
    give_up(c, &why);
}

/* Not /health: it makes a token, which a paused server does not. */
static void look_done(struct http_call *call, enum fl_status st, struct http_answer *a,
                      const struct fl_err *why)
{
    struct calls *c = container_of(call, struct calls, looking);
    struct fl_err err = { 0 };

    if (st == FL_CANCELLED)
        return;
    c->missed = st == FL_OK && a->status < 500 ? 0 : c->missed + 1;
    if (c->missed >= SGLANG_LOOKS) {
        fl_fail(&err, FL_UNREACHABLE,
                "the SGLang server at %s answered none of %d looks, %d s apart%s%.100s",
                c->server->url, SGLANG_LOOKS, SGLANG_LOOK_MS / 1000, st == FL_OK ? "" : ": ",
                st == FL_OK ? "" : why->text);
        give_up(c, &err);
        return;
    }
    fl_timer_arm_in(c->loop, &c->look, SGLANG_LOOK_MS);
}

static void on_look(struct fl_timer *t, uint64_t now_ns)
{
    struct calls *c = container_of(t, struct calls, look);
    struct fl_err err = { 0 };

    (void)now_ns;
    c->looking = (struct http_call){ .done = look_done };
    if (http_go(c, "/model_info", NULL, SGLANG_LOOK_MS, &c->looking, &err) != FL_OK)
        fl_timer_arm_in(c->loop, t, SGLANG_LOOK_MS);
}

static void *calls_run(void *arg)
{
    struct calls *c = arg;

    fl_loop_run(c->loop);
    return NULL;
}

enum fl_status calls_create(struct sglang_server *s, struct calls **out, struct fl_err *err)
{
    FL_AUTO(calls) struct calls *c = calloc(1, sizeof(*c));

    if (!c)
        return fl_fail(err, FL_EXHAUSTED, "no memory for calls");
    pthread_mutex_init(&c->mu, NULL);
    c->server = s;
    c->look.fire = on_look;
    c->wanted.fire = on_wanted;
    c->idle_from = role_now_s();
    FL_TRY(fl_loop_create(NULL, &c->loop, err));
    FL_TRY(http_client_create(c->loop, &c->client, err));
    if (s->pidfd >= 0)
        FL_TRY(fl_watch_create(c->loop, s->pidfd, POLLIN, on_child, c, &c->child, err));
    fl_timer_arm_in(c->loop, &c->look, SGLANG_LOOK_MS);
    fl_timer_arm_in(c->loop, &c->wanted, WANTED_MS);
    errno = FL_FAULT("sglang.thread") ? EAGAIN : pthread_create(&c->thread, NULL, calls_run, c);
    if (errno)
        return fl_fail_errno(err, "a thread for calls");
    c->runs = true;
    *out = FL_TAKE(c);
    return FL_OK;
}

void calls_destroy(struct calls *c)
{
    if (!c)
        return;
    if (c->runs) {
        fl_loop_stop(c->loop);
        (void)pthread_join(c->thread, NULL);
        while (atomic_load(&c->in_flight) && !c->first)
            (void)fl_loop_turn(c->loop, 0); /* posted, and not begun when the loop stopped */
    }
    http_client_destroy(c->client); /* each call in flight comes back and is refused */
    if (c->child)
        fl_watch_destroy(c->child);
    fl_timer_cancel(&c->look);
    fl_timer_cancel(&c->wanted);
    fl_loop_destroy(c->loop);
    pthread_mutex_destroy(&c->mu);
    free(c);
}
