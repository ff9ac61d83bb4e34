#include "tests/web/crowd.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/t.h"

#define GIB (1ull << 30)

const char crowd_evil[] =
    "<img src=x "
    "onerror=\"document.title='owned'\">\"'&lt;\xe2\x80\xae<script>document.title='owned'</script>";

static char *text(const char *s)
{
    return (char *)(uintptr_t)s;
}

static void record(struct head *h, enum rec_kind kind, const void *m)
{
    struct fl_err err = { 0 };

    t_ok(head_record(h, kind, m, NULL, &err), &err);
}

static struct fl_node_id node_id(unsigned i)
{
    return (struct fl_node_id){ { 'n', (uint8_t)(i >> 8), (uint8_t)i } };
}

static struct fl_job_id job_id(unsigned i)
{
    return (struct fl_job_id){ { 0, 0, (uint8_t)(i >> 8), (uint8_t)i } };
}

static struct fl_worker_id worker_id(unsigned i)
{
    return (struct fl_worker_id){ { 'w', (uint8_t)(i >> 8), (uint8_t)i } };
}

static const struct fl_group_id the_group = { "a group" };

/* ---- nodes ---- */

static void make_node(struct head *h, unsigned i)
{
    Fl__NodeRec rec = FL__NODE_REC__INIT;
    Fl__NodeRef who = FL__NODE_REF__INIT;
    Fl__Inventory inv = FL__INVENTORY__INIT;
    Fl__Amount a[3] = { FL__AMOUNT__INIT, FL__AMOUNT__INIT, FL__AMOUNT__INIT },
               *total[3] = { &a[0], &a[1], &a[2] };
    Fl__Device d[2] = { FL__DEVICE__INIT, FL__DEVICE__INIT }, *devices[2] = { &d[0], &d[1] };
    Fl__Label l = FL__LABEL__INIT, *labels[1] = { &l };
    struct fl_node_id id = node_id(i);
    char name[256], address[32];

    snprintf(name, sizeof(name), i == 3 ? "n%u %s" : "n%u", i, crowd_evil);
    snprintf(address, sizeof(address), "10.1.%u.%u", i >> 8, i & 255);
    who.id = BYTES_OF(id);
    who.start = 1;
    a[0].name = text("CPU"), a[0].e4 = 64 * PLACEMENT_ONE;
    a[1].name = text("GPU"), a[1].e4 = 2 * PLACEMENT_ONE;
    a[2].name = text("memory"), a[2].e4 = (int64_t)(512 * GIB) * PLACEMENT_ONE;
    d[0].id = text("0"), d[1].id = text("1");
    d[0].uuid = text("GPU-5b4f2a10-aaaa"), d[1].uuid = text("GPU-5b4f2a10-bbbb");
    d[0].has_memory_bytes = d[1].has_memory_bytes = true;
    d[0].memory_bytes = d[1].memory_bytes = 139 * GIB;
    l.key = text("rack"), l.value = text(i == 3 ? crowd_evil : "r1");
    inv.total = total, inv.n_total = 3;
    inv.devices = devices, inv.n_devices = 2;
    inv.labels = labels, inv.n_labels = 1;
    rec.who = &who;
    rec.name = name;
    rec.address = address;
    rec.boot_id = text("boot");
    rec.inventory = &inv;
    record(h, REC_NODE, &rec);

    struct node *n = node_find(h, &id);
    n->state = i % 97 == 5 ? NODE_SUSPECT : NODE_READY;
    n->reported = true;
    n->beat_ns = fl_loop_now_ns(h->loop);
    n->load_e2 = 50 + i % 900;
    n->memory_available = i == 7 ? 0 : (i == 11 ? 3 : 100 + i * 37 % 400) * GIB;
}

/* ---- jobs ---- */

static void make_job(struct head *h, unsigned i, const char *name, Fl__JobStatus status)
{
    Fl__JobRec rec = FL__JOB_REC__INIT;
    struct fl_job_id id = job_id(i);
    struct fl_worker_id driver = worker_id(i);
    uint8_t key[32] = { 0 };
    char command[512];

    snprintf(command, sizeof(command), "python3 train.py --number=%u%s%s", i, i == 2 ? " " : "",
             i == 2 ? crowd_evil : "");
    rec.id = BYTES_OF(id);
    rec.key = BYTES_OF(key);
    rec.submission_id = text(name);
    rec.entrypoint = command;
    rec.status = status;
    rec.has_start_ms = rec.has_attempt = true;
    rec.start_ms = 1790000000000ull + i * 61000;
    rec.attempt = 1;
    rec.has_cleaned = rec.cleaned = status >= FL__JOB_STATUS__JOB_STOPPED;
    rec.has_end_ms = rec.has_exit_code = rec.cleaned;
    rec.end_ms = rec.start_ms + 1000 + i * 977 % 90000;
    rec.exit_code = status == FL__JOB_STATUS__JOB_FAILED ? 1 : 0;
    rec.message = text(i == 2                                 ? crowd_evil
                       : status == FL__JOB_STATUS__JOB_FAILED ? "driver 0 on n1: exit code 1"
                                                              : NULL);
    rec.run_dir = text(i == 2 ? crowd_evil : NULL);
    if (status == FL__JOB_STATUS__JOB_RUNNING) {
        rec.has_driver = true;
        rec.driver = BYTES_OF(driver);
    }
    record(h, REC_JOB, &rec);
}

