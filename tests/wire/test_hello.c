/* One suite over all carriers: who gets in, and who does not. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/file.h"
#include "tests/certs.h"
#include "tests/wire/rig.h"

static enum fl_status no_such_job(void *arg, const struct wire_hello *claims, struct fl_bytes *key,
                                  struct fl_err *err)
{
    (void)arg;
    (void)key;
    return fl_fail(err, FL_DENIED, "no job of worker attempt %u runs here", claims->seat.attempt);
}

static enum fl_status key_by_seat(void *arg, const struct wire_hello *claims, struct fl_bytes *key,
                                  struct fl_err *err)
{
    (void)arg;
    (void)err;
    *key = claims->seat.attempt == 3 ? (struct fl_bytes){ "three", 5 }
                                     : (struct fl_bytes){ "other", 5 };
    return FL_OK;
}

static enum fl_status fenced(void *arg, const struct wire_hello *peer, struct fl_err *err)
{
    (void)arg;
    return fl_fail(err, FL_STALE, "attempt %u was replaced", peer->seat.attempt);
}

static void set_wrong_key(struct rig *r)
{
    r->to.key = (struct fl_bytes){ "the kez", 7 };
}

static void set_no_key(struct rig *r)
{
    r->to.key = (struct fl_bytes){ 0 };
}

static void set_key_by_seat(struct rig *r)
{
    r->at.key = (struct fl_bytes){ 0 };
    r->at.key_of = key_by_seat;
    r->to.key = (struct fl_bytes){ "three", 5 };
}

static void set_other_seat(struct rig *r)
{
    set_key_by_seat(r);
    r->me.seat.attempt = 4;
}

static void set_no_job(struct rig *r)
{
    r->at.key_of = no_such_job;
}

static void set_fenced(struct rig *r)
{
    r->at.admit = fenced;
}

static void set_major(struct rig *r)
{
    r->me.major = 2;
    r->me.minor = 5;
}

static void set_far_major(struct rig *r)
{
    r->you.major = 7;
}

static void set_minor(struct rig *r)
{
    r->me.major = WIRE_MAJOR;
    r->me.minor = 99;
}

static void set_want(struct rig *r)
{
    memset(r->me.want.id.b, 0xaa, 28);
    r->me.want.attempt = 1;
    r->you.seat = r->me.want;
}

static void set_want_older(struct rig *r)
{
    set_want(r);
    r->you.seat.attempt = 2;
}

static const struct hello_row {
    const char *name;
    void (*set)(struct rig *r);
    enum fl_status wanted;
    const char *text;
} hello_rows[] = {
    { "another key", set_wrong_key, FL_DENIED, "another key" },
    { "no key", set_no_key, FL_DENIED, "another key" },
    { "key of the seat", set_key_by_seat, FL_OK, "" },
    { "key of another seat", set_other_seat, FL_DENIED, "another key" },
    { "no such job", set_no_job, FL_DENIED, "no job of worker attempt 3 runs here" },
    { "refused after the proof", set_fenced, FL_STALE, "attempt 3 was replaced" },
    { "another major", set_major, FL_UNSUPPORTED, "version 2.5 of the protocol and this side (" FURLONG_VERSION ") 1.0" },
    { "server of another major", set_far_major, FL_UNSUPPORTED, "version 7.0" },
    { "a later minor", set_minor, FL_OK, "" },
    { "the wanted one", set_want, FL_OK, "" },
    { "a later attempt than wanted", set_want_older, FL_STALE,
      "aaaaaaaa attempt 1 is wanted and this is" },
};

static void proves_the_key_before_anything(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        for (unsigned i = 0; i < FL_LEN(hello_rows); i++) {
            const struct hello_row *row = &hello_rows[i];
            struct fl_err err = { 0 };
            struct rig r;

            rig_init(&r, c, NULL);
            r.to.again = i % 2; /* a refusal is final, trying again or not */
            row->set(&r);
            t_ok(rig_listen(&r, &err), &err);
            t_ok(rig_dial(&r, &err), &err);
            rig_until(&r, r.client.closed || (r.client.opened && r.far.opened));
            t_int_eq(r.client.closed, row->wanted != FL_OK, "%s over %s: %s", row->name, c->name,
                     r.client.why.text);
            t_int_eq(r.client.why.status, row->wanted, "%s over %s: %s", row->name, c->name,
                     r.client.why.text);
            t_has(r.client.why.text, row->text);
            if (row->wanted != FL_OK) {
                rig_until(&r, r.refused);
                t_int_eq(r.far.opened, 0);
                t_int_eq(r.client.opened, 0);
            }
            rig_fini(&r);
        }
    }
}

