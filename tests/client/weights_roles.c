#include "tests/client/weights_roles.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <furlong/torch.h>

#include "common/base/fault.h"
#include "common/gpu/gpu.h"
#include "tests/gpu/mem.h"
#include "tests/t.h"

enum { TENSORS = 4 };
static const struct {
    const char *name;
    enum fl_dtype dtype;
    uint8_t ndim;
    uint64_t shape[2];
    unsigned bytes;
} shapes[TENSORS] = { { "z.embed", FL_F32, 2, { 128, 33 }, 4 },
                      { "a.norm", FL_BF16, 1, { 64 }, 2 },
                      { "m.proj", FL_F32, 2, { 1024, 96 }, 4 },
                      { "b.buffer", FL_F32, 2, { 0, 8 }, 4 } }; /* of no bytes */

static uint8_t image[1024 * 96 * 4]; /* of one tensor, in the host's memory; kept: tests look at
                                        what is resident */

static uint8_t pattern(unsigned t, uint64_t at, uint64_t version)
{
    uint64_t x = (at + 1) * 0x9e3779b97f4a7c15u ^ (version + 1) * 0xd1b54a32d192ed03u ^
                 (t + 1) * 0x2545f4914f6cdd1du;

    return (uint8_t)(x >> 56);
}

static uint64_t row_bytes(unsigned t)
{
    return (shapes[t].ndim == 2 ? shapes[t].shape[1] : 1) * shapes[t].bytes;
}

/* Every rank of several holds its share of the rows. */
static void tensors(struct furlong_tensor *t, uint32_t rank, uint32_t world, const char *odd)
{
    memset(t, 0, TENSORS * sizeof(*t));
    for (unsigned i = 0; i < TENSORS; i++) {
        t[i].name = shapes[i].name;
        t[i].dtype = shapes[i].dtype;
        t[i].ndim = shapes[i].ndim;
        memcpy(t[i].shape, shapes[i].shape, sizeof(shapes[i].shape));
        if (odd && i == 0)
            t[i].shape[0]++;
        if (world == 1)
            continue;
        t[i].len[0] = t[i].shape[0] / world;
        t[i].at[0] = rank * t[i].len[0];
        t[i].len[1] = t[i].shape[1];
    }
}

static void write_all(struct furlong_weights *w, const struct furlong_tensor *t, uint64_t version)
{
    for (unsigned i = 0; i < TENSORS; i++) {
        uint64_t rows = t[i].len[0] ? t[i].len[0] : t[i].shape[0],
                 first = t[i].at[0] * row_bytes(i), n = rows * row_bytes(i);

        t_true(n <= sizeof(image));
        for (uint64_t k = 0; k < n; k++)
            image[k] = pattern(i, first + k, version);
        t_mem_write(furlong_weights_data(w, i), image, n);
    }
}

static int complain(const char *what, const struct fl_err *err)
{
    fprintf(stderr, "%s: %s\n", what, err->text);
    return 1;
}

static uint32_t slots_wanted(void)
{
    const char *text = getenv("SLOTS");

    return text ? (uint32_t)atoi(text) : 0;
}

/* NULL: host memory */
static const char *device_wanted(void)
{
    static struct gpu_info all[GPU_MAX];
    const struct gpu_ops *gpu;
    size_t n = GPU_MAX;

    if (!getenv("ON_DEVICE") || gpu_pick(&gpu, NULL) != FL_OK || gpu->list(all, &n, NULL) != FL_OK)
        return NULL;
    return all[0].uuid;
}

/* As PyTorch's default allocator, and as its expandable segments. */
static void *foreign(const char *how, uint64_t bytes)
{
    static struct gpu *g;
    const struct gpu_ops *gpu;
    struct gpu_chunk c;
    uint64_t at = 0, whole = (bytes + (2 << 20) - 1) & ~(uint64_t)((2 << 20) - 1);

    if (gpu_pick(&gpu, NULL) != FL_OK || (!g && gpu->open(device_wanted(), &g, NULL) != FL_OK))
        return NULL;
    if (strcmp(how, "plain") == 0)
        return gpu->alloc(g, bytes, &at, NULL) == FL_OK ? (void *)(uintptr_t)at : NULL;
    if (gpu->chunk_create(g, whole, &c, NULL) != FL_OK ||
        gpu->reserve(g, whole, &at, NULL) != FL_OK || gpu->map(g, at, &c, true, NULL) != FL_OK)
        return NULL;
    return (void *)(uintptr_t)at;
}

