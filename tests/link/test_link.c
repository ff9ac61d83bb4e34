/* one suite over every link, and over one that has a bad day; then what each kind alone must refuse
 */
#include <errno.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "kernels/digest.h"
#include "common/base/str.h"
#include "tests/link/wait.h"
#include "tests/t.h"
#include "transport/link/dev.h"
#include "transport/link/lossy.h"
#include "transport/link/tcp_priv.h"

/* On the fake a device's memory is ordinary memory, so the suite looks at it as at the host's. */
struct kind {
    const struct link_ops *ops;
    bool on_device;
};
static struct kind kinds[8];
static size_t n_kinds;
static struct gpu_info device;

static enum fl_status mem_new(const struct kind *k, uint64_t bytes, struct link_mem *out,
                              struct fl_err *err)
{
    return k->on_device ? link_dev_alloc(device.uuid, bytes, out, err)
                        : link_mem_alloc(bytes, out, err);
}

static void mem_drop(struct link_mem *m)
{
    if (m->on_device)
        link_dev_free(m);
    else
        link_mem_free(m);
}

static void place_of(const struct kind *k, struct link_place *out)
{
    struct fl_err err = { 0 };
    struct gpu_found found = {
        .info = device, .opens = true, .fd_shares = true, .handle_shares = true
    };

    t_ok(link_place_here(NULL, out, &err), &err);
    if (k->on_device)
        t_ok(link_place_device(out, device.uuid, &found, 1, &err), &err);
}

/* A source and a receiver on one loop, one memory each. */
struct pair {
    const struct link_ops *ops;
    struct fl_loop *loop;
    struct link_place places[2];
    struct link *from, *to;
    struct link_mem src, dst, view;
};

static void open_one(struct pair *p, unsigned self, struct link **out)
{
    struct link_team team = { .members = p->places, .n = 2, .self = self };
    struct wait w = wait_for();
    struct fl_err err = { 0 };

    t_ok(p->ops->ticket(team.ticket, &err), &err);
    t_ok(p->ops->open(p->loop, &team, out, &w.op, &err), &err);
    t_int_eq(w.times, 0, "ready comes through the loop");
    t_until(p->loop, w.times == 1, 5000);
    t_ok(w.op.err.status, &w.op.err);
}

static void pair_open_kind(struct pair *p, const struct kind *k, uint64_t bytes)
{
    const struct link_ops *ops = k->ops;
    struct fl_err err = { 0 };
    struct link_key key = { 0 };
    uint64_t seed = 5;

    *p = (struct pair){ .ops = ops };
    t_ok(fl_loop_create(NULL, &p->loop, &err), &err);
    place_of(k, &p->places[0]);
    p->places[1] = p->places[0];
    t_true(ops->reaches(&p->places[0], &p->places[1], &err), "%s", err.text);
    open_one(p, 0, &p->from);
    open_one(p, 1, &p->to);
    t_ok(mem_new(k, bytes, &p->src, &err), &err);
    t_ok(mem_new(k, bytes, &p->dst, &err), &err);
    for (uint64_t i = 0; i + 8 <= bytes; i += 8)
        *(uint64_t *)((char *)p->src.addr + i) = t_random(&seed);
    t_ok(ops->share(p->from, &p->src, &key, &err), &err);
    t_ok(ops->map(p->to, &key, false, &p->view, &err), &err);
    t_int_eq(p->view.bytes, bytes);
}

static void pair_open(struct pair *p, const struct link_ops *ops, uint64_t bytes)
{
    struct kind k = { ops, false };

    pair_open_kind(p, &k, bytes);
}

static void pair_close(struct pair *p)
{
    p->ops->unmap(p->to, &p->view);
    p->ops->close(p->to);
    if (p->from)
        p->ops->close(p->from);
    fl_loop_destroy(p->loop);
    mem_drop(&p->src);
    mem_drop(&p->dst);
}

