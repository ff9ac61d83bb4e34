#include "transport/xfer/delta.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>
#include "common/base/fault.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/str.h"

void delta_writer_init(struct delta_writer *d, const struct xfer_manifest *have,
                       const struct fl_seat_ref *who, const char *set,
                       void (*done)(struct delta_writer *, enum fl_status, const struct fl_err *),
                       void (*quiet)(struct delta_writer *))
{
    char id[FL_SHORT];

    *d = (struct delta_writer){ .have = have,
                                .was_version = DELTA_NO_BASE,
                                .last = DELTA_NO_BASE,
                                .base = DELTA_NO_BASE,
                                .most_versions = DELTA_MOST_VERSIONS,
                                .done = done,
                                .quiet = quiet };
    snprintf(d->tag, sizeof(d->tag), "%s%06x-%u", fl_short(id, &who->id),
             (unsigned)(XXH3_64bits(set, strlen(set)) & 0xffffff), who->attempt);
}

void delta_writer_renew(struct delta_writer *d)
{
    d->generation++;
    d->damaged = false;
    d->was_version = d->last = DELTA_NO_BASE;
}

void delta_writer_fini(struct delta_writer *d)
{
    for (size_t i = 0; d->was && i < d->have->n_tensors; i++)
        free(d->was[i]);
    free(d->was);
    d->was = NULL;
}

static void entry_of(const struct xfer_tensor *t, struct st_entry *out)
{
    *out = (struct st_entry){ .name = t->name, .dtype = t->dtype, .ndim = t->ndim };
    memcpy(out->shape, t->shape, sizeof(out->shape));
}

/* One whole piece a tensor, or files of it cannot be written here. */
static const void *whole_at(const struct delta_writer *d, size_t tensor, struct fl_err *err)
{
    const struct xfer_manifest *m = d->have;

    for (size_t i = 0; i < m->n_pieces; i++) {
        const struct xfer_piece *p = &m->pieces[i];

        if (p->tensor == tensor &&
            xfer_box_bytes(&m->tensors[tensor], &p->box) == xfer_tensor_bytes(&m->tensors[tensor]))
            return d->copy ? d->copy + d->copy_at[i] : (const char *)d->mems[p->mem].addr + p->off;
    }
    fl_fail(err, FL_UNSUPPORTED, "disk-delta writes whole tensors, this rank holds a part of %s",
            m->tensors[tensor].name);
    return NULL;
}

static enum fl_status snapshot(struct delta_writer *d, const struct delta_source *src,
                               struct fl_err *err)
{
    if (!d->was)
        d->was = calloc(d->have->n_tensors ? d->have->n_tensors : 1, sizeof(*d->was));
    if (!d->was)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a copy of %zu tensors",
                       d->have->n_tensors);
    for (size_t i = 0; i < d->have->n_tensors; i++) {
        uint64_t bytes = xfer_tensor_bytes(&d->have->tensors[i]);

        if (bytes == 0) /* not in the files either */
            continue;
        if (!d->was[i])
            d->was[i] = malloc(bytes);
        if (!d->was[i]) {
            d->was_version = DELTA_NO_BASE; /* the next one is a base again */
            return fl_fail(err, FL_EXHAUSTED, "no memory for a copy of %s, %" PRIu64 " bytes",
                           src->what.name, bytes);
        }
        memcpy(d->was[i], src->what.data, bytes);
        src++;
    }
    d->was_version = d->version;
    return FL_OK;
}

static enum fl_status write_now(struct delta_writer *d, struct delta_source *src,
                                struct fl_err *err)
{
    struct delta_opts o = { .version = d->version,
                            .base_version = d->was_version,
                            .encoding = DELTA_OVERWRITE };
    enum fl_status st;
    size_t n = 0; /* tensors that have bytes */

    for (size_t i = 0; i < d->have->n_tensors; i++) {
        if (xfer_tensor_bytes(&d->have->tensors[i]) == 0)
            continue;
        const void *at = whole_at(d, i, err);

        if (!at)
            return err->status;
        entry_of(&d->have->tensors[i], &src[n].what);
        src[n].what.data = at;
        src[n++].was = d->was_version == DELTA_NO_BASE ? NULL : d->was[i];
    }
    if (FL_FAULT("xfer.delta_write"))
        return fl_fail(err, FL_UNREACHABLE, "fault xfer.delta_write");
    if (mkdir(d->root, 0777) < 0 && errno != EEXIST)
        return fl_fail_errno(err, "the folder of updates %s", d->root);
    if (mkdir(d->dir, 0777) < 0 && errno != EEXIST)
        return fl_fail_errno(err, "the folder of updates %s", d->dir);
    st = delta_write(d->dir, src, n, &o, &d->stats, err);
    if (st != FL_OK && st != FL_EXISTS)
        return st;
    *err = (struct fl_err){ 0 }; /* by us, the last time */
    d->wrote = st == FL_OK;
    d->whole = d->was_version == DELTA_NO_BASE;
    d->last = d->version;
    return snapshot(d, src, err);
}

