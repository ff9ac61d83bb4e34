/* worker/roles/reward.h - what an answer is worth
 *
 * By exact match (surrounding blanks do not count): 1 or 0. Or by a command of the user's, run once a
 * batch by /bin/sh -c: it gets one {"prompt","response","label"} a line on its standard input and
 * writes one number a line. What it writes to standard error is shown. */
#pragma once
#include "common/base/base.h"

struct reward_row { const char *prompt, *response, *label; };
/* command NULL: exact match. FL_INVALID: the command's answer is wrong or it failed; err names it, the
 * line, and what came. FL_TIMEOUT: it took longer than budget_ms and was ended, with all it started. */
enum fl_status reward_score(const char *command, const struct reward_row *rows, uint32_t n,
                            uint32_t budget_ms, float *out, struct fl_err *err);
