#include "worker/node/leases.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "common/proto/pb.h"
#include <stdlib.h>

enum { FILE_MAX = 4 << 20, HOLD_MAX_MS = 600000 };

struct leases {
    struct fl_loop *loop;
    struct leases_config cfg;
    char path[FL_PATH_MAX];
    Fl__Lease *list[LEASES_MAX];
    uint64_t due_ns[LEASES_MAX]; /* of PREPARED */
    size_t n;
    struct fl_timer hold;
};

static size_t find(const struct leases *s, uint64_t id)
{
    size_t i = 0;

    while (i < s->n && s->list[i]->id != id)
        i++;
    return i;
}

static void drop(struct leases *s, size_t i)
{
    fl__lease__free_unpacked(s->list[i], NULL);
    s->n--;
    s->list[i] = s->list[s->n];
    s->due_ns[i] = s->due_ns[s->n];
}

/* ---- on disk ---- */

static enum fl_status store(const struct leases *s, struct fl_err *err)
{
    Fl__NodeLeases all = FL__NODE_LEASES__INIT;
    Fl__Lease *list[LEASES_MAX];
    enum fl_status st;

    all.leases = list;
    for (size_t i = 0; i < s->n; i++)
        if (s->list[i]->state != FL__LEASE_STATE__PREPARED)
            list[all.n_leases++] = s->list[i];
    size_t len = fl__node_leases__get_packed_size(&all);
    uint8_t *buf = malloc(len ? len : 1);

    if (!buf || FL_FAULT("node.leases.store"))
        st = fl_fail(err, FL_EXHAUSTED, "no room to write %s", s->path);
    else
        st = fl_file_write(s->path, 0600, buf, fl__node_leases__pack(&all, buf), err);
    free(buf);
    return st;
}

static enum fl_status load(struct leases *s, struct fl_err *err)
{
    char *raw;
    size_t len;
    enum fl_status st = fl_file_read(s->path, FILE_MAX, &raw, &len, err);

    if (st == FL_NOT_FOUND)
        return FL_OK;
    FL_TRY(st);
    Fl__NodeLeases *all = pb_unpack(&fl__node_leases__descriptor, raw, len, NULL);

    free(raw);
    if (!all || all->n_leases > LEASES_MAX) {
        if (all)
            fl__node_leases__free_unpacked(all, NULL);
        return fl_fail(err, FL_CORRUPT, "%s (%zu bytes) is not a list of leases", s->path, len);
    }
    for (size_t i = 0; i < all->n_leases; i++)
        s->list[s->n++] = FL_TAKE(all->leases[i]);
    all->n_leases = 0;
    fl__node_leases__free_unpacked(all, NULL);
    return FL_OK;
}

/* ---- the hold ---- */

static void hold_arm(struct leases *s)
{
    uint64_t first = UINT64_MAX;

    for (size_t i = 0; i < s->n; i++)
        if (s->list[i]->state == FL__LEASE_STATE__PREPARED && s->due_ns[i] < first)
            first = s->due_ns[i];
    fl_timer_cancel(&s->hold);
    if (first != UINT64_MAX)
        fl_timer_arm(s->loop, &s->hold, first);
}

static void on_hold(struct fl_timer *t, uint64_t now_ns)
{
    struct leases *s = container_of(t, struct leases, hold);

    for (size_t i = s->n; i-- > 0;)
        if (s->list[i]->state == FL__LEASE_STATE__PREPARED && s->due_ns[i] <= now_ns) {
            fl_warn("prepared lease ran out lease=%llu", (unsigned long long)s->list[i]->id);
            drop(s, i);
        }
    hold_arm(s);
}

enum fl_status node_leases_create(struct fl_loop *l, const struct leases_config *cfg,
                                  struct leases **out, struct fl_err *err)
{
    struct leases *s = calloc(1, sizeof(*s));
    enum fl_status st;

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory for leases");
    s->loop = l;
    s->cfg = *cfg;
    s->hold.fire = on_hold;
    (void)FL_COPY(s->path, cfg->path);
    st = load(s, err);
    if (st != FL_OK) {
        node_leases_destroy(s);
        return st;
    }
    *out = s;
    return FL_OK;
}

