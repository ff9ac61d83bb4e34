#include "worker/node/addr.h"
#include "common/base/fault.h"
#include "common/base/port.h"
#include "common/base/str.h"
#include <errno.h>
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PORT_TRIES = 20000 };

static enum fl_status resolve(const char *host, const char *port, struct sockaddr_storage *out,
                              socklen_t *len, struct fl_err *err)
{
    struct addrinfo want = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG }, *got = NULL;
    int rc = FL_FAULT("node.resolve") ? EAI_FAIL : getaddrinfo(host, port, &want, &got);

    if (rc == EAI_ADDRFAMILY || rc == EAI_NONAME) { /* loopback alone: AI_ADDRCONFIG hides it */
        want.ai_flags = 0;
        rc = getaddrinfo(host, port, &want, &got);
    }
    if (rc)
        return fl_fail(err, rc == EAI_AGAIN ? FL_UNREACHABLE : FL_INVALID, "%s: %s", host,
                       gai_strerror(rc));
    memcpy(out, got->ai_addr, got->ai_addrlen);
    *len = got->ai_addrlen;
    freeaddrinfo(got);
    return FL_OK;
}

/* "HOST:PORT", "[v6]:PORT" */
static enum fl_status split(const char *target, char host[256], char port[8], struct fl_err *err)
{
    const char *colon = strrchr(target, ':');
    int64_t n;

    if (!colon || colon == target || colon - target > 250 ||
        fl_parse_i64(colon + 1, 1, 65535, &n, NULL) != FL_OK)
        return fl_fail(err, FL_INVALID, "--address=%.100s: give HOST:PORT or [IPv6]:PORT", target);
    if (target[0] == '[' && colon[-1] == ']')
        snprintf(host, 256, "%.*s", (int)(colon - target - 2), target + 1);
    else
        snprintf(host, 256, "%.*s", (int)(colon - target), target);
    if (target[0] != '[' && strchr(host, ':'))
        return fl_fail(err, FL_INVALID, "--address=%.100s: write an IPv6 address as [%.100s]:%s",
                       target, host, colon + 1);
    snprintf(port, 8, "%d", (int)n);
    return FL_OK;
}

static bool same_address(const struct sockaddr *a, const struct sockaddr *b)
{
    if (!a || a->sa_family != b->sa_family)
        return false;
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return a->sa_family == AF_INET6 &&
           IN6_ARE_ADDR_EQUAL(&((const struct sockaddr_in6 *)a)->sin6_addr,
                              &((const struct sockaddr_in6 *)b)->sin6_addr);
}

/* Whose it is; 127/8 belongs to the loopback interface as a whole. all: what there is, for errors.
 */
static bool on_interface(const struct sockaddr *want, char iface[32], struct fl_str *all)
{
    struct ifaddrs *list, *i;
    bool found = false;

    if (getifaddrs(&list) < 0)
        return false;
    for (i = list; i && !found; i = i->ifa_next) {
        char text[NODE_ADDR_MAX];

        found = same_address(i->ifa_addr, want);
        if (found)
            (void)fl_copy(iface, 32, i->ifa_name);
        if (i->ifa_addr &&
            (i->ifa_addr->sa_family == AF_INET || i->ifa_addr->sa_family == AF_INET6) &&
            !getnameinfo(i->ifa_addr,
                         i->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in)
                                                           : sizeof(struct sockaddr_in6),
                         text, sizeof(text), NULL, 0, NI_NUMERICHOST))
            fl_str_add(all, "%s%s", all->len ? ", " : "", text);
    }
    freeifaddrs(list);
    if (!found && want->sa_family == AF_INET &&
        (ntohl(((const struct sockaddr_in *)want)->sin_addr.s_addr) >> 24) == 127) {
        (void)fl_copy(iface, 32, "lo");
        found = true;
    }
    return found;
}

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return (ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24) == 127;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static enum fl_status way_to(const char *head, struct sockaddr_storage *own, socklen_t *len,
                             struct fl_err *err)
{
    struct sockaddr_storage to;
    char host[256], port[8];
    enum fl_status st = FL_OK;
    int fd;

