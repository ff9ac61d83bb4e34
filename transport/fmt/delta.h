/* transport/fmt/delta.h - versions of a set of weights as folders of changes on a shared disk
 *
 *   DIR/weight_v%06d/model-%05d-of-%05d.safetensors    changed tensors: compressed bytes as U8
 *   DIR/weight_v%06d/model.safetensors.index.json      metadata: version, base_version, delta_encoding,
 *                                                      compression_format, checksum_format; weight_map
 *   DIR/base_v%06d/                                    the same version whole, files and index as a base's
 *
 * Before compression a tensor's change is, as delta_encoding says: "xor", the new bytes against the old ones;
 * or "overwrite", u32 count, u32 element positions, values. Checksums of the new full tensors are in
 * each file's metadata, and are compared before anything is activated. The index is renamed into place
 * last: a folder without one is not there. A version without base_version is a base:
 * whole tensors as they are, compression_format "none", a checkpoint that anybody reads.
 *
 * A base_v is made later, from the weight_v below it (delta_compact), as base_v%06d.part until it is whole. From then
 * on it stands for its version, and what is below it may go (delta_prune). */
#pragma once
#include "transport/fmt/safetensors.h"

enum delta_encoding { DELTA_XOR, DELTA_OVERWRITE };
const char *delta_encoding_name(enum delta_encoding e);
enum { DELTA_NO_BASE = -1 };

struct delta_source { /* one tensor at the writer: whole, in its own memory */
    struct st_entry what;
    const void *was; /* its bytes in the base version; NULL with a base */
};
struct delta_opts {
    int64_t version, base_version; /* DELTA_NO_BASE: whole tensors */
    enum delta_encoding encoding;
    uint64_t file_bytes;          /* of payload a file; 0: 256 MiB, which wait in memory */
    const struct st_meta *extra;  /* more index metadata, e.g. the version's digest */
    size_t n_extra;
};
struct delta_stats { uint64_t raw_bytes, written_bytes; size_t changed, total; };
/* FL_EXISTS: that version is there already, whole. An unfinished one is removed and written anew. */
enum fl_status delta_write(const char *dir, const struct delta_source *t, size_t n,
                           const struct delta_opts *o, struct delta_stats *stats,
                           struct fl_err *err);

struct delta_version;
/* Maps the files and checks index and headers. FL_NOT_FOUND: not there (yet). FL_CORRUPT, as read. */
enum fl_status delta_open(const char *dir, int64_t version, struct delta_version **out,
                          struct fl_err *err);
int64_t delta_base_of(const struct delta_version *v); /* DELTA_NO_BASE */
const char *delta_meta(const struct delta_version *v, const char *key);
const struct st_reader *delta_files(const struct delta_version *v); /* of a base: the tensors themselves */
/* New bytes of one tensor into to (bytes long). was: its bytes in the base version, may be the same
 * memory as to, and may be NULL for a base. A tensor that did not change is copied. FL_CORRUPT: the result's
 * checksum differs; to is then not to be used. Any thread. */
enum fl_status delta_apply(const struct delta_version *v, const struct st_entry *what,
                           const void *was, void *to, struct fl_err *err);
void delta_version_destroy(struct delta_version *v);
FL_AUTO_DEFINE(delta_version)

/* Makes base_v of a version that is there, from files: no more memory than its largest tensor takes. May be interrupted
 * at any point, and repeated. file_bytes: as in delta_opts. pace, if not NULL, is an enum delta_pace that any thread
 * sets; FL_CANCELLED: to DELTA_STOP. FL_EXISTS: it is there already. FL_NOT_FOUND, FL_CORRUPT: nobody can follow these
 * versions any more. */
enum delta_pace { DELTA_GO, DELTA_HOLD /* waits between two tensors */, DELTA_STOP };
enum fl_status delta_compact(const char *dir, int64_t version, uint64_t file_bytes,
                             const atomic_int *pace, struct fl_err *err);
/* Removes what is below that version, which must be a base, the weight_v beside a base_v, and parts of bases. Not
 * while a base is made there. delta_prune_all: all versions, and DIR if it is empty then. What bears another name
 * than ours stays. An error: what could not be removed; the rest is. */
enum fl_status delta_prune(const char *dir, int64_t base, struct fl_err *err);
enum fl_status delta_prune_all(const char *dir, struct fl_err *err);

/* A host's own full copy, local_dir/model.safetensors with its version in the metadata, brought to version:
 * walks bases and deltas, checks every tensor before it counts, replaces by rename, and may be repeated or interrupted
 * at any point. A base that is damaged is passed over while the versions below it are there. One holder at a time
 * (lock file). FL_STALE: the copy is newer already. */
enum fl_status delta_pull(const char *dir, const char *local_dir, int64_t version,
                          struct fl_err *err);
/* The version of a local copy, DELTA_NO_BASE if there is none. */
int64_t delta_local_version(const char *local_dir);
/* Removes a local copy, and its folder if it is empty then. FL_AGAIN: somebody holds it. */
enum fl_status delta_forget(const char *local_dir, struct fl_err *err);
