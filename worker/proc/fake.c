#include "worker/proc/fake.h"
#include "common/base/str.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <utlist.h>

struct proc {
    struct proc *prev, *next;
    struct fl_loop *loop;
    const struct proc_user *user;
    void *arg;
    struct proc_fake_told told;
    struct fl_task end;
    bool stubborn;
};
static struct proc *all;
static enum fl_status fail_next;

static void fake_free(struct proc *p)
{
    fl_task_cancel(p->loop, &p->end);
    DL_DELETE(all, p);
    if (p->told.seat_fd >= 0)
        close(p->told.seat_fd);
    free(p);
}

static void on_end(struct fl_task *t)
{
    struct proc *p = container_of(t, struct proc, end);

    proc_fake_end(p, p->told.stop_cause, -1);
}

static struct proc *fake_new(struct fl_loop *l, const struct proc_user *u, void *arg)
{
    struct proc *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    p->loop = l;
    p->user = u;
    p->arg = arg;
    p->end.run = on_end;
    p->told.seat_fd = -1;
    DL_APPEND(all, p);
    return p;
}

static enum fl_status fake_start(struct fl_loop *l, const struct proc_spec *s,
                                 const struct proc_user *u, void *arg, struct proc **out,
                                 struct fl_err *err)
{
    struct proc *p;
    enum fl_status st = fail_next;

    fail_next = FL_OK;
    if (st != FL_OK)
        return fl_fail(err, st, "the fake was told to fail");
    p = fake_new(l, u, arg);
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a fake");
    struct fl_str env = FL_STR_ON(p->told.env);

    p->told.who = s->who;
    (void)FL_COPY(p->told.argv0, s->argv[0]);
    (void)FL_COPY(p->told.dir, s->dir);
    (void)FL_COPY(p->told.cwd, s->cwd ? s->cwd : "");
    for (size_t i = 0; s->env && s->env[i]; i++)
        fl_str_add(&env, "%s\n", s->env[i]);
    if (s->seat_fd >= 0)
        p->told.seat_fd = fcntl(s->seat_fd, F_DUPFD_CLOEXEC, 3);
    *out = p;
    return FL_OK;
}

static enum fl_status fake_adopt(struct fl_loop *l, const char *dir, const struct proc_user *u,
                                 void *arg, struct proc **out, struct fl_err *err)
{
    struct proc *p = fake_new(l, u, arg);

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a fake");
    p->told.adopted = true;
    (void)FL_COPY(p->told.dir, dir);
    *out = p;
    return FL_OK;
}

static void fake_stop(struct proc *p, enum proc_cause why, const char *text, uint32_t term_ms)
{
    if (p->told.stopped)
        return;
    p->told.stopped = true;
    p->told.stop_cause = why;
    p->told.stop_term_ms = term_ms;
    (void)FL_COPY(p->told.stop_text, text ? text : "");
    if (!p->stubborn)
        fl_post(p->loop, &p->end);
}

size_t proc_fake_count(void)
{
    size_t n = 0;

    for (struct proc *p = all; p; p = p->next)
        n++;
    return n;
}

struct proc *proc_fake_find(const struct fl_seat_ref *who)
{
    for (struct proc *p = all; p; p = p->next)
        if (!memcmp(&p->told.who.id, &who->id, sizeof(who->id)) &&
            p->told.who.attempt == who->attempt)
            return p;
    return NULL;
}

const struct proc_fake_told *proc_fake_told(const struct proc *p)
{
    return &p->told;
}

void proc_fake_start(struct proc *p, int pid)
{
    p->user->started(p->arg, p, pid);
}

void proc_fake_end(struct proc *p, enum proc_cause cause, int code)
{
    struct proc_exit x = { .who = p->told.who, .cause = cause, .code = code, .lived_ms = 1 };

    snprintf(x.why, sizeof(x.why), "%s",
             p->told.stop_text[0] ? p->told.stop_text : "ended by the test");
    p->user->gone(p->arg, p, &x);
    fake_free(p);
}

void proc_fake_stubborn(struct proc *p)
{
    p->stubborn = true;
}

void proc_fake_fail_next(enum fl_status st)
{
    fail_next = st;
}

void proc_fake_forget_all(void)
{
    while (all)
        fake_free(all);
}

const struct proc_ops proc_fake = {
    .start = fake_start,
    .adopt = fake_adopt,
    .stop = fake_stop,
    .forget = fake_free,
};
