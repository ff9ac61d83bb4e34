#include "worker/proc/lost.h"
#include "worker/keep/group.h"
#include "worker/keep/tree.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROUND_NS = 10 * 1000 * 1000, QUIET_ROUNDS = 2 };

struct proc_lost {
    struct fl_loop *loop;
    struct fl_timer round;
    struct group group;
    char mark[64];
    int keeper_pid;
    uint64_t due_ns;
    unsigned quiet, ended;
    void (*over)(void *arg, unsigned ended, unsigned left);
    void *arg;
};

/* "NAME=value" among the zero-separated strings that a process was born with. */
static bool born_with(int pid, const char *mark)
{
    char path[40], buf[16384 + 160];
    size_t n = strlen(mark), held = 0;
    ssize_t got;
    bool found = false;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/environ", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    /* The mark is at a start of a string: at offset 0 or after a zero byte. buf keeps one zero in
     * front, and what could be a cut mark moves to the front of the next read. */
    buf[held++] = 0;
    while (!found && (got = read(fd, buf + held, 16384)) > 0) {
        held += (size_t)got;
        for (char *p = buf; !found && (p = memchr(p, 0, (size_t)(buf + held - p))); p++)
            found = (size_t)(buf + held - p) > n + 1 && !memcmp(p + 1, mark, n) && p[n + 1] == 0;
        size_t keep = held < n + 1 ? held : n + 1;

        memmove(buf, buf + held - keep, keep);
        held = keep;
    }
    close(fd);
    return found;
}

static bool is_its(const struct tree_stat *p, const void *arg)
{
    const struct proc_lost *x = arg;

    return (x->keeper_pid > 0 && p->sid == x->keeper_pid) || born_with(p->pid, x->mark);
}

static void on_round(struct fl_timer *t, uint64_t now_ns)
{
    struct proc_lost *x = container_of(t, struct proc_lost, round);
    struct tree_pick pick = { .root = -1, .mark = is_its, .arg = x };

    (void)group_kill(&x->group); /* without one the walk does it alone */
    unsigned found = tree_signal(&pick, SIGKILL);

    x->ended = found > x->ended ? found : x->ended;
    x->quiet = found ? 0 : x->quiet + 1;
    if (x->quiet < QUIET_ROUNDS && now_ns < x->due_ns) {
        fl_timer_arm(x->loop, t, now_ns + ROUND_NS);
        return;
    }
    group_remove(&x->group);
    x->over(x->arg, x->ended - (found < x->ended ? found : x->ended), found);
}

enum fl_status proc_lost_start(struct fl_loop *l, const char *dir, const char *mark, int keeper_pid,
                               uint64_t due_ns,
                               void (*over)(void *arg, unsigned ended, unsigned left), void *arg,
                               struct proc_lost **out, struct fl_err *err)
{
    const char *slash = strrchr(dir, '/');
    char name[40];
    struct proc_lost *x = calloc(1, sizeof(*x));

    if (!x)
        return fl_fail(err, FL_EXHAUSTED, "no memory to end what runs in %s", dir);
    *x = (struct proc_lost){
        .loop = l, .keeper_pid = keeper_pid, .due_ns = due_ns, .over = over, .arg = arg
    };
    x->round.fire = on_round;
    snprintf(x->mark, sizeof(x->mark), "%s", mark);
    snprintf(name, sizeof(name), "furlong-%.24s", slash ? slash + 1 : dir);
    group_find(&x->group, name);
    fl_timer_arm(l, &x->round, fl_loop_now_ns(l));
    *out = x;
    return FL_OK;
}

void proc_lost_destroy(struct proc_lost *x)
{
    if (!x)
        return;
    fl_timer_cancel(&x->round);
    free(x);
}
