/* every table keeps the same promises: chunks, mappings, two processes, exhaustion, faults;
 * FURLONG_GPU says which */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "common/gpu/probe.h"
#include "common/gpu/watch.h"
#include "tests/gpu/two.h"
#include "tests/t.h"

enum { MARK = 0x5a, OTHER = 0xa5, LEN = 4096, REFUSED = 7, WRONG = 8 };
static const struct gpu_ops *gpu;
static struct gpu_info info;
static bool
    on_host; /* of the fake and of host memory: what is forbidden is a signal, not an error */
static struct fl_err err;

struct dev { /* one device, one stream */
    struct gpu *g;
    struct gpu_stream *s;
};
struct note {
    struct gpu_handle handle;
    uint64_t off, bytes;
};

static struct dev dev_open(void)
{
    struct dev d = { 0 };

    t_ok(gpu->open(info.uuid, &d.g, &err), &err);
    t_ok(gpu->stream(d.g, &d.s, &err), &err);
    return d;
}

static void dev_close(struct dev *d)
{
    gpu->stream_free(d->s);
    gpu->close(d->g);
}

static void paint(struct dev *d, uint64_t addr, uint8_t value)
{
    t_ok(gpu->fill(d->s, addr, value, LEN, &err), &err);
    t_ok(gpu->stream_sync(d->s, &err), &err);
}

static bool painted(struct dev *d, uint64_t addr, uint8_t value)
{
    unsigned char got[LEN];

    memset(got, ~value, sizeof(got));
    t_ok(gpu->copy(d->s, (uint64_t)(uintptr_t)got, addr, LEN, &err), &err);
    t_ok(gpu->stream_sync(d->s, &err), &err);
    for (size_t i = 0; i < LEN; i++)
        if (got[i] != value)
            return false;
    return true;
}

static void mapped(struct dev *d, struct gpu_chunk *c, uint64_t *addr, bool writable)
{
    t_ok(gpu->reserve(d->g, c->bytes, addr, &err), &err);
    t_ok(gpu->map(d->g, *addr, c, writable, &err), &err);
}

static void unmapped(struct dev *d, struct gpu_chunk *c, uint64_t addr)
{
    uint64_t bytes = c->bytes;

    t_ok(gpu->unmap(d->g, addr, bytes, &err), &err);
    gpu->unreserve(d->g, addr, bytes);
    gpu->chunk_release(d->g, c);
}

/* ==== one process ==== */
static void devices_have_names(void **state)
{
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;
    struct gpu *g = NULL;

    (void)state;
    t_refused(gpu->open("GPU-of-nobody", &g, &err),
              gpu == &gpu_none ? FL_UNSUPPORTED : FL_NOT_FOUND, &err);
    t_has(err.text, gpu == &gpu_host ? "host" : "GPU-of-nobody");
    t_true(g == NULL);
    if (gpu == &gpu_none)
        return;
    t_ok(gpu->list(all, &n, &err), &err);
    for (size_t i = 0; i < n; i++) {
        t_true(on_host || strlen(all[i].uuid) == GPU_UUID_BYTES - 1, "%s", all[i].uuid);
        t_true(all[i].vmm && all[i].granularity_bytes >= 4096);
        for (size_t k = 0; k < i; k++)
            t_true(strcmp(all[i].uuid, all[k].uuid) != 0, "two devices are %s", all[i].uuid);
    }
    n = 0;
    t_refused(gpu->list(all, &n, &err), FL_EXHAUSTED, &err);
}

