#include "common/gpu/guard.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct kept {
    struct kept *next;
    uint64_t addr, bytes;
    int prot;
};
static struct kept *all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned open_by;

bool guard_on(void)
{
    const char *word = getenv("FURLONG_GPU_FAKE_GUARD");

    return word && *word && strcmp(word, "0") != 0;
}

static void set(const struct kept *k, bool open)
{
    /* Cannot fail but for want of memory for the map: then the memory stays as it is. */
    (void)mprotect((void *)(uintptr_t)k->addr, k->bytes, open ? k->prot : PROT_NONE);
}

void guard_add(uint64_t addr, uint64_t bytes, int prot)
{
    struct kept *k = guard_on() ? malloc(sizeof(*k)) : NULL;

    if (!k)
        return;
    pthread_mutex_lock(&lock);
    *k = (struct kept){ all, addr, bytes, prot };
    all = k;
    set(k, open_by > 0);
    pthread_mutex_unlock(&lock);
}

void guard_remove(uint64_t addr, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    for (struct kept **p = &all; *p;) {
        struct kept *k = *p;

        if (k->addr < addr || k->addr >= addr + bytes) {
            p = &k->next;
            continue;
        }
        *p = k->next;
        free(k);
    }
    pthread_mutex_unlock(&lock);
}

void guard_open(void)
{
    pthread_mutex_lock(&lock);
    if (open_by++ == 0)
        for (const struct kept *k = all; k; k = k->next)
            set(k, true);
    pthread_mutex_unlock(&lock);
}

void guard_close(void)
{
    pthread_mutex_lock(&lock);
    if (--open_by == 0)
        for (const struct kept *k = all; k; k = k->next)
            set(k, false);
    pthread_mutex_unlock(&lock);
}
