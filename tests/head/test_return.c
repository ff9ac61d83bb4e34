/* The head comes back: on its own journal, and on an older copy of it. */
#include "tests/head/run.h"

#include <stdlib.h>

static void a_run_does_not_notice_a_new_head(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "comeback", 2, 2);
    Fl__Layout *y = place(&x, split_2_2, 4), *again;
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 1));
    uint64_t term = x.rig.head->term.head;
    head_away(&x);
    rig_open_head(&x.rig);
    t_int_eq(x.rig.head->term.head, term + 1);
    rig_turns(&x.rig, 4);
    t_int_eq(x.rig.head->state, HEAD_RECOVERING, "two nodes must report");
    fake_again(&x.a);
    rig_turns(&x.rig, 4);
    t_int_eq(x.rig.head->state, HEAD_RECOVERING, "one is missing");
    fake_again(&x.b);
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    t_int_eq(x.a.n_leases + x.b.n_leases, 4);
    t_int_eq(x.a.n_workers, 3);
    t_int_eq(x.a.workers[0].starts + x.a.workers[1].starts + x.a.workers[2].starts, 3,
             "nothing started twice");
    t_int_eq(x.a.stops, 0);
    again = place(&x, split_2_2, 4);
    t_true(same_bytes(&y->group, &again->group));
    fake_exit(&x.a, x.driver, 0);
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0)->stop_asked);
    fake_exit(&x.a, fake_worker(&x.a, "trainer", 0), 0);
    fake_exit(&x.a, fake_worker(&x.a, "trainer", 1), 0);
    UNTIL(&x.rig, job(&x.rig, x.job)->rec->cleaned);
    free_msg(y);
    free_msg(again);
    run_end(&x);
}

/* The same journal; every worker lives on, and node a tells of it. */
static void new_head(struct run *x)
{
    head_away(x);
    rig_open_head(&x->rig);
    fake_again(&x->a);
    UNTIL(&x->rig, x->rig.head->state == HEAD_READY);
}

static void what_ended_meanwhile_is_heard_on_return(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "meanwhile", 0, 0);
    head_away(&x);
    rig_open_head(&x.rig);
    fake_again(&x.a);
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    fake_exit(&x.a, x.driver, 5); /* kept by the daemon until it is acknowledged */
    UNTIL(&x.rig, job_over(job(&x.rig, x.job)));
    t_int_eq(job(&x.rig, x.job)->rec->exit_code, 5);
    run_end(&x);
}

static void nothing_submitted_is_lost(void **unused)
{
    struct rig r;
    struct fake a;
    char ids[5][64];

    (void)unused;
    rig_start(&r, "submitted", NULL);
    for (int i = 0; i < 5; i++)
        snprintf(ids[i], sizeof(ids[i]), "%s", submit(&r, "true", NULL));
    rig_again(&r);
    for (int i = 0; i < 5; i++)
        t_int_eq(job(&r, ids[i])->rec->status, FL__JOB_STATUS__JOB_PENDING);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    UNTIL(&r, a.n_workers == 5);
    t_true(!FL_SAME(a.workers[0].job, a.workers[1].job), "ids are not given twice");
    fake_down(&a);
    rig_end(&r);
}

static void a_missing_node_is_given_up_by_a_new_head(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "giveup", 2, 2);
    head_away(&x);
    rig_open_head(&x.rig);
    fake_again(&x.a);
    for (int i = 0; i < 16; i++) {
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
    }
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    t_int_eq(node_find(x.rig.head, &x.b.who.id)->state, NODE_LOST);
    fake_again(&x.b);
    t_true(x.b.fenced);
    run_end(&x);
}

static void a_start_lost_on_the_way_is_sent_again(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "lostcall", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    a.mute_start = true;
    char *id = submit(&r, "true", NULL);
    UNTIL(&r, a.unanswered);
    fake_cut(&a); /* it runs, and the answer is lost */
    reply_empty(a.unanswered);
    a.unanswered = NULL;
    a.mute_start = false;
    fake_again(&a);
    UNTIL(&r, job(&r, id)->rec->status == FL__JOB_STATUS__JOB_RUNNING);
    t_int_eq(a.n_workers, 1);
    t_int_eq(a.workers[0].starts, 1, "it was listed, so it is not even asked again");
    fake_cut(&a);
    a.n_workers = 0; /* the daemon never heard of it */
    fake_again(&a);
    UNTIL(&r, a.n_workers == 1);
    t_int_eq(a.workers[0].who.attempt, 1);
    fake_down(&a);
    rig_end(&r);
}

