/* Calls over a unix socket against what the bare socket gives, in the same run: one JSON line each.
 *
 *     bench_call [seconds of each figure, default 1]
 *
 * Two processes, as in life. "raw" exchanges frames of the same size over a socket pair with
 * nothing but read and write: the same number outstanding, all that is there in one write. "bulk"
 * is a blob lent by the caller into memory given by the receiver. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/call/call.h"

enum { BODY = 64, FRAME = 32 + BODY, BATCH = 64, BULK = 64 << 20, SAMPLES = 1 << 20 };
enum { ECHO = 1, TAKE = 2 };
static const uint64_t sec = 1000000000;
static uint64_t span_ns;

static void die(const char *what, const struct fl_err *err)
{
    fprintf(stderr, "bench_call: %s: %s\n", what, err ? err->text : strerror(errno));
    exit(1);
}

/* ---- the bare socket */

static void raw_write(int fd, const char *p, size_t n)
{
    while (n) {
        ssize_t rc = write(fd, p, n);

        if (rc < 0)
            die("write", NULL);
        p += rc;
        n -= (size_t)rc;
    }
}

static void raw_echo(int fd)
{
    static char buf[BATCH * FRAME];
    size_t have = 0;
    ssize_t rc;

    while ((rc = read(fd, buf + have, sizeof(buf) - have)) > 0) {
        size_t whole;

        have += (size_t)rc;
        whole = have - have % FRAME;
        raw_write(fd, buf, whole);
        memmove(buf, buf + whole, have - whole);
        have -= whole;
    }
    _exit(0);
}

static double raw_rate(int fd, unsigned outstanding)
{
    static char buf[BATCH * FRAME];
    uint64_t begin = fl_clock_boot_ns(), now = begin, n = 0;
    size_t have = 0;

    raw_write(fd, buf, outstanding * (size_t)FRAME);
    while (now - begin < span_ns) {
        ssize_t rc = read(fd, buf + have, outstanding * (size_t)FRAME - have);
        size_t whole;

        if (rc <= 0)
            die("read", NULL);
        have += (size_t)rc;
        whole = have - have % FRAME;
        raw_write(fd, buf, whole);
        n += whole / FRAME;
        memmove(buf, buf + whole, have - whole);
        have -= whole;
        now = fl_clock_boot_ns();
    }
    while (have < outstanding * (size_t)FRAME) /* the next figure begins with an empty socket */
        have += (size_t)read(fd, buf + have, outstanding * (size_t)FRAME - have);
    return (double)n * 1e9 / (double)(now - begin);
}

static void raw_sink(int fd, char *into)
{
    size_t have = 0;
    ssize_t rc;

    while ((rc = read(fd, into + have, BULK - have)) > 0)
        if ((have += (size_t)rc) == BULK) {
            raw_write(fd, "k", 1);
            have = 0;
        }
    _exit(0);
}

static double raw_bulk(int fd, const char *from)
{
    uint64_t begin = fl_clock_boot_ns(), n = 0;
    char ok;

    while (fl_clock_boot_ns() - begin < span_ns) {
        raw_write(fd, from, BULK);
        if (read(fd, &ok, 1) != 1)
            die("read", NULL);
        n += BULK;
    }
    return (double)n / (double)(fl_clock_boot_ns() - begin);
}

/* ---- calls: the process that serves */

static char *bulk_into;

static void serve_echo(void *service, struct call_req *req, const struct wire_msg *m)
{
    (void)service;
    call_reply(req, (struct fl_bytes){ m->body, m->head.body_bytes }, (struct fl_bytes){ 0 });
}

static void *take_room(void *service, uint64_t bytes)
{
    (void)service;
    return bytes <= BULK ? bulk_into : NULL;
}

