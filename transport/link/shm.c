/* transport/link/shm.c - processes of one machine: the pages themselves
 *
 * Memory is shared by descriptor and mapped; a pull is a copy on a pool thread, by the receiver
 * alone. A dead member disturbs nobody: its pages stay while somebody maps them. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/queue.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "kernels/digest.h"
#include "transport/link/link_priv.h"

enum {
    KEY_MAGIC = 0x6d687366,  /* "fshm" */
    VIEW_MAGIC = 0x77766366, /* "fcvw": link_mem.impl of what map() gave */
    MAX_PULLS = 256
}; /* in flight on a link; past it FL_AGAIN until one is back */
enum { SHM_BYTES_PER_US = 8000, SHM_START_NS = 20000 }; /* one core's copy, measured 8 to 13 GB/s */

struct shm_key {
    uint32_t magic, pad;
    uint64_t bytes;
};

/* A mapping of somebody's memory; pulls in flight count as users, so that unmap cannot come too
 * early. */
struct view {
    uint32_t magic, users;
    void *addr;
    uint64_t bytes;
};

enum pull_phase { PULL_WAITS, PULL_RUNS, PULL_OVER, PULL_GIVEN_UP };
struct pull {
    struct fl_work work;
    LIST_ENTRY(pull) next;
    struct shm *k;
    struct link_op *op; /* NULL: brought back by close */
    struct view *view;
    const char *from;
    char *to;
    const struct link_seg *segs;
    size_t n;
    uint64_t (*digests)[2];
    uint64_t bytes, began_ns;
    bool whole;            /* all of it was copied */
    enum pull_phase phase; /* under the link's lock */
};

struct shm {
    struct link base;
    atomic_bool stop;
    bool closed;
    LIST_HEAD(, pull) pulls;
    unsigned n_pulls;
    struct link_op *quiet;
    pthread_mutex_t lock;
    pthread_cond_t left; /* a pull stopped touching memory */
};

static bool shm_reaches(const struct link_place *a, const struct link_place *b,
                        struct fl_err *why_not)
{
    if (a->gpu_uuid[0] || b->gpu_uuid[0]) {
        fl_fail(why_not, FL_UNREACHABLE, "the weights at %s are on device %s",
                a->gpu_uuid[0] ? a->addr : b->addr, a->gpu_uuid[0] ? a->gpu_uuid : b->gpu_uuid);
        return false;
    }
    if (a->host_boot[0] && strcmp(a->host_boot, b->host_boot) == 0 && a->pid_ns == b->pid_ns &&
        strcmp(a->addr, b->addr) == 0)
        return true;
    fl_fail(why_not, FL_UNREACHABLE, "%s and %s are not one machine", a->addr, b->addr);
    return false;
}

static uint64_t shm_cost_ns(const struct link_place *from, const struct link_place *to,
                            uint64_t bytes)
{
    (void)from, (void)to;
    return SHM_START_NS + bytes * 1000 / SHM_BYTES_PER_US;
}

static enum fl_status shm_open_link(struct fl_loop *l, const struct link_team *team,
                                    struct link **out, struct link_op *ready, struct fl_err *err)
{
    struct shm *k = calloc(1, sizeof(*k));

    (void)team; /* the keys bring all that is needed */
    if (!k)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a link");
    k->base.loop = l;
    LIST_INIT(&k->pulls);
    pthread_mutex_init(&k->lock, NULL);
    pthread_cond_init(&k->left, NULL);
    *out = &k->base;
    link_tell_ready(&k->base, ready);
    return FL_OK;
}

static void shm_release(struct shm *k)
{
    pthread_cond_destroy(&k->left);
    pthread_mutex_destroy(&k->lock);
    free(k);
}

static enum fl_status shm_share(struct link *base, const struct link_mem *mine,
                                struct link_key *out, struct fl_err *err)
{
    const struct link_block *b = link_block_of(mine);
    struct shm_key key = { .magic = KEY_MAGIC, .bytes = mine->bytes };

    (void)base;
    if (!b)
        return fl_fail(
            err, FL_UNSUPPORTED,
            "memory at %p has no descriptor: only link_mem_alloc() makes what shm can share",
            mine->addr);
    memset(out->blob, 0, sizeof(out->blob));
    memcpy(out->blob, &key, sizeof(key));
    out->parts = 1;
    out->n_fds = 1;
    out->fds[0] = b->fd;
    return FL_OK;
}

/* Without the seals a peer that truncates its file would kill us by SIGBUS. */
static enum fl_status check_file(int fd, uint64_t bytes, struct fl_err *err)
{
    int seals = fcntl(fd, F_GET_SEALS), wanted = F_SEAL_SHRINK | F_SEAL_GROW;
    struct stat s;

