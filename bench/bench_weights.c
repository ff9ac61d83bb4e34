/* bench/bench_weights.c - moving a model's weights over host memory, against what the machine can
 * do
 *
 * The tensors of Qwen3-0.6B (310, 1.19 GB in bf16) go from a trainer's slot to an engine's: by
 * plan, buckets and link, as an update does. Each line has the limit, measured in turns with it in
 * the same run, and the ratio.
 *
 *     bench_weights [--quick] [--rounds N]
 *
 * ms are medians of the rounds after warm-up. Exit 1: bytes or digests were wrong. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "bench/median.h"
#include "bench/must.h"
#include "bench/shapes.h"
#include "common/base/loop.h"
#include "transport/xfer/plan.h"

enum { MAX_ROUNDS = 64, WARM_UP = 3, IN_FLIGHT = 4, CALL_BYTES = 1 << 20 };

struct bench {
    struct fl_loop *loop;
    struct xfer_tensor tensors[SHAPES_MAX];
    struct xfer_piece pieces[SHAPES_MAX];
    struct shape_tensor shapes[SHAPES_MAX];
    size_t n;
    uint64_t bytes, moved;
    struct xfer_manifest source, engine;
    struct link_place places[2];
    struct link_mem src, dst;
    unsigned rounds;
    bool wrong;
};

static double now_s(void)
{
    return (double)fl_clock_boot_ns() / 1e9;
}

/* ---- the model ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct xfer_tensor *)a)->name, ((const struct xfer_tensor *)b)->name);
}

static void model(struct bench *b, const struct shape *s)
{
    b->n = shape_each(s, b->shapes);
    for (size_t i = 0; i < b->n; i++) {
        const struct shape_tensor *t = &b->shapes[i];

        b->tensors[i] = (struct xfer_tensor){ .name = t->name,
                                              .dtype = FL_BF16,
                                              .ndim = t->columns ? 2 : 1,
                                              .shape = { t->rows, t->columns } };
    }
    qsort(b->tensors, b->n, sizeof(b->tensors[0]), by_name);
    for (uint32_t i = 0; i < b->n; i++) {
        b->pieces[i] = (struct xfer_piece){ i, 0, b->bytes, xfer_box_whole(&b->tensors[i]) };
        b->moved += xfer_tensor_bytes(&b->tensors[i]);
        b->bytes += (xfer_tensor_bytes(&b->tensors[i]) + XFER_ALIGN - 1) / XFER_ALIGN * XFER_ALIGN;
    }
    b->source = (struct xfer_manifest){ .tensors = b->tensors,
                                        .pieces = b->pieces,
                                        .mem_bytes = &b->bytes,
                                        .n_tensors = b->n,
                                        .n_pieces = b->n,
                                        .n_mems = 1 };
    b->engine = b->source;
    b->engine.who.id.b[0] = 1;
}

static void memories(struct bench *b)
{
    struct fl_err err = { 0 };
    uint64_t x = 88172645463325252ull;

    must(xfer_manifest_seal(&b->source, &err));
    must(xfer_manifest_seal(&b->engine, &err));
    must(link_place_here(NULL, &b->places[0], &err));
    b->places[1] = b->places[0];
    must(link_mem_alloc(b->bytes, &b->src, &err));
    must(link_mem_alloc(b->bytes, &b->dst, &err));
    for (uint64_t i = 0; i + 8 <= b->bytes; i += 8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        memcpy((char *)b->src.addr + i, &x, 8);
    }
    memset(b->dst.addr, 0, b->bytes);
}

/* ---- limits ---- */

static double run_memcpy(struct bench *b)
{
    double began = now_s();

    for (size_t i = 0; i < b->n; i++)
        memcpy((char *)b->dst.addr + b->pieces[i].off, (char *)b->src.addr + b->pieces[i].off,
               xfer_tensor_bytes(&b->tensors[i]));
    return now_s() - began;
}

struct raw {
    int fd;
    const char *from;
    uint64_t bytes;
};

static void *raw_send(void *arg)
{
    const struct raw *r = arg;

    for (uint64_t at = 0; at < r->bytes;) {
        size_t n = r->bytes - at < CALL_BYTES ? r->bytes - at : CALL_BYTES;
        ssize_t sent = send(r->fd, r->from + at, n, MSG_NOSIGNAL);

        if (sent <= 0)
            break;
        at += (uint64_t)sent;
    }
    return NULL;
}

