#include <math.h>
#include <stdlib.h>

#include "head/rest/rest.h"

enum { LOGS_MAX = 16 << 20, ENTRYPOINT_MAX = 64 << 10, WANTS_MAX = 64, ENV_MAX = 1024 };

void rest_version(void *head, struct http_req *req)
{
    struct head *h = head;
    char session[64], id[FL_SHORT];

    snprintf(session, sizeof(session), "session_%s_%llu", fl_short(id, h->term.cluster),
             (unsigned long long)h->term.head);
    http_reply_json(req, 200,
                    json_pack("{s:s,s:s,s:s,s:s,s:s}", "version", "4", "ray_version", "2.60.0",
                              "ray_commit", "{{RAY_COMMIT_SHA}}", "session_name", session,
                              "furlong_version", FURLONG_VERSION));
}

/* ---- submitting: everything is looked at before anything is done ---- */

struct form { /* a body that was understood */
    struct job_ask ask;
    Fl__Amount amounts[WANTS_MAX], *amount_list[WANTS_MAX];
    Fl__EnvVar *env, **env_list;
    char *runtime_env, *metadata;
};

static enum fl_status text_of(const json_t *v, const char *name, const char **out,
                              struct fl_err *err)
{
    if (!v || json_is_null(v))
        return FL_OK;
    if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v))
        return fl_fail(err, FL_INVALID, "%s must be a string", name);
    *out = json_string_value(v);
    return FL_OK;
}

static enum fl_status want(struct form *f, const char *name, const char *field, const json_t *v,
                           bool bytes, struct fl_err *err)
{
    double n = json_number_value(v);

    if (!v || json_is_null(v))
        return FL_OK;
    if (!json_is_number(v) || n < 0 || n > 1e15 || (bytes && floor(n) != n))
        return fl_fail(err, FL_INVALID, "%s must be a number from 0 on%s", field,
                       bytes ? ", whole bytes" : "");
    if (n == 0)
        return FL_OK;
    if (f->ask.n_wants == WANTS_MAX)
        return fl_fail(err, FL_INVALID, "entrypoint_resources names more than %d resources",
                       WANTS_MAX);
    Fl__Amount *a = &f->amounts[f->ask.n_wants];
    *a = (Fl__Amount)FL__AMOUNT__INIT;
    a->name = (char *)(uintptr_t)name;
    a->e4 = (int64_t)llround(n * PLACEMENT_ONE);
    f->amount_list[f->ask.n_wants++] = a;
    return FL_OK;
}

static enum fl_status wants(struct form *f, const json_t *o, struct fl_err *err)
{
    const json_t *more = json_object_get(o, "entrypoint_resources");
    const char *name;
    json_t *v;

    FL_TRY(want(f, "CPU", "entrypoint_num_cpus", json_object_get(o, "entrypoint_num_cpus"), false,
                err));
    FL_TRY(want(f, "GPU", "entrypoint_num_gpus", json_object_get(o, "entrypoint_num_gpus"), false,
                err));
    FL_TRY(
        want(f, "memory", "entrypoint_memory", json_object_get(o, "entrypoint_memory"), true, err));
    if (more && !json_is_null(more) && !json_is_object(more))
        return fl_fail(err, FL_INVALID, "entrypoint_resources must be an object of numbers");
    json_object_foreach ((json_t *)(uintptr_t)more, name, v)
        FL_TRY(want(f, name, name, v, false, err));
    f->ask.wants = (const Fl__Amount *const *)f->amount_list;
    return FL_OK;
}

static enum fl_status env_vars(struct form *f, const json_t *vars, struct fl_err *err)
{
    const char *name;
    json_t *v;

    if (!vars || json_is_null(vars))
        return FL_OK;
    if (!json_is_object(vars) || json_object_size(vars) > ENV_MAX)
        return fl_fail(err, FL_INVALID,
                       "runtime_env.env_vars must be an object of at most %d strings", ENV_MAX);
    f->env = must(calloc(json_object_size(vars) + 1, sizeof(*f->env)));
    f->env_list = must(calloc(json_object_size(vars) + 1, sizeof(*f->env_list)));
    json_object_foreach ((json_t *)(uintptr_t)vars, name, v) {
        const char *value = NULL;

        FL_TRY(text_of(v, name, &value, err));
        if (!value || !name[0] || strchr(name, '='))
            return fl_fail(err, FL_INVALID,
                           "runtime_env.env_vars: %.60s must be a name with a string", name);
        Fl__EnvVar *e = &f->env[f->ask.n_env];
        *e = (Fl__EnvVar)FL__ENV_VAR__INIT;
        e->name = (char *)(uintptr_t)name;
        e->value = (char *)(uintptr_t)value;
        f->env_list[f->ask.n_env++] = e;
    }
    f->ask.env = (const Fl__EnvVar *const *)f->env_list;
    return FL_OK;
}

