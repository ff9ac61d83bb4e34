/* A run on a head of Ray's: the package, the submission, the following */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/env.h"
#include "cli/external.h"
#include "cli/foreign.h"
#include "cli/job.h"
#include "cli/quote.h"
#include "common/base/str.h"

extern char **environ;
enum { FILES_MAX = 256, TRACE_MAX = 64 << 10, LINE_MAX_BYTES = 1 << 20, LOADER_MS = 10000, WORDS_MAX = FL_OPT_MAX + 16 };

/* ==== what is sent ================================================================================= */
struct parcel {
    struct ray_pack_file files[FILES_MAX];
    char *texts[2 * FILES_MAX]; /* names and paths of ours */
    size_t n, n_texts;
    bool full;
};

static const char *keep(struct parcel *p, const char *text)
{
    char *copy = p->n_texts < FL_LEN(p->texts) ? strdup(text) : NULL;

    p->full |= !copy;
    if (copy)
        p->texts[p->n_texts++] = copy;
    return copy;
}

static void add(struct parcel *p, const char *folder, const char *name, const char *path, unsigned mode)
{
    char in[FL_PATH_MAX];

    if (p->n == FILES_MAX || fl_path(in, NULL, "%s/%s", folder, name) != FL_OK) {
        p->full = true;
        return;
    }
    for (size_t i = 0; i < p->n; i++)
        if (strcmp(p->files[i].name, in) == 0)
            return; /* of another program already */
    const char *kept = keep(p, in), *from = keep(p, path);

    if (kept && from)
        p->files[p->n++] = (struct ray_pack_file){ .name = kept, .path = from, .mode = mode };
}

static void add_library(void *arg, const char *name, const char *path)
{
    add(arg, "lib", name, path, 0755);
}

/* Of the C library itself each machine has its own, which must be no older than the one of the build. */
void external_libraries(const char *trace, void (*each)(void *arg, const char *name, const char *path), void *arg)
{
    static const char *const own[] = { "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libresolv.so", "ld-linux" };

    for (const char *p = trace; *p; p += strcspn(p, "\n"), p += *p == '\n') {
        char name[256], path[1024];
        bool theirs = false;

        if (sscanf(p, " %255[^ \n] => %1023[^ \n]", name, path) != 2 || path[0] != '/')
            continue;
        for (size_t i = 0; i < FL_LEN(own); i++)
            theirs |= strncmp(name, own[i], strlen(own[i])) == 0;
        if (!theirs)
            each(arg, name, path);
    }
}

/* All that comes until its end; false: that did not come within LOADER_MS of silence, or is longer than out. */
static bool read_end(int fd, char out[TRACE_MAX])
{
    struct pollfd p = { .fd = fd, .events = POLLIN };
    size_t len = 0;
    ssize_t n = 1;

    while (n > 0 && len < TRACE_MAX - 1) {
        int ready = poll(&p, 1, LOADER_MS);

        if (ready < 0 && errno == EINTR)
            continue;
        n = ready > 0 ? read(fd, out + len, TRACE_MAX - 1 - len) : -1;
        len += n > 0 ? (size_t)n : 0;
    }
    out[len] = 0;
    return n == 0;
}

/* What the loader would load for a program of ours: it says so, and does not run it. */
static enum fl_status trace(const char *path, char out[TRACE_MAX], struct fl_err *err)
{
    char *argv[] = { (char *)(uintptr_t)path, NULL }, *env[] = { "LD_TRACE_LOADED_OBJECTS=1", NULL };
    posix_spawn_file_actions_t files;
    int fds[2], rc, ws;
    bool whole = false;
    pid_t pid;

    if (pipe2(fds, O_CLOEXEC) < 0)
        return fl_fail_errno(err, "pipe");
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, fds[1], 1);
    rc = posix_spawn(&pid, path, &files, NULL, argv, env);
    posix_spawn_file_actions_destroy(&files);
    close(fds[1]);
    if (!rc && !(whole = read_end(fds[0], out)))
        (void)kill(pid, SIGKILL); /* our child, not reaped yet */
    close(fds[0]);
    while (!rc && waitpid(pid, &ws, 0) < 0 && errno == EINTR)
        ;
    errno = rc;
    return rc      ? fl_fail_errno(err, "start %s", path)
           : whole ? FL_OK
                   : fl_fail(err, FL_TIMEOUT, "the loader did not say within %d s which libraries %.160s needs", LOADER_MS / 1000, path);
}

/* Every program that a run needs, and their libraries. The keeper is static: it has none, and would really start. */
static enum fl_status add_programs(struct parcel *p, struct fl_err *err)
{
    static const char *const names[] = { "furlong",         "furlong-head",    "furlong-node",  "furlong-driver", "furlong-trainer",
                                         "furlong-rollout", "furlong-sglang", "furlong-probe", "furlong-keep" };
    char path[FL_PATH_MAX], *text = malloc(TRACE_MAX);
    enum fl_status st = text ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory");

