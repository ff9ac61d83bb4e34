#include "worker/node/holders.h"

#include <stdlib.h>

#include "common/base/log.h"
#include "common/gpu/watch.h"
#include "worker/keep/tree.h"

enum { USES_MAX = 256, UP_MAX = 24 /* parents between a process and its keeper */ };
#define SLOW_SAID_NS (600ull * 1000000000) /* heat comes and goes: a device is named so often */

struct use {
    uint32_t device;
    int pid, up[UP_MAX]; /* its parents, the nearest first */
    uint64_t bytes;
    int sm_pct;
};
struct told { /* plain, so that two of them compare */
    uint32_t device;
    int pid;
    uint64_t bytes;
    struct fl_seat_ref who;
    int sm_pct;
    bool known;
};
struct slowed { /* by heat, or by the power brake */
    bool told;
    uint32_t device[NODE_DEVICES_SEEN];
    size_t n;
};
struct holders {
    struct node *node;
    struct fl_work work;
    bool looking, dead, told_any, changed, said;
    /* the pool's while it looks */
    struct gpu_watch *watch; /* of its own: the daemon's may close meanwhile */
    const char *lib;
    char uuid[NODE_DEVICES_SEEN][48];
    size_t n_devices, n_found;
    struct use found[USES_MAX];
    struct slowed slow_found;
    struct fl_err err;
    /* the loop's */
    struct told now[USES_MAX];
    size_t n_now;
    struct slowed slow;
    uint64_t slow_said_ns[NODE_DEVICES_SEEN];
    Fl__DeviceUse use[USES_MAX], *list[USES_MAX];
    Fl__SeatRef ref[USES_MAX];
};

static void climb(struct use *u)
{
    struct tree_stat st = { .ppid = u->pid };
    size_t n = 0;

    for (int at = u->pid; n < UP_MAX && at > 1 && tree_stat(at, &st); at = st.ppid)
        u->up[n++] = at;
    if (n < UP_MAX)
        u->up[n] = 0;
}

static void look_slowed(struct holders *h)
{
    struct slowed *s = &h->slow_found;

    *s = (struct slowed){ 0 };
    for (size_t i = 0; i < h->n_devices; i++) {
        bool slowed = false;

        if (!h->uuid[i][0] || gpu_watch_slowed(h->watch, h->uuid[i], &slowed, NULL) != FL_OK)
            continue;
        s->told = true;
        if (slowed)
            s->device[s->n++] = (uint32_t)i;
    }
}

static void look(struct fl_work *w) /* pool thread */
{
    struct holders *h = container_of(w, struct holders, work);
    struct gpu_proc procs[USES_MAX];

    h->n_found = 0;
    h->err.status = h->watch ? FL_OK : gpu_watch_open(h->lib, &h->watch, &h->err);
    if (h->err.status == FL_OK)
        look_slowed(h);
    for (size_t i = 0; i < h->n_devices && h->err.status == FL_OK; i++) {
        size_t n = USES_MAX - h->n_found;

        h->err.status =
            h->uuid[i][0] ? gpu_watch_procs(h->watch, h->uuid[i], procs, &n, &h->err) : FL_OK;
        if (h->uuid[i][0] && h->err.status == FL_OK)
            gpu_watch_busy(h->watch, h->uuid[i], procs, n);
        for (size_t k = 0; h->uuid[i][0] && h->err.status == FL_OK && k < n; k++) {
            struct use *u = &h->found[h->n_found++];

            *u = (struct use){ .device = (uint32_t)i,
                               .pid = procs[k].pid,
                               .bytes = procs[k].bytes,
                               .sm_pct = procs[k].sm_pct };
            climb(u);
        }
    }
}

static struct worker *owner(struct node *n, const struct use *u)
{
    for (struct worker *w = n->workers; w; w = w->hh.next)
        for (size_t i = 0; i < UP_MAX && u->up[i] && w->pid > 0; i++)
            if (u->up[i] == w->pid || u->up[i] == w->keeper_pid)
                return w;
    return NULL;
}

static int by_place(const void *a, const void *b)
{
    const struct told *x = a, *y = b;

    return x->device != y->device ? (x->device < y->device ? -1 : 1)
                                  : (x->pid > y->pid) - (x->pid < y->pid);
}

