/* tests/worker/test_proc.c - worker processes live and end as proc.h says, with real keepers */
#include "tests/t.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "worker/keep/group.h"
#include "worker/keep/tree.h"
#include "worker/proc/keeper_priv.h"
#include "worker/proc/lost.h"
#include "worker/proc/record.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WAIT_MS = 20000, BOUND = 1 << 20 };

struct bed { /* one worker's life */
    struct fl_loop *loop;
    struct proc *proc;
    char dir[256], out[300], err[300];
    int pid, n_started, n_gone;
    struct proc_exit exit;
};

static const char *keeper_path, *victim_path, *needy_path, *needy_program;
static unsigned n_beds;

static void on_started(void *arg, struct proc *p, int pid)
{
    struct bed *b = arg;

    (void)p;
    b->pid = pid;
    b->n_started++;
}

static void on_gone(void *arg, struct proc *p, const struct proc_exit *x)
{
    struct bed *b = arg;

    t_true(p == b->proc || !b->proc);
    b->exit = *x;
    b->n_gone++;
    b->proc = NULL;
}
static const struct proc_user user = { .started = on_started, .gone = on_gone };

static struct fl_seat_ref seat_of(unsigned n)
{
    struct fl_seat_ref who = { .attempt = n };

    memset(&who.id, 0xa5, sizeof(who.id));
    memcpy(&who.id, &n, sizeof(n));
    int pid = (int)getpid();

    memcpy((uint8_t *)&who.id + 4, &pid, sizeof(pid)); /* the mark is this run's alone */
    return who;
}

static void bed_init(struct bed *b)
{
    struct fl_err err;

    *b = (struct bed){ 0 };
    t_ok(fl_loop_create(NULL, &b->loop, &err), &err);
    snprintf(b->dir, sizeof(b->dir), "%s/p%d-%u", t_tmp(), (int)getpid(), ++n_beds);
    snprintf(b->out, sizeof(b->out), "%s/out", b->dir);
    snprintf(b->err, sizeof(b->err), "%s/err", b->dir);
    t_true(mkdir(b->dir, 0700) == 0);
}

static void bed_fini(struct bed *b)
{
    if (b->proc)
        proc_keeper.forget(b->proc);
    fl_loop_destroy(b->loop);
}

struct how {
    const char *word, *arg, *path; /* path: instead of the victim */
    uint32_t term_ms, kill_ms, orphan_ms;
    uint64_t memory, log;
    const char *cwd;
    int seat_fd;
    const char *preload; /* LD_PRELOAD=... */
    const char *script;  /* a shell's, instead of all of it */
    int stop_signal;
};

static enum fl_status bed_try(struct bed *b, struct how h, struct fl_err *err)
{
    const char *argv[] = { h.path ? h.path : victim_path, h.word, h.arg, NULL };
    const char *shell[] = { "/bin/sh", "-c", h.script, NULL };
    const char *env[] = { "PATH=/usr/bin:/bin", "HELLO=there", h.preload, NULL };
    struct proc_spec s = {
        .who = seat_of(n_beds),
        .keeper = keeper_path,
        .argv = h.script ? shell : argv,
        .env = env,
        .cwd = h.cwd,
        .dir = b->dir,
        .out_path = b->out,
        .err_path = b->err,
        .memory_max_bytes = h.memory,
        .log_max_bytes = h.log ? h.log : BOUND,
        .term_ms = h.term_ms ? h.term_ms : 5000,
        .kill_ms = h.kill_ms ? h.kill_ms : 5000,
        .orphan_ms = h.orphan_ms,
        .stop_signal = h.stop_signal,
        .seat_fd = h.seat_fd ? h.seat_fd : -1,
    };

    return proc_keeper.start(b->loop, &s, &user, b, &b->proc, err);
}

static void bed_start(struct bed *b, struct how h)
{
    struct fl_err err;

    bed_init(b);
    t_ok(bed_try(b, h, &err), &err);
}

