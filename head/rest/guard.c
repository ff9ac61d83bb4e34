/* Who may ask at all: no page in a browser may change anything, and in token mode who shows it */
#include <stdlib.h>
#include <strings.h>

#include "common/base/id.h"
#include "head/rest/rest.h"

/* ---- browsers ---- */

static bool from_browser(struct http_req *req)
{
    static const char *const marks[] = { "Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode",
                                         "Sec-Fetch-Dest", "Sec-Fetch-User" };
    const char *agent = http_req_header(req, "User-Agent");

    for (size_t i = 0; i < FL_LEN(marks); i++)
        if (http_req_header(req, marks[i]))
            return true;
    return agent && strncmp(agent, "Mozilla", 7) == 0;
}

static bool changes(const char *method)
{
    static const char *const safe[] = { "GET", "HEAD", "OPTIONS" };

    for (size_t i = 0; i < FL_LEN(safe); i++)
        if (strcmp(method, safe[i]) == 0)
            return false;
    return true;
}

/* ---- the token ---- */

static bool is_public(const char *path)
{
    static const char *const open[] = { "/",
                                        "/favicon.ico",
                                        "/api/authentication_mode",
                                        "/api/authenticate",
                                        "/api/healthz",
                                        "/api/gcs_healthz",
                                        "/api/local_raylet_healthz",
                                        "/-/healthz" };

    for (size_t i = 0; i < FL_LEN(open); i++)
        if (strcmp(path, open[i]) == 0)
            return true;
    return strncmp(path, "/static/", 8) == 0;
}

static const char *bearer_of(const char *header)
{
    return header && strncasecmp(header, "Bearer ", 7) == 0 ? header + 7 : NULL;
}

static bool is_token(const char *token, const char *given)
{
    size_t len = strlen(token);

    return len && given && strlen(given) == len && fl_equal_ct(given, token, len);
}

/* The cluster's own, or the one that Ray's clients share. */
static bool holds_token(const struct head *h, const char *given)
{
    return is_token(h->token, given) || is_token(h->ray_token, given);
}

/* The first of the three that is there decides, even when it is wrong. */
static unsigned check_token(const struct head *h, struct http_req *req)
{
    const char *header = http_req_header(req, "Authorization");
    const char *cookie = http_req_cookie(req, "ray-authentication-token");

    if (!header || !*header)
        header = http_req_header(req, "X-Ray-Authorization");
    if (header && *header)
        return holds_token(h, bearer_of(header)) ? 0 : 403;
    if (cookie && *cookie)
        return holds_token(h, cookie) ? 0 : 403;
    return 401;
}

unsigned head_refuses(void *head, struct http_req *req, char *text, size_t cap)
{
    struct head *h = head;
    unsigned status;

    if (changes(http_req_method(req)) && from_browser(req)) {
        snprintf(text, cap, "'%s' method not allowed for browser traffic.", http_req_method(req));
        return 405;
    }
    if (is_public(http_req_path(req)) || (!h->ray_token[0] && http_req_from_loopback(req)))
        return 0;
    status = check_token(h, req);
    (void)fl_copy(text, cap,
                  status == 401 ? "Unauthorized: Missing authentication token"
                                : "Forbidden: Invalid authentication token");
    return status;
}

bool head_allows(void *head, struct http_req *req, const char *bearer, bool from_loopback)
{
    struct head *h = head;

    if (!h->ray_token[0] && from_loopback)
        return true;
    return holds_token(h, bearer) ||
           (req && (is_public(http_req_path(req)) || !check_token(h, req)));
}

void rest_auth_mode(void *head, struct http_req *req)
{
    struct head *h = head;

    if (!h->ray_token[0])
        http_reply_header(req, "Set-Cookie", "ray-authentication-token=\"\"; Max-Age=0; Path=/");
    http_reply_json(
        req, 200,
        json_pack("{s:s}", "authentication_mode", h->ray_token[0] ? "token" : "disabled"));
}

void rest_authenticate(void *head, struct http_req *req)
{
    struct head *h = head;
    const char *header = http_req_header(req, "Authorization");

    if (!h->ray_token[0]) {
        http_reply_text(req, 401, "Unauthorized: Token authentication is not enabled");
    } else if (!header || !*header) {
        http_reply_text(req, 401, "Unauthorized: Missing authentication token");
    } else if (!holds_token(h, bearer_of(header))) {
        http_reply_text(req, 403, "Forbidden: Invalid authentication token");
    } else {
        http_reply_header(req, "Set-Cookie",
                          "ray-authentication-token=%s; HttpOnly; Max-Age=2592000; Path=/; "
                          "SameSite=Strict%s",
                          bearer_of(header), http_req_is_tls(req) ? "; Secure" : "");
        http_reply_json(
            req, 200,
            json_pack("{s:s,s:s}", "status", "authenticated", "message", "Token is valid"));
    }
}
