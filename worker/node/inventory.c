#include "worker/node/inventory.h"
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "common/conf/json.h"
#include "common/gpu/watch.h"
#include "worker/keep/group.h"
#include "worker/node/node.h"
#include "worker/node/visible.h"
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ITEMS_MAX = 256, E4 = 10000 };

/* ---- building the message ---- */

static bool grow(void ***list, size_t *n, void *item)
{
    void **bigger = item ? realloc(*list, (*n + 1) * sizeof(**list)) : NULL;

    if (!bigger)
        return false;
    *list = bigger;
    bigger[(*n)++] = item;
    return true;
}

static enum fl_status add_amount(Fl__Inventory *inv, const char *name, int64_t e4,
                                 struct fl_err *err)
{
    Fl__Amount *a = malloc(sizeof(*a));

    if (a) {
        *a = (Fl__Amount)FL__AMOUNT__INIT;
        a->name = strdup(name);
        a->e4 = e4;
    }
    if (!a || !a->name || !grow((void ***)&inv->total, &inv->n_total, a)) {
        if (a)
            free(a->name);
        free(a);
        return fl_fail(err, FL_EXHAUSTED, "no memory for the inventory");
    }
    return FL_OK;
}

static enum fl_status add_label(Fl__Inventory *inv, const char *key, size_t key_len,
                                const char *value, size_t value_len, struct fl_err *err)
{
    Fl__Label *l = malloc(sizeof(*l));

    if (l) {
        *l = (Fl__Label)FL__LABEL__INIT;
        l->key = strndup(key, key_len);
        l->value = strndup(value, value_len);
    }
    if (!l || !l->key || !l->value || !grow((void ***)&inv->labels, &inv->n_labels, l)) {
        if (l)
            fl__label__free_unpacked(l, NULL);
        return fl_fail(err, FL_EXHAUSTED, "no memory for the inventory");
    }
    return FL_OK;
}

static enum fl_status add_device(Fl__Inventory *inv, const char *id, const struct gpu_seen *g,
                                 struct fl_err *err)
{
    Fl__Device *d = malloc(sizeof(*d));
    bool ok = d != NULL;

    if (ok) {
        *d = (Fl__Device)FL__DEVICE__INIT;
        d->id = strdup(id);
        d->uuid = g ? strdup(g->uuid) : NULL;
        d->has_memory_bytes = g && g->total_bytes != UINT64_MAX;
        d->memory_bytes = d->has_memory_bytes ? g->total_bytes : 0;
        d->has_numa = g && g->numa >= 0;
        d->numa = d->has_numa ? (uint32_t)g->numa : 0;
        d->has_island = g != NULL;
        d->island = g ? g->island : 0;
        d->has_logical = !g;
        d->logical = !g;
        d->pci = g && g->pci[0] ? strdup(g->pci) : NULL;
        d->name = g && g->name[0] ? strdup(g->name) : NULL;
        ok = d->id && (!g || d->uuid) && grow((void ***)&inv->devices, &inv->n_devices, d);
        if (!ok)
            fl__device__free_unpacked(d, NULL);
    }
    return ok ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for the inventory");
}

/* ---- cores and memory ---- */

static bool read_text(const char *path, char *buf, size_t cap)
{
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(buf, 1, cap - 1, f) : 0;

    if (f)
        fclose(f);
    buf[n] = 0;
    return n > 0;
}

uint64_t node_cpu_limit_e4(const char *cpu_max)
{
    unsigned long long quota, period = 100000;

    if (sscanf(cpu_max, "%llu %llu", &quota, &period) < 1 || !period)
        return UINT64_MAX; /* "max" */
    return quota * E4 / period;
}

