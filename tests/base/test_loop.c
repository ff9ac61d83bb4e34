#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/loop.h"
#include "tests/t.h"

enum { MS = 1000000 };

static struct fl_held_clock held;

static struct fl_loop *loop_new(void)
{
    struct fl_loop *l = NULL;
    struct fl_err err = { 0 };

    held.now_ns = 1000;
    struct fl_clock clock = fl_held_clock(&held);
    t_ok(fl_loop_create(&clock, &l, &err), &err);
    return l;
}

/* ---- what ran, in order ---- */

static char said[256];

static void say(const char *word)
{
    strncat(said, word, sizeof(said) - strlen(said) - 1);
}

struct probe {
    const char *word;
    struct fl_loop *loop;
    struct fl_task task, *defer_too, *cancel;
    struct fl_timer timer, *cancel_timer;
    struct fl_watch *watch, **destroy_too;
    uint64_t again_in_ns, fired_at;
    bool post_again;
    int fd[2];
};

static void probe_run(struct fl_task *t)
{
    struct probe *p = container_of(t, struct probe, task);

    say(p->word);
    if (p->defer_too)
        fl_defer(p->loop, p->defer_too);
    if (p->cancel)
        fl_task_cancel(p->loop, p->cancel);
    if (p->post_again)
        fl_post(p->loop, t);
}

static void probe_fire(struct fl_timer *t, uint64_t now_ns)
{
    struct probe *p = container_of(t, struct probe, timer);

    say(p->word);
    p->fired_at = now_ns;
    if (p->cancel_timer)
        fl_timer_cancel(p->cancel_timer);
    if (p->again_in_ns != UINT64_MAX)
        fl_timer_arm(p->loop, t, now_ns + p->again_in_ns);
}

static void probe_ready(void *arg, unsigned events)
{
    struct probe *p = arg;

    say(p->word);
    t_true(events & POLLIN);
    if (p->destroy_too && *p->destroy_too) {
        fl_watch_destroy(*p->destroy_too);
        *p->destroy_too = NULL;
    }
}

static struct probe probe(struct fl_loop *l, const char *word)
{
    return (struct probe){ .word = word,
                           .loop = l,
                           .task.run = probe_run,
                           .timer.fire = probe_fire,
                           .again_in_ns = UINT64_MAX };
}

static void a_turn_has_an_order(void **state)
{
    struct fl_loop *l = loop_new();
    struct probe w = probe(l, "w"), p = probe(l, "p"), t = probe(l, "t"), d = probe(l, "d");
    struct fl_err err = { 0 };

    (void)state;
    said[0] = '\0';
    t_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, w.fd), 0);
    t_ok(fl_watch_create(l, w.fd[0], POLLIN, probe_ready, &w, &w.watch, &err), &err);
    t_int_eq(write(w.fd[1], "x", 1), 1);
    fl_defer(l, &d.task);
    fl_timer_arm(l, &t.timer, held.now_ns);
    t_true(fl_post(l, &p.task));
    t_true(!fl_post(l, &p.task), "is queued already");
    t_int_eq(fl_loop_turn(l, 0), 4);
    t_str_eq(said, "wptd");
    fl_watch_destroy(w.watch);
    close(w.fd[0]);
    close(w.fd[1]);
    fl_loop_destroy(l);
}

static void tasks_run_in_the_order_of_posting(void **state)
{
    struct fl_loop *l = loop_new();
    struct probe a = probe(l, "a"), b = probe(l, "b"), c = probe(l, "c"), d = probe(l, "d");

    (void)state;
    said[0] = '\0';
    fl_post(l, &a.task);
    b.task.next = &c.task;
    c.task.next = NULL;
    fl_post_chain(l, &b.task);
    fl_post(l, &d.task);
    t_int_eq(fl_loop_turn(l, 0), 4);
    t_str_eq(said, "abcd");

    said[0] = '\0';
    a.post_again = true; /* gives the rest of the loop a turn in between */
    fl_post(l, &a.task);
    fl_post(l, &b.task);
    t_int_eq(fl_loop_turn(l, -1), 2);
    t_int_eq(fl_loop_turn(l, -1), 1);
    a.post_again = false;
    fl_loop_turn(l, -1);
    t_str_eq(said, "abaa");
    fl_loop_destroy(l);
}

