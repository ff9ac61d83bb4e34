/* bench_update - a whole weight update as a run sees it: call to commit, through driver, trainer and engine
 *
 *     bench_update.py BIN-DIR          starts a cluster and submits this program as its driver
 *     bench_update [--quick]           the driver: places, launches itself as trainer and engine, updates
 *
 * The tensors of Qwen3-0.6B (310, 1.19 GB in bf16). JSON lines: wall is the driver's call, move the bytes alone, pause
 * how long the engine ran no step; limit is one memcpy of the same bytes, best of the same run, on one core. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <furlong/driver.h>

enum { MAX_TENSORS = 310, ROUNDS = 9, WARM = 2, TENSOR_WAIT_MS = 120000 };
struct sizes { uint64_t layers, hidden, q, kv, ffn, head, vocab; };
static const struct sizes full = { 28, 1024, 2048, 1024, 3072, 128, 151936 };
static const struct sizes quick = { 4, 256, 512, 256, 768, 128, 8192 };
static struct furlong_tensor tensors[MAX_TENSORS];
static char names[MAX_TENSORS][40];
static size_t n_tensors;
static uint64_t total;
static struct fl_err err;

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void must(enum fl_status st)
{
    if (st == FL_OK)
        return;
    fprintf(stderr, "bench_update: %s\n", err.text);
    exit(1);
}

static void add(const char *name, uint64_t rows, uint64_t columns)
{
    struct furlong_tensor *t = &tensors[n_tensors];

    snprintf(names[n_tensors], sizeof(names[0]), "%s", name);
    *t = (struct furlong_tensor){ .name = names[n_tensors], .dtype = FL_BF16, .ndim = columns ? 2 : 1,
                                  .shape = { rows, columns } };
    total += 2 * rows * (columns ? columns : 1);
    n_tensors++;
}

static void make_model(const struct sizes *s)
{
    static const char *const what[11] = { "q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2", "q_norm", "k_norm" };
    const uint64_t shape[11][2] = { { s->q, s->hidden }, { s->kv, s->hidden }, { s->kv, s->hidden }, { s->hidden, s->q },
                                    { s->ffn, s->hidden }, { s->ffn, s->hidden }, { s->hidden, s->ffn }, { s->hidden, 0 },
                                    { s->hidden, 0 }, { s->head, 0 }, { s->head, 0 } };
    char name[40];

    add("embed", s->vocab, s->hidden);
    for (uint64_t l = 0; l < s->layers; l++)
        for (size_t i = 0; i < 11; i++) {
            snprintf(name, sizeof(name), "layers.%02" PRIu64 ".%s", l, what[i]);
            add(name, shape[i][0], shape[i][1]);
        }
    add("norm", s->hidden, 0);
}

static uint64_t bytes_of(const struct furlong_tensor *t)
{
    return 2 * t->shape[0] * (t->ndim == 2 ? t->shape[1] : 1);
}

/* ==== the two sides ================================================================================ */
static void trainer(struct furlong *f)
{
    struct furlong_weights *w;
    struct furlong_event ev;

    must(furlong_weights_offer(f, "policy", tensors, n_tensors, NULL, &w, &err));
    for (uint64_t v = 0;;) {
        for (size_t i = 0; i < n_tensors; i++)
            memset(furlong_weights_data(w, i), (int)(v * 31 + i), bytes_of(&tensors[i]));
        must(furlong_weights_publish(w, v, &err));
        if (v)
            furlong_reply(ev.call, NULL, 0);
        for (;;) {
            must(furlong_next(f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err));
            if (ev.what == FURLONG_CALL)
                break;
            furlong_reply(ev.call, NULL, 0);
            if (ev.what == FURLONG_STOP)
                return;
        }
        must(furlong_weights_begin(w, ++v, TENSOR_WAIT_MS, &err));
    }
}

static void engine(struct furlong *f)
{
    struct furlong_weights *w;
    struct furlong_event ev = { 0 };

    must(furlong_weights_accept(f, "policy", tensors, n_tensors, NULL, &w, &err));
    while (ev.what != FURLONG_STOP) {
        must(furlong_next(f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err));
        if (ev.what == FURLONG_COMMIT)
            must(furlong_weights_commit(w, ev.call, &err));
        else
            furlong_reply(ev.call, NULL, 0);
    }
}

