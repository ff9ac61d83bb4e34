#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/daemons.h"
#include "cli/interrupt.h"
#include "cli/start.h"
#include "common/base/addr.h"
#include "common/base/loop.h"
#include "common/base/str.h"

struct start {
    struct cli_common common;
    bool head, block, if_needed, token_stdin;
    struct cli_start how;
};
static const struct fl_opt opts[] = {
    { FL_OPT_SWITCH, "head", .at = offsetof(struct start, head), .help = "start a head here, and its worker daemon" },
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct start, common.address),
      .help = "join the head whose gRPC side is there; [IPv6]:PORT; without a port --port counts" },
    { FL_OPT_INT, "wait", .arg = "SECONDS", .fallback = "30", .max = 86400, .at = offsetof(struct start, how.wait_s),
      .help = "how long to wait for the head, which may start later" },
    { FL_OPT_SWITCH, "if-needed", .at = offsetof(struct start, if_needed), .help = "a daemon here that has joined that head already is enough" },
    { FL_OPT_SWITCH, "token-stdin", .at = offsetof(struct start, token_stdin), .help = "the cluster token comes on standard input, and is kept" },
    { FL_OPT_SWITCH, "block", .at = offsetof(struct start, block),
      .help = "stay in the foreground; ends what it started on Ctrl-C or when the daemon ends" },
    { FL_OPT_SWITCH, "json", .at = offsetof(struct start, common.json), .help = "print JSON" },
    { 0 }
};
static const struct fl_opt head_opts[] = {
    { FL_OPT_INT, "port", .arg = "PORT", .fallback = "6379", .max = 65535, .at = offsetof(struct start, how.port),
      .help = "gRPC, for worker daemons; 0: a free one" },
    { FL_OPT_INT, "dashboard-port", .arg = "PORT", .fallback = "8265", .max = 65535, .at = offsetof(struct start, how.http_port),
      .help = "HTTP, for commands and browsers; 0: a free one" },
    { FL_OPT_TEXT, "dashboard-host", .arg = "ADDRESS", .at = offsetof(struct start, how.http_host),
      .help = "address of the HTTP side (default: --node-ip-address)" },
    { 0 }
};
static const struct fl_opt node_opts[] = {
    { FL_OPT_TEXT, "node-ip-address", .arg = "ADDRESS", .at = offsetof(struct start, how.ip),
      .help = "this node's own address: a literal, a name, an interface, or a subnet as 10.0.0.0/8, the same on every node (default: head MASTER_ADDR, else 127.0.0.1; worker: the source of the route to the head)" },
    { FL_OPT_TEXT, "node-name", .arg = "NAME", .at = offsetof(struct start, how.name), .help = "unique among live nodes (default: host name)" },
    { FL_OPT_TEXT, "num-cpus", .arg = "N", .at = offsetof(struct start, how.cpus), .help = "(default: cores that may be used)" },
    { FL_OPT_TEXT, "num-gpus", .arg = "N", .at = offsetof(struct start, how.gpus),
      .help = "so many devices, logical ones where there is no hardware (default: GPUs found)" },
    { FL_OPT_TEXT, "memory", .arg = "BYTES", .at = offsetof(struct start, how.memory), .help = "(default: the machine's)" },
    { FL_OPT_TEXT, "resources", .arg = "JSON", .at = offsetof(struct start, how.resources), .help = "your own, as {\"name\": amount}" },
    { FL_OPT_TEXT, "labels", .arg = "K=V,...", .at = offsetof(struct start, how.labels), .help = "labels to place by" },
    { FL_OPT_TEXT, "state-dir", .arg = "FOLDER", .at = offsetof(struct start, how.state_dir), .env = "FURLONG_STATE_DIR",
      .help = "ids and the head's journal" },
    { FL_OPT_TEXT, "log-level", .arg = "LEVEL", .choices = "error|warn|info|debug", .at = offsetof(struct start, how.log_level), .help = "of the daemons" },
    { 0 }
};

enum { MAX_WORDS = 32, WORD_BYTES = 1024, READY_MS = 15000, HTTP_MS = 300 };
struct words { /* "--name=value" for a daemon */
    char text[MAX_WORDS][WORD_BYTES];
    const char *argv[MAX_WORDS + 1];
    size_t n;
    bool cut;
};

