#include "common/base/muster.h"
#include "tests/t.h"

enum { SEC = 1000000000 };

static struct fl_held_clock held;
static unsigned overs;
static enum fl_status over_st;
static struct fl_err over_err;

static void over(void *arg, enum fl_status st, const struct fl_err *e)
{
    struct fl_muster **m = arg;

    overs++;
    over_st = st;
    over_err = *e;
    fl_muster_destroy(*m); /* the usual owner's answer */
    *m = NULL;
}

static struct fl_loop *loop_new(void)
{
    struct fl_loop *l = NULL;
    struct fl_err err = { 0 };

    held.now_ns = 5 * (uint64_t)SEC;
    struct fl_clock clock = fl_held_clock(&held);
    t_ok(fl_loop_create(&clock, &l, &err), &err);
    overs = 0;
    return l;
}

static void muster_of(struct fl_loop *l, unsigned n, struct fl_muster **m)
{
    struct fl_err err = { 0 };

    t_ok(fl_muster_create(l, "update 7", n, held.now_ns + 30 * (uint64_t)SEC, over, m, m, &err),
         &err);
    for (unsigned i = 0; i < n; i++)
        fl_muster_name(*m, i, "rank %u on gpu-%c", i, 'a' + (int)(i % 26));
}

enum step { END, IN0, IN1, IN2, BAD1, BAD2, GONE0, GONE1, GONE2, HASTY, WAIT };

static const struct row {
    const char *name;
    enum step steps[8];
    enum fl_status wanted;
    const char *text;
} rows[] = {
    { "all in", { IN0, IN1, IN2 }, FL_OK, "" },
    { "twice in counts once",
      { IN0, IN0, IN1, IN1, WAIT },
      FL_TIMEOUT,
      "update 7: 1 of 3 missing after 30.0 s: rank 2 on gpu-c" },
    { "the dead are not waited for", { IN0, GONE1, IN2 }, FL_OK, "" },
    { "all dead",
      { GONE0, GONE1, GONE2 },
      FL_UNREACHABLE,
      "update 7: rank 0 on gpu-a and all others are gone" },
    { "late, one gone",
      { IN0, GONE1, WAIT },
      FL_TIMEOUT,
      "update 7: 1 of 3 missing after 30.0 s: rank 2 on gpu-c; 1 gone" },
    { "one fails, the rest is waited for",
      { BAD1, IN0, IN2 },
      FL_CORRUPT,
      "update 7: rank 1 on gpu-b (staging, bucket 17 of 33): digest differs" },
    { "the first failure counts",
      { BAD2, BAD1, IN0 },
      FL_CORRUPT,
      "update 7: rank 2 on gpu-c: digest differs" },
    { "hasty: the first failure ends it",
      { HASTY, BAD1 },
      FL_CORRUPT,
      "update 7: rank 1 on gpu-b (staging, bucket 17 of 33): digest differs" },
    { "a failure is said after a timeout too",
      { BAD1, IN0, WAIT },
      FL_TIMEOUT,
      "update 7: 1 of 3 missing after 30.0 s: rank 2 on gpu-c; update 7: rank 1 on gpu-b "
      "(staging, bucket 17 of 33): digest differs" },
};

static void take(struct fl_muster *m, enum step s, struct fl_loop *l)
{
    struct fl_err bad = { FL_CORRUPT, FL_FROM_PEER, 3, "digest differs" };

    if (s == WAIT)
        fl_loop_pass(l, &held, 30 * (uint64_t)SEC);
    else if (s == HASTY)
        fl_muster_hasty(m);
    else if (s >= GONE0)
        fl_muster_excuse(m, s - GONE0);
    else if (s >= BAD1)
        fl_muster_in(m, s - BAD1 + 1, FL_CORRUPT, &bad);
    else
        fl_muster_in(m, s - IN0, FL_OK, NULL);
}

static void each_row_ends_once(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct fl_loop *l = loop_new();
        struct fl_muster *m = NULL;

        muster_of(l, 3, &m);
        fl_muster_at(m, 1, "staging, bucket %d of %d", 17, 33);
        for (const enum step *s = rows[i].steps; *s != END; s++) {
            t_int_eq(overs, 0, "%s: over too early", rows[i].name);
            take(m, *s, l);
        }
        fl_loop_turn(l, 0);
        t_int_eq(overs, 1, "%s", rows[i].name);
        t_int_eq(over_st, rows[i].wanted, "%s", rows[i].name);
        t_int_eq(over_err.status, rows[i].wanted, "%s", rows[i].name);
        t_str_eq(over_err.text, rows[i].text, "%s", rows[i].name);
        fl_loop_pass(l, &held, 60 * (uint64_t)SEC);
        t_int_eq(overs, 1, "%s: again", rows[i].name);
        fl_loop_destroy(l);
    }
}

static void many_late_ones_are_counted(void **state)
{
    struct fl_loop *l = loop_new();
    struct fl_muster *m = NULL;

    (void)state;
    muster_of(l, 1000, &m);
    fl_muster_in(m, 3, FL_OK, NULL);
    fl_loop_pass(l, &held, 30 * (uint64_t)SEC);
    t_int_eq(over_st, FL_TIMEOUT);
    t_has(over_err.text, "update 7: 999 of 1000 missing after 30.0 s: rank 0 on gpu-a, rank 1");
    t_has(over_err.text, " more");
    t_true(strlen(over_err.text) < sizeof(over_err.text) - 1, "cut by count, not by length");
    unsigned named = 0, more = 0;
    for (const char *p = over_err.text; (p = strstr(p, "rank ")); p++)
        named++;
    t_int_eq(sscanf(strstr(over_err.text, "and "), "and %u more", &more), 1);
    t_int_eq(named + more, 999);
    fl_loop_destroy(l);
}

static void nobody_to_wait_for_is_over_at_once(void **state)
{
    struct fl_loop *l = loop_new();
    struct fl_muster *m = NULL;

    (void)state;
    muster_of(l, 0, &m);
    t_int_eq(overs, 0, "never from inside create");
    fl_loop_turn(l, 0);
    t_int_eq(overs, 1);
    t_int_eq(over_st, FL_OK);
    fl_loop_destroy(l);
}

static void a_destroyed_muster_is_silent(void **state)
{
    struct fl_loop *l = loop_new();
    struct fl_muster *m = NULL;

    (void)state;
    muster_of(l, 1, &m);
    t_int_eq(fl_muster_status(m, 0), FL_AGAIN);
    fl_muster_in(m, 0, FL_OK, NULL);
    t_int_eq(fl_muster_status(m, 0), FL_OK);
    fl_muster_destroy(m); /* its outcome was on the way */
    fl_loop_pass(l, &held, 60 * (uint64_t)SEC);
    t_int_eq(overs, 0);
    fl_loop_destroy(l);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_row_ends_once),
        cmocka_unit_test(many_late_ones_are_counted),
        cmocka_unit_test(nobody_to_wait_for_is_over_at_once),
        cmocka_unit_test(a_destroyed_muster_is_silent),
    };

    return t_run("muster", tests);
}
