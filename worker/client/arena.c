#include "worker/client/arena.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#define HASH_NONFATAL_OOM 1
#include <uthash.h>
#include "common/base/fault.h"
#include "common/base/str.h"

#define HUGE_BYTES (2u << 20)       /* from here on: aligned to it, huge pages asked for     */
#define MOVE_BYTES ((size_t)1 << 30)  /* one read or write: Linux takes at most 2 GiB - 4 KiB */

struct arena_piece {
    void *addr; /* key */
    size_t bytes;
    uint32_t tag;
    bool out;
    int file; /* KEEP_DISK while out; else -1 */
    UT_hash_handle hh;
};

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static size_t round_up(size_t n, size_t to)
{
    return n > SIZE_MAX - to ? 0 : (n + to - 1) / to * to;
}

static double seconds_now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

enum fl_status arena_init(struct arena *a, const char *folder, struct fl_err *err)
{
    *a = (struct arena){ 0 };
    if (pthread_mutex_init(&a->mu, NULL) != 0)
        return fl_fail(err, FL_EXHAUSTED, "no mutex for the arena");
    for (unsigned i = 0; i < ARENA_TAGS; i++) {
        bool stays = (1u << i) & (FURLONG_TAG_OPTIMIZER | FURLONG_TAG_DEFAULT);

        a->tags[i].keep = stays ? FURLONG_KEEP_IN : FURLONG_KEEP_NOT;
        (void)FL_COPY(a->tags[i].folder, folder ? folder : "");
    }
    return FL_OK;
}

static void piece_end(struct arena_piece *p)
{
    munmap(p->addr, p->bytes);
    if (p->file >= 0)
        close(p->file);
    free(p);
}

void arena_fini(struct arena *a)
{
    struct arena_piece *p, *next;

    HASH_ITER(hh, a->pieces, p, next) {
        HASH_DEL(a->pieces, p);
        piece_end(p);
    }
    pthread_mutex_destroy(&a->mu);
}