static void hang_up(void *arg, struct stream *s)
{
    ((struct rig *)arg)->far.opened++;
    stream_close(s, NULL);
}

/* Who dials learns who answered, also when that is all that the other side had to say. */
static void opens_before_a_farewell(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct fl_err err = { 0 };
        struct rig r;

        rig_init(&r, c, NULL);
        t_ok(stream_listen(r.loop, c->ops, &r.at, &r.you, hang_up, &r, &r.server, &err), &err);
        r.to.target = stream_server_at(r.server);
        t_ok(rig_dial(&r, &err), &err);
        rig_until(&r, r.client.closed);
        t_int_eq(r.client.opened, 1, "%s: %s", c->name, r.client.why.text);
        t_int_eq(r.far.opened, 1);
        rig_fini(&r);
    }
}

static void reads_the_key_file(void **state)
{
    struct fl_err err = { 0 };
    struct rig r;

    (void)state;
    rig_init(&r, &carriers[0], NULL);
    t_ok(fl_file_write(t_path("token"), 0600, "the key \n", 9, &err), &err);
    r.to.key_path = t_path("token");
    t_ok(rig_listen(&r, &err), &err);
    t_ok(rig_dial(&r, &err), &err);
    rig_until(&r, r.client.opened && r.far.opened);
    rig_fini(&r);

    rig_init(&r, &carriers[0], NULL);
    t_ok(fl_file_write(t_path("token"), 0600, "\n", 1, &err), &err);
    r.to.key_path = t_path("token");
    r.to.target = "unix:/nowhere";
    t_refused(rig_dial(&r, &err), FL_INVALID, &err);
    r.to.key_path = t_path("none");
    t_refused(rig_dial(&r, &err), FL_NOT_FOUND, &err);
    rig_fini(&r);
}

static void gives_up_on_silence(void **state)
{
    (void)state;
    EACH_CARRIER(c)
    {
        struct fl_held_clock held;
        struct fl_err err = { 0 };
        struct rig r;

        if (c->ops == &stream_lossy)
            continue; /* lossy ones wait for their own timers */
        rig_init(&r, c, &held);
        r.to.connect_ms = 700;
        t_ok(rig_listen(&r, &err), &err);
        t_ok(rig_dial(&r, &err), &err);
        fl_loop_pass(r.loop, &held, 701 * 1000000ull);
        rig_until(&r, r.client.closed);
        t_int_eq(r.client.why.status, FL_TIMEOUT, "over %s: %s", c->name, r.client.why.text);
        t_has(r.client.why.text, "within 700 ms");
        rig_fini(&r);
    }
}

/* ---- who does not speak it at all */

static int raw_connect(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    snprintf(a.sun_path, sizeof(a.sun_path), "%s", path);
    t_true(connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0);
    return fd;
}

static void talk_until_closed(struct rig *r, int fd, const uint8_t *say, size_t n)
{
    char sink[512];
    size_t sent = 0;

    for (int i = 0; i < 2000; i++) {
        ssize_t rc = sent < n ? send(fd, say + sent, n - sent, MSG_NOSIGNAL) : 0;

        sent += rc > 0 ? (size_t)rc : 0;
        rc = recv(fd, sink, sizeof(sink), 0);
        if (rc == 0 || (rc < 0 && errno != EAGAIN))
            return;
        fl_loop_turn(r->loop, 1);
    }
    t_true(false, "the server keeps a peer that speaks garbage");
}

