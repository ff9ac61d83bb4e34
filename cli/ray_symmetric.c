#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/daemons.h"
#include "cli/ray.h"
#include "common/base/addr.h"
#include "common/base/file.h"
#include "common/base/str.h"

extern char **environ;
enum { POLL_MS = 500, MAX_WORDS = 64 };

struct symmetric {
    const char *address;
    int64_t min_nodes, wait_s;
    char host[256], port[8];
    char *const *start; /* words for `ray start` */
    size_t n_start;
};
static const struct fl_opt opts[] = {
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct symmetric, address), .help = "of the head: the node that has this address" },
    { FL_OPT_INT, "min-nodes", .alias = "wait-for-nnodes", .arg = "N", .fallback = "1", .min = 1, .max = 100000,
      .at = offsetof(struct symmetric, min_nodes), .help = "nodes to wait for" },
    { FL_OPT_INT, "cluster-wait-timeout", .arg = "SECONDS", .fallback = "30", .min = 1, .max = 86400, .env = "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT",
      .at = offsetof(struct symmetric, wait_s), .help = "how long to wait for the others" },
    { 0 }
};

/* ==== who is the head ============================================================================== */
static bool same(const struct sockaddr *a, const struct sockaddr *b)
{
    if (!a || a->sa_family != b->sa_family)
        return false;
    return a->sa_family == AF_INET
               ? ((const struct sockaddr_in *)a)->sin_addr.s_addr == ((const struct sockaddr_in *)b)->sin_addr.s_addr
               : memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr, 16) == 0;
}

/* host becomes the literal that it stands for; *here: an interface of this machine carries it. */
static enum fl_status elect(struct symmetric *s, bool *here, struct fl_err *err)
{
    struct addrinfo want = { .ai_socktype = SOCK_STREAM }, *got = NULL;
    struct ifaddrs *list = NULL;
    const char *colon = strrchr(s->address, ':');
    int rc;

    if (!colon || colon == s->address || colon - s->address >= (int)sizeof(s->host) || strlen(colon + 1) >= sizeof(s->port))
        return fl_fail(err, FL_INVALID, "Invalid address format, should be `host:port`: %.100s", s->address);
    snprintf(s->host, sizeof(s->host), "%.*s", (int)(colon - s->address), s->address);
    snprintf(s->port, sizeof(s->port), "%s", colon + 1);
    rc = getaddrinfo(s->host, s->port, &want, &got);
    if (rc)
        return fl_fail(err, FL_INVALID, "Could not resolve address: %.100s: %s", s->address, gai_strerror(rc));
    (void)getnameinfo(got->ai_addr, got->ai_addrlen, s->host, sizeof(s->host), NULL, 0, NI_NUMERICHOST);
    if (getifaddrs(&list) == 0)
        for (struct ifaddrs *i = list; i && !*here; i = i->ifa_next)
            *here = same(i->ifa_addr, got->ai_addr);
    *here |= fl_addr_is_loopback(s->host);
    freeifaddrs(list);
    freeaddrinfo(got);
    if (s->min_nodes > 1 && fl_addr_is_loopback(s->host))
        return fl_fail(err, FL_INVALID, "%s is this machine for each of the %lld nodes: give the head's address on the network",
                       s->host, (long long)s->min_nodes);
    return FL_OK;
}

/* ==== children ===================================================================================== */
static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* Its exit code, 128 + signal when one ended it; -1: could not be started. */
static int child(const char *path, char *const *argv, bool quiet)
{
    posix_spawn_file_actions_t files;
    pid_t pid;
    int ws, rc;

    posix_spawn_file_actions_init(&files);
    if (quiet)
        posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
    rc = posix_spawnp(&pid, path, &files, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&files);
    if (rc) {
        errno = rc;
        return -1;
    }
    while (waitpid(pid, &ws, 0) < 0)
        if (errno != EINTR)
            return -1;
    return WIFEXITED(ws) ? WEXITSTATUS(ws) : 128 + WTERMSIG(ws);
}

/* `ray start FIRST... the options of the line` by our own program. */
static int ray_child(const struct symmetric *s, const char *const *first, bool quiet)
{
    char path[FL_PATH_MAX];
    const char *argv[MAX_WORDS + 8] = { "ray", "start" };
    size_t n = 2;

    if (fl_program_path("furlong", path, NULL) != FL_OK)
        return -1;
    while (*first)
        argv[n++] = *first++;
    for (size_t i = 0; i < s->n_start; i++)
        argv[n++] = s->start[i];
    return child(path, (char *const *)argv, quiet);
}

