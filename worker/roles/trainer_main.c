#include <signal.h>
#include <stdio.h>

#include "common/base/fault.h"
#include "worker/roles/trainer.h"

int main(int argc, char **argv)
{
    struct trainer t = { 0 };
    struct fl_err err = { 0 };
    int rc = role_args_main(&t.args, "furlong-trainer", argc, argv);
    enum fl_status st = rc < 0 ? fl_fault_env(&err) : FL_OK;

    if (rc >= 0) {
        role_args_fini(&t.args);
        return rc;
    }
    if (st == FL_OK)
        st = furlong_join(FURLONG_ABI, &t.f, &err);
    if (st == FL_OK)
        st = trainer_run(&t, &err);
    if (st != FL_OK)
        fprintf(stderr, "furlong-trainer: %s\n", err.text);
    furlong_leave(t.f);
    role_args_fini(&t.args);
    return st == FL_OK ? 0 : 1;
}
