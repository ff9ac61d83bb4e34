#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/base/port.h"
#include "common/base/str.h"
#include "common/gpu/probe.h"
#include "worker/doctor/priv.h"
#include "worker/node/addr.h"

enum { TMPFS = 0x01021994, PROBE_MS = 60000, DIAL_MS = 3000, NCCLS = 8 };

static void look_shm(struct doctor_list *l)
{
    struct statfs s;

    if (statfs("/dev/shm", &s) < 0 || s.f_type != TMPFS)
        doctor_judge_shm(0, 0, l);
    else
        doctor_judge_shm((uint64_t)s.f_blocks * (uint64_t)s.f_bsize, (uint64_t)s.f_bavail * (uint64_t)s.f_bsize, l);
}

static void look_files(struct doctor_list *l)
{
    struct rlimit r;

    if (getrlimit(RLIMIT_NOFILE, &r) == 0)
        doctor_judge_files(r.rlim_cur, r.rlim_max, l);
}

static void look_state(const char *dir, struct doctor_list *l)
{
    char path[FL_PATH_MAX];
    struct statfs s;
    struct fl_err err = { 0 };

    if (fl_state_dir(dir, path, &err) != FL_OK)
        doctor_say(l, "state folder", DOCTOR_FAIL, "name another: --state-dir=FOLDER or FURLONG_STATE_DIR", "%s", err.text);
    else if (statfs(path, &s) == 0)
        doctor_judge_fs("state folder", path, (long)s.f_type, (uint64_t)s.f_bavail * (uint64_t)s.f_bsize, l);
    if (fl_runtime_dir(NULL, path, &err) != FL_OK)
        doctor_say(l, "runtime folder", DOCTOR_FAIL, "name another of at most 40 bytes: FURLONG_RUNTIME_DIR", "%s", err.text);
    else
        doctor_say(l, "runtime folder", DOCTOR_OK, "", "%.200s", path);
}

enum fl_status doctor_at_start(const char *state_dir, struct doctor_list *l, struct fl_err *err)
{
    look_shm(l);
    look_files(l);
    look_state(state_dir, l);
    for (size_t i = 0; i < l->n; i++)
        if (l->all[i].state == DOCTOR_FAIL && strcmp(l->all[i].check, "open files") == 0)
            return fl_fail(err, FL_EXHAUSTED, "%s: %s", l->all[i].text, l->all[i].remedy);
    return FL_OK;
}

/* ==== the rest, for `furlong doctor` =============================================================== */
static void look_cpus(struct doctor_list *l)
{
    cpu_set_t set;
    long online = sysconf(_SC_NPROCESSORS_ONLN);

    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        doctor_judge_cpus(CPU_COUNT(&set), (unsigned)online, l);
}

static void look_clock(struct doctor_list *l)
{
    struct timex t = { 0 };

    doctor_judge_clock(adjtimex(&t) != TIME_ERROR, l);
}

/* Whether anything works between two processes here is not asked from the driver: it is tried. */
static bool look_devices(const char *probe, struct doctor_list *l)
{
    static struct gpu_found found[GPU_MAX];
    struct fl_err err = { 0 };
    size_t n = GPU_MAX;
    enum fl_status st = gpu_probe(probe, PROBE_MS, found, &n, &err);

    if (st != FL_OK) {
        doctor_say(l, "driver", st == FL_UNSUPPORTED ? DOCTOR_SKIP : DOCTOR_FAIL,
                   st == FL_UNSUPPORTED ? "" : "see nvidia-smi; in a container: --gpus all", "%s", err.text);
        return false;
    }
    if (n == 0)
        doctor_say(l, "driver", DOCTOR_SKIP, "", "no device: logical ones stand for them");
    for (size_t i = 0; i < n; i++) {
        const struct gpu_found *f = &found[i];

        doctor_say(l, "driver", f->opens ? DOCTOR_OK : DOCTOR_FAIL, f->opens ? "" : "see nvidia-smi: another process, or an error, may hold it",
                   "%s (%.44s)%s%s", f->info.name, f->info.uuid, f->opens ? "" : " does not open: ", f->opens_not);
        if (!f->opens)
            continue;
        doctor_say(l, "ipc", f->fd_shares ? DOCTOR_OK : DOCTOR_FAIL,
                   f->fd_shares ? "" : "weights cannot be shared on this device; in a container give it --ipc=host, and --pid=host or one pod",
                   "%.44s: memory of one process %s another%s%s", f->info.uuid, f->fd_shares ? "is read by" : "cannot be read by",
                   f->fd_shares ? "" : ": ", f->fd_not);
        if (!f->handle_shares)
            doctor_say(l, "ipc", DOCTOR_WARN, "memory that others allocate goes through a copy", "%.44s: no handles: %s", f->info.uuid, f->handle_not);
    }
    return n > 0;
}

