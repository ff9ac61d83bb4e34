/* how much device and host memory a colocated run takes at most, phase by phase: nothing released,
 * the default order of a step, and the one of --colocate-memory-peak-device gpu
 *
 * A trainer and an engine, a process each, hold what they would: weights, an optimizer's states,
 * gradients and activations, a kv_cache; the driver goes through the phases of the design's table.
 * What is counted are chunks, by the process that made them: pages that both map count once.
 * PEAK_UNIT_MIB (default 2) scales it, for a machine with a device. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/client/fake.h"
#include "tests/t.h"
#include "transport/arena/process.h"
#include "transport/link/dev.h"

#define MIB ((uint64_t)1 << 20)
enum { WEIGHTS = 2, OPTIMIZER = 12, GRADIENTS = 4, KV = 16 }; /* units */
enum { TENSORS = 8, LEFT_MIB = 64, BLOCK_MIB = 32 };          /* BLOCK: of pinned memory */

static uint64_t unit(void)
{
    const char *text = getenv("PEAK_UNIT_MIB");

    return (text ? strtoull(text, NULL, 10) : 2) * MIB;
}

/* ==== the two processes ======================================================================= */
struct usage { /* since the last one that was asked for */
    uint64_t peak_bytes, held_bytes, host_peak_bytes;
};

static void answer_usage(const struct furlong *f, struct furlong_call *c)
{
    struct arena_usage u;
    struct arena *a;
    struct usage out;

    t_ok(arena_of_device(furlong_seat(f)->device_uuids[0], &a, NULL), NULL);
    arena_usage(a, true, &u);
    out = (struct usage){ u.peak_held_bytes, u.held_bytes, u.peak_pool_used_bytes };
    furlong_reply(c, &out, sizeof(out));
}

static void tensors(struct furlong_tensor t[TENSORS])
{
    static char names[TENSORS][8];

    memset(t, 0, TENSORS * sizeof(*t));
    for (unsigned i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof(names[i]), "t%u", i);
        t[i] = (struct furlong_tensor){ .name = names[i],
                                        .dtype = FL_BF16,
                                        .ndim = 1,
                                        .shape = { WEIGHTS * unit() / TENSORS / 2 } };
    }
}

/* The version, in the first bytes of each tensor. */
static void mark(const struct furlong *f, struct furlong_weights *w, uint64_t version)
{
    for (unsigned i = 0; i < TENSORS; i++) {
        struct link_mem m;

        t_ok(link_dev_foreign(furlong_seat(f)->device_uuids[0],
                              (uint64_t)(uintptr_t)furlong_weights_data(w, i), 8, &m, NULL),
             NULL);
        t_ok(link_mem_write(&m, 0, &version, 8, NULL), NULL);
        link_dev_free(&m);
    }
}

static uint64_t marked(const struct furlong *f, const struct furlong_weights *w)
{
    uint64_t version = UINT64_MAX;
    struct link_mem m;

    if (!furlong_weights_data(w, TENSORS - 1))
        return UINT64_MAX;
    t_ok(link_dev_foreign(furlong_seat(f)->device_uuids[0],
                          (uint64_t)(uintptr_t)furlong_weights_data(w, TENSORS - 1), 8, &m, NULL),
         NULL);
    t_ok(link_mem_read(&m, 0, &version, 8, NULL), NULL);
    link_dev_free(&m);
    return version;
}

