#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/log.h"
#include "head/state.h"

static const char *const state_names[NODE_STATES] = { "JOINING", "READY", "SUSPECT", "LOST",
                                                      "LEFT" };
static const char *const event_names[] = { "join",   "joined",  "beat", "cut",
                                           "silent", "expired", "left" };

const char *node_state_name(enum node_state s)
{
    return s < NODE_STATES ? state_names[s] : "?";
}

static uint64_t wall_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t); /* shown to people; nothing is decided by it */
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void offer(struct node *n)
{
    if (!n->joined_ms || n->left_ms)
        n->joined_ms = wall_ms();
    n->left_ms = 0;
    n->reported = true;
    head_resources_changed(n->head);
}

static void hold(struct node *n)
{
    head_resources_changed(n->head); /* less than before: what waits hears another reason */
}

static void drop(struct node *n)
{
    n->left_ms = wall_ms();
    head_resources_changed(n->head);
}

static void leave(struct node *n)
{
    n->left_ms = wall_ms();
    head_resources_changed(n->head);
}

/* clang-format off */
const struct node_edge node_edges[] = { /* from, on, to, action */
    { NODE_LOST,    NODE_EV_JOIN,    NODE_JOINING, NULL  },
    { NODE_GONE,    NODE_EV_JOIN,    NODE_JOINING, NULL  },
    { NODE_SUSPECT, NODE_EV_JOIN,    NODE_JOINING, NULL  },
    { NODE_READY,   NODE_EV_JOIN,    NODE_JOINING, hold  }, /* a new stream before the old one ended */
    { NODE_JOINING, NODE_EV_JOINED,  NODE_READY,   offer },
    { NODE_JOINING, NODE_EV_CUT,     NODE_SUSPECT, NULL  },
    { NODE_JOINING, NODE_EV_EXPIRED, NODE_LOST,    drop  },
    { NODE_JOINING, NODE_EV_LEFT,    NODE_GONE,    leave },
    { NODE_READY,   NODE_EV_CUT,     NODE_SUSPECT, hold  },
    { NODE_READY,   NODE_EV_SILENT,  NODE_SUSPECT, hold  },
    { NODE_READY,   NODE_EV_EXPIRED, NODE_LOST,    drop  }, /* swept so late that both came at once */
    { NODE_READY,   NODE_EV_LEFT,    NODE_GONE,    leave },
    { NODE_SUSPECT, NODE_EV_BEAT,    NODE_READY,   offer },
    { NODE_SUSPECT, NODE_EV_EXPIRED, NODE_LOST,    drop  },
    { NODE_SUSPECT, NODE_EV_LEFT,    NODE_GONE,    leave },
};
/* clang-format on */
const size_t node_edges_n = FL_LEN(node_edges);

bool node_event(struct node *n, enum node_event ev)
{
    for (size_t i = 0; i < node_edges_n; i++) {
        const struct node_edge *e = &node_edges[i];

        if (e->from != n->state || e->on != ev)
            continue;
        if (e->to == NODE_READY || e->to == NODE_LOST || e->to == NODE_GONE)
            fl_info("node %s node=%s address=%s was=%s on=%s",
                    e->to == NODE_READY  ? "ready"
                    : e->to == NODE_LOST ? "lost"
                                         : "left",
                    n->rec->name, n->rec->address, state_names[e->from], event_names[ev]);
        n->state = e->to;
        if (e->act)
            e->act(n);
        head_kick(n->head);
        return true;
    }
    return false;
}

void nodes_await(struct head *h)
{
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp) {
        n->reported = false;
        n->beat_ns = fl_loop_now_ns(h->loop);
        n->state = n->rec->fate == FL__NODE_FATE__NODE_IN     ? NODE_SUSPECT
                   : n->rec->fate == FL__NODE_FATE__NODE_LEFT ? NODE_GONE
                                                              : NODE_LOST;
    }
}

bool nodes_all_in(struct head *h)
{
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp)
        if (n->rec->fate == FL__NODE_FATE__NODE_IN && !n->reported)
            return false;
    return true;
}

/* On disk. What it says may not arrive here while what is said to it does: then it ends at once what it runs, as it would
 * when it came back. */
static void fenced(struct after *a, enum fl_status st, const struct fl_err *err)
{
    struct fl_node_id id;
    struct node *n;
    Fl__Shutdown m = FL__SHUTDOWN__INIT;

    memcpy(&id, a->key, sizeof(id));
    n = node_find(a->head, &id);
    if (st != FL_OK)
        fl_error("that a node is fenced could not be kept why=\"%s\"", err->text);
    if (n && n->state == NODE_LOST && n->up) {
        m.why = (char *)(uintptr_t)"the head heard nothing of it for too long";
        if (st == FL_OK)
            (void)node_tell(n, FL_NODE_FENCED, &m, NULL); /* or it hears so when it comes back */
        uplink_close(n->up, FL_STALE, "fenced: silent for too long");
    }
    free(a);
}

