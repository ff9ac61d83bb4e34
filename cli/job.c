#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/follow.h"
#include "cli/job.h"
#include "cli/quote.h"
#include "common/base/str.h"

/* ==== submit ======================================================================================= */
struct submit {
    struct cli_common common;
    const char *id, *env_json, *working_dir, *metadata, *resources;
    double cpus, gpus;
    uint64_t memory;
    int64_t restarts;
    bool no_wait;
};
static const struct fl_opt submit_opts[] = {
    { FL_OPT_TEXT, "submission-id", .arg = "ID", .at = offsetof(struct submit, id), .help = "(default: made by the head)" },
    { FL_OPT_TEXT, "runtime-env-json", .arg = "JSON", .at = offsetof(struct submit, env_json), .help = "env_vars and working_dir of the job" },
    { FL_OPT_TEXT, "working-dir", .arg = "FOLDER", .at = offsetof(struct submit, working_dir), .help = "where it starts, on the driver's node (default: here)" },
    { FL_OPT_TEXT, "metadata-json", .arg = "JSON", .at = offsetof(struct submit, metadata), .help = "strings to keep with the job" },
    { FL_OPT_REAL, "entrypoint-num-cpus", .arg = "N", .max = 1e6, .at = offsetof(struct submit, cpus), .help = "reserved for the command itself" },
    { FL_OPT_REAL, "entrypoint-num-gpus", .arg = "N", .max = 1e6, .at = offsetof(struct submit, gpus), .help = "reserved for the command itself" },
    { FL_OPT_BYTES, "entrypoint-memory", .arg = "BYTES", .at = offsetof(struct submit, memory), .help = "reserved for the command itself" },
    { FL_OPT_TEXT, "entrypoint-resources", .arg = "JSON", .at = offsetof(struct submit, resources), .help = "reserved for the command itself" },
    { FL_OPT_INT, "driver-restarts", .arg = "N", .fallback = "0", .max = 1000, .at = offsetof(struct submit, restarts),
      .help = "start the command again when it fails, so often" },
    { FL_OPT_SWITCH, "no-wait", .at = offsetof(struct submit, no_wait), .help = "print the id and leave it running" },
    { 0 }
};

/* Sets o[name] to the object that text holds; false and a sentence when it is none. */
static bool put_object(json_t *o, const char *name, const char *flag, const char *text)
{
    json_error_t bad;
    json_t *v = text ? json_loads(text, JSON_REJECT_DUPLICATES, &bad) : NULL;

    if (!text)
        return true;
    if (!json_is_object(v)) {
        json_decref(v);
        (void)cli_misused("furlong job submit", "--%s: %s", flag, v ? "an object is wanted" : bad.text);
        return false;
    }
    return json_object_set_new(o, name, v) == 0;
}

static json_t *submission(const struct submit *s, const char *entrypoint)
{
    char here[4096];
    json_t *o = json_pack("{s:s}", "entrypoint", entrypoint);
    const char *cwd = s->working_dir ? s->working_dir : getcwd(here, sizeof(here));
    bool ok = o && put_object(o, "runtime_env", "runtime-env-json", s->env_json) &&
              put_object(o, "metadata", "metadata-json", s->metadata) &&
              put_object(o, "entrypoint_resources", "entrypoint-resources", s->resources);

    if (ok && s->id)
        ok = json_object_set_new(o, "submission_id", json_string(s->id)) == 0;
    if (ok && s->cpus > 0)
        ok = json_object_set_new(o, "entrypoint_num_cpus", json_real(s->cpus)) == 0;
    if (ok && s->gpus > 0)
        ok = json_object_set_new(o, "entrypoint_num_gpus", json_real(s->gpus)) == 0;
    if (ok && s->memory > 0)
        ok = json_object_set_new(o, "entrypoint_memory", json_integer((json_int_t)s->memory)) == 0;
    if (ok)
        ok = json_object_set_new(o, "furlong", json_pack("{s:I,s:s*}", "driver_restarts",
                                                         (json_int_t)s->restarts, "cwd", cwd)) == 0;
    if (ok)
        return o;
    json_decref(o);
    return NULL;
}

enum fl_status cli_submit(const struct cli_cluster *c, const json_t *submission, char id[CLI_JOB_BYTES],
                          struct fl_err *err)
{
    json_t *answer;

    FL_TRY(cli_call(c, "POST", "/api/jobs/", submission, 30000, &answer, err));
    (void)fl_copy(id, CLI_JOB_BYTES, cli_text(answer, "submission_id"));
    json_decref(answer);
    return *id ? FL_OK : fl_fail(err, FL_CORRUPT, "the head at %s named no job", c->url);
}

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
    return end.exit_code ? end.exit_code : 1;
}

