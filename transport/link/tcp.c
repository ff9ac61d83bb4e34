/* transport/link/tcp.c - between machines: the receiver asks, the source's thread sends from
 * memory */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <signal.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/link/tcp_priv.h"

enum {
    TCP_BYTES_PER_US = 1000,
    TCP_START_NS = 200000, /* 10 GbE; connection and first answer */
    TCP_LOOK_MS = 500
};                                /* how often the thread looks for what is late */
enum { VIEW_MAGIC = 0x76637466 }; /* "ftcv": link_mem.impl of what map() gave */
struct tcp_view {
    uint32_t magic, pad;
    struct tcp_key key;
};

static bool tcp_reaches(const struct link_place *a, const struct link_place *b,
                        struct fl_err *why_not)
{
    if (a->addr[0] && b->addr[0])
        return true;
    fl_fail(why_not, FL_UNREACHABLE, "no address on %s side", a->addr[0] ? "the other" : "this");
    return false;
}

/* Of a device: through one pinned buffer at either end, which each waits for. */
static uint64_t tcp_cost_ns(const struct link_place *from, const struct link_place *to,
                            uint64_t bytes)
{
    unsigned ends = (from->gpu_uuid[0] != 0) + (to->gpu_uuid[0] != 0);

    return TCP_START_NS + bytes * 1000 / TCP_BYTES_PER_US * (2 + ends) / 2;
}

bool tcp_bounce(struct tcp *k)
{
    if (!k->bounce)
        k->bounce = malloc(TCP_CALL_BYTES);
    return k->bounce != NULL;
}

/* ---- the thread ---- */

bool tcp_watch(struct tcp *k, struct tcp_end *e, unsigned events, bool first)
{
    struct epoll_event ev = { .events = events, .data = { .ptr = e } };

    return epoll_ctl(k->epoll, first ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, e->fd, &ev) == 0;
}

void tcp_pull_over(struct tcp *k, struct tcp_pull *p)
{
    p->op->bytes = p->arrived;
    p->op->took_ns = fl_clock_boot_ns() - p->began_ns;
    pthread_mutex_lock(&k->lock);
    STAILQ_INSERT_TAIL(&k->over, p, next);
    pthread_mutex_unlock(&k->lock);
    fl_post(k->base.loop, &k->back);
}

static bool take_orders(struct tcp *k, struct tcp_pulls *asked)
{
    uint64_t n;

    if (read(k->wake.fd, &n, sizeof(n)) < 0 && errno != EAGAIN)
        abort(); /* an eventfd of ours cannot fail otherwise */
    pthread_mutex_lock(&k->lock);
    STAILQ_CONCAT(asked, &k->asked);
    bool stop = k->stop;

    pthread_mutex_unlock(&k->lock);
    return !stop;
}

static bool thread_turn(struct tcp *k, uint64_t *looked_ns)
{
    struct epoll_event ev[32];
    struct tcp_pulls asked = STAILQ_HEAD_INITIALIZER(asked);
    int n = epoll_wait(k->epoll, ev, FL_LEN(ev), TCP_LOOK_MS);
    bool go_on = true;

    /* Orders last: nothing that they close may still be in ev. */
    for (int i = 0; i < n; i++) {
        struct tcp_end *e = ev[i].data.ptr;

        if (e->kind == TCP_WAKE)
            go_on = take_orders(k, &asked);
        else if (e->kind == TCP_LISTENS)
            tcp_serve_accept(k);
        else if (e->kind == TCP_SERVES)
            tcp_serve_ready(k, tcp_serving_of(e), ev[i].events);
        else
            tcp_take_ready(k, tcp_taking_of(e), ev[i].events);
    }
    for (struct tcp_pull *p; (p = STAILQ_FIRST(&asked));) {
        STAILQ_REMOVE_HEAD(&asked, next);
        tcp_take_start(k, p);
    }
    uint64_t now_ns = fl_clock_boot_ns();

    if (now_ns - *looked_ns > TCP_LOOK_MS * 1000000ull) {
        *looked_ns = now_ns;
        tcp_take_late(k, now_ns);
        tcp_serve_late(k, now_ns);
    }
    return go_on;
}

