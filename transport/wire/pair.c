/* Both ends in one loop: for tests, byte for byte like a socket, descriptors too. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/wire/stream_priv.h"

enum { RING_BYTES = 256 << 10, MARKS = 16 };

struct mark { /* descriptors that travel with the byte at */
    uint64_t at;
    unsigned n;
    int fds[LINE_FDS];
};
struct pair_line {
    struct wire_line k;
    struct pair_line *other; /* NULL: it hung up */
    struct fl_task poke;
    bool blocked;
    char name[64];
    uint64_t from, to; /* bytes read, bytes that came */
    uint8_t *ring;
    unsigned n_marks;
    struct mark *marks;
};
struct pair_port {
    struct wire_port p;
    struct fl_loop *loop;
    struct pair_port *next;
    bool paused;
};

static pthread_mutex_t ports_lock = PTHREAD_MUTEX_INITIALIZER; /* loops of several threads */
static struct pair_port *ports;

static void poke(struct pair_line *k)
{
    fl_post(k->k.loop, &k->poke);
}

static void pair_drop(struct wire_line *line)
{
    struct pair_line *k = container_of(line, struct pair_line, k);

    if (k->other) {
        k->other->other = NULL;
        poke(k->other);
    }
    fl_task_cancel(line->loop, &k->poke);
    for (unsigned i = 0; i < k->n_marks; i++)
        for (unsigned j = 0; j < k->marks[i].n; j++)
            close(k->marks[i].fds[j]);
    free(k->marks);
    free(k->ring);
    free(k);
}

static enum fl_status put_mark(struct pair_line *to, const int *fds, unsigned n, struct fl_err *err)
{
    struct mark *m = &to->marks[to->n_marks];

    if (to->n_marks == MARKS)
        return FL_AGAIN;
    *m = (struct mark){ .at = to->to };
    for (; m->n < n; m->n++) {
        m->fds[m->n] = fcntl(fds[m->n], F_DUPFD_CLOEXEC, 3);
        if (m->fds[m->n] < 0) {
            enum fl_status st = fl_fail_errno(err, "descriptor %d to send", fds[m->n]);

            while (m->n)
                close(m->fds[--m->n]);
            return st;
        }
    }
    to->n_marks++;
    return FL_OK;
}

static void ring_put(struct pair_line *to, const uint8_t *data, size_t n)
{
    size_t at = to->to % RING_BYTES, first = n < RING_BYTES - at ? n : RING_BYTES - at;

    memcpy(to->ring + at, data, first);
    memcpy(to->ring, data + first, n - first);
    to->to += n;
}

static void ring_get(struct pair_line *k, uint8_t *out, size_t n)
{
    size_t at = k->from % RING_BYTES, first = n < RING_BYTES - at ? n : RING_BYTES - at;

    memcpy(out, k->ring + at, first);
    memcpy(out + first, k->ring, n - first);
    k->from += n;
}

static enum fl_status pair_write(struct wire_line *line, const struct iovec *iov, unsigned n,
                                 const int *fds, unsigned n_fds, size_t *wrote, struct fl_err *err)
{
    struct pair_line *k = container_of(line, struct pair_line, k), *to = k->other;
    size_t sum = 0;

    if (!to)
        return fl_fail(err, FL_UNREACHABLE, "the other side hung up");
    k->blocked = true;
    if (to->to - to->from == RING_BYTES)
        return FL_AGAIN;
    if (n_fds)
        FL_TRY(put_mark(to, fds, n_fds, err));
    k->blocked = false;
    for (unsigned i = 0; i < n; i++) {
        size_t room = RING_BYTES - (size_t)(to->to - to->from);
        size_t part = iov[i].iov_len < room ? iov[i].iov_len : room;

        ring_put(to, iov[i].iov_base, part);
        sum += part;
    }
    poke(to);
    *wrote = sum;
    return FL_OK;
}

static enum fl_status pair_read(struct wire_line *line, const struct iovec *iov, unsigned n,
                                int fds[LINE_FDS], unsigned *n_fds, size_t *got, struct fl_err *err)
{
    struct pair_line *k = container_of(line, struct pair_line, k);
    uint64_t end = k->to;
    size_t sum = 0;

    if (k->from == k->to)
        return k->other ? FL_AGAIN : fl_fail(err, FL_UNREACHABLE, "the other side hung up");
    if (k->n_marks && k->marks[0].at == k->from) {
        memcpy(fds, k->marks[0].fds, sizeof(k->marks[0].fds));
        *n_fds = k->marks[0].n;
        memmove(k->marks, k->marks + 1, --k->n_marks * sizeof(*k->marks));
    }
    if (k->n_marks)
        end = k->marks[0].at; /* like a socket: one set of descriptors a read */
    for (unsigned i = 0; i < n && k->from < end; i++) {
        size_t part = iov[i].iov_len < end - k->from ? iov[i].iov_len : (size_t)(end - k->from);

        ring_get(k, iov[i].iov_base, part);
        sum += part;
    }
    *got = sum;
    if (k->other && k->other->blocked)
        poke(k->other);
    if (k->from < k->to || !k->other)
        poke(k);
    return FL_OK;
}

