/* a second process that hangs in the driver: what it could not answer is not taken from a later
 * device, and the others are known all the same */
#include <stdlib.h>

#include "common/gpu/probe.h"
#include "tests/t.h"

static void one_that_hangs_is_given_up(void **state)
{
    struct gpu_found found[4];
    struct fl_err err = { 0 };
    size_t n = FL_LEN(found);
    uint64_t began = fl_clock_boot_ns();

    (void)state;
    setenv("FURLONG_FAULT", "gpu.import:1=stop", 1); /* the second process alone imports */
    t_ok(gpu_probe(getenv("T_PROBE"), 60000, found, &n, &err), &err);
    t_int_eq(n, 3);
    t_true(fl_clock_boot_ns() - began < 40000000000ull, "one wait, not one a device");
    for (size_t i = 0; i < n; i++) {
        t_true(found[i].opens, "device %zu", i);
        t_true(!found[i].fd_shares && !found[i].handle_shares, "device %zu: nobody tried", i);
        t_has(found[i].fd_not, i ? "the second process" : "no answer in 20 s");
        t_true(found[i].peers == (7ull & ~(1ull << i)), "device %zu", i);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = { cmocka_unit_test(one_that_hangs_is_given_up) };

    return t_run("probe slow", tests);
}
