/* what people met with updates of weights, by their numbers, and input that is wrong: each ends in
 * a sentence, and the old version serves */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "tests/gpu/mem.h"
#include "tests/xfer/epoch_rig.h"
#include "transport/link/dev.h"

static struct rig r; /* of the test in hand: its engines' hooks look at it */

static enum fl_status advance(enum xfer_mode mode, uint64_t version, unsigned least,
                              uint64_t due_ms)
{
    struct xfer_request q = { .target = { .number = version },
                              .mode = mode,
                              .slots = r.o.slots,
                              .party = XFER_ALL_PARTIES,
                              .least_engines = least,
                              .due_ns = fl_loop_now_ns(r.loop) + due_ms * 1000000 };

    return rig_run(&r, &q);
}

static enum fl_status fill(uint32_t party)
{
    struct xfer_request q = { .kind = XFER_FILL,
                              .mode = XFER_P2P, /* bytes move, wherever both are */
                              .slots = r.o.slots,
                              .party = party,
                              .least_engines = 1,
                              .due_ns = fl_loop_now_ns(r.loop) + 20000000000ull };

    return rig_run(&r, &q);
}

static uint64_t serves(const struct rig_proc *p)
{
    struct xfer_version v = { 0 };

    return xfer_sink_data(p->sink, &v) ? v.number : UINT64_MAX;
}

static void says(const struct rig_proc *p, const char *what)
{
    char text[256];

    xfer_sink_says(p->sink, text, sizeof(text));
    t_has(text, what);
}

static void begins(struct rig_opts o, enum xfer_mode mode)
{
    o.hosts = true;
    rig_serving(&r, &o, mode);
}

/* What is on stderr while fn runs. */
static void heard(void (*fn)(void), char *text, size_t room)
{
    FILE *f = tmpfile();
    int was = dup(2);

    t_true(f && was >= 0);
    fflush(stderr);
    dup2(fileno(f), 2);
    fn();
    fflush(stderr);
    dup2(was, 2);
    close(was);
    rewind(f);
    size_t n = fread(text, 1, room - 1, f);

    text[n] = '\0';
    fclose(f);
}

/* ==== a trainer that answers no more ========================================================== */
/* The nth line of that rank in tables of updates that did not end well; of each phase: i in time, l
 * late, - no part. */
static void phases_of(const char *text, unsigned nth, const char *who, const char *wanted)
{
    static const char *const phases[] = { "reconcile", "prepare", "transfer",
                                          "commit",    "resume",  "end" };
    char name[80], word[16], got[FL_LEN(phases) + 1] = "";
    const char *line = text;

    snprintf(name, sizeof(name), "who=\"%s\"", who);
    for (unsigned i = 0; i <= nth; i++) {
        line = strstr(line + (i > 0), name);
        t_true(line != NULL, "%s is not told %u times: %s", who, nth + 1, text);
    }
    for (size_t i = 0; i < FL_LEN(phases); i++) {
        snprintf(word, sizeof(word), " %s_ms=", phases[i]);
        const char *at = strstr(line, word) + strlen(word), *end = at + strcspn(at, " \n");

        got[i] = *at == '-' ? '-' : memmem(at, (size_t)(end - at), ",late", 5) ? 'l' : 'i';
    }
    t_str_eq(got, wanted, "%s, line %u", who, nth);
}

static void version_3_by_p2p(void)
{
    t_ok(fl_log_level_set("info", NULL), NULL);
    (void)rig_update(&r, XFER_P2P, 3);
    t_ok(fl_log_level_set("error", NULL), NULL);
}