void node_leases_destroy(struct leases *s)
{
    if (!s)
        return;
    fl_timer_cancel(&s->hold);
    while (s->n)
        drop(s, s->n - 1);
    free(s);
}

/* ---- prepare ---- */

static const Fl__Amount *total_of(const struct leases *s, const char *name)
{
    for (size_t i = 0; i < s->cfg.inventory->n_total; i++)
        if (!strcmp(s->cfg.inventory->total[i]->name, name))
            return s->cfg.inventory->total[i];
    return NULL;
}

static bool in_message(const Fl__LeasePrepare *m, uint64_t id)
{
    for (size_t i = 0; i < m->n_leases; i++)
        if (m->leases[i]->id == id)
            return true;
    return false;
}

static int64_t amount_in(const Fl__Lease *l, const char *name)
{
    int64_t sum = 0;

    for (size_t i = 0; i < l->n_amounts; i++)
        if (!strcmp(l->amounts[i]->name, name))
            sum += l->amounts[i]->e4;
    return sum;
}

/* By the others, and by all of this message. */
static int64_t wanted_of(const struct leases *s, const Fl__LeasePrepare *m, const char *name,
                         int64_t *held)
{
    int64_t wanted = 0;

    *held = 0;
    for (size_t i = 0; i < s->n; i++)
        if (!in_message(m, s->list[i]->id))
            *held += amount_in(s->list[i], name);
    for (size_t i = 0; i < m->n_leases; i++)
        wanted += amount_in(m->leases[i], name);
    return wanted;
}

static enum fl_status check_one(const struct leases *s, const Fl__LeasePrepare *m,
                                const Fl__Lease *l, const struct fl_term *highest,
                                const struct fl_node_ref *me, struct fl_err *err)
{
    unsigned long long id = l->id;

    if (l->by->cluster.len != sizeof(highest->cluster) || l->at->id.len != sizeof(me->id))
        return fl_fail(err, FL_CORRUPT, "lease %llu: ids of %zu and %zu bytes", id,
                       l->by->cluster.len, l->at->id.len);
    if (memcmp(l->at->id.data, &me->id, sizeof(me->id)) || l->at->start != me->start)
        return fl_fail(err, FL_STALE,
                       "lease %llu is for start %llu of a daemon, this one is start %llu", id,
                       (unsigned long long)l->at->start, (unsigned long long)me->start);
    if (!memcmp(l->by->cluster.data, highest->cluster, sizeof(highest->cluster)) &&
        l->by->head < highest->head)
        return fl_fail(err, FL_STALE, "lease %llu is by term %llu, this daemon has seen %llu", id,
                       (unsigned long long)l->by->head, (unsigned long long)highest->head);
    for (size_t i = 0; i < l->n_devices; i++)
        if (l->devices[i] >= s->cfg.inventory->n_devices)
            return fl_fail(err, FL_INVALID, "lease %llu: device %u of %zu", id, l->devices[i],
                           s->cfg.inventory->n_devices);
    for (size_t i = 0; i < l->n_amounts; i++) {
        const Fl__Amount *a = l->amounts[i], *total = total_of(s, a->name);
        int64_t held, wanted = wanted_of(s, m, a->name, &held);

        if (a->e4 < 0 || !total || wanted > total->e4)
            return fl_fail(err, FL_INVALID, "lease %llu: %s %g wanted, this node has %g", id,
                           a->name, (double)wanted / 10000,
                           total ? (double)total->e4 / 10000 : 0.0);
        if (held > total->e4 - wanted)
            return fl_fail(err, FL_EXHAUSTED,
                           "lease %llu: %s %g wanted, %g of %g are held by other leases", id,
                           a->name, (double)wanted / 10000, (double)held / 10000,
                           (double)total->e4 / 10000);
    }
    return FL_OK;
}

static Fl__Lease *copy_of(const Fl__Lease *l)
{
    size_t len = fl__lease__get_packed_size(l);
    uint8_t *buf = malloc(len ? len : 1);
    Fl__Lease *copy = buf && !FL_FAULT("node.leases.copy")
                          ? fl__lease__unpack(NULL, fl__lease__pack(l, buf), buf)
                          : NULL;

    free(buf);
    return copy;
}

