/* furlong-head: arguments, one object, the loop */
#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/addr.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/port.h"
#include "common/base/str.h"
#include "common/conf/opt.h"
#include "head/head.h"
#include "transport/http/http.h"
#include "transport/tls/tls.h"

struct args {
    const char *node_ip, *dashboard_host, *state_dir, *runtime_dir, *log_level;
    const char *ray_version, *ray_commit;
    int64_t port, dashboard_port, ready_fd, silent_ms;
    bool until_idle, private;
};
#define AT(member) .at = offsetof(struct args, member)
/* clang-format off */
static const struct fl_opt opts[] = {
    { FL_OPT_TEXT, "node-ip-address", .arg = "ADDRESS", .fallback = "127.0.0.1", AT(node_ip),
      .help = "address that daemons connect to; beyond loopback the cluster token is asked from all" },
    { FL_OPT_INT, "port", .arg = "PORT", .fallback = "6379", .min = 0, .max = 65535, AT(port),
      .help = "for daemons; 0: any free one" },
    { FL_OPT_TEXT, "dashboard-host", .arg = "ADDRESS", .fallback = "127.0.0.1", AT(dashboard_host),
      .help = "address of the HTTP face" },
    { FL_OPT_INT, "dashboard-port", .arg = "PORT", .fallback = "8265", .min = 0, .max = 65535, AT(dashboard_port),
      .help = "of the HTTP face; 0: any free one" },
    { FL_OPT_TEXT, "state-dir", .arg = "FOLDER", .env = "FURLONG_STATE_DIR", AT(state_dir),
      .help = "journal and job logs, on a local disk" },
    { FL_OPT_TEXT, "runtime-dir", .arg = "FOLDER", .env = "FURLONG_RUNTIME_DIR", AT(runtime_dir),
      .help = "where head.json is written" },
    { FL_OPT_INT, "ready-fd", .arg = "N", .fallback = "-1", .min = -1, .max = 1 << 20, AT(ready_fd),
      .help = "descriptor that is told once the head serves" },
    { FL_OPT_INT, "node-silent-ms", .arg = "MS", .env = "FURLONG_NODE_SILENT_MS", .fallback = "15000",
      .min = 500, .max = 3600000, AT(silent_ms), .help = "a node that is silent for so long is given up" },
    { FL_OPT_SWITCH, "until-idle", AT(until_idle), .help = "end, daemons too, when the jobs have ended" },
    { FL_OPT_SWITCH, "private", AT(private), .help = "of one run: its state goes when it ends" },
    { FL_OPT_TEXT, "ray-version", .arg = "VERSION", .env = "FURLONG_RAY_VERSION", .fallback = HEAD_RAY_VERSION, AT(ray_version),
      .help = "of Ray, that /api/version claims: the version of the clients that are used here" },
    { FL_OPT_TEXT, "ray-commit", .arg = "HEX", .env = "FURLONG_RAY_COMMIT", .fallback = HEAD_RAY_COMMIT, AT(ray_commit),
      .help = "of Ray, that /api/version claims" },
    { FL_OPT_TEXT, "log-level", .arg = "LEVEL", .choices = "error|warn|info|debug", AT(log_level),
      .help = "how much is logged" },
    { 0 },
};
/* clang-format on */

struct program {
    struct args args;
    struct tls_opts tls_opts;
    enum tls_cover cover;
    struct tls_id *tls;
    struct fl_loop *loop;
    struct fl_signals *signals;
    struct head *head;
    struct stream_server *rpc;
    struct http_server *http;
    struct fl_task close;
    char state_dir[FL_PATH_MAX], dir[FL_PATH_MAX], file[FL_PATH_MAX], token_path[FL_PATH_MAX];
    char ray_token[257];
    char token[129], rpc_at[128], http_at[128];
    struct fl_addr own, http_own; /* as others are told; any: bound to all */
    const char *rpc_host, *http_host, *asked_ip;
    char note[256]; /* for whoever started it, or "" */
    bool beyond;    /* reachable from other hosts */
    bool over;      /* the cluster was shut down, not only this process */
};

/* ---- the addresses ---- */

