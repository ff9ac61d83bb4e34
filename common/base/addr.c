#include "common/base/addr.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/str.h"

#define FORMS "give HOST:PORT, [IPv6]:PORT, or HOST and --port"

/* ==== HOST:PORT ==================================================================================== */
enum fl_status fl_addr_split(const char *flag, const char *target, char host[256], char port[8], struct fl_err *err)
{
    const char *colon = strrchr(target, ':');
    int64_t n;

    if (!colon || colon == target || colon - target > 250 || fl_parse_i64(colon + 1, 1, 65535, &n, NULL) != FL_OK)
        return fl_fail(err, FL_INVALID, "%s=%.100s: " FORMS, flag, target);
    if (target[0] == '[' && colon[-1] == ']')
        snprintf(host, 256, "%.*s", (int)(colon - target - 2), target + 1);
    else
        snprintf(host, 256, "%.*s", (int)(colon - target), target);
    if (target[0] != '[' && strchr(host, ':'))
        return fl_fail(err, FL_INVALID, "%s=%.100s: write an IPv6 address as [%.100s]:%s", flag, target, host, colon + 1);
    snprintf(port, 8, "%d", (int)n);
    return FL_OK;
}

enum fl_status fl_addr_with_port(const char *flag, const char *target, int port, char *out, size_t cap, struct fl_err *err)
{
    struct in6_addr v6;
    size_t len = strlen(target);
    const char *colon = strchr(target, ':');
    int n;

    if (inet_pton(AF_INET6, target, &v6) == 1)
        n = snprintf(out, cap, "[%s]:%d", target, port);
    else if (len > 2 && target[0] == '[' && target[len - 1] == ']')
        n = snprintf(out, cap, "%s:%d", target, port);
    else if (!colon && len && target[strspn(target, "0123456789")])
        n = snprintf(out, cap, "%s:%d", target, port);
    else if (colon && colon != target)
        n = snprintf(out, cap, "%s", target);
    else
        return fl_fail(err, FL_INVALID, "%s=%.100s: " FORMS, flag, target);
    return n > 0 && (size_t)n < cap ? FL_OK : fl_fail(err, FL_INVALID, "%s=%.100s...: too long", flag, target);
}

/* ==== addresses of this host ======================================================================= */
static enum fl_status resolve(const char *host, const char *port, struct sockaddr_storage *out, socklen_t *len,
                              struct fl_err *err)
{
    struct addrinfo want = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG }, *got = NULL;
    int rc = FL_FAULT("node.resolve") ? EAI_FAIL : getaddrinfo(host, port, &want, &got);

    if (rc == EAI_ADDRFAMILY || rc == EAI_NONAME) { /* loopback alone: AI_ADDRCONFIG hides it */
        want.ai_flags = 0;
        rc = getaddrinfo(host, port, &want, &got);
    }
    if (rc)
        return fl_fail(err, rc == EAI_AGAIN ? FL_UNREACHABLE : FL_INVALID, "%s: %s", host, gai_strerror(rc));
    memcpy(out, got->ai_addr, got->ai_addrlen);
    *len = got->ai_addrlen;
    freeaddrinfo(got);
    return FL_OK;
}

static const void *bits_of(const struct sockaddr *a, size_t *n)
{
    *n = a->sa_family == AF_INET ? 4 : 16;
    return a->sa_family == AF_INET ? (const void *)&((const struct sockaddr_in *)a)->sin_addr
                                   : (const void *)&((const struct sockaddr_in6 *)a)->sin6_addr;
}

static bool is_ip(const struct sockaddr *a)
{
    return a && (a->sa_family == AF_INET || a->sa_family == AF_INET6);
}

static socklen_t size_of(const struct sockaddr *a)
{
    return a->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

bool fl_sockaddr_is_loopback(const struct sockaddr *a)
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)a;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)a;

    if (!a)
        return false;
    if (a->sa_family == AF_INET)
        return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    return a->sa_family == AF_INET6 &&
           (IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) ||
            (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr) && v6->sin6_addr.s6_addr[12] == 127));
}

