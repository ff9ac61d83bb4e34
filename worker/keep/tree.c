#include "worker/keep/tree.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "common/base/file.h"

bool tree_stat(int pid, struct tree_stat *out)
{
    struct fl_pid_stat s;

    if (fl_pid_stat(pid, &s, NULL) != FL_OK)
        return false;
    *out = (struct tree_stat){ pid, s.parent, s.session, s.state, s.start_time };
    return true;
}

struct tree_list {
    struct tree_stat *v;
    size_t n, cap;
};

static void list_all(struct tree_list *l)
{
    DIR *d = opendir("/proc");
    struct dirent *e;

    while (d && (e = readdir(d))) {
        int pid = atoi(e->d_name);
        struct tree_stat st;

        if (pid <= 0 || !tree_stat(pid, &st))
            continue;
        if (l->n == l->cap) {
            size_t cap = l->cap ? l->cap * 2 : 256;
            struct tree_stat *v = realloc(l->v, cap * sizeof(*v));

            if (!v)
                break; /* the next round finds the rest */
            l->v = v;
            l->cap = cap;
        }
        l->v[l->n++] = st;
    }
    if (d)
        closedir(d);
}

static int by_pid(const void *a, const void *b)
{
    const struct tree_stat *x = a, *y = b;

    return (x->pid > y->pid) - (x->pid < y->pid);
}

static bool belongs(const struct tree_list *l, const struct tree_stat *p,
                    const struct tree_pick *pick)
{
    for (unsigned depth = 0; p && depth < 4096;
         depth++) { /* a bound: /proc is read while it changes */
        if (p->pid != pick->root && pick->mark && pick->mark(p, pick->arg))
            return true;
        if (p->ppid == pick->root)
            return pick->root > 0;
        if (p->ppid <= 1)
            return false;
        struct tree_stat key = { .pid = p->ppid };

        p = bsearch(&key, l->v, l->n, sizeof(key), by_pid);
    }
    return false;
}

static void signal_one(const struct tree_stat *p, int sig)
{
    struct tree_stat now;
    int fd = (int)syscall(SYS_pidfd_open, p->pid, 0);

    if (fd < 0)
        return;
    if (tree_stat(p->pid, &now) && now.start_time == p->start_time)
        (void)syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0); /* gone meanwhile is fine */
    close(fd);
}

unsigned tree_signal(const struct tree_pick *pick, int sig)
{
    struct tree_list l = { 0 };
    unsigned found = 0;
    int self = (int)getpid();

    list_all(&l);
    if (l.n)
        qsort(l.v, l.n, sizeof(*l.v), by_pid);
    for (size_t i = 0; i < l.n; i++) {
        const struct tree_stat *p = &l.v[i];

        if (p->state == 'Z' || p->state == 'X' || p->pid == pick->root || p->pid == self ||
            !belongs(&l, p, pick))
            continue;
        found++;
        if (sig)
            signal_one(p, sig);
    }
    free(l.v);
    return found;
}