/* What is asked is a literal, a name, an interface, a subnet or a wildcard; from here on it is a literal. */
static enum fl_status find_addresses(struct program *p, struct fl_err *err)
{
    FL_TRY(fl_addr_find("--node-ip-address", p->args.node_ip, NULL, &p->own, err));
    FL_TRY(fl_addr_find("--dashboard-host", p->args.dashboard_host, NULL, &p->http_own, err));
    p->rpc_host = !p->own.any ? p->own.text : strchr(p->args.node_ip, ':') ? "::" : "0.0.0.0";
    p->http_host = !p->http_own.any ? p->http_own.text : strchr(p->args.dashboard_host, ':') ? "::" : "0.0.0.0";
    p->asked_ip = p->args.node_ip;
    p->args.node_ip = p->own.text;
    fl_info("own address=%s interface=%s bound=%s: %s", p->own.text, p->own.iface, p->rpc_host, p->own.why);
    return FL_OK;
}

/* ---- the token ---- */

static enum fl_status make_token(struct program *p, struct fl_err *err)
{
    uint8_t random[32];

    FL_TRY(fl_random(random, sizeof(random), err));
    fl_hex(p->token, random, sizeof(random));
    FL_TRY(fl_file_write(p->token_path, 0600, p->token, strlen(p->token), err));
    fl_info("cluster token made path=%s", p->token_path);
    return FL_OK;
}

/* Other hosts need it, and they get it by the user's hand: the file is what both sides read. */
static enum fl_status find_token(struct program *p, struct fl_err *err)
{
    const char *path = getenv("FURLONG_TOKEN_PATH");
    char state[FL_PATH_MAX], *text = NULL;
    struct stat sb;
    size_t len = 0;

    if (path && path[0])
        FL_TRY(fl_path(p->token_path, err, "%s", path));
    else {
        FL_TRY(fl_state_dir(NULL, state, err));
        FL_TRY(fl_path(p->token_path, err, "%s/token", state));
    }
    p->beyond = !fl_addr_is_loopback(p->rpc_host) || !fl_addr_is_loopback(p->http_host);
    if (stat(p->token_path, &sb) < 0)
        return !p->beyond        ? FL_OK
               : errno == ENOENT ? make_token(p, err)
                                 : fl_fail_errno(err, "token %s", p->token_path);
    if (sb.st_mode & 077)
        return fl_fail(err, FL_DENIED, "token %s can be read by others (mode %o); chmod 600 it",
                       p->token_path, sb.st_mode & 0777);
    FL_TRY(fl_file_read(p->token_path, sizeof(p->token) - 1, &text, &len, err));
    text[strcspn(text, " \t\r\n")] = '\0';
    (void)FL_COPY(p->token, text);
    free(text);
    if (strlen(p->token) < 32)
        return fl_fail(
            err, FL_INVALID,
            "token %s has %zu characters, at least 32 are wanted; remove it to have one made",
            p->token_path, strlen(p->token));
    return FL_OK;
}

/* As Ray 2.60 does at the start of a head: RAY_AUTH_MODE decides, and where it is not set a token
 * that is found closes the head. */
static enum fl_status find_ray_token(struct program *p, struct fl_err *err)
{
    const char *mode = getenv("RAY_AUTH_MODE"), *given = getenv("RAY_AUTH_TOKEN");
    const char *path = getenv("RAY_AUTH_TOKEN_PATH"), *home = getenv("HOME");
    char at[FL_PATH_MAX] = "", *text = NULL;
    size_t len = 0;

    if (mode && *mode && strcmp(mode, "disabled") != 0 && strcmp(mode, "token") != 0)
        return fl_fail(err, FL_INVALID, "RAY_AUTH_MODE is \"%.40s\": token or disabled", mode);
    if (mode && strcmp(mode, "disabled") == 0)
        return FL_OK;
    if (given && *given) {
        if (!FL_COPY(p->ray_token, given))
            return fl_fail(err, FL_INVALID, "RAY_AUTH_TOKEN has %zu bytes, at most 256 are taken",
                           strlen(given));
        return FL_OK;
    }
    if (path && *path)
        FL_TRY(fl_path(at, err, "%s", path));
    else if (home && *home)
        FL_TRY(fl_path(at, err, "%s/.ray/auth_token", home));
    if (at[0] && access(at, F_OK) == 0) {
        FL_TRY(fl_file_read(at, sizeof(p->ray_token) - 1, &text, &len, err));
        text[strcspn(text, " \t\r\n")] = '\0';
        (void)FL_COPY(p->ray_token, text);
        explicit_bzero(text, len);
        free(text);
    }
    if (p->ray_token[0])
        fl_info("HTTP is closed without the token path=%s", at);
    else if ((mode && *mode) || (path && *path))
        return fl_fail(err, FL_DENIED,
                       "Token authentication is enabled but no authentication token was found. Set "
                       "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file with it, or write one to "
                       "~/.ray/auth_token");
    return FL_OK;
}

