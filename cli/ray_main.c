#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <time.h>

#include "cli/daemons.h"
#include "cli/ray.h"
#include "common/base/str.h"

enum { MAX_PASSED = 64 };

static const struct cli_verb verbs[] = {
    { "start",          "start a head, or join one",                      ray_start          },
    { "stop",           "end what this user runs on this machine",        ray_stop           },
    { "status",         "nodes and resources of the cluster",             ray_status         },
    { "job",            "submit, follow and stop jobs",                   ray_job            },
    { "list",           "nodes, jobs, workers, placement groups",         ray_list           },
    { "summary",        "tasks, actors or objects, counted",              ray_summary        },
    { "health-check",   "exit code 0 if the head answers",                ray_health_check   },
    { "symmetric-run",  "the same line on every node: a cluster and a command", ray_symmetric_run },
    { "get-auth-token", "print this user's token",                        ray_get_auth_token },
    { 0 },
};

/* ==== texts ======================================================================================== */
void ray_framed(const char *text)
{
    int n = (int)strlen(text);
    char rule[256];

    memset(rule, '-', sizeof(rule));
    n = n < (int)sizeof(rule) ? n : (int)sizeof(rule);
    printf("\n%.*s\n%s\n%.*s\n\n", n, rule, text, n, rule);
}

int ray_failed(const char *kind, const char *fmt, ...)
{
    va_list ap;

    fflush(stdout);
    fprintf(stderr, "%s%s", kind, *kind ? ": " : "");
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return 1;
}

int ray_misused(const struct fl_opts *o, const char *fmt, ...)
{
    va_list ap;

    fflush(stdout);
    fprintf(stderr, "Usage: %s %s\nTry '%s --help' for help.\n\nError: ", o->program,
            o->usage ? o->usage : "[OPTIONS]", o->program);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return 2;
}

const char *ray_clock(char out[32])
{
    struct timeval now;
    struct tm tm;
    size_t n;

    gettimeofday(&now, NULL);
    n = strftime(out, 32, "%Y-%m-%d %H:%M:%S", localtime_r(&now.tv_sec, &tm));
    snprintf(out + n, 32 - n, ".%06ld", (long)now.tv_usec);
    return out;
}

/* ==== flags ======================================================================================== */
static const struct ray_flag *flag_of(const struct ray_flag *f, const char *word)
{
    size_t len;

    if (strncmp(word, "--", 2) != 0)
        return NULL;
    len = strcspn(word + 2, "=");
    for (; f && f->name; f++)
        if (strlen(f->name) == len && memcmp(f->name, word + 2, len) == 0)
            return f;
    return NULL;
}

/* argv without what is passed over; a command behind "--", or behind the first word, stays as it is. */
static int take_passed(const struct fl_opts *o, const struct ray_flag *passed, int argc, char **argv)
{
    const struct ray_flag *seen[MAX_PASSED], *f;
    int out = 0, n = 0;

    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0 || (i > 0 && argv[i][0] != '-' && o->first_word_ends)) {
            while (i < argc)
                argv[out++] = argv[i++];
            break;
        }
        f = flag_of(passed, argv[i]);
        if (!f) {
            argv[out++] = argv[i];
            if (i > 0 && i + 1 < argc && fl_opts_takes_value(o, argv[i]))
                argv[out++] = argv[++i]; /* its value is no flag, whatever it looks like */
            continue;
        }
        if (f->value && !strchr(argv[i], '=') && i + 1 < argc)
            i++;
        bool twice = false;
        for (int k = 0; k < n; k++)
            twice |= seen[k] == f;
        if (!twice && n < MAX_PASSED)
            seen[n++] = f;
    }
    argv[out] = NULL;
    for (int k = 0; k < n; k++)
        fprintf(stderr, "%s%s--%s%s", k ? "" : o->program, k ? ", " : ": passed over, they mean nothing here: ",
                seen[k]->name, k + 1 == n ? "\n" : "");
    return out;
}

int ray_opts(struct fl_opts *o, const struct ray_flag *passed, int argc, char **argv)
{
    struct fl_err err = { 0 };
    enum fl_status st = fl_opts_parse(o, take_passed(o, passed, argc, argv), argv, &err);
    static const char unknown[] = "unknown option ";
    size_t len = sizeof(unknown) - 1;

    if (st == FL_OK)
        return -1;
    if (st == FL_CANCELLED) {
        fl_opts_help(o, stdout);
        return fflush(stdout) == 0 ? 0 : 1;
    }
    if (strncmp(err.text, unknown, len) == 0)
        return ray_misused(o, "No such option '%.*s'.", (int)strcspn(err.text + len, ";"), err.text + len);
    return ray_misused(o, "%s", err.text);
}

/* ==== which cluster ================================================================================ */
/* The HTTP side of the head that nodes join at address, from the json files of this machine's daemons;
 * address NULL: of the only head here. */
static bool find_here(const char *address, struct cli_cluster *c)
{
    struct cli_daemon *all;
    size_t n;
    bool found = false;

    if (cli_daemons_find(&all, &n, NULL) != FL_OK)
        return false;
    for (size_t i = 0; i < n && !found; i++)
        if (all[i].kind == 'h' && !all[i].private &&
            (!address || strcmp(cli_text(all[i].info, "address"), address) == 0))
            found = cli_url_of(cli_text(all[i].info, "http"), c->url, NULL) == FL_OK &&
                    FL_COPY(c->ca, cli_text(all[i].info, "tls_ca"));
    cli_daemons_free(all, n);
    return found;
}

/* Does the head at c say that nodes join it at address? */
static bool belongs(const struct cli_cluster *c, const char *address)
{
    json_t *status;
    bool same;

    if (cli_call(c, "GET", "/api/furlong/status", NULL, 5000, &status, NULL) != FL_OK)
        return false;
    same = strcmp(cli_text(status, "address"), address) == 0;
    json_decref(status);
    return same;
}

