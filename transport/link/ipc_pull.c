/* transport/link/ipc_pull.c - a bucket as one launch, or as copies and the digests behind them */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/link/ipc_priv.h"

enum {
    DIGESTS_MIN = 1024,
    FAR_MEAN_BYTES = 1 << 20,
    FULL_BYTES = 448 << 20 /* of a bucket: one that has less is the last one, mostly */
};

/* What is digested after the last byte has come is waited for: so little of it is left for then.
 * Not less, though, than comes while the rest is digested, ten times as fast as a link brings it
 * and 5 us after it has come: that part is digested behind it. Another copy costs 4 us, and behind
 * a full bucket comes the next one, whose bytes take longer. */
static size_t last_part(const struct link_seg *segs, size_t n)
{
    uint64_t all = 0, left = 0;
    size_t i = n;

    for (size_t k = 0; k < n; k++)
        all += segs[k].rows * segs[k].run_bytes;
    while (all < FULL_BYTES && i > 0 &&
           (left += segs[i - 1].rows * segs[i - 1].run_bytes) <= all / 8)
        i--;
    return i; /* n: all at once */
}

/* Long stretches from another device: the copy engines reach 0.99 of the link's rate and a kernel
 * that reads over it 0.93. */
static struct dev_stretch *far_stretches(const struct link_seg *segs, size_t n, size_t cut,
                                         size_t *cut_out, size_t *n_out)
{
    struct dev_stretch *far = malloc((n + 1) * sizeof(*far));
    uint64_t bytes = 0;
    size_t first = far ? dev_stretches(segs, cut, far) : 0;
    size_t made = far ? first + dev_stretches(segs + cut, n - cut, far + first) : 0;

    for (size_t i = 0; i < made; i++) {
        if (far[i].bytes == 0)
            made = 0;
        else
            bytes += far[i].bytes;
    }
    if (made == 0 || bytes / made < FAR_MEAN_BYTES) {
        free(far);
        return NULL;
    }
    *cut_out = first;
    *n_out = made;
    return far;
}

static enum fl_status table_far(struct ipc_table *t, const struct link_seg *segs, size_t n,
                                struct fl_err *err)
{
    size_t cut = last_part(segs, n);
    struct kernel_piece *pieces = NULL;

    t->far = far_stretches(segs, n, cut, &t->far_cut, &t->n_far);
    if (!t->far)
        return FL_OK; /* by a kernel that reads over there */
    enum fl_status st = dev_pieces_cut(segs, cut, &pieces, &t->t_cut, err);

    free(pieces); /* how many there are is asked for */
    if (st != FL_OK)
        free(FL_TAKE(t->far));
    return st;
}

/* ==== tables ================================================================================== */
void ipc_table_drop(struct ipc *k, struct ipc_table *t)
{
    dev_table_free(k->dev, &t->t); /* waits for the launches that read it */
    free(t->far);
    *t = (struct ipc_table){ 0 };
}

static enum fl_status table_for(struct ipc *k, const struct link_seg *segs, size_t n, bool from_far,
                                struct ipc_table **out, struct fl_err *err)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(segs, n * sizeof(*segs), from_far);
    struct ipc_table *oldest = &k->tables[0];

    for (unsigned i = 0; i < IPC_TABLES; i++) {
        struct ipc_table *t = &k->tables[i];

        if (t->t.addr && t->key[0] == h.low64 && t->key[1] == h.high64) {
            t->used = ++k->uses;
            *out = t;
            return FL_OK;
        }
        if (t->used < oldest->used)
            oldest = t;
    }
    ipc_table_drop(k, oldest);
    *oldest = (struct ipc_table){ .key = { h.low64, h.high64 } };
    if (from_far)
        FL_TRY(table_far(oldest, segs, n, err));
    enum fl_status st = dev_table_make(k->dev, k->dev->upload, segs, n,
                                       oldest->far ? DEV_TO : DEV_MOVE, &oldest->t, err);

    if (st != FL_OK) {
        ipc_table_drop(k, oldest);
        return st;
    }
    oldest->used = ++k->uses;
    *out = oldest;
    return FL_OK;
}

