/* what is written is read; what is hostile is refused, and says why */
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "tests/t.h"
#include "transport/fmt/safetensors.h"

/* ---- hostile images ---- */

struct image {
    const char *name, *header, *says;
    size_t data_bytes;
};
static const struct image good[] = {
    { "nothing", "{}", NULL, 0 },
    { "one", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}", NULL, 24 },
    { "scalar", "{\"a\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[0,2]}}", NULL, 2 },
    { "empty dimension", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4,0],\"data_offsets\":[0,0]}}", NULL,
      0 },
    { "any order, spaces, metadata",
      "{\"z\":{\"shape\":[1],\"dtype\":\"U8\",\"data_offsets\":[4,5]}, "
      "\"__metadata__\":{\"k\":\"v\"},"
      "\"b\":{\"dtype\":\"I32\",\"data_offsets\":[0,4],\"shape\":[1]}}   ",
      NULL, 5 },
    { "a dtype that is only carried",
      "{\"a\":{\"dtype\":\"F4\",\"shape\":[6],\"data_offsets\":[0,3]}}", NULL, 3 },
    { "an empty one at the seam",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\","
      "\"shape\":[0],"
      "\"data_offsets\":[2,2]},\"c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
      NULL, 3 },
    { "names in UTF-8", "{\"gr\\u00fcn\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
      NULL, 1 },
};
static const struct image hostile[] = {
    { "no JSON", "{a}", "column", 0 },
    { "not an object", "[]", "does not begin", 0 },
    { "behind the header", "{} x", "column", 0 },
    { "a key twice",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\","
      "\"shape\":[1],"
      "\"data_offsets\":[0,1]}}",
      "duplicate", 1 },
    { "not UTF-8", "{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "0xff",
      1 },
    { "a NUL in a name", "{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
      "column", 1 },
    { "no name", "{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "1 to 512", 1 },
    { "entry is a number", "{\"a\":1}", "must have", 0 },
    { "something else in it",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"more\":1}}", "must have",
      1 },
    { "no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", "must have", 1 },
    { "an unknown dtype", "{\"a\":{\"dtype\":\"F7\",\"shape\":[1],\"data_offsets\":[0,1]}}", "F7",
      1 },
    { "a dtype that is a number", "{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,1]}}",
      "must have", 1 },
    { "nine dimensions",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}",
      "at most 8", 1 },
    { "a negative dimension", "{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}",
      "whole number", 1 },
    { "half a dimension", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}",
      "whole number", 1 },
    { "a size that wraps",
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,4],\"data_offsets\":[0,0]}}",
      "a is F32", 0 },
    { "three offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}",
      "data_offsets", 1 },
    { "an offset that is a text",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[\"0\",1]}}", "data_offsets", 1 },
    { "an offset of 2^70",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1180591620717411303424]}}",
      "column", 1 },
    { "offsets the wrong way", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}",
      "1 to 0", 1 },
    { "past the end", "{\"a\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[0,9]}}", "0 to 9",
      8 },
    { "shape and bytes differ", "{\"a\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[0,8]}}",
      "F16 [3]", 8 },
    { "half bytes", "{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", "F4 [3]",
      1 },
    { "overlap",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\","
      "\"shape\":[4],"
      "\"data_offsets\":[2,6]}}",
      "begins at 2", 6 },
    { "a hole",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"U8\","
      "\"shape\":[1],"
      "\"data_offsets\":[2,3]}}",
      "begins at 2", 3 },
    { "a hole at the front", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
      "begins at 1", 2 },
    { "bytes left over", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
      "end at 1 of 2", 2 },
    { "metadata that is no text", "{\"__metadata__\":{\"k\":1}}", "__metadata__ k", 0 },
    { "metadata that is a list", "{\"__metadata__\":[]}", "__metadata__", 0 },
};

static unsigned char *build(const struct image *im, size_t *n)
{
    uint64_t len = strlen(im->header);
    unsigned char *out = malloc(8 + len + im->data_bytes);

    memcpy(out, &len, 8);
    memcpy(out + 8, im->header, len);
    memset(out + 8 + len, 0x11, im->data_bytes);
    *n = 8 + len + im->data_bytes;
    return out;
}

