/* common/base/file.h - whole files, folders, and where things live (docs/protocol.md) */
#pragma once
#include "common/base/base.h"

struct sockaddr_un;

/* *out gets a terminated copy, free() it. FL_EXHAUSTED: longer than max. */
enum fl_status fl_file_read(const char *path, size_t max_bytes, char **out, size_t *len,
                            struct fl_err *err);
/* All or nothing: temporary name beside it, fsync, rename, fsync of the folder. */
enum fl_status fl_file_write(const char *path, unsigned mode, const void *data, size_t len,
                             struct fl_err *err);
enum fl_status fl_mkdirs(const char *path, struct fl_err *err); /* as mkdir -p, each new one 0700 */
enum fl_status fl_tree_remove(const char *path, struct fl_err *err); /* absent is fine; no links followed */

enum { FL_PATH_MAX = 1024, FL_RUNTIME_MAX = 40 };
/* The environment names them or the defaults do; made if absent, 0700, and refused when another
 * user owns them. The runtime folder is also refused when longer than FL_RUNTIME_MAX bytes, since
 * sockets lie below it. dir, from a flag, wins if not NULL. */
enum fl_status fl_runtime_dir(const char *dir, char out[FL_PATH_MAX], struct fl_err *err);
enum fl_status fl_state_dir(const char *dir, char out[FL_PATH_MAX], struct fl_err *err);
/* Of another program of ours: in $FURLONG_BIN_DIR, else beside this executable. */
enum fl_status fl_program_path(const char *name, char out[FL_PATH_MAX], struct fl_err *err);
enum fl_status fl_path(char out[FL_PATH_MAX], struct fl_err *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4))); /* FL_INVALID when too long */
/* FL_INVALID names the path and its length when it does not fit (107 bytes). */
enum fl_status fl_unix_addr(const char *path, struct sockaddr_un *out, struct fl_err *err);

struct fl_pid_stat { /* of /proc/PID/stat */
    char name[32];       /* of its program's file, as the kernel cuts it */
    char state;          /* 'Z': a zombie */
    int parent, group, session;
    uint64_t start_time; /* with the pid it names one process for good */
};
enum fl_status fl_pid_stat(int pid, struct fl_pid_stat *out, struct fl_err *err); /* FL_NOT_FOUND: no such */
enum fl_status fl_pid_start_time(int pid, uint64_t *out, struct fl_err *err);
bool fl_pid_alive(int pid, uint64_t start_time); /* that very process, and no zombie */
