#include "tests/gpu/two.h"

#include <errno.h>
#include <spawn.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/t.h"

extern char **environ;

pid_t two_start(const char *mode, int *sock)
{
    char *argv[] = { (char *)(uintptr_t) "second", (char *)(uintptr_t) "--second",
                     (char *)(uintptr_t)mode, NULL };
    struct timeval wait = { .tv_sec = 30 };
    posix_spawn_file_actions_t files;
    int ends[2];
    pid_t pid;

    t_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, STDERR_FILENO,
                                     STDOUT_FILENO); /* TAP is the first one's */
    posix_spawn_file_actions_adddup2(&files, ends[1], TWO_FD);
    posix_spawn_file_actions_addclosefrom_np(&files, TWO_FD + 1);
    t_int_eq(posix_spawn(&pid, "/proc/self/exe", &files, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&files);
    close(ends[1]);
    (void)setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    *sock = ends[0];
    return pid;
}

void two_send(int sock, const void *data, size_t len, int fd)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } ctl = { 0 };
    struct iovec v = { (void *)(uintptr_t)data, len };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };

    if (fd >= 0) {
        m.msg_control = &ctl;
        m.msg_controllen = sizeof(ctl.room);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
                               .cmsg_level = SOL_SOCKET,
                               .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    }
    t_int_eq(sendmsg(sock, &m, MSG_NOSIGNAL), (intmax_t)len);
}

size_t two_take(int sock, void *into, size_t len, int *fd)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } ctl;
    struct iovec v = { into, len };
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = &ctl, .msg_controllen = sizeof(ctl)
    };
    ssize_t got;

    do
        got = recvmsg(sock, &m, MSG_CMSG_CLOEXEC | MSG_WAITALL);
    while (got < 0 && errno == EINTR);
    struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&m) : NULL;

    if (fd)
        *fd = -1;
    if (fd && c && c->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(c), sizeof(*fd));
    return got > 0 ? (size_t)got : 0;
}

int two_end(pid_t pid, int sock)
{
    int how = -1;

    close(sock);
    while (waitpid(pid, &how, 0) < 0 && errno == EINTR)
        ;
    return how;
}