/* ---- serving ---- */

/* Why a port cannot be had: with whoever has it, if somebody does. */
static enum fl_status no_port(struct fl_err *err, const char *what, const char *host_flag, const char *host,
                              const char *port_flag, int64_t port)
{
    char who[160] = "", why[sizeof(err->text)];
    bool taken = port > 0 && fl_port_holder((uint16_t)port, who, sizeof(who));

    (void)FL_COPY(why, err->text);
    return fl_fail(err, err->status, "%s cannot be served on --%s=%.64s --%s=%d: %s%s", what, host_flag, host, port_flag,
                   (int)port, taken ? "in use by " : "", taken ? who : why);
}

static enum fl_status listen_rpc(struct program *p, struct fl_err *err)
{
    char target[128], says[256], elsewhere[192];
    struct wire_hello me = head_hello(p->head);
    /* A head that only this host reaches asks its daemons for nothing, whether a token is there or
     * not. */
    bool closed = !fl_addr_is_loopback(p->rpc_host);
    struct stream_to at = {
        .target = target, .tls = p->tls, .key_of = closed ? head_key_of : NULL, .admit = head_admit, .refused = head_refused, .says = says
    };

    snprintf(says, sizeof(says), "This is the port that worker daemons join: commands, jobs and browsers go to %s", p->http_at);
    snprintf(target, sizeof(target), strchr(p->rpc_host, ':') ? "[%s]:%d" : "%s:%d", p->rpc_host, (int)p->args.port);
    if (stream_listen(p->loop, &stream_rpc, &at, &me, head_accept, p->head, &p->rpc, err) != FL_OK)
        return no_port(err, "daemons", "node-ip-address", p->args.node_ip, "port", p->args.port);
    snprintf(p->rpc_at, sizeof(p->rpc_at), strchr(p->own.text, ':') ? "[%s]%s" : "%s%s", p->own.text,
             strrchr(stream_server_at(p->rpc), ':'));
    snprintf(elsewhere, sizeof(elsewhere), "worker daemons join at %s", p->rpc_at);
    http_server_says(p->http, elsewhere);
    return FL_OK;
}

/* What others dial has to be in the certificate; that it is not is better said here than there. */
static enum fl_status load_tls(struct program *p, struct fl_err *err)
{
    const char *http = p->http_host;

    FL_TRY(tls_load(&p->tls_opts, &p->cover, &p->tls, err));
    if (p->tls)
        FL_TRY(tls_id_names(p->tls, p->args.node_ip, err));
    if (p->cover == TLS_ALL && !p->http_own.any)
        FL_TRY(tls_id_names(p->tls, http, err));
    if (p->cover == TLS_NODES && !fl_addr_is_loopback(http))
        snprintf(p->note, sizeof(p->note),
                 "HTTP at %s is not encrypted, and the token that is shown there neither: "
                 "--tls=all with "
                 "the three files, or --dashboard-host=127.0.0.1 behind a proxy that speaks TLS",
                 http);
    return FL_OK;
}

static enum fl_status listen_http(struct program *p, struct fl_err *err)
{
    const char *shown = p->http_own.any ? p->own.text : p->http_own.text;
    char self[256] = "";
    const char *hosts[] = { p->args.node_ip, p->asked_ip, self, NULL };
    struct http_config c = { .host = p->http_host,
                             .port = (uint16_t)p->args.dashboard_port,
                             .routes = head_routes(),
                             .arg = p->head,
                             .hosts = hosts,
                             .allowed = head_allows,
                             .refuses = head_refuses,
                             .tls = p->cover == TLS_ALL ? p->tls : NULL,
                             .plain_errors = true,
                             .json_below = HEAD_OWN_PATHS };

    if (gethostname(self, sizeof(self) - 1) < 0 || !self[0])
        hosts[2] = NULL;
    if (http_server_create(p->loop, &c, &p->http, err) != FL_OK)
        return no_port(err, "HTTP", "dashboard-host", p->args.dashboard_host, "dashboard-port", p->args.dashboard_port);
    snprintf(p->http_at, sizeof(p->http_at),
             strchr(shown, ':') ? "http%s://[%s]:%u" : "http%s://%s:%u",
             p->cover == TLS_ALL ? "s" : "", shown, http_server_port(p->http));
    return FL_OK;
}

