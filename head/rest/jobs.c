#include <stdlib.h>
#include <unistd.h>

#include "head/packages.h"
#include "head/rest/form.h"
#include "head/rest/rest.h"

/* The client of the version that is claimed here holds it against its own, so exactly these. */
void rest_version(void *head, struct http_req *req)
{
    struct head *h = head;

    http_reply_json(req, 200,
                    json_pack("{s:s,s:s,s:s,s:s}", "version", "4", "ray_version", h->ray_version,
                              "ray_commit", h->ray_commit, "session_name", h->session));
}

void rest_own_version(void *head, struct http_req *req)
{
    char program[4096] = "";
    ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 1);

    (void)head;
    program[n > 0 ? n : 0] = 0;
    http_reply_json(req, 200, json_pack("{s:s,s:s}", "furlong_version", FURLONG_VERSION, "program", program));
}

static void refuse(struct http_req *req, const struct fl_err *err, bool bad_type)
{
    switch (err->status) {
    case FL_EXISTS: /* 500 as from Ray's head, which hands on what its agent refused */
        http_reply_text(req, 500, "ValueError: %s", err->text);
        return;
    case FL_INVALID:
    case FL_UNSUPPORTED:
    case FL_NOT_FOUND:
        http_reply_text(req, 400, "%s: %s", bad_type ? "TypeError" : "ValueError", err->text);
        return;
    default:
        http_reply_text(req, err->status == FL_EXHAUSTED ? 507 : 503, "RuntimeError: %s",
                        err->text);
    }
}

/* ---- answers that wait for the journal ---- */

struct pending {
    struct http_req *req; /* NULL: the client left */
    struct head *head;
    json_t *answer;
};

static void on_gone(void *arg, struct http_req *req)
{
    (void)req;
    ((struct pending *)arg)->req = NULL;
}

static void answer_durable(struct after *a, enum fl_status st, const struct fl_err *err)
{
    struct pending *p = a->arg;

    p->head->requests--;
    if (p->req && st == FL_OK)
        http_reply_json(p->req, 200, json_incref(p->answer));
    else if (p->req)
        refuse(p->req, err, false);
    json_decref(p->answer);
    free(p);
    free(a);
}

static struct pending *pend(struct head *h, struct http_req *req, struct after **a)
{
    struct pending *p = must(calloc(1, sizeof(*p)));

    p->req = req;
    p->head = h;
    *a = after_new(h, answer_durable);
    (*a)->arg = p;
    return p;
}

static void pended(struct pending *p, json_t *answer)
{
    p->answer = answer;
    p->head->requests++;
    http_req_on_gone(p->req, on_gone, p);
}

/* A name is good while the package is here; a job that waits keeps it. */
static enum fl_status packages_there(struct head *h, const struct job_ask *ask, struct fl_err *err)
{
    size_t i = 0;

    if (ask->working_dir && !packages_has(h->packages, ask->working_dir))
        return fl_fail(err, FL_NOT_FOUND, "Package gcs://%s does not exist", ask->working_dir);
    while (i < ask->n_py_modules && packages_has(h->packages, ask->py_modules[i]))
        i++;
    return i == ask->n_py_modules
               ? FL_OK
               : fl_fail(err, FL_NOT_FOUND, "Package gcs://%s does not exist", ask->py_modules[i]);
}

void rest_job_submit(void *head, struct http_req *req)
{
    struct head *h = head;
    struct form *f = must(calloc(1, sizeof(*f)));
    struct after *a;
    struct fl_err err;
    json_t *o = NULL;
    char id[64];
    enum fl_status st = http_req_json(req, &o, &err);

    if (st == FL_OK)
        st = form_read(f, o, &err);
    if (st == FL_OK)
        st = packages_there(h, &f->ask, &err);
    if (st == FL_OK) {
        struct pending *p = pend(h, req, &a);

        st = job_submit(h, &f->ask, a, id, &err);
        if (st == FL_OK)
            pended(p, json_pack("{s:s,s:s}", "job_id", id, "submission_id", id));
        else
            free(p);
    }
    if (st != FL_OK)
        refuse(req, &err, f->bad_type);
    form_fini(f);
    free(f);
    json_decref(o);
}

void rest_job_stop(void *head, struct http_req *req)
{
    struct head *h = head;
    struct job *j = rest_job(h, req);
    struct after *a;
    struct fl_err err;
    bool live;

    if (!j)
        return;
    struct pending *p = pend(h, req, &a);
    if (job_stop(h, j, a, &live, &err) == FL_OK) {
        pended(p, json_pack("{s:b}", "stopped", live));
    } else {
        free(p);
        refuse(req, &err, false);
    }
}

void rest_job_delete(void *head, struct http_req *req)
{
    struct head *h = head;
    struct job *j = rest_job(h, req);
    struct after *a;
    struct fl_err err;

    if (!j)
        return;
    if (!job_over(j)) {
        http_reply_text(
            req, 500,
            "RuntimeError: Attempted to delete job '%s', but it is in a non-terminal state %s.",
            j->rec->submission_id, job_status_name(j->rec->status));
        return;
    }
    struct pending *p = pend(h, req, &a);
    if (job_ask_delete(h, j, a, &err) == FL_OK) {
        pended(p, json_pack("{s:b}", "deleted", 1));
    } else {
        free(p);
        refuse(req, &err, false);
    }
}

/* ---- looking ---- */

static json_t *parsed(const char *text)
{
    json_t *v = text ? json_loads(text, 0, NULL) : NULL;

    return v ? v : json_null();
}

