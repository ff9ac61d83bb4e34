/* tests/worker/test_node_parts.c - what a daemon decides, without a daemon */
#include "tests/t.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/port.h"
#include "common/base/str.h"
#include "worker/node/addr.h"
#include "worker/node/disk.h"
#include "worker/node/env.h"
#include "worker/node/ident.h"
#include "worker/node/inventory.h"
#include "worker/node/leases.h"
#include "worker/node/node.h"
#include "worker/node/ports.h"
#include "worker/node/visible.h"
#include <arpa/inet.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- lists of devices --------------------------------------------------------------------------
 */

static void p23_lists_of_devices(void **state)
{
    static const struct row {
        const char *name, *list, *ids, *says; /* says: the refusal */
    } rows[] = {
        { "none", NULL, "", NULL },
        { "empty", "", "", NULL },
        { "hidden", "NoDevFiles", "", NULL },
        { "one", "1", "1", NULL },
        { "order kept", "3,1", "3,1", NULL },
        { "blanks", " 3 , 1", "3,1", NULL },
        { "uuid and number", "GPU-ab12,0", "GPU-ab12,0", NULL },
        { "hole", "0,,1", NULL, "entry 2" },
        { "ends in a comma", "0,", NULL, "entry 2" },
        { "twice", "0,0", NULL, "0 is there twice" },
        { "word", "0,gpu1", NULL, "gpu1" },
        { "minus", "-2", NULL, "-2" },
    };
    static struct node_visible v;

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        const struct row *r = &rows[i];
        char text[256];
        struct fl_str ids = FL_STR_ON(text);
        struct fl_err err = { 0 };
        enum fl_status st = node_visible_parse("CUDA_VISIBLE_DEVICES", r->list, &v, &err);

        t_int_eq(st, r->says ? FL_INVALID : FL_OK, "%s: %s", r->name, err.text);
        if (r->says) {
            t_has(err.text, r->says);
            continue;
        }
        for (size_t k = 0; k < v.n; k++)
            fl_str_add(&ids, "%s%s", k ? "," : "", v.id[k]);
        t_str_eq(fl_str_text(&ids), r->ids, "%s", r->name);
        t_int_eq(v.set, r->list != NULL, "%s", r->name);
    }
}

static void p24_p25_ids_are_translated_once(void **state)
{
    const char *uuids[] = { "GPU-aa11", "GPU-ab22", "GPU-cc33" };
    struct fl_err err;
    size_t at = 9;

    (void)state;
    t_ok(node_visible_find("2", uuids, 3, &at, &err), &err);
    t_int_eq(at, 2);
    t_ok(node_visible_find("gpu-AB22", uuids, 3, &at, &err), &err);
    t_int_eq(at, 1);
    t_ok(node_visible_find("GPU-c", uuids, 3, &at, &err), &err);
    t_int_eq(at, 2);
    t_refused(node_visible_find("GPU-a", uuids, 3, &at, &err), FL_INVALID, &err);
    t_has(err.text, "GPU-aa11 and GPU-ab22");
    t_refused(node_visible_find("3", uuids, 3, &at, &err), FL_NOT_FOUND, &err);
    t_refused(node_visible_find("GPU-dd", uuids, 3, &at, &err), FL_NOT_FOUND, &err);
    t_int_eq(node_visible_index("4,5,6,7", "6"), 2);
    t_int_eq(node_visible_index("4,5", "1"), -1);
}

/* ---- environment -------------------------------------------------------------------------------
 */

struct env_row {
    const char *name, *role, *devices, *base, *spec; /* lists; base and spec: "A=1;B=2" */
    const char *has, *lacks;                         /* "A=1;B=2": each a whole line    */
};

static size_t split(char *text, const char *by, char **out)
{
    size_t n = 0;

    for (char *save, *p = strtok_r(text, by, &save); p; p = strtok_r(NULL, by, &save))
        out[n++] = p;
    return n;
}

static bool has_line(char **env, const char *line)
{
    for (size_t i = 0; env[i]; i++)
        if (!strcmp(env[i], line))
            return true;
    return false;
}

static bool has_name(char **env, const char *name)
{
    size_t n = strlen(name);

    for (size_t i = 0; env[i]; i++)
        if (!strncmp(env[i], name, n) && env[i][n] == '=')
            return true;
    return false;
}

