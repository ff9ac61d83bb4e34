/* versions through a folder: what arrives is what was sent, or it is refused and the old copy stays
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/str.h"
#include "tests/t.h"
#include "transport/fmt/delta.h"

enum { TENSORS = 5, VERSIONS = 5, MOST = 3000 };
static const struct st_entry shapes[TENSORS] = {
    { "a", FL_BF16, 2, { 30, 50 }, NULL }, { "b", FL_F32, 1, { 700 }, NULL },
    { "c", FL_U8, 1, { 999 }, NULL },      { "d", FL_I64, 1, { 100 }, NULL },
    { "e", FL_F16, 0, { 0 }, NULL },
};
static unsigned char truth[VERSIONS][TENSORS][MOST];

static uint64_t bytes_of(size_t t)
{
    static const uint64_t bytes[TENSORS] = { 3000, 2800, 999, 800, 2 };

    return bytes[t];
}

/* Few elements change from version to version; c does not change in version 2, nothing does in
 * version 3. */
static void make_truth(void)
{
    uint64_t seed = 9;

    for (size_t v = 0; v < VERSIONS; v++)
        for (size_t t = 0; t < TENSORS; t++)
            for (uint64_t i = 0; i < bytes_of(t); i++) {
                bool first = v == 0, still = v == 3 || (v == 2 && t == 2);

                truth[v][t][i] =
                    first ? (unsigned char)(t_random(&seed) >> 30) : truth[v - 1][t][i];
                if (!first && !still && t_random(&seed) % 40 == 0)
                    truth[v][t][i] ^= 1 + i % 200;
            }
}

static enum fl_status write_version(const char *dir, int v, int base, enum delta_encoding e,
                                    uint64_t file_bytes, struct delta_stats *stats,
                                    struct fl_err *err)
{
    struct delta_source src[TENSORS];
    const struct st_meta extra = { "digest", "abc" };
    struct delta_opts o = { .version = v,
                            .base_version = base,
                            .encoding = e,
                            .file_bytes = file_bytes,
                            .extra = &extra,
                            .n_extra = 1 };

    for (size_t t = 0; t < TENSORS; t++) {
        src[t] =
            (struct delta_source){ .what = shapes[t], .was = base < 0 ? NULL : truth[base][t] };
        src[t].what.data = truth[v][t];
    }
    return delta_write(dir, src, TENSORS, &o, stats, err);
}

static const char *new_folder(const char *name)
{
    const char *dir = t_path(name);
    struct fl_err err = { 0 };

    t_ok(fl_tree_remove(dir, &err), &err);
    t_ok(fl_mkdirs(dir, &err), &err);
    return dir;
}

static void local_is(const char *local, int v)
{
    struct st_reader *r;
    struct fl_err err = { 0 };

    t_int_eq(delta_local_version(local), v);
    t_ok(st_read_folder(local, &r, &err), &err);
    t_int_eq(st_count(r), TENSORS);
    for (size_t t = 0; t < TENSORS; t++) {
        const struct st_tensor *x;

        t_ok(st_need(r, shapes[t].name, shapes[t].dtype, shapes[t].ndim, shapes[t].shape, &x, &err),
             &err);
        t_mem_eq(x->data, truth[v][t], bytes_of(t), "%s in version %d", x->name, v);
    }
    st_reader_destroy(r);
}

struct folder {
    const char *dir;
    uint64_t file_bytes;
    enum delta_encoding encoding;
};

/* 0 is a base; 1 to 4 each from the one before. */
static const char *all_versions(const char *name, enum delta_encoding e, uint64_t file_bytes)
{
    const char *dir = new_folder(name);
    struct fl_err err = { 0 };

    for (int v = 0; v < VERSIONS; v++)
        t_ok(write_version(dir, v, v - 1, e, file_bytes, NULL, &err), &err);
    return dir;
}

