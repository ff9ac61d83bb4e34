#include "head/journal/store.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <xxhash.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/str.h"

enum {
    STORE_FORMAT = 1,
    STORE_APP_ID = 0x46726c67, /* "Frlg", so that `file` can tell */
    WAL_PAGES_MAX = 1024,      /* 4 MiB: then the log goes into the file */
};

struct store {
    char path[FL_PATH_MAX];
    sqlite3 *db;
    sqlite3_stmt *insert, *wipe;
    int lock_fd;
    int wal_pages;
    uint64_t wal_left;
    bool shorter; /* the file ends before the length that its header gives */
};

/* File systems on which two hosts can hold "the same" lock, or mmap and fsync mean little. */
static const struct {
    unsigned long magic;
    const char *name;
} network_fs[] = {
    { 0x6969, "NFS" },       { 0x517b, "SMB" },        { 0xfe534d42, "SMB2" },
    { 0xff534d42, "CIFS" },  { 0x0bd00bd0, "Lustre" }, { 0x47504653, "GPFS" },
    { 0x5346414f, "AFS" },   { 0x00c36400, "Ceph" },   { 0x19830326, "BeeGFS" },
    { 0xaad7aaea, "PanFS" }, { 0x013661, "GFS2" },
};

static enum fl_status db_fail(struct store *s, struct fl_err *err, const char *what)
{
    int rc = s->db ? sqlite3_extended_errcode(s->db) : SQLITE_NOMEM;
    enum fl_status st = FL_INTERNAL;

    switch (rc & 0xff) {
    case SQLITE_FULL:
    case SQLITE_NOMEM:
    case SQLITE_IOERR:
        st = FL_EXHAUSTED;
        break;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
        st = FL_CORRUPT;
        break;
    case SQLITE_BUSY:
        st = FL_EXISTS;
        break;
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
        st = FL_DENIED;
        break;
    }
    fl_err_set(err, st, FL_FROM_SQLITE, rc, "%s %s: %s", what, s->path,
               s->db ? sqlite3_errmsg(s->db) : "no memory");
    return st;
}

static enum fl_status run(struct store *s, const char *sql, struct fl_err *err)
{
    if (sqlite3_exec(s->db, sql, NULL, NULL, NULL) != SQLITE_OK)
        return db_fail(s, err, "journal");
    return FL_OK;
}

/* ---- who may open it ---- */

static enum fl_status refuse_network_fs(const char *path, struct fl_err *err)
{
    char dir[FL_PATH_MAX];
    struct statfs fs;

    (void)FL_COPY(dir, path);
    char *slash = strrchr(dir, '/');
    if (slash)
        *slash = '\0';
    if (statfs(slash && dir[0] ? dir : ".", &fs) < 0)
        return fl_fail_errno(err, "journal folder %s", dir);
    if (FL_FAULT("journal.network_fs"))
        fs.f_type = 0x6969;
    for (size_t i = 0; i < FL_LEN(network_fs); i++)
        if ((unsigned long)fs.f_type == network_fs[i].magic)
            return fl_fail(
                err, FL_UNSUPPORTED,
                "journal folder %s lies on %s, where its lock and its syncs do not hold; "
                "give a folder on a local disk with --state-dir",
                dir, network_fs[i].name);
    return FL_OK;
}

static enum fl_status take_lock(struct store *s, struct fl_err *err)
{
    char path[FL_PATH_MAX + 8], pid[24] = "";

    snprintf(path, sizeof(path), "%s.lock", s->path);
    s->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (s->lock_fd < 0)
        return fl_fail_errno(err, "lock %s", path);
    if (flock(s->lock_fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK)
            return fl_fail_errno(err, "lock %s", path);
        ssize_t n = pread(s->lock_fd, pid, sizeof(pid) - 1, 0);
        pid[n > 0 ? strspn(pid, "0123456789") : 0] = '\0';
        return fl_fail(err, FL_EXISTS,
                       "journal %s is in use by another head (pid %s); stop that one, or give this "
                       "one a folder of its own with --state-dir",
                       s->path, pid[0] ? pid : "unknown");
    }
    int len = snprintf(pid, sizeof(pid), "%d\n", (int)getpid());
    if (ftruncate(s->lock_fd, 0) < 0 || pwrite(s->lock_fd, pid, (size_t)len, 0) != len)
        return fl_fail_errno(err, "lock %s", path);
    return FL_OK;
}

/* ---- opening ---- */

static int on_wal(void *arg, sqlite3 *db, const char *name, int pages)
{
    (void)db, (void)name;
    ((struct store *)arg)->wal_pages = pages;
    return SQLITE_OK;
}

