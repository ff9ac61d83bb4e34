#include "common/gpu/fake.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/base/str.h"
#include "common/gpu/gpu_priv.h"

enum { GRANULARITY = 2 << 20 };

static struct {
    size_t n;
    bool gb10;
    uint64_t bytes;
} shape = { 1, false, 1ull << 30 };

struct held { /* what one process holds: a file of this form, named by its pid */
    uint64_t start_time;
    uint64_t bytes[GPU_MAX]; /* of its own allocations: what it imports is another's */
    uint8_t open[GPU_MAX];
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct held alone, *mine = &alone; /* alone: nobody else looks */

/* ---- devices ---- */

enum fl_status gpu_fake_shape(const char *word, struct fl_err *err)
{
    const char *bytes = getenv("FURLONG_GPU_FAKE_BYTES"), *rest = word + strlen("fake");
    int64_t n = 1;
    enum fl_status st = FL_OK;

    shape.gb10 = strcmp(word, "fake:gb10") == 0;
    if (strncmp(word, "fake", 4) != 0 || (*rest && *rest != ':') ||
        (*rest && !shape.gb10 && fl_parse_i64(rest + 1, 1, GPU_MAX, &n, NULL) != FL_OK))
        return fl_fail(err, FL_INVALID,
                       "FURLONG_GPU=%.40s: cuda, none, host, fake, fake:N (1 to %d devices) or "
                       "fake:gb10 is wanted",
                       word, GPU_MAX);
    shape.n = (size_t)n;
    if (bytes && *bytes)
        st = fl_parse_bytes(bytes, UINT64_MAX / 2, &shape.bytes, err);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "FURLONG_GPU_FAKE_BYTES");
}

struct gpu_info fake_describe(size_t device)
{
    const char *name = getenv("FURLONG_GPU_FAKE_NAME"), *vmm = getenv("FURLONG_GPU_FAKE_VMM");
    uint8_t id[16] = "furlong fake ";
    struct gpu_info out = { .ordinal = (int)device,
                            .major = shape.gb10 ? 12 : 9,
                            .minor = shape.gb10,
                            .multiprocessors = 1,
                            .integrated = shape.gb10,
                            .vmm = true,
                            .posix_fd = true,
                            .legacy_ipc = !shape.gb10,
                            .total_bytes = shape.gb10 ? UINT64_MAX : shape.bytes,
                            .granularity_bytes = GRANULARITY };

    if (vmm && strcmp(vmm, "0") == 0) {
        out.vmm = out.posix_fd = false;
        out.granularity_bytes = 0;
    }
    id[15] = (uint8_t)device;
    gpu_uuid_text(out.uuid, id);
    snprintf(out.name, sizeof(out.name), "%s",
             name && *name ? name
             : shape.gb10  ? "Fake GB10"
                           : "Fake device");
    return out;
}

enum fl_status gpu_fake_list(struct gpu_info *out, size_t *n, struct fl_err *err)
{
    if (shape.n > *n)
        return fl_fail(err, FL_EXHAUSTED, "%zu devices, room for %zu", shape.n, *n);
    for (size_t i = 0; i < shape.n; i++)
        out[i] = fake_describe(i);
    *n = shape.n;
    return FL_OK;
}

/* A number, or a UUID that may be cut short; shape.n: none, or not one alone. */
static size_t meant(const char *entry, size_t len)
{
    size_t found = shape.n;

    if (len && strspn(entry, "0123456789") >= len) {
        size_t i = strtoul(entry, NULL, 10);

        return i < shape.n ? i : shape.n;
    }
    for (size_t i = 0; len && i < shape.n; i++) {
        if (strncasecmp(fake_describe(i).uuid, entry, len) != 0)
            continue;
        if (found < shape.n)
            return shape.n;
        found = i;
    }
    return found;
}

