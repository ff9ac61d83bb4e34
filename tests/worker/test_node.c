/* tests/worker/test_node.c - a daemon under a head that the test plays, with real keepers
 *
 * Everything runs on one loop; the carrier is a socket instead of gRPC. */
#include "tests/t.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "node.pb-c.h"
#include "transport/call/call.h"
#include "worker.pb-c.h"
#include "worker/keep/tree.h"
#include "worker/node/node.h"
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WAIT_MS = 20000, KEY = 32, LOG_MAX = 1 << 20, STATES = 64 };

static const char *keeper_path, *victim_path, *fake_nvml;
static unsigned n_beds;

struct bed { /* the head that is played, the daemon, and what was heard */
    struct fl_loop *loop;
    struct stream_server *server;
    struct call_peer *up; /* the daemon's connection; NULL while there is none */
    struct fl_term term;
    char target[64], runtime[40], state[128];
    struct node_config cfg;
    struct node *node;
    bool ended;
    enum fl_status end_st;
    struct fl_err end_err;

    Fl__JoinRequest *join; /* the last one */
    struct fl_node_ref from;
    unsigned joins, beats, changes, leaves, relays;
    bool fence_next;
    struct fl_err refuse_join; /* status FL_OK: none */
    unsigned refuse_changes;   /* so many answers are failures */
    bool mute_logs;
    unsigned repeats;
    Fl__WorkerState *states[STATES];
    struct fl_str log;   /* all output, in order of arrival */
    size_t log_at_gone;  /* its length when a GONE came */
    uint64_t ends[4][3]; /* by rank and stream */
    uint64_t end_lease;  /* for the next JoinReply */
    struct call_op op;
    bool answered;
    enum fl_status st;
    struct fl_err st_err;
    Fl__LeasePrepared *prepared;
};

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
    (void)req;
    (void)m;
    ((struct bed *)service)->beats++;
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

