#include "worker/node/stats.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TEXT_BYTES = 256 << 10, /* a line of /proc/stat counts each interrupt, before btime */
    SECTOR = 512            /* of procfs, whatever the disk has */
};

static const char *next_line(const char *p)
{
    p = strchr(p, '\n');
    return p ? p + 1 : NULL;
}

bool node_stats_cpu(const char *stat, uint64_t *busy, uint64_t *all, uint64_t *boot_s)
{
    unsigned long long v[8] = { 0 }, boot = 0;

    if (sscanf(stat, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &v[0], &v[1], &v[2], &v[3],
               &v[4], &v[5], &v[6], &v[7]) < 5)
        return false;
    *all = 0;
    for (size_t i = 0; i < 8; i++)
        *all += v[i];
    *busy = *all - v[3] - v[4]; /* idle, and waiting for a disk */
    const char *at = strstr(stat, "\nbtime ");
    if (at && sscanf(at, "\nbtime %llu", &boot) == 1)
        *boot_s = boot;
    return true;
}

/* Two lines of heading, then "name: received ... sent ..." of eight numbers each. */
void node_stats_net(const char *dev, uint64_t *received, uint64_t *sent)
{
    *received = *sent = 0;
    for (const char *p = dev; p; p = next_line(p)) {
        unsigned long long in, out;
        const char *colon = strchr(p, ':'), *end = strchr(p, '\n');

        while (*p == ' ')
            p++;
        if (!colon || (end && colon > end) || strncmp(p, "lo:", 3) == 0)
            continue;
        if (sscanf(colon + 1, "%llu %*u %*u %*u %*u %*u %*u %*u %llu", &in, &out) == 2) {
            *received += in;
            *sent += out;
        }
    }
}

/* Whole disks alone: their parts would count twice, and so would what is laid over them. */
static bool is_disk(const char *name)
{
    size_t n = strlen(name);

    if (strncmp(name, "nvme", 4) == 0 || strncmp(name, "mmcblk", 6) == 0)
        return !strchr(name + 4, 'p');
    return (strncmp(name, "sd", 2) == 0 || strncmp(name, "vd", 2) == 0 ||
            strncmp(name, "xvd", 3) == 0) &&
           n && !isdigit((unsigned char)name[n - 1]);
}

void node_stats_disks(const char *diskstats, uint64_t *read, uint64_t *written)
{
    *read = *written = 0;
    for (const char *p = diskstats; p; p = next_line(p)) {
        unsigned long long in, out;
        char name[64];

        if (sscanf(p, "%*u %*u %63s %*u %*u %llu %*u %*u %*u %llu", name, &in, &out) == 3 &&
            is_disk(name)) {
            *read += in * SECTOR;
            *written += out * SECTOR;
        }
    }
}

static const char *text_of(const char *path, char buf[TEXT_BYTES])
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = 0;
    ssize_t got = -1;

    if (fd < 0)
        return NULL;
    while (n < TEXT_BYTES - 1 && (got = read(fd, buf + n, TEXT_BYTES - 1 - n)) > 0)
        n += (size_t)got;
    close(fd);
    buf[n] = 0;
    return n ? buf : NULL;
}

static uint64_t kib(const char *meminfo, const char *name)
{
    const char *at = strstr(meminfo, name);

    return at ? strtoull(at + strlen(name), NULL, 10) * 1024 : 0;
}

void node_stats_read(struct node_stats_past *past, Fl__NodeStats *out)
{
    char *buf = malloc(TEXT_BYTES);
    uint64_t busy = 0, all = 0;
    const char *text;

    *out = (Fl__NodeStats)FL__NODE_STATS__INIT;
    if (!buf)
        return;
    out->has_cores = true;
    out->cores = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    if ((text = text_of("/proc/stat", buf)) && node_stats_cpu(text, &busy, &all, &out->boot_s)) {
        out->has_boot_s = out->has_cpu_e2 = true;
        out->cpu_e2 =
            all > past->all ? (uint32_t)((busy - past->busy) * 10000 / (all - past->all)) : 0;
        *past = (struct node_stats_past){ busy, all };
    }
    if ((text = text_of("/proc/meminfo", buf))) {
        out->has_mem_total = out->has_mem_available = out->has_mem_shared = true;
        out->mem_total = kib(text, "MemTotal:");
        out->mem_available = kib(text, "MemAvailable:");
        out->mem_shared = kib(text, "Shmem:");
    }
    if ((text = text_of("/proc/net/dev", buf))) {
        out->has_net_sent = out->has_net_received = true;
        node_stats_net(text, &out->net_received, &out->net_sent);
    }
    if ((text = text_of("/proc/diskstats", buf))) {
        out->has_disk_read = out->has_disk_write = true;
        node_stats_disks(text, &out->disk_read, &out->disk_write);
    }
    free(buf);
}
