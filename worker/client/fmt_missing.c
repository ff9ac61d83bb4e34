/* Linked until transport/fmt has its code: modes that need files on disk say so. */
#include "transport/fmt/delta.h"

enum fl_status delta_write(const char *dir, const struct delta_source *t, size_t n,
                           const struct delta_opts *o, struct delta_stats *stats, struct fl_err *err)
{
    (void)dir, (void)t, (void)n, (void)o, (void)stats;
    return fl_fail(err, FL_UNSUPPORTED, "disk-delta is not in this build");
}
enum fl_status delta_pull(const char *dir, const char *local_dir, int64_t version, struct fl_err *err)
{
    (void)dir, (void)local_dir, (void)version;
    return fl_fail(err, FL_UNSUPPORTED, "disk-delta is not in this build");
}
enum fl_status st_read_folder(const char *dir, struct st_reader **out, struct fl_err *err)
{
    (void)dir, (void)out;
    return fl_fail(err, FL_UNSUPPORTED, "safetensors are not in this build");
}
enum fl_status st_need(const struct st_reader *r, const char *name, enum fl_dtype dtype, unsigned ndim,
                       const uint64_t *shape, const struct st_tensor **out, struct fl_err *err)
{
    (void)r, (void)name, (void)dtype, (void)ndim, (void)shape, (void)out;
    return fl_fail(err, FL_UNSUPPORTED, "safetensors are not in this build");
}
void st_reader_destroy(struct st_reader *r)
{
    (void)r;
}
