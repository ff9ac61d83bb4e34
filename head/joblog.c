#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "head/state.h"

/* A job's log is one file that only grows; its oldest pages are given back (a hole, offsets stay).
 * Beside it lies a list of marks, one for each stream of each worker: what has been taken over of
 * it, and where that went. A mark is written before the bytes, so after a kill in between the file
 * is too short for it, and both go back to what was before: nothing is lost and nothing is there
 * twice. */
enum {
    MARK_MAGIC = 0x4c4a4c46, /* "FLJL" */
    KEEP_BYTES = 64 << 20,   /* if not told otherwise; half as much more may lie there */
    LINE_ROOM = 160,         /* of a prefix */
    STREAMS_MAX = 65536,
};

struct mark_key {
    uint8_t worker[28];
    uint32_t attempt, stream;
};
struct mark { /* as in the file */
    struct mark_key key;
    uint32_t mid_line;   /* the last piece did not end a line */
    uint64_t from, to;   /* of the worker's file: before and after the last piece */
    uint64_t begin, end; /* where that piece lies in the log                      */
};
struct mark_head {
    uint32_t magic, size;
    uint64_t first;
    uint8_t room[48];
};

struct slot {
    UT_hash_handle hh;
    struct mark mark;
    off_t at;
};
struct joblog {
    int fd, marks_fd;
    uint64_t end;
    struct mark_head head;
    struct slot *slots;
    unsigned n_slots;
};

static void free_slots(struct joblog *g)
{
    struct slot *s, *tmp;

    HASH_ITER (hh, g->slots, s, tmp) {
        HASH_DEL(g->slots, s);
        free(s);
    }
}

void joblog_close(struct job *j)
{
    struct joblog *g = j->log;

    if (!g)
        return;
    j->log = NULL;
    free_slots(g);
    if (g->fd >= 0)
        close(g->fd);
    if (g->marks_fd >= 0)
        close(g->marks_fd);
    free(g);
}

static enum fl_status open_one(const struct job *j, const char *ending, int *fd, struct fl_err *err)
{
    char path[FL_PATH_MAX];

    FL_TRY(fl_path(path, err, "%s/%s.%s", j->head->logs_dir, j->rec->submission_id, ending));
    *fd = FL_FAULT("joblog.open") ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    return *fd < 0 ? fl_fail_errno(err, "open %s", path) : FL_OK;
}

/* The run's record has its log too: the same file by another name, so it stays when this head's
 * folder goes. On another file system it cannot be, and `furlong logs` alone has it. */
static void lay_into_run(const struct job *j)
{
    char from[FL_PATH_MAX], dir[FL_PATH_MAX], to[FL_PATH_MAX];
    const char *run = j->rec->run_dir;

    if (!run || run[0] != '/' || fl_path(dir, NULL, "%s/logs", run) != FL_OK ||
        fl_path(to, NULL, "%s/%s.log", dir, j->rec->submission_id) != FL_OK ||
        fl_path(from, NULL, "%s/%s.log", j->head->logs_dir, j->rec->submission_id) != FL_OK ||
        fl_mkdirs(dir, NULL) != FL_OK)
        return;
    if (link(from, to) < 0 && errno != EEXIST)
        fl_debug("job's log is not in its run folder to=%s errno=%d", to, errno);
}

static struct slot *slot_add(struct joblog *g, const struct mark *m)
{
    struct slot *s = must(calloc(1, sizeof(*s)));

    s->mark = *m;
    s->at = (off_t)(sizeof(struct mark_head) + g->n_slots++ * sizeof(struct mark));
    HASH_ADD(hh, g->slots, mark.key, sizeof(s->mark.key), s);
    must(s->hh.tbl);
    return s;
}

static bool write_mark(struct joblog *g, const struct slot *s)
{
    return pwrite(g->marks_fd, &s->mark, sizeof(s->mark), s->at) == (ssize_t)sizeof(s->mark);
}

/* The piece that the last mark speaks of and that is not whole in the file. */
static void take_back(struct joblog *g, struct slot *s)
{
    if (s->mark.end <= g->end)
        return;
    if (s->mark.begin < g->end && ftruncate(g->fd, (off_t)s->mark.begin) == 0)
        g->end = s->mark.begin;
    s->mark.to = s->mark.from;
    s->mark.end = s->mark.begin;
    (void)write_mark(g, s); /* the same is found again if this fails */
}

static enum fl_status read_marks(struct joblog *g, struct fl_err *err)
{
    struct mark m;
    struct slot *s, *tmp;
    off_t at = sizeof(g->head);

