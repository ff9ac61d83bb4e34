/* Where the processes of a cluster that run here listen: on their node's one address, on loopback or on all; anything
 * else is a channel that looked for an address of its own, and that peers may not reach. */
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/base/str.h"
#include "worker/doctor/priv.h"

enum { LISTENERS_MAX = 4096, ENVIRON_MAX = 2 << 20 };
struct listener {
    unsigned long inode;
    uint16_t port;
    char address[INET6_ADDRSTRLEN];
};

/* "0100007F:1F90", 32 bits a group in the host's order. */
static bool read_address(const char *hex, struct listener *out)
{
    size_t groups = strcspn(hex, ":") / 8;
    uint32_t bits[4];
    unsigned port;

    if (groups != 1 && groups != 4)
        return false;
    for (size_t i = 0; i < groups; i++)
        if (sscanf(hex + 8 * i, "%8x", &bits[i]) != 1)
            return false;
    if (sscanf(hex + 8 * groups, ":%x", &port) != 1)
        return false;
    out->port = (uint16_t)port;
    return inet_ntop(groups == 1 ? AF_INET : AF_INET6, bits, out->address, sizeof(out->address)) != NULL;
}

static size_t read_listeners(struct listener *all)
{
    static const char *const files[] = { "/proc/net/tcp", "/proc/net/tcp6" };
    char line[512], local[80];
    size_t n = 0;

    for (size_t i = 0; i < FL_LEN(files); i++) {
        FILE *f = fopen(files[i], "re");
        unsigned state;

        while (f && n < LISTENERS_MAX && fgets(line, sizeof(line), f))
            if (sscanf(line, " %*d: %79s %*s %x %*s %*s %*s %*s %*s %lu", local, &state, &all[n].inode) == 3 && state == 0x0a &&
                read_address(local, &all[n]))
                n++;
        if (f)
            fclose(f);
    }
    return n;
}

/* FURLONG_NODE_IP of a process that this user may look at; false: it is none of a cluster's. */
static bool node_of(const char *pid, char out[64])
{
    static const char name[] = "FURLONG_NODE_IP=";
    char path[64], *text;
    size_t len;
    bool found = false;

    snprintf(path, sizeof(path), "/proc/%.20s/environ", pid);
    if (fl_file_read(path, ENVIRON_MAX, &text, &len, NULL) != FL_OK)
        return false;
    for (const char *p = text; p < text + len && !found; p += strlen(p) + 1)
        if (strncmp(p, name, sizeof(name) - 1) == 0)
            found = fl_copy(out, 64, p + sizeof(name) - 1) < 64;
    free(text);
    return found;
}

/* Bound there, or to all; what is mapped is IPv4 in an IPv6 socket. */
static bool belongs(const char *address, const char *node)
{
    const char *v4 = strncmp(address, "::ffff:", 7) == 0 ? address + 7 : address;

    return strcmp(v4, node) == 0 || strcmp(address, "::") == 0 || strcmp(v4, "0.0.0.0") == 0 || strcmp(address, "::1") == 0 ||
           strncmp(v4, "127.", 4) == 0;
}

struct tally { unsigned sockets, processes, strays; };

static void look_process(const char *pid, const struct listener *all, size_t n, struct tally *t, struct doctor_list *l)
{
    char path[300], link[128], node[64], comm[64] = "?";
    unsigned before = t->sockets;
    DIR *fds;

    if (!node_of(pid, node) || strchr(node, '/') || !isxdigit((unsigned char)*node))
        return; /* a subnet is a daemon's own setting, not a worker's address */
    snprintf(path, sizeof(path), "/proc/%.20s/fd", pid);
    fds = opendir(path);
    for (struct dirent *e; fds && (e = readdir(fds));) {
        unsigned long inode;

        snprintf(path, sizeof(path), "/proc/%.20s/fd/%.20s", pid, e->d_name);
        ssize_t len = readlink(path, link, sizeof(link) - 1);

        link[len > 0 ? len : 0] = 0;
        if (sscanf(link, "socket:[%lu]", &inode) != 1)
            continue;
        for (size_t i = 0; i < n; i++) {
            if (all[i].inode != inode)
                continue;
            t->sockets++;
            if (belongs(all[i].address, node))
                continue;
            t->strays++;
            snprintf(path, sizeof(path), "/proc/%.20s/comm", pid);
            FILE *f = fopen(path, "re");

            if (f && fgets(comm, sizeof(comm), f))
                comm[strcspn(comm, "\n")] = 0;
            if (f)
                fclose(f);
            doctor_say(l, "sockets", DOCTOR_WARN, "bind it to FURLONG_NODE_IP, as NCCL, Gloo and the engine are told to",
                       "pid %.20s (%s) listens at %s port %u, which is not the node's address %s", pid, comm, all[i].address, all[i].port, node);
        }
    }
    if (fds)
        closedir(fds);
    t->processes += t->sockets > before;
}

void doctor_look_sockets(struct doctor_list *l)
{
    struct listener *all = calloc(LISTENERS_MAX, sizeof(*all));
    struct tally t = { 0 };
    DIR *proc = all ? opendir("/proc") : NULL;
    size_t n = all ? read_listeners(all) : 0;

    for (struct dirent *p; proc && (p = readdir(proc));)
        if (isdigit((unsigned char)p->d_name[0]))
            look_process(p->d_name, all, n, &t, l);
    if (proc)
        closedir(proc);
    if (t.sockets && !t.strays)
        doctor_say(l, "sockets", DOCTOR_OK, "", "%u listening sockets of %u processes are on their node's address, on loopback or on all", t.sockets, t.processes);
    free(all);
}