static char *slurp(const char *path, size_t *len) /* "" when it is not there */
{
    char *text = NULL;

    if (fl_file_read(path, 64 << 20, &text, len, NULL) != FL_OK) {
        text = calloc(1, 1);
        *len = 0;
    }
    if (!text)
        abort();
    return text;
}

static int said_ready(const struct bed *b) /* the pid that said it, or 0 */
{
    size_t len;
    char *text = slurp(b->out, &len);
    const char *at = memmem(text, len, "ready ", 6); /* what was given back reads as zeros */
    int pid = at && strchr(at, '\n') ? atoi(at + 6) : 0;

    free(text);
    return pid;
}

static bool alive(int pid)
{
    struct tree_stat st;

    return pid > 0 && tree_stat(pid, &st) && st.state != 'Z';
}

static int keeper_of(int pid)
{
    struct tree_stat st;

    return tree_stat(pid, &st) ? st.ppid : 0;
}

static void ends_are_named(void **state)
{
    static const struct row {
        const char *name;
        struct how how;
        enum proc_cause cause;
        int code, sig;
        const char *why, *last;
    } rows[] = {
        { "zero", { "exit", "0" }, PROC_EXITED, 0, 0, "exit code 0", "leaving with 0\n" },
        { "seven", { "exit", "7" }, PROC_EXITED, 7, 0, "exit code 7 after", "leaving with 7\n" },
        { "137 is a code here",
          { "exit", "137" },
          PROC_EXITED,
          137,
          0,
          "exit code 137",
          "leaving" },
        { "segv", { "signal", "11" }, PROC_SIGNALLED, -1, 11, "signal 11 (SEGV)", "" },
        { "kill by itself", { "signal", "9" }, PROC_SIGNALLED, -1, 9, "signal 9 (KILL)", "" },
        { "no such program",
          { .path = "/nowhere/prog" },
          PROC_EXEC_FAILED,
          -1,
          0,
          "cannot execute /nowhere/prog: No such file or directory (errno 2)",
          "" },
        { "no right",
          { .path = "/etc/passwd" },
          PROC_EXEC_FAILED,
          -1,
          0,
          "cannot execute /etc/passwd: Permission denied (errno 13)",
          "" },
        { "no folder",
          { "exit", "0", .cwd = "/nowhere" },
          PROC_EXEC_FAILED,
          -1,
          0,
          "cannot enter the working folder /nowhere: No such",
          "" },
        { "found by PATH", { .path = "false" }, PROC_EXITED, 1, 0, "exit code 1", "" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        const struct row *r = &rows[i];
        struct bed b;

        bed_start(&b, r->how);
        t_until(b.loop, b.n_gone, WAIT_MS);
        t_int_eq(b.exit.cause, r->cause, "%s: %s", r->name, b.exit.why);
        t_int_eq(b.exit.code, r->code, "%s", r->name);
        t_int_eq(b.exit.signal, r->sig, "%s", r->name);
        t_int_eq(b.n_started, r->cause != PROC_EXEC_FAILED, "%s", r->name);
        t_has(b.exit.why, r->why ? r->why : "");
        t_has(b.exit.last, r->last ? r->last : "");
        t_int_eq(b.exit.tree_left, 0, "%s", r->name);
        t_true(b.exit.peak_bytes > 0 || r->cause == PROC_EXEC_FAILED, "%s", r->name);
        bed_fini(&b);
    }
}

/* A library that is not there, and one that lacks another: refused before the worker starts, by the
 * name that is missing. What only the worker itself lacks ends it with 127, which is the loader's.
 */
static void p92_a_library_that_cannot_be_preloaded(void **state)
{
    struct bed b;
    char lacks[600];

    (void)state;
    bed_start(&b, (struct how){ "exit", "0", .preload = "LD_PRELOAD=/nowhere/libsaver.so" });
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.cause, PROC_EXEC_FAILED);
    t_int_eq(b.n_started, 0, "it has not begun");
    t_has(b.exit.why, "LD_PRELOAD=/nowhere/libsaver.so cannot be loaded");
    t_has(b.exit.why, "cannot open shared object file");
    bed_fini(&b);
    snprintf(lacks, sizeof(lacks), "LD_PRELOAD=%s", needy_path);
    bed_start(&b, (struct how){ "exit", "0", .preload = lacks });
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.cause, PROC_EXEC_FAILED, "%s", b.exit.why);
    t_has(b.exit.why, "libnobody_has_this.so.12: cannot open shared object file");
    bed_fini(&b);
    bed_start(&b, (struct how){ .path = needy_program });
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.code, 127);
    t_has(b.exit.why, "the loader has no libnobody_has_this.so.12");
    bed_fini(&b);
    bed_start(&b, (struct how){ .path = "true", .preload = "LD_PRELOAD=libc.so.6" }); /* harmless */
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.code, 0, "%s", b.exit.why);
    bed_fini(&b);
}

