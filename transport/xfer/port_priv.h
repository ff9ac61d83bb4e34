/* transport/xfer/port_priv.h - sets of this process, and the way to peers */
#pragma once
#include "transport/xfer/msg.h"

enum { XFER_LANE = 0x78666572, XFER_KEYS_KEPT = 16 }; /* lane: the plane's own, "xfer" */
/* Between devices an update is shorter than the wakes of its messages: whoever takes part stays
 * awake for as long as a gigabyte takes. */
enum { XFER_AWAKE_NS = 1500000 };
static inline void port_awake(struct fl_loop *l, const struct link_place *p)
{
    if (p->gpu_uuid[0])
        fl_loop_awake(l, XFER_AWAKE_NS);
}

struct port_set { /* embed it in what serves one set */
    struct port_set *next;
    char set[64];
    /* msg is decoded and freed by the caller; req is answered now or later, once */
    void (*serve)(struct port_set *s, uint16_t method, struct call_req *req,
                  const ProtobufCMessage *msg, const struct wire_msg *m);
};
struct xfer_port {
    struct fl_loop *loop;
    struct xfer_dialer dialer;
    struct port_set *sets;
    const struct link_ops *const *links;
    size_t n_links;
    /* links, by their place above, over which a giver could not show its memory: said once */
    uint32_t not_shown;
};
enum fl_status port_add(struct xfer_port *p, struct port_set *s, const char *set,
                        struct fl_err *err);
void port_remove(struct xfer_port *p, struct port_set *s);
const struct link_ops *port_link(const struct xfer_port *p, const char *name);
/* The cheapest link over which `to` pulls from `from` by itself, whoever else is dead; NULL:
 * none. */
const struct link_ops *port_other_way(const struct xfer_port *p, const struct link_place *from,
                                      const struct link_place *to);