static const char noset[] = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1";
static const struct env_row env_rows[] = {
    { "own device is the whole list", "trainer", "3", "", "",
      "CUDA_VISIBLE_DEVICES=3;LOCAL_RANK=0;RANK=5;WORLD_SIZE=8;MASTER_ADDR=10.0.0.9;MASTER_"
      "PORT=20001;"
      "LOCAL_WORLD_SIZE=4;FURLONG_DEVICES=3;FURLONG_SEAT_FD=3",
      "" },
    { "NOSET, no list: the physical id", "trainer", "3", noset, "", "LOCAL_RANK=3",
      "CUDA_VISIBLE_DEVICES" },
    { "NOSET, daemon's list: place in it", "trainer", "5", "CUDA_VISIBLE_DEVICES=3,5", noset,
      "CUDA_VISIBLE_DEVICES=3,5;LOCAL_RANK=1", "" },
    { "NOSET, a view that begins elsewhere", "trainer", "6", "CUDA_VISIBLE_DEVICES=4,5,6,7", noset,
      "CUDA_VISIBLE_DEVICES=4,5,6,7;LOCAL_RANK=2;FURLONG_DEVICES=6", "" },
    { "NOSET by the job, off again", "trainer", "1", noset,
      "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1", "" },
    { "engine of two devices", "rollout", "2,3", "CUDA_VISIBLE_DEVICES=0,1,2,3", "",
      "CUDA_VISIBLE_DEVICES=2,3;FURLONG_RANK=5", "RANK;MASTER_ADDR;LOCAL_RANK" },
    { "no device: left as it is", "driver", "", "CUDA_VISIBLE_DEVICES=0,1", "",
      "CUDA_VISIBLE_DEVICES=0,1", "" },
    { "no device, asked to hide", "driver", "",
      "CUDA_VISIBLE_DEVICES=0,1;RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1", "",
      "CUDA_VISIBLE_DEVICES=", "" },
    { "the spec wins over the daemon", "driver", "", "A=1;B=2", "B=3;C=4", "A=1;B=3;C=4", "" },
    { "nothing of the daemon's own seat", "driver", "", "FURLONG_SEAT_FD=9;FURLONG_WORKER=x-1", "",
      "FURLONG_SEAT_FD=3", "FURLONG_WORKER" },
    { "one address for all channels", "rollout", "", "", "SGLANG_HOST_IP=10.9.9.9",
      "MILES_HOST_IP=10.0.0.7;SGLANG_HOST_IP=10.9.9.9;NCCL_SOCKET_IFNAME==eth1;GLOO_SOCKET_"
      "IFNAME=eth1;"
      "FURLONG_NODE_IP=10.0.0.7",
      "" },
    { "no multicast unless asked for", "rollout", "2,3", "", "", "NCCL_NVLS_ENABLE=0", "" },
    { "multicast, by the job", "trainer", "2,3", "", "NCCL_NVLS_ENABLE=1", "NCCL_NVLS_ENABLE=1",
      "" },
    { "multicast of who has no updates", "driver", "2,3", "", "", "FURLONG_RANK=5", "NCCL_NVLS_ENABLE" },
    { "UUIDs", "trainer", "GPU-b", "CUDA_VISIBLE_DEVICES=GPU-a,GPU-b", noset, "LOCAL_RANK=1", "" },
};

static void env_row_holds(const struct env_row *r)
{
    const struct fl_addr addr = { .text = "10.0.0.7", .iface = "eth1" };
    char base_text[256], spec_text[256], dev_text[64], list[512], *parts[32], *names[32],
        **env = NULL;
    Fl__EnvVar vars[8], *var_list[8];
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    Fl__WorkerSpec s = FL__WORKER_SPEC__INIT;
    struct fl_err err;

    snprintf(base_text, sizeof(base_text), "%s", r->base);
    snprintf(spec_text, sizeof(spec_text), "%s", r->spec);
    snprintf(dev_text, sizeof(dev_text), "%s", r->devices);
    parts[split(base_text, ";", parts)] = NULL;
    s.n_env = split(spec_text, ";", names);
    for (size_t k = 0; k < s.n_env; k++) {
        vars[k] = (Fl__EnvVar)FL__ENV_VAR__INIT;
        vars[k].name = strtok(names[k], "=");
        vars[k].value = strtok(NULL, "");
        var_list[k] = &vars[k];
    }
    char *devices[8];

    s.env = var_list;
    s.who = &who;
    s.n_device_ids = split(dev_text, ",", devices);
    s.device_ids = devices;
    s.role = (char *)(uintptr_t)r->role;
    s.job_name = (char *)(uintptr_t) "job";
    s.rank = 5;
    s.world = 8;
    s.has_local_world = true;
    s.local_world = 4;
    s.master_addr = (char *)(uintptr_t) "10.0.0.9";
    s.master_port = 20001;
    struct node_env_in in = { .base = (const char *const *)parts,
                              .spec = &s,
                              .addr = &addr,
                              .node = "node-a",
                              .seat_fd = 3 };

    t_ok(node_env_make(&in, &env, &err), &err);
    snprintf(list, sizeof(list), "%s", r->has);
    for (char *save, *p = strtok_r(list, ";", &save); p; p = strtok_r(NULL, ";", &save))
        t_true(has_line(env, p), "%s: lacks %s", r->name, p);
    snprintf(list, sizeof(list), "%s", r->lacks);
    for (char *save, *p = strtok_r(list, ";", &save); p; p = strtok_r(NULL, ";", &save))
        t_true(!has_name(env, p), "%s: has %s", r->name, p);
    node_env_free(env);
}

static void p24_env_rules(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(env_rows); i++)
        env_row_holds(&env_rows[i]);
}

/* ---- inventory ---------------------------------------------------------------------------------
 */

static void quotas(void **state)
{
    (void)state;
    t_int_eq(node_cpu_limit_e4("200000 100000\n"), 20000);
    t_int_eq(node_cpu_limit_e4("250000 100000\n"), 25000);
    t_true(node_cpu_limit_e4("max 100000\n") == UINT64_MAX);
    t_true(node_cpu_limit_e4("") == UINT64_MAX);
}

