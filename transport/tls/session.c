/* libssl behind the few functions that a connection needs. It is looked for when TLS is asked for,
 * as the device's driver is: libfurlong needs libc alone to be loaded, and whichever libssl the
 * host program (a Python, mostly) has loaded already is the one that is taken. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/loop.h"
#include "common/base/str.h"
#include "transport/tls/session.h"

enum {
    RECORD = 16 << 10, /* plain bytes of one record */
    PIECE = 4 * RECORD /* taken by one write        */
};

/* ---- libssl */

// clang-format off
#define ALL(X)                                                                                          \
    X(SSL_CTX_new) X(SSL_CTX_free) X(SSL_CTX_up_ref) X(TLS_method) X(SSL_CTX_use_certificate_chain_file)                  \
    X(SSL_CTX_use_PrivateKey_file) X(SSL_CTX_load_verify_locations) X(SSL_CTX_ctrl) X(SSL_CTX_set_options) X(SSL_CTX_set_verify) \
    X(SSL_new) X(SSL_free) X(SSL_set_bio) X(SSL_set_connect_state) X(SSL_set_accept_state)              \
    X(SSL_do_handshake) X(SSL_read) X(SSL_write) X(SSL_get_error) X(SSL_pending)                        \
    X(SSL_get_verify_result) X(SSL_set1_host) X(SSL_get0_param) X(X509_VERIFY_PARAM_set1_ip_asc)        \
    X(BIO_new) X(BIO_s_mem) X(BIO_read) X(BIO_write) X(BIO_ctrl) X(BIO_free) X(ERR_get_error)           \
    X(ERR_clear_error) X(ERR_reason_error_string) X(X509_verify_cert_error_string)
// clang-format on
static struct {
    pthread_once_t once;
    bool here;
#define X(name) __typeof__(name) *name;
    ALL(X)
#undef X
} lib = { .once = PTHREAD_ONCE_INIT };

static void find_lib(void)
{
    static const char *const names[] = { "libssl.so.3", "libssl.so.1.1", "libssl.so" };
    void *h = NULL;

    for (size_t i = 0; i < FL_LEN(names) && !h && !FL_FAULT("tls.libssl"); i++)
        h = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    lib.here = h != NULL;
#define X(name) lib.here = lib.here && (*(void **)&lib.name = dlsym(h, #name));
    ALL(X)
#undef X
}

/* ---- who is whom */

struct tls_session {
    SSL *ssl;
    BIO *in, *out; /* of ssl: bytes as they lie on the wire */
    int fd;
    bool client;
    char pending[RECORD + 512]; /* of out, being sent */
    size_t from, to;
    size_t held; /* plain bytes whose records are not all sent: FL_AGAIN was said of them */
    char plain[RECORD], buf[2 * RECORD];
    char name[64], cert_path[FL_PATH_MAX], ca_path[FL_PATH_MAX];
};

static enum fl_status bad_file(const char *what, const char *path, struct fl_err *err)
{
    unsigned long code = lib.ERR_get_error();
    const char *why = code ? lib.ERR_reason_error_string(code) : NULL;

    lib.ERR_clear_error();
    return fl_fail(err, FL_INVALID, "TLS %s %s is not taken: %s", what, path,
                   why ? why : "unknown");
}

static enum fl_status context_make(const struct tls_id *id, SSL_CTX **out, struct fl_err *err)
{
    SSL_CTX *c;
    enum fl_status st = FL_OK;

