/* The journal: what is promised is there again, whatever happened to the process, the disk or the
 * file. */
#include "tests/t.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "head/journal/journal.h"
#include "head/journal/store.h"

enum { SLOTS = 64, SET = 1, BULK = 2 };

/* A state that is small and easy to compare: numbered slots, and how often anything was applied. */
struct state {
    uint32_t slot[SLOTS];
    unsigned applied;
};
struct set {
    uint32_t slot, value;
};

static void apply_set(void *arg, struct fl_bytes body)
{
    struct state *s = arg;
    struct set one;

    memcpy(&one, body.data, sizeof(one));
    s->slot[one.slot % SLOTS] = one.value;
    s->applied++;
}

static void apply_bulk(void *arg, struct fl_bytes body)
{
    (void)body;
    ((struct state *)arg)->applied++;
}

static void snapshot(void *arg, struct journal_emit *e)
{
    struct state *s = arg;

    for (uint32_t i = 0; i < SLOTS; i++)
        if (s->slot[i])
            e->put(e, SET, (struct fl_bytes){ &(struct set){ i, s->slot[i] }, sizeof(struct set) });
}

static const struct journal_apply table[] = { { SET, apply_set }, { BULK, apply_bulk } };

struct fix {
    struct fl_loop *loop;
    struct state state;
    struct journal *j;
    struct journal_opened found;
    char path[1024];
    unsigned durable, failed;
};

struct waiter {
    struct journal_op op;
    struct fix *f;
};

static void on_durable(struct journal_op *op, enum fl_status st, const struct fl_err *err)
{
    struct waiter *w = container_of(op, struct waiter, op);

    t_true((st == FL_OK) == (err == NULL));
    if (st == FL_OK)
        w->f->durable++;
    else
        w->f->failed++;
}

static void fix_start(struct fix *f, const char *name)
{
    *f = (struct fix){ 0 };
    t_ok(fl_loop_create(NULL, &f->loop, NULL), NULL);
    snprintf(f->path, sizeof(f->path), "%s", t_path(name));
    mkdir(f->path, 0700);
    strcat(f->path, "/journal.db");
}

static enum fl_status try_open(struct fix *f, struct journal_opts *o, struct fl_err *err)
{
    struct journal_opts opts = o ? *o : (struct journal_opts){ 0 };

    opts.table = table;
    opts.n_table = FL_LEN(table);
    opts.state = &f->state;
    if (!opts.snapshot)
        opts.snapshot = snapshot;
    memset(&f->state, 0, sizeof(f->state));
    return journal_open(f->loop, f->path, &opts, &f->j, &f->found, err);
}

static void fix_open(struct fix *f, struct journal_opts *o)
{
    struct fl_err err = { 0 };

    t_ok(try_open(f, o, &err), &err);
}

static void fix_close(struct fix *f)
{
    journal_destroy(f->j);
    f->j = NULL;
}

static void fix_end(struct fix *f)
{
    fix_close(f);
    fl_loop_destroy(f->loop);
}

static void set(struct fix *f, uint32_t slot, uint32_t value, struct waiter *w)
{
    struct fl_err err = { 0 };

    if (w)
        *w = (struct waiter){ .op.durable = on_durable, .f = f };
    t_ok(journal_append(f->j, SET,
                        (struct fl_bytes){ &(struct set){ slot, value }, sizeof(struct set) },
                        w ? &w->op : NULL, &err),
         &err);
}

static void set_durable(struct fix *f, uint32_t slot, uint32_t value)
{
    struct waiter w;
    unsigned before = f->durable;

    set(f, slot, value, &w);
    t_int_eq(f->state.slot[slot], value, "applied at once");
    t_int_eq(f->durable, before, "and not durable in the same breath");
    t_until(f->loop, f->durable == before + 1, 5000);
}

static long file_size(const char *path)
{
    struct stat sb;

    return stat(path, &sb) == 0 ? (long)sb.st_size : -1;
}

