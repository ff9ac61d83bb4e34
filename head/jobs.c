#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <time.h>

#include "common/base/log.h"
#include "head/state.h"

enum { LAST_LINES = 10, LAST_BYTES = 20000 };

const char *job_status_name(Fl__JobStatus s)
{
    static const char *const names[] = { "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED" };

    return (unsigned)s < FL_LEN(names) ? names[s] : "?";
}

static uint64_t wall_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t); /* shown to people; nothing is decided by it */
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

struct seat *job_driver(struct job *j)
{
    return j->rec->has_driver ? seat_of(j->head, &j->rec->driver) : NULL;
}

/* ---- submitting ---- */

static enum fl_status make_name(char out[64], struct fl_err *err)
{
    static const char letters[] = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ123456789";
    uint8_t r[16];

    FL_TRY(fl_random(r, sizeof(r), err));
    strcpy(out, "raysubmit_");
    for (size_t i = 0; i < sizeof(r); i++)
        out[10 + i] = letters[r[i] % (sizeof(letters) - 1)];
    out[26] = '\0';
    return FL_OK;
}

/* It names files, and is a part of paths and of lines for people. */
static enum fl_status check_name(struct head *h, const char *name, struct fl_err *err)
{
    bool good = name[0] && name[0] != '.' && strlen(name) <= 63;

    for (const char *p = name; *p; p++)
        good &= (unsigned char)*p >= ' ' && *p != '/' && *p != '\\' && *p != 0x7f;
    if (!good)
        return fl_fail(err, FL_INVALID,
                       "submission_id \"%.80s\" must have 1 to 63 bytes, no control characters, no "
                       "'/' and no '\\', and not begin with '.'",
                       name);
    if (job_named(h, name))
        return fl_fail(err, FL_EXISTS,
                       "Job with submission_id %s already exists. Please use a "
                       "different submission_id.",
                       name);
    return FL_OK;
}

enum fl_status job_submit(struct head *h, const struct job_ask *ask, struct after *then,
                          char submission_id[64], struct fl_err *err)
{
    Fl__JobRec rec = FL__JOB_REC__INIT;
    uint32_t number = (uint32_t)(h->next_job ? h->next_job : 1);
    uint8_t id[4] = { (uint8_t)(number >> 24), (uint8_t)(number >> 16), (uint8_t)(number >> 8),
                      (uint8_t)number };
    uint8_t key[32];
    enum fl_status st = FL_OK;

    if (h->state == HEAD_ENDING)
        st = fl_fail(err, FL_CANCELLED, "this cluster is being shut down");
    if (st == FL_OK)
        st = journal_accepts(h->journal, err);
    if (st == FL_OK && HASH_CNT(hh, h->jobs) - h->n_jobs_over >= HEAD_JOBS_LIVE)
        st = fl_fail(
            err, FL_EXHAUSTED,
            "%d jobs wait or run already, which is the most; submit again when one has ended",
            HEAD_JOBS_LIVE);
    if (st == FL_OK && !ask->submission_id)
        st = make_name(submission_id, err);
    else if (st == FL_OK && (st = check_name(h, ask->submission_id, err)) == FL_OK)
        (void)fl_copy(submission_id, 64, ask->submission_id);
    if (st == FL_OK)
        st = fl_random(key, sizeof(key), err);
    if (st != FL_OK) {
        free(then);
        return st;
    }
    rec.id = BYTES_OF(id);
    rec.submission_id = submission_id;
    rec.entrypoint = (char *)(uintptr_t)ask->entrypoint;
    rec.status = FL__JOB_STATUS__JOB_PENDING;
    rec.key = BYTES_OF(key);
    rec.metadata = (char *)(uintptr_t)ask->metadata;
    rec.runtime_env = (char *)(uintptr_t)ask->runtime_env;
    rec.env = (Fl__EnvVar **)(uintptr_t)ask->env;
    rec.n_env = ask->n_env;
    rec.cwd = (char *)(uintptr_t)ask->cwd;
    rec.run_dir = (char *)(uintptr_t)ask->run_dir;
    rec.has_driver_restarts = rec.has_attempt = rec.has_start_ms = true;
    rec.driver_restarts = ask->driver_restarts;
    rec.attempt = 1;
    rec.start_ms = wall_ms();
    rec.wants = (Fl__Amount **)(uintptr_t)ask->wants;
    rec.n_wants = ask->n_wants;
    rec.labels = (Fl__Label **)(uintptr_t)ask->labels;
    rec.n_labels = ask->n_labels;
    rec.working_dir = (char *)(uintptr_t)ask->working_dir;
    rec.py_modules = (char **)(uintptr_t)ask->py_modules;
    rec.n_py_modules = ask->n_py_modules;
    rec.has_off_head = rec.off_head = ask->off_head;
    rec.ports = (char **)(uintptr_t)ask->ports;
    rec.n_ports = ask->n_ports;
    st = head_record(h, REC_JOB, &rec, then, err);
    explicit_bzero(key, sizeof(key));
    FL_TRY(st);
    h->had_jobs = true;
    fl_metric_add(h->count.submitted, 1);
    fl_info("job submitted job=%s", submission_id);
    head_kick(h);
    return FL_OK;
}

