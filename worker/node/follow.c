#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/proto/methods.h"
#include "common/proto/pb.h"
#include "worker/node/node_priv.h"

enum { TICK_MS = 200 /* only where inotify gives no watch */ };

struct tail {
    struct node *node;
    int fd;
    struct fl_watch *ready;
    struct fl_timer tick;
    struct follow *by_watch;
    uint8_t buf[NODE_PUSH_BYTES + 256]; /* what is being sent; one at a time */
};

/* ---- who wrote something ---- */

static void unwatch(struct tail *t, struct follow *f)
{
    if (f->watch < 0)
        return;
    HASH_DEL(t->by_watch, f);
    (void)inotify_rm_watch(t->fd, f->watch); /* went by itself when it fired */
    f->watch = -1;
}

/* One event and no more: a chatty worker wakes us once a push, not once a line. */
static void rewatch(struct tail *t, struct follow *f)
{
    if (f->watch >= 0)
        return;
    f->watch = t->fd < 0 ? -1 : inotify_add_watch(t->fd, f->path, IN_MODIFY | IN_ONESHOT);
    if (f->watch >= 0) {
        HASH_ADD_INT(t->by_watch, watch, f);
        if (f->hh.tbl)
            return;
        (void)inotify_rm_watch(t->fd, f->watch);
        f->watch = -1;
    }
    if (!t->tick.loop)
        fl_timer_arm_in(t->node->loop, &t->tick, TICK_MS);
}

static void on_events(void *arg, unsigned events)
{
    struct tail *t = arg;
    char buf[4096] __attribute__((aligned(__alignof__(struct inotify_event))));
    ssize_t n = read(t->fd, buf, sizeof(buf));

    (void)events;
    for (ssize_t at = 0; at < n;) {
        const struct inotify_event *e = (const struct inotify_event *)(buf + at);
        struct follow *f = NULL;

        at += (ssize_t)(sizeof(*e) + e->len);
        if (e->mask & IN_Q_OVERFLOW)
            fl_timer_arm_in(t->node->loop, &t->tick, 0);
        if (!(e->mask & IN_MODIFY))
            continue;
        HASH_FIND_INT(t->by_watch, &e->wd, f);
        if (!f)
            continue;
        HASH_DEL(t->by_watch, f);
        f->watch = -1;
        node_follow_kick(f->worker);
    }
}

static void on_tick(struct fl_timer *timer, uint64_t now_ns)
{
    struct tail *t = container_of(timer, struct tail, tick);

    (void)now_ns;
    for (struct worker *w = t->node->workers, *next; w; w = next) {
        next = w->hh.next;
        node_follow_kick(w);
    }
}

enum fl_status node_tail_create(struct node *n, struct tail **out, struct fl_err *err)
{
    struct tail *t = calloc(1, sizeof(*t));
    enum fl_status st;

    if (!t)
        return fl_fail(err, FL_EXHAUSTED, "no memory to follow outputs");
    t->node = n;
    t->tick.fire = on_tick;
    t->fd = FL_FAULT("node.inotify") ? -1 : inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (t->fd < 0) {
        fl_warn("outputs are looked at every %d ms, inotify gives nothing why=\"%s\"", TICK_MS,
                strerror(errno));
        *out = t;
        return FL_OK;
    }
    st = fl_watch_create(n->loop, t->fd, POLLIN, on_events, t, &t->ready, err);
    if (st != FL_OK) {
        node_tail_destroy(t);
        return st;
    }
    *out = t;
    return FL_OK;
}

void node_tail_destroy(struct tail *t)
{
    if (!t)
        return;
    fl_timer_cancel(&t->tick);
    fl_watch_destroy(t->ready);
    if (t->fd >= 0)
        close(t->fd);
    free(t);
}

/* ---- how far the head has it ---- */

/* Not synced: it survives this process, and a machine that goes takes the outputs along. */
static void pushed_write(const struct worker *w)
{
    uint64_t at[4] = { w->out.offset, w->out.shift, w->err.offset, w->err.shift };

    if (pwrite(w->pushed_fd, at, sizeof(at), 0) != sizeof(at))
        fl_warn("progress of an output not written worker=\"%s\" why=\"%s\"", w->name,
                strerror(errno));
}

