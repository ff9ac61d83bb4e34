/* examples/policy.h - the model of the two examples, and the bulk that a run carries
 *
 * A table of log-odds: each pair of neighbours in the prompt, together with the prompt's last byte,
 * the answer's length so far and its last byte, points at one row; the rows that a state points at
 * are added, and a softmax over the 128 ASCII bytes gives the next one. Byte 0 ends the answer. */
#pragma once
#include <furlong/furlong.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 16384, WORDS = 128, FEATURES_MAX = 64 };
#define BYTES ((size_t)ROWS * WORDS * sizeof(float))
static const struct furlong_tensor policy_tensor = {
    .name = "policy.table", .dtype = FL_F32, .ndim = 2, .shape = { ROWS, WORDS }
};

/* The first device of the seat, where devices are made of host memory (FURLONG_GPU=fake); else NULL: the host. A
 * model in plain C computes on no other, but all that happens to its weights is as on any device. */
static inline const char *policy_device(const struct furlong *f)
{
    const char *made = getenv("FURLONG_GPU");
    const struct furlong_seat *me = furlong_seat(f);

    return made && strncmp(made, "fake", 4) == 0 && me->n_devices ? me->device_uuids[0] : NULL;
}

/* Rows of the state in front of token at; tokens: the prompt's n_prompt bytes, then the answer so
 * far. */
static inline int policy_rows(const int32_t *tokens, int n_prompt, int at,
                              uint32_t rows[FEATURES_MAX])
{
    int n = n_prompt - 1 < FEATURES_MAX ? n_prompt - 1 : FEATURES_MAX;
    uint32_t end = (uint32_t)tokens[n_prompt - 1] + 128u * (uint32_t)(at - n_prompt) +
                   (at > n_prompt ? 7919u * (uint32_t)tokens[at - 1] : 0);

    for (int i = 0; i < n; i++) {
        uint32_t x = ((uint32_t)tokens[i] * 128u + (uint32_t)tokens[i + 1] + 16411u * (uint32_t)i) *
                         2654435761u ^
                     end * 2246822519u;

        rows[i] = (x ^ x >> 15) * 2654435761u >> 18;
    }
    return n;
}

/* p: probabilities of the next byte, given that state. */
static inline void policy_next(const float *table, const int32_t *tokens, int n_prompt, int at,
                               double temperature, float p[WORDS])
{
    uint32_t rows[FEATURES_MAX];
    int n = policy_rows(tokens, n_prompt, at, rows);
    float top = -INFINITY, sum = 0;

    memset(p, 0, WORDS * sizeof(*p));
    for (int i = 0; i < n; i++)
        for (int w = 0; w < WORDS; w++)
            p[w] += table[(size_t)rows[i] * WORDS + (size_t)w] / (float)temperature;
    for (int w = 0; w < WORDS; w++)
        top = p[w] > top ? p[w] : top;
    for (int w = 0; w < WORDS; w++)
        sum += p[w] = expf(p[w] - top);
    for (int w = 0; w < WORDS; w++)
        p[w] /= sum;
}

struct asked { /* the words of one generate call */
    const char *id;
    json_t *prompts;
    json_int_t n, max_new, seed, step, first;
    double temperature;
};

/* A number in [0, 1) that depends on the sample and the position alone, not on who draws it. */
static inline double draw(const struct asked *a, size_t prompt, json_int_t sample, int at)
{
    uint64_t x = (uint64_t)a->seed * 0x9e3779b97f4a7c15u + (uint64_t)a->step;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u + (uint64_t)(a->first + (json_int_t)prompt);
    x = (x ^ x >> 27) * 0x94d049bb133111ebu + (uint64_t)sample * 4096u + (uint64_t)at;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (double)(x >> 11) / 9007199254740992.0;
}

static inline int32_t pick(const float p[WORDS], double temperature, double at)
{
    int32_t best = 0;

    for (int32_t w = 0; w < WORDS && temperature == 0; w++)
        best = p[w] > p[best] ? w : best;
    for (int32_t w = 0; w < WORDS && temperature > 0; w++)
        if ((at -= (double)p[best = w]) < 0)
            break;
    return best;
}

/* One part of a safetensors image, 4 bytes an element; NULL: it is not in there, or not whole. */
static inline const void *image_part(const void *image, size_t bytes, const char *name, size_t *n)
{
    uint64_t head_bytes = 0;
    json_int_t from = 0, to = 0;

    if (bytes < 8)
        return NULL;
    memcpy(&head_bytes, image, 8);
    if (head_bytes > bytes - 8)
        return NULL;
    json_t *head = json_loadb((const char *)image + 8, head_bytes, JSON_REJECT_DUPLICATES, NULL);
    bool there = head && json_unpack(head, "{s:{s:[I,I]}}", name, "data_offsets", &from, &to) == 0;
    json_decref(head);
    if (!there || from < 0 || to < from || (uint64_t)to > bytes - 8 - head_bytes ||
        (8 + head_bytes + (uint64_t)from) % 4)
        return NULL;
    *n = (size_t)(to - from) / 4;
    return (const char *)image + 8 + head_bytes + from;
}