static void images(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(good) + FL_LEN(hostile); i++) {
        const struct image *im = i < FL_LEN(good) ? &good[i] : &hostile[i - FL_LEN(good)];
        struct st_reader *r = NULL;
        struct fl_err err = { 0 };
        size_t n;
        unsigned char *image = build(im, &n);
        enum fl_status st = st_read_image(image, n, &r, &err);

        if (!im->says) {
            t_ok(st, &err);
            t_true(st_at(r, st_count(r)) == NULL);
        } else {
            printf("# %s: %s\n", im->name, err.text);
            t_refused(st, FL_CORRUPT, &err);
            t_has(err.text, im->says);
        }
        st_reader_destroy(r);
        free(image);
    }
}

/* Lengths that lie, and every beginning of a good image. */
static void lengths(void **state)
{
    size_t n;
    unsigned char *image = build(&good[1], &n);
    uint64_t lies[] = { 0, 1, n - 7, n, UINT64_MAX, UINT64_MAX - 7, 100000000, ST_MAX_HEADER + 1 };
    struct st_reader *r = NULL;

    (void)state;
    for (size_t cut = 0; cut < n; cut++) {
        unsigned char *some = malloc(cut + 1);

        memcpy(some, image, cut);
        t_int_eq(st_read_image(some, cut, &r, NULL), FL_CORRUPT, "%zu bytes", cut);
        free(some);
    }
    for (size_t i = 0; i < FL_LEN(lies); i++) {
        memcpy(image, &lies[i], 8);
        t_int_eq(st_read_image(image, n, &r, NULL), FL_CORRUPT, "length %llu",
                 (unsigned long long)lies[i]);
    }
    free(image);
    t_true(r == NULL);
}

static void deep(void **state)
{
    enum { DEPTH = 5000 };
    struct image im = { .header = NULL };
    char *text = malloc(2 * DEPTH + 32);
    struct st_reader *r = NULL;
    struct fl_err err = { 0 };
    size_t n;

    (void)state;
    strcpy(text, "{\"a\":");
    memset(text + 5, '[', DEPTH);
    memset(text + 5 + DEPTH, ']', DEPTH);
    strcpy(text + 5 + 2 * DEPTH, "}");
    im.header = text;
    unsigned char *image = build(&im, &n);

    t_refused(st_read_image(image, n, &r, &err), FL_CORRUPT, &err);
    free(image);
    free(text);
}

/* ---- there and back ---- */

static const uint16_t half[6] = { 1, 2, 3, 4, 5, 6 };
static const float f32[2] = { 1.5f, -2 };
static const uint8_t u8[3] = { 7, 8, 9 };
static const int64_t i64[1] = { -1 };
static const struct st_entry entries[] = {
    { "b.weight", FL_BF16, 2, { 2, 3 }, half }, { "a \"quoted\"\n", FL_U8, 1, { 3 }, u8 },
    { "count", FL_I64, 0, { 0 }, i64 },         { "none", FL_F32, 2, { 3, 0 }, NULL },
    { "gr\xc3\xbcn", FL_F32, 1, { 2 }, f32 },
};
static const struct st_meta meta[] = { { "format", "pt" }, { "k", "v \"x\"" } };

static void same(const struct st_reader *r)
{
    static const uint64_t bytes[] = { 12, 3, 8, 0, 8 };

    t_int_eq(st_count(r), FL_LEN(entries));
    for (size_t i = 0; i < FL_LEN(entries); i++) {
        const struct st_tensor *t;
        struct fl_err err = { 0 };

        t_ok(st_need(r, entries[i].name, entries[i].dtype, entries[i].ndim, entries[i].shape, &t,
                     &err),
             &err);
        t_int_eq(t->bytes, bytes[i]);
        t_true(bytes[i] == 0 || memcmp(t->data, entries[i].data, bytes[i]) == 0, "%s",
               entries[i].name);
        t_true((uintptr_t)t->data % (bytes[i] ? bytes[i] / (i == 0   ? 6
                                                            : i == 1 ? 3
                                                            : i == 4 ? 2
                                                                     : 1)
                                              : 1) ==
                   0,
               "aligned");
    }
    for (size_t i = 1; i < st_count(r); i++)
        t_true(strcmp(st_at(r, i - 1)->name, st_at(r, i)->name) < 0, "sorted");
}

