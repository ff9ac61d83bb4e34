/* What a request line and headers are taken apart with, on any text. */
#include <stdlib.h>
#include <string.h>

#include "transport/http/server_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct http_route routes[] = {
    { "GET", "/api/jobs/{id}", NULL, 0, false },
    { "POST", "/api/jobs/{id}/stop", NULL, 0, false },
    { NULL, "/{a}/{b}/{c}/{d}/{e}", NULL, 0, false },
    { "GET", "/files/{name}/{rest*}", NULL, 0, false },
    { 0 },
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = { "gpu-a", NULL };
    char *text = malloc(size + 1), buf[32];
    struct http_answer a = { .headers = text };
    struct http_params p;
    bool known;

    memcpy(text, data, size);
    text[size] = 0;
    if (http_route_find(routes, "GET", text, &p, &known))
        for (unsigned i = 0; i < p.n; i++)
            if (strlen(p.p[i].value) > size)
                abort();
    (void)http_host_ok(text, "127.0.0.1", names);
    (void)http_origin_ok(text, "a:1");
    (void)http_bearer(text);
    (void)http_answer_header(&a, "x", buf, sizeof(buf));
    free(text);
    return 0;
}
