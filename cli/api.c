#include "cli/api.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "cli/daemons.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/str.h"

enum {
    NO_HTTP = 1,     /* CURLE_UNSUPPORTED_PROTOCOL: HTTP/2 frames came in place of a status line, as Ray's control port answers */
    WRONG_PORT = 421 /* and as ours does */
};

enum fl_status cli_url_of(const char *address, char url[CLI_URL_BYTES], struct fl_err *err)
{
    struct fl_str s = { url, 0, CLI_URL_BYTES, CLI_URL_BYTES - 1, false, false };
    const char *rest = address, *scheme = "http://";

    if (strncmp(address, "http://", 7) == 0)
        rest += 7;
    else if (strncmp(address, "https://", 8) == 0)
        scheme = "https://", rest += 8;
    size_t len = strcspn(rest, "/");

    if (!strchr(rest, ':') || len == 0 || strstr(rest, "://"))
        return fl_fail(err, FL_INVALID,
                       "address '%s': HOST:PORT or http://HOST:PORT of the head's HTTP side is wanted "
                       "(8265 by default)", address);
    fl_str_add(&s, "%s%.*s", scheme, (int)len, rest);
    return s.cut ? fl_fail(err, FL_INVALID, "address '%.40s...' is too long", address) : FL_OK;
}

/* A job's name may hold what no URL does. */
static void add_path(struct fl_str *out, const char *path)
{
    for (const char *p = path; *p; p++) {
        unsigned char ch = (unsigned char)*p;
        bool escape = ch == '%' && isxdigit((unsigned char)p[1]) && isxdigit((unsigned char)p[2]);

        if (ch <= ' ' || ch >= 0x7f || strchr("\"<>#^`{|}", ch) || (ch == '%' && !escape))
            fl_str_add(out, "%%%02X", ch);
        else
            fl_str_add_bytes(out, p, 1);
    }
}

enum fl_status cli_request(const struct cli_cluster *c, const char *method, const char *path, const char *own,
                           uint32_t timeout_ms, struct cli_request *r, struct fl_err *err)
{
    struct fl_str url = FL_STR_ON(r->url);
    size_t n = 0;

    *r = (struct cli_request){ .ask = { .method = method, .timeout_ms = timeout_ms, .answer_max_bytes = c->answer_max_bytes, .unverified = c->unverified } };
    fl_str_add(&url, "%s", c->url);
    add_path(&url, path);
    if (url.cut)
        return fl_fail(err, FL_INVALID, "request to %.80s: the path %.60s... is too long", c->url, path);
    if (own)
        r->headers[n++] = own;
    for (size_t i = 0; i < CLI_HEADERS && c->headers[i]; i++)
        r->headers[n++] = c->headers[i];
    if (*c->token) {
        snprintf(r->bearer, sizeof(r->bearer), "Authorization: Bearer %s", c->token);
        r->headers[n++] = r->bearer;
    }
    r->ask.url = r->url;
    r->ask.headers = r->headers;
    r->ask.ca_path = *c->ca ? c->ca : getenv("RAY_TLS_CA_CERT");
    return FL_OK;
}

static enum fl_status from_here(struct cli_cluster *c, struct fl_err *err)
{
    struct cli_daemon *all;
    struct fl_str list = FL_STR_HEAP(160);
    size_t n, heads = 0;
    enum fl_status st = cli_daemons_find(&all, &n, err);

    if (st != FL_OK)
        return st;
    for (size_t i = 0; i < n && st == FL_OK; i++)
        if (all[i].kind == 'h' && !all[i].private) {
            const char *http = cli_text(all[i].info, "http");

            fl_str_add(&list, "%s%s", heads++ ? ", " : "", http);
            (void)FL_COPY(c->ca, cli_text(all[i].info, "tls_ca"));
            st = cli_url_of(http, c->url, err);
        }
    cli_daemons_free(all, n);
    if (st == FL_OK && heads == 0)
        st = fl_fail(err, FL_NOT_FOUND,
                     "no cluster: no head runs here, and neither --address, FURLONG_ADDRESS nor "
                     "RAY_ADDRESS names one; start one with: furlong start --head");
    else if (st == FL_OK && heads > 1)
        st = fl_fail(err, FL_INVALID, "%zu heads run here (%s): say which with --address", heads,
                     fl_str_text(&list));
    fl_str_fini(&list);
    return st;
}