static void add(struct words *w, const char *name, const char *value)
{
    if (!value)
        return;
    if (w->n == MAX_WORDS || snprintf(w->text[w->n], WORD_BYTES, "--%s=%s", name, value) >= WORD_BYTES) {
        w->cut = true;
        return;
    }
    w->argv[w->n] = w->text[w->n];
    w->n++;
}

static void add_int(struct words *w, const char *name, int64_t value)
{
    char text[24];

    snprintf(text, sizeof(text), "%lld", (long long)value);
    add(w, name, text);
}

static void add_tls(struct words *w, const struct tls_opts *t)
{
    add(w, "tls", t->cover);
    add(w, "tls-cert", t->cert);
    add(w, "tls-key", t->key);
    add(w, "tls-ca", t->ca);
}

/* MASTER_ADDR, where set, is the head's address, the same on every node. */
const char *cli_head_ip(void)
{
    const char *master = getenv("MASTER_ADDR");

    return master && *master ? master : "127.0.0.1";
}

static enum fl_status log_dir(const struct cli_start *s, char out[FL_PATH_MAX], struct fl_err *err)
{
    char state[FL_PATH_MAX];

    FL_TRY(fl_state_dir(s->state_dir, state, err));
    return fl_path(out, err, "%s/logs", state);
}

static void say_notes(const json_t *daemon)
{
    json_t *note;
    size_t i;

    json_array_foreach(json_object_get(daemon, "notes"), i, note)
        fprintf(stderr, "note: %s\n", json_string_value(note));
}

enum fl_status cli_start_head(const struct cli_start *s, json_t **head, struct fl_err *err)
{
    struct words w = { 0 };
    const char *ip = s->ip ? s->ip : cli_head_ip();
    char logs[FL_PATH_MAX];

    FL_TRY(log_dir(s, logs, err));
    add(&w, "node-ip-address", ip);
    add_int(&w, "port", s->port);
    add(&w, "dashboard-host", s->http_host ? s->http_host : ip);
    add_int(&w, "dashboard-port", s->http_port);
    add(&w, "state-dir", s->state_dir);
    add(&w, "log-level", s->log_level);
    add_tls(&w, &s->tls);
    if (w.cut)
        return fl_fail(err, FL_INVALID, "an option is longer than %d bytes", WORD_BYTES);
    FL_TRY(cli_daemon_start("furlong-head", w.argv, logs, READY_MS, head, err));
    say_notes(*head);
    return FL_OK;
}

enum fl_status cli_start_node(const struct cli_start *s, const char *address, json_t **node,
                              struct fl_err *err)
{
    struct words w = { 0 };
    char logs[FL_PATH_MAX];

    FL_TRY(log_dir(s, logs, err));
    add(&w, "address", address);
    add(&w, "node-ip-address", s->ip);
    add(&w, "node-name", s->name);
    add(&w, "num-cpus", s->cpus);
    add(&w, "num-gpus", s->gpus);
    add(&w, "memory", s->memory);
    add(&w, "resources", s->resources);
    add(&w, "labels", s->labels);
    add(&w, "state-dir", s->state_dir);
    add(&w, "log-level", s->log_level);
    add_int(&w, "wait", s->wait_s);
    add_tls(&w, &s->tls);
    if (w.cut)
        return fl_fail(err, FL_INVALID, "an option is longer than %d bytes", WORD_BYTES);
    FL_TRY(cli_daemon_start("furlong-node", w.argv, logs, (uint32_t)s->wait_s * 1000 + READY_MS, node, err));
    say_notes(*node);
    return FL_OK;
}

/* ==== --block ====================================================================================== */
struct block {
    struct fl_loop *loop;
    const struct cli_daemon *ended;
};
struct block_watch {
    struct block *block;
    const struct cli_daemon *daemon;
    struct fl_watch *w;
    int fd;
};

static void on_signal(void *arg, int signal, int from_pid)
{
    struct block *b = arg;

    (void)signal;
    (void)from_pid;
    fl_loop_stop(b->loop);
}

static void on_daemon_end(void *arg, unsigned events)
{
    struct block_watch *w = arg;

    (void)events;
    w->block->ended = w->daemon;
    fl_loop_stop(w->block->loop);
}

void cli_end_all(const char *program, const struct cli_daemon *d, size_t n)
{
    struct fl_err err = { 0 };

    for (size_t i = n; i-- > 0;) /* nodes before heads: a daemon says good-bye to a head that is there */
        if (cli_daemon_end(&d[i], 20000, &err) != FL_OK)
            (void)cli_failed(program, &err);
}