#define EACH_KIND(k)                                                                               \
    for (size_t k = 0; k < n_kinds;                                                                \
         printf("# %s%s\n", kinds[k].ops->name, kinds[k].on_device ? " on a device" : ""), k++)

static void pulls_rows_and_digests(void **state)
{
    static const struct link_seg segs[] = {
        { .from_off = 0, .to_off = 100000, .first_byte = 0, .run_bytes = 5000, .rows = 1 },
        { .from_off = 7000,
          .to_off = 1,
          .first_byte = 77,
          .run_bytes = 6,
          .rows = 300,
          .from_step = 24,
          .to_step = 6,
          .byte_step = 24 },
        { .from_off = 200000,
          .to_off = 300000,
          .first_byte = 1 << 20,
          .run_bytes = 3000000,
          .rows = 2,
          .from_step = 3000000,
          .to_step = 3000001,
          .byte_step = 3000000 },
    };

    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct wait w = wait_for();
        struct fl_err err = { 0 };
        uint64_t got[3][2] = { { 1, 1 } }, want[3][2] = { { 1, 1 } }, all = 0;

        pair_open_kind(&p, &kinds[k], 7 << 20);
        unsigned char *copy = calloc(1, p.dst.bytes);

        for (size_t i = 0; i < FL_LEN(segs); i++)
            for (uint32_t r = 0; r < segs[i].rows; r++, all += segs[i].run_bytes) {
                const unsigned char *from =
                    (unsigned char *)p.src.addr + segs[i].from_off + r * segs[i].from_step;

                memcpy(copy + segs[i].to_off + r * segs[i].to_step, from, segs[i].run_bytes);
                kernel_digest_add(want[i], from, segs[i].run_bytes,
                                  segs[i].first_byte + r * segs[i].byte_step);
            }
        t_ok(p.ops->pull(p.to, &p.view, &p.dst, segs, FL_LEN(segs), got, &w.op, &err), &err);
        t_int_eq(w.times, 0, "comes back through the loop");
        t_until(p.loop, w.times > 0, 10000);
        t_ok(w.op.err.status, &w.op.err);
        t_int_eq(w.op.bytes, all);
        t_true(w.op.took_ns > 0);
        t_mem_eq(p.dst.addr, copy, p.dst.bytes, "every byte, and no other");
        t_mem_eq(got, want, sizeof(want), "added to what was there");
        free(copy);
        pair_close(&p);
    }
}

static void many_at_once(void **state)
{
    enum { N = 300, EACH = 40000 };
    static struct wait w[N];
    static struct link_seg segs[N];

    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct fl_err err = { 0 };
        unsigned again = 0;

        pair_open_kind(&p, &kinds[k], (uint64_t)N * EACH);
        for (unsigned i = 0; i < N; i++) {
            w[i] = wait_for();
            segs[i] = (struct link_seg){ .from_off = (uint64_t)i * EACH,
                                         .to_off = (uint64_t)i * EACH,
                                         .run_bytes = EACH,
                                         .rows = 1 };
            enum fl_status st =
                p.ops->pull(p.to, &p.view, &p.dst, &segs[i], 1, NULL, &w[i].op, &err);

            if (st == FL_AGAIN) { /* the bound: when one is back it goes */
                again++;
                t_true(again < 1000, "nothing comes back");
                fl_loop_turn(p.loop, 20);
                i--;
                continue;
            }
            t_ok(st, &err);
        }
        for (unsigned i = 0; i < N; i++) {
            t_until(p.loop, w[i].times > 0, 10000);
            t_ok(w[i].op.err.status, &w[i].op.err);
        }
        fl_loop_turn(p.loop, 0);
        for (unsigned i = 0; i < N; i++)
            t_int_eq(w[i].times, 1, "exactly once");
        t_mem_eq(p.dst.addr, p.src.addr, p.src.bytes);
        printf("# FL_AGAIN %u times\n", again);
        pair_close(&p);
    }
}