static void flip(const char *path, long at, int len)
{
    int fd = open(path, O_RDWR);
    uint8_t b;

    t_true(fd >= 0, "%s", path);
    for (int i = 0; i < len; i++) {
        t_int_eq(pread(fd, &b, 1, at + i), 1);
        b ^= 0x5a;
        t_int_eq(pwrite(fd, &b, 1, at + i), 1);
    }
    close(fd);
}

static void copy_file(const char *from, const char *to)
{
    char cmd[2600];

    snprintf(cmd, sizeof(cmd), "cp %s %s", from, to);
    t_int_eq(system(cmd), 0);
}

static void opens_fresh_and_counts_terms(void **unused)
{
    struct fix f;
    struct fl_term first;
    struct stat sb;

    (void)unused;
    fix_start(&f, "terms");
    fix_open(&f, NULL);
    t_true(f.found.fresh);
    t_int_eq(f.found.term.head, 1);
    t_str_eq(f.found.note, "");
    first = f.found.term;
    t_int_eq(stat(f.path, &sb), 0);
    t_int_eq(sb.st_mode & 0777, 0600, "keys of jobs lie in it");
    for (uint64_t term = 2; term < 5; term++) {
        fix_close(&f);
        fix_open(&f, NULL);
        t_true(!f.found.fresh);
        t_int_eq(f.found.term.head, term);
        t_mem_eq(f.found.term.cluster, first.cluster, 16);
    }
    fix_end(&f);
}

static void what_was_durable_is_there_again(void **unused)
{
    struct fix f;

    (void)unused;
    fix_start(&f, "replay");
    fix_open(&f, NULL);
    for (uint32_t i = 0; i < 10; i++)
        set_durable(&f, i, i + 100);
    set_durable(&f, 3, 7);
    fix_close(&f);
    fix_open(&f, NULL);
    t_int_eq(f.state.applied, 11);
    t_int_eq(f.state.slot[3], 7, "the last one wins");
    t_int_eq(f.state.slot[9], 109);
    fix_end(&f);
}

static void many_share_one_sync(void **unused)
{
    struct fix f;
    struct waiter w[500];
    struct journal_stats s;

    (void)unused;
    fix_start(&f, "group");
    fix_open(&f, NULL);
    for (unsigned i = 0; i < FL_LEN(w); i++)
        set(&f, i % SLOTS, i + 1, &w[i]);
    t_int_eq(f.durable, 0);
    t_until(f.loop, f.durable == FL_LEN(w), 5000);
    journal_stats(f.j, &s);
    t_int_eq(s.records, FL_LEN(w));
    t_true(s.groups < 50, "%d groups for 500 records", (int)s.groups);
    t_int_eq(s.queued_bytes, 0);
    fix_end(&f);
}

static void destroy_brings_every_op_back(void **unused)
{
    struct fix f;
    struct waiter w[50];

    (void)unused;
    fix_start(&f, "destroy");
    fix_open(&f, NULL);
    for (unsigned i = 0; i < FL_LEN(w); i++)
        set(&f, i, i + 1, &w[i]);
    fix_close(&f);
    t_int_eq(f.durable, FL_LEN(w), "written, not dropped");
    fix_open(&f, NULL);
    t_int_eq(f.state.applied, FL_LEN(w));
    fix_end(&f);
}

static void a_fence_comes_after_what_was_appended(void **unused)
{
    struct fix f;
    struct waiter a, fence = { .op.durable = on_durable, .f = &f };
    struct fl_err err;

    (void)unused;
    fix_start(&f, "fence");
    fix_open(&f, NULL);
    set(&f, 1, 1, &a);
    t_ok(journal_fence(f.j, &fence.op, &err), &err);
    t_until(f.loop, f.durable == 2, 5000);
    fix_end(&f);
}