void cli_describe(struct cli_daemon *d, char kind, const json_t *info)
{
    *d = (struct cli_daemon){ .kind = kind, .pid = (pid_t)cli_int(info, "pid"),
                              .start_time = (uint64_t)cli_int(info, "start_time") };
}

enum fl_status cli_block(const struct cli_daemon *d, size_t n, const struct cli_daemon **ended,
                         int *wstatus, struct fl_err *err)
{
    static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
    struct block b = { 0 };
    struct fl_signals *sig = NULL;
    struct block_watch w[2] = { { .fd = -1 }, { .fd = -1 } };
    enum fl_status st = fl_loop_create(NULL, &b.loop, err);

    if (st == FL_OK)
        st = fl_signals_create(b.loop, signals, FL_LEN(signals), on_signal, &b, &sig, err);
    for (size_t i = 0; i < n && st == FL_OK; i++) {
        w[i] = (struct block_watch){ .block = &b, .daemon = &d[i], .fd = -1 };
        st = cli_daemon_watch(&d[i], b.loop, on_daemon_end, &w[i], &w[i].fd, &w[i].w, err);
    }
    if (st == FL_OK)
        fl_loop_run(b.loop);
    for (size_t i = 0; i < n; i++)
        cli_daemon_unwatch(w[i].w, w[i].fd);
    fl_signals_destroy(sig);
    fl_loop_destroy(b.loop);
    *ended = b.ended;
    *wstatus = 0;
    if (b.ended) /* our child: we started it */
        (void)waitpid(b.ended->pid, wstatus, WNOHANG);
    return st;
}

/* 0: ended on request, or with the cluster; 1: a daemon failed. */
static int block(const struct cli_daemon *d, size_t n)
{
    const struct cli_daemon *ended;
    struct fl_err err = { 0 };
    int wstatus;

    if (cli_block(d, n, &ended, &wstatus, &err) != FL_OK)
        return cli_failed("furlong start", &err);
    bool well = ended && WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == 0;

    if (ended)
        fprintf(stderr, well ? "furlong start: the cluster has ended\n" : "furlong start: a daemon ended by itself; ending the rest\n");
    cli_end_all("furlong start", d, n);
    return ended && !well ? 1 : 0;
}

/* ==== what the user reads ========================================================================== */
static void say_head(const json_t *head, const json_t *node)
{
    const char *address = cli_text(head, "address"), *ip = cli_text(head, "node_ip");

    printf("head      %s (worker daemons), %s (commands, browser)\n", address, cli_text(head, "http"));
    printf("node      %s at %s (%s)\n\n", cli_text(node, "name"), cli_text(node, "address"), cli_text(node, "interface"));
    printf("  furlong train           a run on this cluster\n");
    printf("  furlong status          what it has and does\n");
    if (fl_addr_is_loopback(ip))
        printf("  other nodes             need a head that they can reach: furlong start --head --node-ip-address=ADDRESS\n");
    else
        printf("  on each other node      furlong start --address=%s   (with the same token file: %s)\n",
               address, cli_text(head, "token_path"));
    printf("  furlong stop            end it\n");
}

/* A head's HTTP side taken for the port of daemons: said before anybody waits for it. */
static enum fl_status not_http(const char *address, struct fl_err *err)
{
    struct cli_cluster c = { 0 };
    json_t *status = NULL;
    enum fl_status st = cli_url_of(address, c.url, err);

    cli_token(c.token, sizeof(c.token));

    if (st == FL_OK && cli_call(&c, "GET", "/api/furlong/status", NULL, HTTP_MS, &status, NULL) == FL_OK && *cli_text(status, "address"))
        st = fl_fail(err, FL_INVALID, "--address=%s is the port for commands and jobs of a head; worker daemons join it at %s", address,
                     cli_text(status, "address"));
    json_decref(status);
    return st;
}

