/* A daemon at its edges: devices, strays, its own end, faults. */
#include "tests/worker/bed.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/proto/methods.h"
#include "worker/keep/tree.h"
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

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

static const Fl__DeviceUse *only_use(const struct bed *b)
{
    return b->uses && b->uses->n_uses == 1 ? b->uses->uses[0] : NULL;
}

/* Who has a device open is what the driver says, and whose process that is the tree of processes. */
static void holders_of_a_device(void **state)
{
    char procs[300], line[64];
    struct bed b;

    (void)state;
    snprintf(procs, sizeof(procs), "%s", t_path("procs"));
    setenv("FAKE_NVML_PROCS", procs, 1);
    say_used(procs, "");
    bed_init(&b);
    b.cfg.nvml = fake_nvml;
    node_up(&b);
    t_until(b.loop, b.joins == 1 && b.uses, WAIT_MS);
    t_int_eq(b.uses->n_uses, 0, "nobody, and that is told");
    start(&b, 0, "wait", NULL);
    t_until(b.loop, b.changes == 1, WAIT_MS);
    snprintf(line, sizeof(line), "%d 4096", (int)b.states[0]->pid);
    say_used(procs, line);
    t_until(b.loop, only_use(&b) && only_use(&b)->who, WAIT_MS);
    t_int_eq(only_use(&b)->device, 1);
    t_int_eq(only_use(&b)->pid, b.states[0]->pid);
    t_int_eq(only_use(&b)->bytes, 4096);
    t_true(only_use(&b)->has_sm_pct && only_use(&b)->sm_pct == 0, "no sample of it: it is idle");
    snprintf(line, sizeof(line), "%d 4096 37", (int)b.states[0]->pid);
    say_used(procs, line);
    t_until(b.loop, only_use(&b) && only_use(&b)->sm_pct == 37, WAIT_MS);
    t_mem_eq(only_use(&b)->who->worker.data, b.states[0]->who->worker.data, sizeof(struct fl_worker_id));
    snprintf(line, sizeof(line), "%d -1", (int)getpid()); /* a stranger, on a device that does not count */
    say_used(procs, line);
    t_until(b.loop, only_use(&b) && !only_use(&b)->who, WAIT_MS);
    t_true(!only_use(&b)->has_bytes);
    node_destroy(b.node); /* whatever the pool does just now */
    node_up(&b);
    t_until(b.loop, b.joins == 2, WAIT_MS);
    bed_fini(&b);
    unsetenv("FAKE_NVML_PROCS");
}

/* A box that throttles says so while it does, and not when it has cooled down. */
static void a_slowed_device_is_told(void **state)
{
    char hot[300];
    struct bed b;

    (void)state;
    snprintf(hot, sizeof(hot), "%s", t_path("hot"));
    setenv("FAKE_NVML_HOT", hot, 1);
    bed_init(&b);
    b.cfg.nvml = fake_nvml;
    node_up(&b);
    t_until(b.loop, b.slowed_told, WAIT_MS);
    t_int_eq(b.n_slowed, 0, "the power cap slows nobody");
    say_used(hot, "");
    t_until(b.loop, b.n_slowed == 1, WAIT_MS);
    t_int_eq(b.slowed, 1);
    t_int_eq(unlink(hot), 0);
    t_until(b.loop, b.slowed_told && b.n_slowed == 0, WAIT_MS);
    bed_fini(&b);
    unsetenv("FAKE_NVML_HOT");
    bed_init(&b);
    b.cfg.nvml = fake_nvml;
    node_up(&b);
    t_until(b.loop, b.beats > 3, WAIT_MS);
    t_true(!b.slowed_told, "a driver that does not say");
    bed_fini(&b);
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

/* Who reads the log of a job that has ended reads all of it, however slow the head was. */
static void an_end_waits_for_much_output(void **state)
{
    enum { BYTES = 14 << 16 }; /* pieces of 64 KiB, each taken at the second try, 100 ms later */
    char bytes[16];
    struct bed b;

    (void)state;
    bed_init(&b);
    b.cfg.drain_ms = 700;
    node_up(&b);
    t_until(b.loop, b.joins == 1, WAIT_MS);
    b.slow_logs = true;
    snprintf(bytes, sizeof(bytes), "%d", BYTES);
    start(&b, 0, "pour", bytes);
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(b.log_at_gone, BYTES);
    bed_stop(&b);
    bed_fini(&b);
}

static void an_end_does_not_wait_for_ever(void **state)
{
    struct bed b;

    (void)state;
    bed_init(&b);
    b.cfg.drain_ms = 50;
    node_up(&b);
    t_until(b.loop, b.joins == 1, WAIT_MS);
    b.mute_logs = true;
    start(&b, 0, "pour", "2048");
    t_until(b.loop, gone(&b, 0), WAIT_MS);
    t_int_eq(b.log.len, 0);
    bed_stop(&b);
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
    struct fl_seat_ref seat = seat_of(0);
    struct bed b;
    char dir[300], id[FL_SHORT], wid[FL_SHORT];
    struct fl_err err;

    (void)state;
    bed_join(&b);

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

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_of_a_device_comes_back),
        cmocka_unit_test(holders_of_a_device),
        cmocka_unit_test(a_slowed_device_is_told),
        cmocka_unit_test(strays_end_before_the_join),
        cmocka_unit_test(an_orderly_end_leaves_nothing),
        cmocka_unit_test(an_end_waits_for_much_output),
        cmocka_unit_test(an_end_does_not_wait_for_ever),
        cmocka_unit_test(the_head_can_end_it),
        cmocka_unit_test(a_start_that_cannot_be),
        cmocka_unit_test(an_orphan_ends_when_told_to),
        cmocka_unit_test(bad_orders_are_refused),
        cmocka_unit_test(faults_of_a_start),
        cmocka_unit_test(faults_of_a_beginning),
    };

    if (!bed_args(argc, argv))
        return 2;
    int rc = t_run("node ends", tests);

    bed_end_all();
    return rc;
}
