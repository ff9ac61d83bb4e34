/* Long runs of disk-delta: disks do not fill, and whoever comes late is served. */
#include <dirent.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "tests/xfer/epoch_rig.h"
#include "transport/xfer/source_priv.h"

#define OURS "0100000070ada1" /* the trainer and "policy" */

struct tree { /* what lies in a folder, and below */
    unsigned folders;
    uint64_t bytes;
};

static void look(const char *path, struct tree *out)
{
    char name[FL_PATH_MAX];
    struct dirent *e;
    struct stat s;
    DIR *d = opendir(path);

    while (d && (e = readdir(d))) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        t_ok(fl_path(name, NULL, "%s/%s", path, e->d_name), NULL);
        if (lstat(name, &s) < 0)
            continue;
        out->bytes += S_ISREG(s.st_mode) ? (uint64_t)s.st_size : 0;
        out->folders += S_ISDIR(s.st_mode);
        if (S_ISDIR(s.st_mode))
            look(name, out);
    }
    if (d)
        closedir(d);
}

static struct tree tree_of(const char *path)
{
    struct tree t = { 0 };

    look(path, &t);
    return t;
}

static bool is_there(const char *dir, const char *name)
{
    char path[FL_PATH_MAX];

    t_ok(fl_path(path, NULL, "%s/%s", dir, name), NULL);
    return access(path, F_OK) == 0;
}

static struct delta_writer *writer(struct rig *r)
{
    return &rig_source(r, 0)->src->delta;
}

static bool base_is_made_now(struct rig *r)
{
    return delta_writer_busy(writer(r));
}

/* The update is over at the trainer too, and what is done between two of them. */
static void settled(struct rig *r)
{
    rig_until(r, !give_busy(&rig_source(r, 0)->src->give) && !base_is_made_now(r));
}

static void bring(struct rig *r, uint64_t version)
{
    rig_next(r, version);
    t_ok(rig_update(r, XFER_DISK_DELTA, version), &r->err);
    t_int_eq(r->rep.n_left_behind, 0, "%s", r->rep.first_left_behind.text);
    rig_check_all_serve(r, version);
    settled(r);
}

static void loses_its_copy(struct rig *r, unsigned party)
{
    char local[FL_PATH_MAX];

    t_ok(fl_path(local, NULL, "%s-%u", r->o.local_dir, party), NULL);
    t_ok(fl_tree_remove(local, NULL), NULL);
}

static struct rig_opts opts(const char *name)
{
    static char delta[FL_PATH_MAX], local[FL_PATH_MAX];
    char own[64];

    snprintf(own, sizeof(own), "%s-own", name);
    t_ok(fl_path(delta, NULL, "%s", t_path(name)), NULL);
    t_ok(fl_path(local, NULL, "%s", t_path(own)), NULL);
    return (struct rig_opts){ .n_sources = 1,
                              .n_engines = 2,
                              .delta_dir = delta,
                              .local_dir = local,
                              .own_local = true,
                              .few_change = true };
}

struct long_row {
    const char *name;
    bool few_change;
    unsigned most_versions, updates, folders; /* folders: with the process's own, at most */
    double models; /* bytes in all, at most: in models as small as ours headers count */
};
/* clang-format off */
static const struct long_row long_rows[] = {
    { "very many small changes",      true,  5,                   200, 1 + 9, 3.0 },
    { "until they are a whole model", true,  DELTA_MOST_VERSIONS, 150, 1 + 100, 4.5 },
    { "all of it changes each time",  false, DELTA_MOST_VERSIONS,  20, 1 + 6, 11 },
};
/* clang-format on */

