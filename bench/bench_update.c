/* bench_update - a whole update of weights as a run sees it: call to commit, by a driver, a trainer
 * and an engine, which are this program
 *
 *     furlong job submit -- bench_update [--quick]      as bench/run does on this machine
 *
 * The tensors of Qwen3-0.6B (310, 1.19 GB in bf16). JSON lines: wall is the driver's call, cold
 * that of the first one, move the bytes alone, pause how long the engine ran no step; limit is one
 * memcpy of the same bytes, best of the same run, on one core. Of disk-delta a fiftieth of each
 * tensor changes from version to version, but for the first, which is written whole; its limit is a
 * file of those bytes, written, synced and read. */
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <furlong/driver.h>
#include "bench/median.h"
#include "bench/must.h"
#include "bench/shapes.h"

enum { ROUNDS = 9, WARM = 2, TENSOR_WAIT_MS = 120000, CHANGES_OF = 50 };
static struct furlong_tensor tensors[SHAPES_MAX];
static struct shape_tensor shapes[SHAPES_MAX];
static size_t n_tensors;
static uint64_t total;
static struct fl_err err;

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void make_model(const struct shape *s)
{
    n_tensors = shape_each(s, shapes);
    for (size_t i = 0; i < n_tensors; i++) {
        const struct shape_tensor *t = &shapes[i];

        tensors[i] = (struct furlong_tensor){ .name = t->name,
                                              .dtype = FL_BF16,
                                              .ndim = t->columns ? 2 : 1,
                                              .shape = { t->rows, t->columns } };
        total += shape_bytes(t);
    }
}

/* ==== the two sides
 * ================================================================================ */
/* All of it, or a fiftieth of each tensor: of a method "part". */
static void write_version(struct furlong_weights *w, uint64_t v, bool part)
{
    for (size_t i = 0; i < n_tensors; i++) {
        char *at = furlong_weights_data(w, i);
        uint64_t all = shape_bytes(&shapes[i]), new = part ? all / CHANGES_OF : all;

        memset(at, (int)(v * 31 + i), new);
        memset(at + new, (int)i, all - new);
    }
}

