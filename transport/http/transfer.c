#include "transport/http/transfer.h"

#include <ctype.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/base/fault.h"
#include "common/base/str.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void curl_start(void)
{
    if (curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK)
        atexit(curl_global_cleanup);
}

void http_transfer_start(void)
{
    pthread_once(&once, curl_start);
}

static bool add(char **to, size_t *len, size_t *cap, const char *data, size_t n)
{
    if (*len + n + 1 > *cap) {
        size_t more = *cap * 2 > *len + n + 1 ? *cap * 2 : *len + n + 1;
        char *p = FL_FAULT("http.answer") ? NULL : realloc(*to, more);

        if (!p)
            return false;
        *to = p;
        *cap = more;
    }
    memcpy(*to + *len, data, n);
    *len += n;
    (*to)[*len] = 0;
    return true;
}

static size_t on_body(char *data, size_t one, size_t n, void *arg)
{
    struct http_transfer *t = arg;
    size_t max = t->ask.answer_max_bytes ? t->ask.answer_max_bytes : HTTP_ANSWER_MAX;
    enum fl_status st;
    long status = 0;

    (void)one;
    if (t->ask.piece) {
        curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
        st = t->ask.piece(t->ask.arg, (unsigned)status, (struct fl_bytes){ data, n });
        if (st == FL_OK)
            return n;
        fl_fail(&t->err, st, "%s: reading was ended", t->ask.url);
        return 0;
    }
    if (t->answer.body_len + n > max)
        fl_fail(&t->err, FL_EXHAUSTED, "%s: the answer has more than %zu bytes", t->ask.url, max);
    else if (!add(&t->answer.body, &t->answer.body_len, &t->body_cap, data, n))
        fl_fail(&t->err, FL_EXHAUSTED, "%s: no memory for the answer", t->ask.url);
    else
        return n;
    return 0;
}

/* Of the last answer alone: an interim one (100) comes before it. */
static size_t on_header(char *data, size_t one, size_t n, void *arg)
{
    struct http_transfer *t = arg;
    size_t from = t->headers_len;

    (void)one;
    if (n > 5 && memcmp(data, "HTTP/", 5) == 0) {
        t->headers_len = 0;
        return n;
    }
    if (t->headers_len + n > HTTP_HEADERS_MAX ||
        !add(&t->answer.headers, &t->headers_len, &t->headers_cap, data, n)) {
        fl_fail(&t->err, FL_EXHAUSTED, "%s: more than %d bytes of headers", t->ask.url,
                HTTP_HEADERS_MAX);
        return 0;
    }
    for (char *p = t->answer.headers + from; *p && *p != ':'; p++)
        *p = (char)tolower((unsigned char)*p);
    return n;
}

static enum fl_status set_headers(struct http_transfer *t, struct fl_err *err)
{
    static const char *const ours[] = { "Expect:", NULL }; /* no round trip before a body */

    for (int i = 0; i < 2; i++) {
        for (const char *const *h = i ? t->ask.headers : ours; h && *h; h++) {
            struct curl_slist *more = curl_slist_append(t->headers, *h);

            if (!more)
                return fl_fail(err, FL_EXHAUSTED, "%s: no memory for a header", t->ask.url);
            t->headers = more;
        }
    }
    return FL_OK;
}

static const char *method_of(const struct http_ask *ask)
{
    return ask->method ? ask->method : ask->body.len ? "POST" : "GET";
}

static void set_options(struct http_transfer *t)
{
    const struct http_ask *ask = &t->ask;
    CURL *e = t->easy;
    long ms = ask->timeout_ms ? ask->timeout_ms : HTTP_TIMEOUT_MS;

    curl_easy_setopt(e, CURLOPT_URL, ask->url);
    curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(e, CURLOPT_PROXY,
                     ""); /* whatever http_proxy says: a cluster is reached directly */
    curl_easy_setopt(e, CURLOPT_NOPROXY, "*");
    if (ask->ca_path && *ask->ca_path)
        curl_easy_setopt(e, CURLOPT_CAINFO, ask->ca_path);
    if (ask->unverified) {
        curl_easy_setopt(e, CURLOPT_SSL_VERIFYPEER, 0L);
        curl_easy_setopt(e, CURLOPT_SSL_VERIFYHOST, 0L);
    }
    curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(e, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(e, CURLOPT_TIMEOUT_MS, ms);
    curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS,
                     ms < HTTP_CONNECT_MS ? ms : (long)HTTP_CONNECT_MS);
    curl_easy_setopt(e, CURLOPT_USERAGENT, "furlong/" FURLONG_VERSION);
    curl_easy_setopt(e, CURLOPT_HTTPHEADER, t->headers);
    curl_easy_setopt(e, CURLOPT_ERRORBUFFER, t->curl_error);
    curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(e, CURLOPT_WRITEDATA, t);
    curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(e, CURLOPT_HEADERDATA, t);
    if (ask->body.len || strcmp(method_of(ask), "POST") == 0) {
        curl_easy_setopt(e, CURLOPT_POST, 1L);
        curl_easy_setopt(e, CURLOPT_POSTFIELDS, ask->body.len ? ask->body.data : "");
        curl_easy_setopt(e, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)ask->body.len);
    }
    if (strcmp(method_of(ask), "HEAD") == 0)
        curl_easy_setopt(e, CURLOPT_NOBODY, 1L);
    else
        curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, method_of(ask));
}

enum fl_status http_transfer_init(struct http_transfer *t, const struct http_ask *ask, bool keep,
                                  struct fl_err *err)
{
    enum fl_status st;

