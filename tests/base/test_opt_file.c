#include <stdlib.h>

#include "common/base/file.h"
#include "common/conf/opt.h"
#include "tests/t.h"

struct flags {
    int64_t n;
    bool fast;
    double lr;
    uint64_t bytes;
    const char *model;
};
static const struct fl_opt table[] = {
    { FL_OPT_INT, "num-rollout", .env = "T_OPT_FILE_N", .fallback = "5", .min = 1, .max = 100,
      .at = offsetof(struct flags, n) },
    { FL_OPT_SWITCH, "fast", .off = true, .at = offsetof(struct flags, fast) },
    { FL_OPT_REAL, "lr", .at = offsetof(struct flags, lr) },
    { FL_OPT_BYTES, "buffer", .min = 4096, .max = 1 << 20, .at = offsetof(struct flags, bytes) },
    { FL_OPT_TEXT, "hf-checkpoint", "model", .at = offsetof(struct flags, model) },
    { 0 }
};

static enum fl_status parse(const char *line_word, const char *text, struct flags *f, json_t **keep,
                            struct fl_err *err)
{
    char *argv[] = { (char *)"t", (char *)line_word };
    struct fl_opts o = { .program = "t", .tables = { { NULL, table, f } } };

    *f = (struct flags){ 0 };
    *keep = NULL;
    t_ok(fl_file_write(t_path("flags.json"), 0600, text, strlen(text), err), err);
    FL_TRY(fl_opts_parse(&o, line_word ? 2 : 1, argv, err));
    return fl_opts_file(&o, t_path("flags.json"), keep, err);
}

static void a_file_counts_less_than_all_but_defaults(void **state)
{
    static const char text[] =
        "{\"num-rollout\": 9, \"fast\": true, \"lr\": 0.5, \"buffer\": \"8KiB\", "
        "\"model\": 37, \"lr2\": null}";
    struct fl_err err = { 0 };
    struct flags f;
    json_t *keep;

    (void)state;
    t_ok(parse(NULL, text, &f, &keep, &err), &err);
    t_true(f.n == 9 && f.fast && f.lr == 0.5 && f.bytes == 8192);
    t_str_eq(f.model, "37");
    json_decref(keep);
    t_ok(parse("--num-rollout=3", text, &f, &keep, &err), &err);
    t_int_eq(f.n, 3);
    json_decref(keep);
    setenv("T_OPT_FILE_N", "4", 1);
    t_ok(parse("--no-fast", text, &f, &keep, &err), &err);
    t_true(f.n == 4 && !f.fast);
    json_decref(keep);
    unsetenv("T_OPT_FILE_N");
}

static void what_is_wrong_in_a_file_is_named(void **state)
{
    static const struct row {
        const char *text, *says;
    } rows[] = {
        { "{\"num-rolout\": 9}",
          "flags.json: unknown option --num-rolout; did you mean --num-rollout?" },
        { "{\"num-rollout\": 900}", "flags.json: --num-rollout: 900 is not between 1 and 100" },
        { "{\"num-rollout\": 1.5}", "--num-rollout: \"1.5\" is not a whole number" },
        { "{\"buffer\": 12}", "--buffer: 12 is less than 4096 bytes" },
        { "{\"buffer\": \"2MiB\"}", "--buffer: 2MiB is more than 1048576 bytes" },
        { "{\"lr\": [1]}", "flags.json: lr: give a string, a number, true or false" },
        { "[1]", "flags.json: is not an object of options" },
        { "{", "flags.json: not JSON at column" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct fl_err err = { 0 };
        struct flags f;
        json_t *keep;

        t_refused(parse(NULL, rows[i].text, &f, &keep, &err), FL_INVALID, &err);
        t_has(err.text, rows[i].says);
        t_true(!keep);
    }
}

/* The option itself: --config FILE on the command line of those that take one. */
static void config_names_the_file(void **state)
{
    static const struct row {
        const char *words[4], *says; /* says NULL: it is read, n is 9 */
        bool takes_none;
    } rows[] = {
        { { "t", "--config=%s" }, NULL, false },
        { { "t", "--config", "%s" }, NULL, false },
        { { "t", "--config", "%s", "--fast" }, NULL, false },
        { { "t", "--config" }, "--config: FILE is missing", false },
        { { "t", "--confg=x" }, "unknown option --confg; did you mean --config?", false },
        { { "t", "--config=/no/such/file" }, "/no/such/file", false },
        { { "t", "--config=%s" }, "unknown option --config; see t --help", true },
    };
    static const char text[] = "{\"num-rollout\": 9, \"model\": \"/m\"}";
    char words[4][300], *argv[4];
    struct fl_err err = { 0 };

    (void)state;
    t_ok(fl_file_write(t_path("flags.json"), 0600, text, strlen(text), &err), &err);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct flags f = { 0 };
        struct fl_opts o = { .program = "t", .tables = { { NULL, table, &f } }, .takes_file = !rows[i].takes_none };
        int n = 0;

        for (; n < 4 && rows[i].words[n]; n++) {
            const char *mark = strstr(rows[i].words[n], "%s");

            snprintf(words[n], sizeof(words[n]), "%.*s%s", mark ? (int)(mark - rows[i].words[n]) : 99, rows[i].words[n],
                     mark ? t_path("flags.json") : "");
            argv[n] = words[n];
        }
        enum fl_status st = fl_opts_parse(&o, n, argv, &err);

        if (rows[i].says) {
            t_true(st != FL_OK, "row %zu", i);
            t_has(err.text, rows[i].says);
        } else {
            t_ok(st, &err);
            t_int_eq(f.n, 9, "row %zu", i);
            t_str_eq(f.model, "/m");
            t_int_eq(fl_opts_from(&o, "model"), FL_OPT_FILE);
        }
        fl_opts_fini(&o);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_counts_less_than_all_but_defaults),
        cmocka_unit_test(what_is_wrong_in_a_file_is_named),
        cmocka_unit_test(config_names_the_file),
    };

    return t_run("opt_file", tests);
}