/* One engine comes again where nothing is, one has missed versions that nobody has any more. */
static void a_long_run(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(long_rows); i++) {
        const struct long_row *w = &long_rows[i];
        struct tree most = { 0 };
        struct rig r;
        char name[32];

        snprintf(name, sizeof(name), "long-%zu", i);
        struct rig_opts o = opts(name);

        o.few_change = w->few_change;
        rig_init(&r, &o);
        writer(&r)->most_versions = w->most_versions;
        for (uint64_t v = 0; v < w->updates; v++) {
            if (v == w->updates / 4)
                rig_kill(rig_engine(&r, 1, 0), true);
            if (v == w->updates / 4 * 3)
                (void)rig_restart(rig_engine(&r, 1, 0));
            if (v == w->updates - 2) {
                rig_kill(rig_engine(&r, 0, 0), true);
                loses_its_copy(&r, 0);
                (void)rig_restart(rig_engine(&r, 0, 0));
            }
            bring(&r, v);
            struct tree now = tree_of(o.delta_dir);

            most.bytes = now.bytes > most.bytes ? now.bytes : most.bytes;
            most.folders = now.folders > most.folders ? now.folders : most.folders;
        }
        double models = (double)most.bytes / (double)rig_source(&r, 0)->mem_bytes;

        printf("# %s: at most %u folders, %.2f models\n", w->name, most.folders, models);
        t_true(most.folders <= w->folders, "%s: %u folders", w->name, most.folders);
        t_true(models < w->models, "%s: %.2f models", w->name, models);
        t_true(writer(&r)->base > 0, "%s: no base was made", w->name);
        rig_fini(&r);
    }
}

/* Folders of the dead one, and copies of what it wrote, go; what else lies there stays. */
static void a_trainer_that_starts_again(void **state)
{
    struct rig_opts o = opts("again");
    char path[FL_PATH_MAX];
    struct rig r;

    (void)state;
    rig_init(&r, &o);
    bring(&r, 1);
    bring(&r, 2);
    for (unsigned i = 0; i < 4; i++) {
        static const char *const theirs[] = { OURS "-1", OURS "-01-0", "0200000070ada1-1-0",
                                              "0100000070ada0-1-0" };

        t_ok(fl_path(path, NULL, "%s/%s", o.delta_dir, theirs[i]), NULL);
        t_ok(fl_mkdirs(path, NULL), NULL);
    }
    rig_kill(rig_source(&r, 0), true);
    (void)rig_restart(rig_source(&r, 0));
    bring(&r, 3);
    t_true(is_there(o.delta_dir, OURS "-1-0"), "whoever reads it may go on");
    t_ok(fl_path(path, NULL, "%s-0", o.local_dir), NULL);
    t_true(!is_there(path, OURS "-1-0") && is_there(path, OURS "-2-0"), "a copy each");
    bring(&r, 4);
    t_true(!is_there(o.delta_dir, OURS "-1-0"), "the second version is there");
    t_true(is_there(o.delta_dir, OURS "-1") && is_there(o.delta_dir, OURS "-01-0") &&
               is_there(o.delta_dir, "0200000070ada1-1-0") &&
               is_there(o.delta_dir, "0100000070ada0-1-0"),
           "not ours");
    bring(&r, 5);
    rig_fini(&r);
}

/* No update fails, and it is done later. */
static void what_fails_behind_the_updates(void **state)
{
    static const char *const at[] = { "xfer.delta_compact:1=fail", "fmt.compact:1=fail",
                                      "fmt.compact_room:1=fail" };

    (void)state;
    for (size_t i = 0; i < FL_LEN(at); i++) {
        uint64_t v = 1;
        char name[32];
        struct rig r;

        snprintf(name, sizeof(name), "behind-%zu", i);
        struct rig_opts o = opts(name);

        rig_init(&r, &o);
        writer(&r)->most_versions = 3;
        t_ok(fl_fault_set(at[i], NULL), NULL);
        for (; v <= 4; v++)
            bring(&r, v);
        t_true(writer(&r)->told_made && writer(&r)->base == 1, "%s: no base, and it was said",
               at[i]);
        for (; v <= 4 + DELTA_RETRY_VERSIONS; v++)
            bring(&r, v);
        t_int_eq(writer(&r)->base, 4 + DELTA_RETRY_VERSIONS, "%s", at[i]);
        bring(&r, v++);
        t_ok(fl_fault_set("fmt.prune:1=fail,fmt.prune:2=fail", NULL), NULL);
        bring(&r, v++);
        t_true(writer(&r)->told_removed, "%s: it stays, and it was said", at[i]);
        t_ok(fl_fault_set(NULL, NULL), NULL);
        for (unsigned n = 0; n < 5; n++)
            bring(&r, v++);
        t_true(tree_of(o.delta_dir).folders <= 1 + 9, "it went with the next ones");
        rig_fini(&r);
    }
}

