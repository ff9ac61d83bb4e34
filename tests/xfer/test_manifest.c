/* manifests: what is refused, what travels, and digests that do not depend on who holds what */
#include <stdlib.h>
#include "tests/t.h"
#include "transport/xfer/manifest.h"

enum { MOST = 3 };
struct row {
    const char *name;
    struct xfer_tensor tensors[MOST];
    struct xfer_piece pieces[MOST];
    uint64_t mem_bytes[MOST];
    size_t n_tensors, n_pieces, n_mems;
    const char *says; /* NULL: good */
};
#define A { "a", FL_BF16, 2, { 4, 6 } } /* 48 bytes */
#define B { "b", FL_F32, 1, { 5 } }     /* 20 bytes */
#define ALL_A { 0, 0, 0, { { 0 }, { 4, 6 } } }
/* clang-format off */
static const struct row rows[] = {
    { "nothing", { { 0 } }, { { 0 } }, { 0 }, 0, 0, 0, NULL },
    { "two", { A, B }, { ALL_A, { 1, 0, 48, { { 0 }, { 5 } } } }, { 68 }, 2, 2, 1, NULL },
    { "a tensor without a piece", { A, B }, { ALL_A }, { 48 }, 2, 1, 1, NULL },
    { "two memories", { A, B }, { ALL_A, { 1, 1, 0, { { 0 }, { 5 } } } }, { 48, 20 }, 2, 2, 2, NULL },
    { "a scalar", { { "s", FL_I64, 0, { 0 } } }, { { 0, 0, 8, { { 0 }, { 0 } } } }, { 16 }, 1, 1, 1, NULL },
    { "the same box twice", { A }, { ALL_A, { 0, 0, 48, { { 0 }, { 4, 6 } } } }, { 96 }, 1, 2, 1, NULL },
    { "out of order", { B, A }, { { 0 } }, { 0 }, 2, 0, 0, "sorted" },
    { "a name twice", { A, A }, { { 0 } }, { 0 }, 2, 0, 0, "sorted" },
    { "no name", { { "", FL_U8, 1, { 1 } } }, { { 0 } }, { 0 }, 1, 0, 0, "0 bytes" },
    { "no such dtype", { { "a", (enum fl_dtype)99, 1, { 1 } } }, { { 0 } }, { 0 }, 1, 0, 0, "dtype 99" },
    { "nine dimensions", { { "a", FL_U8, 9, { 1 } } }, { { 0 } }, { 0 }, 1, 0, 0, "9 dimensions" },
    { "a tensor of no bytes, where another one begins", { A, { "b", FL_U8, 2, { 3, 0 } } }, { ALL_A, { 1, 0, 0, { { 0 }, { 3, 0 } } } }, { 48 }, 2, 2, 1, NULL },
    { "a tensor of no bytes, at the end", { A, { "b", FL_F32, 1, { 0 } } }, { ALL_A, { 1, 0, 48, { { 0 }, { 0 } } } }, { 48 }, 2, 2, 1, NULL },
    { "no bytes at all", { { "a", FL_U8, 2, { 3, 0 } } }, { { 0, 0, 0, { { 0 }, { 3, 0 } } } }, { 0 }, 1, 1, 1, "has a byte" },
    { "no bytes, past its memory", { { "a", FL_U8, 1, { 0 } } }, { { 0, 0, 9, { { 0 }, { 0 } } } }, { 8 }, 1, 1, 1, "0 bytes at 9" },
    { "no bytes, a box outside", { { "a", FL_U8, 2, { 3, 0 } } }, { { 0, 0, 0, { { 0 }, { 4, 0 } } } }, { 8 }, 1, 1, 1, "4 from 0" },
    { "no bytes, and a size that wraps", { { "a", FL_U8, 3, { UINT64_MAX, 0, 4 } } }, { { 0 } }, { 0 }, 1, 0, 0, "too large" },
    { "a size that wraps", { { "a", FL_U8, 2, { UINT64_MAX, 4 } } }, { { 0 } }, { 0 }, 1, 0, 0, "too large" },
    { "a piece of no tensor", { A }, { { 1, 0, 0, { { 0 }, { 4, 6 } } } }, { 48 }, 1, 1, 1, "tensor 1 of 1" },
    { "a piece in no memory", { A }, { { 0, 1, 0, { { 0 }, { 4, 6 } } } }, { 48 }, 1, 1, 1, "memory 1 of 1" },
    { "a box that is too long", { A }, { { 0, 0, 0, { { 0, 1 }, { 4, 6 } } } }, { 99 }, 1, 1, 1, "6 from 1" },
    { "a box that wraps", { A }, { { 0, 0, 0, { { 2 }, { UINT64_MAX, 6 } } } }, { 99 }, 1, 1, 1, "dimension 0" },
    { "an empty box", { A }, { { 0, 0, 0, { { 0 }, { 4, 0 } } } }, { 99 }, 1, 1, 1, "0 from 0" },
    { "past the memory", { A }, { { 0, 0, 2, { { 0 }, { 4, 6 } } } }, { 48 }, 1, 1, 1, "48 bytes at 2" },
    { "an offset that wraps", { A }, { { 0, 0, UINT64_MAX - 1, { { 0 }, { 4, 6 } } } }, { 48 }, 1, 1, 1, "48 bytes at" },
    { "half an element off", { A }, { { 0, 0, 1, { { 0 }, { 4, 6 } } } }, { 99 }, 1, 1, 1, "multiple of bf16" },
    { "over each other", { A, B }, { ALL_A, { 1, 0, 44, { { 0 }, { 5 } } } }, { 99 }, 2, 2, 1, "overlap" },
    { "over each other, other order", { A, B }, { { 1, 0, 44, { { 0 }, { 5 } } }, ALL_A }, { 99 }, 2, 2, 1, "overlap" },
};
/* clang-format on */