static void addresses_stay_while_chunks_come_and_go(void **state)
{
    struct gpu_chunk a, b;
    uint64_t base, bytes;

    (void)state;
    struct dev d = dev_open();
    bytes = info.granularity_bytes;
    t_ok(gpu->chunk_create(d.g, bytes, &a, &err), &err);
    t_ok(gpu->chunk_create(d.g, bytes, &b, &err), &err);
    t_ok(gpu->reserve(d.g, 2 * bytes, &base, &err), &err);
    t_ok(gpu->map(d.g, base + bytes, &a, true, &err), &err);
    paint(&d, base + bytes, MARK);
    t_ok(gpu->unmap(d.g, base + bytes, bytes, &err), &err);
    t_ok(gpu->map(d.g, base + bytes, &b, true, &err), &err);
    paint(&d, base + bytes, OTHER);
    t_ok(gpu->map(d.g, base, &a, true, &err),
         &err); /* the first one elsewhere: it holds what it held */
    t_true(painted(&d, base, MARK));
    t_true(painted(&d, base + bytes, OTHER));
    t_true(gpu->chunk_held(d.g, &a) > 0 && gpu->chunk_held(d.g, &a) <= bytes);
    t_ok(gpu->unmap(d.g, base, bytes, &err), &err);
    t_ok(gpu->unmap(d.g, base + bytes, bytes, &err), &err);
    gpu->unreserve(d.g, base, 2 * bytes);
    gpu->chunk_release(d.g, &a);
    gpu->chunk_release(d.g, &b);
    dev_close(&d);
}

static void a_chunk_lives_on_while_it_is_mapped(void **state)
{
    struct gpu_chunk c, gone;
    uint64_t addr;

    (void)state;
    struct dev d = dev_open();
    t_ok(gpu->chunk_create(d.g, info.granularity_bytes, &c, &err), &err);
    gone = c;
    mapped(&d, &c, &addr, true);
    gpu->chunk_release(d.g, &c);
    paint(&d, addr, MARK);
    t_true(painted(&d, addr, MARK));
    t_ok(gpu->unmap(d.g, addr, gone.bytes, &err), &err);
    gpu->unreserve(d.g, addr, gone.bytes);
    dev_close(&d);
}

static void streams_are_ordered_by_events(void **state)
{
    struct gpu_event *from, *to;
    struct gpu_stream *second;
    uint64_t a, b;
    float ms = -1;
    void *pinned;

    (void)state;
    struct dev d = dev_open();
    t_ok(gpu->stream(d.g, &second, &err), &err);
    t_ok(gpu->event(d.g, &from, &err), &err);
    t_ok(gpu->event(d.g, &to, &err), &err);
    t_ok(gpu->alloc(d.g, LEN, &a, &err), &err);
    t_ok(gpu->alloc(d.g, LEN, &b, &err), &err);
    t_ok(gpu->pin(d.g, LEN, &pinned, &err), &err);
    memset(pinned, MARK, LEN);
    t_ok(gpu->event_record(from, d.s, &err), &err);
    t_ok(gpu->copy(d.s, a, (uint64_t)(uintptr_t)pinned, LEN, &err), &err);
    t_ok(gpu->event_record(to, d.s, &err), &err);
    t_ok(gpu->stream_wait(second, to, &err), &err);
    t_ok(gpu->copy(second, b, a, LEN, &err), &err);
    t_ok(gpu->sync(d.g, &err), &err);
    t_true(painted(&d, b, MARK));
    t_ok(gpu->event_done(to, &err), &err);
    t_ok(gpu->event_ms(from, to, &ms, &err), &err);
    t_true(ms >= 0);
    gpu->unpin(d.g, pinned);
    gpu->free(d.g, a);
    gpu->free(d.g, b);
    gpu->event_free(from);
    gpu->event_free(to);
    gpu->stream_free(second);
    dev_close(&d);
}

