/* worker/doctor/doctor.h - what of this machine would make a run fail later, said now, each with its remedy
 *
 * Looking is apart from judging: doctor_look() reads the machine, the judges are pure. `furlong doctor` runs all of it,
 * a worker daemon's start what costs nothing. */
#pragma once
#include "common/base/base.h"

enum doctor_state { DOCTOR_OK, DOCTOR_WARN, DOCTOR_FAIL, DOCTOR_SKIP };
struct doctor_finding {
    const char *check; /* "shm", "open files", ... */
    enum doctor_state state;
    char text[320], remedy[256]; /* remedy: "" when there is nothing to do */
};
enum { DOCTOR_MAX = 96, DOCTOR_PATH = 256 };
struct doctor_list { struct doctor_finding all[DOCTOR_MAX]; size_t n; };
const char *doctor_state_name(enum doctor_state s); /* "ok", "warn", "fail", "skip" */

/* ==== judges: pure ================================================================================= */
void doctor_judge_shm(uint64_t total, uint64_t available, struct doctor_list *out); /* bytes of /dev/shm; 0: there is none */
void doctor_judge_files(uint64_t soft, uint64_t hard, struct doctor_list *out);
/* fs: statfs's f_type; what: "state folder" */
void doctor_judge_fs(const char *what, const char *path, long fs, uint64_t available, struct doctor_list *out);
void doctor_judge_clock(bool synchronized, struct doctor_list *out);
struct doctor_nccl { char path[DOCTOR_PATH]; int version; }; /* 22809 */
void doctor_judge_nccl(const struct doctor_nccl *found, size_t n, bool devices, struct doctor_list *out);
/* holder: "pid 12 (nginx)", "" when it cannot be seen */
void doctor_judge_port(const char *what, uint16_t port, bool free_now, const char *holder, struct doctor_list *out);
struct doctor_link { char hca[64], iface[32]; unsigned port, gbit, mtu; bool up; }; /* iface: "" for InfiniBand */
void doctor_judge_link(const struct doctor_link *k, struct doctor_list *out);
void doctor_judge_cpus(double usable, unsigned online, struct doctor_list *out);

/* ==== looking ====================================================================================== */
struct doctor_ask {
    const char *head;      /* HOST:PORT, or NULL: this node will be one */
    const char *state_dir; /* NULL: the default */
    const char *probe;     /* path of furlong-probe; NULL: devices are not looked at */
    bool ports;            /* those of a head */
};
void doctor_look(const struct doctor_ask *ask, struct doctor_list *out);
/* shm, open files and the state folder: what a daemon says at its start. FL_EXHAUSTED: it cannot work like that. */
enum fl_status doctor_at_start(const char *state_dir, struct doctor_list *out, struct fl_err *err);