static void db_close(struct store *s)
{
    sqlite3_finalize(s->insert);
    sqlite3_finalize(s->wipe);
    s->insert = s->wipe = NULL;
    sqlite3_close(s->db);
    s->db = NULL;
}

/* Writes nothing to a file that has something in it: its log is looked at first. */
static enum fl_status db_open(struct store *s, const char *path, struct fl_err *err)
{
    struct stat sb;
    bool fresh = stat(path, &sb) < 0 || sb.st_size == 0;

    if (sqlite3_open_v2(path, &s->db,
                        SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX |
                            SQLITE_OPEN_EXRESCODE,
                        NULL) != SQLITE_OK)
        return db_fail(s, err, "open journal");
    sqlite3_wal_hook(s->db, on_wal, s);
    /* EXCLUSIVE before WAL: the index of the log then lies in our heap, not in a shared file. */
    FL_TRY(run(s, "PRAGMA locking_mode=EXCLUSIVE", err));
    if (fresh)
        FL_TRY(run(s, "PRAGMA auto_vacuum=INCREMENTAL", err));
    return run(s,
               "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA cache_size=-1024;"
               "PRAGMA temp_store=MEMORY; PRAGMA cell_size_check=ON",
               err);
}

static enum fl_status db_prepare(struct store *s, struct fl_err *err)
{
    if (sqlite3_prepare_v3(s->db, "INSERT INTO record VALUES(?1, ?2, ?3, ?4)", -1,
                           SQLITE_PREPARE_PERSISTENT, &s->insert, NULL) != SQLITE_OK ||
        sqlite3_prepare_v3(s->db, "DELETE FROM record WHERE seq < ?1", -1,
                           SQLITE_PREPARE_PERSISTENT, &s->wipe, NULL) != SQLITE_OK)
        return db_fail(s, err, "journal");
    return FL_OK;
}

static enum fl_status make_table(struct store *s, struct fl_err *err)
{
    char sql[400];

    snprintf(sql, sizeof(sql),
             "BEGIN; CREATE TABLE record(seq INTEGER PRIMARY KEY, kind INTEGER NOT NULL,"
             " sum INTEGER NOT NULL, body BLOB NOT NULL);"
             "PRAGMA user_version=%d; PRAGMA application_id=%d; COMMIT",
             STORE_FORMAT, STORE_APP_ID);
    return run(s, sql, err);
}

static enum fl_status number(struct store *s, const char *sql, int64_t *out, struct fl_err *err)
{
    sqlite3_stmt *q = NULL;
    bool got =
        sqlite3_prepare_v2(s->db, sql, -1, &q, NULL) == SQLITE_OK && sqlite3_step(q) == SQLITE_ROW;

    if (got)
        *out = sqlite3_column_int64(q, 0);
    enum fl_status st = got ? FL_OK : db_fail(s, err, "read journal");
    sqlite3_finalize(q);
    return st;
}

static enum fl_status check_format(struct store *s, bool *fresh, struct fl_err *err)
{
    int64_t format = 0, app = 0, tables = 0;

    FL_TRY(number(s, "PRAGMA user_version", &format, err));
    FL_TRY(number(s, "PRAGMA application_id", &app, err));
    FL_TRY(number(s, "SELECT count(*) FROM sqlite_schema", &tables, err));
    *fresh = format == 0 && app == 0 && tables == 0;
    if (*fresh)
        return FL_OK;
    if (app != STORE_APP_ID)
        return fl_fail(
            err, FL_INVALID,
            "%s is a database of another program, not a journal; give another --state-dir",
            s->path);
    if (format != STORE_FORMAT)
        return fl_fail(err, FL_UNSUPPORTED,
                       "journal %s has format %" PRId64 ", this head reads %d; use the newer "
                       "furlong-head, or another --state-dir",
                       s->path, format, STORE_FORMAT);
    return FL_OK;
}