/* Events and room for n digests: made once for each place in the ring, and kept. */
static enum fl_status pull_room(struct ipc *k, struct ipc_pull *p, size_t n, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;
    size_t room = n > DIGESTS_MIN ? 2 * n : DIGESTS_MIN;

    if (!p->begun)
        FL_TRY(gpu->event(k->dev->g, &p->begun, err));
    if (!p->moved)
        FL_TRY(gpu->event(k->dev->g, &p->moved, err));
    if (!p->rest)
        FL_TRY(gpu->event(k->dev->g, &p->rest, err));
    if (!p->ended)
        FL_TRY(gpu->event(k->dev->g, &p->ended, err));
    if (p->room >= n)
        return FL_OK;
    if (p->sums)
        gpu->free(k->dev->g, p->sums);
    if (p->back)
        gpu->unpin(k->dev->g, p->back);
    p->sums = 0;
    p->back = NULL;
    p->room = 0;
    FL_TRY(gpu->alloc(k->dev->g, room * sizeof(*p->back), &p->sums, err));
    FL_TRY(gpu->pin(k->dev->g, room * sizeof(*p->back), (void **)&p->back, err));
    p->room = room;
    return FL_OK;
}

/* The kernel a on stream s, and all that was summed up on its way to the host. */
static enum fl_status launch_kernel(struct ipc *k, struct ipc_pull *p, struct gpu_stream *s,
                                    const struct kernel_move_args *a, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;

    FL_TRY(kernel_move_start(gpu, k->dev->g, s, a, err));
    if (p->digests)
        FL_TRY(gpu->copy(s, dev_addr(p->back), p->sums, p->n * sizeof(*p->back), err));
    return gpu->event_record(p->ended, s, err);
}

static enum fl_status clear_sums(struct ipc *k, struct ipc_pull *p, struct gpu_stream *s,
                                 struct fl_err *err)
{
    return p->digests ? k->dev->gpu->fill(s, p->sums, 0, p->n * sizeof(*p->back), err) : FL_OK;
}

static enum fl_status copy_far(struct ipc *k, const struct ipc_table *t, size_t first, size_t end,
                               uint64_t from, uint64_t to, struct fl_err *err)
{
    for (size_t i = first; i < end; i++)
        FL_TRY(k->dev->gpu->copy(k->stream, to + t->far[i].to_off, from + t->far[i].from_off,
                                 t->far[i].bytes, err));
    return FL_OK;
}

static enum fl_status launch_far(struct ipc *k, struct ipc_pull *p, const struct ipc_table *t,
                                 uint64_t from, uint64_t to, struct fl_err *err)
{
    const struct gpu_ops *gpu = k->dev->gpu;
    struct kernel_move_args a = {
        .pieces = t->t.addr, .n = t->t_cut, .from = to, .digests = p->sums
    };
    size_t done = 0;

    /* first: the link is what is waited for */
    FL_TRY(copy_far(k, t, 0, t->far_cut, from, to, err));
    FL_TRY(clear_sums(k, p, k->aside, err));
    if (p->digests && t->t_cut < t->t.n) { /* while the rest is on its way */
        FL_TRY(gpu->event_record(p->moved, k->stream, err));
        FL_TRY(gpu->stream_wait(k->aside, p->moved, err));
        FL_TRY(kernel_move_start(gpu, k->dev->g, k->aside, &a, err));
        done = t->t_cut;
    }
    FL_TRY(copy_far(k, t, t->far_cut, t->n_far, from, to, err));
    if (!p->digests)
        return gpu->event_record(p->ended, k->stream, err);
    a.pieces += done * sizeof(struct kernel_piece);
    a.n = t->t.n - done;
    FL_TRY(gpu->event_record(p->rest, k->stream, err));
    FL_TRY(gpu->stream_wait(k->aside, p->rest, err));
    return launch_kernel(k, p, k->aside, &a, err);
}

static enum fl_status launch(struct ipc *k, struct ipc_pull *p, const struct ipc_table *t,
                             const struct link_mem *theirs, const struct link_mem *mine,
                             struct fl_err *err)
{
    struct kernel_move_args a = { .pieces = t->t.addr,
                                  .n = t->t.n,
                                  .from = dev_addr(theirs->addr),
                                  .to = dev_addr(mine->addr),
                                  .digests = p->digests ? p->sums : 0 };

