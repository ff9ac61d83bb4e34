#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/interrupt.h"
#include "common/base/str.h"

const struct fl_opt cli_common_opts[] = {
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct cli_common, address),
      .help = "the head's HTTP side; else FURLONG_ADDRESS, RAY_ADDRESS, or the head that runs here" },
    { FL_OPT_SWITCH, "json", .at = offsetof(struct cli_common, json), .help = "print JSON" },
    { 0 }
};

static void print_verbs(const char *program, const char *about, const struct cli_verb *v, FILE *to)
{
    fprintf(to, "Usage: %s VERB [OPTION...]\n%s\n\n", program, about);
    for (; v->name; v++)
        fprintf(to, "  %-10s %s\n", v->name, v->summary);
    fprintf(to, "\n%s VERB --help says more of each. Exit codes: 2 usage, 1 our own failure, otherwise "
                "the job's.\n", program);
}

static int no_such_verb(const char *program, const struct cli_verb *v, const char *word)
{
    const char *best = NULL;
    unsigned least = 4;

    for (; v->name; v++)
        if (fl_edit_distance(word, v->name) < least) {
            least = fl_edit_distance(word, v->name);
            best = v->name;
        }
    if (best)
        return cli_misused(program, "no verb '%s'; did you mean %s?", word, best);
    return cli_misused(program, "no verb '%s'; see %s --help", word, program);
}

int cli_dispatch(const char *program, const char *about, const struct cli_verb *v, int argc,
                 char **argv)
{
    const char *word = argc > 1 ? argv[1] : NULL;

    if (!word || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        print_verbs(program, about, v, word ? stdout : stderr);
        return word ? 0 : 2;
    }
    for (const struct cli_verb *p = v; p->name; p++)
        if (strcmp(p->name, word) == 0)
            return p->run(argc - 1, argv + 1);
    return no_such_verb(program, v, word);
}

int cli_failed(const char *program, const struct fl_err *err)
{
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", program, err->text);
    if (err->status != FL_CANCELLED)
        return err->status == FL_INVALID ? 2 : 1;
    return cli_interrupt_code() ? cli_interrupt_code() : 130;
}

int cli_misused(const char *program, const char *fmt, ...)
{
    va_list ap;

    fflush(stdout);
    fprintf(stderr, "%s: ", program);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return 2;
}

void cli_print_json(const json_t *o)
{
    json_dumpf(o, stdout, JSON_INDENT(2) | JSON_ENCODE_ANY);
    putchar('\n');
}

int cli_show(const char *program, const struct cli_common *common, const char *path,
             void (*print)(const json_t *answer))
{
    struct cli_cluster c;
    struct fl_err err = { 0 };
    json_t *answer;

    if (cli_cluster_find(common->address, &c, &err) != FL_OK ||
        cli_call(&c, "GET", path, NULL, 10000, &answer, &err) != FL_OK)
        return cli_failed(program, &err);
    if (common->json)
        cli_print_json(answer);
    else
        print(answer);
    json_decref(answer);
    return 0;
}
