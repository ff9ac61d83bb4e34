/* Prompt files, the alphabet, rewards. */
#include "tests/t.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/file.h"
#include "worker/roles/prompts.h"
#include "worker/roles/reward.h"

static void bad_lines(void **state)
{
    static const struct { const char *name, *text, *part, *more; } rows[] = {
        { "no JSON", "{\"input\":\"a\",\"label\":\"b\"}\n{\"input\":\n", "line 2", "" },
        { "no input", "{\"label\":\"b\"}\n", "line 1", "input" },
        { "no label", "{\"input\":\"a\",\"label\":\"b\"}\n\n{\"input\":\"a\"}\n", "line 3", "label" },
        { "a list", "{\"input\":[\"a\"],\"label\":\"b\"}\n", "line 1", "input" },
        { "no object", "[1]\n", "line 1", "" },
        { "empty prompt", "{\"input\":\"\",\"label\":\"b\"}\n", "line 1", "empty" },
        { "a zero byte", "{\"input\":\"a\\u0000\",\"label\":\"b\"}\n", "line 1", "" },
        { "nothing", "\n", "", "no prompt" },
    };
    struct prompts *p = NULL;
    struct fl_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        const char *path = t_path("prompts.jsonl");

        t_ok(fl_file_write(path, 0600, rows[i].text, strlen(rows[i].text), &err), &err);
        t_refused(prompts_load(path, "input", "label", &p, &err), FL_INVALID, &err);
        t_has(err.text, "prompts.jsonl");
        t_has(err.text, rows[i].part);
        t_has(err.text, rows[i].more);
        t_true(p == NULL, "%s", rows[i].name);
    }
    t_refused(prompts_load(t_path("none.jsonl"), "input", "label", &p, &err), FL_NOT_FOUND, &err);
    t_has(err.text, "none.jsonl");
}

static void good_lines(void **state)
{
    static const char text[] = "{\"q\":\"2+3\",\"a\":5}\n{\"q\":\"x\",\"a\":\"yes\"}";
    struct prompts *p;
    struct fl_err err;

    (void)state;
    t_ok(fl_file_write(t_path("good.jsonl"), 0600, text, strlen(text), &err), &err);
    t_ok(prompts_load(t_path("good.jsonl"), "q", "a", &p, &err), &err);
    t_int_eq(p->n, 2);
    t_str_eq(p->rows[0].input, "2+3");
    t_str_eq(p->rows[0].label, "5");
    t_str_eq(p->rows[1].label, "yes");
    prompts_destroy(p);
}

/* It must be read to be answered: the best answer that is always the same. */
static void shipped_files(void **state)
{
    static const char *const names[] = { "lookup.jsonl", "lookup-heldout.jsonl" };
    struct prompts *p[2];
    struct fl_err err;
    char path[1024];

    (void)state;
    for (int i = 0; i < 2; i++) {
        uint32_t counts[256] = { 0 };

        t_ok(prompts_shipped(names[i], path, &err), &err);
        t_ok(prompts_load(path, "input", "label", &p[i], &err), &err);
        for (uint32_t k = 0; k < p[i]->n; k++) {
            t_int_eq(strlen(p[i]->rows[k].label), 1);
            counts[(uint8_t)p[i]->rows[k].label[0]]++;
        }
        for (int b = 0; b < 256; b++)
            t_true(counts[b] < 0.3 * p[i]->n, "%s: always '%c' scores %u of %u", names[i], b, counts[b],
                   p[i]->n);
    }
    for (uint32_t k = 0; k < p[1]->n; k++)
        for (uint32_t j = 0; j < p[0]->n; j++)
            t_true(strcmp(p[1]->rows[k].input, p[0]->rows[j].input) != 0, "held out and trained on: %s",
                   p[1]->rows[k].input);
    prompts_destroy(p[0]);
    prompts_destroy(p[1]);
    t_refused(prompts_shipped("no-such.jsonl", path, &err), FL_NOT_FOUND, &err);
    t_has(err.text, "--prompt-data");
}

