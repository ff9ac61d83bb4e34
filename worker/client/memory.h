/* worker/client/memory.h - the program's memory by tag: the host's, of this seat, and the devices',
 * of the process
 *
 * Any thread. */
#pragma once
#include <pthread.h>
#include <furlong/furlong.h>
#include "transport/arena/process.h"

struct memory_piece;
struct client_memory {
    pthread_mutex_t mu;
    struct arena *host;
    struct memory_piece *pieces; /* uthash, by address: of devices, freed with the seat */
};
/* folder: of FURLONG_KEEP_DISK */
enum fl_status memory_init(struct client_memory *m, const char *folder, struct fl_err *err);
void memory_fini(struct client_memory *m); /* zeros are fine */
/* uuid NULL: host memory */
enum fl_status memory_alloc(struct client_memory *m, const char *uuid, uint32_t tag, size_t bytes,
                            void **out, struct fl_err *err);
void memory_free(struct client_memory *m, void *p);
enum fl_status memory_keep(struct client_memory *m, uint32_t tags, enum furlong_keep how,
                           const char *folder, struct fl_err *err);
bool memory_drops(struct client_memory *m, uint32_t tag);
void memory_shown(struct furlong_moved *out, const struct arena_moved *m); /* out NULL is fine */
/* All of it or nothing. */
enum fl_status memory_offload(struct client_memory *m, uint32_t tags, struct furlong_moved *out,
                              struct fl_err *err);
enum fl_status memory_onload(struct client_memory *m, uint32_t tags, struct furlong_moved *out,
                             struct fl_err *err);