static void memory_that_is_not_there_is_refused(void **state)
{
    struct gpu_chunk c[16];
    uint64_t free_bytes = 0, total = 0, before = 0;
    size_t n = 0;

    (void)state;
    struct dev d = dev_open();
    if (info.integrated) {
        if (on_host)
            t_refused(gpu->memory(d.g, &free_bytes, &total, &err), FL_UNSUPPORTED, &err);
        dev_close(&d);
        return;
    }
    t_ok(gpu->memory(d.g, &before, &total, &err), &err);
    t_refused(gpu->chunk_create(d.g, (total / info.granularity_bytes + 2) * info.granularity_bytes,
                                &c[0], &err),
              FL_EXHAUSTED, &err);
    if (on_host) { /* the whole device, chunk by chunk; what goes back can be had again */
        uint64_t each = total / 8 / info.granularity_bytes * info.granularity_bytes;

        while (n < FL_LEN(c) && gpu->chunk_create(d.g, each, &c[n], &err) == FL_OK)
            n++;
        t_int_eq(n, 8);
        t_int_eq(err.status, FL_EXHAUSTED);
        t_ok(gpu->memory(d.g, &free_bytes, &total, &err), &err);
        t_true(free_bytes < each);
        gpu->chunk_release(d.g, &c[--n]);
        t_ok(gpu->chunk_create(d.g, each, &c[n++], &err), &err);
        while (n > 0)
            gpu->chunk_release(d.g, &c[--n]);
    }
    t_ok(gpu->memory(d.g, &free_bytes, &total, &err), &err);
    t_int_eq(free_bytes, before);
    dev_close(&d);
}

static void words_that_are_no_table_are_refused(void **state)
{
    (void)state;
    static const char *const modes[] = { "bad-word fakes", "bad-word fake:gb10:4",
                                         "bad-word fake:0", "bad-word fake:many",
                                         "bad-word fake:" };

    for (size_t i = 0; i < sizeof(modes) / sizeof(*modes); i++)
        t_int_eq(two_end(two_start(modes[i], &(int){ -1 }), -1), REFUSED << 8);
}

/* ==== two processes ==== */
/* The other process, which has the chunk c that is mapped here at addr and painted. */
struct shown {
    struct dev d;
    struct gpu_chunk c;
    uint64_t addr;
    pid_t pid;
    int sock;
};

static struct shown show_chunk(const char *role)
{
    struct shown s = { .d = dev_open() };
    struct note n = { .bytes = info.granularity_bytes };
    int fd;

    s.pid = two_start(role, &s.sock);
    t_ok(gpu->chunk_create(s.d.g, n.bytes, &s.c, &err), &err);
    mapped(&s.d, &s.c, &s.addr, true);
    paint(&s.d, s.addr, MARK);
    t_ok(gpu->chunk_export(s.d.g, &s.c, &fd, &err), &err);
    two_send(s.sock, &n, sizeof(n), fd);
    close(fd);
    return s;
}

static void a_chunk_is_one_memory_in_two_processes(void **state)
{
    char said;

    (void)state;
    struct shown s = show_chunk("repaint");

    t_int_eq(two_take(s.sock, &said, 1, NULL), 1);
    t_int_eq(said, 'y');
    t_true(painted(&s.d, s.addr, OTHER));
    t_int_eq(two_end(s.pid, s.sock), 0);
    unmapped(&s.d, &s.c, s.addr);
    dev_close(&s.d);
}

static void a_read_only_mapping_refuses_writes(void **state)
{
    char gone;

    (void)state;
    struct shown s = show_chunk("write-read-only");

    t_int_eq(two_take(s.sock, &gone, 1, NULL), 0);
    int how = two_end(s.pid, s.sock);

    if (on_host)
        t_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGSEGV, "ended by %#x", how);
    else
        t_int_eq(how, REFUSED << 8);
    t_true(painted(&s.d, s.addr, MARK));
    unmapped(&s.d, &s.c, s.addr);
    dev_close(&s.d);
}

static void pages_outlive_the_process_that_made_them(void **state)
{
    struct note n;
    struct gpu_chunk c;
    uint64_t addr;
    int sock, fd;

    (void)state;
    struct dev d = dev_open();
    pid_t pid = two_start("give", &sock);
    t_int_eq(two_take(sock, &n, sizeof(n), &fd), sizeof(n));
    t_ok(gpu->chunk_import(d.g, fd, n.bytes, &c, &err), &err);
    close(fd);
    mapped(&d, &c, &addr, false);
    t_int_eq(kill(pid, SIGKILL), 0);
    t_true(WIFSIGNALED(two_end(pid, sock)));
    t_true(painted(&d, addr, MARK));
    unmapped(&d, &c, addr);
    dev_close(&d);
}

