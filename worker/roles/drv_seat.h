/* worker/roles/drv_seat.h - the driver's hands: struct drv_ops over libfurlong */
#pragma once
#include "worker/roles/driver.h"

struct drv_seat {
    struct furlong *f;
    struct furlong_layout *layout;
    struct furlong_group *groups[2]; /* by enum drv_side */
};
enum fl_status drv_seat_generate(struct driver *d, const struct drv_job *job, struct drv_made *out,
                                 struct fl_err *err);
enum fl_status drv_seat_train(struct driver *d, const char *body, const void *blob, size_t bytes,
                              json_t **answer, struct fl_err *err);
void drv_nap(unsigned ms);