/* Nobody could follow such a folder: the next version goes whole to another one. */
static void a_chain_that_is_damaged_behind_its_writer(void **state)
{
    struct rig_opts o = opts("rot");
    char line[FL_PATH_MAX];
    struct rig r;

    (void)state;
    rig_init(&r, &o);
    writer(&r)->most_versions = 4;
    for (uint64_t v = 1; v <= 4; v++)
        bring(&r, v);
    t_ok(fl_path(line, NULL,
                 "for f in %s/*/weight_v000002/*.safetensors; do truncate -s 100 $f; done",
                 o.delta_dir),
         NULL);
    t_int_eq(system(line), 0);
    bring(&r, 5); /* a base is due, and cannot be made */
    t_true(is_there(o.delta_dir, OURS "-1-0/weight_v000005"), "by a change, as before");
    loses_its_copy(&r, 0);
    bring(&r, 6);
    t_true(is_there(o.delta_dir, OURS "-1-1/weight_v000006"), "whole, elsewhere");
    bring(&r, 7);
    t_true(!is_there(o.delta_dir, OURS "-1-0"), "nobody needs it");
    rig_fini(&r);
}

/* ---- the disk is the update's ---- */

enum { POOL = 2 };
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint at_gate;

static void blocks(struct fl_work *w)
{
    (void)w;
    atomic_fetch_add(&at_gate, 1);
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
}

static void unblocked(struct fl_work *w, enum fl_status st)
{
    (void)w, (void)st;
}

/* A base is to be made when the update is over, but the threads for it are not free: it has not got
 * further when the next update begins. */
static void a_base_makes_way_for_an_update(void **state)
{
    struct fl_work works[POOL] = { { .work = blocks, .done = unblocked },
                                   { .work = blocks, .done = unblocked } };
    struct rig_opts o = opts("way");
    struct rig r;

    (void)state;
    rig_init(&r, &o);
    writer(&r)->most_versions = 3;
    for (uint64_t v = 1; v <= 3; v++)
        bring(&r, v);
    rig_next(&r, 4);
    rig_start(&r, &(struct xfer_request){ .target = { .number = 4 },
                                          .mode = XFER_DISK_DELTA,
                                          .party = XFER_ALL_PARTIES,
                                          .due_ns = UINT64_MAX });
    rig_until(&r, rig_engine(&r, 0, 0)->serving.number == 4 &&
                      rig_engine(&r, 1, 0)->serving.number == 4);
    t_true(!base_is_made_now(&r), "the update is not over");
    pthread_mutex_lock(&gate);
    for (unsigned i = 0; i < POOL; i++)
        fl_work_start(r.loop, &works[i]);
    rig_until(&r, atomic_load(&at_gate) == POOL && base_is_made_now(&r) && !r.running);
    delta_tidy_hold(writer(&r)); /* as the next update's first word does */
    pthread_mutex_unlock(&gate);
    rig_next(&r, 5);
    t_true(base_is_made_now(&r), "it waits");
    rig_start(&r, &(struct xfer_request){ .target = { .number = 5 },
                                          .mode = XFER_DISK_DELTA,
                                          .party = XFER_ALL_PARTIES,
                                          .due_ns = UINT64_MAX });
    rig_until(&r, rig_engine(&r, 0, 0)->serving.number == 5 &&
                      rig_engine(&r, 1, 0)->serving.number == 5);
    t_true(!is_there(o.delta_dir, OURS "-1-0/base_v000004") && base_is_made_now(&r),
           "not while an update is under way");
    rig_until(&r, !r.running);
    settled(&r);
    t_true(is_there(o.delta_dir, OURS "-1-0/base_v000004"), "it goes on after it");
    bring(&r, 6);
    rig_fini(&r);
}

