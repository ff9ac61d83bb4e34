#include "cli/launch.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/ssh.h"
#include "cli/start.h"
#include "cli/wait.h"
#include "common/base/str.h"

enum { HEAD_PORT = 6379, HTTP_PORT = 8265, OWN_WAIT_S = 15, SSH_MS = 25000, UNDO_MS = 20000, END_MS = 30000, IP_BYTES = 64 };

#define AT(member) .at = offsetof(struct launch, member)
const struct fl_opt launch_opts[] = {
    { FL_OPT_TEXT, "nodes", .arg = "A,B,C", AT(nodes), .help = "wait for these nodes, by name; each runs furlong start --address (n[1-3] is taken too)" },
    { FL_OPT_INT, "num-nodes", .arg = "N", .min = 1, .max = 10000, AT(num_nodes), .help = "wait for so many nodes, this one counts" },
    { FL_OPT_TEXT, "hostfile", .arg = "FILE", AT(hostfile), .help = "start worker daemons on its hosts over ssh; one a line, as Open MPI's" },
    { FL_OPT_TEXT, "hosts", .arg = "LIST", AT(hosts), .help = "the same for a list: n1,n2 or Slurm's n[1-3,5]" },
    { FL_OPT_TEXT, "head-ip", .arg = "ADDRESS", AT(head_ip), .help = "of a head started here (default: MASTER_ADDR, else the way to the first host)" },
    { FL_OPT_INT, "join-timeout", .arg = "SECONDS", .fallback = "300", .min = 1, .max = 86400, AT(wait_s), .help = "for all of them to be there" },
    { FL_OPT_INT, "node-gpus", .arg = "N", .fallback = "-1", .min = -1, .max = 1024, AT(node_gpus), .help = "so many devices on each node started here and over ssh (default: those found)" },
    { FL_OPT_TEXT, "remote-program", .arg = "PATH", AT(program), .help = "of furlong on the hosts (default: as here)" },
    { FL_OPT_SWITCH, "no-join-ray-workers", AT(no_join), .help = "start nothing over ssh: the hosts are waited for only" },
    { FL_OPT_SWITCH, "keep-cluster", AT(keep), .help = "leave a cluster that was started here running when the run has ended" },
    { 0 }
};

bool cli_env_true(const char *name)
{
    const char *v = getenv(name);

    return v && (strcasecmp(v, "true") == 0 || strcmp(v, "1") == 0);
}

bool launch_asked(const struct launch *l)
{
    return l->nodes || l->hostfile || l->hosts || l->num_nodes > 0 || l->head_ip;
}

void launch_fini(struct launch *l)
{
    hosts_free(&l->names);
}

/* ==== who is who =================================================================================== */
static bool is_own_address(const struct sockaddr *a)
{
    struct ifaddrs *list, *i;
    bool own = false;

    if (getifaddrs(&list) < 0)
        return false;
    for (i = list; i && !own; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == a->sa_family)
            own = a->sa_family == AF_INET
                      ? ((const struct sockaddr_in *)i->ifa_addr)->sin_addr.s_addr == ((const struct sockaddr_in *)a)->sin_addr.s_addr
                      : a->sa_family == AF_INET6 && memcmp(&((const struct sockaddr_in6 *)i->ifa_addr)->sin6_addr,
                                                           &((const struct sockaddr_in6 *)a)->sin6_addr, 16) == 0;
    freeifaddrs(list);
    return own;
}

static bool is_here(const char *host)
{
    struct addrinfo want = { .ai_socktype = SOCK_STREAM }, *got;
    char name[256] = "";
    bool here = false;

    (void)gethostname(name, sizeof(name) - 1);
    if (strcasecmp(host, name) == 0 || strcmp(host, "localhost") == 0)
        return true;
    if (getaddrinfo(host, NULL, &want, &got))
        return false; /* ssh may know it by an alias */
    for (struct addrinfo *a = got; a && !here; a = a->ai_next)
        here = is_own_address(a->ai_addr);
    freeaddrinfo(got);
    return here;
}

