#include "tests/client/fake_priv.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "common/proto/methods.h"
#include "tests/client/seats.h"
#include "tests/t.h"

static void *fake_thread(void *arg)
{
    (void)fl_fault_spare(true);
    fl_loop_run(((struct fake *)arg)->loop);
    return NULL;
}

static void begin_up(struct client_sync *s)
{
    up(container_of(s, struct doing, sync)->f);
    client_sync_end(s, FL_OK, NULL);
}

static void begin_down(struct client_sync *s)
{
    down(container_of(s, struct doing, sync)->f);
    client_sync_end(s, FL_OK, NULL);
}

struct fake *fake_create(void)
{
    static unsigned made; /* a test that failed may have left its own */
    struct fake *f = calloc(1, sizeof(*f));
    struct doing d = { .f = f };
    struct fl_err err;

    snprintf(f->sock, sizeof(f->sock), "%s/node%u.sock", t_tmp(), ++made);
    f->number = made;
    memset(f->key, 0x5a, sizeof(f->key));
    pthread_mutex_init(&f->mu, NULL);
    client_cond_init(&f->changed);
    t_ok(fl_loop_create(NULL, &f->loop, &err), &err);
    t_true(pthread_create(&f->thread, NULL, fake_thread, f) == 0);
    client_sync_run(f->loop, &d.sync, begin_up, NULL);
    return f;
}

void fake_destroy(struct fake *f)
{
    struct doing d = { .f = f };
    unsigned running = fake_running(f, 0);

    for (unsigned i = 0; i < f->n_workers; i++)
        if (f->workers[i].pid)
            kill(f->workers[i].pid, SIGKILL);
    fake_running(f, 0);
    client_sync_run(f->loop, &d.sync, begin_down, NULL);
    fl_loop_stop(f->loop);
    pthread_join(f->thread, NULL);
    for (unsigned i = 0; i < f->n_workers; i++) {
        strings_free(f->workers[i].argv);
        strings_free(f->workers[i].env);
    }
    fl_loop_destroy(f->loop);
    pthread_cond_destroy(&f->changed);
    pthread_mutex_destroy(&f->mu);
    free(f);
    t_int_eq(running, 0, "programs that did not leave");
}

void fake_down(struct fake *f)
{
    struct doing d = { .f = f };

    client_sync_run(f->loop, &d.sync, begin_down, NULL);
}

void fake_up(struct fake *f)
{
    struct doing d = { .f = f };

    client_sync_run(f->loop, &d.sync, begin_up, NULL);
}

static void begin_seat(struct client_sync *s)
{
    struct doing *d = container_of(s, struct doing, sync);
    struct worker *w = worker_of(d->f, d->role, d->rank, (uint32_t)d->bytes);

    w->attempt = d->number;
    *d->out = (uint64_t)worker_seat(w);
    client_sync_end(s, FL_OK, NULL);
}

int fake_seat(struct fake *f, const char *role, uint32_t rank, uint32_t world, uint32_t attempt)
{
    uint64_t fd = 0;
    struct doing d = {
        .f = f, .role = role, .rank = rank, .number = attempt, .bytes = world, .out = &fd
    };

    client_sync_run(f->loop, &d.sync, begin_seat, NULL);
    return (int)fd;
}

enum fl_status fake_join(struct fake *f, const char *role, uint32_t rank, uint32_t world,
                         uint32_t attempt, struct furlong **out, struct fl_err *err)
{
    struct client_seat seat = { 0 };
    int fd = fake_seat(f, role, rank, world, attempt);
    enum fl_status st = client_seat_read(fd, &seat, err);

    close(fd);
    return st == FL_OK ? client_join(&seat, out, err) : st;
}

struct furlong *fake_joined(struct fake *f, const char *role, uint32_t rank, uint32_t world)
{
    struct furlong *out = NULL;
    struct fl_err err;

    t_ok(fake_join(f, role, rank, world, 1, &out, &err), &err);
    return out;
}

static void begin_ended(struct client_sync *s)
{
    struct doing *d = container_of(s, struct doing, sync);
    struct worker *w = find(d->f, d->role, d->rank);

    w->state = FURLONG_ENDED;
    (void)FL_COPY(w->why, d->why);
    tell_driver(d->f);
    client_sync_end(s, FL_OK, NULL);
}

void fake_ended(struct fake *f, const char *role, uint32_t rank, const char *why)
{
    struct doing d = { .f = f, .role = role, .rank = rank, .why = why };

    client_sync_run(f->loop, &d.sync, begin_ended, NULL);
}

static void begin_forget(struct client_sync *s)
{
    struct doing *d = container_of(s, struct doing, sync);

    find(d->f, d->role, d->rank)->attempt++;
    client_sync_end(s, FL_OK, NULL);
}

void fake_forget(struct fake *f, const char *role, uint32_t rank)
{
    struct doing d = { .f = f, .role = role, .rank = rank };

    client_sync_run(f->loop, &d.sync, begin_forget, NULL);
}

static void begin_head(struct client_sync *s)
{
    struct doing *d = container_of(s, struct doing, sync);

    d->f->head_away = d->number;
    client_sync_end(s, FL_OK, NULL);
}