static void term_changed(void *arg, const struct fl_term *term)
{
    struct program *p = arg;

    stream_server_term(p->rpc, term);
}

static void on_close(struct fl_task *t)
{
    struct program *p = container_of(t, struct program, close);

    http_server_destroy(p->http);
    stream_server_destroy(p->rpc);
    head_destroy(p->head);
    p->http = NULL;
    p->rpc = NULL;
    p->head = NULL;
    fl_loop_stop(p->loop);
}

static void on_ended(void *arg)
{
    struct program *p = arg;

    p->over = true;
    fl_post(p->loop, &p->close);
}

/* This process ends; jobs, workers and daemons go on and wait for the next head. */
static void on_signal(void *arg, int signal, int from_pid)
{
    struct program *p = arg;

    fl_info("head stops, what runs goes on signal=%d from_pid=%d", signal, from_pid);
    fl_post(p->loop, &p->close);
}

/* ---- telling ---- */

static char *describe(struct program *p)
{
    const struct fl_term *term = head_term(p->head);
    char cluster[33];
    uint64_t start = 0;

    fl_hex(cluster, term->cluster, sizeof(term->cluster));
    (void)fl_pid_start_time(getpid(), &start, NULL);
    json_t *o = json_pack("{s:s,s:I,s:i,s:I,s:s,s:s,s:s,s:b,s:s,s:s,s:s,s:[]}", "cluster", cluster,
                          "term", (json_int_t)term->head, "pid", (int)getpid(), "start_time",
                          (json_int_t)start, "address", p->rpc_at, "http", p->http_at, "node_ip",
                          p->args.node_ip, "private", (int)p->args.private, "state_dir",
                          p->state_dir, "token_path", p->token[0] ? p->token_path : "", "tls_ca",
                          p->cover == TLS_ALL ? p->tls->ca_path : "", "notes");

    if (p->note[0])
        json_array_append_new(json_object_get(o, "notes"), json_string(p->note));
    char *text = json_dumps(o, JSON_COMPACT);

    json_decref(o);
    return text;
}

static void say_ready(const struct program *p, const char *line)
{
    struct fl_str out = FL_STR_HEAP(64 << 10);

    if (p->args.ready_fd < 0)
        return;
    fl_str_add(&out, "%s\n", line);
    (void)!write((int)p->args.ready_fd, fl_str_text(&out),
                 out.len); /* nobody waits any more: fine */
    close((int)p->args.ready_fd);
    fl_str_fini(&out);
}

static void say_failed(const struct program *p, const struct fl_err *err)
{
    json_t *o = json_pack("{s:s}", "error", err->text);
    char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;

    if (text)
        say_ready(p, text);
    free(text);
    json_decref(o);
    fprintf(stderr, "furlong-head: %s\n", err->text);
}

/* What Prometheus is pointed at by its file_sd_configs, under Ray's name. */
static void write_discovery(const struct program *p)
{
    const char *roots[] = { p->state_dir, getenv("RAY_TMPDIR") };
    const char *target = strstr(p->http_at, "://");
    json_t *o = json_pack("[{s:{s:s,s:s},s:[s]}]", "labels", "job", "ray", "__scheme__",
                          p->cover == TLS_ALL ? "https" : "http", "targets",
                          target ? target + 3 : p->http_at);
    char path[FL_PATH_MAX], *text = o ? json_dumps(o, 0) : NULL;
    struct fl_err err;

    for (size_t i = 0; text && i < FL_LEN(roots); i++)
        if (roots[i] && *roots[i] &&
            (fl_path(path, &err, "%s/prom_metrics_service_discovery.json", roots[i]) != FL_OK ||
             fl_file_write(path, 0644, text, strlen(text), &err) != FL_OK))
            fl_warn("Prometheus is not told of this head why=\"%s\"", err.text);
    free(text);
    json_decref(o);
}

static enum fl_status announce(struct program *p, struct fl_err *err)
{
    char runtime[FL_PATH_MAX], id[FL_SHORT];
    char *text = describe(p);
    enum fl_status st = text ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for head.json");

