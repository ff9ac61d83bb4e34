/* worker/node/package.h - packages of jobs on this node: read from the head, unpacked, kept
 *
 * Below <state>/node/packages, one folder each, there under its name only when whole. One that no
 * worker uses stays until PACKAGES_KEPT newer ones lie unused. */
#pragma once
#include "worker/node/node_priv.h"

enum { PACKAGES_KEPT = 16, PACKAGE_WAITS_MAX = 1024 };

struct packages;
enum fl_status node_packages_create(struct node *n, struct packages **out, struct fl_err *err);
void node_packages_destroy(struct packages *p); /* NULL is fine */

bool node_package_path(const struct packages *p, const char *name, char out[FL_PATH_MAX]);
/* True: all that spec names is here. */
bool node_packages_ready(const struct packages *p, const Fl__WorkerSpec *spec);
/* Gets what is missing, then starts spec (taken) and answers req; FL_CORRUPT to req: a package
 * cannot be had or used, and asking again does not help. */
void node_packages_start(struct packages *p, struct call_req *req, Fl__WorkerSpec *spec_take);
void node_packages_drop(struct packages *p); /* the stream is gone: the head asks again */