static void *thread_main(void *arg)
{
    struct tcp *k = arg;
    uint64_t looked_ns = fl_clock_boot_ns();

    while (thread_turn(k, &looked_ns))
        ;
    tcp_take_close_all(k);
    tcp_serve_close_all(k);
    fl_post(k->base.loop, &k->back); /* quiet, if somebody waits for it */
    return NULL;
}

/* ---- the loop ---- */

static void wake(struct tcp *k)
{
    uint64_t one = 1;

    if (write(k->wake.fd, &one, sizeof(one)) < 0)
        abort(); /* counts to 2^64 */
}

static struct tcp_pull *next_over(struct tcp *k)
{
    pthread_mutex_lock(&k->lock);
    struct tcp_pull *p = STAILQ_FIRST(&k->over);

    if (p)
        STAILQ_REMOVE_HEAD(&k->over, next);
    pthread_mutex_unlock(&k->lock);
    return p;
}

static void tcp_release(struct tcp *k)
{
    if (k->epoll >= 0)
        close(k->epoll);
    if (k->wake.fd >= 0)
        close(k->wake.fd);
    if (k->listener.fd >= 0)
        close(k->listener.fd);
    pthread_mutex_destroy(&k->lock);
    free(k->bounce);
    free(k);
}

/* A callback may close the link; then the last delivery under way lets it go. */
static void deliver(struct tcp *k)
{
    struct tcp_pull *p;

    k->delivering++;
    while ((p = next_over(k))) {
        struct link_op *op = p->op;

        free(p);
        k->n_pulls--;
        fl_loop_release(k->base.loop);
        op->done(op);
    }
    if (--k->delivering == 0 && k->closed)
        tcp_release(k);
}

/* The thread closes all and leaves; joining it takes one turn of it at most. Asked pulls that it
 * never saw come back as the others do. */
static void end_thread(struct tcp *k)
{
    if (k->joined)
        return;
    pthread_mutex_lock(&k->lock);
    k->stop = true;
    pthread_mutex_unlock(&k->lock);
    wake(k);
    pthread_join(k->thread, NULL);
    k->joined = true;
    for (struct tcp_pull *p; (p = STAILQ_FIRST(&k->asked));) {
        STAILQ_REMOVE_HEAD(&k->asked, next);
        link_op_set(p->op, FL_CANCELLED, "tcp: the link was ended");
        STAILQ_INSERT_TAIL(&k->over, p, next);
    }
}

static void tcp_back(struct fl_task *t)
{
    struct tcp *k = container_of(t, struct tcp, back);
    struct link_op *quiet = FL_TAKE(k->quiet);

    if (quiet) /* all have come back before it does */
        end_thread(k);
    if (quiet)
        link_tell_quiet(&k->base, quiet);
    deliver(k); /* last: a callback may close the link */
}

static enum fl_status listen_at(struct tcp *k, struct fl_err *err)
{
    struct addrinfo *a,
        how = { .ai_flags = AI_NUMERICHOST | AI_PASSIVE, .ai_socktype = SOCK_STREAM };
    struct sockaddr_storage is;
    socklen_t len = sizeof(is);

    if (getaddrinfo(k->addr, NULL, &how, &a) != 0)
        return fl_fail(err, FL_INVALID, "tcp: \"%s\" is not a numeric address", k->addr);
    k->listener.fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool ok = k->listener.fd >= 0 && !FL_FAULT("link.tcp.listen") &&
              bind(k->listener.fd, a->ai_addr, a->ai_addrlen) == 0 &&
              listen(k->listener.fd, 256) == 0 &&
              getsockname(k->listener.fd, (struct sockaddr *)&is, &len) == 0;
    int e = errno;

    freeaddrinfo(a);
    errno = e;
    if (!ok)
        return fl_fail_errno(err, "tcp: listen at %s", k->addr);
    k->port = ntohs(is.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)(void *)&is)->sin6_port
                                             : ((struct sockaddr_in *)(void *)&is)->sin_port);
    return FL_OK;
}

static enum fl_status start_thread(struct tcp *k, struct fl_err *err)
{
    sigset_t all, was;

