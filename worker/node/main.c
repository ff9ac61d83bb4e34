/* furlong-node - the worker daemon: one a node */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/conf/opt.h"
#include "worker/doctor/doctor.h"
#include "worker/node/node.h"

enum { TERM_MS = 10000 };

struct daemon {
    struct fl_loop *loop;
    struct node *node;
    int64_t ready_fd;
    int rc;
};

/* To whoever started us and waits for the line of readiness. */
static void say_failed(int64_t fd, const struct fl_err *err)
{
    json_t *line = json_pack("{ss}", "error", err->text);
    char *text = line ? json_dumps(line, JSON_COMPACT) : NULL;

    if (fd >= 0 && text) {
        (void)!write((int)fd, text, strlen(text)); /* nobody there: the log has it as well */
        (void)!write((int)fd, "\n", 1);
        close((int)fd);
    }
    fl_error("daemon fails why=\"%s\"", err->text);
    free(text);
    json_decref(line);
}

static void on_ended(void *arg, enum fl_status st, const struct fl_err *err)
{
    struct daemon *d = arg;

    if (st != FL_OK) {
        say_failed(d->ready_fd, err);
        d->rc = st == FL_INVALID ? 2 : 1;
    }
    fl_loop_stop(d->loop);
}

/* Those who started them wait for these; one that has not begun its program yet has the name of this. */
static bool has_a_waiter(int pid)
{
    static const char *const names[] = { "furlong-keep\n", "furlong-probe\n", "furlong-node\n" };
    char path[40], name[24];
    bool known = false;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/comm", pid);
    if (!(f = fopen(path, "re")))
        return true;
    if (!fgets(name, sizeof(name), f))
        known = true;
    for (size_t i = 0; i < FL_LEN(names); i++)
        known |= strcmp(name, names[i]) == 0;
    fclose(f);
    return known;
}

/* What a keeper that was killed leaves has this daemon for its next parent: the first process may wait for nobody, as in
 * containers, and each would stay a zombie. */
static void wait_for_orphans(void)
{
    char path[64];
    int pid;
    DIR *tasks = opendir("/proc/self/task");

    for (struct dirent *e; tasks && (e = readdir(tasks));) {
        snprintf(path, sizeof(path), "/proc/self/task/%.20s/children", e->d_name);
        FILE *f = e->d_name[0] != '.' ? fopen(path, "re") : NULL;

        while (f && fscanf(f, "%d", &pid) == 1)
            if (!has_a_waiter(pid))
                (void)waitpid(pid, NULL, WNOHANG); /* or it runs on, until its tree is ended */
        if (f)
            fclose(f);
    }
    if (tasks)
        closedir(tasks);
}

static void on_signal(void *arg, int signal, int from_pid)
{
    struct daemon *d = arg;

    if (signal == SIGCHLD) {
        wait_for_orphans();
        return;
    }
    fl_info("daemon ends signal=%d from=%d", signal, from_pid);
    node_stop(d->node, signal == SIGINT ? "the daemon was interrupted" : "the daemon was stopped",
              signal == SIGQUIT ? 0 : TERM_MS);
}

/* Workers inherit what is raised here: trainers map and open more than 1024 of everything. */
static void raise_limits(void)
{
    struct rlimit r;

    if (getrlimit(RLIMIT_NOFILE, &r) < 0 || r.rlim_cur == r.rlim_max)
        return;
    rlim_t was = r.rlim_cur;

    r.rlim_cur = r.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &r) == 0)
        fl_info("open files raised from=%llu to=%llu", (unsigned long long)was,
                (unsigned long long)r.rlim_max);
}

/* Entrypoints name furlong-driver, furlong and ray by their bare names: those of this daemon's own
 * folder come first. keeper: the path of a program there. */
static enum fl_status path_lead(const char *keeper, struct fl_err *err)
{
    const char *was = getenv("PATH");
    char *path = NULL;
    int rc = asprintf(&path, "%.*s:%s", (int)(strrchr(keeper, '/') - keeper), keeper,
                      was && *was ? was : "/usr/local/bin:/usr/bin:/bin");

