/* Calls over a unix socket against what the bare socket gives, and over TCP with TLS against the same without, in the
 * same run: one JSON line each.
 *
 *     bench_call [seconds of each figure, default 1] [CERT KEY CA: names 127.0.0.1; without them nothing of TLS]
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

#include "bench/must.h"
#include "transport/call/call.h"
#include "transport/tls/tls.h"

enum { BODY = 64, FRAME = 32 + BODY, BATCH = 64, BULK = 64 << 20, SAMPLES = 1 << 20 };
enum { ECHO = 1, TAKE = 2 };
static const uint64_t sec = 1000000000;
static uint64_t span_ns;

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

enum { AT = 128 };
static struct tls_id *certificate; /* NULL: none is given */

static void serve(const char *target, bool tls, int ready_fd)
{
    struct stream_to at = { .target = target, .tls = tls ? certificate : NULL };
    char where[AT] = "";
    struct wire_hello me = { .role = "bench" };
    struct stream_server *server;
    struct fl_loop *l;
    struct fl_err err;

    if (fl_loop_create(NULL, &l, &err) != FL_OK ||
        stream_listen(l, &stream_sock, &at, &me, on_accepted, NULL, &server, &err) != FL_OK)
        die("serve", &err);
    snprintf(where, sizeof(where), "%s", stream_server_at(server));
    raw_write(ready_fd, where, sizeof(where));
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

static pid_t child_of(int pair[2], char *bulk, const char *target, bool tls)
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
        serve(target, tls, pair[1]);
    else if (bulk)
        raw_sink(pair[1], bulk);
    raw_echo(pair[1]);
    _exit(0);
}

static struct call_peer *connect_to(struct fl_loop *l, int serving, bool tls)
{
    static const struct call_life life = { .opened = on_opened };
    struct wire_hello me = { .role = "bench" };
    char target[AT];
    struct stream_to to = { .target = target, .tls = tls ? certificate : NULL };
    struct call_peer *p;
    struct stream *s;
    struct fl_err err;

    if (recv(serving, target, sizeof(target), MSG_WAITALL) != sizeof(target))
        die("the process that serves", NULL);
    opened = false;
    if (stream_connect(l, &stream_sock, &to, &me, NULL, NULL, &s, &err) != FL_OK ||
        call_peer_create(s, NULL, 0, &life, NULL, &p, &err) != FL_OK)
        die("connect", &err);
    while (!opened)
        fl_loop_turn(l, -1);
    return p;
}

static const unsigned windows[] = { 1, BATCH };

