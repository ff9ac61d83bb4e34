/* head/rest/rest.h - the HTTP face, docs/protocol.md "HTTP of the head" */
#pragma once
#include <jansson.h>

#include "head/state.h"
#include "transport/http/http.h"

enum { RAY_AGENT_PORT = 52365 }; /* named in job details; nothing of ours listens there */

void rest_version(void *head, struct http_req *req);
void rest_own_version(void *head, struct http_req *req);
void rest_job_submit(void *head, struct http_req *req);
void rest_job_list(void *head, struct http_req *req);
void rest_job_get(void *head, struct http_req *req);
void rest_job_stop(void *head, struct http_req *req);
void rest_job_delete(void *head, struct http_req *req);
void rest_job_logs(void *head, struct http_req *req);
void rest_job_tail(void *head, struct http_req *req);
void rest_own_job_list(void *head, struct http_req *req);
void rest_own_job_get(void *head, struct http_req *req);
void rest_package_get(void *head, struct http_req *req);
void rest_package_put(void *head, struct http_req *req);
void rest_follow_log(void *head, struct http_req *req);
void rest_follow_steps(void *head, struct http_req *req);
void rest_status(void *head, struct http_req *req);
void rest_nodes(void *head, struct http_req *req);
void rest_workers(void *head, struct http_req *req);
void rest_groups(void *head, struct http_req *req);
void rest_leases(void *head, struct http_req *req);
void rest_devices(void *head, struct http_req *req);
void rest_job_env(void *head, struct http_req *req);
void rest_ports(void *head, struct http_req *req);
void rest_explain(void *head, struct http_req *req);
void rest_shutdown(void *head, struct http_req *req);
void rest_metrics(void *head, struct http_req *req);
void rest_auth_mode(void *head, struct http_req *req);
void rest_authenticate(void *head, struct http_req *req);
void rest_state_list(void *head, struct http_req *req);
void rest_state_summary(void *head, struct http_req *req);
void rest_state_logs(void *head, struct http_req *req);
void rest_state_log_file(void *head, struct http_req *req);
void rest_state_log_stream(void *head, struct http_req *req);
void rest_state_timeline(void *head, struct http_req *req);
void rest_ray_nodes(void *head, struct http_req *req);
void rest_ray_node(void *head, struct http_req *req);
void rest_cluster_status(void *head, struct http_req *req);
void rest_gcs_healthz(void *head, struct http_req *req);
void rest_local_healthz(void *head, struct http_req *req);
void rest_grafana(void *head, struct http_req *req);
void rest_prometheus(void *head, struct http_req *req);
void rest_usage_stats(void *head, struct http_req *req);
void rest_timezone(void *head, struct http_req *req);
void rest_activities(void *head, struct http_req *req);

/* The job of the path, by submission id or job id; answered 404 when there is none. */
struct job *rest_job(struct head *h, struct http_req *req);
/* The job whose log the query names, and how many of its last lines (-1: all); answered when that is none. */
struct job *rest_log_job(struct head *h, struct http_req *req, int64_t *lines);
json_t *rest_text(const char *text);                /* null for NULL */
json_t *rest_hex(const ProtobufCBinaryData *bytes); /* as text */
json_t *rest_devices_of(struct head *h, const struct node *n);
json_t *rest_devices_in(struct head *h, size_t most); /* of nodes that are in; none when there are more */
json_t *rest_given_to(const struct seat *s); /* ids of devices that were promised to it */
json_t *rest_used_by(const struct seat *s);  /* and those that its processes have open */
json_t *rest_amount(int64_t e4);                    /* whole numbers as integers */
const char *rest_group_state(Fl__GroupState s);
const char *rest_seat_state(const struct seat *s);
/* {"result","msg","data"}: how Ray's dashboard wraps answers. */
void rest_ray_reply(struct http_req *req, unsigned status, const char *msg, json_t *data_take);
json_t *rest_resources(const Fl__Inventory *i, bool head_node);
json_t *rest_labels(const struct node *n);
const struct node *rest_head_node(struct head *h); /* the one on the head's own host, or NULL */
bool rest_node_alive(const struct node *n);
/* {"GPU":{"used":1.0,"total":2.0},...} of one node, or of all that are in. */
json_t *rest_usage(struct head *h, const struct node *only);
void rest_usage_lines(struct head *h, const struct node *only, const char *indent, struct fl_str *out);
json_t *rest_job_message(const struct job *j); /* its own, or what Ray says of its status */
json_t *rest_job_json(const struct job *j); /* Ray's JobDetails */