static void make_seat(struct head *h, unsigned of_job, unsigned number, const char *role,
                      unsigned rank, unsigned node, bool grouped)
{
    Fl__SeatRec rec = FL__SEAT_REC__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    Fl__NodeRef at = FL__NODE_REF__INIT;
    struct fl_worker_id id = worker_id(number);
    struct fl_job_id job = job_id(of_job);
    struct fl_node_id node_at = node_id(node);
    ProtobufCBinaryData key = BYTES_OF(id);

    who.worker = key;
    who.attempt = 1;
    at.id = BYTES_OF(node_at);
    at.start = 1;
    rec.who = &who;
    rec.job = BYTES_OF(job);
    rec.role = text(role);
    rec.rank = rank;
    rec.world = 2;
    rec.state = FL__SEAT_STATE__SEAT_LIVE;
    rec.has_group = grouped;
    rec.group = BYTES_OF(the_group);
    rec.at = &at;
    rec.has_job_attempt = true;
    rec.job_attempt = 1;
    record(h, REC_SEAT, &rec);
    struct seat *s = seat_of(h, &key);
    s->started = s->joined = true;
    s->pid = 4000 + (int)number;
}

/* ---- a placed group of two bundles, colocated: both sides on both devices of node 0 ---- */

static void make_lease(struct head *h, unsigned of_job, unsigned i)
{
    Fl__Lease l = FL__LEASE__INIT;
    Fl__Term by = FL__TERM__INIT;
    Fl__NodeRef at = FL__NODE_REF__INIT;
    Fl__Amount a = FL__AMOUNT__INIT, *amounts[1] = { &a };
    struct fl_node_id node = node_id(0);
    struct fl_job_id job = job_id(of_job);
    uint32_t device = i;

    by.cluster = BYTES_OF(h->term.cluster);
    by.head = h->term.head;
    at.id = BYTES_OF(node);
    at.start = 1;
    l.id = i + 1;
    l.by = &by;
    l.at = &at;
    l.group = BYTES_OF(the_group);
    l.job = BYTES_OF(job);
    l.has_bundle = l.has_state = true;
    l.bundle = i;
    l.state = FL__LEASE_STATE__COMMITTED;
    a.name = text("GPU");
    a.e4 = PLACEMENT_ONE;
    l.amounts = amounts, l.n_amounts = 1;
    l.devices = &device, l.n_devices = 1;
    record(h, REC_LEASE, &l);
    lease_of(h, i + 1)->acked = true;
}

static void make_group(struct head *h, unsigned of_job)
{
    Fl__GroupRec g = FL__GROUP_REC__INIT;
    Fl__BundleRec b[2] = { FL__BUNDLE_REC__INIT, FL__BUNDLE_REC__INIT },
                  *bundles[2] = { &b[0], &b[1] };
    Fl__Layout y = FL__LAYOUT__INIT;
    Fl__LayoutRank r[4], *ranks[4];
    uint32_t which[2] = { 0, 1 };
    struct fl_job_id job = job_id(of_job);
    char table[512];

    for (unsigned i = 0; i < 2; i++) {
        make_lease(h, of_job, i);
        b[i].has_lease = true;
        b[i].lease = i + 1;
    }
    for (unsigned i = 0; i < 4; i++) {
        r[i] = (Fl__LayoutRank)FL__LAYOUT_RANK__INIT;
        r[i].role = text(i < 2 ? "trainer" : "rollout");
        r[i].rank = i % 2;
        r[i].world = r[i].local_world = 2;
        r[i].node = text("n0");
        r[i].address = text("10.1.0.0");
        r[i].bundles = &which[i % 2], r[i].n_bundles = 1;
        ranks[i] = &r[i];
    }
    snprintf(table, sizeof(table), "role     rank  node  devices\ntrainer     0  n0    0\n%s\n",
             crowd_evil);
    y.group = g.id = BYTES_OF(the_group);
    y.master_addr = text("10.1.0.0");
    y.ranks = ranks, y.n_ranks = 4;
    y.text = table;
    g.job = BYTES_OF(job);
    g.state = FL__GROUP_STATE__GROUP_PLACED;
    g.bundles = bundles, g.n_bundles = 2;
    g.layout = &y;
    record(h, REC_GROUP, &g);
    for (unsigned i = 0; i < 2; i++) {
        Fl__RoleRec role = FL__ROLE_REC__INIT;
        Fl__Launch launch = FL__LAUNCH__INIT;

        launch.group = BYTES_OF(the_group);
        launch.role = text(i ? "rollout" : "trainer");
        role.launch = &launch;
        role.world = 2;
        record(h, REC_ROLE, &role);
    }
}

