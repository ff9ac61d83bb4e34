/* cli/interrupt.h - SIGINT, SIGTERM and SIGHUP while a command starts what it must not leave behind
 *
 * Held, they end nothing by themselves: whoever waits looks at the descriptor too, stops waiting, and what was started is
 * ended on the way out. A loop that takes signals itself (fl_signals) also gets one that came just before it. */
#pragma once
#include "common/base/base.h"

void cli_signals_hold(void);
void cli_signals_let(void); /* one that nobody took acts now, as it would have */
int cli_signals_fd(void);   /* readable once one came; -1, which poll() passes over, while none is held */
/* FL_CANCELLED with "SIGTERM came while waiting for WHAT" if one came, else FL_OK. */
enum fl_status cli_interrupted(struct fl_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int cli_interrupt_code(void); /* 128 + the signal that cli_interrupted() told of; 0: it told of none */
