/* furlong-head as a process: what it says when it is ready or cannot be, what is left of it. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/base/str.h"
#include "tests/t.h"
#include "transport/http/http.h"

extern char **environ;
static const char *program;

struct prog {
    pid_t pid;
    int ready, err;
    char line[4096], said[8192]; /* on the ready descriptor; on stderr */
    json_t *info;
};

static void dirs(const char *name)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/%s", t_tmp(), name);
    mkdir(path, 0700);
    setenv("FURLONG_STATE_DIR", path, 1);
    snprintf(path, sizeof(path), "%s/r-%s", t_tmp(), name);
    mkdir(path, 0700);
    setenv("FURLONG_RUNTIME_DIR", path, 1);
    unsetenv("FURLONG_TOKEN_PATH");
}

/* Up to the end of what comes, or until it has been quiet for too long. */
static void read_all(int fd, char *out, size_t cap, bool one_line)
{
    size_t len = strlen(out);

    for (;;) {
        struct pollfd p = { .fd = fd, .events = POLLIN };
        int rc = poll(&p, 1, 20000);

        t_true(rc > 0 || (rc < 0 && errno == EINTR), "nothing came in 20 s");
        if (rc <= 0)
            continue;
        ssize_t n = read(fd, out + len, cap - 1 - len);
        if (n <= 0)
            break;
        len += (size_t)n;
        out[len] = '\0';
        if ((one_line && memchr(out, '\n', len)) || len == cap - 1)
            break;
    }
}

static void launch(struct prog *p, const char *const *args)
{
    posix_spawn_file_actions_t fa;
    const char *argv[24] = { program, "--ready-fd=3" };
    int ready[2], err[2], n = 2;

    memset(p, 0, sizeof(*p));
    while (*args)
        argv[n++] = *args++;
    t_int_eq(pipe2(ready, O_CLOEXEC) + pipe2(err, O_CLOEXEC), 0);
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, err[1], 2);
    posix_spawn_file_actions_adddup2(&fa, ready[1], 3);
    posix_spawn_file_actions_addclosefrom_np(&fa, 4);
    t_int_eq(posix_spawn(&p->pid, program, &fa, NULL, (char *const *)argv, environ), 0);
    posix_spawn_file_actions_destroy(&fa);
    close(ready[1]);
    close(err[1]);
    p->ready = ready[0];
    p->err = err[0];
    read_all(p->ready, p->line, sizeof(p->line), true);
    p->info = json_loads(p->line, 0, NULL);
}

#define LAUNCH(p, ...) launch((p), (const char *const[]){ __VA_ARGS__, NULL })
#define FREE_PORTS "--port=0", "--dashboard-port=0"

