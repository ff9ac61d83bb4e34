/* tests/link/fake_nccl.c - a library with NCCL's face for tests: ranks meet in shared memory
 *
 * As a communicator that does not block: every call returns at once, and is in progress until its
 * bytes have moved. A rank that is dead or silent is seen by nobody: the others stay in progress
 * until they abort. One root a communicator at a time, as the link uses it. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "common/gpu/fake.h"

enum {
    OK = 0,
    SYSTEM_ERROR = 2,
    INVALID = 4,
    IN_PROGRESS = 7,
    RANKS = 16,
    WINDOW = 1 << 20,
    WARM = 4 << 20
};
struct world { /* shared; begins as zeros */
    atomic_uint joined, left;
    atomic_ullong wrote;          /* bytes, by whoever was root */
    atomic_ullong seen[RANKS];    /* by each                    */
    unsigned char window[WINDOW]; /* from a multiple of WINDOW on */
};
struct order {
    struct order *next;
    const void *from;
    void *to;
    size_t bytes;
    int root;
    struct fake_stream device; /* both are its memory */
};
struct comm {
    struct world *w;
    char name[128];
    int n, rank;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct order *first, **last;
    bool busy, joining;
    atomic_bool stop;
    unsigned queued; /* orders that streams have, and will come to */
};
struct id {
    char internal[128];
};
struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

static atomic_int silent_rank = -1;
static atomic_int aborts, casts;

/* From now on that rank moves nothing; -1: none. */
void fake_nccl_silence(int rank);
int fake_nccl_aborts(void);
int fake_nccl_casts(void); /* by roots, but for the one that warms a communicator up */
int ncclGetVersion(int *version);
int ncclGetUniqueId(struct id *id);
int ncclCommInitRankConfig(struct comm **out, int n, struct id id, int rank, struct config *c);
int ncclCommGetAsyncError(struct comm *c, int *error);
int ncclCommAbort(struct comm *c);
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *c,
                  void *stream);
const char *ncclGetErrorString(int error);

void fake_nccl_silence(int rank)
{
    silent_rank = rank;
}

int fake_nccl_aborts(void)
{
    return aborts;
}

int fake_nccl_casts(void)
{
    return casts;
}

#ifndef FAKE_NCCL_NUMBER
#define FAKE_NCCL_NUMBER 22809
#endif
int ncclGetVersion(int *version)
{
    const char *said = getenv("FAKE_NCCL_VERSION");

    *version = said ? atoi(said) : FAKE_NCCL_NUMBER;
    return OK;
}

const char *ncclGetErrorString(int error)
{
    return error == SYSTEM_ERROR ? "unhandled system error"
           : error == INVALID    ? "invalid argument"
                                 : "error";
}

int ncclGetUniqueId(struct id *id)
{
    unsigned long long r[2];

    if (getrandom(r, sizeof(r), 0) != sizeof(r))
        return SYSTEM_ERROR;
    memset(id, 0, sizeof(*id));
    snprintf(id->internal, sizeof(id->internal), "/fake-nccl-%llx%llx", r[0], r[1]);
    return OK;
}

static bool go_on(const struct comm *c)
{
    const struct timespec nap = { .tv_nsec = 50000 };

    nanosleep(&nap, NULL);
    return !c->stop;
}

static bool all_seen(const struct comm *c, unsigned long long wrote)
{
    for (int i = 0; i < c->n; i++)
        if (i != c->rank && c->w->seen[i] != wrote)
            return false;
    return true;
}

static bool run_root(struct comm *c, const struct order *o)
{
    for (size_t at = 0; at < o->bytes;) {
        unsigned long long wrote = c->w->wrote;
        size_t room = WINDOW - wrote % WINDOW, n = o->bytes - at < room ? o->bytes - at : room;

        while (silent_rank == c->rank || !all_seen(c, wrote))
            if (!go_on(c))
                return false;
        o->device.begins();
        memcpy(c->w->window + wrote % WINDOW, (const char *)o->from + at, n);
        o->device.ends();
        c->w->seen[c->rank] = wrote + n;
        c->w->wrote = wrote + n;
        at += n;
    }
    return true;
}

static bool run_other(struct comm *c, const struct order *o)
{
    for (size_t at = 0; at < o->bytes;) {
        unsigned long long seen = c->w->seen[c->rank], wrote;

        while (silent_rank == c->rank || (wrote = c->w->wrote) == seen)
            if (!go_on(c))
                return false;
        size_t n = wrote - seen < o->bytes - at ? wrote - seen : o->bytes - at;

        o->device.begins();
        memcpy((char *)o->to + at, c->w->window + seen % WINDOW, n);
        o->device.ends();
        c->w->seen[c->rank] = seen + n;
        at += n;
    }
    return true;
}