    *t = (struct http_transfer){ .ask = *ask };
    if (!ask->url || !*ask->url)
        return fl_fail(err, FL_INVALID, "no address to ask");
    http_transfer_start();
    t->easy = FL_FAULT("http.easy") ? NULL : curl_easy_init();
    if (keep && ask->body.len) {
        t->body = malloc(ask->body.len);
        if (t->body)
            memcpy(t->body, ask->body.data, ask->body.len);
        t->ask.body.data = t->body;
    }
    st = t->easy && (t->body || !keep || !ask->body.len)
             ? set_headers(t, err)
             : fl_fail(err, FL_EXHAUSTED, "%s: no memory to ask", ask->url);
    if (st != FL_OK) {
        http_transfer_fini(t);
        return st;
    }
    set_options(t);
    if (keep)
        t->ask.url = "the request"; /* the caller's was borrowed; curl's errors name the host */
    return FL_OK;
}

void http_transfer_fini(struct http_transfer *t)
{
    if (t->easy)
        curl_easy_cleanup(t->easy);
    curl_slist_free_all(t->headers);
    free(t->body);
    http_answer_fini(&t->answer);
    *t = (struct http_transfer){ 0 };
}

static enum fl_status status_of(CURLcode rc)
{
    switch (rc) {
    case CURLE_OPERATION_TIMEDOUT:
        return FL_TIMEOUT;
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
        return FL_INVALID;
    case CURLE_OUT_OF_MEMORY:
        return FL_EXHAUSTED;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_SSL_CACERT_BADFILE:
        return FL_DENIED;
    case CURLE_WEIRD_SERVER_REPLY:
    case CURLE_BAD_CONTENT_ENCODING:
        return FL_CORRUPT;
    default:
        return FL_UNREACHABLE;
    }
}

/* What libcurl says of TLS, with the remedy. NULL: nothing of TLS. */
static const char *tls_trouble(const struct http_transfer *t, CURLcode rc)
{
    static const struct {
        const char *said, *means;
    } rows[] = {
        { "wrong version number", "this port speaks no TLS: use http:// in place of https://" },
        { "unexpected eof",
          "the server hangs up when it is greeted: it likely speaks no TLS, use http:// then" },
        { "SYSCALL",
          "the server hangs up when it is greeted: it likely speaks no TLS, use http:// then" },
        { "has expired", "the server's certificate has expired: a new one is needed there" },
        { "not yet valid",
          "the server's certificate is not valid yet: look at the clocks of both hosts" },
        { "subject name",
          "the server's certificate does not name this address: use one that it names, or make it "
          "with this one as subjectAltName" },
        { "issuer", "the server's certificate is not signed by a CA that is trusted here: give "
                    "that CA's file "
                    "(--verify=FILE, RAY_TLS_CA_CERT)" },
        { "self-signed", "the server's certificate is not signed by a CA that is trusted here: "
                         "give that CA's file "
                         "(--verify=FILE, RAY_TLS_CA_CERT)" },
    };

    if (rc == CURLE_SSL_CACERT_BADFILE)
        return "the CA's file cannot be read, or holds no certificate in PEM: give another one "
               "(--verify=FILE, "
               "RAY_TLS_CA_CERT)";
    if (rc != CURLE_PEER_FAILED_VERIFICATION && rc != CURLE_SSL_CONNECT_ERROR)
        return NULL;
    for (size_t i = 0; i < FL_LEN(rows); i++)
        if (strstr(t->curl_error, rows[i].said))
            return rows[i].means;
    return NULL;
}

enum fl_status http_transfer_result(struct http_transfer *t, CURLcode rc, struct fl_err *err)
{
    long status = 0;
    enum fl_status st;

    if (t->err.status != FL_OK) {
        if (err)
            *err = t->err;
        return t->err.status;
    }
    if (rc != CURLE_OK) {
        const char *tls = tls_trouble(t, rc);

        st = status_of(rc);
        if (tls)
            return fl_fail(err, st, "%s: %s", t->ask.url, tls);
        fl_err_set(err, st, FL_FROM_CURL, (int)rc, "%s: %s", t->ask.url,
                   t->curl_error[0] ? t->curl_error : curl_easy_strerror(rc));
        return st;
    }
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    t->answer.status = (unsigned)status;
    if (!t->answer.body)
        t->answer.body = calloc(1, 1);
    return t->answer.body ? FL_OK : fl_fail(err, FL_EXHAUSTED, "%s: no memory", t->ask.url);
}

void http_answer_fini(struct http_answer *a)
{
    free(a->body);
    free(a->headers);
    *a = (struct http_answer){ 0 };
}

const char *http_answer_header(const struct http_answer *a, const char *name, char *buf, size_t cap)
{
    size_t n = strlen(name);

    for (const char *p = a->headers; p && *p;) {
        size_t len = strcspn(p, "\r\n");

        if (len > n && p[n] == ':' && strncasecmp(p, name, n) == 0) {
            size_t from = n + 1;

            while (from < len && (p[from] == ' ' || p[from] == '\t'))
                from++;
            snprintf(buf, cap, "%.*s", (int)(len - from), p + from);
            return buf;
        }
        p += len;
        p += strspn(p, "\r\n");
    }
    return NULL;
}

enum fl_status http_fetch(const struct http_ask *ask, struct http_answer *out, struct fl_err *err)
{
    struct http_transfer t;
    enum fl_status st;

    FL_TRY(http_transfer_init(&t, ask, false, err));
    st = http_transfer_result(&t, curl_easy_perform(t.easy), err);
    if (st == FL_OK) {
        *out = t.answer;
        t.answer = (struct http_answer){ 0 };
    }
    http_transfer_fini(&t);
    return st;
}