/* Once: the record is what frees its leases and ends its seats. */
static void fence(struct node *n, uint64_t silent_ms)
{
    Fl__NodeRec rec = *n->rec;
    struct after *a = after_new(n->head, fenced);
    struct fl_err err;
    char why[128];

    static_assert(sizeof(struct fl_node_id) <= sizeof(a->key), "an id fits");
    memcpy(a->key, n->rec->who->id.data, sizeof(struct fl_node_id));

    snprintf(why, sizeof(why), "was silent for %" PRIu64 " ms and is fenced", silent_ms);
    rec.has_fate = true;
    rec.fate = FL__NODE_FATE__NODE_FENCED;
    rec.why = why;
    if (head_record(n->head, REC_NODE, &rec, a, &err) != FL_OK) {
        fl_warn("node cannot be fenced yet node=%s why=\"%s\"", n->rec->name, err.text);
        return;
    }
    fl_metric_add(n->head->count.fenced, 1);
    fl_warn("node fenced node=%s address=%s silent_ms=%" PRIu64, n->rec->name, n->rec->address,
            silent_ms);
    node_event(n, NODE_EV_EXPIRED);
}

/* A head that was itself stopped or suspended saw no beat meanwhile, and nobody is to blame: what
 * it was late by is taken off everybody's silence. */
static uint64_t own_absence(struct head *h, uint64_t now_ns)
{
    uint64_t since = now_ns - h->swept_ns, usual = (uint64_t)h->cfg.beat_ms * 2 * 1000000;
    uint64_t late = h->swept_ns && since > usual ? since : 0;

    if (late)
        fl_warn("head was away itself ms=%" PRIu64 " nodes get that time again", late / 1000000);
    h->swept_ns = now_ns;
    return late;
}

void nodes_sweep(struct head *h, uint64_t now_ns)
{
    uint64_t absent = own_absence(h, now_ns);
    struct node *n, *tmp;

    HASH_ITER (hh, h->nodes, n, tmp) {
        if (n->rec->fate != FL__NODE_FATE__NODE_IN)
            continue;
        n->beat_ns += absent;
        if (n->beat_ns > now_ns)
            n->beat_ns = now_ns;
        uint64_t silent_ms = (now_ns - n->beat_ns) / 1000000;
        if (silent_ms >= h->cfg.silent_ms)
            fence(n, silent_ms);
        else if (silent_ms >= 3u * h->cfg.beat_ms)
            node_event(n, NODE_EV_SILENT);
    }
}

/* By itself and soon: what was told to stop, and what ran for long, says nothing about the node. */
void node_ended(struct node *n, const Fl__Exit *x)
{
    bool fault = (x->cause == EXIT_EXITED && x->code != 0) || x->cause == EXIT_SIGNALLED || x->cause == EXIT_EXEC_FAILED;
    bool was = node_troubled(n);

    if (!fault || x->lived_ms >= HEAD_FAULT_S * 1000ull)
        return;
    memmove(&n->bad_ns[1], &n->bad_ns[0], sizeof(n->bad_ns) - sizeof(n->bad_ns[0]));
    n->bad_ns[0] = fl_loop_now_ns(n->head->loop);
    snprintf(n->bad_why, sizeof(n->bad_why), "%s", x->why ? x->why : "no cause was told");
    if (!was && node_troubled(n))
        fl_warn("node is avoided node=%s ends=%d within_s=%d last=\"%s\"", n->rec->name, HEAD_BAD_ENDS, HEAD_FAULT_S, n->bad_why);
}

bool node_troubled(const struct node *n)
{
    uint64_t first = n->bad_ns[HEAD_BAD_ENDS - 1];

    return first && fl_loop_now_ns(n->head->loop) - first < HEAD_FAULT_S * 1000000000ull;
}

void nodes_forget_old(struct head *h)
{
    Fl__GoneRec rec = FL__GONE_REC__INIT;
    struct node *n, *tmp, *oldest = NULL;
    unsigned out = 0;

    HASH_ITER (hh, h->nodes, n, tmp) {
        if (n->rec->fate == FL__NODE_FATE__NODE_IN || n->up)
            continue;
        oldest = oldest ? oldest : n; /* the table keeps the order in which they came */
        out++;
    }
    if (out <= HEAD_NODES_OUT)
        return;
    rec.nodes = &oldest->rec->who->id;
    rec.n_nodes = 1;
    (void)head_record(h, REC_GONE, &rec, NULL, NULL); /* one a sweep; tried again at the next */
}