enum fl_status node_leases_prepare(struct leases *s, const Fl__LeasePrepare *m,
                                   const struct fl_term *highest, const struct fl_node_ref *me,
                                   struct fl_err *err)
{
    size_t before = s->n;
    uint64_t now = fl_loop_now_ns(s->loop);

    if (s->n + m->n_leases > LEASES_MAX)
        return fl_fail(err, FL_EXHAUSTED, "this node holds %zu leases, at most %d", s->n,
                       LEASES_MAX);
    for (size_t i = 0; i < m->n_leases; i++)
        FL_TRY(check_one(s, m, m->leases[i], highest, me, err));
    for (size_t i = 0; i < m->n_leases; i++) {
        const Fl__Lease *l = m->leases[i];
        size_t at = find(s, l->id);

        if (at == s->n) {
            Fl__Lease *copy = copy_of(l);

            if (!copy) {
                while (s->n > before)
                    drop(s, s->n - 1);
                return fl_fail(err, FL_EXHAUSTED, "no memory for lease %llu",
                               (unsigned long long)l->id);
            }
            copy->has_state = true;
            copy->state = FL__LEASE_STATE__PREPARED;
            s->list[s->n++] = copy;
        }
        uint64_t hold = l->has_hold_ms && l->hold_ms < HOLD_MAX_MS ? l->hold_ms : HOLD_MAX_MS;

        s->due_ns[at] = now + hold * 1000000;
    }
    hold_arm(s);
    return FL_OK;
}

/* ---- commit and release ---- */

enum fl_status node_leases_commit(struct leases *s, const uint64_t *ids, size_t n,
                                  struct fl_err *err)
{
    bool was[LEASES_MAX] = { false };
    enum fl_status st;

    for (size_t i = 0; i < n; i++)
        if (find(s, ids[i]) == s->n)
            return fl_fail(err, FL_NOT_FOUND,
                           "lease %llu is not held here; a prepared one ends with its hold",
                           (unsigned long long)ids[i]);
    for (size_t i = 0; i < n; i++) {
        size_t at = find(s, ids[i]);

        if (s->list[at]->state == FL__LEASE_STATE__PREPARED) {
            was[at] = true;
            s->list[at]->state = FL__LEASE_STATE__COMMITTED;
        }
    }
    st = store(s, err);
    for (size_t i = 0; i < s->n && st != FL_OK; i++)
        if (was[i])
            s->list[i]->state = FL__LEASE_STATE__PREPARED;
    hold_arm(s);
    return st;
}

void node_leases_release(struct leases *s, uint64_t id)
{
    size_t at = find(s, id);

    if (at < s->n)
        s->list[at]->state = FL__LEASE_STATE__RELEASING;
}

/* The file may lag behind: a lease that is in it and gone here is released once more after a crash.
 */
static void store_or_say(const struct leases *s)
{
    struct fl_err err;

    if (store(s, &err) != FL_OK)
        fl_warn("leases not written why=\"%s\"", err.text);
}

void node_leases_sweep(struct leases *s)
{
    size_t before = s->n;

    for (size_t i = s->n; i-- > 0;)
        if (s->list[i]->state == FL__LEASE_STATE__RELEASING &&
            !s->cfg.used(s->cfg.arg, s->list[i]->id))
            drop(s, i);
    if (s->n != before)
        store_or_say(s);
    hold_arm(s);
}

void node_leases_clear(struct leases *s)
{
    while (s->n)
        drop(s, s->n - 1);
    store_or_say(s);
    hold_arm(s);
}

bool node_leases_has(const struct leases *s, uint64_t id)
{
    return find(s, id) < s->n;
}

bool node_leases_committed(const struct leases *s, uint64_t id)
{
    size_t at = find(s, id);

    return at < s->n && s->list[at]->state == FL__LEASE_STATE__COMMITTED;
}

size_t node_leases_count(const struct leases *s)
{
    return s->n;
}

Fl__Lease *const *node_leases_list(const struct leases *s, size_t *n)
{
    *n = s->n;
    return s->list;
}
