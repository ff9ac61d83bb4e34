/* common/base/timer.c - timers in a pairing heap whose links lie in the timers themselves
 *
 * Arming allocates nothing, so it cannot fail: a deadline that could not be set would be a hang. */
#include <assert.h>

#include "common/base/loop_priv.h"

static bool earlier(const struct fl_timer *a, const struct fl_timer *b)
{
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->seq < b->seq;
}

/* Two heaps become one. prev of a first child is its parent, of others the sibling before. */
static struct fl_timer *meld(struct fl_timer *a, struct fl_timer *b)
{
    if (!a || !b)
        return a ? a : b;
    if (earlier(b, a)) {
        struct fl_timer *t = a;

        a = b;
        b = t;
    }
    b->prev = a;
    b->next = a->child;
    if (a->child)
        a->child->prev = b;
    a->child = b;
    return a;
}

/* The children of a node that goes: melded in pairs, then the pairs from the last to the first.
 * Loops, not recursion: a heap may be as wide as it has timers. */
static struct fl_timer *meld_siblings(struct fl_timer *first)
{
    struct fl_timer *pairs = NULL, *all = NULL;

    while (first) {
        struct fl_timer *a = first, *b = a->next;

        first = b ? b->next : NULL;
        a->next = a->prev = NULL;
        if (b)
            b->next = b->prev = NULL;
        a = meld(a, b);
        a->next = pairs; /* a stack of roots, by next alone */
        pairs = a;
    }
    while (pairs) {
        struct fl_timer *a = pairs;

        pairs = a->next;
        a->next = NULL;
        all = meld(all, a);
    }
    return all;
}

static void heap_remove(struct fl_loop *l, struct fl_timer *t)
{
    struct fl_timer *below = meld_siblings(t->child);

    t->child = NULL;
    if (t == l->timers) {
        l->timers = below;
    } else {
        if (t->prev->child == t)
            t->prev->child = t->next;
        else
            t->prev->next = t->next;
        if (t->next)
            t->next->prev = t->prev;
        l->timers = meld(l->timers, below);
    }
    t->next = t->prev = NULL;
}

static void due_remove(struct fl_loop *l, struct fl_timer *t)
{
    if (t->prev)
        t->prev->next = t->next;
    else
        l->due = t->next;
    if (t->next)
        t->next->prev = t->prev;
    t->next = t->prev = NULL;
    t->due = false;
}

void fl_timer_cancel(struct fl_timer *t)
{
    if (!t->loop)
        return;
    if (t->due)
        due_remove(t->loop, t);
    else
        heap_remove(t->loop, t);
    t->loop = NULL;
}

void fl_timer_arm(struct fl_loop *l, struct fl_timer *t, uint64_t due_ns)
{
    assert(!t->loop || t->loop == l);
    fl_timer_cancel(t);
    t->loop = l;
    t->due_ns = due_ns;
    t->seq = ++l->timer_seq;
    t->child = t->next = t->prev = NULL;
    l->timers = meld(l->timers, t);
}

void fl_timer_arm_in(struct fl_loop *l, struct fl_timer *t, uint64_t in_ms)
{
    fl_timer_arm(l, t, l->now_ns + in_ms * 1000000u);
}

bool fl_timers_next(const struct fl_loop *l, uint64_t *due_ns)
{
    if (l->due || !l->timers)
        return false;
    *due_ns = l->timers->due_ns;
    return true;
}

/* What is due now is set apart first: a timer that arms itself again at once waits for the next
 * turn, and one that another callback cancels leaves the list. */
unsigned fl_timers_fire(struct fl_loop *l)
{
    struct fl_timer *last = NULL, *t;
    unsigned ran = 0;

    while ((t = l->timers) && t->due_ns <= l->now_ns) {
        heap_remove(l, t);
        t->due = true;
        t->prev = last;
        if (last)
            last->next = t;
        else
            l->due = t;
        last = t;
    }
    while ((t = l->due)) {
        due_remove(l, t);
        t->loop = NULL;
        t->fire(t, l->now_ns);
        ran++;
    }
    return ran;
}

void fl_timers_forget(struct fl_loop *l)
{
    while (l->due)
        fl_timer_cancel(l->due);
    while (l->timers)
        fl_timer_cancel(l->timers);
}
