/* rig PROGRAM ARGS... - runs a program as a job's driver under a daemon and a head that live in
 * this process
 *
 * The program joins as any driver does; what it launches are real processes. The exit code is its
 * own. */
#include <ftw.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/client/fake.h"
#include "tests/t.h"

extern char **environ;

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    (void)remove(path); /* whatever stays is seen by the next one who looks into /tmp */
    return 0;
}

int main(int argc, char **argv)
{
    struct fake *f;
    posix_spawn_file_actions_t fa;
    pid_t pid;
    int fd, status = 0;

    if (argc < 2) {
        fprintf(stderr, "usage: %s PROGRAM ARGS...\n", argv[0]);
        return 2;
    }
    f = fake_create();
    fd = fake_seat(f, "driver", 0, 1, 1);
    setenv("FURLONG_SEAT_FD", "100", 1);
    setenv("FURLONG_DAEMON_AWAY_MS", "5000", 1); /* nothing outlives a test that died */
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, fd, 100);
    if (posix_spawnp(&pid, argv[1], &fa, NULL, argv + 1, environ) != 0) {
        perror(argv[1]);
        return 2;
    }
    posix_spawn_file_actions_destroy(&fa);
    close(fd);
    while (waitpid(pid, &status, 0) < 0)
        ;
    fake_destroy(f);
    (void)nftw(t_tmp(), remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
