#include "worker/roles/sglang/server.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/port.h"
#include "common/base/str.h"
#include "common/conf/json.h"
#include "transport/http/http.h"
#include "worker/roles/sglang/owner.h"
#include "worker/roles/sglang/shell.h"

enum { LOOK_MS = 30000, STOP_MS = 5000, ANSWER_MAX = 64 << 20, OWN_PORTS = 4 };

/* ---- asking ---------------------------------------------------------------------------------- */
/* The sentence in an error's body: "message", "error" as a text or an object with a message, or the
 * text itself. */
static void message_of(const json_t *o, const char *body, size_t len, char *out, size_t cap)
{
    const json_t *e = json_object_get(o, "error"), *m = json_object_get(o, "message");

    if (json_is_object(e))
        m = json_object_get(e, "message");
    else if (json_is_string(e))
        m = e;
    if (json_is_string(m))
        fl_copy(out, cap, json_string_value(m));
    else
        snprintf(out, cap, "%.*s", (int)(len < cap ? len : cap - 1),
                 len ? body : "no reason given");
}

enum fl_status sglang_answer(const char *path, unsigned status, const char *body, size_t len,
                             json_t **out, struct fl_err *err)
{
    struct fl_err parsing = { 0 };
    json_t *o = NULL;
    char why[160];
    enum fl_status st = FL_OK;

    if (len)
        st = fl_json_parse(body, len, path, ANSWER_MAX * 4, &o, &parsing);
    if (status / 100 != 2) {
        message_of(o, body, len, why, sizeof(why));
        json_decref(o);
        return fl_fail(err, status / 100 == 4 ? FL_INVALID : FL_UNREACHABLE,
                       "SGLang answered %s with %u: %s", path, status, why);
    }
    if (out && st != FL_OK)
        return fl_fail(err, FL_CORRUPT, "SGLang's answer is no JSON: %s", parsing.text);
    if (out)
        *out = o ? o : json_null();
    else
        json_decref(o);
    return FL_OK;
}

enum fl_status sglang_ask(const struct sglang_server *s, const char *path, json_t *body_take,
                          uint32_t ms, json_t **out, struct fl_err *err)
{
    char url[512], *body = body_take ? json_dumps(body_take, JSON_COMPACT) : NULL;
    struct http_answer a = { 0 };
    struct http_ask ask = { .method = body ? "POST" : "GET",
                            .url = url,
                            .headers = s->headers,
                            .body = { body, body ? strlen(body) : 0 },
                            .timeout_ms = ms,
                            .answer_max_bytes = ANSWER_MAX };
    enum fl_status st;

    snprintf(url, sizeof(url), "%s%s", s->url, path);
    st = body_take && !body ? fl_fail(err, FL_EXHAUSTED, "%s: no memory", path)
                            : http_fetch(&ask, &a, err);
    if (st == FL_OK)
        st = sglang_answer(path, a.status, a.body, a.body_len, out, err);
    http_answer_fini(&a);
    free(body);
    json_decref(body_take);
    return st;
}

enum fl_status sglang_success(const char *path, const json_t *answer, struct fl_err *err)
{
    char why[160];

    if (!json_is_false(json_object_get(answer, "success")))
        return FL_OK;
    message_of(answer, "", 0, why, sizeof(why));
    return fl_fail(err, FL_INVALID, "SGLang refused %s: %s", path, why);
}

enum fl_status sglang_do(const struct sglang_server *s, const char *path, json_t *body_take,
                         uint32_t ms, struct fl_err *err)
{
    json_t *o = NULL;
    enum fl_status st = sglang_ask(s, path, body_take, ms, &o, err);

    if (st == FL_OK)
        st = sglang_success(path, o, err);
    json_decref(o);
    return st;
}

