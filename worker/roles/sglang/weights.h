/* worker/roles/sglang/weights.h - new versions into SGLang, in whichever way it takes them
 *
 * Ways, best first: the loader (its Python maps our memory: one copy), a group (NCCL), a folder of
 * safetensors that it reads. `auto` takes the first that fits what the server said; a way that
 * fails is given up for the life of the process, with one line that says why, and the next one is
 * tried for the same version. A folder always works where the server sees our files. */
#pragma once
#include "transport/fmt/safetensors.h"
#include "worker/roles/sglang/gen.h"
#include "worker/roles/sglang/server.h"

struct weights_version { /* one COMMIT in hand */
    uint64_t number, digest[2], bytes;
    char label[SGLANG_VERSION_MAX];
    const struct st_entry *t; /* with data */
    const uint64_t *offsets;  /* of t in fd */
    size_t n;
    int fd; /* -1: none */
};

const char *weights_dtype(enum fl_dtype d); /* as torch has it */

struct calls;
struct loader;
struct weights;
/* Tensors, dtypes and shapes of the model's folder. */
enum fl_status weights_create(struct furlong *f, const struct sglang_opts *o,
                              struct sglang_server *s, struct calls *c, struct loader *l,
                              struct weights **out, struct fl_err *err);
struct furlong_weights *weights_set(const struct weights *w);
/* Loads what the COMMIT brings into SGLang and answers it. paused: SGLang is; else it is for the
 * while. Any failure is the end of this attempt: a COMMIT cannot be refused, and what SGLang holds
 * is unsure. */
enum fl_status weights_commit(struct weights *w, struct furlong_call *call, bool paused,
                              uint32_t ms, struct sglang_serves *serves, struct fl_err *err);
void weights_destroy(struct weights *w);
FL_AUTO_DEFINE(weights)

/* weights_disk.c: writes dir/weight_v<number>, links what else the model's folder holds, and
 * removes what an earlier version left, but for keep. out: the folder. */
enum fl_status weights_disk_write(const char *dir, const char *model,
                                  const struct weights_version *v, char out[1024],
                                  struct fl_err *err);
void weights_disk_sweep(const char *dir, const char *keep);
