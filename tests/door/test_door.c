/* A port and those who come to it: over loopback, and over unix sockets, whose peers count as from
 * elsewhere. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/addr.h"
#include "common/base/fault.h"
#include "tests/t.h"
#include "transport/door/door.h"

#define PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#define SETTINGS "\0\0\0\4\0\0\0\0\0"
#define HTTP2 PREFACE SETTINGS
#define SAYS "This is the way out; in is at 10.77.0.1:8265"

/* ---- pure parts */

static void knows_what_is_spoken(void **state)
{
    static const struct {
        const char *name, *first;
        size_t n;
        bool whole;
        unsigned speech;
    } rows[] = {
        { "HTTP/1", "GET / HTTP/1.1\r\n", 16, false, DOOR_TEXT },
        { "a method that begins alike", "PROPFIND /", 10, false, DOOR_TEXT },
        { "one letter of two protocols", "P", 1, false, 0 },
        { "one letter and the end", "P", 1, true, DOOR_TEXT },
        { "HTTP/2", HTTP2, DOOR_NEEDS, false, DOOR_HTTP2 },
        { "a preface alone", HTTP2, DOOR_NEEDS - 9, false, 0 },
        { "a preface and the end", HTTP2, DOOR_NEEDS - 9, true, DOOR_HTTP2 },
        { "half a preface and the end", HTTP2, 12, true, DOOR_TEXT },
        { "another preface", "PRI * HTTP/3.0\r\n\r\n", 18, false, DOOR_TEXT },
        { "TLS", "\x16\3\1", 3, false, DOOR_TLS },
        { "a byte of TLS", "\x16", 1, false, DOOR_TLS },
        { "zeros", "\0\0\0", 3, false, DOOR_TEXT },
        { "a database's client", "*1\r\n$4\r\nPING\r\n", 14, false, DOOR_TEXT },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++)
        t_int_eq(door_speech(rows[i].first, rows[i].n, rows[i].whole), rows[i].speech, "%s",
                 rows[i].name);
}

/* A frame of HTTP/2: its type, and where its payload lies. */
static int frame_of(const uint8_t *p, size_t n, const uint8_t **payload, size_t *len)
{
    if (n < 9)
        return -1;
    *len = (size_t)p[0] << 16 | (size_t)p[1] << 8 | p[2];
    *payload = p + 9;
    return *len <= n - 9 ? p[3] : -1;
}

/* SETTINGS with nothing in it, and GOAWAY with says. */
static void is_goaway(const uint8_t *p, size_t n, const char *says)
{
    const uint8_t *payload = p;
    size_t len = 0;

    t_int_eq(frame_of(p, n, &payload, &len), 4);
    t_int_eq(len, 0);
    t_int_eq(frame_of(p + 9, n - 9, &payload, &len), 7);
    t_int_eq(len, n - 18);
    t_mem_eq(payload, "\0\0\0\0\0\0\0\xd", 8, "nothing was taken, and HTTP/1.1 is wanted");
    t_int_eq(len - 8, strlen(says));
    t_mem_eq(payload + 8, says, len - 8, "%.*s", (int)(len - 8), (const char *)payload + 8);
}

static void tells_in_their_own_words(void **state)
{
    char out[DOOR_SAYS_MAX + 256], vast[2 * DOOR_SAYS_MAX];
    size_t n;

    (void)state;
    n = door_answer(DOOR_TEXT, NULL, SAYS, out, sizeof(out));
    t_int_eq(n, strlen(out));
    t_has(out, "HTTP/1.1 400 Bad Request\r\n");
    t_has(out, "Content-Length: 45\r\n");
    t_has(out, "\r\n\r\n" SAYS "\n");
    n = door_answer(DOOR_TLS, "421 Misdirected Request", SAYS, out, sizeof(out));
    t_has(out, "HTTP/1.1 421 Misdirected Request\r\n");
    n = door_answer(DOOR_HTTP2, NULL, SAYS, out, sizeof(out));
    is_goaway((uint8_t *)out, n, SAYS);
    memset(vast, 'x', sizeof(vast));
    vast[sizeof(vast) - 1] = 0;
    for (unsigned speech = DOOR_HTTP2; speech <= DOOR_TEXT; speech <<= 1)
        t_true(door_answer(speech, NULL, vast, out, sizeof(out)) > DOOR_SAYS_MAX);
    t_int_eq(door_answer(DOOR_HTTP2, NULL, SAYS, out, 20), 0);
    t_int_eq(door_answer(DOOR_TEXT, NULL, SAYS, out, 20), 19);
}

