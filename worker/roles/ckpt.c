#include "worker/roles/ckpt.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "common/conf/json.h"
#include "transport/fmt/safetensors.h"

enum { PATH_BYTES = 1024, JSON_BYTES = 1 << 20 };

struct ckpt_lock {
    int fd;
};

static enum fl_status path_of(char out[PATH_BYTES], const char *dir, const char *name,
                              struct fl_err *err)
{
    if ((size_t)snprintf(out, PATH_BYTES, "%s/%s", dir, name) < PATH_BYTES)
        return FL_OK;
    return fl_fail(err, FL_INVALID, "the path of %s in %.80s... is too long", name, dir);
}

/* ---- lock ------------------------------------------------------------------------------------ */
static enum fl_status lock_check(int fd, const char *path, const char *job, uint32_t attempt,
                                 struct fl_err *err)
{
    char text[512], who[400];
    ssize_t len = pread(fd, text, sizeof(text) - 1, 0);
    unsigned seen;

    if (len < 0)
        return fl_fail_errno(err, "read %s", path);
    text[len] = '\0';
    if (sscanf(text, "%u %399s", &seen, who) == 2 && !strcmp(who, job) && seen > attempt)
        return fl_fail(err, FL_STALE, "%s: attempt %u of job %s writes here, this is attempt %u",
                       path, seen, who, attempt);
    len = snprintf(text, sizeof(text), "%u %.399s\n", attempt, job);
    if (ftruncate(fd, 0) || pwrite(fd, text, (size_t)len, 0) != len || fsync(fd))
        return fl_fail_errno(err, "write %s", path);
    return FL_OK;
}

enum fl_status ckpt_lock_take(const char *folder, const char *job, uint32_t attempt,
                              struct ckpt_lock **out, struct fl_err *err)
{
    FL_AUTO(ckpt_lock) struct ckpt_lock *l = calloc(1, sizeof(*l));
    char path[PATH_BYTES], text[256] = "";

    if (!l)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a lock");
    l->fd = -1;
    FL_TRY(path_of(path, folder, "lock", err));
    FL_TRY(fl_mkdirs(folder, err));
    l->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (l->fd < 0)
        return fl_fail_errno(err, "open %s", path);
    if (flock(l->fd, LOCK_EX | LOCK_NB)) {
        if (errno != EWOULDBLOCK)
            return fl_fail_errno(err, "lock %s", path);
        (void)!pread(l->fd, text, sizeof(text) - 1, 0); /* for the sentence alone */
        text[strcspn(text, "\n")] = '\0';
        return fl_fail(err, FL_EXISTS,
                       "%s is held (attempt and job: %.100s): two runs cannot save to one folder; "
                       "give another --save",
                       path, text);
    }
    FL_TRY(lock_check(l->fd, path, job, attempt, err));
    *out = FL_TAKE(l);
    return FL_OK;
}

void ckpt_lock_destroy(struct ckpt_lock *l)
{
    if (!l)
        return;
    if (l->fd >= 0)
        (void)close(l->fd); /* read and synced before */
    free(l);
}

/* ---- writing --------------------------------------------------------------------------------- */
static enum fl_status json_write(const char *dir, const char *name, json_t *o_take,
                                 struct fl_err *err)
{
    char path[PATH_BYTES];
    char *text = o_take ? json_dumps(o_take, JSON_INDENT(1) | JSON_SORT_KEYS) : NULL;
    enum fl_status st = path_of(path, dir, name, err);

    json_decref(o_take);
    if (!text)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %s", name);
    if (st == FL_OK)
        st = fl_file_write(path, 0644, text, strlen(text), err);
    free(text);
    return st;
}

static json_t *config_json(const struct model_config *c)
{
    return json_pack(
        "{s:[s], s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:f, s:f, s:s, s:b}",
        "architectures", c->qk_norm ? "Qwen3ForCausalLM" : "LlamaForCausalLM", "model_type",
        c->qk_norm ? "qwen3" : "llama", "torch_dtype", "float32", "vocab_size", (int)c->vocab,
        "hidden_size", (int)c->dim, "intermediate_size", (int)c->ffn, "num_hidden_layers",
        (int)c->layers, "num_attention_heads", (int)c->heads, "num_key_value_heads",
        (int)c->kv_heads, "head_dim", (int)c->head_dim, "max_position_embeddings", (int)c->max_len,
        "tie_word_embeddings", (int)c->tied, "rope_theta", (double)c->rope_theta, "rms_norm_eps",
        (double)c->norm_eps, "hidden_act", "silu", "attention_bias", 0);
}

