#include <glob.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli/check.h"
#include "cli/cli.h"
#include "cli/daemons.h"
#include "cli/env.h"
#include "cli/external.h"
#include "cli/interrupt.h"
#include "cli/job.h"
#include "cli/launch.h"
#include "cli/quote.h"
#include "common/base/id.h"
#include "common/base/str.h"
#include "common/conf/train_flags.h"

enum {
    READY_MS = 15000,
    END_MS = 30000,
    ORPHAN_S = 5,
    KEEPERS_MS = 20000,
    AWAY_MS = 600000,
    DRIVER_RESTARTS = 3
};

struct train {
    struct cli_common common;
    int64_t num_gpus;
    bool num_gpus_given;
    struct train_flags flags;
    struct launch launch;
    char run_dir[FL_PATH_MAX], id[CLI_JOB_BYTES];
    struct cli_daemon own[2]; /* of a private cluster: head, node */
    size_t n_own;
    bool own_ended; /* one of them, before the run */
    const char *given_id, *programs, *pass;
};
static const struct fl_opt own_opts[] = {
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct train, common.address),
      .help = "run on that cluster; else on FURLONG_ADDRESS, RAY_ADDRESS, the head that runs here, "
              "or a private one" },
    { FL_OPT_INT, "num-gpus", .arg = "N", .min = 0, .max = 4096,
      .at = offsetof(struct train, num_gpus),
      .help = "a private cluster's logical devices (default: what the run needs)" },
    { FL_OPT_TEXT, "submission-id", .arg = "ID", .at = offsetof(struct train, given_id),
      .help = "of its job (default: train_ and eight digits)" },
    { FL_OPT_TEXT, "pass-env", .arg = "NAME,...", .env = "FURLONG_PASS_ENV",
      .at = offsetof(struct train, pass),
      .help = "variables of this shell that go along to the run's processes, besides the proxies "
              "and " CLI_PASS_PREFIXES },
    { FL_OPT_TEXT, "ray-programs", .arg = "FOLDER", .env = "FURLONG_RAY_PROGRAMS",
      .at = offsetof(struct train, programs),
      .help = "on an external Ray: where furlong is on every node (default: it is sent there)" },
    { FL_OPT_SWITCH, "json", .at = offsetof(struct train, common.json),
      .help = "one JSON object a step on stdout, everything else on stderr" },
    { 0 }
};

/* ==== where it is recorded ==== */
static enum fl_status make_id(struct train *t, struct fl_err *err)
{
    uint32_t id;

    if (t->given_id)
        return FL_COPY(t->id, t->given_id)
                   ? FL_OK
                   : fl_fail(err, FL_INVALID, "--submission-id=%.40s... is longer than %d bytes",
                             t->given_id, CLI_JOB_BYTES - 1);
    FL_TRY(fl_random(&id, sizeof(id), err));
    snprintf(t->id, sizeof(t->id), "train_%08x", id);
    return FL_OK;
}

static enum fl_status make_run_dir(struct train *t, struct fl_err *err)
{
    char state[FL_PATH_MAX], stamp[32];
    time_t now = time(NULL);
    struct tm tm;

    if (t->flags.run_dir && t->flags.run_dir[0] == '/') {
        FL_TRY(fl_path(t->run_dir, err, "%s", t->flags.run_dir));
    } else if (t->flags.run_dir) {
        char here[FL_PATH_MAX];

        if (!getcwd(here, sizeof(here)))
            return fl_fail_errno(err, "current folder");
        FL_TRY(fl_path(t->run_dir, err, "%s/%s", here, t->flags.run_dir));
    } else {
        FL_TRY(fl_state_dir(NULL, state, err));
        strftime(stamp, sizeof(stamp), "%Y%m%d-%H%M%S", localtime_r(&now, &tm));
        FL_TRY(fl_path(t->run_dir, err, "%s/runs/%s-%s", state, stamp, t->id));
    }
    enum fl_status st = fl_mkdirs(t->run_dir, err);

