#include <stdlib.h>
#include <unistd.h>

#include "tests/client/fake.h"
#include "tests/client/pair.h"
#include "tests/t.h"
#include "worker/client/client.h"

static void joins_and_leaves(void **state)
{
    int fds = t_open_fds();
    struct fake *fake = fake_create();
    struct furlong *f = fake_joined(fake, "rollout", 1, 2);

    (void)state;
    t_str_eq(furlong_seat(f)->role, "rollout");
    t_int_eq(furlong_seat(f)->rank, 1);
    furlong_leave(f);
    f = fake_joined(fake, "rollout", 1, 2);
    furlong_leave(f);
    furlong_leave(NULL);
    fake_destroy(fake);
    t_int_eq(t_open_fds(), fds);
}

static void bodies_and_blobs_go_both_ways(void **state)
{
    static const size_t sizes[] = { 0, 1, 63, 64, 4096, 65536, 65537, 1 << 20, 9 << 20 };
    struct pair p = pair_make();
    uint8_t *bulk = malloc(9 << 20);
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < 9 << 20; i++)
        bulk[i] = (uint8_t)(i * 31 + (i >> 12));
    for (size_t i = 0; i < FL_LEN(sizes); i++) {
        struct furlong_data d = { bulk, sizes[i] > 70000 ? 70000 : sizes[i], bulk, sizes[i] };
        struct furlong_answer a;

        t_ok(furlong_ask(p.peer, 0, "echo", &d, 20000, &a, &err), &err);
        t_int_eq(a.body_bytes, d.body_bytes);
        t_int_eq(a.blob_bytes, sizes[i]);
        t_true(memcmp(a.blob ? a.blob : "", bulk, sizes[i]) == 0, "%zu", sizes[i]);
        t_true(!a.blob || (uintptr_t)a.blob % 64 == 0);
        furlong_answer_free(&a);
        furlong_answer_free(&a);
    }
    free(bulk);
    pair_end(&p);
}

static void from_another_machine_by_tcp(void **state)
{
    struct pair p = pair_make();
    struct furlong_data d = { "body", 4, NULL, 5 << 20 };
    struct furlong_answer a;
    struct fl_err err;

    (void)state;
    d.blob = calloc(1, d.blob_bytes);
    fake_far(p.fake, true);
    t_ok(furlong_ask(p.peer, 0, "echo", &d, 20000, &a, &err), &err);
    t_int_eq(a.blob_bytes, d.blob_bytes);
    furlong_answer_free(&a);
    free((void *)(uintptr_t)d.blob);
    pair_end(&p);
}

/* A process whose seat was given on, but which has not heard of it. */
static void an_older_attempt_is_refused(void **state)
{
    struct pair p = pair_make();
    struct furlong *newer = NULL, *older = NULL;
    struct furlong_peer *peer;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(fake_join(p.fake, "critic", 0, 1, 5, &newer, &err), &err);
    t_ok(furlong_peer(newer, "rollout", 0, &peer, &err), &err);
    pair_says(peer, 0, "count", "1");
    t_ok(fake_join(p.fake, "critic", 0, 1, 4, &older, &err), &err);
    t_ok(furlong_peer(older, "rollout", 0, &peer, &err), &err);
    t_refused(furlong_ask(peer, 0, "count", NULL, 200, NULL, &err), FL_TIMEOUT, &err);
    t_has(err.text, "knows attempt 5");
    furlong_leave(older);
    furlong_leave(newer);
    pair_says(p.peer, 0, "count", "2");
    pair_end(&p);
}

static void another_key_is_refused(void **state)
{
    struct pair p = pair_make();
    struct client_seat seat = { 0 };
    struct furlong *stranger = NULL;
    struct fl_err err = { 0 };
    int fd = fake_seat(p.fake, "critic", 0, 1, 1);

    (void)state;
    t_ok(client_seat_read(fd, &seat, &err), &err);
    close(fd);
    seat.key[0] ^= 1;
    t_refused(client_join(&seat, &stranger, &err), FL_DENIED, &err);
    t_true(!stranger);
    pair_says(p.peer, 0, "count", "1");
    pair_end(&p);
}

static void too_big_a_body_is_refused(void **state)
{
    struct pair p = pair_make();
    struct furlong_data d = { .body_bytes = FURLONG_BODY_MAX + 1 };
    struct fl_err err = { 0 };

    (void)state;
    d.body = calloc(1, d.body_bytes);
    t_refused(furlong_ask(p.peer, 0, "echo", &d, 1000, NULL, &err), FL_INVALID, &err);
    t_refused(furlong_ask(p.peer, 32, "echo", NULL, 1000, NULL, &err), FL_INVALID, &err);
    t_refused(furlong_ask(p.peer, 0, "", NULL, 1000, NULL, &err), FL_INVALID, &err);
    d.body_bytes = FURLONG_BODY_MAX;
    t_ok(furlong_ask(p.peer, 0, "echo", &d, 20000, NULL, &err), &err);
    free((void *)(uintptr_t)d.body);
    pair_end(&p);
}