static bool read_token(const char *path, char *out, size_t cap)
{
    char *text = NULL;
    size_t len;

    if (fl_file_read(path, 1024, &text, &len, NULL) != FL_OK)
        return false;
    text[strcspn(text, " \t\r\n")] = 0;
    (void)fl_copy(out, cap, text);
    free(text);
    return *out != 0;
}

void cli_token_of_ray(char *out, size_t cap)
{
    const char *given = getenv("RAY_AUTH_TOKEN"), *path = getenv("RAY_AUTH_TOKEN_PATH"), *home = getenv("HOME");
    char at[FL_PATH_MAX];

    *out = 0;
    if (given && *given)
        (void)fl_copy(out, cap, given);
    else if (!(path && *path && read_token(path, out, cap)) && home && fl_path(at, NULL, "%s/.ray/auth_token", home) == FL_OK)
        (void)read_token(at, out, cap);
}

/* Ray's token first: a head that found it too asks for it from everybody, and takes it in place of
 * the cluster's own. A cluster that asks for no token does not mind one. */
void cli_token(char *out, size_t cap)
{
    static const char *const named[] = { "RAY_AUTH_TOKEN_PATH", "FURLONG_TOKEN_PATH" };
    const char *given = getenv("RAY_AUTH_TOKEN"), *home = getenv("HOME");
    char at[FL_PATH_MAX], state[FL_PATH_MAX];

    *out = 0;
    if (given && *given) {
        (void)fl_copy(out, cap, given);
        return;
    }
    for (size_t i = 0; i < 2; i++) {
        const char *path = getenv(named[i]);

        if (path && *path && read_token(path, out, cap))
            return;
    }
    if (home && fl_path(at, NULL, "%s/.ray/auth_token", home) == FL_OK && read_token(at, out, cap))
        return;
    if (fl_state_dir(NULL, state, NULL) == FL_OK && fl_path(at, NULL, "%s/token", state) == FL_OK)
        (void)read_token(at, out, cap);
}

enum fl_status cli_token_keep(const char *token, struct fl_err *err)
{
    const char *path = getenv("FURLONG_TOKEN_PATH");
    char at[FL_PATH_MAX], state[FL_PATH_MAX];

    if (path && *path) {
        FL_TRY(fl_path(at, err, "%s", path));
    } else {
        FL_TRY(fl_state_dir(NULL, state, err));
        FL_TRY(fl_path(at, err, "%s/token", state));
    }
    return fl_file_write(at, 0600, token, strlen(token), err);
}

enum fl_status cli_token_make(char *out, size_t cap, struct fl_err *err)
{
    const char *path = getenv("RAY_AUTH_TOKEN_PATH"), *home = getenv("HOME");
    uint8_t random[32];
    char token[65], at[FL_PATH_MAX], *slash;

    if (path && *path)
        FL_TRY(fl_path(at, err, "%s", path));
    else if (home && *home)
        FL_TRY(fl_path(at, err, "%s/.ray/auth_token", home));
    else
        return fl_fail(err, FL_INVALID, "HOME is not set: say with RAY_AUTH_TOKEN_PATH where the token shall be");
    slash = strrchr(at, '/');
    if (slash && slash != at) {
        *slash = 0;
        FL_TRY(fl_mkdirs(at, err));
        *slash = '/';
    }
    FL_TRY(fl_random(random, sizeof(random), err));
    fl_hex(token, random, sizeof(random));
    FL_TRY(fl_file_write(at, 0600, token, strlen(token), err));
    (void)fl_copy(out, cap, token);
    return FL_OK;
}

enum fl_status cli_cluster_find(const char *address, struct cli_cluster *out, struct fl_err *err)
{
    static const char *const names[] = { "FURLONG_ADDRESS", "RAY_ADDRESS" };
    struct cli_cluster c = { 0 };

    for (size_t i = 0; i < 2 && !(address && *address); i++)
        address = getenv(names[i]);
    if (address && *address && strcmp(address, "auto") != 0)
        FL_TRY(cli_url_of(address, c.url, err));
    else
        FL_TRY(from_here(&c, err));
    cli_token(c.token, sizeof(c.token));
    *out = c;
    return FL_OK;
}

enum fl_status cli_headers(struct cli_cluster *c, const char *json, char *text, size_t cap, struct fl_err *err)
{
    struct fl_str s = { text, 0, cap, cap - 1, false, false };
    json_t *o = json_loads(json, JSON_REJECT_DUPLICATES, NULL), *v;
    const char *name;
    size_t n = 0;