    if (st == FL_OK)
        st = fl_runtime_dir(p->args.runtime_dir, runtime, err);
    if (st == FL_OK)
        st = fl_path(p->dir, err, "%s/h-%s", runtime, fl_short(id, head_term(p->head)->cluster));
    if (st == FL_OK)
        st = fl_mkdirs(p->dir, err);
    if (st == FL_OK)
        st = fl_path(p->file, err, "%s/head.json", p->dir);
    if (st == FL_OK)
        st = fl_file_write(p->file, 0600, text, strlen(text), err);
    if (st == FL_OK)
        write_discovery(p);
    if (st == FL_OK) {
        fl_info("head serves address=%s http=%s term=%llu pid=%d", p->rpc_at, p->http_at,
                (unsigned long long)head_term(p->head)->head, (int)getpid());
        say_ready(p, text);
    }
    free(text);
    return st;
}

/* Only what this program made, by name. */
static void remove_private(const struct program *p)
{
    static const char *const ours[] = { "head", "logs", "packages" };
    char path[FL_PATH_MAX];
    struct fl_err err;

    for (size_t i = 0; i < FL_LEN(ours); i++)
        if (fl_path(path, &err, "%s/%s", p->state_dir, ours[i]) != FL_OK ||
            fl_tree_remove(path, &err) != FL_OK)
            fl_warn("private state is left behind why=\"%s\"", err.text);
    if (fl_path(path, &err, "%s/prom_metrics_service_discovery.json", p->state_dir) == FL_OK)
        (void)unlink(path);
    (void)rmdir(p->state_dir); /* the daemon may still have its own in it */
}

static enum fl_status start(struct program *p, struct fl_err *err)
{
    static const int signals[] = { SIGTERM, SIGINT };
    struct head_config cfg = { .state_dir = p->state_dir,
                               .node_ip = p->own.text,
                               .silent_ms = (uint32_t)p->args.silent_ms,
                               .until_idle = p->args.until_idle,
                               .token = p->token,
                               .ray_token = p->ray_token,
                               .ray_version = p->args.ray_version,
                               .ray_commit = p->args.ray_commit,
                               .ended = on_ended,
                               .arg = p };

    cfg.beat_ms = p->args.silent_ms < 5000 ? (uint32_t)(p->args.silent_ms / 5) : 1000;
    FL_TRY(fl_state_dir(p->args.state_dir, p->state_dir, err));
    FL_TRY(find_addresses(p, err));
    FL_TRY(find_token(p, err));
    FL_TRY(find_ray_token(p, err));
    FL_TRY(load_tls(p, err));
    cfg.tls = p->tls;
    FL_TRY(fl_loop_create(NULL, &p->loop, err));
    FL_TRY(fl_signals_create(p->loop, signals, FL_LEN(signals), on_signal, p, &p->signals, err));
    FL_TRY(head_create(p->loop, &cfg, &p->head, err));
    FL_TRY(listen_http(p, err));
    FL_TRY(listen_rpc(p, err));
    head_on_term(p->head, term_changed, p);
    head_addresses(p->head, p->rpc_at, p->http_at);
    return announce(p, err);
}

int main(int argc, char **argv)
{
    struct program p = { .args.ready_fd = -1, .close.run = on_close };
    struct fl_opts o = {
        .program = "furlong-head",
        .usage = "[OPTION...]",
        .about = "The head of a cluster: membership, placement, jobs. Runs no user code.",
        .tables = { { NULL, opts, &p.args }, { NULL, tls_opt_table, &p.tls_opts } }
    };
    struct fl_err err = { 0 };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    signal(SIGPIPE, SIG_IGN);
    if (o.n_words) {
        fl_fail(&err, FL_INVALID, "'%.80s' is no option, see --help", o.words[0]);
        say_failed(&p, &err);
        return 2;
    }
    if (fl_fault_env(&err) != FL_OK ||
        (p.args.log_level && fl_log_level_set(p.args.log_level, &err) != FL_OK)) {
        say_failed(&p, &err);
        return 2;
    }
    enum fl_status st = start(&p, &err);
    if (st == FL_OK)
        fl_loop_run(p.loop);
    http_server_destroy(p.http);
    stream_server_destroy(p.rpc);
    head_destroy(p.head);
    fl_signals_destroy(p.signals);
    fl_loop_destroy(p.loop);
    tls_id_destroy(p.tls);
    if (p.file[0])
        (void)unlink(p.file);
    if (p.over && p.args.private)
        remove_private(&p);
    if (p.over && p.dir[0] && p.args.private)
        (void)fl_tree_remove(p.dir, NULL);
    if (st != FL_OK)
        say_failed(&p, &err); /* last: who hears it finds nothing of this process any more */
    return st == FL_OK ? 0 : 1;
}