static int64_t amount(const Fl__Inventory *inv, const char *name)
{
    for (size_t i = 0; i < inv->n_total; i++)
        if (!strcmp(inv->total[i]->name, name))
            return inv->total[i]->e4;
    return -1;
}

/* As on a machine with three devices, each by its own name: runs on the fake are placed as on real ones. */
static void inventories_of_fakes(void **state)
{
    struct node_config cfg = { .cpus = 1, .gpus = -1, .memory_bytes = 1 << 30 };
    Fl__Inventory *inv = NULL;
    struct fl_err err;

    (void)state;
    t_int_eq(setenv("FURLONG_GPU", "fake:3", 1), 0);
    enum fl_status st = node_inventory_make(&cfg, NULL, "no-such-library.so", NULL, &inv, &err);
    t_int_eq(unsetenv("FURLONG_GPU"), 0);
    t_ok(st, &err);
    t_int_eq(inv->n_devices, 3);
    t_true(!inv->devices[0]->logical && strcmp(inv->devices[0]->uuid, inv->devices[2]->uuid) != 0);
    t_true(inv->devices[1]->memory_bytes > 0);
    fl__inventory__free_unpacked(inv, NULL);
}

static void inventories(void **state)
{
    struct node_config cfg = { .cpus = 2.5,
                               .gpus = 4,
                               .memory_bytes = 1 << 30,
                               .resources = "{\"disk\": 0.5, \"seats\": 3}",
                               .labels = "zone=a,rack=7" };
    Fl__Inventory *inv = NULL;
    struct fl_err err;

    (void)state;
    t_ok(node_inventory_make(&cfg, NULL, "no-such-library.so", NULL, &inv, &err), &err);
    t_int_eq(amount(inv, "CPU"), 25000);
    t_int_eq(amount(inv, "GPU"), 40000);
    t_int_eq(amount(inv, "memory"), (1ll << 30) * 10000);
    t_int_eq(amount(inv, "disk"), 5000);
    t_int_eq(amount(inv, "seats"), 30000);
    t_int_eq(inv->n_devices, 4);
    t_str_eq(inv->devices[3]->id, "3");
    t_true(inv->devices[0]->logical);
    t_str_eq(inv->labels[1]->key, "rack");
    t_str_eq(inv->labels[1]->value, "7");
    t_ok(node_inventory_at(inv, "10.0.0.7", &err), &err);
    t_int_eq(amount(inv, "node:10.0.0.7"), 10000);
    fl__inventory__free_unpacked(inv, NULL);

    cfg.gpus = 2;
    t_ok(node_inventory_make(&cfg, "7,GPU-x,1", "no-such-library.so", NULL, &inv, &err), &err);
    t_str_eq(inv->devices[0]->id, "7", "taken from the list");
    t_str_eq(inv->devices[1]->id, "GPU-x");
    fl__inventory__free_unpacked(inv, NULL);

    cfg = (struct node_config){ .cpus = -1, .gpus = -1 };
    t_ok(node_inventory_make(&cfg, NULL, "no-such-library.so", NULL, &inv, &err), &err);
    t_true(amount(inv, "CPU") >= 10000);
    t_true(amount(inv, "memory") > 0);
    t_int_eq(amount(inv, "GPU"), -1);
    fl__inventory__free_unpacked(inv, NULL);
}

static const char *fake_nvml;

/* Worker i takes the i-th listed device; counts and memory come from the driver alone. */
static void inventories_of_gpus(void **state)
{
    static const struct row {
        const char *name, *visible;
        int64_t gpus;
        const char *ids, *uuid0; /* of the first one */
        const char *says;
    } rows[] = {
        { "all", NULL, -1, "0,1", "GPU-11111111-aaaa", NULL },
        { "reversed", "1,0", -1, "1,0", "GPU-22222222-bbbb", NULL },
        { "by UUID", "GPU-22222222-bbbb", -1, "GPU-22222222-bbbb", "GPU-22222222-bbbb", NULL },
        { "by its beginning", "GPU-2", -1, "GPU-2", "GPU-22222222-bbbb", NULL },
        { "hidden", "", -1, "", NULL, NULL },
        { "fewer", NULL, 1, "0", "GPU-11111111-aaaa", NULL },
        { "of the list", "1,0", 1, "1", "GPU-22222222-bbbb", NULL },
        { "none wanted", NULL, 0, "", NULL, NULL },
        { "more than there are", NULL, 3, NULL, NULL, "--num-gpus=3: this machine shows 2" },
        { "not there", "0,7", -1, NULL, NULL, "device 7 is not there" },
        { "ambiguous", "GPU-", -1, NULL, NULL, "fits GPU-11111111-aaaa and GPU-22222222-bbbb" },
    };

    (void)state;
    for (int says_memory = 0; says_memory < 2; says_memory++) {
        if (says_memory)
            setenv("FAKE_NVML_USED", "/nowhere", 1);
        for (size_t i = 0; i < FL_LEN(rows); i++) {
            const struct row *r = &rows[i];
            struct node_config cfg = { .cpus = 1, .gpus = r->gpus };
            Fl__Inventory *inv = NULL;
            struct fl_err err = { 0 };
            char text[256];
            struct fl_str ids = FL_STR_ON(text);
            enum fl_status st = node_inventory_make(&cfg, r->visible, fake_nvml, NULL, &inv, &err);

            t_int_eq(st, r->says ? FL_INVALID : FL_OK, "%s: %s", r->name, err.text);
            if (r->says) {
                t_has(err.text, r->says);
                continue;
            }
            for (size_t k = 0; k < inv->n_devices; k++)
                fl_str_add(&ids, "%s%s", k ? "," : "", inv->devices[k]->id);
            t_str_eq(fl_str_text(&ids), r->ids, "%s", r->name);
            if (inv->n_devices) {
                t_str_eq(inv->devices[0]->uuid, r->uuid0, "%s", r->name);
                t_true(!inv->devices[0]->logical);
                t_int_eq(inv->devices[0]->memory_bytes, says_memory ? 80ll << 30 : 0, "%s",
                         r->name);
            }
            if (inv->n_devices == 2)
                t_int_eq(inv->devices[0]->island, inv->devices[1]->island, "NVLink");
            fl__inventory__free_unpacked(inv, NULL);
        }
    }
    unsetenv("FAKE_NVML_USED");
}

