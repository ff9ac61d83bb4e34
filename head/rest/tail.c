/* A job's log, piece by piece to whoever reads it, as Ray's client does: followed through a
 * WebSocket, in text frames of whole lines with a normal close once the job has ended and all was
 * sent; or as it is now, one member of a JSON object of any length. */
#include <stdlib.h>

#include "head/rest/rest.h"

enum {
    TAIL_PIECE = 64 << 10,
    TAILS_MAX = 128,
    STREAM_LAST = 16 << 20 /* of the lines that stand at the beginning */
};

struct tail {
    struct tail *prev, *next;
    struct job *job;      /* NULL: it has been forgotten */
    struct http_ws *ws;   /* one that follows     */
    struct http_req *req; /* else: one that reads */
    bool raw;             /* it reads the bytes as they are, and goes on as they come */
    uint64_t from, end;   /* of who reads: no further */
    bool begun;           /* the lines that stand before the log were sent */
};

/* How much of text can go as it is: up to the last line's end, else up to a whole character; all of
 * it when no more will come. */
static size_t whole(const char *text, size_t len, bool last)
{
    size_t n = len;

    if (last || !len)
        return len;
    while (n && text[n - 1] != '\n')
        n--;
    if (n)
        return n;
    if (len < TAIL_PIECE)
        return 0; /* a line that is not ended yet; a longer one goes in pieces */
    for (n = len; n > len - 4 && (text[n - 1] & 0xc0) == 0x80; n--)
        ;
    return n > len - 4 && (unsigned char)text[n - 1] >= 0xc0 ? n - 1 : len;
}

/* Inside of a JSON text. */
static void add_escaped(struct fl_str *out, const char *text, size_t len)
{
    size_t done = 0;

    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i];

        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        fl_str_add_bytes(out, text + done, i - done);
        if (c == '\n')
            fl_str_add_bytes(out, "\\n", 2);
        else
            fl_str_add(out, "\\u%04x", c);
        done = i + 1;
    }
    fl_str_add_bytes(out, text + done, len - done);
}

static enum fl_status send_text(struct tail *t, const char *text, size_t len, struct fl_err *err)
{
    struct fl_str clean = FL_STR_HEAP(TAIL_PIECE * 3 + (1 << 17)),
                  json = FL_STR_HEAP(TAIL_PIECE * 8 + (1 << 20));
    enum fl_status st;

    if (t->raw)
        return http_reply_write(t->req, (struct fl_bytes){ text, len }, err);
    fl_str_add_utf8(&clean, text, len);
    if (!t->ws)
        add_escaped(&json, fl_str_text(&clean), clean.len);
    if (clean.cut || json.cut)
        st = fl_fail(err, FL_EXHAUSTED, "no room for %zu bytes of a log", len);
    else if (t->ws)
        st = http_ws_text(t->ws, (struct fl_bytes){ clean.data, clean.len }, err);
    else
        st = http_reply_write(t->req, (struct fl_bytes){ json.data, json.len }, err);
    fl_str_fini(&clean);
    fl_str_fini(&json);
    return st;
}

static enum fl_status send_first(struct tail *t, struct fl_err *err)
{
    struct fl_str top = FL_STR_HEAP(1 << 17);

    if (t->begun)
        return FL_OK;
    joblog_preamble(t->job, &top);
    enum fl_status st = send_text(t, fl_str_text(&top), top.len, err);
    t->begun = st == FL_OK;
    fl_str_fini(&top);
    return st;
}

/* It ends where the log ended when it began, whether the job goes on or not. */
static bool stops_there(const struct tail *t)
{
    return t->req && !t->raw;
}

/* One piece; FL_NOT_FOUND: there is no more now. */
static enum fl_status send_piece(struct tail *t, struct fl_err *err)
{
    uint64_t from = t->from;
    char *text = NULL;
    size_t len = 0;

    FL_TRY(joblog_read(t->job, &from, TAIL_PIECE, &text, &len, err));
    if (stops_there(t) && from + len >= t->end)
        len = from < t->end ? (size_t)(t->end - from) : 0;
    bool last = stops_there(t) ? from + len >= t->end
                               : job_over(t->job) && from + len >= joblog_end(t->job);
    size_t n = t->raw ? len : whole(text, len, last);
    enum fl_status st = n ? send_text(t, text, n, err) : FL_NOT_FOUND;

    free(text);
    if (st == FL_OK)
        t->from = from + n;
    return st;
}

static void forget(struct tail *t)
{
    if (t->job) {
        t->job->followed_ns = fl_loop_now_ns(t->job->head->loop);
        t->job->log_told |= (t->ws || t->raw) && job_over(t->job);
        DL_DELETE(t->job->tails, t);
        t->job->head->requests--;
        head_kick(t->job->head);
    }
    free(t);
}

