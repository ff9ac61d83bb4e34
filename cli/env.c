#include "cli/env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/file.h"
#include "common/base/str.h"

enum { FILE_MAX = 1 << 20 };
extern char **environ;

static enum fl_status from_json(const char *text, size_t len, const char *what, json_t **out, struct fl_err *err)
{
    json_error_t bad;

    *out = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &bad);
    if (*out)
        return FL_OK;
    return fl_fail(err, FL_INVALID, "%.120s: line %d, column %d: %s%s", what, bad.line, bad.column, bad.text,
                   strstr(bad.text, "near '''") ? "; JSON wants double quotes" : "");
}

enum fl_status cli_env_read(const char *text, const char *file, json_t **out, struct fl_err *err)
{
    const char *what = file ? file : "--runtime-env-json", *dot = file ? strrchr(file, '.') : NULL;
    char *held = NULL;
    size_t len = text ? strlen(text) : 0;
    json_t *o = NULL;
    enum fl_status st;

    if (text && file)
        return fl_fail(err, FL_INVALID, "only one of --runtime-env and --runtime-env-json can be given");
    if (!text && !file) {
        *out = json_object();
        return *out ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for a runtime_env");
    }
    if (file && (st = fl_file_read(file, FILE_MAX, &held, &len, err)) != FL_OK)
        return fl_wrap(err, st, "--runtime-env");
    if (file && !(dot && strcmp(dot, ".json") == 0))
        st = cli_yaml_parse(held, len, what, &o, err);
    else
        st = from_json(file ? held : text, len, what, &o, err);
    free(held);
    if (st == FL_OK && !json_is_object(o))
        st = fl_fail(err, FL_INVALID, "%.120s: an object of names and values is wanted", what);
    if (st == FL_OK)
        *out = o;
    else
        json_decref(o);
    return st;
}

static const char *kind(const json_t *v)
{
    static const char *const names[] = { "an object", "a list", "a text", "a number", "a number", "true", "false", "null" };

    return names[json_typeof(v)];
}

enum fl_status cli_env_check(const json_t *env, struct fl_err *err)
{
    static const char *const known[] = { "env_vars", "working_dir", "py_modules", "excludes", "config" };
    const char *name;
    json_t *v;

    json_object_foreach((json_t *)env, name, v) {
        bool found = false;

        for (size_t i = 0; i < FL_LEN(known); i++)
            found |= strcmp(name, known[i]) == 0;
        if (!found)
            return fl_fail(err, FL_INVALID, "runtime_env: '%.60s' is not known; env_vars, working_dir, py_modules, excludes and config are", name);
    }
    v = json_object_get(env, "env_vars");
    if (v && !json_is_object(v))
        return fl_fail(err, FL_INVALID, "runtime_env: env_vars is %s, an object of texts is wanted", kind(v));
    json_t *vars = v;

    json_object_foreach(vars, name, v)
        if (!json_is_string(v))
            return fl_fail(err, FL_INVALID, "runtime_env: env_vars.%.60s is %s, a text is wanted", name, kind(v));
    v = json_object_get(env, "working_dir");
    if (v && !json_is_string(v))
        return fl_fail(err, FL_INVALID, "runtime_env: working_dir is %s, a text is wanted", kind(v));
    v = json_object_get(env, "py_modules");
    if (v && !json_is_array(v))
        return fl_fail(err, FL_INVALID, "runtime_env: py_modules is %s, a list is wanted", kind(v));
    return FL_OK;
}

/* ==== what goes along ============================================================================== */
static bool listed(const char *list, const char *name, size_t len, bool prefix)
{
    for (const char *w = list; *w; w += strspn(w, " ")) {
        size_t n = strcspn(w, " ");

        if (prefix ? n < len && strncmp(w, name, n) == 0 : n == len && strncmp(w, name, n) == 0)
            return true;
        w += n;
    }
    return false;
}

static bool goes_along(const char *name, size_t len)
{
    static const char proxies[] = "http_proxy https_proxy ftp_proxy all_proxy no_proxy "
                                  "HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY";
    /* Interfaces and addresses have other names on other nodes; each daemon sets its own. */
    static const char nodes_own[] = "NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME SGLANG_HOST_IP VLLM_HOST_IP";

    return !listed(nodes_own, name, len, false) &&
           (listed(CLI_PASS_PREFIXES, name, len, true) || listed(proxies, name, len, false));
}

static enum fl_status put(json_t *vars, const char *name, size_t len, const char *value, struct fl_err *err)
{
    char *key = strndup(name, len);
    json_t *v = json_string(value);
    int rc = !key || !v ? -1 : json_object_get(vars, key) ? 0 : json_object_set(vars, key, v);

    json_decref(v);
    if (rc != 0)
        (void)fl_fail(err, FL_INVALID, "the variable %.80s cannot go along: its value is no UTF-8", key ? key : "?");
    free(key);
    return rc == 0 ? FL_OK : FL_INVALID;
}

/* One word of --pass-env. */
static enum fl_status put_named(json_t *vars, const char *word, size_t len, struct fl_err *err)
{
    char name[256];

    if (len == 0 || len >= sizeof(name) || memchr(word, '=', len))
        return fl_fail(err, FL_INVALID, "--pass-env: '%.*s' is no name of a variable; values are given with --runtime-env-json",
                       len > 200 ? 200 : (int)len, word);
    snprintf(name, sizeof(name), "%.*s", (int)len, word);
    const char *value = getenv(name);

    return value ? put(vars, name, len, value, err)
                 : fl_fail(err, FL_INVALID, "--pass-env: %s is not set here", name);
}

enum fl_status cli_env_pass(json_t *env, const char *more, struct fl_err *err)
{
    json_t *vars = json_object_get(env, "env_vars");
    bool none = !vars || json_is_null(vars);

    if (none)
        vars = json_object();
    if (!vars)
        return fl_fail(err, FL_EXHAUSTED, "no memory for env_vars");
    enum fl_status st = FL_OK;

    for (const char *w = more; w && *w && st == FL_OK; w += strspn(w, ",")) {
        size_t n = strcspn(w, ",");

        st = put_named(vars, w, n, err);
        w += n;
    }
    for (char **e = environ; *e && st == FL_OK; e++) {
        size_t n = strcspn(*e, "=");

        if ((*e)[n] && goes_along(*e, n))
            st = put(vars, *e, n, *e + n + 1, err);
    }
    if (none && st == FL_OK && json_object_size(vars) > 0)
        json_object_set(env, "env_vars", vars);
    if (none)
        json_decref(vars);
    return st;
}
