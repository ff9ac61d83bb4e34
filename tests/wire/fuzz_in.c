/* The frame decoder, HELLO and reasons, on any bytes cut anywhere. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/wire/in.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t room[70000];

static void *on_room(void *arg, const struct wire_head *h)
{
    if (h->blob_bytes > 1 << 20 && h->id % 2 == 0)
        wire_in_stop(arg); /* or the fuzzer does nothing but ask for gigabytes */
    return h->id % 2 && h->blob_bytes <= sizeof(room) ? room : NULL;
}

static enum fl_status on_message(void *arg, const struct wire_msg *m, struct fl_err *err)
{
    struct wire_in *in = arg;
    struct wire_hello hello;
    struct fl_err said;
    volatile uint8_t sum = 0;

    for (uint32_t i = 0; i < m->head.body_bytes; i++)
        sum = (uint8_t)(sum + ((const uint8_t *)m->body)[i]);
    for (uint64_t i = 0; m->blob && i < m->head.blob_bytes; i++)
        sum = (uint8_t)(sum + ((const uint8_t *)m->blob)[i]);
    if (m->head.kind == WIRE_HELLO) {
        (void)wire_hello_read(m->body, m->head.body_bytes, &hello, NULL);
        in->in_hello = m->head.id != WIRE_STEP_IN;
    }
    if (m->head.kind == WIRE_ERROR || m->head.kind == WIRE_BYE)
        (void)wire_reason_read(m->body, m->head.body_bytes, &said, NULL);
    if (m->head.kind == WIRE_CANCEL)
        wire_in_forget(in, room);
    return m->head.kind == WIRE_CREDIT && m->head.id == 13 ? fl_fail(err, FL_STALE, "enough")
                                                           : FL_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct wire_in in = { .room = on_room, .message = on_message };
    struct fl_err err;
    size_t most = size ? 1 + data[0] % 200 : 1, at = 1;

    in.arg = &in;
    wire_in_init(&in);
    in.in_hello = size && data[0] & 0x80;
    while (at < size) {
        struct iovec iov[WIRE_IN_IOV];
        size_t n = 0;
        int parts;

        if (wire_in_iov(&in, iov, &parts, &err) != FL_OK)
            break;
        for (int i = 0; i < parts && n < most && at < size; i++) {
            size_t part = iov[i].iov_len < most - n ? iov[i].iov_len : most - n;

            part = part < size - at ? part : size - at;
            memcpy(iov[i].iov_base, data + at, part);
            n += part;
            at += part;
            if (part < iov[i].iov_len)
                break;
        }
        if (wire_in_got(&in, n, NULL, 0, &err) != FL_OK)
            break;
    }
    wire_in_fini(&in);
    return 0;
}
