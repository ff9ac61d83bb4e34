/* tests/client/weights_plane.h - trainers and engines as processes of a head, and what each of them
 * says */
#pragma once
#include <furlong/driver.h>
#include "tests/client/fake.h"

struct plane {
    struct fake *fake;
    struct furlong *me; /* the driver */
    struct furlong_layout *layout;
    struct furlong_group *trainers, *engines;
};
struct seen { /* by an engine of itself */
    long long version;
    char verdict[16], digest[24], paused[16];
    long kib;
    unsigned pauses;
    int fds;
    char at[24]; /* where the first tensor is read */
};

/* The env of each: NULL, or one NAME=VALUE as weights_roles.h has them. */
struct plane plane_make(unsigned trainers, unsigned engines, const char *trainer_env,
                        const char *engine_env);
void plane_end(struct plane *p);
struct furlong_group *plane_launch(struct plane *p, const char *role, const char *play,
                                   unsigned world, const char *more);
struct seen plane_look_how(struct plane *p, uint32_t engine, const char *method);
struct seen plane_look(struct plane *p, uint32_t engine);
void plane_write(struct plane *p, uint64_t version); /* by all trainers, and published */
struct furlong_report plane_update(struct plane *p, uint64_t version, const char *mode,
                                   uint32_t slots);
/* As above, in buckets of that size, 0: the plane's own; every engine commits. */
struct furlong_report plane_update_by(struct plane *p, uint64_t version, const char *mode,
                                      uint64_t bucket_bytes);
void plane_serves(struct plane *p, uint32_t engine, long long version); /* and runs */
/* Version v, written unless it is the first, comes in several buckets and is served by two. */
void plane_comes(struct plane *p, uint64_t v, const char *mode);
