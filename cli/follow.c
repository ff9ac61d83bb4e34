#include "cli/follow.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/table.h"
#include "common/base/loop.h"
#include "common/base/str.h"

enum { POLL_MS = 20000, ASK_MS = 30000, BACK_OFF_MS = 200, STOP_MS = 10000, BAR_CELLS = 24, OWN_MAX = 2, OWN_GRACE_MS = 1000, LOOK_MS = 500, PATH_BYTES = 256 };

/* One of the two things that are read to their end: the log's bytes and the step records. */
struct reader {
    struct follow *f;
    struct http_call call;
    struct fl_timer again;
    bool over;
    uint64_t next;
    void (*take)(struct reader *r, const struct http_answer *a);
    const char *what, *query; /* "log", "offset" */
};
struct follow {
    const struct cli_cluster *c;
    const char *job;
    const struct cli_follow *how;
    struct fl_loop *loop;
    struct http_client *client;
    struct reader log, steps;
    struct http_call stop, look;
    struct fl_timer look_due; /* while it has not started: why not */
    char waits[512];
    unsigned interrupts;
    uint64_t away_since_ns; /* 0: the head answers */
    bool head_away_said, bar_drawn, line_open;
    struct cli_end *end;
    struct own_watch {
        struct follow *f;
        struct fl_watch *watch;
        int fd;
    } own[OWN_MAX];
    struct fl_timer own_due; /* the job's end may be on its way still */
    const struct cli_daemon *own_gone;
    enum fl_status st;
    struct fl_err err;
};

static void give_up(struct follow *f, enum fl_status st)
{
    f->st = st;
    fl_loop_stop(f->loop);
}

/* ==== what is shown ================================================================================ */
static void bar_clear(struct follow *f)
{
    if (f->bar_drawn)
        fputs("\r\033[K", stderr);
    f->bar_drawn = false;
}

static void bar_draw(struct follow *f, const json_t *step)
{
    int64_t done = cli_int(step, "step") + 1, total = f->how->total;
    char left[24] = "";

    if (!f->how->bar || total <= 0 || f->line_open)
        return;
    double seconds = cli_real(step, "perf/step_time");

    fputs("\r\033[K[", stderr);
    for (int64_t i = 0; i < BAR_CELLS; i++)
        fputc(i < done * BAR_CELLS / total ? '#' : '.', stderr);
    fprintf(stderr, "] step %lld of %lld, reward %.3f, %s left", (long long)done, (long long)total,
            cli_real(step, "reward_mean"), cli_duration(left, seconds * (double)(total - done)));
    fflush(stderr);
    f->bar_drawn = true;
}

static void take_log(struct reader *r, const struct http_answer *a)
{
    struct follow *f = r->f;
    char text[32];
    const char *next = http_answer_header(a, "x-furlong-offset", text, sizeof(text));
    FILE *to = f->how->show == CLI_SHOW_LOG ? stdout : stderr;
    uint64_t at = next ? strtoull(next, NULL, 10) : r->next + a->body_len;

    if (a->body_len && f->how->show != CLI_SHOW_NONE) {
        bar_clear(f);
        fwrite(a->body, 1, a->body_len, to);
        fflush(to);
        f->line_open = a->body[a->body_len - 1] != '\n';
    }
    next = http_answer_header(a, "x-furlong-state", text, sizeof(text));
    r->over = next && cli_job_over(next) && at == r->next;
    r->next = at;
}

static void take_steps(struct reader *r, const struct http_answer *a)
{
    struct follow *f = r->f;
    json_t *o = json_loadb(a->body, a->body_len, JSON_REJECT_DUPLICATES, NULL), *step;
    const char *state = cli_text(o, "state");
    uint64_t next = (uint64_t)cli_int(o, "next");
    size_t i;

    json_array_foreach(json_object_get(o, "steps"), i, step) {
        if (f->how->show == CLI_SHOW_STEPS) {
            json_dumpf(step, stdout, JSON_COMPACT);
            fputc('\n', stdout);
            fflush(stdout);
        }
        bar_draw(f, step);
    }
    if (*state)
        (void)FL_COPY(f->end->state, state);
    r->over = cli_job_over(state) && json_array_size(json_object_get(o, "steps")) == 0;
    if (r->over) {
        json_t *code = json_object_get(o, "exit_code");

        f->end->exit_code = json_is_integer(code) ? (int)json_integer_value(code) : strcmp(state, "SUCCEEDED") != 0;
        (void)FL_COPY(f->end->message, cli_text(o, "message"));
    }
    r->next = next > r->next ? next : r->next;
    json_decref(o);
}

/* ==== asking again and again ======================================================================= */
static void ask(struct reader *r);