static int ended(struct prog *p)
{
    int status = 0;

    read_all(p->err, p->said, sizeof(p->said), false); /* its end closes the pipe */
    t_int_eq(waitpid(p->pid, &status, 0), p->pid);
    close(p->ready);
    close(p->err);
    json_decref(p->info);
    p->info = NULL;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static const char *info(struct prog *p, const char *name)
{
    const char *s = json_string_value(json_object_get(p->info, name));

    return s ? s : "";
}

static unsigned fetch(struct prog *p, const char *method, const char *path, const char *body,
                      json_t **out)
{
    char url[256];
    struct http_answer a = { 0 };
    struct fl_err err = { 0 };
    struct http_ask q = { .method = method, .url = url, .timeout_ms = 20000 };

    snprintf(url, sizeof(url), "%s%s", info(p, "http"), path);
    if (body)
        q.body = (struct fl_bytes){ body, strlen(body) };
    t_ok(http_fetch(&q, &a, &err), &err);
    unsigned status = a.status;
    if (out)
        *out = json_loads(a.body, 0, NULL);
    http_answer_fini(&a);
    return status;
}

static void it_says_where_it_serves_and_leaves_nothing(void **unused)
{
    struct prog p;
    char path[FL_PATH_MAX], *text;
    size_t len;
    struct stat sb;

    (void)unused;
    dirs("plain");
    uint64_t before = fl_clock_boot_ns();
    LAUNCH(&p, FREE_PORTS);
    print_message("# ready after %.1f ms\n", (double)(fl_clock_boot_ns() - before) / 1e6);
    t_true(p.info, "%s%s", p.line, p.said);
    t_int_eq(json_integer_value(json_object_get(p.info, "pid")), p.pid);
    t_int_eq(json_integer_value(json_object_get(p.info, "term")), 1);
    t_int_eq(strncmp(info(&p, "address"), "127.0.0.1:", 10), 0);
    t_str_eq(info(&p, "token_path"), "", "on loopback there is none");
    snprintf(path, sizeof(path), "%s/h-%.8s/head.json", getenv("FURLONG_RUNTIME_DIR"),
             info(&p, "cluster"));
    t_ok(fl_file_read(path, 4096, &text, &len, NULL), NULL);
    t_int_eq(strncmp(text, p.line, len), 0);
    free(text);
    t_int_eq(fetch(&p, "GET", "/api/version", NULL, NULL), 200);
    t_int_eq(kill(p.pid, SIGTERM), 0);
    t_int_eq(ended(&p), 0, "%s", p.said);
    t_int_eq(stat(path, &sb), -1, "head.json is gone");
}

static void two_heads_cannot_share_a_journal(void **unused)
{
    struct prog p, q;
    char pid[24];

    (void)unused;
    dirs("journal");
    LAUNCH(&p, FREE_PORTS);
    t_true(p.info);
    LAUNCH(&q, FREE_PORTS);
    snprintf(pid, sizeof(pid), "pid %d", (int)p.pid);
    t_has(info(&q, "error"), pid);
    t_has(info(&q, "error"), "--state-dir");
    t_int_eq(ended(&q), 1);
    t_has(q.said, pid);
    t_int_eq(fetch(&p, "GET", "/api/furlong/status", NULL, NULL), 200);
    kill(p.pid, SIGTERM);
    ended(&p);
}

static void nor_a_port(void **unused)
{
    struct prog p, q;
    char rpc[32], http[32];

    (void)unused;
    dirs("ports");
    LAUNCH(&p, FREE_PORTS);
    snprintf(rpc, sizeof(rpc), "--port=%s", strrchr(info(&p, "address"), ':') + 1);
    snprintf(http, sizeof(http), "--dashboard-port=%s", strrchr(info(&p, "http"), ':') + 1);
    dirs("ports2");
    LAUNCH(&q, rpc, "--dashboard-port=0");
    t_has(info(&q, "error"), "in use");
    t_has(info(&q, "error"), rpc);
    t_int_eq(ended(&q), 1);
    LAUNCH(&q, "--port=0", http);
    t_has(info(&q, "error"), "in use");
    t_has(info(&q, "error"), http);
    t_int_eq(ended(&q), 1);
    kill(p.pid, SIGTERM);
    ended(&p);
}

static void bad_arguments_are_one_sentence(void **unused)
{
    static const struct {
        const char *arg, *says;
        int code;
    } rows[] = {
        { "--prot=1", "--port", 2 },
        { "--port=70000", "65535", 2 },
        { "--port=many", "many", 2 },
        { "serve", "serve", 2 },
        { "--log-level=loud", "loud", 2 },
        { "--node-ip-address=192.0.2.77", "192.0.2.77", 1 },
        { "--dashboard-host=192.0.2.77", "192.0.2.77", 1 },
        { "--state-dir=/proc/nowhere", "/proc", 1 },
    };

    (void)unused;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct prog p;

        dirs("bad");
        LAUNCH(&p, FREE_PORTS, rows[i].arg);
        t_int_eq(ended(&p), rows[i].code, "%s: %s", rows[i].arg, p.said);
        t_has(p.said, rows[i].says);
    }
}

/* The head of a frame that could not be finished, as a kill may leave: the log's salt is in it. */
static void tear(void)
{
    uint8_t log[32], frame[24] = { 0 };
    char path[300];

    snprintf(path, sizeof(path), "%s/head/journal.db-wal", getenv("FURLONG_STATE_DIR"));
    int fd = open(path, O_RDWR | O_APPEND);

    t_true(fd >= 0, "%s: %s", path, strerror(errno));
    t_int_eq(read(fd, log, sizeof(log)), sizeof(log));
    memcpy(frame + 8, log + 16, 8);
    t_int_eq(write(fd, frame, sizeof(frame)), sizeof(frame));
    close(fd);
}

static void a_killed_head_has_kept_what_it_took(void **unused)
{
    (void)unused;
    for (int torn = 0; torn < 2; torn++) {
        struct prog p;
        json_t *o = NULL;
        char cluster[40];

        dirs(torn ? "killed-torn" : "killed");
        LAUNCH(&p, FREE_PORTS);
        snprintf(cluster, sizeof(cluster), "%s", info(&p, "cluster"));
        for (int i = 0; i < 3; i++)
            t_int_eq(fetch(&p, "POST", "/api/jobs/", "{\"entrypoint\": \"true\"}", NULL), 200);
        kill(p.pid, SIGKILL);
        t_int_eq(ended(&p), 128 + SIGKILL);
        if (torn)
            tear();
        LAUNCH(&p, FREE_PORTS);
        t_str_eq(info(&p, "cluster"), cluster);
        t_int_eq(fetch(&p, "GET", "/api/furlong/status", NULL, &o), 200);
        /* the kill may have come into a record that nobody had been told of */
        bool cut = *json_string_value(json_object_get(o, "journal_note"));

        json_decref(o);
        t_true(cut || !torn);
        t_int_eq(json_integer_value(json_object_get(p.info, "term")), cut ? 17 : 2,
                 "what was cut could have been a term");
        t_int_eq(fetch(&p, "GET", "/api/jobs/", NULL, &o), 200);
        t_int_eq(json_array_size(o), 3);
        json_decref(o);
        kill(p.pid, SIGTERM);
        ended(&p);
    }
}