uint64_t store_wal_left(const char *wal_path, unsigned frames)
{
    uint8_t h[32], f[24];
    struct stat sb;
    uint64_t left = 0;
    int fd = open(wal_path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return 0;
    if (fstat(fd, &sb) == 0 && sb.st_size > 0) {
        uint64_t size = (uint64_t)sb.st_size;
        bool whole = pread(fd, h, sizeof(h), 0) == sizeof(h);
        uint64_t page = whole ? (uint64_t)h[8] << 24 | h[9] << 16 | h[10] << 8 | h[11] : 0;
        uint64_t at = 32 + frames * (24 + page);

        if (!whole || (frames == 0 && (h[0] != 0x37 || h[1] != 0x7f || page < 512)))
            left = size; /* not even a header */
        else if (size > at && pread(fd, f, sizeof(f), (off_t)at) == sizeof(f) &&
                 memcmp(f + 8, h + 16, 8) == 0)
            left = size - at; /* the salt of this generation, and yet not taken */
        else if (frames == 0 && size > 32)
            left = size - 32; /* the header's own checksum does not hold */
    }
    close(fd);
    return left;
}

/* How many frames of the log SQLite took; what is behind them was cut. */
static void look_at_wal(struct store *s)
{
    char wal[FL_PATH_MAX + 8];
    int frames = 0, moved = 0;
    struct stat sb;

    snprintf(wal, sizeof(wal), "%s-wal", s->path);
    if (stat(wal, &sb) < 0 || sb.st_size == 0)
        return;
    if (sqlite3_wal_checkpoint_v2(s->db, NULL, SQLITE_CHECKPOINT_PASSIVE, &frames, &moved) ==
            SQLITE_OK &&
        frames >= 0)
        s->wal_left = store_wal_left(wal, (unsigned)frames);
}

/* A cut that was interrupted between its renames goes on; a half-written copy is dropped. */
static enum fl_status finish_cut(const char *path, struct fl_err *err)
{
    char whole[FL_PATH_MAX + 16], gone[FL_PATH_MAX + 16], wal[FL_PATH_MAX + 16];
    char gone_wal[FL_PATH_MAX + 24];

    snprintf(whole, sizeof(whole), "%s.whole", path);
    if (access(whole, F_OK) < 0)
        return FL_OK;
    snprintf(gone, sizeof(gone), "%s.damaged", path);
    snprintf(wal, sizeof(wal), "%s-wal", path);
    snprintf(gone_wal, sizeof(gone_wal), "%s-wal", gone);
    if ((access(wal, F_OK) == 0 && rename(wal, gone_wal) < 0) ||
        (access(path, F_OK) == 0 && rename(path, gone) < 0) || rename(whole, path) < 0)
        return fl_fail_errno(err, "put the whole part of %s in its place", path);
    return FL_OK;
}

enum fl_status store_open(const char *path, struct store **out, struct fl_err *err)
{
    FL_AUTO(store) struct store *s = calloc(1, sizeof(*s));

    if (!s)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the journal");
    s->lock_fd = -1;
    if (!FL_COPY(s->path, path))
        return fl_fail(err, FL_INVALID, "journal path of %zu bytes is too long", strlen(path));
    FL_TRY(refuse_network_fs(path, err));
    FL_TRY(take_lock(s, err));
    FL_TRY(finish_cut(path, err));
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600); /* keys of jobs lie in it */
    if (fd < 0)
        return fl_fail_errno(err, "journal %s", path);
    (void)fchmod(fd, 0600); /* an older copy may have been wider */
    close(fd);

    bool fresh = false;
    enum fl_status st = db_open(s, s->path, err);
    if (st == FL_OK)
        st = check_format(s, &fresh, err);
    if (st == FL_CORRUPT) { /* a file that lost its end is read only under this switch */
        s->shorter =
            sqlite3_db_config(s->db, SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1, NULL) == SQLITE_OK;
        st = check_format(s, &fresh, err);
    }
    if (st == FL_OK && !s->shorter)
        look_at_wal(s);
    if (st == FL_OK && fresh)
        st = make_table(s, err);
    if (st == FL_OK)
        st = db_prepare(s, err);
    if (st == FL_CORRUPT)
        return fl_wrap(err, st,
                       "nothing whole is left; move the file away to begin anew, or put a "
                       "copy in its place");
    FL_TRY(st);
    *out = FL_TAKE(s);
    return FL_OK;
}

/* ---- reading ---- */

static int64_t checksum(uint64_t seq, uint16_t kind, const void *body, size_t len)
{
    uint64_t seed = seq * 0x9e3779b97f4a7c15u + kind;

    return (int64_t)XXH3_64bits_withSeed(body, len, seed);
}

static enum fl_status insert(struct store *s, uint64_t seq, uint16_t kind, struct fl_bytes body,
                             struct fl_err *err)
{
    sqlite3_bind_int64(s->insert, 1, (int64_t)seq);
    sqlite3_bind_int64(s->insert, 2, kind);
    sqlite3_bind_int64(s->insert, 3, checksum(seq, kind, body.data, body.len));
    sqlite3_bind_blob64(s->insert, 4, body.len ? body.data : "", body.len, SQLITE_STATIC);
    int rc = sqlite3_step(s->insert);
    enum fl_status st = rc == SQLITE_DONE ? FL_OK : db_fail(s, err, "write journal");
    sqlite3_reset(s->insert);
    sqlite3_clear_bindings(s->insert);
    return st;
}

