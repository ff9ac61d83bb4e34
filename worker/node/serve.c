/* worker/node/serve.c - what the head asks of this node */
#include <stdio.h>
#include <stdlib.h>

#include "common/base/file.h"
#include "common/base/log.h"
#include "common/proto/methods.h"
#include "common/proto/pb.h"
#include "worker/node/node_priv.h"
#include "worker/node/package.h"
#include "worker/node/ports.h"

enum { ENV_MAX_BYTES = 2 << 20 }; /* as much as Linux lets a program have, and its arguments */

struct release { /* answered when the last of its leases is free */
    struct release *next;
    struct node *node;
    struct call_req *req;
    size_t n;
    uint64_t ids[];
};

static void refuse(struct call_req *req, const struct fl_err *err)
{
    if (req)
        call_fail(req, err);
}

static void done(struct call_req *req)
{
    if (req)
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

/* The service is the node. Before it has joined, nothing the head says counts. */
static void *decode(struct node *n, struct call_req *req, const struct wire_msg *m,
                    const ProtobufCMessageDescriptor *d)
{
    struct fl_err err;
    void *msg = NULL;

    if (!node_uplink_joined(n->up))
        fl_fail(&err, FL_STALE, "this daemon has not joined on this connection");
    else
        msg = pb_unpack(d, m->body, m->head.body_bytes, &err);
    if (!msg)
        refuse(req, &err);
    return msg;
}

static void on_prepare(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__LeasePrepare *m = decode(n, req, w, &fl__lease_prepare__descriptor);
    Fl__LeasePrepared reply = FL__LEASE_PREPARED__INIT;
    uint32_t ports[NODE_PORTS_MAX];
    struct fl_err err;

    if (!m)
        return;
    enum fl_status st = node_may_start(n)
                            ? node_ports_find(n, m, ports, &err)
                            : fl_fail(&err, FL_CANCELLED, "node %s is ending", n->name);

    if (st == FL_OK)
        st = node_leases_prepare(n->leases, m, &n->ident.highest, &n->ident.me, &err);
    if (st == FL_OK) {
        node_ports_give(n, m, ports);
        reply.ports = ports;
        reply.n_ports = m->free_ports;
        struct fl_bytes b = node_pack(&reply.base);

        if (req)
            call_reply(req, b, (struct fl_bytes){ 0 });
        free((void *)(uintptr_t)b.data);
    } else {
        node_ports_settle(n);
        refuse(req, &err);
    }
    fl__lease_prepare__free_unpacked(m, NULL);
}

static void on_commit(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__LeaseIds *m = decode(n, req, w, &fl__lease_ids__descriptor);
    struct fl_err err;

    if (!m)
        return;
    if (node_leases_commit(n->leases, m->ids, m->n_ids, &err) == FL_OK)
        done(req);
    else
        refuse(req, &err);
    fl__lease_ids__free_unpacked(m, NULL);
}

/* ---- release ---- */

static bool held(const struct node *n, const struct release *r)
{
    for (size_t i = 0; i < r->n; i++)
        if (node_leases_has(n->leases, r->ids[i]))
            return true;
    return false;
}

static void release_take(struct release *r)
{
    struct release **at = &r->node->releases;

    while (*at && *at != r)
        at = &(*at)->next;
    if (*at)
        *at = r->next;
}

static void on_unwanted(void *arg, struct call_req *req)
{
    struct release *r = arg;

    release_take(r); /* the leases go all the same */
    done(req);
    free(r);
}

void node_serve_releases(struct node *n)
{
    for (struct release *r = n->releases, *next; r; r = next) {
        next = r->next;
        if (held(n, r))
            continue;
        release_take(r);
        done(r->req);
        free(r);
    }
}

static void end_work_on(struct node *n, uint64_t lease)
{
    for (struct worker *w = n->workers, *next; w; w = next) {
        next = w->hh.next;
        for (size_t i = 0; i < w->spec->n_leases; i++)
            if (w->spec->leases[i] == lease)
                worker_stop(w, PROC_STOPPED, "its lease was released", NODE_TERM_MS);
    }
}

static void on_release(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__LeaseIds *m = decode(n, req, w, &fl__lease_ids__descriptor);
    struct release *r;
    struct fl_err err;

    if (!m)
        return;
    for (size_t i = 0; i < m->n_ids; i++) {
        node_leases_release(n->leases, m->ids[i]);
        end_work_on(n, m->ids[i]);
    }
    node_leases_sweep(n->leases);
    node_ports_settle(n);
    r = req ? calloc(1, sizeof(*r) + m->n_ids * sizeof(r->ids[0])) : NULL;
    if (r) {
        r->node = n;
        r->req = req;
        r->n = m->n_ids;
        if (m->n_ids)
            memcpy(r->ids, m->ids, m->n_ids * sizeof(r->ids[0]));
        r->next = n->releases;
        n->releases = r;
        call_on_unwanted(req, on_unwanted, r);
        node_serve_releases(n);
    } else if (req) {
        fl_fail(&err, FL_EXHAUSTED, "no memory to release leases");
        refuse(req, &err);
    }
    fl__lease_ids__free_unpacked(m, NULL);
}

void node_serve_drop(struct node *n)
{
    node_packages_drop(n->packages);
    while (n->releases) {
        struct release *r = n->releases;

        n->releases = r->next;
        done(r->req);
        free(r);
    }
}

/* ---- workers ---- */

static void on_start(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__WorkerSpec *m = decode(n, req, w, &fl__worker_spec__descriptor);
    struct fl_err err;

    if (!m)
        return;
    if (req && node_may_start(n) && !node_packages_ready(n->packages, m)) {
        node_packages_start(n->packages, req, m);
        return;
    }
    enum fl_status st = node_may_start(n)
                            ? worker_start(n, m, &err)
                            : fl_fail(&err, FL_CANCELLED, "node %s is ending", n->name);

    if (st == FL_OK)
        done(req);
    else
        refuse(req, &err);
    if (st != FL_OK)
        fl_warn("worker not started role=%s rank=%u why=\"%s\"", m->role, m->rank, err.text);
    explicit_bzero(m->key.data, m->key.len);
    fl__worker_spec__free_unpacked(m, NULL);
}

static bool seat_of(const Fl__SeatRef *r, struct fl_seat_ref *out)
{
    *out = (struct fl_seat_ref){ .attempt = r->attempt };
    if (r->worker.len != sizeof(out->id))
        return false;
    memcpy(&out->id, r->worker.data, sizeof(out->id));
    return true;
}

static void on_stop(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__WorkerStop *m = decode(n, req, w, &fl__worker_stop__descriptor);
    struct fl_seat_ref who;
    struct fl_err err;
    char id[FL_SHORT];

    if (!m)
        return;
    struct worker *k = seat_of(m->who, &who) ? worker_find(n, &who) : NULL;

    if (k) { /* ended already: its end is on the way */
        worker_stop(k, m->cause <= PROC_KEEPER_LOST ? (enum proc_cause)m->cause : PROC_STOPPED,
                    m->text,
                    m->has_term_ms         ? m->term_ms
                    : k->spec->has_term_ms ? k->spec->term_ms
                                           : NODE_TERM_MS);
        done(req);
    } else {
        fl_fail(&err, FL_NOT_FOUND, "worker %s attempt %u does not run on node %s",
                fl_short(id, &who.id), who.attempt, n->name);
        refuse(req, &err);
    }
    fl__worker_stop__free_unpacked(m, NULL);
}

static void on_deliver(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__Deliver *m = decode(n, req, w, &fl__deliver__descriptor);
    struct fl_seat_ref who;
    struct fl_err err;

    if (!m)
        return;
    struct worker *k = seat_of(m->to, &who) ? worker_find(n, &who) : NULL;
    enum fl_status st = k && m->method <= UINT16_MAX
                            ? node_line_event(k, (uint16_t)m->method,
                                              (struct fl_bytes){ m->body.data, m->body.len }, &err)
                            : fl_fail(&err, FL_NOT_FOUND, "no such worker here");

    if (st != FL_OK)
        fl_debug("event not delivered method=%u why=\"%s\"", m->method,
                 err.text); /* it asks when it is back */
    if (st == FL_OK)
        done(req);
    else
        refuse(req, &err);
    fl__deliver__free_unpacked(m, NULL);
}

/* From the kernel: what it was started with, whatever it has made of it since. */
static enum fl_status read_env(const struct worker *w, Fl__WorkerEnv *out, char **held, struct fl_err *err)
{
    char path[64], *end;
    size_t len, n = 0;

    snprintf(path, sizeof(path), "/proc/%d/environ", w->pid);
    FL_TRY(fl_file_read(path, ENV_MAX_BYTES, held, &len, err));
    for (char *p = *held; p < *held + len; p += strlen(p) + 1)
        n++;
    Fl__EnvVar *all = calloc(n + 1, sizeof(*all));

    out->env = calloc(n + 1, sizeof(*out->env));
    if (!all || !out->env) {
        free(all);
        return fl_fail(err, FL_EXHAUSTED, "no memory for the environment of %s", w->name);
    }
    out->env[0] = all; /* freed by its first */
    for (char *p = *held; p < *held + len; p = end + 1) {
        char *eq = strchr(p, '=');

        end = p + strlen(p);
        if (!eq)
            continue;
        *eq = 0;
        all[out->n_env] = (Fl__EnvVar)FL__ENV_VAR__INIT;
        all[out->n_env].name = p;
        all[out->n_env].value = eq + 1;
        out->env[out->n_env] = &all[out->n_env];
        out->n_env++;
    }
    return FL_OK;
}

static void on_worker_env(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__WorkerEnvAsk *m = decode(n, req, w, &fl__worker_env_ask__descriptor);
    Fl__WorkerEnv reply = FL__WORKER_ENV__INIT;
    struct fl_seat_ref who;
    struct fl_err err;
    char *held = NULL;

    if (!m)
        return;
    struct worker *k = seat_of(m->who, &who) ? worker_find(n, &who) : NULL;
    enum fl_status st = k && k->pid && !k->gone ? read_env(k, &reply, &held, &err)
                                                : fl_fail(&err, FL_NOT_FOUND, "it does not run on node %s", n->name);

    if (st == FL_OK && req) {
        struct fl_bytes b = node_pack(&reply.base);

        call_reply(req, b, (struct fl_bytes){ 0 });
        free((void *)(uintptr_t)b.data);
    } else {
        refuse(req, &err);
    }
    if (reply.env)
        free(reply.env[0]);
    free(reply.env);
    free(held);
    fl__worker_env_ask__free_unpacked(m, NULL);
}

static void on_shutdown(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__Shutdown *m = decode(n, req, w, &fl__shutdown__descriptor);

    if (!m)
        return;
    done(req);
    node_stop(n, m->why && *m->why ? m->why : "the head ends the cluster",
              m->has_term_ms ? m->term_ms : NODE_TERM_MS);
    fl__shutdown__free_unpacked(m, NULL);
}

static void on_fenced(void *service, struct call_req *req, const struct wire_msg *w)
{
    struct node *n = service;
    Fl__Shutdown *m = decode(n, req, w, &fl__shutdown__descriptor);

    if (!m)
        return;
    done(req);
    node_uplink_fenced(n->up, m->why && *m->why ? m->why : "the head gave this node up");
    fl__shutdown__free_unpacked(m, NULL);
}

const struct call_method node_serve_methods[] = {
    { FL_LEASE_PREPARE, "lease_prepare", on_prepare, NULL, NULL },
    { FL_LEASE_COMMIT, "lease_commit", on_commit, NULL, NULL },
    { FL_LEASE_RELEASE, "lease_release", on_release, NULL, NULL },
    { FL_WORKER_START, "worker_start", on_start, NULL, NULL },
    { FL_WORKER_STOP, "worker_stop", on_stop, NULL, NULL },
    { FL_DELIVER, "deliver", on_deliver, NULL, NULL },
    { FL_NODE_SHUTDOWN, "node_shutdown", on_shutdown, NULL, NULL },
    { FL_WORKER_ENV, "worker_env", on_worker_env, NULL, NULL },
    { FL_NODE_FENCED, "node_fenced", on_fenced, NULL, NULL },
};
const size_t node_serve_n_methods = FL_LEN(node_serve_methods);
