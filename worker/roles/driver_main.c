#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "worker/roles/drv_seat.h"

static bool check;
static const struct fl_opt own_opts[] = {
    { FL_OPT_SWITCH, "check", .at = 0,
      .help = "look at all that the run reads, and end: 0, or 2 and what is wrong" },
    { 0 }
};

/* 2: would be the same the next time, so the head does not start this driver again. */
static int exit_code(enum fl_status st)
{
    switch (st) {
    case FL_OK:
        return 0;
    case FL_INVALID:
    case FL_UNSUPPORTED:
    case FL_CORRUPT: /* --ci-test, a checkpoint */
    case FL_NOT_FOUND:
    case FL_DENIED:
    case FL_EXISTS:
        return 2;
    default:
        return 1;
    }
}

static enum fl_status join_and_run(struct driver *d, struct fl_err *err)
{
    struct drv_seat *s = d->seat;

    FL_TRY(fl_fault_env(err));
    FL_TRY(furlong_join(FURLONG_ABI, &s->f, err));
    const struct furlong_seat *me = furlong_seat(s->f);
    d->job_name = me->job;
    d->node_name = me->node;
    d->attempt = me->attempt;
    snprintf(d->run_dir, sizeof(d->run_dir), "%s", me->run_dir);
    FL_TRY(drv_setup(d, err));
    for (unsigned i = 0; i < d->flags.n_notes; i++)
        drv_say(d, "%s", d->flags.notes[i]);
    return drv_run(d, err);
}

int main(int argc, char **argv)
{
    static struct driver d = { .steps_fd = -1, .log_fd = -1, .out_fd = STDOUT_FILENO };
    struct drv_seat seat = { 0 };
    struct fl_err err = { 0 };
    enum fl_status st;

    (void)signal(SIGPIPE, SIG_IGN); /* a --reward-cmd that does not read to the end */
    d.ops = &drv_ops_seat;
    d.seat = &seat;
    d.opts.program = "furlong-driver";
    d.opts.usage = "[OPTION...]";
    train_flags_tables(&d.flags, d.opts.tables);
    d.opts.tables[TRAIN_FLAG_TABLES] = (struct fl_opt_table){ "The driver", own_opts, &check };
    st = train_flags_parse(&d.flags, &d.opts, argc, argv, &err);
    if (st == FL_CANCELLED) {
        fl_opts_help(&d.opts, stdout);
        train_flags_fini(&d.flags);
        return 0;
    }
    if (st == FL_OK)
        st = check ? drv_look(&d, &err) : join_and_run(&d, &err);
    if (st != FL_OK) {
        fprintf(stderr, "furlong-driver: %s\n", err.text);
        if (d.log_fd >= 0)
            (void)dprintf(d.log_fd, "furlong-driver: %s\n", err.text);
    }
    d.ops->finish(&d);
    furlong_leave(seat.f);
    drv_fini(&d);
    return exit_code(st);
}
