#include "common/base/usage.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool line_of(int pid, const char *file, char *out, size_t cap)
{
    char path[64];
    FILE *f;
    bool got;

    snprintf(path, sizeof(path), "/proc/%d/%s", pid, file);
    f = fopen(path, "re");
    got = f && fgets(out, (int)cap, f);
    if (f)
        fclose(f);
    return got;
}

static uint32_t count_fds(int pid)
{
    char path[64];
    uint32_t n = 0;
    DIR *d;

    snprintf(path, sizeof(path), "/proc/%d/fd", pid);
    d = opendir(path);
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n > 2 ? n - 2 : 0; /* . and .. */
}

enum fl_status fl_usage_read(int pid, struct fl_usage *out, struct fl_err *err)
{
    unsigned long long user = 0, system = 0, rss = 0, shared = 0;
    char stat[1024], memory[256];
    const char *after;
    uint64_t tick_ms = 1000 / (uint64_t)sysconf(_SC_CLK_TCK),
             page = (uint64_t)sysconf(_SC_PAGESIZE);

    if (!line_of(pid, "stat", stat, sizeof(stat)) ||
        !line_of(pid, "statm", memory, sizeof(memory)) ||
        !(after = strrchr(stat, ')')) || /* a name may hold anything, this too */
        sscanf(after + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user,
               &system) != 2 ||
        sscanf(memory, "%*u %llu %llu", &rss, &shared) != 2)
        return fl_fail(err, FL_NOT_FOUND, "there is no process %d", pid);
    *out = (struct fl_usage){ .cpu_ms = (user + system) * tick_ms,
                              .rss_bytes = rss * page,
                              .shared_bytes = shared * page,
                              .fds = count_fds(pid) };
    return FL_OK;
}