static void a_deferred_task_defers_to_the_next_turn(void **state)
{
    struct fl_loop *l = loop_new();
    struct probe a = probe(l, "a"), b = probe(l, "b");

    (void)state;
    said[0] = '\0';
    a.defer_too = &b.task;
    fl_defer(l, &a.task);
    fl_defer(l, &a.task); /* once */
    t_int_eq(fl_loop_turn(l, -1), 1);
    t_str_eq(said, "a");
    t_int_eq(fl_loop_turn(l, -1), 1); /* -1: what is deferred keeps the loop awake */
    t_str_eq(said, "ab");
    fl_loop_destroy(l);
}

static void a_cancelled_task_does_not_run(void **state)
{
    static const struct row {
        const char *name;
        bool by_defer, victim_by_defer, from_task;
    } rows[] = {
        { "posted, before the turn", false, false, false },
        { "deferred, before the turn", false, true, false },
        { "posted, by an earlier one", false, false, true },
        { "deferred, by a posted one", false, true, true },
        { "deferred, by a deferred one", true, true, true },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct fl_loop *l = loop_new();
        struct probe killer = probe(l, "k"), next = probe(l, "n");
        struct probe *victim = malloc(sizeof(*victim));

        *victim = probe(l, "v");
        said[0] = '\0';
        killer.cancel = rows[i].from_task ? &victim->task : NULL;
        rows[i].by_defer ? fl_defer(l, &killer.task) : (void)fl_post(l, &killer.task);
        rows[i].victim_by_defer ? fl_defer(l, &victim->task) : (void)fl_post(l, &victim->task);
        fl_post(l, &next.task);
        if (!rows[i].from_task) {
            fl_task_cancel(l, &victim->task);
            fl_task_cancel(l, &victim->task); /* idle is fine */
            free(victim);
            victim = NULL;
        }
        fl_loop_turn(l, 0);
        fl_loop_turn(l, 0);
        t_true(!strchr(said, 'v') && strchr(said, 'k') && strchr(said, 'n'), "%s: %s", rows[i].name,
               said);
        free(victim);
        fl_loop_destroy(l);
    }
}

static void timers_fire_by_time_then_by_order(void **state)
{
    struct fl_loop *l = loop_new();
    struct probe a = probe(l, "a"), b = probe(l, "b"), c = probe(l, "c"), d = probe(l, "d");

    (void)state;
    said[0] = '\0';
    fl_timer_arm(l, &c.timer, held.now_ns + 30);
    fl_timer_arm(l, &a.timer, held.now_ns + 10);
    fl_timer_arm(l, &b.timer, held.now_ns + 30);
    fl_timer_arm(l, &d.timer, held.now_ns + 5);
    fl_timer_arm(l, &d.timer, held.now_ns + 40); /* again: moves it */
    t_int_eq(fl_loop_turn(l, 0), 0);
    fl_loop_pass(l, &held, 29);
    t_str_eq(said, "a");
    t_int_eq(a.fired_at, 1010);
    fl_loop_pass(l, &held, 1);
    t_str_eq(said, "acb");
    fl_loop_pass(l, &held, 1000 * MS);
    t_str_eq(said, "acbd");
    t_int_eq(d.fired_at, 1040, "pass stops at each due time");
    t_true(!d.timer.loop);
    fl_loop_destroy(l);
}

static void a_cancelled_timer_does_not_fire(void **state)
{
    struct fl_loop *l = loop_new();
    struct probe a = probe(l, "a"), *b = malloc(sizeof(*b)), c = probe(l, "c");

    (void)state;
    *b = probe(l, "b");
    said[0] = '\0';
    fl_timer_arm(l, &a.timer, held.now_ns + 1);
    fl_timer_arm(l, &b->timer, held.now_ns + 1);
    fl_timer_arm(l, &c.timer, held.now_ns + 1);
    a.cancel_timer = &b->timer; /* both due in the same turn */
    a.again_in_ns = 0;          /* due at once, but in the next turn */
    held.now_ns += 5;
    t_int_eq(fl_loop_turn(l, 0), 2);
    t_str_eq(said, "ac");
    free(b);
    a.cancel_timer = NULL;
    t_int_eq(fl_loop_turn(l, 0), 1);
    fl_timer_cancel(&a.timer);
    fl_timer_cancel(&a.timer);
    t_int_eq(fl_loop_turn(l, 0), 0);
    fl_loop_destroy(l);
}

