/* Placement in two phases, workers and their restarts. */
#include "tests/head/run.h"

static void a_split_run_is_placed_and_launched(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "split", 2, 2);
    Fl__Layout *y = place(&x, split_2_2, 4);
    t_int_eq(y->n_ranks, 4);
    t_str_eq(y->master_addr, "10.0.0.1");
    t_true(y->master_port >= 15000);
    t_has(y->text, "trainer 0 of 2  a  10.0.0.1  devices 0");
    t_has(y->text, "rollout 1 of 2  b  10.0.0.2  devices 1");
    t_int_eq(x.a.n_leases, 2);
    t_int_eq(x.b.n_leases, 2);
    t_int_eq(x.b.leases[0]->state, FL__LEASE_STATE__COMMITTED);
    Fl__Members *m = launch(&x, y, "trainer", 0);
    t_int_eq(m->n_members, 2);
    t_int_eq(m->members[1]->state, MEMBER_STARTING);
    free_msg(m);
    m = launch(&x, y, "rollout", 0);
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 1) && fake_worker(&x.b, "rollout", 1));
    struct fake_worker *w = fake_worker(&x.a, "trainer", 1);
    t_str_eq(w->devices, "1");
    t_str_eq(w->command, "prog --x");
    t_int_eq(w->world, 2);
    t_int_eq(w->local_rank, 1);
    t_int_eq(w->local_world, 2);
    t_str_eq(w->master_addr, "10.0.0.1");
    t_int_eq(w->master_port, y->master_port);
    t_mem_eq(w->key, x.driver->key, 32, "one key a job");
    t_str_eq(fake_worker(&x.b, "rollout", 0)->master_addr, "10.0.0.2");
    free_msg(m);
    free_msg(y);
    run_end(&x);
}

static void colocated_ranks_share_their_leases(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "colocated", 2, 0);
    Fl__Layout *y = place(&x, colocated_2, 4);
    t_int_eq(y->n_ranks, 4);
    t_int_eq(x.a.n_leases, 2);
    free_msg(launch(&x, y, "trainer", 0));
    free_msg(launch(&x, y, "rollout", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 1) && fake_worker(&x.a, "trainer", 1));
    t_int_eq(fake_worker(&x.a, "rollout", 1)->leases[0],
             fake_worker(&x.a, "trainer", 1)->leases[0]);
    free_msg(y);
    run_end(&x);
}

static void the_same_question_gets_the_same_answer(void **unused)
{
    struct run x;
    struct fl_err err = { 0 };

    (void)unused;
    run_start(&x, "same", 4, 0);
    Fl__Layout *y = place(&x, split_1_1, 4), *again = place(&x, split_1_1, 4), *other;
    t_true(same_bytes(&y->group, &again->group));
    t_int_eq(x.a.n_leases, 2);
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0));
    Fl__Members *m = launch(&x, y, "trainer", 0);
    rig_turns(&x.rig, 10);
    t_int_eq(m->n_members, 1);
    t_int_eq(x.a.n_workers, 2, "no second process");
    free_msg(m);
    t_true(launch_try(&x, y, "critic", 0, &err) == NULL);
    t_has(err.text, "critic");
    end_group(&x, y);
    other = place(&x, split_1_1, 4);
    t_true(!same_bytes(&y->group, &other->group), "what has ended is not given again");
    free_msg(y);
    free_msg(again);
    free_msg(other);
    run_end(&x);
}

static void what_can_never_fit_is_refused_at_once(void **unused)
{
    struct run x;
    struct asked q;
    static const char *const big[][2] = { { "actor-num-nodes", "1" },
                                          { "actor-num-gpus-per-node", "8" },
                                          { "rollout-num-gpus", "8" },
                                          { "rollout-num-gpus-per-engine", "1" } };
    static const char *const odd[][2] = { { "actor-num-nodes", "many" } };

    (void)unused;
    run_start(&x, "never", 2, 2);
    place_start(&x, big, 4, -1, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_INVALID, "%s", q.err.text);
    ask_free(&q);
    place_start(&x, odd, 1, -1, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_INVALID);
    t_has(q.err.text, "actor-num-nodes");
    ask_free(&q);
    UNTIL(&x.rig, HASH_COUNT(x.rig.head->groups) == 0);
    t_int_eq(x.a.prepares + x.b.prepares, 0);
    run_end(&x);
}