static void leases_left_prepared_are_given_back(void **unused)
{
    struct run x;
    struct asked q;

    (void)unused;
    run_start(&x, "prepared", 2, 2);
    x.b.mute_prepare = true;
    place_start(&x, split_2_2, 4, -1, &q);
    UNTIL(&x.rig, x.b.prepares == 1 && x.a.n_leases == 2);
    rig_turns(&x.rig, 4);
    head_away(&x); /* killed between prepare and commit */
    ask_free(&q);
    reply_empty(x.b.unanswered);
    x.b.unanswered = NULL;
    x.b.mute_prepare = false;
    rig_open_head(&x.rig);
    fake_again(&x.a);
    fake_again(&x.b);
    t_int_eq(x.a.n_leases, 0, "told with the answer to its join");
    Fl__Layout *y = place(&x, split_2_2, 4);
    t_int_eq(y->n_ranks, 4);
    t_int_eq(x.a.n_leases + x.b.n_leases, 4);
    free_msg(y);
    run_end(&x);
}

static void a_commit_lost_on_the_way_is_sent_again(void **unused)
{
    struct run x;
    struct asked q;

    (void)unused;
    run_start(&x, "commit", 2, 2);
    x.b.mute_commit = true;
    place_start(&x, split_2_2, 4, -1, &q);
    UNTIL(&x.rig, x.b.commits == 1);
    head_away(&x); /* decided, and only half told */
    ask_free(&q);
    reply_empty(x.b.unanswered);
    x.b.unanswered = NULL;
    x.b.mute_commit = false;
    rig_open_head(&x.rig);
    fake_again(&x.a);
    fake_again(&x.b);
    UNTIL(&x.rig, x.b.leases[0]->state == FL__LEASE_STATE__COMMITTED);
    t_int_eq(x.a.n_leases + x.b.n_leases, 4);
    Fl__Layout *y = place(&x, split_2_2, 4);
    t_int_eq(x.a.prepares + x.b.prepares, 2, "the same placement");
    free_msg(y);
    run_end(&x);
}

static void work_of_nobody_is_ended(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "nobody", NULL);
    fake_init(&a, &r, "a", "10.0.0.1", 0);
    a.n_workers = 1;
    memset(&a.workers[0].who.id, 7, 28);
    a.workers[0].who.attempt = 1;
    strcpy(a.workers[0].role, "driver");
    fake_connect(&a);
    fake_join(&a);
    t_int_eq(a.workers[0].phase, FL__WORKER_PHASE__WORKER_GONE);
    t_true(r.head->nodes->workers == NULL);
    fake_down(&a);
    rig_end(&r);
}

static void copy_state(const char *from, const char *to)
{
    char cmd[4096];

    snprintf(cmd, sizeof(cmd), "rm -rf %s && cp -r %s %s", to, from, to);
    t_int_eq(system(cmd), 0);
}

static int unknown_leases(const struct run *x)
{
    struct unknown_lease *u;
    int n;

    LL_COUNT(node_find(x->rig.head, &x->a.who.id)->leases, u, n);
    return n;
}

static int unknown_workers(const struct run *x)
{
    struct unknown_worker *u;
    int n;

    LL_COUNT(node_find(x->rig.head, &x->a.who.id)->workers, u, n);
    return n;
}

/* A cluster with a copy of its state, taken when `early` and `late` had been submitted and nothing
 * had run. */