static int play_trainer(void)
{
    struct furlong_tensor t[TENSORS];
    struct furlong_weights_opts o = { .slots = 1 };
    struct furlong_weights *w = NULL;
    struct furlong_event ev = { 0 };
    void *states = NULL, *gradients = NULL;
    struct furlong *f;
    struct fl_err err = { 0 };

    t_ok(furlong_join(FURLONG_ABI, &f, &err), &err);
    o.device = furlong_seat(f)->device_uuids[0];
    t_ok(furlong_arena_keep(f, FURLONG_TAG_DEFAULT, FURLONG_KEEP_NOT, NULL, &err), &err);
    tensors(t);
    while (ev.what != FURLONG_STOP) {
        t_ok(furlong_next(f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err), &err);
        if (ev.what == FURLONG_CALL && strcmp(ev.method, "usage") == 0) {
            answer_usage(f, ev.call);
            continue;
        }
        if (ev.what == FURLONG_CALL && strcmp(ev.method, "load") == 0) {
            t_ok(
                furlong_arena_alloc(f, FURLONG_TAG_OPTIMIZER, 0, OPTIMIZER * unit(), &states, &err),
                &err);
            t_ok(furlong_weights_offer(f, "policy", t, TENSORS, &o, &w, &err), &err);
            mark(f, w, 0);
            t_ok(furlong_weights_publish(w, 0, &err), &err);
        } else if (ev.what == FURLONG_CALL && strcmp(ev.method, "train") == 0) {
            uint64_t version;

            memcpy(&version, ev.body, sizeof(version));
            if (!gradients)
                t_ok(furlong_arena_alloc(f, FURLONG_TAG_DEFAULT, 0, GRADIENTS * unit(), &gradients,
                                         &err),
                     &err);
            t_ok(furlong_weights_begin(w, version, 20000, &err), &err);
            mark(f, w, version);
            t_ok(furlong_weights_publish(w, version, &err), &err);
        } else if (ev.what == FURLONG_CALL) { /* clear_memory */
            furlong_arena_free(f, gradients);
            gradients = NULL;
        }
        furlong_reply(ev.call, NULL, 0);
    }
    furlong_leave(f);
    return 0;
}

static int play_engine(void)
{
    struct furlong_tensor t[TENSORS];
    struct furlong_weights_opts o = { .slots = 1 };
    struct furlong_weights *w = NULL;
    struct furlong_event ev = { 0 };
    struct furlong *f;
    struct fl_err err = { 0 };
    void *kv;

    t_ok(furlong_join(FURLONG_ABI, &f, &err), &err);
    o.device = furlong_seat(f)->device_uuids[0];
    tensors(t);
    while (ev.what != FURLONG_STOP) {
        t_ok(furlong_next(f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err), &err);
        if (ev.what == FURLONG_COMMIT) {
            t_ok(furlong_weights_commit(w, ev.call, &err), &err);
            continue;
        }
        if (ev.what == FURLONG_CALL && strcmp(ev.method, "usage") == 0) {
            answer_usage(f, ev.call);
            continue;
        }
        if (ev.what == FURLONG_CALL && strcmp(ev.method, "generate") == 0) {
            uint64_t serves = marked(f, w);

            furlong_reply(ev.call, &serves, sizeof(serves));
            continue;
        }
        if (ev.what == FURLONG_CALL) { /* load */
            t_ok(furlong_arena_alloc(f, FURLONG_TAG_KV, 0, KV * unit(), &kv, &err), &err);
            t_ok(furlong_weights_accept(f, "policy", t, TENSORS, &o, &w, &err), &err);
        }
        furlong_reply(ev.call, NULL, 0);
    }
    furlong_leave(f);
    return 0;
}

/* ==== the driver ============================================================================== */
enum phase { LOAD, GENERATE, RELEASE, TRAIN, SLEEP, UPDATE, PHASES };
static const char *const phase_names[] = { "load",  "generate", "release, wake up",
                                           "train", "sleep",    "update, resume" };
struct column {
    const char *name, *mode; /* mode: of updates */
    const char *release[4], *sleep[4],
        *resume[2]; /* "T method" of the trainer, "E method" of the engine */
};
/* clang-format off */
static const struct column columns[] = {
    { "nothing released", "copy", { NULL }, { NULL }, { NULL } },
    { "default", "copy", { "E offload_kv", "E offload_weights", "T onload" },
                         { "T offload", "E onload_weights" }, { "E onload_kv" } },
    { "peak on the device", "auto", { "E offload_kv", "T onload", "E offload_weights" },
                         { "T clear_memory", "E onload_weights", "T offload" }, { "E onload_kv" } },
};
/* clang-format on */
struct peaks {
    uint64_t device[PHASES], host[PHASES],
        left; /* left: of the trainer after clear_memory, beyond weights and states */
    char mode[16];
};
struct run {
    struct fake *fake;
    struct furlong *me;
    struct furlong_layout *layout;
    struct furlong_group *trainer, *engine;
    const struct column *c;
    struct peaks *out;
    struct usage trainer_now;
};

