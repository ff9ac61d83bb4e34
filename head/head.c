#include "head/head.h"

#include <inttypes.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/base/log.h"
#include "head/packages.h"
#include "head/state.h"

enum { BEAT_MS = 1000, SILENT_MS = 15000, IDLE_WAIT_MS = 120000 };

/* ---- the round that does what follows from the tables ---- */

void head_kick(struct head *h)
{
    fl_defer(h->loop, &h->settle);
}

void head_wake_at(struct head *h, uint64_t due_ns)
{
    if (!h->wake.loop || due_ns < h->wake.due_ns)
        fl_timer_arm(h->loop, &h->wake, due_ns);
}

void head_resources_changed(struct head *h)
{
    h->resources++;
}

static void recovered(struct head *h)
{
    if (h->state != HEAD_RECOVERING || h->raising || !nodes_all_in(h))
        return;
    if (h->foreign_to)
        jobs_after_older(h);
    h->state = HEAD_READY;
    fl_info("head is ready term=%" PRIu64 " nodes=%u jobs=%u", h->term.head, HASH_COUNT(h->nodes),
            HASH_CNT(hh, h->jobs) - h->n_jobs_over);
    head_resources_changed(h);
}

static void on_settle(struct fl_task *t)
{
    struct head *h = container_of(t, struct head, settle);

    recovered(h);
    jobs_settle(h);
    groups_settle(h);
    leases_settle(h);
    seats_settle(h);
    head_idle(h);
}

static void on_wake(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    head_kick(container_of(t, struct head, wake));
}

static void on_sweep(struct fl_timer *t, uint64_t now_ns)
{
    struct head *h = container_of(t, struct head, sweep);
    struct job *j, *tmp;

    nodes_sweep(h, now_ns);
    nodes_forget_old(h);
    HASH_ITER (hh, h->jobs, j, tmp)
        if (j->log && j->rec->cleaned && !j->followers)
            joblog_close(j);
    fl_timer_arm_in(h->loop, &h->sweep, h->cfg.beat_ms);
    head_kick(h);
}

/* ---- the end ---- */

static bool work_left(struct head *h)
{
    struct job *j, *tmp;

    HASH_ITER (hh, h->jobs, j, tmp)
        if (!job_over(j) || !j->rec->cleaned)
            return true;
    return false;
}

static bool all_told(struct head *h, uint64_t now_ns)
{
    struct job *j, *tmp;

    HASH_ITER (hh, h->jobs, j, tmp)
        if (!job_told(j, now_ns))
            return false;
    return true;
}

static void shutdown_answered(struct send *t, enum fl_status st, const struct wire_msg *reply,
                              const struct fl_err *err)
{
    (void)reply;
    if (st != FL_OK && st != FL_UNREACHABLE && st != FL_CANCELLED)
        fl_warn("daemon does not shut down why=\"%s\"", err->text);
    head_kick(t->head);
}

/* One that comes back only now hears it as well. */
static void tell_daemons(struct head *h)
{
    Fl__Shutdown m = FL__SHUTDOWN__INIT;
    struct node *n, *tmp;
    struct fl_err err;

    m.why = h->end_why;
    m.has_term_ms = true;
    m.term_ms = h->stop_term_ms;
    HASH_ITER (hh, h->nodes, n, tmp)
        if (n->up && n->state != NODE_JOINING && !n->told_end)
            n->told_end = node_send(n, FL_NODE_SHUTDOWN, &m, HEAD_END_MS,
                                    &(struct send){ .done = shutdown_answered }, &err) == FL_OK;
}

static bool daemons_left(struct head *h)
{
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        if (n->up && n->rec->fate == FL__NODE_FATE__NODE_IN)
            return true;
    return false;
}

static void settle_end(struct head *h, uint64_t now)
{
    bool late = now >= h->end_due_ns;

    if (h->ended)
        return;
    if (!h->end_told) {
        if (work_left(h) && !late) {
            head_wake_at(h, h->end_due_ns);
            return;
        }
        if (late)
            fl_warn("jobs did not end in time, daemons end what is left ms=%d", HEAD_END_MS);
        h->end_told = true;
        h->end_due_ns = now + HEAD_END_MS * 1000000ull;
        late = false;
    }
    tell_daemons(h);
    if ((daemons_left(h) || !all_told(h, now)) && !late) {
        head_wake_at(h, h->end_due_ns);
        head_wake_at(h, now + 100000000);
        return;
    }
    h->ended = true;
    fl_info("head ends why=\"%s\"", h->end_why);
    if (h->cfg.ended)
        h->cfg.ended(h->cfg.arg);
}