static bool is_link_local(const struct sockaddr *a)
{
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

struct subnet { /* or one address: all of its bits */
    unsigned char bits[16];
    size_t n; /* bytes of an address of its family */
    unsigned len;
};

static bool inside(const struct sockaddr *a, const struct subnet *s)
{
    size_t n;
    const unsigned char *b = bits_of(a, &n);

    if (n != s->n || memcmp(b, s->bits, s->len / 8) != 0)
        return false;
    return s->len % 8 == 0 || !((b[s->len / 8] ^ s->bits[s->len / 8]) >> (8 - s->len % 8));
}

static bool read_subnet(const char *text, struct subnet *out)
{
    const char *slash = strchr(text, '/');
    char net[64];
    int64_t len;

    if (!slash || slash - text >= (int)sizeof(net))
        return false;
    snprintf(net, sizeof(net), "%.*s", (int)(slash - text), text);
    out->n = inet_pton(AF_INET, net, out->bits) == 1 ? 4 : inet_pton(AF_INET6, net, out->bits) == 1 ? 16 : 0;
    if (!out->n || fl_parse_i64(slash + 1, 0, (int64_t)out->n * 8, &len, NULL) != FL_OK)
        return false;
    out->len = (unsigned)len;
    return true;
}

static void add_text(struct fl_str *all, const struct ifaddrs *i)
{
    char text[FL_ADDR_MAX];

    if (!getnameinfo(i->ifa_addr, size_of(i->ifa_addr), text, sizeof(text), NULL, 0, NI_NUMERICHOST))
        fl_str_add(all, "%s%s (%s)", all->len ? ", " : "", text, i->ifa_name);
}

/* The first address in net, or of the interface named so; near, where it fits as well, comes first: it is the way to
 * the head. What others reach goes before what they do not. all: what there is, for errors. */
static bool look_for(const struct subnet *net, const char *iface, const struct sockaddr *near, struct sockaddr_storage *own,
                     char name[32], struct fl_str *all)
{
    struct ifaddrs *list, *i, *best = NULL;
    struct subnet same = { .n = 0 };

    if (getifaddrs(&list) < 0)
        return false;
    if (near) {
        const void *b = bits_of(near, &same.n);

        memcpy(same.bits, b, same.n);
        same.len = (unsigned)same.n * 8;
    }
    for (i = list; i; i = i->ifa_next) {
        if (!is_ip(i->ifa_addr))
            continue;
        add_text(all, i);
        if (net ? !inside(i->ifa_addr, net) : strcmp(i->ifa_name, iface) != 0)
            continue;
        bool as_near = near && inside(i->ifa_addr, &same), family = near && near->sa_family == i->ifa_addr->sa_family;

        if (!best || as_near || (family && near->sa_family != best->ifa_addr->sa_family) ||
            (is_link_local(best->ifa_addr) && !is_link_local(i->ifa_addr)) ||
            (fl_sockaddr_is_loopback(best->ifa_addr) && !fl_sockaddr_is_loopback(i->ifa_addr)))
            best = i;
        if (as_near)
            break;
    }
    if (best) {
        memcpy(own, best->ifa_addr, size_of(best->ifa_addr));
        (void)fl_copy(name, 32, best->ifa_name);
    }
    freeifaddrs(list);
    return best != NULL;
}

/* Whose it is; 127/8 belongs to the loopback interface as a whole. */
static bool on_interface(const struct sockaddr *want, char iface[32], struct fl_str *all)
{
    struct subnet one = { .n = 0 };
    struct sockaddr_storage own;
    const void *b = bits_of(want, &one.n);

    memcpy(one.bits, b, one.n);
    one.len = (unsigned)one.n * 8;
    if (look_for(&one, NULL, NULL, &own, iface, all))
        return true;
    if (want->sa_family != AF_INET || !fl_sockaddr_is_loopback(want))
        return false;
    (void)fl_copy(iface, 32, "lo");
    return true;
}

/* A datagram socket's connect sends nothing: it asks the routing table. */
static enum fl_status way_to(const char *toward, struct sockaddr_storage *own, struct sockaddr_storage *to, struct fl_err *err)
{
    char host[256], port[8];
    enum fl_status st = FL_OK;
    socklen_t len;
    int fd;

    FL_TRY(fl_addr_split("--address", toward, host, port, err));
    FL_TRY(resolve(host, port, to, &len, err));
    fd = socket(to->ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)to, len) < 0 || getsockname(fd, (struct sockaddr *)own, &len) < 0)
        st = fl_fail_errno(err, "no way to the head at %s", toward);
    if (fd >= 0)
        close(fd);
    return st;
}

bool fl_addr_is_any(const char *asked)
{
    return strcmp(asked, "0.0.0.0") == 0 || strcmp(asked, "::") == 0 || strcmp(asked, "[::]") == 0;
}

bool fl_addr_is_loopback(const char *address)
{
    const char *colon = strchr(address, ':'), *bracket = *address == '[' ? strchr(address, ']') : NULL;
    bool port = colon && !strchr(colon + 1, ':'); /* more of them are of IPv6 */
    const char *from = address + (bracket != NULL), *end = bracket ? bracket : port ? colon : address + strlen(address);
    struct in_addr v4;
    struct in6_addr v6;
    char host[INET6_ADDRSTRLEN];

    if (end - from >= (ptrdiff_t)sizeof(host))
        return false;
    snprintf(host, sizeof(host), "%.*s", (int)(end - from), from);
    return strcmp(host, "localhost") == 0 ||
           (inet_pton(AF_INET, host, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127) ||
           (inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6));
}

