/* bench_device - weights from a trainer's device memory to an engine's, against the plainest copy
 *
 *     bench_device [--tiny|--small|--big] [--rounds N]
 *         --small: 1.19 GB alone; --big: 16.4 GB too
 *
 * Two processes: this one holds the slot, the other pulls it or takes part in the broadcast. On one
 * device, and on two where there are two. Every line carries the limit of the same run: one plain
 * copy of all bytes (device or peer), or one NCCL message of all bytes. ms: median of the rounds
 * after 3; max beside it; cold: the first. Digests are on; bytes are compared at the end.
 * JSON lines, then a table. Exit 1: bytes or digests were wrong. */
#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench/median.h"
#include "bench/shapes.h"
#include "common/base/str.h"
#include "transport/link/dev_priv.h"
#include "transport/link/nccl_api.h"

enum { WARM = 3, ROUNDS_MAX = 64, WINDOW = 3, LINES_MAX = 64, CHILD_FD = 3, SEGS_MAX = 1024 };
#define BUCKET_BYTES (512ull << 20)
extern char **environ;
static struct fl_err err;
static const struct gpu_ops *gpu;
static unsigned rounds = 20;

static void must(enum fl_status st, const char *what)
{
    if (st == FL_OK)
        return;
    fprintf(stderr, "bench_device: %s: %s\n", what, err.text);
    exit(1);
}

/* ==== times =================================================================================== */
struct times {                        /* of one method, ms */
    double cold, median, max, device; /* device: median of what its events say; 0: not asked */
    bool right;
};

static double now_ms(void)
{
    return (double)fl_clock_boot_ns() / 1e6;
}

/* ==== buckets of one layout =================================================================== */
struct layout {
    struct link_seg segs[SEGS_MAX];
    size_t n_segs, first[64], n[64], n_buckets;
    uint64_t bytes, payload;
};

static void lay_out(struct layout *y, const struct shape *s)
{
    uint64_t size[SHAPES_MAX], room = 0;
    size_t n = shape_tensors(s, size);

    *y = (struct layout){ 0 };
    for (size_t i = 0; i < n; i++) {
        for (uint64_t at = 0, part; at < size[i]; at += part) {
            if (room == 0) {
                y->first[y->n_buckets++] = y->n_segs;
                room = BUCKET_BYTES;
            }
            part = size[i] - at < room ? size[i] - at : room;
            y->segs[y->n_segs++] = (struct link_seg){ .from_off = y->bytes + at,
                                                      .to_off = y->bytes + at,
                                                      .first_byte = at,
                                                      .run_bytes = part,
                                                      .rows = 1,
                                                      .tensor = (uint32_t)i };
            y->n[y->n_buckets - 1]++;
            room -= part;
        }
        y->payload += size[i];
        y->bytes += (size[i] + SHAPES_ALIGN - 1) / SHAPES_ALIGN * SHAPES_ALIGN;
    }
}

/* ==== what the two processes say ============================================================== */
enum what {
    DO_SLOT,
    DO_MAP,
    DO_PULL,
    DO_UNMAP,
    DO_HANDLES,
    DO_NCCL,
    DO_CAST,
    DO_RAW,
    DO_RAW_EACH,
    DO_END
};
struct order {
    enum what what;
    unsigned rounds, n_handles;
    struct shape shape;
    struct link_place place;
    struct link_key key;
    uint8_t ticket[256];
};
struct answer {
    struct times t;
    double open_ms;
    uint64_t sum[2];
};

static void tell(int fd, const struct order *o)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
    } ctl = { 0 };
    struct iovec v = { (void *)(uintptr_t)o, sizeof(*o) };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };

    if (o->key.n_fds) {
        m.msg_control = &ctl;
        m.msg_controllen = CMSG_SPACE(sizeof(int) * o->key.n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);

        *c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int) * o->key.n_fds),
                               .cmsg_level = SOL_SOCKET,
                               .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(c), o->key.fds, sizeof(int) * o->key.n_fds);
    }
    if (sendmsg(fd, &m, MSG_NOSIGNAL) != (ssize_t)sizeof(*o)) {
        perror("bench_device: the other process");
        exit(1);
    }
}