void head_idle(struct head *h)
{
    uint64_t now = fl_loop_now_ns(h->loop);

    if (h->state == HEAD_ENDING) {
        settle_end(h, now);
        return;
    }
    if (!h->cfg.until_idle)
        return;
    if (!h->had_jobs) {
        uint64_t due = h->start_ns + h->cfg.idle_wait_ms * 1000000ull;

        if (now >= due)
            head_shutdown(h, "no job came");
        else
            head_wake_at(h, due);
        return;
    }
    if (work_left(h))
        return;
    if (h->requests || !all_told(h, now))
        head_wake_at(h, now + 200000000); /* a follower that never comes back is given up then */
    else
        head_shutdown(h, "its jobs have ended");
}

void head_shutdown(struct head *h, const char *why)
{
    struct job *j, *tmp;
    bool live;

    if (h->state == HEAD_ENDING)
        return;
    (void)FL_COPY(h->end_why, why && why[0] ? why : "asked to");
    fl_info("cluster shuts down why=\"%s\"", h->end_why);
    h->state = HEAD_ENDING;
    h->end_due_ns = fl_loop_now_ns(h->loop) + HEAD_END_MS * 1000000ull;
    HASH_ITER (hh, h->jobs, j, tmp)
        (void)job_stop(h, j, NULL, &live, NULL);
    head_kick(h);
}

/* ---- metrics ---- */

static const struct {
    struct fl_metric_name name;
    size_t at;
} counters[] = {
#define COUNTER(member, text, help_)                                                               \
    {                                                                                              \
        { .kind = FL_COUNTER, .name = text, .help = help_ },                                       \
            offsetof(struct head_counters, member)                                                 \
    }
    COUNTER(submitted, "furlong_jobs_submitted_total", "Jobs taken since the head started"),
    COUNTER(beats, "furlong_node_beats_total", "Beats of daemons heard"),
    COUNTER(placed, "furlong_groups_placed_total", "Placement groups placed"),
    COUNTER(refused, "furlong_groups_refused_total", "Placement groups that can never fit"),
    COUNTER(fenced, "furlong_nodes_fenced_total", "Nodes given up after silence"),
    COUNTER(restarts, "furlong_worker_restarts_total", "Workers and drivers started again"),
    COUNTER(log_bytes, "furlong_job_log_bytes_total", "Bytes of job logs written"),
};

static enum fl_status make_metrics(struct head *h, struct fl_err *err)
{
    FL_TRY(fl_metrics_create(&h->metrics, err));
    for (size_t i = 0; i < FL_LEN(counters); i++)
        FL_TRY(fl_metric(h->metrics, &counters[i].name, NULL, 0,
                         (struct fl_metric **)(void *)((char *)&h->count + counters[i].at), err));
    return FL_OK;
}

/* ---- making it ---- */

static enum fl_status read_boot_id(struct head *h, struct fl_err *err)
{
    char *text = NULL;
    size_t len;

    if (h->cfg.boot_id) {
        (void)FL_COPY(h->boot_id, h->cfg.boot_id);
        return FL_OK;
    }
    FL_TRY(fl_file_read("/proc/sys/kernel/random/boot_id", 64, &text, &len, err));
    text[strcspn(text, "\n")] = '\0';
    (void)FL_COPY(h->boot_id, text);
    free(text);
    return FL_OK;
}

/* Ray's names for them. A value that is none is said once, and the default holds. */
static uint32_t setting(const char *name, int64_t max, uint32_t otherwise)
{
    const char *text = getenv(name);
    struct fl_err err;
    int64_t n;

    if (!text || !*text)
        return otherwise;
    if (fl_parse_i64(text, 0, max, &n, &err) == FL_OK)
        return (uint32_t)n;
    fl_warn("%s is not taken why=\"%s\"", name, err.text);
    return otherwise;
}

static enum fl_status open_journal(struct head *h, struct fl_err *err)
{
    char path[FL_PATH_MAX];
    struct journal_opts opts = {
        .table = head_apply, .n_table = head_apply_n, .state = h, .snapshot = head_snapshot
    };
    struct journal *j = NULL;

    FL_TRY(fl_path(path, err, "%s/head", h->state_dir));
    FL_TRY(fl_mkdirs(path, err));
    FL_TRY(fl_path(path, err, "%s/head/journal.db", h->state_dir));
    FL_TRY(journal_open(h->loop, path, &opts, &j, &h->opened, err));
    h->journal = j;
    h->term = h->opened.term;
    h->first_term = h->term.head;
    if (h->opened.note[0])
        fl_warn("%s", h->opened.note);
    return FL_OK;
}