/* ---- our child ---- */
static bool port_bind(uint16_t port, uint16_t *got)
{
    struct sockaddr_in at = { .sin_family = AF_INET,
                              .sin_addr = { htonl(INADDR_LOOPBACK) },
                              .sin_port = htons(port) };
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    bool ok = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
              bind(fd, (struct sockaddr *)&at, len) == 0 && listen(fd, 1) == 0 &&
              getsockname(fd, (struct sockaddr *)&at, &len) == 0;

    if (fd >= 0)
        (void)close(fd);
    *got = ntohs(at.sin_port);
    return ok;
}

/* One of this engine's own, which nobody else is told while it lives; the next of them where
 * somebody took it all the same. Without a daemon that gives some: any that is free at this
 * moment. */
static enum fl_status free_port(uint16_t *out, struct fl_err *err)
{
    const char *given = getenv("FURLONG_BASE_PORT");
    int64_t base = 0;

    if (given && fl_parse_i64(given, 1, 65535 - OWN_PORTS, &base, NULL) == FL_OK)
        for (int i = 0; i < OWN_PORTS; i++) {
            char who[160];

            if (port_bind((uint16_t)(base + i), out))
                return FL_OK;
            if (!fl_port_holder((uint16_t)(base + i), who, sizeof(who)))
                (void)FL_COPY(who, "somebody");
            fl_warn("a port of this engine is taken, the next one is tried port=%d by=\"%s\"",
                    (int)(base + i), who);
        }
    return port_bind(0, out) ? FL_OK : fl_fail_errno(err, "a port for the SGLang server");
}

/* Where the loader lies that the server shall import: from PYTHONPATH, or beside this program. */
static bool loader_dir(char out[FL_PATH_MAX])
{
    const char *dir = getenv("FURLONG_PYTHON_DIR");
    char self[FL_PATH_MAX] = "", file[FL_PATH_MAX];
    ssize_t len = readlink("/proc/self/exe", self, sizeof(self) - 1);

    self[len > 0 ? len : 0] = '\0';
    for (int up = 0; up < 2 && strrchr(self, '/'); up++)
        *strrchr(self, '/') = '\0';
    const char *const at[] = { dir ? dir : "", "%s/share/furlong/python", FURLONG_SOURCE_PYTHON };
    for (size_t i = 0; i < FL_LEN(at); i++) {
        if (fl_path(out, NULL, i == 1 ? "%s/share/furlong/python" : "%s", i == 1 ? self : at[i]) !=
                FL_OK ||
            fl_path(file, NULL, "%s/furlong_sglang/__init__.py", out) != FL_OK)
            continue;
        if (*out && access(file, R_OK) == 0)
            return true;
    }
    return false;
}

static void word_replace(struct fl_str *out, const char *text, const char *word, const char *by)
{
    const char *at;

    for (; (at = strstr(text, word)); text = at + strlen(word)) {
        fl_str_add_bytes(out, text, (size_t)(at - text));
        fl_str_add(out, "%s", by);
    }
    fl_str_add(out, "%s", text);
}

static void command_make(struct fl_str *out, const struct sglang_opts *o, uint16_t port,
                         bool loader)
{
    char number[8];

    snprintf(number, sizeof(number), "%u", port);
    fl_str_add(out, "exec ");
    word_replace(out, o->cmd, "{port}", number);
    if (!strstr(o->cmd, "{port}"))
        fl_str_add(out, " --host 127.0.0.1 --port %u", port);
    if (loader && !strstr(o->cmd, "--custom-weight-loader") && strcmp(o->weights, "disk") != 0)
        fl_str_add(out, " --custom-weight-loader furlong_sglang.load");
}

static enum fl_status child_spawn(struct sglang_server *s, const char *command, struct fl_err *err)
{
    FL_TRY(shell_start(command, -1, &s->pid, err));
    s->pidfd = (int)syscall(SYS_pidfd_open, s->pid, 0);
    return s->pidfd >= 0 ? FL_OK : fl_fail_errno(err, "watch the SGLang server");
}

/* Which variables it does not know is asked of the Python that the command begins with, beside the
 * start: it only writes notes to the log. A command that begins otherwise is not asked. */