static void alphabets(void **state)
{
    struct alphabet a, b;
    char hex[ALPHABET_HEX], text[32];
    int32_t tokens[32];
    uint32_t n;
    struct fl_err err;

    (void)state;
    alphabet_init(&a);
    alphabet_add(&a, "cab");
    alphabet_add(&a, "a\xff");
    alphabet_settle(&a);
    t_int_eq(a.n, 5);
    alphabet_to_hex(&a, hex);
    t_str_eq(hex, "616263ff");
    t_ok(alphabet_of_hex(hex, &b, &err), &err);
    t_int_eq(b.n, 5);
    t_ok(alphabet_encode(&b, "bac", tokens, &n, &err), &err);
    t_int_eq(n, 3);
    t_int_eq(tokens[0], 2);
    tokens[3] = ALPHABET_END;
    tokens[4] = 1;
    alphabet_decode(&b, tokens, 5, text);
    t_str_eq(text, "bac");
    t_refused(alphabet_encode(&a, "abd", tokens, &n, &err), FL_INVALID, &err);
    t_has(err.text, "0x64");
    static const char *const bad[] = { "", "6", "zz", "6161", "00" };
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        t_refused(alphabet_of_hex(bad[i], &b, &err), FL_INVALID, &err);
}

static const struct reward_row answers[] = {
    { "p1", "7", "7" }, { "p2", " 7\n", "7" }, { "p3", "77", "7" }, { "p \"4\"", "", "" },
};

static void exact(void **state)
{
    float r[4];

    (void)state;
    t_ok(reward_score(NULL, answers, 4, 0, r, NULL), NULL);
    t_true(r[0] == 1 && r[1] == 1 && r[2] == 0 && r[3] == 1);
}

static void by_command(void **state)
{
    static const struct {
        const char *command;
        enum fl_status st;
        const char *part;
        uint32_t budget_ms;
    } rows[] = {
        { "exit 3", FL_INVALID, "exit code 3", 10000 },
        { "kill -9 $$", FL_INVALID, "signal 9", 10000 },
        { "echo 1; echo 2", FL_INVALID, "answered 2 lines to 4", 10000 },
        { "cat >/dev/null; echo 1; echo 2; echo many; echo 4", FL_INVALID, "line 3: 'many'", 10000 },
        { "cat >/dev/null; echo 1; echo 2; echo nan; echo 4", FL_INVALID, "line 3: 'nan'", 10000 },
        { "cat >/dev/null; for i in 1 2 3 4 5; do echo $i; done", FL_INVALID, "more than 4", 10000 },
        { "sleep 30", FL_TIMEOUT, "--reward-timeout", 50 },
        { "exec >&-; sleep 30", FL_TIMEOUT, "did not end", 50 },
        { "/no/such/program", FL_INVALID, "127", 10000 },
    };
    struct fl_err err;
    float r[4];
    int fds = t_open_fds();

    (void)state;
    (void)signal(SIGPIPE, SIG_IGN);
    t_ok(reward_score("while read -r line; do case $line in *p2*) echo 0.5;; *) echo -1;; esac; done",
                      answers, 4, 10000, r, &err),
         &err);
    t_true(r[0] == -1 && r[1] == 0.5f && r[2] == -1 && r[3] == -1);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        t_refused(reward_score(rows[i].command, answers, 4, rows[i].budget_ms, r, &err), rows[i].st, &err);
        t_has(err.text, rows[i].part);
        t_has(err.text, "--reward-cmd");
        t_int_eq(t_open_fds(), fds, "%s", rows[i].command);
    }
}

/* More than a pipe holds, both ways, to a command that answers as it reads. */
static void by_command_many(void **state)
{
    enum { N = 20000 };
    struct reward_row *rows = calloc(N, sizeof(*rows));
    float *r = calloc(N, sizeof(*r));
    struct fl_err err;

    (void)state;
    for (int i = 0; i < N; i++)
        rows[i] = answers[i % 4];
    t_ok(reward_score("sed 's/.*/0.25/'", rows, N, 20000, r, &err), &err);
    for (int i = 0; i < N; i++)
        t_true(r[i] == 0.25f);
    free(rows);
    free(r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_lines), cmocka_unit_test(good_lines),  cmocka_unit_test(shipped_files),
        cmocka_unit_test(alphabets), cmocka_unit_test(exact),       cmocka_unit_test(by_command),
        cmocka_unit_test(by_command_many),
    };

    return t_run("prompts", tests);
}