    c = FL_FAULT("tls.context") ? NULL : lib.SSL_CTX_new(lib.TLS_method());
    if (!c)
        return fl_fail(err, FL_EXHAUSTED, "no memory for TLS");
    lib.SSL_CTX_ctrl(c, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_2_VERSION, NULL);
    lib.SSL_CTX_set_options(c,
                            SSL_OP_NO_RENEGOTIATION); /* so that a write never waits for reading */
    lib.SSL_CTX_set_verify(
        c, id ? SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT : SSL_VERIFY_NONE, NULL);
    if (id && lib.SSL_CTX_use_certificate_chain_file(c, id->cert_path) != 1)
        st = bad_file("certificate", id->cert_path, err);
    else if (id && lib.SSL_CTX_use_PrivateKey_file(c, id->key_path, SSL_FILETYPE_PEM) != 1)
        st = bad_file("key", id->key_path, err);
    else if (id && lib.SSL_CTX_load_verify_locations(c, id->ca_path, NULL) != 1)
        st = bad_file("CA", id->ca_path, err);
    if (st != FL_OK) {
        lib.SSL_CTX_free(c);
        return st;
    }
    *out = c;
    return FL_OK;
}

/* A reference of the caller's: the next one may have another. */
static enum fl_status context(struct tls_id *id, bool client, SSL_CTX **out, struct fl_err *err)
{
    enum fl_status st = FL_OK;
    SSL_CTX *c = NULL;

    if (!id)
        return context_make(NULL, out, err);
    pthread_mutex_lock(&tls_lock); /* tls_diagnose() runs on the pool */
    tls_look_locked(id);
    c = id->session[client];
    if (!c)
        st = context_make(id, &c, err);
    if (st == FL_OK) {
        id->session[client] = c;
        lib.SSL_CTX_up_ref(c);
        *out = c;
    }
    pthread_mutex_unlock(&tls_lock);
    return st;
}

/* Whether the files fit is libssl's to say, and it reads them by itself. */
enum fl_status tls_sessions_check(const struct tls_id *id, struct fl_err *err)
{
    SSL_CTX *c = NULL;

    pthread_once(&lib.once, find_lib);
    if (!lib.here)
        return fl_fail(err, FL_UNSUPPORTED, "no libssl here that could say whether they fit");
    FL_TRY(context_make(id, &c, err));
    lib.SSL_CTX_free(c);
    return FL_OK;
}

void tls_sessions_end(struct tls_id *id)
{
    for (int i = 0; i < 2; i++)
        if (id->session[i])
            lib.SSL_CTX_free(id->session[i]); /* open sessions hold it */
    id->session[0] = id->session[1] = NULL;
}

static enum fl_status begin(struct tls_session *s, SSL_CTX *ctx, const char *host,
                            struct fl_err *err)
{
    struct in6_addr any;
    bool address =
        host && (inet_pton(AF_INET, host, &any) == 1 || inet_pton(AF_INET6, host, &any) == 1);
    int ok = 1;

    s->ssl = FL_FAULT("tls.session") ? NULL : lib.SSL_new(ctx);
    s->in = s->ssl ? lib.BIO_new(lib.BIO_s_mem()) : NULL;
    s->out = s->in ? lib.BIO_new(lib.BIO_s_mem()) : NULL;
    if (!s->out) {
        if (s->in)
            lib.BIO_free(s->in);
        return fl_fail(err, FL_EXHAUSTED, "no memory for TLS");
    }
    lib.SSL_set_bio(s->ssl, s->in, s->out); /* theirs from here on */
    if (address)
        ok = lib.X509_VERIFY_PARAM_set1_ip_asc(lib.SSL_get0_param(s->ssl), host);
    else if (host)
        ok = lib.SSL_set1_host(s->ssl, host);
    if (host)
        lib.SSL_set_connect_state(s->ssl);
    else
        lib.SSL_set_accept_state(s->ssl);
    return ok == 1 ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for TLS");
}

enum fl_status tls_session_create(struct tls_id *id, int fd, const char *host,
                                  struct tls_session **out, struct fl_err *err)
{
    struct tls_session *s;
    SSL_CTX *ctx = NULL;
    enum fl_status st;