static void chains(void **state)
{
    static const int steps[][VERSIONS] = {
        { 0, 1, 2, 3, 4 }, { 4, 4, 4, 4, 4 }, { 0, 2, 2, 4, 4 }, { 1, 3, 4, 4, 4 }
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(steps) * 4; i++) {
        char dir[FL_PATH_MAX], local[FL_PATH_MAX];
        struct fl_err err = { 0 };

        fl_copy(dir, sizeof(dir),
                all_versions("versions", i % 2 ? DELTA_XOR : DELTA_OVERWRITE, i / 2 % 2 ? 400 : 0));
        fl_copy(local, sizeof(local), new_folder("local"));
        t_int_eq(delta_local_version(local), DELTA_NO_BASE);
        for (size_t k = 0; k < VERSIONS; k++) {
            t_ok(delta_pull(dir, local, steps[i / 4][k], &err), &err);
            local_is(local, steps[i / 4][k]);
        }
        t_refused(delta_pull(dir, local, 0, &err), FL_STALE, &err);
        local_is(local, steps[i / 4][VERSIONS - 1]);
    }
}

static void folder_as_the_field_has_it(void **state)
{
    struct fl_err err = { 0 };
    struct delta_stats s;
    const char *dir = new_folder("field");
    char path[FL_PATH_MAX], *text;

    (void)state;
    t_ok(write_version(dir, 0, DELTA_NO_BASE, DELTA_XOR, 0, &s, &err), &err);
    t_int_eq(s.changed, TENSORS);
    t_int_eq(s.written_bytes, 7601);
    t_ok(write_version(dir, 1, 0, DELTA_XOR, 1, &s, &err), &err);
    t_true(s.changed >= 4 && s.written_bytes < s.raw_bytes, "%zu, %llu", s.changed,
           (unsigned long long)s.written_bytes);
    snprintf(path, sizeof(path), "%s/weight_v000001/model-00001-of-%05zu.safetensors", dir,
             s.changed);
    t_int_eq(access(path, F_OK), 0, "%s", path);
    snprintf(path, sizeof(path), "%s/weight_v000001/model.safetensors.index.json", dir);
    t_ok(fl_file_read(path, 100000, &text, NULL, &err), &err);
    t_has(text, "\"version\": 1");
    t_has(text, "\"base_version\": 0");
    t_has(text, "\"delta_encoding\": \"xor\"");
    t_has(text, "\"compression_format\": \"zstd\"");
    t_has(text, "\"checksum_format\": \"xxh3-128\"");
    t_has(text, "\"digest\": \"abc\"");
    t_has(text, "\"a\": \"model-00001-of-");
    free(text);
    struct delta_version *v;

    t_ok(delta_open(dir, 1, &v, &err), &err);
    t_int_eq(delta_base_of(v), 0);
    t_str_eq(delta_meta(v, "digest"), "abc");
    delta_version_destroy(v);
}

static void a_version_is_written_once(void **state)
{
    struct fl_err err = { 0 };
    const char *dir = new_folder("once");
    char path[FL_PATH_MAX];

    (void)state;
    t_ok(write_version(dir, 0, DELTA_NO_BASE, DELTA_XOR, 0, NULL, &err), &err);
    t_refused(write_version(dir, 0, DELTA_NO_BASE, DELTA_XOR, 0, NULL, &err), FL_EXISTS, &err);
    t_refused(write_version(dir, 1, 1, DELTA_XOR, 0, NULL, &err), FL_INVALID, &err);
    snprintf(path, sizeof(path), "%s/weight_v000001", dir); /* a writer that died */
    t_ok(fl_mkdirs(path, &err), &err);
    snprintf(path, sizeof(path), "%s/weight_v000001/part-00007.safetensors", dir);
    t_ok(fl_file_write(path, 0600, "x", 1, &err), &err);
    t_ok(write_version(dir, 1, 0, DELTA_XOR, 0, NULL, &err), &err);
    t_true(access(path, F_OK) < 0, "what it left is gone");
}