enum fl_status gpu_fake_visible(struct gpu_info *out, size_t *n, struct fl_err *err)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    size_t seen = 0, len;

    if (!list)
        return gpu_fake_list(out, n, err);
    for (const char *at = list; *at; at += len + (at[len] == ',')) {
        len = strcspn(at, ",");
        size_t device = meant(at, len);

        if (device == shape.n)
            break; /* as the driver: what follows a bad entry is not seen either */
        if (seen == *n)
            return fl_fail(err, FL_EXHAUSTED, "CUDA_VISIBLE_DEVICES=%.80s: room for %zu", list, *n);
        out[seen] = fake_describe(device);
        out[seen].ordinal = (int)seen;
        seen++;
    }
    *n = seen;
    return FL_OK;
}

size_t fake_device(const char *uuid)
{
    for (size_t i = 0; i < shape.n; i++)
        if (strcmp(fake_describe(i).uuid, uuid) == 0)
            return i;
    return GPU_MAX;
}

void fake_pci(size_t device, char out[32])
{
    snprintf(out, 32, "00000000:%02zX:00.0", device + 1);
}

/* ---- what this process holds ---- */

/* Without the folder, or where it cannot be written, nobody else sees it. Under the lock. */
static void show(void)
{
    const char *dir = getenv("FURLONG_GPU_FAKE_DIR");
    char path[FL_PATH_MAX];
    void *p;

    if (!dir || !*dir || mine != &alone ||
        fl_path(path, NULL, "%s/%d", dir, (int)getpid()) != FL_OK)
        return;
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    if (fd < 0)
        return;
    p = ftruncate(fd, sizeof(struct held)) == 0
            ? mmap(NULL, sizeof(struct held), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
            : MAP_FAILED;
    close(fd);
    if (p == MAP_FAILED)
        return;
    mine = p;
    *mine = alone;
    (void)fl_pid_start_time((int)getpid(), &mine->start_time, NULL);
}

void fake_hold(size_t device)
{
    pthread_mutex_lock(&lock);
    show();
    mine->open[device] = 1;
    pthread_mutex_unlock(&lock);
}

bool fake_take(size_t device, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    bool ok = bytes <= shape.bytes - mine->bytes[device];
    mine->bytes[device] += ok ? bytes : 0;
    pthread_mutex_unlock(&lock);
    return ok;
}

void fake_give(size_t device, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    mine->bytes[device] -= bytes;
    pthread_mutex_unlock(&lock);
}

uint64_t fake_held(size_t device)
{
    pthread_mutex_lock(&lock);
    uint64_t bytes = mine->bytes[device];
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* ---- what all hold ---- */

/* false: that process is no more, and its note goes. */
static bool read_held(const char *dir, const char *pid, struct held *out)
{
    char path[FL_PATH_MAX];
    uint64_t start_time;
    int fd =
        fl_path(path, NULL, "%s/%s", dir, pid) == FL_OK ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    bool whole = fd >= 0 && read(fd, out, sizeof(*out)) == (ssize_t)sizeof(*out);

    if (fd >= 0)
        close(fd);
    if (!whole)
        return false; /* it is just being made */
    if (fl_pid_start_time(atoi(pid), &start_time, NULL) == FL_OK &&
        (start_time == out->start_time || !out->start_time))
        return true;
    (void)unlink(path); /* another reader may have been quicker */
    return false;
}

enum fl_status fake_procs(const char *uuid, struct gpu_proc *out, size_t *n, struct fl_err *err)
{
    const char *dir = getenv("FURLONG_GPU_FAKE_DIR");
    size_t device = fake_device(uuid), found = 0;
    struct dirent *e;
    struct held held;
    DIR *d;

    if (device == GPU_MAX)
        return fl_fail(err, FL_NOT_FOUND, "no device %s among the %zu of this machine", uuid,
                       shape.n);
    if (!dir || !*dir || !(d = opendir(dir)))
        return fl_fail(err, FL_UNSUPPORTED, "device %s, a fake, does not say what is in use", uuid);
    while ((e = readdir(d)))
        if (e->d_name[0] > '0' && e->d_name[0] <= '9' && read_held(dir, e->d_name, &held) &&
            held.open[device] && found < *n)
            out[found++] = (struct gpu_proc){ atoi(e->d_name), held.bytes[device], -1 };
    closedir(d);
    *n = found;
    return FL_OK;
}