/* A hole that is large enough for the alignment, cut to size. */
static void *map_aligned(size_t bytes, size_t align)
{
    size_t want = bytes + (align > page_bytes() ? align : 0);
    uint8_t *at = mmap(NULL, want, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t skip;

    if (at == MAP_FAILED || want == bytes)
        return at;
    skip = (align - (uintptr_t)at % align) % align;
    if (skip)
        munmap(at, skip);
    if (align - skip)
        munmap(at + skip + bytes, align - skip);
    return at + skip;
}

enum fl_status arena_alloc(struct arena *a, uint32_t tag, size_t bytes, void **out,
                           struct fl_err *err)
{
    size_t align = bytes >= HUGE_BYTES ? HUGE_BYTES : page_bytes();
    size_t len = round_up(bytes, page_bytes());
    struct arena_piece *p;
    bool full;

    if (tag == 0 || (tag & (tag - 1)) || tag >= 1u << ARENA_TAGS)
        return fl_fail(err, FL_INVALID, "arena: %#x is not one tag", tag);
    if (bytes == 0 || len == 0 || len > SIZE_MAX / 2)
        return fl_fail(err, FL_INVALID, "arena: cannot give %zu bytes", bytes);
    p = malloc(sizeof(*p));
    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory to note %zu bytes of the arena", bytes);
    *p = (struct arena_piece){ .bytes = len, .tag = tag, .file = -1 };
    p->addr = FL_FAULT("arena.map") ? MAP_FAILED : map_aligned(len, align);
    if (p->addr == MAP_FAILED) {
        free(p);
        return fl_fail_errno(err, "arena: map %zu bytes", bytes);
    }
    if (len >= HUGE_BYTES)
        (void)madvise(p->addr, len, MADV_HUGEPAGE); /* a wish */

    pthread_mutex_lock(&a->mu);
    full = HASH_COUNT(a->pieces) >= ARENA_PIECES_MAX;
    if (!full)
        HASH_ADD_PTR(a->pieces, addr, p);
    full = full || !p->hh.tbl; /* uthash leaves it out when memory ends */
    pthread_mutex_unlock(&a->mu);
    if (full) {
        piece_end(p);
        return fl_fail(err, FL_EXHAUSTED, "arena: at most %d pieces, or no memory to note one more",
                       ARENA_PIECES_MAX);
    }
    *out = p->addr;
    return FL_OK;
}

void arena_free(struct arena *a, void *addr)
{
    struct arena_piece *p;

    pthread_mutex_lock(&a->mu);
    HASH_FIND_PTR(a->pieces, &addr, p);
    if (p)
        HASH_DEL(a->pieces, p);
    pthread_mutex_unlock(&a->mu);
    if (p)
        piece_end(p);
}

enum fl_status arena_keep(struct arena *a, uint32_t tags, enum furlong_keep how,
                          const char *folder, struct fl_err *err)
{
    if (tags == 0 || tags >= 1u << ARENA_TAGS || how > FURLONG_KEEP_DISK)
        return fl_fail(err, FL_INVALID, "arena: tags %#x, keep %d", tags, (int)how);
    if (folder && strlen(folder) >= sizeof(a->tags[0].folder))
        return fl_fail(err, FL_INVALID, "arena: folder of %zu bytes", strlen(folder));
    pthread_mutex_lock(&a->mu);
    for (unsigned i = 0; i < ARENA_TAGS; i++) {
        if (!(tags & 1u << i))
            continue;
        a->tags[i].keep = how;
        if (folder)
            (void)FL_COPY(a->tags[i].folder, folder); /* its length was checked */
    }
    pthread_mutex_unlock(&a->mu);
    return FL_OK;
}

/* What really lies in memory: a cache that was never touched gives nothing back. */
static uint64_t resident_bytes(struct arena *a, const struct arena_piece *p)
{
    size_t page = page_bytes(), window = sizeof(a->seen) * page;
    uint64_t sum = 0;

    for (size_t at = 0; at < p->bytes; at += window) {
        size_t len = p->bytes - at < window ? p->bytes - at : window;

        if (mincore((uint8_t *)p->addr + at, len, a->seen) < 0)
            return p->bytes; /* cannot look: as asked for */
        for (size_t i = 0; i < len / page; i++)
            sum += a->seen[i] & 1 ? page : 0;
    }
    return sum;
}

static enum fl_status file_open(const char *folder, int *out, struct fl_err *err)
{
    char path[1100];
    int fd;

    if (!*folder)
        return fl_fail(err, FL_INVALID,
                       "arena: no folder to offload to; give one to furlong_arena_keep()");
    fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) { /* file systems without O_TMPFILE */
        struct fl_str text = FL_STR_ON(path);

        fl_str_add(&text, "%s/offload-XXXXXX", folder);
        fd = text.cut ? -1 : mkostemp(path, O_CLOEXEC);
        if (fd >= 0)
            (void)unlink(path); /* it has no name from here on */
    }
    if (fd < 0)
        return fl_fail_errno(err, "arena: a file to offload to in %.200s", folder);
    *out = fd;
    return FL_OK;
}

/* Whole piece, one way or the other. */
static enum fl_status piece_move(struct arena_piece *p, bool write_out, struct fl_err *err)
{
    size_t done = 0;

    while (done < p->bytes) {
        size_t len = p->bytes - done < MOVE_BYTES ? p->bytes - done : MOVE_BYTES;
        uint8_t *at = (uint8_t *)p->addr + done;
        ssize_t n = FL_FAULT("arena.move") ? -1
                    : write_out            ? pwrite(p->file, at, len, (off_t)done)
                                           : pread(p->file, at, len, (off_t)done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            errno = n == 0 ? EIO : errno;
            return fl_fail_errno(err, "arena: %s %zu of %zu bytes", write_out ? "wrote" : "read",
                                 done, p->bytes);
        }
        done += (size_t)n;
    }
    return FL_OK;
}

static void piece_drop(struct arena_piece *p)
{
    (void)madvise(p->addr, p->bytes, MADV_DONTNEED); /* our own private pages: cannot fail */
    (void)mprotect(p->addr, p->bytes, PROT_NONE);
    p->out = true;
}

static enum fl_status tag_write(struct arena *a, unsigned i, struct furlong_moved *m,
                                struct fl_err *err)
{
    enum fl_status st = FL_OK;
    struct arena_piece *p, *next;