static enum fl_status find_gcs(const char *address, struct cli_cluster *c, struct fl_err *err)
{
    const char *colon = strrchr(address, ':');

    cli_token(c->token, sizeof(c->token));
    if (find_here(address, c))
        return FL_OK;
    for (int tls = 0; tls < 2 && colon && (size_t)(colon - address) + 17 < sizeof(c->url); tls++) {
        snprintf(c->url, sizeof(c->url), "http%s://%.*s:8265", tls ? "s" : "", (int)(colon - address), address);
        if (belongs(c, address))
            return FL_OK;
    }
    return fl_fail(err, FL_UNREACHABLE, "Ray cluster is not found at %.160s", address);
}

static const char *env(const char *name)
{
    const char *v = getenv(name);

    return v && *v ? v : NULL;
}

static bool is_url(const char *a)
{
    return strncmp(a, "http://", 7) == 0 || strncmp(a, "https://", 8) == 0;
}

static enum fl_status find_named(const char *address, struct cli_cluster *c, struct fl_err *err)
{
    if (!is_url(address))
        return strstr(address, "://") ? fl_fail(err, FL_UNREACHABLE, "%.100s: only http:// addresses, and those that "
                                                "nodes join, are understood", address)
                                      : find_gcs(address, c, err);
    cli_token(c->token, sizeof(c->token));
    return cli_url_of(address, c->url, err);
}

static const char no_cluster[] =
    "Could not find any running Ray instance. Please specify the one to connect to by setting the `--address` flag or "
    "`RAY_ADDRESS` environment variable.";

enum fl_status ray_find(const char *address, struct cli_cluster *out, struct fl_err *err)
{
    struct cli_cluster c = { 0 };

    address = address && *address ? address : env("RAY_ADDRESS");
    if (address && strcmp(address, "auto") != 0)
        FL_TRY(find_named(address, &c, err));
    else if (!find_here(NULL, &c))
        return fl_fail(err, FL_NOT_FOUND, "%s", no_cluster);
    cli_token(c.token, sizeof(c.token));
    *out = c;
    return FL_OK;
}

enum fl_status ray_find_api(const char *address, struct cli_cluster *out, struct fl_err *err)
{
    const char *first = env("RAY_API_SERVER_ADDRESS");
    struct cli_cluster c = { 0 };

    first = first ? first : env("RAY_ADDRESS");
    address = first ? first : address && *address ? address : NULL;
    if (address && strcmp(address, "auto") != 0)
        FL_TRY(find_named(address, &c, err));
    else if (!find_here(NULL, &c) && address)
        return fl_fail(err, FL_NOT_FOUND, "%s", no_cluster);
    else if (!*c.url)
        (void)FL_COPY(c.url, "http://localhost:8265");
    cli_token(c.token, sizeof(c.token));
    *out = c;
    return FL_OK;
}

/* ==== the rest ===================================================================================== */
int ray_main(int argc, char **argv)
{
    /* Launchers clear leftovers by `pkill -9 ray`: a submission that is followed, or a blocked start, is none. */
    (void)prctl(PR_SET_NAME, "furlong");
    if (argc > 1 && strcmp(argv[1], "--version") == 0) {
        puts("ray, version " RAY_VERSION " (Furlong " FURLONG_VERSION ")");
        return 0;
    }
    return cli_dispatch("ray", "Furlong by the name of Ray's command.", verbs, argc, argv);
}

struct health { const char *address, *component; };
static const struct fl_opt health_opts[] = {
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct health, address), .help = "of the head" },
    { FL_OPT_TEXT, "component", .arg = "NAME", .at = offsetof(struct health, component), .help = "taken and passed over" },
    { 0 }
};

int ray_health_check(int argc, char **argv)
{
    static const struct ray_flag passed[] = { { "skip-version-check", false }, { 0 } };
    struct health h = { 0 };
    struct fl_opts o = { .program = "ray health-check", .about = "Exit code 0 if the head at an address answers.",
                         .tables = { { NULL, health_opts, &h } } };
    struct cli_cluster c;
    struct fl_err err = { 0 };
    int rc = ray_opts(&o, passed, argc, argv);

    if (rc >= 0)
        return rc;
    if (ray_find(h.address, &c, &err) != FL_OK ||
        cli_call(&c, "GET", "/api/furlong/status", NULL, 5000, NULL, &err) != FL_OK)
        return ray_failed("ray.exceptions.RpcError", "%s", err.text);
    return 0;
}

struct token { bool make; };
static const struct fl_opt token_opts[] = {
    { FL_OPT_SWITCH, "generate", .at = offsetof(struct token, make), .help = "make one where there is none" },
    { 0 }
};

int ray_get_auth_token(int argc, char **argv)
{
    struct token t = { 0 };
    struct fl_opts o = { .program = "ray get-auth-token", .about = "Prints the token that this user's commands send.",
                         .tables = { { NULL, token_opts, &t } } };
    char token[CLI_TOKEN_BYTES];
    int rc = ray_opts(&o, NULL, argc, argv);

    if (rc >= 0)
        return rc;
    cli_token(token, sizeof(token));
    if (!*token && !t.make)
        return ray_failed("Error", "No authentication token found. Use ray `get-auth-token --generate` to create one.");
    if (!*token) {
        struct fl_err err = { 0 };

        fputs("Generating new authentication token...\n", stderr);
        if (cli_token_make(token, sizeof(token), &err) != FL_OK)
            return ray_failed("Error", "%s", err.text);
    }
    fputs(token, stdout); /* bare: scripts take the whole of it */
    return 0;
}