/* ==== the head ===================================================================================== */
static int64_t nodes_ready(const struct cli_cluster *c)
{
    json_t *nodes, *n;
    int64_t ready = 0;
    size_t i;

    if (cli_call(c, "GET", "/api/furlong/nodes", NULL, 5000, &nodes, NULL) != FL_OK)
        return 0;
    json_array_foreach(nodes, i, n)
        ready += strcmp(cli_text(n, "state"), "READY") == 0;
    json_decref(nodes);
    return ready;
}

static bool wait_for_nodes(const struct symmetric *s, const struct cli_cluster *c)
{
    uint64_t due = now_ms() + (uint64_t)s->wait_s * 1000;
    int64_t said = -1, ready;

    while ((ready = nodes_ready(c)) < s->min_nodes) {
        if (ready != said)
            printf("Waiting for nodes to start... %lld/%lld nodes started\n", (long long)ready, (long long)s->min_nodes);
        said = ready;
        fflush(stdout);
        if (now_ms() > due)
            return false;
        (void)usleep(POLL_MS * 1000);
    }
    return true;
}

/* The daemons of the other nodes end with the head: their `--block` then returns. */
static void end_cluster(const struct cli_cluster *c)
{
    struct cli_daemon *d;
    struct fl_err err = { 0 };
    size_t n, ended = 0;

    if (cli_daemons_find(&d, &n, &err) != FL_OK)
        return;
    (void)cli_call(c, "POST", "/api/furlong/shutdown", NULL, 10000, NULL, &err); /* what is left is ended below */
    for (size_t i = n; i-- > 0;)
        if (!d[i].private)
            ended += cli_daemon_wait(&d[i], 15000) || cli_daemon_end(&d[i], 5000, &err) == FL_OK;
    printf("Stopped all %zu Ray processes.\n", ended);
    cli_daemons_free(d, n);
}

static int on_head(const struct symmetric *s, char *const *command)
{
    static const char rule[] = "=======================";
    char ip[300], port[32], gcs[300], *line = NULL;
    struct cli_cluster c = { 0 };
    struct fl_err err = { 0 };
    int rc;

    puts("On head node. Starting Ray cluster head...");
    fflush(stdout);
    snprintf(ip, sizeof(ip), "--node-ip-address=%s", s->host);
    snprintf(port, sizeof(port), "--port=%s", s->port);
    rc = ray_child(s, (const char *const[]){ "--head", ip, port, NULL }, true);
    if (rc)
        return ray_failed("", "Failed to start the head: exit code %d", rc);
    puts("Head node started.");
    snprintf(gcs, sizeof(gcs), strchr(s->host, ':') ? "[%s]:%s" : "%s:%s", s->host, s->port);
    if (ray_find(gcs, &c, &err) != FL_OK) {
        rc = ray_failed("", "%s", err.text);
    } else if (s->min_nodes > 1 && !wait_for_nodes(s, &c)) {
        rc = ray_failed("", "Timed out waiting for other nodes to start.");
    } else {
        json_t *words = json_array();

        for (size_t i = 0; command[i]; i++)
            json_array_append_new(words, json_string(command[i]));
        line = ray_repr(words);
        json_decref(words);
        printf("%s\nRunning command on head node: %s\n%s\n", rule, line, rule);
        free(line);
        fflush(stdout);
        (void)setenv("RAY_ADDRESS", gcs, 1);
        rc = child(command[0], command, false);
        if (rc < 0) {
            (void)ray_failed("", "%s: %s", command[0], strerror(errno));
            rc = 127;
        }
        puts(rule);
        if (rc)
            (void)ray_failed("", "Command failed with return code %d", rc);
    }
    if (*c.url)
        end_cluster(&c);
    return rc;
}

/* ==== the others =================================================================================== */
static bool answers(const struct symmetric *s)
{
    struct addrinfo want = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST }, *got;
    int fd;
    bool ok;

    if (getaddrinfo(s->host, s->port, &want, &got))
        return false;
    fd = socket(got->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ok = fd >= 0 && connect(fd, got->ai_addr, got->ai_addrlen) == 0;
    if (fd >= 0)
        close(fd);
    freeaddrinfo(got);
    return ok;
}