static void image_there_and_back(void **state)
{
    struct fl_err err = { 0 };
    struct st_reader *r;
    uint64_t header;
    void *image;
    size_t n;

    (void)state;
    t_ok(st_write_image(entries, FL_LEN(entries), meta, 2, &image, &n, &err), &err);
    memcpy(&header, image, 8);
    t_int_eq((8 + header) % 64, 0, "data begins aligned");
    t_ok(st_read_image(image, n, &r, &err), &err);
    same(r);
    t_str_eq(st_meta(r, "k"), "v \"x\"");
    t_true(st_meta(r, "other") == NULL);
    t_int_eq(st_meta_count(r), 2);
    t_true(st_meta_at(r, 1).value && !st_meta_at(r, 2).key);
    st_reader_destroy(r);
    free(image);
}

static void file_there_and_back(void **state)
{
    struct fl_err err = { 0 };
    struct st_reader *r;
    const struct st_tensor *t;
    const char *path = t_path("one.safetensors");

    (void)state;
    t_ok(st_write_file(path, entries, FL_LEN(entries), meta, 2, &err), &err);
    t_ok(st_read_file(path, &r, &err), &err);
    same(r);
    t_refused(st_need(r, "b.weight", FL_F16, 2, (uint64_t[]){ 2, 3 }, &t, &err), FL_INVALID, &err);
    t_has(err.text, "BF16 [2, 3]");
    t_has(err.text, "F16 [2, 3]");
    t_refused(st_need(r, "b.weight", FL_BF16, 2, (uint64_t[]){ 3, 2 }, &t, &err), FL_INVALID, &err);
    t_refused(st_need(r, "c", FL_F16, 1, (uint64_t[]){ 3 }, &t, &err), FL_NOT_FOUND, &err);
    st_reader_destroy(r);
}

static void parts_in_any_order(void **state)
{
    struct fl_err err = { 0 };
    struct st_writer *w;
    struct st_reader *r;
    const char *path = t_path("parts.safetensors");

    (void)state;
    t_ok(st_writer_create(path, entries, FL_LEN(entries), NULL, 0, &w, &err), &err);
    t_ok(st_write_part(w, 4, f32, 4, &err), &err);
    t_ok(st_write_part(w, 0, half, 12, &err), &err);
    t_ok(st_write_part(w, 4, f32 + 1, 4, &err), &err);
    t_refused(st_write_part(w, 4, f32, 1, &err), FL_INVALID, &err);
    t_refused(st_write_part(w, 9, f32, 1, &err), FL_INVALID, &err);
    t_ok(st_write_part(w, 1, u8, 3, &err), &err);
    t_refused(st_writer_finish(w, &err), FL_INVALID, &err);
    t_has(err.text, "0 of 8 bytes");
    st_writer_destroy(w);
    t_true(access(path, F_OK) < 0, "an unfinished file has no name");
    t_ok(st_writer_create(path, entries, FL_LEN(entries), NULL, 0, &w, &err), &err);
    t_ok(st_write_part(w, 2, i64, 8, &err), &err);
    t_ok(st_write_part(w, 1, u8, 3, &err), &err);
    t_ok(st_write_part(w, 4, f32, 8, &err), &err);
    t_ok(st_write_part(w, 0, half, 12, &err), &err);
    t_true(access(path, F_OK) < 0, "nor one that is not finished");
    t_ok(st_writer_finish(w, &err), &err);
    st_writer_destroy(w);
    t_ok(st_read_file(path, &r, &err), &err);
    same(r);
    st_reader_destroy(r);
}