struct image_part {
    const char *name, *dtype;
    const void *data;
    size_t n;
};
static inline void *image_make(const struct image_part *parts, int n_parts, size_t *bytes)
{
    char head[1024] = "{";
    size_t at = 1, data = 0;

    for (int i = 0; i < n_parts; i++, data += parts[i - 1].n * 4)
        at += (size_t)snprintf(
            head + at, sizeof(head) - at,
            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}", i ? "," : "",
            parts[i].name, parts[i].dtype, parts[i].n, data, data + parts[i].n * 4);
    at += (size_t)snprintf(head + at, sizeof(head) - at, "}");
    while (at % 8)
        head[at++] = ' ';
    uint64_t head_bytes = at;
    char *out = malloc(*bytes = 8 + at + data), *to = out + 8 + at;
    if (!out)
        return NULL;
    memcpy(out, &head_bytes, 8);
    memcpy(out + 8, head, at);
    for (int i = 0; i < n_parts; to += parts[i++].n * 4)
        memcpy(to, parts[i].data, parts[i].n * 4);
    return out;
}

/* The blob of train, checked: sample s is tokens[start .. start + lengths[s]), its prompt first. */
struct batch {
    const int32_t *tokens, *lengths, *prompt_lengths;
    const float *logprobs, *advantages;
    size_t n;
};
static inline bool batch_read(const struct furlong_event *ev, struct batch *b)
{
    size_t n[5] = { 0 }, need = 0;

    b->tokens = image_part(ev->blob, ev->blob_bytes, "tokens", &n[0]);
    b->lengths = image_part(ev->blob, ev->blob_bytes, "lengths", &n[1]);
    b->prompt_lengths = image_part(ev->blob, ev->blob_bytes, "prompt_lengths", &n[2]);
    b->logprobs = image_part(ev->blob, ev->blob_bytes, "logprobs", &n[3]);
    b->advantages = image_part(ev->blob, ev->blob_bytes, "advantages", &n[4]);
    if (!b->tokens || !b->lengths || !b->prompt_lengths || !b->logprobs || !b->advantages ||
        n[2] != n[1] || n[4] != n[1] || n[3] != n[0])
        return false;
    for (size_t i = 0; i < n[1]; i++) {
        if (b->prompt_lengths[i] < 2 || b->lengths[i] < b->prompt_lengths[i])
            return false;
        need += (size_t)b->lengths[i];
    }
    for (size_t i = 0; i < n[0]; i++)
        if (b->tokens[i] < 0 || b->tokens[i] >= WORDS)
            return false;
    b->n = n[1];
    return need == n[0];
}

/* A checkpoint is the table, and state.json, which says that it is whole: written last. */
struct trained {
    json_int_t step, version;
};
static inline bool file_save(const char *dir, const char *name, const void *data, size_t bytes)
{
    char part[1200], path[1200];
    FILE *file;

    snprintf(part, sizeof(part), "%s/%s.part", dir, name);
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    file = fopen(part, "wb");
    bool ok =
        file && fwrite(data, bytes, 1, file) == 1 && fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (file)
        fclose(file);
    return ok && rename(part, path) == 0;
}

static inline bool checkpoint_save(const struct trained *t, const char *dir, const void *table)
{
    char state[100];
    int n = snprintf(state, sizeof(state), "{\"step\":%lld,\"version\":%lld}\n", (long long)t->step,
                     (long long)t->version);

    (void)mkdir(dir, 0777); /* may be there already */
    return file_save(dir, "table.bin", table, BYTES) &&
           file_save(dir, "state.json", state, (size_t)n);
}

static inline bool checkpoint_load(struct trained *t, const char *dir, void *table)
{
    char path[1200];

    snprintf(path, sizeof(path), "%s/state.json", dir);
    json_t *state = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
    bool ok =
        state && json_unpack(state, "{s:I,s:I}", "step", &t->step, "version", &t->version) == 0;
    json_decref(state);
    snprintf(path, sizeof(path), "%s/table.bin", dir);
    FILE *file = ok ? fopen(path, "rb") : NULL;
    ok = file && fread(table, BYTES, 1, file) == 1;
    if (file)
        fclose(file);
    return ok;
}

static inline double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline void refuse(struct furlong_call *c, enum fl_status st, const char *text)
{
    struct fl_err why = { .status = st };

    snprintf(why.text, sizeof(why.text), "%s", text);
    furlong_refuse(c, &why);
}

static inline void reply_json(struct furlong_call *c, json_t *o, const void *blob, size_t bytes)
{
    char *text = json_dumps(o, JSON_COMPACT);

    furlong_reply_data(c, &(struct furlong_data){ text, text ? strlen(text) : 0, blob, bytes });
    free(text);
    json_decref(o);
}
