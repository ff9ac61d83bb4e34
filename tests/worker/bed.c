#include "tests/worker/bed.h"

#include "common/base/str.h"
#include "common/proto/methods.h"
#include "worker/keep/tree.h"
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

const char *keeper_path, *victim_path, *fake_nvml;
static unsigned n_beds;

/* ---- the head ----------------------------------------------------------------------------------
 */

static void reply_msg(struct call_req *req, const ProtobufCMessage *m)
{
    uint8_t buf[4096];
    size_t n = protobuf_c_message_get_packed_size(m);

    assert_true(n <= sizeof(buf));
    protobuf_c_message_pack(m, buf);
    call_reply(req, (struct fl_bytes){ buf, n }, (struct fl_bytes){ 0 });
}

static void on_join(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct bed *b = service;
    Fl__JoinReply r = FL__JOIN_REPLY__INIT;

    if (b->join)
        fl__join_request__free_unpacked(b->join, NULL);
    b->join = fl__join_request__unpack(NULL, m->head.body_bytes, m->body);
    assert_non_null(b->join);
    b->from = call_req_from(req)->node;
    if (b->refuse_join.status != FL_OK) {
        call_fail(req, &b->refuse_join);
        return;
    }
    r.beat_ms = 10;
    r.silent_ms = 1000;
    r.has_fenced = b->fence_next;
    r.fenced = b->fence_next;
    b->fence_next = false;
    if (b->end_lease) {
        r.end_leases = &b->end_lease;
        r.n_end_leases = 1;
    }
    reply_msg(req, &r.base);
    b->end_lease = 0;
    b->joins++;
}

static void on_beat(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct bed *b = service;
    Fl__Beat *beat = fl__beat__unpack(NULL, m->head.body_bytes, m->body);

    (void)req;
    b->beats++;
    b->slowed_told = beat && beat->slowed_told;
    b->n_slowed = b->slowed_told ? beat->n_slowed : 0;
    b->slowed = b->n_slowed ? beat->slowed[0] : 0;
    if (beat && beat->uses_told) {
        Fl__Beat *was = b->uses;

        b->uses = beat;
        beat = was;
    }
    if (beat)
        fl__beat__free_unpacked(beat, NULL);
}