/* The least over our own cgroup of that kind and those above it. */
static uint64_t least_above(const char *controller, uint64_t (*read_at)(const char *dir))
{
    char dir[256];
    uint64_t least = UINT64_MAX;
    char *slash;

    if (!group_own_folder(controller, dir, sizeof(dir)))
        return least;
    do {
        uint64_t here = read_at(dir);

        least = here < least ? here : least;
        slash = strrchr(dir, '/');
        if (slash)
            *slash = 0;
    } while (slash && slash != dir);
    return least;
}

static uint64_t cpu_v2(const char *dir)
{
    char path[300], buf[64];

    snprintf(path, sizeof(path), "%s/cpu.max", dir);
    return read_text(path, buf, sizeof(buf)) ? node_cpu_limit_e4(buf) : UINT64_MAX;
}

static uint64_t cpu_v1(const char *dir)
{
    char path[300], quota[32], period[32], both[80];

    snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", dir);
    if (!read_text(path, quota, sizeof(quota)) || quota[0] == '-')
        return UINT64_MAX;
    snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", dir);
    if (!read_text(path, period, sizeof(period)))
        return UINT64_MAX;
    snprintf(both, sizeof(both), "%s %s", quota, period);
    return node_cpu_limit_e4(both);
}

static uint64_t number_at(const char *dir, const char *file)
{
    char path[300], buf[64], *end;
    unsigned long long v;

    snprintf(path, sizeof(path), "%s/%s", dir, file);
    if (!read_text(path, buf, sizeof(buf)))
        return UINT64_MAX;
    v = strtoull(buf, &end, 10);
    return end == buf ? UINT64_MAX : v; /* "max" */
}

static uint64_t memory_v2(const char *dir)
{
    return number_at(dir, "memory.max");
}

static uint64_t memory_v1(const char *dir)
{
    return number_at(dir, "memory.limit_in_bytes");
}