    for (size_t i = 0; i < FL_LEN(names) && st == FL_OK; i++) {
        st = fl_program_path(names[i], path, err);
        if (st != FL_OK)
            break;
        add(p, "bin", names[i], path, 0755);
        if (strcmp(names[i], "furlong-keep") != 0 && (st = trace(path, text, err)) == FL_OK)
            external_libraries(text, add_library, p);
    }
    free(text);
    return st == FL_OK && p->full ? fl_fail(err, FL_EXHAUSTED, "more than %d files are needed", FILES_MAX) : st;
}

static enum fl_status send_package(const struct external *x, const struct external_run *r, char uri[RAY_PACK_URI_BYTES], struct fl_err *err)
{
    struct parcel *p = calloc(1, sizeof(*p));
    size_t bytes = 0;
    enum fl_status st = p ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for a package");

    for (size_t i = 0; st == FL_OK && i < external_n_files; i++)
        p->files[p->n++] = external_files[i];
    if (st == FL_OK && !r->programs)
        st = add_programs(p, err);
    if (st == FL_OK)
        st = ray_pack_list(&x->cluster, p->files, p->n, uri, &bytes, err);
    if (st == FL_OK)
        fprintf(stderr, "%zu files, %.1f MiB, for the nodes of Ray %s at %s\n", p->n, (double)bytes / (1 << 20), x->ray_version, x->cluster.url);
    else if (st == FL_EXHAUSTED)
        st = fl_wrap(err, st, "install Furlong on each node and name the folder of its programs with --ray-programs");
    for (size_t i = 0; p && i < p->n_texts; i++)
        free(p->texts[i]);
    free(p);
    return st;
}

/* ==== the submission =============================================================================== */
static bool is_proxy(const char *name)
{
    size_t n = strlen(name);

    return n >= 6 && strcasecmp(name + n - 6, "_proxy") == 0;
}

/* What goes along with any job (cli/env.h) and FURLONG_RAY_*, but for proxies, which are for a node to know, and what
 * looks like a secret: Ray shows a job's variables to everybody who sees the job. */
/* Those of --pass-env that would be dropped without a word. */
static enum fl_status no_secrets(const char *pass, struct fl_err *err)
{
    for (const char *w = pass; w && *w; w += strspn(w, ",")) {
        char name[256];
        size_t n = strcspn(w, ",");

        snprintf(name, sizeof(name), "%.*s", (int)n, w);
        if (fl_name_is_secret(name))
            return fl_fail(err, FL_INVALID, "--pass-env: %.80s looks like a secret, and Ray shows a job's variables to everybody who may see the job; set it on the nodes", name);
        w += n;
    }
    return FL_OK;
}

enum fl_status external_env(const char *uri, const char *pass, json_t **out, struct fl_err *err)
{
    static const char own[] = "FURLONG_RAY_";
    json_t *env = json_pack("{s:s,s:{}}", "working_dir", uri, "env_vars"), *vars = json_object_get(env, "env_vars"), *v;
    enum fl_status st = vars ? no_secrets(pass, err) : fl_fail(err, FL_EXHAUSTED, "no memory to submit");
    const char *name;
    void *next;

    if (st == FL_OK)
        st = cli_env_pass(env, pass, err);
    for (char **e = environ; *e && st == FL_OK; e++) {
        char own_name[128];
        size_t n = strcspn(*e, "=");

        if (strncmp(*e, own, sizeof(own) - 1) == 0 && (*e)[n] && n < sizeof(own_name)) {
            snprintf(own_name, sizeof(own_name), "%.*s", (int)n, *e);
            json_object_set_new(vars, own_name, json_string(*e + n + 1));
        }
    }
    json_object_foreach_safe(vars, next, name, v)
        if (is_proxy(name) || fl_name_is_secret(name))
            json_object_del(vars, name);
    if (st == FL_OK)
        *out = env;
    else
        json_decref(env);
    return st;
}

static json_t *submission(const struct external *x, const struct external_run *r, json_t *env_take)
{
    const struct launch *l = r->launch;
    char devices[32], nodes[32], gpus[32], wait[40], programs[FL_PATH_MAX + 16], here[4096], cwd[4112], version[64];
    const char *words[WORDS_MAX] = { "sh", "external_ray/start" };
    size_t n = 2;

#define ADD(text, ...) ((void)snprintf(text, sizeof(text), __VA_ARGS__), words[n++] = (text))
    ADD(devices, "--devices=%lld", (long long)r->devices);
    ADD(wait, "--join-timeout=%lld", (long long)l->wait_s);
    ADD(version, "--cluster-version=%s", x->ray_version);
    if (l->num_nodes > 0)
        ADD(nodes, "--num-nodes=%lld", (long long)l->num_nodes);
    if (r->nodes) {
        words[n++] = "--nodes";
        words[n++] = r->nodes;
    }
    if (l->node_gpus >= 0)
        ADD(gpus, "--node-gpus=%lld", (long long)l->node_gpus);
    if (r->programs)
        ADD(programs, "--programs=%s", r->programs);
    if (getcwd(here, sizeof(here)))
        ADD(cwd, "--cwd=%s", here);
#undef ADD
    words[n++] = "--";
    if (r->json)
        words[n++] = "--json";
    for (const char *const *w = r->words; *w && n < WORDS_MAX - 1; w++)
        words[n++] = *w;
    char *line = cli_shell_line(words);
    json_t *body = json_pack("{s:s,s:s,s:{s:s},s:o}", "entrypoint", line, "submission_id", r->id, "metadata", "furlong", "train",
                             "runtime_env", env_take);

    free(line);
    return body;
}

