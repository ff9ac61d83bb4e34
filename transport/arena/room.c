/* transport/arena/room.c - what the device still has: waited for, explained, watched
 *
 * Memory that another process has given up comes back when the driver has reaped it, tens of
 * milliseconds later; one that answered too early gives it back later still. */
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "common/base/str.h"
#include "common/gpu/watch.h"
#include "transport/arena/arena_priv.h"

enum { LOOK_NS = 5000000, PROCS = 16, GROWS_BYTES = 64 << 20, GROWS_TIMES = 3 };

static bool device_says(struct arena *a, uint64_t *free_bytes, uint64_t *total)
{
    return !a->info.integrated && a->gpu->memory(a->g, free_bytes, total, NULL) == FL_OK &&
           *total != UINT64_MAX;
}

enum fl_status arena_room_wait(struct arena *a, uint64_t bytes, struct fl_err *err)
{
    const struct timespec nap = { .tv_nsec = LOOK_NS };
    uint64_t until = arena_now_ns() + a->wait_ms * 1000000ull, left, total;

    for (;;) {
        pthread_mutex_lock(&a->mu);
        bool fits = !device_says(a, &left, &total) || left >= bytes, late = arena_now_ns() >= until;

        if (!fits && late)
            arena_say_full(a, bytes, err);
        pthread_mutex_unlock(&a->mu);
        if (fits || late)
            return fits ? FL_OK : FL_EXHAUSTED;
        nanosleep(&nap, NULL);
    }
}

/* Other processes, as the driver's table has them; ours is told tag by tag. */
void arena_say_others(struct arena *a, struct fl_str *s)
{
    struct gpu_proc all[PROCS];
    struct gpu_watch *w = NULL;
    size_t n = PROCS, said = 0;
    char size[16];

    if (a->info.integrated || a->gpu == &gpu_host || gpu_watch_open(NULL, &w, NULL) != FL_OK)
        return;
    if (gpu_watch_procs(w, a->info.uuid, all, &n, NULL) != FL_OK)
        n = 0;
    for (size_t i = 0; i < n; i++)
        if (all[i].pid != getpid() && all[i].bytes && all[i].bytes != UINT64_MAX)
            fl_str_add(s, "%spid %d has %s", said++ ? ", " : "; ", all[i].pid,
                       fl_bytes_text(size, all[i].bytes));
    gpu_watch_close(w);
}

void arena_growth_note(struct arena *a, struct arena_moved *m)
{
    struct growth *g = &a->growth;
    uint64_t left, total;

    if (!device_says(a, &left, &total))
        return;
    uint64_t used = total - left, rose = used > g->used_bytes ? used - g->used_bytes : 0;
    bool first = !g->noted;

    g->noted = true;
    g->used_bytes = used;
    if (first)
        return;
    g->rises = rose > GROWS_BYTES ? g->rises + 1 : 0;
    g->rose_bytes = g->rises ? g->rose_bytes + rose : 0;
    m->grown_bytes = g->rises >= GROWS_TIMES ? g->rose_bytes : 0;
}