    return st == FL_OK ? FL_OK
                       : fl_wrap(err, st, "%s",
                                 t->flags.run_dir ? "--run-dir"
                                                  : "the run folder (--run-dir names another)");
}

/* ==== its flags ==== */
struct given { /* the run's own flags, as they were given */
    char **words[TRAIN_FLAG_TABLES];
};

/* Adds them to to[0..n), but for --run-dir unless all are wanted. */
static size_t given_words(const struct fl_opts *o, bool all, struct given *g, const char **to,
                          size_t n)
{
    for (size_t i = 0; i < TRAIN_FLAG_TABLES; i++) {
        g->words[i] = fl_opts_words(o, i);
        for (char **w = g->words[i]; w && *w; w++)
            if (all || strncmp(*w, "--run-dir=", 10) != 0)
                to[n++] = *w;
    }
    return n;
}

/* As the driver gets them. */
static void driver_words(const struct train *t, const struct fl_opts *o,
                         char run_dir[FL_PATH_MAX + 16], struct given *g, const char **to)
{
    snprintf(run_dir, FL_PATH_MAX + 16, "--run-dir=%s", t->run_dir);
    to[0] = run_dir;
    (void)given_words(o, false, g, to, 1);
}

static void given_free(struct given *g)
{
    for (size_t i = 0; i < TRAIN_FLAG_TABLES; i++)
        fl_words_free(g->words[i]);
}

/* ==== a private cluster ==== */
/* Logical devices that the flags ask for; what is not given is one. */
struct needed {
    int64_t trainers, engines, all;
};

static struct needed devices_needed(const struct train_flags *f)
{
    int64_t per_node = f->actor_num_gpus_per_node > 0 ? f->actor_num_gpus_per_node : 1;
    int64_t engine = f->rollout_num_gpus_per_engine > 0 ? f->rollout_num_gpus_per_engine : 1;
    struct needed n = { .trainers = (f->actor_num_nodes > 0 ? f->actor_num_nodes : 1) * per_node,
                        .engines = f->rollout_num_gpus > 0 ? f->rollout_num_gpus : engine };

    n.all = !f->colocate ? n.trainers + n.engines : n.trainers > n.engines ? n.trainers : n.engines;
    return n;
}

/* The daemon speaks of a flag that it was given by us: say it in those that the user has. */
static enum fl_status too_few(const struct train *t, const char *gpus, enum fl_status st,
                              struct fl_err *err)
{
    struct needed n = devices_needed(&t->flags);
    char said[sizeof(err->text)];
    size_t len = strlen(gpus);

    if (t->num_gpus_given || strncmp(err->text, gpus, len) != 0)
        return st;
    (void)FL_COPY(said, err->text + len);
    return fl_fail(err, st, "%lld for trainers and %lld for engines need %lld devices%.*s; %s",
                   (long long)n.trainers, (long long)n.engines, (long long)n.all,
                   (int)strcspn(said, ";"), said,
                   t->flags.colocate ? "ask for fewer"
                                     : "ask for fewer, or let both take turns by --colocate");
}

/* A pipe gives its bytes once: to the driver. */
static bool gives_once(const char *path)
{
    struct stat st;

    return path && stat(path, &st) == 0 && S_ISFIFO(st.st_mode);
}

/* The driver will run here too: what it would find wrong is said before there is a cluster. */
static enum fl_status check_private(const struct train *t, const struct fl_opts *o,
                                    struct fl_err *err)
{
    const char *words[FL_OPT_MAX + 2] = { 0 };
    char run_dir[FL_PATH_MAX + 16];
    struct given given;

    if (gives_once(t->flags.prompt_data) || gives_once(t->flags.eval_prompt_data))
        return FL_OK;
    driver_words(t, o, run_dir, &given, words);
    enum fl_status st = cli_check_run(words, err);
    given_free(&given);
    return st;
}

static enum fl_status start_private(struct train *t, struct cli_cluster *c, struct fl_err *err)
{
    char state[FL_PATH_MAX + 32], logs[FL_PATH_MAX], gpus[40], orphan[40], cluster[16],
        address[CLI_URL_BYTES];
    json_t *info;

