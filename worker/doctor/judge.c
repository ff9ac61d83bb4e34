#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/base/str.h"
#include "worker/doctor/priv.h"

enum {
    FILES_LEAST = 1024,  /* a daemon with some workers and a client */
    FILES_WANTED = 65536 /* trainers map every shard, engines hold every connection */
};
#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
#define SHM_WANTED (1 * GIB) /* NCCL takes 10 MiB a pair, data loaders a queue each */

const char *doctor_state_name(enum doctor_state s)
{
    static const char *const names[] = { "ok", "warn", "fail", "skip" };

    return names[s];
}

void doctor_say(struct doctor_list *l, const char *check, enum doctor_state s, const char *remedy, const char *fmt, ...)
{
    struct doctor_finding *f = &l->all[l->n];
    va_list ap;

    if (l->n == DOCTOR_MAX)
        return;
    l->n++;
    *f = (struct doctor_finding){ .check = check, .state = s };
    (void)FL_COPY(f->remedy, remedy);
    va_start(ap, fmt);
    vsnprintf(f->text, sizeof(f->text), fmt, ap);
    va_end(ap);
}

void doctor_judge_shm(uint64_t total, uint64_t available, struct doctor_list *out)
{
    char a[16], t[16];

    if (total == 0)
        doctor_say(out, "shm", DOCTOR_WARN, "mount a tmpfs on /dev/shm: NCCL and data loaders of others need it; our own segments do not",
                   "/dev/shm is no tmpfs here");
    else if (available < SHM_WANTED)
        doctor_say(out, "shm", DOCTOR_WARN, "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory on /dev/shm",
                   "/dev/shm has %s free of %s; NCCL and data loaders want 1.0 GiB. Our own segments need none of it",
                   fl_bytes_text(a, available), fl_bytes_text(t, total));
    else
        doctor_say(out, "shm", DOCTOR_OK, "", "/dev/shm has %s free of %s", fl_bytes_text(a, available), fl_bytes_text(t, total));
}

void doctor_judge_files(uint64_t soft, uint64_t hard, struct doctor_list *out)
{
    static const char remedy[] = "raise the hard limit: ulimit -Hn 65536 as root, LimitNOFILE=65536 (systemd), --ulimit nofile=65536 (docker)";

    if (hard < FILES_LEAST)
        doctor_say(out, "open files", DOCTOR_FAIL, remedy, "at most %llu may be open (soft limit %llu); %d are needed",
                   (unsigned long long)hard, (unsigned long long)soft, FILES_LEAST);
    else if (hard < FILES_WANTED)
        doctor_say(out, "open files", DOCTOR_WARN, remedy, "at most %llu may be open; large runs want %d",
                   (unsigned long long)hard, FILES_WANTED);
    else
        doctor_say(out, "open files", DOCTOR_OK, "", "soft limit %llu%s, hard %llu", (unsigned long long)soft,
                   soft < hard ? ", raised by the daemon" : "", (unsigned long long)hard);
}

void doctor_judge_fs(const char *what, const char *path, long fs, uint64_t available, struct doctor_list *out)
{
    static const struct { long type; const char *name; } remote[] = {
        { 0x6969, "NFS" }, { 0x0bd00bd0, "Lustre" }, { (long)0xff534d42, "CIFS" }, { (long)0xfe534d42, "SMB" }, { 0x47504653, "GPFS" },
        { 0x00c36400, "Ceph" }, { 0x19830326, "BeeGFS" }, { 0x65735546, "FUSE" }, { 0x01021997, "9p" }, { 0x6a656a63, "virtio-fs" },
    };
    char a[16];

    for (size_t i = 0; i < FL_LEN(remote); i++)
        if (remote[i].type == (fs & 0xffffffffL) || remote[i].type == fs) {
            doctor_say(out, what, DOCTOR_FAIL, "put it on a local disk: --state-dir=FOLDER or FURLONG_STATE_DIR",
                       "%s is on %s, where a journal's locks and syncs cannot be trusted", path, remote[i].name);
            return;
        }
    if (available < 1 * GIB)
        doctor_say(out, what, available < 64 * MIB ? DOCTOR_FAIL : DOCTOR_WARN, "free space, or name another disk: --state-dir=FOLDER",
                   "%s has %s free; logs and checkpoints of a run want gigabytes", path, fl_bytes_text(a, available));
    else
        doctor_say(out, what, DOCTOR_OK, "", "%s, %s free%s", path, fl_bytes_text(a, available),
                   fs == 0x01021994 ? "; a tmpfs: it forgets with the machine" : "");
}

void doctor_judge_clock(bool synchronized, struct doctor_list *out)
{
    if (synchronized)
        doctor_say(out, "clock", DOCTOR_OK, "", "kept by a time service");
    else
        doctor_say(out, "clock", DOCTOR_WARN, "start chrony, ntpd or systemd-timesyncd (in a container: on its host)",
                   "no time service keeps it; nothing here compares times of two hosts, but your logs and TLS do");
}

void doctor_judge_nccl(const struct doctor_nccl *f, size_t n, bool devices, struct doctor_list *out)
{
    if (n == 0) {
        doctor_say(out, "nccl", devices ? DOCTOR_WARN : DOCTOR_SKIP, devices ? "install libnccl2, or a PyTorch that brings it" : "",
                   devices ? "no libnccl.so.2: weights between hosts go over TCP" : "no libnccl.so.2, and no device that would use it");
        return;
    }
    for (size_t i = 1; i < n; i++)
        if (f[i].version != f[0].version) {
            doctor_say(out, "nccl", DOCTOR_WARN,
                       "trainer and engine must load the same one: FURLONG_NCCL=PATH for ours, or one environment for both",
                       "two versions: %d.%d.%d (%.80s) and %d.%d.%d (%.80s)", f[0].version / 10000, f[0].version / 100 % 100,
                       f[0].version % 100, f[0].path, f[i].version / 10000, f[i].version / 100 % 100, f[i].version % 100, f[i].path);
            return;
        }
    doctor_say(out, "nccl", DOCTOR_OK, "", "%d.%d.%d (%.200s)", f[0].version / 10000, f[0].version / 100 % 100, f[0].version % 100, f[0].path);
}

void doctor_judge_port(const char *what, uint16_t port, bool free_now, const char *holder, struct doctor_list *out)
{
    if (free_now)
        doctor_say(out, "ports", DOCTOR_OK, "", "%u is free (%s)", port, what);
    else
        doctor_say(out, "ports", DOCTOR_WARN, "end it, or take another: --port, --dashboard-port (0: any free one)", "%u (%s) is taken%s%s", port,
                   what, *holder ? " by " : "", holder);
}

void doctor_judge_cpus(double usable, unsigned online, struct doctor_list *out)
{
    if (usable + 0.5 < online)
        doctor_say(out, "cpus", DOCTOR_OK, "", "%g of %u may be used (affinity or cgroup); so many are offered", usable, online);
    else
        doctor_say(out, "cpus", DOCTOR_OK, "", "%u", online);
}
