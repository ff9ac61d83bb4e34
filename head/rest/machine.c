/* What processes were given on their nodes: their environment, asked of the daemons, and their ports. */
#include <stdlib.h>
#include <unistd.h>

#include "common/base/str.h"
#include "common/proto/methods.h"
#include "common/proto/pb.h"
#include "head/rest/rest.h"

enum { ENV_ASK_MS = 5000 };

/* ==== GET /api/furlong/jobs/ID/env ================================================================= */
struct env_ask { /* answered when the last daemon has, or was late */
    struct http_req *req; /* NULL: the client left */
    struct head *head;
    json_t *workers;
    unsigned waits;
};

static void on_gone(void *arg, struct http_req *req)
{
    (void)req;
    ((struct env_ask *)arg)->req = NULL;
}

static void one_less(struct env_ask *a)
{
    if (--a->waits)
        return;
    a->head->requests--;
    if (a->req)
        http_reply_json(a->req, 200, json_pack("{s:O}", "workers", a->workers));
    json_decref(a->workers);
    free(a);
}

static json_t *env_json(const Fl__WorkerEnv *m)
{
    json_t *o = json_object();

    for (size_t i = 0; i < m->n_env; i++) {
        const char *name = m->env[i]->name, *value = m->env[i]->value;
        bool hidden = fl_name_is_secret(name) || strcmp(name, "RAY_JOB_CONFIG_JSON_ENV_VAR") == 0; /* repeats all of env_vars */
        json_t *v = json_string(hidden ? "***" : value);

        json_object_set_new(o, name, v ? v : json_string("(no UTF-8)"));
    }
    return o;
}

static void on_env(struct send *s, enum fl_status st, const struct wire_msg *reply, const struct fl_err *err)
{
    struct env_ask *a = s->arg;
    json_t *w = json_array_get(a->workers, s->n);
    Fl__WorkerEnv *m = st == FL_OK ? pb_unpack(&fl__worker_env__descriptor, reply->body, reply->head.body_bytes, NULL) : NULL;

    if (m)
        json_object_set_new(w, "env", env_json(m));
    else
        json_object_set_new(w, "why", rest_text(st == FL_OK ? "its daemon answered what is no environment" : err->text));
    free_msg(m);
    one_less(a);
}

static void ask_one(struct env_ask *a, struct seat *seat)
{
    Fl__WorkerEnvAsk m = FL__WORKER_ENV_ASK__INIT;
    struct node *n = seat_node(seat);
    struct send t = { .done = on_env, .arg = a, .n = json_array_size(a->workers) };
    struct fl_err err;

    json_array_append_new(a->workers, json_pack("{s:s,s:i,s:i,s:s*,s:s}", "role", seat->rec->role, "rank", (int)seat->rec->rank,
                                                "attempt", (int)seat->rec->who->attempt, "node", n ? n->rec->name : NULL,
                                                "state", rest_seat_state(seat)));
    m.who = seat->rec->who;
    if (n && node_send(n, FL_WORKER_ENV, &m, ENV_ASK_MS, &t, &err) == FL_OK)
        a->waits++;
    else
        json_object_set_new(json_array_get(a->workers, t.n), "why", rest_text(n ? err.text : "it has no node now"));
}

void rest_job_env(void *head, struct http_req *req)
{
    struct head *h = head;
    struct job *j = rest_job(h, req);
    struct env_ask *a;
    struct seat *s, *tmp;

    if (!j)
        return;
    a = must(calloc(1, sizeof(*a)));
    *a = (struct env_ask){ .req = req, .head = h, .workers = json_array(), .waits = 1 };
    h->requests++;
    http_req_on_gone(req, on_gone, a);
    HASH_ITER (hh, h->seats, s, tmp)
        if (s->job == j && s->rec->state == FL__SEAT_STATE__SEAT_LIVE && s->started)
            ask_one(a, s);
    one_less(a);
}

/* ==== GET /api/furlong/ports ======================================================================= */
static void add_port(json_t *list, const char *node, unsigned port, const char *name, const char *job, const char *role,
                     int rank, int pid)
{
    json_array_append_new(list, json_pack("{s:s,s:i,s:s,s:s*,s:s,s:o,s:o}", "node", node, "port", (int)port, "name", name, "job",
                                          job, "role", role, "rank", rank < 0 ? json_null() : json_integer(rank), "pid",
                                          pid > 0 ? json_integer(pid) : json_null()));
}

static unsigned port_of(const char *at) /* "[::1]:80", "http://a:80" */
{
    const char *colon = strrchr(at, ':');

    return colon ? (unsigned)strtoul(colon + 1, NULL, 10) : 0;
}

static void add_seat(json_t *list, const struct seat *s)
{
    const struct node *n = seat_node(s);
    const char *node = n ? n->rec->name : "";

    for (size_t i = 0; i < s->n_ports; i++)
        add_port(list, node, s->ports[i].number, s->ports[i].name, s->job->rec->submission_id, s->rec->role, (int)s->rec->rank,
                 s->pid);
    if (s->tcp)
        add_port(list, node, port_of(s->tcp), "calls", s->job->rec->submission_id, s->rec->role, (int)s->rec->rank, s->pid);
}

static void add_group(json_t *list, const struct group *g)
{
    const Fl__Layout *y = g->rec->layout;

    if (!y || g->rec->state != FL__GROUP_STATE__GROUP_PLACED)
        return;
    for (size_t i = 0; i < y->n_ranks; i++) {
        const Fl__LayoutRank *r = y->ranks[i];

        if (i == 0 && y->master_port) /* rank 0 of the first role is where trainers meet */
            add_port(list, r->node, y->master_port, "trainers' meeting", g->job->rec->submission_id, r->role, (int)r->rank, 0);
        if (r->has_base_port)
            add_port(list, r->node, r->base_port, "engine's own", g->job->rec->submission_id, r->role, (int)r->rank, 0);
    }
}

void rest_ports(void *head, struct http_req *req)
{
    struct head *h = head;
    const struct node *own = rest_head_node(h);
    const char *here = own ? own->rec->name : h->node_ip;
    json_t *list = json_array();
    struct group *g, *gtmp;
    struct seat *s, *stmp;

    add_port(list, here, port_of(h->rpc), "worker daemons", NULL, "head", -1, getpid());
    add_port(list, here, port_of(h->http), "commands and browsers", NULL, "head", -1, getpid());
    HASH_ITER (hh, h->seats, s, stmp)
        if (s->rec->state == FL__SEAT_STATE__SEAT_LIVE)
            add_seat(list, s);
    HASH_ITER (hh, h->groups, g, gtmp)
        add_group(list, g);
    http_reply_json(req, 200, list);
}
