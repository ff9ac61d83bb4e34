/* What follows from what among the flags of a run, and each refusal with the flag's name. */
#include "tests/t.h"

#include "common/conf/train_flags.h"

#include <stdlib.h>

enum { WORDS = 12 };
struct parsed {
    struct train_flags f;
    struct fl_opts o;
    char *argv[WORDS + 1], text[512];
};

static enum fl_status parse(struct parsed *p, const char *line, struct fl_err *err)
{
    int argc = 1;

    memset(p, 0, sizeof(*p));
    p->o.program = "furlong train";
    train_flags_tables(&p->f, p->o.tables);
    snprintf(p->text, sizeof(p->text), "%s", line);
    p->argv[0] = "train";
    for (char *w = strtok(p->text, " "); w && argc < WORDS; w = strtok(NULL, " "))
        p->argv[argc++] = w;
    return train_flags_parse(&p->f, &p->o, argc, p->argv, err);
}

static void refused(void **state)
{
    static const struct { const char *line, *part, *more; } rows[] = {
        { "--colocate --update-weight-transfer-mode p2p", "--update-weight-transfer-mode p2p", "--colocate" },
        { "--colocate --update-weight-transfer-mode disk-delta", "disk-delta", "--colocate" },
        { "--colocate-memory-peak-device gpu --no-offload-train", "--colocate-memory-peak-device gpu", "--no-offload-train" },
        { "--colocate-memory-peak-device gpu --no-offload-rollout", "--colocate-memory-peak-device gpu", "--no-offload-rollout" },
        { "--colocate-memory-peak-device gpu --no-colocate", "--colocate-memory-peak-device gpu", "--no-colocate" },
        { "--colocate-memory-peak-device gpu --lora-rank 8", "--lora-rank", "8" },
        { "--colocate-memory-peak-device gpu --advantage-estimator ppo", "critic", "--advantage-estimator ppo" },
        { "--colocate-memory-peak-device gpu --offload-rollout-level kv_cache", "--offload-rollout-level", "kv_cache weight" },
        { "--colocate --offload-rollout-level kv_cache,graphs", "--offload-rollout-level", "'graphs'" },
        { "--offload-rollout-level kv_cache", "--offload-rollout-level", "--offload-rollout" },
        { "--offload-train-target disk", "--offload-train-target disk", "--offload-train" },
        { "--colocate-transfer share", "--colocate-transfer", "--colocate" },
        { "--async --colocate", "--async", "--colocate" },
        { "--async --offload-train", "--async", "--offload-train" },
        { "--update-weights-interval 2", "--update-weights-interval", "--async" },
        { "--update-weight-disk-dir /x", "--update-weight-disk-dir", "disk-delta" },
        { "--update-weight-local-checkpoint-dir /x", "--update-weight-local-checkpoint-dir", "disk-delta" },
        { "--train-backend megatron", "--train-backend megatron", "--trainer-cmd" },
        { "--lora-rank 4", "--lora-rank 4", "--trainer-cmd" },
        { "--advantage-estimator ppo", "--advantage-estimator ppo", "--trainer-cmd" },
        { "--num-query-groups 3", "--num-attention-heads 4", "--num-query-groups 3" },
        { "--kv-channels 7", "--kv-channels 7", "odd" },
        { "--num-layer 2", "--num-layer", "did you mean --num-layers" },
        { "--rollout-batch-size 0", "--rollout-batch-size", "0" },
        { "stray", "'stray'", "belongs to no option" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct parsed p;
        struct fl_err err = { 0 };

        t_refused(parse(&p, rows[i].line, &err), FL_INVALID, &err);
        t_has(err.text, rows[i].part);
        t_has(err.text, rows[i].more);
        train_flags_fini(&p.f);
    }
}

static void resolved(void **state)
{
    static const struct {
        const char *line;
        bool colocate, train, rollout, kv, weights;
        const char *mode;
        unsigned notes;
    } rows[] = {
        { "", false, false, false, false, false, "broadcast", 0 },
        { "--update-weight-transfer-mode p2p", false, false, false, false, false, "p2p", 0 },
        { "--update-weight-transfer-mode disk-delta", false, false, false, false, false, "disk-delta", 1 },
        { "--offload", false, true, true, true, true, "broadcast", 0 },
        { "--offload --no-offload-train", false, false, true, true, true, "broadcast", 0 },
        { "--colocate", true, true, true, true, true, "auto", 0 },
        { "--colocate --no-offload-train", true, false, true, true, true, "auto", 0 },
        { "--colocate --no-offload-rollout --colocate-transfer copy", true, true, false, false, false, "copy", 0 },
        { "--colocate --offload-rollout-level kv_cache", true, true, true, true, false, "auto", 0 },
        { "--colocate --offload-rollout-level weight", true, true, true, false, true, "auto", 0 },
        { "--colocate --offload-rollout-level kv_cache weight", true, true, true, true, true, "auto", 0 },
        { "--colocate --update-weight-transfer-mode broadcast", true, true, true, true, true, "auto", 1 },
        { "--colocate-memory-peak-device gpu", true, true, true, true, true, "auto", 1 },
        { "--colocate --colocate-memory-peak-device gpu", true, true, true, true, true, "auto", 0 },
        { "--colocate --rollout-num-gpus 4", true, true, true, true, true, "auto", 1 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct parsed p;
        struct fl_err err = { 0 };
        const char *line = rows[i].line;

        t_ok(parse(&p, line, &err), &err);
        t_true(p.f.colocate == rows[i].colocate, "%s", line);
        t_true(p.f.offload_train == rows[i].train, "%s", line);
        t_true(p.f.offload_rollout == rows[i].rollout, "%s", line);
        t_true(p.f.release_kv == rows[i].kv, "%s", line);
        t_true(p.f.release_weights == rows[i].weights, "%s", line);
        t_str_eq(p.f.mode, rows[i].mode, "%s", line);
        t_int_eq(p.f.n_notes, rows[i].notes, "%s", line);
        train_flags_fini(&p.f);
    }
}

static void other_names_and_extra(void **state)
{
    struct parsed p;
    struct fl_err err = { 0 };

    (void)state;
    setenv("MILES_EXTRA_ARGS", "--lr 0.5 --batch-size 7", 1);
    t_ok(parse(&p, "--model /m --batch-size=16", &err), &err);
    t_str_eq(p.f.hf_checkpoint, "/m");
    t_int_eq(p.f.rollout_batch_size, 16, "the command line wins");
    t_true(p.f.lr == 0.5, "%g", p.f.lr);
    train_flags_fini(&p.f);
    setenv("MILES_EXTRA_ARGS", "--lrr 0.5", 1);
    t_refused(parse(&p, "", &err), FL_INVALID, &err);
    t_has(err.text, "MILES_EXTRA_ARGS");
    train_flags_fini(&p.f);
    unsetenv("MILES_EXTRA_ARGS");
}

/* The help shows what has a text: a flag without one would be there for nobody. */
static void every_flag_has_help(void **state)
{
    struct train_flags f;
    struct fl_opt_table tables[FL_OPT_TABLES] = { 0 };

    (void)state;
    train_flags_tables(&f, tables);
    for (size_t t = 0; t < FL_OPT_TABLES && tables[t].opts; t++)
        for (const struct fl_opt *o = tables[t].opts; o->name; o++)
            t_true(o->help && *o->help, "--%s has no help", o->name);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused),
        cmocka_unit_test(resolved),
        cmocka_unit_test(other_names_and_extra),
        cmocka_unit_test(every_flag_has_help),
    };

    return t_run("flags", tests);
}
