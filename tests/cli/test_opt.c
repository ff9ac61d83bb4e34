/* Option tables: what wins, what is refused and in which words, what is handed on. */
#include <stdlib.h>

#include "common/conf/opt.h"
#include "tests/t.h"

struct flags { bool fast, safe; int64_t n; double rate; uint64_t bytes; const char *mode, *file, *token; };
static const struct fl_opt table[] = {
    { FL_OPT_SWITCH, "fast", .letter = 'f', .at = offsetof(struct flags, fast), .help = "be fast" },
    { FL_OPT_SWITCH, "safe", .off = true, .fallback = "true", .at = offsetof(struct flags, safe), .help = "be safe" },
    { FL_OPT_INT, "num-rollout", "steps", .letter = 'n', .arg = "N", .env = "T_OPT_N", .fallback = "5", .min = 1, .max = 100,
      .at = offsetof(struct flags, n), .help = "how often" },
    { FL_OPT_REAL, "lr", .min = 0, .max = 1, .fallback = "0.5", .at = offsetof(struct flags, rate), .help = "rate" },
    { FL_OPT_BYTES, "buffer", .fallback = "512MiB", .at = offsetof(struct flags, bytes), .help = "size" },
    { FL_OPT_TEXT, "mode", .choices = "copy|share|auto", .fallback = "auto", .at = offsetof(struct flags, mode), .help = "way" },
    { FL_OPT_TEXT, "file", .at = offsetof(struct flags, file), .help = "where" },
    { FL_OPT_TEXT, "auth-token", .at = offsetof(struct flags, token), .help = "secret" },
    { 0 }
};

/* Words of a line, by spaces; at most 15. */
static enum fl_status parse(const char *line, struct fl_opts *o, struct flags *f, struct fl_err *err)
{
    static char text[256], *argv[17];
    int argc = 1;

    snprintf(text, sizeof(text), "%s", line);
    argv[0] = (char[]){ "prog" };
    for (char *w = strtok(text, " "); w; w = strtok(NULL, " "))
        argv[argc++] = w;
    *f = (struct flags){ 0 };
    *o = (struct fl_opts){ .program = "prog", .tables = { { NULL, table, f } }, .first_word_ends = o->first_word_ends };
    *err = (struct fl_err){ 0 };
    return fl_opts_parse(o, argc, argv, err);
}

static void test_values(void **state)
{
    struct fl_opts o = { 0 };
    struct flags f;
    struct fl_err err;

    (void)state;
    unsetenv("T_OPT_N");
    t_ok(parse("", &o, &f, &err), &err);
    t_int_eq(f.n, 5);
    t_true(f.safe && !f.fast);
    t_int_eq(f.bytes, 512 << 20);
    t_true(!fl_opts_given(&o, "num-rollout"));
    t_ok(parse("-f --no-safe --steps=7 --lr 0.25 --buffer=64k --mode share --file -- -- -x y", &o, &f, &err), &err);
    t_true(f.fast && !f.safe && f.n == 7 && f.rate == 0.25 && f.bytes == 65536);
    t_str_eq(f.mode, "share");
    t_str_eq(f.file, "--", "a value may look like an option");
    t_int_eq(o.n_words, 2);
    t_str_eq(o.words[0], "-x", "behind -- nothing is an option");
}

static void test_refusals(void **state)
{
    static const struct { const char *line, *words[3]; } rows[] = {
        { "--num-rolout=3", { "--num-rolout", "--num-rollout" } },
        { "--no-saef", { "--no-saef", "--no-safe" } },
        { "--zebra", { "--zebra", "prog --help" } },
        { "-z", { "-z" } },
        { "--num-rollout=0", { "--num-rollout", "0", "1" } },
        { "--num-rollout=101", { "101", "100" } },
        { "--num-rollout=3x", { "3x" } },
        { "--num-rollout", { "--num-rollout", "N is missing" } },
        { "--lr=nan", { "--lr" } },
        { "--buffer=12parsecs", { "--buffer", "12parsecs" } },
        { "--mode=teleport", { "teleport", "copy|share|auto" } },
        { "--fast=maybe", { "--fast", "maybe" } },
        { "--no-safe=1", { "takes no value" } },
        { "--no-fast", { "--no-fast" } },
    };
    struct fl_opts o = { 0 };
    struct flags f;
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        t_refused(parse(rows[i].line, &o, &f, &err), FL_INVALID, &err);
        for (size_t k = 0; k < 3 && rows[i].words[k]; k++)
            t_has(err.text, rows[i].words[k]);
    }
    t_int_eq(parse("--file=x --help", &o, &f, &err), FL_CANCELLED);
}

