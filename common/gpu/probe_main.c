/* The probe itself: one process makes memory, a second one that it started before any device was
 * touched opens it. */
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "common/gpu/probe.h"
#include "common/gpu/probe_priv.h"

enum { PATTERN = 0x5a, LOOK_BYTES = 4096, PEER_FD = 3, PEER_WAIT_S = 20, PEER_LEAVES = 300 };
struct ask { /* to the second process; with a descriptor: a chunk, without: a handle */
    char uuid[GPU_UUID_BYTES];
    struct gpu_handle handle;
    uint64_t off, bytes;
};
struct told {
    uint32_t status;
    char text[160];
};
extern char **environ;

/* ==== the second process ==== */
static enum fl_status look(const struct gpu_ops *ops, struct gpu *g, uint64_t addr,
                           struct fl_err *err)
{
    unsigned char got[LOOK_BYTES] = { 0 };
    struct gpu_stream *s;
    enum fl_status st;

    FL_TRY(ops->stream(g, &s, err));
    st = ops->copy(s, (uint64_t)(uintptr_t)got, addr, sizeof(got), err);
    if (st == FL_OK)
        st = ops->stream_sync(s, err);
    ops->stream_free(s);
    for (size_t i = 0; i < sizeof(got) && st == FL_OK; i++)
        if (got[i] != PATTERN)
            st = fl_fail(err, FL_CORRUPT, "byte %zu of shared memory is %#x, not %#x", i, got[i],
                         PATTERN);
    return st;
}

static enum fl_status look_at_chunk(const struct gpu_ops *ops, struct gpu *g, int fd,
                                    uint64_t bytes, struct fl_err *err)
{
    struct gpu_chunk c;
    uint64_t addr;
    enum fl_status st;

    FL_TRY(ops->chunk_import(g, fd, bytes, &c, err));
    st = ops->reserve(g, bytes, &addr, err);
    if (st == FL_OK) {
        st = ops->map(g, addr, &c, false, err);
        if (st == FL_OK) {
            st = look(ops, g, addr, err);
            (void)ops->unmap(g, addr, bytes, NULL); /* we are about to leave */
        }
        ops->unreserve(g, addr, bytes);
    }
    ops->chunk_release(g, &c);
    return st;
}

static enum fl_status look_at_handle(const struct gpu_ops *ops, struct gpu *g, const struct ask *a,
                                     struct fl_err *err)
{
    uint64_t addr;
    enum fl_status st;

    FL_TRY(ops->ipc_open(g, &a->handle, &addr, err));
    st = look(ops, g, addr + a->off, err);
    ops->ipc_close(g, addr);
    return st;
}

static ssize_t receive(int sock, void *into, size_t len, int *fd)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } ctl;
    struct iovec v = { into, len };
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = &ctl, .msg_controllen = sizeof(ctl)
    };
    ssize_t got;

    do
        got = recvmsg(sock, &m, MSG_CMSG_CLOEXEC | MSG_WAITALL);
    while (got < 0 && errno == EINTR);
    struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&m) : NULL;

    *fd = -1;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(c), sizeof(*fd));
    return got;
}

static int peer_main(void)
{
    const struct gpu_ops *ops;
    struct gpu *g = NULL;
    struct ask a;
    int fd;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* the first process has one thread: its end is ours */
    if (gpu_pick(&ops, NULL) != FL_OK)
        return 1;
    while (receive(PEER_FD, &a, sizeof(a), &fd) == (ssize_t)sizeof(a)) {
        struct told t = { 0 };
        struct fl_err err = { 0 };
        enum fl_status st = g && strcmp(ops->info(g)->uuid, a.uuid) == 0 ? FL_OK : FL_AGAIN;

        if (st == FL_AGAIN) {
            ops->close(g);
            g = NULL;
            st = ops->open(a.uuid, &g, &err);
        }
        if (st == FL_OK)
            st = fd >= 0 ? look_at_chunk(ops, g, fd, a.bytes, &err)
                         : look_at_handle(ops, g, &a, &err);
        if (fd >= 0)
            close(fd);
        t.status = st;
        if (st != FL_OK)
            (void)FL_COPY(t.text, err.text);
        if (send(PEER_FD, &t, sizeof(t), MSG_NOSIGNAL) != (ssize_t)sizeof(t))
            return 1;
    }
    ops->close(g);
    return 0;
}