static void a_second_head_is_kept_out(void **unused)
{
    struct fix f, g;
    struct fl_err err = { 0 };
    char pid[24];

    (void)unused;
    fix_start(&f, "lock");
    fix_open(&f, NULL);
    fix_start(&g, "lock");
    t_refused(try_open(&g, NULL, &err), FL_EXISTS, &err);
    snprintf(pid, sizeof(pid), "pid %d", (int)getpid());
    t_has(err.text, pid);
    t_has(err.text, "--state-dir");
    t_true(g.j == NULL);
    set_durable(&f, 1, 1); /* the first is not disturbed */
    fix_close(&f);
    fix_open(&g, NULL);
    t_int_eq(g.state.slot[1], 1);
    fix_end(&g);
    fix_end(&f);
}

static void network_file_systems_are_refused(void **unused)
{
    struct fix f;
    struct fl_err err = { 0 };

    (void)unused;
    fix_start(&f, "nfs");
    t_ok(fl_fault_set("journal.network_fs:1=fail", &err), &err);
    t_refused(try_open(&f, NULL, &err), FL_UNSUPPORTED, &err);
    fl_fault_set(NULL, NULL);
    t_has(err.text, "NFS");
    t_has(err.text, "--state-dir");
    t_int_eq(file_size(f.path), -1, "nothing was made");
    fix_end(&f);
}

static void term_is_raised_above_what_was_seen(void **unused)
{
    struct fix f;
    struct fl_term term;
    struct waiter w = { .op.durable = on_durable, .f = &f };
    struct fl_err err;

    (void)unused;
    fix_start(&f, "raise");
    fix_open(&f, NULL);
    term = f.found.term;
    t_ok(journal_raise_term(f.j, 9, &term, &w.op, &err), &err);
    t_int_eq(term.head, 1, "not before it is on disk");
    t_until(f.loop, f.durable == 1, 5000);
    t_int_eq(term.head, 10);
    fix_close(&f);
    fix_open(&f, NULL);
    t_int_eq(f.found.term.head, 11);
    fix_end(&f);
}

/* Each kind of damage to a file that was closed, or copied while it was open. */
struct damage {
    const char *name;
    bool live;     /* copy file and log while the journal is open */
    bool log;      /* hurt the log, else the file */
    int where_pct; /* of its size; 0: the very beginning */
    int cut_pct;   /* keep so much instead, 0: flip bytes */
    enum fl_status wanted;
    bool note;
};
static const struct damage damages[] = {
    { "whole copy of a live journal", true, true, 100, 100, FL_OK, false },
    { "log cut in the middle", true, true, 0, 50, FL_OK, true },
    { "log cut inside its header", true, true, 0, 0, FL_OK, true },
    { "byte flipped in the middle of the log", true, true, 50, -1, FL_OK, true },
    { "byte flipped at the end of the log", true, true, 99, -1, FL_OK, true },
    { "byte flipped in the header of the log", true, true, 0, -1, FL_OK, true },
    { "byte flipped in the file's records", false, false, 85, -1, FL_OK, true },
    { "file cut to 80 percent", false, false, 0, 80, FL_OK, true },
    { "file's header gone", false, false, 0, -1, FL_CORRUPT, false },
    { "file cut to nothing but a piece of a page", false, false, 0, 1, FL_CORRUPT, false },
};

static void make_journal(struct fix *f, const char *name, bool live, char copy[1100])
{
    char from[1100], to[1200], dir[1100];
    struct waiter w;
    uint8_t bulk[900] = { 1 };

    fix_start(f, name);
    fix_open(f, NULL);
    for (uint32_t i = 0; i < 400; i++) { /* about 100 pages: damage has somewhere to be */
        t_ok(journal_append(f->j, BULK, (struct fl_bytes){ bulk, sizeof(bulk) }, NULL, NULL), NULL);
        set(f, i % SLOTS, i + 1, &w);
        t_until(f->loop, f->durable == i + 1, 5000);
    }
    snprintf(dir, sizeof(dir), "%s", t_path("copy"));
    mkdir(dir, 0700);
    snprintf(copy, 1100, "%.1000s/%.60s.db", dir, name);
    if (!live)
        fix_close(f);
    copy_file(f->path, copy);
    if (live) {
        snprintf(from, sizeof(from), "%.1000s-wal", f->path);
        snprintf(to, sizeof(to), "%s-wal", copy);
        copy_file(from, to);
        fix_close(f);
    }
    (void)FL_COPY(f->path, copy);
}

