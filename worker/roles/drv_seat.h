/* worker/roles/drv_seat.h - the driver's hands: struct drv_ops over libfurlong */
#pragma once
#include "worker/roles/driver.h"

struct drv_seat {
    struct furlong *f;
    struct furlong_layout *layout;
    struct furlong_group *groups[2]; /* by enum drv_side */
    uint32_t *told[2];               /* of each member: the attempt whose end has been said */
};
/* Says, once each, how members of that side ended. Waits up to wait_ms for the first to be known: the
 * end of a stream is seen here before its cause comes from the keeper. false: nothing was said. */
bool drv_seat_tell(struct driver *d, enum drv_side side, uint32_t wait_ms);
enum fl_status drv_seat_generate(struct driver *d, const struct drv_job *job, struct drv_made *out,
                                 struct fl_err *err);
enum fl_status drv_seat_train(struct driver *d, const char *body, const void *blob, size_t bytes,
                              json_t **answer, struct fl_err *err);
/* Ends that attempt by force and waits for it; why: who is late, where, in what. */
void drv_seat_end(struct driver *d, enum drv_side side, uint32_t rank, uint32_t attempt, const char *why);
void drv_nap(unsigned ms);
