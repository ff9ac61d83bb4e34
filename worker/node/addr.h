/* worker/node/addr.h - the one address of this node */
#pragma once
#include "common/base/addr.h"

/* asked: --node-ip-address, or NULL; see fl_addr_find(). */
enum fl_status node_addr_find(const char *asked, const char *head, struct fl_addr *out, struct fl_err *err);
enum fl_status node_addr_check(const char *head, struct fl_err *err); /* is that HOST:PORT? no look-up */
struct port_taker {                         /* of numbers that are looked at */
    bool (*take)(void *arg, uint16_t port); /* false: not to be had, and not tried */
    void (*drop)(void *arg, uint16_t port); /* taken, and somebody listens there */
    void *arg;
};
/* A port of that address that could be taken and that nobody listens at now, from *from on; *from
 * moves behind it. Trying one binds it for a moment. FL_EXHAUSTED: none. */
enum fl_status node_port_free(const char *addr, const struct port_taker *t, uint16_t *from,
                              uint16_t *out, struct fl_err *err);
