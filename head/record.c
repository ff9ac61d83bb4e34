#include <stdlib.h>

#include "common/base/log.h"
#include "head/state.h"

void *must(void *p)
{
    if (p)
        return p;
    fl_error("no memory left; what was promised is in the journal and a restart reads it");
    abort();
}

struct fl_bytes pack_msg(const void *msg, struct fl_str *into)
{
    const ProtobufCMessage *m = msg;
    size_t len = protobuf_c_message_get_packed_size(m);

    if (len + 1 > into->cap) {
        free(into->heap ? into->data : NULL);
        *into = (struct fl_str){ must(malloc(len + 1)), 0, len + 1, len, true, false };
    }
    into->len = protobuf_c_message_pack(m, (uint8_t *)into->data);
    return (struct fl_bytes){ into->data, into->len };
}

void *copy_msg(const void *msg)
{
    const ProtobufCMessage *m = msg;
    struct fl_str buf = FL_STR_HEAP(SIZE_MAX - 1);
    struct fl_bytes b = pack_msg(m, &buf);
    void *copy = must(protobuf_c_message_unpack(m->descriptor, NULL, b.len, b.data));

    fl_str_fini(&buf);
    return copy;
}

void free_msg(void *msg)
{
    if (msg)
        protobuf_c_message_free_unpacked(msg, NULL);
}

static void after_durable(struct journal_op *op, enum fl_status st, const struct fl_err *err)
{
    struct after *a = container_of(op, struct after, op);

    a->then(a, st, err);
}

struct after *after_new(struct head *h,
                        void (*then)(struct after *a, enum fl_status st, const struct fl_err *err))
{
    struct after *a = must(calloc(1, sizeof(*a)));

    a->op.durable = after_durable;
    a->head = h;
    a->then = then;
    return a;
}

enum fl_status head_record(struct head *h, enum rec_kind kind, const void *msg, struct after *a,
                           struct fl_err *err)
{
    char small[2048];
    struct fl_str buf = FL_STR_ON(small);
    struct fl_bytes body = pack_msg(msg, &buf);
    enum fl_status st = journal_append(h->journal, kind, body, a ? &a->op : NULL, err);

    fl_str_fini(&buf);
    if (st != FL_OK)
        free(a);
    else
        head_kick(h); /* something may follow from it */
    return st;
}

void head_after(struct after *a)
{
    struct fl_err err;
    enum fl_status st = journal_fence(a->head->journal, &a->op, &err);

    if (st != FL_OK)
        a->then(a, st, &err);
}
