/* head/rest/rest.h - the HTTP face, docs/protocol.md "HTTP of the head" */
#pragma once
#include <jansson.h>

#include "head/state.h"
#include "transport/http/http.h"

void rest_version(void *head, struct http_req *req);
void rest_job_submit(void *head, struct http_req *req);
void rest_job_list(void *head, struct http_req *req);
void rest_job_get(void *head, struct http_req *req);
void rest_job_stop(void *head, struct http_req *req);
void rest_job_logs(void *head, struct http_req *req);
void rest_follow_log(void *head, struct http_req *req);
void rest_follow_steps(void *head, struct http_req *req);
void rest_status(void *head, struct http_req *req);
void rest_nodes(void *head, struct http_req *req);
void rest_workers(void *head, struct http_req *req);
void rest_groups(void *head, struct http_req *req);
void rest_leases(void *head, struct http_req *req);
void rest_explain(void *head, struct http_req *req);
void rest_shutdown(void *head, struct http_req *req);
void rest_metrics(void *head, struct http_req *req);

/* The job of the path, by submission id or job id; answered 404 when there is none. */
struct job *rest_job(struct head *h, struct http_req *req);
json_t *rest_text(const char *text);                /* null for NULL */
json_t *rest_hex(const ProtobufCBinaryData *bytes); /* as text */
json_t *rest_amount(int64_t e4);                    /* whole numbers as integers */
const char *rest_group_state(Fl__GroupState s);
const char *rest_seat_state(const struct seat *s);