static void p77_a_trainer_that_hangs_after_the_commit(void **state)
{
    static char text[8192];

    (void)state;
    begins((struct rig_opts){ .n_sources = 1, .n_engines = 2 }, XFER_P2P);
    struct rig_proc *t = rig_source(&r, 0);

    rig_next(&r, 2);
    t->trap_method = FL_XFER_END;
    t->trap_nth = 1;
    t_ok(rig_update(&r, XFER_P2P, 2), &r.err);
    t_int_eq(r.rep.n_committed, 2, "what was verified is served, whatever the trainer does then");
    t_true(r.rep.plan_ns > 0 && r.rep.bytes > 0, "the phases are told apart");
    rig_check_all_serve(&r, 2);
    rig_until(&r, t->stopped_at);
    uint64_t from = fl_loop_now_ns(r.loop);

    heard(version_3_by_p2p, text, sizeof(text));
    t_int_eq(r.st, FL_TIMEOUT);
    /* a line for each rank, with when it was asked and had answered; who is late comes first */
    t_true(strstr(text, "who=\"trainer 0") < strstr(text, "who=\"rollout 0"), "%s", text);
    phases_of(text, 0, "trainer 0 on host-a", "i-i--l");
    phases_of(text, 0, "rollout 0 on host-a", "i-ii--");
    phases_of(text, 0, "rollout 1 on host-b", "i-ii--");
    phases_of(text, 1, "trainer 0 on host-a", "l-----");
    phases_of(text, 1, "rollout 1 on host-b", "i-----");
    t_true(fl_loop_now_ns(r.loop) - from < 20000000000ull,
           "the end of the one, the begin of the other");
    t_has(r.err.text, "trainer 0 on host-a did not report");
    t_has(r.err.text, "no answer in 5.0 s");
    rig_check_all_serve(&r, 2);
    rig_thaw(t);
    rig_bring(&r, XFER_P2P, 3);
    rig_fini(&r);
}

/* ==== tied embeddings ========================================================================= */
static void p81_a_head_that_is_the_embedding(void **state)
{
    static const struct {
        const char *name;
        bool source_head, engine_head;
        unsigned ranks;
    } rows[] = {
        { "no head in the stream", false, false, 1 },
        { "no head, ranks that both hold the embedding", false, false, 2 },
        { "both sides have both", true, true, 1 },
        { "both sides have both, two ranks", true, true, 2 },
        { "the engine has one pointer for both", true, false, 1 },
        { "one pointer on each of two ranks", true, false, 2 },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct rig_opts o = { .n_sources = 1,
                              .n_engines = 2,
                              .ranks = rows[i].ranks,
                              .source_head = rows[i].source_head,
                              .engine_head = rows[i].engine_head };

        printf("# %s\n", rows[i].name);
        begins(o, XFER_P2P);
        for (uint64_t v = 2; v <= 3; v++) {
            rig_next(&r, v);
            t_ok(rig_update(&r, XFER_P2P, v), &r.err);
            rig_check_all_serve(&r, v); /* also the head's bytes, where there is one */
        }
        t_ok(fill(XFER_ALL_PARTIES), &r.err);
        rig_fini(&r);
    }
}

static void p81_a_head_that_is_not_is_an_error(void **state)
{
    (void)state;
    rig_init(&r, &(struct rig_opts){
                     .n_sources = 1, .n_engines = 1, .source_head = true, .head_differs = true });
    rig_next(&r, 1);
    t_int_eq(rig_update(&r, XFER_P2P, 1), FL_INVALID);
    t_has(r.err.text, "head is wanted by no engine");
    t_has(r.err.text, "not those of embed");
    t_int_eq(r.rep.bytes, 0, "before any byte moved");
    t_int_eq(rig_state(rig_engine(&r, 0, 0)), RX_EMPTY);
    rig_fini(&r);
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 1, .engine_head = true });
    rig_next(&r, 1);
    t_int_eq(rig_update(&r, XFER_P2P, 1), FL_INVALID, "and one that nobody sends");
    t_has(r.err.text, "engines want head");
    t_has(r.err.text, "which no source has");
    rig_fini(&r);
}

