#include <arpa/inet.h>
#include <ctype.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/env.h"
#include "cli/interrupt.h"
#include "cli/ray.h"
#include "cli/start.h"
#include "common/base/file.h"
#include "common/base/str.h"

enum { PORT_TRIES = 50, WAIT_HEAD_S = 5, WAIT_OWN_S = 15, NODES_HERE = 64, LABELS_FILE_BYTES = 64 << 10, LABELS_BYTES = 1000 /* less than a word for the daemon */ };
struct start {
    bool head, block;
    const char *address, *labels_file, *dashboard;
    struct cli_start how;
    char label_text[LABELS_BYTES];
};
static const struct fl_opt opts[] = {
    { FL_OPT_SWITCH, "head", .at = offsetof(struct start, head), .help = "start a head, and a worker daemon beside it" },
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct start, address), .help = "join the head there; auto: the one here" },
    { FL_OPT_INT, "port", .arg = "PORT", .fallback = "6379", .max = 65535, .at = offsetof(struct start, how.port), .env = "RAY_GCS_SERVER_PORT", .help = "that nodes join; 0: a free one" },
    { FL_OPT_TEXT, "dashboard-host", .arg = "ADDRESS", .fallback = "127.0.0.1", .at = offsetof(struct start, how.http_host), .help = "of the HTTP side" },
    { FL_OPT_INT, "dashboard-port", .arg = "PORT", .fallback = "8265", .max = 65535, .at = offsetof(struct start, how.http_port), .help = "of the HTTP side" },
    { FL_OPT_TEXT, "node-ip-address", .arg = "ADDRESS", .at = offsetof(struct start, how.ip), .help = "this node's own" },
    { FL_OPT_TEXT, "node-name", .arg = "NAME", .at = offsetof(struct start, how.name), .help = "unique among live nodes" },
    { FL_OPT_TEXT, "num-cpus", .arg = "N", .at = offsetof(struct start, how.cpus), .help = "(default: cores that may be used)" },
    { FL_OPT_TEXT, "num-gpus", .arg = "N", .at = offsetof(struct start, how.gpus), .help = "(default: GPUs found)" },
    { FL_OPT_TEXT, "memory", .arg = "BYTES", .at = offsetof(struct start, how.memory), .help = "(default: the machine's)" },
    { FL_OPT_TEXT, "resources", .arg = "JSON", .at = offsetof(struct start, how.resources), .help = "your own" },
    { FL_OPT_TEXT, "labels", .arg = "K=V,...", .at = offsetof(struct start, how.labels), .help = "to place by" },
    { FL_OPT_TEXT, "labels-file", .arg = "FILE", .at = offsetof(struct start, labels_file), .help = "key: value, one a line" },
    { FL_OPT_TEXT, "include-dashboard", .arg = "BOOL", .choices = "true|false|True|False|1|0", .at = offsetof(struct start, dashboard), .help = "taken: the HTTP side is always there" },
    { FL_OPT_SWITCH, "block", .at = offsetof(struct start, block), .help = "stay in the foreground" },
    { 0 }
};
/* Ports of parts that do not exist here, and what tunes them. */
static const struct ray_flag passed[] = {
    { "object-store-memory", true }, { "plasma-directory", true }, { "object-spilling-directory", true },
    { "temp-dir", true }, { "min-worker-port", true }, { "max-worker-port", true }, { "worker-port-list", true },
    { "node-manager-port", true }, { "object-manager-port", true }, { "ray-client-server-port", true },
    { "dashboard-agent-listen-port", true }, { "dashboard-agent-grpc-port", true }, { "runtime-env-agent-port", true },
    { "metrics-export-port", true }, { "gcs-server-port", true }, { "redis-shard-ports", true }, { "redis-username", true },
    { "redis-password", true }, { "system-config", true }, { "no-monitor", false }, { "autoscaling-config", true },
    { "include-log-monitor", true }, { "no-redirect-output", false }, { "tracing-startup-hook", true },
    { "ray-debugger-external", false }, { "enable-object-reconstruction", false }, { "enable-resource-isolation", false },
    { "cgroup-path", true }, { "system-reserved-cpu", true }, { "system-reserved-memory", true }, { "raylet-socket-name", true },
    { "plasma-store-socket-name", true }, { "log-style", true }, { "log-color", true }, { "verbose", false }, { 0 }
};
static const struct fl_opt silent[] = { /* wanted by everybody, and true here anyway: not worth a line */
    { FL_OPT_SWITCH, "disable-usage-stats", .at = 0 }, { 0 }
};