static void throws_out_garbage(void **state)
{
    static const uint8_t zeros[64];
    static const struct wire_head late = { .kind = WIRE_REQUEST, .body_bytes = 3, .id = 1 };
    static const struct wire_head vast = { .kind = WIRE_HELLO, .body_bytes = 0x7fffffff, .id = 1 };
    static const struct wire_head early = { .kind = WIRE_HELLO, .body_bytes = 32, .id = 3 };
    static const struct {
        const char *name;
        const void *say;
        size_t n;
    } rows[] = {
        { "HTTP", "GET / HTTP/1.1\r\nHost: a\r\n\r\n.............", 40 },
        { "a request before HELLO", &late, sizeof(late) },
        { "a HELLO of two gigabytes", &vast, sizeof(vast) },
        { "a proof before HELLO", &early, 64 },
        { "zeros", zeros, 64 },
    };
    struct carrier c = { "unix", &stream_sock, "unix:*", NULL };
    struct fl_err err = { 0 };
    uint8_t noise[4096], again[64] = { 0 };
    uint64_t seed = 11;
    struct rig r;

    (void)state;
    rig_init(&r, &c, NULL);
    t_ok(rig_listen(&r, &err), &err);
    memcpy(again, &early, sizeof(early));
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        int fd = raw_connect(r.target + 5);

        talk_until_closed(&r, fd, i == 3 ? again : rows[i].say, rows[i].n);
        close(fd);
        rig_until(&r, r.refused == i + 1);
        t_int_eq(r.refusal.status, FL_CORRUPT, "%s: %s", rows[i].name, r.refusal.text);
    }
    for (unsigned i = 0; i < 50; i++) {
        int fd = raw_connect(r.target + 5);

        for (size_t k = 0; k < sizeof(noise); k++)
            noise[k] = (uint8_t)(t_random(&seed) >> 40);
        talk_until_closed(&r, fd, noise, sizeof(noise));
        close(fd);
    }
    t_ok(rig_dial(&r, &err), &err); /* and others still get in */
    rig_until(&r, r.client.opened && r.far.opened);
    rig_fini(&r);
}

static void gives_up_on_the_mute(void **state)
{
    struct carrier c = { "unix", &stream_sock, "unix:*", NULL };
    struct fl_held_clock held;
    struct fl_err err = { 0 };
    struct rig r;
    int fd;

    (void)state;
    rig_init(&r, &c, &held);
    t_ok(rig_listen(&r, &err), &err);
    fd = raw_connect(r.target + 5);
    for (int i = 0; i < 5; i++)
        fl_loop_turn(r.loop, 1);
    fl_loop_pass(r.loop, &held, 4999 * 1000000ull);
    t_int_eq(r.refused, 0);
    fl_loop_pass(r.loop, &held, 2 * 1000000ull);
    rig_until(&r, r.refused);
    t_int_eq(r.refusal.status, FL_TIMEOUT, "%s", r.refusal.text);
    t_has(r.refusal.text, "5000 ms");
    close(fd);
    rig_fini(&r);
}

/* Answers what HTTP/2 wants answered of who is alive: settings, and pings. */
static void http2_answer(int fd, const uint8_t *in, size_t n)
{
    enum { HEAD = 9, SETTINGS = 4, PING = 6, ACK = 1 };

    for (size_t at = 0; at + HEAD <= n;) {
        size_t len = (size_t)in[at] << 16 | (size_t)in[at + 1] << 8 | in[at + 2];
        uint8_t out[HEAD + 8] = { 0, 0, 0, in[at + 3], ACK };

        if (at + HEAD + len > n)
            return;
        if (in[at + 3] == PING && !(in[at + 4] & ACK) && len == 8) {
            out[2] = 8;
            memcpy(out + HEAD, in + at + HEAD, 8);
            (void)send(fd, out, sizeof(out), MSG_NOSIGNAL);
        } else if (in[at + 3] == SETTINGS && !(in[at + 4] & ACK)) {
            (void)send(fd, out, HEAD, MSG_NOSIGNAL);
        }
        at += HEAD + len;
    }
}