/* ==== who is late ============================================================================= */
static void p83_who_never_comes_is_named_within_30_s(void **state)
{
    static const struct {
        uint16_t method;
        const char *says;
    } rows[] = {
        { FL_XFER_RECONCILE, "rollout 2 on host-c: reconcile" },
        { FL_XFER_BEGIN, "rollout 2 on host-c" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        begins((struct rig_opts){ .n_sources = 1, .n_engines = 3 }, XFER_P2P);
        struct rig_proc *p = rig_engine(&r, 2, 0);

        rig_next(&r, 2);
        p->trap_method = rows[i].method;
        p->trap_nth = 1;
        uint64_t from = fl_loop_now_ns(r.loop);

        t_int_eq(advance(XFER_P2P, 2, 3, 30000), FL_TIMEOUT, "%s", r.err.text);
        t_true(fl_loop_now_ns(r.loop) - from < 32000000000ull,
               "30 s and the look who still answers");
        t_has(r.err.text, rows[i].says);
        t_int_eq(r.rep.n_left_behind, 3);
        rig_thaw(p);
        for (unsigned k = 0; k < 200; k++)
            rig_turn(&r);
        rig_check_all_serve(&r, 1); /* a clean abort */
        t_ok(rig_update(&r, XFER_P2P, 2), &r.err);
        rig_check_all_serve(&r, 2);
        rig_fini(&r);
    }
}

/* ==== failed in the middle ==================================================================== */
static void p84_half_new_weights_are_never_served(void **state)
{
    (void)state;
    begins((struct rig_opts){ .n_sources = 1, .n_engines = 2, .slots = XFER_ONE_SLOT }, XFER_P2P);
    struct rig_proc *p = rig_engine(&r, 0, 0);

    rig_next(&r, 7);
    t_true(rig_update_at(&r, "xfer.pull:5=fail", XFER_P2P, 7) != FL_OK);
    if (rig_state(p) != RX_DIRTY || xfer_sink_data(p->sink, NULL))
        p = rig_engine(&r, 1, 0);
    t_int_eq(rig_state(p), RX_DIRTY);
    t_int_eq(serves(p), UINT64_MAX);
    t_true(p->paused && p->resumes == 0, "nobody has let it go on");
    says(p, "weights incomplete: version 7, ");
    says(p, " of 12 buckets; rollout ");
    t_ok(fl_fault_set("xfer.pull:2=fail,xfer.pull:3=fail,xfer.pull:4=fail", NULL), NULL);
    (void)fill(XFER_ALL_PARTIES); /* a second failure: still not */
    t_ok(fl_fault_set(NULL, NULL), NULL);
    t_true(serves(p) == UINT64_MAX || serves(p) == 7);
    rig_bring(&r, XFER_P2P, 8);
    says(p, "");
    t_true(!p->paused);
    rig_fini(&r);
}

/* All hear the one error; what belongs to the epoch that failed is of no use afterwards. */
static void p85_one_rank_fails_and_all_know_why(void **state)
{
    (void)state;
    begins((struct rig_opts){ .n_sources = 1, .n_engines = 4, .slots = XFER_ONE_SLOT }, XFER_P2P);
    struct xfer_epoch failed;

    rig_next(&r, 2);
    t_true(rig_update_at(&r, "xfer.pull:2=fail", XFER_P2P, 2) != FL_OK);
    failed = r.rep.epoch;
    const char *bucket = strstr(r.err.text, "bucket "), *rank = strstr(r.err.text, "rollout ");

    t_true(bucket && rank && strstr(r.err.text, " of 12 of epoch "), "%s", r.err.text);
    char who[20];

    fl_copy(who, sizeof(who), rank);
    who[strlen("rollout 1 on host-b")] = '\0';
    for (unsigned e = 0; e < 4; e++)
        if (rig_state(rig_engine(&r, e, 0)) == RX_DIRTY)
            says(rig_engine(&r, e, 0), who);
    t_ok(rig_update(&r, XFER_P2P, 2), &r.err);
    t_true(r.rep.epoch.seq > failed.seq, "names of an update are its own");
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* ==== membership ============================================================================== */
static void p86_a_late_engine_is_filled_before_it_serves(void **state)
{
    (void)state;
    begins((struct rig_opts){ .n_sources = 1, .n_engines = 1 }, XFER_P2P);
    for (uint64_t v = 2; v <= 3; v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, XFER_P2P, v), &r.err);
    }
    struct rig_proc *late = rig_join(&r, 1);

    t_int_eq(serves(late), UINT64_MAX);
    says(late, "no version of the weights \"policy\" is here yet");
    t_ok(fill(1), &r.err);
    t_int_eq(rig_engine(&r, 0, 0)->flips, 3, "nobody else is disturbed");
    rig_check_all_serve(&r, 3);
    /* From the engine that has it, when the trainer has gone on. */
    t_ok(rig_begin(&r, 4, 5000), &r.err);
    rig_write(rig_source(&r, 0), 4);
    late = rig_join(&r, 2);
    t_ok(fill(2), &r.err);
    rig_check_all_serve(&r, 3);
    rig_publish(&r, 4);
    t_ok(rig_update(&r, XFER_P2P, 4), &r.err);
    rig_check_all_serve(&r, 4);
    rig_fini(&r);
}

