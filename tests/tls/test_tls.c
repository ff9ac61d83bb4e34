/* Three files: each way in which they do not fit has its sentence; and two ends of a connection. */
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/certs.h"
#include "tests/t.h"

static struct t_cert ca, other_ca, good, expired, early, stranger, named, old_ca, of_old_ca;

static int make_all(void **state)
{
    (void)state;
    t_cert_make(&ca, "ca", NULL, NULL, 0, 9);
    t_cert_make(&other_ca, "other-ca", NULL, NULL, 0, 9);
    t_cert_make(&old_ca, "old-ca", NULL, NULL, -9, -1);
    t_cert_make(&good, "good", &ca, "IP:127.0.0.1,DNS:localhost", 0, 9);
    t_cert_make(&expired, "expired", &ca, "IP:127.0.0.1", -9, -1);
    t_cert_make(&early, "early", &ca, "IP:127.0.0.1", 2, 9);
    t_cert_make(&stranger, "stranger", &other_ca, "IP:127.0.0.1", 0, 9);
    t_cert_make(&named, "named", &ca, "IP:10.1.2.3,DNS:head.example,IP:fd00::7", 0, 9);
    t_cert_make(&of_old_ca, "of-old-ca", &old_ca, "IP:127.0.0.1", 0, 9);
    return 0;
}

static int free_all(void **state)
{
    struct t_cert *all[] = { &ca,       &other_ca, &good,   &expired,  &early,
                             &stranger, &named,    &old_ca, &of_old_ca };

    (void)state;
    for (size_t i = 0; i < FL_LEN(all); i++)
        t_cert_free(all[i]);
    return 0;
}

static void each_file_that_does_not_fit_is_named(void **state)
{
    const struct {
        const char *name, *cert, *key, *ca;
        enum fl_status wanted;
        const char *says, *remedy;
    } rows[] = {
        { "all fit", good.cert, good.key, ca.cert, FL_OK, "", "" },
        { "no such file", t_path("none"), good.key, ca.cert, FL_NOT_FOUND, "none", "give a file" },
        { "a folder", good.cert, t_tmp(), ca.cert, FL_INVALID, "is a folder", "give a file" },
        { "not PEM", good.key, good.key, ca.cert, FL_INVALID, "good.key holds no certificate",
          "PEM" },
        { "no key in it", good.cert, good.cert, ca.cert, FL_INVALID,
          "good.crt holds no private key", "PEM" },
        { "no CA in it", good.cert, good.key, good.key, FL_INVALID, "CA", "PEM" },
        { "expired", expired.cert, expired.key, ca.cert, FL_INVALID, "expired.crt has expired at",
          "make a new one" },
        { "not yet", early.cert, early.key, ca.cert, FL_INVALID, "early.crt is not valid before",
          "clock" },
        { "another key", good.cert, expired.key, ca.cert, FL_INVALID, "does not fit",
          "name the key" },
        { "another CA", stranger.cert, stranger.key, ca.cert, FL_INVALID, "is not signed by the CA",
          "name the CA" },
        { "CA expired", of_old_ca.cert, of_old_ca.key, old_ca.cert, FL_INVALID,
          "old-ca.crt has expired", "make a new one" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct fl_err err = { 0 };
        struct tls_id *id = NULL;
        enum fl_status st = tls_id_create(rows[i].cert, rows[i].key, rows[i].ca, &id, &err);

        if (st == FL_OK)
            st = tls_id_check(id, &err);
        t_int_eq(st, rows[i].wanted, "%s: %s", rows[i].name, err.text);
        t_has(err.text, rows[i].says);
        t_has(err.text, rows[i].remedy);
        tls_id_destroy(id);
    }
}

static void a_file_of_others_is_said_to_be_one(void **state)
{
    struct fl_err err = { 0 };
    struct tls_id *id = NULL;

    (void)state;
    chmod(good.key, 0);
    if (geteuid() == 0) /* who reads everything */
        t_true(seteuid(65534) == 0);
    enum fl_status st = tls_id_create(good.cert, good.key, ca.cert, &id, &err);

    if (getuid() == 0)
        t_true(seteuid(0) == 0);
    chmod(good.key, 0600);
    t_refused(st, FL_DENIED, &err);
    t_has(err.text, "give a file that this user may read");
}

static void an_address_is_looked_for_in_the_certificate(void **state)
{
    static const struct {
        const char *host;
        bool ok;
    } rows[] = { { "10.1.2.3", true },         { "head.example", true },   { "fd00::7", true },
                 { "10.1.2.4", false },        { "other.example", false }, { "::1", false },
                 { "10.1.2.3.example", false } };
    struct fl_err err = { 0 };
    struct tls_id *id;

    (void)state;
    t_ok(tls_id_create(named.cert, named.key, ca.cert, &id, &err), &err);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        t_int_eq(tls_id_names(id, rows[i].host, &err) == FL_OK, rows[i].ok, "%s", rows[i].host);
        if (!rows[i].ok)
            t_has(err.text, "names 10.1.2.3, head.example, fd00::7 and not");
    }
    tls_id_destroy(id);
}