/* In one memory, as an engine would lay them out: by name, from one multiple of 256 to the next. */
static bool lies_in_a_row(struct furlong_tensor *t)
{
    static const unsigned by_name[] = { 1, 2, 0 }; /* those that have bytes */
    uint64_t at = 0;
    char *base = foreign("pool", sizeof(image) * 2);

    for (unsigned i = 0; base && i < FL_LEN(by_name); i++) {
        unsigned k = by_name[i];

        t[k].data = base + at;
        at += (t[k].shape[0] * row_bytes(k) + 255) / 256 * 256;
    }
    return base != NULL;
}

static bool lies(struct furlong_tensor *t)
{
    const char *how = getenv("LIES");

    if (how && strcmp(how, "row") == 0)
        return lies_in_a_row(t);
    for (unsigned i = 0; how && i < TENSORS; i++) {
        uint64_t bytes = t[i].shape[0] * row_bytes(i);

        if (bytes == 0)
            continue;
        t[i].data = strcmp(how, "arena") == 0 ? furlong_torch_alloc_weights((ssize_t)bytes, 0, NULL)
                                              : foreign(how, bytes);
        if (!t[i].data)
            abort();
    }
    return how != NULL;
}

struct beginning {
    pthread_t thread;
    struct furlong_weights *w;
    uint64_t version;
    pthread_barrier_t *at_once;
    enum fl_status st;
};

static void *begins(void *arg)
{
    struct beginning *b = arg;

    (void)pthread_barrier_wait(b->at_once);
    b->st = furlong_weights_begin(b->w, b->version, 20000, NULL);
    return NULL;
}

/* Two threads, one of which is let in. */
static enum fl_status begin_twice(struct furlong_weights *w, uint64_t version, struct fl_err *err)
{
    pthread_barrier_t at_once;
    struct beginning b[2] = { { .w = w, .version = version, .at_once = &at_once },
                              { .w = w, .version = version, .at_once = &at_once } };
    unsigned in = 0, refused = 0;

    if (pthread_barrier_init(&at_once, NULL, FL_LEN(b)) != 0)
        abort();
    for (unsigned i = 0; i < FL_LEN(b); i++)
        if (pthread_create(&b[i].thread, NULL, begins, &b[i]) != 0)
            abort();
    for (unsigned i = 0; i < FL_LEN(b); i++) {
        pthread_join(b[i].thread, NULL);
        in += b[i].st == FL_OK;
        refused += b[i].st == FL_INVALID;
    }
    pthread_barrier_destroy(&at_once);
    return in == 1 && refused == 1
               ? FL_OK
               : fl_fail(err, FL_INTERNAL, "%u are let in, %u are refused", in, refused);
}

static int trainer_serve(struct furlong *f, struct furlong_weights *w,
                         const struct furlong_tensor *t)
{
    struct furlong_event ev = { 0 };
    struct fl_err err = { 0 };
    uint64_t version;

    write_all(w, t, 0);
    if (furlong_weights_publish(w, 0, &err) != FL_OK)
        return complain("publish", &err);
    while (ev.what != FURLONG_STOP) {
        if (furlong_next(f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err) != FL_OK)
            return complain("next", &err);
        if (ev.what != FURLONG_CALL) {
            furlong_reply(ev.call, NULL, 0);
            continue;
        }
        memcpy(&version, ev.body, sizeof(version));
        if ((strcmp(ev.method, "twice") == 0
                 ? begin_twice(w, version, &err)
                 : furlong_weights_begin(w, version, ev.budget_ms, &err)) != FL_OK) {
            furlong_refuse(ev.call, &err);
            continue;
        }
        bool taken_back = strcmp(ev.method, "abandon") == 0;

        write_all(w, t, taken_back ? version + 100 : version);
        if ((taken_back ? furlong_weights_abandon(w, &err)
                        : furlong_weights_publish(w, version, &err)) != FL_OK)
            furlong_refuse(ev.call, &err);
        else
            furlong_reply(ev.call, NULL, 0);
    }
    return 0;
}