/* ==== nothing is held after a failure ========================================================= */
static void p120_a_failure_holds_nothing(void **state)
{
    static const struct {
        const char *name, *fault, *says;
    } rows[] = {
        { "set-up", "xfer.give:1=fail", "xfer.give" },
        { "room", "xfer.room:1=fail", "xfer.room" },
        { "transfer", "xfer.pull:2=fail", "xfer.pull" },
        { "the answer", "xfer.verified:1=fail", "no memory to serve" },
        { "the commit", "xfer.decided:1=fail", "xfer.decided" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        begins((struct rig_opts){ .n_sources = 1, .n_engines = 2, .real_clock = true }, XFER_P2P);
        rig_next(&r, 2);
        t_true(rig_update_at(&r, rows[i].fault, XFER_P2P, 2) != FL_OK, "%s", rows[i].name);
        t_has(r.err.text, rows[i].says); /* the first error is what is kept */
        rig_check_all_serve(&r, 1);
        uint64_t from = fl_loop_now_ns(r.loop);

        t_ok(rig_update(&r, XFER_P2P, 2), &r.err);
        t_true(fl_loop_now_ns(r.loop) - from < 1000000000, "%s: the next one waits for nobody",
               rows[i].name);
        rig_check_all_serve(&r, 2);
        rig_fini(&r);
    }
}

static void p120_a_killed_driver_holds_nothing(void **state)
{
    (void)state;
    begins((struct rig_opts){ .n_sources = 1, .n_engines = 2 }, XFER_P2P);
    struct xfer_request q = {
        .target = { .number = 2 }, .mode = XFER_P2P, .party = XFER_ALL_PARTIES, .due_ns = UINT64_MAX
    };

    rig_next(&r, 2);
    rig_start(&r, &q);
    rig_until(&r, rig_state(rig_engine(&r, 1, 0)) == RX_STAGING);
    rig_coord(&r, 2); /* in the middle, without a word */
    uint64_t from = fl_loop_now_ns(r.loop);

    t_ok(rig_update(&r, XFER_P2P, 2), &r.err);
    t_true(fl_loop_now_ns(r.loop) - from < 1000000000, "no lease is waited for");
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* ==== deltas ================================================================================== */
static void p125_an_engine_that_was_replaced_gets_all_of_it(void **state)
{
    char line[600], *index;
    struct fl_err err = { 0 };

    (void)state;
    begins((struct rig_opts){ .n_sources = 1,
                              .n_engines = 2,
                              .delta_dir = t_path("deltas"),
                              .local_dir = t_path("own"),
                              .own_local = true },
           XFER_DISK_DELTA);
    for (uint64_t v = 2; v <= 3; v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, XFER_DISK_DELTA, v), &r.err);
    }
    rig_kill(rig_engine(&r, 1, 0), true); /* and comes up where nothing is */
    snprintf(line, sizeof(line), "rm -rf %s-1", t_path("own"));
    t_int_eq(system(line), 0);
    (void)rig_restart(rig_engine(&r, 1, 0));
    rig_next(&r, 4);
    t_ok(rig_update(&r, XFER_DISK_DELTA, 4), &r.err);
    t_int_eq(r.rep.n_committed, 2);
    rig_check_all_serve(&r, 4);
    snprintf(line, sizeof(line), "%s/0100000070ada1-1-0/weight_v000004/model.safetensors.index.json",
             t_path("deltas"));
    t_ok(fl_file_read(line, 100000, &index, NULL, &err), &err);
    t_has(index, "\"base_version\": 3"); /* the others took a delta */
    free(index);
    rig_fini(&r);
}

