#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/follow.h"
#include "cli/job.h"
#include "common/base/str.h"

enum { STOP_LOOK_MS = 50, STOP_LOOKS_MAX = 3600 * 1000 / STOP_LOOK_MS };

/* ==== watching ===================================================================================== */
int cli_watch(const char *program, const struct cli_cluster *c, const char *job, const struct cli_follow *how)
{
    struct cli_end end = { .exit_code = 1 };
    struct fl_err err = { 0 };

    if (cli_follow(c, job, how, &end, &err) != FL_OK)
        return cli_failed(program, &err);
    if (strcmp(end.state, "SUCCEEDED") == 0)
        return end.exit_code;
    bool own = strncmp(end.message, "Job entrypoint command failed", 29) == 0; /* shown: its output, the code */

    fprintf(stderr, "job %s %s with exit code %d%s%s\n", job, strcmp(end.state, "STOPPED") == 0 ? "was stopped" : "failed",
            end.exit_code, own || !*end.message ? "" : ": ", own ? "" : end.message);
    if (how->tried && (end.exit_code == 127 || end.exit_code == 126)) /* a shell's: not found, not to be run */
        fprintf(stderr, "tried on the driver's node: %s\n", how->tried);
    return end.exit_code ? end.exit_code : 1;
}

/* ==== logs, list, stop, status ===================================================================== */
static int no_such_job(const char *program)
{
    return cli_misused(program, "one job is wanted, see furlong job list");
}

struct logs { struct cli_common common; bool follow; };
static const struct fl_opt log_opts[] = {
    { FL_OPT_SWITCH, "follow", .letter = 'f', .at = offsetof(struct logs, follow),
      .help = "until it ends; exits with the job's code" },
    { 0 }
};

/* As Ray answers: the last part of it, as one member. */
static int log_json(const char *program, const struct cli_cluster *c, const char *job)
{
    char path[CLI_JOB_BYTES + 64];
    struct fl_err err = { 0 };
    json_t *answer;

    snprintf(path, sizeof(path), "/api/jobs/%s/logs", job);
    if (cli_call(c, "GET", path, NULL, 30000, &answer, &err) != FL_OK)
        return cli_failed(program, &err);
    cli_print_json(answer);
    json_decref(answer);
    return 0;
}

static int logs(const char *program, int argc, char **argv)
{
    struct logs s = { 0 };
    struct fl_opts o = {
        .program = program, .usage = "JOB [OPTION...]",
        .about = "What the job and its workers have printed; lines of workers begin with (role rank node).",
        .tables = { { NULL, log_opts, &s }, { NULL, cli_common_opts, &s.common } },
    };
    struct cli_follow how = { .show = CLI_SHOW_LOG, .away_max_ms = 600000 };
    struct http_answer a = { 0 };
    char path[CLI_JOB_BYTES + 64];
    struct cli_cluster c;
    struct fl_err err = { 0 };
    uint64_t offset = 0;
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    if (o.n_words != 1 || strlen(o.words[0]) >= CLI_JOB_BYTES)
        return no_such_job(program);
    if (cli_cluster_find(s.common.address, &c, &err) != FL_OK)
        return cli_failed(program, &err);
    if (s.follow)
        return cli_watch(program, &c, o.words[0], &how);
    if (s.common.json)
        return log_json(program, &c, o.words[0]);
    for (;;) { /* piece by piece: an answer has a bound, a log has not */
        char text[32];

        snprintf(path, sizeof(path), "/api/furlong/jobs/%s/log?offset=%llu&wait_ms=0", o.words[0],
                 (unsigned long long)offset);
        if (cli_fetch(&c, "GET", path, NULL, 30000, &a, &err) != FL_OK)
            return cli_failed(program, &err);
        const char *next = http_answer_header(&a, "x-furlong-offset", text, sizeof(text));
        bool more = a.body_len > 0;

        fwrite(a.body, 1, a.body_len, stdout);
        offset = next ? strtoull(next, NULL, 10) : offset + a.body_len;
        http_answer_fini(&a);
        if (!more)
            return fflush(stdout) == 0 ? 0 : 1;
    }
}