/* As Ray names its: clients and dashboards show it. */
static void name_session(struct head *h)
{
    struct timespec t;
    struct tm tm;
    char text[32];

    clock_gettime(CLOCK_REALTIME, &t);
    localtime_r(&t.tv_sec, &tm);
    strftime(text, sizeof(text), "%Y-%m-%d_%H-%M-%S", &tm);
    snprintf(h->session, sizeof(h->session), "session_%s_%06ld_%d", text, t.tv_nsec / 1000,
             (int)getpid());
    (void)FL_COPY(h->ray_version, h->cfg.ray_version ? h->cfg.ray_version : HEAD_RAY_VERSION);
    (void)FL_COPY(h->ray_commit, h->cfg.ray_commit ? h->cfg.ray_commit : HEAD_RAY_COMMIT);
}

enum fl_status head_create(struct fl_loop *l, const struct head_config *cfg, struct head **out,
                           struct fl_err *err)
{
    FL_AUTO(head) struct head *h = calloc(1, sizeof(*h));

    if (!h)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the head");
    h->loop = l;
    h->cfg = *cfg;
    h->cfg.beat_ms = cfg->beat_ms ? cfg->beat_ms : BEAT_MS;
    h->cfg.silent_ms = cfg->silent_ms ? cfg->silent_ms : SILENT_MS;
    h->cfg.idle_wait_ms = cfg->idle_wait_ms ? cfg->idle_wait_ms : IDLE_WAIT_MS;
    h->resources = 1;
    h->settle.run = on_settle;
    h->wake.fire = on_wake;
    h->sweep.fire = on_sweep;
    h->start_ns = h->swept_ns = fl_loop_now_ns(l);
    (void)FL_COPY(h->state_dir, cfg->state_dir);
    (void)FL_COPY(h->node_ip, cfg->node_ip ? cfg->node_ip : "127.0.0.1");
    (void)FL_COPY(h->token, cfg->token ? cfg->token : "");
    (void)FL_COPY(h->ray_token, cfg->ray_token ? cfg->ray_token : "");
    head_addresses(h, cfg->rpc, cfg->http);
    FL_TRY(make_metrics(h, err));
    FL_TRY(read_boot_id(h, err));
    FL_TRY(fl_path(h->logs_dir, err, "%s/logs", h->state_dir));
    FL_TRY(fl_mkdirs(h->logs_dir, err));
    h->stop_term_ms = 1000 * setting("RAY_JOB_STOP_WAIT_TIME_S", 86400, HEAD_STOP_TERM_MS / 1000);
    h->late_ms = setting("FURLONG_LATE_MS", 86400000, HEAD_LATE_MS);
    h->job_start_s = setting("RAY_JOB_START_TIMEOUT_SECONDS", 86400 * 365, HEAD_JOB_START_S);
    FL_TRY(packages_create(h, &h->packages, err));
    FL_TRY(open_journal(h, err));
    name_session(h);
    nodes_await(h);
    fl_timer_arm_in(l, &h->sweep, h->cfg.beat_ms);
    h->had_jobs = h->jobs != NULL;
    head_kick(h);
    *out = FL_TAKE(h);
    return FL_OK;
}

void head_destroy(struct head *h)
{
    if (!h)
        return;
    fl_timer_cancel(&h->sweep);
    dials_end(h);
    uplinks_destroy(h);
    journal_destroy(h->journal); /* what waited for it is answered, to streams that are gone */
    h->journal = NULL;
    h->pushing = true; /* nothing is told any more */
    tables_free(h);
    packages_destroy(h->packages);
    fl_timer_cancel(&h->wake);
    if (h->loop)
        fl_task_cancel(h->loop, &h->settle);
    fl_metrics_destroy(h->metrics);
    explicit_bzero(h->token, sizeof(h->token));
    explicit_bzero(h->ray_token, sizeof(h->ray_token));
    free(h);
}

void head_addresses(struct head *h, const char *rpc, const char *http)
{
    (void)FL_COPY(h->rpc, rpc ? rpc : "");
    (void)FL_COPY(h->http, http ? http : "");
}

const struct fl_term *head_term(const struct head *h)
{
    return &h->term;
}

void head_on_term(struct head *h, void (*term_changed)(void *arg, const struct fl_term *term),
                  void *arg)
{
    h->term_changed = term_changed;
    h->term_arg = arg;
}

struct wire_hello head_hello(const struct head *h)
{
    struct wire_hello me = { .term = h->term, .role = "head" };

    (void)FL_COPY(me.build, FURLONG_VERSION);
    return me;
}