static void serve_take(void *service, struct call_req *req, const struct wire_msg *m)
{
    (void)service;
    (void)m;
    call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

static const struct call_method methods[] = {
    { ECHO, "echo", serve_echo, NULL, NULL },
    { TAKE, "take", serve_take, take_room, NULL },
};

static void on_accepted(void *arg, struct stream *s)
{
    static struct call_peer *peer;
    struct fl_err err;

    (void)arg;
    if (call_peer_create(s, methods, FL_LEN(methods), NULL, NULL, &peer, &err) != FL_OK)
        die("peer", &err);
}

static void serve(const char *target, int ready_fd)
{
    struct stream_to at = { .target = target };
    struct wire_hello me = { .role = "bench" };
    struct stream_server *server;
    struct fl_loop *l;
    struct fl_err err;

    if (fl_loop_create(NULL, &l, &err) != FL_OK ||
        stream_listen(l, &stream_sock, &at, &me, on_accepted, NULL, &server, &err) != FL_OK)
        die("serve", &err);
    raw_write(ready_fd, "k", 1);
    fl_loop_run(l); /* until it is killed */
}

/* ---- calls: the process that asks */

struct slot {
    struct call_op op;
    uint64_t begun_ns;
};
static struct call_peer *peer;
static uint64_t done_n, end_ns;
static unsigned in_flight;
static uint32_t *took_ns;
static bool opened;

static void ask(struct slot *s);

static void on_done(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                    const struct fl_err *err)
{
    struct slot *s = container_of(op, struct slot, op);
    uint64_t now = fl_clock_boot_ns();

    (void)reply;
    if (st != FL_OK)
        die("call", err);
    took_ns[done_n++ % SAMPLES] = (uint32_t)(now - s->begun_ns);
    in_flight--;
    if (now < end_ns)
        ask(s);
}

static void ask(struct slot *s)
{
    static const char body[BODY];
    struct fl_err err;

    s->op = (struct call_op){ .done = on_done };
    s->begun_ns = fl_clock_boot_ns();
    if (call_start(peer, &(struct call_args){ .method = ECHO, .body = { body, BODY } }, &s->op,
                   &err) != FL_OK)
        die("call", &err);
    in_flight++;
}

static int by_size(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? -1 : x > y;
}

static double call_rate(struct fl_loop *l, unsigned outstanding, double *p50_us, double *p99_us)
{
    static struct slot slots[BATCH];
    uint64_t begin = fl_clock_boot_ns(), took;
    size_t n;

    done_n = 0;
    end_ns = begin + span_ns;
    for (unsigned i = 0; i < outstanding; i++)
        ask(&slots[i]);
    while (in_flight)
        fl_loop_turn(l, -1);
    took = fl_clock_boot_ns() - begin;
    n = done_n < SAMPLES ? done_n : SAMPLES;
    qsort(took_ns, n, sizeof(*took_ns), by_size);
    *p50_us = took_ns[n / 2] / 1e3;
    *p99_us = took_ns[n * 99 / 100] / 1e3;
    return (double)done_n * 1e9 / (double)took;
}

static bool bulk_done;

static void on_bulk(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                    const struct fl_err *err)
{
    (void)op;
    (void)reply;
    if (st != FL_OK)
        die("bulk", err);
    bulk_done = true;
}

static void on_left(struct wire_hold *h)
{
    (void)h;
}

static double call_bulk(struct fl_loop *l, const char *from)
{
    uint64_t begin = fl_clock_boot_ns(), n = 0;
    struct wire_hold hold = { on_left };
    struct fl_err err;

    while (fl_clock_boot_ns() - begin < span_ns) {
        struct call_op op = { .done = on_bulk };

        bulk_done = false;
        if (call_start(peer,
                       &(struct call_args){ .method = TAKE, .blob = { from, BULK }, .hold = &hold },
                       &op, &err) != FL_OK)
            die("bulk", &err);
        while (!bulk_done)
            fl_loop_turn(l, -1);
        n += BULK;
    }
    return (double)n / (double)(fl_clock_boot_ns() - begin);
}

static void on_opened(void *service, const struct wire_hello *who)
{
    (void)service;
    (void)who;
    opened = true;
}

static pid_t child_of(int pair[2], char *bulk, const char *target)
{
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) < 0)
        die("socket pair", NULL);
    pid = fork(); /* no thread is there yet */
    if (pid < 0)
        die("process", NULL);
    if (pid) {
        close(pair[1]);
        return pid;
    }
    close(pair[0]);
    if (target)
        serve(target, pair[1]);
    else if (bulk)
        raw_sink(pair[1], bulk);
    raw_echo(pair[1]);
    _exit(0);
}

int main(int argc, char **argv)
{
    static const struct call_life life = { .opened = on_opened };
    static const unsigned windows[] = { 1, BATCH };
    char dir[] = "/tmp/bench-call-XXXXXX", target[64], *bulk = malloc(BULK), ok;
    struct wire_hello me = { .role = "bench" };
    struct stream_to to = { .target = target };
    int echo[2], sink[2], serving[2];
    struct fl_loop *l;
    struct stream *s;
    struct fl_err err;
    pid_t pids[3];

    span_ns = (uint64_t)((argc > 1 ? atof(argv[1]) : 1.0) * (double)sec);
    bulk_into = bulk;
    took_ns = malloc(SAMPLES * sizeof(*took_ns));
    if (!bulk || !took_ns || !span_ns || !mkdtemp(dir))
        die("memory, a folder, or a time above 0", NULL);
    memset(bulk, 1, BULK);
    snprintf(target, sizeof(target), "unix:%s/s", dir);
    pids[0] = child_of(echo, NULL, NULL);
    pids[1] = child_of(sink, bulk, NULL);
    pids[2] = child_of(serving, NULL, target);
    if (read(serving[0], &ok, 1) != 1)
        die("the process that serves", NULL);
    if (fl_loop_create(NULL, &l, &err) != FL_OK ||
        stream_connect(l, &stream_sock, &to, &me, NULL, NULL, &s, &err) != FL_OK ||
        call_peer_create(s, NULL, 0, &life, NULL, &peer, &err) != FL_OK)
        die("connect", &err);
    while (!opened)
        fl_loop_turn(l, -1);
    for (unsigned i = 0; i < FL_LEN(windows); i++) {
        double p50, p99, raw = raw_rate(echo[0], windows[i]),
                         calls = call_rate(l, windows[i], &p50, &p99);

        printf("{\"bench\":\"call\",\"carrier\":\"unix\",\"outstanding\":%u,\"body_bytes\":%d,"
               "\"calls_per_s\":%.0f,"
               "\"p50_us\":%.1f,\"p99_us\":%.1f,\"limit\":\"raw unix "
               "socket\",\"limit_per_s\":%.0f,\"ratio\":%.3f}\n",
               windows[i], BODY, calls, p50, p99, raw, calls / raw);
        fflush(stdout);
    }
    double raw = raw_bulk(sink[0], bulk), got = call_bulk(l, bulk);

    printf("{\"bench\":\"call_bulk\",\"carrier\":\"unix\",\"blob_bytes\":%d,\"gb_per_s\":%.3f,"
           "\"limit\":\"raw unix socket\",\"limit_gb_per_s\":%.3f,\"ratio\":%.3f}\n",
           BULK, got, raw, got / raw);
    call_peer_destroy(peer);
    fl_loop_turn(l, 0);
    fl_loop_destroy(l);
    for (int i = 0; i < 3; i++) {
        kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
    }
    unlink(target + 5);
    rmdir(dir);
    free(bulk);
    free(took_ns);
    return 0;
}
