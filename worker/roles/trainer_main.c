#include "worker/roles/trainer.h"

static struct trainer me;

static enum fl_status run(struct fl_err *err)
{
    return trainer_run(&me, err);
}

int main(int argc, char **argv)
{
    return role_main("furlong-trainer", argc, argv, &me.args, &me.f, run);
}
