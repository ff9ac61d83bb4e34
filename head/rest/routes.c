#include "common/base/id.h"
#include "head/rest/rest.h"
#include "head/web/web.h"

/* clang-format off */
static const struct http_route routes[] = {
    { "GET",  "/",                              web_root, .open = true },
    { "GET",  "/api/version",                   rest_version, .open = true },
    { "POST", "/api/jobs/",                     rest_job_submit },
    { "GET",  "/api/jobs/",                     rest_job_list },
    { "GET",  "/api/jobs/{id}",                 rest_job_get },
    { "POST", "/api/jobs/{id}/stop",            rest_job_stop },
    { "GET",  "/api/jobs/{id}/logs",            rest_job_logs },
    { "GET",  "/api/furlong/jobs/{id}/log",     rest_follow_log },
    { "GET",  "/api/furlong/jobs/{id}/steps",   rest_follow_steps },
    { "GET",  "/api/furlong/status",            rest_status },
    { "GET",  "/api/furlong/nodes",             rest_nodes },
    { "GET",  "/api/furlong/workers",           rest_workers },
    { "GET",  "/api/furlong/groups",            rest_groups },
    { "GET",  "/api/furlong/leases",            rest_leases },
    { "GET",  "/api/furlong/explain/{id}",      rest_explain },
    { "GET",  "/api/furlong/browse/jobs",       web_browse_jobs },
    { "GET",  "/api/furlong/browse/jobs/{id}",  web_browse_job },
    { "GET",  "/api/furlong/browse/nodes",      web_browse_nodes },
    { "POST", "/api/furlong/shutdown",          rest_shutdown },
    { "GET",  "/metrics",                       rest_metrics },
    { 0 },
};
/* clang-format on */

const struct http_route *head_routes(void)
{
    return routes;
}

/* From this host: whoever can open a loopback socket here. From elsewhere: the cluster's token. */
bool head_allows(void *head, struct http_req *req, const char *bearer, bool from_loopback)
{
    struct head *h = head;
    size_t len = strlen(h->token);

    (void)req;
    if (from_loopback)
        return true;
    return len && bearer && strlen(bearer) == len && fl_equal_ct(bearer, h->token, len);
}

enum fl_status head_key_of(void *head, const struct wire_hello *claims, struct fl_bytes *key,
                           struct fl_err *err)
{
    struct head *h = head;

    (void)err;
    (void)claims;
    *key = (struct fl_bytes){ h->token, strlen(h->token) };
    return FL_OK;
}

json_t *rest_text(const char *text)
{
    return text ? json_string(text) : json_null();
}

json_t *rest_hex(const ProtobufCBinaryData *bytes)
{
    char text[2 * 32 + 1];

    if (bytes->len > 32)
        return json_null();
    fl_hex(text, bytes->data, bytes->len);
    return json_string(text);
}

json_t *rest_amount(int64_t e4)
{
    return e4 % PLACEMENT_ONE ? json_real((double)e4 / PLACEMENT_ONE)
                              : json_integer(e4 / PLACEMENT_ONE);
}

struct job *rest_job(struct head *h, struct http_req *req)
{
    const char *id = http_req_param(req, "id");
    struct job *j = job_named(h, id);
    struct fl_job_id number;

    if (!j && fl_hex_parse(id, &number, sizeof(number)))
        j = job_of(h, &BYTES_OF(number));
    if (!j)
        http_reply_error(req, 404, "Job %.80s does not exist", id);
    return j;
}