static void knows_its_own_host(void **state)
{
    struct sockaddr_in v4 = { .sin_family = AF_INET,
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK + 7) };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT };
    struct sockaddr_un un = { .sun_family = AF_UNIX };

    (void)state;
    t_true(fl_sockaddr_is_loopback((struct sockaddr *)&v4) && fl_sockaddr_is_loopback((struct sockaddr *)&v6));
    t_true(inet_pton(AF_INET6, "::ffff:127.0.0.1", &v6.sin6_addr) == 1 &&
           fl_sockaddr_is_loopback((struct sockaddr *)&v6));
    t_true(inet_pton(AF_INET6, "::ffff:10.0.0.1", &v6.sin6_addr) == 1 &&
           !fl_sockaddr_is_loopback((struct sockaddr *)&v6));
    v4.sin_addr.s_addr = htonl(0x0a000001);
    t_true(!fl_sockaddr_is_loopback((struct sockaddr *)&v4) && !fl_sockaddr_is_loopback((struct sockaddr *)&un) &&
           !fl_sockaddr_is_loopback(NULL));
}

/* ---- a door, and who was let in */

enum { MOST = 8 };
struct port {
    struct fl_loop *loop;
    struct fl_held_clock clock;
    struct fl_clock held;
    struct door *door;
    struct door_config c;
    bool elsewhere; /* its clients come from there */
    union {
        struct sockaddr sa;
        struct sockaddr_in v4;
        struct sockaddr_un un;
    } at;
    int in[64], fds_before;
    unsigned n_in, inside, inside_far;
};

static void come_in(void *arg, int fd, const struct sockaddr *from, socklen_t len)
{
    struct port *p = arg;

    t_int_eq(from->sa_family, p->at.sa.sa_family);
    t_true(len >= sizeof(sa_family_t) && p->n_in < FL_LEN(p->in));
    p->in[p->n_in++] = fd;
}

static unsigned inside(void *arg, unsigned *far)
{
    struct port *p = arg;

    *far = p->inside_far;
    return p->inside;
}

