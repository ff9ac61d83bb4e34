#include <stdlib.h>

#include "head/rest/rest.h"

/* Long polls: a request sleeps until there is more, the job has ended, or its time is over. */
enum { LOG_PIECE = 1 << 20, WAIT_MAX_MS = 60000, STEPS_PIECE = 256, LINGER_MS = 250 };

struct follower {
    struct follower *prev, *next;
    struct job *job;
    struct http_req *req;
    uint64_t from;
    bool steps;
    struct fl_timer late;
};

static void drop(struct follower *f)
{
    DL_DELETE(f->job->followers, f);
    f->job->head->requests--;
    fl_timer_cancel(&f->late);
    free(f);
}

static void on_gone(void *arg, struct http_req *req)
{
    struct follower *f = arg;
    struct head *h = f->job->head;

    (void)req;
    drop(f);
    head_kick(h);
}

/* ---- the log ---- */

static void answer_log(struct job *j, struct http_req *req, uint64_t from)
{
    struct fl_err err;
    char *text = NULL;
    size_t len = 0;
    uint64_t asked = from;

    if (joblog_read(j, &from, LOG_PIECE, &text, &len, &err) != FL_OK) {
        http_reply_fail(req, &err);
        return;
    }
    /* The end is told with the last bytes, never before them. */
    bool all = from + len >= joblog_end(j);
    bool over = job_over(j) && all;
    http_reply_header(req, "X-Furlong-Offset", "%llu", (unsigned long long)(from + len));
    http_reply_header(
        req, "X-Furlong-State", "%s",
        job_status_name(over || !job_over(j) ? j->rec->status : FL__JOB_STATUS__JOB_RUNNING));
    if (over && j->rec->has_exit_code)
        http_reply_header(req, "X-Furlong-Exit-Code", "%d", j->rec->exit_code);
    j->log_told |= over && asked >= from && len == 0;
    http_reply_bytes(req, 200, "text/plain; charset=utf-8", (struct fl_bytes){ text, len });
    free(text);
}

/* ---- the steps ---- */

/* Why it ended, for whoever follows: not every end shows in the output. */
static void add_message(struct fl_str *out, const char *message)
{
    json_t *text = message ? json_string(message) : json_null();
    char *json = text ? json_dumps(text, JSON_ENCODE_ANY) : NULL;

    fl_str_add(out, ",\"message\":%s", json ? json : "null");
    free(json);
    json_decref(text);
}

static void answer_steps(struct job *j, struct http_req *req, uint64_t from)
{
    struct fl_str out = FL_STR_HEAP(64 << 20);
    uint64_t oldest = j->steps.next > HEAD_STEPS_KEPT ? j->steps.next - HEAD_STEPS_KEPT : 0;
    /* Beyond the end is the count of a head before this one: all that this one has came since. */
    uint64_t next = from <= j->steps.next ? from : oldest;
    unsigned n = 0;

    if (next < oldest)
        next = oldest;
    fl_str_add(&out, "{\"steps\":[");
    for (; next < j->steps.next && n < STEPS_PIECE; next++, n++) {
        const char *json =
            steps_get(&j->steps, next); /* was checked to be an object when it came */

        fl_str_add(&out, "%s", n ? "," : "");
        fl_str_add_bytes(&out, json, strlen(json));
    }
    bool over = job_over(j) && next == j->steps.next && !j->steps.recall;
    fl_str_add(
        &out, "],\"next\":%llu,\"state\":\"%s\",\"exit_code\":", (unsigned long long)next,
        job_status_name(over || !job_over(j) ? j->rec->status : FL__JOB_STATUS__JOB_RUNNING));
    if (over && j->rec->has_exit_code)
        fl_str_add(&out, "%d", j->rec->exit_code);
    else
        fl_str_add(&out, "null");
    add_message(&out, over ? j->rec->message : NULL);
    fl_str_add(&out, "}");
    j->steps_told |= over && n == 0;
    if (out.cut)
        http_reply_error(req, 500, "no memory for the steps of job %s", j->rec->submission_id);
    else
        http_reply_bytes(req, 200, "application/json", (struct fl_bytes){ out.data, out.len });
    fl_str_fini(&out);
}

/* ---- waiting ---- */

static void answer(struct follower *f)
{
    struct job *j = f->job;
    struct http_req *req = f->req;
    uint64_t from = f->from;
    bool steps = f->steps;

    j->followed_ns = fl_loop_now_ns(j->head->loop);
    drop(f);
    if (steps)
        answer_steps(j, req, from);
    else
        answer_log(j, req, from);
}

static bool has_news(const struct follower *f)
{
    uint64_t end = f->steps ? f->job->steps.next : joblog_end(f->job);

    if (f->steps && f->job->steps.recall)
        return false;
    return job_over(f->job) || f->from < end || (f->steps && f->from > end);
}

static void on_late(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    answer(container_of(t, struct follower, late));
}

void followers_wake(struct job *j)
{
    struct follower *f, *next;

    DL_FOREACH_SAFE (j->followers, f, next)
        if (has_news(f))
            answer(f);
    tails_wake(j);
}

void followers_free(struct job *j)
{
    while (j->followers) {
        struct http_req *req = j->followers->req;

        drop(j->followers);
        http_reply_error(req, 404, "Job %s does not exist", j->rec->submission_id);
    }
}

static void follow(struct head *h, struct http_req *req, bool steps)
{
    struct job *j = rest_job(h, req);
    uint64_t from, wait_ms;
    struct fl_err err;

    if (!j)
        return;
    if (http_req_number(req, steps ? "from" : "offset", 0, UINT64_MAX >> 1, &from, &err) != FL_OK ||
        http_req_number(req, "wait_ms", 0, WAIT_MAX_MS, &wait_ms, &err) != FL_OK) {
        http_reply_error(req, 400, "%s", err.text);
        return;
    }
    struct follower *f = must(calloc(1, sizeof(*f)));
    f->job = j;
    f->req = req;
    f->from = from;
    f->steps = steps;
    f->late.fire = on_late;
    *(steps ? &j->steps_followed : &j->log_followed) = true;
    j->followed_ns = fl_loop_now_ns(h->loop);
    h->requests++;
    if (steps)
        steps_recall(j);
    DL_APPEND(j->followers, f);
    if (!wait_ms || has_news(f)) {
        answer(f);
        return;
    }
    http_req_on_gone(req, on_gone, f);
    fl_timer_arm_in(h->loop, &f->late, wait_ms);
}

void rest_follow_log(void *head, struct http_req *req)
{
    follow(head, req, false);
}

void rest_follow_steps(void *head, struct http_req *req)
{
    follow(head, req, true);
}

/* Whoever followed has read the end, or has been away for too long; whoever may still come to ask
 * has had as long. */
bool job_told(const struct job *j, uint64_t now_ns)
{
    uint64_t since = j->followed_ns > j->end_ns ? j->followed_ns : j->end_ns;
    bool followed = j->log_followed || j->steps_followed;
    bool told = followed
                    ? (!j->log_followed || j->log_told) && (!j->steps_followed || j->steps_told)
                    : j->asked_end;

    return j->replayed || now_ns >= since + (told ? LINGER_MS : HEAD_TOLD_MS) * 1000000ull;
}