static void away(struct reader *r, const struct fl_err *err)
{
    struct follow *f = r->f;
    uint64_t now = fl_loop_now_ns(f->loop);

    if (!f->away_since_ns)
        f->away_since_ns = now;
    if (!f->head_away_said && now - f->away_since_ns > 2000000000u) {
        bar_clear(f);
        fprintf(stderr, "furlong: the head at %s does not answer; the job goes on, waiting for it\n",
                f->c->url);
        f->head_away_said = true;
    }
    if ((now - f->away_since_ns) / 1000000 > f->how->away_max_ms) {
        (void)fl_fail(&f->err, FL_UNREACHABLE,
                      "the head at %s has been away for %u s (%.120s); the job goes on without a "
                      "watcher: furlong job logs --follow %s", f->c->url, f->how->away_max_ms / 1000,
                      err->text, f->job);
        give_up(f, FL_UNREACHABLE);
        return;
    }
    fl_timer_arm_in(f->loop, &r->again, BACK_OFF_MS);
}

static void on_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    ask(container_of(t, struct reader, again));
}

static void on_answer(struct http_call *call, enum fl_status st, struct http_answer *a,
                      const struct fl_err *err)
{
    struct reader *r = container_of(call, struct reader, call);
    struct follow *f = r->f;

    if (st == FL_CANCELLED)
        return;
    if (st != FL_OK || a->status >= 500) {
        struct fl_err e = { .text = "it answers with an error of its own" };

        away(r, st != FL_OK ? err : &e);
        return;
    }
    f->away_since_ns = 0;
    f->head_away_said = false;
    if (a->status >= 400) {
        (void)fl_fail(&f->err, FL_NOT_FOUND, "the head at %s answers %u for job %s: %.120s", f->c->url,
                      a->status, f->job, a->body ? a->body : "");
        give_up(f, FL_NOT_FOUND);
        return;
    }
    r->take(r, a);
    if (!r->over)
        ask(r);
    else if (f->log.over && f->steps.over)
        give_up(f, FL_OK);
}

static void ask(struct reader *r)
{
    struct follow *f = r->f;
    char path[PATH_BYTES];
    struct cli_request q;
    struct fl_err err = { 0 };

    snprintf(path, sizeof(path), "/api/furlong/jobs/%s/%s?%s=%llu&wait_ms=%d", f->job, r->what, r->query, (unsigned long long)r->next, POLL_MS);
    if (cli_request(f->c, NULL, path, NULL, ASK_MS, &q, &err) != FL_OK || http_start(f->client, &q.ask, &r->call, &err) != FL_OK)
        away(r, &err);
}

/* ==== why it has not started yet ==================================================================== */
static void on_look_due(struct fl_timer *t, uint64_t now_ns)
{
    struct follow *f = container_of(t, struct follow, look_due);
    char path[PATH_BYTES];
    struct cli_request q;

    (void)now_ns;
    snprintf(path, sizeof(path), "/api/furlong/jobs/%s", f->job);
    if (cli_request(f->c, NULL, path, NULL, ASK_MS, &q, NULL) != FL_OK || http_start(f->client, &q.ask, &f->look, NULL) != FL_OK)
        fl_timer_arm_in(f->loop, &f->look_due, LOOK_MS);
}

static void on_look(struct http_call *call, enum fl_status st, struct http_answer *a, const struct fl_err *err)
{
    struct follow *f = container_of(call, struct follow, look);
    json_t *o = st == FL_OK && a->status == 200 ? json_loadb(a->body, a->body_len, JSON_REJECT_DUPLICATES, NULL) : NULL;
    const char *why = cli_text(o, "why");

    (void)err;
    if (st == FL_CANCELLED)
        return;
    if (*why && strcmp(why, f->waits) != 0) {
        (void)FL_COPY(f->waits, why);
        bar_clear(f);
        fprintf(stderr, "job %s waits: %s\n", f->job, why);
    }
    if (st != FL_OK || strcmp(cli_text(o, "status"), "PENDING") == 0)
        fl_timer_arm_in(f->loop, &f->look_due, LOOK_MS);
    json_decref(o);
}

/* ==== a private cluster's own daemons ============================================================== */
static void on_own_due(struct fl_timer *t, uint64_t now_ns)
{
    struct follow *f = container_of(t, struct follow, own_due);
    bool head = f->own_gone->kind == 'h';

    (void)now_ns;
    *f->how->own_ended = true;
    (void)fl_fail(&f->err, FL_UNREACHABLE,
                  "the %s of this private cluster (pid %d) ended before the run had, which ends the run; its log: "
                  "%.120s/furlong-%s.log",
                  head ? "head" : "worker daemon", (int)f->own_gone->pid, f->how->own_logs, head ? "head" : "node");
    bar_clear(f);
    give_up(f, FL_UNREACHABLE);
}

