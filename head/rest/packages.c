/* /api/packages/{protocol}/{name}: asking for a package, which also keeps it, and putting one */
#include "head/packages.h"

#include <stdlib.h>

#include "head/rest/rest.h"

struct upload {
    struct package_put put;
    struct head *head;
    struct http_req *req; /* NULL: the client left; what it sent is kept all the same */
};

/* The name when the address is one of ours; answered otherwise. */
static const char *asked(struct http_req *req)
{
    const char *protocol = http_req_param(req, "protocol"), *name = http_req_param(req, "name");
    struct fl_err err;

    if (strcmp(protocol, "gcs") != 0)
        http_reply_text(req, 500,
                        "ValueError: Protocol %.40s is not supported: packages lie under gcs",
                        protocol);
    else if (package_name_check(name, &err) != FL_OK)
        http_reply_text(req, 500, "ValueError: %s", err.text);
    else
        return name;
    return NULL;
}

void rest_package_get(void *head, struct http_req *req)
{
    struct head *h = head;
    const char *name = asked(req);

    if (!name)
        return;
    if (packages_has(h->packages, name))
        http_reply_bytes(req, 200, NULL, (struct fl_bytes){ 0 });
    else
        http_reply_text(req, 404, "Package gcs://%s does not exist", name);
}

static void on_gone(void *arg, struct http_req *req)
{
    (void)req;
    ((struct upload *)arg)->req = NULL;
}

static void on_put(struct package_put *put, enum fl_status st, const struct fl_err *err)
{
    struct upload *u = container_of(put, struct upload, put);

    if (put->of)
        u->head->requests--;
    if (u->req && st == FL_OK)
        http_reply_bytes(u->req, 200, NULL, (struct fl_bytes){ 0 });
    else if (u->req)
        http_reply_text(u->req, 500, "RuntimeError: %s", err->text);
    free(u);
}

void rest_package_put(void *head, struct http_req *req)
{
    struct head *h = head;
    const char *name = asked(req);
    struct upload *u;
    struct fl_err err;

    if (!name)
        return;
    u = must(calloc(1, sizeof(*u)));
    u->head = h;
    u->req = req;
    u->put.done = on_put;
    (void)FL_COPY(u->put.name, name);
    u->put.data = http_req_take_body(req, &u->put.len);
    if (packages_put(h->packages, &u->put, &err) != FL_OK) {
        free(u);
        http_reply_text(req, 507, "RuntimeError: %s", err.text);
        return;
    }
    h->requests++;
    http_req_on_gone(req, on_gone, u);
}