/* Nothing more comes: good, or what is missing must be seen to be missing. t is gone for who reads.
 */
static void finish(struct tail *t, bool good)
{
    if (t->ws) {
        http_ws_close(t->ws, good ? 1000 : 1011);
        return;
    }
    if (good)
        http_reply_end(t->req);
    else
        http_reply_cut(t->req);
    forget(t);
}

static void step(struct tail *t)
{
    struct fl_err err = { 0 };
    enum fl_status st = FL_NOT_FOUND;

    if (!t->job)
        return;
    if (t->job->rec->driver_node) { /* before there is nothing to read */
        st = send_first(t, &err);
        while (st == FL_OK)
            st = send_piece(t, &err);
    }
    if (st == FL_NOT_FOUND && stops_there(t))
        st = http_reply_write(t->req, (struct fl_bytes){ "\"}", 2 }, &err);
    if (st == FL_AGAIN)
        return;
    if (st != FL_OK && st != FL_NOT_FOUND)
        finish(t, false);
    else if (stops_there(t) || job_over(t->job))
        finish(t, true);
}

static void on_more(void *arg, struct http_ws *ws)
{
    (void)ws;
    step(arg);
}

static void on_gone(void *arg, struct http_ws *ws)
{
    (void)ws;
    forget(arg);
}

static void on_room(void *arg, struct http_req *req)
{
    (void)req;
    step(arg);
}

static void on_left(void *arg, struct http_req *req)
{
    (void)req;
    forget(arg);
}

static const struct http_ws_user user = { .more = on_more, .gone = on_gone };

void tails_wake(struct job *j)
{
    struct tail *t, *next;

    DL_FOREACH_SAFE (j->tails, t, next)
        step(t);
}

void tails_free(struct job *j)
{
    while (j->tails) {
        struct tail *t = j->tails;

        DL_DELETE(j->tails, t);
        t->job = NULL;
        j->head->requests--;
        finish(t, t->ws != NULL);
    }
}

/* One more of the job's; NULL: it has been answered. */
static struct tail *begin(struct job *j, struct http_req *req)
{
    struct tail *t;
    unsigned n = 0;

    if (!j)
        return NULL;
    DL_COUNT(j->tails, t, n);
    if (n >= TAILS_MAX) {
        http_reply_text(req, 503, "%d clients read the log of job %s already, which is the most",
                        TAILS_MAX, j->rec->submission_id);
        return NULL;
    }
    t = must(calloc(1, sizeof(*t)));
    t->job = j;
    return t;
}

static void go(struct tail *t)
{
    t->job->head->requests++;
    DL_APPEND(t->job->tails, t);
    step(t);
}

void rest_job_tail(void *head, struct http_req *req)
{
    struct tail *t = begin(rest_job(head, req), req);
    struct fl_err err;

    if (!t)
        return;
    if (http_ws_accept(req, &user, t, &t->ws, &err) != FL_OK) {
        free(t);
        http_reply_text(req, err.status == FL_INVALID ? 400 : 503, "%s", err.text);
        return;
    }
    t->job->log_followed = true;
    t->job->followed_ns = fl_loop_now_ns(t->job->head->loop);
    go(t);
}

void rest_job_logs(void *head, struct http_req *req)
{
    struct tail *t = begin(rest_job(head, req), req);
    struct fl_err err;

    if (!t)
        return;
    if (http_reply_start(req, 200, "application/json; charset=utf-8", on_room, &err) != FL_OK) {
        free(t);
        http_reply_fail(req, &err);
        return;
    }
    t->req = req;
    t->end = joblog_end(t->job);
    http_req_on_gone(req, on_left, t);
    (void)http_reply_write(req, (struct fl_bytes){ "{\"logs\": \"", 10 },
                           &err); /* the next one fails too */
    go(t);
}

/* The last lines of a job's log, and what comes after them until it has ended. */
void rest_state_log_stream(void *head, struct http_req *req)
{
    int64_t lines;
    struct tail *t = begin(rest_log_job(head, req, &lines), req);
    struct fl_str last = FL_STR_HEAP(STREAM_LAST);
    struct fl_err err;

    if (!t)
        return;
    if (http_reply_start(req, 200, "text/plain; charset=utf-8", on_room, &err) != FL_OK) {
        free(t);
        http_reply_fail(req, &err);
        return;
    }
    if (lines > 0)
        joblog_tail(t->job, &last, (unsigned)lines);
    t->req = req;
    t->raw = true;
    t->begun = lines >= 0;
    t->from = lines < 0 ? 0 : joblog_end(t->job) - last.len;
    fl_str_fini(&last);
    http_req_on_gone(req, on_left, t);
    go(t);
}