static void refusals_keep_their_words(void **state)
{
    struct pair p = pair_make();
    struct fl_err err = { 0 };

    (void)state;
    t_refused(furlong_ask(p.peer, 0, "refuse", NULL, 5000, NULL, &err), FL_STALE, &err);
    t_has(err.text, "version 3 was asked for");
    pair_says(p.peer, 0, "count", "1");
    pair_end(&p);
}

static void reserved_names_become_events(void **state)
{
    static const struct {
        const char *method, *seen;
    } rows[] = {
        { "pause", "pause" },
        { "resume", "resume" },
        { "offload", "offload:24" },
        { "onload", "onload:24" },
        { "offload_kv", "offload_kv:6" },
        { "onload_kv", "onload_kv:6" },
        { "offload_weights", "offload_weights:1" },
        { "onload_weights", "onload_weights:1" },
    };
    struct pair p = pair_make();
    uint64_t bytes = 1000, half = 0;
    struct furlong_answer a;
    struct fl_err err = { 0 };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        t_ok(furlong_ask(p.peer, 0, rows[i].method, NULL, 5000, &a, &err), &err);
        t_has(server_seen(p.engine, rows[i].seen), rows[i].seen);
        if (strstr(rows[i].method, "load"))
            t_true(memmem(a.body, a.body_bytes, "\"dropped_bytes\":0", 17) != NULL, "%s",
                   rows[i].method);
        furlong_answer_free(&a);
    }
    t_ok(furlong_ask(p.peer, 0, "squeeze", &(struct furlong_data){ &bytes, 8, NULL, 0 }, 5000, &a,
                     &err),
         &err);
    t_int_eq(a.body_bytes, 8);
    memcpy(&half, a.body, 8);
    t_int_eq(half, 500);
    furlong_answer_free(&a);
    t_refused(furlong_ask(p.peer, 0, "squeeze", &(struct furlong_data){ &bytes, 7, NULL, 0 }, 5000,
                          NULL, &err),
              FL_INVALID, &err);
    t_ok(furlong_ask(p.peer, 0, "stop", NULL, 5000, NULL, &err), &err);
    t_int_eq(server_wait(p.engine, NULL), FL_OK);
    p.engine = NULL;
    pair_end(&p);
}

static void lanes_do_not_wait_for_each_other(void **state)
{
    struct pair p = pair_make();
    struct furlong_asks *asks;
    struct furlong_done d;
    struct fl_err err;

    (void)state;
    t_ok(furlong_asks_create(p.me, 2, &asks, &err), &err);
    t_ok(furlong_asks_start(asks, p.peer, 0, "hold", NULL, 0, 11, &err), &err);
    t_ok(furlong_asks_start(asks, p.peer, 0, "count", NULL, 0, 12, &err), &err);
    t_refused(furlong_asks_start(asks, p.peer, 0, "count", NULL, 0, 13, &err), FL_AGAIN, &err);
    t_ok(furlong_asks_next(asks, 10000, &d, &err), &err);
    t_int_eq(d.tag, 12, "replies come in any order");
    furlong_answer_free(&d.answer);
    t_refused(furlong_asks_next(asks, 0, &d, &err), FL_AGAIN, &err);
    pair_says(p.peer, 1, "release", "");
    t_ok(furlong_asks_next(asks, 10000, &d, &err), &err);
    t_int_eq(d.tag, 11);
    t_int_eq(d.status, FL_OK);
    furlong_answer_free(&d.answer);
    t_refused(furlong_asks_next(asks, 1000, &d, &err), FL_NOT_FOUND, &err);
    furlong_asks_destroy(asks);
    furlong_asks_destroy(NULL);
    pair_end(&p);
}

static void a_lane_keeps_its_order(void **state)
{
    enum { N = 500 };
    struct pair p = pair_make();
    struct furlong_asks *asks;
    struct fl_err err;
    unsigned seen = 0;

    (void)state;
    t_ok(furlong_asks_create(p.me, N, &asks, &err), &err);
    for (unsigned i = 0; i < N; i++)
        t_ok(furlong_asks_start(asks, p.peer, 0, "count", NULL, 0, i, &err), &err);
    for (unsigned i = 0; i < N; i++) {
        struct furlong_done d;
        char text[16] = "";

        t_ok(furlong_asks_next(asks, 10000, &d, &err), &err);
        memcpy(text, d.answer.body, d.answer.body_bytes);
        t_int_eq(atoi(text), (int)d.tag + 1);
        seen++;
        furlong_answer_free(&d.answer);
    }
    t_int_eq(seen, N);
    furlong_asks_destroy(asks);
    pair_end(&p);
}