    FL_TRY(fl_path(logs, err, "%s/logs", t->run_dir));
    snprintf(state, sizeof(state), "--state-dir=%s/cluster", t->run_dir);
    snprintf(orphan, sizeof(orphan), "--orphan-timeout=%d", ORPHAN_S);
    snprintf(gpus, sizeof(gpus), "--num-gpus=%lld",
             (long long)(t->num_gpus_given ? t->num_gpus : devices_needed(&t->flags).all));
    FL_TRY(cli_daemon_start("furlong-head",
                            (const char *const[]){ "--private", "--tls=off", "--until-idle",
                                                   "--node-ip-address=127.0.0.1", "--port=0",
                                                   "--dashboard-host=127.0.0.1",
                                                   "--dashboard-port=0", state, NULL },
                            logs, READY_MS, &info, err));
    t->own[t->n_own++] = (struct cli_daemon){ .kind = 'h',
                                              .pid = (pid_t)cli_int(info, "pid"),
                                              .start_time = (uint64_t)cli_int(info, "start_time") };
    snprintf(cluster, sizeof(cluster), "%.8s", cli_text(info, "cluster"));
    snprintf(c->url, sizeof(c->url), "%s%s", strstr(cli_text(info, "http"), "://") ? "" : "http://",
             cli_text(info, "http"));
    snprintf(address, sizeof(address), "--address=%s", cli_text(info, "address"));
    json_decref(info);
    enum fl_status st =
        cli_daemon_start("furlong-node",
                         (const char *const[]){ address, "--private", "--tls=off", orphan,
                                                "--node-ip-address=127.0.0.1", "--node-name=local",
                                                gpus, state, NULL },
                         logs, READY_MS, &info, err);
    if (st != FL_OK)
        return too_few(t, gpus, st, err);
    t->own[t->n_own++] = (struct cli_daemon){ .kind = 'n',
                                              .pid = (pid_t)cli_int(info, "pid"),
                                              .start_time = (uint64_t)cli_int(info, "start_time") };
    (void)FL_COPY(t->own[1].dir, cli_text(info, "sock")); /* <folder>/node.sock */
    char *slash = strrchr(t->own[1].dir, '/');
    if (slash)
        *slash = '\0';
    json_decref(info);
    slash = strrchr(t->own[1].dir, '/'); /* the head's own folder lies beside it */
    if (slash)
        (void)fl_path(t->own[0].dir, NULL, "%.*s/h-%s", (int)(slash - t->own[1].dir), t->own[1].dir,
                      cluster);
    return FL_OK;
}

/* Keepers that lost their daemon end by themselves, after --orphan-timeout: each takes its socket
 * away. */
static void keepers_wait(const char *node_dir)
{
    enum { LOOK_MS = 50 };
    char pattern[FL_PATH_MAX];
    glob_t g;

    if (fl_path(pattern, NULL, "%s/w/*/keep.sock", node_dir) != FL_OK)
        return;
    for (int waited = 0; waited < KEEPERS_MS && glob(pattern, GLOB_NOSORT, NULL, &g) == 0;
         waited += LOOK_MS) {
        globfree(&g);
        (void)poll(NULL, 0, LOOK_MS);
    }
}

/* What a daemon that was killed leaves in the runtime folder. */
static void sweep_private(const struct train *t)
{
    struct fl_err err = { 0 };
    const char *dir = t->own[1].dir;

    if (!*dir)
        return;
    keepers_wait(dir);
    if (fl_tree_remove(dir, &err) != FL_OK)
        (void)cli_failed("furlong train", &err);
    if (*t->own[0].dir && fl_tree_remove(t->own[0].dir, &err) != FL_OK)
        (void)cli_failed("furlong train", &err);
}

/* The head ends by itself when its job has: this only waits, and forces it when that takes too
 * long. */