static void say_slowed(struct holders *h)
{
    uint64_t now = fl_loop_now_ns(h->node->loop);

    for (size_t i = 0; i < h->slow.n; i++) {
        uint32_t d = h->slow.device[i];

        if (h->slow_said_ns[d] && now - h->slow_said_ns[d] < SLOW_SAID_NS)
            continue;
        h->slow_said_ns[d] = now;
        fl_warn("device is slowed by heat or by the power brake: steps take longer device=%s",
                h->uuid[d]);
    }
}

static void looked(struct fl_work *w, enum fl_status st)
{
    struct holders *h = container_of(w, struct holders, work);
    struct told now[USES_MAX];
    size_t n = 0;

    h->looking = false;
    if (h->dead) {
        gpu_watch_close(h->watch);
        free(h);
        return;
    }
    h->slow = st == FL_OK ? h->slow_found : (struct slowed){ 0 };
    say_slowed(h);
    if (st == FL_OK)
        st = h->err.status;
    if (st != FL_OK) {
        if (!h->said)
            fl_info("who uses the devices is not told why=\"%s\"", h->err.text);
        h->said = true;
        return;
    }
    memset(now, 0, sizeof(now)); /* also between the members: they are compared as bytes */
    for (; n < h->n_found; n++) {
        struct worker *o = owner(h->node, &h->found[n]);

        now[n].device = h->found[n].device;
        now[n].pid = h->found[n].pid;
        now[n].bytes = h->found[n].bytes;
        now[n].sm_pct = h->found[n].sm_pct;
        now[n].known = o != NULL;
        if (o)
            now[n].who = o->who;
    }
    qsort(now, n, sizeof(now[0]), by_place);
    h->changed |= !h->told_any || n != h->n_now || memcmp(now, h->now, n * sizeof(now[0])) != 0;
    memcpy(h->now, now, n * sizeof(now[0]));
    h->n_now = n;
    h->told_any = true;
}

enum fl_status node_holders_create(struct node *n, struct holders **out, struct fl_err *err)
{
    struct holders *h = calloc(1, sizeof(*h));

    if (!h)
        return fl_fail(err, FL_EXHAUSTED, "no memory to watch devices");
    h->node = n;
    h->lib = n->cfg.nvml;
    h->work = (struct fl_work){ .work = look, .done = looked };
    for (; h->n_devices < n->inventory->n_devices && h->n_devices < NODE_DEVICES_SEEN;
         h->n_devices++) {
        const Fl__Device *d = n->inventory->devices[h->n_devices];

        if (d->uuid)
            (void)FL_COPY(h->uuid[h->n_devices], d->uuid);
    }
    *out = h;
    return FL_OK;
}

void node_holders_destroy(struct holders *h)
{
    if (!h)
        return;
    h->dead = true;
    if (h->looking)
        return; /* looked() ends it */
    gpu_watch_close(h->watch);
    free(h);
}

void node_holders_look(struct holders *h)
{
    if (!h || h->looking)
        return;
    h->looking = true;
    fl_work_start(h->node->loop, &h->work);
}

void node_holders_anew(struct holders *h)
{
    if (h)
        h->changed = h->told_any;
}

void node_holders_fill(struct holders *h, Fl__Beat *m)
{
    if (h && h->slow.told) {
        m->has_slowed_told = m->slowed_told = true;
        m->slowed = h->slow.device;
        m->n_slowed = h->slow.n;
    }
    if (!h || !h->changed)
        return;
    h->changed = false;
    m->has_uses_told = m->uses_told = true;
    m->uses = h->list;
    m->n_uses = h->n_now;
    for (size_t i = 0; i < h->n_now; i++) {
        Fl__DeviceUse *u = &h->use[i];

        *u = (Fl__DeviceUse)FL__DEVICE_USE__INIT;
        u->device = h->now[i].device;
        u->pid = h->now[i].pid;
        u->has_bytes = h->now[i].bytes != UINT64_MAX;
        u->bytes = u->has_bytes ? h->now[i].bytes : 0;
        u->has_sm_pct = h->now[i].sm_pct >= 0;
        u->sm_pct = u->has_sm_pct ? (uint32_t)h->now[i].sm_pct : 0;
        if (h->now[i].known) {
            h->ref[i] = (Fl__SeatRef)FL__SEAT_REF__INIT;
            h->ref[i].worker =
                (ProtobufCBinaryData){ sizeof(h->now[i].who.id), (uint8_t *)&h->now[i].who.id };
            h->ref[i].attempt = h->now[i].who.attempt;
            u->who = &h->ref[i];
        }
        h->list[i] = u;
    }
}
