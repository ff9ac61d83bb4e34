/* Whole epochs: every mode, one and two slots, one and several ranks. */
#include <dirent.h>
#include <inttypes.h>
#include <stdlib.h>
#include "tests/xfer/epoch_rig.h"

struct mode_row {
    const char *name;
    enum xfer_mode mode;
    struct rig_opts o;
};
/* clang-format off */
static const struct mode_row mode_rows[] = {
    { "copy, two slots",        XFER_COPY,      { .n_sources = 1, .n_engines = 2 } },
    { "copy, one slot",         XFER_COPY,      { .n_sources = 1, .n_engines = 2, .slots = XFER_ONE_SLOT } },
    { "copy, equal checked",    XFER_COPY,      { .n_sources = 1, .n_engines = 1, .check_equal = true } },
    { "copy, engine of 2",      XFER_COPY,      { .n_sources = 1, .n_engines = 2, .ranks = 2 } },
    { "copy, one slot, of 2",   XFER_COPY,      { .n_sources = 1, .n_engines = 1, .ranks = 2, .slots = XFER_ONE_SLOT } },
    { "copy, replicas",         XFER_COPY,      { .n_sources = 2, .n_engines = 2 } },
    { "copy, trainer sharded",  XFER_COPY,      { .n_sources = 2, .n_engines = 2, .sharded = true } },
    { "p2p, sharded to sharded",XFER_P2P,       { .n_sources = 2, .n_engines = 2, .ranks = 2, .sharded = true } },
    { "p2p, 4 to 2",            XFER_P2P,       { .n_sources = 4, .n_engines = 1, .ranks = 2, .sharded = true } },
    { "share, two slots",       XFER_SHARE,     { .n_sources = 1, .n_engines = 2 } },
    { "share, one slot",        XFER_SHARE,     { .n_sources = 1, .n_engines = 2, .src_slots = 1, .slots = XFER_ONE_SLOT } },
    { "share, equal checked",   XFER_SHARE,     { .n_sources = 1, .n_engines = 1, .check_equal = true } },
    { "broadcast, shm",         XFER_BROADCAST, { .n_sources = 1, .n_engines = 3 } },
    { "broadcast, tcp",         XFER_BROADCAST, { .n_sources = 1, .n_engines = 2, .addr_of_engines = "127.0.0.2" } },
    { "p2p, tcp",               XFER_P2P,       { .n_sources = 2, .n_engines = 2, .addr_of_engines = "127.0.0.2" } },
    { "disk-delta",             XFER_DISK_DELTA,{ .n_sources = 1, .n_engines = 2 } },
    { "disk-delta, one slot",   XFER_DISK_DELTA,{ .n_sources = 1, .n_engines = 1, .slots = XFER_ONE_SLOT } },
    { "disk-delta, engine of 2",XFER_DISK_DELTA,{ .n_sources = 1, .n_engines = 1, .ranks = 2 } },
    { "disk-delta, replicas",   XFER_DISK_DELTA,{ .n_sources = 2, .n_engines = 1 } },
    { "auto",                   XFER_AUTO,      { .n_sources = 1, .n_engines = 2 } },
};
/* clang-format on */

/* Five versions one after the other: kept links, kept mappings, both slots in turn. */
static void each_mode(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(mode_rows); i++) {
        const struct mode_row *w = &mode_rows[i];
        struct rig_opts o = w->o;
        char delta[32], local[32];
        struct rig r;

        snprintf(delta, sizeof(delta), "delta-%zu", i);
        snprintf(local, sizeof(local), "local-%zu", i);
        o.delta_dir = t_path(delta);
        o.local_dir = t_path(local);
        rig_init(&r, &o);
        for (uint64_t v = 0; v < 5; v++) {
            rig_next(&r, v);
            t_true(rig_update(&r, w->mode, v) == FL_OK, "%s, version %" PRIu64 ": %s", w->name, v,
                   r.err.text);
            t_int_eq(r.rep.n_committed, w->o.n_engines, "%s", w->name);
            t_int_eq(r.rep.n_left_behind, 0, "%s: %s", w->name, r.rep.first_left_behind.text);
            t_int_eq(r.rep.now.number, v);
            bool shares =
                w->mode == XFER_SHARE || (w->mode == XFER_AUTO && rig_devices() &&
                                          strcmp(rig_devices(), "same") == 0); /* auto does there */

            t_true((r.rep.bytes == 0) == shares, "%s moved %" PRIu64, w->name, r.rep.bytes);
            rig_check_all_serve(&r, v);
        }
        rig_fini(&r);
    }
}

/* An old number with other bytes goes to a folder of its own, and the copy of it is another one. */
static void a_delta_trainer_that_went_back(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1,
                                     .n_engines = 1,
                                     .delta_dir = t_path("back"),
                                     .local_dir = t_path("back-local") });
    for (uint64_t v = 1; v < 4; v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, XFER_DISK_DELTA, v), &r.err);
    }
    t_ok(rig_begin(&r, 2, 5000), &r.err);
    rig_write(rig_source(&r, 0), 9);
    rig_publish(&r, 2);
    t_ok(rig_update(&r, XFER_DISK_DELTA, 2), &r.err);
    rig_bring(&r, XFER_DISK_DELTA, 3);
    rig_fini(&r);
}