enum fl_status node_follow_open(struct worker *w, struct fl_err *err)
{
    struct follow *both[] = { &w->out, &w->err };
    char path[FL_PATH_MAX];
    uint64_t at[4];

    for (unsigned i = 0; i < 2; i++) {
        struct follow *f = both[i];

        f->worker = w;
        f->stream = i + 1;
        FL_TRY(fl_path(f->path, err, "%s/%s", w->dir, i ? "err" : "out"));
        f->fd = FL_FAULT("node.follow")
                    ? -1
                    : open(f->path, O_RDONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (f->fd < 0)
            return fl_fail_errno(err, "open %s", f->path);
    }
    FL_TRY(fl_path(path, err, "%s/pushed", w->dir));
    w->pushed_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (w->pushed_fd < 0)
        return fl_fail_errno(err, "open %s", path);
    if (pread(w->pushed_fd, at, sizeof(at), 0) == sizeof(at)) {
        w->out.offset = at[0];
        w->out.shift = at[1];
        w->err.offset = at[2];
        w->err.shift = at[3];
    }
    return FL_OK;
}

void node_follow_close(struct worker *w)
{
    struct follow *both[] = { &w->out, &w->err };

    fl_timer_cancel(&w->push_again);
    if (w->pushing) {
        w->pushing = NULL;
        call_cancel(&w->push);
    }
    for (unsigned i = 0; i < 2; i++) {
        if (w->node->tail)
            unwatch(w->node->tail, both[i]);
        if (both[i]->fd >= 0)
            close(both[i]->fd);
        both[i]->fd = -1;
    }
    if (w->pushed_fd >= 0)
        close(w->pushed_fd);
    w->pushed_fd = -1;
}

/* ---- pushing ---- */

static uint64_t size_of(const struct follow *f)
{
    struct stat st;

    return f->fd >= 0 && fstat(f->fd, &st) == 0 ? (uint64_t)st.st_size : 0;
}

static bool all_taken(const struct follow *f)
{
    return f->fd < 0 || f->offset - f->shift == size_of(f);
}

bool node_follow_done(const struct worker *w)
{
    return w->gone && !w->pushing && all_taken(&w->out) && all_taken(&w->err);
}

struct piece { /* the next thing to say */
    const uint8_t *data;
    size_t len;
    uint64_t end; /* of the output, as the head counts */
};

static size_t whole_lines(const uint8_t *data, size_t len, bool all)
{
    const uint8_t *last = memrchr(data, '\n', len);

    return all || (!last && len == NODE_PUSH_BYTES) ? len : last ? (size_t)(last + 1 - data) : 0;
}

/* false: nothing, or no whole line yet. */
static bool next_piece(struct tail *t, struct follow *f, struct piece *out)
{
    uint64_t size = size_of(f), place = f->offset - f->shift;
    uint8_t *data = t->buf + 256;
    size_t skip = 0;

    if (size < place) { /* a filesystem without holes: the keeper emptied the file */
        f->shift = f->offset;
        place = 0;
    }
    if (size == place)
        return false;
    off_t at = lseek(f->fd, (off_t)place, SEEK_DATA);
    uint64_t from = at < 0 ? (errno == ENXIO ? size : place) : (uint64_t)at;
    ssize_t n = from < size ? pread(f->fd, data, NODE_PUSH_BYTES, (off_t)from) : 0;

    if (n < 0)
        return false;
    if (from > place && n) { /* it begins somewhere in a line */
        const uint8_t *line = memchr(data, '\n', (size_t)n);

        skip = line ? (size_t)(line + 1 - data) : 0;
    }
    size_t len =
        whole_lines(data + skip, (size_t)n - skip, f->worker->gone && from + (uint64_t)n == size);

    if (!len && from == place)
        return false;
    out->end = f->shift + from + skip + len;
    if (from > place) {
        char note[200];
        int k = snprintf(note, sizeof(note),
                         "[%llu bytes of output are gone: they were not taken before the "
                         "worker wrote more than --log-max-bytes]\n",
                         (unsigned long long)(from + skip - place));

        memcpy(data + skip - k, note, (size_t)k); /* 256 bytes are free in front */
        data -= k;
        len += (size_t)k;
        fl_metric_add(t->node->count[NODE_GONE_BYTES], (double)(from + skip - place));
    }
    out->data = data + skip;
    out->len = len;
    return true;
}

static void push_later(struct worker *w);

static void on_pushed(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                      const struct fl_err *err)
{
    struct worker *w = container_of(op, struct worker, push);
    struct follow *f = w->pushing;
    Fl__LogPushed *m;

    if (!f)
        return; /* closed */
    w->pushing = NULL;
    if (st != FL_OK) {
        if (!node_uplink_joined(w->node->up))
            return; /* the next join goes on from offset */
        fl_warn("output not taken worker=\"%s\" why=\"%s\"", w->name, err->text);
        push_later(w);
        return;
    }
    uint64_t was = f->offset;

    m = pb_unpack(&fl__log_pushed__descriptor, reply->body, reply->head.body_bytes, NULL);
    f->offset = m && m->has_next ? m->next : f->sent_end;
    if (m)
        fl__log_pushed__free_unpacked(m, NULL);
    if (f->offset < f->shift || f->offset - f->shift > size_of(f)) {
        fl_warn("the head wants output that is not here worker=\"%s\" stream=%u at=%llu", w->name,
                f->stream, (unsigned long long)f->offset);
        f->offset = f->sent_end;
    }
    pushed_write(w);
    if (f->offset == was) /* it does not get on: not again at once */
        push_later(w);
    else
        node_follow_kick(w);
}

static void on_push_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    node_follow_kick(container_of(t, struct worker, push_again));
}

