/* examples/trainer.c - one trainer rank over libfurlong, for furlong train --trainer-cmd
 *
 * Policy gradient on a table of log-odds. Every rank gets the whole batch and the model is tiny, so
 * each takes the same step and the replicas stay equal without a word between them. */
#include "policy.h"

#define RATE 1.0f

/* table += the gradient of sum(advantage * log p) over the answers, at what last says. */
static json_t *learn(const struct batch *b, const float *last, float *table)
{
    double loss = 0, gap = 0, norm = 0, from = now();
    size_t n_tokens = 0, start = 0;
    uint32_t rows[FEATURES_MAX];
    float p[WORDS];

    for (size_t s = 0; s < b->n; start += (size_t)b->lengths[s++]) {
        const int32_t *tokens = b->tokens + start;

        for (int at = b->prompt_lengths[s]; at < b->lengths[s]; at++, n_tokens++) {
            int n = policy_rows(tokens, b->prompt_lengths[s], at, rows);
            float step = RATE * b->advantages[s] / (float)b->n * 64;

            policy_next(last, tokens, b->prompt_lengths[s], at, 1, p);
            loss -= b->advantages[s] * logf(p[tokens[at]]);
            gap += fabs((double)logf(p[tokens[at]]) - (double)b->logprobs[start + (size_t)at]);
            for (int w = 0; w < WORDS; w++) {
                float g = step * ((w == tokens[at] ? 1.0f : 0.0f) - p[w]);

                norm += (double)(g * g) * n;
                for (int i = 0; i < n; i++)
                    table[(size_t)rows[i] * WORDS + (size_t)w] += g;
            }
        }
    }
    double all = n_tokens ? (double)n_tokens : 1;
    return json_pack("{s:f,s:f,s:f,s:I,s:f,s:f}", "loss", loss / all, "grad_norm",
                     sqrt(norm) / RATE, "logprob_abs_diff", gap / all, "tokens",
                     (json_int_t)n_tokens, "train_s", now() - from, "log_probs_s", 0.0);
}

struct trainer {
    struct furlong *f;
    struct furlong_weights *w;
    struct trained at;
};

static enum fl_status write_version(struct trainer *t, json_int_t version, const struct batch *b,
                                    const void *whole, uint32_t budget_ms, json_t **said,
                                    struct fl_err *err)
{
    double from = now(), begun;

    FL_TRY(furlong_weights_begin(t->w, (uint64_t)version, budget_ms, err)); /* ours to write */
    begun = now();
    memmove(furlong_weights_data(t->w, 0), whole, BYTES); /* with one slot it is the same memory */
    if (b)
        *said = learn(b, whole, furlong_weights_data(t->w, 0));
    double trained = now();
    FL_TRY(furlong_weights_publish(t->w, (uint64_t)version, err)); /* whole, and frozen */
    t->at.version = version;
    if (b)
        json_object_update_new(
            *said, json_pack("{s:f,s:f}", "begin_s", begun - from, "publish_s", now() - trained));
    return FL_OK;
}

static enum fl_status failed(struct fl_err *err, const char *what, const char *dir)
{
    snprintf(err->text, sizeof(err->text), "%s %.180s: %m", what, dir);
    return err->status = FL_NOT_FOUND;
}

static enum fl_status serve(struct trainer *t, const struct furlong_event *ev, json_t **said,
                            struct fl_err *err)
{
    json_t *o = json_loadb(ev->body ? ev->body : "{}", ev->body ? ev->body_bytes : 2,
                           JSON_REJECT_DUPLICATES, NULL);
    json_int_t step = 0, version = 0;
    const char *dir = "";
    struct batch b;
    enum fl_status st = FL_OK;
    double from = now();

    json_unpack(o, "{s?I,s?I,s?s}", "step", &step, "version", &version, "dir", &dir);
    if (strcmp(ev->method, "train") == 0) {
        st = batch_read(ev, &b) ? write_version(t, version, &b, furlong_weights_last(t->w, 0),
                                                ev->budget_ms, said, err)
                                : FL_INVALID;
        t->at.step = st == FL_OK ? step + 1 : t->at.step;
    } else if (strcmp(ev->method, "save") == 0) {
        if (furlong_seat(t->f)->rank == 0 &&
            !checkpoint_save(&t->at, dir, furlong_weights_last(t->w, 0)))
            st = failed(err, "write a checkpoint in", dir);
        *said = json_pack("{s:I,s:f}", "bytes", (json_int_t)BYTES, "seconds", now() - from);
    } else if (strcmp(ev->method, "load") == 0) {
        void *table = calloc(1, BYTES);

        t->at = (struct trained){ 0 };
        if (*dir && !checkpoint_load(&t->at, dir, table))
            st = failed(err, "read the checkpoint in", dir);
        if (st == FL_OK)
            st = write_version(t, t->at.version, NULL, table, ev->budget_ms, NULL, err);
        free(table);
    } else if (strcmp(ev->method, "clear_memory") == 0) {
        *said = json_pack("{s:I}", "left_bytes", (json_int_t)0);
    } else if (strcmp(ev->method, "state") != 0) {
        st = FL_UNSUPPORTED;
    }
    json_decref(o);
    if (st == FL_OK && !*said) /* load, state */
        *said = json_pack("{s:I,s:I}", "step", t->at.step, "version", t->at.version);
    return st;
}

int main(void)
{
    struct furlong_weights_opts two = { .slots = 2 };
    struct fl_err err = { 0 };
    struct furlong_event ev = { 0 };
    struct trainer t = { 0 };
    enum fl_status st = furlong_join(FURLONG_ABI, &t.f, &err);

    if (st == FL_OK)
        two.device = policy_device(t.f);
    if (st == FL_OK)
        st = furlong_weights_offer(t.f, "policy", &policy_tensor, 1, &two, &t.w, &err);
    if (st == FL_OK)
        st = furlong_weights_publish(t.w, 0, &err); /* zeros: every answer is as likely */
    while (st == FL_OK && ev.what != FURLONG_STOP) {
        json_t *said = NULL;

        st = furlong_next(t.f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err);
        if (st != FL_OK)
            break;
        if (ev.what != FURLONG_CALL)
            furlong_reply(ev.call, NULL, 0);
        else if ((err.status = serve(&t, &ev, &said, &err)) == FL_OK)
            reply_json(ev.call, said, NULL, 0);
        else
            refuse(ev.call, err.status, *err.text ? err.text : "a trainer answers no such call");
        err = (struct fl_err){ 0 };
    }
    if (st != FL_OK)
        fprintf(stderr, "%s\n", err.text);
    furlong_leave(t.f);
    return st == FL_OK ? 0 : 1;
}