    if (pread(g->marks_fd, &g->head, sizeof(g->head), 0) != (ssize_t)sizeof(g->head) ||
        g->head.magic != MARK_MAGIC || g->head.size != sizeof(struct mark)) {
        g->head = (struct mark_head){ .magic = MARK_MAGIC, .size = sizeof(struct mark) };
        if (pwrite(g->marks_fd, &g->head, sizeof(g->head), 0) != (ssize_t)sizeof(g->head))
            return fl_fail_errno(err, "marks of a job's log");
        return FL_OK;
    }
    for (; pread(g->marks_fd, &m, sizeof(m), at) == (ssize_t)sizeof(m) && g->n_slots < STREAMS_MAX;
         at += (off_t)sizeof(m))
        slot_add(g, &m);
    HASH_ITER (hh, g->slots, s, tmp)
        take_back(g, s);
    return FL_OK;
}

static enum fl_status need_log(struct job *j, struct fl_err *err)
{
    struct joblog *g;
    struct stat sb;
    enum fl_status st;

    if (j->log)
        return FL_OK;
    g = j->log = must(calloc(1, sizeof(*g)));
    g->fd = g->marks_fd = -1;
    st = open_one(j, "log", &g->fd, err);
    if (st == FL_OK)
        st = open_one(j, "marks", &g->marks_fd, err);
    if (st == FL_OK && fstat(g->fd, &sb) < 0)
        st = fl_fail_errno(err, "log of job %s", j->rec->submission_id);
    if (st == FL_OK && sb.st_size == 0)
        lay_into_run(j);
    if (st == FL_OK) {
        g->end = (uint64_t)sb.st_size;
        st = read_marks(g, err);
    }
    if (st != FL_OK)
        joblog_close(j);
    return st;
}

/* Bounded: what is older than the last KEEP_BYTES goes. Where the file system makes no holes in
 * what is there, the file is emptied and goes on at the same offset. */
static void punch(struct joblog *g, uint64_t keep)
{
    uint64_t first = (g->end - keep) & ~4095ull;

    if (g->end - g->head.first < keep + keep / 2)
        return;
    if (fallocate(g->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)first) < 0) {
        if (ftruncate(g->fd, 0) < 0 || ftruncate(g->fd, (off_t)g->end) < 0)
            return;
        first = g->end;
    }
    g->head.first = first;
    (void)pwrite(g->marks_fd, &g->head, sizeof(g->head), 0); /* else a hole is read as zeros */
}

/* ---- writing ---- */

static struct slot *slot_of(struct joblog *g, const Fl__LogPush *m)
{
    struct mark fresh = { .key = { .attempt = m->who->attempt, .stream = m->stream } };
    struct slot *s;

    memcpy(fresh.key.worker, m->who->worker.data,
           m->who->worker.len < sizeof(fresh.key.worker) ? m->who->worker.len
                                                         : sizeof(fresh.key.worker));
    HASH_FIND(hh, g->slots, &fresh.key, sizeof(fresh.key), s);
    return s ? s : g->n_slots < STREAMS_MAX ? slot_add(g, &fresh) : NULL;
}

/* Each line behind its prefix; a driver's are left as they are. */
static void compose(struct fl_str *out, const Fl__LogPush *m, const char *node, bool mid_line,
                    const uint8_t *data, size_t len)
{
    char prefix[LINE_ROOM];

    if (strcmp(m->role, "driver") == 0) {
        fl_str_add_bytes(out, data, len);
        return;
    }
    snprintf(prefix, sizeof(prefix), "(%.40s %u %.63s) ", m->role, m->rank, node);
    while (len) {
        const uint8_t *nl = memchr(data, '\n', len);
        size_t n = nl ? (size_t)(nl - data) + 1 : len;

        if (!mid_line)
            fl_str_add_bytes(out, prefix, strlen(prefix));
        fl_str_add_bytes(out, data, n);
        mid_line = !nl;
        data += n;
        len -= n;
    }
}

static enum fl_status append(struct joblog *g, struct slot *s, const struct fl_str *text,
                             uint64_t to, bool mid_line, struct fl_err *err)
{
    struct mark was = s->mark;
    size_t done = 0;

    s->mark.from = was.to;
    s->mark.to = to;
    s->mark.begin = g->end;
    s->mark.end = g->end + text->len;
    s->mark.mid_line = mid_line;
    bool ok = write_mark(g, s);
    if (ok)
        (void)FL_FAULT("joblog.marked"); /* for kill: the mark is there, the bytes are not */
    while (ok && done < text->len) {
        ssize_t n = FL_FAULT("joblog.write") ? (errno = ENOSPC, -1)
                                             : pwrite(g->fd, text->data + done, text->len - done,
                                                      (off_t)(g->end + done));

        if (n < 0 && errno == EINTR)
            continue;
        ok = n > 0;
        done += ok ? (size_t)n : 0;
    }
    if (!ok) {
        fl_fail_errno(err, "log of the job");
        (void)ftruncate(g->fd, (off_t)g->end);
        s->mark = was;
        (void)write_mark(g, s);
        return err ? err->status : FL_EXHAUSTED;
    }
    g->end += text->len;
    return FL_OK;
}

enum fl_status joblog_push(struct job *j, const Fl__LogPush *m, const char *node, uint64_t *next,
                           struct fl_err *err)
{
    const uint8_t *data = m->data.data;
    size_t len = m->data.len;
    uint64_t to = m->has_end ? m->end : m->offset + len;

