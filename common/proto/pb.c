#include "common/proto/pb.h"

#include <stdlib.h>

#include "common/base/fault.h"

struct budget {
    size_t left;
    bool over;
};

static void *take(void *arg, size_t n)
{
    struct budget *b = arg;

    if (n > b->left || FL_FAULT("proto.unpack")) {
        b->over = true;
        return NULL;
    }
    b->left -= n;
    return malloc(n);
}

static void give(void *arg, void *p)
{
    (void)arg;
    free(p);
}

static bool enums_ok(const ProtobufCMessage *m, const char **field);

/* One value of a field: an enum's number, or a message to look into. */
static bool value_ok(const ProtobufCFieldDescriptor *f, const void *at, const char **field)
{
    bool ok = true;

    if (f->type == PROTOBUF_C_TYPE_ENUM)
        ok = protobuf_c_enum_descriptor_get_value(f->descriptor, *(const int *)at) != NULL;
    else if (f->type == PROTOBUF_C_TYPE_MESSAGE && *(ProtobufCMessage *const *)at)
        return enums_ok(*(ProtobufCMessage *const *)at, field);
    if (!ok)
        *field = f->name;
    return ok;
}

/* Messages of ours hold no messages of their own kind: the depth is the schema's. */
static bool enums_ok(const ProtobufCMessage *m, const char **field)
{
    const char *base = (const char *)m;

    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        const void *at = base + f->offset;

        if (f->type != PROTOBUF_C_TYPE_ENUM && f->type != PROTOBUF_C_TYPE_MESSAGE)
            continue;
        if (f->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t n = *(const size_t *)(const void *)(base + f->quantifier_offset);
            size_t size = f->type == PROTOBUF_C_TYPE_ENUM ? sizeof(int) : sizeof(void *);

            for (size_t k = 0; k < n; k++)
                if (!value_ok(f, *(const char *const *)at + k * size, field))
                    return false;
            continue;
        }
        if (f->type == PROTOBUF_C_TYPE_ENUM && f->label == PROTOBUF_C_LABEL_OPTIONAL &&
            !*(const protobuf_c_boolean *)(const void *)(base + f->quantifier_offset))
            continue;
        if (!value_ok(f, at, field))
            return false;
    }
    return true;
}

void *pb_unpack_within(const ProtobufCMessageDescriptor *d, const void *data, size_t len,
                       size_t max_bytes, struct fl_err *err)
{
    struct budget b = { .left = max_bytes };
    ProtobufCAllocator alloc = { take, give, &b };
    const char *field = NULL;
    ProtobufCMessage *m = protobuf_c_message_unpack(d, &alloc, len, data);

    if (!m && b.over) {
        fl_fail(err, FL_EXHAUSTED, "a %s of %zu bytes unpacks to more than %zu", d->short_name, len,
                max_bytes);
    } else if (!m) {
        fl_fail(err, FL_CORRUPT, "a %s of %zu bytes cannot be decoded", d->short_name, len);
    } else if (!enums_ok(m, &field)) {
        protobuf_c_message_free_unpacked(m, NULL);
        m = NULL;
        fl_fail(err, FL_CORRUPT, "a %s whose %s has a value that this release does not know",
                d->short_name, field);
    }
    return m;
}

void *pb_unpack(const ProtobufCMessageDescriptor *d, const void *data, size_t len,
                struct fl_err *err)
{
    size_t max = len < PB_MEMORY_MAX / PB_GROWTH ? len * PB_GROWTH + PB_SLACK : PB_MEMORY_MAX;

    return pb_unpack_within(d, data, len, max, err);
}