static void nobody_is_left_behind(void **state)
{
    static const char *const words[] = { "leave-child", "with-child" };

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct bed b;

        bed_start(&b, (struct how){ words[i], "3", .term_ms = 50 });
        t_until(b.loop, said_ready(&b) || b.n_gone, WAIT_MS);
        int child = said_ready(&b);

        t_true(child > 0);
        if (i == 1)
            proc_keeper.stop(b.proc, PROC_STOPPED, "asked by the test", 50);
        t_until(b.loop, b.n_gone, WAIT_MS);
        t_true(!alive(child), "%s: %d lives on", words[i], child);
        t_int_eq(b.exit.cause, i ? PROC_STOPPED : PROC_EXITED, "%s", words[i]);
        t_int_eq(b.exit.tree_ended, 1, "%s: %s", words[i], b.exit.why);
        t_has(b.exit.why, i ? "asked by the test" : "exit code 3");
        bed_fini(&b);
    }
}

static void the_stubborn_are_killed(void **state)
{
    struct bed b;

    (void)state;
    bed_start(&b, (struct how){ "stubborn", .term_ms = 30 });
    t_until(b.loop, said_ready(&b), WAIT_MS);
    proc_keeper.stop(b.proc, PROC_GUARD, "over its share", 30);
    proc_keeper.stop(b.proc, PROC_STOPPED, "a second word changes nothing", 1000);
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.cause, PROC_GUARD);
    t_int_eq(b.exit.signal, SIGKILL);
    t_has(b.exit.why, "over its share");
    t_has(b.exit.why, "after it was asked to go");
    bed_fini(&b);
}

/* A shell in front dies by the first SIGTERM; the program behind it needs its time all the same. */
static void a_stop_waits_for_the_whole_tree(void **state)
{
    char script[600];
    struct bed b;

    (void)state;
    snprintf(script, sizeof(script), "trap 'exit 0' TERM; %s saver & wait; wait", victim_path);
    bed_start(&b, (struct how){ .script = script, .term_ms = 10000, .kill_ms = 1000 });
    t_until(b.loop, said_ready(&b), WAIT_MS);
    proc_keeper.stop(b.proc, PROC_STOPPED, NULL, 10000);
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.tree_ended, 0, "it left by itself: %s", b.exit.why);
    t_true(b.exit.lived_ms < 10000);
    bed_fini(&b);
}

/* RAY_JOB_STOP_SIGNAL: what a stop sends first. */
static void a_stop_begins_with_the_signal_of_the_spec(void **state)
{
    static const struct {
        int signal, code;
    } rows[] = { { 0, 43 }, { SIGTERM, 43 }, { SIGINT, 42 } };
    static const char script[] =
        "trap 'exit 42' INT; trap 'exit 43' TERM; echo ready $$; while :; do sleep 0.01; done";

    (void)state;
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        struct bed b;

        bed_start(&b, (struct how){ .script = script,
                                    .term_ms = 10000,
                                    .kill_ms = 1000,
                                    .stop_signal = rows[i].signal });
        t_until(b.loop, said_ready(&b), WAIT_MS);
        proc_keeper.stop(b.proc, PROC_STOPPED, NULL, 10000);
        t_until(b.loop, b.n_gone, WAIT_MS);
        t_int_eq(b.exit.code, rows[i].code, "row %u: %s", i, b.exit.why);
        bed_fini(&b);
    }
}