    pthread_once(&lib.once, find_lib);
    if (!lib.here)
        return fl_fail(
            err, FL_UNSUPPORTED,
            "TLS is on and no libssl is installed here: install libssl 3 (Debian: libssl3)");
    FL_TRY(context(id, host != NULL, &ctx, err));
    s = calloc(1, sizeof(*s));
    st = s ? begin(s, ctx, host, err) : fl_fail(err, FL_EXHAUSTED, "no memory for TLS");
    lib.SSL_CTX_free(ctx); /* the session holds it */
    if (st != FL_OK) {
        tls_session_destroy(s);
        return st;
    }
    s->fd = fd;
    s->client = host != NULL;
    (void)FL_COPY(s->name, host ? host : "the other side");
    (void)FL_COPY(s->cert_path, id ? id->cert_path : "");
    (void)FL_COPY(s->ca_path, id ? id->ca_path : "");
    *out = s;
    return FL_OK;
}

void tls_session_destroy(struct tls_session *s)
{
    if (!s)
        return;
    if (s->ssl)
        lib.SSL_free(s->ssl);
    explicit_bzero(s->plain, sizeof(s->plain));
    free(s);
}

bool tls_session_has(const struct tls_session *s)
{
    return lib.SSL_pending(s->ssl) > 0 || lib.BIO_ctrl(s->in, BIO_CTRL_PENDING, 0, NULL) > 0;
}

/* ---- what went wrong */

enum fl_status tls_refusal(const char *whose, const char *ca_path, long result, struct fl_err *err)
{
    switch (result) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
        return fl_fail(err, FL_DENIED, "the certificate of %s has expired: make a new one there",
                       whose);
    case X509_V_ERR_CERT_NOT_YET_VALID:
        return fl_fail(err, FL_DENIED,
                       "the certificate of %s is not valid yet: look at the clocks of both hosts",
                       whose);
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
        return fl_fail(
            err, FL_DENIED,
            "the certificate shown at %s does not name %s: make it with that address or name "
            "as subjectAltName, or use one that it names",
            whose, whose);
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
        return fl_fail(
            err, FL_DENIED,
            "the certificate of %s is not signed by the CA %s: both sides need the same CA", whose,
            ca_path);
    default:
        return fl_fail(err, FL_DENIED, "the certificate of %s is not taken (%ld)", whose, result);
    }
}

static enum fl_status explain(struct tls_session *s, struct fl_err *err)
{
    unsigned long code = lib.ERR_get_error();
    int reason = ERR_GET_REASON(code);
    const char *why = code ? lib.ERR_reason_error_string(code) : NULL;
    long result = lib.SSL_get_verify_result(s->ssl);

    lib.ERR_clear_error();
    if (reason == SSL_R_CERTIFICATE_VERIFY_FAILED && result != X509_V_OK)
        return tls_refusal(s->name, s->ca_path, result, err);
    if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE)
        return fl_fail(err, FL_DENIED,
                       "%s shows no certificate: TLS between nodes wants one of each side",
                       s->name);
    if (reason >= SSL_AD_REASON_OFFSET)
        return fl_fail(err, FL_DENIED, "%s does not take the certificate %s of this side (%s)",
                       s->name, s->cert_path, why ? why : "no reason given");
    if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST ||
        reason == SSL_R_PACKET_LENGTH_TOO_LONG || reason == SSL_R_UNEXPECTED_MESSAGE)
        return fl_fail(
            err, FL_UNSUPPORTED,
            "%s speaks no TLS, and this side does: turn it on for both (RAY_USE_TLS=1) or for "
            "none",
            s->name);
    return fl_fail(err, FL_UNREACHABLE, "TLS with %s: %s", s->name, why ? why : "it hung up");
}

static enum fl_status hung_up(const struct tls_session *s, struct fl_err *err)
{
    if (errno == ECONNRESET || errno == EPIPE || errno == 0)
        return fl_fail(err, FL_UNREACHABLE, "%s hung up", s->name);
    return fl_fail_errno(err, "TLS with %s", s->name);
}

/* ---- bytes on the wire */