static bool hear(int fd, struct order *o)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
    } ctl;
    struct iovec v = { o, sizeof(*o) };
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = &ctl, .msg_controllen = sizeof(ctl)
    };

    if (recvmsg(fd, &m, MSG_WAITALL | MSG_CMSG_CLOEXEC) != (ssize_t)sizeof(*o))
        return false;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        if (c->cmsg_type == SCM_RIGHTS)
            memcpy(o->key.fds, CMSG_DATA(c), sizeof(int) * o->key.n_fds);
    return true;
}

static void read_all(int fd, void *at, size_t n)
{
    if (recv(fd, at, n, MSG_WAITALL) != (ssize_t)n) {
        fprintf(stderr, "bench_device: the other process is gone\n");
        exit(1);
    }
}

/* ==== one side ================================================================================ */
struct side {
    struct fl_loop *loop;
    struct link_place place, both[2];
    struct layout y;
    struct link_mem slot, view;
    struct link *ipc, *nccl;
    struct link_dev *dev;
    unsigned in_flight;
    size_t next;
    uint64_t (*digests)[2];
    struct link_op ops[64];
    double device_ms;
    bool failed;
    bool casts;
};
static struct side me;

static void came(struct link_op *op)
{
    me.in_flight--;
    me.device_ms += (double)op->took_ns / 1e6;
    if (op->err.status != FL_OK) {
        fprintf(stderr, "bench_device: %s\n", op->err.text);
        me.failed = true;
    }
}

static void start_next(void)
{
    size_t b = me.next;
    const struct link_seg *segs = &me.y.segs[me.y.first[b]];
    uint64_t(*digests)[2] = &me.digests[me.y.first[b]];
    enum fl_status st;

    me.ops[b] = (struct link_op){ .done = came };
    if (me.casts)
        st = link_nccl.cast_segs(me.nccl, 0, &me.slot, segs, me.y.n[b], digests, &me.ops[b], &err);
    else
        st = link_cuda_ipc.pull(me.ipc, &me.view, &me.slot, segs, me.y.n[b], digests, &me.ops[b],
                                &err);
    must(st, "start a bucket");
    me.in_flight++;
    me.next++;
}

/* All buckets once, as the executor does: WINDOW of them under way. */
static void one_update(void)
{
    memset(me.digests, 0, me.y.n_segs * sizeof(*me.digests));
    me.next = 0;
    me.device_ms = 0;
    while (me.next < me.y.n_buckets || me.in_flight) {
        while (me.next < me.y.n_buckets && me.in_flight < WINDOW)
            start_next();
        fl_loop_turn(me.loop, -1);
    }
}

static struct times updates(unsigned n)
{
    double wall[ROUNDS_MAX], device[ROUNDS_MAX];
    struct times t = { .right = true };

    for (int i = -WARM; i < (int)n; i++) {
        double began = now_ms();

        one_update();
        double took = now_ms() - began;

        if (i == -WARM)
            t.cold = took;
        if (i >= 0) {
            wall[i] = took;
            device[i] = me.device_ms;
            t.max = took > t.max ? took : t.max;
        }
    }
    t.median = median(wall, n);
    t.device = me.casts ? 0 : median(device, n);
    t.right = !me.failed;
    return t;
}

static void sum_of(uint64_t out[2])
{
    out[0] = out[1] = 0;
    for (size_t i = 0; i < me.y.n_segs; i++) {
        out[0] += me.digests[i][0] * (2 * i + 1);
        out[1] += me.digests[i][1] * (2 * i + 1);
    }
}

static void digest_slot(bool from, uint64_t out[2])
{
    memset(me.digests, 0, me.y.n_segs * sizeof(*me.digests));
    must(link_mem_digest(&me.slot, me.y.segs, me.y.n_segs, from, me.digests, &err), "digest");
    sum_of(out);
}

struct opening {
    struct link_op op;
    bool came;
};

static void on_open(struct link_op *op)
{
    container_of(op, struct opening, op)->came = true;
}

static double open_link(const struct link_ops *ops, const struct link_team *team, struct link **out)
{
    struct opening w = { .op = { .done = on_open } };
    double began = now_ms();

    must(ops->open(me.loop, team, out, &w.op, &err), ops->name);
    while (!w.came)
        fl_loop_turn(me.loop, -1);
    err = w.op.err;
    must(w.op.err.status, ops->name);
    return now_ms() - began;
}

