/* transport/xfer/delta_tidy.c - between the updates: new bases, and the end of what nobody needs
 *
 * Nothing of it is an update's error: it is logged, and tried again some versions later. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/str.h"
#include "transport/xfer/delta.h"

/* ---- folders of those before ---- */

struct owner { /* of a folder: ID-ATTEMPT-GENERATION, the id of process and set */
    char id[16];
    unsigned attempt, generation;
};

static bool owner_of(const char *name, struct owner *out)
{
    char again[64];

    if (sscanf(name, "%15[0-9a-f]-%u-%u", out->id, &out->attempt, &out->generation) != 3)
        return false;
    snprintf(again, sizeof(again), "%s-%u-%u", out->id, out->attempt, out->generation);
    return strcmp(name, again) == 0; /* exactly as we write it */
}

static bool is_older(const struct owner *o, const struct owner *than)
{
    return strcmp(o->id, than->id) == 0 &&
           (o->attempt < than->attempt ||
            (o->attempt == than->attempt && o->generation < than->generation));
}

enum fl_status delta_drop_older(const char *dir,
                                enum fl_status (*drop)(const char *path, struct fl_err *err),
                                struct fl_err *err)
{
    const char *slash = strrchr(dir, '/');
    enum fl_status st = FL_OK, one;
    struct owner mine, o;
    struct dirent *e;
    struct stat s;
    char root[512], path[800];

    if (!slash || !owner_of(slash + 1, &mine))
        return FL_OK;
    snprintf(root, sizeof(root), "%.*s", (int)(slash - dir), dir);
    DIR *d = opendir(root);

    if (!d)
        return fl_fail_errno(err, "open folder %s", root);
    while ((e = readdir(d))) {
        if (!owner_of(e->d_name, &o) || !is_older(&o, &mine))
            continue;
        snprintf(path, sizeof(path), "%s/%s", root, e->d_name);
        if (lstat(path, &s) < 0 || !S_ISDIR(s.st_mode))
            continue; /* a link is somebody else's */
        one = drop(path, err);
        st = one == FL_OK || one == FL_AGAIN ? st : one;
    }
    closedir(d);
    return st;
}

/* ---- the work ---- */

/* Of all writers of a process: one that holds for an update has a thread of the pool, and the next
 * one would have the last. Who is due meanwhile begins after its own next update. */
static atomic_flag one_is_busy = ATOMIC_FLAG_INIT;

static void tidy_work(struct fl_work *w)
{
    struct delta_tidy *t = container_of(w, struct delta_tidy, w);

    if (t->older)
        (void)delta_drop_older(t->dir, delta_prune_all, &t->removed);
    if (t->prune != DELTA_NO_BASE)
        (void)delta_prune(t->dir, t->prune, &t->removed);
    if (t->compact == DELTA_NO_BASE)
        return;
    if (FL_FAULT("xfer.delta_compact"))
        (void)fl_fail(&t->made, FL_UNREACHABLE, "fault xfer.delta_compact");
    else
        (void)delta_compact(t->dir, t->compact, 0, &t->pace, &t->made);
}

static void note_made(struct delta_writer *d, enum fl_status st)
{
    const struct delta_tidy *t = &d->tidy;

    if (t->bases != d->bases || strcmp(t->dir, d->dir) != 0 || st == FL_CANCELLED)
        return; /* a whole version was written since, or will be, or the writer ends */
    if (st == FL_OK || st == FL_EXISTS) {
        fl_debug("weights base made dir=%s version=%" PRId64, t->dir, t->compact);
        d->base = t->compact;
        d->since_bytes -= t->bytes;
        d->since -= t->versions;
        d->written = d->retry_at = 0;
        d->prune_due = d->told_made = false;
        return;
    }
    if (!d->told_made)
        fl_warn("weights base not made, versions gather dir=%s version=%" PRId64 " why=\"%s\"",
                t->dir, t->compact, t->made.text);
    d->told_made = true;
    d->retry_at = d->since + DELTA_RETRY_VERSIONS;
    d->damaged |= st == FL_CORRUPT || st == FL_NOT_FOUND;
}

static void tidy_done(struct fl_work *w, enum fl_status st)
{
    struct delta_tidy *t = container_of(w, struct delta_tidy, w);
    struct delta_writer *d = container_of(t, struct delta_writer, tidy);

    atomic_flag_clear(&one_is_busy);
    if (t->removed.status != FL_OK && !d->told_removed) {
        fl_warn("weights stay in folder dir=%s why=\"%s\"", t->dir, t->removed.text);
        d->told_removed = true;
    }
    if (t->compact != DELTA_NO_BASE)
        note_made(d, st == FL_OK ? t->made.status : st);
    d->quiet(d);
}

/* ---- when ---- */

/* Not before what the last one made superfluous may go: else it would never come to that. */
static bool base_is_due(const struct delta_writer *d)
{
    return d->written >= DELTA_QUIET_VERSIONS && d->since >= d->retry_at &&
           (d->since_bytes > d->base_bytes || d->since >= d->most_versions);
}

void delta_tidy_written(struct delta_writer *d)
{
    d->older_due |= ++d->in_dir == DELTA_QUIET_VERSIONS;
    if (d->whole) {
        d->bases++;
        d->base = d->version;
        d->base_bytes = d->stats.raw_bytes;
        d->since_bytes = 0;
        d->since = d->written = d->retry_at = 0;
        d->prune_due = false;
        return;
    }
    d->since++;
    d->since_bytes += d->stats.written_bytes;
    d->prune_due |= ++d->written == DELTA_QUIET_VERSIONS;
}

static void begin(struct delta_writer *d)
{
    struct delta_tidy *t = &d->tidy;

    atomic_store(&t->pace, DELTA_GO);
    fl_copy(t->dir, sizeof(t->dir), d->dir);
    t->bases = d->bases;
    t->older = d->older_due;
    t->prune = d->prune_due ? d->base : DELTA_NO_BASE;
    t->compact = base_is_due(d) ? d->last : DELTA_NO_BASE;
    t->bytes = d->since_bytes;
    t->versions = d->since;
    t->removed = t->made = (struct fl_err){ 0 };
    d->older_due = d->prune_due = false;
    t->w = (struct fl_work){ .work = tidy_work, .done = tidy_done };
    fl_work_start(d->loop, &t->w);
}

void delta_writer_over(struct delta_writer *d)
{
    if (delta_writer_busy(d)) {
        if (atomic_load(&d->tidy.pace) == DELTA_HOLD)
            atomic_store(&d->tidy.pace, DELTA_GO);
    } else if (!d->stopping && (d->older_due || d->prune_due || base_is_due(d)) &&
               !atomic_flag_test_and_set(&one_is_busy)) {
        begin(d);
    }
}

/* The disk and the processor are the update's, until it is over. */
void delta_tidy_hold(struct delta_writer *d)
{
    if (atomic_load(&d->tidy.pace) == DELTA_GO)
        atomic_store(&d->tidy.pace, DELTA_HOLD);
}

void delta_tidy_elsewhere(struct delta_writer *d)
{
    atomic_store(&d->tidy.pace, DELTA_STOP);
    d->in_dir = 0;
    d->older_due = d->prune_due = false;
}

void delta_writer_stop(struct delta_writer *d)
{
    d->stopping = true;
    atomic_store(&d->tidy.pace, DELTA_STOP);
}

bool delta_writer_busy(const struct delta_writer *d)
{
    return d->tidy.w.loop != NULL;
}