enum fl_status job_stop(struct head *h, struct job *j, struct after *then, bool *live,
                        struct fl_err *err)
{
    Fl__JobRec rec = *j->rec;

    *live = !job_over(j);
    if (!*live || j->rec->stop_asked) {
        if (then)
            head_after(then);
        return FL_OK;
    }
    rec.has_stop_asked = rec.stop_asked = true;
    FL_TRY(head_record(h, REC_JOB, &rec, then, err));
    fl_info("job is to stop job=%s", j->rec->submission_id);
    head_kick(h);
    return FL_OK;
}

enum fl_status job_ask_delete(struct head *h, struct job *j, struct after *then, struct fl_err *err)
{
    Fl__JobRec rec = *j->rec;

    rec.has_delete_asked = rec.delete_asked = true;
    FL_TRY(head_record(h, REC_JOB, &rec, then, err));
    fl_info("job is to be forgotten job=%s", j->rec->submission_id);
    head_kick(h);
    return FL_OK;
}

bool job_wants_resources(const struct job *j)
{
    return j->rec->n_wants || j->rec->n_labels;
}

/* "job_submission_id" and "job_name" come first: the user's own metadata may name them anew. */
char *job_config_json(const struct job *j)
{
    const Fl__JobRec *r = j->rec;
    json_t *env = r->runtime_env ? json_loads(r->runtime_env, 0, NULL) : NULL;
    json_t *own = r->metadata ? json_loads(r->metadata, 0, NULL) : NULL;
    json_t *meta =
        json_pack("{s:s,s:s}", "job_submission_id", r->submission_id, "job_name", r->submission_id);

    env = env ? env : json_object();
    if (!json_is_object(json_object_get(env, "env_vars")))
        json_object_set_new(env, "env_vars", json_object());
    if (job_wants_resources(j))
        json_object_set_new(json_object_get(env, "env_vars"), "RAY_worker_niceness",
                            json_string("0"));
    if (own)
        json_object_update(meta, own);
    json_decref(own);
    json_t *all = json_pack("{s:o,s:o}", "runtime_env", env, "metadata", meta);
    char *text = json_dumps(all, JSON_COMPACT);
    json_decref(all);
    return text;
}

/* ---- ending ---- */

static void finish_signalled(struct job *j, Fl__JobStatus status, const int32_t *exit_code,
                             int signal, const char *error_type, const char *message)
{
    Fl__JobRec rec = *j->rec;
    struct fl_err err;

    rec.status = status;
    rec.has_end_ms = true;
    rec.end_ms = wall_ms();
    rec.has_exit_code = exit_code != NULL;
    rec.exit_code = exit_code ? *exit_code : 0;
    rec.has_exit_signal = signal != 0;
    rec.exit_signal = signal;
    rec.error_type = (char *)(uintptr_t)error_type;
    rec.message = (char *)(uintptr_t)message;
    if (head_record(j->head, REC_JOB, &rec, NULL, &err) != FL_OK)
        return; /* what leads here is still so at the next turn */
    fl_info("job ended job=%s status=%s exit_code=%d", j->rec->submission_id,
            job_status_name(status), exit_code ? *exit_code : -1);
    followers_wake(j);
    head_kick(j->head);
}