    FL_TRY(split(head, host, port, err));
    FL_TRY(resolve(host, port, &to, len, err));
    fd = socket(to.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    /* A datagram socket's connect sends nothing: it asks the routing table. */
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, *len) < 0 ||
        getsockname(fd, (struct sockaddr *)own, len) < 0)
        st = fl_fail_errno(err, "no way to the head at %s", head);
    if (fd >= 0)
        close(fd);
    return st;
}

enum fl_status node_addr_find(const char *asked, const char *head, struct node_addr *out,
                              struct fl_err *err)
{
    struct sockaddr_storage own;
    struct node_addr a = { 0 };
    char have[160], bare[256];
    struct fl_str all = FL_STR_ON(have);
    socklen_t len = sizeof(own);

    if (asked) {
        size_t n = strlen(asked);
        bool brackets = n > 2 && asked[0] == '[' && asked[n - 1] == ']';

        snprintf(bare, sizeof(bare), "%.*s", (int)(brackets ? n - 2 : n), asked + brackets);
        enum fl_status st = resolve(bare, NULL, &own, &len, err);

        if (st != FL_OK)
            return fl_wrap(err, FL_INVALID, "--node-ip-address");
    } else {
        FL_TRY(way_to(head, &own, &len, err));
    }
    const struct sockaddr *at = (const struct sockaddr *)&own;

    if (!on_interface(at, a.iface, &all) && asked)
        return fl_fail(err, FL_INVALID,
                       "--node-ip-address=%.60s: no interface of this host has it; it has %s",
                       asked, fl_str_text(&all));
    if (getnameinfo(at, len, a.text, sizeof(a.text), NULL, 0, NI_NUMERICHOST))
        return fl_fail(err, FL_INTERNAL, "own address cannot be written");
    a.text[strcspn(a.text, "%")] =
        0; /* the scope of a link-local address means nothing elsewhere */
    a.loopback = is_loopback(at);
    *out = a;
    return FL_OK;
}

enum fl_status node_addr_check(const char *head, struct fl_err *err)
{
    char host[256], port[8];

    return split(head, host, port, err);
}

static bool port_is_free(const char *addr, uint16_t port)
{
    struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(port) };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
    bool six = inet_pton(AF_INET6, addr, &v6.sin6_addr) == 1;
    int fd = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    bool free_now;

    if (!six) /* all addresses: rank 0 may well bind them all */
        v4.sin_addr.s_addr = INADDR_ANY;
    if (fd < 0)
        return false;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    free_now = bind(fd, six ? (struct sockaddr *)&v6 : (struct sockaddr *)&v4,
                    six ? sizeof(v6) : sizeof(v4)) == 0 &&
               listen(fd, 1) == 0;
    close(fd);
    return free_now;
}

enum fl_status node_port_free(const char *addr, uint16_t *from, uint16_t *out, struct fl_err *err)
{
    uint32_t at = *from < 1024 ? 20000 : *from;
    uint16_t first, last;

    fl_port_ephemeral(&first, &last);
    if (first <= 1024 && last == 65535) /* there is nothing outside it */
        first = last = 0;

    for (unsigned i = 0; i < PORT_TRIES && !FL_FAULT("node.port"); i++, at++) {
        if (at > 65535)
            at = 1024;
        if (at >= first && at <= last) /* an outgoing connection may take it the next moment */
            at = last < 65535 ? last + 1u : 1024;
        if (!port_is_free(addr, (uint16_t)at))
            continue;
        *out = (uint16_t)at;
        *from = at == 65535 ? 1024 : (uint16_t)(at + 1);
        return FL_OK;
    }
    return fl_fail(err, FL_EXHAUSTED,
                   "no free port on %s in %d tries from %u on; end what listens there", addr,
                   PORT_TRIES, *from);
}
