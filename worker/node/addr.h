/* worker/node/addr.h - the one address of this node */
#pragma once
#include "common/base/base.h"

enum { NODE_ADDR_MAX = 64 };
struct node_addr {
    char text[NODE_ADDR_MAX]; /* a literal, without brackets */
    char iface[32];           /* the interface that has it; "" when none is known */
    bool loopback;
};
/* asked: --node-ip-address, a literal or a name; FL_INVALID when no interface has it. NULL: the
 * source address of the way to head ("HOST:PORT"), which is what that host would answer to: neither
 * the host's name nor the first interface is asked. Names are looked up: this blocks. */
enum fl_status node_addr_find(const char *asked, const char *head, struct node_addr *out,
                              struct fl_err *err);
enum fl_status node_addr_check(const char *head, struct fl_err *err); /* is that HOST:PORT? no look-up */
/* A port of that address that nobody listens at now, from *from on; *from moves behind it. It is
 * not held. FL_EXHAUSTED: none. */
enum fl_status node_port_free(const char *addr, uint16_t *from, uint16_t *out, struct fl_err *err);
