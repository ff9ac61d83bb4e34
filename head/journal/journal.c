#include "head/journal/journal.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "common/base/fault.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "head/journal/store.h"

enum {
    COMPACT_RECORDS = 8192,
    COMPACT_BYTES = 8 << 20,
    RESERVE_BYTES = 32 << 20,
    QUEUE_BYTES = 64 << 20,
    KINDS = 256,
    RETRY_MS = 250,      /* a full disk is looked at again so often, */
    RETRY_MAX_MS = 2000, /* up to so seldom */
    CUT_TERMS = 16, /* a cut tail may have held terms that daemons have seen: skip these many */
    STACK_BYTES = 256 << 10,
};

struct item {                 /* what waits for the thread; comes back with the result */
    struct store_batch batch; /* without records: a fence */
    struct journal_op *op;
    size_t bytes;
    struct fl_term *raise; /* set to `raised` once durable */
    struct fl_term raised;
    bool compacts;
    enum fl_status st;
    struct fl_err err;
};

struct journal {
    struct fl_loop *loop;
    struct store *store;
    struct journal_opts opts;
    void (*apply[KINDS])(void *state, struct fl_bytes body);
    struct fl_term term;
    uint64_t seq, since_records, since_bytes, base_records, base_bytes;
    bool compacting, threaded, closing;
    struct journal_stats stats;

    pthread_t thread;
    pthread_mutex_t lock; /* below: shared with the thread */
    pthread_cond_t come;
    struct store_batch *head, **tail; /* each lies in an item */
    struct store_batch *done, **done_tail;
    size_t queued_bytes;
    bool stop;
    enum fl_status sick; /* FL_OK: the disk takes what is written */
    char sick_text[sizeof(((struct fl_err *)0)->text)];
    struct fl_task wake;
};

/* ---- the thread ---- */

static void nap(struct journal *j, unsigned ms)
{
    struct timespec due;

    clock_gettime(CLOCK_MONOTONIC, &due);
    due.tv_nsec += (long)(ms % 1000) * 1000000;
    due.tv_sec += ms / 1000 + due.tv_nsec / 1000000000;
    due.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&j->come, &j->lock, &due);
}

/* Lock held. Writes until it holds or the journal is being closed. */
static enum fl_status write_group(struct journal *j, const struct store_batch *group,
                                  struct fl_err *err)
{
    unsigned wait_ms = RETRY_MS;

    for (;;) {
        pthread_mutex_unlock(&j->lock);
        enum fl_status st = store_write(j->store, group, err);
        pthread_mutex_lock(&j->lock);
        if (st != FL_OK && j->sick == FL_OK)
            fl_error("journal cannot be written, new work is refused until it can why=\"%s\"",
                     err->text);
        if (st == FL_OK && j->sick != FL_OK)
            fl_info("journal is written again");
        j->sick = st;
        if (st == FL_OK)
            return FL_OK;
        (void)FL_COPY(j->sick_text, err->text);
        if (j->stop)
            return st;
        nap(j, wait_ms);
        wait_ms = wait_ms * 2 < RETRY_MAX_MS ? wait_ms * 2 : RETRY_MAX_MS;
    }
}

