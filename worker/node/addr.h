/* worker/node/addr.h - the one address of this node */
#pragma once
#include "common/base/addr.h"

/* asked: --node-ip-address, or NULL; see fl_addr_find(). */
enum fl_status node_addr_find(const char *asked, const char *head, struct fl_addr *out, struct fl_err *err);
enum fl_status node_addr_check(const char *head, struct fl_err *err); /* is that HOST:PORT? no look-up */
/* A port of that address that nobody listens at now, from *from on; *from moves behind it. It is
 * not held. FL_EXHAUSTED: none. */
enum fl_status node_port_free(const char *addr, uint16_t *from, uint16_t *out, struct fl_err *err);
