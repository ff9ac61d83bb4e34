/* worker/client/arena.h - host memory by tag that can go and come back at the same addresses
 *
 * One mapping an allocation. Offload takes the pages, never the addresses: while a piece is out its
 * pages are inaccessible, so a use that was not meant to happen shows at once, as on a device.
 * Any thread; one call at a time moves pages (mutex). */
#pragma once
#include <pthread.h>
#include <furlong/furlong.h>
#include "common/base/base.h"

enum { ARENA_TAGS = 5, ARENA_PIECES_MAX = 32768 }; /* of 65530 mappings that a process may have */
struct arena_piece;
struct arena {
    pthread_mutex_t mu;
    struct arena_piece *pieces; /* uthash, by address */
    struct arena_tag {
        enum furlong_keep keep;
        char folder[1024];
    } tags[ARENA_TAGS];
    uint32_t out;              /* tags that are offloaded               */
    unsigned char seen[16384]; /* residency is looked at in such windows */
};
enum fl_status arena_init(struct arena *a, const char *folder, struct fl_err *err);
void arena_fini(struct arena *a);
enum fl_status arena_alloc(struct arena *a, uint32_t tag, size_t bytes, void **out,
                           struct fl_err *err);
void arena_free(struct arena *a, void *p);
enum fl_status arena_keep(struct arena *a, uint32_t tags, enum furlong_keep how,
                          const char *folder, struct fl_err *err);
enum fl_status arena_offload(struct arena *a, uint32_t tags, struct furlong_moved *out,
                             struct fl_err *err);
enum fl_status arena_onload(struct arena *a, uint32_t tags, struct furlong_moved *out,
                            struct fl_err *err);
bool arena_drops(struct arena *a, uint32_t tag); /* KEEP_NOT */
uint32_t arena_out(struct arena *a); /* tags that are out now */