static void on_changed(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct bed *b = service;
    struct fl_err err;

    if (b->refuse_changes) {
        b->refuse_changes--;
        fl_fail(&err, FL_AGAIN, "the journal is busy");
        call_fail(req, &err);
        return;
    }
    assert_true(b->changes < STATES);
    b->states[b->changes] = fl__worker_state__unpack(NULL, m->head.body_bytes, m->body);
    assert_non_null(b->states[b->changes]);
    if (b->states[b->changes]->phase == FL__WORKER_PHASE__WORKER_GONE)
        b->log_at_gone = b->log.len;
    b->changes++;
    call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

void on_log(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct bed *b = service;
    Fl__LogPush *p = fl__log_push__unpack(NULL, m->head.body_bytes, m->body);
    Fl__LogPushed r = FL__LOG_PUSHED__INIT;

    assert_non_null(p);
    assert_true(p->stream == 1 || p->stream == 2);
    b->log_refused = b->slow_logs && !b->log_refused;
    if (b->mute_logs || b->log_refused) {
        struct fl_err err;

        fl_fail(&err, FL_AGAIN, "the disk is slow");
        call_fail(req, &err);
    } else {
        uint64_t *end = &b->ends[p->rank][p->stream];

        t_true(p->offset <= *end, "bytes are left out: at %lu after %lu", p->offset, *end);
        if (p->offset == *end) {
            fl_str_add_bytes(&b->log, p->data.data, p->data.len);
            *end = p->end;
        } else { /* a daemon that was killed before it heard that this is here */
            b->repeats++;
            r.has_next = true;
            r.next = *end;
        }
        reply_msg(req, &r.base);
    }
    fl__log_push__free_unpacked(p, NULL);
}

static void on_relay(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct bed *b = service;
    Fl__Relay *r = fl__relay__unpack(NULL, m->head.body_bytes, m->body);
    char text[64];

    assert_non_null(r);
    snprintf(text, sizeof(text), "%u:%.*s", r->method, (int)r->body.len, (char *)r->body.data);
    call_reply(req, (struct fl_bytes){ text, strlen(text) }, (struct fl_bytes){ 0 });
    b->relays++;
    fl__relay__free_unpacked(r, NULL);
}

static void on_leave(void *service, struct call_req *req, const struct wire_msg *m)
{
    (void)m;
    ((struct bed *)service)->leaves++;
    call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
}

static const struct call_method head_methods[] = {
    { FL_NODE_JOIN, "node_join", on_join, NULL, NULL },
    { FL_NODE_BEAT, "node_beat", on_beat, NULL, NULL },
    { FL_WORKER_CHANGED, "worker_changed", on_changed, NULL, NULL },
    { FL_LOG_PUSH, "log_push", on_log, NULL, NULL },
    { FL_RELAY, "relay", on_relay, NULL, NULL },
    { FL_NODE_LEAVE, "node_leave", on_leave, NULL, NULL },
};

static void head_closed(void *service, const struct fl_err *why)
{
    struct bed *b = service;

    (void)why;
    call_peer_destroy(b->up);
    b->up = NULL;
}
static const struct call_life head_life = { .closed = head_closed };

static void head_accepted(void *arg, struct stream *s_take)
{
    struct bed *b = arg;
    struct fl_err err;

    if (b->up)
        call_peer_destroy(b->up);
    t_ok(call_peer_create(s_take, head_methods, FL_LEN(head_methods), &head_life, b, &b->up, &err),
         &err);
}

void head_start(struct bed *b)
{
    struct wire_hello me = { .role = "head", .term = b->term };
    struct stream_to at = { .target = b->target };
    struct fl_err err;

    t_ok(stream_listen(b->loop, &stream_sock, &at, &me, head_accepted, b, &b->server, &err), &err);
    snprintf(b->target, sizeof(b->target), "%s", stream_server_at(b->server));
}

void head_stop(struct bed *b)
{
    if (b->up)
        call_peer_destroy(b->up);
    b->up = NULL;
    stream_server_destroy(b->server);
    b->server = NULL;
}

void head_restart(struct bed *b)
{
    head_stop(b);
    b->term.head++;
    head_start(b);
}

static void on_answer(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *err)
{
    struct bed *b = container_of(op, struct bed, op);

    b->answered = true;
    b->st = st;
    if (err)
        b->st_err = *err;
    if (b->prepared)
        fl__lease_prepared__free_unpacked(b->prepared, NULL);
    b->prepared =
        st == FL_OK ? fl__lease_prepared__unpack(NULL, reply->head.body_bytes, reply->body) : NULL;
}

enum fl_status ask(struct bed *b, uint16_t method, const ProtobufCMessage *m)
{
    static uint8_t buf[65536];
    struct call_args a = { .method = method, .due_ns = fl_loop_now_ns(b->loop) + 10000000000ull };
    struct fl_err err;

    a.body = (struct fl_bytes){ buf, protobuf_c_message_pack(m, buf) };
    b->answered = false;
    b->op.done = on_answer;
    t_ok(call_start(b->up, &a, &b->op, &err), &err);
    t_until(b->loop, b->answered, WAIT_MS);
    return b->st;
}

/* ---- the daemon --------------------------------------------------------------------------------
 */

void on_ended(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct bed *b = arg;

    b->ended = true;
    b->end_st = st;
    if (err)
        b->end_err = *err;
}

void node_up(struct bed *b)
{
    struct fl_err err;

    b->cfg.address = b->target;
    t_ok(node_create(b->loop, &b->cfg, on_ended, b, &b->node, &err), &err);
}

void bed_init(struct bed *b)
{
    struct fl_err err;

    *b = (struct bed){ .term = { .cluster = { 7 }, .head = 10 }, .log = FL_STR_HEAP(LOG_MAX) };
    t_ok(fl_loop_create(NULL, &b->loop, &err), &err);
    snprintf(b->target, sizeof(b->target), "127.0.0.1:0");
    snprintf(b->runtime, sizeof(b->runtime), "%s/r%u", t_tmp(), ++n_beds);
    snprintf(b->state, sizeof(b->state), "%s/s%u", t_tmp(), n_beds);
    head_start(b);
    b->cfg = (struct node_config){ .name = "node-a",
                                   .cpus = 4,
                                   .gpus = 2,
                                   .memory_bytes = 1 << 30,
                                   .log_max_bytes = 1 << 20,
                                   .wait_s = 20,
                                   .ready_fd = -1,
                                   .state_dir = b->state,
                                   .runtime_dir = b->runtime,
                                   .nvml = "no-such-library.so",
                                   .carrier = &stream_sock,
                                   .proc = &proc_keeper,
                                   .keeper = keeper_path };
}

void bed_join(struct bed *b)
{
    bed_init(b);
    node_up(b);
    t_until(b->loop, b->joins == 1, WAIT_MS);
}

void bed_stop(struct bed *b)
{
    node_stop(b->node, "the test is over", 2000);
    t_until(b->loop, b->ended, WAIT_MS);
    node_destroy(b->node);
    b->node = NULL;
}

void bed_fini(struct bed *b)
{
    if (b->node)
        bed_stop(b);
    head_stop(b);
    if (b->join)
        fl__join_request__free_unpacked(b->join, NULL);
    if (b->prepared)
        fl__lease_prepared__free_unpacked(b->prepared, NULL);
    for (unsigned i = 0; i < b->changes; i++)
        fl__worker_state__free_unpacked(b->states[i], NULL);
    fl_str_fini(&b->log);
    fl_loop_destroy(b->loop);
    if (b->uses)
        fl__beat__free_unpacked(b->uses, NULL);
}

Fl__WorkerState *gone(struct bed *b, unsigned nth)
{
    for (unsigned i = 0; i < b->changes; i++)
        if (b->states[i]->phase == FL__WORKER_PHASE__WORKER_GONE && nth-- == 0)
            return b->states[i];
    return NULL;
}

Fl__WorkerState *in_phase(struct bed *b, Fl__WorkerPhase phase)
{
    for (unsigned i = 0; i < b->changes; i++)
        if (b->states[i]->phase == phase)
            return b->states[i];
    return NULL;
}

/* ---- workers -----------------------------------------------------------------------------------
 */

uint8_t job_key[KEY] = { 1, 2, 3, 4 };

struct fl_seat_ref seat_of(unsigned n)
{
    struct fl_seat_ref who = { .attempt = 1 };
    int pid = (int)getpid();

    memcpy(&who.id, &pid, sizeof(pid));
    memcpy((uint8_t *)&who.id + 4, &n, sizeof(n));
    memcpy((uint8_t *)&who.id + 8, &n_beds, sizeof(n_beds));
    who.id.b[0] = (uint8_t)n; /* folders are named by the first bytes */
    return who;
}

enum fl_status try_start(struct bed *b, unsigned n, const char *word, const char *arg,
                         uint64_t lease)
{
    struct fl_seat_ref seat = seat_of(n);
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    Fl__WorkerSpec s = FL__WORKER_SPEC__INIT;
    char *argv[] = { (char *)(uintptr_t)victim_path, (char *)(uintptr_t)word,
                     (char *)(uintptr_t)arg };
    char *devices[] = { (char *)(uintptr_t) "1" };
    uint8_t job[4] = { 5 };

    who.worker = (ProtobufCBinaryData){ sizeof(seat.id), (uint8_t *)&seat.id };
    who.attempt = seat.attempt;
    s.who = &who;
    s.job = (ProtobufCBinaryData){ sizeof(job), job };
    s.job_name = (char *)(uintptr_t) "job-1";
    s.job_attempt = 1;
    s.role = (char *)(uintptr_t) "trainer";
    s.rank = n;
    s.world = 100;
    s.argv = argv;
    s.n_argv = arg ? 3 : 2;
    s.leases = &lease;
    s.n_leases = lease != 0;
    s.device_ids = devices;
    s.n_device_ids = lease != 0;
    s.has_term_ms = true;
    s.term_ms = 2000;
    s.key = (ProtobufCBinaryData){ KEY, job_key };
    return ask(b, FL_WORKER_START, &s.base);
}

void start(struct bed *b, unsigned n, const char *word, const char *arg)
{
    t_int_eq(try_start(b, n, word, arg, 0), FL_OK, "%s", b->st_err.text);
}

enum fl_status stop(struct bed *b, unsigned n, const char *text, uint32_t term_ms)
{
    struct fl_seat_ref seat = seat_of(n);
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    Fl__WorkerStop m = FL__WORKER_STOP__INIT;

    who.worker = (ProtobufCBinaryData){ sizeof(seat.id), (uint8_t *)&seat.id };
    who.attempt = seat.attempt;
    m.who = &who;
    m.cause = PROC_STOPPED;
    m.text = (char *)(uintptr_t)text;
    m.has_term_ms = true;
    m.term_ms = term_ms;
    return ask(b, FL_WORKER_STOP, &m.base);
}

enum fl_status lease(struct bed *b, uint64_t id, int64_t gpu_e4, uint32_t ports)
{
    Fl__LeasePrepare m = FL__LEASE_PREPARE__INIT;
    Fl__Lease l = FL__LEASE__INIT, *list = &l;
    Fl__Term by = FL__TERM__INIT;
    Fl__NodeRef at = FL__NODE_REF__INIT;
    Fl__Amount amount = FL__AMOUNT__INIT, *amounts = &amount;
    uint8_t zero[18] = { 0 };
    uint32_t device = 1;

    by.cluster = (ProtobufCBinaryData){ 16, b->term.cluster };
    by.head = b->term.head;
    at.id = (ProtobufCBinaryData){ sizeof(b->from.id), (uint8_t *)&b->from.id };
    at.start = b->from.start;
    amount.name = (char *)(uintptr_t) "GPU";
    amount.e4 = gpu_e4;
    l.id = id;
    l.by = &by;
    l.at = &at;
    l.group = (ProtobufCBinaryData){ 18, zero };
    l.job = (ProtobufCBinaryData){ 4, zero };
    l.has_hold_ms = true;
    l.hold_ms = 10000;
    l.amounts = &amounts;
    l.n_amounts = 1;
    l.devices = &device;
    l.n_devices = 1;
    m.leases = &list;
    m.n_leases = 1;
    m.has_free_ports = ports != 0;
    m.free_ports = ports;
    return ask(b, FL_LEASE_PREPARE, &m.base);
}

enum fl_status lease_ids(struct bed *b, uint16_t method, uint64_t id)
{
    Fl__LeaseIds m = FL__LEASE_IDS__INIT;

    m.ids = &id;
    m.n_ids = 1;
    return ask(b, method, &m.base);
}

bool logged(const struct bed *b, const char *text)
{
    return b->log.data && strstr(b->log.data, text);
}

bool alive(int pid)
{
    struct tree_stat st;

    return tree_stat(pid, &st) && st.state != 'Z';
}

bool bed_args(int argc, char **argv)
{
    if (argc != 4)
        return false;
    fake_nvml = argv[3];
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    keeper_path = realpath(argv[1], NULL);
    victim_path = realpath(argv[2], NULL);
    return true;
}

void bed_end_all(void)
{
    struct tree_pick mine = { .root = (int)getpid() };

    for (unsigned i = 0; i < 1000 && tree_signal(&mine, SIGKILL); i++)
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
}