    if (!json_is_object(o)) {
        json_decref(o);
        return fl_fail(err, FL_INVALID, "Failed to parse headers into JSON: \"%.100s\".", json);
    }
    json_object_foreach(o, name, v) {
        size_t at = s.len;

        if (n == CLI_HEADERS || strpbrk(name, "\r\n") || strpbrk(json_string_value(v) ? json_string_value(v) : "\n", "\r\n"))
            continue;
        fl_str_add(&s, "%s: %s", name, json_string_value(v));
        c->headers[n++] = text + at;
        if (strcasecmp(name, "authorization") == 0)
            *c->token = 0;
        fl_str_add_bytes(&s, "", 1);
    }
    json_decref(o);
    return s.cut ? fl_fail(err, FL_INVALID, "headers are longer than %zu bytes", cap) : FL_OK;
}

static enum fl_status status_of(unsigned http)
{
    switch (http) {
    case 400: return FL_INVALID;
    case 401: case 403: return FL_DENIED;
    case 404: return FL_NOT_FOUND;
    case 408: case 504: return FL_TIMEOUT;
    case 409: return FL_EXISTS;
    case 413: case 429: case 507: return FL_EXHAUSTED;
    case 501: return FL_UNSUPPORTED;
    case 503: return FL_UNREACHABLE;
    default: return http < 500 ? FL_INVALID : FL_INTERNAL;
    }
}

/* A trace of Python (a head of Ray's answers so) says what is wrong in its last line that has a word. */
static void last_words(const char *body, char *out, size_t cap)
{
    const char *from = body, *end = body + strlen(body);

    if (strstr(body, "Traceback (most recent call last)")) {
        while (end > body && !isalnum((unsigned char)end[-1]))
            end--;
        for (from = end; from > body && from[-1] != '\n';)
            from--;
    }
    snprintf(out, cap, "%.*s", (int)(end - from), from);
    for (char *p = out; *p; p++)
        if ((unsigned char)*p < ' ')
            *p = ' ';
}

/* On Ray's paths our head answers with a sentence, or as Ray's with the name of an exception in front of it; NULL: neither. */
static const char *ray_said(const struct http_answer *a)
{
    static const char *const kinds[] = { "ValueError: ", "TypeError: ", "RuntimeError: " };
    char text[64];

    for (size_t i = 0; i < FL_LEN(kinds); i++)
        if (a->body_len > strlen(kinds[i]) && strncmp(a->body, kinds[i], strlen(kinds[i])) == 0)
            return a->body + strlen(kinds[i]);
    return a->body_len && !strchr(a->body, '\n') && http_answer_header(a, HTTP_PRODUCT_HEADER, text, sizeof(text)) ? a->body : NULL;
}

static enum fl_status explain(const struct cli_cluster *c, const char *path,
                              const struct http_answer *a, struct fl_err *err)
{
    json_t *o = json_loadb(a->body, a->body_len, JSON_REJECT_DUPLICATES, NULL);
    const char *said = cli_text(o, "error"), *ours = ray_said(a);
    char words[160];
    enum fl_status st = status_of(a->status);

    if (*said) {
        (void)fl_fail(err, st, "%s", said);
    } else if (a->status == WRONG_PORT && a->body_len) {
        (void)fl_fail(err, FL_INVALID, "%s: %.*s", c->url, (int)strcspn(a->body, "\n"), a->body);
    } else if (ours) {
        (void)fl_fail(err, st, "%s", ours);
    } else {
        last_words(a->body_len ? a->body : "(nothing)", words, sizeof(words));
        (void)fl_fail(err, st, "%s%s answered %u: %s", c->url, path, a->status, words);
    }
    json_decref(o);
    return st;
}

/* Once a command: which release speaks to which, and where each of them lies, before anybody wonders. */
static void note_release(const struct cli_cluster *c, const struct http_answer *a)
{
    enum { ASK_MS = 5000 };
    static bool said;
    char theirs[64], own[4096] = "?";
    const char *version = http_answer_header(a, HTTP_PRODUCT_HEADER, theirs, sizeof(theirs));
    struct http_answer more = { 0 };
    json_t *o = NULL;

    if (said || !version || strcmp(version, FURLONG_VERSION) == 0)
        return;
    said = true;
    ssize_t n = readlink("/proc/self/exe", own, sizeof(own) - 1);

    own[n > 0 ? n : 1] = '\0';
    if (cli_ask(c, "GET", "/api/furlong/version", NULL, ASK_MS, &more, NULL) == FL_OK) {
        o = json_loadb(more.body, more.body_len, JSON_REJECT_DUPLICATES, NULL);
        http_answer_fini(&more);
    }
    fprintf(stderr, "furlong: note: this is release %s (%s), the head at %s is %s (%s)\n", FURLONG_VERSION, own, c->url, version,
            *cli_text(o, "program") ? cli_text(o, "program") : "where is not said");
    json_decref(o);
}