static void names_ask(const char *command)
{
    size_t n = strcspn(command, " \t\n");
    const char *base = memrchr(command, '/', n);
    struct fl_str line = FL_STR_HEAP(FL_PATH_MAX);
    pid_t pid;

    base = base ? base + 1 : command;
    if (strncmp(base, "python", 6) == 0) {
        /* the keeper is its next parent */
        fl_str_add(&line, "%.*s -m furlong_sglang.names </dev/null 1>&2 2>/dev/null &", (int)n,
                   command);
        if (!line.cut && shell_start(fl_str_text(&line), -1, &pid, NULL) == FL_OK)
            (void)waitpid(pid, NULL, 0); /* of the shell, which goes at once */
    }
    fl_str_fini(&line);
}

enum fl_status sglang_server_start(struct sglang_server *s, const struct sglang_opts *o,
                                   const char *socket, struct fl_err *err)
{
    struct fl_str command = FL_STR_HEAP(64 << 10), path = FL_STR_HEAP(64 << 10);
    char dir[FL_PATH_MAX];
    uint16_t port = 0;
    bool loader;

    *s = (struct sglang_server){ .pidfd = -1, .tp = 1, .ranks = 1 };
    s->headers[0] = "Content-Type: application/json";
    if (o->api_key) {
        if ((size_t)snprintf(s->auth, sizeof(s->auth), "Authorization: Bearer %s", o->api_key) >=
            sizeof(s->auth))
            return fl_fail(err, FL_INVALID, "--sglang-api-key has more than %zu bytes",
                           sizeof(s->auth) - 23);
        s->headers[1] = s->auth;
    }
    if (o->url) {
        size_t len = strlen(o->url);

        while (len && o->url[len - 1] == '/')
            len--;
        if (len >= sizeof(s->url))
            return fl_fail(err, FL_INVALID, "--sglang-url has %zu bytes: at most %zu", len,
                           sizeof(s->url) - 1);
        memcpy(s->url, o->url, len);
        return FL_OK;
    }
    FL_TRY(free_port(&port, err));
    s->port = port;
    s->socket = socket;
    snprintf(s->url, sizeof(s->url), "http://127.0.0.1:%u", port);
    loader = loader_dir(dir);
    if (loader) {
        const char *had = getenv("PYTHONPATH");

        fl_str_add(&path, "%s%s%s", dir, had && *had ? ":" : "", had ? had : "");
        (void)setenv("PYTHONPATH", fl_str_text(&path), 1);
    }
    (void)setenv("FURLONG_SGLANG_SOCKET", socket, 1);
    command_make(&command, o, port, loader);
    enum fl_status st = command.cut ? fl_fail(err, FL_INVALID, "--sglang-cmd is too long")
                                    : child_spawn(s, fl_str_text(&command), err);
    fl_str_fini(&command);
    fl_str_fini(&path);
    if (st == FL_OK && loader)
        names_ask(o->cmd);
    if (st == FL_OK)
        fl_info("SGLang server starts pid=%d url=%s", (int)s->pid, s->url);
    return st;
}

enum fl_status sglang_server_lives(struct sglang_server *s, struct fl_err *err)
{
    siginfo_t i = { 0 };

    if (!s->pid || waitid(P_PID, (id_t)s->pid, &i, WEXITED | WNOHANG | WNOWAIT) != 0 || !i.si_pid)
        return FL_OK;
    if (i.si_code == CLD_EXITED)
        return fl_fail(
            err, FL_UNREACHABLE,
            "the SGLang server (pid %d) ended with exit code %d: its last lines are above",
            (int)s->pid, i.si_status);
    return fl_fail(err, FL_UNREACHABLE, "the SGLang server (pid %d) was ended by signal %d (%s)",
                   (int)s->pid, i.si_status, strsignal(i.si_status));
}