static void finish(struct job *j, Fl__JobStatus status, const int32_t *exit_code,
                   const char *error_type, const char *message)
{
    finish_signalled(j, status, exit_code, 0, error_type, message);
}

/* As if the log were Ray's, which begins with two lines of its own. */
static void last_lines(struct job *j, struct fl_str *out)
{
    struct fl_str own = FL_STR_HEAP(LAST_BYTES), top = FL_STR_HEAP(128 << 10);
    unsigned n = 0;

    joblog_tail(j, &own, LAST_LINES);
    for (size_t i = 0; i < own.len; i++)
        n += own.data[i] == '\n' || i + 1 == own.len;
    if (n < LAST_LINES) {
        const char *from;

        joblog_preamble(j, &top);
        from = fl_str_text(&top);
        if (n == LAST_LINES - 1)
            from = strchr(from, '\n') ? strchr(from, '\n') + 1 : from;
        fl_str_add_bytes(out, from, strlen(from));
    }
    fl_str_add_bytes(out, fl_str_text(&own), own.len);
    if (out->len > LAST_BYTES) {
        memmove(out->data, out->data + out->len - LAST_BYTES, LAST_BYTES + 1);
        out->len = LAST_BYTES;
    }
    fl_str_fini(&own);
    fl_str_fini(&top);
}

static void fail_with_log(struct job *j, const Fl__Exit *x)
{
    struct fl_str text = FL_STR_HEAP(LAST_BYTES + (128 << 10) + 512);
    int32_t code = x->cause == EXIT_EXITED ? x->code : x->signal ? 128 + x->signal : 1;
    const char *type = "JOB_ENTRYPOINT_COMMAND_ERROR";

    if (x->cause == EXIT_FENCED || x->cause == EXIT_KEEPER_LOST) {
        fl_str_add(&text, "Job supervisor actor died: %s", x->why ? x->why : "how is not known");
        type = "JOB_SUPERVISOR_ACTOR_DIED";
    } else if (x->cause == EXIT_SETUP_FAILED) {
        fl_str_add(&text, "runtime_env setup failed: %s", x->why ? x->why : "why is not known");
        joblog_note(j, "%s", fl_str_text(&text));
        type = "RUNTIME_ENV_SETUP_FAILURE";
        finish(j, FL__JOB_STATUS__JOB_FAILED, NULL, type, fl_str_text(&text));
        fl_str_fini(&text);
        return;
    } else if (x->cause == EXIT_EXEC_FAILED) {
        fl_str_add(&text, "%s", x->why ? x->why : "the entrypoint could not be started");
        type = "JOB_ENTRYPOINT_COMMAND_START_ERROR";
    } else {
        struct fl_str last = FL_STR_HEAP(LAST_BYTES + (128 << 10));

        last_lines(j, &last);
        fl_str_add(&text, "Job entrypoint command failed with exit code %d",
                   x->signal ? -x->signal : code); /* as Python counts them */
        if (last.len)
            fl_str_add(&text, ", last available logs (truncated to 20,000 chars):\n%s",
                       fl_str_text(&last));
        else
            fl_str_add(&text, ". No logs available.");
        if (x->cause != EXIT_EXITED && x->cause != EXIT_SIGNALLED && x->why)
            fl_str_add(&text, "\n%s", x->why);
        fl_str_fini(&last);
    }
    finish_signalled(j, FL__JOB_STATUS__JOB_FAILED, &code, x->signal, type, fl_str_text(&text));
    fl_str_fini(&text);
}

static void driver_again(struct job *j, struct seat *d)
{
    Fl__JobRec rec = *j->rec;
    struct head *h = j->head;
    uint32_t n = j->rec->attempt > 0 ? j->rec->attempt - 1 : 0;
    uint64_t wait_ms = (uint64_t)HEAD_DRIVER_BACKOFF_MS << (n < 10 ? n : 10);
    struct fl_err err;

    if (wait_ms > HEAD_DRIVER_BACKOFF_MAX_MS)
        wait_ms = HEAD_DRIVER_BACKOFF_MAX_MS;
    rec.attempt = j->rec->attempt + 1;
    if (head_record(h, REC_JOB, &rec, NULL, &err) != FL_OK ||
        seat_again(d, d->rec->restarts + 1, &err) != FL_OK)
        return;
    d->ready_ns = fl_loop_now_ns(h->loop) + wait_ms * 1000000;
    fl_metric_add(h->count.restarts, 1);
    joblog_note(j, "%s; it starts again as attempt %u of %u in %.1f s",
                d->rec->exit && d->rec->exit->why ? d->rec->exit->why : "the driver has ended",
                j->rec->attempt, j->rec->driver_restarts + 1, (double)wait_ms / 1000);
    fl_info("driver starts again job=%s attempt=%u of=%u in_ms=%" PRIu64, j->rec->submission_id,
            j->rec->attempt, j->rec->driver_restarts + 1, wait_ms);
    head_kick(h);
}