static void handles_open_elsewhere_and_not_here(void **state)
{
    struct note n = { 0 };
    uint64_t addr, other;
    int sock;
    char said;

    (void)state;
    struct dev d = dev_open();
    t_ok(gpu->alloc(d.g, 2 * LEN, &addr, &err), &err);
    paint(&d, addr + LEN, MARK);
    if (!info.legacy_ipc) {
        t_refused(gpu->ipc_get(d.g, addr, &n.handle, &n.off, &err), FL_UNSUPPORTED, &err);
    } else {
        pid_t pid = two_start("open-handle", &sock);

        t_ok(gpu->ipc_get(d.g, addr + LEN, &n.handle, &n.off, &err), &err);
        t_true(n.off >= LEN, "inside the allocation");
        t_true(gpu->ipc_open(d.g, &n.handle, &other, &err) != FL_OK, "opened by its own maker");
        two_send(sock, &n, sizeof(n), -1);
        t_int_eq(two_take(sock, &said, 1, NULL), 1);
        t_int_eq(said, 'y');
        t_int_eq(two_end(pid, sock), 0);
    }
    gpu->free(d.g, addr);
    dev_close(&d);
}

static void chunks_have_no_handle(void **state)
{
    struct gpu_handle h;
    struct gpu_chunk c;
    uint64_t addr, off;

    (void)state;
    struct dev d = dev_open();
    t_ok(gpu->chunk_create(d.g, info.granularity_bytes, &c, &err), &err);
    mapped(&d, &c, &addr, true);
    t_refused(gpu->ipc_get(d.g, addr, &h, &off, &err), FL_UNSUPPORTED, &err);
    unmapped(&d, &c, addr);
    dev_close(&d);
}

/* ==== faults ==== */
static enum fl_status everything(struct fl_err *e)
{
    struct gpu_chunk c, again;
    struct gpu_stream *s;
    struct gpu *g;
    uint64_t addr, plain;
    void *pinned;
    int fd;
    enum fl_status st;

    FL_TRY(gpu->open(info.uuid, &g, e));
    st = gpu->stream(g, &s, e);
    if (st != FL_OK)
        goto close;
    st = gpu->chunk_create(g, info.granularity_bytes, &c, e);
    if (st != FL_OK)
        goto stream;
    st = gpu->chunk_export(g, &c, &fd, e);
    if (st != FL_OK)
        goto chunk;
    st = gpu->chunk_import(g, fd, c.bytes, &again, e);
    close(fd);
    if (st != FL_OK)
        goto chunk;
    st = gpu->reserve(g, c.bytes, &addr, e);
    if (st != FL_OK)
        goto imported;
    st = gpu->map(g, addr, &again, true, e);
    if (st == FL_OK)
        st = gpu->pin(g, LEN, &pinned, e);
    if (st == FL_OK) {
        st = gpu->alloc(g, LEN, &plain, e);
        if (st == FL_OK)
            st = gpu->copy(s, plain, addr, LEN, e);
        if (st == FL_OK)
            st = gpu->stream_sync(s, e);
        if (st == FL_OK)
            st = gpu->unmap(g, addr, c.bytes, e);
    }
    gpu->unreserve(g, addr, c.bytes);
imported:
    gpu->chunk_release(g, &again);
chunk:
    gpu->chunk_release(g, &c);
stream:
    gpu->stream_free(s);
close:
    gpu->close(g); /* brings back what is left: the plain and the pinned memory */
    return st;
}

static void every_failure_leaves_nothing_behind(void **state)
{
    enum fl_status st = FL_INTERNAL;
    unsigned nth = 1;

    (void)state;
    int before = t_open_fds();
    for (; st != FL_OK; nth++) {
        err = (struct fl_err){ 0 };
        fl_fault_arm(nth);
        st = everything(&err);
        fl_fault_disarm();
        t_true((st == FL_OK) == (err.text[0] == 0), "nth=%u: %s", nth, err.text);
        t_int_eq(t_open_fds(), before, "nth=%u", nth);
        t_true(nth < 100);
    }
    t_true(nth > 8, "only %u places can fail", nth);
}