/* ==== release and resume ====================================================================== */
static void p91_nothing_is_served_from_new_pages(void **state)
{
    (void)state;
    begins((struct rig_opts){ .n_sources = 1, .n_engines = 2, .slots = XFER_ONE_SLOT }, XFER_P2P);
    struct rig_proc *p = rig_engine(&r, 0, 0);

    p->reads = NULL;
    t_ok(xfer_sink_offload(p->sink, true, &r.err), &r.err);
    says(p, "the weights \"policy\" are offloaded");
    xfer_sink_onload(p->sink);
    t_int_eq(serves(p), UINT64_MAX, "the pages are there, the version is not");
    says(p, "no version of the weights \"policy\" is here yet");
    t_ok(fl_fault_set("xfer.pull:4=fail", NULL), NULL);
    t_true(fill(0) != FL_OK, "a part of it is not enough");
    t_ok(fl_fault_set(NULL, NULL), NULL);
    t_int_eq(serves(p), UINT64_MAX);
    t_ok(fill(0), &r.err);
    rig_check_all_serve(&r, 1);
    rig_fini(&r);
}

/* ==== auto ==================================================================================== */
static void two_by_auto(void)
{
    t_ok(fl_log_level_set("info", NULL), NULL);
    for (uint64_t v = 1; v <= 2; v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, XFER_AUTO, v), &r.err);
    }
    t_ok(fl_log_level_set("error", NULL), NULL);
}

static void auto_tells_what_it_expected_and_what_came(void **state)
{
    static char text[8192];
    bool one_device = rig_devices() && strcmp(rig_devices(), "same") == 0;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2 });
    heard(two_by_auto, text, sizeof(text));
    t_true(r.rep.mode != XFER_AUTO && r.rep.predicted_ns > 0, "what it chose, and why");
    t_has(text, "weights update done set=policy epoch=1.1 version=1 mode=");
    t_has(text, one_device ? "mode=share" : "mode=copy");
    const char *line = strstr(text, "weights update done");

    t_true(strstr(line, " move_us=") && strstr(line, " predicted_us="), "%s", line);
    t_true(strstr(line + 1, "weights update done") == NULL, "once for each choice: %s", text);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

/* ==== input that is wrong ===================================================================== */
static struct xfer_tensor bent[RIG_TENSORS];
static const char *bend_how;

static bool is_new(const struct rig_proc *p)
{
    return !p->source && p->me.party == 1 && p->me.who.attempt == 2;
}

/* The engine that comes again has another idea of the model. */
static void bend_model(struct rig_proc *p, struct link_place *place)
{
    if (!is_new(p) || place)
        return;
    memcpy(bent, p->m.tensors, p->m.n_tensors * sizeof(bent[0]));
    p->m.tensors = bent;
    if (strcmp(bend_how, "shape") == 0) {
        bent[0].shape[0] = 64;
        p->pieces[0].box.len[0] = 64;
    } else if (strcmp(bend_how, "dtype") == 0) {
        bent[2].dtype = FL_F16;
    } else if (strcmp(bend_how, "name") == 0) {
        bent[0].name = "embedding";
    } else { /* layout: a rank that holds half of a tensor, and nobody holds the rest */
        p->pieces[0].box.len[0] = 48;
    }
}