static void cannot_be_written(void **state)
{
    struct fl_err err = { 0 };
    struct st_entry twice[] = { entries[0], entries[0] }, wild = { "\xff", FL_U8, 1, { 1 }, u8 },
                    huge = { "h", FL_F32, 2, { UINT32_MAX, UINT32_MAX }, u8 },
                    reserved = { "__metadata__", FL_U8, 1, { 1 }, u8 };
    void *image;
    size_t n;

    (void)state;
    t_refused(st_write_image(twice, 2, NULL, 0, &image, &n, &err), FL_INVALID, &err);
    t_refused(st_write_image(&wild, 1, NULL, 0, &image, &n, &err), FL_INVALID, &err);
    t_refused(st_write_image(&huge, 1, NULL, 0, &image, &n, &err), FL_INVALID, &err);
    t_refused(st_write_image(&reserved, 1, NULL, 0, &image, &n, &err), FL_INVALID, &err);
}

/* ---- folders ---- */

static const char *new_folder(const char *name)
{
    const char *dir = t_path(name);
    struct fl_err err = { 0 };

    t_ok(fl_tree_remove(dir, &err), &err);
    t_ok(fl_mkdirs(dir, &err), &err);
    return dir;
}

static void put(const char *dir, const char *file, const char *text)
{
    char path[FL_PATH_MAX];
    struct fl_err err = { 0 };

    snprintf(path, sizeof(path), "%s/%s", dir, file);
    t_ok(fl_file_write(path, 0600, text, strlen(text), &err), &err);
}

static void folders(void **state)
{
    static const uint64_t limits[] = { 0, 1, 12, 20 };
    static const size_t files[] = { 1, 5, 3, 2 };

    (void)state;
    for (size_t i = 0; i < FL_LEN(limits); i++) {
        const char *dir = new_folder("folder");
        struct fl_err err = { 0 };
        struct st_reader *r;
        char path[FL_PATH_MAX];

        t_ok(st_write_folder(dir, entries, FL_LEN(entries), meta, 2, limits[i], &err), &err);
        snprintf(path, sizeof(path), "%s/model-00001-of-%05zu.safetensors", dir, files[i]);
        t_true((access(path, F_OK) == 0) == (files[i] > 1), "%s", path);
        t_ok(st_read_folder(dir, &r, &err), &err);
        same(r);
        t_str_eq(st_meta(r, "format"), "pt");
        if (files[i] > 1)
            t_str_eq(st_meta(r, "total_size"), "31");
        st_reader_destroy(r);
    }
}

struct index {
    const char *name, *text, *says;
};
static const struct index indexes[] = {
    /* one.safetensors has a, two.safetensors has b and c */
    { "no map", "{\"metadata\":{}}", "weight_map" },
    { "not JSON", "{", "column" },
    { "leaves the folder", "{\"weight_map\":{\"a\":\"../one.safetensors\"}}", "no file name" },
    { "an absolute path", "{\"weight_map\":{\"a\":\"/one.safetensors\"}}", "no file name" },
    { "a hidden file", "{\"weight_map\":{\"a\":\".safetensors\"}}", "no file name" },
    { "another kind of file", "{\"weight_map\":{\"a\":\"one.bin\"}}", "no file name" },
    { "a number", "{\"weight_map\":{\"a\":1}}", "no file name" },
    { "a missing file", "{\"weight_map\":{\"a\":\"none.safetensors\"}}", "none.safetensors" },
    { "a tensor in another file",
      "{\"weight_map\":{\"a\":\"two.safetensors\",\"b\":\"two.safetensors\",\"c\":\"one."
      "safetensors\"}}",
      "tensor a" },
    { "a tensor that is nowhere",
      "{\"weight_map\":{\"a\":\"one.safetensors\",\"x\":\"one.safetensors\"}}", "2 tensors" },
    { "a tensor that is not listed",
      "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}}", "2 tensors" },
    { "a tensor twice", "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"dup.safetensors\"}}",
      "tensor a is in" },
};