static int job_logs(int argc, char **argv)
{
    return logs("furlong job logs", argc, argv);
}

int cli_logs(int argc, char **argv)
{
    return logs("furlong logs", argc, argv);
}

static int job_list(int argc, char **argv)
{
    struct cli_common common = { 0 };
    struct fl_opts o = { .program = "furlong job list", .about = "All jobs that the cluster remembers.",
                         .tables = { { NULL, cli_common_opts, &common } } };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    return o.n_words ? cli_misused(o.program, "'%s' is no option", o.words[0])
                     : cli_list_jobs(o.program, &common);
}

void cli_job_why(const json_t *job, char *out, size_t cap)
{
    const char *why = cli_text(job, "why"), *status = cli_text(job, "status");
    bool ended = strcmp(status, "FAILED") == 0 || strcmp(status, "STOPPED") == 0;

    if (!*why && ended)
        why = cli_text(job, "message");
    const char *log = strstr(why, ", last available logs"); /* what it printed is for furlong job logs */
    size_t len = log ? (size_t)(log - why) : strcspn(why, "\n");

    snprintf(out, cap, "%.*s", (int)len, why);
}

static void print_job(const json_t *j)
{
    const json_t *driver = json_object_get(j, "driver");
    bool waits = *cli_text(j, "why");
    char why[1024];

    printf("job %s: %s", cli_text(j, "submission_id"), cli_text(j, "status"));
    if (json_is_integer(json_object_get(j, "exit_code")))
        printf(", exit code %lld", (long long)cli_int(j, "exit_code"));
    if (json_is_integer(json_object_get(j, "signal")))
        printf(", signal %lld", (long long)cli_int(j, "signal"));
    printf("\n  %s\n", cli_text(j, "entrypoint"));
    cli_job_why(j, why, sizeof(why));
    if (*why)
        printf("  %s%s\n", waits ? "waits: " : "", why);
    if (*cli_text(driver, "node"))
        printf("  command on node %s at %s: %s\n", cli_text(driver, "node"), cli_text(driver, "address"), cli_text(driver, "why"));
    if (strcmp(cli_text(j, "status"), "FAILED") == 0)
        printf("  what it printed: furlong job logs %s\n", cli_text(j, "submission_id"));
}

/* BEFORE/JOB/BEHIND, asked for the job that is the only word. -1: *answer is the head's, to json_decref(); or the exit code. */
static int ask_job(const struct fl_opts *o, const struct cli_common *common, const char *method, const char *before, const char *behind,
                   struct cli_cluster *c, json_t **answer)
{
    char path[CLI_JOB_BYTES + 64];
    struct fl_err err = { 0 };

    if (o->n_words != 1 || strlen(o->words[0]) >= CLI_JOB_BYTES)
        return no_such_job(o->program);
    snprintf(path, sizeof(path), "%s/%s%s", before, o->words[0], behind);
    return cli_cluster_find(common->address, c, &err) != FL_OK || cli_call(c, method, path, NULL, 30000, answer, &err) != FL_OK
               ? cli_failed(o->program, &err)
               : -1;
}

/* A verb with one job as its word: one request, one answer. */
static int one_job(const char *program, const char *about, const char *path_of, void (*print)(const json_t *), int argc,
                   char **argv)
{
    struct cli_common common = { 0 };
    struct fl_opts o = { .program = program, .usage = "JOB [OPTION...]", .about = about,
                         .tables = { { NULL, cli_common_opts, &common } } };
    struct cli_cluster c;
    json_t *answer;
    int rc = fl_opts_main(&o, argc, argv);

    if (rc < 0)
        rc = ask_job(&o, &common, "GET", "/api/furlong/jobs", path_of, &c, &answer);
    if (rc >= 0)
        return rc;
    if (common.json)
        cli_print_json(answer);
    else
        print(answer);
    json_decref(answer);
    return 0;
}