/* On disk with the job: a head that starts anew does not give the whole budget once more. */
enum fl_status job_used_up(const struct seat *member, const char *why)
{
    struct job *j = member->job;
    Fl__JobRec rec = *j->rec;
    char text[320];
    struct fl_err err;

    if (rec.used_up)
        return FL_OK;
    snprintf(text, sizeof(text), "%s %u has used its restarts; %s", member->rec->role,
             member->rec->rank, why);
    rec.used_up = text;
    if (head_record(j->head, REC_JOB, &rec, NULL, &err) == FL_OK)
        return FL_OK;
    head_wake_at(j->head, fl_loop_now_ns(j->head->loop) + HEAD_RETRY_MS * 1000000ull);
    return err.status;
}

/* Exit code 2: what the driver was given is wrong, and would be the next time too. */
static bool refused(const Fl__Exit *x)
{
    return x && x->cause == EXIT_EXITED && x->code == 2;
}

/* Where a member has used up its restarts, a driver that began anew would only multiply them. */
static void driver_over(struct job *j, struct seat *d)
{
    bool again = d->rec->restarts < j->rec->driver_restarts && !j->head->foreign_to;
    const Fl__Exit *x = d->rec->exit;
    int32_t ok = 0;

    if (j->rec->stop_asked)
        finish(j, FL__JOB_STATUS__JOB_STOPPED, NULL, NULL, "Job was intentionally stopped.");
    else if (x && x->cause == EXIT_EXITED && x->code == 0)
        finish(j, FL__JOB_STATUS__JOB_SUCCEEDED, &ok, NULL, "Job finished successfully.");
    else if (again && !refused(x) && !j->rec->used_up)
        driver_again(j, d);
    else if (x) {
        if (again && j->rec->used_up)
            joblog_note(j, "the driver is not started again: %s", j->rec->used_up);
        fail_with_log(j, x);
    }
}

/* Its workers are stopped by seats.c as soon as it is over; here its groups, and the last word. */
static void clean(struct head *h, struct job *j)
{
    Fl__JobRec rec = *j->rec;
    struct group *g, *gtmp;
    struct seat *s, *stmp;
    struct fl_err err;
    bool none = true;

    HASH_ITER (hh, h->groups, g, gtmp) {
        if (g->job != j)
            continue;
        none = false;
        if (g->rec->state != FL__GROUP_STATE__GROUP_ENDING)
            (void)group_end(h, g, NULL, &err);
    }
    HASH_ITER (hh, h->seats, s, stmp)
        none &= s->job != j || (s->rec->state == FL__SEAT_STATE__SEAT_CLOSED && !s->rec->ending);
    if (!none)
        return;
    rec.has_cleaned = rec.cleaned = true;
    if (head_record(h, REC_JOB, &rec, NULL, &err) == FL_OK)
        head_kick(h);
}

/* ---- starting ---- */

/* It waits from when this head had it first. */
static bool waited_out(struct head *h, struct job *j)
{
    uint64_t due = j->pending_ns + h->job_start_s * 1000000000ull;
    struct fl_str text = FL_STR_HEAP(1024);

    if (j->rec->status != FL__JOB_STATUS__JOB_PENDING || h->state != HEAD_READY)
        return false;
    if (fl_loop_now_ns(h->loop) < due) {
        head_wake_at(h, due);
        return false;
    }
    fl_str_add(&text,
               "Job supervisor actor failed to start within %u seconds. This timeout can be "
               "configured by setting the environment variable RAY_JOB_START_TIMEOUT_SECONDS.",
               h->job_start_s);
    if (j->rec->n_wants)
        fl_str_add(&text, " This may be because the job entrypoint's specified resources "
                          "(entrypoint_num_cpus, entrypoint_num_gpus, entrypoint_resources, "
                          "entrypoint_memory)aren't available on the cluster. Try checking the "
                          "cluster's available resources with `ray status` and specifying fewer "
                          "resources for the job entrypoint.");
    finish(j, FL__JOB_STATUS__JOB_FAILED, NULL, "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
           fl_str_text(&text));
    fl_str_fini(&text);
    return true;
}

