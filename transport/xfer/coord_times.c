/* transport/xfer/coord_times.c - when each rank was asked and had answered, phase by phase: the
 * table of an update that did not end well
 *
 * Times are the coordinator's, from the update's begin on: clocks of hosts are never compared. */
#include <string.h>
#include "common/base/log.h"
#include "common/base/str.h"
#include "transport/xfer/coord_priv.h"

enum { SAID_RANKS = 64 }; /* of one update: of more ranks those that are late come first */
static const struct {
    enum co_step step;
    const char *name;
} columns[] = {
    { CO_RECONCILE, "reconcile" }, { CO_GIVE, "prepare" },  { CO_STAGE, "transfer" },
    { CO_COMMIT, "commit" },       { CO_RESUME, "resume" }, { CO_END, "end" },
};

void co_times_begin(struct xfer_coord *c)
{
    for (struct co_member *m = c->members; m; m = m->next)
        memset(m->times, 0, sizeof(m->times));
}

void co_times_asked(struct co_member *m)
{
    m->times[m->c->step] = (struct co_time){ .asked_ns = fl_loop_now_ns(m->c->loop) };
}

void co_times_in(struct co_member *m, enum fl_status st)
{
    struct co_time *t = &m->times[m->c->step];

    if (!m->mustered || t->in_ns)
        return;
    t->in_ns = fl_loop_now_ns(m->c->loop);
    t->st = st;
}

static bool is_late(const struct co_member *m)
{
    for (size_t i = 0; i < FL_LEN(columns); i++) {
        const struct co_time *t = &m->times[columns[i].step];

        if (t->asked_ns && (!t->in_ns || t->st != FL_OK))
            return true;
    }
    return false;
}

static void say(const struct co_member *m, enum fl_log_level level)
{
    const struct xfer_coord *c = m->c;
    char text[300];
    struct fl_str s = FL_STR_ON(text);

    for (size_t i = 0; i < FL_LEN(columns); i++) {
        const struct co_time *t = &m->times[columns[i].step];

        fl_str_add(&s, " %s_ms=", columns[i].name);
        if (!t->asked_ns)
            fl_str_add(&s, "-");
        else if (!t->in_ns)
            fl_str_add(&s, "%.1f..,late", (double)(t->asked_ns - c->run_ns) / 1e6);
        else
            fl_str_add(&s, "%.1f..%.1f%s", (double)(t->asked_ns - c->run_ns) / 1e6,
                       (double)(t->in_ns - c->run_ns) / 1e6,
                       t->st == FL_OK        ? ""
                       : t->st == FL_TIMEOUT ? ",late"
                                             : ",failed");
    }
    fl_log(level, "weights update rank set=%s epoch=%u.%u who=\"%s\"%s%s", c->set,
           c->rep.epoch.attempt, c->rep.epoch.seq, m->me.name, text, m->gone ? " gone" : "");
}

void co_times_say(const struct xfer_coord *c, enum fl_log_level level)
{
    unsigned n = 0;

    for (unsigned pass = 0; pass < 2; pass++)
        for (const struct co_member *m = c->members; m && n < SAID_RANKS; m = m->next)
            if (is_late(m) == (pass == 0)) {
                say(m, level);
                n++;
            }
}
