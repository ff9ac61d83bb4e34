#include "worker/roles/sglang/owner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/file.h"
#include "common/base/port.h"
#include "common/base/str.h"

enum { PARENTS_MAX = 32, ENVIRON_BYTES = 256 << 10 };
#define SOCKET "FURLONG_SGLANG_SOCKET="

/* A server of another engine is known by its environment. What a container engine starts for our
 * command is neither below it nor has its environment; whoever listens for it may be older than we
 * are. */
enum owner sglang_owner_of(const struct owner_sign *s, const struct owner_us *us)
{
    if (s->below)
        return OWNER_OURS;
    if (!s->socket)
        return OWNER_UNKNOWN;
    return strcmp(s->socket, us->socket) == 0 ? OWNER_OURS : OWNER_OTHERS;
}

static bool is_below(int pid, int top)
{
    struct fl_pid_stat s;

    for (int i = 0; i < PARENTS_MAX && pid > 1 && fl_pid_stat(pid, &s, NULL) == FL_OK; i++) {
        if (pid == top || s.group == top)
            return true;
        pid = s.parent;
    }
    return false;
}

/* Into out; false: it is not there, or may not be read. */
static bool socket_of(int pid, char *out, size_t cap)
{
    char path[64], *all = malloc(ENVIRON_BYTES);
    size_t n = 0;
    bool found = false;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/environ", pid);
    f = all ? fopen(path, "re") : NULL;
    if (f) {
        n = fread(all, 1, ENVIRON_BYTES - 1, f);
        fclose(f);
        all[n] = '\0';
    }
    for (size_t i = 0; i < n && !found; i += strlen(all + i) + 1)
        if (strncmp(all + i, SOCKET, sizeof(SOCKET) - 1) == 0)
            found = fl_copy(out, cap, all + i + sizeof(SOCKET) - 1);
    free(all);
    return found;
}

struct look {
    const struct owner_us *us;
    enum owner owner;
};

/* Several processes may share the socket: one of ours among them is enough. */
static bool look_at(void *arg, int pid)
{
    struct look *l = arg;
    struct owner_sign s = { .below = is_below(pid, l->us->pid) };
    char socket[128];

    if (!s.below && socket_of(pid, socket, sizeof(socket)))
        s.socket = socket;
    enum owner o = sglang_owner_of(&s, l->us);
    if (o == OWNER_OURS || l->owner == OWNER_UNKNOWN)
        l->owner = o;
    return o != OWNER_OURS;
}

enum owner sglang_port_owner(uint16_t port, const struct owner_us *us, char *who, size_t cap)
{
    struct look l = { us, OWNER_UNKNOWN };

    fl_port_holders(port, look_at, &l);
    if (l.owner == OWNER_OTHERS && !fl_port_holder(port, who, cap))
        l.owner = OWNER_UNKNOWN; /* it has just left */
    return l.owner;
}
