#include "worker/client/memory.h"
#include <inttypes.h>
#include <stdlib.h>
#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#include "common/base/log.h"

struct memory_piece {
    void *addr; /* key */
    struct arena *from;
    UT_hash_handle hh;
};

enum fl_status memory_init(struct client_memory *m, const char *folder, struct fl_err *err)
{
    const struct arena_opts o = { .folder = folder };

    *m = (struct client_memory){ 0 };
    if (pthread_mutex_init(&m->mu, NULL) != 0)
        return fl_fail(err, FL_EXHAUSTED, "no mutex for the program's memory");
    if (folder) /* devices write where the host does */
        FL_TRY(arena_folder_all(folder, err));
    return arena_create(&gpu_host, "host", &o, &m->host, err);
}

void memory_fini(struct client_memory *m)
{
    struct memory_piece *p, *next;

    HASH_ITER (hh, m->pieces, p, next) {
        HASH_DEL(m->pieces, p);
        (void)arena_wait(p->from, NULL); /* a lost device is past that */
        arena_free(p->from, p->addr);
        free(p);
    }
    arena_destroy(m->host);
    m->host = NULL;
}

static enum fl_status note(struct client_memory *m, struct arena *from, void *addr,
                           struct fl_err *err)
{
    struct memory_piece *p = malloc(sizeof(*p));
    bool noted = false;

    if (p) {
        *p = (struct memory_piece){ .addr = addr, .from = from };
        pthread_mutex_lock(&m->mu);
        HASH_ADD_PTR(m->pieces, addr, p);
        noted = p->hh.tbl; /* uthash leaves it out when memory ends */
        pthread_mutex_unlock(&m->mu);
    }
    if (noted)
        return FL_OK;
    free(p);
    return fl_fail(err, FL_EXHAUSTED, "no memory to note a piece");
}

enum fl_status memory_alloc(struct client_memory *m, const char *uuid, uint32_t tag, size_t bytes,
                            void **out, struct fl_err *err)
{
    struct arena *a;
    enum fl_status st;
    void *p;

    if (!uuid)
        return arena_alloc(m->host, tag, bytes, ARENA_ZEROED, out, err);
    FL_TRY(arena_of_device(uuid, &a, err));
    FL_TRY(arena_alloc(a, tag, bytes, ARENA_ZEROED, &p, err));
    st = note(m, a, p, err);
    if (st != FL_OK) {
        arena_free(a, p);
        return st;
    }
    *out = p;
    return FL_OK;
}

void memory_free(struct client_memory *m, void *addr)
{
    struct memory_piece *p;

    pthread_mutex_lock(&m->mu);
    HASH_FIND_PTR(m->pieces, &addr, p);
    if (p)
        HASH_DEL(m->pieces, p);
    pthread_mutex_unlock(&m->mu);
    if (p) /* as cudaFree; a lost device is past that */
        (void)arena_wait(p->from, NULL);
    arena_free(p ? p->from : m->host, addr);
    free(p);
}

enum fl_status memory_keep(struct client_memory *m, uint32_t tags, enum furlong_keep how,
                           const char *folder, struct fl_err *err)
{
    FL_TRY(arena_keep(m->host, tags, how, folder, err));
    return arena_keep_all(tags, how, folder, err);
}

bool memory_drops(struct client_memory *m, uint32_t tag)
{
    return arena_drops(m->host, tag);
}

void memory_shown(struct furlong_moved *out, const struct arena_moved *m)
{
    if (out)
        *out = (struct furlong_moved){ .setup_s = (double)m->setup_ns / 1e9,
                                       .copy_s = (double)m->copy_ns / 1e9,
                                       .dropped_bytes = m->dropped_bytes,
                                       .kept_bytes = m->kept_bytes,
                                       .written_bytes = m->written_bytes,
                                       .backed_bytes = m->backed_bytes };
}

enum fl_status memory_offload(struct client_memory *m, uint32_t tags, struct furlong_moved *out,
                              struct fl_err *err)
{
    struct arena_moved host, devices;
    enum fl_status st;

    FL_TRY(arena_offload(m->host, tags, &host, err));
    st = arena_offload_all(tags, &devices, err);
    if (st != FL_OK) {
        (void)arena_onload(m->host, tags, NULL, NULL);
        (void)arena_onload_all(tags, NULL, NULL);
        return st;
    }
    arena_moved_add(&host, &devices);
    if (host.grown_bytes)
        fl_warn("device memory grows from one offload to the next grown_mib=%" PRIu64,
                host.grown_bytes >> 20);
    memory_shown(out, &host);
    return FL_OK;
}

enum fl_status memory_onload(struct client_memory *m, uint32_t tags, struct furlong_moved *out,
                             struct fl_err *err)
{
    struct arena_moved host, devices;

    FL_TRY(arena_onload(m->host, tags, &host, err));
    FL_TRY(arena_onload_all(tags, &devices, err));
    arena_moved_add(&host, &devices);
    memory_shown(out, &host);
    return FL_OK;
}