static void tcp_pair(int fds[2])
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof(a);
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;

    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(l, (struct sockaddr *)&a, len) < 0 || listen(l, 1) < 0 ||
        getsockname(l, (struct sockaddr *)&a, &len) < 0 ||
        connect(fds[0], (struct sockaddr *)&a, len) < 0 || (fds[1] = accept(l, NULL, NULL)) < 0)
        die("a socket pair", NULL);
    setsockopt(fds[0], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    close(l);
}

/* One thread sends, one receives, over TCP on loopback. */
static double run_raw(struct bench *b, int fds[2])
{
    struct raw r = { fds[0], b->src.addr, b->bytes };
    double began = now_s();
    pthread_t thread;

    if (pthread_create(&thread, NULL, raw_send, &r) != 0)
        die("a thread", NULL);
    for (uint64_t at = 0; at < b->bytes;) {
        size_t n = b->bytes - at < CALL_BYTES ? b->bytes - at : CALL_BYTES;
        ssize_t got = recv(fds[1], (char *)b->dst.addr + at, n, 0);

        if (got <= 0)
            die("a socket's other end", NULL);
        at += (uint64_t)got;
    }
    double took = now_s() - began;

    pthread_join(thread, NULL);
    return took;
}

/* ---- an update ---- */

struct ends { /* both sides of a link, and the plan that it carries */
    const struct link_ops *ops;
    struct link *from, *to;
    struct link_mem view;
    struct xfer_plan *plan;
    uint64_t (*digests)[2];
    unsigned back;
};
struct moving {
    struct link_op op;
    struct ends *e;
    enum fl_status st;
};

static void on_back(struct link_op *op)
{
    struct moving *m = container_of(op, struct moving, op);

    if (op->err.status != FL_OK)
        die(m->e->ops->name, &op->err);
    m->e->back++;
}

static void open_link(struct bench *b, struct ends *e, unsigned self, struct link **out)
{
    struct link_team team = { .members = b->places, .n = 2, .self = self };
    struct moving m = { .op = { .done = on_back }, .e = e };
    struct fl_err err = { 0 };
    unsigned before = e->back;

    must(e->ops->open(b->loop, &team, out, &m.op, &err));
    while (e->back == before)
        fl_loop_turn(b->loop, 100);
}

static void open_ends(struct bench *b, struct ends *e, const struct link_ops *ops,
                      enum xfer_mode mode)
{
    struct xfer_plan_in in = { .sources = &b->source,
                               .engines = &b->engine,
                               .places = b->places,
                               .n_sources = 1,
                               .n_engines = 1,
                               .mode = mode,
                               .spare_bytes = XFER_NO_LIMIT,
                               .links = &ops,
                               .n_links = 1 };
    struct link_key key = { 0 };
    struct fl_err err = { 0 };

    *e = (struct ends){ .ops = ops };
    must(xfer_plan_make(&in, &e->plan, &err));
    e->digests = calloc(e->plan->n_segs, sizeof(*e->digests));
    open_link(b, e, 0, &e->from);
    open_link(b, e, 1, &e->to);
    must(ops->share(e->from, &b->src, &key, &err));
    must(ops->map(e->to, &key, false, &e->view, &err));
}

static void close_ends(struct ends *e)
{
    e->ops->unmap(e->to, &e->view);
    e->ops->close(e->to);
    e->ops->close(e->from);
    xfer_plan_destroy(e->plan);
    free(e->digests);
}

static double run_plan(struct bench *b, struct ends *e, bool digests)
{
    struct moving ops[IN_FLIGHT];
    unsigned first = e->back, n = (unsigned)e->plan->n_buckets, started = 0;
    double began = now_s();

    if (digests)
        memset(e->digests, 0, e->plan->n_segs * sizeof(*e->digests));
    while (e->back - first < n) {
        while (started < n && started - (e->back - first) < IN_FLIGHT) {
            const struct xfer_bucket *bk = &e->plan->buckets[started];
            struct moving *m = &ops[started % IN_FLIGHT];
            struct fl_err err = { 0 };

            *m = (struct moving){ .op = { .done = on_back }, .e = e };
            must(e->ops->pull(e->to, &e->view, &b->dst, e->plan->segs + bk->first_seg, bk->n_segs,
                              digests ? e->digests + bk->first_seg : NULL, &m->op, &err));
            started++;
        }
        fl_loop_turn(b->loop, 100);
    }
    return now_s() - began;
}