/* ==== the first process ==== */
static enum fl_status start_peer(int *sock, pid_t *pid, struct fl_err *err)
{
    char *argv[] = { (char *)(uintptr_t) "furlong-probe", (char *)(uintptr_t) "--peer", NULL };
    struct timeval wait = { .tv_sec = PEER_WAIT_S };
    posix_spawn_file_actions_t files;
    int ends[2], e;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return fl_fail_errno(err, "sockets to the second process");
    posix_spawn_file_actions_init(&files);
    /* the answer is the first one's alone */
    posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, ends[1], PEER_FD);
    posix_spawn_file_actions_addclosefrom_np(&files, PEER_FD + 1);
    e = posix_spawn(pid, "/proc/self/exe", &files, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&files);
    close(ends[1]);
    if (e != 0) {
        close(ends[0]);
        errno = e;
        return fl_fail_errno(err, "start the second process");
    }
    /* bounds a peer that hangs in the driver */
    (void)setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    *sock = ends[0];
    return FL_OK;
}

static enum fl_status ask_peer(int sock, const struct ask *a, int fd, struct fl_err *err)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } ctl = { 0 };
    struct iovec v = { (void *)(uintptr_t)a, sizeof(*a) };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };
    struct told t;
    int none;

    if (fd >= 0) {
        m.msg_control = &ctl;
        m.msg_controllen = sizeof(ctl.room);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
                               .cmsg_level = SOL_SOCKET,
                               .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    }
    if (sendmsg(sock, &m, MSG_NOSIGNAL) != (ssize_t)sizeof(*a))
        return fl_fail_errno(err, "the second process is gone");
    if (receive(sock, &t, sizeof(t), &none) != (ssize_t)sizeof(t)) {
        (void)shutdown(sock, SHUT_RDWR); /* a late answer would be the next question's */
        return fl_fail(err, FL_UNREACHABLE, "the second process gave no answer in %d s",
                       PEER_WAIT_S);
    }
    t.text[sizeof(t.text) - 1] = 0;
    return t.status == FL_OK
               ? FL_OK
               : fl_fail(err, t.status < FL_STATUS_COUNT ? (enum fl_status)t.status : FL_INTERNAL,
                         "%s", t.text);
}

static enum fl_status paint(const struct gpu_ops *ops, struct gpu *g, uint64_t addr,
                            struct fl_err *err)
{
    struct gpu_stream *s;
    enum fl_status st;

    FL_TRY(ops->stream(g, &s, err));
    st = ops->fill(s, addr, PATTERN, LOOK_BYTES, err);
    if (st == FL_OK)
        st = ops->stream_sync(s, err);
    ops->stream_free(s);
    return st;
}

static enum fl_status try_fd(const struct gpu_ops *ops, struct gpu *g, int sock, struct fl_err *err)
{
    const struct gpu_info *info = ops->info(g);
    struct ask a = { .bytes = info->granularity_bytes };
    struct gpu_chunk c;
    uint64_t addr;
    int fd = -1;
    enum fl_status st;

    if (!info->vmm || !info->posix_fd)
        return fl_fail(err, FL_UNSUPPORTED, "the driver says that it cannot");
    (void)FL_COPY(a.uuid, info->uuid);
    FL_TRY(ops->chunk_create(g, a.bytes, &c, err));
    st = ops->reserve(g, a.bytes, &addr, err);
    if (st == FL_OK) {
        st = ops->map(g, addr, &c, true, err);
        if (st == FL_OK) {
            st = paint(ops, g, addr, err);
            if (st == FL_OK)
                st = ops->chunk_export(g, &c, &fd, err);
            if (st == FL_OK)
                st = ask_peer(sock, &a, fd, err);
            if (fd >= 0)
                close(fd);
            (void)ops->unmap(g, addr, a.bytes, NULL);
        }
        ops->unreserve(g, addr, a.bytes);
    }
    ops->chunk_release(g, &c);
    return st;
}

static enum fl_status try_handle(const struct gpu_ops *ops, struct gpu *g, int sock,
                                 struct fl_err *err)
{
    const struct gpu_info *info = ops->info(g);
    struct ask a = { .bytes = LOOK_BYTES };
    uint64_t addr;
    enum fl_status st;

    (void)FL_COPY(a.uuid, info->uuid);
    FL_TRY(ops->alloc(g, LOOK_BYTES, &addr, err));
    st = paint(ops, g, addr, err);
    if (st == FL_OK)
        st = ops->ipc_get(g, addr, &a.handle, &a.off, err);
    if (st == FL_OK)
        st = ask_peer(sock, &a, -1, err);
    ops->free(g, addr);
    return st;
}

static void look_at_device(const struct gpu_ops *ops, int sock, struct gpu_found *f)
{
    struct fl_err err = { 0 };
    struct gpu *g;

    if (ops->open(f->info.uuid, &g, &err) != FL_OK) {
        (void)FL_COPY(f->opens_not, err.text);
        (void)FL_COPY(f->fd_not, "the device does not open");
        (void)FL_COPY(f->handle_not, "the device does not open");
        return;
    }
    f->opens = true;
    f->fd_shares = try_fd(ops, g, sock, &err) == FL_OK;
    if (!f->fd_shares)
        (void)FL_COPY(f->fd_not, err.text);
    f->handle_shares = try_handle(ops, g, sock, &err) == FL_OK;
    if (!f->handle_shares)
        (void)FL_COPY(f->handle_not, err.text);
    ops->close(g);
}