static bool others_answer(struct sglang_server *s, struct fl_err *why)
{
    const struct owner_us us = { s->pid, s->socket };
    char who[160];

    if (!s->pid || sglang_port_owner(s->port, &us, who, sizeof(who)) != OWNER_OTHERS)
        return false;
    fl_fail(why, FL_AGAIN, "port %u is served by %s, which this engine did not start", s->port,
            who);
    if (!s->others_said)
        fl_warn("another's server answers, ours is waited for port=%u by=\"%s\"", s->port, who);
    s->others_said = true;
    return true;
}

enum fl_status sglang_server_look(struct sglang_server *s, struct fl_err *err)
{
    struct fl_err why = { 0 };

    FL_TRY(sglang_server_lives(s, err));
    if (sglang_ask(s, "/health", NULL, LOOK_MS, NULL, &why) == FL_OK && !others_answer(s, &why))
        return FL_OK;
    FL_TRY(sglang_server_lives(s, err)); /* meanwhile */
    return fl_fail(err, FL_AGAIN, "%s", why.text);
}

void sglang_server_stop(struct sglang_server *s)
{
    struct pollfd p = { .fd = s->pidfd, .events = POLLIN };

    if (s->pid) {
        (void)kill(-s->pid, SIGTERM); /* may be gone already, as in the next one */
        (void)poll(&p, s->pidfd >= 0, STOP_MS);
        (void)kill(-s->pid, SIGKILL);
        (void)waitpid(s->pid, NULL, 0);
    }
    if (s->pidfd >= 0)
        (void)close(s->pidfd);
    s->pid = 0;
    s->pidfd = -1;
}

/* ---- what it says of itself ---- */
/* The newer path, or what older releases call it. */
static enum fl_status ask_either(const struct sglang_server *s, const char *path, const char *older,
                                 uint32_t ms, json_t **out, struct fl_err *err)
{
    enum fl_status st = sglang_ask(s, path, NULL, ms, out, err);

    return st == FL_INVALID ? sglang_ask(s, older, NULL, ms, out, err) : st;
}

static void text_take(const json_t *o, const char *key, char *out, size_t cap)
{
    const char *v = json_string_value(json_object_get(o, key));

    if (v)
        fl_copy(out, cap, v);
}

static uint32_t count_take(const json_t *o, const char *key)
{
    json_int_t v = json_integer_value(json_object_get(o, key));

    return v > 0 && v <= 65536 ? (uint32_t)v : 1;
}

static bool names_loader(const json_t *list)
{
    size_t i;
    json_t *v;

    json_array_foreach (list, i, v)
        if (json_is_string(v) && !strcmp(json_string_value(v), "furlong_sglang.load"))
            return true;
    return false;
}

enum fl_status sglang_server_about(struct sglang_server *s, uint32_t ms, struct fl_err *err)
{
    json_t *model = NULL, *server = NULL;
    enum fl_status st = ask_either(s, "/model_info", "/get_model_info", ms, &model, err);

    if (st == FL_OK)
        st = ask_either(s, "/server_info", "/get_server_info", ms, &server, err);
    if (st == FL_OK && (!json_is_object(model) || !json_is_object(server)))
        st = fl_fail(err, FL_CORRUPT, "SGLang's /model_info or /server_info is no JSON object");
    if (st == FL_OK) {
        text_take(model, "model_path", s->model, sizeof(s->model));
        text_take(model, "weight_version", s->weight_version, sizeof(s->weight_version));
        text_take(server, "version", s->version, sizeof(s->version));
        uint32_t tp = count_take(server, "tp_size"), pp = count_take(server, "pp_size"),
                 dp = count_take(server, "dp_size");
        /* with attention by data the ranks of tp are shared out, else dp is replicas of them */
        s->ranks =
            tp * pp * (json_is_true(json_object_get(server, "enable_dp_attention")) ? 1 : dp);
        snprintf(s->parallel, sizeof(s->parallel), "tp=%u pp=%u dp=%u", tp, pp, dp);
        s->tp = tp;
        s->has_saver = json_is_true(json_object_get(server, "enable_memory_saver"));
        s->has_loader = names_loader(json_object_get(server, "custom_weight_loader"));
    }
    json_decref(model);
    json_decref(server);
    return st;
}
