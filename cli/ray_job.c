#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli/env.h"
#include "cli/foreign.h"
#include "cli/job.h"
#include "cli/quote.h"
#include "cli/ray.h"
#include "cli/ray_pack.h"
#include "common/base/str.h"

enum { ASK_MS = 30000, POLL_MS = 1000, HEADER_BYTES = 4096, AWAY_MS = 600000, AGAIN_MS = 30000, AGAIN_STEP_MS = 200 };
static const size_t LOG_MAX_BYTES = 2ull << 30; /* of `ray job logs`, as JSON */

/* ==== what every command of `ray job` takes ======================================================== */
struct common {
    const char *address, *headers, *verify;
    struct cli_cluster cluster;
    char header_text[HEADER_BYTES];
    bool followed; /* a job, until its end */
};
static const struct fl_opt common_opts[] = {
    { FL_OPT_TEXT, "address", .arg = "URL", .at = offsetof(struct common, address),
      .help = "http://HOST:8265; RAY_API_SERVER_ADDRESS and RAY_ADDRESS count more" },
    { FL_OPT_TEXT, "headers", .arg = "JSON", .env = "RAY_JOB_HEADERS", .at = offsetof(struct common, headers),
      .help = "of each request besides" },
    { FL_OPT_TEXT, "verify", .arg = "BOOL|FILE", .at = offsetof(struct common, verify), .help = "whether the certificate of https:// is looked at, or a file of CAs to trust (default true)" },
    { 0 }
};
static const struct ray_flag passed[] = {
    { "log-style", true }, { "log-color", true }, { "verbose", false }, { "no-format", false }, { "cluster", true }, { 0 }
};

static void take_verify(struct common *m)
{
    const char *v = m->verify;

    if (!v || strcasecmp(v, "true") == 0 || strcmp(v, "1") == 0)
        return;
    m->cluster.unverified = strcasecmp(v, "false") == 0 || strcmp(v, "0") == 0;
    if (!m->cluster.unverified)
        (void)FL_COPY(m->cluster.ca, v); /* one that is cut is a file that is not there, which is said */
}

/* -1, or the exit code. Prints which server it is, as every command of `ray job` does. */
static int find(struct common *m)
{
    struct fl_err err = { 0 };
    enum fl_status st = ray_find_api(m->address, &m->cluster, &err);

    take_verify(m);
    if (st == FL_OK && m->headers && (st = cli_headers(&m->cluster, m->headers, m->header_text, HEADER_BYTES, &err)) != FL_OK)
        return ray_failed("ValueError", "%s", err.text);
    if (st != FL_OK)
        return ray_failed("ConnectionError", "%s", err.text);
    printf("Job submission server address: %s\n", m->cluster.url);
    fflush(stdout);
    return -1;
}