static void add_step(struct job *j, const char *json)
{
    struct fl_err err = { 0 };

    t_ok(steps_add(j, json, &err), &err);
}

static void make_steps(struct job *j)
{
    char json[2048];

    for (unsigned i = 0; i < CROWD_STEPS; i++) {
        double train = 1.9 + 0.2 * sin(i * 0.9), roll = 2.6 + 0.5 * cos(i * 0.7),
               up = 0.04 + 0.01 * sin(i);

        snprintf(
            json, sizeof(json),
            "{\"step\":%u,\"reward_mean\":%.4f,\"eval_reward_mean\":%s,\"response_len_mean\":412.5,"
            "\"weights_version\":%u,\"train_rollout_logprob_abs_diff\":%.6f,\"transfer_mode\":\"%"
            "s\","
            "\"engines_updated\":%u,\"engines_left_behind\":%u,\"perf/step_time\":%.4f,"
            "\"perf/rollout_time\":%.4f,\"perf/train_time\":%.4f,\"perf/update_weights_time\":%.4f,"
            "\"perf/wake_up_time\":0.09,\"perf/sleep_time\":0.06,\"perf/save_model_time\":%s,"
            "\"perf/update_weights_move_time\":%.5f,\"perf/update_weights_pause_time\":0.0021,"
            "\"perf/update_weights_predicted_time\":0.035,\"perf/"
            "update_weights_bytes\":17179869184,"
            "\"clean\":%s,\"unclean_why\":{%s}}",
            i, 0.9 - 0.85 * exp(-(i / 20.0)), i % 10 == 9 ? "0.5" : "null", i + 1,
            2e-4 + 1e-4 * sin(i * 1.3), i % 2 ? "share" : "p2p", i == 41 ? 1 : 2, i == 41,
            train + roll + up + 0.4, roll, train, up, i % 20 == 19 ? "0.7" : "0.0", up * 0.9,
            i == 41 ? "false" : "true",
            i == 41 ? "\"update_weights\":\"1 left behind: rollout 1 on n0, bucket 3 of 33, "
                      "<b>late</b>\""
                    : "");
        add_step(j, json);
    }
    snprintf(json, sizeof(json),
             "{\"step\":%d,\"reward_mean\":null,\"<b>key</b>\":\"<i>value</i>\"}", CROWD_STEPS);
    add_step(j, json);
}

void crowd_make(struct head *h, unsigned nodes, unsigned jobs)
{
    static const Fl__JobStatus often[] = { FL__JOB_STATUS__JOB_SUCCEEDED,
                                           FL__JOB_STATUS__JOB_SUCCEEDED,
                                           FL__JOB_STATUS__JOB_FAILED,
                                           FL__JOB_STATUS__JOB_STOPPED };
    char name[64];

    for (unsigned i = 0; i < nodes; i++)
        make_node(h, i);
    for (unsigned i = 1; i < jobs; i++) {
        snprintf(name, sizeof(name), "job-%u", i);
        make_job(h, i, name, often[i % FL_LEN(often)]);
    }
    if (!nodes || !jobs)
        return;
    make_job(h, jobs, "train-live", FL__JOB_STATUS__JOB_RUNNING);
    make_group(h, jobs);
    make_seat(h, jobs, jobs, "driver", 0, nodes > 1 ? 1 : 0, false);
    make_seat(h, jobs, jobs + 1, "trainer", 0, 0, true);
    make_seat(h, jobs, jobs + 2, "rollout", 0, 0, true);
    make_seat(h, jobs, jobs + 3, "rollout", 1, 0, true);
    make_steps(job_named(h, "train-live"));
    joblog_note(job_named(h, "train-live"), "%s", crowd_evil);
    joblog_note(job_named(h, "train-live"), "plain \033[31mred\033[0m text");
    joblog_note(job_named(h, "train-live"), "10%%\r 90%%\r100%% done");
}