/* The same two processes over host memory: what a run without devices needs. */
static void look_host_memory(const char *probe, struct doctor_list *l)
{
    static struct gpu_found found[2];
    struct fl_err err = { 0 };
    size_t n = 2;

    (void)setenv("FURLONG_GPU", "host", 1);
    enum fl_status st = gpu_probe(probe, PROBE_MS, found, &n, &err);

    (void)unsetenv("FURLONG_GPU");
    if (st != FL_OK || n == 0 || !found[0].fd_shares)
        doctor_say(l, "ipc", DOCTOR_FAIL, "memfd and descriptors over unix sockets must be allowed: see the container's seccomp profile",
                   "host memory cannot be shared between two processes: %s", st != FL_OK ? err.text : found[0].fd_not);
    else
        doctor_say(l, "ipc", DOCTOR_OK, "", "host memory is shared between two processes");
}

static void add_nccl(struct doctor_nccl *all, size_t *n, const char *path)
{
    char real[4096];
    int (*version)(int *) = NULL, v = 0;
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (lib)
        *(void **)&version = dlsym(lib, "ncclGetVersion");
    if (version && *n < NCCLS && version(&v) == 0) {
        Dl_info where;

        if (dladdr(*(void **)&version, &where) && realpath(where.dli_fname, real))
            path = real;
        for (size_t i = 0; i < *n; i++)
            if (strcmp(all[i].path, path) == 0)
                return;
        all[*n].version = v;
        (void)FL_COPY(all[(*n)++].path, path);
    }
}

static void look_nccl(bool devices, struct doctor_list *l)
{
    static const char *const places[] = { "/usr/lib/*/libnccl.so.2", "/usr/local/lib/python3*/*-packages/nvidia/nccl/lib/libnccl.so.2",
                                          "/usr/lib/python3*/*-packages/nvidia/nccl/lib/libnccl.so.2",
                                          "/opt/*/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2" };
    struct doctor_nccl found[NCCLS] = { 0 };
    const char *own = getenv("FURLONG_NCCL"), *venv = getenv("VIRTUAL_ENV");
    char pattern[512];
    size_t n = 0;

    if (own && *own)
        add_nccl(found, &n, own);
    add_nccl(found, &n, "libnccl.so.2");
    for (size_t i = 0; i <= FL_LEN(places); i++) {
        glob_t g;

        snprintf(pattern, sizeof(pattern), "%s/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2", venv ? venv : "/nonexistent");
        if (glob(i < FL_LEN(places) ? places[i] : pattern, 0, NULL, &g) != 0)
            continue;
        for (size_t k = 0; k < g.gl_pathc; k++)
            add_nccl(found, &n, g.gl_pathv[k]);
        globfree(&g);
    }
    doctor_judge_nccl(found, n, devices, l);
}

/* ==== ports ======================================================================================== */
static void look_port(const char *what, uint16_t port, struct doctor_list *l)
{
    char holder[160];
    bool taken = fl_port_holder(port, holder, sizeof(holder));

    doctor_judge_port(what, port, !taken, holder, l);
}

/* ==== addresses ==================================================================================== */
/* 0, or why not, as errno tells it. */
static int dial(const struct sockaddr *to, socklen_t len)
{
    int fd = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), e = 0;
    struct pollfd p = { .fd = fd, .events = POLLOUT };
    socklen_t size = sizeof(e);

    if (fd < 0)
        return errno;
    if (connect(fd, to, len) < 0)
        e = errno;
    if (e == EINPROGRESS) {
        e = ETIMEDOUT;
        if (poll(&p, 1, DIAL_MS) > 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &size) < 0)
            e = errno;
    }
    close(fd);
    return e;
}