static void slot_new(const struct shape *s)
{
    if (me.slot.addr)
        link_dev_free(&me.slot);
    free(me.digests);
    lay_out(&me.y, s);
    me.digests = calloc(me.y.n_segs, sizeof(*me.digests));
    must(link_dev_alloc(me.place.gpu_uuid, me.y.bytes, &me.slot, &err), "slot");
}

/* Random, and no two stretches of 32 MiB alike. */
static void slot_fill(void)
{
    enum { PART = 32 << 20 };
    uint64_t *part = malloc(PART), x = 88172645463325252ull;

    for (size_t i = 0; i < PART / 8; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        part[i] = x;
    }
    for (uint64_t at = 0; at < me.slot.bytes; at += PART) {
        part[at / PART % 1000] ^= at + 1;
        must(link_mem_write(&me.slot, at, part,
                            me.slot.bytes - at < PART ? me.slot.bytes - at : PART, &err),
             "fill");
    }
    free(part);
}

/* ==== a handle per tensor, as others do it ==================================================== */
static struct times by_handles(int fd, unsigned n, unsigned n_handles)
{
    struct {
        struct gpu_handle h;
        uint64_t off, bytes;
    } *all = calloc(n_handles, sizeof(*all));
    struct times t = { .right = true };
    double wall[ROUNDS_MAX];

    read_all(fd, all, n_handles * sizeof(*all));
    for (int i = -WARM; i < (int)n; i++) {
        double began = now_ms();
        uint64_t to = dev_addr(me.slot.addr), from;

        for (unsigned k = 0; k < n_handles; k++) {
            must(gpu->ipc_open(me.dev->g, &all[k].h, &from, &err), "open a handle");
            must(gpu->copy(me.dev->stream, to, from + all[k].off, all[k].bytes, &err), "copy");
            must(gpu->stream_sync(me.dev->stream, &err),
                 "copy"); /* it is closed, so it must be over */
            gpu->ipc_close(me.dev->g, from);
            to += (all[k].bytes + SHAPES_ALIGN - 1) / SHAPES_ALIGN * SHAPES_ALIGN;
        }
        double took = now_ms() - began;

        if (i == -WARM)
            t.cold = took;
        if (i >= 0) {
            wall[i] = took;
            t.max = took > t.max ? took : t.max;
        }
    }
    t.median = median(wall, n);
    free(all);
    return t;
}

/* ==== NCCL by hand: one message of all bytes, the limit of casts; or one a tensor ============= */
static void nccl_settle(const struct nccl_api *api, nccl_comm c)
{
    int r = NCCL_IN_PROGRESS;

    while (api->async_error(c, &r) == NCCL_OK && r == NCCL_IN_PROGRESS)
        ;
    if (r != NCCL_OK) {
        fprintf(stderr, "bench_device: NCCL: %s\n", api->error_text(r));
        exit(1);
    }
}

/* The slot's bytes from rank 0: at once, or tensor by tensor, the next one when the last has been
 * queued, as a loop over parameters does. */
static void raw_broadcast(const struct nccl_api *api, nccl_comm c, const struct shape *each)
{
    void *stream = gpu->stream_raw(me.dev->stream);
    uint64_t size[SHAPES_MAX];
    size_t n = each ? shape_tensors(each, size) : 1;
    char *at = me.slot.addr;

    for (size_t i = 0; i < n; i++) {
        uint64_t bytes = each ? size[i] : me.y.bytes;

        (void)api->broadcast(at, at, bytes, NCCL_UINT8, 0, c, stream);
        nccl_settle(api, c);
        at += (bytes + SHAPES_ALIGN - 1) / SHAPES_ALIGN * SHAPES_ALIGN;
    }
}

static struct times raw_nccl(const uint8_t *ticket, int rank, const struct shape *each, unsigned n)
{
    const struct nccl_api *api;
    struct nccl_config config = { sizeof(config), NCCL_CONFIG_MAGIC, NCCL_CONFIG_VERSION, 0,
                                  NCCL_UNDEFINED, NCCL_UNDEFINED,    NCCL_UNDEFINED,      NULL,
                                  NCCL_UNDEFINED };
    struct nccl_id id;
    nccl_comm c;
    double wall[ROUNDS_MAX];
    struct times t = { .right = true };
    uint64_t free_bytes, all;

