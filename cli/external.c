#include "cli/external.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/str.h"

enum { HTTP_PORT = 8265, API_VERSION = 4, ADDRESS_BYTES = 128 };

bool external_asked(void)
{
    return cli_env_true("MILES_SCRIPT_EXTERNAL_RAY");
}

/* ==== where ======================================================================================== */
static const char *named(const char *address)
{
    static const char *const names[] = { "FURLONG_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_ADDRESS" };

    for (size_t i = 0; i < FL_LEN(names) && !(address && *address); i++)
        address = getenv(names[i]);
    return address && *address ? address : NULL;
}

/* The port of HTTP on the host of HOST:PORT. */
static void http_beside(const char *address, char url[CLI_URL_BYTES])
{
    const char *colon = strrchr(address, ':');

    snprintf(url, CLI_URL_BYTES, "http://%.*s:%d", (int)(colon - address), address, HTTP_PORT);
}

/* The head that was started here last: ours, else the one that Ray has written down. */
static void find_here(char url[CLI_URL_BYTES])
{
    const char *tmp = getenv("RAY_TMPDIR");
    char path[FL_PATH_MAX], *text = NULL;
    struct cli_cluster own;
    struct fl_err none = { 0 };
    size_t len;

    (void)fl_copy(url, CLI_URL_BYTES, "http://127.0.0.1:8265");
    if (cli_cluster_find("auto", &own, &none) == FL_OK) {
        (void)fl_copy(url, CLI_URL_BYTES, own.url);
        return;
    }
    if (fl_path(path, NULL, "%s/ray/ray_current_cluster", tmp && *tmp ? tmp : "/tmp") != FL_OK ||
        fl_file_read(path, ADDRESS_BYTES, &text, &len, NULL) != FL_OK)
        return;
    text[strcspn(text, " \r\n")] = 0;
    if (strchr(text, ':'))
        http_beside(text, url);
    free(text);
}

/* ==== who ========================================================================================== */
static enum fl_status take_headers(struct external *x, struct fl_err *err)
{
    const char *text = getenv("RAY_JOB_HEADERS");

    return text && *text ? cli_headers(&x->cluster, text, x->header_text, sizeof(x->header_text), err) : FL_OK;
}

static enum fl_status check_ray(struct external *x, const json_t *version, struct fl_err *err)
{
    const char *ray = cli_text(version, "ray_version"), *api = cli_text(version, "version");

    if (!*ray)
        return fl_fail(err, FL_UNSUPPORTED, "%s is no head of a cluster: /api/version names no version of Ray; RAY_ADDRESS must be the "
                       "address of its dashboard (8265 by default)", x->cluster.url);
    if (strtol(api, NULL, 10) < API_VERSION)
        return fl_fail(err, FL_UNSUPPORTED, "Ray %.20s at %s is too old: its Jobs API has version %.8s, %d is needed", ray, x->cluster.url,
                       api, API_VERSION);
    (void)FL_COPY(x->ray_version, ray);
    return FL_OK;
}

static enum fl_status ask(struct external *x, struct fl_err *err)
{
    json_t *version = NULL;
    enum fl_status st = cli_is_ours(&x->cluster, &x->ours, &version, err);

    if (st == FL_DENIED)
        return fl_wrap(err, st, *x->cluster.token ? "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token holds a token that is not this cluster's"
                                                  : "the cluster wants a token: RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH names it");
    if (st == FL_OK && x->ours && !x->cluster.headers[0])
        cli_token(x->cluster.token, sizeof(x->cluster.token));
    else if (st == FL_OK)
        st = check_ray(x, version, err);
    json_decref(version);
    return st;
}

enum fl_status external_find(const char *address, struct external *out, struct fl_err *err)
{
    const char *given = named(address);
    bool bare = given && !strstr(given, "://") && strcmp(given, "auto") != 0;
    struct fl_err first = { 0 };

    *out = (struct external){ 0 };
    if (!given)
        (void)FL_COPY(out->cluster.url, "http://127.0.0.1:8265");
    else if (strcmp(given, "auto") == 0)
        find_here(out->cluster.url);
    else
        FL_TRY(cli_url_of(given, out->cluster.url, err));
    cli_token_of_ray(out->cluster.token, sizeof(out->cluster.token));
    FL_TRY(take_headers(out, err));
    enum fl_status st = ask(out, &first);

    if (bare && st != FL_OK && st != FL_DENIED) { /* the port that nodes join? */
        http_beside(given, out->cluster.url);
        st = ask(out, NULL);
    }
    if (st == FL_OK)
        return FL_OK;
    st = first.status;
    if (err)
        *err = first;
    return st == FL_UNREACHABLE || st == FL_TIMEOUT || st == FL_CORRUPT
               ? fl_wrap(err, FL_UNREACHABLE, "MILES_SCRIPT_EXTERNAL_RAY is set, so no cluster is started, and none answers (%s)",
                         given ? "--address and RAY_ADDRESS name it" : "RAY_ADDRESS names another place")
               : st;
}
