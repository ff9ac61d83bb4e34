#include "worker/client/client.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "transport/xfer/port.h"
#include "worker.pb-c.h"
#include "worker/client/sync.h"
#include "worker/client/weights.h"

enum { METHOD_NAME_MAX = 128 };
#define KV (FURLONG_TAG_KV | FURLONG_TAG_GRAPH)
#define TRAINING (FURLONG_TAG_OPTIMIZER | FURLONG_TAG_DEFAULT)

/* clang-format off */
static const struct reserved { /* docs/roles.md */
    const char *method;
    enum furlong_what what;
    uint32_t tags;
} reserved[] = {
    { "pause",           FURLONG_PAUSE,   0                   },
    { "resume",          FURLONG_RESUME,  0                   },
    { "offload",         FURLONG_OFFLOAD, TRAINING            },
    { "onload",          FURLONG_ONLOAD,  TRAINING            },
    { "offload_kv",      FURLONG_OFFLOAD, KV                  },
    { "onload_kv",       FURLONG_ONLOAD,  KV                  },
    { "offload_weights", FURLONG_OFFLOAD, FURLONG_TAG_WEIGHTS },
    { "onload_weights",  FURLONG_ONLOAD,  FURLONG_TAG_WEIGHTS },
    { "squeeze",         FURLONG_SQUEEZE, 0                   },
    { "stop",            FURLONG_STOP,    0                   },
};
static const char *const names[] = { /* of events that no method made */
    [FURLONG_CALL] = "",         [FURLONG_PAUSE] = "pause",     [FURLONG_COMMIT] = "accept",
    [FURLONG_RESUME] = "resume", [FURLONG_OFFLOAD] = "offload", [FURLONG_ONLOAD] = "onload",
    [FURLONG_SQUEEZE] = "squeeze", [FURLONG_STOP] = "stop",
};
/* clang-format on */

static void call_free(struct furlong_call *c)
{
    if (c->ask)
        fl__ask__free_unpacked(c->ask, NULL);
    client_blob_free(c->blob);
    client_blob_free(c->copied);
    free(c->body);
    free(c);
}

static void call_gone(void *arg, struct call_req *req)
{
    struct furlong_call *c = arg;

    (void)req;
    atomic_store(&c->unwanted, true);
}

struct furlong_call *client_call_new(struct furlong *f, enum furlong_what what,
                                     struct call_req *req)
{
    struct furlong_call *c = FL_FAULT("client.call") ? NULL : calloc(1, sizeof(*c));

    if (!c)
        return NULL;
    c->f = f;
    c->req = req;
    c->ev = (struct furlong_event){ .what = what,
                                    .method = names[what],
                                    .from = f->seat.shown.node,
                                    .version = FURLONG_NO_VERSION,
                                    .call = c };
    c->due_ns = req ? call_req_due_ns(req) : 0;
    return c;
}

enum fl_status client_call_put(struct furlong_call *c, struct fl_err *err)
{
    enum fl_status st;

    if (c->req) /* before others can answer and free it */
        call_on_unwanted(c->req, call_gone, c);
    st = inbox_put(&c->f->inbox, c, err);
    if (st == FL_OK)
        return FL_OK;
    if (c->req)
        call_on_unwanted(c->req, NULL, NULL);
    call_free(c);
    return st;
}

/* ---- in ------------------------------------------------------------------------------------- */
static const struct reserved *reserved_find(const char *method)
{
    for (size_t i = 0; i < FL_LEN(reserved); i++)
        if (strcmp(reserved[i].method, method) == 0)
            return &reserved[i];
    return NULL;
}

static enum fl_status word_of(const struct furlong_event *ev, uint64_t *out, struct fl_err *err)
{
    const uint8_t *b = ev->body;

    if (ev->body_bytes != sizeof(*out))
        return fl_fail(err, FL_INVALID, "%s: a body of %zu bytes, wants a uint64 of 8", ev->method,
                       ev->body_bytes);
    *out = 0;
    for (unsigned i = 0; i < 8; i++)
        *out |= (uint64_t)b[i] << (8 * i);
    return FL_OK;
}

