/* Following a job's log through a WebSocket, as Ray's client does: text frames of whole lines, and
 * a normal close once the job has ended and all of its log has been sent. */
#include <stdlib.h>

#include "head/rest/rest.h"

enum { TAIL_PIECE = 64 << 10, TAILS_MAX = 128 };

struct tail {
    struct tail *prev, *next;
    struct job *job; /* NULL: it has been forgotten */
    struct http_ws *ws;
    uint64_t from;
    bool begun; /* the lines that stand before the log were sent */
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

static enum fl_status send_text(struct tail *t, const char *text, size_t len, struct fl_err *err)
{
    struct fl_str clean = FL_STR_HEAP(TAIL_PIECE * 3 + (1 << 17));

    rest_add_utf8(&clean, text, len);
    enum fl_status st = http_ws_text(t->ws, (struct fl_bytes){ clean.data, clean.len }, err);
    fl_str_fini(&clean);
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

/* One piece; FL_NOT_FOUND: there is no more now. */
static enum fl_status send_piece(struct tail *t, struct fl_err *err)
{
    uint64_t from = t->from;
    char *text = NULL;
    size_t len = 0;

    FL_TRY(joblog_read(t->job, &from, TAIL_PIECE, &text, &len, err));
    bool last = job_over(t->job) && from + len >= joblog_end(t->job);
    size_t n = whole(text, len, last);
    enum fl_status st = n ? send_text(t, text, n, err) : FL_NOT_FOUND;

    free(text);
    if (st == FL_OK)
        t->from = from + n;
    return st;
}

static void step(struct tail *t)
{
    struct fl_err err = { 0 };
    enum fl_status st = FL_OK;

    if (!t->job)
        return;
    if (t->job->rec->driver_node) { /* before there is nothing to read */
        st = send_first(t, &err);
        while (st == FL_OK)
            st = send_piece(t, &err);
        if (st == FL_AGAIN)
            return;
    }
    if (st != FL_OK && st != FL_NOT_FOUND)
        http_ws_close(t->ws, 1011);
    else if (job_over(t->job))
        http_ws_close(t->ws, 1000);
}

static void on_more(void *arg, struct http_ws *ws)
{
    (void)ws;
    step(arg);
}

static void on_gone(void *arg, struct http_ws *ws)
{
    struct tail *t = arg;

    (void)ws;
    if (t->job) {
        t->job->followed_ns = fl_loop_now_ns(t->job->head->loop);
        t->job->log_told |= job_over(t->job);
        DL_DELETE(t->job->tails, t);
        t->job->head->requests--;
        head_kick(t->job->head);
    }
    free(t);
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
        http_ws_close(t->ws, 1000);
    }
}

void rest_job_tail(void *head, struct http_req *req)
{
    struct head *h = head;
    struct job *j = rest_job(h, req);
    struct tail *t;
    unsigned n = 0;
    struct fl_err err;

    if (!j)
        return;
    DL_COUNT(j->tails, t, n);
    if (n >= TAILS_MAX) {
        http_reply_text(req, 503, "%d clients follow job %s already, which is the most", TAILS_MAX,
                        j->rec->submission_id);
        return;
    }
    t = must(calloc(1, sizeof(*t)));
    t->job = j;
    if (http_ws_accept(req, &user, t, &t->ws, &err) != FL_OK) {
        free(t);
        http_reply_text(req, err.status == FL_INVALID ? 400 : 503, "%s", err.text);
        return;
    }
    j->log_followed = true;
    j->followed_ns = fl_loop_now_ns(h->loop);
    h->requests++;
    DL_APPEND(j->tails, t);
    step(t);
}
