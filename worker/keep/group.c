#include "worker/keep/group.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool read_text(const char *dir, const char *file, char *buf, size_t cap)
{
    char path[320];
    int fd;
    ssize_t n;

    snprintf(path, sizeof(path), "%s/%s", dir, file);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    n = read(fd, buf, cap - 1);
    close(fd);
    buf[n > 0 ? n : 0] = 0;
    return n > 0;
}

static bool write_text(const char *dir, const char *file, const char *text)
{
    char path[320];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, file);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool ok = write(fd, text, strlen(text)) == (ssize_t)strlen(text);

    close(fd);
    return ok;
}

static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);

    for (const char *p = list; (p = strstr(p, word)); p += n)
        if ((p == list || p[-1] == ',') && (p[n] == 0 || p[n] == ','))
            return true;
    return false;
}

/* Our own path in the hierarchy with that controller; "" names the unified one. */
static bool own_path(const char *controller, char *out, size_t cap)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    char line[512];
    bool found = false;

    while (f && !found && fgets(line, sizeof(line), f)) {
        char *list = strchr(line, ':');
        char *path = list ? strchr(++list, ':') : NULL;

        if (!path)
            continue;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        if (controller[0] ? has_word(list, controller) : list[0] == 0) {
            snprintf(out, cap, "%s", path);
            found = true;
        }
    }
    if (f)
        fclose(f);
    return found;
}

bool group_own_folder(const char *controller, char *out, size_t cap)
{
    char line[1024], own[256];
    FILE *f;
    bool found = false;

    if (!own_path(controller, own, sizeof(own)))
        return false;
    f = fopen("/proc/self/mountinfo", "re");
    while (f && !found && fgets(line, sizeof(line), f)) {
        char root[256], point[256], type[32], options[256];
        const char *dash = strstr(line, " - ");

        if (!dash || sscanf(line, "%*s %*s %*s %255s %255s", root, point) != 2 ||
            sscanf(dash + 3, "%31s %*s %255s", type, options) != 2)
            continue;
        if (controller[0] ? strcmp(type, "cgroup") || !has_word(options, controller)
                          : strcmp(type, "cgroup2"))
            continue;
        size_t n = strcmp(root, "/") ? strlen(root) : 0;
        const char *below = n && !strncmp(own, root, n) ? own + n : own;

        found = snprintf(out, cap, "%s%s", point, strcmp(below, "/") ? below : "") < (int)cap;
    }
    if (f)
        fclose(f);
    return found;
}

/* 0: made (or there already); else errno. */
static int leaf_make(const char *controller, const char *name, char out[256])
{
    char dir[256];
    int n;

    out[0] = 0;
    if (!group_own_folder(controller, dir, sizeof(dir)))
        return ENOENT;
    n = snprintf(out, 256, "%s/%s", dir, name);
    if (n >= 256)
        out[0] = 0;
    if (n >= 256)
        return ENAMETOOLONG;
    if (mkdir(out, 0755) == 0 || errno == EEXIST)
        return 0;
    n = errno;
    out[0] = 0;
    return n;
}

static void limit_memory(struct group *g, const char *name, uint64_t max)
{
    char text[24];

    snprintf(text, sizeof(text), "%llu", (unsigned long long)max);
    if (g->unified[0] && write_text(g->unified, "memory.max", text)) {
        snprintf(g->memory, sizeof(g->memory), "%s", g->unified);
        g->memory_v2 = true;
    } else if (leaf_make("memory", name, g->memory) == 0 &&
               !write_text(g->memory, "memory.limit_in_bytes", text)) {
        rmdir(g->memory);
        g->memory[0] = 0;
    }
}

void group_make(struct group *g, const char *name, uint64_t memory_max_bytes)
{
    int why = leaf_make("", name, g->unified);
    char probe[8];

    *g->freezer = *g->memory = 0;
    g->memory_v2 = false;
    if (why == 0 && access(g->unified, W_OK) == 0 &&
        read_text(g->unified, "cgroup.type", probe, sizeof(probe))) {
        snprintf(g->text, sizeof(g->text), "v2");
    } else if (leaf_make("freezer", name, g->freezer) == 0) {
        snprintf(g->text, sizeof(g->text), "v1 freezer");
    } else {
        snprintf(g->text, sizeof(g->text), "none: %s", strerror(why ? why : EROFS));
    }
    if (memory_max_bytes)
        limit_memory(g, name, memory_max_bytes);
    if (memory_max_bytes && !g->memory[0]) {
        size_t n = strlen(g->text);

        snprintf(g->text + n, sizeof(g->text) - n, ", no memory limit");
    }
}

void group_find(struct group *g, const char *name)
{
    static const char *const kinds[] = { "", "freezer", "memory" };
    char *const outs[] = { g->unified, g->freezer, g->memory };

    *g = (struct group){ 0 };
    for (size_t i = 0; i < 3; i++) {
        char dir[256];

        if (!group_own_folder(kinds[i], dir, sizeof(dir)) ||
            snprintf(outs[i], 256, "%s/%s", dir, name) >= 256 || access(outs[i], F_OK) != 0)
            outs[i][0] = 0;
    }
}

void group_enter(const struct group *g)
{
    const char *const dirs[] = { g->unified, g->freezer, g->memory };

    for (size_t i = 0; i < 3; i++)
        if (dirs[i][0])
            (void)write_text(dirs[i], "cgroup.procs", "0"); /* else the walk ends it all the same */
}

static bool freezer_kill(const char *dir)
{
    char path[320];
    FILE *f;
    int pid;

    if (!write_text(dir, "freezer.state", "FROZEN"))
        return false;
    snprintf(path, sizeof(path), "%s/cgroup.procs", dir);
    f = fopen(path, "re");
    while (f && fscanf(f, "%d", &pid) == 1)
        (void)kill(pid, SIGKILL); /* frozen: the number cannot pass on */
    if (f)
        fclose(f);
    return write_text(dir, "freezer.state", "THAWED");
}

bool group_kill(const struct group *g)
{
    if (g->unified[0] && write_text(g->unified, "cgroup.kill", "1"))
        return true;
    return g->freezer[0] && freezer_kill(g->freezer);
}

uint64_t group_oom_kills(const struct group *g)
{
    char buf[512];
    const char *p;

    if (!g->memory[0] ||
        !read_text(g->memory, g->memory_v2 ? "memory.events" : "memory.oom_control", buf,
                   sizeof(buf)))
        return 0;
    p = strstr(buf, "oom_kill ");
    return p ? strtoull(p + strlen("oom_kill "), NULL, 10) : 0;
}

void group_remove(struct group *g)
{
    char *const dirs[] = { g->unified, g->freezer, g->memory };

    for (size_t i = 0; i < 3; i++) {
        if (dirs[i][0])
            (void)rmdir(dirs[i]); /* what is left in it keeps it; the exit record says how many */
        dirs[i][0] = 0;
    }
}
