#include "bench/device_side.h"
#include <sys/socket.h>
#include <unistd.h>

enum { WINDOW = 3 };
#define BUCKET_BYTES (512ull << 20)
static struct fl_err err;
struct side me;

double now_ms(void)
{
    return (double)fl_clock_boot_ns() / 1e6;
}

void lap(struct laps *l, int i, double ms)
{
    if (i == -WARM)
        l->cold = ms;
    if (i < 0)
        return;
    l->ms[i] = ms;
    l->max = ms > l->max ? ms : l->max;
}

struct times laps_times(struct laps *l, unsigned n)
{
    return (
        struct times){ .cold = l->cold, .median = median(l->ms, n), .max = l->max, .right = true };
}

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

/* ==== what the two say ======================================================================== */
void tell(int fd, const struct order *o)
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
    if (sendmsg(fd, &m, MSG_NOSIGNAL) != (ssize_t)sizeof(*o))
        die("the other process", NULL);
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

void read_all(int fd, void *at, size_t n)
{
    if (recv(fd, at, n, MSG_WAITALL) != (ssize_t)n)
        die("the other process", &(struct fl_err){ .text = "it is gone" });
}

/* ==== one of them ============================================================================= */
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
    must(st);
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

struct times updates(unsigned n)
{
    struct laps wall = { 0 };
    double device[ROUNDS_MAX];

    for (int i = -WARM; i < (int)n; i++) {
        double began = now_ms();

        one_update();
        lap(&wall, i, now_ms() - began);
        if (i >= 0)
            device[i] = me.device_ms;
    }
    struct times t = laps_times(&wall, n);

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

void digest_slot(bool from, uint64_t out[2])
{
    memset(me.digests, 0, me.y.n_segs * sizeof(*me.digests));
    must(link_mem_digest(&me.slot, me.y.segs, me.y.n_segs, from, me.digests, &err));
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

double open_link(const struct link_ops *ops, const struct link_team *team, struct link **out)
{
    struct opening w = { .op = { .done = on_open } };
    double began = now_ms();

    must(ops->open(me.loop, team, out, &w.op, &err));
    while (!w.came)
        fl_loop_turn(me.loop, -1);
    err = w.op.err;
    must(w.op.err.status);
    return now_ms() - began;
}

void slot_new(const struct shape *s)
{
    if (me.slot.addr)
        link_dev_free(&me.slot);
    free(me.digests);
    lay_out(&me.y, s);
    me.digests = calloc(me.y.n_segs, sizeof(*me.digests));
    must(link_dev_alloc(me.place.gpu_uuid, me.y.bytes, &me.slot, &err));
}

/* ==== a handle per tensor, as others do it ==================================================== */
static struct times by_handles(int fd, unsigned n, unsigned n_handles)
{
    struct piece *all = calloc(n_handles, sizeof(*all));
    struct laps wall = { 0 };

    read_all(fd, all, n_handles * sizeof(*all));
    for (int i = -WARM; i < (int)n; i++) {
        double began = now_ms();
        uint64_t to = dev_addr(me.slot.addr), from;

        for (unsigned k = 0; k < n_handles; k++) {
            must(me.gpu->ipc_open(me.dev->g, &all[k].h, &from, &err));
            must(me.gpu->copy(me.dev->stream, to, from + all[k].off, all[k].bytes, &err));
            must(me.gpu->stream_sync(me.dev->stream, &err)); /* it is closed, so it must be over */
            me.gpu->ipc_close(me.dev->g, from);
            to += (all[k].bytes + SHAPES_ALIGN - 1) / SHAPES_ALIGN * SHAPES_ALIGN;
        }
        lap(&wall, i, now_ms() - began);
    }
    free(all);
    return laps_times(&wall, n);
}

/* ==== NCCL by hand: one message of all bytes, the limit of casts; or one a tensor ============= */
static void nccl_settle(const struct nccl_api *api, nccl_comm c)
{
    int r = NCCL_IN_PROGRESS;

    while (api->async_error(c, &r) == NCCL_OK && r == NCCL_IN_PROGRESS)
        ;
    if (r != NCCL_OK)
        must(fl_fail(&err, FL_UNREACHABLE, "NCCL: %s", api->error_text(r)));
}

/* The slot's bytes from rank 0: at once, or tensor by tensor, the next one when the last has been
 * queued, as a loop over parameters does. */
static void raw_broadcast(const struct nccl_api *api, nccl_comm c, const struct shape *each)
{
    void *stream = me.gpu->stream_raw(me.dev->stream);
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

struct times raw_nccl(const uint8_t *ticket, int rank, const struct shape *each, unsigned n)
{
    const struct nccl_api *api;
    struct nccl_config config = { sizeof(config), NCCL_CONFIG_MAGIC, NCCL_CONFIG_VERSION, 0,
                                  NCCL_UNDEFINED, NCCL_UNDEFINED,    NCCL_UNDEFINED,      NULL,
                                  NCCL_UNDEFINED };
    struct nccl_id id;
    nccl_comm c;
    struct laps wall = { 0 };
    uint64_t free_bytes, all;

    must(nccl_load(&api, &err));
    memcpy(&id, ticket, sizeof(id));
    (void)me.gpu->memory(me.dev->g, &free_bytes, &all, NULL); /* current on this thread now */
    (void)api->init(&c, 2, id, rank, &config);
    nccl_settle(api, c);
    for (int i = -WARM; i < (int)n; i++) {
        double began = now_ms();

        raw_broadcast(api, c, each);
        must(me.gpu->stream_sync(me.dev->stream, &err));
        lap(&wall, i, now_ms() - began);
    }
    (void)api->abort(c);
    return laps_times(&wall, n);
}

/* ==== the other process ======================================================================= */
void side_open(const char *uuid)
{
    must(fl_loop_create(NULL, &me.loop, &err));
    must(gpu_pick(&me.gpu, &err));
    must(link_dev_get(uuid, &me.dev, &err));
}

static void child_map(const struct order *o)
{
    must(link_cuda_ipc.map(me.ipc, &o->key, false, &me.view, &err));
    for (unsigned i = 0; i < o->key.n_fds; i++)
        close(o->key.fds[i]);
}

void team_of(const struct order *o, unsigned self, struct link_team *team)
{
    *team = (struct link_team){ .members = me.both, .n = 2, .self = self };
    memcpy(team->ticket, o->ticket, sizeof(team->ticket));
}

int child(const char *uuid)
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
            must(me.gpu->fill(me.dev->stream, dev_addr(me.slot.addr), 0xa5, me.slot.bytes, &err));
            must(me.gpu->stream_sync(me.dev->stream, &err));
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