    if (seals < 0 || fstat(fd, &s) < 0)
        return fl_fail_errno(err, "memory of a peer, descriptor %d", fd);
    if ((seals & wanted) != wanted)
        return fl_fail(err, FL_INVALID,
                       "memory of a peer is not sealed against shrinking (seals %#x)", seals);
    if ((uint64_t)s.st_size < bytes)
        return fl_fail(err, FL_INVALID, "memory of a peer has %llu bytes, its key says %llu",
                       (unsigned long long)s.st_size, (unsigned long long)bytes);
    return FL_OK;
}

static void view_put(struct view *v)
{
    if (--v->users > 0)
        return;
    munmap(v->addr, v->bytes);
    free(v);
}

static void shm_unmap(struct link *base, struct link_mem *theirs)
{
    (void)base;
    if (theirs->impl)
        view_put(theirs->impl);
    *theirs = (struct link_mem){ 0 };
}

static enum fl_status shm_map(struct link *base, const struct link_key *theirs, bool writable,
                              struct link_mem *out, struct fl_err *err)
{
    struct shm_key key;
    void *at = MAP_FAILED;

    memcpy(&key, theirs->blob, sizeof(key));
    if (theirs->part)
        shm_unmap(base, out);
    if (key.magic != KEY_MAGIC || theirs->n_fds != 1 || theirs->part || key.bytes == 0)
        return fl_fail(err, FL_CORRUPT, "not a key of shared memory: part %u, %u descriptors",
                       theirs->part, theirs->n_fds);
    FL_TRY(check_file(theirs->fds[0], key.bytes, err));
    struct view *v = malloc(sizeof(*v));

    if (!v)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a view");
    if (!FL_FAULT("link.map"))
        at = mmap(NULL, key.bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED,
                  theirs->fds[0], 0);
    if (at == MAP_FAILED) {
        enum fl_status st =
            fl_fail_errno(err, "map %llu bytes of a peer", (unsigned long long)key.bytes);

        free(v);
        return st;
    }
    *v = (struct view){ .magic = VIEW_MAGIC, .users = 1, .addr = at, .bytes = key.bytes };
    *out = (struct link_mem){ .addr = at, .bytes = key.bytes, .impl = v };
    return FL_OK;
}

static bool copy_run(const struct pull *p, size_t i, uint32_t row)
{
    const struct link_seg *s = &p->segs[i];
    const char *from = p->from + s->from_off + row * s->from_step;
    char *to = p->to + s->to_off + row * s->to_step;
    uint64_t at = 0, first_byte = s->first_byte + row * s->byte_step;

    while (at < s->run_bytes) {
        uint64_t n = s->run_bytes - at < LINK_STEP_BYTES ? s->run_bytes - at : LINK_STEP_BYTES;

        if (atomic_load_explicit(&p->k->stop, memory_order_relaxed))
            return false;
        if (p->digests)
            kernel_digest_copy(p->digests[i], to + at, from + at, n, first_byte + at);
        else
            memcpy(to + at, from + at, n);
        at += n;
    }
    return true;
}

static bool copy_all(const struct pull *p)
{
    for (size_t i = 0; i < p->n; i++)
        for (uint32_t row = 0; row < p->segs[i].rows; row++)
            if (!copy_run(p, i, row))
                return false;
    return !FL_FAULT("link.pull");
}

static void pull_work(struct fl_work *w)
{
    struct pull *p = container_of(w, struct pull, work);

    pthread_mutex_lock(&p->k->lock);
    bool runs = p->phase == PULL_WAITS; /* else close() has brought it back already */

    if (runs)
        p->phase = PULL_RUNS;
    pthread_mutex_unlock(&p->k->lock);
    if (!runs)
        return;
    p->whole = copy_all(p);
    pthread_mutex_lock(&p->k->lock);
    p->phase = PULL_OVER;
    pthread_cond_broadcast(&p->k->left);
    pthread_mutex_unlock(&p->k->lock);
}

static void pull_set(const struct pull *p, struct link_op *op, enum fl_status st)
{
    if (st == FL_OK && p->whole)
        link_op_set(op, FL_OK, "%s", "");
    else if (atomic_load(&p->k->stop) || st == FL_CANCELLED)
        link_op_set(op, FL_CANCELLED, "shm: a pull of %llu bytes was ended",
                    (unsigned long long)p->bytes);
    else if (st == FL_OK)
        link_op_set(op, FL_UNREACHABLE, "shm: a pull of %llu bytes broke off",
                    (unsigned long long)p->bytes);
    else
        link_op_set(op, st, "shm: no thread for a pull of %llu bytes",
                    (unsigned long long)p->bytes);
    op->bytes = p->bytes;
    op->took_ns = fl_clock_boot_ns() - p->began_ns;
}