static void hurt(const struct damage *d, const char *copy)
{
    char path[1200];
    long size;

    snprintf(path, sizeof(path), "%s%s", copy, d->log ? "-wal" : "");
    size = file_size(path);
    t_true(size > 20000, "%s: %ld bytes", d->name, size);
    if (d->cut_pct < 0)
        flip(path, d->where_pct ? size * d->where_pct / 100 : 8, 4);
    else if (d->cut_pct < 100)
        t_int_eq(truncate(path, d->cut_pct ? size * d->cut_pct / 100 : 20), 0);
}

static void damaged_tails_are_cut_with_a_note(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < FL_LEN(damages); i++) {
        const struct damage *d = &damages[i];
        char name[32], copy[1100];
        struct fl_err err = { 0 };
        struct fix f;

        snprintf(name, sizeof(name), "damage%zu", i);
        make_journal(&f, name, d->live, copy);
        hurt(d, copy);
        long size = file_size(copy);
        enum fl_status st = try_open(&f, NULL, &err);
        t_int_eq(st, d->wanted, "%s: %s", d->name, err.text);
        if (st != FL_OK) {
            t_has(err.text, "whole");
            t_int_eq(file_size(copy), size, "%s: the file is not touched", d->name);
            fix_end(&f);
            continue;
        }
        t_true((f.found.note[0] != '\0') == d->note, "%s: note \"%s\"", d->name, f.found.note);
        t_true(f.state.applied <= 800 && (!d->note || f.state.applied < 800 || d->log), "%s",
               d->name);
        t_true(d->note || f.state.applied == 800, "%s: %u", d->name, f.state.applied);
        if (d->note)
            t_has(f.found.note, "cut");
        t_true(f.found.term.head >= 2, "%s", d->name);
        /* it takes records again, and those are there the next time, without a note */
        unsigned left = f.state.applied;
        set_durable(&f, 5, 4242);
        fix_close(&f);
        fix_open(&f, NULL);
        t_str_eq(f.found.note, "", "%s", d->name);
        t_int_eq(f.state.applied, left + 1, "%s", d->name);
        t_int_eq(f.state.slot[5], 4242, "%s", d->name);
        fix_end(&f);
    }
}

static void a_copied_older_journal_has_an_older_term(void **unused)
{
    struct fix f;
    char older[1100];

    (void)unused;
    make_journal(&f, "older", false, older);
    fix_open(&f, NULL);
    fix_close(&f);
    fix_open(&f, NULL);
    uint64_t term = f.found.term.head;
    fix_end(&f);
    make_journal(&f, "older2", false, older);
    fix_open(&f, NULL);
    t_true(f.found.term.head < term, "its daemons have seen %d", (int)term);
    fix_end(&f);
}

static void the_file_stays_bounded(void **unused)
{
    struct fix f;
    struct journal_opts o = { .compact_records = 100, .compact_bytes = 1 << 20 };
    struct journal_stats s;
    struct waiter w;
    uint64_t after_1000 = 0;

    (void)unused;
    fix_start(&f, "compact");
    fix_open(&f, &o);
    for (uint32_t i = 0; i < 6000; i++) {
        set(&f, i % SLOTS, i + 1, &w);
        if (i % 50 == 49)
            t_until(f.loop, (journal_stats(f.j, &s), s.queued_bytes == 0), 5000);
        if (i == 999)
            journal_stats(f.j, &s), after_1000 = s.file_bytes;
    }
    journal_stats(f.j, &s);
    t_true(s.compactions >= 10, "%d", (int)s.compactions);
    struct state was = f.state;
    fix_close(&f);
    t_true((uint64_t)file_size(f.path) <= after_1000 + 65536, "%ld after 6000, %ld after 1000",
           file_size(f.path), (long)after_1000);
    fix_open(&f, &o);
    t_mem_eq(f.state.slot, was.slot, sizeof(was.slot));
    t_true(f.found.records < 600, "%d records replayed", (int)f.found.records);
    fix_end(&f);
}