static int by_due(const void *a, const void *b)
{
    const struct fl_timer *x = *(struct fl_timer *const *)a, *y = *(struct fl_timer *const *)b;

    return x->due_ns != y->due_ns ? (x->due_ns < y->due_ns ? -1 : 1) : (x->seq < y->seq ? -1 : 1);
}

static struct fl_timer *fired[2000];
static size_t n_fired;

static void note_fired(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    fired[n_fired++] = t;
}

static void many_timers_agree_with_a_sorted_list(void **state)
{
    enum { N = FL_LEN(fired) };
    static struct fl_timer timers[N], *left[N];
    struct fl_loop *l = loop_new();
    uint64_t seed = 7;
    size_t n = 0;

    (void)state;
    n_fired = 0;
    for (size_t i = 0; i < N; i++) {
        timers[i].fire = note_fired;
        fl_timer_arm(l, &timers[i], held.now_ns + t_random(&seed) % 500);
    }
    for (size_t i = 0; i < N; i++) { /* a third goes, a third moves */
        size_t pick = t_random(&seed) % N;

        if (t_random(&seed) % 2)
            fl_timer_cancel(&timers[pick]);
        else
            fl_timer_arm(l, &timers[pick], held.now_ns + t_random(&seed) % 500);
    }
    for (size_t i = 0; i < N; i++)
        if (timers[i].loop)
            left[n++] = &timers[i];
    qsort(left, n, sizeof(left[0]), by_due);
    fl_loop_pass(l, &held, 500);
    t_int_eq(n_fired, n);
    t_mem_eq(fired, left, n * sizeof(left[0]), "order of %zu timers", n);
    fl_loop_destroy(l);
}

static void the_real_clock_fires_too(void **state)
{
    struct fl_loop *l = NULL;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    struct probe p = probe(l, "p");
    uint64_t start = fl_loop_now_ns(l);

    fl_timer_arm_in(l, &p.timer, 3);
    t_until(l, p.fired_at, 5000);
    t_true(p.fired_at >= start + 3 * MS);
    fl_loop_destroy(l);
}

static void a_watch_destroyed_in_the_turn_is_silent(void **state)
{
    struct fl_loop *l = loop_new();
    struct probe a = probe(l, "x"), b = probe(l, "x");
    struct fl_err err = { 0 };

    (void)state;
    said[0] = '\0';
    t_int_eq(pipe(a.fd), 0);
    t_int_eq(pipe(b.fd), 0);
    t_ok(fl_watch_create(l, a.fd[0], POLLIN, probe_ready, &a, &a.watch, &err), &err);
    t_ok(fl_watch_create(l, b.fd[0], POLLIN, probe_ready, &b, &b.watch, &err), &err);
    a.destroy_too = &b.watch; /* whichever comes first silences the other */
    b.destroy_too = &a.watch;
    t_int_eq(write(a.fd[1], "x", 1) + write(b.fd[1], "x", 1), 2);
    t_int_eq(fl_loop_turn(l, 0), 1);
    t_str_eq(said, "x");
    t_true(!a.watch != !b.watch);
    fl_watch_destroy(a.watch);
    fl_watch_destroy(b.watch);
    for (int i = 0; i < 2; i++) {
        close(a.fd[i]);
        close(b.fd[i]);
    }
    fl_loop_destroy(l);
}

