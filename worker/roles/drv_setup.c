/* What a run needs before it asks for room: prompts, alphabet, sizes, folders. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/base/file.h"
#include "worker/roles/ckpt.h"
#include "worker/roles/config.h"
#include "worker/roles/driver.h"

static enum fl_status data_load(struct driver *d, struct fl_err *err)
{
    const struct train_flags *f = &d->flags;

    if (f->prompt_data)
        snprintf(d->prompt_path, sizeof(d->prompt_path), "%s", f->prompt_data);
    else
        FL_TRY(prompts_shipped("lookup.jsonl", d->prompt_path, err));
    if (f->eval_prompt_data)
        snprintf(d->eval_path, sizeof(d->eval_path), "%s", f->eval_prompt_data);
    else if (!f->prompt_data)
        FL_TRY(prompts_shipped("lookup-heldout.jsonl", d->eval_path, err));
    enum fl_status st = prompts_load(d->prompt_path, f->input_key, f->label_key, &d->prompts, err);

    if (st != FL_OK)
        return fl_wrap(err, st, "--prompt-data");
    if (*d->eval_path)
        st = prompts_load(d->eval_path, f->input_key, f->label_key, &d->evals, err);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "--eval-prompt-data");
}

static void alphabet_collect(struct alphabet *a, const struct prompts *p)
{
    for (uint32_t i = 0; p && i < p->n; i++) {
        alphabet_add(a, p->rows[i].input);
        alphabet_add(a, p->rows[i].label);
    }
}

/* Sizes that were given must be those of the folder that the weights come from. */
static enum fl_status sizes_agree(const struct driver *d, const char *dir, struct fl_err *err)
{
    const struct train_flags *f = &d->flags;
    const struct {
        const char *flag;
        int64_t given;
        uint32_t there;
    } rows[] = {
        { "num-layers", f->num_layers, d->config.layers },
        { "hidden-size", f->hidden_size, d->config.dim },
        { "ffn-hidden-size", f->ffn_hidden_size, d->config.ffn },
        { "num-attention-heads", f->num_attention_heads, d->config.heads },
        { "num-query-groups", f->num_query_groups, d->config.kv_heads },
        { "kv-channels", f->kv_channels, d->config.head_dim },
        { "max-position-embeddings", f->max_position_embeddings, d->config.max_len },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        if (fl_opts_given(&d->opts, rows[i].flag) && rows[i].given != rows[i].there)
            return fl_fail(err, FL_INVALID, "--%s %jd, but %s has %u: leave the flag out",
                           rows[i].flag, (intmax_t)rows[i].given, dir, rows[i].there);
    return FL_OK;
}

static enum fl_status sizes_settle(struct driver *d, struct fl_err *err)
{
    const char *from = *d->load_dir ? d->load_dir : d->flags.hf_checkpoint;

    alphabet_init(&d->alphabet);
    if (!from || d->flags.trainer_cmd) { /* what is in it is that program's own matter */
        alphabet_collect(&d->alphabet, d->prompts);
        alphabet_collect(&d->alphabet, d->evals);
        alphabet_settle(&d->alphabet);
        d->config = model_config_of_flags(&d->flags, d->alphabet.n);
        return model_config_check(&d->config, err);
    }
    enum fl_status st = ckpt_config(from, &d->config, &d->alphabet, err);

    if (st == FL_OK) /* a trainer that finds it wrong would start, end, and start again */
        st = ckpt_check(from, &d->config, *d->load_dir, err);
    if (st != FL_OK)
        return fl_wrap(err, st, *d->load_dir ? "--load" : "--hf-checkpoint");
    if (!d->alphabet.n) { /* a folder from elsewhere: tokens are the bytes themselves */
        for (int b = 1; b < 256; b++)
            d->alphabet.token_of[b] = 1;
        alphabet_settle(&d->alphabet);
        if (d->config.vocab < d->alphabet.n)
            return fl_fail(err, FL_INVALID, "%s has %u tokens and no vocab.json: bytes need %u",
                           from, d->config.vocab, d->alphabet.n);
    }
    return sizes_agree(d, from, err);
}

static enum fl_status prompts_fit(struct driver *d, const struct prompts *p, const char *path,
                                  struct fl_err *err)
{
    int32_t *tokens = malloc((size_t)PROMPT_LINE_MAX * sizeof(*tokens));
    enum fl_status st = tokens ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for prompts");

    for (uint32_t i = 0; st == FL_OK && p && i < p->n; i++) {
        uint32_t n = 0, label;

        st = alphabet_encode(&d->alphabet, p->rows[i].input, tokens, &n, err);
        if (st == FL_OK && n + d->max_new > d->config.max_len)
            st = fl_fail(
                err, FL_INVALID,
                "a prompt of %u tokens and an answer of %u: --max-position-embeddings is %u, give "
                "at least their sum, or a smaller --rollout-max-response-len",
                n, d->max_new, d->config.max_len);
        if (st == FL_OK && !d->flags.reward_cmd)
            st = alphabet_encode(&d->alphabet, p->rows[i].label, tokens, &label, err);
        if (st != FL_OK)
            st = fl_wrap(err, st, "%s, prompt %u", path, i + 1);
    }
    free(tokens);
    return st;
}

static void longest_label(struct driver *d, const struct prompts *p)
{
    for (uint32_t i = 0; p && i < p->n; i++) {
        uint32_t len = (uint32_t)strlen(p->rows[i].label);

        d->max_new = len > d->max_new ? len : d->max_new;
    }
}

static enum fl_status folders_name(struct driver *d, struct fl_err *err)
{
    const struct train_flags *f = &d->flags;

