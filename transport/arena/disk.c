/* The only second tier where host and device are one memory: a file without a name, through two
 * pinned blocks, so that one part is read or written while the next is copied. What was written
 * leaves the page cache at once: it is the same memory. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/arena/arena_priv.h"

static enum fl_status file_open(const char *folder, int *out, struct fl_err *err)
{
    char path[1100];
    int fd;

    if (!*folder)
        return fl_fail(err, FL_INVALID, "no folder to offload to");
    fd = FL_FAULT("arena.file") ? -1 : open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) { /* file systems without O_TMPFILE */
        struct fl_str text = FL_STR_ON(path);

        fl_str_add(&text, "%s/offload-XXXXXX", folder);
        fd = text.cut ? -1 : mkostemp(path, O_CLOEXEC);
        if (fd >= 0)
            (void)unlink(path); /* it has no name from here on */
    }
    if (fd < 0)
        return fl_fail_errno(err, "a file to offload to in %.200s", folder);
    *out = fd;
    return FL_OK;
}

static enum fl_status transfer(const struct region *r, char *at, uint64_t bytes, uint64_t where,
                               bool write_out, struct fl_err *err)
{
    uint64_t done = 0;
    int fd = r->file;

    while (done < bytes) {
        ssize_t n = FL_FAULT("arena.move") ? -1
                    : write_out ? pwrite(fd, at + done, bytes - done, (off_t)(where + done))
                                : pread(fd, at + done, bytes - done, (off_t)(where + done));

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            errno = n == 0 ? EIO : errno;
            return fl_fail_errno(err, "%s %llu bytes at %llu of the file in %.120s",
                                 write_out ? "write" : "read", (unsigned long long)bytes,
                                 (unsigned long long)(where + done), r->folder);
        }
        done += (uint64_t)n;
    }
    return FL_OK;
}

static void forget_cached(int fd, uint64_t where, uint64_t bytes, bool written)
{
    if (written)
        (void)sync_file_range(fd, (off_t)where, (off_t)bytes,
                              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                  SYNC_FILE_RANGE_WAIT_AFTER);
    (void)posix_fadvise(fd, (off_t)where, (off_t)bytes, POSIX_FADV_DONTNEED); /* a wish */
}

struct lane { /* one of the two blocks */
    char *at;
    struct gpu_event *ended;
    size_t part;
    bool busy;
};

static enum fl_status lane_finish_write(struct arena *a, struct region *r, struct lane *l,
                                        struct arena_moved *m, struct fl_err *err)
{
    const struct part *p = &r->parts[l->part];

    if (!l->busy)
        return FL_OK;
    l->busy = false;
    FL_TRY(a->gpu->event_sync(l->ended, err));
    FL_TRY(transfer(r, l->at, p->bytes, p->at, true, err));
    forget_cached(r->file, p->at, p->bytes, true);
    m->written_bytes += p->bytes;
    return FL_OK;
}

static enum fl_status write_parts(struct arena *a, struct region *r, struct lane *lanes,
                                  struct arena_moved *m, struct fl_err *err)
{
    for (size_t k = 0; k < r->n_parts; k++) {
        struct lane *l = &lanes[k % ARENA_STREAMS];

        FL_TRY(lane_finish_write(a, r, l, m, err));
        FL_TRY(a->gpu->copy(a->streams[k % ARENA_STREAMS], (uint64_t)(uintptr_t)l->at,
                            r->base + r->parts[k].off, r->parts[k].bytes, err));
        FL_TRY(a->gpu->event_record(l->ended, a->streams[k % ARENA_STREAMS], err));
        l->part = k;
        l->busy = true;
    }
    for (size_t k = 0; k < ARENA_STREAMS; k++) /* the older one first */
        FL_TRY(lane_finish_write(a, r, &lanes[(r->n_parts + k) % ARENA_STREAMS], m, err));
    return FL_OK;
}

static enum fl_status read_parts(struct arena *a, struct region *r, struct lane *lanes,
                                 struct arena_moved *m, struct fl_err *err)
{
    for (size_t k = 0; k < r->n_parts; k++) {
        struct lane *l = &lanes[k % ARENA_STREAMS];
        const struct part *p = &r->parts[k];

        if (l->busy)
            FL_TRY(a->gpu->event_sync(l->ended, err));
        FL_TRY(transfer(r, l->at, p->bytes, p->at, false, err));
        forget_cached(r->file, p->at, p->bytes, false);
        FL_TRY(a->gpu->copy(a->streams[k % ARENA_STREAMS], r->base + p->off,
                            (uint64_t)(uintptr_t)l->at, p->bytes, err));
        FL_TRY(a->gpu->event_record(l->ended, a->streams[k % ARENA_STREAMS], err));
        l->busy = true;
        m->written_bytes += p->bytes;
    }
    return a->gpu->sync(a->g, err);
}

static enum fl_status stream_parts(struct arena *a, struct region *r, bool write_out,
                                   struct arena_moved *m, struct fl_err *err)
{
    struct lane lanes[ARENA_STREAMS] = { 0 };
    uint32_t blocks[ARENA_STREAMS];
    uint64_t at = arena_now_ns();
    enum fl_status st = pool_take(a, blocks, ARENA_STREAMS, err);

    FL_TRY(st);
    st = arena_streams(a, err);
    for (unsigned i = 0; i < ARENA_STREAMS && st == FL_OK; i++) {
        lanes[i].at = a->pool.blocks[blocks[i]].at;
        st = a->gpu->event(a->g, &lanes[i].ended, err);
    }
    m->setup_ns += arena_now_ns() - at;
    at = arena_now_ns();
    if (st == FL_OK)
        st = write_out ? write_parts(a, r, lanes, m, err) : read_parts(a, r, lanes, m, err);
    if (st != FL_OK)
        (void)a->gpu->sync(a->g, NULL); /* no copy may run into blocks that are given back */
    m->copy_ns += arena_now_ns() - at;
    for (unsigned i = 0; i < ARENA_STREAMS; i++)
        if (lanes[i].ended)
            a->gpu->event_free(lanes[i].ended);
    pool_give(&a->pool, blocks, ARENA_STREAMS);
    return st;
}

enum fl_status disk_write(struct arena *a, struct region *r, struct arena_moved *m,
                          struct fl_err *err)
{
    FL_TRY(file_open(r->folder, &r->file, err));
    return stream_parts(a, r, true, m, err); /* the caller closes the file */
}

enum fl_status disk_read(struct arena *a, struct region *r, struct arena_moved *m,
                         struct fl_err *err)
{
    return stream_parts(a, r, false, m, err);
}
