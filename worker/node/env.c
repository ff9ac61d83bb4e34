#include "worker/node/env.h"
#include "common/base/file.h"
#include "common/base/fault.h"
#include "common/base/str.h"
#include "worker/node/visible.h"
#include "worker/proc/lost.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

enum { ENV_MAX = 8192 };

struct env {
    char **v;
    size_t n;
    bool failed;
};

/* Of the daemon, and nothing to a worker. */
static const char *const own[] = { "FURLONG_SEAT_FD", PROC_MARK, "FURLONG_READY_FD" };

static const char *env_get(const struct env *e, const char *name)
{
    size_t n = strlen(name);

    for (size_t i = 0; i < e->n; i++)
        if (!strncmp(e->v[i], name, n) && e->v[i][n] == '=')
            return e->v[i] + n + 1;
    return NULL;
}

static void env_set(struct env *e, const char *name, const char *value)
{
    const char *was = env_get(e, name);
    char *line = NULL;

    if (e->failed || (!was && e->n == ENV_MAX) || FL_FAULT("node.env") ||
        asprintf(&line, "%s=%s", name, value) < 0) {
        e->failed = true;
        return;
    }
    for (size_t i = 0; was && i < e->n; i++)
        if (e->v[i] == was - strlen(name) - 1) {
            free(e->v[i]);
            e->v[i] = line;
            return;
        }
    e->v[e->n++] = line;
}

static void env_set_u(struct env *e, const char *name, uint32_t value)
{
    char text[16];

    snprintf(text, sizeof(text), "%u", value);
    env_set(e, name, text);
}

static void env_default(struct env *e, const char *name, const char *value)
{
    const char *was = env_get(e, name);

    if (!was || !*was)
        env_set(e, name, value);
}

/* value in front of what is there, as in a path. */
static void env_lead(struct env *e, const char *name, const char *value)
{
    const char *was = env_get(e, name);
    char *both = NULL;

    if (!was || !*was) {
        env_set(e, name, value);
    } else if (asprintf(&both, "%s:%s", value, was) < 0) {
        e->failed = true;
    } else {
        env_set(e, name, both);
        free(both);
    }
}

static void take_base(struct env *e, const char *const *base)
{
    for (size_t i = 0; base && base[i] && e->n < ENV_MAX && !e->failed; i++) {
        bool private = false;

        for (size_t k = 0; k < FL_LEN(own); k++)
        private |= !strncmp(base[i], own[k], strlen(own[k])) && base[i][strlen(own[k])] == '=';
        if (private || !strchr(base[i], '='))
            continue;
        e->v[e->n] = strdup(base[i]);
        e->failed = !e->v[e->n];
        e->n += !e->failed;
    }
}

static void join_ids(const Fl__WorkerSpec *s, struct fl_str *out)
{
    for (size_t i = 0; i < s->n_device_ids; i++)
        fl_str_add(out, "%s%s", i ? "," : "", s->device_ids[i]);
}

/* With the switch a worker sees the daemon's whole list and finds its own device by LOCAL_RANK;
 * without it the list is its own devices. No device: the list is left as it is, as Ray 2.60 does.
 */