/* Past the lane's credit asks wait in the library, and all of them get through. */
static void more_than_a_lane_holds(void **state)
{
    enum { N = 12, BYTES = 4 << 20 };
    struct pair p = pair_make();
    uint8_t *bulk = calloc(1, BYTES);
    struct furlong_asks *asks;
    struct fl_err err;

    (void)state;
    t_ok(furlong_asks_create(p.me, N, &asks, &err), &err);
    for (unsigned i = 0; i < N; i++)
        t_ok(furlong_asks_start(asks, p.peer, i % 2, "echo",
                                &(struct furlong_data){ .blob = bulk, .blob_bytes = BYTES }, 0, i,
                                &err),
             &err);
    for (unsigned i = 0; i < N; i++) {
        struct furlong_done d;

        t_ok(furlong_asks_next(asks, 20000, &d, &err), &err);
        t_int_eq(d.status, FL_OK, "%s", d.err.text);
        t_int_eq(d.answer.blob_bytes, BYTES);
        furlong_answer_free(&d.answer);
    }
    furlong_asks_destroy(asks);
    free(bulk);
    pair_end(&p);
}

static void deadlines_name_where_it_stands(void **state)
{
    struct pair p = pair_make();
    struct furlong_peer *nobody, *later;
    struct fl_err err = { 0 };
    int fd;

    (void)state;
    t_refused(furlong_ask(p.peer, 0, "hold", NULL, 100, NULL, &err), FL_TIMEOUT, &err);
    pair_says(p.peer, 1, "gone?", "1");
    pair_says(p.peer, 1, "release", "");
    t_ok(furlong_peer(p.me, "rollout", 9, &nobody, &err), &err);
    t_refused(furlong_ask(nobody, 0, "count", NULL, 5000, NULL, &err), FL_NOT_FOUND, &err);
    fd = fake_seat(p.fake, "rollout", 1, 2, 1);
    t_ok(furlong_peer(p.me, "rollout", 1, &later, &err), &err);
    t_refused(furlong_ask(later, 0, "count", NULL, 150, NULL, &err), FL_TIMEOUT, &err);
    t_has(err.text, "has not joined");
    close(fd);
    pair_end(&p);
}

static void cancelled_asks_come_back_at_once(void **state)
{
    struct pair p = pair_make();
    struct furlong_asks *asks;
    struct fl_err err;

    (void)state;
    t_ok(furlong_asks_create(p.me, 8, &asks, &err), &err);
    t_ok(furlong_asks_start(asks, p.peer, 0, "hold", NULL, 0, 1, &err), &err);
    pair_says(p.peer, 1, "held?", "1");
    furlong_asks_destroy(asks);
    pair_says(p.peer, 1, "gone?", "1");
    pair_says(p.peer, 1, "release", "");
    pair_end(&p);
}

static void a_program_that_leaves_refuses(void **state)
{
    struct pair p = pair_make();
    struct furlong_asks *asks;
    struct furlong_done d;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(furlong_asks_create(p.me, 2, &asks, &err), &err);
    t_ok(furlong_asks_start(asks, p.peer, 0, "hold", NULL, 0, 1, &err), &err);
    pair_says(p.peer, 1, "held?", "1");
    t_ok(furlong_asks_start(asks, p.peer, 1, "leave", NULL, 0, 2, &err), &err);
    (void)server_wait(p.engine, NULL);
    for (unsigned i = 0; i < 2; i++) {
        t_ok(furlong_asks_next(asks, 20000, &d, &err), &err);
        t_int_eq(d.status, FL_UNREACHABLE, "%s", d.err.text);
        t_has(d.err.text, "rollout 0 on gpu-a left before it answered");
    }
    furlong_asks_destroy(asks);
    fake_ended(p.fake, "rollout", 0, "exit code 0");
    t_refused(furlong_ask(p.peer, 0, "count", NULL, 20000, NULL, &err), FL_UNREACHABLE, &err);
    t_has(err.text, "exit code 0");
    p.engine = NULL;
    pair_end(&p);
}

static void the_next_attempt_is_found(void **state)
{
    struct pair p = pair_make();
    struct furlong *next;
    struct fl_err err;

    (void)state;
    pair_says(p.peer, 0, "count", "1");
    pair_says(p.peer, 0, "count", "2");
    server_end(p.engine);
    t_ok(fake_join(p.fake, "rollout", 0, 2, 2, &next, &err), &err);
    p.engine = server_start(next);
    pair_says(p.peer, 0, "count", "1");
    pair_end(&p);
}