static void what_does_not_fit_now_waits_for_room(void **unused)
{
    struct run x;
    struct asked q, now;

    (void)unused;
    run_start(&x, "wait", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4), *z;
    place_start(&x, colocated_2, 4, 60000, &q);
    rig_turns(&x.rig, 20);
    t_true(!q.done);
    place_start(&x, split_2_2, 4, 0, &now);
    ask_wait(&x.a, &now);
    t_true(now.st == FL_INVALID || now.st == FL_EXHAUSTED);
    ask_free(&now);
    end_group(&x, y);
    ask_wait(&x.a, &q); /* by the release, with no time passing */
    z = asked_msg(&q, &fl__layout__descriptor);
    t_int_eq(x.a.n_leases, 2);
    ask_free(&q);
    place_start(&x, split_1_1, 4, 5000, &q);
    rig_turns(&x.rig, 20);
    t_true(!q.done);
    rig_pass(&x.rig, 5200);
    fake_beat(&x.a);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_EXHAUSTED);
    ask_free(&q);
    free_msg(y);
    free_msg(z);
    run_end(&x);
}

static void a_node_that_does_not_prepare_undoes_all(void **unused)
{
    struct run x;
    struct asked q;

    (void)unused;
    run_start(&x, "undo", 2, 2);
    x.b.on_prepare = FL_EXHAUSTED;
    place_start(&x, split_2_2, 4, 10000, &q);
    UNTIL(&x.rig, x.a.releases == 1 && x.b.releases == 1);
    t_int_eq(x.a.n_leases, 0);
    t_true(!q.done, "tried again, it may be a passing thing");
    UNTIL(&x.rig, HASH_COUNT(x.rig.head->leases) == 0);
    x.b.on_prepare = FL_OK;
    rig_pass(&x.rig, 1200);
    ask_wait(&x.a, &q);
    free_msg(asked_msg(&q, &fl__layout__descriptor));
    ask_free(&q);
    t_int_eq(x.b.n_leases, 2);
    run_end(&x);
}

static void a_node_that_says_nothing_is_named(void **unused)
{
    struct run x;
    struct asked q;

    (void)unused;
    run_start(&x, "mute", 2, 2);
    x.b.mute_prepare = true;
    place_start(&x, split_2_2, 4, 4000, &q);
    UNTIL(&x.rig, x.b.prepares == 1);
    for (int i = 0; i < 6; i++) {
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
        fake_beat(&x.b);
    }
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_EXHAUSTED);
    t_has(q.err.text, "node b");
    ask_free(&q);
    run_end(&x);
}

static void a_worker_starts_again_after_back_off(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "restart", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 2));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    fake_joined(&x.a, fake_worker(&x.a, "rollout", 0));
    for (uint32_t attempt = 2; attempt <= 3; attempt++) {
        fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
        rig_turns(&x.rig, 8);
        t_int_eq(fake_worker(&x.a, "rollout", 0)->who.attempt, attempt - 1, "not at once");
        rig_pass(&x.rig, attempt == 2 ? 250 : 450);
        UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0)->who.attempt == attempt);
    }
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
    rig_pass(&x.rig, 5000);
    t_int_eq(fake_worker(&x.a, "rollout", 0)->who.attempt, 3, "twice and no more");
    struct seat *s = seat_of(x.rig.head, &BYTES_OF(fake_worker(&x.a, "rollout", 0)->who.id));
    t_int_eq(s->rec->state, FL__SEAT_STATE__SEAT_CLOSED);
    free_msg(y);
    run_end(&x);
}