static void a_lost_keeper_takes_its_tree_along(void **state)
{
    struct bed b;

    (void)state;
    bed_start(&b, (struct how){ "with-child", NULL });
    t_until(b.loop, b.n_started && said_ready(&b), WAIT_MS);
    int child = said_ready(&b), keeper = keeper_of(b.pid), worker = b.pid;

    t_true(keeper > 1);
    kill(keeper, SIGKILL);
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_true(!alive(child) && !alive(worker));
    t_int_eq(b.exit.cause, PROC_KEEPER_LOST);
    t_has(b.exit.why, "keeper");
    struct proc_exit again;
    struct fl_err err;

    t_ok(proc_record_read(b.dir, &again, &err), &err); /* for a daemon that starts after this */
    t_int_eq(again.cause, PROC_KEEPER_LOST);
    bed_fini(&b);
}

static void a_hanging_keeper_cannot_hold_a_stop_up(void **state)
{
    struct bed b;
    struct fl_err err;

    (void)state;
    bed_init(&b);
    setenv("FURLONG_FAULT", "keep.started:1=stop", 1);
    t_ok(bed_try(&b, (struct how){ "wait", .term_ms = 1, .kill_ms = 1 }, &err), &err);
    unsetenv("FURLONG_FAULT");
    t_until(b.loop, said_ready(&b), WAIT_MS);
    proc_keeper.stop(b.proc, PROC_STOPPED, "the job ended", 1);
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.cause, PROC_STOPPED);
    t_has(b.exit.why, "the job ended");
    bed_fini(&b);
}

static void a_new_daemon_adopts(void **state)
{
    struct bed b;
    struct fl_err err;

    (void)state;
    bed_start(&b, (struct how){ "wait", NULL });
    t_until(b.loop, b.n_started, WAIT_MS);
    int pid = b.pid;

    proc_keeper.forget(b.proc);
    b.proc = NULL;
    b.n_started = b.pid = 0;
    t_true(alive(pid));
    t_ok(proc_keeper.adopt(b.loop, b.dir, &user, &b, &b.proc, &err), &err);
    t_until(b.loop, b.n_started, WAIT_MS);
    t_int_eq(b.pid, pid);
    proc_keeper.stop(b.proc, PROC_STOPPED, "by its second daemon", 5000);
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_has(b.exit.why, "by its second daemon");
    t_int_eq(b.exit.who.attempt, n_beds);
    bed_fini(&b);
}

static void an_end_that_nobody_saw_is_read(void **state)
{
    struct bed b;
    struct fl_err err;
    struct stat st;
    char record[300];

    (void)state;
    bed_start(&b, (struct how){ "wait", NULL });
    t_until(b.loop, b.n_started, WAIT_MS);
    proc_keeper.forget(b.proc);
    b.proc = NULL;
    kill(b.pid, SIGUSR1);
    snprintf(record, sizeof(record), "%s/exit", b.dir);
    t_until(b.loop, stat(record, &st) == 0, WAIT_MS);
    t_ok(proc_keeper.adopt(b.loop, b.dir, &user, &b, &b.proc, &err), &err);
    t_int_eq(b.n_gone, 0, "never from inside adopt");
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.cause, PROC_SIGNALLED);
    t_int_eq(b.exit.signal, SIGUSR1);
    bed_fini(&b);
}