/* The driver's pause and the plane's overlap: steps may run again when both have ended. */
static bool resume_is_early(struct furlong *f, enum furlong_what what)
{
    if (what == FURLONG_PAUSE)
        f->paused_by_driver = true;
    if (what != FURLONG_RESUME)
        return false;
    f->paused_by_driver = false;
    return f->paused_by_plane > 0;
}

static enum fl_status ask_read(struct furlong_call *c, const struct wire_msg *m, struct fl_err *err)
{
    const struct reserved *r;

    c->ask = fl__ask__unpack(NULL, m->head.body_bytes, m->body);
    if (!c->ask)
        return fl_fail(err, FL_CORRUPT, "a call of %u bytes that is no Ask message",
                       m->head.body_bytes);
    if (!*c->ask->method || strlen(c->ask->method) > METHOD_NAME_MAX)
        return fl_fail(err, FL_INVALID, "a method name of %zu bytes, 1 to %d are allowed",
                       strlen(c->ask->method), METHOD_NAME_MAX);
    c->lane = m->head.lane;
    c->ev.method = c->ask->method;
    c->ev.from = c->ask->from;
    if (c->ask->has_body) {
        c->ev.body = c->ask->body.data;
        c->ev.body_bytes = c->ask->body.len;
    }
    c->ev.blob = c->blob;
    c->ev.blob_bytes = m->head.blob_bytes;
    r = reserved_find(c->ask->method);
    if (!r)
        return FL_OK;
    c->ev.what = r->what;
    c->ev.tags = r->tags;
    return r->what == FURLONG_SQUEEZE ? word_of(&c->ev, &c->ev.bytes, err) : FL_OK;
}

/* A blob on its way in. What room() could not give memory for is not ours to keep when it arrives,
 * so that each one is looked up. */
struct client_room {
    struct client_room *next;
    void *blob;
};

static void *room_take(struct furlong *f, const void *blob)
{
    for (struct client_room **at = &f->rooms; *at; at = &(*at)->next) {
        struct client_room *r = *at;
        void *mine = r->blob;

        if (mine != blob)
            continue;
        *at = r->next;
        free(r);
        return mine;
    }
    return NULL;
}

static void *ask_room(void *service, uint64_t blob_bytes)
{
    struct furlong *f = ((struct client_line *)service)->f;
    struct client_room *r = malloc(sizeof(*r));
    void *blob = r ? client_blob_alloc(blob_bytes) : NULL;

    if (!blob) {
        free(r);
        return NULL;
    }
    *r = (struct client_room){ .next = f->rooms, .blob = blob };
    f->rooms = r;
    return blob;
}

static void ask_lost(void *service, void *room)
{
    client_blob_free(room_take(((struct client_line *)service)->f, room));
}

static void serve_ask(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct furlong *f = ((struct client_line *)service)->f;
    struct furlong_call *c = client_call_new(f, FURLONG_CALL, req);
    void *blob = m->head.blob_bytes ? room_take(f, m->blob) : NULL;
    struct fl_err err = { 0 };

    if (!c || (m->head.blob_bytes && !blob)) {
        client_blob_free(blob);
        if (c)
            call_free(c);
        fl_fail(&err, FL_EXHAUSTED, "%s has no memory for one more call with a blob of %llu bytes",
                f->seat.name, (unsigned long long)m->head.blob_bytes);
        call_fail(req, &err);
        return;
    }
    c->blob = blob;
    if (ask_read(c, m, &err) != FL_OK) {
        call_free(c);
        call_fail(req, &err);
        return;
    }
    if (resume_is_early(f, c->ev.what)) {
        call_free(c);
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
        return;
    }
    if (client_call_put(c, &err) != FL_OK) {
        fl_wrap(&err, err.status, "%s", f->seat.name);
        call_fail(req, &err);
    }
}

const struct call_method client_methods[1] = {
    { .method = FL_ASK, .name = "ask", .serve = serve_ask, .room = ask_room, .lost = ask_lost },
};

void client_calls_other(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct furlong *f = ((struct client_line *)service)->f;
    struct fl_err err;

    if (xfer_method_is(m->head.method)) {
        xfer_port_serve(f->port, req, m);
    } else if (req) {
        fl_fail(&err, FL_UNSUPPORTED, "%s answers no method %u", f->seat.name, m->head.method);
        call_fail(req, &err);
    }
}