/* ==== what a daemon sees ==== */
static void daemons_see_devices_without_opening_them(void **state)
{
    struct gpu_seen seen[GPU_MAX];
    struct gpu_watch *w = NULL;
    size_t n = GPU_MAX;
    bool slowed = true;

    (void)state;
    if (gpu == &gpu_none || gpu == &gpu_host) {
        t_refused(gpu_watch_open(NULL, &w, &err), FL_UNSUPPORTED, &err);
        return;
    }
    t_ok(gpu_watch_open(NULL, &w, &err), &err);
    t_ok(gpu_watch_list(w, seen, &n, &err), &err);
    t_true(n >= 1);
    t_str_eq(seen[0].uuid, info.uuid);
    t_true(seen[0].total_bytes > 0 &&
           (seen[0].total_bytes == UINT64_MAX) == (on_host && info.integrated));
    t_refused(gpu_watch_slowed(w, "GPU-of-nobody", &slowed, &err), FL_NOT_FOUND, &err);
    enum fl_status st = gpu_watch_slowed(w, info.uuid, &slowed, &err);
    t_true(st == FL_OK || (st == FL_UNSUPPORTED && !on_host), "%s", err.text);
    uint64_t used = 0;
    t_int_eq(gpu_watch_used(w, info.uuid, &used, &err) == FL_OK, !on_host && !info.integrated);
    if (!on_host) {
        gpu_watch_close(w);
        return;
    }
    t_true(!slowed);
    t_ok(fl_fault_set("gpu.thermal:2=fail", &err), &err);
    t_ok(gpu_watch_slowed(w, info.uuid, &slowed, &err), &err);
    t_true(!slowed);
    t_ok(gpu_watch_slowed(w, info.uuid, &slowed, &err), &err);
    t_true(slowed, "heat on demand");
    t_ok(gpu_watch_slowed(w, info.uuid, &slowed, &err), &err);
    t_true(!slowed, "and once");
    t_ok(fl_fault_set(NULL, &err), &err);
    gpu_watch_close(w);
}

static const char *script(const char *name, const char *line)
{
    const char *path = t_path(name);
    FILE *f = fopen(path, "we");

    t_true(f != NULL);
    fprintf(f, "#!/bin/sh\n%s\n", line);
    fclose(f);
    t_int_eq(chmod(path, 0700), 0);
    return path;
}

static void the_probe_tries_what_the_driver_says(void **state)
{
    static struct gpu_found found[GPU_MAX];
    size_t n = GPU_MAX;
    const char *probe = getenv("T_PROBE");
    int before = t_open_fds();

    (void)state;
    t_true(probe != NULL);
    t_ok(gpu_probe(probe, 120000, found, &n, &err), &err);
    if (!info.uuid[0]) {
        t_int_eq(n, 0);
    } else {
        t_true(n >= 1);
        t_str_eq(found[0].info.uuid, info.uuid);
        t_true(found[0].opens && found[0].fd_shares, "%s, %s", found[0].opens_not, found[0].fd_not);
        t_true(found[0].handle_shares == info.legacy_ipc, "%s", found[0].handle_not);
        t_true(found[0].handle_shares == (found[0].handle_not[0] == 0));
        n = 0;
        t_refused(gpu_probe(probe, 120000, found, &n, &err), FL_EXHAUSTED, &err);
    }
    n = GPU_MAX;
    t_refused(gpu_probe(t_path("no-such"), 1000, found, &n, &err), FL_NOT_FOUND, &err);
    t_refused(gpu_probe(script("dumb", "echo hello"), 20000, found, &n, &err), FL_INTERNAL, &err);
    t_refused(gpu_probe(script("slow", "exec sleep 60"), 20, found, &n, &err), FL_TIMEOUT, &err);
    t_int_eq(t_open_fds(), before);
}

