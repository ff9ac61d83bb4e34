/* transport/link/tcp_serve.c - the source's side: sends what peers ask for, straight from memory
 *
 * A stranger may send 40 bytes; only then, with the token that travels in keys, is anything
 * allocated or sent for it. One ask at a time is served on a connection, further ones wait in the
 * socket. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "transport/link/tcp_priv.h"

enum serving_state { SERVING_ASK, SERVING_RUNS, SERVING_SAY, SERVING_BYTES };
struct tcp_serving {
    struct tcp_end end;
    LIST_ENTRY(tcp_serving) next;
    enum serving_state state;
    bool known;        /* has shown the token once */
    uint64_t since_ns; /* accepted */
    struct tcp_ask ask;
    struct tcp_say say;
    size_t at; /* bytes of ask, runs or say that are done */
    struct tcp_run *runs;
    struct link_mem mem;
    uint32_t run, row;
    uint64_t run_at;
};

struct tcp_serving *tcp_serving_of(struct tcp_end *e)
{
    return container_of(e, struct tcp_serving, end);
}

static void serving_close(struct tcp *k, struct tcp_serving *c)
{
    close(c->end.fd);
    LIST_REMOVE(c, next);
    free(c->runs);
    free(c);
    k->n_servings--;
    if (k->accept_paused)
        k->accept_paused = !tcp_watch(k, &k->listener, EPOLLIN, false);
}

void tcp_serve_close_all(struct tcp *k)
{
    for (struct tcp_serving *c; (c = LIST_FIRST(&k->servings));)
        serving_close(k, c);
}

void tcp_serve_late(struct tcp *k, uint64_t now_ns)
{
    struct tcp_serving *c, *next;

    for (c = LIST_FIRST(&k->servings); c; c = next) {
        next = LIST_NEXT(c, next);
        if (!c->known && now_ns - c->since_ns > TCP_CONNECT_MS * 1000000ull)
            serving_close(k, c);
    }
}

