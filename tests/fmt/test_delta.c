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
#include "tests/fmt/versions.h"

static void chains(void **state)
{
    static const int steps[][V_VERSIONS] = {
        { 0, 1, 2, 3, 4 }, { 4, 4, 4, 4, 4 }, { 0, 2, 2, 4, 4 }, { 1, 3, 4, 4, 4 }
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(steps) * 4; i++) {
        char dir[FL_PATH_MAX], local[FL_PATH_MAX];
        struct fl_err err = { 0 };

        fl_copy(dir, sizeof(dir),
                v_write_all("versions", i % 2 ? DELTA_XOR : DELTA_OVERWRITE, i / 2 % 2 ? 400 : 0));
        fl_copy(local, sizeof(local), v_folder("local"));
        t_int_eq(delta_local_version(local), DELTA_NO_BASE);
        for (size_t k = 0; k < V_VERSIONS; k++) {
            t_ok(delta_pull(dir, local, steps[i / 4][k], &err), &err);
            v_local_is(local, steps[i / 4][k]);
        }
        t_refused(delta_pull(dir, local, 0, &err), FL_STALE, &err);
        v_local_is(local, steps[i / 4][V_VERSIONS - 1]);
    }
}

static void folder_as_the_field_has_it(void **state)
{
    struct fl_err err = { 0 };
    struct delta_stats s;
    const char *dir = v_folder("field");
    char path[FL_PATH_MAX], *text;

    (void)state;
    t_ok(v_write(dir, 0, DELTA_NO_BASE, DELTA_XOR, 0, &s, &err), &err);
    t_int_eq(s.changed, V_TENSORS);
    t_int_eq(s.written_bytes, 7601);
    t_ok(v_write(dir, 1, 0, DELTA_XOR, 1, &s, &err), &err);
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
    const char *dir = v_folder("once");
    char path[FL_PATH_MAX];

    (void)state;
    t_ok(v_write(dir, 0, DELTA_NO_BASE, DELTA_XOR, 0, NULL, &err), &err);
    t_refused(v_write(dir, 0, DELTA_NO_BASE, DELTA_XOR, 0, NULL, &err), FL_EXISTS, &err);
    t_refused(v_write(dir, 1, 1, DELTA_XOR, 0, NULL, &err), FL_INVALID, &err);
    snprintf(path, sizeof(path), "%s/weight_v000001", dir); /* a writer that died */
    t_ok(fl_mkdirs(path, &err), &err);
    snprintf(path, sizeof(path), "%s/weight_v000001/part-00007.safetensors", dir);
    t_ok(fl_file_write(path, 0600, "x", 1, &err), &err);
    t_ok(v_write(dir, 1, 0, DELTA_XOR, 0, NULL, &err), &err);
    t_true(access(path, F_OK) < 0, "what it left is gone");
}

static void apply_by_hand(void **state)
{
    struct fl_err err = { 0 };
    const char *dir = v_write_all("hand", DELTA_OVERWRITE, 0);
    struct delta_version *v;
    unsigned char buf[V_MOST];

    (void)state;
    t_ok(delta_open(dir, 1, &v, &err), &err);
    memcpy(buf, v_truth[0][0], v_bytes(0));
    for (unsigned times = 0; times < 3; times++) { /* overwriting may be repeated */
        t_ok(delta_apply(v, &v_shapes[0], buf, buf, &err), &err);
        t_mem_eq(buf, v_truth[1][0], v_bytes(0));
    }
    memset(buf, 0, sizeof(buf));
    t_refused(delta_apply(v, &v_shapes[0], buf, buf, &err), FL_CORRUPT, &err); /* another base */
    t_has(err.text, "checksum");
    t_refused(delta_apply(v, &v_shapes[0], NULL, buf, &err), FL_INVALID, &err);
    delta_version_destroy(v);
    t_refused(delta_open(dir, 77, &v, &err), FL_NOT_FOUND, &err);
    t_refused(delta_open(dir, 1000000, &v, &err), FL_INVALID, &err);
}

