/* common/conf/opt_priv.h - what the parser, the help and the record share */
#pragma once
#include "common/conf/opt.h"

#define FILE_OPTION "config"

struct fl_opt_ref { const struct fl_opt *opt; void *at; size_t table; };
struct fl_opt_ref fl_opts_at(const struct fl_opts *o, size_t i); /* opt NULL: past the last */
/* Takes the options of argv[0..argc) and moves the other words to its front. */
enum fl_status fl_opts_line(struct fl_opts *o, enum fl_opt_from from, const char *origin, int argc,
                            char **argv, struct fl_err *err);
enum fl_status fl_opts_named(struct fl_opts *o, enum fl_opt_from from, const char *origin, const char *name,
                             const char *value, struct fl_err *err);