    must(nccl_load(&api, &err), "NCCL");
    memcpy(&id, ticket, sizeof(id));
    (void)gpu->memory(me.dev->g, &free_bytes, &all,
                      NULL); /* the device is current on this thread */
    (void)api->init(&c, 2, id, rank, &config);
    nccl_settle(api, c);
    for (int i = -WARM; i < (int)n; i++) {
        double began = now_ms();

        raw_broadcast(api, c, each);
        must(gpu->stream_sync(me.dev->stream, &err), "broadcast");
        double took = now_ms() - began;

        if (i == -WARM)
            t.cold = took;
        if (i >= 0) {
            wall[i] = took;
            t.max = took > t.max ? took : t.max;
        }
    }
    t.median = median(wall, n);
    (void)api->abort(c);
    return t;
}

/* ==== the other process ======================================================================= */
static void side_open(const char *uuid)
{
    must(fl_loop_create(NULL, &me.loop, &err), "loop");
    must(gpu_pick(&gpu, &err), "devices");
    must(link_dev_get(uuid, &me.dev, &err), "device");
}

static void child_map(const struct order *o)
{
    must(link_cuda_ipc.map(me.ipc, &o->key, false, &me.view, &err), "map");
    for (unsigned i = 0; i < o->key.n_fds; i++)
        close(o->key.fds[i]);
}

static void team_of(const struct order *o, unsigned self, struct link_team *team)
{
    *team = (struct link_team){ .members = me.both, .n = 2, .self = self };
    memcpy(team->ticket, o->ticket, sizeof(team->ticket));
}

static int child(const char *uuid)
{
    struct order o;
    struct link_team team;

    side_open(uuid);
    while (hear(CHILD_FD, &o) && o.what != DO_END) {
        struct answer a = { .t.right = true };

        me.casts = o.what == DO_CAST;
        switch (o.what) {
        case DO_SLOT:
            me.place = o.place;
            slot_new(&o.shape);
            if (!me.ipc) {
                team = (struct link_team){ .members = &me.place, .n = 1 };
                a.open_ms = open_link(&link_cuda_ipc, &team, &me.ipc);
            }
            break;
        case DO_MAP:
            a.open_ms = now_ms();
            child_map(&o);
            a.open_ms = now_ms() - a.open_ms;
            break;
        case DO_UNMAP:
            link_cuda_ipc.unmap(me.ipc, &me.view);
            break;
        case DO_PULL:
        case DO_CAST:
            must(gpu->fill(me.dev->stream, dev_addr(me.slot.addr), 0xa5, me.slot.bytes, &err),
                 "poison");
            must(gpu->stream_sync(me.dev->stream, &err), "poison");
            a.t = updates(o.rounds);
            sum_of(a.sum);
            uint64_t again[2];

            digest_slot(false, again); /* of what lies there now */
            a.t.right &= memcmp(again, a.sum, sizeof(again)) == 0;
            break;
        case DO_HANDLES:
            a.t = by_handles(CHILD_FD, o.rounds, o.n_handles);
            break;
        case DO_NCCL:
            me.both[0] = o.place;
            me.both[1] = me.place;
            team_of(&o, 1, &team);
            a.open_ms = open_link(&link_nccl, &team, &me.nccl);
            break;
        case DO_RAW:
        case DO_RAW_EACH:
            a.t = raw_nccl(o.ticket, 1, o.what == DO_RAW_EACH ? &o.shape : NULL, o.rounds);
            break;
        case DO_END:
            break;
        }
        if (send(CHILD_FD, &a, sizeof(a), MSG_NOSIGNAL) != (ssize_t)sizeof(a))
            return 1;
    }
    return 0;
}

/* ==== this process: the trainer =============================================================== */
struct line {
    char name[96];
    uint64_t bytes;
    struct times t;
    double limit;
    const char *limit_is;
};
static struct line lines[LINES_MAX];
static unsigned n_lines;

