#include "worker/roles/sglang/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "worker/roles/role.h"
#include "worker/roles/sglang/group.h"
#include "worker/roles/sglang/loader.h"

enum { WAYS = 3 };

struct weights {
    struct furlong *f;
    const struct sglang_opts *o;
    struct sglang_server *s;
    struct calls *c;
    struct loader *l;
    struct group *group;
    struct furlong_weights *set;
    struct st_reader *folder; /* names lie in it */
    struct st_entry *t;
    uint64_t *offsets, bytes;
    size_t n;
    char model[1024], dir[1024], last[1024]; /* last: the folder that SGLang read last */
    bool gone[WAYS];
    bool said;
};

const char *weights_dtype(enum fl_dtype d)
{
    static const char *const names[] = { "float32",     "float16", "bfloat16", "float8_e4m3fn",
                                         "float8_e5m2", "int64",   "int32",    "uint8" };

    return (size_t)d < FL_LEN(names) ? names[d] : "?";
}

/* ---- ways ---- */
struct way {
    const char *name;
    bool (*fits)(const struct weights *w, char *why, size_t cap); /* else why not */
    enum fl_status (*update)(struct weights *w, const struct weights_version *v, bool flush,
                             uint32_t ms, struct fl_err *err);
};

static bool loader_fits(const struct weights *w, char *why, size_t cap)
{
    if (w->s->has_loader)
        return true;
    snprintf(why, cap,
             "the server was not started with --custom-weight-loader furlong_sglang.load");
    return false;
}

static enum fl_status loader_way(struct weights *w, const struct weights_version *v, bool flush,
                                 uint32_t ms, struct fl_err *err)
{
    return loader_update(w->l, w->c, v, flush, ms, err);
}

static bool group_fits(const struct weights *w, char *why, size_t cap)
{
    if (w->o->group_cmd)
        return true;
    snprintf(why, cap, "no --sglang-group-cmd names a program that can be rank 0 of a group");
    return false;
}

static enum fl_status group_way(struct weights *w, const struct weights_version *v, bool flush,
                                uint32_t ms, struct fl_err *err)
{
    if (!w->group)
        FL_TRY(group_create(w->o->group_cmd, w->c, &w->group, err));
    enum fl_status st = group_update(w->group, v, flush, ms, err);
    if (st != FL_OK) {
        group_destroy(w->group);
        w->group = NULL;
    }
    return st;
}

static bool disk_fits(const struct weights *w, char *why, size_t cap)
{
    (void)w;
    (void)why;
    (void)cap;
    return true;
}

static enum fl_status disk_way(struct weights *w, const struct weights_version *v, bool flush,
                               uint32_t ms, struct fl_err *err)
{
    char folder[1024];

    FL_TRY(weights_disk_write(w->dir, w->model, v, folder, err));
    FL_TRY(sglang_do(w->s, "/update_weights_from_disk",
                     json_pack("{s:s, s:s, s:b, s:s}", "model_path", folder, "load_format", "auto",
                               "flush_cache", flush, "weight_version", v->label),
                     ms, err));
    fl_copy(w->last, sizeof(w->last), folder);
    /* SGLang may read its model_path again: the last one stays */
    weights_disk_sweep(w->dir, w->last);
    return FL_OK;
}

static const struct way ways[WAYS] = { { "loader", loader_fits, loader_way },
                                       { "group", group_fits, group_way },
                                       { "disk", disk_fits, disk_way } };

static bool asked_for(const struct weights *w, const struct way *way)
{
    return !strcmp(w->o->weights, "auto") || !strcmp(w->o->weights, way->name);
}

static enum fl_status load(struct weights *w, const struct weights_version *v, bool flush,
                           uint32_t ms, struct fl_err *err)
{
    enum fl_status st =
        fl_fail(err, FL_UNSUPPORTED, "no way is left to give SGLang %s its weights", w->s->version);

    for (size_t i = 0; i < WAYS; i++) {
        struct fl_err why = { 0 };
        bool last = i == WAYS - 1 || strcmp(w->o->weights, "auto") != 0;

        if (w->gone[i] || !asked_for(w, &ways[i]))
            continue;
        if (!ways[i].fits(w, why.text, sizeof(why.text))) {
            if (last)
                return fl_fail(err, FL_UNSUPPORTED, "--sglang-weights %s: %s", ways[i].name,
                               why.text);
            w->gone[i] = true;
            fl_info("weights do not go by %s why=%s", ways[i].name, why.text);
            continue;
        }
        st = ways[i].update(w, v, flush, ms, &why);
        if (st == FL_OK) {
            if (!w->said)
                fl_info("weights go by %s SGLang=%s %s", ways[i].name, w->s->version,
                        w->s->parallel);
            w->said = true;
            return FL_OK;
        }
        FL_TRY(sglang_server_lives(w->s, err));
        if (last) {
            *err = why;
            return fl_wrap(err, st, "weights by %s", ways[i].name);
        }
        w->gone[i] = true;
        w->said = false;
        fl_warn("weights go by %s no more why=%s", ways[i].name, why.text);
    }
    return st;
}

/* ---- a COMMIT ---- */
static enum fl_status coming(struct weights *w, struct weights_version *v, struct fl_err *err)
{
    struct furlong_coming c;

