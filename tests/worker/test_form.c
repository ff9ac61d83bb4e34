/* tests/worker/test_form.c - the keeper's forms: what was put comes out, what is cut is refused */
#include "tests/t.h"
#include "worker/keep/form.h"
#include <stdlib.h>

static void sample(struct form *f)
{
    form_begin(f, FORM_EXIT);
    form_put_u64(f, FORM_CODE, 7);
    form_put_text(f, FORM_WHY, "ended");
    form_put(f, FORM_LAST, "a\0b", 3);
    form_put_text(f, FORM_CWD, NULL);
    t_true(form_end(f));
}

static void round_trip(void **state)
{
    struct form f = { 0 };
    struct form_field x;
    size_t at = 0;

    (void)state;
    sample(&f);
    t_true(form_check(f.data, f.len, FORM_EXIT));
    t_true(!form_check(f.data, f.len, FORM_SPEC));
    t_true(form_next(f.data, f.len, &at, &x));
    t_int_eq(x.tag, FORM_CODE);
    t_int_eq(form_u64(&x), 7);
    t_true(form_next(f.data, f.len, &at, &x));
    t_str_eq(form_text(&x), "ended");
    t_int_eq(form_u64(&x), 0, "a text is no number");
    t_true(form_next(f.data, f.len, &at, &x));
    t_int_eq(x.len, 3);
    t_true(!form_next(f.data, f.len, &at, &x));
    form_fini(&f);
}

static void cut_or_bent(void **state)
{
    struct form f = { 0 };
    uint64_t seed = 7;

    (void)state;
    sample(&f);
    for (size_t n = 0; n < f.len; n++)
        t_true(!form_check(f.data, n, FORM_EXIT), "cut at %zu", n);
    for (unsigned i = 0; i < 20000; i++) { /* walked under the sanitizers whatever it says */
        uint8_t *bent = malloc(f.len);
        struct form_field x;
        size_t at = 0;

        memcpy(bent, f.data, f.len);
        for (unsigned k = 0; k < 3; k++)
            bent[t_random(&seed) % f.len] = (uint8_t)t_random(&seed);
        if (form_check(bent, f.len, FORM_EXIT))
            while (form_next(bent, f.len, &at, &x))
                t_true(strlen(form_text(&x)) <= x.len);
        free(bent);
    }
    form_fini(&f);
}

static void too_much(void **state)
{
    struct form f = { 0 };
    char *big = calloc(1, FORM_MAX);

    (void)state;
    form_begin(&f, FORM_SPEC);
    form_put(&f, FORM_ENV, big, FORM_MAX);
    t_true(!form_end(&f));
    form_fini(&f);
    free(big);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(cut_or_bent),
        cmocka_unit_test(too_much),
    };

    return t_run("form", tests);
}