static void note(const char *name, const struct shape *s, const struct times *t, double limit,
                 const char *limit_is)
{
    struct line *l = &lines[n_lines < LINES_MAX ? n_lines++ : LINES_MAX - 1];

    snprintf(l->name, sizeof(l->name), "%s %s", s->name, name);
    l->bytes = me.y.payload;
    l->t = *t;
    l->limit = limit;
    l->limit_is = limit_is;
    printf(
        "{\"name\":\"%s\",\"bytes\":%llu,\"ms\":%.4f,\"max_ms\":%.4f,\"cold_ms\":%.4f,\"device_"
        "ms\":%.4f,"
        "\"limit\":\"%s\",\"limit_ms\":%.4f,\"ratio\":%.3f,\"device_ratio\":%.3f,\"right\":%s}\n",
        l->name, (unsigned long long)l->bytes, t->median, t->max, t->cold, t->device, limit_is,
        limit, t->median / limit, t->device / limit, t->right ? "true" : "false");
    fflush(stdout);
}

struct kid {
    int fd;
    pid_t pid;
    char uuid[GPU_UUID_BYTES];
};

static struct kid kid_new(const char *self, const char *uuid)
{
    char *argv[] = { (char *)(uintptr_t)self, "--child", (char *)(uintptr_t)uuid, NULL };
    posix_spawn_file_actions_t files;
    struct kid k = { 0 };
    int ends[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        exit(1);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, ends[1], CHILD_FD);
    if (posix_spawn(&k.pid, "/proc/self/exe", &files, NULL, argv, environ) != 0)
        exit(1);
    posix_spawn_file_actions_destroy(&files);
    close(ends[1]);
    k.fd = ends[0];
    (void)FL_COPY(k.uuid, uuid);
    return k;
}

