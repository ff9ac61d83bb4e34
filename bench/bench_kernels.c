/* bench_kernels - the move kernel against the plainest copy of the same bytes, on the first device
 *
 * JSON lines: bytes in 310 tensors as Qwen3-0.6B has them (and 399 as 8B with --big), device time
 * by events, median of 20 after 3; limit: one cuMemcpyAsync of all bytes in the same run. Digests
 * are compared with the plain C form. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/median.h"
#include "bench/must.h"
#include "bench/shapes.h"
#include "common/gpu/gpu.h"
#include "kernels/digest.h"
#include "kernels/launch.h"

enum { RUNS = 20, WARM = 3, PATTERN_BYTES = 63999984 };
static const struct gpu_ops *gpu;
static struct fl_err err;

static size_t tensors_of(const struct shape *s, struct kernel_piece *out, uint64_t *total)
{
    uint64_t bytes[SHAPES_MAX], at = 0;
    size_t n = shape_tensors(s, bytes);

    for (size_t i = 0; i < n; i++) {
        out[i] = (struct kernel_piece){
            .from_off = at, .to_off = at, .run_bytes = bytes[i], .rows = 1, .tensor = (uint32_t)i
        };
        at += (bytes[i] + SHAPES_ALIGN - 1) / SHAPES_ALIGN * SHAPES_ALIGN;
    }
    *total = at;
    return n;
}

struct job {
    struct gpu *g;
    struct gpu_stream *s;
    uint64_t from, to, pieces, digests, bytes, n;
    bool copy, digest, alone; /* alone: nothing is written */
};

static void once(struct job *j)
{
    if (j->copy) {
        must(gpu->copy(j->s, j->to, j->from, j->bytes, &err));
        return;
    }
    struct kernel_move_args a = { .pieces = j->pieces,
                                  .n = j->n,
                                  .from = j->from,
                                  .to = j->alone ? 0 : j->to,
                                  .digests = j->digest || j->alone ? j->digests : 0 };

    must(kernel_move_start(gpu, j->g, j->s, &a, &err));
}

static double median_ms(struct gpu *g, struct job *j)
{
    struct gpu_event *a, *b;
    float ms;
    double all[RUNS];

    must(gpu->event(g, &a, &err));
    must(gpu->event(g, &b, &err));
    for (int i = -WARM; i < RUNS; i++) {
        must(gpu->event_record(a, j->s, &err));
        once(j);
        must(gpu->event_record(b, j->s, &err));
        must(gpu->event_sync(b, &err));
        must(gpu->event_ms(a, b, &ms, &err));
        if (i >= 0)
            all[i] = (double)ms;
    }
    gpu->event_free(a);
    gpu->event_free(b);
    return median(all, RUNS);
}

/* The source repeats a pattern whose length shares nothing with the tensors'. */
static unsigned char *pattern;

static void digest_of_pattern(uint64_t digest[2], uint64_t at, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes;) {
        uint64_t off = (at + done) % PATTERN_BYTES, len = PATTERN_BYTES - off;

        len = len < bytes - done ? len : bytes - done;
        kernel_digest_add(digest, pattern + off, len, done);
        done += len;
    }
}

static void fill_source(struct job *j)
{
    uint64_t x = 88172645463325252ull;

    for (uint64_t i = 0; i + 8 <= PATTERN_BYTES; i += 8) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        memcpy(pattern + i, &x, 8);
    }
    for (uint64_t at = 0; at < j->bytes; at += PATTERN_BYTES) {
        uint64_t left = j->bytes - at;

        must(gpu->copy(j->s, j->from + at, (uint64_t)(uintptr_t)pattern,
                       left < PATTERN_BYTES ? left : PATTERN_BYTES, &err));
    }
    must(gpu->stream_sync(j->s, &err));
}