static void push_later(struct worker *w)
{
    w->push_again.fire = on_push_again;
    fl_timer_arm_in(w->node->loop, &w->push_again, NODE_BACKOFF_MIN_MS);
}

static bool push(struct follow *f)
{
    struct worker *w = f->worker;
    struct node *n = w->node;
    Fl__LogPush m = FL__LOG_PUSH__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    struct piece p;
    struct fl_err err;

    if (f->fd < 0 || !next_piece(n->tail, f, &p))
        return false;
    who.worker = (ProtobufCBinaryData){ sizeof(w->who.id), (uint8_t *)&w->who.id };
    who.attempt = w->who.attempt;
    m.who = &who;
    m.job = w->spec->job;
    m.role = w->spec->role;
    m.rank = w->spec->rank;
    m.offset = f->offset;
    m.data = (ProtobufCBinaryData){ p.len, (uint8_t *)(uintptr_t)p.data };
    m.has_stream = m.has_end = true;
    m.stream = f->stream;
    m.end = p.end;
    w->push.done = on_pushed;
    f->sent_end = p.end;
    w->pushing = f;
    w->out_was_last = f == &w->out; /* they take turns */
    if (node_uplink_call(n->up, FL_LOG_PUSH, LANE_LOGS,
                         fl_loop_now_ns(n->loop) + NODE_CALL_MS * 1000000ull, &m.base, &w->push,
                         &err) != FL_OK) {
        w->pushing = NULL;
        push_later(w);
        return true;
    }
    fl_metric_add(n->count[NODE_PUSHED_BYTES], (double)p.len);
    return true;
}

void node_follow_kick(struct worker *w)
{
    struct node *n = w->node;
    struct follow *first = w->out_was_last ? &w->err : &w->out;
    struct follow *second = w->out_was_last ? &w->out : &w->err;

    if (w->pushing || w->untold || !node_uplink_joined(n->up) || w->push_again.loop)
        return;
    if (push(first) || push(second))
        return;
    if (w->gone) {
        worker_tell(w);
        return;
    }
    rewatch(n->tail, &w->out);
    rewatch(n->tail, &w->err);
    /* What came between the look and the watch wakes nobody. */
    if (!push(first))
        (void)push(second);
}
