#include "tests/gpu/mem.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "common/gpu/gpu.h"
#include "tests/t.h"

static struct opened { /* kept: a context takes a third of a second */
    char uuid[GPU_UUID_BYTES];
    struct gpu *g;
    struct gpu_stream *s;
} opened[GPU_MAX];

static const struct gpu_ops *table(void)
{
    const struct gpu_ops *gpu;

    return gpu_in_use() && gpu_pick(&gpu, NULL) == FL_OK && gpu != &gpu_none && gpu != &gpu_host
               ? gpu
               : NULL;
}

bool t_on_cuda(void)
{
    return table() == &gpu_cuda;
}

static struct opened *open_of(const char *uuid)
{
    const struct gpu_ops *gpu = table();
    struct opened *o = opened;
    struct fl_err err = { 0 };

    while (o < opened + GPU_MAX && o->g && strcmp(o->uuid, uuid) != 0)
        o++;
    t_true(o < opened + GPU_MAX);
    if (!o->g) {
        t_ok(gpu->open(uuid, &o->g, &err), &err);
        t_ok(gpu->stream(o->g, &o->s, &err), &err);
        (void)FL_COPY(o->uuid, uuid);
    }
    return o;
}

/* NULL: the host's. */
static struct opened *device_at(const void *p)
{
    const struct gpu_ops *gpu = table();
    struct gpu_where w;

    return gpu && gpu->where((uint64_t)(uintptr_t)p, &w, NULL) == FL_OK ? open_of(w.uuid) : NULL;
}

/* What others gave the device before has happened, and so has this: their streams do not wait for
 * this one. */
static enum fl_status copy_on(struct opened *o, void *to, const void *from, size_t bytes,
                              struct fl_err *err)
{
    const struct gpu_ops *gpu = table();

    FL_TRY(gpu->copy(o->s, (uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes, err));
    return gpu->stream_sync(o->s, err);
}

/* Pages of one device may be mapped for another one alone: then that one is asked. */
static void copy(struct opened *o, void *to, const void *from, size_t bytes)
{
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;
    struct fl_err err = { 0 }, other;
    enum fl_status st = copy_on(o, to, from, bytes, &err);

    if (st != FL_OK)
        t_ok(table()->list(all, &n, NULL), NULL);
    for (size_t i = 0; st == FL_INVALID && i < n; i++)
        if (copy_on(open_of(all[i].uuid), to, from, bytes, &other) == FL_OK)
            st = FL_OK;
    t_ok(st, &err);
}

/* What a test does by itself is no place of the sweep. device: on which the bytes may lie. */
static void moved(const void *device, void *to, const void *from, size_t bytes)
{
    bool was = fl_fault_spare(true);
    struct opened *o = bytes ? device_at(device) : NULL;

    if (o)
        copy(o, to, from, bytes);
    else if (bytes) /* a tensor of none may lie nowhere */
        memcpy(to, from, bytes);
    (void)fl_fault_spare(was);
}

void t_mem_write(void *to, const void *from, size_t bytes)
{
    moved(to, to, from, bytes);
}

void t_mem_read(void *to, const void *from, size_t bytes)
{
    moved(from, to, from, bytes);
}

void t_mem_fill(void *to, uint8_t value, size_t bytes)
{
    bool was = fl_fault_spare(true);
    struct opened *o = device_at(to);
    struct fl_err err = { 0 };

    if (o) {
        t_ok(table()->fill(o->s, (uint64_t)(uintptr_t)to, value, bytes, &err), &err);
        t_ok(table()->stream_sync(o->s, &err), &err);
    } else if (bytes) {
        memset(to, value, bytes);
    }
    (void)fl_fault_spare(was);
}

bool t_mem_same(const void *at, const void *wanted, size_t bytes)
{
    uint8_t *got = malloc(2 * bytes + 1);

    t_true(got != NULL);
    t_mem_read(got, at, bytes);
    t_mem_read(got + bytes, wanted, bytes);
    bool same = memcmp(got, got + bytes, bytes) == 0;

    free(got);
    return same;
}

uint8_t t_mem_byte(const void *at)
{
    uint8_t b;

    t_mem_read(&b, at, 1);
    return b;
}

bool t_mem_there(const void *at)
{
    int ends[2];

    if (device_at(at))
        return true;
    t_int_eq(pipe(ends), 0);
    ssize_t n = write(ends[1], at, 1); /* EFAULT instead of a signal */
    t_true(n == 1 || errno == EFAULT);
    close(ends[0]);
    close(ends[1]);
    return n == 1;
}

struct t_hog {
    struct gpu *g;
    uint64_t held[64];
    unsigned n;
};

struct t_hog *t_hog_leave(const char *uuid, uint64_t leave_bytes)
{
    const struct gpu_ops *gpu = table();
    struct t_hog *h = calloc(1, sizeof(*h));
    uint64_t left = 0, total;
    struct fl_err err = { 0 };

    t_true(h && gpu);
    t_ok(gpu->open(uuid, &h->g, &err), &err);
    if (gpu->memory(h->g, &left, &total, NULL) != FL_OK)
        left = 0;
    for (uint64_t bytes = (uint64_t)1 << 40; bytes >= 1 << 20;) {
        if (bytes <= left && left - bytes >= leave_bytes &&
            gpu->alloc(h->g, bytes, &h->held[h->n], NULL) == FL_OK) {
            t_true(++h->n < FL_LEN(h->held));
            t_ok(gpu->memory(h->g, &left, &total, &err), &err);
        } else {
            bytes /= 2;
        }
    }
    return h;
}

void t_hog_end(struct t_hog *h)
{
    const struct gpu_ops *gpu = table();

    while (h->n)
        gpu->free(h->g, h->held[--h->n]);
    gpu->close(h->g);
    free(h);
}