static const struct line_ops pair_ops = { .write = pair_write,
                                          .read = pair_read,
                                          .drop = pair_drop };

static struct pair_line *line_create(struct fl_loop *l, void (*run)(struct fl_task *t))
{
    struct pair_line *k = FL_FAULT("wire.line") ? NULL : calloc(1, sizeof(*k));

    if (!k)
        return NULL;
    k->k = (struct wire_line){ .ops = &pair_ops, .loop = l, .caps = STREAM_FDS | STREAM_LOCAL };
    k->poke.run = run;
    k->ring = malloc(RING_BYTES);
    k->marks = calloc(MARKS, sizeof(*k->marks));
    if (k->ring && k->marks)
        return k;
    pair_drop(&k->k);
    return NULL;
}

static void poked(struct fl_task *t)
{
    struct pair_line *k = container_of(t, struct pair_line, poke);
    unsigned what = k->from < k->to || !k->other ? LINE_IN : 0;

    if (k->blocked && (!k->other || k->other->to - k->other->from < RING_BYTES)) {
        k->blocked = false;
        what |= LINE_OUT;
    }
    if (what && k->k.user)
        k->k.user->ready(k->k.arg, what);
}

/* ---- names */

static struct pair_port *find(struct fl_loop *l, const char *at)
{
    struct pair_port *p;

    pthread_mutex_lock(&ports_lock);
    for (p = ports; p && (p->loop != l || strcmp(p->p.at, at) != 0); p = p->next)
        ;
    pthread_mutex_unlock(&ports_lock);
    return p;
}

static void dialled(struct fl_task *t)
{
    struct pair_line *k = container_of(t, struct pair_line, poke), *far = NULL;
    struct pair_port *p = find(k->k.loop, k->name);
    struct fl_err err;

    if (!p || p->paused || FL_FAULT("wire.connect") || !(far = line_create(k->k.loop, poked))) {
        fl_fail(&err, FL_UNREACHABLE, "connect to %s: %s", k->name,
                p ? "it takes nobody now" : "nobody listens there");
        k->k.user->down(k->k.arg, &err);
        return;
    }
    k->poke.run = poked;
    k->other = far;
    far->other = k;
    p->p.arrived(p->p.arg, &far->k);
    k->k.user->up(k->k.arg);
}

static enum fl_status pair_dial(struct fl_loop *l, const struct stream_to *to,
                                const struct line_user *user, void *arg, struct wire_line **out,
                                struct fl_err *err)
{
    struct pair_line *k = line_create(l, dialled);

    if (!k)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a connection to %s", to->target);
    k->k.user = user;
    k->k.arg = arg;
    snprintf(k->name, sizeof(k->name), "%s", to->target);
    poke(k);
    *out = &k->k;
    return FL_OK;
}

static void pair_close(struct wire_port *port)
{
    struct pair_port *p = container_of(port, struct pair_port, p);

    pthread_mutex_lock(&ports_lock);
    for (struct pair_port **at = &ports; *at; at = &(*at)->next) {
        if (*at == p) {
            *at = p->next;
            break;
        }
    }
    pthread_mutex_unlock(&ports_lock);
    free(p);
}

static void pair_pause(struct wire_port *port, bool on)
{
    container_of(port, struct pair_port, p)->paused = on;
}

static enum fl_status pair_listen(struct fl_loop *l, const struct stream_to *at, bool has_key,
                                  void (*arrived)(void *arg, struct wire_line *k_take), void *arg,
                                  struct wire_port **out, struct fl_err *err)
{
    static const struct wire_port_ops ops = { .close = pair_close, .pause = pair_pause };
    struct pair_port *p;

    (void)has_key;
    if (strncmp(at->target, "pair:", 5) != 0)
        return fl_fail(err, FL_INVALID, "\"%s\" is no pair:NAME", at->target);
    if (find(l, at->target))
        return fl_fail(err, FL_EXISTS, "%s is in use by another server: choose another one",
                       at->target);
    p = calloc(1, sizeof(*p));
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory to listen at %s", at->target);
    p->p = (struct wire_port){ .ops = &ops, .arrived = arrived, .arg = arg };
    p->loop = l;
    snprintf(p->p.at, sizeof(p->p.at), "%s", at->target);
    pthread_mutex_lock(&ports_lock);
    p->next = ports;
    ports = p;
    pthread_mutex_unlock(&ports_lock);
    *out = &p->p;
    return FL_OK;
}

static const struct wire_carrier pair_carrier = { .dial = pair_dial, .listen = pair_listen };
const struct stream_ops stream_pair = {
    .name = "pair",
    .caps = STREAM_FDS | STREAM_LOCAL,
    .send = wire_send,
    .close = wire_close,
    .carrier = &pair_carrier,
};