static void inventories_refused(void **state)
{
    static const struct row {
        const char *name, *visible;
        struct node_config cfg;
        const char *says;
    } rows[] = {
        { "more than listed", "0,1", { .gpus = 3 }, "--num-gpus=3: CUDA_VISIBLE_DEVICES lists 2" },
        { "bad list", "0,,1", { .gpus = 1 }, "CUDA_VISIBLE_DEVICES=0,,1" },
        { "label", NULL, { .labels = "a=1,b" }, "\"b\" is not KEY=VALUE" },
        { "label twice", NULL, { .labels = "a=1,a=2" }, "a is there twice" },
        { "resources no JSON", NULL, { .resources = "{disk: 2}" }, "--resources" },
        { "resources no object", NULL, { .resources = "[1]" }, "JSON object" },
        { "negative", NULL, { .resources = "{\"disk\": -2}" }, "disk" },
        { "word", NULL, { .resources = "{\"disk\": \"two\"}" }, "disk" },
        { "of another flag", NULL, { .resources = "{\"GPU\": 2}" }, "--num-gpus" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        Fl__Inventory *inv = NULL;
        struct fl_err err = { 0 };

        t_int_eq(node_inventory_make(&rows[i].cfg, rows[i].visible, "no-such-library.so", NULL,
                                     &inv, &err),
                 FL_INVALID, "%s", rows[i].name);
        t_has(err.text, rows[i].says);
        t_true(!inv, "%s", rows[i].name);
    }
}

/* ---- address -----------------------------------------------------------------------------------
 */

static void addresses(void **state)
{
    struct fl_addr a;
    struct fl_err err;

    (void)state;
    t_ok(node_addr_find(NULL, "127.0.0.1:6379", &a, &err), &err);
    t_str_eq(a.text, "127.0.0.1");
    t_true(a.loopback);
    t_ok(node_addr_find("127.0.0.5", "127.0.0.1:1", &a, &err), &err);
    t_str_eq(a.text, "127.0.0.5");
    t_refused(node_addr_find("203.0.113.77", "127.0.0.1:1", &a, &err), FL_INVALID, &err);
    t_has(err.text, "no interface of this host has it; it has 127.0.0.1");
    t_refused(node_addr_find(NULL, "6379", &a, &err), FL_INVALID, &err);
    t_refused(node_addr_find(NULL, ":6379", &a, &err), FL_INVALID, &err);
    t_refused(node_addr_find(NULL, "fd00::1:6379", &a, &err), FL_INVALID, &err);
    t_has(err.text, "write an IPv6 address as [fd00::1]");
    t_refused(node_addr_find(NULL, "host:70000", &a, &err), FL_INVALID, &err);
}

/* 64 engines with three ports each, 20 times: none twice, none of the outgoing connections' range. */
static void ports_of_many(void **state)
{
    static struct node n = { .addr.text = "127.0.0.1" };
    static struct worker all[64];
    static Fl__WorkerSpec specs[64];
    static char *names[64][3], text[64][3][8];
    static bool seen[65536];
    uint16_t first, last;
    struct fl_err err;

    (void)state;
    fl_port_ephemeral(&first, &last);
    for (unsigned turn = 0; turn < 20; turn++) {
        memset(seen, 0, sizeof(seen));
        for (uint32_t i = 0; i < 64; i++) {
            specs[i] = (Fl__WorkerSpec)FL__WORKER_SPEC__INIT;
            all[i] = (struct worker){ .node = &n, .spec = &specs[i], .who.attempt = i };
            specs[i].ports = names[i];
            specs[i].n_ports = 3;
            for (int k = 0; k < 3; k++)
                names[i][k] = strdup(strcpy(text[i][k], k ? "nccl" : "http"));
            t_ok(node_ports_of_worker(&n, &specs[i], &err), &err);
            HASH_ADD(hh, n.workers, who, sizeof(all[i].who), &all[i]);
            for (int k = 0; k < 3; k++) {
                unsigned port = (unsigned)atoi(strchr(names[i][k], '=') + 1);

                t_true(port > 1024 && !seen[port] && (port < first || port > last), "turn %u engine %u port %u", turn, i, port);
                seen[port] = true;
            }
        }
        HASH_CLEAR(hh, n.workers);
        for (unsigned i = 0; i < 64 * 3; i++)
            free(names[i / 3][i % 3]);
    }
    node_ports_fini(&n);
}

static bool any_port(void *arg, uint16_t port)
{
    (void)arg;
    return port;
}

static void not_that(void *arg, uint16_t port)
{
    *(uint16_t *)arg = port;
}

static void ports(void **state)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    uint16_t from = 20000, first, got, dropped = 0;
    const struct port_taker t = { any_port, not_that, &dropped };
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct fl_err err;

    (void)state;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    do { /* another test may have it by now */
        t_ok(node_port_free("127.0.0.1", &t, &from, &first, &err), &err);
        at.sin_port = htons(first);
    } while (bind(fd, (struct sockaddr *)&at, sizeof(at)) < 0 || listen(fd, 1) < 0);
    from = first;
    t_ok(node_port_free("127.0.0.1", &t, &from, &got, &err), &err);
    t_true(got != first && dropped, "%u is taken", got);
    t_true(from != got);
    close(fd);
}

