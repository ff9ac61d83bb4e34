/* memory that is made in the background and kept */
#include "tests/link/wait.h"
#include "tests/t.h"

static void recycles(void **state)
{
    struct fl_loop *l;
    struct link_pool *p;
    struct link_mem a = { 0 }, b = { 0 }, c = { 0 };
    struct wait w = wait_for(), v = wait_for(), u = wait_for();
    struct fl_err err = { 0 };

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    t_ok(link_pool_create(l, 1 << 20, &p, &err), &err);
    t_ok(link_pool_alloc(p, 1000000, &a, &w.op, &err), &err);
    t_true(a.addr == NULL, "not before it is back");
    t_until(l, w.times == 1, 5000);
    t_ok(w.op.err.status, &w.op.err);
    t_int_eq(a.bytes, 1000000);
    void *was = a.addr;

    strcpy(was, "still here");
    link_pool_free(p, &a);
    t_true(a.addr == NULL);
    t_ok(link_pool_alloc(p, 999999, &b, &v.op, &err), &err);
    t_until(l, v.times == 1, 5000);
    t_true(b.addr == was, "the same pages, for as many");
    t_str_eq((char *)b.addr, "still here");
    t_ok(link_pool_alloc(p, 3 << 20, &c, &u.op, &err), &err);
    t_until(l, u.times == 1, 5000);
    int fds = t_open_fds();

    link_pool_free(p, &c); /* more than is kept */
    t_until(l, t_open_fds() == fds - 1, 5000);
    link_pool_free(p, &b);
    link_pool_destroy(p);
    t_int_eq(t_open_fds(), fds - 2);
    fl_loop_destroy(l);
}

static void goes_while_it_makes(void **state)
{
    struct fl_loop *l;
    struct link_pool *p;
    struct link_mem a = { 0 };
    struct wait w = wait_for();
    struct fl_err err = { 0 };
    int fds = t_open_fds();

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    t_ok(link_pool_create(l, 1 << 20, &p, &err), &err);
    t_ok(link_pool_alloc(p, 8 << 20, &a, &w.op, &err), &err);
    link_pool_destroy(p);
    t_int_eq(w.times, 1);
    t_refused(w.op.err.status, FL_CANCELLED, &w.op.err);
    fl_loop_destroy(l);
    t_true(a.addr == NULL);
    t_int_eq(w.times, 1);
    t_int_eq(t_open_fds(), fds);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(recycles),
        cmocka_unit_test(goes_while_it_makes),
    };

    return t_run("link pool", tests);
}
