/* cli/ray_pack.h - folders of a runtime_env, sent to the head as packages */
#pragma once
#include <stdio.h>

#include "cli/api.h"
#include "common/base/limits.h"

enum { RAY_PACK_MAX_BYTES = FL_PACKAGE_MAX_BYTES, RAY_PACK_MAX_FILES = 65535, RAY_PACK_URI_BYTES = 64, RAY_PACK_HTTP_BYTES = FL_PACKAGE_MAX_BYTES };

/* working_dir and the members of py_modules that are local folders (or .zip files) are packed, uploaded unless the
 * head has them already, and replaced by their gcs:// address. Others stay as they are. What .gitignore files name
 * is taken too; .git is not.
 *
 * FL_NOT_FOUND   no such folder
 * FL_EXHAUSTED   larger than the head takes: nothing was read or sent. err has both sizes, say the largest parts and
 *                the words that leave them out */
enum fl_status ray_pack_env(const struct cli_cluster *c, json_t *env, FILE *say, struct fl_err *err);

struct ray_pack_file {
    const char *name; /* in the package                        */
    const char *path; /* where it is read from, else data, len */
    const void *data;
    size_t len;
    unsigned mode; /* permissions */
};
/* These files, sent as one package unless the head has it. uri: its gcs:// address; *bytes: its size.
 *
 * FL_EXHAUSTED   larger than RAY_PACK_HTTP_BYTES, which is what Ray's head takes over HTTP */
enum fl_status ray_pack_list(const struct cli_cluster *c, const struct ray_pack_file *files, size_t n, char uri[RAY_PACK_URI_BYTES],
                             size_t *bytes, struct fl_err *err);