/* 127: a shell has not found the command. Of one that had joined it is an end like any other. */
static void a_command_that_cannot_be_run_ends_at_once(void **unused)
{
    for (int ran = 0; ran < 2; ran++) {
        struct run x;
        const Fl__Where *w;

        (void)unused;
        run_start(&x, ran ? "ran" : "unrunnable", 2, 0);
        Fl__Layout *y = place(&x, split_1_1, 4);
        free_msg(launch(&x, y, "rollout", 2));
        UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
        if (ran)
            fake_joined(&x.a, fake_worker(&x.a, "rollout", 0));
        fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 127);
        UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == (ran ? MEMBER_STARTING : MEMBER_ENDED));
        t_int_eq(w->has_unrunnable && w->unrunnable, !ran);
        rig_pass(&x.rig, 5000);
        t_int_eq(fake_worker(&x.a, "rollout", 0)->who.attempt, ran ? 2 : 1);
        free_msg(y);
        run_end(&x);
    }
}

static void the_driver_hears_how_its_members_fare(void **unused)
{
    struct run x;
    const Fl__Where *w;

    (void)unused;
    run_start(&x, "members", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 1));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    fake_joined(&x.a, fake_worker(&x.a, "rollout", 0));
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == MEMBER_LIVE);
    t_str_eq(w->tcp, "10.0.0.1:4000");
    t_str_eq(w->node, "a");
    t_mem_eq(&x.a.events[0].to.id, &x.driver->who.id, 28);
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == MEMBER_STARTING);
    t_has(w->why, "ended with code 9");
    rig_pass(&x.rig, 300);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->who->attempt == 2);
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0)->who.attempt == 2);
    fake_exit(&x.a, fake_worker(&x.a, "rollout", 0), 9);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == MEMBER_ENDED);
    free_msg(y);
    run_end(&x);
}

static void a_role_restarts_as_a_whole(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "role", 4, 0);
    Fl__Layout *y = place(&x, split_2_2, 4);
    free_msg(launch(&x, y, "trainer", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 1));
    struct fake_worker *one = fake_worker(&x.a, "trainer", 0),
                       *two = fake_worker(&x.a, "trainer", 1);
    t_int_eq(role_call(&x, y, FL_ROLE_RESTART, "trainer"), FL_OK);
    UNTIL(&x.rig, one->stop_asked && two->stop_asked);
    rig_turns(&x.rig, 8);
    t_true(fake_worker(&x.a, "trainer", 0) == one, "the older attempt must end first");
    fake_exit(&x.a, one, 0);
    fake_exit(&x.a, two, 0);
    UNTIL(&x.rig, fake_worker(&x.a, "trainer", 0)->who.attempt == 2 &&
                      fake_worker(&x.a, "trainer", 1)->who.attempt == 2);
    t_int_eq(role_call(&x, y, FL_ROLE_END, "trainer"), FL_OK);
    one = fake_worker(&x.a, "trainer", 0);
    UNTIL(&x.rig, one->stop_asked);
    fake_exit(&x.a, one, 0);
    rig_pass(&x.rig, 3000);
    t_int_eq(fake_worker(&x.a, "trainer", 0)->who.attempt, 2, "it has ended for good");
    t_int_eq(role_call(&x, y, FL_ROLE_RESTART, "trainer"), FL_INVALID);
    t_int_eq(role_call(&x, y, FL_ROLE_RESTART, "rollout"), FL_NOT_FOUND);
    free_msg(y);
    run_end(&x);
}

static enum fl_status member_end(struct run *x, const Fl__Layout *y, const char *role, uint32_t rank,
                                 uint32_t attempt)
{
    Fl__MemberEnd m = FL__MEMBER_END__INIT;
    struct asked q;

    m.group = y->group;
    m.role = (char *)(uintptr_t)role;
    m.rank = rank;
    m.attempt = attempt;
    m.why = "it hangs";
    ask_relay(&x->a, x->driver, FL_MEMBER_END, &m, &q);
    ask_wait(&x->a, &q);
    enum fl_status st = q.st;
    ask_free(&q);
    return st;
}

