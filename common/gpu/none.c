/* No devices: every way in says so, and nothing can be held that another function would be
 * given. */
#include "common/gpu/gpu_priv.h"

static enum fl_status none_list(struct gpu_info *out, size_t *n, struct fl_err *err)
{
    (void)out;
    (void)err;
    *n = 0;
    return FL_OK;
}

static enum fl_status none_open(const char *uuid, struct gpu **out, struct fl_err *err)
{
    (void)out;
    return fl_fail(err, FL_UNSUPPORTED, "device %s: %s", uuid,
                   gpu_none_why.text[0] ? gpu_none_why.text
                                        : "no devices are used here: FURLONG_GPU=none");
}

static enum fl_status none_where(uint64_t addr, struct gpu_where *out, struct fl_err *err)
{
    (void)out;
    return fl_fail(err, FL_NOT_FOUND, "memory at %#llx is on no device: there is none",
                   (unsigned long long)addr);
}

static void none_close(struct gpu *g)
{
    (void)g;
}

const struct gpu_ops gpu_none = {
    .name = "none", .list = none_list, .open = none_open, .close = none_close, .where = none_where
};