static void older_start(struct run *x, const char *name, char early[64], char late[64],
                        char older[1024])
{
    char copy[64];

    rig_start(&x->rig, name, NULL);
    memset(&x->b, 0, sizeof(x->b));
    fake_up(&x->a, &x->rig, "a", "10.0.0.1", 3);
    fake_cut(&x->a);
    snprintf(early, 64, "%s", submit(&x->rig, "runs to its end", NULL));
    snprintf(late, 64, "%s", submit(&x->rig, "runs on", NULL));
    rig_stop_head(&x->rig);
    snprintf(copy, sizeof(copy), "%s-copy", name);
    (void)fl_copy(older, 1024, t_path(copy));
    copy_state(x->rig.state_dir, older);
    rig_open_head(&x->rig);
    fake_again(&x->a);
}

/* On the copy: its first term is one that the daemons have heard already. */
static void older_head(struct run *x, const char *older)
{
    uint64_t newest = x->rig.head->term.head;

    head_away(x);
    (void)FL_COPY(x->rig.state_dir, older);
    rig_open_head(&x->rig);
    t_int_eq(x->rig.head->term.head, newest);
    fake_connect(&x->a);
    UNTIL(&x->rig, x->rig.terms == 1);
    t_int_eq(x->rig.head->term.head, newest + 1, "the next above what was seen");
    fake_again(&x->a);
    t_true(x->a.joined, "%s", x->a.join_text);
    UNTIL(&x->rig, x->rig.head->state == HEAD_READY);
    rig_turns(&x->rig, 20);
}

static void a_copied_older_journal_says_so_and_harms_nothing(void **unused)
{
    struct run x;
    char early[64], late[64], third[64], older[1024];
    struct asked q;

    (void)unused;
    older_start(&x, "older", early, late, older);
    driver_of(&x.rig, &x.a, early);
    x.driver = driver_of(&x.rig, &x.a, late);
    fake_exit(&x.a, &x.a.workers[0], 0);
    UNTIL(&x.rig, job_over(job(&x.rig, early)));
    snprintf(third, sizeof(third), "%s", submit(&x.rig, "the copy knows nothing of it", NULL));
    UNTIL(&x.rig, job(&x.rig, third)->rec->status == FL__JOB_STATUS__JOB_RUNNING);
    x.driver = fake_worker(&x.a, "driver", 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0));
    free_msg(y);

    older_head(&x, older);
    t_int_eq(unknown_leases(&x), 2, "shown");
    t_int_eq(unknown_workers(&x), 2, "the third job's driver and its trainer");
    t_int_eq(x.a.stops, 0, "all of it runs on");
    t_int_eq(x.a.n_leases, 2);
    t_int_eq(x.a.n_workers, 4, "and nothing was started a second time");
    t_int_eq(job(&x.rig, late)->rec->status, FL__JOB_STATUS__JOB_RUNNING,
             "it was running: taken over");
    t_int_eq(job(&x.rig, early)->rec->status, FL__JOB_STATUS__JOB_FAILED);
    t_has(job(&x.rig, early)->rec->message, "older than the cluster");

    /* nothing is placed over it: one device of three is left */
    x.driver = &x.a.workers[1];
    place_start(&x, split_1_1, 4, 0, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_EXHAUSTED, "%s", q.err.text);
    ask_free(&q);

    /* and when the unknown work ends, its share is free */
    struct fake_worker *w = fake_worker(&x.a, "trainer", 0);
    fake_exit(&x.a, w, 0);
    UNTIL(&x.rig, x.a.releases == 1);
    t_int_eq(unknown_leases(&x), 1, "one was held by nobody");
    rig_again(&x.rig); /* what is foreign is remembered */
    UNTIL(&x.rig, x.a.peer == NULL);
    fake_again(&x.a);
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    t_int_eq(unknown_leases(&x), 1);
    t_int_eq(unknown_workers(&x), 1);
    run_end(&x);
}

/* One start of a head later than the copy: the terms alone show nothing, what the daemon has does.
 */