/* What is on a device is read once, while it is written and compared. */
static enum fl_status fetch(struct delta_writer *d, struct fl_err *err)
{
    const struct xfer_manifest *m = d->have;
    uint64_t all = 0;

    if (!d->mems[0].on_device)
        return FL_OK;
    d->copy_at = calloc(m->n_pieces + 1, sizeof(*d->copy_at));
    for (size_t i = 0; d->copy_at && i < m->n_pieces; i++) {
        d->copy_at[i] = all;
        all += xfer_box_bytes(&m->tensors[m->pieces[i].tensor], &m->pieces[i].box);
    }
    d->copy = d->copy_at ? malloc(all + 1) : NULL;
    if (!d->copy)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %" PRIu64 " bytes off the device", all);
    for (size_t i = 0; i < m->n_pieces; i++) {
        const struct xfer_piece *p = &m->pieces[i];
        uint64_t bytes = xfer_box_bytes(&m->tensors[p->tensor], &p->box);

        if (bytes)
            FL_TRY(link_mem_read(&d->mems[p->mem], p->off, d->copy + d->copy_at[i], bytes, err));
    }
    return FL_OK;
}

static void writer_work(struct fl_work *w)
{
    struct delta_writer *d = container_of(w, struct delta_writer, w);
    struct delta_source *src = calloc(d->have->n_tensors ? d->have->n_tensors : 1, sizeof(*src));
    enum fl_status st;

    st = src ? fetch(d, &d->err) : fl_fail(&d->err, FL_EXHAUSTED, "no memory to write a version");
    if (st == FL_OK)
        st = write_now(d, src, &d->err);
    free(FL_TAKE(d->copy));
    free(FL_TAKE(d->copy_at));
    if (st != FL_OK)
        fl_wrap(&d->err, st, "writing version %" PRId64 " to %s", d->version, d->dir);
    free(src);
}

static void writer_done(struct fl_work *w, enum fl_status st)
{
    struct delta_writer *d = container_of(w, struct delta_writer, w);

    if (st != FL_OK)
        fl_fail(&d->err, st, "version %" PRId64 " was not written", d->version);
    if (d->wrote)
        delta_tidy_written(d);
    d->done(d, d->err.status, &d->err);
}

static void nothing_to_do(struct fl_work *w)
{
    (void)w;
}

void delta_writer_start(struct delta_writer *d, struct fl_loop *l, const char *root,
                        uint64_t version, bool same_bytes, const struct link_mem *mems)
{
    bool there = d->was_version == (int64_t)version && strcmp(d->root, root) == 0;
    char dir[sizeof(d->dir)];

    d->err = (struct fl_err){ 0 };
    d->loop = l;
    d->wrote = false;
    d->mems = mems;
    d->version = (int64_t)version;
    if (strcmp(d->root, root) != 0)
        d->was_version = DELTA_NO_BASE;
    if (!same_bytes && d->damaged)
        delta_writer_renew(d);
    if (!same_bytes && d->last != DELTA_NO_BASE && (int64_t)version <= d->last)
        delta_writer_renew(d); /* an old number with new bytes */
    fl_copy(d->root, sizeof(d->root), root);
    snprintf(dir, sizeof(dir), "%s/%s-%u", d->root, d->tag, d->generation);
    if (strcmp(dir, d->dir) != 0) {
        delta_tidy_elsewhere(d);
        fl_copy(d->dir, sizeof(d->dir), dir);
    }
    delta_tidy_hold(d);
    d->w = (struct fl_work){ .work = there && same_bytes ? nothing_to_do : writer_work,
                             .done = writer_done };
    fl_work_start(l, &d->w);
}

/* ---- the taker ---- */

enum { PUT_RUNS = 64 };
struct putting { /* to a device: runs gather here and go together */
    const struct link_mem *mem;
    char *room; /* LINK_RUNS_BYTES */
    struct link_run runs[PUT_RUNS];
    size_t n, bytes;
};

static enum fl_status put_flush(struct putting *p, struct fl_err *err)
{
    enum fl_status st = p->n ? link_mem_put(p->mem, p->runs, p->n, p->room, err) : FL_OK;

    p->n = p->bytes = 0;
    return st;
}