struct bad_seg {
    const char *name;
    struct link_seg seg;
};
static const struct bad_seg bad_segs[] = {
    { "past the source", { .from_off = 4000, .run_bytes = 97, .rows = 1 } },
    { "past the receiver", { .to_off = 4096, .run_bytes = 1, .rows = 1 } },
    { "by its last row", { .run_bytes = 8, .rows = 513, .from_step = 8, .to_step = 0 } },
    { "no rows", { .run_bytes = 8 } },
    { "no bytes", { .rows = 1 } },
    { "offset wraps", { .from_off = UINT64_MAX - 3, .run_bytes = 8, .rows = 1 } },
    { "step wraps", { .from_step = 1ull << 63, .run_bytes = 8, .rows = 3 } },
    { "length wraps", { .from_off = 8, .run_bytes = UINT64_MAX - 4, .rows = 1 } },
};

static void segments_stay_inside(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        static unsigned char was[4096];

        pair_open_kind(&p, &kinds[k], 4096);
        memcpy(was, p.dst.addr, sizeof(was));
        for (size_t i = 0; i < FL_LEN(bad_segs); i++) {
            struct link_seg two[2] = { { .run_bytes = 16, .rows = 1 }, bad_segs[i].seg };
            struct wait w = wait_for();
            struct fl_err err = { 0 };

            t_refused(p.ops->pull(p.to, &p.view, &p.dst, two, 2, NULL, &w.op, &err), FL_INVALID,
                      &err);
            fl_loop_turn(p.loop, 0);
            t_int_eq(w.times, 0, "%s: not started", bad_segs[i].name);
        }
        t_mem_eq(p.dst.addr, was, sizeof(was), "nothing half done");
        pair_close(&p);
    }
}

static void mapped_pages_are_the_pages(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct fl_err err = { 0 };
        struct link_key key = { 0 };
        struct link_mem again = { 0 };

        if (!(kinds[k].ops->caps & LINK_MAP))
            continue;
        pair_open_kind(&p, &kinds[k], 1 << 16);
        strcpy(p.src.addr, "written after mapping");
        t_str_eq((char *)p.view.addr, "written after mapping");
        t_ok(p.ops->share(p.from, &p.src, &key, &err), &err);
        t_ok(p.ops->map(p.to, &key, true, &again, &err), &err);
        strcpy(again.addr, "and back");
        t_str_eq((char *)p.src.addr, "and back");
        p.ops->unmap(p.to, &again);
        t_true(again.addr == NULL);
        pair_close(&p);
    }
}

/* The source goes in the middle: pages that are mapped stay, a connection breaks. Nothing else
 * happens to anybody. */
static void source_goes(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct wait w = wait_for(), after = wait_for();
        struct fl_err err = { 0 };
        struct link_seg all = { .run_bytes = 64 << 20, .rows = 1 };

        pair_open_kind(&p, &kinds[k], all.run_bytes);
        t_ok(p.ops->pull(p.to, &p.view, &p.dst, &all, 1, NULL, &w.op, &err), &err);
        p.ops->close(p.from);
        p.from = NULL;
        t_until(p.loop, w.times > 0, 10000);
        if (kinds[k].ops->caps & LINK_MAP) {
            t_ok(w.op.err.status, &w.op.err);
            t_mem_eq(p.dst.addr, p.src.addr, p.src.bytes);
        } else {
            t_refused(w.op.err.status, FL_UNREACHABLE, &w.op.err);
            t_ok(p.ops->pull(p.to, &p.view, &p.dst, &all, 1, NULL, &after.op, &err), &err);
            t_until(p.loop, after.times > 0, 10000);
            t_refused(after.op.err.status, FL_UNREACHABLE, &after.op.err);
            t_has(after.op.err.text, "127.0.0.1");
        }
        pair_close(&p);
    }
}

struct order {
    struct link_op op;
    unsigned *count, at;
};

static void came_in_order(struct link_op *op)
{
    struct order *o = container_of(op, struct order, op);

    o->at = ++*o->count;
}