static void set_devices(struct env *e, const Fl__WorkerSpec *s)
{
    char text[4096];
    struct fl_str ids = FL_STR_ON(text);

    join_ids(s, &ids);
    env_set(e, "FURLONG_DEVICES", fl_str_text(&ids));
    if (node_truthy(env_get(e, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")))
        return;
    if (s->n_device_ids)
        env_set(e, "CUDA_VISIBLE_DEVICES", fl_str_text(&ids));
    else if (node_truthy(env_get(e, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")))
        env_set(e, "CUDA_VISIBLE_DEVICES", "");
}

/* The index that torch.cuda.set_device() wants: in the visible list, or the device's own number. */
static uint32_t device_index(const struct env *e, const Fl__WorkerSpec *s)
{
    const char *list = env_get(e, "CUDA_VISIBLE_DEVICES");
    int at;

    if (!list || !*list)
        list = env_get(e, "HIP_VISIBLE_DEVICES");
    if (!s->n_device_ids)
        return s->local_rank;
    if (!list || !*list)
        return (uint32_t)strtoul(s->device_ids[0], NULL, 10);
    at = node_visible_index(list, s->device_ids[0]);
    return at < 0 ? s->local_rank : (uint32_t)at;
}

bool node_is_engine(const Fl__WorkerSpec *s)
{
    return strcmp(s->role, "trainer") && strcmp(s->role, "critic");
}

static void set_ranks(struct env *e, const Fl__WorkerSpec *s, const struct fl_addr *addr)
{
    if (node_is_engine(s))
        return; /* an engine would take them for its own */
    env_set(e, "MASTER_ADDR", s->master_addr && *s->master_addr ? s->master_addr : addr->text);
    if (s->master_port)
        env_set_u(e, "MASTER_PORT", s->master_port);
    env_set_u(e, "RANK", s->rank);
    env_set_u(e, "WORLD_SIZE", s->world);
    env_set_u(e, "LOCAL_RANK", device_index(e, s));
    env_set_u(e, "LOCAL_WORLD_SIZE", s->has_local_world ? s->local_world : 1);
}

/* One address for every channel: others would look for an interface of their own. */
static void set_address(struct env *e, const struct fl_addr *addr)
{
    static const char *const hosts[] = { "MILES_HOST_IP", "SGLANG_HOST_IP", "VLLM_HOST_IP" };
    char exact[40];

    if (addr->loopback)
        return;
    for (size_t i = 0; i < FL_LEN(hosts); i++)
        env_default(e, hosts[i], addr->text);
    if (!addr->iface[0])
        return;
    snprintf(exact, sizeof(exact), "=%s", addr->iface); /* without '=' NCCL takes it for a prefix */
    env_default(e, "NCCL_SOCKET_IFNAME", exact);
    env_default(e, "GLOO_SOCKET_IFNAME", addr->iface);
}

/* Multicast over NVLink can put a host's devices out of service, and wins nothing for a broadcast.
 * Here, because a process that runs has threads that read its environment. */
static void set_multicast(struct env *e, const Fl__WorkerSpec *s)
{
    if (s->n_device_ids && strcmp(s->role, "driver"))
        env_default(e, "NCCL_NVLS_ENABLE", "0");
}

static void set_ports(struct env *e, const Fl__WorkerSpec *s)
{
    if (s->master_port && node_is_engine(s))
        env_set_u(e, "FURLONG_BASE_PORT", s->master_port);
    for (size_t i = 0; i < s->n_ports; i++) {
        char name[64] = "FURLONG_PORT_";
        size_t at = strlen(name);
        const char *p = s->ports[i];

        for (; *p && *p != '=' && at < sizeof(name) - 1; p++)
            name[at++] = (char)toupper((unsigned char)*p);
        name[at] = 0;
        env_set(e, name, *p ? p + 1 : "");
    }
}

/* Where a proxy is set, the cluster's own addresses are kept from it: added to what the user wrote, never in its place. */
static void set_no_proxy(struct env *e, const Fl__WorkerSpec *s, const struct fl_addr *addr)
{
    static const char *const proxies[] = { "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY" };
    static const char *const names[] = { "no_proxy", "NO_PROXY" };
    const char *lower = env_get(e, "no_proxy"), *upper = env_get(e, "NO_PROXY"), *peers = env_get(e, "FURLONG_PEERS");
    const char *was = lower && *lower ? lower : upper ? upper : "";
    struct fl_str all = FL_STR_HEAP(64 << 10);
    bool any = false;

    for (size_t i = 0; i < FL_LEN(proxies); i++)
        any |= env_get(e, proxies[i]) && *env_get(e, proxies[i]);
    if (!any)
        return;
    fl_str_add(&all, "%s%slocalhost,127.0.0.1,::1,%s", was, *was ? "," : "", addr->text);
    if (s->master_addr && *s->master_addr)
        fl_str_add(&all, ",%s", s->master_addr);
    if (peers && *peers)
        fl_str_add(&all, ",%s", peers);
    e->failed |= all.cut;
    for (size_t i = 0; i < FL_LEN(names) && !e->failed; i++)
        env_set(e, names[i], fl_str_text(&all));
    fl_str_fini(&all);
}

/* Where the programs beside this one are: an interpreter's own folder says nothing about them. */
static void set_bin(struct env *e)
{
    char path[FL_PATH_MAX];

    if (env_get(e, "FURLONG_BIN_DIR") || fl_program_path("furlong-probe", path, NULL) != FL_OK)
        return;
    *strrchr(path, '/') = '\0';
    env_set(e, "FURLONG_BIN_DIR", path);
}

enum fl_status node_env_make(const struct node_env_in *in, char ***out, struct fl_err *err)
{
    const Fl__WorkerSpec *s = in->spec;
    struct env e = { .v = calloc(ENV_MAX + 1, sizeof(char *)) };

    if (!e.v)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the environment of %s %u", s->role,
                       s->rank);
    for (size_t i = 0; i < s->n_env; i++)
        if (!*s->env[i]->name || strchr(s->env[i]->name, '=')) {
            node_env_free(e.v);
            return fl_fail(err, FL_INVALID,
                           "environment of %s %u: \"%.80s\" is no name of a variable", s->role,
                           s->rank, s->env[i]->name);
        }
    take_base(&e, in->base);
    for (size_t i = 0; i < s->n_env; i++)
        env_set(&e, s->env[i]->name, s->env[i]->value);
    if (in->python_path && *in->python_path)
        env_lead(&e, "PYTHONPATH", in->python_path);
    set_bin(&e);
    set_devices(&e, s);
    set_ranks(&e, s, in->addr);
    set_address(&e, in->addr);
    set_multicast(&e, s);
    set_ports(&e, s);
    set_no_proxy(&e, s, in->addr);
    env_set_u(&e, "FURLONG_SEAT_FD", (uint32_t)in->seat_fd);
    env_set(&e, "FURLONG_JOB", s->job_name);
    env_set(&e, "FURLONG_ROLE", s->role);
    env_set_u(&e, "FURLONG_RANK", s->rank);
    env_set_u(&e, "FURLONG_WORLD_SIZE", s->world);
    env_set_u(&e, "FURLONG_ATTEMPT", s->who->attempt);
    env_set(&e, "FURLONG_NODE", in->node);
    env_set(&e, "FURLONG_NODE_IP", in->addr->text);
    if (s->run_dir && *s->run_dir)
        env_set(&e, "FURLONG_RUN_DIR", s->run_dir);
    if (e.failed) {
        node_env_free(e.v);
        return fl_fail(err, FL_EXHAUSTED,
                       "the environment of %s %u has over %d variables, or memory ended", s->role,
                       s->rank, ENV_MAX);
    }
    *out = e.v;
    return FL_OK;
}

void node_env_free(char **env)
{
    for (size_t i = 0; env && env[i]; i++)
        free(env[i]);
    free(env);
}