static enum fl_status drain(struct tls_session *s, unsigned *events, struct fl_err *err)
{
    for (;;) {
        ssize_t rc;

        if (s->from == s->to) {
            int n = lib.BIO_read(s->out, s->pending, sizeof(s->pending));

            s->from = 0;
            s->to = n > 0 ? (size_t)n : 0;
            if (n <= 0)
                return FL_OK;
        }
        do
            rc = send(s->fd, s->pending + s->from, s->to - s->from, MSG_NOSIGNAL | MSG_DONTWAIT);
        while (rc < 0 && errno == EINTR);
        if (rc < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            *events |= POLLOUT;
            return FL_AGAIN;
        }
        if (rc < 0)
            return hung_up(s, err);
        s->from += (size_t)rc;
    }
}

static enum fl_status fill(struct tls_session *s, unsigned *events, struct fl_err *err)
{
    ssize_t n;

    do
        n = recv(s->fd, s->buf, sizeof(s->buf), MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        *events |= POLLIN;
        return FL_AGAIN;
    }
    if (n == 0)
        errno = 0;
    if (n <= 0)
        return hung_up(s, err);
    return lib.BIO_write(s->in, s->buf, (int)n) == n
               ? FL_OK
               : fl_fail(err, FL_EXHAUSTED, "no memory for TLS");
}

/* What libssl asked for by rc. FL_OK: once more. */
static enum fl_status go_on(struct tls_session *s, int rc, unsigned *events, struct fl_err *err)
{
    int what = lib.SSL_get_error(s->ssl, rc);

    if (what == SSL_ERROR_WANT_READ) {
        enum fl_status st = drain(s, events, err);

        return st == FL_OK || st == FL_AGAIN ? fill(s, events, err) : st;
    }
    if (what == SSL_ERROR_ZERO_RETURN) {
        errno = 0;
        return hung_up(s, err);
    }
    enum fl_status st = explain(s, err);
    unsigned ignored = 0;

    (void)drain(s, &ignored, NULL); /* the alert tells the other side why */
    return st;
}

enum fl_status tls_session_shake(struct tls_session *s, unsigned *events, struct fl_err *err)
{
    *events = 0;
    for (;;) {
        lib.ERR_clear_error(); /* what others left would be taken for ours */
        int rc = lib.SSL_do_handshake(s->ssl);

        if (rc == 1)
            return drain(s, events, err);
        FL_TRY(go_on(s, rc, events, err));
    }
}

static size_t gather(struct tls_session *s, const struct iovec *iov, unsigned n, size_t skip)
{
    size_t len = 0;

    for (unsigned i = 0; i < n && len < sizeof(s->plain); i++) {
        size_t from = skip < iov[i].iov_len ? skip : iov[i].iov_len;
        size_t take = iov[i].iov_len - from;

        skip -= from;
        take = take < sizeof(s->plain) - len ? take : sizeof(s->plain) - len;
        if (take)
            memcpy(s->plain + len, (const char *)iov[i].iov_base + from, take);
        len += take;
    }
    return len;
}

enum fl_status tls_session_write(struct tls_session *s, const struct iovec *iov, unsigned n,
                                 size_t *wrote, unsigned *events, struct fl_err *err)
{
    size_t len;

    *events = 0;
    while (s->held < PIECE && s->from == s->to && (len = gather(s, iov, n, s->held)) > 0) {
        lib.ERR_clear_error();
        int rc = lib.SSL_write(s->ssl, s->plain, (int)len);

        if (rc <= 0) {
            FL_TRY(go_on(s, rc, events, err));
            continue;
        }
        s->held += (size_t)rc;
        if (s->held >= PIECE)
            break;
    }
    FL_TRY(drain(s, events, err));
    len = 0;
    for (unsigned i = 0; i < n; i++)
        len += iov[i].iov_len;
    *wrote = s->held < len ? s->held : len; /* less than was given before: the rest is owed */
    s->held -= *wrote;
    return FL_OK;
}