/* ---- who this node is --------------------------------------------------------------------------
 */

static void identity(void **state)
{
    struct node_ident a, b;
    struct fl_term term = { .cluster = { 1, 2, 3 }, .head = 7 };
    char *dir = strdup(t_path("state"));
    struct fl_err err;

    (void)state;
    t_ok(node_ident_open(dir, &a, &err), &err);
    t_int_eq(a.me.start, 1);
    t_refused(node_ident_open(dir, &b, &err), FL_EXISTS, &err);
    char pid[32];

    snprintf(pid, sizeof(pid), "pid %d", (int)getpid());
    t_has(err.text, pid);
    t_ok(node_ident_heard(&a, &term, &err), &err);
    t_ok(node_ident_restart(&a, &err), &err);
    node_ident_close(&a);
    t_ok(node_ident_open(dir, &b, &err), &err);
    t_int_eq(b.me.start, 3);
    t_true(FL_SAME(a.me.id, b.me.id));
    t_int_eq(b.highest.head, 7);
    node_ident_close(&b);

    static const char *const bad[] = {
        "", "{", "{}", "{\"node\": \"ab\", \"start\": 1, \"cluster\": \"\", \"term\": 0}",
        "{\"node\": 7}"
    };
    for (size_t i = 0; i < FL_LEN(bad); i++) {
        int fds = t_open_fds();

        t_ok(fl_file_write(t_path("state/node/node.json"), 0600, bad[i], strlen(bad[i]), &err),
             &err);
        t_refused(node_ident_open(dir, &b, &err), FL_CORRUPT, &err);
        t_has(err.text, "node.json");
        t_int_eq(t_open_fds(), fds);
    }
    free(dir);
}

/* Whatever fails on the way, a start number is never used twice. */
static void identity_under_faults(void **state)
{
    char *dir = strdup(t_path("faulty"));
    struct node_ident id;
    struct fl_err err;
    uint64_t seen = 0;
    enum fl_status st = FL_INTERNAL;

    (void)state;
    for (unsigned nth = 1; st != FL_OK && nth < 50; nth++) {
        int fds = t_open_fds();

        fl_fault_arm(nth);
        st = node_ident_open(dir, &id, &err);
        fl_fault_disarm();
        if (st == FL_OK) {
            t_true(id.me.start > seen, "nth=%u", nth);
            seen = id.me.start;
            node_ident_close(&id);
        }
        t_int_eq(t_open_fds(), fds, "nth=%u", nth);
    }
    t_int_eq(st, FL_OK);
    free(dir);
}

/* ---- leases ------------------------------------------------------------------------------------
 */

struct ledger {
    struct fl_loop *loop;
    struct fl_held_clock clock;
    Fl__Inventory *inv;
    struct leases *leases;
    struct fl_node_ref me;
    struct fl_term highest;
    uint64_t busy; /* id of a lease that a worker runs on */
    char path[256];
};

static bool ledger_used(void *arg, uint64_t id)
{
    return ((struct ledger *)arg)->busy == id;
}

static void ledger_open(struct ledger *d)
{
    struct leases_config cfg = { d->path, d->inv, ledger_used, d };
    struct fl_err err;

    t_ok(node_leases_create(d->loop, &cfg, &d->leases, &err), &err);
}

static void ledger_init(struct ledger *d, const char *name)
{
    struct node_config cfg = { .cpus = 4, .gpus = 2, .memory_bytes = 1 << 30 };
    struct fl_err err;

    *d = (struct ledger){ .me.start = 5, .highest = { .cluster = { 9 }, .head = 3 } };
    struct fl_clock clock = fl_held_clock(&d->clock);

    snprintf(d->path, sizeof(d->path), "%s", t_path(name));
    t_ok(fl_loop_create(&clock, &d->loop, &err), &err);
    t_ok(node_inventory_make(&cfg, NULL, "no-such-library.so", NULL, &d->inv, &err), &err);
    ledger_open(d);
}

static void ledger_fini(struct ledger *d)
{
    node_leases_destroy(d->leases);
    fl__inventory__free_unpacked(d->inv, NULL);
    fl_loop_destroy(d->loop);
}

struct ask {
    uint64_t id, head, start;
    int64_t gpu_e4;
    uint32_t device, hold_ms;
    const char *name;
};

