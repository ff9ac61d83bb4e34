/* tests/t.h - what every unit test includes: cmocka in TAP, checks with a sentence, a temp folder
 *
 *     static void grows(void **state) { ... t_int_eq(n, 3, "row %s", row->name); }
 *     int main(void)
 *     {
 *         static const struct CMUnitTest tests[] = { cmocka_unit_test(grows) };
 *         return t_run("buffer", tests);
 *     }
 *
 * Checks are for the main thread of the test alone. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "common/base/loop.h"

#define t_run(name, tests) t_run_(name, tests, sizeof(tests) / sizeof((tests)[0]))
int t_run_(const char *name, const struct CMUnitTest *tests, size_t n);
void t_skip(const char *why, ...) __attribute__((format(printf, 1, 2), noreturn)); /* says SKIP why */

/* The words after the condition are optional: a format and its values. */
#define t_true(cond, ...)                                                                         \
    ((cond) ? (void)0 : t_fail_(__FILE__, __LINE__, "not true: " #cond, " " __VA_ARGS__))
#define t_int_eq(got, wanted, ...)                                                                \
    t_int_eq_(__FILE__, __LINE__, #got, (intmax_t)(got), (intmax_t)(wanted), " " __VA_ARGS__)
#define t_str_eq(got, wanted, ...)                                                                \
    t_str_eq_(__FILE__, __LINE__, #got, (got), (wanted), " " __VA_ARGS__)
#define t_mem_eq(got, wanted, len, ...)                                                           \
    t_true(memcmp((got), (wanted), (len)) == 0, __VA_ARGS__)
#define t_has(text, part) t_has_(__FILE__, __LINE__, (text), (part)) /* part is in text */
/* st is FL_OK, else the test fails with what err says */
#define t_ok(st, err) t_ok_(__FILE__, __LINE__, #st, (st), (err))
/* st is wanted, and err carries it with one line of text */
#define t_refused(st, wanted, err) t_refused_(__FILE__, __LINE__, #st, (st), (wanted), (err))

void t_fail_(const char *file, int line, const char *what, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void t_int_eq_(const char *file, int line, const char *what, intmax_t got, intmax_t wanted,
               const char *fmt, ...) __attribute__((format(printf, 6, 7)));
void t_str_eq_(const char *file, int line, const char *what, const char *got, const char *wanted,
               const char *fmt, ...) __attribute__((format(printf, 6, 7)));
void t_has_(const char *file, int line, const char *text, const char *part);
void t_ok_(const char *file, int line, const char *what, enum fl_status st,
           const struct fl_err *err);
void t_refused_(const char *file, int line, const char *what, enum fl_status st,
                enum fl_status wanted, const struct fl_err *err);

int t_open_fds(void); /* of this process, without the one that looks */
void t_open_names(char *out, size_t cap); /* what they are: "3 socket:[17], 4 /dev/null" */

/* One folder a test program, made on first use, removed with all in it at the end. */
const char *t_tmp(void);
/* PATH of name in it; four may be in use at a time */
const char *t_path(const char *name);

/* Turns the loop until cond holds; fails the test after wait_ms of real time. */
#define t_until(loop, cond, wait_ms)                                                              \
    do {                                                                                          \
        uint64_t t_end_ = fl_clock_boot_ns() + (uint64_t)(wait_ms) * 1000000u;                    \
        while (!(cond)) {                                                                         \
            t_true(fl_clock_boot_ns() < t_end_, "waited %d ms for " #cond, (int)(wait_ms));       \
            fl_loop_turn((loop), 20);                                                             \
        }                                                                                         \
    } while (0)

/* Times that a test compares with a limit are that much longer under a sanitizer. */
#ifdef __SANITIZE_THREAD__
#define T_SLOWDOWN 20
#elif defined(__SANITIZE_ADDRESS__)
#define T_SLOWDOWN 5
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define T_SLOWDOWN 20
#else
#define T_SLOWDOWN 1
#endif
#else
#define T_SLOWDOWN 1
#endif

/* xorshift64*: the same numbers in every run; seed is not 0 */
uint64_t t_random(uint64_t *seed);