static void ask(struct furlong_group *g, const char *method, const void *body, size_t bytes,
                void *reply, size_t reply_bytes)
{
    struct furlong_answer a = { 0 };
    struct fl_err err;

    t_ok(furlong_ask(furlong_group_peer(g, 0), 0, method,
                     &(struct furlong_data){ body, bytes, NULL, 0 }, 60000, &a, &err),
         &err);
    if (reply) {
        t_int_eq(a.body_bytes, reply_bytes);
        memcpy(reply, a.body, reply_bytes);
    }
    furlong_answer_free(&a);
}

static void phase_ends(struct run *r, enum phase p)
{
    struct usage t, e;
    uint64_t device, host;

    ask(r->trainer, "usage", NULL, 0, &t, sizeof(t));
    ask(r->engine, "usage", NULL, 0, &e, sizeof(e));
    device = t.peak_bytes + e.peak_bytes;
    host = t.host_peak_bytes + e.host_peak_bytes;
    r->out->device[p] = device > r->out->device[p] ? device : r->out->device[p];
    r->out->host[p] = host > r->out->host[p] ? host : r->out->host[p];
    r->trainer_now = t;
}

/* One after the other, as a step does; what one gives up is no longer there when the next one
 * takes. */
static void orders(struct run *r, enum phase p, const char *const *list, size_t n)
{
    if (n == 0 || !list[0])
        phase_ends(r, p); /* nothing to do: it is what it was */
    for (size_t i = 0; i < n && list[i]; i++) {
        ask(list[i][0] == 'T' ? r->trainer : r->engine, list[i] + 2, NULL, 0, NULL, 0);
        phase_ends(r, p);
        if (strcmp(list[i], "T clear_memory") == 0)
            r->out->left = r->trainer_now.held_bytes - (WEIGHTS + OPTIMIZER) * unit();
    }
}

static void update(struct run *r, uint64_t version)
{
    struct furlong_update how = { .version = version,
                                  .set = "policy",
                                  .mode = r->c->mode,
                                  .slots = 1,
                                  .budget_ms = 60000,
                                  .bucket_bytes = unit() };
    struct furlong_report rep = { 0 };
    struct fl_err err;
    uint64_t serves = 0;

    t_ok(furlong_update(r->trainer, r->engine, &how, &rep, &err), &err);
    (void)snprintf(r->out->mode, sizeof(r->out->mode), "%s", rep.mode);
    phase_ends(r, UPDATE);
    orders(r, UPDATE, r->c->resume, FL_LEN(r->c->resume));
    ask(r->engine, "generate", NULL, 0, &serves, sizeof(serves));
    t_int_eq(serves, version);
}

static struct furlong_group *launch(struct run *r, const char *role, const char *play)
{
    struct furlong_launch_opts o = { .start_ms = 20000 };
    char *argv[] = { "/proc/self/exe", (char *)(uintptr_t)play, NULL },
         *env[] = { "FAKE_WORLD=1", NULL };
    struct furlong_group *g = NULL;
    struct fl_err err;

    t_ok(furlong_launch(r->me, r->layout, role, argv, env, &o, &g, &err), &err);
    return g;
}

static void go_through(const struct column *c, struct peaks *out)
{
    struct furlong_flag flags[] = { { "trainer", "1" }, { "rollout", "1" } };
    static const char *const before[] = { "E offload_kv", "E offload_weights" };
    struct run r = { .fake = fake_create(), .c = c, .out = out };
    struct fl_err err;

    *out = (struct peaks){ 0 };
    r.me = fake_joined(r.fake, "driver", 0, 1);
    t_ok(furlong_place(r.me, flags, 2, &r.layout, &err), &err);
    r.trainer = launch(&r, "trainer", "trainer");
    r.engine = launch(&r, "rollout", "engine");
    ask(r.engine, "load", NULL, 0, NULL, 0);
    phase_ends(&r, LOAD);
    orders(&r, LOAD, c->release[0] ? before : c->release, c->release[0] ? FL_LEN(before) : 0);
    ask(r.trainer, "load", NULL, 0, NULL, 0);
    phase_ends(&r, LOAD);
    orders(&r, SLEEP, c->sleep, FL_LEN(c->sleep));
    update(&r, 0);
    phase_ends(&r, UPDATE);
    for (uint64_t version = 1; version <= 3; version++) {
        uint64_t serves;

        ask(r.engine, "generate", NULL, 0, &serves, sizeof(serves));
        phase_ends(&r, GENERATE);
        orders(&r, RELEASE, c->release, FL_LEN(c->release));
        ask(r.trainer, "train", &version, sizeof(version), NULL, 0);
        phase_ends(&r, TRAIN);
        orders(&r, SLEEP, c->sleep, FL_LEN(c->sleep));
        update(&r, version);
        phase_ends(&r, UPDATE);
    }
    furlong_group_end(r.engine);
    furlong_group_end(r.trainer);
    furlong_layout_free(r.layout);
    furlong_leave(r.me);
    fake_destroy(r.fake);
}