/* Abort in the middle of much: each op comes back, then quiet, and from then on the memory is ours.
 */
static void abort_then_quiet(void **state)
{
    enum { N = 8, EACH = 8 << 20 };

    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        unsigned count = 0;
        struct order ops[N], quiet = { .op = { .done = came_in_order }, .count = &count };
        struct fl_err err = { 0 };
        struct link_seg segs[N];

        pair_open_kind(&p, &kinds[k], (uint64_t)N * EACH);
        for (unsigned i = 0; i < N; i++) {
            ops[i] = (struct order){ .op = { .done = came_in_order }, .count = &count };
            segs[i] = (struct link_seg){ .from_off = (uint64_t)i * EACH,
                                         .to_off = (uint64_t)i * EACH,
                                         .run_bytes = EACH,
                                         .rows = 1 };
            t_ok(p.ops->pull(p.to, &p.view, &p.dst, &segs[i], 1, NULL, &ops[i].op, &err), &err);
        }
        t_until(p.loop, count > 0, 10000);
        p.ops->abort(p.to, &quiet.op);
        t_int_eq(quiet.at, 0, "quiet comes through the loop");
        t_until(p.loop, quiet.at > 0, 10000);
        t_ok(quiet.op.err.status, &quiet.op.err);
        t_int_eq(quiet.at, N + 1, "after all of them");
        unsigned cancelled = 0;

        for (unsigned i = 0; i < N; i++) {
            t_true(ops[i].at > 0);
            t_true(ops[i].op.err.status == FL_OK || ops[i].op.err.status == FL_CANCELLED, "%s",
                   ops[i].op.err.text);
            cancelled += ops[i].op.err.status == FL_CANCELLED;
        }
        t_true(cancelled > 0, "the test was too slow to abort anything");
        memset(p.dst.addr, 0x5a, p.dst.bytes);
        t_refused(p.ops->pull(p.to, &p.view, &p.dst, &segs[0], 1, NULL, &ops[0].op, &err),
                  FL_CANCELLED, &err);
        for (unsigned i = 0; i < 20; i++)
            fl_loop_turn(p.loop, 1);
        for (uint64_t i = 0; i < p.dst.bytes; i++)
            t_true(((unsigned char *)p.dst.addr)[i] == 0x5a, "byte %llu was written after quiet",
                   (unsigned long long)i);
        pair_close(&p);
    }
}

static void abort_of_an_idle_link(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct wait quiet = wait_for(), other = wait_for();

        pair_open_kind(&p, &kinds[k], 4096);
        p.ops->abort(p.to, &quiet.op);
        p.ops->abort(p.from, &other.op);
        t_until(p.loop, quiet.times == 1 && other.times == 1, 5000);
        pair_close(&p);
    }
}

static void close_brings_all_back(void **state)
{
    enum { N = 6, EACH = 4 << 20 };

    (void)state;
    EACH_KIND(k)
    {
        struct pair p;
        struct wait w[N];
        struct fl_err err = { 0 };
        struct link_seg segs[N];

        pair_open_kind(&p, &kinds[k], (uint64_t)N * EACH);
        for (unsigned i = 0; i < N; i++) {
            w[i] = wait_for();
            segs[i] = (struct link_seg){ .from_off = (uint64_t)i * EACH,
                                         .to_off = (uint64_t)i * EACH,
                                         .run_bytes = EACH,
                                         .rows = 1 };
            t_ok(p.ops->pull(p.to, &p.view, &p.dst, &segs[i], 1, NULL, &w[i].op, &err), &err);
        }
        p.ops->close(p.to);
        for (unsigned i = 0; i < N; i++) {
            t_int_eq(w[i].times, 1, "before close returned");
            t_true(w[i].op.err.status == FL_OK || w[i].op.err.status == FL_CANCELLED, "%s",
                   w[i].op.err.text);
        }
        memset(p.dst.addr, 0x33, p.dst.bytes);
        fl_loop_turn(p.loop, 10);
        for (uint64_t i = 0; i < p.dst.bytes; i++)
            t_true(((unsigned char *)p.dst.addr)[i] == 0x33, "written after close");
        open_one(&p, 1, &p.to); /* for pair_close */
        pair_close(&p);
    }
}