static void hostile_indexes(void **state)
{
    const struct st_entry a = { "a", FL_U8, 1, { 3 }, u8 },
                          bc[] = { { "b", FL_U8, 1, { 3 }, u8 }, { "c", FL_U8, 1, { 3 }, u8 } };
    const char *dir = new_folder("indexes");
    struct fl_err err = { 0 };
    struct st_reader *r = NULL;
    char path[FL_PATH_MAX];

    (void)state;
    t_refused(st_read_folder(dir, &r, &err), FL_NOT_FOUND, &err);
    snprintf(path, sizeof(path), "%s/one.safetensors", dir);
    t_ok(st_write_file(path, &a, 1, NULL, 0, &err), &err);
    snprintf(path, sizeof(path), "%s/dup.safetensors", dir);
    t_ok(st_write_file(path, &a, 1, NULL, 0, &err), &err);
    snprintf(path, sizeof(path), "%s/two.safetensors", dir);
    t_ok(st_write_file(path, bc, 2, NULL, 0, &err), &err);
    for (size_t i = 0; i < FL_LEN(indexes); i++) {
        put(dir, "model.safetensors.index.json", indexes[i].text);
        enum fl_status st = st_read_folder(dir, &r, &err);

        printf("# %s: %s\n", indexes[i].name, err.text);
        t_refused(st, FL_CORRUPT, &err);
        t_has(err.text, indexes[i].says);
        t_true(r == NULL);
    }
    put(dir, "model.safetensors.index.json",
        "{\"metadata\":{\"n\":7,\"s\":\"t\",\"f\":1.5},\"weight_map\":{\"a\":\"one.safetensors\","
        "\"b\":\"two.safetensors\",\"c\":\"two.safetensors\"}}");
    t_ok(st_read_folder(dir, &r, &err), &err);
    t_str_eq(st_meta(r, "n"), "7");
    t_true(st_meta(r, "f") == NULL);
    t_int_eq(st_count(r), 3);
    st_reader_destroy(r);
}

static void not_files(void **state)
{
    struct fl_err err = { 0 };
    struct st_reader *r = NULL;

    (void)state;
    t_refused(st_read_file(t_path("nowhere"), &r, &err), FL_NOT_FOUND, &err);
    t_refused(st_read_file(t_tmp(), &r, &err), FL_INVALID, &err);
    t_int_eq(mkfifo(t_path("fifo"), 0600), 0);
    t_refused(st_read_file(t_path("fifo"), &r, &err), FL_INVALID, &err);
}

/* Whatever fails while a new file is written, the old one stays whole and nothing is left beside
 * it. */
static void faults_keep_the_old_file(void **state)
{
    const char *dir = new_folder("faults");
    struct fl_err err = { 0 };
    char path[FL_PATH_MAX], tmp[FL_PATH_MAX + 4];
    int fds = t_open_fds();
    enum fl_status st = FL_AGAIN;

    (void)state;
    snprintf(path, sizeof(path), "%s/x.safetensors", dir);
    snprintf(tmp, sizeof(tmp), "%s.tmp", path);
    t_ok(st_write_file(path, entries, 1, NULL, 0, &err), &err);
    for (unsigned nth = 1; st != FL_OK; nth++) {
        struct st_reader *r;

        fl_fault_arm(nth);
        st = st_write_file(path, entries, FL_LEN(entries), meta, 2, &err);
        fl_fault_disarm();
        t_true(access(tmp, F_OK) < 0, "nth=%u", nth);
        t_int_eq(t_open_fds(), fds, "nth=%u", nth);
        t_ok(st_read_file(path, &r, &err), &err);
        t_int_eq(st_count(r), st == FL_OK ? FL_LEN(entries) : 1, "nth=%u", nth);
        st_reader_destroy(r);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(images),
        cmocka_unit_test(lengths),
        cmocka_unit_test(deep),
        cmocka_unit_test(image_there_and_back),
        cmocka_unit_test(file_there_and_back),
        cmocka_unit_test(parts_in_any_order),
        cmocka_unit_test(cannot_be_written),
        cmocka_unit_test(folders),
        cmocka_unit_test(hostile_indexes),
        cmocka_unit_test(not_files),
        cmocka_unit_test(faults_keep_the_old_file),
    };

    return t_run("safetensors", tests);
}