static json_t *time_of(bool has, uint64_t ms)
{
    return has ? json_integer((json_int_t)ms) : json_null();
}

/* A driver that never joined is a shell line to Ray: it has no job id. */
static json_t *driver_info(const Fl__JobRec *r)
{
    char pid[16];

    if (!r->connected || !r->driver_address)
        return json_null();
    snprintf(pid, sizeof(pid), "%d", r->driver_pid);
    return json_pack("{s:o,s:s,s:s}", "id", rest_hex(&r->id), "node_ip_address", r->driver_address,
                     "pid", r->has_driver_pid ? pid : "");
}

static bool has_environment(const Fl__JobRec *r)
{
    return r->runtime_env && strcmp(r->runtime_env, "{}") != 0;
}

json_t *rest_job_message(const struct job *j)
{
    static const char *const plain[] = { NULL, "Job is currently running.",
                                         "Job was intentionally stopped.",
                                         "Job finished successfully.", "Job failed." };
    const Fl__JobRec *r = j->rec;

    if (r->message)
        return json_string(r->message);
    if (r->status != FL__JOB_STATUS__JOB_PENDING)
        return rest_text((unsigned)r->status < FL_LEN(plain) ? plain[r->status] : NULL);
    return json_sprintf(
        "Job has not started yet.%s%s",
        r->n_wants ? " It may be waiting for resources (CPUs, GPUs, memory, custom "
                     "resources) to become available."
                   : "",
        has_environment(r) ? " It may be waiting for the runtime environment to be set up." : "");
}

static json_t *python_code(const Fl__JobRec *r)
{
    return r->has_exit_signal && r->exit_signal ? json_integer(-r->exit_signal)
           : r->has_exit_code                   ? json_integer(r->exit_code)
                                                : json_null();
}

json_t *rest_job_json(const struct job *j)
{
    const Fl__JobRec *r = j->rec;
    json_t *agent = r->driver_address
                        ? json_sprintf("http://%s:%d", r->driver_address, RAY_AGENT_PORT)
                        : json_null();

    return json_pack(
        "{s:s,s:o,s:s,s:o,s:s,s:s,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o}", "type", "SUBMISSION",
        "job_id", r->connected ? rest_hex(&r->id) : json_null(), "submission_id", r->submission_id,
        "driver_info", driver_info(r), "status", job_status_name(r->status), "entrypoint",
        r->entrypoint, "message", rest_job_message(j), "error_type", rest_text(r->error_type),
        "start_time", time_of(r->has_start_ms, r->start_ms), "end_time",
        time_of(r->has_end_ms, r->end_ms), "metadata", parsed(r->metadata), "runtime_env",
        parsed(r->runtime_env), "driver_agent_http_address", agent, "driver_node_id",
        rest_text(r->driver_node), "driver_exit_code", python_code(r));
}

/* Where its command runs, and why there; null before it does. */
static json_t *driver_place(const struct job *j)
{
    const Fl__JobRec *r = j->rec;
    struct seat *s = job_driver((struct job *)(uintptr_t)j);
    struct node *n = s ? seat_node(s) : NULL;
    const char *why = job_wants_resources(j)  ? "it has what the command asked for"
                      : r->off_head           ? "any node but the head's own was asked for"
                      : n && !node_is_heads(n) ? "the head's own node takes no work now"
                                               : "the head's own node, as the command asked for no resources";

    if (!r->driver_node)
        return json_null();
    return json_pack("{s:s*,s:s*,s:s}", "node", n ? n->rec->name : r->driver_node, "address", r->driver_address, "why", why);
}

/* Ours: the same, and what Ray has no field for. */
static json_t *own_json(const struct job *j)
{
    const Fl__JobRec *r = j->rec;
    json_t *o = rest_job_json(j);
    char text[640];
    struct fl_str why = FL_STR_ON(text);

    json_object_set_new(o, "exit_code",
                        r->has_exit_code ? json_integer(r->exit_code) : json_null());
    json_object_set_new(o, "signal",
                        r->has_exit_signal && r->exit_signal ? json_integer(r->exit_signal)
                                                             : json_null());
    json_object_set_new(o, "run_dir", rest_text(r->run_dir));
    json_object_set_new(o, "driver_attempt", json_integer(r->attempt));
    json_object_set_new(o, "id", rest_hex(&r->id));
    json_object_set_new(o, "why", job_waits(j, &why) ? json_string(text) : json_null());
    json_object_set_new(o, "driver", driver_place(j));
    return o;
}

static void list(struct head *h, struct http_req *req, json_t *(*one)(const struct job *j))
{
    json_t *all = json_array();
    struct job *j, *tmp;

    HASH_ITER (hh, h->jobs, j, tmp)
        if (!j->rec->delete_asked)
            json_array_append_new(all, one(j));
    http_reply_json(req, 200, all);
}

void rest_job_list(void *head, struct http_req *req)
{
    list(head, req, rest_job_json);
}

void rest_own_job_list(void *head, struct http_req *req)
{
    list(head, req, own_json);
}

static void get(struct head *h, struct http_req *req, json_t *(*one)(const struct job *j))
{
    struct job *j = rest_job(h, req);

    if (!j)
        return;
    j->followed_ns = fl_loop_now_ns(h->loop);
    j->asked_end |= job_over(j);
    http_reply_json(req, 200, one(j));
}

void rest_job_get(void *head, struct http_req *req)
{
    get(head, req, rest_job_json);
}

void rest_own_job_get(void *head, struct http_req *req)
{
    get(head, req, own_json);
}