/* By force, counted as any end, and never the attempt after the one that was meant. */
static void one_member_is_ended(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "member", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 1));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    struct fake_worker *one = fake_worker(&x.a, "rollout", 0);
    fake_joined(&x.a, one);
    t_int_eq(member_end(&x, y, "rollout", 0, 2), FL_INVALID);
    t_int_eq(member_end(&x, y, "rollout", 1, 1), FL_NOT_FOUND);
    t_int_eq(member_end(&x, y, "rollout", 0, 1), FL_OK);
    UNTIL(&x.rig, one->stop_asked);
    t_int_eq(one->stop_term_ms, 0);
    t_int_eq(member_end(&x, y, "rollout", 0, 1), FL_OK);
    fake_exit(&x.a, one, 0);
    rig_pass(&x.rig, 300);
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0)->who.attempt == 2);
    one = fake_worker(&x.a, "rollout", 0);
    t_int_eq(member_end(&x, y, "rollout", 0, 1), FL_OK);
    rig_pass(&x.rig, 3000);
    t_true(!one->stop_asked, "the older attempt was meant");
    t_int_eq(member_end(&x, y, "rollout", 0, 2), FL_OK);
    UNTIL(&x.rig, one->stop_asked);
    fake_exit(&x.a, one, 0);
    const Fl__Where *w;
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 0)) && w->state == MEMBER_ENDED);
    free_msg(y);
    run_end(&x);
}

static void the_end_of_a_job_ends_its_workers_and_groups(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "jobend", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 5));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    struct fake_worker *w = fake_worker(&x.a, "rollout", 0);
    fake_exit(&x.a, x.driver, 0);
    UNTIL(&x.rig, w->stop_asked);
    t_true(job_over(job(&x.rig, x.job)) && !job(&x.rig, x.job)->rec->cleaned);
    t_int_eq(x.a.n_leases, 2, "not while something runs on them");
    fake_exit(&x.a, w, 143);
    UNTIL(&x.rig, job(&x.rig, x.job)->rec->cleaned);
    t_int_eq(x.a.n_leases, 0);
    t_int_eq(HASH_COUNT(x.rig.head->leases) + HASH_COUNT(x.rig.head->groups), 0);
    t_int_eq(x.a.n_workers, 2, "nothing started again");
    free_msg(y);
    run_end(&x);
}