static enum fl_status ledger_prepare(struct ledger *d, const struct ask *asks, size_t n,
                                     struct fl_err *err)
{
    Fl__LeasePrepare m = FL__LEASE_PREPARE__INIT;
    Fl__Lease l[4], *list[4];
    Fl__Term by[4];
    Fl__NodeRef at[4];
    Fl__Amount amount[4], *amounts[4];
    uint8_t zero[18] = { 0 };

    for (size_t i = 0; i < n; i++) {
        l[i] = (Fl__Lease)FL__LEASE__INIT;
        by[i] = (Fl__Term)FL__TERM__INIT;
        at[i] = (Fl__NodeRef)FL__NODE_REF__INIT;
        amount[i] = (Fl__Amount)FL__AMOUNT__INIT;
        by[i].cluster = (ProtobufCBinaryData){ 16, d->highest.cluster };
        by[i].head = asks[i].head ? asks[i].head : 3;
        at[i].id = (ProtobufCBinaryData){ sizeof(d->me.id), (uint8_t *)&d->me.id };
        at[i].start = asks[i].start ? asks[i].start : 5;
        amount[i].name = (char *)(uintptr_t)(asks[i].name ? asks[i].name : "GPU");
        amount[i].e4 = asks[i].gpu_e4;
        amounts[i] = &amount[i];
        l[i].id = asks[i].id;
        l[i].by = &by[i];
        l[i].at = &at[i];
        l[i].group = (ProtobufCBinaryData){ 18, zero };
        l[i].job = (ProtobufCBinaryData){ 4, zero };
        l[i].has_hold_ms = true;
        l[i].hold_ms = asks[i].hold_ms ? asks[i].hold_ms : 1000;
        l[i].amounts = &amounts[i];
        l[i].n_amounts = 1;
        l[i].devices = (uint32_t *)(uintptr_t)&asks[i].device;
        l[i].n_devices = 1;
        list[i] = &l[i];
    }
    m.leases = list;
    m.n_leases = n;
    return node_leases_prepare(d->leases, &m, &d->highest, &d->me, err);
}

/* All of a node's ports are given, or none are so many in a row: said, and not looked for for ever.
 */
static void ports_end(void **state)
{
    static struct node n = { .addr.text = "127.0.0.1", .name = "node-a" };
    static uint32_t got[NODE_PORTS_MAX];
    Fl__LeasePrepare m = FL__LEASE_PREPARE__INIT;
    struct ask one = { 1, .gpu_e4 = 10000 };
    struct ledger d;
    struct fl_err err;

    (void)state;
    ledger_init(&d, "ports");
    t_ok(ledger_prepare(&d, &one, 1, &err), &err);
    n.leases = d.leases;
    for (unsigned port = 1024; port <= 65535; port += 17) {
        n.given[n.n_given].lease = 1;
        n.given[n.n_given++].port = (uint16_t)port;
    }
    m.has_free_ports = m.has_port_block = true;
    m.free_ports = m.port_block = 17;
    t_refused(node_ports_find(&n, &m, got, &err), FL_EXHAUSTED, &err);
    t_has(err.text, "no 17 free ports in a row on node node-a");
    m.free_ports = m.port_block = 8;
    t_ok(node_ports_find(&n, &m, got, &err), &err);
    for (unsigned i = 0; i < 8; i++)
        t_true(got[i] == got[0] + i && (got[i] - 1024) % 17 != 0, "%u", got[i]);
    node_ports_fini(&n);
    ledger_fini(&d);
}

/* Two clusters on one host, before any engine of either has bound what it was given. */
static void ports_of_two_daemons(void **state)
{
    static struct node a = { .addr.text = "127.0.0.1", .name = "a" },
                       b = { .addr.text = "127.0.0.1", .name = "b" };
    static uint32_t of_a[NODE_PORTS_MAX], of_b[NODE_PORTS_MAX];
    Fl__LeasePrepare m = FL__LEASE_PREPARE__INIT;
    Fl__WorkerSpec spec = FL__WORKER_SPEC__INIT;
    Fl__Lease l = FL__LEASE__INIT, *leases = &l;
    struct ask one = { 1, .gpu_e4 = 10000 };
    char want[16], *names[2] = { want };
    struct ledger d;
    struct fl_err err;
    int fds = t_open_fds();

    (void)state;
    ledger_init(&d, "two");
    t_ok(ledger_prepare(&d, &one, 1, &err), &err);
    a.leases = b.leases = d.leases;
    l.id = 1;
    m.leases = &leases;
    m.n_leases = 1;
    m.has_free_ports = m.has_port_block = true;
    m.free_ports = 16;
    m.port_block = 4;
    t_ok(node_ports_find(&a, &m, of_a, &err), &err);
    t_ok(node_ports_find(&b, &m, of_b, &err), &err);
    node_ports_give(&a, &m, of_a);
    for (unsigned i = 0; i < 16; i++)
        for (unsigned k = 0; k < 16; k++)
            t_true(of_a[i] != of_b[k], "%u is given twice", of_a[i]);
    snprintf(want, sizeof(want), "http=%u", of_a[5]);
    spec.ports = names;
    spec.n_ports = 1;
    t_refused(node_ports_of_worker(&b, &spec, &err), FL_EXISTS, &err);
    t_has(err.text, "another cluster on this host");
    node_leases_release(d.leases, 1);
    node_leases_sweep(d.leases);
    node_ports_settle(&a);
    t_int_eq(a.n_holds, 0, "of a lease that has gone");
    t_ok(node_ports_of_worker(&b, &spec, &err), &err);
    t_int_eq(b.n_holds, 1, "what was found for it and not given is let go");
    names[1] = want;
    spec.n_ports = 2;
    t_ok(node_ports_of_worker(&b, &spec, &err), &err); /* two names for one port */
    t_int_eq(b.n_holds, 1);
    node_ports_fini(&a);
    node_ports_fini(&b);
    ledger_fini(&d);
    t_int_eq(t_open_fds(), fds);
}