/* A connection to gRPC that says nothing, or greets and then asks for nothing, is not kept. */
static void gives_up_on_who_asks_nothing(void **state)
{
    static const char greeting[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";
    static const size_t said[] = { 0, 3, sizeof(greeting) - 1 };
    static const struct carrier both[] = { { "rpc", &stream_rpc, "127.0.0.1:0", NULL, false },
                                           { "rpc, TLS", &stream_rpc, "127.0.0.1:0", NULL, true } };

    (void)state;
    for (size_t k = 0; k < FL_LEN(both); k++) {
        struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        int fd[FL_LEN(said)];
        bool ended[FL_LEN(said)] = { 0 };
        struct fl_err err = { 0 };
        size_t left = FL_LEN(said);
        struct rig r;

        rig_init(&r, &both[k], NULL);
        t_ok(rig_listen(&r, &err), &err);
        a.sin_port = htons((uint16_t)atoi(strrchr(stream_server_at(r.server), ':') + 1));
        for (size_t i = 0; i < FL_LEN(said); i++) {
            fd[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            t_true(connect(fd[i], (struct sockaddr *)&a, sizeof(a)) == 0);
            if (said[i])
                t_int_eq(send(fd[i], greeting, said[i], MSG_NOSIGNAL), said[i]);
        }
        for (uint64_t due = fl_clock_boot_ns() + 15000000000ull; left;) {
            t_true(fl_clock_boot_ns() < due, "%zu of %zu are kept over %s", left, FL_LEN(said),
                   both[k].name);
            fl_loop_turn(r.loop, 50);
            for (size_t i = 0; i < FL_LEN(said); i++) {
                uint8_t sink[2048];
                ssize_t n = ended[i] ? -1 : recv(fd[i], sink, sizeof(sink), MSG_DONTWAIT);

                if (ended[i])
                    continue;
                if (n > 0 && !both[k].tls)
                    http2_answer(fd[i], sink, (size_t)n);
                if (n == 0 || (n < 0 && errno == ECONNRESET)) {
                    ended[i] = true;
                    left--;
                }
            }
        }
        for (size_t i = 0; i < FL_LEN(said); i++)
            close(fd[i]);
        rig_fini(&r);
    }
}

/* Who speaks HTTP/1 or TLS at a port of gRPC reads where to go with it; others come in as before, under their own
 * address. */
static void says_where_others_go(void **state)
{
    static const struct {
        const char *name, *say;
        size_t n;
    } rows[] = {
        { "HTTP", "POST /api/jobs/ HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 59 },
        { "TLS", "\x16\3\1\2\0\1\0\1\xfc\3\3", 11 },
        { "nothing that is known", "*1\r\n$4\r\nPING\r\n", 14 },
    };
    static const struct carrier c = { "rpc", &stream_rpc, "127.0.0.1:0", NULL, false };
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct fl_err err = { 0 };
    struct rig r;

    (void)state;
    rig_init(&r, &c, NULL);
    r.at.says = "Jobs go to http://10.77.0.1:8265";
    t_ok(rig_listen(&r, &err), &err);
    a.sin_port = htons((uint16_t)atoi(strrchr(stream_server_at(r.server), ':') + 1));
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        char heard[1024] = "";
        ssize_t n = 0;

        t_true(connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0);
        t_int_eq(send(fd, rows[i].say, rows[i].n, MSG_NOSIGNAL), rows[i].n);
        rig_until(&r, (n = recv(fd, heard, sizeof(heard) - 1, MSG_DONTWAIT)) > 0);
        t_true(strncmp(heard, "HTTP/1.1 421 ", 13) == 0, "%s: %s", rows[i].name, heard);
        t_has(heard, "\r\n\r\nJobs go to http://10.77.0.1:8265\n");
        rig_until(&r, recv(fd, heard, sizeof(heard), MSG_DONTWAIT) == 0);
        close(fd);
    }
    t_ok(rig_dial(&r, &err), &err);
    rig_until(&r, r.client.opened && r.far.opened);
    t_has(stream_name(r.far.s), "127.0.0.1:");
    t_int_eq(r.refused, 0);
    rig_fini(&r);
}

/* A server that ends waits for nobody who greeted in HTTP/2 and stays silent. */
static void ends_with_silent_ones_inside(void **state)
{
    static const char greeting[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";
    static const struct carrier c = { "rpc", &stream_rpc, "127.0.0.1:0", NULL, false };
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct fl_err err = { 0 };
    int fd[3];
    struct rig r;

    (void)state;
    for (int i = 0; i < 3; i++)
        fd[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); /* open before and after */
    rig_init(&r, &c, NULL);
    t_ok(rig_listen(&r, &err), &err);
    a.sin_port = htons((uint16_t)atoi(strrchr(stream_server_at(r.server), ':') + 1));
    for (int i = 0; i < 3; i++) {
        uint8_t sink[64];

        t_true(connect(fd[i], (struct sockaddr *)&a, sizeof(a)) == 0);
        t_int_eq(send(fd[i], greeting, sizeof(greeting) - 1, MSG_NOSIGNAL), sizeof(greeting) - 1);
        rig_until(&r, recv(fd[i], sink, sizeof(sink), MSG_DONTWAIT) > 0); /* gRPC's own greeting */
    }
    uint64_t since = fl_clock_boot_ns();

    rig_fini(&r);
    t_true(fl_clock_boot_ns() - since < 8000000000ull, "it took %llu ms",
           (unsigned long long)((fl_clock_boot_ns() - since) / 1000000));
    for (int i = 0; i < 3; i++)
        close(fd[i]);
}

/* Certificates are replaced under a server and a client that go on. */
static void shows_the_new_certificate(void **state)
{
    static const struct carrier c = { "rpc, TLS", &stream_rpc, "127.0.0.1:0", NULL, true };
    char live[3][FL_PATH_MAX];
    struct t_cert a, of_a, b, of_b;
    struct tls_id *id, *old;
    struct fl_err err = { 0 };
    struct rig r;

    (void)state;
    t_cert_make(&a, "ca-a", NULL, NULL, 0, 9);
    t_cert_make(&b, "ca-b", NULL, NULL, 0, 9);
    t_cert_make(&of_a, "of-a", &a, "IP:127.0.0.1", 0, 9);
    t_cert_make(&of_b, "of-b", &b, "IP:127.0.0.1", 0, 9);
    for (int i = 0; i < 3; i++)
        snprintf(live[i], FL_PATH_MAX, "%s%d", t_path("live"), i);
    t_put(live[0], of_a.cert);
    t_put(live[1], of_a.key);
    t_put(live[2], a.cert);
    t_ok(tls_id_create(live[0], live[1], live[2], &id, &err), &err);
    t_ok(tls_id_create(of_a.cert, of_a.key, a.cert, &old, &err), &err);
    id->look_ns = 0;
    rig_init(&r, &c, NULL);
    r.at.tls = r.to.tls = id;
    t_ok(rig_listen(&r, &err), &err);
    t_ok(rig_dial(&r, &err), &err);
    rig_until(&r, r.client.opened && r.far.opened);
    stream_close(r.client.s, NULL);
    rig_until(&r, !r.client.s && !r.far.s);
    t_put(live[0], of_b.cert);
    t_put(live[1], of_b.key);
    t_put(live[2], b.cert);
    r.client.closed = 0;
    t_ok(rig_dial(&r, &err), &err);
    rig_until(&r, r.client.closed || (r.client.opened == 2 && r.far.opened == 2));
    t_int_eq(r.client.closed, 0, "%s", r.client.why.text);
    stream_close(r.client.s, NULL);
    rig_until(&r, !r.client.s && !r.far.s);
    r.client.closed = 0;
    r.to.tls = old;
    t_ok(rig_dial(&r, &err), &err);
    rig_until(&r, r.client.closed);
    t_int_eq(r.client.why.status, FL_DENIED, "%s", r.client.why.text);
    rig_fini(&r);
    tls_id_destroy(id);
    tls_id_destroy(old);
    t_cert_free(&a);
    t_cert_free(&b);
    t_cert_free(&of_a);
    t_cert_free(&of_b);
}

/* A caller gives up while HTTP/2 is being greeted, and the other side's SETTINGS come after that:
 * its socket goes. */
static void gives_up_half_way(void **state)
{
    static const uint8_t settings[9] = { 0, 0, 0, 4 };
    struct carrier c = { "rpc", &stream_rpc, "127.0.0.1:0", NULL };
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof(a);
    struct fl_err err = { 0 };
    char target[32], sink[512];
    struct rig r;
    int port = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), fd = -1;

    (void)state;
    t_true(bind(port, (struct sockaddr *)&a, len) == 0 && listen(port, 1) == 0 &&
           getsockname(port, (struct sockaddr *)&a, &len) == 0);
    snprintf(target, sizeof(target), "127.0.0.1:%d", ntohs(a.sin_port));
    rig_init(&r, &c, NULL);
    r.to.target = target;
    t_ok(rig_dial(&r, &err), &err);
    rig_until(&r, (fd = accept4(port, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0);
    rig_until(&r, recv(fd, sink, sizeof(sink), 0) >= 24); /* its preface */
    stream_close(r.client.s, NULL);
    rig_until(&r, !r.client.s);
    t_int_eq(send(fd, settings, sizeof(settings), MSG_NOSIGNAL), sizeof(settings));
    rig_until(&r, recv(fd, sink, sizeof(sink), 0) == 0);
    close(fd);
    rig_fini(&r);
    close(port);
}

static void send_fds(int fd, unsigned n)
{
    char byte = 1, room[CMSG_SPACE(200 * sizeof(int))] = { 0 };
    struct iovec iov = { &byte, 1 };
    struct msghdr m = { .msg_iov = &iov,
                        .msg_iovlen = 1,
                        .msg_control = room,
                        .msg_controllen = CMSG_SPACE(n * sizeof(int)) };
    int *fds = (int *)(void *)CMSG_DATA(CMSG_FIRSTHDR(&m));

    *CMSG_FIRSTHDR(&m) = (struct cmsghdr){ .cmsg_level = SOL_SOCKET,
                                           .cmsg_type = SCM_RIGHTS,
                                           .cmsg_len = CMSG_LEN(n * sizeof(int)) };
    for (unsigned i = 0; i < n; i++)
        fds[i] = 0;
    t_true(sendmsg(fd, &m, MSG_NOSIGNAL) == 1);
}

static void keeps_no_descriptor_that_it_did_not_ask_for(void **state)
{
    struct carrier c = { "unix", &stream_sock, "unix:*", NULL };
    struct fl_err err = { 0 };
    struct rig r;
    int fd;

    (void)state;
    rig_init(&r, &c, NULL);
    t_ok(rig_listen(&r, &err), &err);
    fd = raw_connect(r.target + 5);
    send_fds(fd, 100); /* more than a message may carry: some are lost */
    rig_until(&r, r.refused == 1);
    t_int_eq(r.refusal.status, FL_EXHAUSTED, "%s", r.refusal.text);
    close(fd);
    fd = raw_connect(r.target + 5);
    for (int i = 0; i < 3; i++)
        send_fds(fd, 60); /* that no frame speaks of */
    rig_until(&r, r.refused == 2);
    t_int_eq(r.refusal.status, FL_CORRUPT, "%s", r.refusal.text);
    close(fd);
    rig_fini(&r);
}

static void refuses_other_users(void **state)
{
    struct carrier c = { "unix", &stream_sock, "unix:*", NULL };
    struct fl_err err = { 0 };
    struct rig r;
    pid_t pid;
    int status;

    (void)state;
    if (geteuid() != 0)
        t_skip("only root can become another user");
    rig_init(&r, &c, NULL);
    t_ok(rig_listen(&r, &err), &err);
    t_true(chmod(t_tmp(), 0755) == 0 && chmod(r.target + 5, 0666) == 0);
    pid = fork(); /* system calls alone, then it leaves */
    if (pid == 0) {
        struct sockaddr_un a = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        char byte;

        memcpy(a.sun_path, r.target + 5, strlen(r.target + 5));
        if (setuid(65534) < 0 || connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0)
            _exit(1);
        _exit(read(fd, &byte, 1) == 0 ? 0 : 2); /* hung up, without a word */
    }
    for (int i = 0; i < 2000 && waitpid(pid, &status, WNOHANG) == 0; i++)
        fl_loop_turn(r.loop, 5);
    t_true(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
    t_true(chmod(t_tmp(), 0700) == 0);
    rig_fini(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(proves_the_key_before_anything),
        cmocka_unit_test(opens_before_a_farewell),
        cmocka_unit_test(reads_the_key_file),
        cmocka_unit_test(gives_up_on_silence),
        cmocka_unit_test(throws_out_garbage),
        cmocka_unit_test(gives_up_on_the_mute),
        cmocka_unit_test(gives_up_on_who_asks_nothing),
        cmocka_unit_test(says_where_others_go),
        cmocka_unit_test(ends_with_silent_ones_inside),
        cmocka_unit_test(shows_the_new_certificate),
        cmocka_unit_test(gives_up_half_way),
        cmocka_unit_test(keeps_no_descriptor_that_it_did_not_ask_for),
        cmocka_unit_test(refuses_other_users),
    };

    rig_warm();
    return t_run("hello", tests);
}
