/* worker/roles/sglang/shell.h - programs that the user named, beside this one */
#pragma once
#include <sys/types.h>

#include "common/base/base.h"

/* /bin/sh runs it as the leader of a process group, with no signal blocked or ignored and without
 * the seat. fd: the program's descriptor 3; -1: none. The caller waits for it, and is the first
 * thread: the kernel kills that shell, or what it became by exec, when the thread ends, for of
 * keeper and daemon none may be left to do it. */
enum fl_status shell_start(const char *command, int fd, pid_t *out, struct fl_err *err);
