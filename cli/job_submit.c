#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/env.h"
#include "cli/follow.h"
#include "cli/job.h"
#include "cli/quote.h"
#include "cli/ray_pack.h"
#include "common/base/str.h"

#define PROGRAM "furlong job submit"

struct submit {
    struct cli_common common;
    struct cli_wants wants;
    const char *env_json, *env_file, *upload, *working_dir, *metadata, *resources, *labels, *ports, *pass;
    int64_t restarts;
    bool no_wait, off_head;
};
const struct fl_opt cli_wants_opts[] = {
    { FL_OPT_TEXT, "submission-id", .arg = "ID", .at = offsetof(struct cli_wants, id), .help = "(default: made by the head)" },
    { FL_OPT_REAL, "entrypoint-num-cpus", .arg = "N", .max = 1e6, .at = offsetof(struct cli_wants, cpus), .help = "reserved for the command itself" },
    { FL_OPT_REAL, "entrypoint-num-gpus", .arg = "N", .max = 1e6, .at = offsetof(struct cli_wants, gpus), .help = "reserved for the command itself" },
    { FL_OPT_BYTES, "entrypoint-memory", .arg = "BYTES", .at = offsetof(struct cli_wants, memory), .help = "reserved for the command itself" },
    { 0 }
};

bool cli_wants_put(json_t *submission, const struct cli_wants *w)
{
    return (!w->id || json_object_set_new(submission, "submission_id", json_string(w->id)) == 0) &&
           (w->cpus <= 0 || json_object_set_new(submission, "entrypoint_num_cpus", json_real(w->cpus)) == 0) &&
           (w->gpus <= 0 || json_object_set_new(submission, "entrypoint_num_gpus", json_real(w->gpus)) == 0) &&
           (!w->memory || json_object_set_new(submission, "entrypoint_memory", json_integer((json_int_t)w->memory)) == 0);
}

static const struct fl_opt submit_opts[] = {
    { FL_OPT_TEXT, "runtime-env-json", .arg = "JSON", .at = offsetof(struct submit, env_json),
      .help = "env_vars, working_dir and py_modules of the job" },
    { FL_OPT_TEXT, "runtime-env", .arg = "FILE", .at = offsetof(struct submit, env_file), .help = "the same in a file, YAML or JSON" },
    { FL_OPT_TEXT, "working-dir", .arg = "FOLDER", .at = offsetof(struct submit, working_dir),
      .help = "where it starts, a folder that is there on the driver's node (default: here)" },
    { FL_OPT_TEXT, "upload", .arg = "FOLDER", .at = offsetof(struct submit, upload),
      .help = "send this folder and start in it: at most 100 MiB, without what .gitignore and excludes name" },
    { FL_OPT_TEXT, "pass-env", .arg = "NAME,...", .env = "FURLONG_PASS_ENV", .at = offsetof(struct submit, pass),
      .help = "variables of this shell that go along, besides the proxies and " CLI_PASS_PREFIXES },
    { FL_OPT_TEXT, "ports", .arg = "NAME[=PORT],...", .at = offsetof(struct submit, ports),
      .help = "each process of the job gets a free port for each name, as FURLONG_PORT_NAME; PORT: that one, or none starts" },
    { FL_OPT_TEXT, "metadata-json", .arg = "JSON", .at = offsetof(struct submit, metadata), .help = "strings to keep with the job" },
    { FL_OPT_TEXT, "entrypoint-resources", .arg = "JSON", .at = offsetof(struct submit, resources), .help = "reserved for the command itself" },
    { FL_OPT_TEXT, "entrypoint-label-selector", .arg = "JSON", .at = offsetof(struct submit, labels), .help = "labels of the command's node" },
    { FL_OPT_SWITCH, "off-head", .at = offsetof(struct submit, off_head),
      .help = "the command runs on any node but the head's own, where it is by default" },
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
    if (json_is_object(v))
        return json_object_set_new(o, name, v) == 0;
    if (v)
        (void)cli_misused(PROGRAM, "--%s: an object is wanted", flag);
    else
        (void)cli_misused(PROGRAM, "--%s: line %d, column %d: %s", flag, bad.line, bad.column, bad.text);
    json_decref(v);
    return false;
}

static json_t *ports_list(const char *text)
{
    json_t *list = json_array();

    for (const char *w = text; w && *w; w += strspn(w, ",")) {
        size_t n = strcspn(w, ",");

        json_array_append_new(list, json_stringn(w, n));
        w += n;
    }
    return list;
}