static void check(struct bench *b, struct ends *e, bool digests, const char *what)
{
    uint64_t sums[SHAPES_MAX][2] = { { 0 } };

    for (size_t i = 0; i < b->n; i++)
        if (memcmp((char *)b->dst.addr + b->pieces[i].off, (char *)b->src.addr + b->pieces[i].off,
                   xfer_tensor_bytes(&b->tensors[i])) != 0)
            b->wrong = true;
    for (size_t i = 0; i < e->plan->n_segs && digests; i++) {
        sums[e->plan->segs[i].tensor][0] += e->digests[i][0];
        sums[e->plan->segs[i].tensor][1] += e->digests[i][1];
    }
    for (size_t i = 0; i < b->n && digests; i++) {
        uint64_t want[2] = { 0 };

        xfer_digest_piece(want, &b->tensors[i], &b->pieces[i].box,
                          (char *)b->src.addr + b->pieces[i].off);
        if (memcmp(want, sums[i], sizeof(want)) != 0)
            b->wrong = true;
    }
    if (b->wrong)
        fprintf(stderr, "bench_weights: %s moved wrong bytes\n", what);
    memset(b->dst.addr, 0, b->bytes);
}

/* ---- figures ---- */

/* Sorts: best first. */
static const double *sorted(double *t, unsigned n)
{
    qsort(t, n, sizeof(*t), median_order);
    return t;
}

/* ratio is of the medians, ratio_best of the best rounds: on a machine that does other things too
 * the second says what this code can do, so the goal is held against it. */
static void line(const struct bench *b, const char *mode, const char *link, bool digests,
                 const double *s, const char *limit, const double *limit_s, double goal)
{
    unsigned mid = b->rounds / 2;

    printf("{\"bench\":\"weights\",\"mode\":\"%s\",\"link\":\"%s\",\"digests\":%s,\"tensors\":%zu,"
           "\"bytes\":%llu,"
           "\"rounds\":%u,\"ms\":%.3f,\"best_ms\":%.3f,\"gb_per_s\":%.2f,\"limit\":\"%s\",\"limit_"
           "ms\":%.3f,"
           "\"limit_best_ms\":%.3f,\"limit_gb_per_s\":%.2f,\"ratio\":%.3f,\"ratio_best\":%.3f,"
           "\"goal\":%.2f,\"met\":%s}\n",
           mode, link, digests ? "true" : "false", b->n, (unsigned long long)b->moved, b->rounds,
           s[mid] * 1e3, s[0] * 1e3, (double)b->moved / s[mid] / 1e9, limit, limit_s[mid] * 1e3,
           limit_s[0] * 1e3, (double)b->moved / limit_s[mid] / 1e9, limit_s[mid] / s[mid],
           limit_s[0] / s[0], goal, limit_s[0] / s[0] >= goal ? "true" : "false");
    fflush(stdout);
}

/* For work that moves nothing: against a millisecond. */
static void line_ms(const struct bench *b, const char *mode, const char *link, const double *s)
{
    unsigned mid = b->rounds / 2;

    printf("{\"bench\":\"weights\",\"mode\":\"%s\",\"link\":\"%s\",\"tensors\":%zu,\"bytes\":%llu,"
           "\"rounds\":%u,"
           "\"ms\":%.3f,\"best_ms\":%.3f,\"limit\":\"1 "
           "ms\",\"limit_ms\":1,\"ratio\":%.3f,\"ratio_best\":%.3f,"
           "\"goal\":1.00,\"met\":%s}\n",
           mode, link, b->n, (unsigned long long)b->moved, b->rounds, s[mid] * 1e3, s[0] * 1e3,
           1e-3 / s[mid], 1e-3 / s[0], s[0] <= 1e-3 ? "true" : "false");
    fflush(stdout);
}

/* Limit, plain and with digests in turns, so that what else the machine does meets all of them
 * alike. */
