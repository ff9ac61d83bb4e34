#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/gpu/gpu_priv.h"

enum {
    HUGE = 2 << 20,
    TOUCH_THREADS = 8,
    TOUCH_EACH = 64 << 20
}; /* a thread is worth 64 MiB of pages */
struct part {
    pthread_t thread;
    char *at;
    size_t bytes, page;
};

static void *touch(void *arg)
{
    struct part *p = arg;

    for (size_t i = 0; i < p->bytes; i += p->page)
        ((volatile char *)p->at)[i] = 0;
    return NULL;
}

static void touch_all(char *at, size_t bytes)
{
    struct part parts[TOUCH_THREADS];
    size_t cores = (size_t)sysconf(_SC_NPROCESSORS_ONLN), want = bytes / TOUCH_EACH + 1, n = 0,
           done = 0;

    want = want > TOUCH_THREADS ? TOUCH_THREADS : want;
    want = want > cores ? cores : want;
    size_t each = (bytes / want + HUGE - 1) / HUGE * HUGE;
    for (; n + 1 < want && done < bytes; n++, done += each) {
        size_t len = bytes - done < each ? bytes - done : each;

        parts[n] =
            (struct part){ .at = at + done, .bytes = len, .page = (size_t)sysconf(_SC_PAGESIZE) };
        if (pthread_create(&parts[n].thread, NULL, touch, &parts[n]) != 0)
            break;
    }
    struct part rest = { .at = at + done,
                         .bytes = bytes - done,
                         .page = (size_t)sysconf(_SC_PAGESIZE) };

    touch(&rest);
    for (size_t i = 0; i < n; i++)
        pthread_join(parts[i].thread, NULL);
}

enum fl_status gpu_touched_pages(uint64_t bytes, void **out, struct fl_err *err)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), want;
    char *at;

    bytes = (bytes + page - 1) / page * page;
    want = bytes + HUGE;
    at = FL_FAULT("gpu.pin") ? MAP_FAILED
                             : mmap(NULL, want, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (at == MAP_FAILED)
        return fl_fail_errno(err, "%llu bytes of host memory to pin", (unsigned long long)bytes);
    size_t skip = (HUGE - (uintptr_t)at % HUGE) % HUGE;

    if (skip)
        (void)munmap(at, skip);
    (void)munmap(at + skip + bytes, want - skip - bytes);
    (void)madvise(at + skip, bytes, MADV_HUGEPAGE); /* a wish */
    touch_all(at + skip, bytes);
    *out = at + skip;
    return FL_OK;
}
