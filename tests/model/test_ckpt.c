/* Checkpoints and batches on their way: whole or not at all, and what is refused. */
#include "tests/t.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "transport/fmt/safetensors.h"
#include "worker/roles/batch.h"
#include "worker/roles/ckpt.h"

static const struct model_config config = {
    .vocab = 5, .dim = 8, .layers = 1, .heads = 2, .kv_heads = 1, .head_dim = 4, .ffn = 6, .max_len = 8,
    .rope_theta = 10000, .norm_eps = 1e-6f,
};

struct rig {
    struct model_layout *l;
    float *base, **w, *m, *v;
    struct alphabet a;
};

static void rig_up(struct rig *r, const struct model_config *c, uint64_t seed)
{
    struct fl_err err;

    t_ok(model_layout_create(c, &r->l, &err), &err);
    r->base = aligned_alloc(64, r->l->floats * sizeof(float));
    r->m = calloc(r->l->floats, sizeof(float));
    r->v = calloc(r->l->floats, sizeof(float));
    r->w = calloc(r->l->n, sizeof(*r->w));
    model_init(r->l, r->base, seed);
    model_point(r->l, r->base, r->w);
    for (size_t i = 0; i < r->l->floats; i++) {
        r->m[i] = (float)i * 0.5f + (float)seed;
        r->v[i] = (float)i * 0.25f + (float)seed;
    }
    t_ok(alphabet_of_hex("61626364", &r->a, &err), &err);
}

static void rig_down(struct rig *r)
{
    free(r->base);
    free(r->m);
    free(r->v);
    free(r->w);
    model_layout_destroy(r->l);
}

static void round_trip(void **state)
{
    struct rig a, b;
    struct ckpt_state s = { 7, 7, 9, 3 }, got;
    struct model_config c;
    struct alphabet abc;
    struct fl_err err;
    char dir[1024], newest[1024];
    uint64_t bytes = 0;

    (void)state;
    rig_up(&a, &config, 1);
    rig_up(&b, &config, 2);
    ckpt_dir(dir, t_path("ck"), 7);
    t_ok(ckpt_save(dir, a.l, a.w, a.m, a.v, &a.a, &s, &bytes, &err), &err);
    t_true(bytes > 0);
    t_ok(ckpt_load(dir, b.l, b.w, b.m, b.v, &got, &err), &err);
    t_mem_eq(&s, &got, sizeof(s));
    for (uint32_t i = 0; i < a.l->n; i++) { /* gaps between tensors are nobody's */
        size_t at = a.l->tensors[i].offset, n = a.l->tensors[i].count * sizeof(float);

        t_mem_eq(a.base + at, b.base + at, n);
        t_mem_eq(a.m + at, b.m + at, n);
        t_mem_eq(a.v + at, b.v + at, n);
    }
    t_ok(ckpt_config(dir, &c, &abc, &err), &err);
    t_int_eq(c.vocab, 5);
    t_int_eq(c.kv_heads, 1);
    t_true(c.rope_theta == 10000 && c.norm_eps == 1e-6f && !c.tied);
    t_int_eq(abc.n, 5);
    s.adam_steps = 10; /* the same name again: replaced */
    t_ok(ckpt_save(dir, a.l, a.w, a.m, a.v, &a.a, &s, &bytes, &err), &err);
    t_ok(ckpt_state_read(dir, &got, &err), &err);
    t_int_eq(got.adam_steps, 10);
    for (uint64_t step = 8; step < 12; step++) {
        ckpt_dir(dir, t_path("ck"), step);
        t_ok(ckpt_save(dir, a.l, a.w, a.m, a.v, &a.a, &s, &bytes, &err), &err);
    }
    ckpt_prune(t_path("ck"), 2);
    t_ok(ckpt_newest(t_path("ck"), newest, &err), &err);
    t_str_eq(newest, dir);
    ckpt_dir(dir, t_path("ck"), 10);
    t_int_eq(access(dir, F_OK), 0);
    ckpt_dir(dir, t_path("ck"), 9);
    t_true(access(dir, F_OK) != 0, "pruned");
    rig_down(&a);
    rig_down(&b);
}