static void t_until_ready(struct fl_loop *l, struct wait *a, struct wait *b)
{
    t_until(l, a->times && b->times, 5000);
}

/* Every place that can fail does so once; nothing is left, and what failed says so. */
static void faults(void **state)
{
    (void)state;
    EACH_KIND(k)
    {
        struct fl_err err = { 0 };
        struct link_place here[2];
        int fds = t_open_fds();
        bool met = true;

        place_of(&kinds[k], &here[0]);
        here[1] = here[0];
        for (unsigned nth = 1; met; nth++) {
            const struct link_ops *ops = kinds[k].ops;
            struct link_team team = { .members = here, .n = 2 };
            struct link *a = NULL, *b = NULL;
            struct link_mem src = { 0 }, dst = { 0 }, view = { 0 };
            struct link_key key = { 0 };
            struct link_seg all = { .run_bytes = 100000, .rows = 1 };
            struct wait ra = wait_for(), rb = wait_for(), w = wait_for();
            struct fl_loop *l;
            enum fl_status st;

            t_ok(fl_loop_create(NULL, &l, &err), &err);
            fl_fault_arm(nth);
            st = ops->open(l, &team, &a, &ra.op, &err);
            st = st ? st : ops->open(l, &team, &b, &rb.op, &err);
            if (st == FL_OK) /* a device is opened on the pool: then it is there, or the link says
                                why not */
                t_until_ready(l, &ra, &rb);
            st = st ? st : ra.op.err.status;
            st = st ? st : rb.op.err.status;
            st = st ? st : mem_new(&kinds[k], 100000, &src, &err);
            st = st ? st : mem_new(&kinds[k], 100000, &dst, &err);
            st = st ? st : ops->share(a, &src, &key, &err);
            st = st ? st : ops->map(b, &key, false, &view, &err);
            st = st ? st : ops->pull(b, &view, &dst, &all, 1, NULL, &w.op, &err);
            if (st == FL_OK) {
                t_until(l, w.times > 0, 10000);
                st = w.op.err.status;
            }
            met = fl_fault_disarm();
            t_true(met || st == FL_OK, "nth=%u: %s", nth, err.text);
            if (st == FL_OK) /* a pool thread less, or nothing failed */
                t_mem_eq(dst.addr, src.addr, 100000, "nth=%u", nth);
            if (view.impl)
                ops->unmap(b, &view);
            if (b)
                ops->close(b);
            if (a)
                ops->close(a);
            fl_loop_destroy(l);
            mem_drop(&src);
            mem_drop(&dst);
            t_int_eq(t_open_fds(), fds, "nth=%u", nth);
        }
    }
}

/* ---- lossy ---- */

static void a_bad_day(void **state)
{
    struct pair p;
    struct wait w[3], quiet = wait_for();
    struct fl_err err = { 0 };
    struct link_seg all = { .run_bytes = 4096, .rows = 1 };

    (void)state;
    pair_open(&p, &link_lossy, 4096);
    link_lossy_script = (struct link_lossy_script){ .delay_ms = 1, .cut = 1, .lost = 2 };
    for (unsigned i = 0; i < 3; i++) {
        w[i] = wait_for();
        t_ok(p.ops->pull(p.to, &p.view, &p.dst, &all, 1, NULL, &w[i].op, &err), &err);
    }
    t_until(p.loop, w[0].times == 1 && w[2].times == 1, 5000);
    t_refused(w[0].op.err.status, FL_UNREACHABLE, &w[0].op.err);
    t_ok(w[2].op.err.status, &w[2].op.err);
    t_int_eq(w[1].times, 0, "lost");
    p.ops->abort(p.to, &quiet.op);
    t_until(p.loop, quiet.times == 1, 5000);
    t_int_eq(w[1].times, 1);
    t_refused(w[1].op.err.status, FL_CANCELLED, &w[1].op.err);
    link_lossy_script = (struct link_lossy_script){ 0 };
    pair_close(&p);
}

