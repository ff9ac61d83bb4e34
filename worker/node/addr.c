#include "worker/node/addr.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/port.h"

enum { PORT_TRIES = 20000 };

enum fl_status node_addr_find(const char *asked, const char *head, struct fl_addr *out, struct fl_err *err)
{
    return fl_addr_find("--node-ip-address", asked, head, out, err);
}

enum fl_status node_addr_check(const char *head, struct fl_err *err)
{
    char host[256], port[8];

    return fl_addr_split("--address", head, host, port, err);
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

enum fl_status node_port_free(const char *addr, const struct port_taker *t, uint16_t *from,
                              uint16_t *out, struct fl_err *err)
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
        if (!t->take(t->arg, (uint16_t)at))
            continue;
        if (!port_is_free(addr, (uint16_t)at)) {
            t->drop(t->arg, (uint16_t)at);
            continue;
        }
        *out = (uint16_t)at;
        *from = at == 65535 ? 1024 : (uint16_t)(at + 1);
        return FL_OK;
    }
    return fl_fail(err, FL_EXHAUSTED,
                   "no free port on %s in %d tries from %u on; end what listens there", addr,
                   PORT_TRIES, *from);
}