static void begin_far(struct client_sync *s)
{
    struct doing *d = container_of(s, struct doing, sync);

    d->f->far = d->number;
    client_sync_end(s, FL_OK, NULL);
}

void fake_far(struct fake *f, bool far)
{
    struct doing d = { .f = f, .number = far };

    client_sync_run(f->loop, &d.sync, begin_far, NULL);
}

void fake_head_away(struct fake *f, bool away)
{
    struct doing d = { .f = f, .number = away };

    client_sync_run(f->loop, &d.sync, begin_head, NULL);
}

static void begin_stop(struct client_sync *s)
{
    struct doing *d = container_of(s, struct doing, sync);

    send_stop(find(d->f, d->role, d->rank), d->number);
    client_sync_end(s, FL_OK, NULL);
}

void fake_stop(struct fake *f, const char *role, uint32_t rank, uint32_t budget_ms)
{
    struct doing d = { .f = f, .role = role, .rank = rank, .number = budget_ms };

    client_sync_run(f->loop, &d.sync, begin_stop, NULL);
}

static void squeezed(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                     const struct fl_err *err)
{
    struct doing *d = container_of(op, struct doing, op);

    if (st == FL_OK && reply->head.body_bytes == 8)
        memcpy(d->out, reply->body, 8);
    client_sync_end(&d->sync, st, err);
}

static void begin_squeeze(struct client_sync *s)
{
    struct doing *d = container_of(s, struct doing, sync);
    Fl__Squeeze m = FL__SQUEEZE__INIT;
    uint8_t body[32];
    struct fl_err err;
    enum fl_status st;

    m.bytes = d->bytes;
    d->op.done = squeezed;
    st = call_start(find(d->f, d->role, d->rank)->guest->call,
                    &(struct call_args){ .method = FL_EV_SQUEEZE,
                                         .due_ns = fl_loop_now_ns(d->f->loop) + 5000000000u,
                                         .body = { body, fl__squeeze__pack(&m, body) } },
                    &d->op, &err);
    if (st != FL_OK)
        client_sync_end(s, st, &err);
}

enum fl_status fake_squeeze(struct fake *f, const char *role, uint32_t rank, uint64_t bytes,
                            uint64_t *out, struct fl_err *err)
{
    struct doing d = { .f = f, .role = role, .rank = rank, .bytes = bytes, .out = out };

    return client_sync_run(f->loop, &d.sync, begin_squeeze, err);
}

static void begin_kill(struct client_sync *s)
{
    struct doing *d = container_of(s, struct doing, sync);
    struct worker *w = find(d->f, d->role, d->rank);

    siginfo_t info;

    if (w && w->pid && kill(w->pid, (int)d->number) == 0 && d->number == SIGSTOP)
        (void)waitid(P_PID, (id_t)w->pid, &info, WSTOPPED | WNOWAIT); /* it takes a moment */
    client_sync_end(s, FL_OK, NULL);
}

void fake_kill(struct fake *f, const char *role, uint32_t rank, int signal)
{
    struct doing d = { .f = f, .role = role, .rank = rank, .number = (uint32_t)signal };

    client_sync_run(f->loop, &d.sync, begin_kill, NULL);
}

#define WAIT_FOR(f, cond)                                                                          \
    do {                                                                                           \
        struct timespec until_ = client_until(WAIT_MS);                                            \
        bool late_ = false;                                                                        \
        pthread_mutex_lock(&(f)->mu);                                                              \
        while (!(cond) && !late_)                                                                  \
            late_ = !client_cond_wait(&(f)->changed, &(f)->mu, WAIT_MS, &until_);                  \
    } while (0)

unsigned fake_steps(struct fake *f, unsigned n, char last[256])
{
    unsigned got;

    WAIT_FOR(f, f->n_steps >= n);
    got = f->n_steps;
    (void)fl_copy(last, 256, f->last_step);
    pthread_mutex_unlock(&f->mu);
    return got;
}

static double metric_now(struct fake *f, const char *name)
{
    for (unsigned i = 0; i < f->n_metrics; i++)
        if (strcmp(f->metrics[i].name, name) == 0)
            return f->metrics[i].value;
    return -1;
}

double fake_metric(struct fake *f, const char *name, double wanted)
{
    double got;

    WAIT_FOR(f, metric_now(f, name) == wanted);
    got = metric_now(f, name);
    pthread_mutex_unlock(&f->mu);
    return got;
}

uint64_t fake_progress(struct fake *f, uint64_t wanted)
{
    uint64_t got;

    WAIT_FOR(f, f->progress == wanted);
    got = f->progress;
    pthread_mutex_unlock(&f->mu);
    return got;
}

unsigned fake_running(struct fake *f, unsigned wanted)
{
    unsigned got;

    WAIT_FOR(f, f->n_running == wanted);
    got = f->n_running;
    pthread_mutex_unlock(&f->mu);
    return got;
}

unsigned fake_finds(struct fake *f)
{
    unsigned n;

    pthread_mutex_lock(&f->mu);
    n = f->n_finds;
    pthread_mutex_unlock(&f->mu);
    return n;
}

const char *fake_role(int argc, char **argv)
{
    return argc > 1 && getenv("FURLONG_SEAT_FD") ? argv[1] : NULL;
}