static void a_silent_watch_neither_speaks_nor_spins(void **state)
{
    struct fl_loop *l = loop_new();
    struct probe p = probe(l, "p");
    struct fl_err err = { 0 };

    (void)state;
    said[0] = '\0';
    t_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, p.fd), 0);
    t_ok(fl_watch_create(l, p.fd[0], POLLIN, probe_ready, &p, &p.watch, &err), &err);
    fl_watch_events(p.watch, 0);
    t_int_eq(write(p.fd[1], "x", 1), 1);
    close(p.fd[1]); /* a hang-up, which epoll reports unasked */
    t_int_eq(fl_loop_turn(l, 0), 0);
    uint64_t before = fl_clock_boot_ns();
    t_int_eq(fl_loop_turn(l, 20), 0);
    t_true(fl_clock_boot_ns() - before >= 19 * MS, "the hang-up woke it again");
    fl_watch_events(p.watch, POLLIN);
    t_int_eq(fl_loop_turn(l, 0), 1);
    t_str_eq(said, "p");
    fl_watch_destroy(p.watch);
    close(p.fd[0]);
    fl_loop_destroy(l);
}

static void a_bad_descriptor_is_refused(void **state)
{
    struct fl_loop *l = loop_new();
    struct fl_watch *w = NULL;
    struct fl_err err = { 0 };

    (void)state;
    t_true(fl_watch_create(l, 999999, POLLIN, probe_ready, NULL, &w, &err) != FL_OK);
    t_has(err.text, "999999");
    t_true(!w);
    fl_loop_destroy(l);
}

static void a_loop_that_cannot_be_made_leaves_nothing(void **state)
{
    int fds = t_open_fds();
    enum fl_status st = FL_INTERNAL;
    unsigned nth = 1;

    (void)state;
    for (; st != FL_OK; nth++) {
        struct fl_loop *l = NULL;

        fl_fault_arm(nth);
        st = fl_loop_create(NULL, &l, NULL);
        fl_fault_disarm();
        t_true((st == FL_OK) == (l != NULL), "nth=%u", nth);
        fl_loop_destroy(l);
        t_int_eq(t_open_fds(), fds, "nth=%u", nth);
    }
    t_true(nth > 3, "the sweep met %u places", nth - 1);
}

/* ---- threads ---- */

struct counted {
    struct fl_task task;
    struct fl_loop *loop;
    unsigned *ran, all;
};

static void counted_run(struct fl_task *t)
{
    struct counted *c = container_of(t, struct counted, task);

    fl_loop_release(c->loop);
    if (++*c->ran == c->all)
        fl_loop_stop(c->loop);
}

struct poster {
    struct fl_loop *loop;
    struct counted *tasks;
    size_t n;
};

static void *poster_main(void *arg)
{
    struct poster *p = arg;

    for (size_t i = 0; i < p->n; i++)
        if (!fl_post(p->loop, &p->tasks[i].task))
            return arg;
    return NULL;
}

static void each_task_of_every_thread_runs_once(void **state)
{
    enum { THREADS = 4, EACH = 500 };
    static struct counted tasks[THREADS][EACH];
    struct fl_loop *l = loop_new();
    struct poster posters[THREADS];
    pthread_t threads[THREADS];
    unsigned ran = 0;
    void *failed;

    (void)state;
    for (int i = 0; i < THREADS; i++) {
        for (int k = 0; k < EACH; k++) {
            tasks[i][k] = (struct counted){ { .run = counted_run }, l, &ran, THREADS * EACH };
            fl_loop_hold(l);
        }
        posters[i] = (struct poster){ l, tasks[i], EACH };
        t_int_eq(pthread_create(&threads[i], NULL, poster_main, &posters[i]), 0);
    }
    fl_loop_run(l);
    t_int_eq(ran, THREADS * EACH);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &failed);
        t_true(!failed);
    }
    fl_loop_destroy(l);
}

struct job {
    struct fl_work work;
    struct fl_loop *loop;
    pthread_t on;
    bool ran, stop, blocked;
    unsigned done;
    enum fl_status st;
    int gate;
};

static void job_work(struct fl_work *w)
{
    struct job *j = container_of(w, struct job, work);
    sigset_t now;
    char c;

    if (j->gate >= 0)
        (void)!read(j->gate, &c, 1);
    pthread_sigmask(SIG_BLOCK, NULL, &now);
    j->blocked = sigismember(&now, SIGTERM) && sigismember(&now, SIGINT);
    j->on = pthread_self();
    j->ran = true;
}

