#include "worker/roles/sglang/loader.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/loop.h"
#include "common/conf/json.h"

enum { RANKS_MOST = 64, LINE_MOST = 4096 };

struct rank { /* that loads */
    int fd;
    size_t len;
    char line[LINE_MOST];
};
struct serving {
    struct loader *l;
    const struct weights_version *v;
    int data_fd, head_fd;
    struct rank ranks[RANKS_MOST];
    uint32_t n, done;
    char error[160]; /* of the first that failed */
};

enum fl_status loader_open(struct loader *l, const char *name, struct fl_err *err)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    uint64_t id[2];

    *l = (struct loader){ .fd = -1 };
    if (name && (*name != '@' || strlen(name) >= sizeof(l->name)))
        return fl_fail(err, FL_INVALID,
                       "--sglang-socket '%s': a name begins with @ and has at most %zu bytes", name,
                       sizeof(l->name) - 1);
    if (getrandom(id, sizeof(id), 0) != sizeof(id))
        return fl_fail_errno(err, "random bytes");
    if (name)
        snprintf(l->name, sizeof(l->name), "%s", name);
    else
        snprintf(l->name, sizeof(l->name), "@furlong-%016jx%016jx", (uintmax_t)id[0],
                 (uintmax_t)id[1]);
    size_t len = strlen(l->name);
    memcpy(at.sun_path + 1, l->name + 1, len - 1); /* abstract: no file to be left behind */
    l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0 ||
        bind(l->fd, (struct sockaddr *)&at,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len)) != 0 ||
        listen(l->fd, RANKS_MOST) != 0) {
        enum fl_status st = fl_fail_errno(err, "listen on %s", l->name);

        loader_close(l);
        return st;
    }
    return FL_OK;
}

void loader_close(struct loader *l)
{
    if (l->fd >= 0)
        (void)close(l->fd);
    l->fd = -1;
}

/* ---- what a rank gets ---- */
static enum fl_status head_make(const struct weights_version *v, int *out, struct fl_err *err)
{
    json_t *tensors = json_array();

    for (size_t i = 0; i < v->n; i++) {
        json_t *shape = json_array();

        for (unsigned d = 0; d < v->t[i].ndim; d++)
            json_array_append_new(shape, json_integer((json_int_t)v->t[i].shape[d]));
        json_array_append_new(tensors, json_pack("{s:s, s:s, s:o, s:I}", "name", v->t[i].name,
                                                 "dtype", weights_dtype(v->t[i].dtype), "shape",
                                                 shape, "offset", (json_int_t)v->offsets[i]));
    }
    json_t *o = json_pack("{s:s, s:o}", "version", v->label, "tensors", tensors);
    char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
    int fd = FL_FAULT("sglang.head") ? -1 : memfd_create("furlong-tensors", MFD_CLOEXEC);
    size_t len = text ? strlen(text) : 0;
    bool ok = text && fd >= 0 && write(fd, text, len) == (ssize_t)len;

    free(text);
    json_decref(o);
    if (ok) {
        *out = fd;
        return FL_OK;
    }
    enum fl_status st = fl_fail_errno(err, "a table of %zu tensors", v->n);
    if (fd >= 0)
        (void)close(fd);
    return st;
}

static enum fl_status read_only(int fd, int *out, struct fl_err *err)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    *out = open(path, O_RDONLY | O_CLOEXEC);
    return *out >= 0 ? FL_OK : fl_fail_errno(err, "open the weights' memory for reading");
}

static bool hand_over(const struct serving *s, int to)
{
    char one = 'F';
    struct iovec iov = { &one, 1 };
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(2 * sizeof(int))];
    } control = { 0 };
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
    };
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    int fds[2] = { s->data_fd, s->head_fd };

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(fds));
    memcpy(CMSG_DATA(c), fds, sizeof(fds));
    return sendmsg(to, &m, MSG_NOSIGNAL) == 1;
}

static void rank_accept(struct serving *s)
{
    struct ucred who = { .uid = (uid_t)-1 };
    socklen_t len = sizeof(who);
    int fd = accept4(s->l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return;
    bool ours = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len) == 0 && who.uid == geteuid();
    if (!ours || s->n == RANKS_MOST || !hand_over(s, fd)) {
        (void)close(fd);
        return;
    }
    s->ranks[s->n++] = (struct rank){ .fd = fd };
}