static void end_private(struct train *t, bool at_once)
{
    char state[FL_PATH_MAX];
    struct fl_err err = { 0 };

    for (size_t i = t->n_own; i-- > 0;)
        if ((at_once || !cli_daemon_wait(&t->own[i], END_MS)) &&
            cli_daemon_end(&t->own[i], 10000, &err) != FL_OK)
            (void)cli_failed("furlong train", &err);
    if (t->own_ended)
        sweep_private(t);
    if (t->n_own && fl_path(state, NULL, "%s/cluster", t->run_dir) == FL_OK &&
        fl_tree_remove(state, &err) != FL_OK)
        (void)cli_failed("furlong train", &err);
}

static enum fl_status takes_as_it_is(const struct train *t, const char *url, struct fl_err *err)
{
    return t->num_gpus_given ? fl_fail(err, FL_INVALID,
                                       "--num-gpus is for a private cluster; this run goes to %s "
                                       "and takes its nodes as they are: leave the flag out",
                                       url)
                             : FL_OK;
}

static enum fl_status find_or_start(struct train *t, const struct fl_opts *o,
                                    const struct cli_cluster *external, struct cli_cluster *c,
                                    struct fl_err *err)
{
    if (launch_asked(&t->launch))
        return launch_cluster(&t->launch, external ? external->url : t->common.address,
                              (double)devices_needed(&t->flags).all, c, err);
    if (external) {
        *c = *external;
        return takes_as_it_is(t, c->url, err);
    }
    enum fl_status st = cli_cluster_find(t->common.address, c, err);

    if (st != FL_NOT_FOUND)
        return st == FL_OK ? takes_as_it_is(t, c->url, err) : st;
    if (err)
        *err = (struct fl_err){ 0 };
    FL_TRY(check_private(t, o, err));
    return start_private(t, c, err);
}

/* ==== the run ==== */
static json_t *submission(const struct train *t, const struct fl_opts *o, json_t *env_take)
{
    const char *words[FL_OPT_MAX + 4] = { "furlong-driver" };
    char run_dir[FL_PATH_MAX + 16], here[4096];
    struct given given;

    driver_words(t, o, run_dir, &given, words + 1);
    char *line = cli_shell_line(words);
    json_t *body = json_pack("{s:s,s:s,s:o,s:{s:s},s:{s:i,s:s,s:s*}}", "entrypoint", line,
                             "submission_id", t->id, "runtime_env", env_take, "metadata", "furlong",
                             "train", "furlong", "driver_restarts", DRIVER_RESTARTS, "run_dir",
                             t->run_dir, "cwd", getcwd(here, sizeof(here)));

    free(line);
    given_free(&given);
    return body;
}

/* On a cluster of Ray's: nothing is recorded here, the run is where its driver is. */
static int run_on_ray(struct train *t, const struct fl_opts *o, const struct external *x)
{
    const char *words[FL_OPT_MAX + 1] = { 0 };
    char *nodes = NULL;
    struct given given;
    struct external_run r = { .program = o->program,
                              .id = t->id,
                              .programs = t->programs,
                              .pass = t->pass,
                              .launch = &t->launch,
                              .devices = devices_needed(&t->flags).all,
                              .words = words,
                              .json = t->common.json,
                              .away_max_ms = AWAY_MS };
    struct fl_err err = { 0 };
    int rc;

    if (takes_as_it_is(t, x->cluster.url, &err) != FL_OK ||
        launch_names(&t->launch, &nodes, &err) != FL_OK)
        return cli_failed(o->program, &err);
    r.nodes = nodes;
    (void)given_words(o, true, &given, words, 0);
    rc = external_run(x, &r);
    given_free(&given);
    free(nodes);
    return rc;
}