static uint64_t meminfo(const char *key)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[128];
    unsigned long long kib = 0;
    size_t n = strlen(key);

    while (f && fgets(line, sizeof(line), f))
        if (!strncmp(line, key, n) && sscanf(line + n, ": %llu", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib * 1024;
}

uint64_t node_memory_available(void)
{
    return meminfo("MemAvailable");
}

unsigned node_load_e2(void)
{
    double load = 0;

    return getloadavg(&load, 1) == 1 ? (unsigned)(load * 100) : 0;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static int64_t cores_e4(void)
{
    uint64_t quota = least(least_above("", cpu_v2), least_above("cpu", cpu_v1));
    cpu_set_t set;
    uint64_t n = sched_getaffinity(0, sizeof(set), &set) == 0
                     ? (uint64_t)CPU_COUNT(&set)
                     : (uint64_t)sysconf(_SC_NPROCESSORS_ONLN);

    /* A quota of 2.5 cores is shown as that; less than one is still one, or nothing could start. */
    return (int64_t)(quota < E4 ? E4 : least(n * E4, quota));
}

static int64_t memory_e4(uint64_t asked)
{
    uint64_t have = asked ? asked
                          : least(meminfo("MemTotal"), least(least_above("", memory_v2),
                                                             least_above("memory", memory_v1)));

    return (int64_t)(least(have, INT64_MAX / E4) * E4);
}

/* ---- devices ---- */

static enum fl_status devices_logical(const struct node_config *cfg, const struct node_visible *v,
                                      Fl__Inventory *inv, struct fl_err *err)
{
    if (v->n && cfg->gpus > (int64_t)v->n)
        return fl_fail(
            err, FL_INVALID,
            "--num-gpus=%lld: CUDA_VISIBLE_DEVICES lists %zu; give at most so many, or unset it",
            (long long)cfg->gpus, v->n);
    for (int64_t i = 0; i < cfg->gpus; i++) {
        char number[16];

        snprintf(number, sizeof(number), "%d", (int)i);
        FL_TRY(add_device(inv, v->n ? v->id[i] : number, NULL, err));
    }
    return FL_OK;
}

/* In the order of the list: worker i takes the i-th listed device. */
static enum fl_status devices_real(const struct node_config *cfg, const struct node_visible *v,
                                   const struct gpu_seen *gpus, size_t n_gpus, Fl__Inventory *inv,
                                   struct fl_err *err)
{
    const char *uuids[GPU_MAX];
    size_t n = v->set ? v->n : n_gpus;

    for (size_t i = 0; i < n_gpus; i++)
        uuids[i] = gpus[i].uuid;
    if (cfg->gpus >= 0) {
        if ((size_t)cfg->gpus > n)
            return fl_fail(
                err, FL_INVALID,
                "--num-gpus=%lld: this machine shows %zu%s; give at most so many, or leave it out",
                (long long)cfg->gpus, n, v->set ? " by CUDA_VISIBLE_DEVICES" : "");
        n = (size_t)cfg->gpus;
    }
    for (size_t i = 0; i < n; i++) {
        size_t at = i;
        char number[16];

        if (v->set && node_visible_find(v->id[i], uuids, n_gpus, &at, err) != FL_OK)
            return fl_wrap(err, FL_INVALID, "CUDA_VISIBLE_DEVICES");
        snprintf(number, sizeof(number), "%zu", i);
        FL_TRY(add_device(inv, v->set ? v->id[i] : number, &gpus[at], err));
    }
    return FL_OK;
}

static enum fl_status devices(const struct node_config *cfg, const char *visible,
                              const char *nvml_lib, struct gpu_watch **watch, Fl__Inventory *inv,
                              struct fl_err *err)
{
    static struct node_visible v; /* 64 KiB: not for the stack */
    struct gpu_seen gpus[GPU_MAX];
    struct fl_err why;
    size_t n = GPU_MAX;

    FL_TRY(node_visible_parse("CUDA_VISIBLE_DEVICES", visible, &v, err));
    if (cfg->gpus == 0)
        return FL_OK;
    enum fl_status st = gpu_watch_open(nvml_lib, watch, &why);

    if (st == FL_INVALID)
        return fl_fail(err, st, "%s", why.text); /* FURLONG_GPU: not a word that is known */
    if (st == FL_OK)
        FL_TRY(gpu_watch_list(*watch, gpus, &n, err));
    else
        fl_debug("no GPUs by NVML why=\"%s\"", why.text);
    if (st == FL_OK && n)
        return devices_real(cfg, &v, gpus, n, inv, err);
    return cfg->gpus > 0 ? devices_logical(cfg, &v, inv, err) : FL_OK;
}

/* ---- the user's own ---- */

enum fl_status node_labels_parse(const char *text, Fl__Inventory *into, struct fl_err *err)
{
    for (const char *at = text; at && *at;) {
        size_t len = strcspn(at, ",");
        const char *eq = memchr(at, '=', len);
        size_t key = eq ? (size_t)(eq - at) : 0;

        if (!key)
            return fl_fail(err, FL_INVALID, "--labels: \"%.*s\" is not KEY=VALUE", (int)len, at);
        for (size_t i = 0; i < into->n_labels; i++)
            if (strlen(into->labels[i]->key) == key && !memcmp(into->labels[i]->key, at, key))
                return fl_fail(err, FL_INVALID, "--labels: %.*s is there twice; keep one", (int)key,
                               at);
        if (into->n_labels == ITEMS_MAX)
            return fl_fail(err, FL_INVALID, "--labels: more than %d", ITEMS_MAX);
        FL_TRY(add_label(into, at, key, eq + 1, len - key - 1, err));
        at += len;
        at += *at == ',';
    }
    return FL_OK;
}

static enum fl_status resource_of(const struct fl_json_at *at, const char *name,
                                  const json_t *value, Fl__Inventory *into, struct fl_err *err)
{
    double v = json_number_value(value);

    if (!json_is_number(value) || !(v >= 0) || v > 1e12)
        return fl_json_bad(at, name, err, "is no amount from 0 to 1e12");
    if (!*name || !strcmp(name, "CPU") || !strcmp(name, "GPU") || !strcmp(name, "memory") ||
        !strncmp(name, "node:", 5))
        return fl_json_bad(at, name, err,
                           "is given by a flag of its own (--num-cpus, --num-gpus, --memory)");
    if (into->n_total == ITEMS_MAX)
        return fl_fail(err, FL_INVALID, "--resources: more than %d", ITEMS_MAX);
    return add_amount(into, name, (int64_t)llround(v * E4), err);
}

enum fl_status node_resources_parse(const char *text, Fl__Inventory *into, struct fl_err *err)
{
    json_t *root, *value;
    const char *name;
    enum fl_status st;

    if (!text || !*text)
        return FL_OK;
    FL_TRY(fl_json_parse(text, strlen(text), "--resources", FL_JSON_MAX, &root, err));
    struct fl_json_at at = fl_json_root(root, "--resources");

    st = json_is_object(root)
             ? FL_OK
             : fl_fail(err, FL_INVALID, "--resources=%.80s: give a JSON object, as {\"disk\": 2}",
                       text);
    json_object_foreach (root, name, value)
        if (st == FL_OK)
            st = resource_of(&at, name, value, into, err);
    json_decref(root);
    return st;
}

/* ------------------------------------------------------------------------------------------------
 */

enum fl_status node_inventory_make(const struct node_config *cfg, const char *visible,
                                   const char *nvml_lib, struct gpu_watch **watch,
                                   Fl__Inventory **out, struct fl_err *err)
{
    Fl__Inventory *inv = malloc(sizeof(*inv));
    struct gpu_watch *gpus = NULL;
    enum fl_status st;

    if (!inv || FL_FAULT("node.inventory")) {
        free(inv);
        return fl_fail(err, FL_EXHAUSTED, "no memory for the inventory");
    }
    *inv = (Fl__Inventory)FL__INVENTORY__INIT;
    st = devices(cfg, visible, nvml_lib, &gpus, inv, err);
    if (st == FL_OK)
        st = add_amount(inv, "CPU", cfg->cpus >= 0 ? (int64_t)llround(cfg->cpus * E4) : cores_e4(),
                        err);
    if (st == FL_OK && inv->n_devices)
        st = add_amount(inv, "GPU", (int64_t)inv->n_devices * E4, err);
    if (st == FL_OK)
        st = add_amount(inv, "memory", memory_e4(cfg->memory_bytes), err);
    if (st == FL_OK)
        st = node_resources_parse(cfg->resources, inv, err);
    if (st == FL_OK)
        st = node_labels_parse(cfg->labels, inv, err);
    if (st != FL_OK || !watch || !inv->n_devices || !inv->devices[0]->uuid)
        gpu_watch_close(FL_TAKE(gpus));
    if (st != FL_OK) {
        fl__inventory__free_unpacked(inv, NULL);
        return st;
    }
    if (watch)
        *watch = gpus;
    *out = inv;
    return FL_OK;
}

enum fl_status node_inventory_at(Fl__Inventory *inv, const char *addr, struct fl_err *err)
{
    char name[80];

    snprintf(name, sizeof(name), "node:%s", addr);
    for (size_t i = 0; i < inv->n_total; i++)
        if (!strcmp(inv->total[i]->name, name))
            return FL_OK;
    return add_amount(inv, name, E4, err);
}

const char *node_inventory_text(const Fl__Inventory *inv, char out[256])
{
    struct fl_str s = { .data = out, .cap = 256, .max = 255 };

    out[0] = 0;
    for (size_t i = 0; i < inv->n_total; i++)
        if (!strcmp(inv->total[i]->name, "memory"))
            fl_str_add(&s, "%smemory_mib=%lld", i ? " " : "",
                       (long long)(inv->total[i]->e4 / E4 >> 20));
        else
            fl_str_add(&s, "%s%s=%g", i ? " " : "", inv->total[i]->name,
                       (double)inv->total[i]->e4 / E4);
    return out;
}