static void disagreeing_models(void **state)
{
    static const struct {
        const char *how, *source, *engine;
    } rows[] = {
        { "shape", "source has embed f32 [96, 64]", "engine rank 1 wants embed f32 [64, 64]" },
        { "dtype", "source has layer.down bf16 [64, 160]",
          "engine rank 1 wants layer.down f16 [64, 160]" },
        { "name", "engines want embedding f32 [96, 64]", "which no source has" },
        { "layout", "engine 1: its ranks together want", "of embed" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        bend_how = rows[i].how;
        begins((struct rig_opts){ .n_sources = 1, .n_engines = 2, .bend = bend_model }, XFER_P2P);
        rig_kill(rig_engine(&r, 1, 0), true);
        (void)rig_restart(rig_engine(&r, 1, 0));
        rig_next(&r, 2);
        t_int_eq(rig_update(&r, XFER_P2P, 2), FL_INVALID, "%s", bend_how);
        printf("# %s: %s\n", bend_how, r.err.text);
        t_has(r.err.text, rows[i].source);
        t_has(r.err.text, rows[i].engine);
        t_int_eq(r.rep.bytes, 0, "before any byte moved");
        t_int_eq(serves(rig_engine(&r, 0, 0)), 1, "the old version serves");
        t_int_eq(rig_state(rig_engine(&r, 1, 0)), RX_EMPTY);
        rig_check(&r);
        rig_fini(&r);
    }
}

static void buckets_smaller_than_a_run_are_split(void **state)
{
    static const uint64_t sizes[] = { 512, 1000, 4096 };

    (void)state;
    for (size_t i = 0; i < FL_LEN(sizes); i++) { /* the longest run has 24 KiB */
        begins((struct rig_opts){ .n_sources = 1, .n_engines = 2, .bucket_bytes = sizes[i] },
               XFER_P2P);
        rig_bring(&r, XFER_P2P, 2);
        rig_fini(&r);
    }
}

/* ---- places ---- */
static void bend_place(struct rig_proc *p, struct link_place *place)
{
    if (p->source || !place)
        return;
    if (strcmp(bend_how, "no peer access") == 0)
        place->n_gpu_peers = 0;
    else if (strcmp(bend_how, "ipc refused") == 0)
        place->vmm_fd = place->legacy_ipc = false;
    else if (strcmp(bend_how, "other nccl") == 0)
        place->nccl_version = 21801;
    else
        fl_copy(place->nccl_env, sizeof(place->nccl_env), "NCCL_CUMEM_ENABLE=0");
}

/* Another way is found, and why it is not the fastest is said. */
static void another_way(const char *how, const char *why)
{
    bend_how = how;
    begins(
        (struct rig_opts){ .n_sources = 1, .n_engines = 2, .bend = bend_place, .real_clock = true },
        XFER_P2P);
    t_has(r.rep.passed_over, "cuda_ipc: ");
    t_has(r.rep.passed_over, why);
    rig_bring(&r, XFER_P2P, 2);
    rig_next(&r, 3);
    t_int_eq(rig_update(&r, XFER_COPY, 3), FL_UNREACHABLE, "a mode that has no other way");
    printf("# %s: %s\n", bend_how, r.err.text);
    t_has(r.err.text, "no link for copy reaches");
    t_has(r.err.text, why);
    rig_check_all_serve(&r, 2);
    t_ok(rig_update(&r, XFER_AUTO, 3), &r.err);
    rig_check_all_serve(&r, 3);
    rig_fini(&r);
}

static void devices_without_peer_access(void **state)
{
    (void)state;
    if (strcmp(rig_devices(), "same") == 0)
        t_skip("both sides are on one device: two are wanted");
    another_way("no peer access", "no peer access");
}

static void three_by_p2p(void)
{
    for (uint64_t v = 1; v <= 3; v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, XFER_P2P, v), &r.err);
    }
}

/* The probe was content, and yet the giver cannot show its memory: another link in the same epoch,
 * said once. */