static void a_full_disk_is_said_and_waited_for(void **unused)
{
    struct fix f;
    struct waiter w;
    struct fl_err err = { 0 };

    (void)unused;
    fix_start(&f, "full");
    fix_open(&f, NULL);
    t_ok(journal_accepts(f.j, &err), &err);
    t_ok(fl_fault_set("journal.room:1=fail", &err), &err);
    t_refused(journal_accepts(f.j, &err), FL_EXHAUSTED, &err);
    t_has(err.text, "--state-dir");

    t_ok(fl_fault_set("journal.full:1=fail", &err), &err);
    set(&f, 1, 11, &w);
    t_until(f.loop, journal_accepts(f.j, &err) != FL_OK || f.durable, 5000);
    t_int_eq(f.durable, 0, "not told while it is not on disk");
    t_has(err.text, "full");
    t_until(f.loop, f.durable == 1, 5000); /* tried again */
    t_ok(journal_accepts(f.j, &err), &err);
    fl_fault_set(NULL, NULL);
    fix_close(&f);
    fix_open(&f, NULL);
    t_int_eq(f.state.slot[1], 11);
    t_int_eq(f.state.applied, 1, "once");
    fix_end(&f);
}

static void the_queue_is_bounded(void **unused)
{
    struct fix f;
    struct journal_opts o = { .queue_bytes = 4096 };
    struct fl_err err = { 0 };
    unsigned taken = 0;
    enum fl_status st = FL_OK;

    (void)unused;
    fix_start(&f, "bound");
    fix_open(&f, &o);
    t_ok(fl_fault_set("journal.full:1=fail", &err), &err);
    for (; st == FL_OK && taken < 1000; taken += st == FL_OK)
        st = journal_append(f.j, SET, (struct fl_bytes){ &(struct set){ 1, taken + 1 }, 8 }, NULL,
                            &err);
    t_refused(st, FL_EXHAUSTED, &err);
    t_true(taken > 5 && taken < 100, "%u", taken);
    t_int_eq(f.state.slot[1], taken, "what is refused is not applied");
    fl_fault_set(NULL, NULL);
    fix_close(&f);
    fix_open(&f, NULL);
    t_int_eq(f.state.slot[1], taken);
    fix_end(&f);
}

/* A process that is killed at a fault point while it writes; the parent then looks at what is left.
 */