static void entry_of(struct st_entry *e, const struct model_tensor *t, const char *name,
                     const void *data)
{
    *e = (struct st_entry){ .name = name,
                            .dtype = FL_F32,
                            .ndim = t->ndim,
                            .shape = { t->shape[0], t->shape[1] },
                            .data = data };
}

static enum fl_status model_write(const char *dir, const struct model_layout *l, float *const *w,
                                  struct fl_err *err)
{
    struct st_entry *e = calloc(l->n, sizeof(*e));
    struct st_meta meta = { "format", "pt" };
    char path[PATH_BYTES];
    enum fl_status st = path_of(path, dir, "model.safetensors", err);

    if (!e)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u tensors", l->n);
    for (uint32_t i = 0; i < l->n; i++)
        entry_of(&e[i], &l->tensors[i], l->tensors[i].name, w[i]);
    if (st == FL_OK)
        st = st_write_file(path, e, l->n, &meta, 1, err);
    free(e);
    return st;
}

static void moment_name(char out[80], const char *kind, const char *tensor)
{
    snprintf(out, 80, "%s.%s", kind, tensor);
}

static enum fl_status optimizer_write(const char *dir, const struct model_layout *l, const float *m,
                                      const float *v, struct fl_err *err)
{
    struct st_entry *e = calloc((size_t)l->n * 2, sizeof(*e));
    char(*names)[80] = calloc((size_t)l->n * 2, sizeof(*names));
    char path[PATH_BYTES];
    enum fl_status st = path_of(path, dir, "optimizer.safetensors", err);

    if (st == FL_OK && (!e || !names))
        st = fl_fail(err, FL_EXHAUSTED, "no memory for %u tensors", l->n);
    for (uint32_t i = 0; st == FL_OK && i < l->n; i++) {
        const struct model_tensor *t = &l->tensors[i];

        moment_name(names[2 * i], "exp_avg", t->name);
        moment_name(names[2 * i + 1], "exp_avg_sq", t->name);
        entry_of(&e[2 * i], t, names[2 * i], m + t->offset);
        entry_of(&e[2 * i + 1], t, names[2 * i + 1], v + t->offset);
    }
    if (st == FL_OK)
        st = st_write_file(path, e, (size_t)l->n * 2, NULL, 0, err);
    free(names);
    free(e);
    return st;
}

static enum fl_status vocab_write(const char *dir, const struct alphabet *a, struct fl_err *err)
{
    char hex[ALPHABET_HEX];

    alphabet_to_hex(a, hex);
    return json_write(dir, "vocab.json",
                      json_pack("{s:i, s:s}", "end", ALPHABET_END, "bytes_hex", hex), err);
}

static enum fl_status parts_write(const char *dir, const struct model_layout *l, float *const *w,
                                  const float *m, const float *v, const struct alphabet *a,
                                  const struct ckpt_state *s, struct fl_err *err)
{
    FL_TRY(model_write(dir, l, w, err));
    if (FL_FAULT("ckpt.write"))
        return fl_fail_errno(err, "write %s", dir);
    FL_TRY(optimizer_write(dir, l, m, v, err));
    FL_TRY(json_write(dir, "config.json", config_json(&l->cfg), err));
    FL_TRY(vocab_write(dir, a, err));
    return json_write(dir, "state.json",
                      json_pack("{s:I, s:I, s:I, s:I}", "step", (json_int_t)s->step, "version",
                                (json_int_t)s->version, "adam_steps", (json_int_t)s->adam_steps,
                                "seed", (json_int_t)s->seed),
                      err);
}

static enum fl_status folder_swap(const char *part, const char *dir, struct fl_err *err)
{
    char *up = strdup(dir), *slash = up ? strrchr(up, '/') : NULL;
    int fd = -1;