/* True when the driver's own resources are there, or it asked for none. */
static bool has_room(struct head *h, struct job *j)
{
    struct group *g = j->rec->has_group ? group_of(h, &j->rec->group) : NULL;
    Fl__BundleRec bundle = FL__BUNDLE_REC__INIT, *bundles = &bundle;
    Fl__GroupRec like = FL__GROUP_REC__INIT;
    Fl__JobRec rec = *j->rec;
    struct fl_err err;

    if (!job_wants_resources(j))
        return true;
    if (g)
        return g->rec->state == FL__GROUP_STATE__GROUP_PLACED && !bundle_lost(g->rec);
    bundle.wants = j->rec->wants;
    bundle.n_wants = j->rec->n_wants;
    bundle.must = j->rec->labels;
    bundle.n_must = j->rec->n_labels;
    like.bundles = &bundles;
    like.n_bundles = 1;
    like.has_driver = like.driver = true;
    like.has_strategy = true;
    like.strategy = PLACEMENT_PACK;
    if (group_make(h, j, &like, &g, &err) != FL_OK)
        return false;
    rec.has_group = true;
    rec.group = g->rec->id;
    (void)head_record(h, REC_JOB, &rec, NULL, &err);
    return false;
}

bool node_is_heads(const struct node *n)
{
    return strcmp(n->rec->boot_id, n->head->boot_id) == 0 &&
           strcmp(n->rec->address, n->head->node_ip) == 0;
}

bool job_may_run_on(const struct job *j, const struct node *n)
{
    return n->state == NODE_READY && n->up && !(j->rec->off_head && node_is_heads(n));
}

static bool any_node_takes_driver(const struct job *j)
{
    struct node *n, *tmp;

    HASH_ITER (hh, j->head->nodes, n, tmp)
        if (job_may_run_on(j, n))
            return true;
    return false;
}

bool job_waits(const struct job *j, struct fl_str *why)
{
    struct group *g = j->rec->has_group ? group_of(j->head, &j->rec->group) : NULL;

    if (j->rec->status != FL__JOB_STATUS__JOB_PENDING)
        return false;
    if (j->head->state == HEAD_RECOVERING)
        fl_str_add(why,
                   "the head has just started and waits for the nodes that it knows to report");
    else if (g && g->why[0] && g->rec->state == FL__GROUP_STATE__GROUP_PENDING)
        fl_str_add(why, "%s%s", g->why, g->wait == WAIT_NODES ? "; it waits for other nodes" : "");
    else if (!any_node_takes_driver(j))
        fl_str_add(why, j->rec->off_head
                            ? "no node but the head's own is there, and --off-head was asked"
                            : "no node is there");
    else
        fl_str_add(why, "it is being started");
    return true;
}

static void make_driver(struct head *h, struct job *j)
{
    Fl__JobRec rec = *j->rec;
    struct fl_worker_id id;
    struct fl_err err;

    if (!has_room(h, j))
        return;
    if (!j->rec->has_driver) { /* the id first: two seats could otherwise come of one failure */
        if (fl_random(&id, sizeof(id), &err) != FL_OK)
            return;
        rec = *j->rec;
        rec.has_driver = true;
        rec.driver = BYTES_OF(id);
        if (head_record(h, REC_JOB, &rec, NULL, &err) != FL_OK)
            return;
    }
    memcpy(&id, j->rec->driver.data, sizeof(id));
    if (seat_make(h, j, NULL, "driver", 0, 1, &id, &err) == FL_OK)
        head_kick(h);
}