/* Killed at each write of the journal: what was answered with 200 is there afterwards, whole. */
static void killed_anywhere_nothing_answered_is_lost(void **unused)
{
    (void)unused;
    for (int nth = 1; nth <= 9; nth += 2) {
        char spec[64], name[32];
        struct prog p;
        json_t *o = NULL, *jobs = NULL;
        unsigned answered = 0;

        snprintf(name, sizeof(name), "kp%d", nth);
        dirs(name);
        snprintf(spec, sizeof(spec),
                 nth % 4 == 1 ? "journal.record:%d=kill" : "journal.committed:%d=kill", nth + 2);
        setenv("FURLONG_FAULT", spec, 1);
        LAUNCH(&p, FREE_PORTS);
        unsetenv("FURLONG_FAULT");
        t_true(p.info, "%s", p.said);
        for (int i = 0; i < 20; i++) {
            char url[256];
            struct http_answer a = { 0 };
            struct http_ask q = { .method = "POST",
                                  .url = url,
                                  .timeout_ms = 20000,
                                  .body = { "{\"entrypoint\": \"true\"}", 22 } };

            snprintf(url, sizeof(url), "%s/api/jobs/", info(&p, "http"));
            bool ok = http_fetch(&q, &a, NULL) == FL_OK && a.status == 200;
            http_answer_fini(&a);
            if (!ok)
                break;
            answered++;
        }
        t_int_eq(ended(&p), 128 + SIGKILL, "%s", spec);
        LAUNCH(&p, FREE_PORTS);
        t_true(p.info, "%s", p.said);
        fetch(&p, "GET", "/api/jobs/", NULL, &jobs);
        t_true(json_array_size(jobs) >= answered && json_array_size(jobs) <= answered + 1,
               "%s: %u answered, %zu kept", spec, answered, json_array_size(jobs));
        json_decref(jobs);
        json_decref(o);
        kill(p.pid, SIGTERM);
        ended(&p);
    }
}

static void beyond_loopback_a_token_is_made(void **unused)
{
    struct prog p;
    char path[256];
    struct stat sb;

    (void)unused;
    dirs("beyond");
    LAUNCH(&p, FREE_PORTS, "--dashboard-host=0.0.0.0");
    t_true(p.info, "%s", p.said);
    snprintf(path, sizeof(path), "%s/token", getenv("FURLONG_STATE_DIR"));
    t_str_eq(info(&p, "token_path"), path);
    t_int_eq(stat(path, &sb), 0);
    t_int_eq(sb.st_mode & 0777, 0600);
    t_int_eq(sb.st_size, 64);
    kill(p.pid, SIGTERM);
    ended(&p);
    t_int_eq(chmod(path, 0644), 0);
    LAUNCH(&p, FREE_PORTS, "--dashboard-host=0.0.0.0");
    t_has(info(&p, "error"), "chmod 600");
    t_int_eq(ended(&p), 1);
}

static void a_private_one_takes_its_state_along(void **unused)
{
    struct prog p;
    char path[256];
    struct stat sb;

    (void)unused;
    dirs("private");
    snprintf(path, sizeof(path), "--state-dir=%s/mine", getenv("FURLONG_STATE_DIR"));
    LAUNCH(&p, FREE_PORTS, "--private", "--until-idle", path);
    t_true(p.info, "%s", p.said);
    t_true(json_is_true(json_object_get(p.info, "private")));
    t_int_eq(stat(path + 12, &sb), 0);
    t_int_eq(fetch(&p, "POST", "/api/furlong/shutdown", "{}", NULL), 200);
    t_int_eq(ended(&p), 0, "%s", p.said);
    t_int_eq(stat(path + 12, &sb), -1);
    snprintf(path, sizeof(path), "%s/h-", getenv("FURLONG_RUNTIME_DIR"));
    t_true(rmdir(getenv("FURLONG_RUNTIME_DIR")) == 0, "nothing is left in the runtime folder");
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_says_where_it_serves_and_leaves_nothing),
        cmocka_unit_test(two_heads_cannot_share_a_journal),
        cmocka_unit_test(nor_a_port),
        cmocka_unit_test(bad_arguments_are_one_sentence),
        cmocka_unit_test(a_killed_head_has_kept_what_it_took),
        cmocka_unit_test(killed_anywhere_nothing_answered_is_lost),
        cmocka_unit_test(beyond_loopback_a_token_is_made),
        cmocka_unit_test(a_private_one_takes_its_state_along),
    };

    if (argc < 2)
        return 2;
    program = argv[1];
    return t_run("program", tests);
}