static void apply_by_hand(void **state)
{
    struct fl_err err = { 0 };
    const char *dir = all_versions("hand", DELTA_OVERWRITE, 0);
    struct delta_version *v;
    unsigned char buf[MOST];

    (void)state;
    t_ok(delta_open(dir, 1, &v, &err), &err);
    memcpy(buf, truth[0][0], bytes_of(0));
    for (unsigned times = 0; times < 3; times++) { /* overwriting may be repeated */
        t_ok(delta_apply(v, &shapes[0], buf, buf, &err), &err);
        t_mem_eq(buf, truth[1][0], bytes_of(0));
    }
    memset(buf, 0, sizeof(buf));
    t_refused(delta_apply(v, &shapes[0], buf, buf, &err), FL_CORRUPT, &err); /* another base */
    t_has(err.text, "checksum");
    t_refused(delta_apply(v, &shapes[0], NULL, buf, &err), FL_INVALID, &err);
    delta_version_destroy(v);
    t_refused(delta_open(dir, 77, &v, &err), FL_NOT_FOUND, &err);
    t_refused(delta_open(dir, 1000000, &v, &err), FL_INVALID, &err);
}

/* Xor on the wrong base, or twice, is seen by the checksum. */
static void xor_once(void **state)
{
    struct fl_err err = { 0 };
    const char *dir = all_versions("xor", DELTA_XOR, 0);
    struct delta_version *v;
    unsigned char buf[MOST];

    (void)state;
    t_ok(delta_open(dir, 1, &v, &err), &err);
    memcpy(buf, truth[0][0], bytes_of(0));
    t_ok(delta_apply(v, &shapes[0], buf, buf, &err), &err);
    t_mem_eq(buf, truth[1][0], bytes_of(0));
    t_refused(delta_apply(v, &shapes[0], buf, buf, &err), FL_CORRUPT, &err);
    delta_version_destroy(v);
}

/* One bit anywhere in the files of a version: refused, or the very same bytes come out. The copy
 * stays what it was. */
static void bent_files(void **state)
{
    char dir[FL_PATH_MAX], local[FL_PATH_MAX], path[FL_PATH_MAX], *text;
    struct fl_err err = { 0 };
    size_t n, refused = 0, tried = 0;

    (void)state;
    fl_copy(dir, sizeof(dir), all_versions("bent", DELTA_OVERWRITE, 0));
    snprintf(path, sizeof(path), "%s/weight_v000001/model-00001-of-00001.safetensors", dir);
    t_ok(fl_file_read(path, 1 << 20, &text, &n, &err), &err);
    for (size_t at = 0; at < n; at += 23, tried++) {
        text[at] ^= 0x10;
        t_ok(fl_file_write(path, 0600, text, n, &err), &err);
        text[at] ^= 0x10;
        fl_copy(local, sizeof(local), new_folder("bent-local"));
        t_ok(delta_pull(dir, local, 0, &err), &err);
        enum fl_status st = delta_pull(dir, local, 1, &err);

        refused += st != FL_OK;
        local_is(local, st == FL_OK ? 1 : 0);
    }
    t_true(refused > tried * 9 / 10, "%zu of %zu", refused, tried);
    free(text);
}

struct bad_index {
    const char *name, *from, *to;
    enum fl_status st;
};
static const struct bad_index bad_indexes[] = {
    { "another version", "\"version\": 1", "\"version\": 2", FL_CORRUPT },
    { "made from itself", "\"base_version\": 0", "\"base_version\": 1", FL_CORRUPT },
    { "a base that is no number", "\"base_version\": 0", "\"base_version\": \"x\"", FL_CORRUPT },
    { "unknown encoding", "\"delta_encoding\": \"overwrite\"", "\"delta_encoding\": \"scatter\"",
      FL_CORRUPT },
    { "unknown compression", "\"zstd\"", "\"lz4\"", FL_UNSUPPORTED },
    { "unknown checksum", "\"xxh3-128\"", "\"adler32\"", FL_UNSUPPORTED },
    { "the other encoding", "\"delta_encoding\": \"overwrite\"", "\"delta_encoding\": \"xor\"",
      FL_CORRUPT },
};