int run_trainer(struct furlong *f)
{
    struct furlong_tensor t[TENSORS];
    struct furlong_weights_opts o = { .slots = slots_wanted(), .device = device_wanted() };
    struct furlong_weights *w;
    struct fl_err err = { 0 };
    int rc;

    tensors(t, furlong_seat(f)->rank, furlong_seat(f)->world, NULL);
    o.in_place = lies(t);
    if (furlong_weights_offer(f, "policy", t, TENSORS, &o, &w, &err) != FL_OK)
        return complain("offer", &err);
    rc = trainer_serve(f, w, t);
    furlong_weights_drop(w);
    return rc;
}

static const char *verdict(const struct furlong_weights *w, uint64_t version)
{
    bool differs = false;

    if (!furlong_weights_data(w, 0))
        return "none";
    for (unsigned i = 0; i < TENSORS; i++) {
        uint64_t n = shapes[i].shape[0] * row_bytes(i);

        t_true(n <= sizeof(image));
        t_mem_read(image, furlong_weights_data(w, i), n);
        for (uint64_t k = 0; k < n; k++)
            differs |= image[k] != pattern(i, k, version);
    }
    return differs ? "wrong" : "ok";
}

static long resident_kib(void)
{
    long pages = 0, rss = 0;
    FILE *in = fopen("/proc/self/statm", "re");

    if (in && fscanf(in, "%ld %ld", &pages, &rss) != 2)
        rss = 0;
    if (in)
        fclose(in);
    return rss * sysconf(_SC_PAGESIZE) / 1024;
}

static void answer_check(struct furlong_call *c, bool count_fds, const struct furlong_weights *w,
                         bool paused, unsigned pauses)
{
    uint64_t digest[2], version = furlong_weights_version(w, digest);
    const char *found = verdict(w, version); /* before what is resident is looked at */
    char text[128];
    int n =
        snprintf(text, sizeof(text), "%lld %s %016llx %s %ld %u %d %p", (long long)version, found,
                 (unsigned long long)digest[0], paused ? "paused" : "running", resident_kib(),
                 pauses, count_fds ? t_open_fds() : 0, furlong_weights_data(w, 0));

    furlong_reply(c, text, (size_t)n);
}

static void die_if_due(uint64_t version)
{
    const char *at = getenv("DIE_AT"), *mark = getenv("DIE_MARK");

    if (at && (uint64_t)atoll(at) == version &&
        open(mark, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600) >= 0)
        raise(SIGKILL);
}

/* As a decode step that is still under way: it reads what serves, and has not ended. */
static void read_later(const struct furlong_weights *w)
{
    static struct gpu *g;
    static struct gpu_stream *stream;
    static uint64_t to;
    const struct gpu_ops *gpu;
    const uint64_t bytes = shapes[0].shape[0] * row_bytes(0);
    const void *from = furlong_weights_data(w, 0);

    if (!device_wanted() || !from || gpu_pick(&gpu, NULL) != FL_OK)
        return;
    if (!g && (gpu->open(device_wanted(), &g, NULL) != FL_OK ||
               gpu->stream(g, &stream, NULL) != FL_OK || gpu->alloc(g, bytes, &to, NULL) != FL_OK))
        abort();
    for (unsigned i = 0; i < 8; i++)
        if (gpu->copy(stream, to, (uint64_t)(uintptr_t)from, bytes, NULL) != FL_OK)
            abort();
}

/* Joined, and its model takes a while: until somebody opens the other end. */
static void load(const struct furlong_seat *me)
{
    const char *fifo = getenv("LOADS");

    if (fifo && *fifo == '+')
        fifo = me->rank + 1 == me->world ? fifo + 1 : NULL;
    int fd = fifo ? open(fifo, O_RDONLY | O_CLOEXEC) : -1;
    char c;

    if (fd < 0)
        return;
    (void)!read(fd, &c, 1);
    close(fd);
}