static void measure(struct bench *b, const struct link_ops *ops, enum xfer_mode mode,
                    const char *limit, double goal, double goal_digests)
{
    double lim[MAX_ROUNDS], plain[MAX_ROUNDS], sums[MAX_ROUNDS];
    struct ends e;
    int fds[2] = { -1, -1 };

    open_ends(b, &e, ops, mode);
    if (ops == &link_tcp)
        tcp_pair(fds);
    for (unsigned r = 0; r < WARM_UP + b->rounds; r++) {
        unsigned at = r < WARM_UP ? 0 : r - WARM_UP;

        lim[at] = ops == &link_tcp ? run_raw(b, fds) : run_memcpy(b);
        plain[at] = run_plan(b, &e, false);
        if (r == 0)
            check(b, &e, false, ops->name);
        sums[at] = run_plan(b, &e, true);
        if (r == 0 || r == WARM_UP + b->rounds - 1)
            check(b, &e, true, ops->name);
    }
    const double *limit_s = sorted(lim, b->rounds);

    line(b, xfer_mode_name(mode), ops->name, false, sorted(plain, b->rounds), limit, limit_s, goal);
    line(b, xfer_mode_name(mode), ops->name, true, sorted(sums, b->rounds), limit, limit_s,
         goal_digests);
    if (fds[0] >= 0) {
        close(fds[0]);
        close(fds[1]);
    }
    close_ends(&e);
}

/* Shared pages: what an update costs is the exchange of pointers, read through the plan; mapping is
 * done once. */
static void measure_share(struct bench *b)
{
    double took[MAX_ROUNDS];
    const void *pointers[SHAPES_MAX];
    volatile char sum = 0;
    struct ends e;

    open_ends(b, &e, &link_shm, XFER_SHARE);
    for (unsigned r = 0; r < b->rounds; r++) {
        struct link_key key = { 0 };
        struct link_mem view;
        struct fl_err err = { 0 };
        double began = now_s();

        must(e.ops->share(e.from, &b->src, &key, &err));
        must(e.ops->map(e.to, &key, false, &view, &err));
        for (size_t i = 0; i < e.plan->n_segs; i++)
            pointers[e.plan->segs[i].tensor] = (char *)view.addr + e.plan->segs[i].from_off;
        took[r] = now_s() - began;
        for (size_t i = 0; i < b->n; i++) {
            sum = (char)(sum + *(const char *)pointers[i]);
            b->wrong =
                b->wrong || memcmp(pointers[i], (char *)b->src.addr + b->pieces[i].off, 64) != 0;
        }
        e.ops->unmap(e.to, &view);
    }
    line_ms(b, "share", "shm", sorted(took, b->rounds));
    close_ends(&e);
}

static void measure_plan(struct bench *b)
{
    struct xfer_plan_in in = { .sources = &b->source,
                               .engines = &b->engine,
                               .places = b->places,
                               .n_sources = 1,
                               .n_engines = 1,
                               .mode = XFER_COPY,
                               .spare_bytes = XFER_NO_LIMIT };
    struct fl_err err = { 0 };
    double t[MAX_ROUNDS];

    for (unsigned r = 0; r < b->rounds; r++) {
        struct xfer_plan *p;
        double began = now_s();

        must(xfer_plan_make(&in, &p, &err));
        t[r] = now_s() - began;
        xfer_plan_destroy(p);
    }
    line_ms(b, "plan", "none", sorted(t, b->rounds));
}

int main(int argc, char **argv)
{
    static struct bench b = { .rounds = 11 };
    const struct shape *s = &shape_06;
    struct fl_err err = { 0 };

    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--quick") == 0) {
            s = &shape_tiny;
            b.rounds = 3;
        } else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc && atoi(argv[i + 1]) > 0 &&
                   atoi(argv[i + 1]) <= MAX_ROUNDS) {
            b.rounds = (unsigned)atoi(argv[++i]);
        } else {
            fprintf(stderr, "usage: bench_weights [--quick] [--rounds 1..%d]\n", MAX_ROUNDS);
            return 2;
        }
    must(fl_loop_create(NULL, &b.loop, &err));
    model(&b, s);
    memories(&b);
    measure_plan(&b);
    measure_share(&b);
    measure(&b, &link_shm, XFER_COPY, "memcpy on one thread, copies run on two", 0.9, 0.6);
    measure(&b, &link_tcp, XFER_P2P, "socket pair, one thread each", 0.9, 0.6);
    fl_loop_destroy(b.loop);
    link_mem_free(&b.src);
    link_mem_free(&b.dst);
    return b.wrong ? 1 : 0;
}