static void only_the_driver_may_place(void **unused)
{
    struct run x;
    struct asked q;
    Fl__Group m = FL__GROUP__INIT;
    Fl__Find find = FL__FIND__INIT;

    (void)unused;
    run_start(&x, "may", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    struct fake_worker *w = fake_worker(&x.a, "rollout", 0);
    m.group = y->group;
    ask_relay(&x.a, w, FL_GROUP_END, &m, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_DENIED);
    ask_free(&q);
    find.role = "driver";
    ask_relay(&x.a, w, FL_DIR_FIND, &find, &q);
    ask_wait(&x.a, &q);
    Fl__Where *where = asked_msg(&q, &fl__where__descriptor);
    t_mem_eq(where->who->worker.data, &x.driver->who.id, 28);
    free_msg(where);
    ask_free(&q);
    w->who.attempt = 9; /* one that the head never started */
    ask_relay(&x.a, w, FL_DIR_FIND, &find, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_STALE);
    ask_free(&q);
    free_msg(y);
    run_end(&x);
}

static void a_lost_nodes_share_is_placed_elsewhere(void **unused)
{
    struct run x;
    struct fake c;
    const Fl__Where *w;

    (void)unused;
    run_start(&x, "elsewhere", 2, 2);
    Fl__Layout *y = place(&x, split_2_2, 4);
    free_msg(launch(&x, y, "rollout", 3));
    UNTIL(&x.rig, fake_worker(&x.b, "rollout", 1));
    fake_up(&c, &x.rig, "c", "10.0.0.3", 2);
    fake_cut(&x.b);
    for (int i = 0; i < 17; i++) {
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
        fake_beat(&c);
    }
    UNTIL(&x.rig, fake_worker(&c, "rollout", 1));
    t_int_eq(fake_worker(&c, "rollout", 0)->who.attempt, 2);
    t_str_eq(fake_worker(&c, "rollout", 0)->master_addr, "10.0.0.3");
    t_int_eq(c.n_leases, 2);
    UNTIL(&x.rig, (w = last_news(&x.a, "rollout", 1)) && w->node && strcmp(w->node, "c") == 0);
    t_has(w->why, "fenced");
    fake_down(&c);
    free_msg(y);
    run_end(&x);
}

static void a_driver_may_ask_for_resources(void **unused)
{
    struct rig r;
    struct fake a;
    Fl__Amount gpu = FL__AMOUNT__INIT;
    const Fl__Amount *wants = &gpu;
    struct job_ask ask = { .wants = &wants, .n_wants = 1 };

    (void)unused;
    rig_start(&r, "wants", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 2);
    gpu.name = "GPU";
    gpu.e4 = 10000;
    char first[64], second[64];
    snprintf(first, sizeof(first), "%s", submit(&r, "one", &ask));
    struct fake_worker *w = driver_of(&r, &a, first);
    t_int_eq(w->n_leases, 1);
    t_str_eq(w->devices, "0");
    gpu.e4 = 40000;
    snprintf(second, sizeof(second), "%s", submit(&r, "four", &ask));
    UNTIL(&r, job(&r, second)->rec->has_group);
    rig_turns(&r, 10);
    t_int_eq(job(&r, second)->rec->status, FL__JOB_STATUS__JOB_PENDING);
    fake_exit(&a, w, 0);
    UNTIL(&r, job(&r, first)->rec->cleaned);
    t_int_eq(a.n_leases, 0);
    fake_down(&a);
    rig_end(&r);
}

static bool waits_for(struct rig *r, const char *id, const char *words)
{
    char text[1024] = "";
    struct fl_str why = FL_STR_ON(text);

    return job_waits(job(r, id), &why) && strstr(text, words) != NULL;
}

/* What the present nodes can never have, and what they only do not give now, are told apart each
 * time. */
static void why_a_job_waits_is_of_its_kind(void **unused)
{
    struct rig r;
    struct fake a, b;
    Fl__Amount gpu = FL__AMOUNT__INIT;
    const Fl__Amount *wants = &gpu;
    struct job_ask ask = { .wants = &wants, .n_wants = 1 };
    char id[64];

    (void)unused;
    rig_start(&r, "kind", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 2);
    gpu.name = "GPU";
    gpu.e4 = 40000;
    snprintf(id, sizeof(id), "%s", submit(&r, "four", &ask));
    UNTIL(&r,
          waits_for(&r, id,
                    "can never fit: 4 GPU asked, 1 node has 2 (a 2); it waits for other nodes"));
    fake_init(&b, &r, "b", "10.0.0.2", 4);
    b.on_prepare = FL_EXHAUSTED;
    fake_connect(&b);
    fake_join(&b);
    UNTIL(&r, b.prepares && waits_for(&r, id, "node b"));
    t_true(!waits_for(&r, id, "other nodes") && !waits_for(&r, id, "never"),
           "it has what is asked");
    fake_down(&a);
    fake_down(&b);
    rig_end(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_split_run_is_placed_and_launched),
        cmocka_unit_test(colocated_ranks_share_their_leases),
        cmocka_unit_test(the_same_question_gets_the_same_answer),
        cmocka_unit_test(what_can_never_fit_is_refused_at_once),
        cmocka_unit_test(what_does_not_fit_now_waits_for_room),
        cmocka_unit_test(why_a_job_waits_is_of_its_kind),
        cmocka_unit_test(a_node_that_does_not_prepare_undoes_all),
        cmocka_unit_test(a_node_that_says_nothing_is_named),
        cmocka_unit_test(a_worker_starts_again_after_back_off),
        cmocka_unit_test(a_command_that_cannot_be_run_ends_at_once),
        cmocka_unit_test(the_driver_hears_how_its_members_fare),
        cmocka_unit_test(one_member_is_ended),
        cmocka_unit_test(a_role_restarts_as_a_whole),
        cmocka_unit_test(the_end_of_a_job_ends_its_workers_and_groups),
        cmocka_unit_test(only_the_driver_may_place),
        cmocka_unit_test(a_lost_nodes_share_is_placed_elsewhere),
        cmocka_unit_test(a_driver_may_ask_for_resources),
    };

    return t_run("place", tests);
}