    if (t->far) {
        FL_TRY(k->dev->gpu->event_record(p->begun, k->stream, err));
        return launch_far(k, p, t, a.from, a.to, err);
    }
    /* the device has come to this process, if it was at another */
    FL_TRY(clear_sums(k, p, k->stream, err));
    FL_TRY(k->dev->gpu->event_record(p->begun, k->stream, err));
    return launch_kernel(k, p, k->stream, &a, err);
}

static enum fl_status pull_check(const struct ipc *k, const struct link_mem *theirs,
                                 const struct link_mem *mine, struct fl_err *err)
{
    const struct ipc_view *v = theirs->impl;
    const struct link_pages *p = link_pages_of(mine);

    if (k->stop)
        return fl_fail(err, FL_CANCELLED, "cuda_ipc: the link was aborted");
    if (k->state != IPC_OPEN)
        return fl_fail(err, FL_AGAIN, "cuda_ipc: the link is not open yet");
    if (!v || !theirs->on_device || v->magic != IPC_VIEW_MAGIC)
        return fl_fail(err, FL_INVALID, "cuda_ipc: memory at %p was not mapped by this link",
                       theirs->addr);
    if (v->key.kind == IPC_CHUNKS && v->n_mapped != v->key.n_chunks)
        return fl_fail(err, FL_INVALID, "cuda_ipc: %u of %u chunks are mapped", v->n_mapped,
                       v->key.n_chunks);
    if (!p || strcmp(p->uuid, k->self.gpu_uuid) != 0)
        return fl_fail(err, FL_INVALID, "cuda_ipc: memory at %p is not on device %s", mine->addr,
                       k->self.gpu_uuid);
    if (k->n_pulls >= IPC_MAX_PULLS)
        return fl_fail(err, FL_AGAIN, "cuda_ipc: %u pulls are in flight", k->n_pulls);
    return FL_OK;
}

/* The stream has one thing after the other. */
static uint64_t expected_ns(const struct ipc *k, const struct ipc_view *v, uint64_t bytes,
                            uint64_t now)
{
    const struct ipc_pull *before = &k->pulls[(k->first + k->n_pulls - 1) % IPC_MAX_PULLS];
    struct link_place from = { 0 };
    uint64_t due = k->n_pulls ? before->began_ns + before->expect_ns : now;

    (void)FL_COPY(from.gpu_uuid, v->key.uuid);
    return ipc_copy_ns(&from, &k->self, bytes) + (due > now ? due - now : 0);
}

enum fl_status ipc_pull(struct link *base, const struct link_mem *theirs,
                        const struct link_mem *mine, const struct link_seg *segs, size_t n,
                        uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    struct ipc *k = container_of(base, struct ipc, base);
    struct ipc_pull *p;
    struct ipc_table *table;
    uint64_t bytes;

    FL_TRY(pull_check(k, theirs, mine, err));
    if (k->n_pulls == 0)
        k->first = 0; /* room that is made already */
    p = &k->pulls[(k->first + k->n_pulls) % IPC_MAX_PULLS];
    FL_TRY(link_check_segs(segs, n, theirs->bytes, mine->bytes, &bytes, err));
    p->view = theirs->impl;
    FL_TRY(table_for(k, segs, n, strcmp(p->view->key.uuid, k->self.gpu_uuid) != 0, &table, err));
    p->op = op;
    p->digests = digests;
    p->n = n;
    p->bytes = bytes;
    p->began_ns = fl_clock_boot_ns();
    p->expect_ns = expected_ns(k, p->view, bytes, p->began_ns);
    FL_TRY(pull_room(k, p, n, err));
    pthread_mutex_lock(&k->dev->lock);
    enum fl_status st = launch(k, p, table, theirs, mine, err);

    pthread_mutex_unlock(&k->dev->lock);
    if (st != FL_OK) { /* part of it may be on the stream: nothing of it is left when we return */
        (void)k->dev->gpu->stream_sync(k->stream, NULL);
        (void)k->dev->gpu->stream_sync(k->aside, NULL);
        return st;
    }
    p->view->users++;
    if (k->n_pulls++ == 0)
        fl_post(base->loop, &k->poll);
    return FL_OK;
}