static unsigned n_written;

static void on_written(struct delta_writer *d, enum fl_status st, const struct fl_err *err)
{
    (void)d;
    t_ok(st, err);
    n_written++;
}

/* Each update holds what is being done, and lets it go when it is over; another folder ends it. */
static void who_sets_the_pace(void **state)
{
    struct xfer_manifest nothing = { 0 };
    struct link_mem mem = { 0 };
    struct fl_seat_ref who = { .attempt = 1 };
    struct delta_writer d;
    struct fl_loop *loop;

    (void)state;
    t_ok(fl_loop_create(NULL, &loop, NULL), NULL);
    delta_writer_init(&d, &nothing, &who, "policy", on_written, NULL);
    d.tidy.w.loop = loop; /* as if */
    for (uint64_t v = 1; v <= 2; v++) {
        delta_writer_start(&d, loop, t_path("pace"), v, false, &mem);
        t_int_eq(d.tidy.pace, v == 1 ? DELTA_STOP : DELTA_HOLD);
        t_until(loop, n_written == v, 10000);
        t_int_eq(d.tidy.pace, v == 1 ? DELTA_STOP : DELTA_HOLD, "engines read it now");
        delta_writer_over(&d);
        t_int_eq(d.tidy.pace, v == 1 ? DELTA_STOP : DELTA_GO);
        d.tidy.pace = DELTA_GO; /* the next one */
    }
    delta_writer_renew(&d);
    delta_writer_start(&d, loop, t_path("pace"), 3, false, &mem);
    t_int_eq(d.tidy.pace, DELTA_STOP);
    t_until(loop, n_written == 3, 10000);
    delta_writer_fini(&d);
    fl_loop_destroy(loop);
}

enum { SETS = 2 };
static unsigned n_quiet;

static void on_quiet(struct delta_writer *d)
{
    (void)d;
    n_quiet++;
}

/* The copy to compare with could not be made: the version is there all the same. */
static void a_version_that_is_there_is_written(void **state)
{
    struct xfer_manifest nothing = { 0 };
    struct link_mem mem = { 0 };
    struct fl_seat_ref who = { .attempt = 1 };
    struct delta_writer d;
    struct fl_loop *loop;
    unsigned was = n_written;

    (void)state;
    t_ok(fl_loop_create(NULL, &loop, NULL), NULL);
    delta_writer_init(&d, &nothing, &who, "policy", on_written, NULL);
    for (unsigned i = 0; i < 2; i++) {
        delta_writer_start(&d, loop, t_path("there"), 1, i > 0, &mem);
        t_until(loop, n_written == was + i + 1, 10000);
        d.was_version = DELTA_NO_BASE;
    }
    delta_writer_fini(&d);
    fl_loop_destroy(loop);
}

/* Two sets of one process in one folder: what is done behind the updates of both leaves a thread
 * for what they write, and nothing of the other set goes. */