static void many_threads_ask(void **state)
{
    enum { THREADS = 8, EACH = 50 };
    struct pair p = pair_make();
    struct asker a[THREADS];
    pthread_t t[THREADS];

    (void)state;
    for (unsigned round = 0; round < EACH; round += 10) {
        for (unsigned i = 0; i < THREADS; i++) {
            a[i] = (struct asker){ .p = p.peer, .method = "count" };
            t_true(pthread_create(&t[i], NULL, pair_ask_in_thread, &a[i]) == 0);
        }
        for (unsigned i = 0; i < THREADS; i++) {
            pthread_join(t[i], NULL);
            t_int_eq(a[i].st, FL_OK, "%s", a[i].err.text);
        }
    }
    pair_end(&p);
}

/* A program that does not look at its lane: what is too much is refused, not piled up. */
static void a_full_lane_refuses(void **state)
{
    struct fake *fake = fake_create();
    struct furlong *me = fake_joined(fake, "trainer", 0, 1),
                   *busy = fake_joined(fake, "rollout", 0, 1);
    struct furlong_asks *asks;
    struct furlong_peer *p;
    struct furlong_done d;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(furlong_peer(me, "rollout", 0, &p, &err), &err);
    t_ok(furlong_asks_create(me, 5000, &asks, &err), &err);
    for (unsigned i = 0; i <= FURLONG_QUEUE_MAX; i++)
        t_ok(furlong_asks_start(asks, p, 3, "x", NULL, 0, i, &err), &err);
    t_ok(furlong_asks_next(asks, 20000, &d, &err), &err);
    t_int_eq(d.status, FL_EXHAUSTED);
    t_int_eq(d.tag, FURLONG_QUEUE_MAX, "the last one");
    t_has(d.err.text, "4096");
    furlong_leave(busy);
    t_ok(furlong_asks_next(asks, 20000, &d, &err), &err);
    t_int_eq(d.status, FL_UNREACHABLE);
    furlong_asks_destroy(asks);
    furlong_leave(me);
    fake_destroy(fake);
}

static void calls_past_their_time_are_not_handed_out(void **state)
{
    struct fake *fake = fake_create();
    struct furlong *me = fake_joined(fake, "trainer", 0, 1),
                   *busy = fake_joined(fake, "rollout", 0, 1);
    struct furlong_asks *asks;
    struct furlong_peer *p;
    struct furlong_event ev;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(furlong_peer(me, "rollout", 0, &p, &err), &err);
    t_refused(furlong_ask(p, 0, "late", NULL, 100, NULL, &err), FL_TIMEOUT, &err);
    t_has(err.text, "rollout 0 did not answer in time");
    t_ok(furlong_asks_create(me, 1, &asks, &err), &err);
    t_ok(furlong_asks_start(asks, p, 1, "after the cancel", NULL, 0, 1, &err), &err);
    t_ok(furlong_next(busy, 1, 10000, &ev, &err), &err);
    t_refused(furlong_next(busy, 0, 0, &ev, &err), FL_AGAIN, &err);
    t_refused(furlong_next(busy, 32, 0, &ev, &err), FL_INVALID, &err);
    furlong_asks_destroy(asks);
    furlong_leave(busy);
    furlong_leave(me);
    fake_destroy(fake);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(joins_and_leaves),
        cmocka_unit_test(bodies_and_blobs_go_both_ways),
        cmocka_unit_test(from_another_machine_by_tcp),
        cmocka_unit_test(an_older_attempt_is_refused),
        cmocka_unit_test(another_key_is_refused),
        cmocka_unit_test(too_big_a_body_is_refused),
        cmocka_unit_test(refusals_keep_their_words),
        cmocka_unit_test(reserved_names_become_events),
        cmocka_unit_test(lanes_do_not_wait_for_each_other),
        cmocka_unit_test(a_lane_keeps_its_order),
        cmocka_unit_test(more_than_a_lane_holds),
        cmocka_unit_test(deadlines_name_where_it_stands),
        cmocka_unit_test(cancelled_asks_come_back_at_once),
        cmocka_unit_test(a_program_that_leaves_refuses),
        cmocka_unit_test(the_next_attempt_is_found),
        cmocka_unit_test(many_threads_ask),
        cmocka_unit_test(a_full_lane_refuses),
        cmocka_unit_test(calls_past_their_time_are_not_handed_out),
    };

    return t_run("client calls", tests);
}