/* ---- to the program ------------------------------------------------------------------------- */
/* Nobody waits for it any more, or its memory cannot be brought back: settled without the
 * program. */
static bool settled_early(struct furlong_call *c)
{
    struct fl_err err = { 0 };
    uint64_t now = fl_clock_boot_ns();

    if (c->req && atomic_load(&c->unwanted))
        fl_fail(&err, FL_CANCELLED, "%s: nobody waits for the answer", c->ev.method);
    else if (c->req && c->due_ns && c->due_ns <= now)
        fl_fail(&err, FL_TIMEOUT, "%s waited in lane %u until its time was over", c->ev.method,
                c->lane);
    else if (c->ev.what == FURLONG_ONLOAD)
        client_weights_onload(c->f, c->ev.tags, &c->moved, &err);
    if (err.status == FL_OK)
        return false;
    furlong_refuse(c, &err);
    return true;
}

enum fl_status furlong_next(struct furlong *f, uint32_t lane, uint32_t wait_ms,
                            struct furlong_event *ev, struct fl_err *err)
{
    uint64_t until = fl_clock_boot_ns() + (uint64_t)wait_ms * 1000000;
    struct furlong_call *c = NULL;
    uint64_t now;

    FL_TRY(client_here(f, err));
    for (;;) {
        FL_TRY(inbox_take(&f->inbox, lane, wait_ms, &c, err));
        if (!settled_early(c))
            break;
        now = fl_clock_boot_ns();
        if (wait_ms != FURLONG_FOREVER)
            wait_ms = now < until ? (uint32_t)((until - now) / 1000000) : 0;
    }
    *ev = c->ev;
    if (c->due_ns) {
        now = fl_clock_boot_ns();
        ev->budget_ms = c->due_ns > now ? (uint32_t)((c->due_ns - now + 999999) / 1000000) : 1;
    }
    return FL_OK;
}

void *furlong_take_blob(struct furlong_call *c)
{
    void *blob;

    if (client_here(c->f, NULL) != FL_OK)
        return NULL;
    blob = c->blob;
    c->blob = NULL;
    return blob;
}

void furlong_blob_free(void *blob)
{
    client_blob_free(blob);
}

bool furlong_unwanted(const struct furlong_call *c)
{
    return client_here(c->f, NULL) != FL_OK || atomic_load(&c->unwanted);
}

/* ---- out ------------------------------------------------------------------------------------ */
static void answer_freed(struct wire_hold *h)
{
    struct furlong_call *c = container_of(h, struct furlong_call, hold);
    struct client_sync *sent = c->sent;

    call_free(c);
    if (sent)
        client_sync_end(sent, FL_OK, NULL);
}

/* The loop's part of every answer; c is gone when nothing reads its blob any more. */
static void answer_leave(struct furlong_call *c)
{
    struct call_answer a = { .body = { c->body, c->body_bytes },
                             .blob = { c->lent.blob, c->lent.blob_bytes } };

    if (c->then)
        fl_post(c->f->loop, c->then);
    if (!c->req || c->refused.status != FL_OK || !a.blob.len) {
        if (c->req && c->refused.status != FL_OK)
            call_fail(c->req, &c->refused);
        else if (c->req)
            call_answer(c->req, &a);
        answer_freed(&c->hold);
        return;
    }
    c->hold.free = answer_freed;
    a.hold = &c->hold;
    call_answer(c->req, &a);
}

static void answer_posted(struct fl_task *t)
{
    answer_leave(container_of(t, struct furlong_call, back));
}

struct answer_wait {
    struct client_sync sync;
    struct furlong_call *c;
};

static void answer_waited(struct client_sync *s)
{
    answer_leave(container_of(s, struct answer_wait, sync)->c);
}

/* Small blobs are copied, so that answering never waits for a slow caller; large ones are lent to
 * the socket, which costs a wait and saves the copy. */