static enum fl_status runtime_env(struct form *f, const json_t *r, struct fl_err *err)
{
    const char *name, *dir = NULL;
    json_t *v;

    if (!r || json_is_null(r))
        return FL_OK;
    if (!json_is_object(r))
        return fl_fail(err, FL_INVALID, "runtime_env must be a dict");
    json_object_foreach ((json_t *)(uintptr_t)r, name, v)
        if (strcmp(name, "env_vars") != 0 && strcmp(name, "working_dir") != 0)
            return fl_fail(err, FL_UNSUPPORTED,
                           "runtime_env: %.60s is not supported; env_vars and "
                           "working_dir are",
                           name);
    FL_TRY(env_vars(f, json_object_get(r, "env_vars"), err));
    FL_TRY(text_of(json_object_get(r, "working_dir"), "runtime_env.working_dir", &dir, err));
    if (dir && dir[0] != '/')
        return fl_fail(err, FL_INVALID,
                       "runtime_env.working_dir %.120s must be an absolute path on the "
                       "driver's node",
                       dir);
    f->ask.cwd = dir;
    f->runtime_env = json_dumps(r, JSON_COMPACT);
    f->ask.runtime_env = f->runtime_env;
    return FL_OK;
}

static enum fl_status furlong_part(struct form *f, const json_t *o, struct fl_err *err)
{
    const json_t *n = json_object_get(o, "driver_restarts");
    const char *name;
    json_t *v;

    if (!o || json_is_null(o))
        return FL_OK;
    if (!json_is_object(o))
        return fl_fail(err, FL_INVALID, "furlong must be an object");
    json_object_foreach ((json_t *)(uintptr_t)o, name, v)
        if (strcmp(name, "driver_restarts") != 0 && strcmp(name, "run_dir") != 0 &&
            strcmp(name, "cwd") != 0)
            return fl_fail(err, FL_INVALID, "furlong: unknown member %.60s", name);
    if (n && (!json_is_integer(n) || json_integer_value(n) < 0 || json_integer_value(n) > 1000))
        return fl_fail(err, FL_INVALID, "furlong.driver_restarts must be a number from 0 to 1000");
    f->ask.driver_restarts = (uint32_t)json_integer_value(n);
    FL_TRY(text_of(json_object_get(o, "run_dir"), "furlong.run_dir", &f->ask.run_dir, err));
    return text_of(json_object_get(o, "cwd"), "furlong.cwd", &f->ask.cwd, err);
}

static enum fl_status metadata(struct form *f, const json_t *m, struct fl_err *err)
{
    const char *name;
    json_t *v;

    if (!m || json_is_null(m))
        return FL_OK;
    if (!json_is_object(m))
        return fl_fail(err, FL_INVALID, "metadata must be a dict");
    json_object_foreach ((json_t *)(uintptr_t)m, name, v)
        if (!json_is_string(v))
            return fl_fail(err, FL_INVALID, "metadata values must be strings, and %.60s is none",
                           name);
    f->metadata = json_dumps(m, JSON_COMPACT);
    f->ask.metadata = f->metadata;
    return FL_OK;
}

static enum fl_status read_form(struct form *f, const json_t *o, struct fl_err *err)
{
    static const char *const known[] = { "entrypoint",
                                         "submission_id",
                                         "job_id",
                                         "metadata",
                                         "runtime_env",
                                         "entrypoint_num_cpus",
                                         "entrypoint_num_gpus",
                                         "entrypoint_memory",
                                         "entrypoint_resources",
                                         "furlong" };
    const char *name;
    json_t *v;