static void kid_end(struct kid *k)
{
    struct order o = { .what = DO_END };

    tell(k->fd, &o);
    close(k->fd);
    while (waitpid(k->pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

static struct answer ask(struct kid *k, struct order *o)
{
    struct answer a;

    tell(k->fd, o);
    read_all(k->fd, &a, sizeof(a));
    return a;
}

/* Device time of one copy of all bytes into to, by events. */
static struct times plain_copy(uint64_t to, bool kernel, const struct dev_table *table)
{
    struct times t = { .right = true };
    struct gpu_event *a, *b;
    double v[ROUNDS_MAX];
    float ms;

    must(gpu->event(me.dev->g, &a, &err), "event");
    must(gpu->event(me.dev->g, &b, &err), "event");
    for (int i = -WARM; i < (int)rounds; i++) {
        struct kernel_move_args m = { .pieces = table ? table->addr : 0,
                                      .n = table ? table->n : 0,
                                      .from = dev_addr(me.slot.addr),
                                      .to = to };

        must(gpu->event_record(a, me.dev->stream, &err), "event");
        if (kernel)
            must(kernel_move_start(gpu, me.dev->g, me.dev->stream, &m, &err), "kernel");
        else
            must(gpu->copy(me.dev->stream, to, dev_addr(me.slot.addr), me.y.bytes, &err), "copy");
        must(gpu->event_record(b, me.dev->stream, &err), "event");
        must(gpu->event_sync(b, &err), "event");
        must(gpu->event_ms(a, b, &ms, &err), "event");
        if (i == -WARM)
            t.cold = (double)ms;
        if (i >= 0) {
            v[i] = (double)ms;
            t.max = v[i] > t.max ? v[i] : t.max;
        }
    }
    t.median = t.device = median(v, rounds);
    gpu->event_free(a);
    gpu->event_free(b);
    return t;
}

/* Peer copy: the target lies on the other device, as this process sees it. */
static double peer_limit(const struct shape *s, const char *uuid, bool same)
{
    struct link_dev *other;
    uint64_t to;
    struct dev_table table;
    struct times t;
    double limit;

    must(link_dev_get(uuid, &other, &err), "device");
    if (!same)
        must(gpu->peer(me.dev->g, other->g, &err), "peer access");
    must(gpu->alloc(other->g, me.y.bytes, &to, &err), "target of the plain copy");
    t = plain_copy(to, false, NULL);
    limit = t.median;
    note(same ? "plain device copy" : "plain peer copy", s, &t, limit, "itself");
    must(dev_table_make(me.dev, me.dev->stream, me.y.segs, me.y.n_segs, DEV_MOVE, &table, &err),
         "table");
    if (same) {
        t = plain_copy(to, true, &table);
        note("one kernel, no digests", s, &t, limit, "plain copy");
        limit = t.median;
    }
    dev_table_free(me.dev, &table);
    gpu->free(other->g, to);
    return limit;
}

static void check(struct answer *a)
{
    uint64_t want[2];

    digest_slot(true, want);
    a->t.right &= memcmp(want, a->sum, sizeof(want)) == 0;
}

static void share_to(struct kid *k, const struct link_mem *mem, struct order *o, double *map_ms)
{
    o->what = DO_MAP;
    o->key = (struct link_key){ 0 };
    *map_ms = 0;
    do {
        must(link_cuda_ipc.share(me.ipc, mem, &o->key, &err), "share");
        *map_ms += ask(k, o).open_ms;
    } while (++o->key.part < o->key.parts);
    o->key.n_fds = 0;
}

static void pulls(struct kid *k, const struct shape *s, struct order *o, double limit,
                  const char *what, bool same)
{
    char name[64];
    struct answer a;

    o->what = DO_PULL;
    o->rounds = rounds;
    a = ask(k, o);
    check(&a);
    snprintf(name, sizeof(name), "pull by %s, digests", what);
    note(name, s, &a.t, limit, same ? "one kernel" : "plain peer copy");
    o->what = DO_UNMAP;
    (void)ask(k, o);
}

static void handle_each(struct kid *k, const struct shape *s, struct order *o, double limit)
{
    struct {
        struct gpu_handle h;
        uint64_t off, bytes;
    } *all = calloc(SHAPES_MAX, sizeof(*all));
    uint64_t size[SHAPES_MAX], addr[SHAPES_MAX];
    unsigned n = (unsigned)shape_tensors(s, size);

    for (unsigned i = 0; i < n; i++) {
        must(gpu->alloc(me.dev->g, size[i], &addr[i], &err), "tensor");
        all[i].bytes = size[i];
        must(gpu->ipc_get(me.dev->g, addr[i], &all[i].h, &all[i].off, &err), "handle");
    }
    o->what = DO_HANDLES;
    o->rounds = rounds < 8 ? rounds : 8;
    o->n_handles = n;
    tell(k->fd, o);
    if (send(k->fd, all, n * sizeof(*all), MSG_NOSIGNAL) != (ssize_t)(n * sizeof(*all)))
        exit(1);
    struct answer a;

    read_all(k->fd, &a, sizeof(a));
    note("a handle per tensor, opened each time", s, &a.t, limit, "plain copy");
    for (unsigned i = 0; i < n; i++)
        gpu->free(me.dev->g, addr[i]);
    free(all);
}

static void casts(struct kid *k, const struct shape *s, struct order *o)
{
    struct link_team team;
    struct answer a;
    struct times t;

    me.both[0] = me.place;
    me.both[1] = o->place;
    struct order n = *o;
    double limit = 0;

    n.place = me.place;
    n.rounds = rounds;
    for (int each = 0; each < 2; each++) {
        must(link_nccl.ticket(n.ticket, &err), "ticket");
        n.what = each ? DO_RAW_EACH : DO_RAW;
        tell(k->fd, &n);
        t = raw_nccl(n.ticket, 0, each ? s : NULL, rounds);
        read_all(k->fd, &a, sizeof(a));
        if (!each)
            limit = a.t.median > t.median ? a.t.median : t.median;
        note(each ? "NCCL, a broadcast per tensor" : "NCCL, one message", s, &a.t, limit,
             each ? "NCCL, one message" : "itself");
    }
    must(link_nccl.ticket(n.ticket, &err), "ticket");
    n.what = DO_NCCL;
    tell(k->fd, &n);
    team_of(&n, 0, &team);
    double open_ms = open_link(&link_nccl, &team, &me.nccl);

    read_all(k->fd, &a, sizeof(a));
    n.what = DO_CAST;
    tell(k->fd, &n);
    me.casts = true;
    (void)updates(rounds);
    me.casts = false;
    read_all(k->fd, &a, sizeof(a));
    check(&a);
    note("broadcast by NCCL, digests", s, &a.t, limit, "NCCL, one message");
    printf("{\"name\":\"%s communicator\",\"open_ms\":%.1f}\n", s->name, open_ms);
    link_nccl.close(FL_TAKE(me.nccl));
}

static void run_to(const char *self, const struct shape *s, const struct link_place *to, bool same)
{
    struct kid k = kid_new(self, to->gpu_uuid);
    struct order o = { .what = DO_SLOT, .shape = *s, .place = *to };
    struct answer a = ask(&k, &o);
    struct link_mem plain = { 0 };
    double limit, map_ms;
    uint64_t addr;

    printf("{\"name\":\"%s link opened\",\"ms\":%.1f}\n", s->name, a.open_ms);
    limit = peer_limit(s, to->gpu_uuid, same);
    share_to(&k, &me.slot, &o, &map_ms);
    printf("{\"name\":\"%s slot mapped\",\"chunks\":%u,\"ms\":%.3f}\n", s->name,
           link_pages_of(&me.slot)->n_chunks, map_ms);
    pulls(&k, s, &o, limit, "mapped chunks", same);
    if (me.place.legacy_ipc && gpu->alloc(me.dev->g, me.y.bytes, &addr, NULL) == FL_OK) {
        must(gpu->copy(me.dev->stream, addr, dev_addr(me.slot.addr), me.y.bytes, &err), "copy");
        must(gpu->stream_sync(me.dev->stream, &err), "copy");
        must(link_dev_foreign(me.place.gpu_uuid, addr, me.y.bytes, &plain, &err),
             "memory of others");
        share_to(&k, &plain, &o, &map_ms);
        pulls(&k, s, &o, limit, "one handle", same);
        link_dev_free(&plain);
        gpu->free(me.dev->g, addr);
    }
    if (me.place.legacy_ipc)
        handle_each(&k, s, &o, limit);
    if (!same && me.place.nccl_version)
        casts(&k, s, &o);
    kid_end(&k);
}

static void table(void)
{
    printf("\n%-48s %9s %9s %9s %9s  %6s %6s\n", "", "ms", "max", "cold", "device", "x", "GB/s");
    for (unsigned i = 0; i < n_lines; i++) {
        const struct line *l = &lines[i];

        printf("%-48s %9.3f %9.3f %9.3f %9.3f  %6.3f %6.0f%s\n", l->name, l->t.median, l->t.max,
               l->t.cold, l->t.device, l->t.median / l->limit, (double)l->bytes / l->t.median / 1e6,
               l->t.right ? "" : "  WRONG");
    }
}

static void places_of(const struct gpu_info *all, size_t n, struct link_place *out)
{
    struct gpu_found *found = calloc(n, sizeof(*found));

    for (size_t i = 0; i < n; i++)
        found[i] = (struct gpu_found){ .info = all[i],
                                       .opens = true,
                                       .fd_shares = all[i].posix_fd,
                                       .handle_shares = all[i].legacy_ipc,
                                       .peers = ~0ull };
    for (size_t i = 0; i < n; i++) {
        must(link_place_here(NULL, &out[i], &err), "place");
        must(link_place_device(&out[i], all[i].uuid, found, n, &err), "place");
    }
    free(found);
}

int main(int argc, char **argv)
{
    const struct shape *shapes[2] = { &shape_06, NULL };
    struct gpu_info all[GPU_MAX];
    struct link_place places[GPU_MAX];
    size_t n = GPU_MAX;

    if (argc == 3 && strcmp(argv[1], "--child") == 0)
        return child(argv[2]);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--big") == 0)
            shapes[1] = &shape_8;
        else if (strcmp(argv[i], "--tiny") == 0)
            shapes[0] = &shape_tiny;
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            rounds = (unsigned)atoi(argv[++i]);
    }
    rounds = rounds < 1 || rounds > ROUNDS_MAX ? 20 : rounds;
    must(gpu_pick(&gpu, &err), "devices");
    must(gpu->list(all, &n, &err), "devices");
    if (n == 0) {
        puts("{\"name\":\"bench_device\",\"skipped\":\"no device\"}");
        return 0;
    }
    places_of(all, n, places);
    side_open(all[0].uuid);
    me.place = places[0];
    struct link_team alone = { .members = &me.place, .n = 1 };

    (void)open_link(&link_cuda_ipc, &alone, &me.ipc);
    for (unsigned i = 0; i < 2 && shapes[i]; i++) {
        slot_new(shapes[i]);
        slot_fill();
        run_to(argv[0], shapes[i], &places[0], true);
        if (n > 1)
            run_to(argv[0], shapes[i], &places[1], false);
    }
    table();
    bool right = true;

    for (unsigned i = 0; i < n_lines; i++)
        right &= lines[i].t.right;
    return right ? 0 : 1;
}
