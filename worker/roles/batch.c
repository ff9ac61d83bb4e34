#include "worker/roles/batch.h"

#include <stdlib.h>
#include <string.h>

#include "transport/fmt/safetensors.h"

enum { BATCH_MOST = 1 << 28 }; /* tokens or samples */

enum fl_status batch_write(const struct batch *b, void **out, size_t *bytes, struct fl_err *err)
{
    /* clang-format off */
    const struct st_entry all[] = {
        { .name = "tokens", .dtype = FL_I32, .ndim = 1, .shape = { b->n_tokens }, .data = b->tokens },
        { .name = "lengths", .dtype = FL_I32, .ndim = 1, .shape = { b->n_samples }, .data = b->lengths },
        { .name = "prompt_lengths", .dtype = FL_I32, .ndim = 1, .shape = { b->n_samples }, .data = b->prompt_lengths },
        { .name = "logprobs", .dtype = FL_F32, .ndim = 1, .shape = { b->n_tokens }, .data = b->logprobs },
        { .name = "advantages", .dtype = FL_F32, .ndim = 1, .shape = { b->n_samples }, .data = b->advantages },
    };
    /* clang-format on */
    struct st_entry some[5];
    size_t n = 0;

    for (size_t i = 0; i < 5; i++)
        if (all[i].data)
            some[n++] = all[i];
    return st_write_image(some, n, NULL, 0, out, bytes, err);
}

static enum fl_status part(const struct st_reader *r, const char *name, enum fl_dtype dtype,
                           uint64_t n, const void **out, struct fl_err *err)
{
    const struct st_tensor *t;

    FL_TRY(st_need(r, name, dtype, 1, &n, &t, err));
    *out = t->data;
    return FL_OK;
}

static enum fl_status size_of(const struct st_reader *r, const char *name, uint32_t *out,
                              struct fl_err *err)
{
    const struct st_tensor *t = st_find(r, name);

    if (!t || t->ndim != 1)
        return fl_fail(err, FL_INVALID, "batch: %s is missing or has no single dimension", name);
    if (t->shape[0] > BATCH_MOST)
        return fl_fail(err, FL_EXHAUSTED, "batch: %s has %ju entries, at most %d are taken", name,
                       (uintmax_t)t->shape[0], BATCH_MOST);
    *out = (uint32_t)t->shape[0];
    return FL_OK;
}

static enum fl_status lengths_check(struct batch *b, struct fl_err *err)
{
    uint64_t at = 0;

    b->starts = calloc((size_t)b->n_samples + 1, sizeof(*b->starts));
    if (!b->starts)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u samples", b->n_samples);
    for (uint32_t s = 0; s < b->n_samples; s++) {
        if (b->lengths[s] < 1 || b->prompt_lengths[s] < 1 || b->prompt_lengths[s] > b->lengths[s])
            return fl_fail(err, FL_INVALID, "batch: sample %u has %d tokens, %d of them prompt", s,
                           b->lengths[s], b->prompt_lengths[s]);
        at += (uint64_t)b->lengths[s];
        if (at > b->n_tokens)
            break;
        b->starts[s + 1] = (uint32_t)at;
    }
    if (at != b->n_tokens)
        return fl_fail(err, FL_INVALID, "batch: lengths do not add up to the %u tokens",
                       b->n_tokens);
    return FL_OK;
}

static enum fl_status parts_read(struct batch *b, unsigned need, struct fl_err *err)
{
    const struct st_reader *r = b->keep;
    const void *p;

    FL_TRY(size_of(r, "tokens", &b->n_tokens, err));
    FL_TRY(size_of(r, "lengths", &b->n_samples, err));
    FL_TRY(part(r, "tokens", FL_I32, b->n_tokens, &p, err));
    b->tokens = p;
    FL_TRY(part(r, "lengths", FL_I32, b->n_samples, &p, err));
    b->lengths = p;
    FL_TRY(part(r, "prompt_lengths", FL_I32, b->n_samples, &p, err));
    b->prompt_lengths = p;
    if (need & BATCH_LOGPROBS) {
        FL_TRY(part(r, "logprobs", FL_F32, b->n_tokens, &p, err));
        b->logprobs = p;
    }
    if (need & BATCH_ADVANTAGES) {
        FL_TRY(part(r, "advantages", FL_F32, b->n_samples, &p, err));
        b->advantages = p;
    }
    return lengths_check(b, err);
}

enum fl_status batch_read(const void *image, size_t bytes, unsigned need, struct batch *out,
                          struct fl_err *err)
{
    struct batch b = { 0 };
    struct st_reader *r = NULL;
    enum fl_status st = st_read_image(image, bytes, &r, err);

    if (st != FL_OK)
        return fl_wrap(err, st, "batch");
    b.keep = r;
    st = parts_read(&b, need, err);
    if (st != FL_OK) {
        batch_fini(&b);
        return st;
    }
    *out = b;
    return FL_OK;
}

void batch_fini(struct batch *b)
{
    free(b->starts);
    st_reader_destroy(b->keep);
    *b = (struct batch){ 0 };
}