static void *comm_main(void *arg)
{
    struct comm *c = arg;

    while (c->w->joined < (unsigned)c->n)
        if (!go_on(c))
            return NULL;
    pthread_mutex_lock(&c->lock);
    c->joining = false;
    pthread_cond_broadcast(&c->more);
    while (!c->stop) {
        struct order *o = c->first;

        if (!o) {
            c->busy = false;
            pthread_cond_wait(&c->more, &c->lock);
            continue;
        }
        c->first = o->next;
        if (!c->first)
            c->last = &c->first;
        pthread_mutex_unlock(&c->lock);
        (void)(o->root == c->rank ? run_root(c, o) : run_other(c, o));
        free(o);
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

int ncclCommInitRankConfig(struct comm **out, int n, struct id id, int rank, struct config *config)
{
    struct comm *c = calloc(1, sizeof(*c));
    int fd = shm_open(id.internal, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

    if (!c || fd < 0 || n > RANKS || config->blocking || config->magic != 0xcafebeef ||
        ftruncate(fd, sizeof(struct world)) < 0)
        return INVALID;
    c->w = mmap(NULL, sizeof(struct world), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    snprintf(c->name, sizeof(c->name), "%s", id.internal);
    c->n = n;
    c->rank = rank;
    c->last = &c->first;
    c->joining = true;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->more, NULL);
    if (++c->w->joined == (unsigned)n)
        shm_unlink(c->name); /* all have it */
    if (pthread_create(&c->thread, NULL, comm_main, c) != 0)
        return SYSTEM_ERROR;
    *out = c;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(struct comm *c, int *error)
{
    pthread_mutex_lock(&c->lock);
    *error = c->busy || c->joining ? IN_PROGRESS : OK;
    pthread_mutex_unlock(&c->lock);
    return OK;
}

/* In its turn on the stream; whoever waits for the stream waits for the ranks. */
struct turn {
    struct comm *c;
    struct order *o;
};

static void take_turn(void *arg)
{
    struct turn *t = arg;

    pthread_mutex_lock(&t->c->lock);
    while (t->c->joining && !t->c->stop)
        pthread_cond_wait(&t->c->more, &t->c->lock);
    pthread_mutex_unlock(&t->c->lock);
    if (!t->c->stop)
        (void)(t->o->root == t->c->rank ? run_root(t->c, t->o) : run_other(t->c, t->o));
    free(t->o);
    pthread_mutex_lock(&t->c->lock);
    t->c->queued--;
    pthread_cond_broadcast(&t->c->more);
    pthread_mutex_unlock(&t->c->lock);
}

/* As a communicator that does not block: it has been taken when the call returns. */
static int queue(struct comm *c, struct order *o)
{
    struct turn t = { c, o };

    pthread_mutex_lock(&c->lock);
    c->queued++;
    pthread_mutex_unlock(&c->lock);
    return o->device.then(o->device.later, take_turn, &t, sizeof(t)) ? OK : SYSTEM_ERROR;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *c,
                  void *stream)
{
    struct order *o = malloc(sizeof(*o));

    if (!o || type != 1 || !stream)
        return INVALID;
    *o = (struct order){ NULL, from, to, count, root, *(const struct fake_stream *)stream };
    casts += root == c->rank && count != WARM;
    if (o->device.then)
        return queue(c, o);
    pthread_mutex_lock(&c->lock);
    *c->last = o;
    c->last = &o->next;
    c->busy = true;
    pthread_cond_signal(&c->more);
    pthread_mutex_unlock(&c->lock);
    return IN_PROGRESS;
}

int ncclCommAbort(struct comm *c)
{
    pthread_mutex_lock(&c->lock);
    c->stop = true;
    pthread_cond_broadcast(&c->more);
    while (c->queued)
        pthread_cond_wait(&c->more, &c->lock);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    for (struct order *o = c->first, *next; o; o = next) {
        next = o->next;
        free(o);
    }
    (void)shm_unlink(c->name); /* gone unless not all came */
    munmap(c->w, sizeof(struct world));
    pthread_cond_destroy(&c->more);
    pthread_mutex_destroy(&c->lock);
    free(c);
    aborts++;
    return OK;
}
