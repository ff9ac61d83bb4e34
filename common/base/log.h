/* common/base/log.h - one line an event: time level phrase key=value
 *
 *     2026-11-29T19:07:14.123Z warn node lost node=7 silent_ms=15012 leases=3
 *
 * Goes to stderr in one write, so lines of several threads never mix; control characters become
 * \xNN. FURLONG_LOG=error|warn|info|debug chooses, default info. Keys, tokens and values of
 * variables whose names fl_name_is_secret() are never given to it. Any thread. */
#pragma once
#include "common/base/base.h"

enum fl_log_level { FL_LOG_ERROR, FL_LOG_WARN, FL_LOG_INFO, FL_LOG_DEBUG };
bool fl_log_on(enum fl_log_level level);
void fl_log(enum fl_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
enum fl_status fl_log_level_set(const char *name, struct fl_err *err); /* a flag beats FURLONG_LOG */

#define fl_error(...) fl_log(FL_LOG_ERROR, __VA_ARGS__) /* someone must act              */
#define fl_warn(...) fl_log(FL_LOG_WARN, __VA_ARGS__)   /* we went on, and how           */
#define fl_info(...) fl_log(FL_LOG_INFO, __VA_ARGS__)   /* a state changed               */
#define fl_debug(...)                                   /* one operation; no cost if off */          \
    (fl_log_on(FL_LOG_DEBUG) ? fl_log(FL_LOG_DEBUG, __VA_ARGS__) : (void)0)