/* ---- what it answers ---- */
static void rank_said(struct serving *s, struct rank *r)
{
    struct fl_err err = { 0 };
    json_t *o = NULL;
    const char *error = "its answer is no JSON";

    if (!r->len)
        error = "it ended before it answered";
    else if (fl_json_parse(r->line, r->len, "the loader", LINE_MOST, &o, &err) == FL_OK)
        error = json_string_value(json_object_get(o, "error"));
    if (error && *error && !s->error[0])
        snprintf(s->error, sizeof(s->error), "rank %jd: %.130s",
                 (intmax_t)json_integer_value(json_object_get(o, "rank")), error);
    json_decref(o);
    (void)close(r->fd);
    r->fd = -1;
    s->done++;
}

static void rank_read(struct serving *s, struct rank *r)
{
    ssize_t n = recv(r->fd, r->line + r->len, sizeof(r->line) - r->len, 0);

    if (n < 0 && errno == EAGAIN)
        return;
    r->len += n > 0 ? (size_t)n : 0;
    if (n > 0 && !memchr(r->line, '\n', r->len) && r->len < sizeof(r->line))
        return;
    rank_said(s, r);
}

/* Until SGLang's own answer is there: the ranks have answered by then. */
static void serve(struct serving *s, int done_fd)
{
    for (bool over = false; !over;) {
        struct pollfd p[RANKS_MOST + 2] = { { s->l->fd, POLLIN, 0 }, { done_fd, POLLIN, 0 } };
        uint32_t n = s->n;

        for (uint32_t i = 0; i < n; i++)
            p[i + 2] = (struct pollfd){ s->ranks[i].fd, POLLIN, 0 };
        if (poll(p, n + 2, -1) < 0)
            continue; /* a signal */
        over = p[1].revents;
        for (uint32_t i = 0; i < n; i++)
            if (s->ranks[i].fd >= 0 && (p[i + 2].revents || over))
                rank_read(s, &s->ranks[i]);
        if (p[0].revents && !over)
            rank_accept(s);
    }
    for (uint32_t i = 0; i < s->n; i++)
        if (s->ranks[i].fd >= 0)
            rank_said(s, &s->ranks[i]);
}

/* A pickle of an empty list (PROTO 4, EMPTY_LIST, STOP), one for each rank of tensor parallelism:
 * the tensors come by the socket. */
static json_t *body_make(const struct weights_version *v, uint32_t tp, bool flush)
{
    json_t *none = json_array();

    for (uint32_t i = 0; i < tp; i++)
        json_array_append_new(none, json_string("gARdLg=="));
    return json_pack("{s:o, s:s, s:b, s:s}", "serialized_named_tensors", none, "load_format",
                     "furlong_sglang.load", "flush_cache", flush, "weight_version", v->label);
}

enum fl_status loader_update(struct loader *l, struct calls *c, const struct weights_version *v,
                             bool flush, uint32_t ms, struct fl_err *err)
{
    struct serving *s;
    struct calls_post *post = NULL;
    json_t *answer = NULL;
    uint32_t ranks = calls_server(c)->ranks;
    int done_fd = -1;
    enum fl_status st;

    if (v->fd < 0)
        return fl_fail(err, FL_UNSUPPORTED,
                       "the weights' memory here is not to be shared by a descriptor");
    if (ranks > RANKS_MOST)
        return fl_fail(err, FL_UNSUPPORTED, "%u ranks load weights, the loader serves %d", ranks,
                       RANKS_MOST);
    s = calloc(1, sizeof(*s));
    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the loader");
    *s = (struct serving){ .l = l, .v = v, .data_fd = -1, .head_fd = -1 };
    st = head_make(v, &s->head_fd, err);
    if (st == FL_OK)
        st = read_only(v->fd, &s->data_fd, err);
    if (st == FL_OK)
        st = calls_post_start(c, "/update_weights_from_tensor",
                              body_make(v, calls_server(c)->tp, flush), ms, &post, &done_fd, err);
    if (st == FL_OK) {
        serve(s, done_fd);
        st = calls_post_end(post, &answer, err);
    }
    if (st == FL_OK)
        st = sglang_success("/update_weights_from_tensor", answer, err);
    if (st == FL_OK && s->error[0])
        st = fl_fail(err, FL_INVALID, "the loader in the SGLang server: %s", s->error);
    if (st == FL_OK && s->done != ranks)
        st = fl_fail(
            err, FL_INVALID, "%u of %u ranks of the SGLang server came for their weights (%s)",
            s->done, ranks,
            s->done ? calls_server(c)->parallel : "was it started with FURLONG_SGLANG_SOCKET?");
    json_decref(answer);
    if (s->head_fd >= 0)
        (void)close(s->head_fd);
    if (s->data_fd >= 0)
        (void)close(s->data_fd);
    free(s);
    return st;
}