/* Their leases are known by the file, what was given with them is not. */
static void ports_of_adopted_workers(void **state)
{
    static struct node n = { .addr.text = "127.0.0.1", .name = "a" },
                       other = { .addr.text = "127.0.0.1" };
    static uint32_t got[NODE_PORTS_MAX], first[NODE_PORTS_MAX];
    Fl__LeasePrepare m = FL__LEASE_PREPARE__INIT;
    Fl__WorkerSpec spec = FL__WORKER_SPEC__INIT;
    struct worker w = { .node = &n, .spec = &spec };
    struct ledger d;
    struct fl_err err;

    (void)state;
    ledger_init(&d, "adopted");
    n.leases = other.leases = d.leases;
    m.has_free_ports = m.has_port_block = true;
    m.free_ports = m.port_block = 4;
    t_ok(node_ports_find(&n, &m, first, &err), &err);
    spec.role = "rollout";
    spec.has_master_port = true;
    spec.master_port = first[0];
    HASH_ADD(hh, n.workers, who, sizeof(w.who), &w);
    node_ports_fini(&n); /* the earlier daemon */
    node_ports_again(&n, &spec);
    t_int_eq(n.n_holds, 4);
    for (int i = 0; i < 2; i++) {
        t_ok(node_ports_find(i ? &other : &n, &m, got, &err), &err);
        for (unsigned k = 0; k < 4; k++)
            t_true(got[k] < first[0] || got[k] > first[3], "%u is the engine's", got[k]);
    }
    w.gone = true;
    node_ports_settle(&n);
    t_int_eq(n.n_holds, 0);
    HASH_CLEAR(hh, n.workers);
    node_ports_fini(&n);
    node_ports_fini(&other);
    ledger_fini(&d);
}

static void leases_refused(void **state)
{
    static const struct row {
        const char *name;
        struct ask asks[2];
        enum fl_status st;
        const char *says;
    } rows[] = {
        { "older head", { { 1, .head = 2, .gpu_e4 = 1 } }, FL_STALE, "term 2" },
        { "another start", { { 1, .start = 4, .gpu_e4 = 1 } }, FL_STALE, "start 4" },
        { "no such device", { { 1, .gpu_e4 = 1, .device = 2 } }, FL_INVALID, "device 2 of 2" },
        { "more than there is",
          { { 1, .gpu_e4 = 20001 } },
          FL_INVALID,
          "GPU 2.0001 wanted, this node has 2" },
        { "what is not there", { { 1, .gpu_e4 = 1, .name = "disk" } }, FL_INVALID, "disk" },
        { "negative", { { 1, .gpu_e4 = -1 } }, FL_INVALID, "GPU" },
        { "the second of two",
          { { 1, .gpu_e4 = 10000 }, { 2, .gpu_e4 = 10001 } },
          FL_INVALID,
          "wanted" },
        { "held by others",
          { { 2, .gpu_e4 = 6001 } },
          FL_EXHAUSTED,
          "GPU 0.6001 wanted, 1.4 of 2 are held" },
    };
    static const struct ask held = { 100, .gpu_e4 = 14000 };
    struct ledger d;
    struct fl_err err;

    (void)state;
    ledger_init(&d, "l1");
    t_ok(ledger_prepare(&d, &held, 1, &err), &err);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        t_int_eq(ledger_prepare(&d, rows[i].asks, rows[i].asks[1].id ? 2 : 1, &err), rows[i].st,
                 "%s: %s", rows[i].name, err.text);
        t_has(err.text, rows[i].says);
        t_int_eq(node_leases_count(d.leases), 1, "%s: none of it is held", rows[i].name);
    }
    ledger_fini(&d);
}