static int run(const struct start *s)
{
    json_t *head = NULL, *node = NULL;
    struct cli_daemon d[2];
    struct fl_err err = { 0 };
    size_t n = 0;
    int rc = 0;

    cli_signals_hold(); /* what is started is ended again, or said to be there */
    enum fl_status st = s->head ? cli_start_head(&s->how, &head, &err) : FL_OK;

    if (st == FL_OK && head)
        cli_describe(&d[n++], 'h', head);
    if (st == FL_OK && !head)
        st = not_http(s->common.address, &err);
    if (st == FL_OK)
        st = cli_start_node(&s->how, head ? cli_text(head, "address") : s->common.address, &node, &err);
    if (st == FL_OK)
        cli_describe(&d[n++], 'n', node);
    if (st != FL_OK) {
        cli_end_all("furlong start", d, n); /* a head without its node would look like a start that worked */
        rc = cli_failed("furlong start", &err);
    } else if (s->common.json) {
        json_t *both = head ? json_pack("{s:O,s:O}", "head", head, "node", node) : json_pack("{s:O}", "node", node);

        cli_print_json(both);
        json_decref(both);
    } else if (head) {
        say_head(head, node);
    } else {
        printf("node %s at %s (%s, %s) joined the head at %s\n", cli_text(node, "name"), cli_text(node, "address"),
               cli_text(node, "interface"), cli_text(node, "address_why"), s->common.address);
    }
    fflush(stdout);
    if (st == FL_OK && s->block)
        rc = block(d, n);
    cli_signals_let();
    json_decref(head);
    json_decref(node);
    return rc;
}

/* ==== joining, once ================================================================================ */
static enum fl_status keep_token(struct fl_err *err)
{
    char given[130] = "", have[80];
    ssize_t n = read(STDIN_FILENO, given, sizeof(given) - 1);

    given[n > 0 ? n : 0] = 0;
    given[strcspn(given, " \t\r\n")] = 0;
    if (!*given) /* the head asks for none */
        return FL_OK;
    cli_token(have, sizeof(have));
    if (!*have)
        return cli_token_keep(given, err);
    return strcmp(have, given) == 0 ? FL_OK
                                    : fl_fail(err, FL_DENIED, "this user has another cluster token here than the head's; remove it, or "
                                              "name another file with FURLONG_TOKEN_PATH");
}

static bool has_joined(const char *address)
{
    struct cli_daemon *d;
    size_t n;
    bool joined = false;

    if (cli_daemons_find(&d, &n, NULL) != FL_OK)
        return false;
    for (size_t i = 0; i < n; i++)
        joined |= d[i].kind == 'n' && strcmp(cli_text(d[i].info, "head"), address) == 0;
    cli_daemons_free(d, n);
    return joined;
}

static int start(struct start *s, const struct fl_opts *o)
{
    if (o->n_words)
        return cli_misused(o->program, "'%s' is no option", o->words[0]);
    const char *master = getenv("MASTER_ADDR");
    char at[300], whole[320];
    struct fl_err err = { 0 };

    if (!s->head && !s->common.address && master && *master) { /* the same on every node: the head's */
        snprintf(at, sizeof(at), strchr(master, ':') ? "[%.256s]:6379" : "%.256s:6379", master);
        s->common.address = at;
    }
    if (s->head == (s->common.address != NULL))
        return cli_misused(o->program, s->head ? "--head and --address exclude each other"
                                             : "--head or --address=HOST:PORT is wanted");
    if (s->head && !s->how.ip)
        s->how.ip = cli_head_ip();
    if (s->token_stdin && keep_token(&err) != FL_OK)
        return cli_failed(o->program, &err);
    if (s->common.address) {
        if (fl_addr_with_port("--address", s->common.address, (int)s->how.port, whole, sizeof(whole), &err) != FL_OK)
            return cli_misused(o->program, "%s", err.text);
        s->common.address = whole;
    }
    if (s->if_needed && s->common.address && has_joined(s->common.address)) {
        printf("this node has joined the head at %s already\n", s->common.address);
        return 0;
    }
    return run(s);
}

int cli_start(int argc, char **argv)
{
    struct start s = { 0 };
    struct fl_opts o = {
        .program = "furlong start", .usage = "--head | --address=HOST:PORT [OPTION...]",
        .about = "Starts a head with a worker daemon beside it, or a worker daemon that joins a head.",
        .tables = { { NULL, opts, &s }, { "With --head", head_opts, &s }, { "The node", node_opts, &s }, { "TLS", tls_opt_table, &s.how.tls } },
        .takes_file = true,
    };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc < 0)
        rc = start(&s, &o);
    fl_opts_fini(&o);
    return rc;
}