static void say_running(struct job *j, struct seat *d)
{
    Fl__JobRec rec = *j->rec;
    struct node *n = seat_node(d);
    char id[2 * sizeof(struct fl_node_id) + 1] = "";
    struct fl_err err;

    rec.status = FL__JOB_STATUS__JOB_RUNNING;
    if (n) {
        FL_HEX(n->id, id);
        rec.driver_node = id;
        rec.driver_address = n->rec->address;
    }
    rec.has_driver_pid = d->pid != 0;
    rec.driver_pid = d->pid;
    if (head_record(j->head, REC_JOB, &rec, NULL, &err) == FL_OK)
        followers_wake(j);
}

static bool no_node_left(struct head *h)
{
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        if (n->rec->fate == FL__NODE_FATE__NODE_IN)
            return false;
    return h->nodes != NULL;
}

static void settle(struct head *h, struct job *j)
{
    struct seat *d = job_driver(j);
    bool idle = !d || d->rec->state == FL__SEAT_STATE__SEAT_CLOSED ||
                (d->rec->state == FL__SEAT_STATE__SEAT_WAITING && !d->rec->ending);

    if (!job_over(j) && idle && h->cfg.until_idle && no_node_left(h))
        finish(j, FL__JOB_STATUS__JOB_FAILED, NULL, "JOB_SUPERVISOR_ACTOR_DIED",
               "The only worker daemon of this private cluster was lost, and no other comes.");
    if (job_over(j)) {
        if (!j->rec->cleaned)
            clean(h, j);
    } else if (j->rec->stop_asked && idle) {
        finish(j, FL__JOB_STATUS__JOB_STOPPED, NULL, NULL, "Job was intentionally stopped.");
    } else if (waited_out(h, j)) {
        return;
    } else if (!d) {
        if (h->state == HEAD_READY)
            make_driver(h, j);
    } else if (d->rec->state == FL__SEAT_STATE__SEAT_OVER) {
        driver_over(j, d);
    } else if (d->rec->state == FL__SEAT_STATE__SEAT_LIVE && d->started &&
               j->rec->status == FL__JOB_STATUS__JOB_PENDING) {
        say_running(j, d);
    } else if (d->joined && !j->rec->connected) {
        Fl__JobRec rec = *j->rec;

        rec.has_connected = rec.connected = true;
        (void)head_record(h, REC_JOB, &rec, NULL, NULL); /* or at the next turn */
    }
}

void jobs_settle(struct head *h)
{
    struct job *j, *tmp;

    HASH_ITER (hh, h->jobs, j, tmp)
        settle(h, j);
    job_forget_old(h);
}

/* ---- the past ---- */

#define GIVEN_UP "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"

bool job_given_up(const struct job *j)
{
    return job_over(j) && j->rec->error_type && strcmp(j->rec->error_type, GIVEN_UP) == 0;
}

/* Whether they ran under the later head is not known, and running them twice would do harm. What a
 * daemon still runs of them has been taken over by then, or is shown as unknown when it comes. */
void jobs_after_older(struct head *h)
{
    struct job *j, *tmp;

    HASH_ITER (hh, h->jobs, j, tmp) {
        struct seat *d = job_driver(j);

        if (j->replayed && !job_over(j) && (!d || d->rec->state == FL__SEAT_STATE__SEAT_WAITING))
            finish(
                j, FL__JOB_STATUS__JOB_FAILED, NULL, GIVEN_UP,
                "Not started: this head's journal is older than the cluster, and the job may have "
                "run already; submit it again if it has not.");
    }
}

static void forget(struct head *h, struct job *j)
{
    Fl__GoneRec rec = FL__GONE_REC__INIT;
    ProtobufCBinaryData id = j->rec->id;
    char name[64];
    struct fl_err err;

    (void)FL_COPY(name, j->rec->submission_id);
    rec.jobs = &id;
    rec.n_jobs = 1;
    if (head_record(h, REC_GONE, &rec, NULL, &err) == FL_OK)
        joblog_remove(h, name);
}

/* The table keeps the order of submission. */
void job_forget_old(struct head *h)
{
    struct job *j, *tmp;

    HASH_ITER (hh, h->jobs, j, tmp)
        if (j->rec->cleaned &&
            (j->rec->delete_asked || (h->n_jobs_over > HEAD_JOBS_KEPT && !j->followers)))
            forget(h, j);
}