/* ---- what a peer could send ---- */

static void keys_of_strangers(void **state)
{
    struct pair p;
    struct fl_err err = { 0 };
    struct link_mem out = { 0 };
    struct link_key good = { 0 }, key;

    (void)state;
    pair_open(&p, &link_shm, 8192);
    t_ok(p.ops->share(p.from, &p.src, &good, &err), &err);
    key = good;
    key.blob[0] ^= 1;
    t_refused(p.ops->map(p.to, &key, false, &out, &err), FL_CORRUPT, &err);
    key = good;
    key.n_fds = 0;
    t_refused(p.ops->map(p.to, &key, false, &out, &err), FL_CORRUPT, &err);
    key = good;
    key.blob[10] = 1; /* says 73,728 bytes of a file of 8192 */
    t_refused(p.ops->map(p.to, &key, false, &out, &err), FL_INVALID, &err);
    t_has(err.text, "73728");
    key = good;
    key.fds[0] = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    t_int_eq(ftruncate(key.fds[0], 8192), 0);
    t_refused(p.ops->map(p.to, &key, false, &out, &err), FL_INVALID, &err);
    t_has(err.text, "not sealed");
    close(key.fds[0]);
    t_true(out.addr == NULL);
    int fd = link_mem_fd(&p.src);

    t_true(ftruncate(fd, 100) < 0 && ftruncate(fd, 100000) < 0, "sealed");
    pair_close(&p);
}

