#include "transport/xfer/port_priv.h"
#include "common/proto/pb.h"
#include <stdlib.h>
#include <string.h>
#include "common/base/str.h"
#include "common/proto/methods.h"

static void port_serve(void *service, struct call_req *req, const struct wire_msg *m)
{
    if (req)
        xfer_port_serve(service, req, m);
}

/* clang-format off */
const struct call_method xfer_methods[XFER_N_METHODS] = {
    { FL_XFER_RECONCILE, "xfer.reconcile", port_serve, NULL, NULL },
    { FL_XFER_BEGIN,     "xfer.begin",     port_serve, NULL, NULL },
    { FL_XFER_WAIT,      "xfer.wait",      port_serve, NULL, NULL },
    { FL_XFER_VERIFY,    "xfer.verify",    port_serve, NULL, NULL },
    { FL_XFER_COMMIT,    "xfer.commit",    port_serve, NULL, NULL },
    { FL_XFER_ABORT,     "xfer.abort",     port_serve, NULL, NULL },
    { FL_XFER_RESUME,    "xfer.resume",    port_serve, NULL, NULL },
    { FL_XFER_END,       "xfer.end",       port_serve, NULL, NULL },
    { FL_XFER_WATCH,     "xfer.watch",     port_serve, NULL, NULL },
    { FL_XFER_GRANT,     "xfer.grant",     port_serve, NULL, NULL },
    { FL_XFER_KEY,       "xfer.key",       port_serve, NULL, NULL },
    { FL_XFER_CHECK,     "xfer.check",     port_serve, NULL, NULL },
    { FL_XFER_STAGE,     "xfer.stage",     port_serve, NULL, NULL },
};
/* In the order of the methods. */
static const ProtobufCMessageDescriptor *const bodies[XFER_N_METHODS] = {
    &fl__xfer_reconcile__descriptor, &fl__xfer_begin__descriptor,  &fl__xfer_wait__descriptor,
    &fl__xfer_verify__descriptor,    &fl__xfer_commit__descriptor, &fl__xfer_abort__descriptor,
    &fl__xfer_resume__descriptor,    &fl__xfer_end__descriptor,    &fl__xfer_watch__descriptor,
    &fl__xfer_grant__descriptor,     &fl__xfer_key__descriptor,    &fl__xfer_check__descriptor,
    &fl__xfer_stage__descriptor,
};
/* clang-format on */

bool xfer_method_is(uint16_t method)
{
    return method >= FL_XFER_FIRST && method <= FL_XFER_LAST;
}

enum fl_status xfer_port_create(struct fl_loop *l, const struct xfer_dialer *dialer,
                                struct xfer_port **out, struct fl_err *err)
{
    struct xfer_port *p = calloc(1, sizeof(*p));

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the weight plane's port");
    *p = (struct xfer_port){
        .loop = l, .dialer = *dialer, .links = link_table, .n_links = link_table_n
    };
    *out = p;
    return FL_OK;
}

const struct link_ops *port_other_way(const struct xfer_port *p, const struct link_place *from,
                                      const struct link_place *to)
{
    const struct link_ops *best = NULL;

    for (size_t i = 0; i < p->n_links; i++) {
        const struct link_ops *k = p->links[i];

        if ((k->caps & (LINK_PULL | LINK_ALONE)) != (LINK_PULL | LINK_ALONE) ||
            !k->reaches(from, to, NULL))
            continue;
        if (!best || k->cost_ns(from, to, 1 << 30) < best->cost_ns(from, to, 1 << 30))
            best = k;
    }
    return best;
}

void xfer_port_links(struct xfer_port *p, const struct link_ops *const *links, size_t n)
{
    p->links = links;
    p->n_links = n;
}

void xfer_port_destroy(struct xfer_port *p)
{
    free(p);
}

static struct port_set *find(const struct xfer_port *p, const char *set)
{
    for (struct port_set *s = p->sets; s; s = s->next)
        if (strcmp(s->set, set) == 0)
            return s;
    return NULL;
}

enum fl_status port_add(struct xfer_port *p, struct port_set *s, const char *set,
                        struct fl_err *err)
{
    if (find(p, set))
        return fl_fail(err, FL_EXISTS, "weights \"%s\" are offered or accepted here already", set);
    if (!FL_COPY(s->set, set))
        return fl_fail(err, FL_INVALID,
                       "the name \"%s\" of a set of weights is longer than %zu bytes", set,
                       sizeof(s->set) - 1);
    s->next = p->sets;
    p->sets = s;
    return FL_OK;
}

void port_remove(struct xfer_port *p, struct port_set *s)
{
    for (struct port_set **at = &p->sets; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            return;
        }
}

const struct link_ops *port_link(const struct xfer_port *p, const char *name)
{
    for (size_t i = 0; i < p->n_links; i++)
        if (strcmp(p->links[i]->name, name) == 0)
            return p->links[i];
    return NULL;
}

static size_t method_index(uint16_t method)
{
    size_t i = 0;

    while (i < XFER_N_METHODS && xfer_methods[i].method != method)
        i++;
    return i;
}

static const char *set_of(const ProtobufCMessage *msg)
{
    const ProtobufCFieldDescriptor *f =
        protobuf_c_message_descriptor_get_field_by_name(msg->descriptor, "set");

    return *(char *const *)(const void *)((const char *)msg + f->offset);
}

void xfer_port_serve(struct xfer_port *p, struct call_req *req, const struct wire_msg *m)
{
    size_t i = method_index(m->head.method);
    ProtobufCMessage *msg = NULL;
    struct port_set *s;
    struct fl_err err = { 0 };

    if (i < XFER_N_METHODS)
        msg = pb_unpack(bodies[i], m->body, m->head.body_bytes, NULL);
    if (!msg) {
        fl_fail(&err, i < XFER_N_METHODS ? FL_CORRUPT : FL_UNSUPPORTED,
                "method %u of the weight plane: %s", m->head.method,
                i < XFER_N_METHODS ? "the body does not decode" : "not known here");
        call_fail(req, &err);
        return;
    }
    s = find(p, set_of(msg));
    if (s) {
        s->serve(s, m->head.method, req, msg, m);
    } else {
        fl_fail(&err, FL_NOT_FOUND, "weights \"%s\" are neither offered nor accepted here",
                set_of(msg));
        call_fail(req, &err);
    }
    protobuf_c_message_free_unpacked(msg, NULL);
}