static void an_older_journal_with_a_later_term_is_seen_by_what_daemons_have(void **unused)
{
    struct run x;
    char older[1024];

    (void)unused;
    rig_start(&x.rig, "missing", NULL);
    memset(&x.b, 0, sizeof(x.b));
    fake_up(&x.a, &x.rig, "a", "10.0.0.1", 2);
    rig_turns(&x.rig, 10);
    (void)fl_copy(older, sizeof(older), t_path("missing-copy"));
    copy_state(x.rig.state_dir, older); /* live, with its log */
    snprintf(x.job, sizeof(x.job), "%s", submit(&x.rig, "unknown to the copy", NULL));
    x.driver = driver_of(&x.rig, &x.a, x.job);
    fake_joined(&x.a, x.driver);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0));
    free_msg(y);
    head_away(&x);
    (void)FL_COPY(x.rig.state_dir, older);
    rig_open_head(&x.rig);
    t_int_eq(x.rig.head->term.head, 2);
    fake_again(&x.a);
    t_true(x.a.joined, "%s", x.a.join_text);
    t_int_eq(x.rig.head->term.head, 3, "it takes the next term");
    UNTIL(&x.rig, x.rig.head->state == HEAD_READY);
    rig_turns(&x.rig, 10);
    t_int_eq(unknown_leases(&x), 2);
    t_int_eq(unknown_workers(&x), 2);
    t_int_eq(x.a.stops, 0);
    t_int_eq(x.a.n_leases, 2);
    t_int_eq(x.rig.terms, 1, "once");
    run_end(&x);
}

/* The driver is submitted with restarts of its own: which it gets is what the head remembers of its
 * members. */
static void restarts_used_up_are_known_to_a_new_head(void **unused)
{
    static const struct job_ask twice = { .driver_restarts = 2 };
    struct run x;

    (void)unused;
    rig_start(&x.rig, "usedup", NULL);
    memset(&x.b, 0, sizeof(x.b));
    fake_up(&x.a, &x.rig, "a", "10.0.0.1", 2);
    snprintf(x.job, sizeof(x.job), "%s", submit(&x.rig, "driver", &twice));
    x.driver = driver_of(&x.rig, &x.a, x.job);
    fake_joined(&x.a, x.driver);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 1));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    fake_joined(&x.a, fake_worker(&x.a, "rollout", 0));
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
    rig_pass(&x.rig, 250);
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0)->who.attempt == 2);
    new_head(&x);
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
    struct seat *s = seat_of(x.rig.head, &BYTES_OF(fake_worker(&x.a, "rollout", 0)->who.id));
    UNTIL(&x.rig, s->rec->state == FL__SEAT_STATE__SEAT_CLOSED);
    new_head(&x);
    fake_exit(&x.a, x.driver, 1);
    UNTIL(&x.rig, job_over(job(&x.rig, x.job)) || job(&x.rig, x.job)->rec->attempt > 1);
    t_int_eq(job(&x.rig, x.job)->rec->status, FL__JOB_STATUS__JOB_FAILED,
             "its driver is not started again");
    t_has(job(&x.rig, x.job)->rec->used_up, "rollout 0 has used its restarts");
    free_msg(y);
    run_end(&x);
}

static void a_command_that_cannot_be_run_is_known_to_a_new_head(void **unused)
{
    struct run x;
    const Fl__Where *w;

    (void)unused;
    run_start(&x, "unrunnable", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 1));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 127);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == MEMBER_ENDED);
    new_head(&x);
    Fl__Members *m = launch(&x, y, "rollout", 1);
    t_int_eq(m->n_members, 1);
    t_true(m->members[0]->unrunnable, "said to a driver that asks again");
    free_msg(m);
    free_msg(y);
    run_end(&x);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_does_not_notice_a_new_head),
        cmocka_unit_test(what_ended_meanwhile_is_heard_on_return),
        cmocka_unit_test(nothing_submitted_is_lost),
        cmocka_unit_test(a_missing_node_is_given_up_by_a_new_head),
        cmocka_unit_test(a_start_lost_on_the_way_is_sent_again),
        cmocka_unit_test(leases_left_prepared_are_given_back),
        cmocka_unit_test(a_commit_lost_on_the_way_is_sent_again),
        cmocka_unit_test(work_of_nobody_is_ended),
        cmocka_unit_test(a_copied_older_journal_says_so_and_harms_nothing),
        cmocka_unit_test(an_older_journal_with_a_later_term_is_seen_by_what_daemons_have),
        cmocka_unit_test(restarts_used_up_are_known_to_a_new_head),
        cmocka_unit_test(a_command_that_cannot_be_run_is_known_to_a_new_head),
    };

    return t_run("return", tests);
}