static void job_done(struct fl_work *w, enum fl_status st)
{
    struct job *j = container_of(w, struct job, work);

    j->done++;
    j->st = st;
    if (j->stop)
        fl_loop_stop(j->loop);
}

static struct job job(struct fl_loop *l)
{
    return (struct job){ .work = { .work = job_work, .done = job_done }, .loop = l, .gate = -1 };
}

static void work_runs_elsewhere_and_comes_back_here(void **state)
{
    struct fl_loop *l = loop_new();
    struct job a = job(l), b = job(l);

    (void)state;
    fl_work_start(l, &a.work);
    fl_work_start(l, &b.work);
    fl_loop_stop(l); /* and yet it waits for the tags in flight */
    fl_loop_run(l);
    t_true(a.ran && b.ran && a.done == 1 && b.done == 1);
    t_int_eq(a.st, FL_OK);
    t_true(!pthread_equal(a.on, pthread_self()));
    t_true(a.blocked, "pool threads take no signals");
    t_true(!a.work.loop, "idle again");
    fl_loop_destroy(l);
}

static void a_loop_that_goes_brings_its_work_back(void **state)
{
    enum { N = 6 };
    struct fl_loop *l = loop_new();
    struct job jobs[N];
    int gate[2], begun = 0;

    (void)state;
    t_int_eq(pipe(gate), 0);
    for (int i = 0; i < N; i++) {
        jobs[i] = job(l);
        jobs[i].gate = gate[0];
        fl_work_start(l, &jobs[i].work);
    }
    t_int_eq(write(gate[1], "xxxxxx", N), N);
    fl_loop_destroy(l);
    for (int i = 0; i < N; i++) {
        t_int_eq(jobs[i].done, 1, "job %d", i);
        t_int_eq(jobs[i].st, jobs[i].ran ? FL_OK : FL_CANCELLED, "job %d", i);
        begun += jobs[i].ran;
    }
    t_true(begun <= N);
    close(gate[0]);
    close(gate[1]);
}

static void work_without_a_thread_says_so(void **state)
{
    struct fl_loop *l = loop_new();
    struct job a = job(l);

    (void)state;
    a.stop = true;
    fl_fault_arm(1);
    fl_work_start(l, &a.work);
    fl_fault_disarm();
    t_int_eq(a.done, 0, "never from inside the call");
    fl_loop_run(l);
    t_int_eq(a.st, FL_EXHAUSTED);
    t_true(!a.ran);
    fl_loop_destroy(l);
}

static void a_stopped_loop_runs_again(void **state)
{
    struct fl_loop *l = loop_new();

    (void)state;
    fl_loop_stop(l);
    fl_loop_run(l);
    struct job a = job(l);
    a.stop = true;
    fl_work_start(l, &a.work);
    fl_loop_run(l);
    t_int_eq(a.done, 1);
    fl_loop_destroy(l);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_turn_has_an_order),
        cmocka_unit_test(tasks_run_in_the_order_of_posting),
        cmocka_unit_test(a_deferred_task_defers_to_the_next_turn),
        cmocka_unit_test(a_cancelled_task_does_not_run),
        cmocka_unit_test(timers_fire_by_time_then_by_order),
        cmocka_unit_test(a_cancelled_timer_does_not_fire),
        cmocka_unit_test(many_timers_agree_with_a_sorted_list),
        cmocka_unit_test(the_real_clock_fires_too),
        cmocka_unit_test(a_watch_destroyed_in_the_turn_is_silent),
        cmocka_unit_test(a_silent_watch_neither_speaks_nor_spins),
        cmocka_unit_test(a_bad_descriptor_is_refused),
        cmocka_unit_test(a_loop_that_cannot_be_made_leaves_nothing),
        cmocka_unit_test(each_task_of_every_thread_runs_once),
        cmocka_unit_test(work_runs_elsewhere_and_comes_back_here),
        cmocka_unit_test(a_loop_that_goes_brings_its_work_back),
        cmocka_unit_test(work_without_a_thread_says_so),
        cmocka_unit_test(a_stopped_loop_runs_again),
    };

    return t_run("loop", tests);
}