static int dial(const struct tcp_key *k)
{
    struct sockaddr_in to = { .sin_family = AF_INET,
                              .sin_port = htons(k->port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    t_int_eq(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    return fd;
}

/* Is the connection closed by the other side, without a byte? */
static bool hung_up(int fd)
{
    struct timeval tv = { .tv_sec = 5 };
    char c;

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
    return recv(fd, &c, 1, 0) <= 0 && errno != EAGAIN;
}

struct stranger {
    const char *name;
    void (*bend)(struct tcp_ask *a);
};
static void bad_magic(struct tcp_ask *a)
{
    a->magic++;
}
static void bad_token(struct tcp_ask *a)
{
    a->token[7] ^= 4;
}
static void no_runs(struct tcp_ask *a)
{
    a->n_runs = 0;
}
static void too_many_runs(struct tcp_ask *a)
{
    a->n_runs = UINT32_MAX;
}
static const struct stranger strangers[] = {
    { "garbage", bad_magic },
    { "wrong token", bad_token },
    { "no runs", no_runs },
    { "4 billion runs", too_many_runs },
};

static void strangers_on_the_port(void **state)
{
    struct pair p;
    struct fl_err err = { 0 };
    struct link_key k = { 0 };
    struct tcp_key key;
    struct wait w = wait_for();
    struct link_seg all = { .run_bytes = 4096, .rows = 1 };

    (void)state;
    pair_open(&p, &link_tcp, 4096);
    t_ok(p.ops->share(p.from, &p.src, &k, &err), &err);
    memcpy(&key, k.blob, sizeof(key));
    for (size_t i = 0; i < FL_LEN(strangers); i++) {
        struct tcp_ask ask = { .magic = TCP_ASK_MAGIC, .n_runs = 1 };
        int fd = dial(&key);

        memcpy(ask.token, key.token, sizeof(ask.token));
        strangers[i].bend(&ask);
        t_int_eq(send(fd, &ask, sizeof(ask), MSG_NOSIGNAL), sizeof(ask));
        t_true(hung_up(fd), "%s", strangers[i].name);
        close(fd);
    }
    for (unsigned what = 0; what < 2;
         what++) { /* a peer that asks for what it may not have: an answer */
        struct tcp_ask ask = {
            .magic = TCP_ASK_MAGIC, .n_runs = 1, .id = 9, .region = what ? 0 : 5
        };
        struct tcp_run run = { .off = 4000, .bytes = 97, .rows = 1 };
        struct tcp_say say;
        int fd = dial(&key);

        memcpy(ask.token, key.token, sizeof(ask.token));
        t_int_eq(send(fd, &ask, sizeof(ask), MSG_NOSIGNAL), sizeof(ask));
        t_int_eq(send(fd, &run, sizeof(run), MSG_NOSIGNAL), sizeof(run));
        t_int_eq(recv(fd, &say, sizeof(say), MSG_WAITALL), sizeof(say));
        t_int_eq(say.status, what ? FL_INVALID : FL_NOT_FOUND, "%s", say.text);
        close(fd);
    }
    t_ok(p.ops->pull(p.to, &p.view, &p.dst, &all, 1, NULL, &w.op, &err), &err);
    t_until(p.loop, w.times > 0, 5000);
    t_ok(w.op.err.status, &w.op.err);
    t_mem_eq(p.dst.addr, p.src.addr, 4096, "the others are served on");
    pair_close(&p);
}

/* It accepts and says nothing, as a stopped process does: only abort ends that. */
static void silent_source(void **state)
{
    struct pair p;
    struct fl_err err = { 0 };
    struct link_key k = { 0 };
    struct tcp_key key;
    struct link_mem view;
    struct wait w = wait_for(), quiet = wait_for();
    struct link_seg all = { .run_bytes = 4096, .rows = 1 };
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)state;
    t_int_eq(bind(fd, (struct sockaddr *)&at, len), 0);
    t_int_eq(listen(fd, 1), 0);
    t_int_eq(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    pair_open(&p, &link_tcp, 4096);
    t_ok(p.ops->share(p.from, &p.src, &k, &err), &err);
    memcpy(&key, k.blob, sizeof(key));
    key.port = ntohs(at.sin_port);
    memcpy(k.blob, &key, sizeof(key));
    t_ok(p.ops->map(p.to, &k, false, &view, &err), &err);
    t_ok(p.ops->pull(p.to, &view, &p.dst, &all, 1, NULL, &w.op, &err), &err);
    p.ops->unmap(p.to, &view);
    int peer = accept(fd, NULL, NULL);

    fl_loop_turn(p.loop, 0);
    t_int_eq(w.times, 0);
    p.ops->abort(p.to, &quiet.op);
    t_until(p.loop, quiet.times == 1, 5000);
    t_int_eq(w.times, 1);
    t_refused(w.op.err.status, FL_CANCELLED, &w.op.err);
    close(peer);
    close(fd);
    pair_close(&p);
}

static void places(void **state)
{
    struct link_place a, b;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(link_place_here("10.0.0.1", &a, &err), &err);
    t_int_eq(strlen(a.host_boot), 36);
    b = a;
    t_true(link_shm.reaches(&a, &b, NULL));
    b.host_boot[0] ^= 1;
    t_true(!link_shm.reaches(&a, &b, &err), "another machine, or another start of it");
    b = a;
    b.pid_ns++;
    t_true(!link_shm.reaches(&a, &b, NULL), "another container");
    t_true(link_tcp.reaches(&a, &b, NULL));
    b.addr[0] = 0;
    t_true(!link_tcp.reaches(&a, &b, &err));
    t_true(link_shm.cost_ns(&a, &a, 1 << 30) < link_tcp.cost_ns(&a, &a, 1 << 30));
    t_true(link_by_name("tcp") == &link_tcp && link_by_name("nccl") == &link_nccl &&
           link_by_name("pigeon") == NULL);
    struct link_team team = { .members = &b, .n = 1 };
    struct link *k = NULL;
    struct wait w = wait_for();

    fl_copy(b.addr, sizeof(b.addr), "no.such.number");
    t_refused(link_tcp.open(NULL, &team, &k, &w.op, &err), FL_INVALID, &err);
    t_has(err.text, "no.such.number");
}

/* ---- pool ---- */

static void pool_recycles(void **state)
{
    struct fl_loop *l;
    struct link_pool *p;
    struct link_mem a = { 0 }, b = { 0 }, c = { 0 };
    struct wait w = wait_for(), v = wait_for(), u = wait_for();
    struct fl_err err = { 0 };

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    t_ok(link_pool_create(l, 1 << 20, &p, &err), &err);
    t_ok(link_pool_alloc(p, 1000000, &a, &w.op, &err), &err);
    t_true(a.addr == NULL, "not before it is back");
    t_until(l, w.times == 1, 5000);
    t_ok(w.op.err.status, &w.op.err);
    t_int_eq(a.bytes, 1000000);
    void *was = a.addr;

    strcpy(was, "still here");
    link_pool_free(p, &a);
    t_true(a.addr == NULL);
    t_ok(link_pool_alloc(p, 999999, &b, &v.op, &err), &err);
    t_until(l, v.times == 1, 5000);
    t_true(b.addr == was, "the same pages, for as many");
    t_str_eq((char *)b.addr, "still here");
    t_ok(link_pool_alloc(p, 3 << 20, &c, &u.op, &err), &err);
    t_until(l, u.times == 1, 5000);
    int fds = t_open_fds();

    link_pool_free(p, &c); /* more than is kept */
    t_until(l, t_open_fds() == fds - 1, 5000);
    link_pool_free(p, &b);
    link_pool_destroy(p);
    t_int_eq(t_open_fds(), fds - 2);
    fl_loop_destroy(l);
}

static void pool_goes_while_it_makes(void **state)
{
    struct fl_loop *l;
    struct link_pool *p;
    struct link_mem a = { 0 };
    struct wait w = wait_for();
    struct fl_err err = { 0 };
    int fds = t_open_fds();

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    t_ok(link_pool_create(l, 1 << 20, &p, &err), &err);
    t_ok(link_pool_alloc(p, 8 << 20, &a, &w.op, &err), &err);
    link_pool_destroy(p);
    t_int_eq(w.times, 1);
    t_refused(w.op.err.status, FL_CANCELLED, &w.op.err);
    fl_loop_destroy(l);
    t_true(a.addr == NULL);
    t_int_eq(w.times, 1);
    t_int_eq(t_open_fds(), fds);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(pulls_rows_and_digests),
        cmocka_unit_test(many_at_once),
        cmocka_unit_test(segments_stay_inside),
        cmocka_unit_test(mapped_pages_are_the_pages),
        cmocka_unit_test(source_goes),
        cmocka_unit_test(abort_then_quiet),
        cmocka_unit_test(abort_of_an_idle_link),
        cmocka_unit_test(close_brings_all_back),
        cmocka_unit_test(faults),
        cmocka_unit_test(a_bad_day),
        cmocka_unit_test(keys_of_strangers),
        cmocka_unit_test(strangers_on_the_port),
        cmocka_unit_test(silent_source),
        cmocka_unit_test(places),
        cmocka_unit_test(pool_recycles),
        cmocka_unit_test(pool_goes_while_it_makes),
    };

    size_t n = 1;

    if (gpu_fake.list(&device, &n, NULL) != FL_OK)
        return 1;
    for (size_t i = 0; i < link_table_n; i++) {
        uint32_t caps = link_table[i]->caps;

        if (!(caps & LINK_PULL))
            continue; /* test_nccl */
        if (caps & LINK_HOST)
            kinds[n_kinds++] = (struct kind){ link_table[i], false };
        if (caps & LINK_DEVICE)
            kinds[n_kinds++] = (struct kind){ link_table[i], true };
    }
    kinds[n_kinds++] = (struct kind){ &link_lossy, false };
    return t_run("link", tests);
}
