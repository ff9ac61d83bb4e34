/* what a peer could send, and who can reach whom */
#include <errno.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include "common/base/str.h"
#include "tests/link/pair.h"
#include "tests/t.h"
#include "transport/link/tcp_priv.h"

static void keys_of_strangers(void **state)
{
    struct pair p;
    struct fl_err err = { 0 };
    struct link_mem out = { 0 };
    struct link_key good = { 0 }, key;

    (void)state;
    pair_open_host(&p, &link_shm, 8192);
    t_ok(p.ops->share(p.from, &p.src, &good, &err), &err);
    key = good;
    key.blob[0] ^= 1;
    t_refused(p.ops->map(p.to, &key, false, &out, &err), FL_CORRUPT, &err);
    key = good;
    key.n_fds = 0;
    t_refused(p.ops->map(p.to, &key, false, &out, &err), FL_CORRUPT, &err);
    key = good;
    key.blob[10] = 1; /* says 73,728 bytes of a file of 8192 */
    t_refused(p.ops->map(p.to, &key, false, &out, &err), FL_INVALID, &err);
    t_has(err.text, "73728");
    key = good;
    key.fds[0] = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    t_int_eq(ftruncate(key.fds[0], 8192), 0);
    t_refused(p.ops->map(p.to, &key, false, &out, &err), FL_INVALID, &err);
    t_has(err.text, "not sealed");
    close(key.fds[0]);
    t_true(out.addr == NULL);
    int fd = link_mem_fd(&p.src);

    t_true(ftruncate(fd, 100) < 0 && ftruncate(fd, 100000) < 0, "sealed");
    pair_close(&p);
}