enum fl_status launch_may_join(const struct launch *l, struct fl_err *err)
{
    if ((l->hosts || l->hostfile) && !l->no_join && cli_env_true("MILES_SCRIPT_EXTERNAL_RAY"))
        return fl_fail(err, FL_INVALID, "MILES_SCRIPT_EXTERNAL_RAY is set: the cluster is not this launch's, and starting its workers "
                       "again over ssh (%s) would stop them; pass --no-join-ray-workers", l->hostfile ? "--hostfile" : "--hosts");
    return FL_OK;
}

static enum fl_status read_names(const struct launch *l, struct hosts *all, struct fl_err *err)
{
    if (!!l->nodes + !!l->hostfile + !!l->hosts > 1)
        return fl_fail(err, FL_INVALID, "--nodes, --hostfile and --hosts exclude each other; give one of them");
    if (l->nodes || l->hosts)
        return hosts_parse(l->nodes ? l->nodes : l->hosts, all, err);
    return l->hostfile ? hosts_read(l->hostfile, all, err) : FL_OK;
}

enum fl_status launch_names(const struct launch *l, char **out, struct fl_err *err)
{
    struct hosts all = { 0 };
    struct fl_str s = FL_STR_HEAP(HOSTS_MAX * HOST_BYTES);
    enum fl_status st = read_names(l, &all, err);

    for (size_t i = 0; i < all.n && st == FL_OK; i++)
        fl_str_add(&s, "%s%s", i ? "," : "", host_bare(all.names[i]));
    if (st == FL_OK && s.cut)
        st = fl_fail(err, FL_EXHAUSTED, "no memory for the names of %zu nodes", all.n);
    if (st == FL_OK)
        *out = all.n ? FL_TAKE(s.data) : NULL;
    hosts_free(&all);
    fl_str_fini(&s);
    return st;
}

static enum fl_status take_names(struct launch *l, struct fl_err *err)
{
    struct hosts all = { 0 };
    enum fl_status st = read_names(l, &all, err);

    l->named = all.n > 0;
    l->joins = (l->hosts || l->hostfile) && !l->no_join;
    for (size_t i = 0; i < all.n && st == FL_OK; i++)
        if (!is_here(host_bare(all.names[i]))) /* this node is there when its daemon is */
            st = hosts_parse(all.names[i], &l->names, err);
    hosts_free(&all);
    return st;
}

/* The source address of the way to host: what that host would answer to. */
static enum fl_status way_to(const char *host, char out[IP_BYTES], struct fl_err *err)
{
    struct addrinfo want = { .ai_socktype = SOCK_DGRAM }, *got;
    struct sockaddr_storage own;
    socklen_t len = sizeof(own);
    int rc = getaddrinfo(host, "6379", &want, &got), fd;

    if (rc)
        return fl_fail(err, FL_INVALID, "%s: %s; give this head's own address with --head-ip or MASTER_ADDR", host, gai_strerror(rc));
    fd = socket(got->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, got->ai_addr, got->ai_addrlen) < 0 || getsockname(fd, (struct sockaddr *)&own, &len) < 0 ||
        getnameinfo((struct sockaddr *)&own, len, out, IP_BYTES, NULL, 0, NI_NUMERICHOST))
        (void)fl_fail_errno(err, "no way to %s", host);
    else
        rc = 1;
    if (fd >= 0)
        close(fd);
    freeaddrinfo(got);
    return rc == 1 ? FL_OK : FL_UNREACHABLE;
}

static enum fl_status head_ip(const struct launch *l, char out[IP_BYTES], struct fl_err *err)
{
    const char *master = getenv("MASTER_ADDR");
    const char *given = l->head_ip ? l->head_ip : master && *master ? master : NULL;