/* A listener on the own address that is dialled by that address: what every peer of this node does. */
static bool dials_back(const char *ip, char *why, size_t cap)
{
    struct sockaddr_storage a = { 0 };
    struct sockaddr *at = (struct sockaddr *)&a;
    struct sockaddr_in *v4 = (struct sockaddr_in *)&a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&a;
    bool six = inet_pton(AF_INET6, ip, &v6->sin6_addr) == 1;
    socklen_t len = six ? sizeof(*v6) : sizeof(*v4);
    int l = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), e;

    a.ss_family = six ? AF_INET6 : AF_INET;
    if (!six)
        (void)inet_pton(AF_INET, ip, &v4->sin_addr);
    if (l < 0 || bind(l, at, len) < 0 || listen(l, 1) < 0 || getsockname(l, at, &len) < 0)
        e = errno;
    else
        e = dial(at, len);
    if (l >= 0)
        close(l);
    snprintf(why, cap, "%s", e ? strerror(e) : "");
    return !e;
}

static bool reaches(const char *head, char *why, size_t cap)
{
    struct addrinfo want = { .ai_socktype = SOCK_STREAM }, *list = NULL;
    char host[256], port[8];
    struct fl_err err = { 0 };
    int e = 0;

    if (fl_addr_split("--address", head, host, port, &err) != FL_OK)
        return snprintf(why, cap, "%s", err.text) < 0;
    int rc = getaddrinfo(host, port, &want, &list);

    for (struct addrinfo *i = list; i; i = i->ai_next)
        if ((e = dial(i->ai_addr, i->ai_addrlen)) == 0)
            break;
    if (list)
        freeaddrinfo(list);
    snprintf(why, cap, "%s", rc ? gai_strerror(rc) : e ? strerror(e) : "");
    return !rc && !e;
}

static void look_addresses(const char *head, struct doctor_list *l)
{
    const char *asked = getenv("FURLONG_NODE_IP"), *proxy = getenv("http_proxy");
    struct fl_addr a;
    struct fl_err err = { 0 };
    char why[128];

    if (!head) {
        doctor_say(l, "address", DOCTOR_SKIP, "", "which address counts depends on the head: furlong doctor --address=HOST:6379");
    } else if (node_addr_find(asked && *asked ? asked : NULL, head, &a, &err) != FL_OK) {
        doctor_say(l, "address", DOCTOR_FAIL, "check --address, the route, or FURLONG_NODE_IP", "%s", err.text);
    } else {
        bool ok = dials_back(a.text, why, sizeof(why));

        doctor_say(l, "address", ok ? DOCTOR_OK : DOCTOR_FAIL, ok ? "" : "a firewall on this host? name another with FURLONG_NODE_IP",
                   "%s on %s, %s; a listener there %s%s%s", a.text, a.iface, asked && *asked ? "as FURLONG_NODE_IP says" : "the source of the way to the head",
                   ok ? "is reached by that address" : "is not reached by that address: ", why, "");
        ok = reaches(head, why, sizeof(why));
        doctor_say(l, "head", ok ? DOCTOR_OK : DOCTOR_FAIL, ok ? "" : "is the head up, and its port open in the firewall? furlong start --head there",
                   "%.200s %s%s", head, ok ? "answers" : "does not answer: ", why);
    }
    if (proxy && *proxy)
        doctor_say(l, "proxy", DOCTOR_OK, "", "http_proxy is set: it is not used for addresses of the cluster");
}

static void look_path(struct doctor_list *l)
{
    char own[FL_PATH_MAX], path[4096], real[4096], mine[4096];
    const char *env = getenv("PATH");
    char *save = NULL;

    if (!env || !FL_COPY(path, env) || fl_program_path("furlong", own, NULL) != FL_OK || !realpath(own, mine))
        return;
    for (char *dir = strtok_r(path, ":", &save); dir; dir = strtok_r(NULL, ":", &save)) {
        char at[4096];

        snprintf(at, sizeof(at), "%s/furlong", dir);
        if (access(at, X_OK) == 0 && realpath(at, real)) {
            if (strcmp(real, mine) != 0)
                doctor_say(l, "programs", DOCTOR_WARN, "put the one that you mean first on PATH, on every node", "%.120s runs, but PATH finds %.120s first", mine, real);
            return;
        }
    }
}

void doctor_look(const struct doctor_ask *ask, struct doctor_list *l)
{
    bool devices = false;

    look_shm(l);
    look_files(l);
    look_cpus(l);
    if (ask->probe) {
        devices = look_devices(ask->probe, l);
        if (!devices)
            look_host_memory(ask->probe, l);
    }
    look_nccl(devices, l);
    if (ask->ports) {
        look_port("worker daemons", 6379, l);
        look_port("commands and browsers", 8265, l);
    }
    look_addresses(ask->head, l);
    doctor_look_fabric(l);
    doctor_look_sockets(l);
    look_state(ask->state_dir, l);
    look_clock(l);
    look_path(l);
}