static void hostile_indexes(void **state)
{
    char dir[FL_PATH_MAX], local[FL_PATH_MAX], path[FL_PATH_MAX], bent[4096], *text;
    struct fl_err err = { 0 };

    (void)state;
    fl_copy(dir, sizeof(dir), all_versions("index", DELTA_OVERWRITE, 0));
    fl_copy(local, sizeof(local), new_folder("index-local"));
    t_ok(delta_pull(dir, local, 0, &err), &err);
    snprintf(path, sizeof(path), "%s/weight_v000001/model.safetensors.index.json", dir);
    t_ok(fl_file_read(path, 100000, &text, NULL, &err), &err);
    for (size_t i = 0; i < FL_LEN(bad_indexes); i++) {
        const struct bad_index *b = &bad_indexes[i];
        char *at = strstr(text, b->from);

        t_true(at != NULL, "%s", b->name);
        snprintf(bent, sizeof(bent), "%.*s%s%s", (int)(at - text), text, b->to,
                 at + strlen(b->from));
        t_ok(fl_file_write(path, 0600, bent, strlen(bent), &err), &err);
        enum fl_status st = delta_pull(dir, local, 1, &err);

        printf("# %s: %s\n", b->name, err.text);
        t_refused(st, b->st, &err);
        local_is(local, 0);
    }
    free(text);
}

/* Whatever fails, at the writer or at the host: nothing half done, and the next try ends well. */
static void faults(void **state)
{
    char dir[FL_PATH_MAX], local[FL_PATH_MAX], path[FL_PATH_MAX];
    struct fl_err err = { 0 };
    int fds = t_open_fds();
    bool met = true;

    (void)state;
    fl_copy(dir, sizeof(dir), new_folder("faults"));
    t_ok(write_version(dir, 0, DELTA_NO_BASE, DELTA_XOR, 0, NULL, &err), &err);
    snprintf(path, sizeof(path), "%s/weight_v000001/model.safetensors.index.json", dir);
    for (unsigned nth = 1; met; nth++) {
        fl_fault_arm(nth);
        enum fl_status st = write_version(dir, 1, 0, DELTA_XOR, 500, NULL, &err);

        met = fl_fault_disarm();
        t_int_eq(st == FL_OK, !met, "writer, nth=%u", nth);
        t_int_eq(access(path, F_OK) == 0, !met, "writer, nth=%u", nth);
        t_int_eq(t_open_fds(), fds);
    }
    met = true;
    for (unsigned nth = 1; met; nth++) {
        fl_copy(local, sizeof(local), new_folder("faults-local"));
        t_ok(delta_pull(dir, local, 0, &err), &err);
        fl_fault_arm(nth);
        enum fl_status st = delta_pull(dir, local, 1, &err);

        met = fl_fault_disarm();
        local_is(local, st == FL_OK ? 1 : 0);
        t_ok(delta_pull(dir, local, 1, &err), &err);
        local_is(local, 1);
        t_int_eq(t_open_fds(), fds);
    }
}

/* A process that is killed while it holds the copy stops nobody. */
static void killed_holder(void **state)
{
    char dir[FL_PATH_MAX], local[FL_PATH_MAX];
    struct fl_err err = { 0 };
    int status;

    (void)state;
    fl_copy(dir, sizeof(dir), all_versions("killed", DELTA_XOR, 0));
    fl_copy(local, sizeof(local), new_folder("killed-local"));
    t_ok(delta_pull(dir, local, 1, &err), &err);
    pid_t pid = fork(); /* one thread, no device: a child may run on */

    if (pid == 0) {
        (void)fl_fault_set("fmt.rename:1=kill", NULL);
        (void)delta_pull(dir, local, 2, NULL);
        _exit(0);
    }
    t_int_eq(waitpid(pid, &status, 0), pid);
    t_true(WIFSIGNALED(status), "the child was not killed");
    local_is(local, 1);
    t_ok(delta_pull(dir, local, 2, &err), &err);
    local_is(local, 2);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(chains),
        cmocka_unit_test(folder_as_the_field_has_it),
        cmocka_unit_test(a_version_is_written_once),
        cmocka_unit_test(apply_by_hand),
        cmocka_unit_test(xor_once),
        cmocka_unit_test(bent_files),
        cmocka_unit_test(hostile_indexes),
        cmocka_unit_test(faults),
        cmocka_unit_test(killed_holder),
    };

    make_truth();
    return t_run("delta", tests);
}
