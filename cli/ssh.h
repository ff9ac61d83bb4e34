/* cli/ssh.h - one command on many hosts, over the user's own ssh */
#pragma once
#include "cli/hosts.h"

struct ssh_run {
    const char *const *command; /* words for the remote shell, quoted here; NULL-terminated. %h is the host's name */
    const char *input;          /* its standard input; NULL: none. Secrets go here, not into command lines */
    uint32_t wait_ms;           /* for all of them together */
};
/* Runs it on hosts[0..n), in parallel, with the words of FURLONG_SSH (default "ssh") plus BatchMode, a connect
 * time-out and a shared connection (ControlMaster) below the runtime folder.
 *
 * done[i]        it ended there with 0, or was cut off and may yet
 * FL_UNREACHABLE err names the first host that failed, what it said, and how many others did; those that were not
 *                over by then are ended
 * FL_CANCELLED   a signal came (cli/interrupt.h) */
enum fl_status ssh_run_all(const struct hosts *h, const struct ssh_run *r, bool *done, struct fl_err *err);