static void leases_live(void **state)
{
    static const struct ask thirds[] = { { 1, .gpu_e4 = 4000 },
                                         { 2, .gpu_e4 = 4000 },
                                         { 3, .gpu_e4 = 2000 } };
    uint64_t ids[] = { 1, 2, 3 }, unknown[] = { 1, 9 };
    struct ledger d;
    struct fl_err err;

    (void)state;
    ledger_init(&d, "l2");
    t_ok(ledger_prepare(&d, thirds, 3, &err), &err);
    fl_loop_pass(d.loop, &d.clock, 900 * 1000000ull);
    t_ok(ledger_prepare(&d, thirds, 1, &err), &err); /* the hold of 1 starts anew */
    fl_loop_pass(d.loop, &d.clock, 200 * 1000000ull);
    t_int_eq(node_leases_count(d.leases), 1, "2 and 3 ran out, 1 did not");
    t_refused(node_leases_commit(d.leases, unknown, 2, &err), FL_NOT_FOUND, &err);
    t_true(!node_leases_committed(d.leases, 1), "all or none");
    t_ok(ledger_prepare(&d, thirds, 3, &err), &err);
    t_ok(node_leases_commit(d.leases, ids, 3, &err), &err);
    fl_loop_pass(d.loop, &d.clock, 3600ull * 1000000000);
    t_int_eq(node_leases_count(d.leases), 3, "committed ones stay");

    node_leases_destroy(d.leases); /* a new daemon */
    ledger_open(&d);
    t_int_eq(node_leases_count(d.leases), 3);
    t_true(node_leases_committed(d.leases, 2));
    d.busy = 2;
    for (size_t i = 0; i < 3; i++)
        node_leases_release(d.leases, ids[i]);
    node_leases_sweep(d.leases);
    t_int_eq(node_leases_count(d.leases), 1, "a worker runs on 2");
    d.busy = 0;
    node_leases_sweep(d.leases);
    t_int_eq(node_leases_count(d.leases), 0);
    ledger_fini(&d);
}

static void leases_under_faults(void **state)
{
    static const struct ask one = { 1, .gpu_e4 = 10000, .hold_ms = 600000 };
    uint64_t id = 1;
    struct ledger d;
    struct fl_err err;
    enum fl_status st = FL_INTERNAL;

    (void)state;
    ledger_init(&d, "l3");
    for (unsigned nth = 1; st != FL_OK && nth < 30; nth++) {
        fl_fault_arm(nth);
        st = ledger_prepare(&d, &one, 1, &err);
        if (st == FL_OK)
            st = node_leases_commit(d.leases, &id, 1, &err);
        fl_fault_disarm();
        t_int_eq(node_leases_committed(d.leases, 1), st == FL_OK, "nth=%u", nth);
    }
    t_int_eq(st, FL_OK);
    ledger_fini(&d);
}

static void leases_file_damaged(void **state)
{
    struct ledger d;
    struct leases *none = NULL;
    struct fl_err err;

    (void)state;
    ledger_init(&d, "l4");
    t_ok(fl_file_write(d.path, 0600, "\x0a\xff garbage", 10, &err), &err);
    struct leases_config cfg = { d.path, d.inv, ledger_used, &d };

    t_refused(node_leases_create(d.loop, &cfg, &none, &err), FL_CORRUPT, &err);
    t_has(err.text, d.path);
    ledger_fini(&d);
}

/* ---- room on a disk ---------------------------------------------------------------------------- */
static sem_t answers;
static atomic_int asks;

static int one_answer(const char *path, struct statvfs *v)
{
    (void)path;
    asks++;
    sem_wait(&answers);
    *v = (struct statvfs){ .f_blocks = 100, .f_bavail = 40, .f_frsize = 512 };
    return 0;
}

static Fl__NodeStats told_at(struct node_disk *d, uint64_t s)
{
    Fl__NodeStats out = FL__NODE_STATS__INIT;

    node_disk_fill(d, s * 1000000000ull, &out);
    return out;
}

static void room_is_told_while_it_is_known(void **state)
{
    struct fl_err err;
    struct node_disk *d;

    (void)state;
    sem_init(&answers, 0, 0);
    asks = 0;
    t_int_eq(node_disk_create("/data", one_answer, &d, &err), FL_OK);
    node_disk_look(d, 0);
    node_disk_look(d, 1000000000ull);
    t_true(!told_at(d, 2).has_disk_total, "nothing has been answered");
    sem_post(&answers);
    for (int i = 0; i < 20000 && !told_at(d, 2).has_disk_total; i++)
        usleep(1000);
    t_int_eq(told_at(d, 9).disk_total, 51200);
    t_int_eq(told_at(d, 9).disk_free, 20480);
    t_int_eq(asks, 1, "once at a time");
    node_disk_look(d, 10 * 1000000000ull);
    t_true(told_at(d, 15).has_disk_free, "of the last answer, for five seconds");
    t_true(!told_at(d, 16).has_disk_free && !told_at(d, 16).has_disk_total, "late");
    node_disk_destroy(d); /* the thread has it still */
    sem_post(&answers);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(p23_lists_of_devices),
        cmocka_unit_test(p24_p25_ids_are_translated_once),
        cmocka_unit_test(p24_env_rules),
        cmocka_unit_test(quotas),
        cmocka_unit_test(room_is_told_while_it_is_known),
        cmocka_unit_test(inventories),
        cmocka_unit_test(inventories_of_gpus),
        cmocka_unit_test(inventories_of_fakes),
        cmocka_unit_test(inventories_refused),
        cmocka_unit_test(addresses),
        cmocka_unit_test(ports),
        cmocka_unit_test(ports_of_many),
        cmocka_unit_test(ports_end),
        cmocka_unit_test(ports_of_two_daemons),
        cmocka_unit_test(ports_of_adopted_workers),
        cmocka_unit_test(identity),
        cmocka_unit_test(identity_under_faults),
        cmocka_unit_test(leases_refused),
        cmocka_unit_test(leases_live),
        cmocka_unit_test(leases_under_faults),
        cmocka_unit_test(leases_file_damaged),
    };

    if (argc != 2)
        return 2;
    fake_nvml = argv[1];
    return t_run("node parts", tests);
}