/* ==== the driver =================================================================================== */
static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static uint64_t memcpy_ns(void)
{
    char *a = malloc(total), *b = malloc(total);
    uint64_t best = UINT64_MAX;

    if (!a || !b)
        exit(1);
    memset(a, 1, total);
    memset(b, 2, total);
    for (int i = 0; i < 4; i++) {
        uint64_t begin = now_ns();

        memcpy(i & 1 ? a : b, i & 1 ? b : a, total);
        uint64_t took = now_ns() - begin;
        best = took < best ? took : best;
    }
    free(a);
    free(b);
    return best;
}

static void run_mode(struct furlong_group *from, struct furlong_group *to, const char *mode, const char *dir, uint64_t *version,
                     uint64_t limit)
{
    uint64_t wall[ROUNDS], move[ROUNDS], pause[ROUNDS];
    struct furlong_report rep = { 0 };

    for (int i = -WARM; i < ROUNDS; i++) {
        struct furlong_update how = { .version = ++*version, .set = "policy", .mode = mode, .budget_ms = TENSOR_WAIT_MS, .dir = dir };

        must(furlong_ask_all(from, "write", NULL, TENSOR_WAIT_MS, NULL, &err));
        uint64_t begin = now_ns();
        must(furlong_update(from, to, &how, &rep, &err));
        if (i < 0)
            continue;
        wall[i] = now_ns() - begin;
        move[i] = rep.move_ns;
        pause[i] = rep.pause_ns;
    }
    qsort(wall, ROUNDS, sizeof(*wall), by_value);
    qsort(move, ROUNDS, sizeof(*move), by_value);
    qsort(pause, ROUNDS, sizeof(*pause), by_value);
    printf("{\"name\":\"update %s\",\"mode\":\"%s\",\"tensors\":%zu,\"bytes\":%" PRIu64 ",\"wall_ms\":%.3f,\"move_ms\":%.3f,"
           "\"pause_ms\":%.3f,\"min_wall_ms\":%.3f,\"runs\":%d,\"limit_ms\":%.3f,\"limit_is\":\"one memcpy of the bytes\",\"ratio\":%.3f}\n",
           mode, rep.mode, n_tensors, total, 1e-6 * (double)wall[ROUNDS / 2], 1e-6 * (double)move[ROUNDS / 2],
           1e-6 * (double)pause[ROUNDS / 2], 1e-6 * (double)wall[0], ROUNDS, 1e-6 * (double)limit,
           (double)limit / (double)wall[ROUNDS / 2]);
    fflush(stdout);
}

static void driver(struct furlong *f, char **argv)
{
    const struct furlong_flag split[] = { { "actor-num-nodes", "1" }, { "actor-num-gpus-per-node", "1" }, { "rollout-num-gpus", "1" } };
    char *const again[] = { argv[0], argv[1], NULL };
    struct furlong_group *from, *to;
    struct furlong_layout *y;
    uint64_t version = 0, limit = memcpy_ns();

    must(furlong_place(f, split, 3, &y, &err));
    must(furlong_launch(f, y, "trainer", again, NULL, NULL, &from, &err));
    must(furlong_launch(f, y, "rollout", again, NULL, NULL, &to, &err));
    struct furlong_update first = { .version = 0, .set = "policy", .mode = "broadcast", .budget_ms = TENSOR_WAIT_MS };
    must(furlong_update(from, to, &first, NULL, &err));
    run_mode(from, to, "broadcast", NULL, &version, limit);
    run_mode(from, to, "p2p", NULL, &version, limit);
    run_mode(from, to, "copy", NULL, &version, limit);
    run_mode(from, to, "share", NULL, &version, limit);
    furlong_group_end(to);
    furlong_group_end(from);
    furlong_layout_free(y);
}

int main(int argc, char **argv)
{
    struct furlong *f = NULL;
    char *args[] = { argv[0], argc > 1 ? argv[1] : NULL, NULL };

    make_model(argc > 1 && strcmp(argv[1], "--quick") == 0 ? &quick : &full);
    must(furlong_join(FURLONG_ABI, &f, &err));
    const char *role = furlong_seat(f)->role;

    if (strcmp(role, "trainer") == 0)
        trainer(f);
    else if (strcmp(role, "rollout") == 0)
        engine(f);
    else
        driver(f, args);
    furlong_leave(f);
    return 0;
}
