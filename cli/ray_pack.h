/* cli/ray_pack.h - folders of a runtime_env, sent to the head as packages */
#pragma once
#include "cli/api.h"

enum { RAY_PACK_MAX_BYTES = 512 << 20, RAY_PACK_MAX_FILES = 65536 };

/* working_dir and the members of py_modules that are local folders (or .zip files) are packed, uploaded unless the
 * head has them already, and replaced by their gcs:// address. Others stay as they are. What .gitignore files name
 * is taken too; .git is not.
 *
 * FL_NOT_FOUND   no such folder
 * FL_EXHAUSTED   larger than RAY_PACK_MAX_BYTES: err names the largest file */
enum fl_status ray_pack_env(const struct cli_cluster *c, json_t *env, struct fl_err *err);