static void a_probe_that_cannot_share_says_why(void **state)
{
    static struct gpu_found found[GPU_MAX];
    size_t n = GPU_MAX;

    (void)state;
    t_int_eq(setenv("FURLONG_FAULT", "gpu.export:1=fail", 1), 0);
    enum fl_status st = gpu_probe(getenv("T_PROBE"), 20000, found, &n, &err);
    unsetenv("FURLONG_FAULT");
    t_ok(st, &err);
    t_true(found[0].opens && !found[0].fd_shares);
    t_has(found[0].fd_not, "export");
}

/* ==== the second process ==== */
static int second(const char *mode)
{
    struct dev d;
    struct gpu_chunk c;
    struct note n = { 0 };
    uint64_t addr;
    int fd;

    if (strncmp(mode, "bad-word ", 9) == 0) {
        char said[64];

        snprintf(said, sizeof(said), "FURLONG_GPU=%s: cuda, none", mode + 9);
        setenv("FURLONG_GPU", mode + 9, 1);
        return gpu_pick(&gpu, &err) == FL_INVALID && strstr(err.text, said) ? REFUSED : WRONG;
    }
    d = dev_open();
    if (strcmp(mode, "give") == 0) {
        n.bytes = info.granularity_bytes;
        t_ok(gpu->chunk_create(d.g, n.bytes, &c, &err), &err);
        mapped(&d, &c, &addr, true);
        paint(&d, addr, MARK);
        t_ok(gpu->chunk_export(d.g, &c, &fd, &err), &err);
        two_send(TWO_FD, &n, sizeof(n), fd);
        two_take(TWO_FD, &n, sizeof(n), NULL); /* is killed here */
        return WRONG;
    }
    if (two_take(TWO_FD, &n, sizeof(n), &fd) != sizeof(n))
        return WRONG;
    if (strcmp(mode, "open-handle") == 0) {
        t_ok(gpu->ipc_open(d.g, &n.handle, &addr, &err), &err);
        two_send(TWO_FD, painted(&d, addr + n.off, MARK) ? "y" : "n", 1, -1);
        gpu->ipc_close(d.g, addr);
        dev_close(&d);
        return 0;
    }
    t_ok(gpu->chunk_import(d.g, fd, n.bytes, &c, &err), &err);
    close(fd);
    mapped(&d, &c, &addr, strcmp(mode, "repaint") == 0);
    if (strcmp(mode, "write-read-only") == 0) {
        if (!painted(&d, addr, MARK))
            return WRONG;
        signal(SIGSEGV, SIG_DFL); /* a sanitizer would make a report of it */
        enum fl_status st = gpu->fill(d.s, addr, OTHER, LEN, &err);
        return st != FL_OK || gpu->stream_sync(d.s, &err) != FL_OK ? REFUSED : WRONG;
    }
    bool right = painted(&d, addr, MARK);
    paint(&d, addr, OTHER);
    two_send(TWO_FD, right ? "y" : "n", 1, -1);
    unmapped(&d, &c, addr);
    dev_close(&d);
    return 0;
}

/* What the program can reach there by itself: the kernel looks at the same rights. */
static bool closed_to_us(uint64_t addr)
{
    int ends[2];

    t_int_eq(pipe(ends), 0);
    ssize_t n = write(ends[1], (const void *)(uintptr_t)addr, 1);
    bool fault = n < 0 && errno == EFAULT;

    close(ends[0]);
    close(ends[1]);
    t_true(fault || n == 1);
    return fault;
}

/* As a real device's, where a test asks for it: what is forgotten in the table's functions is seen
 * here. */
