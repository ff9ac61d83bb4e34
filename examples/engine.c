/* examples/engine.c - a rollout engine over libfurlong: furlong train --rollout-cmd
 * build/bin/example-engine
 *
 * Everything that a run asks of an engine (docs/roles.md) is answered in the loop of main(). */
#include "policy.h"

struct made {
    int32_t *tokens, *lengths, *prompt_lengths;
    float *logprobs;
    size_t n_tokens, n_samples;
};

/* One answer; its tokens and log probabilities go behind what is made already. */
static void answer(const struct asked *a, const float *table, size_t prompt, json_int_t sample,
                   struct made *m, char *text)
{
    const char *words = json_string_value(json_array_get(a->prompts, prompt));
    int n_prompt = (int)strlen(words), at = n_prompt;
    int32_t *tokens = m->tokens + m->n_tokens;
    float p[WORDS];

    for (int i = 0; i < n_prompt; i++) {
        tokens[i] = words[i] & 127;
        m->logprobs[m->n_tokens + (size_t)i] = 0;
    }
    while (at < n_prompt + a->max_new) {
        policy_next(table, tokens, n_prompt, at, a->temperature > 0 ? a->temperature : 1, p);
        tokens[at] = pick(p, a->temperature, draw(a, prompt, sample, at));
        m->logprobs[m->n_tokens + (size_t)at] = logf(p[tokens[at]]);
        if (tokens[at++] == 0)
            break;
        *text++ = (char)tokens[at - 1];
    }
    *text = '\0';
    m->lengths[m->n_samples] = at;
    m->prompt_lengths[m->n_samples++] = n_prompt;
    m->n_tokens += (size_t)at;
}

/* NULL: what is wrong with it. */
static const char *ask_read(json_t *o, struct asked *a, size_t *room)
{
    *a = (struct asked){ .id = "" };
    if (json_unpack(o, "{s?s,s:o,s:I,s:I,s:F,s:I,s?I,s?I}", "id", &a->id, "prompts", &a->prompts,
                    "n", &a->n, "max_new_tokens", &a->max_new, "temperature", &a->temperature,
                    "seed", &a->seed, "step", &a->step, "first", &a->first) != 0 ||
        !json_is_array(a->prompts))
        return "generate: wants prompts, n, max_new_tokens, temperature, seed";
    if (a->n < 1 || a->n > 4096 || a->max_new < 1 || a->max_new > 4096)
        return "generate: n and max_new_tokens are 1 to 4096";
    for (size_t i = *room = 0; i < json_array_size(a->prompts); i++) {
        size_t len = json_string_length(json_array_get(a->prompts, i));

        if (len < 2)
            return "generate: a prompt has at least two bytes";
        *room += (len + (size_t)a->max_new) * (size_t)a->n;
    }
    return NULL;
}

static void generate(const struct furlong_event *ev, const struct furlong_weights *w)
{
    json_t *o = json_loadb(ev->body, ev->body_bytes, JSON_REJECT_DUPLICATES, NULL),
           *texts = json_array(), *spans = json_array();
    uint64_t digest[2], version = furlong_weights_version(w, digest);
    json_int_t exact = -1, least = -1;
    struct asked a;
    size_t room = 0, bytes = 0;
    char hex[40];
    const char *wrong = ask_read(o, &a, &room);

    json_unpack(o, "{s?I,s?I}", "version", &exact, "version_at_least", &least);
    bool stale = version == FURLONG_NO_VERSION || (exact >= 0 && version != (uint64_t)exact) ||
                 (least >= 0 && version < (uint64_t)least);
    if (wrong || stale) {
        snprintf(hex, sizeof(hex), "asked for %lld, serve %lld",
                 (long long)(exact >= 0 ? exact : least), (long long)version);
        refuse(ev->call, wrong ? FL_INVALID : FL_STALE, wrong ? wrong : hex);
    } else {
        size_t n = json_array_size(a.prompts) * (size_t)a.n;
        struct made m = {
            calloc(room + 1, 4), calloc(n + 1, 4), calloc(n + 1, 4), calloc(room + 1, 4), 0, 0
        };
        char *text = malloc((size_t)a.max_new + 1);

        snprintf(hex, sizeof(hex), "%016llx%016llx", (unsigned long long)digest[0],
                 (unsigned long long)digest[1]);
        for (size_t i = 0; i < n; i++) {
            answer(&a, furlong_weights_data(w, 0), i / (size_t)a.n, (json_int_t)(i % (size_t)a.n),
                   &m, text);
            json_array_append_new(texts, json_string(text));
            json_array_append_new(spans, json_pack("[{s:i,s:I,s:s}]", "tokens",
                                                   m.lengths[i] - m.prompt_lengths[i], "version",
                                                   (json_int_t)version, "digest", hex));
        }
        const struct image_part parts[] = { { "tokens", "I32", m.tokens, m.n_tokens },
                                            { "lengths", "I32", m.lengths, n },
                                            { "prompt_lengths", "I32", m.prompt_lengths, n },
                                            { "logprobs", "F32", m.logprobs, m.n_tokens } };
        void *image = image_make(parts, 4, &bytes);
        reply_json(ev->call,
                   json_pack("{s:s,s:O,s:O,s:f}", "id", a.id, "texts", texts, "spans", spans,
                             "idle_s", 0.0),
                   image, bytes);
        free(image), free(text), free(m.tokens), free(m.lengths), free(m.prompt_lengths),
            free(m.logprobs);
    }
    json_decref(texts), json_decref(spans), json_decref(o);
}

int main(void)
{
    struct fl_err err = { 0 };
    struct furlong *f = NULL;
    struct furlong_weights *w = NULL;
    struct furlong_event ev = { 0 };
    enum fl_status st = furlong_join(FURLONG_ABI, &f, &err);
    struct furlong_weights_opts o = { 0 };

    if (st == FL_OK)
        o.device = policy_device(f);
    if (st == FL_OK)
        st = furlong_weights_accept(f, "policy", &policy_tensor, 1, &o, &w, &err);
    while (st == FL_OK && ev.what != FURLONG_STOP) {
        st = furlong_next(f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err);
        if (st != FL_OK)
            break;
        if (ev.what == FURLONG_COMMIT) /* between two answers by construction */
            st = furlong_weights_commit(w, ev.call, &err);
        else if (ev.what !=
                 FURLONG_CALL) /* offload, onload, pause: the library does what there is to do */
            furlong_reply(ev.call, NULL, 0);
        else if (strcmp(ev.method, "generate") == 0)
            generate(&ev, w);
        else
            refuse(ev.call, FL_UNSUPPORTED, "an engine answers generate");
    }
    if (st != FL_OK)
        fprintf(stderr, "%s\n", err.text);
    furlong_leave(f); /* the weights go with it */
    return st == FL_OK ? 0 : 1;
}