static struct xfer_manifest manifest_of(const struct row *r)
{
    return (struct xfer_manifest){ .party = 3, .who = { .attempt = 7 }, .tensors = r->tensors, .pieces = r->pieces,
                                   .mem_bytes = r->mem_bytes, .n_tensors = r->n_tensors, .n_pieces = r->n_pieces,
                                   .n_mems = r->n_mems };
}

static void sealed_or_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct xfer_manifest m = manifest_of(&rows[i]), *back = NULL;
        struct fl_err err = { 0 };
        void *image;
        size_t n;

        if (rows[i].says) {
            printf("# %s\n", rows[i].name);
            t_refused(xfer_manifest_seal(&m, &err), FL_INVALID, &err);
            t_has(err.text, rows[i].says);
            t_true(m.hash[0] == 0 && m.hash[1] == 0, "untouched");
            if (rows[i].tensors[0].ndim > FL_DIMS || rows[i].pieces[0].tensor >= rows[i].n_tensors)
                continue; /* has no image */
            t_ok(xfer_manifest_encode(&m, &image, &n, NULL), &err);
            t_true(xfer_manifest_decode(image, n, &back, NULL) != FL_OK, "%s came through", rows[i].name);
            free(image);
            continue;
        }
        t_ok(xfer_manifest_seal(&m, &err), &err);
        t_ok(xfer_manifest_encode(&m, &image, &n, &err), &err);
        t_ok(xfer_manifest_decode(image, n, &back, &err), &err);
        t_mem_eq(back->hash, m.hash, sizeof(m.hash), "%s", rows[i].name);
        t_int_eq(back->party, 3);
        t_int_eq(back->who.attempt, 7);
        for (size_t t = 0; t < m.n_tensors; t++)
            t_str_eq(back->tensors[t].name, m.tensors[t].name);
        for (size_t cut = 0; cut < n; cut++) {
            struct xfer_manifest *none = NULL;
            void *some = malloc(cut + 1);

            memcpy(some, image, cut);
            t_int_eq(xfer_manifest_decode(some, cut, &none, NULL), FL_CORRUPT, "%zu of %zu bytes", cut, n);
            free(some);
        }
        free(back);
        free(image);
    }
}