static void bases_of_two_sets(void **state)
{
    static const char *const sets[SETS] = { "policy", "draft" };
    struct fl_work works[POOL] = { { .work = blocks, .done = unblocked },
                                   { .work = blocks, .done = unblocked } };
    struct xfer_tensor t = { .name = "w", .dtype = FL_F32, .ndim = 1, .shape = { 4 } };
    struct xfer_piece piece = { .box = xfer_box_whole(&t) };
    struct xfer_manifest have = { .tensors = &t, .pieces = &piece, .n_tensors = 1, .n_pieces = 1 };
    float bytes[4] = { 0 };
    struct link_mem mem = { .addr = bytes, .bytes = sizeof(bytes) };
    struct fl_seat_ref who = { .attempt = 1 };
    struct delta_writer d[SETS];
    struct fl_loop *loop;
    unsigned was = n_written, at = atomic_load(&at_gate);
    char path[FL_PATH_MAX];

    (void)state;
    t_ok(fl_loop_create(NULL, &loop, NULL), NULL);
    for (unsigned i = 0; i < SETS; i++) {
        delta_writer_init(&d[i], &have, &who, sets[i], on_written, on_quiet);
        d[i].most_versions = 3;
        for (uint64_t v = 1; v <= 4; v++) {
            bytes[0] = (float)v;
            delta_writer_start(&d[i], loop, t_path("sets"), v, false, &mem);
            t_until(loop, n_written == was + 1, 10000);
            was++;
        }
    }
    pthread_mutex_lock(&gate);
    for (unsigned i = 0; i < POOL; i++)
        fl_work_start(loop, &works[i]);
    t_until(loop, atomic_load(&at_gate) == at + POOL, 10000);
    for (unsigned i = 0; i < SETS; i++)
        delta_writer_over(&d[i]);
    t_true(delta_writer_busy(&d[0]), "a base is due");
    for (unsigned i = 0; i < SETS; i++) {
        bytes[0] = 5;
        delta_writer_start(&d[i], loop, t_path("sets"), 5, false, &mem);
    }
    pthread_mutex_unlock(&gate);
    t_until(loop, n_written == was + SETS, 10000);
    for (unsigned i = 0; i < SETS; i++) {
        delta_writer_over(&d[i]);
        t_until(loop, !delta_writer_busy(&d[i]), 10000);
        delta_writer_over(&d[i]);
        t_until(loop, !delta_writer_busy(&d[i]), 10000);
        t_ok(fl_path(path, NULL, "%s/base_v%06" PRId64, d[i].dir, d[i].base), NULL);
        t_true(access(path, F_OK) == 0, "%s", path);
    }
    delta_writer_renew(&d[0]);
    was = n_written;
    for (uint64_t v = 6; v <= 7; v++) {
        delta_writer_start(&d[0], loop, t_path("sets"), v, false, &mem);
        t_until(loop, n_written == was + 1, 10000);
        was++;
        delta_writer_over(&d[0]);
        t_until(loop, !delta_writer_busy(&d[0]), 10000);
    }
    t_true(access(path, F_OK) == 0, "another set's: %s", path);
    t_true(strstr(d[0].dir, "-1-1") != NULL, "%s", d[0].dir);
    for (unsigned i = 0; i < SETS; i++)
        delta_writer_fini(&d[i]);
    fl_loop_destroy(loop);
}

static bool version_is_written_now(struct rig *r)
{
    return rig_source(r, 0)->src->give.writing;
}

/* It waits for what is done behind the updates, which ends early, and begins nothing more. */
static void a_trainer_that_ends(void **state)
{
    static bool (*const whens[])(struct rig *) = { version_is_written_now, base_is_made_now };

    (void)state;
    for (size_t i = 0; i < FL_LEN(whens); i++) {
        struct rig_opts o = opts(i ? "ends-1" : "ends-0");
        struct rig r;

        rig_init(&r, &o);
        writer(&r)->most_versions = 3;
        for (uint64_t v = 1; v <= 3; v++)
            bring(&r, v);
        rig_next(&r, 4);
        rig_start(&r, &(struct xfer_request){ .target = { .number = 4 },
                                              .mode = XFER_DISK_DELTA,
                                              .party = XFER_ALL_PARTIES,
                                              .due_ns = UINT64_MAX });
        rig_until(&r, whens[i](&r));
        rig_fini(&r);
        t_true(is_there(o.delta_dir, OURS "-1-0/weight_v000004"), "it was written");
        t_true(!is_there(o.delta_dir, OURS "-1-0/base_v000004.part"), "half a base is left");
        t_true(i || !is_there(o.delta_dir, OURS "-1-0/base_v000004"), "begun after its end");
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_long_run),
        cmocka_unit_test(a_trainer_that_starts_again),
        cmocka_unit_test(what_fails_behind_the_updates),
        cmocka_unit_test(a_chain_that_is_damaged_behind_its_writer),
        cmocka_unit_test(a_base_makes_way_for_an_update),
        cmocka_unit_test(who_sets_the_pace),
        cmocka_unit_test(a_version_that_is_there_is_written),
        cmocka_unit_test(bases_of_two_sets),
        cmocka_unit_test(a_trainer_that_ends),
    };

    return t_run("epoch_deltas", tests);
}