    if (given) {
        if (fl_copy(out, IP_BYTES, given) >= IP_BYTES)
            return fl_fail(err, FL_INVALID, "'%.40s...' is no address", given);
        return is_here(given) ? FL_OK
                              : fl_fail(err, FL_INVALID, "%s (%s) is not an address of this machine: the head starts where the command runs",
                                        given, l->head_ip ? "--head-ip" : "MASTER_ADDR");
    }
    if (l->names.n)
        return way_to(host_bare(l->names.names[0]), out, err);
    if (l->num_nodes > 1)
        return fl_fail(err, FL_INVALID, "--num-nodes=%lld: other nodes need the head's address; give --head-ip or MASTER_ADDR",
                       (long long)l->num_nodes);
    (void)fl_copy(out, IP_BYTES, "127.0.0.1");
    return FL_OK;
}

/* ==== the head ===================================================================================== */
static enum fl_status start_here(struct launch *l, struct fl_err *err)
{
    struct cli_start how = { .port = HEAD_PORT, .http_port = HTTP_PORT, .wait_s = OWN_WAIT_S, .http_host = "127.0.0.1" };
    char ip[IP_BYTES], gpus[24];
    json_t *head, *node;

    FL_TRY(head_ip(l, ip, err));
    how.ip = ip;
    snprintf(gpus, sizeof(gpus), "%lld", (long long)l->node_gpus);
    how.gpus = l->node_gpus >= 0 ? gpus : NULL;
    FL_TRY(cli_start_head(&how, &head, err));
    cli_describe(&l->own[l->n_own++], 'h', head);
    (void)FL_COPY(l->cluster.ca, cli_text(head, "tls_ca"));
    enum fl_status st = cli_url_of(cli_text(head, "http"), l->cluster.url, err);

    cli_token(l->cluster.token, sizeof(l->cluster.token));
    if (st == FL_OK)
        st = cli_start_node(&how, cli_text(head, "address"), &node, err);
    if (st == FL_OK) {
        cli_describe(&l->own[l->n_own++], 'n', node);
        json_decref(node);
        fprintf(stderr, "head %s started; each other node joins by: furlong start --address=%s --block --wait=300\n",
                cli_text(head, "address"), cli_text(head, "address"));
    }
    json_decref(head);
    return st;
}

static enum fl_status find_or_start(struct launch *l, const char *address, struct fl_err *err)
{
    struct fl_err none = { 0 };
    enum fl_status st = cli_cluster_find(address, &l->cluster, &none);

    if (st == FL_NOT_FOUND)
        return start_here(l, err);
    if (st != FL_OK && err)
        *err = none;
    return st;
}

/* ==== the others, over ssh ========================================================================= */
static enum fl_status own_program(const struct launch *l, char out[FL_PATH_MAX], struct fl_err *err)
{
    return l->program ? fl_path(out, err, "%s", l->program) : fl_program_path("furlong", out, err);
}

/* What was started is stopped: a launch that failed leaves nothing behind. */
static void undo(const struct launch *l, const char *program, const bool *done)
{
    const char *command[] = { program, "stop", NULL };
    struct ssh_run r = { .command = command, .wait_ms = UNDO_MS };
    struct hosts started = { 0 };
    struct fl_err err = { 0 };
    bool *ended;

    for (size_t i = 0; i < l->names.n; i++)
        if (done[i])
            (void)hosts_parse(l->names.names[i], &started, NULL); /* it was parsed before */
    ended = calloc(started.n + 1, sizeof(*ended));
    if (ended && started.n && ssh_run_all(&started, &r, ended, &err) != FL_OK)
        fprintf(stderr, "furlong train: what was started is not stopped everywhere: %s\n", err.text);
    free(ended);
    hosts_free(&started);
}

/* ssh carries no environment: what says TLS here is given as flags there. The files lie at the same places. */
static size_t tls_words(char text[4][FL_PATH_MAX], const char **command, size_t n)
{
    static const struct {
        const char *env, *flag;
    } all[] = { { "FURLONG_TLS", "--tls" }, { "RAY_TLS_SERVER_CERT", "--tls-cert" },
                { "RAY_TLS_SERVER_KEY", "--tls-key" }, { "RAY_TLS_CA_CERT", "--tls-ca" } };

    for (size_t i = 0; i < FL_LEN(all); i++) {
        const char *v = getenv(all[i].env);

        if (i == 0 && !(v && *v) && cli_env_true("RAY_USE_TLS"))
            v = "nodes";
        if (v && *v && fl_path(text[i], NULL, "%s=%s", all[i].flag, v) == FL_OK)
            command[n++] = text[i];
    }
    return n;
}