enum fl_status tls_session_read(struct tls_session *s, const struct iovec *iov, unsigned n,
                                size_t *got, unsigned *events, struct fl_err *err)
{
    size_t sum = 0;

    *events = 0;
    for (unsigned i = 0; i < n; i++) {
        size_t at = 0;

        while (at < iov[i].iov_len) {
            lib.ERR_clear_error();
            int rc = lib.SSL_read(s->ssl, (char *)iov[i].iov_base + at, (int)(iov[i].iov_len - at));

            if (rc > 0) {
                at += (size_t)rc;
                continue;
            }
            sum += at;
            if (sum) { /* what is wrong, or that there is no more, is told by the next one */
                *got = sum;
                return FL_OK;
            }
            FL_TRY(go_on(s, rc, events, err));
        }
        sum += at;
    }
    *got = sum;
    return FL_OK;
}

/* ---- to find out */

static uint64_t left_ms(uint64_t due_ns)
{
    uint64_t now = fl_clock_boot_ns();

    return now < due_ns ? (due_ns - now) / 1000000 : 0;
}

static bool wait_for(int fd, unsigned events, uint64_t due_ns)
{
    struct pollfd p = { .fd = fd, .events = (short)events };
    int rc;

    do
        rc = poll(&p, 1, (int)left_ms(due_ns));
    while (rc < 0 && errno == EINTR);
    return rc > 0;
}

static enum fl_status dial(const char *host, uint16_t port, uint64_t due_ns, int *out,
                           struct fl_err *err)
{
    struct addrinfo want = { .ai_socktype = SOCK_STREAM }, *list = NULL;
    char text[8];
    int number = 0;
    socklen_t len = sizeof(number);

    snprintf(text, sizeof(text), "%u", port);
    if (getaddrinfo(host, text, &want, &list))
        return fl_fail(err, FL_UNREACHABLE, "host %s is not known here", host);
    int fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0 || (connect(fd, list->ai_addr, list->ai_addrlen) < 0 && errno != EINPROGRESS) ||
        !wait_for(fd, POLLOUT, due_ns) || getsockopt(fd, SOL_SOCKET, SO_ERROR, &number, &len) < 0 ||
        number) {
        if (fd >= 0)
            close(fd);
        freeaddrinfo(list);
        return fl_fail(err, FL_UNREACHABLE, "nobody answers at %s:%u", host, port);
    }
    freeaddrinfo(list);
    *out = fd;
    return FL_OK;
}

/* With TLS 1.3 the refusal of a certificate comes after the greeting: it is waited for a moment. */
static enum fl_status greet(struct tls_session *s, int fd, bool whole, uint64_t due_ns,
                            struct fl_err *err)
{
    enum { AFTER_MS = 500 };
    struct iovec iov = { &(char){ 0 }, 1 };
    unsigned events;
    size_t got;
    enum fl_status st;

    while ((st = tls_session_shake(s, &events, err)) == FL_AGAIN)
        if (!wait_for(fd, events, due_ns))
            return fl_fail(err, FL_TIMEOUT, "%s does not end the greeting of TLS", s->name);
    if (st != FL_OK || !whole)
        return st;
    due_ns = left_ms(due_ns) > AFTER_MS ? fl_clock_boot_ns() + AFTER_MS * 1000000ull : due_ns;
    while ((st = tls_session_read(s, &iov, 1, &got, &events, err)) == FL_AGAIN)
        if (!wait_for(fd, events, due_ns))
            return FL_OK;
    return st;
}

enum fl_status tls_diagnose(struct tls_id *id, const char *host, uint16_t port, uint32_t wait_ms,
                            struct fl_err *err)
{
    uint64_t due_ns = fl_clock_boot_ns() + wait_ms * 1000000ull;
    struct tls_session *s = NULL;
    int fd = -1;

    FL_TRY(dial(host, port, due_ns, &fd, err));
    enum fl_status st = tls_session_create(id, fd, host, &s, err);

    if (st == FL_OK)
        st = greet(s, fd, id != NULL, due_ns, err);
    tls_session_destroy(s);
    close(fd);
    return st;
}