    if (rename(part, dir)) { /* one of that name is there: exchange, then remove the old one */
        if ((errno != ENOTEMPTY && errno != EEXIST) ||
            renameat2(AT_FDCWD, part, AT_FDCWD, dir, RENAME_EXCHANGE)) {
            free(up);
            return fl_fail_errno(err, "rename %s to %s", part, dir);
        }
        (void)fl_tree_remove(part, NULL); /* pruned later if it stays */
    }
    if (slash) {
        *slash = '\0';
        fd = open(slash == up ? "/" : up, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    free(up);
    if (fd >= 0) {
        (void)fsync(fd); /* file systems without it refuse; the rename stands */
        (void)close(fd);
    }
    return FL_OK;
}

enum fl_status ckpt_save(const char *dir, const struct model_layout *l, float *const *w,
                         const float *m, const float *v, const struct alphabet *a,
                         const struct ckpt_state *s, uint64_t *bytes, struct fl_err *err)
{
    char part[PATH_BYTES];
    enum fl_status st;

    if ((size_t)snprintf(part, sizeof(part), "%s.part", dir) >= sizeof(part))
        return fl_fail(err, FL_INVALID, "the path %.80s... is too long", dir);
    FL_TRY(fl_tree_remove(part, err));
    FL_TRY(fl_mkdirs(part, err));
    st = parts_write(part, l, w, m, v, a, s, err);
    if (st == FL_OK)
        st = folder_swap(part, dir, err);
    if (st != FL_OK) {
        (void)fl_tree_remove(part, NULL); /* the error is the one above */
        return fl_wrap(err, st, "checkpoint %s", dir);
    }
    *bytes = (uint64_t)l->floats * sizeof(float) * 3;
    return FL_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */
static enum fl_status json_at(const char *dir, const char *name, json_t **out, struct fl_err *err)
{
    char path[PATH_BYTES];

    FL_TRY(path_of(path, dir, name, err));
    return fl_json_load(path, JSON_BYTES, out, err);
}

static enum fl_status need_all(const struct st_reader *r, const struct model_layout *l,
                               const char *kind, struct fl_err *err)
{
    for (uint32_t i = 0; i < l->n; i++) {
        const struct model_tensor *t = &l->tensors[i];
        const struct st_tensor *found;
        char name[80];

        if (kind)
            moment_name(name, kind, t->name);
        found = kind ? NULL : st_find(r, t->name);
        FL_TRY(st_need(r, kind ? name : t->name,
                       found && found->known && found->dtype == FL_BF16 ? FL_BF16 : FL_F32, t->ndim,
                       t->shape, &found, err));
    }
    return FL_OK;
}

/* bf16 is the upper half of an fp32. */
static void weights_copy(float *to, const struct st_tensor *from, size_t n)
{
    const uint8_t *at = from->data;

    if (from->dtype == FL_F32) {
        memcpy(to, from->data, n * sizeof(float));
        return;
    }
    for (size_t i = 0; i < n; i++, at += 2) {
        uint32_t bits = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;

        memcpy(to + i, &bits, sizeof(bits));
    }
}

static void moments_copy(const struct st_reader *r, const struct model_layout *l, const char *kind,
                         float *to)
{
    for (uint32_t i = 0; i < l->n; i++) {
        char name[80];

        moment_name(name, kind, l->tensors[i].name);
        memcpy(to + l->tensors[i].offset, st_find(r, name)->data,
               l->tensors[i].count * sizeof(float));
    }
}

static enum fl_status readers_open(const char *dir, const struct model_layout *l, bool moments,
                                   struct st_reader **weights, struct st_reader **optimizer,
                                   struct fl_err *err)
{
    char path[PATH_BYTES];

    FL_TRY(st_read_folder(dir, weights, err));
    FL_TRY(need_all(*weights, l, NULL, err));
    if (!moments)
        return FL_OK;
    FL_TRY(path_of(path, dir, "optimizer.safetensors", err));
    FL_TRY(st_read_file(path, optimizer, err));
    FL_TRY(need_all(*optimizer, l, "exp_avg", err));
    return need_all(*optimizer, l, "exp_avg_sq", err);
}

enum fl_status ckpt_check(const char *dir, const struct model_config *c, bool moments,
                          struct fl_err *err)
{
    FL_AUTO(st_reader) struct st_reader *weights = NULL, *optimizer = NULL;
    struct model_layout *l;

    FL_TRY(model_layout_create(c, &l, err));
    enum fl_status st = readers_open(dir, l, moments, &weights, &optimizer, err);

    model_layout_destroy(l);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "%s", dir);
}

enum fl_status ckpt_load(const char *dir, const struct model_layout *l, float *const *w, float *m,
                         float *v, struct ckpt_state *s, struct fl_err *err)
{
    FL_AUTO(st_reader) struct st_reader *weights = NULL, *optimizer = NULL;
    enum fl_status st;

    if (s) {
        st = ckpt_state_read(dir, s, err);
        if (st != FL_OK)
            return fl_wrap(err, st, "checkpoint %s", dir);
    }
    st = readers_open(dir, l, m != NULL, &weights, &optimizer, err);
    if (st != FL_OK)
        return fl_wrap(err, st, "%s", dir);
    for (uint32_t i = 0; i < l->n; i++)
        weights_copy(w[i], st_find(weights, l->tensors[i].name), l->tensors[i].count);
    if (m) {
        moments_copy(optimizer, l, "exp_avg", m);
        moments_copy(optimizer, l, "exp_avg_sq", v);
    }
    return FL_OK;
}

enum fl_status ckpt_state_read(const char *dir, struct ckpt_state *s, struct fl_err *err)
{
    json_t *o = NULL;
    int64_t v[4] = { 0, 0, 0, -1 };
    static const char *const keys[4] = { "step", "version", "adam_steps", "seed" };
    enum fl_status st = json_at(dir, "state.json", &o, err);
    struct fl_json_at at = fl_json_root(o, "state.json");

    for (int i = 0; st == FL_OK && i < 4; i++)
        if (i < 2 || fl_json_has(&at, keys[i])) /* a trainer of others keeps the first two alone */
            st = fl_json_int(&at, keys[i], 0, INT64_MAX, &v[i], err);
    if (st == FL_OK)
        *s = (struct ckpt_state){ (uint64_t)v[0], (uint64_t)v[1], (uint64_t)v[2], (uint64_t)v[3] };
    json_decref(o);
    return st;
}

/* The kinds that have just these parts; others compute something else from the same names. */
static enum fl_status kind_read(const struct fl_json_at *at, struct model_config *c,
                                struct fl_err *err)
{
    const char *kind = "llama";
    bool bias = false;

    if (fl_json_has(at, "model_type"))
        FL_TRY(fl_json_text(at, "model_type", &kind, err));
    if (strcmp(kind, "llama") && strcmp(kind, "qwen3"))
        return fl_json_bad(at, "model_type", err, "is '%.40s': llama and qwen3 (dense) are read",
                           kind);
    if (fl_json_has(at, "attention_bias"))
        FL_TRY(fl_json_bool(at, "attention_bias", &bias, err));
    if (bias)
        return fl_json_bad(at, "attention_bias", err, "is true: layers with biases are not read");
    c->qk_norm = !strcmp(kind, "qwen3");
    return FL_OK;
}

/* Beside the sizes, or in an object of its own since transformers 5. */
static enum fl_status rope_read(const struct fl_json_at *at, double *theta, struct fl_err *err)
{
    static const char *const places[] = { "rope_scaling", "rope_parameters" };
    const char *kind = "default";

    for (int i = 0; i < 2; i++) {
        struct fl_json_at in;

        if (!fl_json_has(at, places[i]))
            continue;
        FL_TRY(fl_json_object(at, places[i], &in, err));
        if (fl_json_has(&in, "rope_type"))
            FL_TRY(fl_json_text(&in, "rope_type", &kind, err));
        if (strcmp(kind, "default"))
            return fl_json_bad(&in, "rope_type", err, "is '%.40s': default is read", kind);
        if (fl_json_has(&in, "rope_theta"))
            FL_TRY(fl_json_real(&in, "rope_theta", theta, err));
    }
    return fl_json_has(at, "rope_theta") ? fl_json_real(at, "rope_theta", theta, err) : FL_OK;
}

static enum fl_status config_read(const json_t *o, struct model_config *c, struct fl_err *err)
{
    struct fl_json_at at = fl_json_root(o, "config.json");
    const struct {
        const char *key;
        uint32_t *to;
        bool may_miss;
    } ints[] = {
        { "vocab_size", &c->vocab, false },
        { "hidden_size", &c->dim, false },
        { "intermediate_size", &c->ffn, false },
        { "num_hidden_layers", &c->layers, false },
        { "num_attention_heads", &c->heads, false },
        { "num_key_value_heads", &c->kv_heads, true },
        { "head_dim", &c->head_dim, true },
        { "max_position_embeddings", &c->max_len, false },
    };
    double theta = 10000, eps = 1e-6;

    for (size_t i = 0; i < sizeof(ints) / sizeof(*ints); i++) {
        int64_t v = 0;

        if (!ints[i].may_miss || fl_json_has(&at, ints[i].key))
            FL_TRY(fl_json_int(&at, ints[i].key, 1, 1 << 24, &v, err));
        *ints[i].to = (uint32_t)v;
    }
    if (!c->kv_heads)
        c->kv_heads = c->heads;
    if (fl_json_has(&at, "tie_word_embeddings"))
        FL_TRY(fl_json_bool(&at, "tie_word_embeddings", &c->tied, err));
    FL_TRY(kind_read(&at, c, err));
    if (!c->head_dim) /* the default of each kind in transformers */
        c->head_dim = c->qk_norm ? 128 : c->dim / c->heads;
    FL_TRY(rope_read(&at, &theta, err));
    if (fl_json_has(&at, "rms_norm_eps"))
        FL_TRY(fl_json_real(&at, "rms_norm_eps", &eps, err));
    c->rope_theta = (float)theta;
    c->norm_eps = (float)eps;
    return model_config_check(c, err);
}

enum fl_status ckpt_config(const char *dir, struct model_config *c, struct alphabet *a,
                           struct fl_err *err)
{
    struct model_config got = { 0 };
    json_t *o = NULL, *vocab = NULL;
    const char *hex;
    enum fl_status st = json_at(dir, "config.json", &o, err);

    if (st == FL_OK)
        st = config_read(o, &got, err);
    json_decref(o);
    alphabet_init(a);
    if (st == FL_OK && json_at(dir, "vocab.json", &vocab, NULL) == FL_OK &&
        json_object_get(vocab, "bytes_hex")) { /* else the words of another tokenizer */
        struct fl_json_at at = fl_json_root(vocab, "vocab.json");

        st = fl_json_text(&at, "bytes_hex", &hex, err);
        if (st == FL_OK)
            st = alphabet_of_hex(hex, a, err);
        if (st == FL_OK && a->n != got.vocab)
            st = fl_fail(err, FL_INVALID, "vocab.json has %u tokens, config.json says %u", a->n,
                         got.vocab);
    }
    json_decref(vocab);
    if (st != FL_OK)
        return fl_wrap(err, st, "%s", dir);
    *c = got;
    return FL_OK;
}

/* ---- the folder of checkpoints --------------------------------------------------------------- */
void ckpt_dir(char out[1024], const char *folder, uint64_t step)
{
    snprintf(out, 1024, "%s/step_%08ju", folder, (uintmax_t)step);
}

static bool step_of(const char *name, uint64_t *step, bool *part)
{
    int end = 0;
    uintmax_t n;

    if (sscanf(name, "step_%ju%n", &n, &end) != 1)
        return false;
    *step = n;
    *part = !strcmp(name + end, ".part");
    return !name[end] || *part;
}

static bool is_whole(const char *dir)
{
    char path[PATH_BYTES];

    return path_of(path, dir, "state.json", NULL) == FL_OK && access(path, R_OK) == 0;
}

enum fl_status ckpt_newest(const char *folder, char out[1024], struct fl_err *err)
{
    uint64_t best = 0, step;
    bool found = false, part;
    struct dirent *e;
    DIR *d;

    if (is_whole(folder)) {
        snprintf(out, PATH_BYTES, "%s", folder);
        return FL_OK;
    }
    d = opendir(folder);
    if (!d)
        return fl_fail_errno(err, "checkpoints in %s", folder);
    while ((e = readdir(d)))
        if (step_of(e->d_name, &step, &part) && !part && (!found || step > best)) {
            char dir[PATH_BYTES];

            ckpt_dir(dir, folder, step);
            if (is_whole(dir)) {
                found = true;
                best = step;
            }
        }
    (void)closedir(d);
    if (!found)
        return fl_fail(
            err, FL_NOT_FOUND,
            "%s holds no whole checkpoint (step_*/state.json); name a folder that --save wrote",
            folder);
    ckpt_dir(out, folder, best);
    return FL_OK;
}

static int by_step_down(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? 1 : x > y ? -1 : 0;
}

void ckpt_prune(const char *folder, uint32_t keep)
{
    enum { SEEN = 1024 };
    uint64_t steps[SEEN], step;
    size_t n = 0;
    bool part;
    char dir[PATH_BYTES];
    struct dirent *e;
    DIR *d = opendir(folder);

    if (!d)
        return;
    while ((e = readdir(d))) {
        if (!step_of(e->d_name, &step, &part))
            continue;
        if (part && path_of(dir, folder, e->d_name, NULL) == FL_OK)
            (void)fl_tree_remove(dir, NULL); /* tried again next time */
        else if (!part && n < SEEN)
            steps[n++] = step;
    }
    (void)closedir(d);
    qsort(steps, n, sizeof(*steps), by_step_down);
    for (size_t i = keep; keep && i < n; i++) {
        struct fl_err err;

        ckpt_dir(dir, folder, steps[i]);
        if (fl_tree_remove(dir, &err) != FL_OK)
            fl_warn("old checkpoint stays dir=%s why=%s", dir, err.text);
    }
}
