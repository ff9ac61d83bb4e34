/* transport/xfer/manifest.h - what a process holds of a set of weights, or wants to hold
 *
 * Names, dtypes and whole shapes in the same words on every side, and pieces: boxes of whole
 * tensors at an offset of one of the process's memories, each box contiguous and row-major
 * there. */
#pragma once
#include "common/base/base.h"
#include "kernels/digest.h"

enum { XFER_ALIGN = 256 };           /* of pieces that we lay out ourselves                     */
enum { XFER_MAX_NAME = 512 };        /* bytes                                                   */
enum { XFER_MAX_TENSORS = 1 << 20 }; /* in one manifest: 1 T parameters have 71,000             */
enum { XFER_MAX_PIECES = 1 << 22 };
enum { XFER_MAX_MEMS = 1024 };

struct xfer_version { uint64_t number, digest[2]; }; /* the same only when both are equal */
/* entries from ndim on are not looked at */
struct xfer_box {
    uint64_t at[FL_DIMS], len[FL_DIMS];
};
struct xfer_tensor { /* the whole tensor, in the same words on every side */
    const char *name;
    enum fl_dtype dtype;
    uint8_t ndim; /* 0: a scalar */
    uint64_t shape[FL_DIMS]; /* with a 0 in it: no bytes, and nothing of it moves */
};
struct xfer_piece { uint32_t tensor, mem; uint64_t off; struct xfer_box box; };
struct xfer_manifest {
    struct fl_seat_ref who;
    uint32_t party;                    /* the trainer, or the engine that it is a rank of       */
    const struct xfer_tensor *tensors; /* sorted by name, each once; may be the part it holds   */
    const struct xfer_piece *pieces;
    const uint64_t *mem_bytes; /* of each memory that the pieces name; one slot, if it has two  */
    size_t n_tensors, n_pieces, n_mems;
    uint64_t hash[2]; /* set by xfer_manifest_seal() */
};

uint64_t xfer_dtype_bytes(enum fl_dtype t);                   /* 0: not a dtype                   */
const char *xfer_dtype_name(enum fl_dtype t);                 /* "bf16"                           */
uint64_t xfer_tensor_bytes(const struct xfer_tensor *t);      /* of one that passed the check     */
uint64_t xfer_box_bytes(const struct xfer_tensor *t, const struct xfer_box *b);
struct xfer_box xfer_box_whole(const struct xfer_tensor *t);
/* "layers.0.q_proj bf16 [2048, 1024]": a tensor as errors show it; cut to the room. Returns
 * line. */
const char *xfer_tensor_line(const struct xfer_tensor *t, char *line, size_t room);

/* Checks everything that a peer could have got wrong (order and uniqueness of names, dtypes, shapes
 * whose size overflows, boxes outside their tensor, pieces outside their memory or over each other)
 * and sets hash. Pure. FL_INVALID: err names the tensor and the values; hash is untouched. */
enum fl_status xfer_manifest_seal(struct xfer_manifest *m, struct fl_err *err);

/* On the wire: one flat image. decode checks and seals; the result is one heap block that the
 * caller frees with free(). FL_CORRUPT: not an image; FL_INVALID: as seal. */
enum fl_status xfer_manifest_encode(const struct xfer_manifest *m, void **out, size_t *n_bytes,
                                    struct fl_err *err);
enum fl_status xfer_manifest_decode(const void *image, size_t n_bytes, struct xfer_manifest **out,
                                    struct fl_err *err);

/* tensor_digest += the piece's box, whose bytes lie at data. A source that sums its own pieces,
 * each part of a tensor once over all sources, has the tensor's digest. */
void xfer_digest_piece(uint64_t tensor_digest[2], const struct xfer_tensor *t,
                       const struct xfer_box *box, const void *data);
/* version_digest += mix(tensor's digest, tensor's index in the plan's table). */
void xfer_digest_fold(uint64_t version_digest[2], const uint64_t tensor_digest[2], uint32_t index);