/* Each file of a checkpoint fails in turn: what was there before is there still, and whole. */
static void half_written(void **state)
{
    struct rig a;
    struct ckpt_state s = { 1, 1, 1, 1 }, got;
    struct fl_err err;
    char dir[1024], part[1100];
    uint64_t bytes;
    enum fl_status st = FL_INTERNAL;
    int fds;

    (void)state;
    rig_up(&a, &config, 1);
    ckpt_dir(dir, t_path("half"), 1);
    snprintf(part, sizeof(part), "%s.part", dir);
    t_ok(ckpt_save(dir, a.l, a.w, a.m, a.v, &a.a, &s, &bytes, &err), &err);
    s.adam_steps = 2;
    fds = t_open_fds();
    for (unsigned nth = 1; st != FL_OK; nth++) {
        fl_fault_arm(nth);
        st = ckpt_save(dir, a.l, a.w, a.m, a.v, &a.a, &s, &bytes, &err);
        bool hit = fl_fault_disarm();
        t_true(hit == (st != FL_OK), "nth=%u", nth);
        t_ok(ckpt_load(dir, a.l, a.w, a.m, a.v, &got, &err), &err);
        t_int_eq(got.adam_steps, st == FL_OK ? 2 : 1, "nth=%u", nth);
        t_int_eq(t_open_fds(), fds, "nth=%u", nth);
        t_true(access(part, F_OK) != 0, "nth=%u left a part", nth);
    }
    rig_down(&a);
}

static void refused(void **state)
{
    struct rig a, b;
    struct model_config other = config;
    struct ckpt_state s = { 1, 1, 1, 1 };
    struct fl_err err;
    char dir[1024], newest[1024], path[1100];
    uint64_t bytes;
    float before;

    (void)state;
    other.ffn = 10;
    rig_up(&a, &config, 1);
    rig_up(&b, &other, 2);
    ckpt_dir(dir, t_path("other"), 1);
    t_ok(ckpt_save(dir, a.l, a.w, a.m, a.v, &a.a, &s, &bytes, &err), &err);
    before = b.base[0];
    t_true(ckpt_load(dir, b.l, b.w, b.m, b.v, &s, &err) != FL_OK);
    t_has(err.text, "mlp.");
    t_true(b.base[0] == before, "nothing half done");
    t_refused(ckpt_newest(t_path("empty"), newest, &err), FL_NOT_FOUND, &err);
    snprintf(path, sizeof(path), "%s/state.json", dir);
    t_ok(fl_file_write(path, 0600, "{\"step\":-1}", 11, &err), &err);
    t_refused(ckpt_state_read(dir, &s, &err), FL_INVALID, &err);
    t_has(err.text, "step");
    (void)unlink(path);
    t_refused(ckpt_newest(t_path("other"), newest, &err), FL_NOT_FOUND, &err);
    rig_down(&a);
    rig_down(&b);
}

