/* Commits of the head's journal against what the disk can do: one write and one fdatasync each.
 *
 *     bench_journal [--quick] [FOLDER]      FOLDER: on the disk to measure, default the current one
 *
 * One JSON line a case: durable records a second with so many outstanding, the raw rate measured in
 * the same run before and after it, and the ratio. With many outstanding the ratio passes 1: they
 * share a sync. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/must.h"
#include "common/base/file.h"
#include "common/base/str.h"
#include "head/journal/journal.h"

enum { MOST = 64, BODY = 256, PAGE = 4096, KIND = 1 };

struct bench {
    struct fl_loop *loop;
    struct journal *journal;
    uint64_t left, done; /* to append, durable */
    struct slot {
        struct journal_op op;
        struct bench *bench;
    } slots[MOST];
};

static void apply(void *state, struct fl_bytes body)
{
    (void)body;
    ++*(uint64_t *)state;
}

static void append(struct slot *s)
{
    static const uint8_t body[BODY];
    struct fl_err err;

    if (!s->bench->left)
        return;
    s->bench->left--;
    must(journal_append(s->bench->journal, KIND, (struct fl_bytes){ body, sizeof(body) }, &s->op,
                        &err));
}

static void durable(struct journal_op *op, enum fl_status st, const struct fl_err *err)
{
    struct slot *s = container_of(op, struct slot, op);

    if (st != FL_OK)
        die("commit", err);
    s->bench->done++;
    append(s);
}

static double journal_rate(const char *path, unsigned outstanding, uint64_t records)
{
    static const struct journal_apply table[] = { { KIND, apply } };
    struct bench b = { .left = records };
    struct journal_opened found;
    struct fl_err err = { 0 };
    uint64_t applied = 0;
    struct journal_opts o = { .table = table, .n_table = 1, .state = &applied };

    must(fl_loop_create(NULL, &b.loop, &err));
    must(journal_open(b.loop, path, &o, &b.journal, &found, &err));
    uint64_t start = fl_clock_boot_ns();
    for (unsigned i = 0; i < outstanding; i++) {
        b.slots[i] = (struct slot){ .op.durable = durable, .bench = &b };
        append(&b.slots[i]);
    }
    while (b.done < records)
        fl_loop_turn(b.loop, -1);
    double seconds = (double)(fl_clock_boot_ns() - start) / 1e9;
    journal_destroy(b.journal);
    fl_loop_destroy(b.loop);
    return (double)records / seconds;
}

/* What SQLite's log does for one record at the least: a page behind the last, and a sync. */
static double raw_rate(const char *path, unsigned syncs)
{
    static uint8_t page[PAGE];
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    uint64_t start = fl_clock_boot_ns();

    for (unsigned i = 0; fd >= 0 && i < syncs; i++)
        if (pwrite(fd, page, sizeof(page), (off_t)(i % 1024) * PAGE) != PAGE || fdatasync(fd) < 0)
            die("raw write", NULL);
    double seconds = (double)(fl_clock_boot_ns() - start) / 1e9;
    close(fd);
    return (double)syncs / seconds;
}

int main(int argc, char **argv)
{
    bool quick = argc > 1 && strcmp(argv[1], "--quick") == 0;
    const char *folder = argc > 1 + quick ? argv[1 + quick] : ".";
    static const unsigned outstanding[] = { 1, MOST };
    char dir[FL_PATH_MAX], path[FL_PATH_MAX], raw[FL_PATH_MAX];
    struct fl_err err;

    must(fl_path(dir, &err, "%s/bench-journal.%d", folder, (int)getpid()));
    must(fl_mkdirs(dir, &err));
    must(fl_path(raw, &err, "%s/raw", dir));
    for (size_t i = 0; i < FL_LEN(outstanding); i++) {
        unsigned syncs = quick ? 50 : 2000;

        must(fl_path(path, &err, "%s/journal%u.db", dir, outstanding[i]));
        double before = raw_rate(raw, syncs);
        double rate =
            journal_rate(path, outstanding[i], (uint64_t)syncs * (outstanding[i] > 1 ? 10 : 1));
        double limit = (before + raw_rate(raw, syncs)) / 2;
        printf(
            "{\"bench\":\"journal\",\"outstanding\":%u,\"record_bytes\":%d,\"commits_per_s\":%.0f,"
            "\"raw_fdatasync_per_s\":%.0f,\"ratio\":%.2f}\n",
            outstanding[i], BODY, rate, limit, rate / limit);
        fflush(stdout);
    }
    return fl_tree_remove(dir, &err) == FL_OK ? 0 : 1;
}
