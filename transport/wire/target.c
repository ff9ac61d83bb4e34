#include <arpa/inet.h>
#include <string.h>

#include "common/base/str.h"
#include "transport/wire/carrier.h"

enum fl_status wire_target_split(const char *target, char host[WIRE_HOST_MAX], uint16_t *port,
                                 struct fl_err *err)
{
    bool v6 = target[0] == '[';
    const char *from = v6 ? target + 1 : target;
    const char *end = v6 ? strchr(from, ']') : strrchr(from, ':');
    const char *colon = end && v6 ? end + 1 : end;
    int64_t n;

    if (!end || *colon != ':' || end == from || (size_t)(end - from) >= WIRE_HOST_MAX ||
        (!v6 && memchr(from, ':', (size_t)(end - from))))
        return fl_fail(err, FL_INVALID,
                       "\"%s\" is no HOST:PORT ([ADDRESS]:PORT for IPv6) and no unix:PATH", target);
    if (fl_parse_i64(colon + 1, 0, UINT16_MAX, &n, err) != FL_OK)
        return fl_wrap(err, FL_INVALID, "port of \"%s\"", target);
    memcpy(host, from, (size_t)(end - from));
    host[end - from] = 0;
    *port = (uint16_t)n;
    return FL_OK;
}

bool wire_host_is_loopback(const char *host)
{
    struct in_addr v4;
    struct in6_addr v6;

    if (strcmp(host, "localhost") == 0)
        return true;
    if (inet_pton(AF_INET, host, &v4) == 1)
        return ntohl(v4.s_addr) >> 24 == 127;
    return inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

enum fl_status wire_port_check(const char *host, bool has_key, struct fl_err *err)
{
    if (has_key || wire_host_is_loopback(host))
        return FL_OK;
    return fl_fail(err, FL_DENIED, "listening at %s, beyond loopback, needs a key: give a token",
                   host);
}