static enum fl_status put_run(struct putting *p, uint64_t off, const void *from, uint64_t bytes,
                              uint64_t first_byte, uint64_t digest[2], struct fl_err *err)
{
    for (uint64_t at = 0, n; at < bytes; at += n) {
        if (p->n == PUT_RUNS || p->bytes == LINK_RUNS_BYTES)
            FL_TRY(put_flush(p, err));
        n = bytes - at < LINK_RUNS_BYTES - p->bytes ? bytes - at : LINK_RUNS_BYTES - p->bytes;
        kernel_digest_copy(digest, p->room + p->bytes, (const char *)from + at, n, first_byte + at);
        p->runs[p->n++] = (struct link_run){ off + at, n };
        p->bytes += n;
    }
    return FL_OK;
}

static enum fl_status copy_seg(const struct link_seg *s, const void *whole, struct putting *p,
                               uint64_t digest[2], struct fl_err *err)
{
    for (uint32_t r = 0; r < s->rows; r++) {
        const char *from = (const char *)whole + s->from_off + r * s->from_step;
        uint64_t to = s->to_off + r * s->to_step, first = s->first_byte + r * s->byte_step;

        if (p->mem->on_device)
            FL_TRY(put_run(p, to, from, s->run_bytes, first, digest, err));
        else
            kernel_digest_copy(digest, (char *)p->mem->addr + to, from, s->run_bytes, first);
    }
    return FL_OK;
}

static bool seg_fits(const struct link_seg *s, uint64_t bytes)
{
    uint64_t steps, end;

    return s->rows && !__builtin_mul_overflow(s->from_step, (uint64_t)s->rows - 1, &steps) &&
           !__builtin_add_overflow(s->from_off, s->rows > 1 ? steps : 0, &end) &&
           !__builtin_add_overflow(end, s->run_bytes, &end) && end <= bytes;
}

/* Copies of what earlier writers wrote, each a whole model, are of no use to anybody. */
static void forget_older(const char *local)
{
    static atomic_flag told = ATOMIC_FLAG_INIT;
    struct fl_err err = { 0 };

    if (delta_drop_older(local, delta_forget, &err) != FL_OK && !atomic_flag_test_and_set(&told))
        fl_warn("weights stay in local folder dir=%s why=\"%s\"", local, err.text);
}

static enum fl_status take_files(const char *dir, const char *local_dir, uint64_t version,
                                 const struct xfer_plan *part, const struct link_seg *segs,
                                 size_t n, struct putting *put, uint64_t (*digests)[2],
                                 struct fl_err *err)
{
    FL_AUTO(st_reader) struct st_reader *r = NULL;
    const char *base = strrchr(dir, '/');
    char local[512]; /* a copy for each writer: the same number of another one has other bytes */

    if (FL_FAULT("xfer.delta_take"))
        return fl_fail(err, FL_UNREACHABLE, "fault xfer.delta_take");
    if (mkdir(local_dir, 0777) < 0 && errno != EEXIST)
        return fl_fail_errno(err, "the folder of this host's copy %s", local_dir);
    if ((size_t)snprintf(local, sizeof(local), "%s/%s", local_dir, base ? base + 1 : dir) >=
        sizeof(local))
        return fl_fail(err, FL_INVALID, "the path %s is too long", local_dir);
    FL_TRY(delta_pull(dir, local, (int64_t)version, err));
    FL_TRY(st_read_folder(local, &r, err));
    for (size_t i = 0; i < n; i++) {
        const struct xfer_tensor *t = &part->tensors[segs[i].tensor];
        const struct st_tensor *file;

        FL_TRY(st_need(r, t->name, t->dtype, t->ndim, t->shape, &file, err));
        if (!seg_fits(&segs[i], file->bytes))
            return fl_fail(err, FL_INVALID, "a segment of %s lies outside its %" PRIu64 " bytes",
                           t->name, file->bytes);
        FL_TRY(copy_seg(&segs[i], file->data, put, digests[i], err));
    }
    forget_older(local);
    return FL_OK;
}

enum fl_status delta_take(const char *dir, const char *local_dir, uint64_t version,
                          const struct xfer_plan *part, const struct link_seg *segs, size_t n,
                          const struct link_mem *mem, uint64_t (*digests)[2], struct fl_err *err)
{
    struct putting put = { .mem = mem, .room = mem->on_device ? malloc(LINK_RUNS_BYTES) : NULL };
    enum fl_status st =
        mem->on_device && !put.room
            ? fl_fail(err, FL_EXHAUSTED, "no memory to copy to a device")
            : take_files(dir, local_dir, version, part, segs, n, &put, digests, err);

    if (st == FL_OK)
        st = put_flush(&put, err);
    free(put.room);
    return st;
}