    json_object_foreach ((json_t *)(uintptr_t)o, name, v) {
        bool found = json_is_null(v); /* clients send what is not given as null */

        for (size_t i = 0; i < FL_LEN(known); i++)
            found |= strcmp(name, known[i]) == 0;
        if (!found)
            return fl_fail(err, FL_INVALID, "__init__() got an unexpected keyword argument '%.60s'",
                           name);
    }
    FL_TRY(text_of(json_object_get(o, "entrypoint"), "entrypoint", &f->ask.entrypoint, err));
    if (!f->ask.entrypoint || !f->ask.entrypoint[0])
        return fl_fail(err, FL_INVALID, "entrypoint is missing: the command line that is to run");
    if (strlen(f->ask.entrypoint) > ENTRYPOINT_MAX)
        return fl_fail(err, FL_INVALID, "entrypoint has %zu bytes, at most %d are taken",
                       strlen(f->ask.entrypoint), ENTRYPOINT_MAX);
    FL_TRY(text_of(json_object_get(o, "job_id"), "job_id", &f->ask.submission_id, err));
    FL_TRY(
        text_of(json_object_get(o, "submission_id"), "submission_id", &f->ask.submission_id, err));
    FL_TRY(metadata(f, json_object_get(o, "metadata"), err));
    FL_TRY(runtime_env(f, json_object_get(o, "runtime_env"), err));
    FL_TRY(wants(f, o, err));
    return furlong_part(f, json_object_get(o, "furlong"), err);
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
        http_reply_fail(p->req, err);
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

void rest_job_submit(void *head, struct http_req *req)
{
    struct head *h = head;
    struct form f = { 0 };
    struct after *a;
    struct fl_err err;
    json_t *o = NULL;
    char id[64];

    if (http_req_json(req, &o, &err) != FL_OK || read_form(&f, o, &err) != FL_OK) {
        http_reply_error(req, 400, "%s", err.text);
    } else {
        struct pending *p = pend(h, req, &a);

        if (job_submit(h, &f.ask, a, id, &err) == FL_OK) {
            pended(p, json_pack("{s:s,s:s}", "job_id", id, "submission_id", id));
        } else {
            free(p);
            http_reply_error(req,
                             err.status == FL_INVALID || err.status == FL_EXISTS ? 400
                             : err.status == FL_EXHAUSTED                        ? 507
                                                                                 : 503,
                             "%s", err.text);
        }
    }
    free(f.env);
    free(f.env_list);
    free(f.runtime_env);
    free(f.metadata);
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
        http_reply_fail(req, &err);
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

static json_t *driver_info(const Fl__JobRec *r)
{
    char pid[16];

    if (!r->driver_address)
        return json_null();
    snprintf(pid, sizeof(pid), "%d", r->driver_pid);
    return json_pack("{s:o,s:s,s:s}", "id", rest_hex(&r->id), "node_ip_address", r->driver_address,
                     "pid", r->has_driver_pid ? pid : "");
}

static json_t *job_json(const struct job *j)
{
    const Fl__JobRec *r = j->rec;
    json_t *code = r->has_exit_code ? json_integer(r->exit_code) : json_null();

    return json_pack(
        "{s:s,s:o,s:s,s:o,s:s,s:s,s:o,s:o,s:o,s:o,s:o,s:o,s:n,s:o,s:O,s:o,s:o,s:i}", "type",
        "SUBMISSION", "job_id", rest_hex(&r->id), "submission_id", r->submission_id, "driver_info",
        driver_info(r), "status", job_status_name(r->status), "entrypoint", r->entrypoint,
        "message", rest_text(r->message ? r->message : "Job has not started yet."), "error_type",
        rest_text(r->error_type), "start_time", time_of(r->has_start_ms, r->start_ms), "end_time",
        time_of(r->has_end_ms, r->end_ms), "metadata", parsed(r->metadata), "runtime_env",
        parsed(r->runtime_env), "driver_agent_http_address", "driver_node_id",
        rest_text(r->driver_node), "driver_exit_code", code, "exit_code", code, "run_dir",
        rest_text(r->run_dir), "driver_attempt", (int)r->attempt);
}

void rest_job_list(void *head, struct http_req *req)
{
    struct head *h = head;
    json_t *list = json_array();
    struct job *j, *tmp;

    HASH_ITER (hh, h->jobs, j, tmp)
        json_array_append_new(list, job_json(j));
    http_reply_json(req, 200, list);
}

void rest_job_get(void *head, struct http_req *req)
{
    struct job *j = rest_job(head, req);

    if (!j)
        return;
    j->followed_ns = fl_loop_now_ns(j->head->loop);
    j->asked_end |= job_over(j);
    http_reply_json(req, 200, job_json(j));
}

void rest_job_logs(void *head, struct http_req *req)
{
    struct job *j = rest_job(head, req);
    struct fl_err err;
    char *text = NULL;
    size_t len = 0;

    if (!j)
        return;
    uint64_t end = joblog_end(j), from = end > LOGS_MAX ? end - LOGS_MAX : 0;
    if (joblog_read(j, &from, LOGS_MAX, &text, &len, &err) != FL_OK) {
        http_reply_fail(req, &err);
        return;
    }
    json_t *logs = json_stringn(text, len);
    if (!logs) { /* not UTF-8: what is not goes as '?' */
        for (size_t i = 0; i < len; i++)
            text[i] = (unsigned char)text[i] < 0x80 ? text[i] : '?';
        logs = json_stringn(text, len);
    }
    free(text);
    http_reply_json(req, 200, json_pack("{s:o}", "logs", logs));
}
