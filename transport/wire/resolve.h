/* transport/wire/resolve.h - addresses, and names on the pool; private to wire */
#pragma once
#include <netinet/in.h>
#include <sys/un.h>

#include "transport/wire/carrier.h"

enum { WIRE_ADDRS = 8 };
union wire_sockaddr {
    struct sockaddr sa;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un un;
    struct sockaddr_storage any;
};
struct wire_addr {
    union wire_sockaddr u;
    socklen_t len;
};
struct wire_addrs {
    unsigned n;
    struct wire_addr a[WIRE_ADDRS];
};
enum fl_status wire_addr_unix(const char *path, struct wire_addrs *out, struct fl_err *err);
bool wire_addr_parse(const char *host, uint16_t port, struct wire_addrs *out); /* no name */
void wire_addr_text(const union wire_sockaddr *sa, char *out, size_t cap);     /* as a target */

struct wire_resolve; /* one name being looked up */
enum fl_status wire_resolve(struct fl_loop *l, const char *host, uint16_t port,
                            void (*done)(void *arg, enum fl_status st, const struct wire_addrs *addrs,
                                         const struct fl_err *why),
                            void *arg, struct wire_resolve **out, struct fl_err *err);
void wire_resolve_forget(struct wire_resolve *r); /* done does not run; NULL is fine */