/* NULL: said why, and it is the user's to mend. */
static json_t *environment(const struct submit *s)
{
    struct fl_err err = { 0 };
    json_t *env = NULL;
    enum fl_status st = cli_env_read(s->env_json, s->env_file, &env, &err);

    if (st == FL_OK)
        st = cli_env_check(env, &err);
    if (st == FL_OK)
        st = cli_env_pass(env, s->pass, &err);
    if (st == FL_OK && s->upload && s->working_dir)
        st = fl_fail(&err, FL_INVALID, "--upload and --working-dir exclude each other");
    if (st == FL_OK && s->upload && json_object_set_new(env, "working_dir", json_string(s->upload)) != 0)
        st = fl_fail(&err, FL_INVALID, "--upload is no UTF-8");
    if (st == FL_OK)
        return env;
    (void)cli_misused(PROGRAM, "%s", err.text);
    json_decref(env);
    return NULL;
}

/* Takes env. */
static json_t *submission(const struct submit *s, const char *entrypoint, json_t *env)
{
    char here[4096];
    json_t *o = json_pack("{s:s,s:o}", "entrypoint", entrypoint, "runtime_env", env);
    const char *cwd = s->upload ? NULL : s->working_dir ? s->working_dir : getcwd(here, sizeof(here));
    bool ok = o && put_object(o, "metadata", "metadata-json", s->metadata) &&
              put_object(o, "entrypoint_resources", "entrypoint-resources", s->resources) &&
              put_object(o, "entrypoint_label_selector", "entrypoint-label-selector", s->labels) &&
              cli_wants_put(o, &s->wants);

    if (ok)
        ok = json_object_set_new(o, "furlong", json_pack("{s:I,s:s*,s:b,s:o}", "driver_restarts", (json_int_t)s->restarts,
                                                         "cwd", cwd, "off_head", s->off_head, "ports",
                                                         ports_list(s->ports))) == 0;
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

/* Local folders are sent; an absolute working_dir is one that is there on the nodes, unless --upload names it. */
static enum fl_status send_folders(const struct submit *s, const struct cli_cluster *c, json_t *env, struct fl_err *err)
{
    json_t *dir = json_object_get(env, "working_dir");
    json_t *there = !s->upload && json_is_string(dir) && *json_string_value(dir) == '/' ? json_incref(dir) : NULL;

    if (there)
        json_object_del(env, "working_dir");
    enum fl_status st = ray_pack_env(c, env, stderr, err);

    if (there)
        json_object_set_new(env, "working_dir", there);
    return st;
}

/* -1, or the exit code: 2 for what the user gave, 1 for all else. */
static int send(struct submit *s, const char *line, struct cli_cluster *c, char id[CLI_JOB_BYTES])
{
    json_t *env = environment(s), *body = env ? submission(s, line, env) : NULL;
    struct fl_err err = { 0 };
    enum fl_status st;

    if (!body)
        return 2;
    st = cli_cluster_find(s->common.address, c, &err);
    if (st == FL_OK)
        st = send_folders(s, c, json_object_get(body, "runtime_env"), &err);
    if (st == FL_OK)
        st = cli_submit(c, body, id, &err);
    json_decref(body);
    if (st == FL_INVALID)
        return cli_misused(PROGRAM, "%s", err.text);
    return st == FL_OK ? -1 : cli_failed(PROGRAM, &err);
}

int cli_job_submit(int argc, char **argv)
{
    struct submit s = { 0 };
    struct fl_opts o = {
        .program = PROGRAM, .usage = "[OPTION...] -- COMMAND [ARG...]",
        .about = "Runs a command as a job and follows it; exits with its code. One word is a shell line.",
        .first_word_ends = true,
        .tables = { { NULL, submit_opts, &s }, { NULL, cli_wants_opts, &s.wants }, { NULL, cli_common_opts, &s.common } },
    };
    char id[CLI_JOB_BYTES];
    struct cli_cluster c;
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
    struct cli_follow how = { .show = CLI_SHOW_LOG, .away_max_ms = 600000, .tried = line };

    rc = send(&s, line, &c, id);
    if (rc < 0) {
        if (s.common.json)
            printf("{\"submission_id\": \"%s\"}\n", id);
        else if (s.no_wait)
            puts(id);
        else
            fprintf(stderr, "job %s\n", id);
        fflush(stdout);
        rc = s.no_wait || s.common.json ? 0 : cli_watch(o.program, &c, id, &how);
    }
    free(words);
    free(line);
    return rc;
}