    for (size_t i = 0; i < w->n; i++) {
        FL_TRY(furlong_weights_coming(w->set, i, &c, err));
        w->t[i].data = c.data;
        w->offsets[i] = c.fd_offset;
    }
    *v = (struct weights_version){ .number = c.version,
                                   .digest = { c.digest[0], c.digest[1] },
                                   .bytes = w->bytes,
                                   .t = w->t,
                                   .offsets = w->offsets,
                                   .n = w->n,
                                   .fd = c.fd };
    sglang_version_print(v->number, v->digest, v->label);
    return FL_OK;
}

enum fl_status weights_commit(struct weights *w, struct furlong_call *call, bool paused,
                              uint32_t ms, struct sglang_serves *serves, struct fl_err *err)
{
    struct weights_version v;
    double from = role_now_s(), loaded;
    bool in_place = !strcmp(w->o->pause, "in_place");

    if (FL_FAULT("sglang.commit"))
        return fl_fail(err, FL_INTERNAL, "a commit that a test makes fail");
    FL_TRY(coming(w, &v, err));
    if (!paused)
        FL_TRY(
            sglang_do(w->s, "/pause_generation", json_pack("{s:s}", "mode", w->o->pause), ms, err));
    double at = role_now_s();
    /* requests that are frozen with their cache cannot be there when it is flushed */
    FL_TRY(load(w, &v, !in_place || !calls_in_flight(w->c), ms, err));
    loaded = role_now_s();
    if (!paused)
        FL_TRY(sglang_do(w->s, "/continue_generation", json_object(), ms, err));
    FL_TRY(furlong_weights_commit(w->set, call, err));
    *serves = (struct sglang_serves){ v.number, { v.digest[0], v.digest[1] } };
    furlong_metric(w->f, "sglang_weights_load_s", loaded - at);
    furlong_metric(w->f, "sglang_weights_pause_s", role_now_s() - from);
    fl_debug("weights loaded version=%s load_s=%.3f", v.label, loaded - at);
    return FL_OK;
}

/* ---- the set ---- */
static enum fl_status folder_read(struct weights *w, struct fl_err *err)
{
    const char *model = w->o->model ? w->o->model : w->s->model;
    enum fl_status st;

    if (*model != '/')
        return fl_fail(err, FL_INVALID,
                       "the server's model is '%.120s', no folder here: --sglang-model names one "
                       "with the same "
                       "tensors, dtypes and shapes",
                       model);
    fl_copy(w->model, sizeof(w->model), model);
    st = st_read_folder(model, &w->folder, err);
    if (st != FL_OK)
        return fl_wrap(err, st, "--sglang-model");
    w->n = st_count(w->folder);
    w->t = calloc(w->n + 1, sizeof(*w->t));
    w->offsets = calloc(w->n + 1, sizeof(*w->offsets));
    if (!w->t || !w->offsets)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu tensors", w->n);
    for (size_t i = 0; i < w->n; i++) {
        const struct st_tensor *t = st_at(w->folder, i);

        if (!t->known)
            return fl_fail(err, FL_UNSUPPORTED,
                           "%s: %s is %s, which the weight plane does not carry", model, t->name,
                           t->dtype_name);
        w->t[i] = (struct st_entry){ .name = t->name, .dtype = t->dtype, .ndim = t->ndim };
        memcpy(w->t[i].shape, t->shape, sizeof(t->shape));
        w->bytes += t->bytes;
    }
    return FL_OK;
}

static enum fl_status accept_set(struct weights *w, struct fl_err *err)
{
    struct furlong_weights_opts how = { .slots = (uint32_t)w->o->slots,
                                        .check_equal = w->o->check_equal };
    struct furlong_tensor *t = calloc(w->n + 1, sizeof(*t));
    enum fl_status st;

    if (!t)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu tensors", w->n);
    for (size_t i = 0; i < w->n; i++) {
        t[i] = (struct furlong_tensor){ .name = w->t[i].name,
                                        .dtype = w->t[i].dtype,
                                        .ndim = w->t[i].ndim };
        memcpy(t[i].shape, w->t[i].shape, sizeof(t[i].shape));
    }
    st = furlong_weights_accept(w->f, "policy", t, w->n, &how, &w->set, err);
    free(t);
    return st;
}

enum fl_status weights_create(struct furlong *f, const struct sglang_opts *o,
                              struct sglang_server *s, struct calls *c, struct loader *l,
                              struct weights **out, struct fl_err *err)
{
    FL_AUTO(weights) struct weights *w = calloc(1, sizeof(*w));
    const struct furlong_seat *seat = furlong_seat(f);

    if (!w)
        return fl_fail(err, FL_EXHAUSTED, "no memory for weights");
    w->f = f;
    w->o = o;
    w->s = s;
    w->c = c;
    w->l = l;
    /* memory unless somebody said otherwise; by user, job and rank, since engines share a host */
    FL_TRY(fl_path(w->dir, err, "%s/furlong-sglang-%u-%.16s-%u",
                   o->weights_dir ? o->weights_dir : "/dev/shm", (unsigned)geteuid(), seat->job,
                   seat->rank));
    weights_disk_sweep(w->dir, NULL); /* of an attempt before */
    FL_TRY(folder_read(w, err));
    FL_TRY(accept_set(w, err));
    *out = FL_TAKE(w);
    return FL_OK;
}

struct furlong_weights *weights_set(const struct weights *w)
{
    return w->set;
}

void weights_destroy(struct weights *w)
{
    if (!w)
        return;
    if (w->set)
        furlong_weights_drop(w->set);
    if (*w->dir)
        (void)fl_tree_remove(w->dir, NULL); /* memory or disk that nobody reads any more */
    group_destroy(w->group);
    st_reader_destroy(w->folder);
    free(w->t);
    free(w->offsets);
    free(w);
}