static void answer_go(struct furlong_call *c, const struct furlong_data *d)
{
    struct answer_wait w = { .c = c };

    inbox_forget(&c->f->inbox, c);
    if (d && d->blob_bytes)
        c->lent = *d;
    if (d && d->blob_bytes && d->blob_bytes <= CLIENT_SPARE_BLOB) {
        c->copied = client_blob_alloc(d->blob_bytes);
        if (c->copied)
            c->lent.blob = memcpy(c->copied, d->blob, d->blob_bytes);
    }
    if (c->lent.blob_bytes && !c->copied && c->refused.status == FL_OK) {
        c->sent = &w.sync;
        client_sync_run(c->f->loop, &w.sync, answer_waited, NULL);
        return;
    }
    c->back.run = answer_posted;
    fl_post(c->f->loop, &c->back);
}

static void answer_pack(struct furlong_call *c, const void *body, size_t bytes)
{
    Fl__Answer a = FL__ANSWER__INIT;

    a.has_body = bytes > 0;
    a.body.data = (uint8_t *)(uintptr_t)body;
    a.body.len = bytes;
    c->body_bytes = c->bare ? bytes : fl__answer__get_packed_size(&a);
    c->body = malloc(c->body_bytes ? c->body_bytes : 1);
    if (!c->body) {
        fl_fail(&c->refused, FL_EXHAUSTED, "%s has no memory for an answer of %zu bytes",
                c->f->seat.name, bytes);
        return;
    }
    if (!c->bare)
        fl__answer__pack(&a, c->body);
    else if (bytes)
        memcpy(c->body, body, bytes);
}

static size_t moved_json(const struct furlong_moved *m, char *out, size_t room)
{
    int n = snprintf(out, room,
                     "{\"setup_s\":%.6f,\"copy_s\":%.6f,\"dropped_bytes\":%llu,\"kept_bytes\":%llu,"
                     "\"written_bytes\":%llu}",
                     m->setup_s, m->copy_s, (unsigned long long)m->dropped_bytes,
                     (unsigned long long)m->kept_bytes, (unsigned long long)m->written_bytes);

    return n < 0 ? 0 : (size_t)n;
}

void furlong_reply_data(struct furlong_call *c, const struct furlong_data *d)
{
    struct furlong_data none = { 0 };
    char json[256];

    if (client_here(c->f, NULL) != FL_OK)
        return;
    d = d ? d : &none;
    if (c->set)
        client_weights_settle(c);
    if (c->ev.what == FURLONG_OFFLOAD)
        client_weights_offload(c->f, c->ev.tags, &c->moved, &c->refused);
    if (d->body_bytes > FURLONG_BODY_MAX)
        fl_fail(&c->refused, FL_INVALID,
                "%s answered %s with a body of %zu bytes, at most %u; put "
                "bulk in the blob",
                c->f->seat.name, c->ev.method, d->body_bytes, FURLONG_BODY_MAX);
    if (c->refused.status == FL_OK && !d->body_bytes &&
        (c->ev.what == FURLONG_OFFLOAD || c->ev.what == FURLONG_ONLOAD))
        answer_pack(c, json, moved_json(&c->moved, json, sizeof(json)));
    else if (c->refused.status == FL_OK)
        answer_pack(c, d->body, d->body_bytes);
    answer_go(c, d);
}

void furlong_reply(struct furlong_call *c, const void *body, size_t bytes)
{
    furlong_reply_data(c, &(struct furlong_data){ .body = body, .body_bytes = bytes });
}

void furlong_refuse(struct furlong_call *c, const struct fl_err *why)
{
    if (client_here(c->f, NULL) != FL_OK)
        return;
    if (c->set)
        client_weights_settle(c);
    if (why && why->status != FL_OK)
        c->refused = *why;
    else
        fl_fail(&c->refused, FL_INTERNAL, "%s refused %s and gave no reason", c->f->seat.name,
                c->ev.method);
    answer_go(c, NULL);
}

void client_calls_refuse_all(struct furlong *f)
{
    struct furlong_call *c;
    struct fl_err why;

    while ((c = inbox_any(&f->inbox))) {
        fl_fail(&why, FL_UNREACHABLE, "%s left before it answered %s", f->seat.name, c->ev.method);
        furlong_refuse(c, &why);
    }
}