/* A folder that others wrote: bf16, numbers of the rotary positions in an object, words of another tokenizer. */
static void others_folders(void **state)
{
    static const struct { const char *name, *add, *said; } rows[] = {
        { "as it is", "", NULL },
        { "positions that are scaled", ",\"rope_scaling\":{\"rope_type\":\"yarn\"}", "rope_type: is 'yarn'" },
        { "biases", ",\"attention_bias\":true", "attention_bias: is true" },
        { "another kind", ",\"model_type\":\"gpt2\"", "model_type: is 'gpt2'" },
    };
    struct model_config qk = config, c;
    const char *folder = t_path("theirs");
    struct st_entry e[16];
    struct alphabet abc;
    struct fl_err err;
    struct rig a, b;
    char text[1024], path[1200];

    (void)state;
    qk.qk_norm = true;
    qk.rope_theta = 5000;
    rig_up(&a, &qk, 1);
    rig_up(&b, &qk, 2);
    uint8_t *half = malloc(a.l->floats * 2);
    for (size_t i = 0; i < a.l->floats; i++)
        memcpy(half + 2 * i, (const uint8_t *)&a.base[i] + 2, 2);
    for (uint32_t i = 0; i < a.l->n; i++)
        e[i] = (struct st_entry){ .name = a.l->tensors[i].name, .dtype = FL_BF16, .ndim = a.l->tensors[i].ndim,
                                  .shape = { a.l->tensors[i].shape[0], a.l->tensors[i].shape[1] },
                                  .data = half + 2 * a.l->tensors[i].offset };
    t_ok(fl_mkdirs(folder, &err), &err);
    snprintf(path, sizeof(path), "%s/model.safetensors", folder);
    t_ok(st_write_file(path, e, a.l->n, NULL, 0, &err), &err);
    snprintf(path, sizeof(path), "%s/vocab.json", folder);
    t_ok(fl_file_write(path, 0644, "{\"a\":1}", 7, &err), &err);
    for (size_t r = 0; r < sizeof(rows) / sizeof(*rows); r++) {
        int n = snprintf(text, sizeof(text),
                         "{\"vocab_size\":5,\"hidden_size\":8,\"intermediate_size\":6,\"num_hidden_layers\":1,"
                         "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":4,"
                         "\"max_position_embeddings\":8,\"rope_parameters\":{\"rope_theta\":5000.0,\"rope_type\":\"default\"}"
                         "%s%s}", strstr(rows[r].add, "model_type") ? "" : ",\"model_type\":\"qwen3\"", rows[r].add);

        snprintf(path, sizeof(path), "%s/config.json", folder);
        t_ok(fl_file_write(path, 0644, text, (size_t)n, &err), &err);
        if (rows[r].said) {
            t_refused(ckpt_config(folder, &c, &abc, &err), FL_INVALID, &err);
            t_has(err.text, rows[r].said);
            continue;
        }
        t_ok(ckpt_config(folder, &c, &abc, &err), &err);
        t_true(c.qk_norm && c.rope_theta == 5000 && abc.n == 0, "%s", rows[r].name);
        t_ok(ckpt_load(folder, b.l, b.w, NULL, NULL, NULL, &err), &err);
        for (uint32_t i = 0; i < a.l->n; i++)
            for (size_t j = 0; j < a.l->tensors[i].count; j++) {
                uint32_t want;

                memcpy(&want, &a.w[i][j], sizeof(want));
                want &= 0xffff0000u;
                t_mem_eq(&b.w[i][j], &want, sizeof(want), "%s [%zu]", a.l->tensors[i].name, j);
            }
    }
    free(half);
    rig_down(&a);
    rig_down(&b);
}

static void the_size_of_a_head_by_default(void **state)
{
    static const struct { const char *kind; uint32_t head_dim; } rows[] = { { "qwen3", 128 }, { "llama", 4 } };
    const char *folder = t_path("defaults");
    char path[600], text[600];
    struct model_config c;
    struct alphabet abc;
    struct fl_err err;

    (void)state;
    t_ok(fl_mkdirs(folder, &err), &err);
    for (size_t r = 0; r < FL_LEN(rows); r++) {
        int n = snprintf(text, sizeof(text),
                         "{\"vocab_size\":5,\"hidden_size\":8,\"intermediate_size\":6,\"num_hidden_layers\":1,"
                         "\"num_attention_heads\":2,\"max_position_embeddings\":8,\"rope_scaling\":null,\"model_type\":\"%s\"}",
                         rows[r].kind);

        snprintf(path, sizeof(path), "%s/config.json", folder);
        t_ok(fl_file_write(path, 0644, text, (size_t)n, &err), &err);
        snprintf(path, sizeof(path), "%s/vocab.json", folder);
        t_ok(fl_file_write(path, 0644, "{\"a\":1}", 7, &err), &err);
        t_ok(ckpt_config(folder, &c, &abc, &err), &err);
        t_int_eq(c.head_dim, rows[r].head_dim, "%s", rows[r].kind);
    }
}