/* One request. -1: *out has the answer; else the exit code, said in the words of Ray's client. */
static int ask(struct common *m, const char *method, const char *path, const json_t *body, json_t **out)
{
    struct http_answer a = { 0 };
    struct fl_err err = { 0 };
    int rc = -1;

    enum fl_status st = cli_ask(&m->cluster, method, path, body, ASK_MS, &a, &err);

    /* A port forward may go with the job that was followed through it, and come back: its end is asked for again. */
    for (int waited = 0; st != FL_OK && m->followed && waited < AGAIN_MS; waited += AGAIN_STEP_MS) {
        (void)usleep(AGAIN_STEP_MS * 1000);
        st = cli_ask(&m->cluster, method, path, body, ASK_MS, &a, &err);
    }
    if (st != FL_OK)
        return ray_failed("ConnectionError", "Failed to connect to Ray at address: %s. (%s)", m->cluster.url, err.text);
    if (a.status == 401 || a.status == 403) {
        rc = ray_failed("ray.exceptions.AuthenticationError", "Authentication %s: %s",
                        a.status == 401 ? "required" : "failed", a.body ? a.body : "");
    } else if (a.status != 200) {
        json_t *o = json_loadb(a.body ? a.body : "", a.body_len, 0, NULL);
        const char *said = cli_text(o, "error");

        rc = ray_failed("RuntimeError", "Request failed with status code %u: %s.", a.status, *said ? said : a.body ? a.body : "");
        json_decref(o);
    } else {
        *out = json_loadb(a.body, a.body_len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        if (!*out)
            rc = ray_failed("RuntimeError", "%s%s answered what is not JSON", m->cluster.url, path);
    }
    http_answer_fini(&a);
    return rc;
}

/* ==== how a job stands ============================================================================= */
static void say_status(const char *job, const json_t *details)
{
    const char *status = cli_text(details, "status"), *message = cli_text(details, "message");
    char text[CLI_JOB_BYTES + 32];

    if (strcmp(status, "SUCCEEDED") == 0 || strcmp(status, "FAILED") == 0) {
        snprintf(text, sizeof(text), "Job '%s' %s", job, *status == 'S' ? "succeeded" : "failed");
        ray_framed(text);
        if (*status == 'F' && *message)
            printf("Status message: %s\n", message);
    } else if (strcmp(status, "STOPPED") == 0) {
        printf("Job '%s' was stopped\n", job);
    } else {
        printf("Status for job '%s': %s\n", job, status);
        if (*message)
            printf("Status message: %s\n", message);
    }
}

static int get(struct common *m, const char *job, json_t **details)
{
    char path[CLI_JOB_BYTES + 32];

    snprintf(path, sizeof(path), "/api/jobs/%s", job);
    return ask(m, "GET", path, NULL, details);
}

/* ==== following ==================================================================================== */
static void show(void *arg, const char *text, size_t len)
{
    (void)arg;
    fwrite(text, 1, len, stdout);
    fflush(stdout);
}

/* Of a head that is not ours. */
static int follow_foreign(struct common *m, const char *job)
{
    const struct foreign_follow how = { .show = show, .program = "ray job", .leave = true, .away_max_ms = AWAY_MS };
    struct fl_err err = { 0 };
    json_t *details;

    fflush(stdout);
    if (foreign_follow(&m->cluster, job, &how, &details, &err) != FL_OK)
        return err.status == FL_CANCELLED ? ray_failed("", "\nAborted!") : ray_failed("RuntimeError", "%s", err.text);
    json_decref(details);
    return -1;
}

/* Until the job has ended; Ctrl-C leaves it running, as in Ray. */
static int follow(struct common *m, const char *job)
{
    struct cli_follow how = { .show = CLI_SHOW_LOG, .leave = true, .away_max_ms = AWAY_MS };
    struct cli_end end = { 0 };
    struct fl_err err = { 0 };
    bool ours = false;

    m->followed = true;
    (void)cli_is_ours(&m->cluster, &ours, NULL, &err); /* who does not answer now is waited for */
    err = (struct fl_err){ 0 };
    if (!ours)
        return follow_foreign(m, job);
    fflush(stdout);
    if (cli_follow(&m->cluster, job, &how, &end, &err) == FL_OK)
        return -1;
    return err.status == FL_CANCELLED ? ray_failed("", "\nAborted!") : ray_failed("RuntimeError", "%s", err.text);
}

/* ==== submit ======================================================================================= */
struct submit {
    struct common common;
    struct cli_wants wants;
    const char *old_id, *env_file, *env_json, *working_dir, *metadata, *resources, *labels;
    bool no_wait;
};
static const struct fl_opt submit_opts[] = {
    { FL_OPT_TEXT, "job-id", .arg = "ID", .at = offsetof(struct submit, old_id), .help = "the same, deprecated" },
    { FL_OPT_TEXT, "runtime-env", .arg = "FILE", .at = offsetof(struct submit, env_file), .help = "a YAML or JSON file" },
    { FL_OPT_TEXT, "runtime-env-json", .arg = "JSON", .at = offsetof(struct submit, env_json), .help = "env_vars, working_dir, py_modules" },
    { FL_OPT_TEXT, "working-dir", .arg = "FOLDER|URI", .at = offsetof(struct submit, working_dir), .help = "uploaded, and where the command starts" },
    { FL_OPT_TEXT, "metadata-json", .arg = "JSON", .at = offsetof(struct submit, metadata), .help = "strings to keep with the job" },
    { FL_OPT_TEXT, "entrypoint-resources", .arg = "JSON", .at = offsetof(struct submit, resources), .help = "reserved for the command" },
    { FL_OPT_TEXT, "entrypoint-label-selector", .arg = "JSON", .at = offsetof(struct submit, labels), .help = "of the command's node" },
    { FL_OPT_SWITCH, "no-wait", .at = offsetof(struct submit, no_wait), .help = "do not follow it" },
    { 0 }
};

/* o[name] = the object that text holds. False: said why. */
static bool put_object(json_t *o, const char *name, const char *flag, const char *text)
{
    json_t *v = text ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;

    if (!text)
        return true;
    if (json_is_object(v))
        return json_object_set_new(o, name, v) == 0;
    json_decref(v);
    (void)ray_failed("ValueError", "Failed to parse %s into JSON: \"%.200s\"", flag, text);
    return false;
}

static json_t *runtime_env(const struct submit *s)
{
    struct fl_err err = { 0 };
    json_t *o = NULL;

    if (s->env_file && s->env_json) {
        (void)ray_failed("ValueError", "Only one of --runtime_env and --runtime-env-json can be provided.");
        return NULL;
    }
    if (cli_env_read(s->env_json, s->env_file, &o, &err) != FL_OK) {
        (void)ray_failed("ValueError", "Failed to parse runtime env: %s", err.text);
        return NULL;
    }
    if (s->working_dir)
        json_object_set_new(o, "working_dir", json_string(s->working_dir));
    return o;
}

static json_t *submission(struct submit *s, const char *entrypoint)
{
    struct fl_err err = { 0 };
    json_t *env = runtime_env(s), *o = json_pack("{s:s}", "entrypoint", entrypoint);
    bool ok = env && o;

    s->wants.id = s->wants.id ? s->wants.id : s->old_id;
    if (ok && ray_pack_env(&s->common.cluster, env, stderr, &err) != FL_OK) {
        (void)ray_failed("ValueError", "%s", err.text);
        ok = false;
    }
    if (ok)
        ok = json_object_set(o, "runtime_env", env) == 0 &&
             put_object(o, "metadata", "metadata", s->metadata ? s->metadata : "{}") &&
             put_object(o, "entrypoint_resources", "entrypoint-resources", s->resources) &&
             put_object(o, "entrypoint_label_selector", "entrypoint-label-selector", s->labels) &&
             cli_wants_put(o, &s->wants);
    json_decref(env);
    if (ok)
        return o;
    json_decref(o);
    return NULL;
}

static void say_submitted(const char *job)
{
    char text[CLI_JOB_BYTES + 40];

    snprintf(text, sizeof(text), "Job '%s' submitted successfully", job);
    ray_framed(text);
    printf("Next steps\n"
           "  Query the logs of the job:\n"
           "    ray job logs %s\n"
           "  Query the status of the job:\n"
           "    ray job status %s\n"
           "  Request the job to be stopped:\n"
           "    ray job stop %s\n\n", job, job, job);
    fflush(stdout); /* others read the id from here */
}

static int submit(struct submit *s, const char *entrypoint)
{
    json_t *answer, *details;
    char job[CLI_JOB_BYTES];
    int rc = find(&s->common);

    if (rc >= 0)
        return rc;
    json_t *body = submission(s, entrypoint);

    if (!body)
        return 1;
    rc = ask(&s->common, "POST", "/api/jobs/", body, &answer);
    json_decref(body);
    if (rc >= 0)
        return rc;
    (void)FL_COPY(job, cli_text(answer, "submission_id"));
    json_decref(answer);
    say_submitted(job);
    if (s->no_wait)
        return 0;
    puts("Tailing logs until the job exits (disable with --no-wait):");
    rc = follow(&s->common, job);
    if (rc < 0)
        rc = get(&s->common, job, &details);
    if (rc >= 0)
        return rc;
    rc = strcmp(cli_text(details, "status"), "FAILED") == 0;
    say_status(job, details);
    json_decref(details);
    return rc;
}

static int job_submit(int argc, char **argv)
{
    struct submit *s = calloc(1, sizeof(*s));
    struct fl_opts o = { .program = "ray job submit", .usage = "[OPTIONS] ENTRYPOINT...",
                         .about = "Runs a command as a job and follows it; exit code 1 if it failed.", .first_word_ends = true,
                         .tables = { { NULL, submit_opts, s }, { NULL, cli_wants_opts, s ? &s->wants : NULL },
                                     { NULL, common_opts, s ? &s->common : NULL } } };

    if (!s)
        return ray_failed("MemoryError", "no memory");
    int rc = ray_opts(&o, passed, argc, argv);

    if (rc < 0 && !o.n_words)
        rc = ray_misused(&o, "Missing argument 'ENTRYPOINT...'.");
    if (rc < 0) {
        const char **words = calloc(o.n_words + 1, sizeof(*words));

        if (!words)
            abort();
        memcpy(words, o.words, o.n_words * sizeof(*words));
        /* One string is a shell line; words are joined so that a shell gives them back. */
        char *line = o.n_words == 1 ? strdup(words[0]) : cli_shell_line(words);

        rc = submit(s, line);
        free(line);
        free(words);
    }
    free(s);
    return rc;
}

/* ==== the others =================================================================================== */
struct one { struct common common; bool follow, no_wait; };
static const struct fl_opt logs_opts[] = {
    { FL_OPT_SWITCH, "follow", .letter = 'f', .at = offsetof(struct one, follow), .help = "until the job ends" }, { 0 }
};
static const struct fl_opt stop_opts[] = {
    { FL_OPT_SWITCH, "no-wait", .at = offsetof(struct one, no_wait), .help = "do not wait for its end" }, { 0 }
};

/* Options, the one job, the server's line. -1: go on. */
static int begin(struct one *one, struct fl_opts *o, int argc, char **argv)
{
    int rc;

    *one = (struct one){ 0 };
    o->usage = "[OPTIONS] JOB_ID";
    o->tables[o->tables[0].opts ? 1 : 0] = (struct fl_opt_table){ NULL, common_opts, &one->common };
    rc = ray_opts(o, passed, argc, argv);
    if (rc < 0 && o->n_words != 1)
        rc = o->n_words ? ray_misused(o, "Got unexpected extra argument (%s)", o->words[1])
                        : ray_misused(o, "Missing argument 'JOB_ID'.");
    if (rc < 0 && (strlen(o->words[0]) >= CLI_JOB_BYTES || strpbrk(o->words[0], "/?#% ")))
        rc = ray_failed("RuntimeError", "Job %.100s does not exist", o->words[0]);
    return rc < 0 ? find(&one->common) : rc;
}

static int job_status(int argc, char **argv)
{
    struct one one;
    struct fl_opts o = { .program = "ray job status", .about = "Where the job stands." };
    json_t *details;
    int rc = begin(&one, &o, argc, argv);

    if (rc < 0)
        rc = get(&one.common, o.words[0], &details);
    if (rc >= 0)
        return rc;
    say_status(o.words[0], details);
    json_decref(details);
    return 0;
}

static int job_logs(int argc, char **argv)
{
    struct one one;
    struct fl_opts o = { .program = "ray job logs", .about = "What the job has printed.", .tables = { { NULL, logs_opts, &one } } };
    char path[CLI_JOB_BYTES + 32];
    json_t *answer;
    int rc = begin(&one, &o, argc, argv);

    if (rc >= 0)
        return rc;
    if (!one.follow) {
        snprintf(path, sizeof(path), "/api/jobs/%s/logs", o.words[0]);
        one.common.cluster.answer_max_bytes = LOG_MAX_BYTES;
        rc = ask(&one.common, "GET", path, NULL, &answer);
        if (rc >= 0)
            return rc;
        fwrite(cli_text(answer, "logs"), 1, json_string_length(json_object_get(answer, "logs")), stdout);
        json_decref(answer);
        return fflush(stdout) == 0 ? 0 : 1;
    }
    rc = get(&one.common, o.words[0], &answer); /* an unknown one is said here */
    if (rc >= 0)
        return rc;
    json_decref(answer);
    rc = follow(&one.common, o.words[0]);
    if (rc < 0)
        rc = get(&one.common, o.words[0], &answer);
    if (rc >= 0)
        return rc;
    say_status(o.words[0], answer);
    json_decref(answer);
    return 0;
}

static int job_stop(int argc, char **argv)
{
    struct one one;
    struct fl_opts o = { .program = "ray job stop", .about = "Ends the job.", .tables = { { NULL, stop_opts, &one } } };
    char path[CLI_JOB_BYTES + 32];
    json_t *answer;
    int rc = begin(&one, &o, argc, argv);

    if (rc >= 0)
        return rc;
    printf("Attempting to stop job '%s'\n", o.words[0]);
    snprintf(path, sizeof(path), "/api/jobs/%s/stop", o.words[0]);
    rc = ask(&one.common, "POST", path, NULL, &answer);
    if (rc >= 0)
        return rc;
    json_decref(answer);
    if (one.no_wait)
        return 0;
    printf("Waiting for job '%s' to exit (disable with --no-wait):\n", o.words[0]);
    for (;;) {
        rc = get(&one.common, o.words[0], &answer);
        if (rc >= 0)
            return rc;
        const char *status = cli_text(answer, "status");

        if (cli_job_over(status)) {
            say_status(o.words[0], answer);
            json_decref(answer);
            return 0;
        }
        printf("Job has not exited yet. Status: %s\n", status);
        fflush(stdout);
        json_decref(answer);
        (void)usleep(POLL_MS * 1000);
    }
}

static int job_delete(int argc, char **argv)
{
    struct one one;
    struct fl_opts o = { .program = "ray job delete", .about = "Forgets a job that has ended." };
    char path[CLI_JOB_BYTES + 32];
    json_t *answer;
    int rc = begin(&one, &o, argc, argv);

    if (rc >= 0)
        return rc;
    snprintf(path, sizeof(path), "/api/jobs/%s", o.words[0]);
    rc = ask(&one.common, "DELETE", path, NULL, &answer);
    if (rc >= 0)
        return rc;
    json_decref(answer);
    printf("Job '%s' deleted successfully\n", o.words[0]);
    return 0;
}

/* ==== list ========================================================================================= */
static void put_repr(FILE *to, const json_t *v)
{
    const char *key, *text = json_string_value(v);
    json_t *item;
    size_t i;

    if (text) {
        char q = strchr(text, '\'') && !strchr(text, '"') ? '"' : '\'';

        fputc(q, to);
        for (; *text; text++)
            if (*text == '\n' || *text == '\t' || *text == '\r')
                fprintf(to, "\\%c", *text == '\n' ? 'n' : *text == '\t' ? 't' : 'r');
            else if (*text == '\\' || *text == q)
                fprintf(to, "\\%c", *text);
            else if (iscntrl((unsigned char)*text))
                fprintf(to, "\\x%02x", (unsigned char)*text);
            else
                fputc(*text, to);
        fputc(q, to);
    } else if (json_is_integer(v)) {
        fprintf(to, "%lld", (long long)json_integer_value(v));
    } else if (json_is_real(v)) {
        double d = json_real_value(v);

        fprintf(to, d >= -1e15 && d <= 1e15 && d == (double)(long long)d ? "%.1f" : "%.17g", d);
    } else if (json_is_object(v)) {
        const char *comma = "";

        fputc('{', to);
        json_object_foreach((json_t *)v, key, item) {
            json_t *k = json_string(key);

            fputs(comma, to);
            put_repr(to, k);
            json_decref(k);
            fputs(": ", to);
            put_repr(to, item);
            comma = ", ";
        }
        fputc('}', to);
    } else if (json_is_array(v)) {
        fputc('[', to);
        json_array_foreach((json_t *)v, i, item) {
            fputs(i ? ", " : "", to);
            put_repr(to, item);
        }
        fputc(']', to);
    } else {
        fputs(json_is_true(v) ? "True" : json_is_false(v) ? "False" : "None", to);
    }
}

char *ray_repr(const json_t *v)
{
    char *text = NULL;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    if (!to)
        abort();
    put_repr(to, v);
    if (fclose(to) != 0)
        abort();
    return text;
}

static void put_details(const json_t *j)
{
    static const char *const members[] = { "type", "job_id", "submission_id", "driver_info", "status", "entrypoint", "message",
                                           "error_type", "start_time", "end_time", "metadata", "runtime_env",
                                           "driver_agent_http_address", "driver_node_id", "driver_exit_code" };

    fputs("JobDetails(", stdout);
    for (size_t i = 0; i < FL_LEN(members); i++) {
        json_t *v = json_object_get(j, members[i]);

        printf("%s%s=", i ? ", " : "", members[i]);
        if (json_is_string(v) && (i == 0 || i == 4)) /* enumerations of Ray's client */
            printf("<%s.%s: '%s'>", i ? "JobStatus" : "JobType", json_string_value(v), json_string_value(v));
        else
            put_repr(stdout, v);
    }
    fputc(')', stdout);
}

static int job_list(int argc, char **argv)
{
    struct common m = { 0 };
    struct fl_opts o = { .program = "ray job list", .about = "All jobs.", .tables = { { NULL, common_opts, &m } } };
    json_t *jobs, *j;
    size_t i;
    int rc = ray_opts(&o, passed, argc, argv);

    if (rc < 0 && o.n_words)
        rc = ray_misused(&o, "Got unexpected extra argument (%s)", o.words[0]);
    if (rc < 0)
        rc = find(&m);
    if (rc < 0)
        rc = ask(&m, "GET", "/api/jobs/", NULL, &jobs);
    if (rc >= 0)
        return rc;
    putchar('[');
    json_array_foreach(jobs, i, j) {
        fputs(i ? ",\n " : "", stdout);
        put_details(j);
    }
    puts("]");
    json_decref(jobs);
    return fflush(stdout) == 0 ? 0 : 1;
}

static const struct cli_verb job_verbs[] = {
    { "submit", "run a command as a job and follow it", job_submit },
    { "status", "where one stands",                     job_status },
    { "logs",   "what it printed, or prints",           job_logs   },
    { "stop",   "end it",                               job_stop   },
    { "list",   "all jobs",                             job_list   },
    { "delete", "forget one that has ended",            job_delete },
    { 0 },
};

int ray_job(int argc, char **argv)
{
    return cli_dispatch("ray job", "Commands that the cluster runs on a node of its own.", job_verbs, argc, argv);
}
