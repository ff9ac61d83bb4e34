#include "tests/fmt/versions.h"
#include "common/base/file.h"

const struct st_entry v_shapes[V_TENSORS] = {
    { "a", FL_BF16, 2, { 30, 50 }, NULL }, { "b", FL_F32, 1, { 700 }, NULL },
    { "c", FL_U8, 1, { 999 }, NULL },      { "d", FL_I64, 1, { 100 }, NULL },
    { "e", FL_F16, 0, { 0 }, NULL },
};
unsigned char v_truth[V_VERSIONS][V_TENSORS][V_MOST];

uint64_t v_bytes(size_t t)
{
    static const uint64_t bytes[V_TENSORS] = { 3000, 2800, 999, 800, 2 };

    return bytes[t];
}

/* Few elements change from version to version; c does not change in version 2, nothing does in
 * version 3. */
void v_make(void)
{
    uint64_t seed = 9;

    for (size_t v = 0; v < V_VERSIONS; v++)
        for (size_t t = 0; t < V_TENSORS; t++)
            for (uint64_t i = 0; i < v_bytes(t); i++) {
                bool first = v == 0, still = v == 3 || (v == 2 && t == 2);

                v_truth[v][t][i] =
                    first ? (unsigned char)(t_random(&seed) >> 30) : v_truth[v - 1][t][i];
                if (!first && !still && t_random(&seed) % 40 == 0)
                    v_truth[v][t][i] ^= 1 + i % 200;
            }
}

enum fl_status v_write(const char *dir, int v, int base, enum delta_encoding e, uint64_t file_bytes,
                       struct delta_stats *stats, struct fl_err *err)
{
    struct delta_source src[V_TENSORS];
    const struct st_meta extra = { "digest", "abc" };
    struct delta_opts o = { .version = v,
                            .base_version = base,
                            .encoding = e,
                            .file_bytes = file_bytes,
                            .extra = &extra,
                            .n_extra = 1 };

    for (size_t t = 0; t < V_TENSORS; t++) {
        src[t] =
            (struct delta_source){ .what = v_shapes[t], .was = base < 0 ? NULL : v_truth[base][t] };
        src[t].what.data = v_truth[v][t];
    }
    return delta_write(dir, src, V_TENSORS, &o, stats, err);
}

const char *v_folder(const char *name)
{
    const char *dir = t_path(name);
    struct fl_err err = { 0 };

    t_ok(fl_tree_remove(dir, &err), &err);
    t_ok(fl_mkdirs(dir, &err), &err);
    return dir;
}

void v_local_is(const char *local, int v)
{
    struct st_reader *r;
    struct fl_err err = { 0 };

    t_int_eq(delta_local_version(local), v);
    t_ok(st_read_folder(local, &r, &err), &err);
    t_int_eq(st_count(r), V_TENSORS);
    for (size_t t = 0; t < V_TENSORS; t++) {
        const struct st_tensor *x;

        t_ok(st_need(r, v_shapes[t].name, v_shapes[t].dtype, v_shapes[t].ndim, v_shapes[t].shape,
                     &x, &err),
             &err);
        t_mem_eq(x->data, v_truth[v][t], v_bytes(t), "%s in version %d", x->name, v);
    }
    st_reader_destroy(r);
}

/* 0 is a base; 1 to 4 each from the one before. */
const char *v_write_all(const char *name, enum delta_encoding e, uint64_t file_bytes)
{
    const char *dir = v_folder(name);
    struct fl_err err = { 0 };

    for (int v = 0; v < V_VERSIONS; v++)
        t_ok(v_write(dir, v, v - 1, e, file_bytes, NULL, &err), &err);
    return dir;
}
