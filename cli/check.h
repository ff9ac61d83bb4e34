/* cli/check.h - whether the built-in driver can use what a run is given, before anything starts */
#pragma once
#include "common/base/base.h"

/* words: of a run on this machine, NULL-terminated, without the program's name.
 *
 * FL_INVALID    a file or a folder of it is wrong; err holds the driver's own sentence
 * FL_INTERNAL   the driver could not look; err says why
 * FL_CANCELLED  a signal came (cli/interrupt.h) */
enum fl_status cli_check_run(const char *const *words, struct fl_err *err);
