/* Whose server answers: what is known of a process that listens, and what follows. */
#include "worker/roles/sglang/owner.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/t.h"

static void whose_it_is(void **state)
{
    static const struct owner_us us = { .pid = 100, .socket = "@a" };
    static const struct {
        const char *name;
        struct owner_sign sign;
        enum owner wanted;
    } rows[] = {
        { "our child", { .below = true }, OWNER_OURS },
        { "in our group, with a name of its own", { .below = true, .socket = "@b" }, OWNER_OURS },
        { "it left our tree, and has our environment", { .socket = "@a" }, OWNER_OURS },
        { "of another engine", { .socket = "@b" }, OWNER_OTHERS },
        { "of another engine, whose name begins like ours", { .socket = "@ab" }, OWNER_OTHERS },
        { "a container's, or nothing can be read of it", { 0 }, OWNER_UNKNOWN },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        t_int_eq(sglang_owner_of(&rows[i].sign, &us), rows[i].wanted, "%s", rows[i].name);
}

/* A process with that environment, which has what we have open; it ends when its end of go is the
 * last. */
static pid_t holds_too(const char *socket, int go[2])
{
    char env[64], fd[16];
    pid_t child;

    t_true(pipe(go) == 0);
    snprintf(env, sizeof(env), "FURLONG_SGLANG_SOCKET=%s", socket);
    snprintf(fd, sizeof(fd), "%d", go[0]);
    child = fork();
    if (child == 0) {
        close(go[1]);
        execle("/proc/self/exe", "test_owner", fd, NULL, (char *[]){ env, NULL });
        _exit(127);
    }
    close(go[0]);
    return child;
}

static void who_listens_is_looked_for(void **state)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct owner_us ours = { .pid = getpid(), .socket = "@a" },
                    nobody = { .pid = 1 << 30, .socket = "@a" };
    int fd = socket(AF_INET, SOCK_STREAM, 0), go[2], status;
    socklen_t len = sizeof(at);
    enum owner is = OWNER_UNKNOWN;
    char who[160] = "";

    (void)state;
    t_true(bind(fd, (struct sockaddr *)&at, len) == 0 && listen(fd, 1) == 0);
    t_true(getsockname(fd, (struct sockaddr *)&at, &len) == 0);
    uint16_t port = ntohs(at.sin_port);

    t_int_eq(sglang_port_owner(port, &ours, who, sizeof(who)), OWNER_OURS);
    t_int_eq(sglang_port_owner(port, &nobody, who, sizeof(who)), OWNER_UNKNOWN,
             "no name to know it by");
    pid_t child = holds_too("@b", go);

    for (unsigned i = 0; i < 2000 && is == OWNER_UNKNOWN; i++) { /* until it has its environment */
        is = sglang_port_owner(port, &nobody, who, sizeof(who));
        (void)poll(NULL, 0, 1);
    }
    t_int_eq(is, OWNER_OTHERS);
    t_has(who, "pid ");
    close(go[1]);
    t_true(waitpid(child, &status, 0) == child);
    close(fd);
    t_int_eq(sglang_port_owner(port, &nobody, who, sizeof(who)), OWNER_UNKNOWN, "nobody listens");
}

/* Somebody else's at another address has the same number, whichever is listed first. */
static void another_address_has_the_port_too(void **state)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct owner_us us = { .socket = "@a" };
    socklen_t len = sizeof(at);
    char who[160];
    int ready[2], status;

    (void)state;
    for (int mine_first = 0; mine_first < 2; mine_first++) {
        int mine = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
            others = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        at.sin_port = 0;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        t_true(bind(mine, (struct sockaddr *)&at, len) == 0);
        t_true(getsockname(mine, (struct sockaddr *)&at, &len) == 0);
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
        t_true(bind(others, (struct sockaddr *)&at, len) == 0);
        t_true(listen(mine_first ? mine : others, 1) == 0);
        t_true(listen(mine_first ? others : mine, 1) == 0);
        t_true(pipe(ready) == 0);
        pid_t child = fork(); /* ours */

        if (child == 0) {
            close(others);
            close(ready[1]);
            (void)!read(ready[0], who, 1);
            _exit(0);
        }
        close(mine);
        close(ready[0]);
        us.pid = child;
        t_int_eq(sglang_port_owner(ntohs(at.sin_port), &us, who, sizeof(who)), OWNER_OURS, "%d",
                 mine_first);
        close(ready[1]);
        t_true(waitpid(child, &status, 0) == child);
        close(others);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(whose_it_is),
        cmocka_unit_test(who_listens_is_looked_for),
        cmocka_unit_test(another_address_has_the_port_too),
    };

    char c;

    if (argc > 1) /* holds_too() */
        return (int)read(atoi(argv[1]), &c, 1);
    return t_run("sglang owner", tests);
}
