/* Any bytes as WebSocket frames of a client. */
#include <errno.h>
#include <string.h>

#include "transport/http/server_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct pipe {
    const uint8_t *data;
    size_t left;
};

static ssize_t on_recv(void *arg, void *buf, size_t len)
{
    struct pipe *p = arg;
    size_t n = len < p->left ? len : p->left;

    if (!n) {
        errno = EAGAIN;
        return -1;
    }
    memcpy(buf, p->data, n);
    p->data += n;
    p->left -= n;
    return (ssize_t)n;
}

static ssize_t on_send(void *arg, const void *data, size_t len)
{
    (void)arg, (void)data;
    return (ssize_t)len;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct pipe p = { data, size };
    struct http_ws_io io = { on_recv, on_send, &p };
    bool closed;

    (void)http_ws_feed(&io, &closed);
    return 0;
}