static void trainer(struct furlong *f)
{
    struct furlong_weights *w;
    struct furlong_event ev = { 0 };

    must(furlong_weights_offer(f, "policy", tensors, n_tensors, NULL, &w, &err));
    for (uint64_t v = 0;;) {
        write_version(w, v, v && strcmp(ev.method, "part") == 0);
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

/* ==== the driver
 * =================================================================================== */
static uint64_t memcpy_ns(void)
{
    char *a = malloc(total), *b = malloc(total);
    uint64_t best = UINT64_MAX;

    if (!a || !b)
        die("memory of two models", NULL);
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

static char folder[] = "/tmp/fl-deltas-XXXXXX"; /* of disk-delta */

static int removed(const char *path, const struct stat *st, int what, struct FTW *at)
{
    (void)st;
    (void)what;
    (void)at;
    return remove(path);
}

static void folder_remove(void)
{
    (void)nftw(folder, removed, 8, FTW_DEPTH | FTW_PHYS);
}

static void folder_make(void)
{
    if (!mkdtemp(folder) || atexit(folder_remove) != 0)
        die(folder, NULL);
}

static uint64_t file_ns(uint64_t bytes)
{
    char *a = malloc(bytes);
    uint64_t best = UINT64_MAX;

    if (!a)
        die("memory of a delta", NULL);
    memset(a, 1, bytes);
    for (int i = 0; i < 4; i++) {
        uint64_t begin = now_ns();
        int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

        if (fd < 0 || pwrite(fd, a, bytes, 0) != (ssize_t)bytes || fdatasync(fd) != 0 ||
            pread(fd, a, bytes, 0) != (ssize_t)bytes)
            die(folder, NULL);
        close(fd);
        uint64_t took = now_ns() - begin;
        best = took < best ? took : best;
    }
    free(a);
    return best;
}

struct way {
    const char *mode, *dir; /* dir: of disk-delta */
    uint64_t limit_ns;
    const char *limit;
};

static void run_mode(struct furlong_group *from, struct furlong_group *to, const struct way *way,
                     uint64_t *version)
{
    double wall[ROUNDS], move[ROUNDS], pause[ROUNDS], cold_ms = 0;
    struct furlong_report rep = { 0 };

    for (int i = -WARM; i < ROUNDS; i++) {
        struct furlong_update how = { .version = ++*version,
                                      .set = "policy",
                                      .mode = way->mode,
                                      .budget_ms = TENSOR_WAIT_MS,
                                      .dir = way->dir };

        must(furlong_ask_all(from, way->dir ? "part" : "write", NULL, TENSOR_WAIT_MS, NULL, &err));
        uint64_t begin = now_ns();
        must(furlong_update(from, to, &how, &rep, &err));
        double took_ms = 1e-6 * (double)(now_ns() - begin);

        if (i == -WARM)
            cold_ms = took_ms;
        if (i < 0)
            continue;
        wall[i] = took_ms;
        move[i] = 1e-6 * (double)rep.move_ns;
        pause[i] = 1e-6 * (double)rep.pause_ns;
    }
    double wall_ms = median(wall, ROUNDS), limit_ms = 1e-6 * (double)way->limit_ns;

    printf(
        "{\"name\":\"update %s\",\"mode\":\"%s\",\"tensors\":%zu,\"bytes\":%" PRIu64
        ",\"cold_ms\":%.3f,\"wall_ms\":%.3f,\"move_ms\":%.3f,\"pause_ms\":%.3f,"
        "\"min_wall_ms\":%.3f,\"runs\":%d,\"limit_ms\":%.3f,\"limit_is\":\"%s\",\"ratio\":%.3f}\n",
        way->mode, rep.mode, n_tensors, total, cold_ms, wall_ms, median(move, ROUNDS),
        median(pause, ROUNDS), wall[0], ROUNDS, limit_ms, way->limit, limit_ms / wall_ms);
    fflush(stdout);
}

static void driver(struct furlong *f, char **argv)
{
    const struct furlong_flag split[] = { { "actor-num-nodes", "1" },
                                          { "actor-num-gpus-per-node", "1" },
                                          { "rollout-num-gpus", "1" } };
    char *const again[] = { argv[0], argv[1], NULL };
    struct furlong_group *from, *to;
    struct furlong_layout *y;
    uint64_t version = 0, copy_ns = memcpy_ns();

    folder_make();
    const struct way ways[] = {
        { "broadcast", NULL, copy_ns, "one memcpy of the bytes" },
        { "p2p", NULL, copy_ns, "one memcpy of the bytes" },
        { "copy", NULL, copy_ns, "one memcpy of the bytes" },
        { "share", NULL, copy_ns, "one memcpy of the bytes" },
        { "disk-delta", folder, file_ns(total / CHANGES_OF),
          "a file of a fiftieth of the bytes written, synced and read" },
    };

    must(furlong_place(f, split, 3, &y, &err));
    must(furlong_launch(f, y, "trainer", again, NULL, NULL, &from, &err));
    must(furlong_launch(f, y, "rollout", again, NULL, NULL, &to, &err));
    struct furlong_update first = {
        .version = 0, .set = "policy", .mode = "broadcast", .budget_ms = TENSOR_WAIT_MS
    };
    must(furlong_update(from, to, &first, NULL, &err));
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        run_mode(from, to, &ways[i], &version);
    furlong_group_end(to);
    furlong_group_end(from);
    furlong_layout_free(y);
}

int main(int argc, char **argv)
{
    struct furlong *f = NULL;
    char *args[] = { argv[0], argc > 1 ? argv[1] : NULL, NULL };

    make_model(argc > 1 && strcmp(argv[1], "--quick") == 0 ? &shape_tiny : &shape_06);
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
