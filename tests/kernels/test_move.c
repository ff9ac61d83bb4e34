/* the plain forms against the definition, and the device's (or the fake's) against the plain forms,
 * bit for bit */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/digest.h"
#include "kernels/launch.h"
#include "tests/t.h"

enum { ROOM = 3 << 20, TENSORS = 8, PIECES = 64 };
static unsigned char from[ROOM], wanted[ROOM], got[ROOM];
static const struct gpu_ops *gpu;
static struct gpu_info info;
static struct fl_err err;

static void fill(unsigned char *at, size_t n, uint64_t seed)
{
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t x = t_random(&seed);

        memcpy(at + i, &x, 8);
    }
}

/* ==== casts against all values that the result can have ==== */
static double half_value(uint16_t h, bool bf16)
{
    int exp = bf16 ? h >> 7 & 0xff : h >> 10 & 0x1f, man = bf16 ? h & 0x7f : h & 0x3ff;
    int bits = bf16 ? 7 : 10, bias = bf16 ? 127 : 15;

    return exp == 0 ? ldexp(man, 1 - bias - bits) : ldexp(man + (1 << bits), exp - bias - bits);
}

/* The nearest of all finite halves; a tie goes to the even one; past the last one and half a step:
 * infinity. */
static uint16_t nearest(float f, bool bf16)
{
    uint16_t inf = bf16 ? 0x7f80 : 0x7c00, low = 0, high = (uint16_t)(inf - 1),
             sign = signbit(f) ? 0x8000 : 0;
    double x = fabs((double)f), last = half_value(high, bf16),
           step = last - half_value((uint16_t)(high - 1), bf16);

    if (x >= last + step / 2)
        return sign | inf;
    while (high - low > 1) {
        uint16_t mid = (uint16_t)((low + high) / 2);

        if (half_value(mid, bf16) <= x)
            low = mid;
        else
            high = mid;
    }
    double below = x - half_value(low, bf16), above = half_value(high, bf16) - x;

    return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

static uint16_t cast_one(float f, enum kernel_cast cast)
{
    struct kernel_piece p = { .run_bytes = 2, .rows = 1 };
    uint16_t out = 0;

    kernel_move(&p, 1, &f, &out, NULL, cast);
    return out;
}

static float float_of(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static void casts_round_to_the_nearest(void **state)
{
    uint64_t seed = 5;

    (void)state;
    for (int which = 0; which < 2; which++) {
        bool bf16 = which == 0;
        enum kernel_cast cast = bf16 ? KERNEL_F32_TO_BF16 : KERNEL_F32_TO_F16;

        for (uint32_t h = 0; h < (bf16 ? 0x7f80u : 0x7c00u);
             h++) { /* each half, the ties around it, and next to them */
            float v = (float)half_value((uint16_t)h, bf16);
            float tie =
                (float)((half_value((uint16_t)h, bf16) + half_value((uint16_t)(h + 1), bf16)) / 2);
            float all[] = {
                v, -v, tie, -tie, nextafterf(tie, 0), nextafterf(tie, INFINITY), nextafterf(v, 0)
            };

            if (h + 1 == (bf16 ? 0x7f80u : 0x7c00u))
                all[2] = all[3] = all[4] = all[5] = v;
            for (size_t i = 0; i < FL_LEN(all); i++)
                t_int_eq(cast_one(all[i], cast), nearest(all[i], bf16), "%a to %s", (double)all[i],
                         bf16 ? "bf16" : "f16");
        }
        for (unsigned i = 0; i < 20000; i++) {
            float f = float_of((uint32_t)t_random(&seed));

            if (isfinite(f))
                t_int_eq(cast_one(f, cast), nearest(f, bf16), "%a to %s", (double)f,
                         bf16 ? "bf16" : "f16");
        }
    }
}

static void what_is_no_number_stays_none(void **state)
{
    static const uint32_t nans[] = { 0x7fc00000, 0x7f800001, 0xff800001,
                                     0x7fffffff, 0xffc12345, 0x7f80ffff };

    (void)state;
    for (size_t i = 0; i < FL_LEN(nans); i++) {
        uint16_t b = cast_one(float_of(nans[i]), KERNEL_F32_TO_BF16),
                 h = cast_one(float_of(nans[i]), KERNEL_F32_TO_F16);

        t_true((b & 0x7fff) > 0x7f80 && (b >> 15) == (nans[i] >> 31), "%#x to bf16: %#x", nans[i],
               b);
        t_true((h & 0x7fff) > 0x7c00 && (h >> 15) == (nans[i] >> 31), "%#x to f16: %#x", nans[i],
               h);
    }
    t_int_eq(cast_one(INFINITY, KERNEL_F32_TO_BF16), 0x7f80);
    t_int_eq(cast_one(-INFINITY, KERNEL_F32_TO_F16), 0xfc00);
    t_int_eq(cast_one(3.4e38f, KERNEL_F32_TO_F16), 0x7c00);
    t_int_eq(cast_one(-0.0f, KERNEL_F32_TO_BF16), 0x8000);
}

/* ==== pieces ==== */
struct table {
    struct kernel_piece piece[PIECES];
    size_t n;
    uint64_t to_bytes;
};

/* Pieces whose results lie apart from each other; align: of all addresses and lengths, a power of
 * two. */
static void random_table(struct table *t, uint64_t *seed, enum kernel_cast cast, unsigned align)
{
    uint64_t at = 0, scale = cast == KERNEL_NO_CAST ? 1 : 2,
             unit = scale > 1 && align < 2 ? 2 : align;

    for (t->n = 0; t->n < PIECES; t->n++) {
        struct kernel_piece *p = &t->piece[t->n];
        uint64_t most = t_random(seed) % 4 == 0 ? 60000 : 700;

        p->run_bytes = (t_random(seed) % most / unit + 1) * unit;
        p->rows = t_random(seed) % 3 ? 1 : (uint32_t)(t_random(seed) % 40 + 1);
        p->to_step = p->run_bytes + t_random(seed) % 4 * unit;
        p->byte_step = p->run_bytes + t_random(seed) % 5 * unit;
        p->from_step = scale * (p->run_bytes + t_random(seed) % 3 * unit);
        p->to_off = at + t_random(seed) % 20 * unit;
        p->first_byte =
            t_random(seed) % 100000 / unit * unit + (t_random(seed) % 5 == 0 ? 1ull << 40 : 0);
        p->tensor = (uint32_t)(t_random(seed) % TENSORS);
        uint64_t to_end = p->to_off + (p->rows - 1) * p->to_step + p->run_bytes;
        uint64_t from_room = ROOM - (p->rows - 1) * p->from_step - scale * p->run_bytes;
        if (to_end > ROOM || (p->rows - 1) * p->from_step + scale * p->run_bytes > ROOM)
            break;
        p->from_off = t_random(seed) % from_room / (scale * unit) * (scale * unit);
        at = to_end;
    }
    t->to_bytes = at;
}

static void by_hand(const struct table *t, unsigned char *to, uint64_t (*digests)[2],
                    enum kernel_cast cast)
{
    for (size_t i = 0; i < t->n; i++)
        for (uint32_t row = 0; row < t->piece[i].rows; row++) {
            const struct kernel_piece *p = &t->piece[i];
            unsigned char *out = to + p->to_off + row * p->to_step;
            const unsigned char *in = from + p->from_off + row * p->from_step;

            for (uint64_t k = 0; k < p->run_bytes; k += cast == KERNEL_NO_CAST ? 1 : 2) {
                uint16_t h;
                float f;

                if (cast == KERNEL_NO_CAST) {
                    out[k] = in[k];
                    continue;
                }
                memcpy(&f, in + 2 * k, sizeof(f));
                h = cast_one(f, cast);
                memcpy(out + k, &h, sizeof(h));
            }
            kernel_digest_add(digests[p->tensor], out, p->run_bytes,
                              p->first_byte + row * p->byte_step);
        }
}

static void plain_moves_what_the_table_says(void **state)
{
    static struct table t;
    uint64_t seed = 3;

    (void)state;
    for (unsigned round = 0; round < 30; round++) {
        enum kernel_cast cast = round % 3;
        uint64_t want[TENSORS][2] = { 0 }, sum[TENSORS][2] = { 0 };

        random_table(&t, &seed, cast, 1u << round % 5);
        memset(wanted, 0xee, ROOM);
        memset(got, 0xee, ROOM);
        by_hand(&t, wanted, want, cast);
        kernel_move(t.piece, t.n, from, got, sum, cast);
        t_mem_eq(got, wanted, ROOM, "round %u", round);
        t_mem_eq(sum, want, sizeof(sum), "round %u", round);
        memset(got, 0xee, ROOM);
        kernel_move(t.piece, t.n, from, got, NULL, cast);
        t_mem_eq(got, wanted, ROOM, "without digests, round %u", round);
    }
}

static void cut_pieces_are_the_same_bytes(void **state)
{
    static struct kernel_piece cut[1000];
    struct kernel_piece big[] = {
        { .to_off = 16, .run_bytes = 5 * KERNEL_PIECE_BYTES + 17, .rows = 1, .first_byte = 3 },
        { .from_off = 999,
          .to_off = 1 << 20,
          .run_bytes = 100,
          .from_step = 300,
          .to_step = 100,
          .byte_step = 500,
          .rows = 5000,
          .tensor = 1 },
        { .to_off = 7, .run_bytes = 0, .rows = 1 },
    };
    uint64_t want[TENSORS][2] = { 0 }, sum[TENSORS][2] = { 0 };
    size_t n = kernel_pieces_cut(big, FL_LEN(big), KERNEL_NO_CAST, NULL);

    (void)state;
    t_true(n > 9 && n <= FL_LEN(cut), "%zu pieces", n);
    t_int_eq(kernel_pieces_cut(big, FL_LEN(big), KERNEL_NO_CAST, cut), n);
    for (size_t i = 0; i < n; i++)
        t_true(cut[i].run_bytes * cut[i].rows <= KERNEL_PIECE_BYTES && cut[i].run_bytes > 0,
               "piece %zu", i);
    memset(wanted, 0, ROOM);
    memset(got, 0, ROOM);
    kernel_move(big, FL_LEN(big), from, wanted, want, KERNEL_NO_CAST);
    kernel_move(cut, n, from, got, sum, KERNEL_NO_CAST);
    t_mem_eq(got, wanted, ROOM);
    t_mem_eq(sum, want, sizeof(sum));
}

/* One column of a matrix with as many rows as a count holds. */
static void all_rows_are_cut(void **state)
{
    struct kernel_piece tall = { .run_bytes = 1, .rows = UINT32_MAX, .from_step = 8, .to_step = 1 };
    uint64_t rows = 0;

    (void)state;
    (void)alarm(20); /* a count that runs over never ends */
    size_t n = kernel_pieces_cut(&tall, 1, KERNEL_NO_CAST, NULL);
    struct kernel_piece *cut = malloc(n * sizeof(*cut));

    t_int_eq(kernel_pieces_cut(&tall, 1, KERNEL_NO_CAST, cut), n);
    for (size_t i = 0; i < n; i++) {
        t_int_eq(cut[i].from_off, 8 * rows, "piece %zu", i);
        rows += cut[i].rows;
    }
    t_int_eq(rows, UINT32_MAX);
    free(cut);
    (void)alarm(0);
}

static void plain_sees_changed_blocks(void **state)
{
    static const uint32_t blocks[] = { 1, 2, 7, 64, 256, 4096, 100000 };
    uint64_t seed = 9;

    (void)state;
    for (size_t b = 0; b < FL_LEN(blocks); b++) {
        uint64_t bytes = 50001, n = (bytes + blocks[b] - 1) / blocks[b];
        uint8_t *flags = malloc(n), *want = calloc(n, 1);

        memcpy(got, from, bytes);
        for (unsigned i = 0; i < 5; i++) {
            uint64_t at = i == 0 ? bytes - 1 : t_random(&seed) % bytes;

            got[at] ^= 1;
            want[at / blocks[b]] = got[at] != from[at];
        }
        for (uint64_t i = 0; i < n; i++) { /* a byte may have been flipped back */
            uint64_t left = bytes - i * blocks[b];

            want[i] = memcmp(got + i * blocks[b], from + i * blocks[b],
                             left < blocks[b] ? left : blocks[b]) != 0;
        }
        memset(flags, 0xcc, n);
        kernel_changed(from, got, bytes, blocks[b], flags);
        t_mem_eq(flags, want, n, "blocks of %u", blocks[b]);
        free(flags);
        free(want);
    }
}

/* ==== the device ==== */
struct rig {
    struct gpu *g;
    struct gpu_stream *s;
    uint64_t from, to, pieces, digests, flags;
};

static void rig_open(struct rig *r)
{
    t_ok(gpu->open(info.uuid, &r->g, &err), &err);
    t_ok(gpu->stream(r->g, &r->s, &err), &err);
    t_ok(gpu->alloc(r->g, ROOM + 64, &r->from, &err), &err);
    t_ok(gpu->alloc(r->g, ROOM + 64, &r->to, &err), &err);
    t_ok(gpu->alloc(r->g, 4096 * sizeof(struct kernel_piece), &r->pieces, &err), &err);
    t_ok(gpu->alloc(r->g, sizeof(uint64_t[TENSORS][2]), &r->digests, &err), &err);
    t_ok(gpu->alloc(r->g, ROOM, &r->flags, &err), &err);
}

static void rig_close(struct rig *r)
{
    gpu->stream_free(r->s);
    gpu->close(r->g);
}

static void copy(struct rig *r, uint64_t to, const void *host, uint64_t bytes)
{
    t_ok(gpu->copy(r->s, to, (uint64_t)(uintptr_t)host, bytes, &err), &err);
}

static void back(struct rig *r, void *host, uint64_t addr, uint64_t bytes)
{
    t_ok(gpu->copy(r->s, (uint64_t)(uintptr_t)host, addr, bytes, &err), &err);
    t_ok(gpu->stream_sync(r->s, &err), &err);
}

/* The table on the device, and with the plain form at the same alignment: both results and both
 * digests. */
static void same_as_plain(struct rig *r, const struct table *t, enum kernel_cast cast,
                          unsigned shift, bool digest, const char *what)
{
    static struct kernel_piece cut[4096];
    uint64_t want[TENSORS][2] = { { 1, 2 } }, sum[TENSORS][2] = { { 1, 2 } };
    size_t n = kernel_pieces_cut(t->piece, t->n, cast, NULL);

    t_true(n <= FL_LEN(cut));
    kernel_pieces_cut(t->piece, t->n, cast, cut);
    memset(wanted, 0xee, ROOM);
    kernel_move(t->piece, t->n, from, wanted, digest ? want : NULL, cast);
    copy(r, r->from + shift, from, ROOM);
    copy(r, r->pieces, cut, n * sizeof(*cut));
    copy(r, r->digests, sum, sizeof(sum));
    t_ok(gpu->fill(r->s, r->to + shift, 0xee, ROOM, &err), &err);
    struct kernel_move_args a = {
        r->pieces, n, r->from + shift, r->to + shift, digest ? r->digests : 0, cast
    };
    t_ok(kernel_move_start(gpu, r->g, r->s, &a, &err), &err);
    back(r, got, r->to + shift, ROOM);
    back(r, sum, r->digests, sizeof(sum));
    t_mem_eq(got, wanted, ROOM, "%s, cast %d, shifted by %u", what, cast, shift);
    t_mem_eq(sum, want, sizeof(sum), "digests: %s, cast %d, shifted by %u", what, cast, shift);
    if (cast != KERNEL_NO_CAST || !digest)
        return;
    memset(sum, 0, sizeof(sum)); /* digests alone: the same, and nothing is written */
    sum[0][0] = 1, sum[0][1] = 2;
    copy(r, r->digests, sum, sizeof(sum));
    t_ok(gpu->fill(r->s, r->to + shift, 0x11, ROOM, &err), &err);
    a.to = 0;
    t_ok(kernel_move_start(gpu, r->g, r->s, &a, &err), &err);
    back(r, got, r->to + shift, ROOM);
    back(r, sum, r->digests, sizeof(sum));
    t_mem_eq(sum, want, sizeof(sum), "digests alone: %s, shifted by %u", what, shift);
    for (size_t i = 0; i < ROOM; i++)
        t_true(got[i] == 0x11, "digests alone wrote to byte %zu", i);
}

static void device_moves_as_plain(void **state)
{
    static struct table t;
    uint64_t seed = 21;
    struct rig r;

    (void)state;
    rig_open(&r);
    for (unsigned round = 0; round < 90; round++) {
        enum kernel_cast cast = round % 3;
        unsigned align = 1u << round / 3 % 6,
                 shift = align < 16 && cast == KERNEL_NO_CAST ? round % 16 : 0;

        random_table(&t, &seed, cast, align);
        same_as_plain(&r, &t, cast, shift, round % 7 != 0, "random pieces");
    }
    rig_close(&r);
}

static void device_moves_every_size_and_alignment(void **state)
{
    static struct table t;
    struct rig r;

    (void)state;
    rig_open(&r);
    for (unsigned start = 0; start < 17;
         start++) /* a piece a size, each one begins start bytes past 16 */
        for (unsigned base = 1; base < 560; base += PIECES) {
            uint64_t at = 0;

            for (t.n = 0; t.n < PIECES; t.n++) {
                uint64_t bytes = base + t.n;

                t.piece[t.n] = (struct kernel_piece){ .from_off = at + start,
                                                      .to_off = at + (start * 7) % 16,
                                                      .first_byte = start,
                                                      .run_bytes = bytes,
                                                      .rows = 1,
                                                      .tensor = (uint32_t)t.n % TENSORS };
                at += 640;
            }
            same_as_plain(&r, &t, KERNEL_NO_CAST, 0, true, "every size");
        }
    for (unsigned lines = 1; lines < 5;
         lines++) { /* around the stretch of a warp, and of a piece */
        uint64_t
            sizes[] = { 8192, 8192 - 16, 8192 + 16, 131072, 131072 + 256, 131072 - 16, 300000 },
            at = 0;

        for (t.n = 0; t.n < FL_LEN(sizes); t.n++) {
            t.piece[t.n] = (struct kernel_piece){ .from_off = at,
                                                  .to_off = at,
                                                  .first_byte = 256 * lines,
                                                  .run_bytes = sizes[t.n],
                                                  .rows = 1,
                                                  .tensor = (uint32_t)t.n };
            at += (sizes[t.n] + 255) / 256 * 256;
        }
        same_as_plain(&r, &t, KERNEL_NO_CAST, 0, true, "around a stretch");
    }
    rig_close(&r);
}

static void device_casts_every_kind_of_number(void **state)
{
    static const uint32_t special[] = { 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff,
                                        0x477ff000, 0x477fefff, 0x33000000, 0x33000001, 0x32ffffff,
                                        0x387fffff, 0x38800000, 0x00000001, 0x807fffff, 0x3f808000,
                                        0x3f818000, 0x3f801000, 0x3f803000, 0x7f7fffff, 0x00000000,
                                        0x80000000 };
    static struct table t;
    uint64_t seed = 77, bytes = 1 << 20;
    struct rig r;

    (void)state;
    rig_open(&r);
    for (size_t i = 0; i < bytes / 4; i++) {
        uint32_t x = i < 4096 ? special[i % FL_LEN(special)] : (uint32_t)t_random(&seed);

        if (i % 3 == 1) /* where f16 has its subnormals and its end */
            x = (x & 0x807fffff) | (uint32_t)(96 + x % 50) << 23;
        memcpy(from + 4 * i, &x, sizeof(x));
    }
    t.n = 2;
    t.piece[0] = (struct kernel_piece){ .run_bytes = bytes / 4, .rows = 1 };
    t.piece[1] = (struct kernel_piece){ .from_off = bytes / 2 + 4,
                                        .to_off = bytes / 2 + 2,
                                        .first_byte = 2,
                                        .rows = 1,
                                        .tensor = 1,
                                        .run_bytes = bytes / 4 - 6 };
    same_as_plain(&r, &t, KERNEL_F32_TO_BF16, 0, true, "kinds of numbers");
    same_as_plain(&r, &t, KERNEL_F32_TO_F16, 0, true, "kinds of numbers");
    fill(from, ROOM, 1);
    rig_close(&r);
}

static void device_sees_changed_blocks(void **state)
{
    static const uint32_t blocks[] = { 1, 3, 16, 64, 100, 256, 4096, 65536, 1 << 20 };
    static uint8_t want[ROOM], flags[ROOM];
    uint64_t seed = 13;
    struct rig r;

    (void)state;
    rig_open(&r);
    for (size_t b = 0; b < FL_LEN(blocks); b++)
        for (unsigned shift = 0; shift < 17; shift += b % 2 ? 1 : 16) {
            uint64_t bytes = 200000 + shift * 3, n = (bytes + blocks[b] - 1) / blocks[b];

            memcpy(got, from, bytes);
            for (unsigned i = 0; i < 6; i++)
                got[i == 0 ? bytes - 1 : t_random(&seed) % bytes] ^= 0x80;
            copy(&r, r.from + shift, from, bytes);
            copy(&r, r.to, got, bytes);
            kernel_changed(from, got, bytes, blocks[b], want);
            struct kernel_changed_args a = { r.from + shift, r.to, bytes, blocks[b], r.flags };
            t_ok(kernel_changed_start(gpu, r.g, r.s, &a, &err), &err);
            back(&r, flags, r.flags, n);
            t_mem_eq(flags, want, n, "blocks of %u, shifted by %u", blocks[b], shift);
        }
    struct kernel_changed_args none = { r.from, r.to, 10, 0, r.flags };
    t_refused(kernel_changed_start(gpu, r.g, r.s, &none, &err), FL_INVALID, &err);
    rig_close(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(casts_round_to_the_nearest),
        cmocka_unit_test(what_is_no_number_stays_none),
        cmocka_unit_test(plain_moves_what_the_table_says),
        cmocka_unit_test(cut_pieces_are_the_same_bytes),
        cmocka_unit_test(all_rows_are_cut),
        cmocka_unit_test(plain_sees_changed_blocks),
        cmocka_unit_test(device_moves_as_plain),
        cmocka_unit_test(device_moves_every_size_and_alignment),
        cmocka_unit_test(device_casts_every_kind_of_number),
        cmocka_unit_test(device_sees_changed_blocks),
    };
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;

    fill(from, ROOM, 1);
    if (gpu_pick(&gpu, &err) != FL_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    if (gpu->list(all, &n, &err) != FL_OK || n == 0 ||
        (gpu == &gpu_cuda && !kernel_has_device_code())) {
        printf("1..0 # SKIP %s\n",
               n > 0 && err.status == FL_OK ? "this build has no device code" : "no device");
        return 0;
    }
    info = all[0];
    return t_run("move", tests);
}
