#include "worker/roles/sglang/group.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/loop.h"
#include "common/conf/json.h"
#include "worker/roles/sglang/shell.h"

enum { LINE_MOST = 4096 };
#define GROUP_NAME "furlong"

struct group {
    struct calls *c;
    pid_t pid;
    int fd;
    bool made;
};

/* ---- the program ---- */
enum fl_status group_create(const char *command, struct calls *c, struct group **out,
                            struct fl_err *err)
{
    FL_AUTO(group) struct group *g = calloc(1, sizeof(*g));
    int pair[2];

    if (!g)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a group");
    *g = (struct group){ .c = c, .fd = -1 };
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        return fl_fail_errno(err, "a socket to %s", command);
    g->fd = pair[0];
    enum fl_status st = FL_FAULT("sglang.group") ? fl_fail(err, FL_EXHAUSTED, "start %s", command)
                                                 : shell_start(command, pair[1], &g->pid, err);

    (void)close(pair[1]);
    FL_TRY(st);
    *out = FL_TAKE(g);
    return FL_OK;
}

void group_destroy(struct group *g)
{
    if (!g)
        return;
    if (g->fd >= 0)
        (void)close(g->fd); /* its end of input */
    if (g->pid) {
        (void)kill(-g->pid, SIGKILL); /* holds nothing that has to be saved; may be stuck in NCCL */
        (void)waitpid(g->pid, NULL, 0);
    }
    free(g);
}

/* ---- commands ---- */
static enum fl_status wait_for(const struct group *g, short events, uint64_t end, uint32_t ms,
                               const char *what, struct fl_err *err)
{
    uint64_t now = fl_clock_boot_ns();
    struct pollfd p = { .fd = g->fd, .events = events };

    if (now < end && poll(&p, 1, (int)((end - now) / 1000000u + 1)) != 0)
        return FL_OK; /* there, gone, or a signal: the next try tells */
    return fl_fail(err, FL_TIMEOUT, "the group's rank 0 did not %s in %u ms", what, ms);
}

/* More than the socket holds is taken by a program that reads, and one may have stopped. */
static enum fl_status say(const struct group *g, json_t *take, int fd, uint32_t ms,
                          struct fl_err *err)
{
    char *text = json_dumps(take, JSON_COMPACT);
    size_t len = text ? strlen(text) : 0, at = 0;
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    enum fl_status st = text ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for a command");
    uint64_t end = fl_clock_boot_ns() + (uint64_t)ms * 1000000u;

    json_decref(take);
    if (text)
        text[len++] = '\n'; /* in place of its end */
    while (st == FL_OK && at < len) {
        struct iovec iov = { text + at, len - at };
        struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

        if (fd >= 0 && at == 0) {
            m.msg_control = &control;
            m.msg_controllen = sizeof(control);
            struct cmsghdr *c = CMSG_FIRSTHDR(&m);
            *c = (struct cmsghdr){ .cmsg_level = SOL_SOCKET,
                                   .cmsg_type = SCM_RIGHTS,
                                   .cmsg_len = CMSG_LEN(sizeof(int)) };
            memcpy(CMSG_DATA(c), &fd, sizeof(fd));
        }
        ssize_t n = sendmsg(g->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0)
            at += (size_t)n;
        else if (errno == EAGAIN)
            st = wait_for(g, POLLOUT, end, ms, "take its command", err);
        else if (errno != EINTR)
            st = fl_fail_errno(err, "the group's rank 0");
    }
    free(text);
    return st;
}

static enum fl_status hear(const struct group *g, uint32_t ms, struct fl_err *err)
{
    char line[LINE_MOST];
    size_t len = 0;
    json_t *o = NULL;
    uint64_t end = fl_clock_boot_ns() + (uint64_t)ms * 1000000u;