static void *writer(void *arg)
{
    struct journal *j = arg;

    pthread_mutex_lock(&j->lock);
    for (;;) {
        while (!j->head && !j->stop)
            pthread_cond_wait(&j->come, &j->lock);
        if (!j->head)
            break;
        struct store_batch *group = j->head, *last = NULL;
        struct fl_err err = { 0 };
        bool compacts = false;

        j->head = NULL;
        j->tail = &j->head;
        enum fl_status st = write_group(j, group, &err);
        for (struct store_batch *b = group; b; b = b->next) {
            struct item *it = container_of(b, struct item, batch);

            it->st = st;
            it->err = err;
            compacts |= it->compacts;
            last = b;
        }
        *j->done_tail = group;
        j->done_tail = &last->next;
        fl_post(j->loop, &j->wake);
        if (st == FL_OK) {
            pthread_mutex_unlock(&j->lock);
            store_tidy(j->store, compacts);
            pthread_mutex_lock(&j->lock);
        }
    }
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

/* ---- back on the loop ---- */

static void item_free(struct item *it)
{
    while (it->batch.records) {
        struct store_record *r = it->batch.records;

        it->batch.records = r->next;
        free(r);
    }
    free(it);
}

static void deliver(struct journal *j)
{
    pthread_mutex_lock(&j->lock);
    struct store_batch *done = j->done;
    j->done = NULL;
    j->done_tail = &j->done;
    for (struct store_batch *b = done; b; b = b->next)
        j->queued_bytes -= container_of(b, struct item, batch)->bytes;
    pthread_mutex_unlock(&j->lock);
    if (done)
        j->stats.groups++;
    while (done) {
        struct item *it = container_of(done, struct item, batch);

        done = done->next;
        if (it->compacts) {
            j->compacting = false;
            j->stats.compactions += it->st == FL_OK;
        }
        if (it->raise && it->st == FL_OK)
            *it->raise = j->term = it->raised;
        if (it->op) {
            fl_loop_release(j->loop);
            it->op->durable(it->op, it->st, it->st == FL_OK ? NULL : &it->err);
        }
        item_free(it);
    }
}

static void on_wake(struct fl_task *t)
{
    deliver(container_of(t, struct journal, wake));
}

static void enqueue(struct journal *j, struct item *it)
{
    if (it->op)
        fl_loop_hold(j->loop);
    pthread_mutex_lock(&j->lock);
    bool first = !j->head;
    *j->tail = &it->batch;
    j->tail = &it->batch.next;
    j->queued_bytes += it->bytes;
    if (first)
        pthread_cond_signal(&j->come);
    pthread_mutex_unlock(&j->lock);
}

static struct store_record *record_make(uint64_t seq, uint16_t kind, struct fl_bytes body)
{
    struct store_record *r = malloc(sizeof(*r) + body.len);

    if (!r)
        return NULL;
    *r = (struct store_record){ .seq = seq, .kind = kind, .len = body.len };
    if (body.len)
        memcpy(r->body, body.data, body.len);
    return r;
}

static struct item *item_make(struct journal *j, uint16_t kind, struct fl_bytes body,
                              struct journal_op *op, struct fl_err *err)
{
    struct item *it = calloc(1, sizeof(*it));

    if (it && !(it->batch.records = record_make(j->seq + 1, kind, body))) {
        free(it);
        it = NULL;
    }
    if (!it) {
        fl_fail(err, FL_EXHAUSTED, "no memory for a journal record of %zu bytes", body.len);
        return NULL;
    }
    it->op = op;
    it->bytes = sizeof(*it) + sizeof(struct store_record) + body.len;
    return it;
}

static bool full(struct journal *j, size_t more, struct fl_err *err)
{
    pthread_mutex_lock(&j->lock);
    size_t queued = j->queued_bytes;
    bool sick = j->sick != FL_OK;
    pthread_mutex_unlock(&j->lock);
    if (queued + more <= j->opts.queue_bytes && !FL_FAULT("journal.queue"))
        return false;
    fl_fail(err, FL_EXHAUSTED, "%zu bytes wait to be written to the journal, more is not taken%s%s",
            queued, sick ? ": " : "", sick ? j->sick_text : "");
    return true;
}

/* ---- compaction ---- */

struct snapshot {
    struct journal_emit emit;
    struct journal *j;
    struct store_record *first, **at;
    uint64_t seq, records, bytes;
    bool failed;
};

static void snapshot_put(struct journal_emit *e, uint16_t kind, struct fl_bytes body)
{
    struct snapshot *s = container_of(e, struct snapshot, emit);
    struct store_record *r = s->failed ? NULL : record_make(s->seq + 1, kind, body);

    if (!r) {
        s->failed = true;
        return;
    }
    r->first = !s->first;
    *s->at = r;
    s->at = &r->next;
    s->seq++;
    s->records++;
    s->bytes += body.len;
}

static struct fl_bytes term_body(const struct fl_term *term, uint8_t out[24])
{
    memcpy(out, term->cluster, 16);
    for (int i = 0; i < 8; i++)
        out[16 + i] = (uint8_t)(term->head >> 8 * i);
    return (struct fl_bytes){ out, 24 };
}

static void compact(struct journal *j)
{
    struct snapshot s = { .emit.put = snapshot_put, .j = j, .seq = j->seq };
    struct item *it = calloc(1, sizeof(*it));
    uint8_t body[24];

    s.at = &s.first;
    j->since_records = j->since_bytes = 0; /* a failed one is tried again after as many records */
    if (!it)
        return;
    s.emit.put(&s.emit, STORE_TERM_KIND, term_body(&j->term, body));
    j->opts.snapshot(j->opts.state, &s.emit);
    it->batch.records = s.first;
    if (s.failed) {
        item_free(it);
        return;
    }
    j->seq = s.seq;
    j->base_records = s.records;
    j->base_bytes = s.bytes;
    j->compacting = it->compacts = true;
    it->bytes = sizeof(*it) + s.bytes + s.records * sizeof(struct store_record);
    enqueue(j, it);
}

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static void grown(struct journal *j, size_t bytes)
{
    j->seq++;
    j->stats.records++;
    j->stats.bytes += bytes;
    j->since_records++;
    j->since_bytes += bytes;
    /* As much again as the state itself: the file stays within a few times of what it must hold. */
    if (j->opts.snapshot && !j->compacting &&
        (j->since_records > most(j->opts.compact_records, 2 * j->base_records) ||
         j->since_bytes > most(j->opts.compact_bytes, 2 * j->base_bytes)))
        compact(j);
}

/* ---- the face ---- */

enum fl_status journal_append(struct journal *j, uint16_t kind, struct fl_bytes body,
                              struct journal_op *op, struct fl_err *err)
{
    if (kind >= KINDS || !j->apply[kind])
        return fl_fail(err, FL_INTERNAL, "journal record of unknown kind %u", kind);
    if (j->closing)
        return fl_fail(err, FL_CANCELLED, "the journal is being closed");
    if (full(j, body.len, err))
        return FL_EXHAUSTED;
    struct item *it = item_make(j, kind, body, op, err);
    if (!it)
        return FL_EXHAUSTED;
    enqueue(j, it);
    j->apply[kind](j->opts.state, body);
    grown(j, body.len);
    return FL_OK;
}

enum fl_status journal_fence(struct journal *j, struct journal_op *op, struct fl_err *err)
{
    struct item *it = j->closing ? NULL : calloc(1, sizeof(*it));

    if (!it)
        return fl_fail(err, j->closing ? FL_CANCELLED : FL_EXHAUSTED,
                       "cannot wait for the journal");
    it->op = op;
    it->bytes = sizeof(*it);
    enqueue(j, it);
    return FL_OK;
}

enum fl_status journal_accepts(struct journal *j, struct fl_err *err)
{
    pthread_mutex_lock(&j->lock);
    enum fl_status st = j->sick;
    if (st != FL_OK)
        fl_fail(err, FL_EXHAUSTED, "the journal cannot be written: %s", j->sick_text);
    pthread_mutex_unlock(&j->lock);
    if (st != FL_OK)
        return FL_EXHAUSTED;
    return store_room(j->store, j->opts.reserve_bytes, err);
}

enum fl_status journal_raise_term(struct journal *j, uint64_t seen, struct fl_term *term,
                                  struct journal_op *op, struct fl_err *err)
{
    struct fl_term next = j->term;
    uint8_t body[24];

    next.head = most(seen, next.head) + 1;
    struct item *it = item_make(j, STORE_TERM_KIND, term_body(&next, body), op, err);
    if (!it)
        return FL_EXHAUSTED;
    it->raise = term;
    it->raised = next;
    enqueue(j, it);
    grown(j, sizeof(body));
    return FL_OK;
}

uint64_t journal_seq(const struct journal *j)
{
    return j->seq;
}

void journal_stats(const struct journal *j, struct journal_stats *out)
{
    struct journal *w = (struct journal *)(uintptr_t)j; /* the lock is not part of what is read */

    *out = j->stats;
    pthread_mutex_lock(&w->lock);
    out->queued_bytes = j->queued_bytes;
    pthread_mutex_unlock(&w->lock);
    out->file_bytes = store_file_bytes(j->store);
}

static enum fl_status replay_one(void *arg, uint64_t seq, uint16_t kind, struct fl_bytes body,
                                 struct fl_err *err)
{
    struct journal *j = arg;

    j->seq = seq;
    j->since_records++;
    j->since_bytes += body.len;
    if (kind == STORE_TERM_KIND) {
        const uint8_t *b = body.data;

        if (body.len != 24)
            return fl_fail(err, FL_CORRUPT, "journal record %llu is no term",
                           (unsigned long long)seq);
        memcpy(j->term.cluster, b, 16);
        j->term.head = 0;
        for (int i = 0; i < 8; i++)
            j->term.head |= (uint64_t)b[16 + i] << 8 * i;
        return FL_OK;
    }
    if (kind >= KINDS || !j->apply[kind])
        return fl_fail(err, FL_UNSUPPORTED,
                       "journal record %llu has kind %u, which this head does not know; use the "
                       "newer furlong-head",
                       (unsigned long long)seq, kind);
    j->apply[kind](j->opts.state, body);
    return FL_OK;
}

static enum fl_status next_term(struct journal *j, struct journal_opened *found, struct fl_err *err)
{
    uint8_t body[24];

    if (found->fresh)
        FL_TRY(fl_random(j->term.cluster, sizeof(j->term.cluster), err));
    j->term.head += found->note[0] ? CUT_TERMS : 1;
    struct store_record *r = record_make(j->seq + 1, STORE_TERM_KIND, term_body(&j->term, body));
    if (!r)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the term");
    enum fl_status st = store_write(j->store, &(struct store_batch){ .records = r }, err);
    free(r);
    FL_TRY(st);
    j->seq++;
    found->term = j->term;
    return FL_OK;
}

static enum fl_status start_thread(struct journal *j, struct fl_err *err)
{
    pthread_attr_t attr;

    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    int rc = FL_FAULT("journal.thread") ? 11 : pthread_create(&j->thread, &attr, writer, j);
    pthread_attr_destroy(&attr);
    if (rc)
        return fl_fail(err, FL_EXHAUSTED, "journal thread: %s", strerror(rc));
    j->threaded = true;
    return FL_OK;
}

static void set_up(struct journal *j, struct fl_loop *l, const struct journal_opts *opts)
{
    pthread_condattr_t mono;

    j->loop = l;
    j->opts = *opts;
    j->opts.compact_records = opts->compact_records ? opts->compact_records : COMPACT_RECORDS;
    j->opts.compact_bytes = opts->compact_bytes ? opts->compact_bytes : COMPACT_BYTES;
    j->opts.reserve_bytes = opts->reserve_bytes ? opts->reserve_bytes : RESERVE_BYTES;
    j->opts.queue_bytes = opts->queue_bytes ? opts->queue_bytes : QUEUE_BYTES;
    for (size_t i = 0; i < opts->n_table; i++)
        j->apply[opts->table[i].kind % KINDS] = opts->table[i].apply;
    j->tail = &j->head;
    j->done_tail = &j->done;
    j->wake.run = on_wake;
    pthread_mutex_init(&j->lock, NULL);
    pthread_condattr_init(&mono);
    pthread_condattr_setclock(&mono, CLOCK_MONOTONIC);
    pthread_cond_init(&j->come, &mono);
    pthread_condattr_destroy(&mono);
}

enum fl_status journal_open(struct fl_loop *l, const char *path, const struct journal_opts *opts,
                            struct journal **out, struct journal_opened *found, struct fl_err *err)
{
    FL_AUTO(journal) struct journal *j = calloc(1, sizeof(*j));

    if (!j)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the journal");
    set_up(j, l, opts);
    *found = (struct journal_opened){ 0 };
    FL_TRY(store_open(path, &j->store, err));
    FL_TRY(store_replay(j->store, replay_one, j, found, err));
    found->fresh = found->records == 0;
    FL_TRY(next_term(j, found, err));
    FL_TRY(start_thread(j, err));
    *out = FL_TAKE(j);
    return FL_OK;
}

void journal_destroy(struct journal *j)
{
    if (!j)
        return;
    j->closing = true;
    if (j->threaded) {
        pthread_mutex_lock(&j->lock);
        j->stop = true;
        pthread_cond_signal(&j->come);
        pthread_mutex_unlock(&j->lock);
        pthread_join(j->thread, NULL);
        fl_task_cancel(j->loop, &j->wake);
        deliver(j);
    }
    store_destroy(j->store);
    pthread_cond_destroy(&j->come);
    pthread_mutex_destroy(&j->lock);
    free(j);
}
