/* transport/link/mem.c - host memory that links can share: sealed memfds */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "transport/link/link_priv.h"

enum { BLOCK_MAGIC = 0x6b626c66 }; /* "flbk" */

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
    /* where shared memory may have huge pages: fewer faults */
    (void)madvise(at, whole, MADV_HUGEPAGE);
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
