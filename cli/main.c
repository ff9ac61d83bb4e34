#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/ray.h"
#include "common/base/fault.h"
#include "common/base/file.h"

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
    { "list",    "nodes, devices, jobs, workers, groups, leases or ports",                      cli_list    },
    { "doctor",  "what of this machine would make a run fail",          doctor      },
    { "explain", "why a placement came out as it did",                          cli_explain },
    { 0 },
};

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
