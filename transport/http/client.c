#include <poll.h>
#include <stdlib.h>

#include "common/base/fault.h"
#include "transport/http/transfer.h"

struct client_sock { /* a socket of curl's, watched while curl wants it */
    struct client_sock *prev, *next;
    struct http_client *client;
    curl_socket_t fd;
    struct fl_watch *watch;
};
struct client_call {
    struct client_call *prev, *next;
    struct http_call *call;
    bool broken; /* its socket cannot be watched */
    struct http_transfer t;
};
struct http_client {
    struct fl_loop *loop;
    CURLM *multi;
    struct fl_timer timer;
    struct client_sock *socks;
    struct client_call *calls;
    unsigned busy; /* callbacks under way: freed by the last one */
    bool dead;
};

static void client_free(struct http_client *c)
{
    while (c->calls)
        http_cancel(c->calls->call);
    curl_multi_cleanup(c->multi); /* closes kept connections: their watches go through on_socket */
    while (c->socks) {
        struct client_sock *s = c->socks;

        c->socks = s->next;
        fl_watch_destroy(s->watch);
        free(s);
    }
    fl_timer_cancel(&c->timer);
    free(c);
}

static void call_end(struct client_call *k, enum fl_status st, const struct fl_err *err)
{
    struct http_call *call = k->call;
    struct http_client *c = call->client;

    curl_multi_remove_handle(c->multi, k->t.easy);
    *(k->prev ? &k->prev->next : &c->calls) = k->next;
    if (k->next)
        k->next->prev = k->prev;
    call->client = NULL;
    call->priv = NULL;
    call->done(call, st, st == FL_OK ? &k->t.answer : NULL, st == FL_OK ? NULL : err);
    http_transfer_fini(&k->t);
    free(k);
}

static void drive(struct http_client *c, curl_socket_t fd, int what)
{
    int left;
    CURLMsg *m;

    c->busy++;
    curl_multi_socket_action(c->multi, fd, what, &left);
    while (!c->dead && (m = curl_multi_info_read(c->multi, &left))) {
        struct client_call *k = NULL;
        struct fl_err err = { 0 };
        CURLcode rc = m->data.result;

        if (m->msg != CURLMSG_DONE)
            continue;
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&k);
        call_end(k, http_transfer_result(&k->t, rc, &err), &err);
    }
    for (struct client_call *k = c->calls; k && !c->dead;) {
        struct fl_err err;

        if (k->broken) {
            fl_fail(&err, FL_EXHAUSTED, "%s: no memory to watch a connection", k->t.ask.url);
            call_end(k, FL_EXHAUSTED, &err);
            k = c->calls; /* done() may have changed the list */
        } else {
            k = k->next;
        }
    }
    if (--c->busy == 0 && c->dead)
        client_free(c);
}

static void on_ready(void *arg, unsigned events)
{
    struct client_sock *s = arg;
    int what = 0;

    what |= events & POLLIN ? CURL_CSELECT_IN : 0;
    what |= events & POLLOUT ? CURL_CSELECT_OUT : 0;
    what |= events & (POLLERR | POLLHUP) ? CURL_CSELECT_ERR : 0;
    drive(s->client, s->fd, what);
}

static void sock_drop(struct client_sock *s)
{
    *(s->prev ? &s->prev->next : &s->client->socks) = s->next;
    if (s->next)
        s->next->prev = s->prev;
    fl_watch_destroy(s->watch);
    free(s);
}

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *arg, void *sock)
{
    struct http_client *c = arg;
    struct client_sock *s = sock;
    unsigned events = (what & CURL_POLL_IN ? POLLIN : 0u) | (what & CURL_POLL_OUT ? POLLOUT : 0u);

    if (what == CURL_POLL_REMOVE) {
        if (s)
            sock_drop(s);
        return 0;
    }
    if (s) {
        fl_watch_events(s->watch, events);
        return 0;
    }
    s = calloc(1, sizeof(*s));
    if (s && fl_watch_create(c->loop, fd, events, on_ready, s, &s->watch, NULL) != FL_OK) {
        free(s);
        s = NULL;
    }
    if (!s) { /* -1 would end every transfer of this client: only this one ends, soon */
        struct client_call *k = NULL;

        curl_easy_getinfo(easy, CURLINFO_PRIVATE, (char **)&k);
        if (k)
            k->broken = true;
        fl_timer_arm_in(c->loop, &c->timer, 0);
        return 0;
    }
    s->client = c;
    s->fd = fd;
    s->next = c->socks;
    if (s->next)
        s->next->prev = s;
    c->socks = s;
    curl_multi_assign(c->multi, fd, s);
    return 0;
}

static void on_timer(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    drive(container_of(t, struct http_client, timer), CURL_SOCKET_TIMEOUT, 0);
}

static int on_timeout(CURLM *multi, long ms, void *arg)
{
    struct http_client *c = arg;

    (void)multi;
    if (ms < 0)
        fl_timer_cancel(&c->timer);
    else
        fl_timer_arm_in(c->loop, &c->timer, (uint64_t)ms);
    return 0;
}

enum fl_status http_client_create(struct fl_loop *l, struct http_client **out, struct fl_err *err)
{
    struct http_client *c = calloc(1, sizeof(*c));

    http_transfer_start();
    if (c)
        c->multi = FL_FAULT("http.multi") ? NULL : curl_multi_init();
    if (!c || !c->multi) {
        free(c);
        return fl_fail(err, FL_EXHAUSTED, "no memory for an HTTP client");
    }
    c->loop = l;
    c->timer.fire = on_timer;
    curl_multi_setopt(c->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    curl_multi_setopt(c->multi, CURLMOPT_SOCKETDATA, c);
    curl_multi_setopt(c->multi, CURLMOPT_TIMERFUNCTION, on_timeout);
    curl_multi_setopt(c->multi, CURLMOPT_TIMERDATA, c);
    *out = c;
    return FL_OK;
}

void http_client_destroy(struct http_client *c)
{
    if (!c || c->dead)
        return;
    c->dead = true;
    while (c->calls)
        http_cancel(c->calls->call);
    if (!c->busy)
        client_free(c);
}

enum fl_status http_start(struct http_client *c, const struct http_ask *ask, struct http_call *call,
                          struct fl_err *err)
{
    struct client_call *k;
    enum fl_status st;

    if (c->dead)
        return fl_fail(err, FL_CANCELLED, "the HTTP client ends");
    k = calloc(1, sizeof(*k));
    if (!k)
        return fl_fail(err, FL_EXHAUSTED, "no memory to ask %s", ask->url);
    st = http_transfer_init(&k->t, ask, true, err);
    if (st != FL_OK) {
        free(k);
        return st;
    }
    k->call = call;
    curl_easy_setopt(k->t.easy, CURLOPT_PRIVATE, k);
    if (curl_multi_add_handle(c->multi, k->t.easy) != CURLM_OK) {
        http_transfer_fini(&k->t);
        free(k);
        return fl_fail(err, FL_EXHAUSTED, "no memory to ask %s", ask->url);
    }
    k->next = c->calls;
    if (k->next)
        k->next->prev = k;
    c->calls = k;
    call->client = c;
    call->priv = k;
    return FL_OK;
}

void http_cancel(struct http_call *call)
{
    struct fl_err err;

    if (!call->client)
        return;
    fl_fail(&err, FL_CANCELLED, "the request was cancelled");
    call_end(call->priv, FL_CANCELLED, &err);
}