void tcp_serve_accept(struct tcp *k)
{
    int one = 1;

    while (k->n_servings < TCP_MAX_CONNS) {
        int fd = accept4(k->listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        struct tcp_serving *c = fd >= 0 ? calloc(1, sizeof(*c)) : NULL;

        if (!c) {
            if (fd >= 0)
                close(fd);
            if (fd < 0 &&
                (errno == EMFILE || errno == ENFILE)) /* until a connection ends, or for good */
                k->accept_paused = tcp_watch(k, &k->listener, 0, false);
            return;
        }
        c->end = (struct tcp_end){ TCP_SERVES, fd };
        c->since_ns = fl_clock_boot_ns();
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        LIST_INSERT_HEAD(&k->servings, c, next);
        k->n_servings++;
        if (!tcp_watch(k, &c->end, EPOLLIN, true))
            serving_close(k, c);
    }
    k->accept_paused = tcp_watch(k, &k->listener, 0, false);
}

static bool token_is(const uint8_t *a, const uint8_t *b)
{
    uint8_t differs = 0;

    for (unsigned i = 0; i < TCP_TOKEN; i++) /* all of it, always: the time tells nothing */
        differs |= a[i] ^ b[i];
    return differs == 0;
}

static void answer(struct tcp_serving *c, enum fl_status st, const char *text)
{
    c->say.magic = TCP_SAY_MAGIC;
    c->say.status = st;
    c->say.id = c->ask.id;
    snprintf(c->say.text, sizeof(c->say.text), "%s", text);
    c->state = SERVING_SAY;
    c->at = 0;
}

/* The ask is here. false: not a peer of ours, close without a word. */
static bool check_ask(struct tcp *k, struct tcp_serving *c)
{
    if (c->ask.magic != TCP_ASK_MAGIC || !token_is(c->ask.token, k->token) || c->ask.n_runs == 0 ||
        c->ask.n_runs > TCP_MAX_RUNS)
        return false;
    c->known = true;
    c->runs = malloc(c->ask.n_runs * sizeof(*c->runs));
    c->state = SERVING_RUNS;
    c->at = 0;
    return c->runs != NULL;
}

static bool run_fits(const struct tcp_run *r, uint64_t room, uint64_t *sum)
{
    uint64_t end, part;

    return r->rows > 0 && r->bytes > 0 && !__builtin_mul_overflow(r->step, r->rows - 1ull, &end) &&
           !__builtin_add_overflow(end, r->off, &end) &&
           !__builtin_add_overflow(end, r->bytes, &end) && end <= room &&
           !__builtin_mul_overflow(r->bytes, r->rows, &part) &&
           !__builtin_add_overflow(*sum, part, sum);
}

static void check_runs(struct tcp *k, struct tcp_serving *c)
{
    struct tcp_region region = { 0 };

    pthread_mutex_lock(&k->lock);
    if (c->ask.region < k->n_regions && k->n_regions - c->ask.region <= TCP_MAX_REGIONS)
        region = k->regions[c->ask.region % TCP_MAX_REGIONS];
    pthread_mutex_unlock(&k->lock);
    c->say.bytes = 0;
    if (!region.mem.bytes) {
        answer(c, FL_NOT_FOUND, "no such region is shared, or not any more");
        return;
    }
    for (uint32_t i = 0; i < c->ask.n_runs; i++)
        if (!run_fits(&c->runs[i], region.mem.bytes, &c->say.bytes)) {
            answer(c, FL_INVALID, "a segment reaches outside of the region");
            return;
        }
    c->mem = region.mem;
    c->run = c->row = 0;
    c->run_at = 0;
    answer(c, FL_OK, "");
}

static int get(struct tcp_serving *c, void *to, size_t all)
{
    ssize_t n = recv(c->end.fd, (char *)to + c->at, all - c->at, 0);

    if (n < 0 && errno == EINTR)
        return 1;
    if (n <= 0)
        return n < 0 && errno == EAGAIN ? 0 : -1;
    c->at += (size_t)n;
    return 1;
}

static int put_say(struct tcp_serving *c)
{
    int more = c->say.status == FL_OK ? MSG_MORE : 0;
    ssize_t n =
        send(c->end.fd, (char *)&c->say + c->at, sizeof(c->say) - c->at, MSG_NOSIGNAL | more);

    if (n < 0)
        return errno == EINTR ? 1 : errno == EAGAIN ? 0 : -1;
    c->at += (size_t)n;
    if (c->at == sizeof(c->say)) {
        c->at = 0;
        c->state = c->say.status == FL_OK ? SERVING_BYTES : SERVING_ASK;
    }
    return 1;
}

static void sent(struct tcp_serving *c, size_t n)
{
    while (n > 0) {
        const struct tcp_run *r = &c->runs[c->run];
        uint64_t part = r->bytes - c->run_at < n ? r->bytes - c->run_at : n;

        n -= part;
        c->run_at += part;
        if (c->run_at < r->bytes)
            return;
        c->run_at = 0;
        if (++c->row == r->rows) {
            c->row = 0;
            c->run++;
        }
    }
}

/* Runs of a device's memory, one after the other in the bounce buffer. What the socket does not
 * take is fetched again. */
static bool fetch(struct tcp *k, const struct tcp_serving *c, struct iovec *iov, unsigned *n,
                  size_t all)
{
    struct link_run runs[TCP_IOV];

    for (unsigned i = 0; i < *n; i++)
        runs[i] = (struct link_run){
            (uint64_t)(uintptr_t)iov[i].iov_base - (uint64_t)(uintptr_t)c->mem.addr, iov[i].iov_len
        };
    if (!tcp_bounce(k) || link_mem_get(&c->mem, runs, *n, k->bounce, NULL) != FL_OK)
        return false;
    iov[0] = (struct iovec){ k->bounce, all };
    *n = 1;
    return true;
}

static int put_bytes(struct tcp *k, struct tcp_serving *c)
{
    struct iovec iov[TCP_IOV];
    size_t all = 0;
    uint32_t run = c->run, row = c->row;
    uint64_t at = c->run_at;
    unsigned n = 0;

    for (; n < TCP_IOV && run < c->ask.n_runs && all < TCP_CALL_BYTES; n++) {
        const struct tcp_run *r = &c->runs[run];
        uint64_t len = r->bytes - at < TCP_CALL_BYTES - all ? r->bytes - at : TCP_CALL_BYTES - all;

        iov[n] = (struct iovec){ (char *)c->mem.addr + r->off + row * r->step + at, len };
        all += len;
        at = 0;
        if (++row == r->rows) {
            row = 0;
            run++;
        }
    }
    if (c->mem.on_device && !fetch(k, c, iov, &n, all)) {
        errno = EIO;
        return -1;
    }
    struct msghdr m = { .msg_iov = iov, .msg_iovlen = n };
    ssize_t done = sendmsg(c->end.fd, &m, MSG_NOSIGNAL);

    if (done < 0)
        return errno == EINTR ? 1 : errno == EAGAIN ? 0 : -1;
    sent(c, (size_t)done);
    if (c->run == c->ask.n_runs) {
        free(c->runs);
        c->runs = NULL;
        c->state = SERVING_ASK;
        c->at = 0;
    }
    return (size_t)done == all; /* less: the socket is full */
}

static int step(struct tcp *k, struct tcp_serving *c)
{
    int st = 1;

    switch (c->state) {
    case SERVING_ASK:
        st = get(c, &c->ask, sizeof(c->ask));
        if (st > 0 && c->at == sizeof(c->ask) && !check_ask(k, c))
            st = -1;
        break;
    case SERVING_RUNS:
        st = get(c, c->runs, c->ask.n_runs * sizeof(*c->runs));
        if (st > 0 && c->at == c->ask.n_runs * sizeof(*c->runs))
            check_runs(k, c);
        break;
    case SERVING_SAY:
        st = put_say(c);
        /* refused: the runs were read, the next ask follows */
        if (st > 0 && c->state == SERVING_ASK) {
            free(c->runs);
            c->runs = NULL;
        }
        break;
    case SERVING_BYTES:
        st = put_bytes(k, c);
        break;
    }
    return st;
}

void tcp_serve_ready(struct tcp *k, struct tcp_serving *c, unsigned events)
{
    enum serving_state before = c->state;
    int st = 1;

    (void)events; /* an error shows in the call */
    for (unsigned i = 0; st > 0 && i < TCP_TURN_CALLS; i++)
        st = step(k, c);
    bool writes = c->state >= SERVING_SAY;

    if (st >= 0 && writes != (before >= SERVING_SAY))
        st = tcp_watch(k, &c->end, writes ? EPOLLOUT : EPOLLIN, false) ? 0 : -1;
    if (st < 0)
        serving_close(k, c);
}