static enum fl_status join_all(struct launch *l, bool *done, struct fl_err *err)
{
    char tls[4][FL_PATH_MAX];
    size_t n = 7;
    char program[FL_PATH_MAX], address[CLI_URL_BYTES + 16], gpus[32], wait[32];
    json_t *status;

    FL_TRY(own_program(l, program, err));
    FL_TRY(cli_call(&l->cluster, "GET", "/api/furlong/status", NULL, 10000, &status, err));
    snprintf(address, sizeof(address), "--address=%s", cli_text(status, "address"));
    json_decref(status);
    if (strncmp(address, "--address=127.", 14) == 0 || strncmp(address, "--address=[::1]", 15) == 0)
        return fl_fail(err, FL_INVALID, "the head that runs here is bound to %s, which other hosts cannot reach: furlong stop, then "
                       "start it with --node-ip-address, or let this command start it", address + 10);
    snprintf(gpus, sizeof(gpus), "--num-gpus=%lld", (long long)l->node_gpus);
    snprintf(wait, sizeof(wait), "--wait=%lld", (long long)(l->wait_s > 20 ? 20 : l->wait_s));
    const char *command[16] = { program, "start", address, wait, "--if-needed", "--token-stdin", "--node-name=%h" };
    if (l->node_gpus >= 0)
        command[n++] = gpus;
    command[tls_words(tls, command, n)] = NULL;
    struct ssh_run r = { .command = command, .input = *l->cluster.token ? l->cluster.token : "\n", .wait_ms = SSH_MS };

    fprintf(stderr, "starting worker daemons on %zu hosts over ssh\n", l->names.n);
    return ssh_run_all(&l->names, &r, done, err);
}

/* ==== all of it ==================================================================================== */
enum fl_status launch_cluster(struct launch *l, const char *address, double gpus, struct cli_cluster *out, struct fl_err *err)
{
    struct wait_for w = { .gpus = gpus };
    char program[FL_PATH_MAX] = "furlong";
    bool *done = NULL;

    FL_TRY(launch_may_join(l, err));
    FL_TRY(take_names(l, err));
    enum fl_status st = find_or_start(l, address, err);

    if (st == FL_OK && l->joins) {
        done = calloc(l->names.n + 1, sizeof(*done));
        st = done ? join_all(l, done, err) : fl_fail(err, FL_EXHAUSTED, "no memory for %zu hosts", l->names.n);
    }
    w.names = l->named ? &l->names : NULL;
    w.nodes = l->num_nodes;
    if (st == FL_OK)
        st = wait_for_nodes(&l->cluster, &w, (uint32_t)l->wait_s * 1000, err);
    if (st != FL_OK) {
        if (done && own_program(l, program, NULL) == FL_OK)
            undo(l, program, done);
        cli_end_all("furlong train", l->own, l->n_own);
        l->n_own = 0;
    }
    free(done);
    if (st == FL_OK)
        *out = l->cluster;
    return st;
}

void launch_end(struct launch *l)
{
    json_t *body = json_pack("{s:s}", "why", "the run that started this cluster has ended");
    struct fl_err err = { 0 };

    if (l->n_own && !l->keep) {
        (void)cli_call(&l->cluster, "POST", "/api/furlong/shutdown", body, 30000, NULL, &err); /* what is left is ended below */
        for (size_t i = l->n_own; i-- > 0;)
            if (!cli_daemon_wait(&l->own[i], END_MS) && cli_daemon_end(&l->own[i], 10000, &err) != FL_OK)
                (void)cli_failed("furlong train", &err);
    }
    json_decref(body);
}
