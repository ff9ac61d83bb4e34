/* head/packages.h - what clients upload for their jobs: files by name below <state_dir>/packages
 *
 * A package is kept while a job that has not ended names it, and for a while after it was last
 * asked for or put; then it may go when room is needed. Daemons read packages over their stream. */
#pragma once
#include "common/base/limits.h"
#include "common/base/loop.h"
#include "node.pb-c.h"
#include "transport/call/call.h"

enum {
    PACKAGE_MAX_BYTES = FL_PACKAGE_MAX_BYTES,
    PACKAGE_NAME_MAX = 128,
    PACKAGE_PIECE_BYTES = 1 << 20, /* of one answer to a daemon              */
    PACKAGES_MAX = 4096,
    PACKAGE_PIN_S = 600, /* RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S */
};
#define PACKAGES_MAX_BYTES (4ull << 30) /* of all together */

struct head;
struct packages;
enum fl_status packages_create(struct head *h, struct packages **out, struct fl_err *err);
void packages_destroy(struct packages *p); /* files stay; NULL is fine */

/* NAME.zip or NAME.whl of letters, digits, and _ - . +, not beginning with a dot. */
enum fl_status package_name_check(const char *name, struct fl_err *err);
bool packages_has(struct packages *p,
                  const char *name); /* and keeps it for PACKAGE_PIN_S from now */
/* Written in the background, whole or not at all; done comes once, from the loop. FL_EXHAUSTED: no
 * room is left, for packages in use hold it. data is taken. */
struct package_put {
    struct package_put *prev, *next;
    struct fl_work work;
    struct packages *of;
    char name[PACKAGE_NAME_MAX + 1], path[1024];
    char *data;
    size_t len;
    enum fl_status got; /* of the work */
    struct fl_err err;
    void (*done)(struct package_put *put, enum fl_status st, const struct fl_err *err);
    void *arg;
};
enum fl_status packages_put(struct packages *p, struct package_put *put, struct fl_err *err);
void packages_serve(struct packages *p, struct call_req *req, const Fl__PackageRead *m);