/* Xor on the wrong base, or twice, is seen by the checksum. */
static void xor_once(void **state)
{
    struct fl_err err = { 0 };
    const char *dir = v_write_all("xor", DELTA_XOR, 0);
    struct delta_version *v;
    unsigned char buf[V_MOST];

    (void)state;
    t_ok(delta_open(dir, 1, &v, &err), &err);
    memcpy(buf, v_truth[0][0], v_bytes(0));
    t_ok(delta_apply(v, &v_shapes[0], buf, buf, &err), &err);
    t_mem_eq(buf, v_truth[1][0], v_bytes(0));
    t_refused(delta_apply(v, &v_shapes[0], buf, buf, &err), FL_CORRUPT, &err);
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
    fl_copy(dir, sizeof(dir), v_write_all("bent", DELTA_OVERWRITE, 0));
    snprintf(path, sizeof(path), "%s/weight_v000001/model-00001-of-00001.safetensors", dir);
    t_ok(fl_file_read(path, 1 << 20, &text, &n, &err), &err);
    for (size_t at = 0; at < n; at += 23, tried++) {
        text[at] ^= 0x10;
        t_ok(fl_file_write(path, 0600, text, n, &err), &err);
        text[at] ^= 0x10;
        fl_copy(local, sizeof(local), v_folder("bent-local"));
        t_ok(delta_pull(dir, local, 0, &err), &err);
        enum fl_status st = delta_pull(dir, local, 1, &err);

        refused += st != FL_OK;
        v_local_is(local, st == FL_OK ? 1 : 0);
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
    fl_copy(dir, sizeof(dir), v_write_all("index", DELTA_OVERWRITE, 0));
    fl_copy(local, sizeof(local), v_folder("index-local"));
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
        v_local_is(local, 0);
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
    fl_copy(dir, sizeof(dir), v_folder("faults"));
    t_ok(v_write(dir, 0, DELTA_NO_BASE, DELTA_XOR, 0, NULL, &err), &err);
    snprintf(path, sizeof(path), "%s/weight_v000001/model.safetensors.index.json", dir);
    for (unsigned nth = 1; met; nth++) {
        fl_fault_arm(nth);
        enum fl_status st = v_write(dir, 1, 0, DELTA_XOR, 500, NULL, &err);

        met = fl_fault_disarm();
        t_int_eq(st == FL_OK, !met, "writer, nth=%u", nth);
        t_int_eq(access(path, F_OK) == 0, !met, "writer, nth=%u", nth);
        t_int_eq(t_open_fds(), fds);
    }
    met = true;
    for (unsigned nth = 1; met; nth++) {
        fl_copy(local, sizeof(local), v_folder("faults-local"));
        t_ok(delta_pull(dir, local, 0, &err), &err);
        fl_fault_arm(nth);
        enum fl_status st = delta_pull(dir, local, 1, &err);

        met = fl_fault_disarm();
        v_local_is(local, st == FL_OK ? 1 : 0);
        t_ok(delta_pull(dir, local, 1, &err), &err);
        v_local_is(local, 1);
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
    fl_copy(dir, sizeof(dir), v_write_all("killed", DELTA_XOR, 0));
    fl_copy(local, sizeof(local), v_folder("killed-local"));
    t_ok(delta_pull(dir, local, 1, &err), &err);
    pid_t pid = fork(); /* one thread, no device: a child may run on */

    if (pid == 0) {
        (void)fl_fault_set("fmt.rename:1=kill", NULL);
        (void)delta_pull(dir, local, 2, NULL);
        _exit(0);
    }
    t_int_eq(waitpid(pid, &status, 0), pid);
    t_true(WIFSIGNALED(status), "the child was not killed");
    v_local_is(local, 1);
    t_ok(delta_pull(dir, local, 2, &err), &err);
    v_local_is(local, 2);
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

    v_make();
    return t_run("delta", tests);
}