    k->epoll = epoll_create1(EPOLL_CLOEXEC);
    k->wake.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (k->epoll < 0 || k->wake.fd < 0 ||
        getrandom(k->token, sizeof(k->token), 0) != sizeof(k->token) ||
        !tcp_watch(k, &k->wake, EPOLLIN, true) || !tcp_watch(k, &k->listener, EPOLLIN, true))
        return fl_fail_errno(err, "tcp: start at %s", k->addr);
    sigfillset(&all); /* signals are the program's, not this thread's */
    pthread_sigmask(SIG_SETMASK, &all, &was);
    int e = FL_FAULT("link.tcp.thread") ? EAGAIN : pthread_create(&k->thread, NULL, thread_main, k);

    pthread_sigmask(SIG_SETMASK, &was, NULL);
    return e ? fl_fail(err, FL_EXHAUSTED, "tcp: no thread: %s", strerror(e)) : FL_OK;
}

static enum fl_status tcp_open_link(struct fl_loop *l, const struct link_team *team,
                                    struct link **out, struct link_op *ready, struct fl_err *err)
{
    struct tcp *k = team->self < team->n ? calloc(1, sizeof(*k)) : NULL;

    if (!k)
        return fl_fail(err, team->self < team->n ? FL_EXHAUSTED : FL_INVALID,
                       "tcp: member %u of a team of %u", team->self, team->n);
    k->base.loop = l;
    k->epoll = k->wake.fd = k->listener.fd = -1;
    k->wake.kind = TCP_WAKE;
    k->listener.kind = TCP_LISTENS;
    k->back.run = tcp_back;
    pthread_mutex_init(&k->lock, NULL);
    STAILQ_INIT(&k->asked);
    STAILQ_INIT(&k->over);
    LIST_INIT(&k->servings);
    LIST_INIT(&k->takings);
    fl_copy(k->addr, sizeof(k->addr), team->members[team->self].addr);
    enum fl_status st = listen_at(k, err);

    if (st == FL_OK)
        st = start_thread(k, err);
    if (st != FL_OK) {
        tcp_release(k);
        return st;
    }
    *out = &k->base;
    link_tell_ready(&k->base, ready);
    return FL_OK;
}

/* With the lock held. The oldest gives its place up: a line lives for many epochs, and memory comes
 * and goes. What is at an address that was shared before may be another's by now. */
static uint64_t region_note(struct tcp *k, const struct link_mem *mine)
{
    uint64_t id = k->n_regions > TCP_MAX_REGIONS ? k->n_regions - TCP_MAX_REGIONS : 0;

    for (; id < k->n_regions; id++) {
        struct link_mem *m = &k->regions[id % TCP_MAX_REGIONS].mem;

        if (m->addr != mine->addr || m->bytes != mine->bytes)
            continue;
        *m = *mine;
        return id;
    }
    k->regions[id % TCP_MAX_REGIONS] = (struct tcp_region){ *mine };
    k->n_regions++;
    return id;
}

static enum fl_status tcp_share(struct link *base, const struct link_mem *mine,
                                struct link_key *out, struct fl_err *err)
{
    struct tcp *k = container_of(base, struct tcp, base);
    struct tcp_key key = { .magic = TCP_KEY_MAGIC, .bytes = mine->bytes, .port = k->port };

    if (mine->on_device && !link_pages_of(mine))
        return fl_fail(err, FL_INVALID, "tcp: memory at %p: nobody said on which device it is",
                       mine->addr);
    pthread_mutex_lock(&k->lock);
    key.region = region_note(k, mine);
    pthread_mutex_unlock(&k->lock);
    memcpy(key.token, k->token, sizeof(key.token));
    memcpy(key.addr, k->addr, sizeof(key.addr));
    memset(out->blob, 0, sizeof(out->blob));
    memcpy(out->blob, &key, sizeof(key));
    out->parts = 1;
    out->n_fds = 0;
    return FL_OK;
}

static void tcp_unmap(struct link *base, struct link_mem *theirs)
{
    (void)base;
    free(theirs->impl); /* pulls in flight have their copy of the key */
    *theirs = (struct link_mem){ 0 };
}

/* Nothing is mapped: addr stays NULL, and pull() knows from whom. */
static enum fl_status tcp_map(struct link *base, const struct link_key *theirs, bool writable,
                              struct link_mem *out, struct fl_err *err)
{
    struct tcp_view *v = malloc(sizeof(*v));