static void hashes_differ(void **state)
{
    struct xfer_manifest a = manifest_of(&rows[1]), b = a;
    struct xfer_tensor other[2];

    (void)state;
    memcpy(other, a.tensors, sizeof(other));
    other[1].dtype = FL_I32;
    b.tensors = other;
    t_ok(xfer_manifest_seal(&a, NULL), NULL);
    t_ok(xfer_manifest_seal(&b, NULL), NULL);
    t_true(memcmp(a.hash, b.hash, sizeof(a.hash)) != 0, "another dtype of the same size");
    b = a;
    b.who.attempt++;
    t_ok(xfer_manifest_seal(&b, NULL), NULL);
    t_true(memcmp(a.hash, b.hash, sizeof(a.hash)) != 0, "another attempt");
}

static void lines(void **state)
{
    char line[40];
    const struct xfer_tensor t = { "layers.0.q_proj", FL_BF16, 2, { 2048, 1024 } }, s = { "step", FL_I64, 0, { 0 } };

    (void)state;
    t_str_eq(xfer_tensor_line(&t, line, sizeof(line)), "layers.0.q_proj bf16 [2048, 1024]");
    t_str_eq(xfer_tensor_line(&s, line, sizeof(line)), "step i64 []");
    t_int_eq(strlen(xfer_tensor_line(&t, line, 20)), 19);
}

/* Any cut of a tensor into boxes gives its digest; each box lies by itself, row-major. */
static void boxes_sum_to_the_tensor(void **state)
{
    static unsigned char whole[24 * 20 * 12 * 4], part[sizeof(whole)];
    uint64_t seed = 21, n = 0;

    (void)state;
    for (size_t i = 0; i < sizeof(whole); i++)
        whole[i] = (unsigned char)(t_random(&seed) >> 33);
    for (unsigned round = 0; round < 60; round++) {
        struct xfer_tensor t = { .name = "t", .dtype = round % 2 ? FL_F32 : FL_BF16, .ndim = 3, .shape = { 24, 20, 12 } };
        uint64_t item = xfer_dtype_bytes(t.dtype), want[2] = { 0 }, got[2] = { 0 }, cut[3][3];
        struct xfer_box all = xfer_box_whole(&t);

        xfer_digest_piece(want, &t, &all, whole);
        for (unsigned d = 0; d < 3; d++) { /* one cut in each dimension: eight boxes */
            cut[d][0] = 0;
            cut[d][1] = 1 + t_random(&seed) % (t.shape[d] - 1);
            cut[d][2] = t.shape[d];
        }
        for (unsigned k = 8; k-- > 0;) {
            struct xfer_box b = { .at = { 0 } };

            for (unsigned d = 0; d < 3; d++) {
                b.at[d] = cut[d][k >> d & 1];
                b.len[d] = cut[d][(k >> d & 1) + 1] - b.at[d];
            }
            n = 0;
            for (uint64_t x = 0; x < b.len[0]; x++)
                for (uint64_t y = 0; y < b.len[1]; y++, n += b.len[2])
                    memcpy(part + n * item, whole + (((b.at[0] + x) * 20 + b.at[1] + y) * 12 + b.at[2]) * item,
                           b.len[2] * item);
            xfer_digest_piece(got, &t, &b, part);
        }
        t_mem_eq(got, want, sizeof(want), "round %u", round);
    }
}

static void folding(void **state)
{
    const uint64_t a[2] = { 5, 6 }, b[2] = { 7, 8 };
    uint64_t one[2] = { 0 }, other[2] = { 0 }, swapped[2] = { 0 };

    (void)state;
    xfer_digest_fold(one, a, 0);
    xfer_digest_fold(one, b, 1);
    xfer_digest_fold(other, b, 1);
    xfer_digest_fold(other, a, 0);
    t_mem_eq(one, other, sizeof(one), "in any order");
    xfer_digest_fold(swapped, b, 0);
    xfer_digest_fold(swapped, a, 1);
    t_true(one[0] != swapped[0] && one[1] != swapped[1], "but each at its own index");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(sealed_or_refused),
        cmocka_unit_test(hashes_differ),
        cmocka_unit_test(lines),
        cmocka_unit_test(boxes_sum_to_the_tensor),
        cmocka_unit_test(folding),
    };

    return t_run("manifest", tests);
}