    HASH_ITER(hh, a->pieces, p, next) {
        double at = seconds_now();

        if (st != FL_OK || p->tag != 1u << i || p->out)
            continue;
        st = file_open(a->tags[i].folder, &p->file, err);
        m->setup_s += seconds_now() - at;
        at = seconds_now();
        if (st == FL_OK)
            st = piece_move(p, true, err);
        m->copy_s += seconds_now() - at;
        m->written_bytes += p->bytes;
    }
    if (st == FL_OK)
        return FL_OK;
    HASH_ITER(hh, a->pieces, p, next) {
        if (p->tag == 1u << i && !p->out && p->file >= 0) {
            close(p->file);
            p->file = -1;
        }
    }
    return st;
}

static enum fl_status tag_offload(struct arena *a, unsigned i, struct furlong_moved *m,
                                  struct fl_err *err)
{
    struct furlong_moved mine = { 0 };
    struct arena_piece *p, *next;
    double at;

    if (a->tags[i].keep == FURLONG_KEEP_DISK)
        FL_TRY(tag_write(a, i, &mine, err));
    at = seconds_now();
    HASH_ITER(hh, a->pieces, p, next) {
        if (p->tag != 1u << i || p->out)
            continue;
        if (a->tags[i].keep == FURLONG_KEEP_IN) {
            mine.kept_bytes += resident_bytes(a, p);
            continue;
        }
        if (a->tags[i].keep == FURLONG_KEEP_NOT)
            mine.dropped_bytes += resident_bytes(a, p);
        piece_drop(p);
    }
    m->setup_s += mine.setup_s + (seconds_now() - at);
    m->copy_s += mine.copy_s;
    m->dropped_bytes += mine.dropped_bytes;
    m->kept_bytes += mine.kept_bytes;
    m->written_bytes += mine.written_bytes;
    a->out |= 1u << i;
    return FL_OK;
}

enum fl_status arena_offload(struct arena *a, uint32_t tags, struct furlong_moved *out,
                             struct fl_err *err)
{
    struct furlong_moved m = { 0 };
    enum fl_status st = FL_OK;

    pthread_mutex_lock(&a->mu);
    for (unsigned i = 0; i < ARENA_TAGS && st == FL_OK; i++)
        if (tags & 1u << i)
            st = tag_offload(a, i, &m, err);
    pthread_mutex_unlock(&a->mu);
    if (out && st == FL_OK)
        *out = m;
    return st;
}

static enum fl_status piece_back(struct arena_piece *p, struct furlong_moved *m, struct fl_err *err)
{
    double at = seconds_now();
    enum fl_status st = FL_OK;

    if (mprotect(p->addr, p->bytes, PROT_READ | PROT_WRITE) < 0)
        return fl_fail_errno(err, "arena: %zu bytes back", p->bytes);
    m->setup_s += seconds_now() - at;
    at = seconds_now();
    if (p->file >= 0)
        st = piece_move(p, false, err);
    m->copy_s += seconds_now() - at;
    if (st != FL_OK) { /* as it was: out, its file whole */
        piece_drop(p);
        return st;
    }
    if (p->file >= 0)
        close(p->file);
    p->file = -1;
    p->out = false;
    return FL_OK;
}

enum fl_status arena_onload(struct arena *a, uint32_t tags, struct furlong_moved *out,
                            struct fl_err *err)
{
    struct furlong_moved m = { 0 };
    enum fl_status st = FL_OK;
    struct arena_piece *p, *next;

    pthread_mutex_lock(&a->mu);
    HASH_ITER(hh, a->pieces, p, next)
        if (st == FL_OK && (p->tag & tags) && p->out)
            st = piece_back(p, &m, err);
    if (st == FL_OK)
        a->out &= ~tags;
    pthread_mutex_unlock(&a->mu);
    if (out && st == FL_OK)
        *out = m;
    return st;
}

uint32_t arena_out(struct arena *a)
{
    uint32_t out;

    pthread_mutex_lock(&a->mu);
    out = a->out;
    pthread_mutex_unlock(&a->mu);
    return out;
}

bool arena_drops(struct arena *a, uint32_t tag)
{
    bool drops = false;

    pthread_mutex_lock(&a->mu);
    for (unsigned i = 0; i < ARENA_TAGS; i++)
        drops |= tag == 1u << i && a->tags[i].keep == FURLONG_KEEP_NOT;
    pthread_mutex_unlock(&a->mu);
    return drops;
}
