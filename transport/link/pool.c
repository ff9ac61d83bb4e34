/* transport/link/pool.c - host memory that links can share: sealed memfds, touched in the
 * background */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/queue.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "transport/link/link_priv.h"

enum { BLOCK_MAGIC = 0x6b626c66 }; /* "flbk" */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14; older kernels say EINVAL */
#endif

const struct link_block *link_block_of(const struct link_mem *mem)
{
    const struct link_block *b = mem->impl;

    return b && !mem->on_device && b->magic == BLOCK_MAGIC ? b : NULL;
}

int link_mem_fd(const struct link_mem *mem)
{
    const struct link_block *b = link_block_of(mem);

    return b ? b->fd : -1;
}

static uint64_t whole_pages(uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    return (bytes + page - 1) / page * page;
}

enum fl_status link_mem_alloc(uint64_t bytes, struct link_mem *out, struct fl_err *err)
{
    struct link_block *b = malloc(sizeof(*b));
    uint64_t whole = whole_pages(bytes ? bytes : 1);
    void *at = MAP_FAILED;

    if (!b || bytes > INT64_MAX / 2) {
        free(b);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a region of %llu bytes",
                       (unsigned long long)bytes);
    }
    *b = (struct link_block){ BLOCK_MAGIC,
                              memfd_create("furlong-weights", MFD_CLOEXEC | MFD_ALLOW_SEALING),
                              whole };
    if (b->fd >= 0 && !FL_FAULT("link.memfd") && ftruncate(b->fd, (off_t)whole) == 0 &&
        fcntl(b->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, b->fd, 0);
    if (at == MAP_FAILED) {
        enum fl_status st = fl_fail_errno(err, "region of %llu bytes", (unsigned long long)bytes);

        if (b->fd >= 0)
            close(b->fd);
        free(b);
        return st;
    }
    (void)madvise(at, whole,
                  MADV_HUGEPAGE); /* where shared memory may have huge pages: fewer faults */
    *out = (struct link_mem){ .addr = at, .bytes = bytes, .impl = b };
    return FL_OK;
}

void link_mem_free(struct link_mem *mem)
{
    struct link_block *b = mem->impl;

    if (!link_block_of(mem))
        return;
    munmap(mem->addr, b->bytes);
    close(b->fd);
    free(b);
    *mem = (struct link_mem){ 0 };
}

/* First touch of shared memory costs more than the copy into it. */
static void touch(const struct link_mem *mem)
{
    const struct link_block *b = link_block_of(mem);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    if (madvise(mem->addr, b->bytes, MADV_POPULATE_WRITE) == 0 || errno != EINVAL)
        return; /* no memory: the first writer will meet it, as it would have without this */
    for (uint64_t at = 0; at < b->bytes; at += page)
        *((volatile char *)mem->addr + at) = 0;
}

struct kept {
    STAILQ_ENTRY(kept) next;
    struct link_mem mem;
};
struct making {
    struct fl_work work;
    LIST_ENTRY(making) next;
    struct link_pool *pool; /* NULL: it is gone */
    struct link_mem *out;
    struct link_op *op;
    struct link_mem made;
    uint64_t bytes;
    struct fl_err err;
    enum fl_status st;
};
struct link_pool {
    struct fl_loop *loop;
    uint64_t keep_bytes, kept_bytes;
    STAILQ_HEAD(, kept) kept;
    LIST_HEAD(, making) making;
};

enum fl_status link_pool_create(struct fl_loop *l, uint64_t keep_bytes, struct link_pool **out,
                                struct fl_err *err)
{
    struct link_pool *p = calloc(1, sizeof(*p));

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a pool");
    p->loop = l;
    p->keep_bytes = keep_bytes;
    STAILQ_INIT(&p->kept);
    LIST_INIT(&p->making);
    *out = p;
    return FL_OK;
}

static void make_work(struct fl_work *w)
{
    struct making *m = container_of(w, struct making, work);

    m->st = link_mem_alloc(m->bytes, &m->made, &m->err);
    if (m->st == FL_OK)
        touch(&m->made);
}