static int run(struct train *t, const struct fl_opts *o)
{
    struct external x;
    char logs[FL_PATH_MAX] = "";
    struct cli_follow how = {
        .show = t->common.json ? CLI_SHOW_STEPS : CLI_SHOW_LOG,
        .bar = isatty(STDERR_FILENO) && isatty(STDOUT_FILENO) && !t->common.json,
        .total = t->flags.num_rollout,
        .away_max_ms = AWAY_MS,
        .own = t->own,
        .own_logs = logs,
        .own_ended = &t->own_ended,
    };
    struct cli_cluster c = { 0 };
    struct fl_err err = { 0 };
    char id[CLI_JOB_BYTES] = "";
    bool external = external_asked();
    json_t *env = json_object(), *body = NULL;
    enum fl_status st = make_id(t, &err);

    if (st == FL_OK)
        st = env ? cli_env_pass(env, t->pass, &err)
                 : fl_fail(&err, FL_EXHAUSTED, "no memory to submit");
    if (st == FL_OK && external)
        /* before anybody is asked: it would be refused anywhere */
        st = launch_may_join(&t->launch, &err);
    if (st == FL_OK && external)
        st = external_find(t->common.address, &x, &err);
    if (st != FL_OK || (external && !x.ours)) {
        json_decref(env);
        return st != FL_OK ? cli_failed(o->program, &err) : run_on_ray(t, o, &x);
    }
    cli_signals_hold(); /* until they mean the job */
    st = make_run_dir(t, &err);
    if (st == FL_OK)
        st = find_or_start(t, o, external ? &x.cluster : NULL, &c, &err);
    if (st == FL_OK)
        body = submission(t, o, FL_TAKE(env));
    if (st == FL_OK)
        st = body ? cli_submit(&c, body, id, &err)
                  : fl_fail(&err, FL_EXHAUSTED, "no memory to submit");
    json_decref(body);
    json_decref(env);
    if (st != FL_OK) {
        int rc = cli_failed(o->program, &err);

        end_private(t, true);
        launch_end(&t->launch);
        (void)rmdir(t->run_dir); /* goes only if nothing was written */
        return rc;
    }
    fprintf(stderr, "job %s on %s%s, recorded in %s\n", id, c.url, t->n_own ? " (private)" : "",
            t->run_dir);
    how.n_own = t->n_own;
    (void)fl_path(logs, NULL, "%s/logs", t->run_dir); /* made a moment ago: it is not too long */
    int rc = cli_watch(o->program, &c, id, &how);

    cli_signals_let();
    if (rc != 130) { /* the user left a run behind on purpose */
        end_private(t, t->own_ended);
        launch_end(&t->launch);
    }
    return rc;
}

int cli_train(int argc, char **argv)
{
    struct train *t = calloc(1, sizeof(*t)); /* too large for the stack of a command */
    struct fl_opts o = {
        .program = "furlong train",
        .usage = "[OPTION...]",
        .about = "Generates with rollout engines, trains on what they wrote, moves the new "
                 "weights back; many times.\n"
                 "Without a cluster it starts a private one on this machine, which ends with the "
                 "run.",
        .notes = "More flags from the environment: MILES_EXTRA_ARGS; the command line wins.",
        .takes_file = true,
    };
    struct fl_err err = { 0 };

    if (!t)
        return cli_misused(o.program, "no memory");
    train_flags_tables(&t->flags, o.tables);
    o.tables[TRAIN_FLAG_TABLES] = (struct fl_opt_table){ "Cluster and output", own_opts, t };
    o.tables[TRAIN_FLAG_TABLES + 1] =
        (struct fl_opt_table){ "Several nodes", launch_opts, &t->launch };
    enum fl_status st = train_flags_parse(&t->flags, &o, argc, argv, &err);
    int rc;

    /* The run's words hold what it gave; the driver would read it anew, and knows no flag of the
     * command alone. */
    (void)unsetenv("MILES_EXTRA_ARGS");

    t->num_gpus_given = fl_opts_given(&o, "num-gpus");
    if (st == FL_CANCELLED) {
        fl_opts_help(&o, stdout);
        rc = 0;
    } else if (st != FL_OK) {
        rc = cli_misused(o.program, "%s", err.text);
    } else {
        rc = run(t, &o);
    }
    train_flags_fini(&t->flags);
    fl_opts_fini(&o);
    launch_fini(&t->launch);
    free(t);
    return rc;
}