    if (!*d->run_dir)
        return fl_fail(err, FL_INVALID, "--run-dir is missing, and the job has none");
    if ((size_t)snprintf(d->save_dir, sizeof(d->save_dir), "%s%s", f->save ? f->save : d->run_dir,
                         f->save ? "" : "/checkpoints") >= sizeof(d->save_dir))
        return fl_fail(err, FL_INVALID, "--save: the path is too long");
    return FL_OK;
}

static enum fl_status folders_make(struct driver *d, struct fl_err *err)
{
    char logs[1100];

    snprintf(logs, sizeof(logs), "%s/logs", d->run_dir);
    FL_TRY(fl_mkdirs(d->run_dir, err));
    FL_TRY(fl_mkdirs(logs, err));
    FL_TRY(fl_mkdirs(d->save_dir, err));
    snprintf(logs, sizeof(logs), "%s/logs/driver.log", d->run_dir);
    d->log_fd = open(logs, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (d->log_fd < 0)
        return fl_fail_errno(err, "open %s", logs);
    return FL_OK;
}

/* What an earlier run left in the folder would be taken for this run's own after a failure. */
static enum fl_status no_others(const struct driver *d, struct fl_err *err)
{
    char newest[1024];
    struct ckpt_state there, from = { 0 };

    if (d->attempt > 1 || ckpt_newest(d->save_dir, newest, NULL) != FL_OK ||
        ckpt_state_read(newest, &there, NULL) != FL_OK)
        return FL_OK;
    if (*d->load_dir)
        FL_TRY(ckpt_state_read(d->load_dir, &from, err));
    if (there.step <= from.step)
        return FL_OK;
    return fl_fail(
        err, FL_EXISTS,
        "%s holds step %ju of an earlier run: --load %s goes on from it, another --run-dir or "
        "--save begins anew",
        d->save_dir, (uintmax_t)there.step, d->save_dir);
}

/* --load names a checkpoint, or a folder of them; its seed goes on unless another one was given. */
static enum fl_status resume_point(struct driver *d, struct fl_err *err)
{
    struct ckpt_state s;
    enum fl_status st;

    if (!d->flags.load)
        return FL_OK;
    st = ckpt_newest(d->flags.load, d->load_dir, err);
    if (st == FL_OK)
        st = ckpt_state_read(d->load_dir, &s, err);
    if (st != FL_OK)
        return fl_wrap(err, st, "--load");
    if (!fl_opts_given(&d->opts, "seed") && s.seed != CKPT_NO_SEED)
        d->flags.seed = (int64_t)s.seed;
    return FL_OK;
}

enum fl_status drv_look(struct driver *d, struct fl_err *err)
{
    struct train_flags *f = &d->flags;

    d->steps_fd = d->log_fd = -1;
    if (f->run_dir)
        snprintf(d->run_dir, sizeof(d->run_dir), "%s", f->run_dir);
    FL_TRY(data_load(d, err));
    FL_TRY(resume_point(d, err));
    FL_TRY(sizes_settle(d, err));
    d->max_new = (uint32_t)f->max_response_len;
    if (!d->max_new) {
        longest_label(d, d->prompts);
        longest_label(d, d->evals);
        d->max_new = d->max_new ? d->max_new : 1;
    }
    if (!f->rollout_cmd) { /* else tokens and lengths are that program's own matter */
        FL_TRY(prompts_fit(d, d->prompts, d->prompt_path, err));
        FL_TRY(prompts_fit(d, d->evals, d->eval_path, err));
    }
    d->n_steps = (uint64_t)f->num_rollout;
    if (f->num_epoch && !fl_opts_given(&d->opts, "num-rollout"))
        d->n_steps =
            ((uint64_t)f->num_epoch * d->prompts->n + (uint64_t)f->rollout_batch_size - 1) /
            (uint64_t)f->rollout_batch_size;
    FL_TRY(folders_name(d, err));
    return no_others(d, err);
}

enum fl_status drv_setup(struct driver *d, struct fl_err *err)
{
    FL_TRY(drv_look(d, err));
    return folders_make(d, err);
}

void drv_fini(struct driver *d)
{
    prompts_destroy(d->prompts);
    prompts_destroy(d->evals);
    json_decref(d->trainer_said);
    if (d->steps_fd >= 0)
        (void)close(d->steps_fd); /* each record was written when it was made */
    if (d->log_fd >= 0)
        (void)close(d->log_fd);
    train_flags_fini(&d->flags);
}