static void killed_anywhere_keeps_what_was_told(void **unused)
{
    static const char *const points[] = { "journal.record:3",   "journal.record:17",
                                          "journal.record:90",  "journal.full:1",
                                          "journal.full:4",     "journal.committed:1",
                                          "journal.committed:5" };

    (void)unused;
    for (size_t p = 0; p < FL_LEN(points); p++) {
        char name[32], spec[64];
        int told[2];
        struct fix f;
        struct fl_err err = { 0 };
        uint32_t last = 0, got;

        snprintf(name, sizeof(name), "kill%zu", p);
        snprintf(spec, sizeof(spec), "%s=kill", points[p]);
        t_int_eq(pipe(told), 0);
        pid_t pid = fork();
        if (pid == 0) {
            struct waiter w[8];
            struct journal_opts o = { .compact_records = 20 };

            close(told[0]);
            fix_start(&f, name);
            fix_open(&f, &o);
            fl_fault_set(spec, NULL);
            for (uint32_t i = 1;; i++) {
                set(&f, i % SLOTS, i, &w[i % 8]);
                while (f.durable < i - i % 8)
                    fl_loop_turn(f.loop, 20);
                if (write(told[1], &f.durable, 4) != 4)
                    _exit(3);
                if (i == 4000)
                    _exit(4); /* the point was never met */
            }
        }
        close(told[1]);
        while (read(told[0], &got, 4) == 4)
            last = got;
        close(told[0]);
        int status = 0;
        t_int_eq(waitpid(pid, &status, 0), pid);
        t_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "%s: status %x", points[p],
               status);
        fix_start(&f, name);
        t_ok(try_open(&f, NULL, &err), &err);
        uint32_t most = 0;
        for (unsigned i = 0; i < SLOTS; i++)
            most = f.state.slot[i] > most ? f.state.slot[i] : most;
        t_true(most >= last, "%s: told %u, kept %u", points[p], last, most);
        for (uint32_t i = most; i && i + SLOTS > most; i--)
            t_int_eq(f.state.slot[i % SLOTS], i, "%s: no hole below the last", points[p]);
        t_int_eq(f.found.term.head, 2, "%s", points[p]);
        fix_end(&f);
    }
}

static void a_newer_kind_is_refused_by_name(void **unused)
{
    struct fix f;
    struct fl_err err = { 0 };

    (void)unused;
    fix_start(&f, "newer");
    fix_open(&f, NULL);
    set_durable(&f, 1, 1);
    fix_close(&f);
    struct journal *j = NULL;
    struct journal_opts o = { .table = &table[1], .n_table = 1, .state = &f.state };
    t_refused(journal_open(f.loop, f.path, &o, &j, &f.found, &err), FL_UNSUPPORTED, &err);
    t_has(err.text, "newer furlong-head");
    fix_open(&f, NULL); /* and it was not hurt */
    t_int_eq(f.state.slot[1], 1);
    fix_end(&f);
}

static void every_failure_on_the_way_in_is_clean(void **unused)
{
    struct fix f;
    struct fl_err err = { 0 };
    enum fl_status st = FL_INTERNAL;

    (void)unused;
    fix_start(&f, "sweep");
    int fds = t_open_fds();
    for (unsigned nth = 1; st != FL_OK; nth++) {
        t_true(nth < 50);
        fl_fault_arm(nth);
        st = try_open(&f, NULL, &err);
        bool met = fl_fault_disarm();
        t_true((st == FL_OK) == (f.j != NULL), "nth=%u", nth);
        t_true(met || st == FL_OK, "nth=%u", nth);
        fix_close(&f);
        t_int_eq(t_open_fds(), fds, "nth=%u", nth);
        if (st == FL_OK && met)
            st = FL_INTERNAL; /* a point without a failure to give */
    }
    fix_end(&f);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(opens_fresh_and_counts_terms),
        cmocka_unit_test(what_was_durable_is_there_again),
        cmocka_unit_test(many_share_one_sync),
        cmocka_unit_test(destroy_brings_every_op_back),
        cmocka_unit_test(a_fence_comes_after_what_was_appended),
        cmocka_unit_test(a_second_head_is_kept_out),
        cmocka_unit_test(network_file_systems_are_refused),
        cmocka_unit_test(term_is_raised_above_what_was_seen),
        cmocka_unit_test(damaged_tails_are_cut_with_a_note),
        cmocka_unit_test(a_copied_older_journal_has_an_older_term),
        cmocka_unit_test(the_file_stays_bounded),
        cmocka_unit_test(a_full_disk_is_said_and_waited_for),
        cmocka_unit_test(the_queue_is_bounded),
        cmocka_unit_test(killed_anywhere_keeps_what_was_told),
        cmocka_unit_test(a_newer_kind_is_refused_by_name),
        cmocka_unit_test(every_failure_on_the_way_in_is_clean),
    };

    return t_run("journal", tests);
}