/* The same version once more, for an engine that came later. */
static void a_delta_is_written_once(void **state)
{
    struct rig r;
    struct xfer_request q = {
        .kind = XFER_FILL, .mode = XFER_DISK_DELTA, .party = 1, .due_ns = UINT64_MAX
    };

    (void)state;
    rig_serving(&r,
                &(struct rig_opts){ .n_sources = 1,
                                    .n_engines = 2,
                                    .delta_dir = t_path("once"),
                                    .local_dir = t_path("once-local") },
                XFER_DISK_DELTA);
    rig_next(&r, 2);
    t_ok(rig_update(&r, XFER_DISK_DELTA, 2), &r.err);
    rig_kill(rig_engine(&r, 1, 0), true);
    rig_restart(rig_engine(&r, 1, 0));
    t_ok(rig_run(&r, &q), &r.err);
    rig_check_all_serve(&r, 2);
    rig_fini(&r);
}

static unsigned folders_in(const char *path)
{
    struct dirent *e;
    unsigned n = 0;
    DIR *d = opendir(path);

    while (d && (e = readdir(d)))
        n += e->d_name[0] != '.';
    if (d)
        closedir(d);
    return n;
}

/* Who reads what a second one writes? */
static void a_delta_of_replicas_is_written_by_one(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 3,
                                     .n_engines = 2,
                                     .delta_dir = t_path("replicas"),
                                     .local_dir = t_path("replicas-local") });
    for (uint64_t v = 1; v <= 2; v++) {
        rig_next(&r, v);
        t_ok(rig_update(&r, XFER_DISK_DELTA, v), &r.err);
        rig_check_all_serve(&r, v);
    }
    t_int_eq(folders_in(t_path("replicas")), 1);
    rig_fini(&r);
}

static void nothing_to_do_is_done(void **state)
{
    struct rig r;

    (void)state;
    rig_init(&r, &(struct rig_opts){ .n_sources = 1, .n_engines = 2 });
    rig_next(&r, 3);
    t_ok(rig_update(&r, XFER_COPY, 3), &r.err);
    t_ok(rig_update(&r, XFER_COPY, 3), &r.err);
    t_int_eq(r.rep.n_committed, 2, "they have it already");
    t_int_eq(r.rep.bytes, 0);
    t_int_eq(rig_engine(&r, 0, 0)->flips, 1);
    t_int_eq(rig_update(&r, XFER_COPY, 4), FL_INVALID, "that is not published");
    rig_check_all_serve(&r, 3);
    rig_fini(&r);
}

/* Somebody tidied the shared folder, or a disk lost a block of it: an engine that has to begin at
 * the base cannot follow. Nothing in later deltas would mend that, and no later base is there. */
static void a_delta_chain_that_is_broken(void **state)
{
    static const char *const how[] = {
        "rm -r %s/*/weight_v000002",
        "for f in %s/*/weight_v000002/*.safetensors; do truncate -s 100 $f; done",
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(how); i++) {
        char line[600], folder[32], own[32];
        struct rig_opts o = {
            .n_sources = 1, .n_engines = 2, .own_local = true, .few_change = true
        };
        struct rig r;

        snprintf(folder, sizeof(folder), "broken-%zu", i);
        snprintf(own, sizeof(own), "broken-own-%zu", i);
        o.delta_dir = t_path(folder);
        o.local_dir = t_path(own);
        rig_init(&r, &o);
        for (uint64_t v = 1; v <= 3; v++) {
            rig_next(&r, v);
            t_ok(rig_update(&r, XFER_DISK_DELTA, v), &r.err);
        }
        rig_kill(rig_engine(&r, 1, 0), true);
        snprintf(line, sizeof(line), "rm -rf %s-1", o.local_dir);
        t_int_eq(system(line), 0);
        snprintf(line, sizeof(line), how[i], o.delta_dir);
        t_int_eq(system(line), 0, "%s", line);
        (void)rig_restart(rig_engine(&r, 1, 0));
        rig_next(&r, 4);
        t_true(rig_update(&r, XFER_DISK_DELTA, 4) != FL_OK, "the chain is broken");
        rig_check(&r);
        t_ok(rig_update(&r, XFER_DISK_DELTA, 4), &r.err); /* whole */
        rig_check_all_serve(&r, 4);
        rig_next(&r, 5);
        t_ok(rig_update(&r, XFER_DISK_DELTA, 5), &r.err);
        rig_check_all_serve(&r, 5);
        rig_fini(&r);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_mode),
        cmocka_unit_test(a_delta_trainer_that_went_back),
        cmocka_unit_test(a_delta_is_written_once),
        cmocka_unit_test(a_delta_of_replicas_is_written_by_one),
        cmocka_unit_test(a_delta_chain_that_is_broken),
        cmocka_unit_test(nothing_to_do_is_done),
    };

    return t_run("epoch_run", tests);
}