    while (!memchr(line, '\n', len) && len < sizeof(line)) {
        FL_TRY(wait_for(g, POLLIN, end, ms, "answer", err));
        ssize_t n = recv(g->fd, line + len, sizeof(line) - len, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (n <= 0)
            return fl_fail(err, FL_UNREACHABLE,
                           "the group's rank 0 has ended: its last lines are above");
        len += (size_t)n;
    }
    FL_TRY(fl_json_parse(line, len, "the group's rank 0", LINE_MOST, &o, err));
    const char *error = json_string_value(json_object_get(o, "error"));
    enum fl_status st =
        error && *error ? fl_fail(err, FL_INVALID, "the group's rank 0: %.180s", error) : FL_OK;
    json_decref(o);
    return st;
}

/* One command to our rank and one request to the engine's, which meet inside NCCL: both are under
 * way before either is waited for. When ours fails the other would wait for it: it is left to its
 * deadline. */
static enum fl_status both(struct group *g, const char *path, json_t *request_take,
                           json_t *command_take, int fd, uint32_t ms, struct fl_err *err)
{
    struct calls_post *post;
    json_t *answer = NULL;
    struct fl_err mine = { 0 };
    int done_fd;
    enum fl_status st = calls_post_start(g->c, path, request_take, ms, &post, &done_fd, err), ours;

    if (st != FL_OK) {
        json_decref(command_take);
        return st;
    }
    ours = say(g, command_take, fd, ms, &mine);
    if (ours == FL_OK)
        ours = hear(g, ms, &mine);
    st = calls_post_end(post, &answer, err);
    if (st == FL_OK)
        st = sglang_success(path, answer, err);
    json_decref(answer);
    if (ours != FL_OK && err)
        *err = mine;
    return ours != FL_OK ? ours : st;
}

static enum fl_status port_free(uint16_t *out, struct fl_err *err)
{
    struct sockaddr_in at = { .sin_family = AF_INET };
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && bind(fd, (struct sockaddr *)&at, len) == 0 &&
              getsockname(fd, (struct sockaddr *)&at, &len) == 0;
    enum fl_status st = ok ? FL_OK : fl_fail_errno(err, "a port for the group");

    if (fd >= 0)
        (void)close(fd);
    *out = ntohs(at.sin_port);
    return st;
}

/* The address that the server's ranks reach us at: of the socket that would speak with it. */
static const char *group_address(const struct group *g)
{
    return calls_server(g->c)->here;
}

static enum fl_status group_make(struct group *g, uint32_t ms, struct fl_err *err)
{
    uint32_t ranks = calls_server(g->c)->ranks;
    uint16_t port = 0;

    FL_TRY(port_free(&port, err));
    /* what an attempt before us left under that name would block ours */
    (void)sglang_do(calls_server(g->c), "/destroy_weights_update_group",
                    json_pack("{s:s}", "group_name", GROUP_NAME), ms, NULL);
    FL_TRY(both(g, "/init_weights_update_group",
                json_pack("{s:s, s:i, s:i, s:I, s:s, s:s}", "master_address", group_address(g),
                          "master_port", port, "rank_offset", 1, "world_size",
                          (json_int_t)ranks + 1, "group_name", GROUP_NAME, "backend", "nccl"),
                json_pack("{s:s, s:s, s:i, s:I, s:s}", "do", "init", "address", group_address(g),
                          "port", port, "world", (json_int_t)ranks + 1, "group", GROUP_NAME),
                -1, ms, err));
    g->made = true;
    return FL_OK;
}

enum fl_status group_update(struct group *g, const struct weights_version *v, bool flush,
                            uint32_t ms, struct fl_err *err)
{
    json_t *names = json_array(), *dtypes = json_array(), *shapes = json_array(),
           *offsets = json_array();
    enum fl_status st =
        v->fd < 0 ? fl_fail(err, FL_UNSUPPORTED,
                            "the weights' memory here is not to be shared by a descriptor")
                  : FL_OK;

    if (st == FL_OK && !g->made)
        st = group_make(g, ms, err);
    for (size_t i = 0; i < v->n; i++) {
        json_t *shape = json_array();

        for (unsigned d = 0; d < v->t[i].ndim; d++)
            json_array_append_new(shape, json_integer((json_int_t)v->t[i].shape[d]));
        json_array_append_new(names, json_string(v->t[i].name));
        json_array_append_new(dtypes, json_string(weights_dtype(v->t[i].dtype)));
        json_array_append_new(shapes, shape);
        json_array_append_new(offsets, json_integer((json_int_t)v->offsets[i]));
    }
    if (st == FL_OK)
        st = both(g, "/update_weights_from_distributed",
                  json_pack("{s:O, s:O, s:O, s:s, s:b, s:s}", "names", names, "dtypes", dtypes,
                            "shapes", shapes, "group_name", GROUP_NAME, "flush_cache", flush,
                            "weight_version", v->label),
                  json_pack("{s:s, s:O, s:O, s:O}", "do", "send", "dtypes", dtypes, "shapes",
                            shapes, "offsets", offsets),
                  v->fd, ms, err);
    json_decref(names);
    json_decref(dtypes);
    json_decref(shapes);
    json_decref(offsets);
    return st;
}
