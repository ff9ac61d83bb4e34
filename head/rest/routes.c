#include "common/base/id.h"
#include "head/packages.h"
#include "head/rest/rest.h"
#include "head/web/web.h"

/* clang-format off */
static const struct http_route routes[] = {
    { "GET",    "/",                              web_root, .open = true },
    { "GET",    "/api/version",                   rest_version },
    { "POST",   "/api/jobs/",                     rest_job_submit },
    { "GET",    "/api/jobs/",                     rest_job_list },
    { "GET",    "/api/jobs/{id}",                 rest_job_get },
    { "DELETE", "/api/jobs/{id}",                 rest_job_delete },
    { "POST",   "/api/jobs/{id}/stop",            rest_job_stop },
    { "GET",    "/api/jobs/{id}/logs",            rest_job_logs },
    { "GET",    "/api/jobs/{id}/logs/tail",       rest_job_tail },
    { "GET",    "/api/packages/{protocol}/{name}", rest_package_get },
    { "PUT",    "/api/packages/{protocol}/{name}", rest_package_put, .body_max_bytes = PACKAGE_MAX_BYTES },
    { "GET",    "/api/v0/logs",                   rest_state_logs },
    { "GET",    "/api/v0/logs/file",              rest_state_log_file },
    { "GET",    "/api/v0/logs/stream",            rest_state_log_stream },
    { "GET",    "/api/v0/tasks/timeline",         rest_state_timeline },
    { "GET",    "/api/v0/{kind}",                 rest_state_list },
    { "GET",    "/api/v0/{kind}/summarize",       rest_state_summary },
    { "GET",    "/nodes",                         rest_ray_nodes },
    { "GET",    "/nodes/{id}",                    rest_ray_node },
    { "GET",    "/api/cluster_status",            rest_cluster_status },
    { "GET",    "/api/gcs_healthz",               rest_gcs_healthz },
    { "GET",    "/api/local_raylet_healthz",      rest_local_healthz },
    { "GET",    "/api/grafana_health",            rest_grafana },
    { "GET",    "/api/prometheus_health",         rest_prometheus },
    { "GET",    "/usage_stats_enabled",           rest_usage_stats },
    { "GET",    "/timezone",                      rest_timezone },
    { "GET",    "/api/component_activities",      rest_activities },
    { "GET",    "/api/authentication_mode",       rest_auth_mode },
    { "POST",   "/api/authenticate",              rest_authenticate },
    { "GET",    "/api/furlong/version",           rest_own_version },
    { "GET",    "/api/furlong/jobs/",             rest_own_job_list },
    { "GET",    "/api/furlong/jobs/{id}",         rest_own_job_get },
    { "GET",    "/api/furlong/jobs/{id}/env",     rest_job_env },
    { "GET",    "/api/furlong/jobs/{id}/log",     rest_follow_log },
    { "GET",    "/api/furlong/jobs/{id}/steps",   rest_follow_steps },
    { "GET",    "/api/furlong/status",            rest_status },
    { "GET",    "/api/furlong/nodes",             rest_nodes },
    { "GET",    "/api/furlong/workers",           rest_workers },
    { "GET",    "/api/furlong/groups",            rest_groups },
    { "GET",    "/api/furlong/leases",            rest_leases },
    { "GET",    "/api/furlong/devices",           rest_devices },
    { "GET",    "/api/furlong/ports",             rest_ports },
    { "GET",    "/api/furlong/explain/{id}",      rest_explain },
    { "GET",    "/api/furlong/browse/jobs",       web_browse_jobs },
    { "GET",    "/api/furlong/browse/jobs/{id}",  web_browse_job },
    { "GET",    "/api/furlong/browse/nodes",      web_browse_nodes },
    { "POST",   "/api/furlong/shutdown",          rest_shutdown },
    { "GET",    "/metrics",                       rest_metrics },
    { 0 },
};
/* clang-format on */

const struct http_route *head_routes(void)
{
    return routes;
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

/* By the driver's job id first, as Ray looks; a job whose driver never joined has none to be found
 * by. */
struct job *rest_job(struct head *h, struct http_req *req)
{
    const char *id = http_req_param(req, "id");
    struct fl_job_id number;
    struct job *j = NULL;

    if (fl_hex_parse(id, &number, sizeof(number)))
        j = job_of(h, &BYTES_OF(number));
    if (!j || !j->rec->connected)
        j = job_named(h, id);
    if (j && j->rec->delete_asked)
        j = NULL;
    if (!j && strncmp(http_req_path(req), "/api/furlong/", 13) == 0)
        http_reply_error(req, 404, "Job %.300s does not exist", id);
    else if (!j)
        http_reply_text(req, 404, "Job %.1000s does not exist", id);
    return j;
}