static void a_guarded_fake_is_closed_to_the_program(void **state)
{
    struct gpu_chunk c;
    uint64_t plain, open, addr;

    (void)state;
    struct dev d = dev_open();
    t_ok(gpu->alloc(d.g, LEN, &open, &err), &err);
    t_true(!closed_to_us(open), "without a guard it is ordinary memory");
    t_int_eq(setenv("FURLONG_GPU_FAKE_GUARD", "1", 1), 0);
    t_ok(gpu->alloc(d.g, LEN, &plain, &err), &err);
    t_ok(gpu->chunk_create(d.g, info.granularity_bytes, &c, &err), &err);
    mapped(&d, &c, &addr, true);
    t_true(closed_to_us(plain) && closed_to_us(addr));
    paint(&d, plain, MARK);
    t_ok(gpu->copy(d.s, addr, plain, LEN, &err), &err);
    t_true(painted(&d, addr, MARK), "the table reaches it");
    t_true(closed_to_us(plain) && closed_to_us(addr), "and leaves it closed");
    t_int_eq(unsetenv("FURLONG_GPU_FAKE_GUARD"), 0);
    unmapped(&d, &c, addr);
    gpu->free(d.g, plain);
    gpu->free(d.g, open);
    dev_close(&d);
}

int main(int argc, char **argv)
{
    enum {
        NONE = 1,
        HOST = 2,
        FAKE = 4,
        CUDA = 8,
        DEVICE = HOST | FAKE | CUDA,
        EVERY = NONE | DEVICE
    };
    static const struct {
        struct CMUnitTest test;
        unsigned where;
    } all_tests[] = {
        { cmocka_unit_test(devices_have_names), EVERY },
        { cmocka_unit_test(addresses_stay_while_chunks_come_and_go), DEVICE },
        { cmocka_unit_test(a_chunk_lives_on_while_it_is_mapped), DEVICE },
        { cmocka_unit_test(streams_are_ordered_by_events), DEVICE },
        { cmocka_unit_test(memory_that_is_not_there_is_refused), DEVICE },
        { cmocka_unit_test(words_that_are_no_table_are_refused), EVERY },
        { cmocka_unit_test(a_chunk_is_one_memory_in_two_processes), DEVICE },
        { cmocka_unit_test(a_read_only_mapping_refuses_writes), DEVICE },
        { cmocka_unit_test(pages_outlive_the_process_that_made_them), DEVICE },
        { cmocka_unit_test(handles_open_elsewhere_and_not_here), DEVICE },
        { cmocka_unit_test(chunks_have_no_handle), DEVICE },
        { cmocka_unit_test(every_failure_leaves_nothing_behind), HOST | FAKE },
        { cmocka_unit_test(daemons_see_devices_without_opening_them), EVERY },
        { cmocka_unit_test(the_probe_tries_what_the_driver_says), EVERY },
        { cmocka_unit_test(a_probe_that_cannot_share_says_why), HOST | FAKE },
        { cmocka_unit_test(a_guarded_fake_is_closed_to_the_program), FAKE },
    };
    struct CMUnitTest tests[FL_LEN(all_tests)];
    size_t n_tests = 0;
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;
    bool is_second = argc == 3 && strcmp(argv[1], "--second") == 0;

    if (is_second && strncmp(argv[2], "bad-word ", 9) == 0)
        return second(argv[2]);
    if (gpu_pick(&gpu, &err) != FL_OK || (gpu->list(all, &n, &err) != FL_OK && gpu != &gpu_cuda)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    if (gpu == &gpu_cuda && (err.status != FL_OK || n == 0)) { /* asked for, and there is none */
        printf("1..0 # SKIP %s\n", err.status != FL_OK ? err.text : "no CUDA device");
        return 0;
    }
    if (n > 0)
        info = all[0];
    on_host = gpu == &gpu_fake || gpu == &gpu_host;
    if (is_second)
        return second(argv[2]);
    unsigned here = gpu == &gpu_none   ? NONE
                    : gpu == &gpu_host ? HOST
                    : gpu == &gpu_fake ? FAKE
                                       : CUDA;
    for (size_t i = 0; i < FL_LEN(all_tests); i++)
        if (all_tests[i].where & here)
            tests[n_tests++] = all_tests[i].test;
        else
            printf("# SKIP %s: not of table %s\n", all_tests[i].test.name, gpu->name);
    return t_run_("gpu", tests, n_tests);
}
