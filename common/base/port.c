#include "common/base/port.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/fault.h"

enum { LISTENERS_MAX = 16 };
struct listeners { /* several may share a port: each at an address of its own, or by SO_REUSEPORT */
    unsigned long inode[LISTENERS_MAX];
    size_t n;
};

static struct listeners listeners_of(uint16_t port)
{
    static const char *const files[] = { "/proc/net/tcp", "/proc/net/tcp6" };
    struct listeners l = { .n = 0 };
    char line[512];

    for (size_t i = 0; i < FL_LEN(files); i++) {
        FILE *f = fopen(files[i], "re");

        while (f && l.n < LISTENERS_MAX && fgets(line, sizeof(line), f)) {
            unsigned local, state;
            unsigned long ino;

            if (sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*s %*s %lu",
                       &local, &state, &ino) == 3 &&
                local == port && state == 0x0a && ino)
                l.inode[l.n++] = ino;
        }
        if (f)
            fclose(f);
    }
    return l;
}

static bool is_one(const struct listeners *l, const char *link)
{
    unsigned long ino;
    bool found = false;

    if (sscanf(link, "socket:[%lu]", &ino) == 1)
        for (size_t i = 0; i < l->n && !found; i++)
            found = l->inode[i] == ino;
    return found;
}

static bool has_one(const char *pid, const struct listeners *l)
{
    char path[300], link[128];
    bool found = false;
    DIR *fds;

    snprintf(path, sizeof(path), "/proc/%s/fd", pid);
    fds = opendir(path);
    for (struct dirent *e; fds && !found && (e = readdir(fds));) {
        snprintf(path, sizeof(path), "/proc/%s/fd/%s", pid, e->d_name);
        ssize_t n = readlink(path, link, sizeof(link) - 1);

        link[n > 0 ? n : 0] = 0;
        found = is_one(l, link);
    }
    if (fds)
        closedir(fds);
    return found;
}

/* The beginning of its command line, words apart by spaces; its name where it has none. */
static void say_process(int pid, char *who, size_t cap)
{
    char path[300], cmd[96] = "";
    size_t n = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/cmdline", pid);
    f = fopen(path, "re");
    if (f) {
        n = fread(cmd, 1, sizeof(cmd) - 1, f);
        fclose(f);
    }
    while (n && !cmd[n - 1])
        n--;
    for (size_t i = 0; i < n; i++)
        if (!cmd[i] || iscntrl((unsigned char)cmd[i]))
            cmd[i] = ' ';
    snprintf(who, cap, "pid %d (%s)", pid, n ? cmd : "without a command line");
}

static void each_holder(const struct listeners *l, bool (*see)(void *arg, int pid), void *arg)
{
    DIR *proc = opendir("/proc");

    for (struct dirent *p; proc && (p = readdir(proc));)
        if (isdigit((unsigned char)p->d_name[0]) && has_one(p->d_name, l) &&
            !see(arg, atoi(p->d_name)))
            break;
    if (proc)
        closedir(proc);
}

void fl_port_holders(uint16_t port, bool (*see)(void *arg, int pid), void *arg)
{
    struct listeners l = listeners_of(port);

    if (l.n)
        each_holder(&l, see, arg);
}

static bool note_pid(void *arg, int pid)
{
    *(int *)arg = pid;
    return false;
}

bool fl_port_holder(uint16_t port, char *who, size_t cap)
{
    struct listeners l = listeners_of(port);
    int pid = 0;

    *who = 0;
    if (!l.n)
        return false;
    each_holder(&l, note_pid, &pid);
    if (pid)
        say_process(pid, who, cap);
    else
        snprintf(who, cap, "a process of another user");
    return true;
}

int fl_port_hold(uint16_t port)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    int n = snprintf(at.sun_path + 1, sizeof(at.sun_path) - 1, "furlong-port-%u", port);
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    int fd = FL_FAULT("base.port_hold") ? -1 : socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0 || bind(fd, (struct sockaddr *)&at, len) == 0)
        return fd;
    int why = errno;

    close(fd);
    errno = why;
    return -1;
}

void fl_port_ephemeral(uint16_t *first, uint16_t *last)
{
    FILE *f = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");

    if (!f || fscanf(f, "%hu %hu", first, last) != 2)
        *first = *last = 0;
    if (f)
        fclose(f);
}