enum { DROPPED = 100 };

/* By the thread that would answer: at_commit: when a COMMIT waits for it. */
static void drop(struct furlong_call *c, struct furlong_weights *w, bool at_commit)
{
    const char *mark = getenv("DROP_MARK");
    struct furlong_coming coming;
    int fd = at_commit && mark ? open(mark, O_CREAT | O_WRONLY | O_CLOEXEC, 0600) : -1;

    if (fd >= 0)
        close(fd);
    while (at_commit && furlong_weights_coming(w, 0, &coming, NULL) != FL_OK)
        (void)usleep(1000);
    furlong_weights_drop(w);
    furlong_reply(c, NULL, 0);
}

static int engine_serve(struct furlong *f, struct furlong_weights *w)
{
    struct furlong_event ev = { 0 };
    struct fl_err err = { 0 };
    static bool paused;
    static unsigned pauses;

    while (ev.what != FURLONG_STOP) {
        if (furlong_next(f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err) != FL_OK)
            return complain("next", &err);
        if (ev.what == FURLONG_PAUSE || ev.what == FURLONG_RESUME)
            paused = ev.what == FURLONG_PAUSE;
        pauses += ev.what == FURLONG_PAUSE;
        if (ev.what == FURLONG_PAUSE || ev.what == FURLONG_COMMIT || ev.what == FURLONG_OFFLOAD)
            read_later(w);
        if (ev.what == FURLONG_COMMIT) {
            die_if_due(ev.version);
            if (furlong_weights_commit(w, ev.call, &err) != FL_OK)
                return complain("commit", &err);
        } else if (ev.what == FURLONG_CALL && strcmp(ev.method, "why") == 0) {
            char why[256];

            furlong_weights_why(w, why, sizeof(why));
            furlong_reply(ev.call, why, strlen(why));
        } else if (ev.what == FURLONG_CALL && strncmp(ev.method, "drop", 4) == 0) {
            drop(ev.call, w, strcmp(ev.method, "drop_at_commit") == 0);
            return DROPPED;
        } else if (ev.what == FURLONG_CALL) {
            answer_check(ev.call, strcmp(ev.method, "check_fds") == 0, w, paused, pauses);
        } else {
            furlong_reply(ev.call, NULL, 0);
        }
    }
    return 0;
}

int run_engine(struct furlong *f)
{
    struct furlong_tensor t[TENSORS];
    struct furlong_weights_opts o = { .slots = slots_wanted(),
                                      .device = device_wanted(),
                                      .fixed_addresses = getenv("FIXED") != NULL,
                                      .check_equal = getenv("CHECK_EQUAL") != NULL };
    struct furlong_weights *w;
    struct fl_err err = { 0 };
    int rc;

    if (getenv("FAULT_1") && furlong_seat(f)->rank == 1 && furlong_seat(f)->attempt == 1 &&
        fl_fault_set(getenv("FAULT_1"), &err) != FL_OK)
        return complain("fault", &err);
    load(furlong_seat(f));
    tensors(t, 0, 1, getenv("ODD"));
    if (getenv("KEEP") &&
        furlong_arena_keep(f, FURLONG_TAG_WEIGHTS, FURLONG_KEEP_HOST, NULL, &err) != FL_OK)
        return complain("keep", &err);
    do {
        if (furlong_weights_accept(f, "policy", t, TENSORS, &o, &w, &err) != FL_OK)
            return complain("accept", &err);
        rc = engine_serve(f, w);
    } while (rc == DROPPED);
    furlong_weights_drop(w);
    return rc;
}

int play_role(const char *role)
{
    struct furlong *f;
    struct fl_err err = { 0 };
    int rc;

    if (furlong_join(FURLONG_ABI, &f, &err) != FL_OK)
        return complain("join", &err);
    rc = strcmp(role, "trainer") == 0 ? run_trainer(f) : run_engine(f);
    furlong_leave(f);
    return rc;
}