    FL_TRY(need_log(j, err));
    struct slot *s = slot_of(j->log, m);
    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "job %s has output of %u streams, which is the most",
                       j->rec->submission_id, j->log->n_slots);
    if (m->offset < s->mark.to) { /* sent again by a daemon that missed the answer */
        uint64_t had = s->mark.to - m->offset;

        if (had >= len) {
            *next = s->mark.to;
            return FL_OK;
        }
        data += had;
        len -= had;
    }
    struct fl_str out = FL_STR_HEAP(SIZE_MAX - 1);
    compose(&out, m, node, s->mark.mid_line, data, len);
    bool mid = len ? data[len - 1] != '\n' : s->mark.mid_line;
    enum fl_status st = out.cut ? fl_fail(err, FL_EXHAUSTED, "no memory for %zu bytes of log", len)
                                : append(j->log, s, &out, to, mid, err);
    fl_metric_add(j->head->count.log_bytes, (double)out.len);
    fl_str_fini(&out);
    FL_TRY(st);
    *next = to;
    punch(j->log, j->head->cfg.log_keep_bytes ? j->head->cfg.log_keep_bytes : KEEP_BYTES);
    followers_wake(j);
    return FL_OK;
}

void joblog_note(struct job *j, const char *fmt, ...)
{
    struct fl_str line = FL_STR_HEAP(2048);
    va_list ap;

    fl_str_add(&line, "furlong: ");
    va_start(ap, fmt);
    fl_str_addv(&line, fmt, ap);
    va_end(ap);
    fl_str_add(&line, "\n");
    if (need_log(j, NULL) == FL_OK &&
        pwrite(j->log->fd, fl_str_text(&line), line.len, (off_t)j->log->end) == (ssize_t)line.len) {
        j->log->end += line.len; /* else it is in the head's own log all the same */
        followers_wake(j);
    }
    fl_str_fini(&line);
}

/* ---- reading ---- */

uint64_t joblog_end(struct job *j)
{
    return need_log(j, NULL) == FL_OK ? j->log->end : 0;
}

enum fl_status joblog_read(struct job *j, uint64_t *from, size_t max, char **out, size_t *len,
                           struct fl_err *err)
{
    FL_TRY(need_log(j, err));
    struct joblog *g = j->log;
    bool moved = *from < g->head.first;

    if (moved)
        *from = g->head.first;
    if (*from > g->end)
        *from = g->end;
    size_t want = g->end - *from < max ? (size_t)(g->end - *from) : max;
    char *buf = malloc(want + 1);
    if (!buf)
        return fl_fail(err, FL_EXHAUSTED, "no memory for %zu bytes of log", want);
    ssize_t n = pread(g->fd, buf, want, (off_t)*from);
    if (n < 0) {
        free(buf);
        return fl_fail_errno(err, "read log of job %s", j->rec->submission_id);
    }
    char *nl = moved ? memchr(buf, '\n', (size_t)n) : NULL;
    if (nl) { /* the first whole line that is left */
        size_t skip = (size_t)(nl - buf) + 1;

        memmove(buf, buf + skip, (size_t)n - skip);
        *from += skip;
        n -= (ssize_t)skip;
    }
    *out = buf;
    *len = (size_t)n;
    return FL_OK;
}

/* A file of Ray's begins with these; ours does not, so they are made for who reads it as Ray's. */
void joblog_preamble(const struct job *j, struct fl_str *out)
{
    time_t s = (time_t)(j->rec->start_ms / 1000);
    struct tm tm;
    char text[32];

    localtime_r(&s, &tm);
    strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &tm);
    fl_str_add(out, "%s,%03u\tINFO job_manager.py:%d -- Runtime env is setting up.\n", text,
               (unsigned)(j->rec->start_ms % 1000), 568);
    if (j->rec->driver_node)
        fl_str_add(out, "Running entrypoint for job %s: %s\n", j->rec->submission_id,
                   j->rec->entrypoint);
}

void joblog_tail(struct job *j, struct fl_str *out, unsigned lines)
{
    uint64_t end = joblog_end(j), from = end > out->max ? end - out->max : 0;
    char *buf = NULL;
    size_t len = 0, at;

    if (joblog_read(j, &from, out->max, &buf, &len, NULL) != FL_OK)
        return;
    at = len && buf[len - 1] == '\n' ? len - 1 : len;
    while (at > 0 && (buf[at - 1] != '\n' || --lines > 0))
        at--;
    fl_str_add_bytes(out, buf + at, len - at);
    free(buf);
}

void joblog_remove(struct head *h, const char *submission_id)
{
    static const char *const endings[] = { "log", "marks" };
    char path[FL_PATH_MAX];

    for (size_t i = 0; i < FL_LEN(endings); i++)
        if (fl_path(path, NULL, "%s/%s.%s", h->logs_dir, submission_id, endings[i]) == FL_OK)
            (void)unlink(path); /* a job that wrote nothing has none */
}