struct stop { struct cli_common common; bool no_wait; };
static const struct fl_opt stop_opts[] = {
    { FL_OPT_SWITCH, "no-wait", .at = offsetof(struct stop, no_wait), .help = "do not wait for its end" },
    { 0 }
};

/* Until all of its processes have ended, however long a handler of SIGTERM may take: at most STOP_LOOKS_MAX times. */
static enum fl_status wait_end(const struct cli_cluster *c, const char *job, struct fl_err *err)
{
    char path[CLI_JOB_BYTES + 64];

    snprintf(path, sizeof(path), "/api/furlong/jobs/%s", job);
    for (int i = 0; i < STOP_LOOKS_MAX; i++) {
        json_t *j;

        FL_TRY(cli_call(c, "GET", path, NULL, 30000, &j, err));
        bool over = cli_job_over(cli_text(j, "status"));

        json_decref(j);
        if (over)
            return FL_OK;
        (void)usleep(STOP_LOOK_MS * 1000);
    }
    return fl_fail(err, FL_TIMEOUT, "job %s was asked to end an hour ago and has not; see furlong job status %s", job, job);
}

static int job_stop(int argc, char **argv)
{
    struct stop s = { 0 };
    struct fl_opts o = { .program = "furlong job stop", .usage = "JOB [OPTION...]",
                         .about = "Asks the job's command and all its workers to end, ends by force what does not, and waits for it.",
                         .tables = { { NULL, stop_opts, &s }, { NULL, cli_common_opts, &s.common } } };
    struct cli_cluster c;
    struct fl_err err = { 0 };
    json_t *answer;
    int rc = fl_opts_main(&o, argc, argv);

    if (rc < 0)
        rc = ask_job(&o, &s.common, "POST", "/api/jobs", "/stop", &c, &answer);
    if (rc >= 0)
        return rc;
    bool live = json_is_true(json_object_get(answer, "stopped"));

    if (live && !s.no_wait && wait_end(&c, o.words[0], &err) != FL_OK) {
        json_decref(answer);
        return cli_failed(o.program, &err);
    }
    if (s.common.json)
        cli_print_json(answer);
    else
        puts(!live ? "it had ended already" : s.no_wait ? "stopping" : "stopped");
    json_decref(answer);
    return 0;
}

static int job_status(int argc, char **argv)
{
    return one_job("furlong job status", "Where the job stands.", "", print_job, argc, argv);
}

static void print_env(const json_t *a)
{
    json_t *w, *v;
    const char *name;
    size_t i;

    json_array_foreach(json_object_get(a, "workers"), i, w) {
        printf("%s(%s %lld %s)\n", i ? "\n" : "", cli_text(w, "role"), (long long)cli_int(w, "rank"), cli_text(w, "node"));
        if (*cli_text(w, "why"))
            printf("  %s\n", cli_text(w, "why"));
        json_object_foreach(json_object_get(w, "env"), name, v)
            printf("  %s=%s\n", name, json_string_value(v));
    }
    if (json_array_size(json_object_get(a, "workers")) == 0)
        puts("it has no process now");
}

static int job_env(int argc, char **argv)
{
    return one_job("furlong job env", "What each process of the job was given as environment; secrets are masked.", "/env",
                   print_env, argc, argv);
}

static const struct cli_verb job_verbs[] = {
    { "submit", "run a command as a job and follow it", cli_job_submit },
    { "list",   "all jobs",                             job_list   },
    { "status", "where one stands",                     job_status },
    { "logs",   "what it printed, or prints",           job_logs   },
    { "env",    "what its processes were given",        job_env    },
    { "stop",   "end it",                               job_stop   },
    { 0 },
};

int cli_job(int argc, char **argv)
{
    return cli_dispatch("furlong job", "Commands that the cluster runs on a node of its own.", job_verbs,
                        argc, argv);
}