static void against_raw(struct fl_loop *l, int echo, int sink, const char *bulk)
{
    for (unsigned i = 0; i < FL_LEN(windows); i++) {
        double p50, p99, raw = raw_rate(echo, windows[i]), calls = call_rate(l, windows[i], &p50, &p99);

        printf("{\"bench\":\"call\",\"carrier\":\"unix\",\"outstanding\":%u,\"body_bytes\":%d,"
               "\"calls_per_s\":%.0f,"
               "\"p50_us\":%.1f,\"p99_us\":%.1f,\"limit\":\"raw unix "
               "socket\",\"limit_per_s\":%.0f,\"ratio\":%.3f}\n",
               windows[i], BODY, calls, p50, p99, raw, calls / raw);
        fflush(stdout);
    }
    double raw = raw_bulk(sink, bulk), got = call_bulk(l, bulk);

    printf("{\"bench\":\"call_bulk\",\"carrier\":\"unix\",\"blob_bytes\":%d,\"gb_per_s\":%.3f,"
           "\"limit\":\"raw unix socket\",\"limit_gb_per_s\":%.3f,\"ratio\":%.3f}\n",
           BULK, got, raw, got / raw);
    fflush(stdout);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

/* In turns, and the middle of each: others of this machine take their time from both. */
enum { ROUNDS = 5, WITHOUT = 0, WITH = 1 };

static double middle(double of[ROUNDS])
{
    qsort(of, ROUNDS, sizeof(*of), by_value);
    return of[ROUNDS / 2];
}

static void against_plain(struct fl_loop *l, struct call_peer *const both[2], const char *bulk)
{
    double rate[2][ROUNDS], p50[2][ROUNDS], p99;

    for (unsigned i = 0; i < FL_LEN(windows); i++) {
        for (int k = 0; k < 2 * ROUNDS; k++) {
            peer = both[k % 2];
            rate[k % 2][k / 2] = call_rate(l, windows[i], &p50[k % 2][k / 2], &p99);
        }
        double with = middle(rate[WITH]), without = middle(rate[WITHOUT]);

        printf("{\"bench\":\"call_tls\",\"carrier\":\"tcp\",\"outstanding\":%u,\"body_bytes\":%d,\"calls_per_s\":%.0f,"
               "\"p50_us\":%.1f,\"limit\":\"the same without TLS\",\"limit_per_s\":%.0f,\"limit_p50_us\":%.1f,"
               "\"ratio\":%.3f}\n",
               windows[i], BODY, with, middle(p50[WITH]), without, middle(p50[WITHOUT]), with / without);
        fflush(stdout);
    }
    for (int k = 0; k < 2 * ROUNDS; k++) {
        peer = both[k % 2];
        rate[k % 2][k / 2] = call_bulk(l, bulk);
    }
    double with = middle(rate[WITH]), without = middle(rate[WITHOUT]);

    printf("{\"bench\":\"call_tls_bulk\",\"carrier\":\"tcp\",\"blob_bytes\":%d,\"gb_per_s\":%.3f,"
           "\"limit\":\"the same without TLS\",\"limit_gb_per_s\":%.3f,\"ratio\":%.3f}\n",
           BULK, with, without, with / without);
}

int main(int argc, char **argv)
{
    char dir[] = "/tmp/bench-call-XXXXXX", target[64], *bulk = malloc(BULK);
    int echo[2], sink[2], serving[3][2];
    struct call_peer *peers[3] = { NULL };
    struct fl_loop *l;
    struct fl_err err;
    pid_t pids[5] = { 0 };

    span_ns = (uint64_t)((argc > 1 ? atof(argv[1]) : 1.0) * (double)sec);
    bulk_into = bulk;
    took_ns = malloc(SAMPLES * sizeof(*took_ns));
    if (!bulk || !took_ns || !span_ns || !mkdtemp(dir))
        die("memory, a folder, or a time above 0", NULL);
    if (argc > 4 && tls_id_create(argv[2], argv[3], argv[4], &certificate, &err) != FL_OK)
        die("certificate", &err);
    memset(bulk, 1, BULK);
    snprintf(target, sizeof(target), "unix:%s/s", dir);
    pids[0] = child_of(echo, NULL, NULL, false);
    pids[1] = child_of(sink, bulk, NULL, false);
    pids[2] = child_of(serving[0], NULL, target, false);
    for (int i = 1; certificate && i < 3; i++)
        pids[2 + i] = child_of(serving[i], NULL, "127.0.0.1:0", i == 2);
    if (fl_loop_create(NULL, &l, &err) != FL_OK)
        die("loop", &err);
    for (int i = 0; i < (certificate ? 3 : 1); i++)
        peers[i] = connect_to(l, serving[i][0], i == 2);
    peer = peers[0];
    against_raw(l, echo[0], sink[0], bulk);
    if (certificate)
        against_plain(l, peers + 1, bulk);
    for (int i = 0; i < 3; i++)
        call_peer_destroy(peers[i]);
    fl_loop_turn(l, 0);
    fl_loop_destroy(l);
    for (int i = 0; i < 5 && pids[i]; i++) {
        kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
    }
    unlink(target + 5);
    rmdir(dir);
    tls_id_destroy(certificate);
    free(bulk);
    free(took_ns);
    return 0;
}
