/* worker/roles/engine.h - continuous batching: which sequences go into the next decode step
 *
 * Knows neither sockets nor libfurlong. Requests come at any time; each step feeds one token of every
 * sequence that runs and prompts of new ones into whatever slots are free. Samples of one prompt that
 * start together share its prefill. What a sequence becomes does not depend on which others run: not
 * on the batch, the slot, or a retraction in the middle. */
#pragma once
#include "worker/roles/model.h"

struct engine_span { uint32_t tokens; uint64_t version, digest[2]; };
struct engine_seq { /* one sample; of a finished request */
    int32_t *tokens; /* prompt, then answer */
    float *logp;     /* of each token; 0 over the prompt */
    uint32_t n_prompt, n;
    struct engine_span *spans; /* of the answer's tokens, in order */
    uint32_t n_spans;
    /* the engine's own */
    struct engine_request *of;
    struct engine_seq *next;
    uint32_t index, rng_index;
    bool done;
};
struct engine_request {
    uint32_t n_prompts, n; /* samples of each prompt */
    const int32_t *tokens; /* prompts, one after the other; copied */
    const uint32_t *lengths;
    uint32_t max_new;
    float temperature; /* 0: the most likely token */
    uint64_t seed;
    uint32_t step, first; /* of the run; number of its first prompt in the step: for random numbers */
    void *user;
    /* out */
    struct engine_seq *seqs; /* n_prompts * n, prompt by prompt */
    uint32_t left;
    struct engine_request *next;
};

enum { ENGINE_QUEUE_MAX = 1 << 20 }; /* sequences */
struct engine;
enum fl_status engine_create(const struct model_layout *l, uint32_t slots, int32_t end_token,
                             struct engine **out, struct fl_err *err);
void engine_destroy(struct engine *e); /* requests in it are dropped */
FL_AUTO_DEFINE(engine)

/* w NULL: no version serves; nothing runs until one does. Sequences in the middle go on with it. */
void engine_weights(struct engine *e, float *const *w, uint64_t version, const uint64_t digest[2]);
/* FL_INVALID: a token or a length that the model does not have. FL_EXHAUSTED: the queue is full. */
enum fl_status engine_submit(struct engine *e, const struct engine_request *what, struct fl_err *err);
bool engine_busy(const struct engine *e); /* a step would do something */
void engine_step(struct engine *e);
struct engine_request *engine_done(struct engine *e); /* one that is finished, or NULL */
void engine_request_destroy(struct engine_request *r);

/* The cache is given back; what ran starts over from its tokens so far. Returns bytes. */
size_t engine_offload(struct engine *e);
void engine_onload(struct engine *e);