static void test_what_wins(void **state)
{
    struct fl_opts o = { 0 };
    struct flags f;
    struct fl_err err;
    char *keep = NULL;

    (void)state;
    setenv("T_OPT_N", "11", 1);
    t_ok(parse("--mode=copy", &o, &f, &err), &err);
    t_int_eq(f.n, 11, "environment over default");
    t_ok(fl_opts_extra(&o, "EXTRA", "--num-rollout 12 --mode=share --file='a b'\\ c", &keep, &err), &err);
    t_int_eq(f.n, 12, "extra words over environment");
    t_str_eq(f.mode, "copy", "command line over extra words");
    t_str_eq(f.file, "a b c");
    free(keep);
    t_refused(fl_opts_extra(&o, "EXTRA", "--file='a", &keep, &err), FL_INVALID, &err);
    t_has(err.text, "EXTRA");
    free(keep);
    t_refused(fl_opts_extra(&o, "EXTRA", "stray", &keep, &err), FL_INVALID, &err);
    free(keep);
    setenv("T_OPT_N", "many", 1);
    t_refused(parse("", &o, &f, &err), FL_INVALID, &err);
    t_has(err.text, "T_OPT_N");
    unsetenv("T_OPT_N");
}

static void test_handed_on_the_same(void **state)
{
    struct fl_opts o = { 0 }, again = { 0 };
    struct flags f, g;
    struct fl_err err;
    char line[256] = "";

    (void)state;
    t_ok(parse("--no-safe -n 9 --lr=0.1 --buffer=3k --file=x --auth-token=hush", &o, &f, &err), &err);
    char **words = fl_opts_words(&o, 0);
    for (char **w = words; *w; w++)
        snprintf(line + strlen(line), sizeof(line) - strlen(line), "%s ", *w);
    fl_words_free(words);
    t_true(!strstr(line, "mode"), "only what was given: %s", line);
    json_t *record = fl_opts_json(&o, 0);
    t_str_eq(json_string_value(json_object_get(record, "auth-token")), "***");
    t_str_eq(json_string_value(json_object_get(record, "mode")), "auto");
    json_decref(record);
    t_ok(parse(line, &again, &g, &err), &err);
    t_true(f.safe == g.safe && f.n == g.n && f.rate == g.rate && f.bytes == g.bytes);
}

static void test_a_command_follows(void **state)
{
    struct fl_opts o = { .first_word_ends = true };
    struct flags f;
    struct fl_err err;

    (void)state;
    t_ok(parse("-f run --num-rollout=999 -z", &o, &f, &err), &err);
    t_int_eq(o.n_words, 3);
    t_str_eq(o.words[1], "--num-rollout=999");
}

static void test_help_shows_every_option(void **state)
{
    struct fl_opts o = { 0 };
    struct flags f;
    struct fl_err err;
    char *text;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    (void)state;
    t_ok(parse("", &o, &f, &err), &err);
    fl_opts_help(&o, to);
    fclose(to);
    for (const struct fl_opt *p = table; p->name; p++)
        t_has(text, p->name);
    t_has(text, "(default 512MiB)");
    t_has(text, "[T_OPT_N]");
    free(text);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values), cmocka_unit_test(test_refusals), cmocka_unit_test(test_what_wins),
        cmocka_unit_test(test_handed_on_the_same), cmocka_unit_test(test_a_command_follows),
        cmocka_unit_test(test_help_shows_every_option),
    };
    return t_run("opt", tests);
}
