/* tests/xfer/world.h - sources and engines in plain memory, for planner tests */
#pragma once
#include "tests/t.h"
#include "transport/xfer/plan.h"

enum { WORLD_TENSORS = 12, WORLD_MEMBERS = 24, WORLD_PIECES = 64, WORLD_NAME = 24 };

struct world_member {
    struct xfer_manifest m;
    struct xfer_piece pieces[WORLD_PIECES];
    uint64_t mem_bytes[2];
    unsigned char *mem[2];
    uint8_t *writes[2]; /* of an engine: how often each byte was written */
};
struct world {
    struct xfer_tensor tensors[WORLD_TENSORS];
    char names[WORLD_TENSORS][WORLD_NAME];
    unsigned char *truth[WORLD_TENSORS]; /* whole, row-major */
    size_t n_tensors, n_sources, n_engines;
    struct world_member sources[WORLD_MEMBERS], engines[WORLD_MEMBERS];
    struct xfer_manifest source_manifests[WORLD_MEMBERS], engine_manifests[WORLD_MEMBERS];
    struct link_place places[2 * WORLD_MEMBERS];
};

void world_init(struct world *w);
void world_fini(struct world *w);
/* Tensors must come in the order of their names. Filled with numbers that differ from byte to byte.
 */
void world_tensor(struct world *w, const char *name, enum fl_dtype t, unsigned ndim,
                  const uint64_t *shape);
/* Adds a member on a machine; who: 0-based over both kinds. Then its pieces, laid out one after the
 * other with gap bytes between them, or at off (UINT64_MAX: the next place). */
struct world_member *world_source(struct world *w, const char *machine);
struct world_member *world_engine(struct world *w, uint32_t party, const char *machine);
void world_piece(struct world *w, struct world_member *m, uint32_t tensor,
                 const struct xfer_box *box, uint32_t mem, uint64_t gap);
void world_whole(struct world *w, struct world_member *m); /* every tensor, 256-byte aligned */
/* Allocates and fills the memories, seals all manifests. */
void world_seal(struct world *w);
struct xfer_plan_in world_in(const struct world *w, enum xfer_mode mode);

/* Carries the plan out by memcpy and checks it against a copy made element by element: every wanted
 * byte once and right, nothing else touched, digests of every party those of the whole tensors,
 * parts that travel whole and check, buckets within bounds. */
void world_run(struct world *w, const struct xfer_plan_in *in, const struct xfer_plan *p);