/* Tensors whose digest or bytes are not the source's. */
static uint64_t count_wrong(struct gpu *g, struct job *j, const struct kernel_piece *whole,
                            size_t n)
{
    uint64_t(*got)[2] = calloc(n, sizeof(*got)), wrong = 0;
    unsigned char *back;

    must(gpu->pin(g, PATTERN_BYTES, (void **)&back, &err));
    must(gpu->fill(j->s, j->digests, 0, n * sizeof(*got), &err));
    j->digest = true;
    once(j);
    must(gpu->copy(j->s, (uint64_t)(uintptr_t)got, j->digests, n * sizeof(*got), &err));
    must(gpu->stream_sync(j->s, &err));
    for (size_t i = 0; i < n; i++) {
        uint64_t d[2] = { 0, 0 };

        digest_of_pattern(d, whole[i].from_off, whole[i].run_bytes);
        wrong += d[0] != got[i][0] || d[1] != got[i][1];
    }
    for (size_t i = 0; i < n; i++)
        for (uint64_t at = whole[i].from_off, end = at + whole[i].run_bytes; at < end;) {
            uint64_t off = at % PATTERN_BYTES,
                     len = PATTERN_BYTES - off < end - at ? PATTERN_BYTES - off : end - at;

            must(gpu->copy(j->s, (uint64_t)(uintptr_t)back, j->to + at, len, &err));
            must(gpu->stream_sync(j->s, &err));
            wrong += memcmp(back, pattern + off, len) != 0;
            at += len;
        }
    gpu->unpin(g, back);
    free(got);
    return wrong;
}

static void run(struct gpu *g, const char *name, const struct shape *shape)
{
    static struct kernel_piece whole[SHAPES_MAX];
    uint64_t total;
    size_t n = tensors_of(shape, whole, &total),
           cut = kernel_pieces_cut(whole, n, KERNEL_NO_CAST, NULL);
    struct kernel_piece *pieces = malloc(cut * sizeof(*pieces));
    struct job j = { .g = g, .bytes = total, .n = cut };

    kernel_pieces_cut(whole, n, KERNEL_NO_CAST, pieces);
    must(gpu->stream(g, &j.s, &err));
    must(gpu->alloc(g, total, &j.from, &err));
    must(gpu->alloc(g, total, &j.to, &err));
    must(gpu->alloc(g, cut * sizeof(*pieces), &j.pieces, &err));
    must(gpu->alloc(g, n * 16, &j.digests, &err));
    must(gpu->pin(g, PATTERN_BYTES, (void **)&pattern, &err));
    must(gpu->copy(j.s, j.pieces, (uint64_t)(uintptr_t)pieces, cut * sizeof(*pieces), &err));
    must(gpu->fill(j.s, j.to, 0, total, &err));
    fill_source(&j);
    uint64_t wrong = count_wrong(g, &j, whole, n);
    j.copy = true;
    double limit = median_ms(g, &j);
    j.copy = false;
    static const char *const what[] = { "", " with digests", ", digests alone" };

    for (int k = 0; k < 3; k++) {
        j.digest = k == 1;
        j.alone = k == 2;
        double ms = median_ms(g, &j);

        printf("{\"name\":\"move "
               "%s%s\",\"tensors\":%zu,\"bytes\":%llu,\"ms\":%.4f,\"limit_ms\":%.4f,\"ratio\":%.3f,"
               "\"wrong\":%llu}\n",
               name, what[k], n, (unsigned long long)total, ms, limit,
               ms / limit, (unsigned long long)wrong);
    }
    gpu->unpin(g, pattern);
    gpu->free(g, j.from);
    gpu->free(g, j.to);
    gpu->free(g, j.pieces);
    gpu->free(g, j.digests);
    gpu->stream_free(j.s);
    free(pieces);
}

int main(int argc, char **argv)
{
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;
    struct gpu *g;

    must(gpu_pick(&gpu, &err));
    must(gpu->list(all, &n, &err));
    if (n == 0) {
        puts("{\"name\":\"bench_kernels\",\"skipped\":\"no device\"}");
        return 0;
    }
    must(gpu->open(all[0].uuid, &g, &err));
    run(g, "0.6B", &shape_06);
    if (argc > 1 && strcmp(argv[1], "--big") == 0)
        run(g, "8B", &shape_8);
    gpu->close(g);
    return 0;
}