static void on_log(void *service, struct call_req *req, const struct wire_msg *m)
{
    struct bed *b = service;
    Fl__LogPush *p = fl__log_push__unpack(NULL, m->head.body_bytes, m->body);
    Fl__LogPushed r = FL__LOG_PUSHED__INIT;

    assert_non_null(p);
    assert_true(p->stream == 1 || p->stream == 2);
    if (b->mute_logs) {
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

static void head_start(struct bed *b)
{
    struct wire_hello me = { .role = "head", .term = b->term };
    struct stream_to at = { .target = b->target };
    struct fl_err err;

    t_ok(stream_listen(b->loop, &stream_sock, &at, &me, head_accepted, b, &b->server, &err), &err);
    snprintf(b->target, sizeof(b->target), "%s", stream_server_at(b->server));
}

static void head_stop(struct bed *b)
{
    if (b->up)
        call_peer_destroy(b->up);
    b->up = NULL;
    stream_server_destroy(b->server);
    b->server = NULL;
}

static void head_restart(struct bed *b)
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

static enum fl_status ask(struct bed *b, uint16_t method, const ProtobufCMessage *m)
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

static void on_ended(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct bed *b = arg;

    b->ended = true;
    b->end_st = st;
    if (err)
        b->end_err = *err;
}

static void node_up(struct bed *b)
{
    struct fl_err err;

    b->cfg.address = b->target;
    t_ok(node_create(b->loop, &b->cfg, on_ended, b, &b->node, &err), &err);
}

static void bed_init(struct bed *b)
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

static void bed_join(struct bed *b)
{
    bed_init(b);
    node_up(b);
    t_until(b->loop, b->joins == 1, WAIT_MS);
}

static void bed_stop(struct bed *b) /* ends what it runs */
{
    node_stop(b->node, "the test is over", 2000);
    t_until(b->loop, b->ended, WAIT_MS);
    node_destroy(b->node);
    b->node = NULL;
}

static void bed_fini(struct bed *b)
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
}

static Fl__WorkerState *gone(struct bed *b, unsigned nth)
{
    for (unsigned i = 0; i < b->changes; i++)
        if (b->states[i]->phase == FL__WORKER_PHASE__WORKER_GONE && nth-- == 0)
            return b->states[i];
    return NULL;
}

static Fl__WorkerState *in_phase(struct bed *b, Fl__WorkerPhase phase)
{
    for (unsigned i = 0; i < b->changes; i++)
        if (b->states[i]->phase == phase)
            return b->states[i];
    return NULL;
}

/* ---- workers -----------------------------------------------------------------------------------
 */

static uint8_t job_key[KEY] = { 1, 2, 3, 4 };

static struct fl_seat_ref seat_of(unsigned n)
{
    struct fl_seat_ref who = { .attempt = 1 };
    int pid = (int)getpid();

    memcpy(&who.id, &pid, sizeof(pid));
    memcpy((uint8_t *)&who.id + 4, &n, sizeof(n));
    memcpy((uint8_t *)&who.id + 8, &n_beds, sizeof(n_beds));
    who.id.b[0] = (uint8_t)n; /* folders are named by the first bytes */
    return who;
}

static enum fl_status try_start(struct bed *b, unsigned n, const char *word, const char *arg,
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

static void start(struct bed *b, unsigned n, const char *word, const char *arg)
{
    t_int_eq(try_start(b, n, word, arg, 0), FL_OK, "%s", b->st_err.text);
}

static enum fl_status stop(struct bed *b, unsigned n, const char *text, uint32_t term_ms)
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

static enum fl_status lease(struct bed *b, uint64_t id, int64_t gpu_e4, uint32_t ports)
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

static enum fl_status lease_ids(struct bed *b, uint16_t method, uint64_t id)
{
    Fl__LeaseIds m = FL__LEASE_IDS__INIT;

    m.ids = &id;
    m.n_ids = 1;
    return ask(b, method, &m.base);
}

static bool logged(const struct bed *b, const char *text)
{
    return b->log.data && strstr(b->log.data, text);
}

static bool alive(int pid)
{
    struct tree_stat st;

    return tree_stat(pid, &st) && st.state != 'Z';
}

/* ---- tests -------------------------------------------------------------------------------------
 */

static void it_joins(void **state)
{
    struct bed b;
    int fds[2];
    char line[1024], id[2 * sizeof(struct fl_node_id) + 1];

    (void)state;
    bed_init(&b);
    t_true(pipe2(fds, O_CLOEXEC) == 0);
    b.cfg.ready_fd = fds[1];
    b.cfg.labels = "zone=a";
    node_up(&b);
    t_until(b.loop, b.joins && b.beats > 2, WAIT_MS);
    t_str_eq(b.join->name, "node-a");
    t_str_eq(b.join->address, "127.0.0.1");
    t_int_eq(strlen(b.join->boot_id), 36);
    t_int_eq(b.join->inventory->n_devices, 2);
    t_int_eq(b.join->inventory->n_labels, 1);
    t_int_eq(b.join->highest->head, b.term.head);
    t_int_eq(b.from.start, 1);
    ssize_t n = read(fds[0], line, sizeof(line) - 1);

    t_true(n > 0 && line[n - 1] == '\n');
    line[n] = 0;
    FL_HEX(b.from.id, id);
    t_has(line, id);
    t_has(line, "\"name\":\"node-a\"");
    t_has(line, "\"address\":\"127.0.0.1\"");
    t_int_eq(read(fds[0], line, 1), 0, "closed after the line");
    close(fds[0]);
    bed_fini(&b);
}

static void an_end_is_told_after_its_output(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    start(&b, 0, "exit", "7");
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    Fl__WorkerState *w = gone(&b, 0);

    t_int_eq(w->exit->code, 7);
    t_int_eq(w->exit->cause, PROC_EXITED);
    t_has(w->exit->why, "trainer 0 on node-a: ended with exit code 7");
    t_has(w->exit->last, "leaving with 7");
    t_has(b.log.data, "leaving with 7\n");
    t_int_eq(b.log_at_gone, b.log.len, "nothing comes after the end");
    t_int_eq(try_start(&b, 1, "exit", "0", 0), FL_OK);
    t_until(b.loop, gone(&b, 1), WAIT_MS);
    t_int_eq(gone(&b, 1)->rank, 1);
    bed_fini(&b);
}

static void what_cannot_run_is_told_too(void **state)
{
    struct bed b;
    const char *was = victim_path;

    (void)state;
    bed_join(&b);
    victim_path = "/nowhere/program";
    start(&b, 0, "x", NULL);
    victim_path = was;
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(gone(&b, 0)->exit->cause, PROC_EXEC_FAILED);
    t_has(gone(&b, 0)->exit->why, "cannot execute /nowhere/program");
    t_int_eq(stop(&b, 9, "", 100), FL_NOT_FOUND);
    bed_fini(&b);
}

static void an_end_is_told_until_it_is_heard(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    start(&b, 0, "wait", NULL);
    t_until(b.loop, in_phase(&b, FL__WORKER_PHASE__WORKER_STARTING), WAIT_MS);
    b.refuse_changes = 2;
    kill(in_phase(&b, FL__WORKER_PHASE__WORKER_STARTING)->pid, SIGUSR2);
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(b.refuse_changes, 0);
    t_int_eq(gone(&b, 0)->exit->signal, SIGUSR2);
    bed_fini(&b);
}

static void a_stop_has_its_reason(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    start(&b, 0, "stubborn", NULL);
    t_until(b.loop, logged(&b, "ready"), WAIT_MS);
    t_int_eq(stop(&b, 0, "its job has ended", 50), FL_OK);
    t_int_eq(stop(&b, 0, "asked again", 50), FL_OK);
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(gone(&b, 0)->exit->cause, PROC_STOPPED);
    t_has(gone(&b, 0)->exit->why, "its job has ended");
    t_int_eq(gone(&b, 0)->exit->signal, SIGKILL);
    bed_fini(&b);
}

static void a_new_head_finds_all_of_it(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    start(&b, 0, "wait", NULL);
    start(&b, 1, "exit", "3");
    t_until(b.loop,
            gone(&b, 0) && logged(&b, "ready") && in_phase(&b, FL__WORKER_PHASE__WORKER_STARTING),
            WAIT_MS);
    head_stop(&b);
    struct fl_seat_ref first = seat_of(0);

    b.term.head++;
    head_start(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    t_int_eq(b.join->n_workers, 1);
    t_mem_eq(b.join->workers[0]->who->worker.data, &first.id, sizeof(first.id));
    t_int_eq(b.join->highest->head, b.term.head);
    t_int_eq(b.from.start, 1);
    /* Its output goes on where the last head had it: on_log checks the offsets. */
    t_int_eq(stop(&b, 0, "enough", 1000), FL_OK);
    t_until(b.loop, gone(&b, 1), WAIT_MS);
    bed_fini(&b);
}

static void an_end_without_a_head_is_kept(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    start(&b, 0, "wait", NULL);
    t_until(b.loop, in_phase(&b, FL__WORKER_PHASE__WORKER_STARTING) && logged(&b, "ready"),
            WAIT_MS);
    int pid = in_phase(&b, FL__WORKER_PHASE__WORKER_STARTING)->pid;

    head_stop(&b);
    kill(pid, SIGUSR1);
    t_until(b.loop, !alive(pid), WAIT_MS);
    b.term.head++;
    head_start(&b);
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(gone(&b, 0)->exit->signal, SIGUSR1);
    bed_fini(&b);
}

static void a_new_daemon_adopts(void **state)
{
    struct bed b;
    struct fl_seat_ref seat = seat_of(0);

    (void)state;
    bed_join(&b);
    t_int_eq(lease(&b, 41, 10000, 0), FL_OK, "%s", b.st_err.text);
    t_int_eq(lease_ids(&b, FL_LEASE_COMMIT, 41), FL_OK);
    seat = seat_of(0);
    t_int_eq(try_start(&b, 0, "wait", NULL, 41), FL_OK, "%s", b.st_err.text);
    start(&b, 1, "wait", NULL);
    t_until(b.loop, b.changes == 2 && b.ends[0][1] && b.ends[1][1], WAIT_MS);
    int pid0 = b.states[0]->pid, pid1 = b.states[1]->pid;

    node_destroy(b.node);                                /* as if it had been killed */
    kill(b.states[1]->rank == 1 ? pid1 : pid0, SIGUSR1); /* rank 1 ends while nobody looks */
    node_up(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    t_int_eq(b.from.start, 2);
    t_int_eq(b.join->n_leases, 1);
    t_int_eq(b.join->leases[0]->id, 41);
    t_int_eq(b.join->leases[0]->state, FL__LEASE_STATE__COMMITTED);
    t_int_eq(b.join->n_workers, 2);
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(gone(&b, 0)->rank, 1);
    t_int_eq(gone(&b, 0)->exit->signal, SIGUSR1);
    t_true(alive(b.states[0]->rank == 0 ? pid0 : pid1));
    t_int_eq(stop(&b, 0, "by the second daemon", 1000), FL_OK);
    t_until(b.loop, gone(&b, 1), WAIT_MS);
    t_mem_eq(gone(&b, 1)->who->worker.data, &seat.id, sizeof(seat.id));
    t_has(gone(&b, 1)->exit->why, "by the second daemon");
    bed_fini(&b);
}

static void a_fenced_node_ends_what_it_ran(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    t_int_eq(lease(&b, 41, 10000, 0), FL_OK);
    t_int_eq(lease_ids(&b, FL_LEASE_COMMIT, 41), FL_OK);
    start(&b, 0, "with-child", NULL);
    t_until(b.loop, b.changes == 1 && logged(&b, "ready"), WAIT_MS);
    int pid = b.states[0]->pid, child = atoi(strstr(b.log.data, "ready ") + 6);

    b.fence_next = true;
    head_restart(&b);
    t_until(b.loop, b.joins == 3, WAIT_MS);
    t_true(!alive(pid) && !alive(child));
    t_int_eq(b.from.start, 2);
    t_int_eq(b.join->n_workers, 0);
    t_int_eq(b.join->n_leases, 0);
    t_int_eq(b.changes, 1, "what was fenced is not reported");
    bed_fini(&b);
}

static void an_older_head_is_not_joined(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    head_stop(&b);
    b.term.head = 9;
    head_start(&b);
    t_until(b.loop, b.up, WAIT_MS);
    t_until(b.loop, !b.up, WAIT_MS); /* it hung up by itself */
    t_int_eq(b.joins, 1);
    head_stop(&b);
    b.term.head = 11;
    head_start(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    bed_fini(&b);
}

static void another_cluster_gets_nothing_of_the_last(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    start(&b, 0, "wait", NULL);
    t_until(b.loop, b.changes == 1, WAIT_MS);
    int pid = b.states[0]->pid;

    head_stop(&b);
    b.term.cluster[0] = 8;
    b.term.head = 1;
    head_start(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    t_true(!alive(pid));
    t_int_eq(b.join->n_workers, 0);
    t_int_eq(b.changes, 1);
    bed_fini(&b);
}

static void leases_guard_workers(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    t_int_eq(try_start(&b, 0, "wait", NULL, 41), FL_STALE);
    t_has(b.st_err.text, "lease 41 is not committed here");
    t_int_eq(lease(&b, 41, 10000, 2), FL_OK);
    t_int_eq(b.prepared->n_ports, 2);
    t_true(b.prepared->ports[0] != b.prepared->ports[1]);
    uint32_t port = b.prepared->ports[1];

    t_int_eq(lease(&b, 44, 1, 1), FL_OK);
    t_true(b.prepared->ports[0] > port, "%u is given to another group", b.prepared->ports[0]);
    t_int_eq(lease_ids(&b, FL_LEASE_RELEASE, 44), FL_OK);
    t_int_eq(try_start(&b, 0, "wait", NULL, 41), FL_STALE, "prepared is not enough");
    t_int_eq(lease_ids(&b, FL_LEASE_COMMIT, 41), FL_OK);
    t_int_eq(try_start(&b, 0, "wait", NULL, 41), FL_OK);
    t_until(b.loop, b.changes == 1, WAIT_MS);
    int pid = b.states[0]->pid;

    t_int_eq(lease(&b, 42, 15000, 0), FL_EXHAUSTED);
    t_int_eq(lease_ids(&b, FL_LEASE_RELEASE, 41), FL_OK);
    t_true(!alive(pid), "answered when nothing runs on it any more");
    t_int_eq(lease(&b, 42, 15000, 0), FL_OK);
    b.end_lease = 42;
    head_restart(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    t_int_eq(lease(&b, 43, 20000, 0), FL_OK, "42 was ended by the join's answer: %s",
             b.st_err.text);
    bed_fini(&b);
}

/* ---- a worker's own connection -----------------------------------------------------------------
 */

struct guest {
    struct call_peer *peer;
    bool open, closed, answered, stop_asked;
    enum fl_status closed_st, st;
    unsigned members;
    struct call_op op;
    char reply[64];
};

static void guest_opened(void *service, const struct wire_hello *peer)
{
    t_str_eq(peer->role, "node");
    ((struct guest *)service)->open = true;
}

static void guest_closed(void *service, const struct fl_err *why)
{
    struct guest *g = service;

    g->closed = true;
    g->open = false;
    g->closed_st = why->status;
}
static const struct call_life guest_life = { .opened = guest_opened, .closed = guest_closed };

static void guest_stop(void *service, struct call_req *req, const struct wire_msg *m)
{
    (void)req;
    (void)m;
    ((struct guest *)service)->stop_asked = true;
}

static void guest_members(void *service, struct call_req *req, const struct wire_msg *m)
{
    (void)req;
    t_int_eq(m->head.body_bytes, 5);
    ((struct guest *)service)->members++;
}
static const struct call_method guest_methods[] = {
    { FL_EV_STOP, "stop", guest_stop, NULL, NULL },
    { FL_EV_MEMBERS, "members", guest_members, NULL, NULL },
};

static void guest_dial(struct bed *b, struct guest *g, const struct fl_seat_ref *seat,
                       const uint8_t *key)
{
    struct wire_hello me = { .role = "worker", .seat = *seat };
    char target[200], id[FL_SHORT];
    struct stream_to to = { .target = target, .key = { key, KEY } };
    struct stream *s;
    struct fl_err err;

    *g = (struct guest){ 0 };
    snprintf(target, sizeof(target), "unix:%s/n-%s/node.sock", b->runtime,
             fl_short(id, &b->from.id));
    t_ok(stream_connect(b->loop, &stream_sock, &to, &me, NULL, NULL, &s, &err), &err);
    t_ok(call_peer_create(s, guest_methods, FL_LEN(guest_methods), &guest_life, g, &g->peer, &err),
         &err);
    t_until(b->loop, g->open || g->closed, WAIT_MS);
}

static void guest_answer(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                         const struct fl_err *err)
{
    struct guest *g = container_of(op, struct guest, op);

    (void)err;
    g->answered = true;
    g->st = st;
    if (reply)
        snprintf(g->reply, sizeof(g->reply), "%.*s", (int)reply->head.body_bytes,
                 (const char *)reply->body);
}

static enum fl_status guest_ask(struct bed *b, struct guest *g, uint16_t method, const void *body,
                                size_t len)
{
    struct call_args a = { .method = method,
                           .body = { body, len },
                           .due_ns = fl_loop_now_ns(b->loop) + 5000000000ull };
    struct fl_err err;

    g->answered = false;
    g->op.done = guest_answer;
    t_ok(call_start(g->peer, &a, &g->op, &err), &err);
    t_until(b->loop, g->answered, WAIT_MS);
    return g->st;
}

static void a_worker_speaks_through_its_daemon(void **state)
{
    struct bed b;
    struct guest g, wrong;
    struct fl_err err;

    (void)state;
    bed_join(&b);
    start(&b, 0, "wait", NULL);
    t_until(b.loop, b.changes == 1, WAIT_MS);
    struct fl_seat_ref seat = seat_of(0), other = seat_of(5);
    uint8_t bad_key[KEY] = { 0 };

    guest_dial(&b, &wrong, &seat, bad_key);
    t_int_eq(wrong.closed_st, FL_DENIED);
    call_peer_destroy(wrong.peer);
    guest_dial(&b, &wrong, &other, job_key);
    t_int_eq(wrong.closed_st, FL_STALE);
    call_peer_destroy(wrong.peer);

    guest_dial(&b, &g, &seat, job_key);
    t_true(g.open);
    Fl__WorkerReady r = FL__WORKER_READY__INIT;
    uint8_t buf[256];

    r.tcp = (char *)(uintptr_t) "127.0.0.1:777";
    r.unix_path = (char *)(uintptr_t) "/x/peer.sock";
    r.pid = 77;
    t_int_eq(guest_ask(&b, &g, FL_WORKER_READY, buf, fl__worker_ready__pack(&r, buf)), FL_OK);
    t_until(b.loop, in_phase(&b, FL__WORKER_PHASE__WORKER_JOINED), WAIT_MS);
    t_str_eq(in_phase(&b, FL__WORKER_PHASE__WORKER_JOINED)->tcp, "127.0.0.1:777");

    t_int_eq(guest_ask(&b, &g, FL_DIR_FIND, "hello", 5), FL_OK);
    t_str_eq(g.reply, "128:hello", "the body went through as it was");
    t_int_eq(guest_ask(&b, &g, 99, "x", 1), FL_UNSUPPORTED);

    Fl__Deliver d = FL__DELIVER__INIT;
    Fl__SeatRef to = FL__SEAT_REF__INIT;

    to.worker = (ProtobufCBinaryData){ sizeof(seat.id), (uint8_t *)&seat.id };
    to.attempt = seat.attempt;
    d.to = &to;
    d.method = FL_EV_MEMBERS;
    d.body = (ProtobufCBinaryData){ 5, (uint8_t *)(uintptr_t) "event" };
    t_ok(
        call_event(b.up, FL_DELIVER, 0, (struct fl_bytes){ buf, fl__deliver__pack(&d, buf) }, &err),
        &err);
    t_until(b.loop, g.members == 1, WAIT_MS);

    head_stop(&b); /* a call while no head is there may be repeated: nothing was started */
    t_until(b.loop, guest_ask(&b, &g, FL_DIR_FIND, "hello", 5) == FL_AGAIN, WAIT_MS);
    b.term.head++;
    head_start(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    t_int_eq(b.join->workers[0]->phase, FL__WORKER_PHASE__WORKER_JOINED);

    t_int_eq(stop(&b, 0, "by word first", 1000), FL_OK);
    t_until(b.loop, g.stop_asked, WAIT_MS);
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(gone(&b, 0)->exit->signal, SIGTERM, "then by signal");
    call_peer_destroy(g.peer);
    bed_fini(&b);
}

/* ---- logs --------------------------------------------------------------------------------------
 */

static void output_that_was_given_back_is_named(void **state)
{
    struct bed b;
    struct stat st;
    char out[300], id[FL_SHORT], wid[FL_SHORT];
    struct fl_seat_ref seat;

    (void)state;
    bed_init(&b);
    b.cfg.log_max_bytes = 256 << 10;
    node_up(&b);
    t_until(b.loop, b.joins == 1, WAIT_MS);
    b.mute_logs = true;
    start(&b, 0, "flood", "3000000");
    seat = seat_of(0);
    snprintf(out, sizeof(out), "%s/n-%s/w/%s-1/out", b.runtime, fl_short(id, &b.from.id),
             fl_short(wid, &seat.id));
    t_until(b.loop, stat(out, &st) == 0 && st.st_size > 3000000 && st.st_blocks * 512 <= 256 << 10,
            WAIT_MS);
    b.mute_logs = false;
    t_until(b.loop, logged(&b, "ready"), WAIT_MS);
    t_true(b.log.data[0] == '[', "%.80s", b.log.data);
    t_has(b.log.data, " bytes of output are gone");
    const char *line = strchr(b.log.data, '\n') + 1;

    t_true(line[0] == 'x' && line[1022] == 'x' && line[1023] == '\n',
           "it goes on with a whole line");
    t_int_eq(b.ends[0][1], st.st_size);
    bed_fini(&b);
}

static void an_end_does_not_wait_for_ever(void **state)
{
    struct bed b;

    (void)state;
    bed_join(&b);
    b.mute_logs = true;
    start(&b, 0, "exit", "0");
    t_until(b.loop, gone(&b, 0), WAIT_MS); /* after the 5 s that the protocol gives it */
    t_int_eq(b.log.len, 0);
    bed_fini(&b);
}

/* ---- devices -----------------------------------------------------------------------------------
 */

static void say_used(const char *path, const char *text)
{
    struct fl_err err;

    t_ok(fl_file_write(path, 0600, text, strlen(text), &err), &err);
}

/* The lease is free when the memory of the device is back, not when the process is gone. */
static void memory_of_a_device_comes_back(void **state)
{
    char used[300];
    struct bed b;

    (void)state;
    snprintf(used, sizeof(used), "%s", t_path("used"));
    setenv("FAKE_NVML_USED", used, 1);
    say_used(used, "0 1000000000");
    bed_init(&b);
    b.cfg.nvml = fake_nvml;
    node_up(&b);
    t_until(b.loop, b.joins == 1, WAIT_MS);
    t_int_eq(lease(&b, 41, 10000, 0), FL_OK);
    t_int_eq(lease_ids(&b, FL_LEASE_COMMIT, 41), FL_OK);
    t_int_eq(try_start(&b, 0, "wait", NULL, 41), FL_OK, "%s", b.st_err.text);
    t_until(b.loop, b.changes == 1, WAIT_MS);
    int pid = b.states[0]->pid;

    say_used(used, "0 9000000000");
    kill(pid, SIGKILL);
    t_until(b.loop, !alive(pid), WAIT_MS);
    for (unsigned i = 0; i < 5; i++)
        t_int_eq(lease(&b, 42, 15000, 0), FL_EXHAUSTED, "not free before the memory is back");
    t_true(!gone(&b, 0));
    say_used(used, "0 1000000000");
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(gone(&b, 0)->exit->device_bytes_left, 0);

    say_used(used, "0 0");
    t_int_eq(try_start(&b, 1, "wait", NULL, 41), FL_OK, "%s", b.st_err.text);
    t_until(b.loop, b.changes == 3, WAIT_MS);
    say_used(used, "0 5000000000"); /* and never back */
    kill(b.states[2]->pid, SIGKILL);
    t_until(b.loop, gone(&b, 1), WAIT_MS);
    t_int_eq(gone(&b, 1)->exit->device_bytes_left, 5000000000ll);
    bed_fini(&b);
    unsetenv("FAKE_NVML_USED");
}

static void strays_end_before_the_join(void **state)
{
    struct bed b;
    struct fl_err err;
    char path[400], id[FL_SHORT], wid[FL_SHORT];

    (void)state;
    bed_join(&b);
    start(&b, 0, "with-child", NULL);
    start(&b, 1, "wait", NULL);
    t_until(b.loop, b.changes == 2 && logged(&b, "ready"), WAIT_MS);
    int pids[] = { b.states[0]->pid, b.states[1]->pid };
    struct fl_seat_ref seat = seat_of(1);
    struct fl_node_id old = b.from.id;

    node_destroy(b.node); /* one spec becomes unreadable */
    snprintf(path, sizeof(path), "%s/n-%s/w/%s-1/worker", b.runtime, fl_short(id, &old),
             fl_short(wid, &seat.id));
    t_ok(fl_file_write(path, 0600, "rubbish", 7, &err), &err);
    node_up(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    t_int_eq(b.join->n_workers, 1);
    t_int_eq(b.join->workers[0]->rank, 0);
    t_true(!alive(b.states[0]->rank == 1 ? pids[0] : pids[1]));

    node_destroy(b.node); /* the state folder is lost: another id, and nothing of the old one */
    t_ok(fl_tree_remove(b.state, &err), &err);
    node_up(&b);
    t_until(b.loop, b.joins == 3, WAIT_MS);
    t_true(!FL_SAME(b.from.id, old));
    t_int_eq(b.from.start, 1);
    t_int_eq(b.join->n_workers, 0);
    t_true(!alive(pids[0]) && !alive(pids[1]));
    snprintf(path, sizeof(path), "%s/n-%s", b.runtime, fl_short(id, &old));
    t_true(access(path, F_OK) < 0, "%s is still there", path);
    bed_fini(&b);
}

/* ---- ends of the daemon ------------------------------------------------------------------------
 */

static void an_orderly_end_leaves_nothing(void **state)
{
    struct bed b;
    char dir[200], id[FL_SHORT];

    (void)state;
    bed_join(&b);
    start(&b, 0, "with-child", NULL);
    start(&b, 1, "wait", NULL);
    t_until(b.loop, b.changes == 2 && logged(&b, "ready"), WAIT_MS);
    bed_stop(&b);
    t_int_eq(b.end_st, FL_OK);
    t_int_eq(b.leaves, 1);
    t_true(gone(&b, 0) && gone(&b, 1));
    t_has(gone(&b, 0)->exit->why, "the test is over");
    snprintf(dir, sizeof(dir), "%s/n-%s", b.runtime, fl_short(id, &b.from.id));
    t_true(access(dir, F_OK) < 0, "%s is still there", dir);
    bed_fini(&b);
}

static void the_head_can_end_it(void **state)
{
    struct bed b;
    Fl__Shutdown m = FL__SHUTDOWN__INIT;

    (void)state;
    bed_join(&b);
    start(&b, 0, "wait", NULL);
    t_until(b.loop, b.changes == 1, WAIT_MS);
    m.why = (char *)(uintptr_t) "the cluster is shut down";
    m.has_term_ms = true;
    m.term_ms = 1000;
    t_int_eq(ask(&b, FL_NODE_SHUTDOWN, &m.base), FL_OK);
    t_until(b.loop, b.ended, WAIT_MS);
    t_int_eq(b.end_st, FL_OK);
    t_has(gone(&b, 0)->exit->why, "the cluster is shut down");
    node_destroy(b.node);
    b.node = NULL;
    bed_fini(&b);
}

static void a_start_that_cannot_be(void **state)
{
    struct bed b;
    struct fl_err err;
    struct node *second = NULL;

    (void)state;
    bed_init(&b); /* nobody answers */
    head_stop(&b);
    b.cfg.wait_s = 0;
    node_up(&b);
    t_until(b.loop, b.ended, WAIT_MS);
    t_int_eq(b.end_st, FL_UNREACHABLE);
    t_has(b.end_err.text, "no head at 127.0.0.1:");
    node_destroy(b.node);

    b.cfg.wait_s = 20; /* refused for good */
    b.ended = false;
    snprintf(b.target, sizeof(b.target), "127.0.0.1:0");
    head_start(&b);
    fl_fail(&b.refuse_join, FL_EXISTS, "node name node-a belongs to the node at 10.0.0.1 already");
    node_up(&b);
    t_until(b.loop, b.ended, WAIT_MS);
    t_int_eq(b.end_st, FL_EXISTS);
    t_has(b.end_err.text, "belongs to the node at 10.0.0.1");
    node_destroy(b.node);

    b.ended = false; /* not now: it comes again */
    fl_fail(&b.refuse_join, FL_AGAIN, "its holder is silent just now");
    node_up(&b);
    t_refused(node_create(b.loop, &b.cfg, on_ended, &b, &second, &err), FL_EXISTS, &err);
    t_has(err.text, "another daemon, pid");
    t_until(b.loop, b.join && b.up, WAIT_MS);
    b.refuse_join.status = FL_OK;
    t_until(b.loop, b.joins == 1, WAIT_MS);
    bed_fini(&b);
}

static void an_orphan_ends_when_told_to(void **state)
{
    struct bed b;

    (void)state;
    bed_init(&b);
    b.cfg.orphan_s = 1;
    node_up(&b);
    t_until(b.loop, b.joins == 1, WAIT_MS);
    start(&b, 0, "wait", NULL);
    t_until(b.loop, b.changes == 1, WAIT_MS);
    int pid = b.states[0]->pid;

    head_stop(&b);
    t_until(b.loop, b.ended, WAIT_MS);
    t_int_eq(b.end_st, FL_OK);
    t_true(!alive(pid));
    node_destroy(b.node);
    b.node = NULL;
    bed_fini(&b);
}

static void bad_orders_are_refused(void **state)
{
    struct bed b;
    Fl__WorkerSpec s = FL__WORKER_SPEC__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    uint8_t bytes[KEY] = { 0 };

    (void)state;
    bed_join(&b);
    who.worker = (ProtobufCBinaryData){ 28, bytes };
    s.who = &who;
    s.job = (ProtobufCBinaryData){ 4, bytes };
    s.job_name = (char *)(uintptr_t) "j";
    s.role = (char *)(uintptr_t) "trainer";
    s.world = 1;
    s.key = (ProtobufCBinaryData){ 31, bytes };
    t_int_eq(ask(&b, FL_WORKER_START, &s.base), FL_INVALID);
    t_has(b.st_err.text, "key of 31");
    s.key.len = 28;
    t_int_eq(ask(&b, FL_WORKER_START, &s.base), FL_INVALID);
    Fl__Shutdown junk = FL__SHUTDOWN__INIT;

    junk.why = (char *)(uintptr_t) "not a spec";
    t_int_eq(ask(&b, FL_WORKER_START, &junk.base), FL_CORRUPT);
    bed_fini(&b);
}

/* Each place that can fail while a worker starts: the head hears it, and nothing stays behind. */
static void faults_of_a_start(void **state)
{
    static const char *const points[] = {
        "node.pack:1=fail",   "node.pack:2=fail",       "node.pack:3=fail",   "node.worker:1=fail",
        "base.write:1=fail",  "base.fsync:1=fail",      "base.rename:1=fail", "node.follow:1=fail",
        "node.follow:2=fail", "node.env:1=fail",        "node.env:5=fail",    "node.seat:1=fail",
        "base.write:2=fail",  "proc.socketpair:1=fail", "proc.spawn:1=fail",  "proc.pidfd:1=fail",
    };
    struct bed b;
    char dir[300], id[FL_SHORT], wid[FL_SHORT];
    struct fl_err err;

    (void)state;
    bed_join(&b);
    struct fl_seat_ref seat = seat_of(0);

    snprintf(dir, sizeof(dir), "%s/n-%s/w/%s-1", b.runtime, fl_short(id, &b.from.id),
             fl_short(wid, &seat.id));
    for (size_t i = 0; i < FL_LEN(points); i++) {
        int fds = t_open_fds();

        t_ok(fl_fault_set(points[i], &err), &err);
        enum fl_status st = try_start(&b, 0, "exit", "0", 0);

        t_ok(fl_fault_set("", &err), &err);
        t_true(st != FL_OK, "%s", points[i]);
        t_true(b.st_err.text[0] != 0, "%s", points[i]);
        t_true(access(dir, F_OK) < 0, "%s leaves %s", points[i], dir);
        t_int_eq(t_open_fds(), fds, "%s: %s", points[i], b.st_err.text);
    }
    start(&b, 0, "exit", "0");
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    bed_fini(&b);
}

/* What fails while the daemon begins: one sentence, nothing open, nothing locked. */
static void faults_of_a_beginning(void **state)
{
    static const char *const points[] = { "node.inventory:1=fail", "base.write:1=fail",
                                          "base.fsync:1=fail",     "base.rename:1=fail",
                                          "base.write:2=fail",     "base.read:2=fail" };
    struct bed b;
    struct fl_err err;

    (void)state;
    bed_init(&b);
    for (size_t i = 0; i < FL_LEN(points); i++) {
        int fds = t_open_fds();
        struct node *n = NULL;

        b.cfg.address = b.target;
        t_ok(fl_fault_set(points[i], &err), &err);
        enum fl_status st = node_create(b.loop, &b.cfg, on_ended, &b, &n, &err);

        (void)fl_fault_set("", NULL);
        t_true(st != FL_OK && !n, "%s", points[i]);
        t_int_eq(t_open_fds(), fds, "%s: %s", points[i], err.text);
    }
    t_ok(fl_fault_set("node.inotify:1=fail,node.connect:1=fail,node.beat:1=fail", &err),
         &err); /* it goes on */
    node_up(&b);
    t_until(b.loop, b.joins == 1, WAIT_MS);
    (void)fl_fault_set("", NULL);
    start(&b, 0, "wait", NULL);
    t_until(b.loop, logged(&b, "ready"), WAIT_MS);
    bed_fini(&b);
}

static void end_all(void) /* whatever a failed test left */
{
    struct tree_pick mine = { .root = (int)getpid() };

    for (unsigned i = 0; i < 1000 && tree_signal(&mine, SIGKILL); i++)
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_joins),
        cmocka_unit_test(an_end_is_told_after_its_output),
        cmocka_unit_test(what_cannot_run_is_told_too),
        cmocka_unit_test(an_end_is_told_until_it_is_heard),
        cmocka_unit_test(a_stop_has_its_reason),
        cmocka_unit_test(a_new_head_finds_all_of_it),
        cmocka_unit_test(an_end_without_a_head_is_kept),
        cmocka_unit_test(a_new_daemon_adopts),
        cmocka_unit_test(a_fenced_node_ends_what_it_ran),
        cmocka_unit_test(an_older_head_is_not_joined),
        cmocka_unit_test(another_cluster_gets_nothing_of_the_last),
        cmocka_unit_test(leases_guard_workers),
        cmocka_unit_test(a_worker_speaks_through_its_daemon),
        cmocka_unit_test(output_that_was_given_back_is_named),
        cmocka_unit_test(an_end_does_not_wait_for_ever),
        cmocka_unit_test(memory_of_a_device_comes_back),
        cmocka_unit_test(strays_end_before_the_join),
        cmocka_unit_test(an_orderly_end_leaves_nothing),
        cmocka_unit_test(the_head_can_end_it),
        cmocka_unit_test(a_start_that_cannot_be),
        cmocka_unit_test(an_orphan_ends_when_told_to),
        cmocka_unit_test(bad_orders_are_refused),
        cmocka_unit_test(faults_of_a_start),
        cmocka_unit_test(faults_of_a_beginning),
    };

    if (argc != 4)
        return 2;
    fake_nvml = argv[3];
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    keeper_path = realpath(argv[1], NULL);
    victim_path = realpath(argv[2], NULL);
    int rc = t_run("node", tests);

    end_all();
    return rc;
}