static enum fl_status finish(const struct sockaddr *at, struct fl_addr *a, struct fl_err *err)
{
    if (getnameinfo(at, size_of(at), a->text, sizeof(a->text), NULL, 0, NI_NUMERICHOST))
        return fl_fail(err, FL_INTERNAL, "own address cannot be written");
    a->text[strcspn(a->text, "%")] = 0; /* the scope of a link-local address means nothing elsewhere */
    a->loopback = fl_sockaddr_is_loopback(at);
    return FL_OK;
}

/* No head to look towards: the way out, by an address that documents alone use; else an interface's, loopback where
 * there is no other. */
static enum fl_status to_outside(struct fl_addr *a, struct fl_err *err)
{
    static const struct subnet all4 = { .n = 4 };
    struct sockaddr_storage own, to;
    char have[160];
    struct fl_str all = FL_STR_ON(have);

    if (way_to("192.0.2.1:9", &own, &to, NULL) == FL_OK) {
        (void)FL_COPY(a->why, "the source of the way out");
        (void)on_interface((struct sockaddr *)&own, a->iface, &all);
        return finish((struct sockaddr *)&own, a, err);
    }
    struct sockaddr_in none = { .sin_family = AF_INET };

    (void)FL_COPY(a->why, "there is no way out");
    if (!look_for(&all4, NULL, (struct sockaddr *)&none, &own, a->iface, &all))
        return fl_fail(err, FL_INVALID, "no interface of this host has an address");
    return finish((struct sockaddr *)&own, a, err);
}

static enum fl_status as_asked(const char *flag, const char *asked, const struct sockaddr *near, struct sockaddr_storage *own,
                               struct fl_addr *a, struct fl_err *err)
{
    size_t n = strlen(asked);
    bool brackets = n > 2 && asked[0] == '[' && asked[n - 1] == ']';
    char have[160], bare[256];
    struct fl_str all = FL_STR_ON(have);
    struct subnet net;
    socklen_t len;

    if (read_subnet(asked, &net)) {
        snprintf(a->why, sizeof(a->why), "in %s=%.60s", flag, asked);
        return look_for(&net, NULL, near, own, a->iface, &all)
                   ? FL_OK
                   : fl_fail(err, FL_INVALID, "%s=%.60s: no address of this host is in it; it has %s", flag, asked, fl_str_text(&all));
    }
    if (if_nametoindex(asked)) {
        snprintf(a->why, sizeof(a->why), "of %s=%.60s", flag, asked);
        return look_for(NULL, asked, near, own, a->iface, &all)
                   ? FL_OK
                   : fl_fail(err, FL_INVALID, "%s=%.60s: that interface has no address", flag, asked);
    }
    (void)FL_COPY(a->why, "as asked");
    snprintf(bare, sizeof(bare), "%.*s", (int)(brackets ? n - 2 : n), asked + brackets);
    if (resolve(bare, NULL, own, &len, err) != FL_OK)
        return fl_wrap(err, FL_INVALID, "%s", flag);
    return on_interface((struct sockaddr *)own, a->iface, &all)
               ? FL_OK
               : fl_fail(err, FL_INVALID, "%s=%.60s: no interface of this host has it; it has %s", flag, asked, fl_str_text(&all));
}

enum fl_status fl_addr_find(const char *flag, const char *asked, const char *toward, struct fl_addr *out, struct fl_err *err)
{
    struct sockaddr_storage own = { 0 }, to = { 0 }, source = { 0 };
    struct fl_addr a = { .any = asked && fl_addr_is_any(asked) };
    char have[160];
    struct fl_str all = FL_STR_ON(have);
    bool look = !asked || a.any;

    if (look && !toward) {
        FL_TRY(to_outside(&a, err));
        *out = a;
        return FL_OK;
    }
    enum fl_status st = toward ? way_to(toward, &source, &to, look ? err : NULL) : FL_NOT_FOUND;

    if (look) {
        FL_TRY(st);
        own = source;
        (void)on_interface((struct sockaddr *)&own, a.iface, &all);
        (void)FL_COPY(a.why, "the source of the way to the head");
    } else {
        FL_TRY(as_asked(flag, asked, st == FL_OK ? (struct sockaddr *)&source : NULL, &own, &a, err));
    }
    FL_TRY(finish((struct sockaddr *)&own, &a, err));
    if (a.loopback && st == FL_OK && !fl_sockaddr_is_loopback((struct sockaddr *)&to))
        return fl_fail(err, FL_INVALID,
                       "%s=%.60s is loopback, which no other node reaches, and the head is at %s: leave it out, or name another address or a subnet",
                       flag, asked ? asked : a.text, toward);
    *out = a;
    return FL_OK;
}
