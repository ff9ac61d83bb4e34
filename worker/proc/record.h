/* worker/proc/record.h - the exit record that a keeper leaves in a worker's folder */
#pragma once
#include "worker/proc/proc.h"

/* FL_NOT_FOUND: none yet. FL_CORRUPT: there, and not whole. who is not in it: the caller knows. */
enum fl_status proc_record_read(const char *dir, struct proc_exit *out, struct fl_err *err);
/* For the one case where no keeper can: it was lost. */
enum fl_status proc_record_write(const char *dir, const struct proc_exit *x, struct fl_err *err);