static int dial(const struct tcp_key *k)
{
    struct sockaddr_in to = { .sin_family = AF_INET,
                              .sin_port = htons(k->port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    t_int_eq(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    return fd;
}

/* Is the connection closed by the other side, without a byte? */
static bool hung_up(int fd)
{
    struct timeval tv = { .tv_sec = 5 };
    char c;

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
    return recv(fd, &c, 1, 0) <= 0 && errno != EAGAIN;
}

struct stranger {
    const char *name;
    void (*bend)(struct tcp_ask *a);
};
static void bad_magic(struct tcp_ask *a)
{
    a->magic++;
}
static void bad_token(struct tcp_ask *a)
{
    a->token[7] ^= 4;
}
static void no_runs(struct tcp_ask *a)
{
    a->n_runs = 0;
}
static void too_many_runs(struct tcp_ask *a)
{
    a->n_runs = UINT32_MAX;
}
static const struct stranger strangers[] = {
    { "garbage", bad_magic },
    { "wrong token", bad_token },
    { "no runs", no_runs },
    { "4 billion runs", too_many_runs },
};

static void strangers_on_the_port(void **state)
{
    struct pair p;
    struct fl_err err = { 0 };
    struct link_key k = { 0 };
    struct tcp_key key;
    struct wait w = wait_for();
    struct link_seg all = { .run_bytes = 4096, .rows = 1 };

    (void)state;
    pair_open_host(&p, &link_tcp, 4096);
    t_ok(p.ops->share(p.from, &p.src, &k, &err), &err);
    memcpy(&key, k.blob, sizeof(key));
    for (size_t i = 0; i < FL_LEN(strangers); i++) {
        struct tcp_ask ask = { .magic = TCP_ASK_MAGIC, .n_runs = 1 };
        int fd = dial(&key);

        memcpy(ask.token, key.token, sizeof(ask.token));
        strangers[i].bend(&ask);
        t_int_eq(send(fd, &ask, sizeof(ask), MSG_NOSIGNAL), sizeof(ask));
        t_true(hung_up(fd), "%s", strangers[i].name);
        close(fd);
    }
    for (unsigned what = 0; what < 2;
         what++) { /* a peer that asks for what it may not have: an answer */
        struct tcp_ask ask = {
            .magic = TCP_ASK_MAGIC, .n_runs = 1, .id = 9, .region = what ? 0 : 5
        };
        struct tcp_run run = { .off = 4000, .bytes = 97, .rows = 1 };
        struct tcp_say say;
        int fd = dial(&key);

        memcpy(ask.token, key.token, sizeof(ask.token));
        t_int_eq(send(fd, &ask, sizeof(ask), MSG_NOSIGNAL), sizeof(ask));
        t_int_eq(send(fd, &run, sizeof(run), MSG_NOSIGNAL), sizeof(run));
        t_int_eq(recv(fd, &say, sizeof(say), MSG_WAITALL), sizeof(say));
        t_int_eq(say.status, what ? FL_INVALID : FL_NOT_FOUND, "%s", say.text);
        close(fd);
    }
    t_ok(pair_pull(&p, &all, 1, NULL, &w.op, &err), &err);
    t_until(p.loop, w.times > 0, 5000);
    t_ok(w.op.err.status, &w.op.err);
    t_mem_eq(p.dst.addr, p.src.addr, 4096, "the others are served on");
    pair_close(&p);
}

/* It accepts and says nothing, as a stopped process does: only abort ends that. */
static void silent_source(void **state)
{
    struct pair p;
    struct fl_err err = { 0 };
    struct link_key k = { 0 };
    struct tcp_key key;
    struct link_mem view;
    struct wait w = wait_for(), quiet = wait_for();
    struct link_seg all = { .run_bytes = 4096, .rows = 1 };
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)state;
    t_int_eq(bind(fd, (struct sockaddr *)&at, len), 0);
    t_int_eq(listen(fd, 1), 0);
    t_int_eq(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    pair_open_host(&p, &link_tcp, 4096);
    t_ok(p.ops->share(p.from, &p.src, &k, &err), &err);
    memcpy(&key, k.blob, sizeof(key));
    key.port = ntohs(at.sin_port);
    memcpy(k.blob, &key, sizeof(key));
    t_ok(p.ops->map(p.to, &k, false, &view, &err), &err);
    t_ok(p.ops->pull(p.to, &view, &p.dst, &all, 1, NULL, &w.op, &err), &err);
    p.ops->unmap(p.to, &view);
    int peer = accept(fd, NULL, NULL);

    fl_loop_turn(p.loop, 0);
    t_int_eq(w.times, 0);
    p.ops->abort(p.to, &quiet.op);
    t_until(p.loop, quiet.times == 1, 5000);
    t_int_eq(w.times, 1);
    t_refused(w.op.err.status, FL_CANCELLED, &w.op.err);
    close(peer);
    close(fd);
    pair_close(&p);
}

static void places(void **state)
{
    struct link_place a, b;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(link_place_here("10.0.0.1", &a, &err), &err);
    t_int_eq(strlen(a.host_boot), 36);
    b = a;
    t_true(link_shm.reaches(&a, &b, NULL));
    b.host_boot[0] ^= 1;
    t_true(!link_shm.reaches(&a, &b, &err), "another machine, or another start of it");
    b = a;
    b.pid_ns++;
    t_true(!link_shm.reaches(&a, &b, NULL), "another container");
    t_true(link_tcp.reaches(&a, &b, NULL));
    b.addr[0] = 0;
    t_true(!link_tcp.reaches(&a, &b, &err));
    t_true(link_shm.cost_ns(&a, &a, 1 << 30) < link_tcp.cost_ns(&a, &a, 1 << 30));
    struct link_team team = { .members = &b, .n = 1 };
    struct link *k = NULL;
    struct wait w = wait_for();

    fl_copy(b.addr, sizeof(b.addr), "no.such.number");
    t_refused(link_tcp.open(NULL, &team, &k, &w.op, &err), FL_INVALID, &err);
    t_has(err.text, "no.such.number");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_of_strangers),
        cmocka_unit_test(strangers_on_the_port),
        cmocka_unit_test(silent_source),
        cmocka_unit_test(places),
    };

    return t_run("link peers", tests);
}
