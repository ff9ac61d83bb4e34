#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/ray.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/str.h"

const struct fl_opt cli_common_opts[] = {
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct cli_common, address),
      .help = "the head's HTTP side; else FURLONG_ADDRESS, RAY_ADDRESS, or the head that runs here" },
    { FL_OPT_SWITCH, "json", .at = offsetof(struct cli_common, json), .help = "print JSON" },
    { 0 }
};

/* A program of its own: it opens devices, which no command shall. */
static int doctor(int argc, char **argv)
{
    char path[FL_PATH_MAX];
    struct fl_err err = { 0 };

    (void)argc;
    if (fl_program_path("furlong-doctor", path, &err) != FL_OK)
        return cli_failed("furlong doctor", &err);
    argv[0] = "furlong-doctor";
    execv(path, argv);
    (void)fl_fail_errno(&err, "start %s", path);
    return cli_failed("furlong doctor", &err);
}

static const struct cli_verb verbs[] = {
    { "train",   "run generate, train, update on this machine or on a cluster", cli_train   },
    { "start",   "start a head, or a worker daemon that joins one",             cli_start   },
    { "stop",    "end what runs here, or the whole cluster",                    cli_stop    },
    { "status",  "nodes, resources, jobs",                                      cli_status  },
    { "job",     "submit, list, follow and stop jobs",                          cli_job     },
    { "logs",    "the output of a job",                                         cli_logs    },
    { "list",    "nodes, jobs, workers, groups or leases",                      cli_list    },
    { "doctor",  "what of this machine would make a run fail",          doctor      },
    { "explain", "why a placement came out as it did",                          cli_explain },
    { 0 },
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
    return err->status == FL_CANCELLED ? 130 : 1;
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

static bool is_ray(const char *program)
{
    const char *slash = strrchr(program, '/');

    return strcmp(slash ? slash + 1 : program, "ray") == 0;
}

int main(int argc, char **argv)
{
    struct fl_err err = { 0 };

    if (fl_fault_env(&err) != FL_OK) {
        (void)cli_failed("furlong", &err);
        return 2;
    }
    if (is_ray(argv[0]))
        return ray_main(argc, argv);
    if (argc > 1 && strcmp(argv[1], "--version") == 0) {
        puts("furlong " FURLONG_VERSION);
        return 0;
    }
    return cli_dispatch("furlong", "A distributed worker runtime for reinforcement-learning runs.",
                        verbs, argc, argv);
}