static void on_own_ended(void *arg, unsigned events)
{
    struct own_watch *w = arg;
    struct follow *f = w->f;

    (void)events;
    fl_watch_events(w->watch, 0);
    if (f->own_gone)
        return;
    f->own_gone = &f->how->own[w - f->own];
    fl_timer_arm_in(f->loop, &f->own_due, OWN_GRACE_MS);
}

static enum fl_status own_watch(struct follow *f, struct fl_err *err)
{
    enum fl_status st = FL_OK;

    for (size_t i = 0; i < f->how->n_own && i < OWN_MAX && st == FL_OK; i++)
        st = cli_daemon_watch(&f->how->own[i], f->loop, on_own_ended, &f->own[i], &f->own[i].fd,
                              &f->own[i].watch, err);
    return st;
}

/* ==== Ctrl-C ======================================================================================= */
static void on_stop_answer(struct http_call *call, enum fl_status st, struct http_answer *a,
                           const struct fl_err *err)
{
    struct follow *f = container_of(call, struct follow, stop);

    if (st == FL_CANCELLED || (st == FL_OK && a->status < 400)) /* cancelled: its end was heard before the answer */
        return;
    fprintf(stderr, "furlong: job %s was not stopped: %s; press Ctrl-C again to leave it running\n",
            f->job, st != FL_OK ? err->text : "the head refused");
}

static void on_signal(void *arg, int signal, int from_pid)
{
    struct follow *f = arg;
    char path[PATH_BYTES];
    struct cli_request q;
    struct fl_err err = { 0 };

    (void)signal;
    (void)from_pid;
    bar_clear(f);
    if (f->interrupts++ > 0 || f->how->leave) {
        (void)fl_fail(&f->err, FL_CANCELLED, "no longer waiting for job %s, which %s", f->job,
                      f->how->leave ? "goes on" : "was asked to stop");
        give_up(f, FL_CANCELLED);
        return;
    }
    fprintf(stderr, "furlong: stopping job %s; press Ctrl-C again to stop waiting for it\n", f->job);
    snprintf(path, sizeof(path), "/api/jobs/%s/stop", f->job);
    if (cli_request(f->c, "POST", path, NULL, STOP_MS, &q, &err) != FL_OK || http_start(f->client, &q.ask, &f->stop, &err) != FL_OK)
        fprintf(stderr, "furlong: %s\n", err.text);
}

enum fl_status cli_follow(const struct cli_cluster *c, const char *job, const struct cli_follow *how,
                          struct cli_end *out, struct fl_err *err)
{
    static const int signals[] = { SIGINT, SIGTERM };
    struct follow f = { .c = c, .job = job, .how = how, .end = out };
    struct fl_signals *sig = NULL;
    enum fl_status st = fl_loop_create(NULL, &f.loop, err);

    f.log = (struct reader){ .f = &f, .call = { .done = on_answer }, .again = { .fire = on_again },
                             .take = take_log, .what = "log", .query = "offset",
                             .over = how->show == CLI_SHOW_NONE };
    f.steps = (struct reader){ .f = &f, .call = { .done = on_answer }, .again = { .fire = on_again },
                               .take = take_steps, .what = "steps", .query = "from" };
    f.stop.done = on_stop_answer;
    f.look.done = on_look;
    f.look_due.fire = on_look_due;
    f.own_due.fire = on_own_due;
    for (size_t i = 0; i < OWN_MAX; i++)
        f.own[i] = (struct own_watch){ .f = &f, .fd = -1 };
    if (st == FL_OK)
        st = fl_signals_create(f.loop, signals, FL_LEN(signals), on_signal, &f, &sig, err);
    if (st == FL_OK)
        st = own_watch(&f, err);
    if (st == FL_OK)
        st = http_client_create(f.loop, &f.client, err);
    if (st == FL_OK) {
        ask(&f.steps);
        if (!f.log.over)
            ask(&f.log);
        fl_timer_arm_in(f.loop, &f.look_due, LOOK_MS);
        fl_loop_run(f.loop);
        bar_clear(&f);
        st = f.st;
        if (st != FL_OK && err)
            *err = f.err;
    }
    for (size_t i = 0; i < OWN_MAX; i++)
        cli_daemon_unwatch(f.own[i].watch, f.own[i].fd);
    fl_timer_cancel(&f.own_due);
    fl_timer_cancel(&f.look_due);
    fl_timer_cancel(&f.log.again);
    fl_timer_cancel(&f.steps.again);
    http_client_destroy(f.client);
    fl_signals_destroy(sig);
    fl_loop_destroy(f.loop);
    return st;
}