/* Copies the records up to `last` into a new file and puts that in the damaged one's place. */
static enum fl_status cut_after(struct store *s, uint64_t last, struct fl_err *err)
{
    char path[FL_PATH_MAX], whole[FL_PATH_MAX + 16], part[FL_PATH_MAX + 16];
    sqlite3_stmt *q = NULL;
    sqlite3 *old = s->db;
    enum fl_status st;

    (void)FL_COPY(path, s->path);
    snprintf(whole, sizeof(whole), "%s.whole", path);
    snprintf(part, sizeof(part), "%s.part", path);
    (void)unlink(part); /* of an earlier try */
    sqlite3_finalize(s->insert);
    sqlite3_finalize(s->wipe);
    s->insert = s->wipe = NULL;
    s->db = NULL;

    st = db_open(s, part, err);
    if (st == FL_OK)
        st = make_table(s, err);
    if (st == FL_OK)
        st = db_prepare(s, err);
    if (st == FL_OK)
        st = run(s, "BEGIN", err);
    if (st == FL_OK && sqlite3_prepare_v2(old,
                                          "SELECT seq, kind, body FROM record WHERE seq <= ?1 "
                                          "ORDER BY seq",
                                          -1, &q, NULL) != SQLITE_OK)
        st = fl_fail(err, FL_CORRUPT, "journal %s cannot be read: %s", path, sqlite3_errmsg(old));
    if (st == FL_OK)
        sqlite3_bind_int64(q, 1, (int64_t)last);
    for (uint64_t seq = 0; st == FL_OK && seq < last && sqlite3_step(q) == SQLITE_ROW;) {
        seq = (uint64_t)sqlite3_column_int64(q, 0);
        struct fl_bytes body = { sqlite3_column_blob(q, 2), (size_t)sqlite3_column_bytes(q, 2) };
        st = insert(s, seq, (uint16_t)sqlite3_column_int64(q, 1), body, err);
    }
    sqlite3_finalize(q);
    if (st == FL_OK)
        st = run(s, "COMMIT", err);
    db_close(s); /* closing moves its log in and syncs */
    if (st == FL_OK) {
        s->db =
            old; /* closed before its files move, so that it does not write to them afterwards */
        sqlite3_db_config(old, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
        db_close(s);
        st =
            rename(part, whole) < 0 ? fl_fail_errno(err, "rename %s", part) : finish_cut(path, err);
    } else {
        sqlite3_close(old);
    }
    if (st == FL_OK)
        st = db_open(s, path, err);
    return st == FL_OK ? db_prepare(s, err) : st;
}

static void note_cut(struct store *s, struct journal_opened *found, uint64_t lost, bool damaged)
{
    if (damaged)
        snprintf(found->note, sizeof(found->note),
                 "journal damaged after record %" PRIu64
                 ": cut there%s; the damaged file is kept as "
                 "%.120s.damaged",
                 found->last_seq, lost ? ", later ones are lost" : "", s->path);
    else if (s->wal_left)
        snprintf(found->note, sizeof(found->note),
                 "journal had a torn tail of %" PRIu64 " bytes after record %" PRIu64 ": cut there",
                 s->wal_left, found->last_seq);
}

enum fl_status store_replay(struct store *s,
                            enum fl_status (*each)(void *arg, uint64_t seq, uint16_t kind,
                                                   struct fl_bytes body, struct fl_err *err),
                            void *arg, struct journal_opened *found, struct fl_err *err)
{
    sqlite3_stmt *q = NULL;
    enum fl_status st = FL_OK;
    bool damaged = false;
    int rc;

    if (sqlite3_prepare_v2(s->db, "SELECT seq, kind, sum, body FROM record ORDER BY seq", -1, &q,
                           NULL) != SQLITE_OK)
        return db_fail(s, err, "read journal");
    while ((rc = sqlite3_step(q)) == SQLITE_ROW) {
        uint64_t seq = (uint64_t)sqlite3_column_int64(q, 0);
        uint16_t kind = (uint16_t)sqlite3_column_int64(q, 1);
        struct fl_bytes body = { sqlite3_column_blob(q, 3), (size_t)sqlite3_column_bytes(q, 3) };

        damaged = checksum(seq, kind, body.data, body.len) != sqlite3_column_int64(q, 2) ||
                  (found->records && seq != found->last_seq + 1) ||
                  (!found->records && kind != STORE_TERM_KIND);
        if (damaged)
            break;
        st = each(arg, seq, kind, body, err);
        if (st != FL_OK)
            break;
        found->records++;
        found->last_seq = seq;
    }
    if (st == FL_OK && rc != SQLITE_ROW && rc != SQLITE_DONE) {
        damaged = true;
        (void)db_fail(s, err, "read journal");
    }
    sqlite3_finalize(q);
    FL_TRY(st);
    damaged |= s->shorter;
    s->shorter = false;
    if (damaged && !found->records)
        return fl_fail(
            err, FL_CORRUPT,
            "journal %s: not one whole record is left; move the file away to begin anew, "
            "or put a copy in its place",
            s->path);
    note_cut(s, found, rc == SQLITE_ROW, damaged);
    return damaged ? cut_after(s, found->last_seq, err) : FL_OK;
}

/* ---- writing ---- */

static enum fl_status wipe_before(struct store *s, uint64_t seq, struct fl_err *err)
{
    sqlite3_bind_int64(s->wipe, 1, (int64_t)seq);
    int rc = sqlite3_step(s->wipe);
    enum fl_status st = rc == SQLITE_DONE ? FL_OK : db_fail(s, err, "compact journal");
    sqlite3_reset(s->wipe);
    return st;
}

static enum fl_status write_batch(struct store *s, const struct store_batch *b, struct fl_err *err)
{
    for (const struct store_record *r = b->records; r; r = r->next) {
        if (r->first)
            FL_TRY(wipe_before(s, r->seq, err));
        FL_TRY(insert(s, r->seq, r->kind, (struct fl_bytes){ r->body, r->len }, err));
        if (FL_FAULT("journal.record"))
            return fl_fail(err, FL_EXHAUSTED, "write journal %s: fault point", s->path);
    }
    return FL_OK;
}

enum fl_status store_write(struct store *s, const struct store_batch *first, struct fl_err *err)
{
    enum fl_status st = FL_OK;