/* Nobody adopts: the keeper ends its tree itself, and says why. */
static void an_orphan_ends_by_itself(void **state)
{
    struct bed b;
    struct fl_err err;
    struct stat st;
    char record[300];

    (void)state;
    bed_start(&b, (struct how){ "with-child", NULL, .orphan_ms = 50, .term_ms = 1 });
    t_until(b.loop, b.n_started && said_ready(&b), WAIT_MS);
    proc_keeper.forget(b.proc);
    b.proc = NULL;
    snprintf(record, sizeof(record), "%s/exit", b.dir);
    t_until(b.loop, stat(record, &st) == 0, WAIT_MS);
    t_ok(proc_keeper.adopt(b.loop, b.dir, &user, &b, &b.proc, &err), &err);
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.cause, PROC_STOPPED);
    t_has(b.exit.why, "its daemon was away");
    t_int_eq(b.exit.tree_left, 0);
    bed_fini(&b);
}

static void a_folder_without_keeper_or_record(void **state)
{
    struct bed b;
    struct fl_err err;

    (void)state;
    bed_start(&b, (struct how){ "with-child", NULL });
    t_until(b.loop, b.n_started && said_ready(&b), WAIT_MS);
    int child = said_ready(&b), keeper = keeper_of(b.pid);

    proc_keeper.forget(b.proc);
    b.proc = NULL;
    kill(keeper, SIGKILL);
    t_ok(proc_keeper.adopt(b.loop, b.dir, &user, &b, &b.proc, &err), &err);
    t_until(b.loop, b.n_gone, WAIT_MS);
    t_int_eq(b.exit.cause, PROC_KEEPER_LOST);
    t_true(!alive(child));
    bed_fini(&b);
}

static void nothing_is_inherited_unseen(void **state)
{
    struct bed b;
    int seat = memfd_create("seat", MFD_CLOEXEC), leak = open("/dev/null", O_RDONLY);

    (void)state;
    bed_start(&b, (struct how){ "fds", .seat_fd = seat });
    t_until(b.loop, b.n_gone, WAIT_MS);
    size_t len;
    char *text = slurp(b.out, &len);

    t_str_eq(text, "0 1 2 3 \n");
    free(text);
    bed_fini(&b);
    bed_start(&b, (struct how){ "env", NULL });
    t_until(b.loop, b.n_gone, WAIT_MS);
    text = slurp(b.out, &len);
    t_true(!strncmp(text, "PATH=/usr/bin:/bin\nHELLO=there\n" PROC_MARK "=", 42), "%s", text);
    t_int_eq(strchr(strstr(text, PROC_MARK), '\n')[1], 0, "%s", text);
    free(text);
    bed_fini(&b);
    close(seat);
    close(leak);
}

static void output_is_bounded(void **state)
{
    struct bed b;
    struct stat st;

    (void)state;
    bed_start(&b, (struct how){ "flood", "6000000" });
    t_until(b.loop, said_ready(&b), WAIT_MS);
    t_until(b.loop, stat(b.out, &st) == 0 && st.st_blocks * 512 <= BOUND, WAIT_MS);
    proc_keeper.stop(b.proc, PROC_STOPPED, NULL, 10000);
    t_until(b.loop, b.n_gone, WAIT_MS);
    bed_fini(&b);
}

static void a_memory_limit_is_named(void **state)
{
    struct bed b;

    (void)state;
    bed_start(&b, (struct how){ "eat", "268435456", .memory = 64 << 20 });
    t_until(b.loop, b.n_gone, WAIT_MS);
    if (b.exit.cause == PROC_EXITED) {
        bed_fini(&b);
        t_skip("no writable memory cgroup here");
    }
    t_int_eq(b.exit.cause, PROC_CGROUP_OOM, "%s", b.exit.why);
    t_has(b.exit.why, "limit of 64 MiB");
    bed_fini(&b);
}

static bool group_left(const struct bed *b)
{
    struct group g;
    char name[64];

    snprintf(name, sizeof(name), "furlong-%.24s", strrchr(b->dir, '/') + 1);
    group_find(&g, name);
    return g.unified[0] || g.freezer[0] || g.memory[0];
}