enum fl_status cli_ask(const struct cli_cluster *c, const char *method, const char *path,
                       const json_t *body, uint32_t timeout_ms, struct http_answer *out,
                       struct fl_err *err)
{
    struct cli_request r;
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    enum fl_status st = body && !text ? fl_fail(err, FL_EXHAUSTED, "no memory for a request to %.80s", c->url)
                                      : cli_request(c, method, path, body ? "Content-Type: application/json" : NULL, timeout_ms, &r, err);

    if (st != FL_OK) {
        free(text);
        return st;
    }
    r.ask.body = (struct fl_bytes){ text, text ? strlen(text) : 0 };
    st = http_fetch(&r.ask, out, err);
    free(text);
    if (st != FL_OK && err && err->origin == FL_FROM_CURL && err->native == NO_HTTP)
        return fl_fail(err, FL_INVALID, "%s is the port that worker daemons join, not the one for commands and jobs: that is the head's "
                       "HTTP port, 8265 by default", c->url);
    if (st == FL_OK)
        note_release(c, out);
    if (st == FL_OK)
        return FL_OK;
    size_t where = strlen(r.url) + 2; /* "URL: " says again what stands in front of it */

    if (err && strlen(err->text) > where && strncmp(err->text, r.url, where - 2) == 0)
        memmove(err->text, err->text + where, strlen(err->text) + 1 - where);
    return fl_wrap(err, st, "head at %s", c->url);
}

enum fl_status cli_fetch(const struct cli_cluster *c, const char *method, const char *path,
                         const json_t *body, uint32_t timeout_ms, struct http_answer *out,
                         struct fl_err *err)
{
    enum fl_status st = cli_ask(c, method, path, body, timeout_ms, out, err);

    if (st == FL_OK && out->status >= 400) {
        st = explain(c, path, out, err);
        http_answer_fini(out);
    }
    return st;
}

enum fl_status cli_is_ours(const struct cli_cluster *c, bool *ours, json_t **version, struct fl_err *err)
{
    enum { ASK_MS = 10000 };
    struct http_answer a = { 0 };
    char text[64];
    json_t *o = NULL;
    enum fl_status st;

    FL_TRY(cli_ask(c, "GET", "/api/version", NULL, ASK_MS, &a, err));
    *ours = http_answer_header(&a, HTTP_PRODUCT_HEADER, text, sizeof(text)) != NULL;
    st = a.status < 400 || (*ours && a.status != WRONG_PORT) ? FL_OK : explain(c, "/api/version", &a, err);
    if (st == FL_OK && a.status == 200)
        o = json_loadb(a.body, a.body_len, JSON_REJECT_DUPLICATES, NULL);
    http_answer_fini(&a);
    if (version)
        *version = o;
    else
        json_decref(o);
    return st;
}

enum fl_status cli_call(const struct cli_cluster *c, const char *method, const char *path,
                        const json_t *body, uint32_t timeout_ms, json_t **out, struct fl_err *err)
{
    struct http_answer a = { 0 };
    json_error_t bad;
    json_t *o;

    FL_TRY(cli_fetch(c, method, path, body, timeout_ms, &a, err));
    o = json_loadb(a.body, a.body_len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &bad); /* a log may have one */
    http_answer_fini(&a);
    if (!o)
        return fl_fail(err, FL_CORRUPT, "%s%s answered what is not JSON: %s; is that the HTTP address of a head?", c->url, path, bad.text);
    if (out)
        *out = o;
    else
        json_decref(o);
    return FL_OK;
}

const char *cli_text(const json_t *o, const char *name)
{
    const char *t = json_string_value(json_object_get(o, name));

    return t ? t : "";
}

int64_t cli_int(const json_t *o, const char *name)
{
    return json_integer_value(json_object_get(o, name));
}

double cli_real(const json_t *o, const char *name)
{
    return json_number_value(json_object_get(o, name));
}

bool cli_job_over(const char *status)
{
    return strcmp(status, "SUCCEEDED") == 0 || strcmp(status, "FAILED") == 0 || strcmp(status, "STOPPED") == 0;
}