    FL_TRY(run(s, "BEGIN IMMEDIATE", err));
    for (const struct store_batch *b = first; b && st == FL_OK; b = b->next)
        st = write_batch(s, b, err);
    if (st == FL_OK && FL_FAULT("journal.full"))
        st = fl_fail(err, FL_EXHAUSTED, "write journal %s: database or disk is full", s->path);
    if (st == FL_OK)
        st = run(s, "COMMIT", err);
    if (st != FL_OK && !sqlite3_get_autocommit(s->db))
        (void)run(s, "ROLLBACK", NULL); /* the first error is the one to tell */
    if (st == FL_OK)
        (void)FL_FAULT("journal.committed"); /* for kill and stop: on disk, and nobody knows yet */
    return st;
}

void store_tidy(struct store *s, bool now)
{
    if (now)
        (void)run(s, "PRAGMA incremental_vacuum", NULL); /* later will do as well */
    if (s->wal_pages < WAL_PAGES_MAX && !(now && s->wal_pages > 0))
        return;
    if (sqlite3_wal_checkpoint_v2(s->db, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL) == SQLITE_OK)
        s->wal_pages = 0;
}

enum fl_status store_room(const struct store *s, uint64_t reserve_bytes, struct fl_err *err)
{
    struct statvfs fs;
    char have[16], want[16];

    if (statvfs(s->path, &fs) < 0)
        return fl_fail_errno(err, "journal %s", s->path);
    uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (FL_FAULT("journal.room"))
        free_bytes = 4096;
    if (free_bytes >= reserve_bytes)
        return FL_OK;
    return fl_fail(err, FL_EXHAUSTED,
                   "the disk of %s has %s left and %s are kept for what runs already; free some "
                   "space, or use another --state-dir",
                   s->path, fl_bytes_text(have, free_bytes), fl_bytes_text(want, reserve_bytes));
}

uint64_t store_file_bytes(const struct store *s)
{
    char wal[FL_PATH_MAX + 8];
    struct stat a = { 0 }, b = { 0 };

    snprintf(wal, sizeof(wal), "%s-wal", s->path);
    (void)stat(s->path, &a); /* absent counts as empty */
    (void)stat(wal, &b);
    return (uint64_t)a.st_size + (uint64_t)b.st_size;
}

void store_destroy(struct store *s)
{
    if (!s)
        return;
    db_close(s);
    if (s->lock_fd >= 0)
        close(s->lock_fd);
    free(s);
}
