#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "transport/http/server_priv.h"

/* One segment of the pattern against one of the path; both start behind the '/'. */
static bool segment(const char *pat, size_t pat_len, const char *path, size_t path_len,
                    struct http_params *out)
{
    if (pat_len < 2 || pat[0] != '{')
        return pat_len == path_len && memcmp(pat, path, pat_len) == 0;
    if (path_len == 0 || out->n == HTTP_PARAMS)
        return false;
    snprintf(out->p[out->n].name, sizeof(out->p[0].name), "%.*s", (int)pat_len - 2, pat + 1);
    out->p[out->n].value = path;
    out->n++;
    return true;
}

static bool match(const char *pat, const char *path, struct http_params *out)
{
    out->n = 0;
    for (;;) {
        size_t a = strcspn(pat, "/"), b = strcspn(path, "/");

        if (a > 3 && pat[0] == '{' && pat[a - 2] == '*') { /* {rest*}: all that is left */
            if (!segment(pat, a, path, strlen(path), out))
                return false;
            out->p[out->n - 1].name[a - 3] = 0;
            return true;
        }
        if (!segment(pat, a, path, b, out))
            return false;
        if (!pat[a] || !path[b])
            return pat[a] == path[b];
        pat += a + 1;
        path += b + 1;
    }
}

/* Values are parts of the path: ended in the copy, after all of it has matched. */
static void cut_values(struct http_params *out, const struct http_route *r)
{
    for (unsigned i = 0; i < out->n; i++) {
        bool last = i + 1 == out->n && strstr(r->pattern, "*}");
        char *v = (char *)(uintptr_t)out->p[i].value;

        if (!last)
            v[strcspn(v, "/")] = 0;
    }
}

const struct http_route *http_route_find(const struct http_route *routes, const char *method,
                                         const char *path, struct http_params *out, bool *known)
{
    const char *as = strcmp(method, "HEAD") == 0 ? "GET" : method;

    *known = false;
    out->n = 0;
    if (path[0] != '/' || fl_copy(out->text, sizeof(out->text), path) >= sizeof(out->text))
        return NULL;
    for (const struct http_route *r = routes; r && r->pattern; r++) {
        if (!match(r->pattern + 1, out->text + 1, out))
            continue;
        *known = true;
        if (r->method && strcmp(r->method, as) != 0)
            continue;
        cut_values(out, r);
        return r;
    }
    return NULL;
}

/* "name:port", "name", "[v6]:port" to its name; false: none of these. */
static bool host_name(const char *header, char *out, size_t cap)
{
    const char *from = header[0] == '[' ? header + 1 : header;
    size_t n = strcspn(from, header[0] == '[' ? "]" : ":");
    const char *rest = from + n;

    if (header[0] == '[' && *rest++ != ']')
        return false;
    if (n == 0 || n >= cap || (*rest && *rest != ':'))
        return false;
    if (*rest && strspn(rest + 1, "0123456789") != strlen(rest + 1))
        return false;
    memcpy(out, from, n);
    out[n] = 0;
    return true;
}

bool http_host_ok(const char *host_header, const char *own_host, const char *const *names)
{
    char name[HTTP_NAME_MAX];
    struct in6_addr any;

    if (!host_name(host_header, name, sizeof(name)))
        return false;
    if (inet_pton(AF_INET, name, &any) == 1 || inet_pton(AF_INET6, name, &any) == 1)
        return true; /* nobody else's page has an address as its origin */
    if (strcasecmp(name, "localhost") == 0 || (own_host && strcasecmp(name, own_host) == 0))
        return true;
    for (; names && *names; names++)
        if (strcasecmp(name, *names) == 0)
            return true;
    return false;
}

bool http_origin_ok(const char *origin, const char *host_header)
{
    const char *at;

    if (!origin)
        return true;
    at = strstr(origin, "://");
    return host_header && at && strcasecmp(at + 3, host_header) == 0;
}

const char *http_bearer(const char *authorization)
{
    if (!authorization || strncasecmp(authorization, "Bearer ", 7) != 0)
        return NULL;
    authorization += 7;
    while (*authorization == ' ')
        authorization++;
    return *authorization ? authorization : NULL;
}
