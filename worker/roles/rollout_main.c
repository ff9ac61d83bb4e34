#include "worker/roles/rollout.h"

static struct rollout me;

static enum fl_status run(struct fl_err *err)
{
    return rollout_run(&me, err);
}

int main(int argc, char **argv)
{
    return role_main("furlong-rollout", argc, argv, &me.args, &me.f, run);
}