static int on_worker(const struct symmetric *s)
{
    uint64_t due = now_ms() + (uint64_t)s->wait_s * 1000;
    char address[300];

    printf("On worker node. Connecting to Ray cluster at %s:%s...\n", s->host, s->port);
    fflush(stdout);
    while (!answers(s)) {
        if (now_ms() > due)
            return ray_failed("", "Timed out waiting for head node to start.");
        (void)usleep(POLL_MS * 1000);
    }
    puts("Ray cluster is ready!");
    fflush(stdout);
    snprintf(address, sizeof(address), strchr(s->host, ':') ? "--address=[%s]:%s" : "--address=%s:%s", s->host, s->port);
    return ray_child(s, (const char *const[]){ address, "--block", NULL }, true);
}

/* ==== the verb ===================================================================================== */
static bool runs_here(void)
{
    struct cli_daemon *d;
    size_t n, own = 0;

    if (cli_daemons_find(&d, &n, NULL) != FL_OK)
        return false;
    for (size_t i = 0; i < n; i++)
        own += !d[i].private;
    cli_daemons_free(d, n);
    return own > 0;
}

/* Splits argv[0..sep): our options stay, the rest goes to `ray start`. */
static int split(struct symmetric *s, struct fl_opts *o, int sep, char **argv, char **rest)
{
    static const char *const forbidden[] = { "--head", "--node-ip-address", "--port", "--block" };
    static const struct ray_flag none[] = { { 0 } };
    int own = 1;
    size_t n = 0;

    for (int i = 1; i < sep; i++) {
        size_t len = strcspn(argv[i], "=");

        for (size_t k = 0; k < FL_LEN(forbidden); k++)
            if (strlen(forbidden[k]) == len && memcmp(forbidden[k], argv[i], len) == 0)
                return ray_failed("Error", "Cannot use %s option in symmetric_run.", forbidden[k]);
        bool ours = (len == 9 && memcmp(argv[i], "--address", len) == 0) || (len == 11 && memcmp(argv[i], "--min-nodes", len) == 0) ||
                    (len == 17 && memcmp(argv[i], "--wait-for-nnodes", len) == 0) || strcmp(argv[i], "--help") == 0;

        if (!ours && n < MAX_WORDS)
            rest[n++] = argv[i];
        if (!ours)
            continue;
        argv[own++] = argv[i];
        if (argv[own - 1][len] == 0 && i + 1 < sep && strcmp(argv[own - 1], "--help") != 0)
            argv[own++] = argv[++i];
    }
    argv[own] = NULL;
    s->start = rest;
    s->n_start = n;
    return ray_opts(o, none, own, argv);
}

int ray_symmetric_run(int argc, char **argv)
{
    struct symmetric s = { 0 };
    struct fl_opts o = { .program = "ray symmetric-run", .usage = "--address HOST:PORT [OPTIONS] -- ENTRYPOINT...",
                         .about = "The same line on every node: the node that has the address becomes the head and runs the command,\n"
                                  "the others join it, all end with it. Other options go to ray start.",
                         .tables = { { NULL, opts, &s } } };
    char *rest[MAX_WORDS + 1], **command;
    struct fl_err err = { 0 };
    bool head = false;
    int sep = 1, rc;

    while (sep < argc && strcmp(argv[sep], "--") != 0)
        sep++;
    command = argv + sep + 1;
    rc = sep == argc && argc > 1 && strcmp(argv[1], "--help") != 0
             ? ray_failed("Error", "No separator '--' found in arguments. Please use '--' to separate Ray start arguments and the "
                          "entrypoint command.")
             : split(&s, &o, sep, argv, rest);
    if (rc >= 0)
        return rc;
    if (sep + 1 >= argc)
        return ray_failed("Error", "No entrypoint command provided.");
    if (!s.address)
        return ray_misused(&o, "Missing option '--address'.");
    if (runs_here())
        return ray_failed("Error", "Ray is already started on this node.");
    if (elect(&s, &head, &err) != FL_OK)
        return ray_failed("Error", "%s", err.text);
    return head ? on_head(&s, command) : on_worker(&s);
}
