/* Whose server answers: what is known of a process that listens, and what follows. */
#include "worker/roles/sglang/owner.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/file.h"
#include "tests/t.h"

static void whose_it_is(void **state)
{
    static const struct owner_us us = { .pid = 100, .socket = "@a", .started = 50 };
    static const struct {
        const char *name;
        struct owner_sign sign;
        enum owner wanted;
    } rows[] = {
        { "our child", { .below = true, .started = 51 }, OWNER_OURS },
        { "in our group, with a name of its own", { .below = true, .socket = "@b" }, OWNER_OURS },
        { "it left our tree, and has our environment",
          { .socket = "@a", .started = 52 },
          OWNER_OURS },
        { "of another engine", { .socket = "@b", .started = 52 }, OWNER_OTHERS },
        { "of another engine, whose name begins like ours", { .socket = "@ab" }, OWNER_OTHERS },
        { "there before us", { .started = 49 }, OWNER_OTHERS },
        { "younger: a container's, for our command", { .started = 50 }, OWNER_UNKNOWN },
        { "nothing can be read of it", { 0 }, OWNER_UNKNOWN },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        t_int_eq(sglang_owner_of(&rows[i].sign, &us), rows[i].wanted, "%s", rows[i].name);
}

static void this_process_listens(void **state)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct owner_us ours = { .pid = getpid(), .socket = "@a" },
                    others = { .pid = 1 << 30, .socket = "@a" };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t len = sizeof(at);
    char who[160] = "", me[32];
    struct fl_err err;

    (void)state;
    t_true(bind(fd, (struct sockaddr *)&at, len) == 0 && listen(fd, 1) == 0);
    t_true(getsockname(fd, (struct sockaddr *)&at, &len) == 0);
    uint16_t port = ntohs(at.sin_port);

    t_ok(fl_pid_start_time(getpid(), &others.started, &err), &err);
    t_int_eq(sglang_port_owner(port, &ours, who, sizeof(who)), OWNER_OURS);
    t_int_eq(sglang_port_owner(port, &others, who, sizeof(who)), OWNER_UNKNOWN);
    others.started++;
    snprintf(me, sizeof(me), "pid %d (", (int)getpid());
    t_int_eq(sglang_port_owner(port, &others, who, sizeof(who)), OWNER_OTHERS);
    t_has(who, me);
    close(fd);
    t_int_eq(sglang_port_owner(port, &others, who, sizeof(who)), OWNER_UNKNOWN, "nobody listens");
}

int main(void)
{
    static const struct CMUnitTest tests[] = { cmocka_unit_test(whose_it_is),
                                               cmocka_unit_test(this_process_listens) };

    return t_run("sglang owner", tests);
}