    if (rc < 0 || setenv("PATH", path, 1))
        rc = -1;
    if (rc >= 0)
        free(path);
    return rc < 0 ? fl_fail(err, FL_EXHAUSTED, "no memory for PATH") : FL_OK;
}

/* What would make a run fail later is said to whoever starts this daemon. */
static enum fl_status check_machine(struct node_config *cfg, struct fl_err *err)
{
    static struct doctor_list found;

    FL_TRY(doctor_at_start(cfg->state_dir, &found, err));
    cfg->notes = json_array();
    for (size_t i = 0; i < found.n; i++)
        if (found.all[i].state == DOCTOR_WARN || found.all[i].state == DOCTOR_FAIL) {
            fl_warn("machine check=\"%s\" what=\"%s\"", found.all[i].check, found.all[i].text);
            json_array_append_new(cfg->notes, json_sprintf("%s: %s; %s", found.all[i].check,
                                                           found.all[i].text, found.all[i].remedy));
        }
    return FL_OK;
}

static enum fl_status run(const struct node_config *cfg, struct daemon *d, struct fl_err *err)
{
    static const int signals[] = { SIGTERM, SIGINT, SIGQUIT, SIGCHLD }; /* SIGQUIT: workers are killed at once */
    struct fl_signals *s = NULL;
    enum fl_status st = fl_fault_env(err);

    if (st == FL_OK && prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        st = fl_fail_errno(err, "become the next parent of what a keeper leaves");
    if (st == FL_OK)
        st = fl_loop_create(NULL, &d->loop, err);
    if (st == FL_OK)
        st = fl_signals_create(d->loop, signals, FL_LEN(signals), on_signal, d, &s, err);
    if (st == FL_OK)
        st = node_create(d->loop, cfg, on_ended, d, &d->node, err);
    if (st == FL_OK)
        fl_loop_run(d->loop);
    node_destroy(d->node);
    fl_signals_destroy(s);
    fl_loop_destroy(d->loop);
    return st;
}

int main(int argc, char **argv)
{
    struct node_config cfg = { .carrier = &stream_rpc, .proc = &proc_keeper };
    struct tls_opts tls = { 0 };
    enum tls_cover cover;
    struct fl_opts o = {
        .program = "furlong-node",
        .usage = "--address=HOST:PORT [OPTION...]",
        .about = "The worker daemon of one node. People use: furlong start --address=HOST:PORT",
        .tables = { { NULL, node_opts, &cfg }, { NULL, tls_opt_table, &tls } },
    };
    char keeper[FL_PATH_MAX];
    struct fl_err err = { 0 };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    struct daemon d = { .ready_fd = cfg.ready_fd };
    enum fl_status st = FL_OK;

    signal(SIGPIPE, SIG_IGN);
    if (!cfg.address)
        st = fl_fail(&err, FL_INVALID, "furlong-node needs --address=HOST:PORT, of the head");
    if (st == FL_OK && o.n_words)
        st = fl_fail(&err, FL_INVALID, "furlong-node: '%s' is no option, see --help", o.words[0]);
    if (st == FL_OK && cfg.log_level)
        st = fl_log_level_set(cfg.log_level, &err);
    if (st == FL_OK)
        st = tls_load(&tls, &cover, &cfg.tls, &err);
    if (st == FL_OK)
        st = fl_program_path("furlong-keep", keeper, &err);
    if (st == FL_OK)
        st = path_lead(keeper, &err);
    if (st == FL_OK)
        st = check_machine(&cfg, &err);
    if (st == FL_OK) {
        cfg.keeper = keeper;
        raise_limits();
        st = run(&cfg, &d, &err);
    }
    json_decref(cfg.notes);
    tls_id_destroy(cfg.tls);
    if (st == FL_OK)
        return d.rc;
    say_failed(cfg.ready_fd, &err);
    return st == FL_INVALID ? 2 : 1;
}
