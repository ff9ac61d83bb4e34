#include "transport/xfer/line.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>

static void line_on_event(void *arg, unsigned events)
{
    struct line *ln = arg;

    (void)events;
    ln->ops->progress(ln->k);
}

static void line_on_ready(struct link_op *op)
{
    struct line *ln = container_of(op, struct line, ready);

    if (ln->state != LINE_OPENING || ln->ending)
        return; /* aborted meanwhile: quiet() is what counts */
    if (op->err.status == FL_OK && ln->broken.status == FL_OK)
        ln->state = LINE_READY;
    else if (op->err.status == FL_OK)
        op->err = ln->broken;
    ln->user->ready(ln->arg, ln, op->err.status, &op->err);
}

static void line_stop_watch(struct line *ln)
{
    fl_watch_destroy(ln->watch);
    ln->watch = NULL;
}

static void line_on_quiet(struct link_op *op)
{
    struct line *ln = container_of(op, struct line, quiet);

    ln->state = LINE_QUIET;
    line_stop_watch(ln);
    if (!ln->ending)
        ln->user->quiet(ln->arg, ln);
}

enum fl_status line_open(struct fl_loop *l, const struct link_ops *ops,
                         const struct link_place *places, unsigned n, unsigned self,
                         const uint8_t *ticket, const uint64_t key[2], const struct line_user *user,
                         void *arg, struct line **out, struct fl_err *err)
{
    struct line *ln = calloc(1, sizeof(*ln));
    struct link_team team = { .members = places, .n = n, .self = self };
    enum fl_status st = FL_OK;
    int fd;

    if (!ln)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a link");
    *ln = (struct line){ .loop = l,
                         .ops = ops,
                         .user = user,
                         .arg = arg,
                         .n_members = n,
                         .self = self,
                         .key = { key[0], key[1] } };
    ln->ready.done = line_on_ready;
    ln->quiet.done = line_on_quiet;
    if (ticket)
        memcpy(ln->ticket, ticket, sizeof(ln->ticket));
    else
        st = ops->ticket(ln->ticket, err);
    memcpy(team.ticket, ln->ticket, sizeof(team.ticket));
    if (st == FL_OK)
        st = ops->open(l, &team, &ln->k, &ln->ready, err);
    if (st != FL_OK) {
        free(ln);
        return fl_wrap(err, st, "opening %s between %u members", ops->name, n);
    }
    fd = ops->event_fd(ln->k);
    if (fd >= 0 && fl_watch_create(l, fd, POLLIN, line_on_event, ln, &ln->watch, err) != FL_OK)
        ln->broken =
            *err; /* told by ready(): it is opening already, and must be aborted like any other */
    *out = ln;
    return FL_OK;
}

void line_use(struct line *ln, const struct line_user *user, void *arg)
{
    ln->user = user;
    ln->arg = arg;
}

void line_abort(struct line *ln)
{
    if (ln->state == LINE_ABORTING || ln->state == LINE_QUIET)
        return;
    ln->state = LINE_ABORTING;
    ln->ops->abort(ln->k, &ln->quiet);
}

void line_destroy(struct line *ln)
{
    if (!ln)
        return;
    ln->ending = true;
    line_stop_watch(ln);
    if (ln->k)
        ln->ops->close(ln->k);
    free(ln->who);
    free(ln);
}

void line_note_team(struct line *ln, const struct xfer_member *members)
{
    ln->who = calloc(ln->n_members, sizeof(*ln->who));
    for (unsigned i = 0; ln->who && i < ln->n_members; i++)
        ln->who[i] = members[i].who;
}

bool line_outdated(const struct line *ln, const struct xfer_member *members, unsigned n)
{
    for (unsigned i = 0; ln->who && i < ln->n_members; i++)
        for (unsigned k = 0; k < n; k++)
            if (memcmp(&ln->who[i].id, &members[k].who.id, sizeof(members[k].who.id)) == 0 &&
                ln->who[i].attempt < members[k].who.attempt)
                return true;
    return false;
}

void line_key(uint64_t out[2], const struct link_ops *ops, const struct xfer_member *members,
              unsigned n)
{
    XXH3_state_t *x = XXH3_createState();
    XXH128_hash_t h = { 0, 0 };

    if (x) {
        XXH3_128bits_reset(x);
        XXH3_128bits_update(x, ops->name, strlen(ops->name) + 1);
        for (unsigned i = 0; i < n; i++) {
            XXH3_128bits_update(x, members[i].who.id.b, sizeof(members[i].who.id.b));
            XXH3_128bits_update(x, &members[i].who.attempt, sizeof(members[i].who.attempt));
        }
        h = XXH3_128bits_digest(x);
        XXH3_freeState(x);
    }
    out[0] = h.low64;
    out[1] = h.high64;
}