static void what_is_on_is_decided_by_flag_and_ray(void **state)
{
    static const struct {
        const char *name, *flag, *ray, *ca;
        enum fl_status wanted;
        enum tls_cover cover;
        const char *says;
    } rows[] = {
        { "nothing", NULL, NULL, "x", FL_OK, TLS_OFF, "" },
        { "Ray", NULL, "1", "x", FL_OK, TLS_NODES, "" },
        { "Ray, true", NULL, "True", "x", FL_OK, TLS_NODES, "" },
        { "Ray, 0", NULL, "0", "x", FL_OK, TLS_OFF, "" },
        { "flag over Ray", "off", "1", "x", FL_OK, TLS_OFF, "" },
        { "all", "all", NULL, "x", FL_OK, TLS_ALL, "" },
        { "nodes", "nodes", NULL, "x", FL_OK, TLS_NODES, "" },
        { "Ray without CA", NULL, "1", NULL, FL_INVALID, TLS_OFF, "RAY_TLS_CA_CERT" },
        { "flag without CA", "all", NULL, "", FL_INVALID, TLS_OFF, "--tls-ca" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct tls_opts o = { .cover = rows[i].flag, .cert = "x", .key = "x", .ca = rows[i].ca };
        enum tls_cover cover = TLS_OFF;
        struct fl_err err = { 0 };

        if (rows[i].ray)
            setenv("RAY_USE_TLS", rows[i].ray, 1);
        else
            unsetenv("RAY_USE_TLS");
        t_int_eq(tls_opts_cover(&o, &cover, &err), rows[i].wanted, "%s", rows[i].name);
        t_int_eq(cover, rows[i].cover, "%s", rows[i].name);
        t_has(err.text, rows[i].says);
    }
    unsetenv("RAY_USE_TLS");
}

/* ---- two ends over a socket pair */

struct side {
    struct tls_session *s;
    int fd;
    enum fl_status st;
    struct fl_err err;
};

static struct tls_id *id_of(const struct t_cert *c, const struct t_cert *of)
{
    struct fl_err err = { 0 };
    struct tls_id *id;

    t_ok(tls_id_create(c->cert, c->key, of->cert, &id, &err), &err);
    return id;
}

/* Until both have ended; a refusal that comes after the greeting is found by reading. */
static void shake_both(struct side *a, struct side *b)
{
    struct side *both[] = { a, b };
    struct iovec iov = { &(char){ 0 }, 1 };

    a->st = b->st = FL_AGAIN;
    for (int turn = 0; turn < 200; turn++)
        for (int i = 0; i < 2; i++) {
            unsigned events;
            size_t got;

            if (both[i]->st == FL_AGAIN)
                both[i]->st = tls_session_shake(both[i]->s, &events, &both[i]->err);
            else if (both[i]->st == FL_OK) {
                enum fl_status st =
                    tls_session_read(both[i]->s, &iov, 1, &got, &events, &both[i]->err);

                if (st != FL_AGAIN)
                    both[i]->st = st;
            }
        }
}

static void both_ends_show_who_they_are(void **state)
{
    const struct {
        const char *name;
        const struct t_cert *server, *server_ca, *client, *client_ca;
        const char *host;
        enum fl_status at_server, at_client;
        const char *server_says, *client_says;
    } rows[] = {
        { "both good", &good, &ca, &good, &ca, "127.0.0.1", FL_OK, FL_OK, "", "" },
        { "by name", &good, &ca, &good, &ca, "localhost", FL_OK, FL_OK, "", "" },
        { "another address", &good, &ca, &good, &ca, "10.9.9.9", FL_DENIED, FL_DENIED,
          "does not take", "does not name 10.9.9.9" },
        { "server expired", &expired, &ca, &good, &ca, "127.0.0.1", FL_DENIED, FL_DENIED,
          "does not take", "has expired" },
        { "server of another CA", &stranger, &other_ca, &good, &ca, "127.0.0.1", FL_DENIED,
          FL_DENIED, "does not take", "is not signed by the CA" },
        { "client expired", &good, &ca, &expired, &ca, "127.0.0.1", FL_DENIED, FL_DENIED,
          "has expired", "does not take the certificate" },
        { "client of another CA", &good, &ca, &stranger, &ca, "127.0.0.1", FL_DENIED, FL_DENIED,
          "is not signed by the CA", "does not take the certificate" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct side server = { 0 }, client = { 0 };
        struct tls_id *a = id_of(rows[i].server, rows[i].server_ca),
                      *b = id_of(rows[i].client, rows[i].client_ca);
        int fd[2], before = t_open_fds();

        t_true(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fd) == 0);
        t_ok(tls_session_create(a, fd[0], NULL, &server.s, &server.err), &server.err);
        t_ok(tls_session_create(b, fd[1], rows[i].host, &client.s, &client.err), &client.err);
        shake_both(&client, &server);
        t_int_eq(server.st, rows[i].at_server == FL_OK ? FL_OK : rows[i].at_server,
                 "%s: server: %s", rows[i].name, server.err.text);
        t_int_eq(client.st, rows[i].at_client, "%s: client: %s", rows[i].name, client.err.text);
        t_has(server.err.text, rows[i].server_says);
        t_has(client.err.text, rows[i].client_says);
        tls_session_destroy(server.s);
        tls_session_destroy(client.s);
        tls_id_destroy(a);
        tls_id_destroy(b);
        close(fd[0]);
        close(fd[1]);
        t_int_eq(t_open_fds(), before, "%s", rows[i].name);
    }
}

/* ---- new files in the place of the old ones */

static unsigned taken, refused;
static struct fl_err last_why;

static void on_renewed(const struct tls_id *id, const struct fl_err *why)
{
    (void)id;
    if (!why)
        taken++;
    else
        last_why = *why;
    refused += why != NULL;
}

static struct tls_id *live_id(char cert[FL_PATH_MAX], char key[FL_PATH_MAX], char of[FL_PATH_MAX])
{
    struct fl_err err = { 0 };
    struct tls_id *id;

    snprintf(cert, FL_PATH_MAX, "%s", t_path("live.crt"));
    snprintf(key, FL_PATH_MAX, "%s", t_path("live.key"));
    snprintf(of, FL_PATH_MAX, "%s", t_path("live-ca.crt"));
    t_put(cert, good.cert);
    t_put(key, good.key);
    t_put(of, ca.cert);
    t_ok(tls_id_create(cert, key, of, &id, &err), &err);
    id->renewed = on_renewed;
    id->look_ns = 0;
    taken = refused = 0;
    return id;
}

static void new_files_are_taken_when_they_fit(void **state)
{
    char cert[FL_PATH_MAX], key[FL_PATH_MAX], of[FL_PATH_MAX];
    struct tls_id *id = live_id(cert, key, of);
    struct fl_err err = { 0 };
    struct tls_pem pem;

    (void)state;
    t_int_eq(tls_id_look(id), 0, "as they were");
    t_put(key, named.key);
    t_int_eq(tls_id_look(id), 0, "a key without its certificate");
    t_int_eq(tls_id_look(id), 0);
    t_true(taken == 0 && refused == 1, "said once: %u, %u", taken, refused);
    t_has(last_why.text, "live.key");
    t_ok(tls_id_names(id, "localhost", &err), &err);
    t_put(cert, named.cert);
    t_int_eq(tls_id_look(id), 1, "a pair: %s", last_why.text);
    t_true(taken == 1 && refused == 1);
    t_ok(tls_id_names(id, "10.1.2.3", &err), &err);
    t_ok(tls_id_pem(id, &pem, &err), &err);
    t_int_eq(pem.turn, 1);
    t_has(pem.key, "PRIVATE KEY");
    tls_pem_fini(&pem);
    t_true(unlink(cert) == 0);
    t_int_eq(tls_id_look(id), 1, "a file that is away for a moment");
    t_int_eq(last_why.status, FL_NOT_FOUND, "%s", last_why.text);
    t_put(cert, good.cert);
    t_put(key, good.key);
    t_int_eq(tls_id_look(id), 2);
    id->look_ns = 3600ull * 1000000000;
    t_put(cert, named.cert);
    t_put(key, named.key);
    t_int_eq(tls_id_look(id), 2, "not yet: it looks now and then");
    tls_id_destroy(id);
}

static void new_sessions_show_the_new_certificate(void **state)
{
    char cert[FL_PATH_MAX], key[FL_PATH_MAX], of[FL_PATH_MAX], byte = 'x';
    struct tls_id *id = live_id(cert, key, of), *old = id_of(&good, &ca), *new = id_of(&stranger, &other_ca);
    struct iovec iov = { &byte, 1 };
    struct side server[3] = { 0 }, client[3] = { 0 };
    int fd[3][2];
    unsigned events;
    size_t n;

    (void)state;
    for (int i = 0; i < 3; i++) { /* before; after, with who knows the new CA; and with who does not */
        struct tls_id *who = i == 1 ? new : old;

        if (i == 1) {
            t_put(cert, stranger.cert);
            t_put(key, stranger.key);
            t_put(of, other_ca.cert);
        }
        t_true(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fd[i]) == 0);
        t_ok(tls_session_create(id, fd[i][0], NULL, &server[i].s, &server[i].err), &server[i].err);
        t_ok(tls_session_create(who, fd[i][1], "127.0.0.1", &client[i].s, &client[i].err), &client[i].err);
        shake_both(&client[i], &server[i]);
        t_int_eq(server[i].st, i < 2 ? FL_OK : FL_DENIED, "%d: %s", i, server[i].err.text);
    }
    t_ok(tls_session_write(server[0].s, &iov, 1, &n, &events, &server[0].err), &server[0].err);
    t_ok(tls_session_read(client[0].s, &iov, 1, &n, &events, &client[0].err), &client[0].err);
    for (int i = 0; i < 3; i++) {
        tls_session_destroy(server[i].s);
        tls_session_destroy(client[i].s);
        close(fd[i][0]);
        close(fd[i][1]);
    }
    tls_id_destroy(id);
    tls_id_destroy(old);
    tls_id_destroy(new);
}

