#include "worker/node/devmem.h"
#include <stdlib.h>

#include "common/base/log.h"
#include "common/gpu/watch.h"

enum {
    LOOK_MS = 20,
    LOOK_FOR_MS = 2000,
    SLACK_BYTES = 64 << 20 /* the driver's own bookkeeping moves by some MiB */
};

struct devmem {
    struct worker *worker;
    struct fl_timer look;
    uint64_t until_ns;
    void (*back)(struct worker *w);
    size_t n;
    struct {
        const char *uuid;
        uint64_t before;
    } device[];
};

static const Fl__Device *device_of(const struct node *n, const char *id)
{
    for (size_t i = 0; i < n->inventory->n_devices; i++)
        if (!strcmp(n->inventory->devices[i]->id, id))
            return n->inventory->devices[i]->uuid ? n->inventory->devices[i] : NULL;
    return NULL;
}

/* By another worker that lives. */
static bool held_by_others(const struct worker *w, const char *uuid)
{
    for (struct worker *o = w->node->workers; o; o = o->hh.next)
        for (size_t i = 0; i < o->spec->n_device_ids && o != w && !o->gone; i++) {
            const Fl__Device *d = device_of(w->node, o->spec->device_ids[i]);

            if (d && !strcmp(d->uuid, uuid))
                return true;
        }
    return false;
}

void node_devmem_before(struct worker *w)
{
    const Fl__WorkerSpec *s = w->spec;
    struct devmem *m;

    if (!s->n_device_ids || !device_of(w->node, s->device_ids[0]) || !w->node->gpus ||
        !(m = calloc(1, sizeof(*m) + s->n_device_ids * sizeof(m->device[0]))))
        return;
    m->worker = w;
    for (size_t i = 0; i < s->n_device_ids; i++) {
        const Fl__Device *d = device_of(w->node, s->device_ids[i]);
        struct fl_err err;
        uint64_t used;

        if (!d || held_by_others(w, d->uuid))
            continue;
        if (gpu_watch_used(w->node->gpus, d->uuid, &used, &err) != FL_OK) {
            fl_debug("memory of a device is not verified why=\"%s\"", err.text);
            continue;
        }
        m->device[m->n].uuid = d->uuid;
        m->device[m->n++].before = used;
    }
    if (m->n)
        w->devmem = m;
    else
        free(m);
}

static uint64_t left_over(const struct devmem *m)
{
    uint64_t left = 0, used;

    for (size_t i = 0; i < m->n; i++)
        if (!held_by_others(m->worker, m->device[i].uuid) &&
            gpu_watch_used(m->worker->node->gpus, m->device[i].uuid, &used, NULL) == FL_OK &&
            used > m->device[i].before + SLACK_BYTES)
            left += used - m->device[i].before;
    return left;
}

static void on_look(struct fl_timer *t, uint64_t now_ns)
{
    struct devmem *m = container_of(t, struct devmem, look);
    struct worker *w = m->worker;
    uint64_t left = left_over(m);

    if (left && now_ns < m->until_ns) {
        fl_timer_arm(w->node->loop, t, now_ns + LOOK_MS * 1000000ull);
        return;
    }
    if (left)
        fl_warn("memory of devices is not back worker=\"%s\" left_mib=%llu waited_ms=%d", w->name,
                (unsigned long long)(left >> 20), LOOK_FOR_MS);
    w->exit.device_bytes_left = left;
    m->back(w);
}

bool node_devmem_wait(struct worker *w, void (*back)(struct worker *w))
{
    struct devmem *m = w->devmem;
    uint64_t now = fl_loop_now_ns(w->node->loop);

    if (!m)
        return false;
    m->back = back;
    m->until_ns = now + LOOK_FOR_MS * 1000000ull;
    m->look.fire = on_look;
    fl_timer_arm(w->node->loop, &m->look, now);
    return true;
}

void node_devmem_drop(struct worker *w)
{
    if (!w->devmem)
        return;
    fl_timer_cancel(&w->devmem->look);
    free(w->devmem);
    w->devmem = NULL;
}
