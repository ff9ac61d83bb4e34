#include "common/base/muster.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/base/str.h"

struct party {
    char name[64], at[64];
    enum fl_status st; /* FL_AGAIN: not in yet */
};

struct fl_muster {
    struct fl_loop *loop;
    char what[64];
    unsigned n, missing, excused, failures;
    uint64_t made_ns;
    bool hasty, ended;
    struct fl_timer late;
    struct fl_task tell; /* deferred: over never runs inside the call that brought the last one */
    void (*over)(void *arg, enum fl_status st, const struct fl_err *e);
    void *arg;
    struct fl_err err; /* the outcome, FL_OK while nobody failed */
    struct party parties[];
};

static void muster_tell(struct fl_task *t)
{
    struct fl_muster *m = container_of(t, struct fl_muster, tell);

    m->over(m->arg, m->err.status, &m->err); /* last: m may go in it */
}

static void muster_end(struct fl_muster *m)
{
    m->ended = true;
    fl_timer_cancel(&m->late);
    fl_defer(m->loop, &m->tell);
}

/* ", rank 3 on gpu-b (staging, bucket 17 of 33)" for as many as fit, then how many did not */
static void add_missing(struct fl_str *s, const struct fl_muster *m)
{
    enum { TAIL = 24 }; /* ", and 4294967295 more" */
    unsigned left = m->missing;
    const char *comma = "";

    s->max -= TAIL;
    for (unsigned i = 0; i < m->n && left; i++) {
        const struct party *p = &m->parties[i];
        size_t before = s->len;

        if (p->st != FL_AGAIN)
            continue;
        fl_str_add(s, p->at[0] ? "%s%s (%s)" : "%s%s", comma, p->name, p->at);
        if (s->cut) {
            s->data[s->len = before] = '\0';
            break;
        }
        comma = ", ";
        left--;
    }
    s->max += TAIL;
    if (left)
        fl_str_add(s, "%sand %u more", comma, left);
}

static void muster_late(struct fl_timer *t, uint64_t now_ns)
{
    struct fl_muster *m = container_of(t, struct fl_muster, late);
    struct fl_str s = FL_STR_ON(m->err.text);
    bool failed = m->failures != 0;
    char first[sizeof(m->err.text)];

    memcpy(first, m->err.text, sizeof(first));
    fl_str_add(&s, "%s: %u of %u missing after %.1f s: ", m->what, m->missing, m->n,
               (double)(now_ns - m->made_ns) / 1e9);
    add_missing(&s, m);
    if (m->excused)
        fl_str_add(&s, "; %u gone", m->excused);
    if (failed)
        fl_str_add(&s, "; %s", first);
    m->err.status = FL_TIMEOUT;
    m->err.origin = FL_FROM_SELF;
    m->err.native = 0;
    muster_end(m);
}

enum fl_status fl_muster_create(struct fl_loop *l, const char *what, unsigned parties,
                                uint64_t due_ns,
                                void (*over)(void *arg, enum fl_status st, const struct fl_err *e),
                                void *arg, struct fl_muster **out, struct fl_err *err)
{
    struct fl_muster *m = calloc(1, sizeof(*m) + parties * sizeof(m->parties[0]));

    if (!m)
        return fl_fail(err, FL_EXHAUSTED, "no memory to wait for %u parties", parties);
    m->loop = l;
    m->n = m->missing = parties;
    m->made_ns = fl_loop_now_ns(l);
    m->over = over;
    m->arg = arg;
    m->late.fire = muster_late;
    m->tell.run = muster_tell;
    (void)FL_COPY(m->what, what); /* cut names are still names */
    for (unsigned i = 0; i < parties; i++) {
        snprintf(m->parties[i].name, sizeof(m->parties[i].name), "party %u", i);
        m->parties[i].st = FL_AGAIN;
    }
    if (!parties)
        muster_end(m);
    else if (due_ns)
        fl_timer_arm(l, &m->late, due_ns);
    *out = m;
    return FL_OK;
}

void fl_muster_name(struct fl_muster *m, unsigned i, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(m->parties[i].name, sizeof(m->parties[i].name), fmt, ap);
    va_end(ap);
}

void fl_muster_at(struct fl_muster *m, unsigned i, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(m->parties[i].at, sizeof(m->parties[i].at), fmt, ap);
    va_end(ap);
}

static void first_failure(struct fl_muster *m, const struct party *p, enum fl_status st,
                          const struct fl_err *err)
{
    fl_err_set(&m->err, st, err ? err->origin : FL_FROM_SELF, err ? err->native : 0,
               p->at[0] ? "%s: %s (%s): %s" : "%s: %s%s: %s", m->what, p->name, p->at,
               err && err->text[0] ? err->text : fl_status_name(st));
}

static void check_whole(struct fl_muster *m)
{
    if (m->missing && !(m->hasty && m->failures))
        return;
    if (m->n && m->excused == m->n)
        fl_fail(&m->err, FL_UNREACHABLE, "%s: %s%s gone", m->what, m->parties[0].name,
                m->n > 1 ? " and all others are" : " is");
    muster_end(m);
}

void fl_muster_in(struct fl_muster *m, unsigned i, enum fl_status st, const struct fl_err *err)
{
    struct party *p = &m->parties[i];

    if (m->ended || p->st != FL_AGAIN)
        return;
    if (st == FL_AGAIN)
        st = FL_EXHAUSTED; /* "not now" from a party is final for this wait */
    p->st = st;
    m->missing--;
    if (st != FL_OK && m->failures++ == 0)
        first_failure(m, p, st, err);
    check_whole(m);
}

void fl_muster_excuse(struct fl_muster *m, unsigned i)
{
    struct party *p = &m->parties[i];

    if (m->ended || p->st != FL_AGAIN)
        return;
    p->st = FL_UNREACHABLE;
    m->missing--;
    m->excused++;
    check_whole(m);
}

void fl_muster_hasty(struct fl_muster *m)
{
    m->hasty = true;
}

enum fl_status fl_muster_status(const struct fl_muster *m, unsigned i)
{
    return m->parties[i].st;
}

void fl_muster_destroy(struct fl_muster *m)
{
    if (!m)
        return;
    fl_timer_cancel(&m->late);
    fl_task_cancel(m->loop, &m->tell);
    free(m);
}