static uint64_t most(const uint64_t *of)
{
    uint64_t best = 0;

    for (unsigned p = 0; p < PHASES; p++)
        best = of[p] > best ? of[p] : best;
    return best;
}

static void print(const struct peaks *all)
{
    printf("# MiB at most; weights %" PRIu64 ", optimizer %" PRIu64
           ", gradients and activations %" PRIu64 ", kv_cache "
           "%" PRIu64 "\n",
           WEIGHTS * unit() / MIB, OPTIMIZER * unit() / MIB, GRADIENTS * unit() / MIB,
           KV * unit() / MIB);
    printf("# %-18s", "");
    for (size_t c = 0; c < FL_LEN(columns); c++)
        printf(" | %18s (%5s)", columns[c].name, all[c].mode);
    printf("\n# %-18s", "phase");
    for (size_t c = 0; c < FL_LEN(columns); c++)
        printf(" | %12s %13s", "device", "host");
    for (unsigned p = 0; p <= PHASES; p++) {
        printf("\n# %-18s", p < PHASES ? phase_names[p] : "most");
        for (size_t c = 0; c < FL_LEN(columns); c++)
            printf(" | %12" PRIu64 " %13" PRIu64,
                   (p < PHASES ? all[c].device[p] : most(all[c].device)) / MIB,
                   (p < PHASES ? all[c].host[p] : most(all[c].host)) / MIB);
    }
    for (size_t c = 1; c < FL_LEN(columns); c++)
        printf("\n# %s: %.0f %% of the device's peak saved", columns[c].name,
               100.0 * (1 - (double)most(all[c].device) / (double)most(all[0].device)));
    printf("\n");
}

static void peaks_are_as_designed(void **state)
{
    static struct peaks all[FL_LEN(columns)];
    uint64_t trainer = (WEIGHTS + OPTIMIZER + GRADIENTS) * unit(), engine = WEIGHTS * unit(),
             kv = KV * unit(), bound = 2 * unit(), /* two buckets */
        backup = (OPTIMIZER * unit() + BLOCK_MIB * MIB - 1) / (BLOCK_MIB * MIB) * (BLOCK_MIB * MIB);

    (void)state;
    for (size_t c = 0; c < FL_LEN(columns); c++)
        go_through(&columns[c], &all[c]);
    print(all);
    bound += trainer + engine > engine + kv ? trainer + engine : engine + kv;
    t_int_eq(most(all[0].device), trainer + engine + kv, "everything at once");
    t_true(most(all[2].device) <= bound, "%llu MiB of %llu with the flag",
           (unsigned long long)(most(all[2].device) / MIB), (unsigned long long)(bound / MIB));
    t_true(most(all[2].device) < most(all[0].device));
    for (size_t c = 1; c < FL_LEN(columns); c++)
        t_true(most(all[c].host) <= backup && most(all[c].host) > 0,
               "%s: %llu MiB of host memory, one backup has %llu", columns[c].name,
               (unsigned long long)(most(all[c].host) / MIB), (unsigned long long)(backup / MIB));
    t_true(all[2].left < LEFT_MIB * MIB, "%llu MiB of the trainer are left after clear_memory",
           (unsigned long long)(all[2].left / MIB));
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = { cmocka_unit_test(peaks_are_as_designed) };
    const char *role = fake_role(argc, argv);

    if (role)
        return strcmp(role, "trainer") == 0 ? play_trainer() : play_engine();
    return t_run("client peak", tests);
}