static void faults_leave_nothing(void **state)
{
    int fds = 0;
    enum fl_status st = FL_INTERNAL;

    (void)state;
    for (unsigned nth = 1; st != FL_OK && nth < 64; nth++) {
        struct fl_err err = { 0 };
        struct bed b;

        bed_init(&b);
        fds = t_open_fds();
        fl_fault_arm(nth);
        st = bed_try(&b, (struct how){ "exit", "0" }, &err);
        fl_fault_disarm();
        t_true((st == FL_OK) == (b.proc != NULL), "nth=%u", nth);
        if (st == FL_OK)
            t_until(b.loop, b.n_gone, WAIT_MS);
        else
            t_true(err.text[0] != 0, "nth=%u", nth);
        t_int_eq(t_open_fds(), fds, "nth=%u %s", nth, err.text);
        t_true(!group_left(&b), "nth=%u leaves a cgroup", nth);
        bed_fini(&b);
    }
    t_int_eq(st, FL_OK);
}

/* Each place of the keeper, failed from outside: an end comes, with a sentence. */
static void a_keepers_own_failures(void **state)
{
    static const char *const points[] = { "keep.listen:1=fail", "keep.fork:1=fail",
                                          "keep.exec:1=fail",   "keep.record:1=fail",
                                          "keep.record:1=kill", "keep.started:1=kill" };

    (void)state;
    static const char *const says[] = { "cannot listen at", "cannot fork", "cannot execute",
                                        "no exit record",   "was killed",  "was killed" };
    for (size_t i = 0; i < FL_LEN(points); i++) {
        struct bed b;
        struct fl_err err;

        bed_init(&b);
        setenv("FURLONG_FAULT", points[i], 1);
        t_ok(bed_try(&b, (struct how){ "exit", "0" }, &err), &err);
        unsetenv("FURLONG_FAULT");
        t_until(b.loop, b.n_gone, WAIT_MS);
        t_int_eq(b.exit.cause, i < 3 ? PROC_EXEC_FAILED : PROC_KEEPER_LOST, "%s: %s", points[i],
                 b.exit.why);
        t_has(b.exit.why, says[i]);
        bed_fini(&b);
    }
}

/* Whatever a failed test left: keepers are our children, and what they leave becomes ours. */
static void end_all(void)
{
    struct tree_pick mine = { .root = (int)getpid() };

    for (unsigned i = 0; i < 1000 && tree_signal(&mine, SIGKILL); i++)
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(ends_are_named),
        cmocka_unit_test(p92_a_library_that_cannot_be_preloaded),
        cmocka_unit_test(nobody_is_left_behind),
        cmocka_unit_test(the_stubborn_are_killed),
        cmocka_unit_test(a_stop_waits_for_the_whole_tree),
        cmocka_unit_test(a_stop_begins_with_the_signal_of_the_spec),
        cmocka_unit_test(a_lost_keeper_takes_its_tree_along),
        cmocka_unit_test(a_hanging_keeper_cannot_hold_a_stop_up),
        cmocka_unit_test(a_new_daemon_adopts),
        cmocka_unit_test(an_end_that_nobody_saw_is_read),
        cmocka_unit_test(an_orphan_ends_by_itself),
        cmocka_unit_test(a_folder_without_keeper_or_record),
        cmocka_unit_test(nothing_is_inherited_unseen),
        cmocka_unit_test(output_is_bounded),
        cmocka_unit_test(a_memory_limit_is_named),
        cmocka_unit_test(faults_leave_nothing),
        cmocka_unit_test(a_keepers_own_failures),
    };

    if (argc != 5)
        return 2;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    keeper_path = realpath(argv[1], NULL); /* workers start in another folder */
    victim_path = realpath(argv[2], NULL);
    needy_path = realpath(argv[3], NULL);
    needy_program = realpath(argv[4], NULL);
    int rc = t_run("proc", tests);

    end_all();
    return rc;
}