/* Contexts on all of them at once, so it comes last: half a gigabyte each for a moment. */
static void look_at_peers(const struct gpu_ops *ops, struct gpu_found *f, size_t n)
{
    struct gpu *g[GPU_MAX] = { 0 };

    for (size_t i = 0; n > 1 && i < n; i++)
        if (f[i].opens && ops->open(f[i].info.uuid, &g[i], NULL) != FL_OK)
            g[i] = NULL;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < n; k++)
            if (i != k && g[i] && g[k] && ops->peer(g[i], g[k], NULL) == FL_OK)
                f[i].peers |= 1ull << k;
    for (size_t i = 0; i < n; i++)
        if (g[i])
            ops->close(g[i]);
}

/* One that hangs in the driver may not even die: it goes when we do (PR_SET_PDEATHSIG). */
static void end_peer(pid_t pid)
{
    const struct timespec nap = { .tv_nsec = 10000000 };

    for (unsigned i = 0; i < 2 * PEER_LEAVES; i++) {
        if (waitpid(pid, NULL, WNOHANG) != 0) /* it has gone, or somebody else has waited for it */
            return;
        if (i == PEER_LEAVES)
            (void)kill(pid, SIGKILL); /* not yet waited for: the number is still its own */
        nanosleep(&nap, NULL);
    }
}

static enum fl_status probe_all(struct gpu_found *out, size_t *n, struct fl_err *err)
{
    struct gpu_info all[GPU_MAX];
    const struct gpu_ops *ops;
    size_t count = GPU_MAX;
    int sock = -1;
    pid_t pid = -1;

    FL_TRY(gpu_pick(&ops, err));
    /* first: a driver that is started does not survive a fork */
    FL_TRY(start_peer(&sock, &pid, err));
    enum fl_status st = ops->list(all, &count, err);
    for (size_t i = 0; i < count && st == FL_OK; i++) {
        out[i] = (struct gpu_found){ .info = all[i] };
        look_at_device(ops, sock, &out[i]);
    }
    if (st == FL_OK)
        look_at_peers(ops, out, count);
    close(sock); /* the peer leaves */
    end_peer(pid);
    if (st == FL_OK)
        *n = count;
    return st;
}

static void print(const struct gpu_found *f, size_t n)
{
    char total[16];

    if (n == 0)
        puts("no devices");
    for (size_t i = 0; i < n; i++, f++) {
        printf("%s  %s, compute capability %d.%d, %s, %s\n", f->info.uuid, f->info.name,
               f->info.major, f->info.minor,
               f->info.total_bytes == UINT64_MAX ? "memory not said"
                                                 : fl_bytes_text(total, f->info.total_bytes),
               f->info.integrated ? "one memory with the host" : "memory of its own");
        printf("  opens: %s\n", f->opens ? "yes" : f->opens_not);
        printf("  shares chunks by descriptor: %s\n", f->fd_shares ? "yes" : f->fd_not);
        printf("  shares allocations by handle: %s\n", f->handle_shares ? "yes" : f->handle_not);
        if (n > 1)
            printf("  reads the memory of %d of the %zu others\n", __builtin_popcountll(f->peers),
                   n - 1);
    }
}

static bool write_all(const void *data, size_t len)
{
    for (const char *at = data; len > 0;) {
        ssize_t n = write(STDOUT_FILENO, at, len);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        at += n;
        len -= (size_t)n;
    }
    return true;
}

int gpu_probe_main(int argc, char **argv)
{
    static struct gpu_found found[GPU_MAX];
    struct fl_err err = { 0 };
    size_t n = 0;

    if (argc > 1 && strcmp(argv[1], "--peer") == 0)
        return peer_main();
    bool raw = argc > 1 && strcmp(argv[1], "--raw") == 0;
    if (argc > 1 && !raw) {
        fprintf(stderr,
                "furlong-probe: %s: takes no arguments; it prints what the devices of this machine "
                "can\n",
                argv[1]);
        return 2;
    }
    enum fl_status st = fl_fault_env(&err);
    if (st == FL_OK)
        st = probe_all(found, &n, &err);
    if (raw) {
        struct probe_head h = { PROBE_MAGIC, sizeof(*found), (uint32_t)n, st, "" };

        (void)FL_COPY(h.text, err.text);
        return write_all(&h, sizeof(h)) && write_all(found, n * sizeof(*found)) ? 0 : 1;
    }
    if (st != FL_OK)
        fprintf(stderr, "furlong-probe: %s\n", err.text);
    else
        print(found, n);
    return st == FL_OK ? 0 : st == FL_INVALID ? 2 : 1;
}