static void make_done(struct fl_work *w, enum fl_status st)
{
    struct making *m = container_of(w, struct making, work);

    if (!m->pool) { /* op came back when the pool went */
        if (st == FL_OK && m->st == FL_OK)
            link_mem_free(&m->made);
        free(m);
        return;
    }
    LIST_REMOVE(m, next);
    if (st != FL_OK) {
        link_op_set(m->op, st, "region of %llu bytes: no thread to make it",
                    (unsigned long long)m->bytes);
    } else {
        m->op->err = m->st == FL_OK ? (struct fl_err){ 0 } : m->err;
        m->op->bytes = m->bytes;
        if (m->st == FL_OK)
            *m->out = m->made;
    }
    struct link_op *op = m->op;

    free(m);
    op->done(op);
}

static bool take_kept(struct link_pool *p, uint64_t bytes, struct link_mem *out)
{
    struct kept *k;

    STAILQ_FOREACH(k, &p->kept, next)
    {
        const struct link_block *b = link_block_of(&k->mem);

        if (b->bytes != whole_pages(bytes ? bytes : 1))
            continue;
        STAILQ_REMOVE(&p->kept, k, kept, next);
        p->kept_bytes -= b->bytes;
        *out = k->mem;
        out->bytes = bytes;
        free(k);
        return true;
    }
    return false;
}

enum fl_status link_pool_alloc(struct link_pool *p, uint64_t bytes, struct link_mem *out,
                               struct link_op *op, struct fl_err *err)
{
    if (take_kept(p, bytes, out)) {
        link_op_set(op, FL_OK, "%s", "");
        op->bytes = bytes;
        link_op_end(p->loop, op);
        return FL_OK;
    }
    struct making *m = calloc(1, sizeof(*m));

    if (!m)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a region of %llu bytes",
                       (unsigned long long)bytes);
    *m = (struct making){ .work = { .work = make_work, .done = make_done },
                          .pool = p,
                          .out = out,
                          .op = op,
                          .bytes = bytes };
    LIST_INSERT_HEAD(&p->making, m, next);
    fl_work_start(p->loop, &m->work);
    return FL_OK;
}

struct ending {
    struct fl_work work;
    struct link_mem mem;
};

static void end_work(struct fl_work *w)
{
    link_mem_free(&container_of(w, struct ending, work)->mem);
}

static void end_done(struct fl_work *w, enum fl_status st)
{
    struct ending *e = container_of(w, struct ending, work);

    if (st != FL_OK)
        link_mem_free(&e->mem);
    free(e);
}

void link_pool_free(struct link_pool *p, struct link_mem *mem)
{
    const struct link_block *b = link_block_of(mem);
    struct kept *k = b && p->kept_bytes + b->bytes <= p->keep_bytes ? malloc(sizeof(*k)) : NULL;

    if (k) {
        k->mem = *mem;
        STAILQ_INSERT_HEAD(&p->kept, k, next);
        p->kept_bytes += b->bytes;
        *mem = (struct link_mem){ 0 };
        return;
    }
    struct ending *e =
        b ? malloc(sizeof(*e)) : NULL; /* giving a gigabyte back takes long: not on the loop */

    if (!e) {
        link_mem_free(mem);
        return;
    }
    *e = (struct ending){ .work = { .work = end_work, .done = end_done }, .mem = *mem };
    *mem = (struct link_mem){ 0 };
    fl_work_start(p->loop, &e->work);
}

void link_pool_destroy(struct link_pool *p)
{
    if (!p)
        return;
    for (struct kept *k; (k = STAILQ_FIRST(&p->kept));) {
        STAILQ_REMOVE_HEAD(&p->kept, next);
        link_mem_free(&k->mem);
        free(k);
    }
    for (struct making *m; (m = LIST_FIRST(&p->making));) {
        LIST_REMOVE(m, next);
        m->pool = NULL;
        link_op_set(m->op, FL_CANCELLED, "the pool that makes %llu bytes has gone",
                    (unsigned long long)m->bytes);
        m->op->done(m->op);
    }
    free(p);
}