static int job_submit(int argc, char **argv)
{
    struct submit s = { 0 };
    struct fl_opts o = {
        .program = "furlong job submit", .usage = "[OPTION...] -- COMMAND [ARG...]",
        .about = "Runs a command as a job and follows it; exits with its code. One word is a shell line.",
        .first_word_ends = true,
        .tables = { { NULL, submit_opts, &s }, { NULL, cli_common_opts, &s.common } },
    };
    struct cli_follow how = { .show = CLI_SHOW_LOG, .away_max_ms = 600000 };
    char id[CLI_JOB_BYTES];
    struct cli_cluster c;
    struct fl_err err = { 0 };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    if (!o.n_words)
        return cli_misused(o.program, "a command is wanted: %s -- COMMAND", o.program);
    char **words = calloc(o.n_words + 1, sizeof(*words));
    if (!words)
        abort();
    memcpy(words, o.words, o.n_words * sizeof(*words));
    char *line = o.n_words == 1 ? strdup(words[0]) : cli_shell_line((const char *const *)words);
    json_t *body = submission(&s, line);

    free(words);
    free(line);
    if (!body)
        return 2;
    if (cli_cluster_find(s.common.address, &c, &err) == FL_OK)
        (void)cli_submit(&c, body, id, &err);
    json_decref(body);
    if (err.status != FL_OK)
        return cli_failed(o.program, &err);
    if (s.common.json)
        printf("{\"submission_id\": \"%s\"}\n", id);
    else if (s.no_wait)
        puts(id);
    else
        fprintf(stderr, "job %s\n", id);
    fflush(stdout);
    return s.no_wait || s.common.json ? 0 : cli_watch(o.program, &c, id, &how);
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

static void print_job(const json_t *j)
{
    printf("job %s: %s", cli_text(j, "submission_id"), cli_text(j, "status"));
    if (json_is_integer(json_object_get(j, "exit_code")))
        printf(", exit code %lld", (long long)cli_int(j, "exit_code"));
    printf("\n  %s\n", cli_text(j, "entrypoint"));
    if (*cli_text(j, "message"))
        printf("  %s\n", cli_text(j, "message"));
}

static void print_stop(const json_t *j)
{
    puts(json_is_true(json_object_get(j, "stopped")) ? "stopping" : "it had ended already");
}

/* A verb with one job as its word: one request, one answer. */
static int one_job(const char *program, const char *about, const char *path_of, const char *method,
                   void (*print)(const json_t *), int argc, char **argv)
{
    struct cli_common common = { 0 };
    struct fl_opts o = { .program = program, .usage = "JOB [OPTION...]", .about = about,
                         .tables = { { NULL, cli_common_opts, &common } } };
    char path[CLI_JOB_BYTES + 64];
    struct cli_cluster c;
    struct fl_err err = { 0 };
    json_t *answer;
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    if (o.n_words != 1 || strlen(o.words[0]) >= CLI_JOB_BYTES)
        return no_such_job(program);
    snprintf(path, sizeof(path), "%s/%s%s", *path_of ? "/api/jobs" : "/api/furlong/jobs", o.words[0],
             path_of);
    if (cli_cluster_find(common.address, &c, &err) != FL_OK ||
        cli_call(&c, method, path, NULL, 30000, &answer, &err) != FL_OK)
        return cli_failed(program, &err);
    if (common.json)
        cli_print_json(answer);
    else
        print(answer);
    json_decref(answer);
    return 0;
}

static int job_stop(int argc, char **argv)
{
    return one_job("furlong job stop", "Asks the job's command to end, then ends it and all its workers.",
                   "/stop", "POST", print_stop, argc, argv);
}

static int job_status(int argc, char **argv)
{
    return one_job("furlong job status", "Where the job stands.", "", "GET", print_job, argc, argv);
}

static const struct cli_verb job_verbs[] = {
    { "submit", "run a command as a job and follow it", job_submit },
    { "list",   "all jobs",                             job_list   },
    { "status", "where one stands",                     job_status },
    { "logs",   "what it printed, or prints",           job_logs   },
    { "stop",   "end it",                               job_stop   },
    { 0 },
};

int cli_job(int argc, char **argv)
{
    return cli_dispatch("furlong job", "Commands that the cluster runs on a node of its own.", job_verbs,
                        argc, argv);
}