static void one_writer(void **state)
{
    struct ckpt_lock *l = NULL, *other = NULL;
    struct fl_err err;

    (void)state;
    t_ok(ckpt_lock_take(t_path("lock"), "job_a", 3, &l, &err), &err);
    t_refused(ckpt_lock_take(t_path("lock"), "job_b", 1, &other, &err), FL_EXISTS, &err);
    t_has(err.text, "job_a");
    ckpt_lock_destroy(l);
    t_refused(ckpt_lock_take(t_path("lock"), "job_a", 2, &other, &err), FL_STALE, &err);
    t_has(err.text, "attempt 3");
    t_ok(ckpt_lock_take(t_path("lock"), "job_a", 4, &l, &err), &err);
    ckpt_lock_destroy(l);
    t_ok(ckpt_lock_take(t_path("lock"), "job_b", 1, &l, &err), &err);
    ckpt_lock_destroy(l);
}

static void batches(void **state)
{
    static const int32_t tokens[] = { 1, 2, 3, 4, 5 }, good[] = { 3, 2 }, prompts[] = { 2, 1 };
    static const float logp[5] = { 0, 0, -1, 0, -2 }, adv[2] = { 1, -1 };
    static const struct { const char *name; int32_t lengths[2], prompts[2]; const char *part; } rows[] = {
        { "too short", { 3, 1 }, { 2, 1 }, "add up" },
        { "too long", { 3, 3 }, { 2, 1 }, "add up" },
        { "negative", { 4, -1 }, { 2, 1 }, "sample 1" },
        { "prompt longer than all", { 3, 2 }, { 4, 1 }, "sample 0" },
        { "no prompt", { 3, 2 }, { 2, 0 }, "sample 1" },
        { "wraps around", { 2147483647, 2147483647 }, { 1, 1 }, "add up" },
    };
    struct batch b = { .n_tokens = 5, .n_samples = 2, .tokens = tokens, .lengths = good,
                       .prompt_lengths = prompts, .logprobs = logp, .advantages = adv }, got;
    struct fl_err err;
    void *image;
    size_t bytes;

    (void)state;
    t_ok(batch_write(&b, &image, &bytes, &err), &err);
    t_ok(batch_read(image, bytes, BATCH_LOGPROBS | BATCH_ADVANTAGES, &got, &err), &err);
    t_int_eq(got.n_samples, 2);
    t_int_eq(got.starts[1], 3);
    t_mem_eq(got.tokens, tokens, sizeof(tokens));
    t_mem_eq(got.logprobs, logp, sizeof(logp));
    t_mem_eq(got.advantages, adv, sizeof(adv));
    batch_fini(&got);
    for (size_t cut = 0; cut < bytes; cut += 7)
        t_true(batch_read(image, cut, 0, &got, &err) != FL_OK, "cut at %zu", cut);
    free(image);
    b.advantages = NULL;
    t_ok(batch_write(&b, &image, &bytes, &err), &err);
    t_ok(batch_read(image, bytes, BATCH_LOGPROBS, &got, &err), &err);
    batch_fini(&got);
    t_true(batch_read(image, bytes, BATCH_ADVANTAGES, &got, &err) != FL_OK);
    t_has(err.text, "advantages");
    free(image);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        b.lengths = rows[i].lengths;
        b.prompt_lengths = rows[i].prompts;
        t_ok(batch_write(&b, &image, &bytes, &err), &err);
        t_refused(batch_read(image, bytes, 0, &got, &err), FL_INVALID, &err);
        t_has(err.text, rows[i].part);
        free(image);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip), cmocka_unit_test(half_written), cmocka_unit_test(refused),
        cmocka_unit_test(others_folders), cmocka_unit_test(the_size_of_a_head_by_default), cmocka_unit_test(one_writer), cmocka_unit_test(batches),
    };

    return t_run("ckpt", tests);
}
