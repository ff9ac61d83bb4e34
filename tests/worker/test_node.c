/* A daemon in its life: it joins, runs, is left by its head, and is adopted. */
#include "tests/worker/bed.h"
#include "common/base/id.h"
#include "common/proto/methods.h"
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "worker/node/node_priv.h"

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

static sem_t server_back;

static int dead_file_system(const char *path, struct statvfs *v)
{
    (void)path;
    sem_wait(&server_back);
    memset(v, 0, sizeof(*v));
    return 0;
}

static void a_dead_file_system_holds_no_daemon_up(void **state)
{
    struct bed b;

    (void)state;
    sem_init(&server_back, 0, 0);
    bed_init(&b);
    b.cfg.room = dead_file_system;
    node_up(&b);
    t_until(b.loop, b.joins && b.beats > 2, WAIT_MS);
    start(&b, 0, "exit", "7");
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    bed_fini(&b); /* nor its end */
    sem_post(&server_back);
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

static void fenced_node(bool told)
{
    struct bed b;

    bed_join(&b);
    t_int_eq(lease(&b, 41, 10000, 0), FL_OK);
    t_int_eq(lease_ids(&b, FL_LEASE_COMMIT, 41), FL_OK);
    start(&b, 0, "with-child", NULL);
    t_until(b.loop, b.changes == 1 && logged(&b, "ready"), WAIT_MS);
    int pid = b.states[0]->pid, child = atoi(strstr(b.log.data, "ready ") + 6);

    if (told) {
        t_int_eq(call_event(b.up, FL_NODE_FENCED, 0, (struct fl_bytes){ 0 }, NULL), FL_OK);
        t_until(b.loop, b.joins == 2, WAIT_MS);
    } else {
        b.fence_next = true;
        head_restart(&b);
        t_until(b.loop, b.joins == 3, WAIT_MS);
    }
    t_true(!alive(pid) && !alive(child));
    t_int_eq(b.from.start, 2);
    t_int_eq(b.join->n_workers, 0);
    t_int_eq(b.join->n_leases, 0);
    t_int_eq(b.changes, 1, "what was fenced is not reported");
    bed_fini(&b);
}

static void a_fenced_node_ends_what_it_ran(void **state)
{
    (void)state;
    fenced_node(false); /* hears so when it comes back */
    fenced_node(true);  /* its head still reaches it   */
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
    uint32_t first = b.prepared->ports[0], second = b.prepared->ports[1];

    t_int_eq(lease(&b, 44, 1, 1), FL_OK);
    t_true(b.prepared->ports[0] != first && b.prepared->ports[0] != second,
           "%u is given to another group", b.prepared->ports[0]); /* one below may have come free meanwhile */
    t_int_eq(lease_ids(&b, FL_LEASE_RELEASE, 44), FL_OK);
    t_int_eq(try_start(&b, 0, "wait", NULL, 41), FL_STALE, "prepared is not enough");
    t_int_eq(lease_ids(&b, FL_LEASE_COMMIT, 41), FL_OK);
    t_int_eq(try_start(&b, 0, "wait", NULL, 41), FL_OK);
    t_until(b.loop, b.changes == 1, WAIT_MS);
    int pid = b.states[0]->pid;

    t_int_eq(lease(&b, 42, 15000, 0), FL_EXHAUSTED);
    t_int_eq(lease_ids(&b, FL_LEASE_RELEASE, 41), FL_OK);
    t_true(!alive(pid), "answered when nothing runs on it any more");
    t_int_eq(lease(&b, 42, 15000, 1), FL_OK);
    t_int_eq(b.node->n_holds, 1);
    b.end_lease = 42;
    head_restart(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    t_until(b.loop, b.node->n_holds == 0, WAIT_MS); /* though nobody asks for anything */
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

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_joins),
        cmocka_unit_test(a_dead_file_system_holds_no_daemon_up),
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
    };

    if (!bed_args(argc, argv))
        return 2;
    int rc = t_run("node", tests);

    bed_end_all();
    return rc;
}