static enum fl_status try_open(struct port *p, struct fl_err *err)
{
    socklen_t len = sizeof(p->at);
    int fd =
        socket(p->elsewhere ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    memset(&p->at, 0, sizeof(p->at));
    p->at.v4 =
        (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    if (p->elsewhere) {
        p->at.un = (struct sockaddr_un){ .sun_family = AF_UNIX };
        snprintf(p->at.un.sun_path, sizeof(p->at.un.sun_path), "%s", t_path("door"));
        (void)unlink(p->at.un.sun_path);
    }
    t_true(bind(fd, &p->at.sa, p->elsewhere ? sizeof(p->at.un) : sizeof(p->at.v4)) == 0 &&
           listen(fd, 64) == 0);
    t_true(getsockname(fd, &p->at.sa, &len) == 0);
    return door_create(p->loop, fd, &p->c, &p->door, err);
}

static void port_open(struct port *p, unsigned speaks)
{
    struct fl_err err = { 0 };

    *p = (struct port){ .fds_before = t_open_fds(),
                        .c = { .speaks = speaks,
                               .says = SAYS,
                               .max = MOST,
                               .wait_ms = 5000,
                               .in = come_in,
                               .inside = inside,
                               .arg = p } };
    p->held = fl_held_clock(&p->clock);
    t_ok(fl_loop_create(&p->held, &p->loop, &err), &err);
    t_ok(try_open(p, &err), &err);
}

static void port_close(struct port *p)
{
    door_destroy(p->door);
    for (unsigned i = 0; i < p->n_in; i++)
        close(p->in[i]);
    fl_loop_destroy(p->loop);
    t_int_eq(t_open_fds(), p->fds_before);
}

static int dial(const struct port *p)
{
    int fd = socket(p->at.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int one = 1, rc = connect(fd, &p->at.sa, p->elsewhere ? sizeof(p->at.un) : sizeof(p->at.v4));

    t_true(rc == 0 || errno == EINPROGRESS);
    t_true(poll(&(struct pollfd){ fd, POLLOUT, 0 }, 1, 5000) == 1);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one,
                     sizeof(one)); /* a unix socket has none to set */
    return fd;
}

static void turns(struct port *p)
{
    unsigned n = 0;

    while (fl_loop_turn(p->loop, 0) > 0)
        t_true(++n < 1000, "the loop does not come to rest");
}

static bool ended(int fd)
{
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

    return n == 0 || (n < 0 && errno == ECONNRESET);
}

static void hands_in_what_is_spoken(void **state)
{
    static const struct {
        const char *name, *first;
        size_t n;
        unsigned speech;
    } rows[] = {
        { "HTTP/1", "GET / HTTP/1.1\r\n", 16, DOOR_TEXT },
        { "HTTP/2", HTTP2, DOOR_NEEDS, DOOR_HTTP2 },
        { "TLS", "\x16\3\1\2\0", 5, DOOR_TLS },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        for (size_t k = 0; k < FL_LEN(rows); k++) { /* each protocol at a port of each */
            struct port p;
            char got[1024];
            int fd;

            port_open(&p, rows[k].speech);
            fd = dial(&p);
            turns(&p); /* it comes first, and speaks later */
            t_int_eq(send(fd, rows[i].first, rows[i].n, 0), rows[i].n);
            turns(&p);
            t_int_eq(p.n_in, i == k, "%s at a port of %s", rows[i].name, rows[k].name);
            if (i == k) {
                t_int_eq(recv(p.in[0], got, sizeof(got), 0), rows[i].n,
                         "%s: nothing of it was taken", rows[i].name);
                t_mem_eq(got, rows[i].first, rows[i].n);
            } else {
                ssize_t n = recv(fd, got, sizeof(got), 0);

                t_true(n > 0, "%s is told nothing at a port of %s", rows[i].name, rows[k].name);
                if (rows[i].speech == DOOR_HTTP2)
                    is_goaway((uint8_t *)got, (size_t)n, SAYS);
                else
                    t_has((got[n] = 0, got), "\r\n\r\n" SAYS "\n");
                t_true(ended(fd));
            }
            close(fd);
            port_close(&p);
        }
    }
}

/* Byte by byte: too little is waited for, without a wake for what is there already. */
static void waits_for_enough(void **state)
{
    struct port p;
    int fd;

    (void)state;
    port_open(&p, DOOR_HTTP2);
    fd = dial(&p);
    turns(&p);
    for (size_t i = 0; i < DOOR_NEEDS; i++) {
        t_int_eq(p.n_in, 0, "after %zu bytes", i);
        t_int_eq(send(fd, &HTTP2[i], 1, 0), 1);
        turns(&p); /* ends: nothing keeps the loop awake */
    }
    t_int_eq(p.n_in, 1);
    t_int_eq(send(fd, "x", 1, 0), 1);
    char got[DOOR_NEEDS];

    t_int_eq(recv(p.in[0], got, sizeof(got), 0), DOOR_NEEDS);
    t_true(poll(&(struct pollfd){ p.in[0], POLLIN, 0 }, 1, 0) == 1,
           "a single byte wakes whoever has it now");
    close(fd);
    port_close(&p);
}

static void answers_who_said_all(void **state)
{
    static const char *const rows[] = { "PRI", "x", "GET / HTTP/1.0\r\n\r\n" };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct port p;
        char got[1024] = "";
        int fd;

        port_open(&p, DOOR_HTTP2);
        fd = dial(&p);
        t_int_eq(send(fd, rows[i], strlen(rows[i]), 0), strlen(rows[i]));
        t_true(shutdown(fd, SHUT_WR) == 0);
        turns(&p);
        t_true(recv(fd, got, sizeof(got) - 1, 0) > 0, "\"%s\" is told nothing", rows[i]);
        t_has(got, SAYS);
        t_true(ended(fd));
        close(fd);
        port_close(&p);
    }
}

static void gives_up_on_silence(void **state)
{
    struct port p;
    int fd[4];

    (void)state;
    port_open(&p, DOOR_HTTP2);
    for (int i = 0; i < 4; i++)
        fd[i] = dial(&p);
    turns(&p);
    t_int_eq(send(fd[1], "PRI *", 5, 0), 5);
    t_int_eq(send(fd[2], "GET / ", 6, 0), 6);
    close(fd[3]);
    turns(&p);
    fl_loop_pass(p.loop, &p.clock, 1001 * 1000000ull);
    t_true(!ended(fd[0]) && !ended(fd[1]));
    fl_loop_pass(p.loop, &p.clock, 3998 * 1000000ull);
    t_true(!ended(fd[0]) && !ended(fd[1]));
    fl_loop_pass(p.loop, &p.clock, 2 * 1000000ull);
    t_true(ended(fd[0]) && ended(fd[1]));
    for (int i = 0; i < 3; i++)
        close(fd[i]);
    port_close(&p);
}

/* Who was told and does not leave, is left after a second; what they still send is read and
 * dropped. */
static void lingers_a_second(void **state)
{
    static const char much[40000];
    struct port p;
    int fd;

    (void)state;
    port_open(&p, DOOR_HTTP2);
    fd = dial(&p);
    t_int_eq(send(fd, "GET / HTTP/1.1\r\n\r\n", 18, 0), 18);
    turns(&p);
    fl_loop_pass(p.loop, &p.clock, 999 * 1000000ull);
    t_int_eq(send(fd, much, sizeof(much), MSG_NOSIGNAL), sizeof(much));
    turns(&p);
    t_int_eq(send(fd, "x", 1, MSG_NOSIGNAL), 1);
    turns(&p);
    fl_loop_pass(p.loop, &p.clock, 2 * 1000000ull);
    t_int_eq(send(fd, "x", 1, MSG_NOSIGNAL), 1);
    t_true(poll(&(struct pollfd){ fd, 0, 0 }, 1, 5000) == 1, "it is still there");
    close(fd);
    port_close(&p);
}

/* Full of silent ones, the door is open to the next one: the oldest goes. Full inside, others wait
 * in the kernel. */
static void makes_room(void **state)
{
    struct port p;
    int silent[MOST + 4], fd;

    (void)state;
    port_open(&p, DOOR_TEXT);
    for (int i = 0; i < MOST + 4; i++)
        silent[i] = dial(&p);
    turns(&p);
    for (int i = 0; i < MOST + 4; i++)
        t_int_eq(ended(silent[i]), i < 4, "number %d", i);
    t_int_eq(t_open_fds() - p.fds_before - (MOST + 4), 3 + MOST,
             "epoll, eventfd, listener, and those at the door");
    fd = dial(&p);
    t_int_eq(send(fd, "GET / ", 6, 0), 6);
    turns(&p);
    t_int_eq(p.n_in, 1);
    for (int i = 0; i < MOST + 4; i++)
        close(silent[i]);
    turns(&p);
    p.inside = MOST;
    door_look(p.door);
    close(fd);
    fd = dial(&p);
    t_int_eq(send(fd, "GET / ", 6, 0), 6);
    turns(&p);
    t_true(p.n_in == 1 && !ended(fd), "who does not fit waits");
    p.inside--;
    door_look(p.door);
    turns(&p);
    t_int_eq(p.n_in, 2, "and is let in once somebody has left");
    close(fd);
    port_close(&p);
}

static void keeps_a_part_for_its_own_host(void **state)
{
    struct port p;
    int a, b;

    (void)state;
    port_open(&p, DOOR_TEXT);
    door_destroy(p.door);
    p.elsewhere = true;
    p.c.far_max = MOST / 2;
    t_ok(try_open(&p, NULL), &(struct fl_err){ 0 });
    p.inside = p.inside_far = MOST / 2 - 1;
    a = dial(&p);
    turns(&p);
    t_true(!ended(a));
    b = dial(&p);
    turns(&p);
    t_true(ended(a) && !ended(b), "of those from elsewhere the oldest made room");
    p.inside = ++p.inside_far;
    t_int_eq(send(b, "GET / ", 6, 0), 6);
    turns(&p);
    t_int_eq(p.n_in, 1);
    close(a);
    a = dial(&p);
    turns(&p);
    t_true(ended(a), "all of their part is inside");
    close(a);
    close(b);
    port_close(&p);
}

static void every_fault_ends_well(void **state)
{
    bool met = true;

    (void)state;
    for (unsigned nth = 1; met; nth++) {
        struct port p = { .fds_before = t_open_fds(),
                          .c = { .speaks = DOOR_TEXT,
                                 .says = SAYS,
                                 .max = MOST,
                                 .wait_ms = 5000,
                                 .in = come_in,
                                 .inside = inside } };
        struct fl_err err = { 0 };
        enum fl_status st;
        int fd = -1;

        p.c.arg = &p;
        p.held = fl_held_clock(&p.clock);
        t_ok(fl_loop_create(&p.held, &p.loop, &err), &err);
        fl_fault_arm(nth);
        st = try_open(&p, &err);
        if (st == FL_OK) {
            fd = dial(&p);
            turns(&p);
            (void)send(fd, "GET / ", 6, MSG_NOSIGNAL);
            turns(&p);
            fl_loop_pass(p.loop, &p.clock,
                         200 *
                             1000000ull); /* it looks again after a descriptor was not to be had */
            turns(&p);
        }
        met = fl_fault_disarm();
        t_true(met || p.n_in == 1, "fault %u", nth);
        t_true(st == FL_OK || err.text[0], "fault %u", nth);
        if (fd >= 0)
            close(fd);
        port_close(&p);
        t_true(nth < 20);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(knows_what_is_spoken),
        cmocka_unit_test(tells_in_their_own_words),
        cmocka_unit_test(knows_its_own_host),
        cmocka_unit_test(hands_in_what_is_spoken),
        cmocka_unit_test(waits_for_enough),
        cmocka_unit_test(answers_who_said_all),
        cmocka_unit_test(gives_up_on_silence),
        cmocka_unit_test(lingers_a_second),
        cmocka_unit_test(makes_room),
        cmocka_unit_test(keeps_a_part_for_its_own_host),
        cmocka_unit_test(every_fault_ends_well),
    };

    return t_run("door", tests);
}