    if (theirs->part)
        tcp_unmap(base, out);
    if (!v)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a view");
    *v = (struct tcp_view){ .magic = VIEW_MAGIC };
    memcpy(&v->key, theirs->blob, sizeof(v->key));
    if (writable || v->key.magic != TCP_KEY_MAGIC || theirs->n_fds != 0 || theirs->part ||
        !memchr(v->key.addr, 0, sizeof(v->key.addr))) {
        free(v);
        return fl_fail(err, writable ? FL_UNSUPPORTED : FL_CORRUPT,
                       writable ? "tcp: nobody writes over it" : "not a key of a tcp link");
    }
    *out = (struct link_mem){ .bytes = v->key.bytes, .impl = v };
    return FL_OK;
}

static enum fl_status tcp_pull(struct link *base, const struct link_mem *theirs,
                               const struct link_mem *mine, const struct link_seg *segs, size_t n,
                               uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    struct tcp *k = container_of(base, struct tcp, base);
    const struct tcp_view *v = theirs->impl;
    uint64_t bytes;

    if (k->stop) /* written by this thread alone */
        return fl_fail(err, FL_CANCELLED, "tcp: the link was aborted");
    if (!v || v->magic != VIEW_MAGIC)
        return fl_fail(err, FL_INVALID, "tcp: not memory that this link has mapped");
    if (k->n_pulls >= TCP_MAX_PULLS)
        return fl_fail(err, FL_AGAIN, "tcp: %u pulls are in flight", k->n_pulls);
    if (n == 0 || n > TCP_MAX_RUNS)
        return fl_fail(err, FL_INVALID, "tcp: a pull of %zu segments; 1 to %d can be", n,
                       TCP_MAX_RUNS);
    FL_TRY(link_check_segs(segs, n, theirs->bytes, mine->bytes, &bytes, err));
    struct tcp_pull *p = malloc(sizeof(*p));

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a pull");
    *p = (struct tcp_pull){ .op = op,
                            .from = v->key,
                            .to = *mine,
                            .segs = segs,
                            .n = n,
                            .digests = digests,
                            .bytes = bytes,
                            .id = k->next_id++,
                            .began_ns = fl_clock_boot_ns() };
    k->n_pulls++;
    fl_loop_hold(base->loop);
    pthread_mutex_lock(&k->lock);
    STAILQ_INSERT_TAIL(&k->asked, p, next);
    pthread_mutex_unlock(&k->lock);
    wake(k);
    return FL_OK;
}

static void tcp_abort(struct link *base, struct link_op *quiet)
{
    struct tcp *k = container_of(base, struct tcp, base);

    if (k->joined) {
        link_tell_quiet(base, quiet);
        return;
    }
    k->quiet = quiet;
    pthread_mutex_lock(&k->lock);
    k->stop = true;
    pthread_mutex_unlock(&k->lock);
    wake(k); /* it closes all, and posts */
}

static void tcp_close(struct link *base)
{
    struct tcp *k = container_of(base, struct tcp, base);

    end_thread(k);
    fl_task_cancel(base->loop, &k->back);
    k->delivering++; /* the link stays until the last line */
    deliver(k);
    if (k->quiet)
        link_tell_quiet(base, FL_TAKE(k->quiet));
    link_tell_now(base);
    k->closed = true;
    if (--k->delivering == 0)
        tcp_release(k);
}

const struct link_ops link_tcp = {
    .name = "tcp",
    .caps = LINK_HOST | LINK_DEVICE | LINK_PULL | LINK_SEGS | LINK_ALONE,
    .reaches = tcp_reaches,
    .cost_ns = tcp_cost_ns,
    .ticket = link_no_ticket,
    .open = tcp_open_link,
    .share = tcp_share,
    .map = tcp_map,
    .unmap = tcp_unmap,
    .pull = tcp_pull,
    .send = link_no_send,
    .recv = link_no_recv,
    .cast = link_no_cast,
    .cast_segs = link_no_cast_segs,
    .progress = link_no_progress,
    .event_fd = link_no_event_fd,
    .abort = tcp_abort,
    .close = tcp_close,
};