static void p71_memory_that_is_never_shown_is_said_once(void **state)
{
    static char text[16384];
    char faults[512] = "";

    (void)state;
    for (unsigned i = 1; i <= 12; i++)
        snprintf(faults + strlen(faults), sizeof(faults) - strlen(faults),
                 "%slink.ipc.share:%u=fail", i > 1 ? "," : "", i);
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 1, .real_clock = true });
    t_ok(fl_log_level_set("warn", NULL), NULL);
    t_ok(fl_fault_set(faults, NULL), NULL);
    heard(three_by_p2p, text, sizeof(text));
    t_ok(fl_fault_set(NULL, NULL), NULL);
    t_ok(fl_log_level_set("error", NULL), NULL);
    rig_check_all_serve(&r, 3);
    const char *line = strstr(text, "weights go another way");

    t_true(line && !strstr(line + 1, "weights go another way"), "once: %s", text);
    t_true(strstr(line, "from=cuda_ipc to=tcp why=\"fault link.ipc.share\""), "%s", line);
    rig_fini(&r);
}

static void p71_a_container_that_refuses_ipc(void **state)
{
    (void)state;
    another_way("ipc refused", "neither by descriptor nor by handle");
}

static void p113_nccl_that_differs_is_refused_with_both(void **state)
{
    static const struct link_ops *const nccl[] = { &link_nccl };
    struct link_place here = { 0 };
    char version[16];
    const struct {
        const char *how, *a, *b;
    } rows[] = {
        { "other nccl", version, "21801" },
        { "other settings", "NCCL_NVLS_ENABLE=0", "NCCL_CUMEM_ENABLE=0" },
    };

    (void)state;
    link_place_nccl(&here);
    snprintf(version, sizeof(version), "%u", here.nccl_version);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        bend_how = rows[i].how;
        rig_init(&r, &(struct rig_opts){ .n_sources = 1,
                                         .n_engines = 1,
                                         .bend = bend_place,
                                         .real_clock = true,
                                         .links = nccl,
                                         .n_links = 1 });
        rig_next(&r, 1);
        uint64_t from = fl_clock_boot_ns();

        t_int_eq(rig_update(&r, XFER_BROADCAST, 1), FL_UNREACHABLE);
        printf("# %s: %s\n", bend_how, r.err.text);
        t_true(fl_clock_boot_ns() - from < 5000000000ull);
        t_has(r.err.text, rows[i].a);
        t_has(r.err.text, rows[i].b);
        t_int_eq(rig_state(rig_engine(&r, 0, 0)), RX_EMPTY);
        rig_fini(&r);
        /* With other links there it goes by one of them. */
        begins((struct rig_opts){ .n_sources = 1, .n_engines = 1, .bend = bend_place },
               XFER_BROADCAST);
        rig_fini(&r);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(p77_a_trainer_that_hangs_after_the_commit),
        cmocka_unit_test(p81_a_head_that_is_the_embedding),
        cmocka_unit_test(p81_a_head_that_is_not_is_an_error),
        cmocka_unit_test(p83_who_never_comes_is_named_within_30_s),
        cmocka_unit_test(p84_half_new_weights_are_never_served),
        cmocka_unit_test(p85_one_rank_fails_and_all_know_why),
        cmocka_unit_test(p86_a_late_engine_is_filled_before_it_serves),
        cmocka_unit_test(p91_nothing_is_served_from_new_pages),
        cmocka_unit_test(p120_a_failure_holds_nothing),
        cmocka_unit_test(p120_a_killed_driver_holds_nothing),
        cmocka_unit_test(p125_an_engine_that_was_replaced_gets_all_of_it),
        cmocka_unit_test(auto_tells_what_it_expected_and_what_came),
        cmocka_unit_test(disagreeing_models),
        cmocka_unit_test(buckets_smaller_than_a_run_are_split),
        cmocka_unit_test(p71_a_container_that_refuses_ipc), /* from here on: with devices alone */
        cmocka_unit_test(p71_memory_that_is_never_shown_is_said_once),
        cmocka_unit_test(devices_without_peer_access),
        cmocka_unit_test(p113_nccl_that_differs_is_refused_with_both),
    };
    enum { OF_DEVICES = 4 };

    return t_run_(rig_devices() ? "pain of updates on devices" : "pain of updates", tests,
                  FL_LEN(tests) - (rig_devices() ? 0 : OF_DEVICES));
}
