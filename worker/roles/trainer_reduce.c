/* One sum over the ranks: each sends its own to rank 0 and gets the whole back. Rank 0 adds in the
 * order of learner.h, whoever comes first. */
#include "worker/roles/trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "common/conf/json.h"

enum { WAIT_MS = 1000 };

struct gather {
    struct furlong_call **calls; /* by rank; NULL: not there yet */
    void **sums;
    uint32_t there;
};

static enum fl_status gather_check(const struct trainer *t, const struct furlong_event *ev,
                                   uint64_t version, uint32_t part, size_t bytes, int64_t *rank,
                                   struct fl_err *err)
{
    json_t *o = NULL;
    int64_t v = 0, p = 0;
    enum fl_status st;

    if (ev->what != FURLONG_CALL || strcmp(ev->method, "reduce"))
        return fl_fail(err, FL_UNSUPPORTED, "%s: this lane takes reduce alone", ev->method);
    FL_TRY(role_body(ev, &o, err));
    struct fl_json_at at = fl_json_root(o, "reduce");
    st = fl_json_int(&at, "rank", 1, (int64_t)t->seat->world - 1, rank, err);
    if (st == FL_OK)
        st = fl_json_int(&at, "version", 0, INT64_MAX, &v, err);
    if (st == FL_OK)
        st = fl_json_int(&at, "part", 0, UINT32_MAX, &p, err);
    json_decref(o);
    FL_TRY(st);
    if ((uint64_t)v != version || (uint32_t)p != part || ev->blob_bytes != bytes)
        return fl_fail(
            err, FL_STALE,
            "reduce of version %jd part %jd with %zu bytes: rank 0 is at version %ju part %u "
            "with %zu",
            (intmax_t)v, (intmax_t)p, ev->blob_bytes, (uintmax_t)version, part, bytes);
    return FL_OK;
}

static enum fl_status gather_one(struct trainer *t, struct gather *g, uint64_t version,
                                 uint32_t part, size_t bytes, uint32_t wait_ms, struct fl_err *err)
{
    struct furlong_event ev;
    struct fl_err why;
    int64_t rank = 0;

    FL_TRY(furlong_next(t->f, TRAINER_LANE, wait_ms, &ev, err));
    enum fl_status st = gather_check(t, &ev, version, part, bytes, &rank, &why);
    if (st == FL_OK && g->calls[rank])
        st = fl_fail(&why, FL_EXISTS, "reduce of rank %jd came twice", (intmax_t)rank);
    if (st != FL_OK) { /* its sender hears it; we wait for the right one */
        role_refuse(ev.call, st, &why);
        return FL_OK;
    }
    g->calls[rank] = ev.call;
    g->sums[rank] = (void *)(uintptr_t)ev.blob; /* ours to add to until the call is answered */
    g->there++;
    return FL_OK;
}

static enum fl_status gather_all(struct trainer *t, struct gather *g, uint64_t version,
                                 uint32_t part, size_t bytes, struct fl_err *err)
{
    double due = role_now_s() + t->args.flags.silence_timeout_s;

    while (g->there + 1 < t->seat->world) {
        enum fl_status st = gather_one(t, g, version, part, bytes, WAIT_MS, err);
        char late[128] = "";
        int len = 0;

        if (st == FL_OK || (st == FL_AGAIN && role_now_s() < due))
            continue;
        if (st != FL_AGAIN)
            return st;
        for (uint32_t r = 1; r < t->seat->world && len < 100; r++)
            if (!g->calls[r])
                len += snprintf(late + len, sizeof(late) - (size_t)len, " %u", r);
        return fl_fail(err, FL_TIMEOUT, "gradients of trainer ranks%s did not come in %.0f s", late,
                       t->args.flags.silence_timeout_s);
    }
    return FL_OK;
}

static enum fl_status at_root(struct trainer *t, uint64_t version, uint32_t part, void *sum,
                              size_t bytes, struct fl_err *err)
{
    uint32_t world = t->seat->world;
    struct gather g = { calloc(world, sizeof(*g.calls)), calloc(world, sizeof(*g.sums)), 0 };
    enum fl_status st =
        g.calls && g.sums ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for %u ranks", world);

    if (st == FL_OK)
        st = gather_all(t, &g, version, part, bytes, err);
    if (st == FL_OK) {
        g.sums[0] = sum;
        learner_fold(g.sums, world, bytes);
    }
    for (uint32_t r = 1; g.calls && r < world; r++) {
        struct furlong_data d = { .blob = sum, .blob_bytes = bytes };

        if (g.calls[r] && st == FL_OK)
            furlong_reply_data(g.calls[r], &d);
        else if (g.calls[r])
            role_refuse(g.calls[r], st, err);
    }
    free(g.calls);
    free(g.sums);
    return st;
}

static enum fl_status at_leaf(struct trainer *t, uint64_t version, uint32_t part, void *sum,
                              size_t bytes, struct fl_err *err)
{
    struct furlong_peer *root;
    struct furlong_answer answer = { 0 };
    char body[96];
    int len = snprintf(body, sizeof(body), "{\"rank\":%u,\"version\":%ju,\"part\":%u}",
                       t->seat->rank, (uintmax_t)version, part);
    struct furlong_data d = { body, (size_t)len, sum, bytes };

    FL_TRY(furlong_peer(t->f, t->seat->role, 0, &root, err));
    FL_TRY(furlong_ask(root, TRAINER_LANE, "reduce", &d,
                       (uint32_t)(t->args.flags.silence_timeout_s * 1000), &answer, err));
    enum fl_status st =
        answer.blob_bytes == bytes
            ? FL_OK
            : fl_fail(err, FL_CORRUPT, "trainer rank 0 answered reduce with %zu bytes, not %zu",
                      answer.blob_bytes, bytes);

    if (st == FL_OK)
        memcpy(sum, answer.blob, bytes);
    furlong_answer_free(&answer);
    return st;
}

enum fl_status trainer_reduce(struct trainer *t, uint64_t version, uint32_t part, void *sum,
                              size_t bytes, struct fl_err *err)
{
    if (FL_FAULT("trainer.reduce"))
        return fl_fail_errno(err, "reduce");
    if (t->seat->world == 1)
        return FL_OK;
    return t->seat->rank == 0 ? at_root(t, version, part, sum, bytes, err)
                              : at_leaf(t, version, part, sum, bytes, err);
}