static enum fl_status submit(const struct external *x, const struct external_run *r, char id[CLI_JOB_BYTES], struct fl_err *err)
{
    char uri[RAY_PACK_URI_BYTES];
    json_t *body, *env;

    FL_TRY(no_secrets(r->pass, err)); /* before anything is sent */
    FL_TRY(send_package(x, r, uri, err));
    FL_TRY(external_env(uri, r->pass, &env, err));
    body = submission(x, r, env);
    enum fl_status st = body ? cli_submit(&x->cluster, body, id, err) : fl_fail(err, FL_EXHAUSTED, "no memory to submit");
    json_decref(body);
    return st == FL_OK || !err || !strstr(err->text, "already exists")
               ? st
               : fl_fail(err, FL_EXISTS, "%s has a job %s already; give another --submission-id, or none", x->cluster.url, r->id);
}

/* ==== what is shown ================================================================================ */
struct shown {
    const struct external_run *run;
    char *line; /* what came of one without its end */
    size_t len, cap;
};

/* Ray's two lines at the beginning say nothing that was not said. */
static bool is_rays(const char *line)
{
    return strncmp(line, "Running entrypoint for job ", 27) == 0 || strstr(line, " -- Runtime env is setting up.\n");
}

static void show_line(struct shown *s)
{
    json_t *o = s->run->json && *s->line == '{' ? json_loads(s->line, JSON_REJECT_DUPLICATES, NULL) : NULL;
    FILE *to = s->run->json && !json_is_integer(json_object_get(o, "step")) ? stderr : stdout;

    json_decref(o);
    if (!is_rays(s->line))
        fwrite(s->line, 1, s->len, to);
    fflush(to);
    s->len = 0;
}

static void show(void *arg, const char *text, size_t len)
{
    struct shown *s = arg;

    while (len > 0) {
        const char *end = memchr(text, '\n', len);
        size_t n = end ? (size_t)(end - text) + 1 : len;

        if (s->len + n + 1 > s->cap) {
            size_t cap = 2 * (s->len + n + 1);
            char *more = realloc(s->line, cap);

            if (!more)
                abort();
            s->line = more;
            s->cap = cap;
        }
        memcpy(s->line + s->len, text, n);
        s->len += n;
        s->line[s->len] = 0;
        if (end || s->len > LINE_MAX_BYTES)
            show_line(s);
        text += n;
        len -= n;
    }
}

static int ended(const struct external_run *r, const json_t *details)
{
    const char *status = cli_text(details, "status"), *message = cli_text(details, "message");
    json_t *exit_code = json_object_get(details, "driver_exit_code");
    int code = json_is_integer(exit_code) ? (int)json_integer_value(exit_code) : strcmp(status, "SUCCEEDED") != 0;
    bool own = strncmp(message, "Job entrypoint command failed", 29) == 0; /* shown: its output, the code */

    if (strcmp(status, "SUCCEEDED") == 0)
        return code;
    fprintf(stderr, "job %s %s with exit code %d%s%.*s\n", r->id, strcmp(status, "STOPPED") == 0 ? "was stopped" : "failed", code,
            own || !*message ? "" : ": ", own ? 0 : 600, message);
    return code ? code : 1;
}

int external_run(const struct external *x, const struct external_run *r)
{
    struct shown shown = { .run = r };
    const struct foreign_follow how = { .show = show, .arg = &shown, .program = r->program, .away_max_ms = r->away_max_ms };
    char id[CLI_JOB_BYTES];
    struct fl_err err = { 0 };
    json_t *details;

    if (submit(x, r, id, &err) != FL_OK)
        return cli_failed(r->program, &err);
    fprintf(stderr, "job %s on Ray %s at %s\n", id, x->ray_version, x->cluster.url);
    enum fl_status st = foreign_follow(&x->cluster, id, &how, &details, &err);

    if (shown.len)
        show_line(&shown);
    free(shown.line);
    if (st != FL_OK)
        return cli_failed(r->program, &err);
    int rc = ended(r, details);

    json_decref(details);
    return rc;
}