/* ==== labels ======================================================================================= */
/* A letter or digit at both ends, those and - _ . between, 63 at most: as Kubernetes has them. */
static bool is_label(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)text[i]) && (i == 0 || i == len - 1 || !strchr("-_.", text[i])))
            return false;
    return len > 0 && len <= 63;
}

static enum fl_status check_label(const char *key, const char *value, struct fl_err *err)
{
    const char *slash = strrchr(key, '/'), *name = slash ? slash + 1 : key;
    static const char rule[] = "must be 63 chars or less beginning and ending with an alphanumeric character ([a-z0-9A-Z]) with dashes (-), "
                               "underscores (_),dots (.), and alphanumerics between.";

    if (!value)
        return fl_fail(err, FL_INVALID, "The value of \"%.63s\" is not string type.", key);
    if (!is_label(name, strlen(name)) || (slash && (slash == key || slash - key > 253 || strpbrk(key, "=,"))))
        return fl_fail(err, FL_INVALID, "Invalid label key name `%.63s`. Name %s", name, rule);
    return !*value || is_label(value, strlen(value)) ? FL_OK
                                                     : fl_fail(err, FL_INVALID, "Invalid label key value `%.63s`. Value %s", value, rule);
}

/* --labels says key=... too. */
static bool given_label(const char *labels, const char *key)
{
    size_t n = strlen(key);

    for (const char *p = labels; p && *p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
        if (strncmp(p + strspn(p, " "), key, n) == 0 && p[strspn(p, " ") + n] == '=')
            return true;
    return false;
}

/* Those of --labels-file that --labels does not give go behind them. */
static enum fl_status take_labels(struct start *s, struct fl_err *err)
{
    struct fl_str all = FL_STR_ON(s->label_text);
    json_t *file = NULL, *v;
    const char *key;
    char *text;
    size_t len;

    FL_TRY(fl_file_read(s->labels_file, LABELS_FILE_BYTES, &text, &len, err));
    enum fl_status st = cli_yaml_parse(text, len, s->labels_file, &file, err);

    free(text);
    if (st != FL_OK)
        return st;
    if (!json_is_object(file))
        st = fl_fail(err, FL_INVALID, "The format after deserialization is not a key-value pair map.");
    fl_str_add(&all, "%s", s->how.labels ? s->how.labels : "");
    json_object_foreach(file, key, v) {
        if (st == FL_OK)
            st = check_label(key, json_string_value(v), err);
        if (st == FL_OK && !given_label(s->how.labels, key))
            fl_str_add(&all, "%s%s=%s", all.len ? "," : "", key, json_string_value(v));
    }
    json_decref(file);
    if (st == FL_OK && all.cut)
        st = fl_fail(err, FL_EXHAUSTED, "labels of more than %zu bytes together.", all.max);
    s->how.labels = all.len ? s->label_text : s->how.labels;
    return st;
}

/* ==== ports ======================================================================================== */
static bool port_is_free(const char *host, int64_t port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_free = fd < 0 || inet_pton(AF_INET, host, &a.sin_addr) != 1; /* a name, IPv6: the head will tell */

    if (!is_free) {
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
        is_free = bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0;
    }
    if (fd >= 0)
        close(fd);
    return is_free;
}

/* As in Ray the dashboard takes the next port when 8265 is taken and none was asked for. */
static void pick_http_port(struct start *s)
{
    for (int i = 0; i < PORT_TRIES && !port_is_free(s->how.http_host, s->how.http_port); i++)
        s->how.http_port++;
}

/* ==== what is printed ============================================================================== */
static void say_started(void)
{
    ray_framed("Ray runtime started.");
}

static void say_head(const json_t *head)
{
    const char *ip = cli_text(head, "node_ip"), *http = cli_text(head, "http");
    bool home = strcmp(ip, "127.0.0.1") == 0;

    http += strncmp(http, "http://", 7) == 0 ? 7 : 0;
    say_started();
    puts("Next steps\n"
         "  Note: The following commands are intended for use on\n"
         "  the head node or within the cluster network.\n"
         "\n"
         "  To add another node to this Ray cluster, run");
    printf("    ray start --address='%s'\n"
           "  \n"
           "  To connect to this Ray cluster:\n"
           "    import ray\n"
           "    ray.init(%s%s%s)\n"
           "  \n"
           "  To submit a Ray job using the Ray Jobs CLI:\n"
           "    RAY_API_SERVER_ADDRESS='http://%s' ray job submit --working-dir . -- python my_script.py\n"
           "  \n"
           "  See https://docs.ray.io/en/latest/cluster/running-applications/job-submission/index.html \n"
           "  for more information on submitting Ray jobs to the Ray cluster.\n"
           "  \n"
           "  To terminate the Ray runtime, run\n"
           "    ray stop\n"
           "  \n"
           "  To view the status of the cluster, use\n"
           "    ray status\n"
           "  \n"
           "  To monitor and debug Ray, view the dashboard at \n"
           "    %s\n"
           "  \n"
           "  If connection to the dashboard fails, check your firewall settings and network configuration.\n",
           cli_text(head, "address"), home ? "" : "_node_ip_address='", home ? "" : ip, home ? "" : "'", http, http);
}

static void say_node(void)
{
    say_started();
    puts("To terminate the Ray runtime, run\n"
         "  ray stop");
}

static int block_on(const struct cli_daemon *d, size_t n)
{
    const struct cli_daemon *ended;
    struct fl_err err = { 0 };
    int ws;

    puts("\n--block\n"
         "  This command will now block forever until terminated by a signal.\n"
         "  Running subprocesses are monitored and a message will be printed if any of them terminate unexpectedly. "
         "Subprocesses exit with SIGTERM will be treated as graceful, thus NOT reported.");
    fflush(stdout);
    if (cli_block(d, n, &ended, &ws, &err) != FL_OK)
        return ray_failed("Error", "%s", err.text);
    bool graceful = !ended || (WIFEXITED(ws) && (WEXITSTATUS(ws) == 0 || WEXITSTATUS(ws) == 143 || WEXITSTATUS(ws) == 15)) ||
                    (WIFSIGNALED(ws) && WTERMSIG(ws) == SIGTERM);

    if (!graceful)
        fprintf(stderr, "\nSome Ray subprocesses exited unexpectedly:\n  %s [exit code=%d]\n\n"
                        "Remaining processes will be killed.\n",
                ended->kind == 'h' ? "gcs_server (furlong-head)" : "raylet (furlong-node)",
                WIFEXITED(ws) ? WEXITSTATUS(ws) : -WTERMSIG(ws));
    cli_end_all("ray start", d, n);
    return graceful ? 0 : 1;
}

/* ==== starting ===================================================================================== */
static int start_head(struct start *s)
{
    struct cli_daemon d[2];
    json_t *head = NULL, *node = NULL;
    struct fl_err err = { 0 };
    int rc = 0;

    s->how.ip = s->how.ip ? s->how.ip : cli_head_ip();
    s->how.wait_s = WAIT_OWN_S;
    printf("Usage stats collection is disabled.\n\nLocal node IP: %s\n", s->how.ip);
    fflush(stdout);
    if (s->how.port && !port_is_free(s->how.ip, s->how.port))
        return ray_failed("ConnectionError", "Ray is trying to start at %s:%lld, but is already running at %s:%lld. Please "
                          "specify a different port using the `--port` flag of `ray start` command.", s->how.ip,
                          (long long)s->how.port, s->how.ip, (long long)s->how.port);
    if (cli_start_head(&s->how, &head, &err) != FL_OK)
        return ray_failed("RuntimeError", "%s", err.text);
    cli_describe(&d[0], 'h', head);
    if (cli_start_node(&s->how, cli_text(head, "address"), &node, &err) != FL_OK) {
        cli_end_all("ray start", d, 1); /* a head without its node would look like a start that worked */
        json_decref(head);
        return ray_failed("RuntimeError", "%s", err.text);
    }
    cli_describe(&d[1], 'n', node);
    say_head(head);
    fflush(stdout);
    json_decref(head);
    json_decref(node);
    if (s->block)
        rc = block_on(d, 2);
    return rc;
}

/* Ray takes several nodes on one machine; each of ours has a state folder and a name of its own. */
static enum fl_status start_one_more(struct start *s, json_t **node, struct fl_err *err)
{
    char state[FL_PATH_MAX], dir[FL_PATH_MAX], host[64] = "node", name[80];
    enum fl_status st = cli_start_node(&s->how, s->address, node, err);

    (void)gethostname(host, sizeof(host) - 1);
    for (int i = 2; i <= NODES_HERE && st != FL_OK && strstr(err->text, "has the state folder"); i++) {
        struct cli_start how = s->how;

        *err = (struct fl_err){ 0 };
        FL_TRY(fl_state_dir(NULL, state, err));
        FL_TRY(fl_path(dir, err, "%s/node-%d", state, i));
        snprintf(name, sizeof(name), "%s-%d", host, i);
        how.state_dir = dir;
        how.name = how.name ? how.name : name;
        st = cli_start_node(&how, s->address, node, err);
    }
    return st;
}

static int start_worker(struct start *s)
{
    struct cli_daemon d;
    struct cli_cluster c;
    char here[CLI_URL_BYTES];
    json_t *node, *status = NULL;
    struct fl_err err = { 0 };

    if (strcmp(s->address, "auto") == 0) {
        if (ray_find("auto", &c, &err) != FL_OK ||
            cli_call(&c, "GET", "/api/furlong/status", NULL, 5000, &status, &err) != FL_OK)
            return ray_failed("ConnectionError", "%s", err.text);
        (void)FL_COPY(here, cli_text(status, "address"));
        json_decref(status);
        s->address = here;
    }
    s->how.wait_s = WAIT_HEAD_S; /* launchers loop until it works */
    if (start_one_more(s, &node, &err) != FL_OK) {
        if (strstr(err.text, "no head at"))
            return ray_failed("ConnectionError", "Unable to connect to GCS at %s. Check that (1) Ray GCS with matching version "
                              "started successfully at the specified address, and (2) there is no firewall setting preventing "
                              "access. (%s)", s->address, err.text);
        return ray_failed("RuntimeError", "%s", err.text);
    }
    printf("Local node IP: %.*s\n", (int)strcspn(cli_text(node, "address"), ":"), cli_text(node, "address"));
    cli_describe(&d, 'n', node);
    json_decref(node);
    say_node();
    fflush(stdout);
    return s->block ? block_on(&d, 1) : 0;
}

int ray_start(int argc, char **argv)
{
    static const char *const heads_only[] = { "port", "include-dashboard" };
    bool ignored = false;
    struct start s = { 0 };
    struct fl_err err = { 0 };
    struct fl_opts o = { .program = "ray start", .about = "Starts a head with a worker daemon, or a worker daemon that joins one.",
                         .tables = { { NULL, opts, &s }, { NULL, silent, &ignored } } };
    int rc = ray_opts(&o, passed, argc, argv);

    if (rc >= 0)
        return rc;
    if (o.n_words)
        return ray_misused(&o, "Got unexpected extra argument (%s)", o.words[0]);
    if (s.labels_file && take_labels(&s, &err) != FL_OK)
        return ray_failed("Error", "The file at `--labels-file=%.160s` is not a valid YAML file, detailed error: %s Valid values look like this: "
                          "`--labels-file='gpu_type: A100\nregion: us'`", s.labels_file, err.text);
    if (s.head && s.address)
        return ray_failed("Error", "`--address` and `--head` exclude each other here: there is no external Redis.");
    if (s.head) {
        if (!fl_opts_given(&o, "dashboard-port"))
            pick_http_port(&s);
        cli_signals_hold();
        rc = start_head(&s);
        cli_signals_let();
        return rc;
    }
    for (size_t i = 0; i < FL_LEN(heads_only); i++)
        if (fl_opts_from(&o, heads_only[i]) == FL_OPT_LINE)
            return ray_failed("Error", "`--%s` should only be specified when starting head node with `--head`.", heads_only[i]);
    if (!s.address)
        return ray_failed("Error", "`--address` is a required flag unless starting a head node with `--head`.");
    if (ray_refuse_fan_out(o.program, s.address)) /* what was not stopped is not started twice */
        return 1;
    cli_signals_hold();
    rc = start_worker(&s);
    cli_signals_let();
    return rc;
}
