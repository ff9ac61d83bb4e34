#include "transport/arena/process.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/str.h"
#include "transport/arena/arena_priv.h"

#define CHUNK_MOST ((uint64_t)64 << 30)
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char uuid[GPU_UUID_BYTES];
    struct arena *a;
} arenas[GPU_MAX];
static size_t n_arenas;
static atomic_bool forked;

static void in_child(void)
{
    atomic_store(&forked, true);
}

/* The child of a fork has no device, and none of the threads that may hold a lock. */
enum fl_status arena_here(struct fl_err *err)
{
    return atomic_load(&forked)
               ? fl_fail(err, FL_UNSUPPORTED,
                         "arena: the child of a fork cannot use its parent's device: start it anew "
                         "(spawn)")
               : FL_OK;
}
static char first_folder[1024];
static struct { /* said before an arena was there */
    bool set;
    enum furlong_keep how;
    char folder[1024];
} rules[ARENA_TAGS];

static enum fl_status chunk_of(const char *name, uint64_t *bytes, struct fl_err *err)
{
    const char *text = getenv(name);
    enum fl_status st = FL_OK;

    if (text && *text)
        st = fl_parse_bytes(text, CHUNK_MOST, bytes, err);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "%s", name);
}

/* With the lock held. Once, also where no arena can be made and each call tries again. */
static enum fl_status hear_of_forks(struct fl_err *err)
{
    static bool heard;

    if (!heard && pthread_atfork(NULL, NULL, in_child) != 0)
        return fl_fail(err, FL_EXHAUSTED, "no memory to hear of forks");
    heard = true;
    return FL_OK;
}

static enum fl_status make(const char *uuid, struct arena **out, struct fl_err *err)
{
    struct arena_opts o = { .folder = first_folder };
    uint64_t weights = 0, other = 0;
    const struct gpu_ops *gpu;
    struct arena *a;

    FL_TRY(hear_of_forks(err));
    if (n_arenas == GPU_MAX)
        return fl_fail(err, FL_EXHAUSTED, "more than %d devices in one process", GPU_MAX);
    FL_TRY(chunk_of("FURLONG_ARENA_WEIGHTS_CHUNK", &weights, err));
    FL_TRY(chunk_of("FURLONG_ARENA_CHUNK", &other, err));
    for (unsigned i = 0; i < ARENA_TAGS; i++)
        o.chunk_bytes[i] = 1u << i == FURLONG_TAG_WEIGHTS ? weights : other;
    FL_TRY(gpu_pick(&gpu, err));
    FL_TRY(arena_create(gpu, uuid, &o, &a, err));
    for (unsigned i = 0; i < ARENA_TAGS; i++)
        if (rules[i].set)
            (void)arena_keep(a, 1u << i, rules[i].how, rules[i].folder[0] ? rules[i].folder : NULL,
                             NULL); /* was checked when it was said */
    (void)FL_COPY(arenas[n_arenas].uuid, uuid);
    arenas[n_arenas++].a = a;
    *out = a;
    return FL_OK;
}

enum fl_status arena_of_device(const char *uuid, struct arena **out, struct fl_err *err)
{
    enum fl_status st = FL_OK;
    size_t i = 0;

    FL_TRY(arena_here(err));
    pthread_mutex_lock(&lock);
    while (i < n_arenas && strcmp(arenas[i].uuid, uuid) != 0)
        i++;
    if (i < n_arenas)
        *out = arenas[i].a;
    else
        st = make(uuid, out, err);
    pthread_mutex_unlock(&lock);
    return st;
}

size_t arena_of_each(struct arena **out, size_t room)
{
    size_t n;

    pthread_mutex_lock(&lock);
    n = n_arenas < room ? n_arenas : room;
    for (size_t i = 0; i < n; i++)
        out[i] = arenas[i].a;
    pthread_mutex_unlock(&lock);
    return n;
}

enum fl_status arena_keep_all(uint32_t tags, enum furlong_keep how, const char *folder,
                              struct fl_err *err)
{
    enum fl_status st = FL_OK;

    if (tags == 0 || tags >= 1u << ARENA_TAGS || how > FURLONG_KEEP_HOST)
        return fl_fail(err, FL_INVALID, "arena: tags %#x, keep %d", tags, (int)how);
    if (folder && strlen(folder) >= sizeof(rules[0].folder))
        return fl_fail(err, FL_INVALID, "arena: folder of %zu bytes", strlen(folder));
    FL_TRY(arena_here(err));
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < ARENA_TAGS; i++) {
        if (!(tags & 1u << i))
            continue;
        rules[i].set = true;
        rules[i].how = how;
        if (folder)
            (void)FL_COPY(rules[i].folder, folder); /* its length was checked */
    }
    for (size_t i = 0; i < n_arenas && st == FL_OK; i++)
        st = arena_keep(arenas[i].a, tags, how, folder, err);
    pthread_mutex_unlock(&lock);
    return st;
}

enum fl_status arena_folder_all(const char *folder, struct fl_err *err)
{
    bool fits;

    pthread_mutex_lock(&lock);
    fits = FL_COPY(first_folder, folder);
    pthread_mutex_unlock(&lock);
    return fits ? FL_OK : fl_fail(err, FL_INVALID, "arena: folder of %zu bytes", strlen(folder));
}

void arena_moved_add(struct arena_moved *sum, const struct arena_moved *m)
{
    sum->setup_ns += m->setup_ns;
    sum->copy_ns += m->copy_ns;
    sum->wall_ns += m->wall_ns;
    sum->dropped_bytes += m->dropped_bytes;
    sum->kept_bytes += m->kept_bytes;
    sum->backed_bytes += m->backed_bytes;
    sum->written_bytes += m->written_bytes;
    sum->shared_bytes += m->shared_bytes;
    sum->grown_bytes += m->grown_bytes;
}

enum fl_status arena_wait_all(struct fl_err *err)
{
    struct arena *all[GPU_MAX];

    FL_TRY(arena_here(err));
    size_t n = arena_of_each(all, GPU_MAX);

    for (size_t i = 0; i < n; i++)
        FL_TRY(arena_wait(all[i], err));
    return FL_OK;
}

static enum fl_status each(enum fl_status (*move)(struct arena *, uint32_t, struct arena_moved *,
                                                  struct fl_err *),
                           uint32_t tags, struct arena_moved *out, struct fl_err *err)
{
    struct arena *all[GPU_MAX];
    struct arena_moved sum = { 0 };

    FL_TRY(arena_here(err));
    size_t n = arena_of_each(all, GPU_MAX);

    for (size_t i = 0; i < n; i++) {
        struct arena_moved m;

        FL_TRY(move(all[i], tags, &m, err));
        arena_moved_add(&sum, &m);
    }
    if (out)
        *out = sum;
    return FL_OK;
}

enum fl_status arena_offload_all(uint32_t tags, struct arena_moved *out, struct fl_err *err)
{
    return each(arena_offload, tags, out, err);
}

enum fl_status arena_onload_all(uint32_t tags, struct arena_moved *out, struct fl_err *err)
{
    return each(arena_onload, tags, out, err);
}