static void pull_done(struct fl_work *w, enum fl_status st)
{
    struct pull *p = container_of(w, struct pull, work);
    struct shm *k = p->k;
    struct link_op *op = p->op;

    LIST_REMOVE(p, next);
    k->n_pulls--;
    if (op)
        pull_set(p, op, st);
    view_put(p->view);
    free(p);
    if (k->quiet && k->n_pulls == 0)
        link_tell_quiet(&k->base, FL_TAKE(k->quiet));
    if (k->closed && k->n_pulls == 0)
        shm_release(k);
    if (op)
        op->done(op);
}

static enum fl_status shm_pull(struct link *base, const struct link_mem *theirs,
                               const struct link_mem *mine, const struct link_seg *segs, size_t n,
                               uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    struct shm *k = container_of(base, struct shm, base);
    uint64_t bytes;

    if (atomic_load(&k->stop))
        return fl_fail(err, FL_CANCELLED, "shm: the link was aborted");
    if (k->n_pulls >= MAX_PULLS)
        return fl_fail(err, FL_AGAIN, "shm: %u pulls are in flight", k->n_pulls);
    const struct view *v = theirs->impl;

    if (!v || v->magic != VIEW_MAGIC)
        return fl_fail(err, FL_INVALID, "shm: memory at %p was not mapped by this link",
                       theirs->addr);
    FL_TRY(link_check_segs(segs, n, theirs->bytes, mine->bytes, &bytes, err));
    struct pull *p = calloc(1, sizeof(*p));

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a pull");
    *p = (struct pull){ .work = { .work = pull_work, .done = pull_done },
                        .k = k,
                        .op = op,
                        .view = theirs->impl,
                        .from = theirs->addr,
                        .to = mine->addr,
                        .segs = segs,
                        .n = n,
                        .digests = digests,
                        .bytes = bytes,
                        .began_ns = fl_clock_boot_ns() };
    p->view->users++;
    LIST_INSERT_HEAD(&k->pulls, p, next);
    k->n_pulls++;
    fl_work_start(base->loop, &p->work);
    return FL_OK;
}

static void shm_abort(struct link *base, struct link_op *quiet)
{
    struct shm *k = container_of(base, struct shm, base);

    atomic_store(&k->stop, true);
    if (k->n_pulls == 0)
        link_tell_quiet(base, quiet);
    else
        k->quiet = quiet;
}

/* A pull that runs is waited for: at most one step of LINK_STEP_BYTES. One that waits for a thread
 * is given up: the thread will touch nothing for it. */
static void shm_close(struct link *base)
{
    struct shm *k = container_of(base, struct shm, base);
    struct pull *p, *next;

    atomic_store(&k->stop, true);
    pthread_mutex_lock(&k->lock);
    for (p = LIST_FIRST(&k->pulls); p; p = LIST_NEXT(p, next)) {
        while (p->phase == PULL_RUNS)
            pthread_cond_wait(&k->left, &k->lock);
        if (p->phase == PULL_WAITS)
            p->phase = PULL_GIVEN_UP;
    }
    pthread_mutex_unlock(&k->lock);
    for (p = LIST_FIRST(&k->pulls); p; p = next) {
        struct link_op *op = FL_TAKE(p->op);

        next = LIST_NEXT(p, next);
        if (op) {
            pull_set(p, op, p->phase == PULL_OVER ? FL_OK : FL_CANCELLED);
            op->done(op);
        }
    }
    if (k->quiet)
        link_tell_quiet(base, FL_TAKE(k->quiet));
    link_tell_now(base);
    k->closed = true;
    if (k->n_pulls == 0)
        shm_release(k);
}

const struct link_ops link_shm = {
    .name = "shm",
    .caps = LINK_HOST | LINK_MAP | LINK_PULL | LINK_SEGS | LINK_ALONE,
    .reaches = shm_reaches,
    .cost_ns = shm_cost_ns,
    .ticket = link_no_ticket,
    .open = shm_open_link,
    .share = shm_share,
    .map = shm_map,
    .unmap = shm_unmap,
    .pull = shm_pull,
    .send = link_no_send,
    .recv = link_no_recv,
    .cast = link_no_cast,
    .cast_segs = link_no_cast_segs,
    .progress = link_no_progress,
    .event_fd = link_no_event_fd,
    .abort = shm_abort,
    .close = shm_close,
};
