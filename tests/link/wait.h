/* tests/link/wait.h - an operation that counts how often it came back */
#pragma once
#include "transport/link/link.h"

struct wait {
    struct link_op op;
    unsigned times;
};

static void came(struct link_op *op)
{
    container_of(op, struct wait, op)->times++;
}

static struct wait wait_for(void)
{
    return (struct wait){ .op = { .done = came } };
}