static void what_speaks_no_tls_is_said_to(void **state)
{
    static const char *const said[] = { "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                                        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                                        "\x28\0\0\0\0\0\0\0plain frames of ours" };

    (void)state;
    for (size_t i = 0; i < FL_LEN(said); i++)
        for (int server = 0; server < 2; server++) {
            struct tls_id *id = id_of(&good, &ca);
            struct side s = { 0 };
            unsigned events;
            int fd[2];

            t_true(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fd) == 0);
            t_int_eq(write(fd[1], said[i], 24), 24);
            t_ok(tls_session_create(id, fd[0], server ? NULL : "127.0.0.1", &s.s, &s.err), &s.err);
            t_refused(tls_session_shake(s.s, &events, &s.err), FL_UNSUPPORTED, &s.err);
            t_has(s.err.text, "speaks no TLS");
            tls_session_destroy(s.s);
            tls_id_destroy(id);
            close(fd[0]);
            close(fd[1]);
        }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_file_that_does_not_fit_is_named),
        cmocka_unit_test(a_file_of_others_is_said_to_be_one),
        cmocka_unit_test(an_address_is_looked_for_in_the_certificate),
        cmocka_unit_test(what_is_on_is_decided_by_flag_and_ray),
        cmocka_unit_test(both_ends_show_who_they_are),
        cmocka_unit_test(new_files_are_taken_when_they_fit),
        cmocka_unit_test(new_sessions_show_the_new_certificate),
        cmocka_unit_test(what_speaks_no_tls_is_said_to),
    };

    make_all(NULL);
    int rc = t_run("tls", tests);

    free_all(NULL);
    return rc;
}
