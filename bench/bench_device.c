/* bench_device - weights from a trainer's device memory to an engine's, against the plainest copy
 *
 *     bench_device [--tiny|--small|--big] [--rounds N]
 *         --small: 1.19 GB alone; --big: 16.4 GB too
 *
 * Two processes: this one holds the slot, the other pulls it or takes part in the broadcast. On one
 * device, and on two where there are two. Every line carries the limit of the same run: one plain
 * copy of all bytes (device or peer), or one NCCL message of all bytes. ms: median of the rounds
 * after 3; max beside it; cold: the first. Digests are on; bytes are compared at the end.
 * JSON lines, then a table. Exit 1: bytes or digests were wrong. */
#include <errno.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench/device_side.h"
#include "common/base/str.h"

enum { LINES_MAX = 64 };
extern char **environ;
static struct fl_err err;
static unsigned rounds = 20;

/* ==== what is printed ========================================================================= */
struct line {
    char name[96];
    uint64_t bytes;
    struct times t;
    double limit;
    const char *limit_is;
};
static struct line lines[LINES_MAX];
static unsigned n_lines;

static void note(const char *name, const struct shape *s, const struct times *t, double limit,
                 const char *limit_is)
{
    struct line *l = &lines[n_lines < LINES_MAX ? n_lines++ : LINES_MAX - 1];

    snprintf(l->name, sizeof(l->name), "%s %s", s->name, name);
    l->bytes = me.y.payload;
    l->t = *t;
    l->limit = limit;
    l->limit_is = limit_is;
    printf("{\"name\":\"%s\",\"bytes\":%llu,\"ms\":%.4f,\"max_ms\":%.4f,\"cold_ms\":%.4f,"
           "\"device_ms\":%.4f,\"limit\":\"%s\",\"limit_ms\":%.4f,\"ratio\":%.3f,"
           "\"device_ratio\":%.3f,\"right\":%s}\n",
           l->name, (unsigned long long)l->bytes, t->median, t->max, t->cold, t->device, limit_is,
           limit, t->median / limit, t->device / limit, t->right ? "true" : "false");
    fflush(stdout);
}

/* ==== the other process ======================================================================= */
struct kid {
    int fd;
    pid_t pid;
    char uuid[GPU_UUID_BYTES];
};

static struct kid kid_new(const char *self, const char *uuid)
{
    char *argv[] = { (char *)(uintptr_t)self, "--child", (char *)(uintptr_t)uuid, NULL };
    posix_spawn_file_actions_t files;
    struct kid k = { 0 };
    int ends[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        die("socket pair", NULL);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, ends[1], CHILD_FD);
    if (posix_spawn(&k.pid, "/proc/self/exe", &files, NULL, argv, environ) != 0)
        die("the other process", NULL);
    posix_spawn_file_actions_destroy(&files);
    close(ends[1]);
    k.fd = ends[0];
    (void)FL_COPY(k.uuid, uuid);
    return k;
}

static void kid_end(struct kid *k)
{
    struct order o = { .what = DO_END };

    tell(k->fd, &o);
    close(k->fd);
    while (waitpid(k->pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

static struct answer ask(struct kid *k, struct order *o)
{
    struct answer a;

    tell(k->fd, o);
    read_all(k->fd, &a, sizeof(a));
    return a;
}

/* ==== figures ================================================================================= */
/* Device time of one copy of all bytes into to, by events. */
static struct times plain_copy(uint64_t to, bool kernel, const struct dev_table *table)
{
    struct laps laps = { 0 };
    struct gpu_event *a, *b;
    struct times t;
    float ms;

    must(me.gpu->event(me.dev->g, &a, &err));
    must(me.gpu->event(me.dev->g, &b, &err));
    for (int i = -WARM; i < (int)rounds; i++) {
        struct kernel_move_args m = { .pieces = table ? table->addr : 0,
                                      .n = table ? table->n : 0,
                                      .from = dev_addr(me.slot.addr),
                                      .to = to };

        must(me.gpu->event_record(a, me.dev->stream, &err));
        if (kernel)
            must(kernel_move_start(me.gpu, me.dev->g, me.dev->stream, &m, &err));
        else
            must(me.gpu->copy(me.dev->stream, to, dev_addr(me.slot.addr), me.y.bytes, &err));
        must(me.gpu->event_record(b, me.dev->stream, &err));
        must(me.gpu->event_sync(b, &err));
        must(me.gpu->event_ms(a, b, &ms, &err));
        lap(&laps, i, (double)ms);
    }
    t = laps_times(&laps, rounds);
    t.device = t.median;
    me.gpu->event_free(a);
    me.gpu->event_free(b);
    return t;
}

/* Peer copy: the target lies on the other device, as this process sees it. */
static double peer_limit(const struct shape *s, const char *uuid, bool same)
{
    struct link_dev *other;
    uint64_t to;
    struct dev_table table;
    struct times t;
    double limit;

    must(link_dev_get(uuid, &other, &err));
    if (!same)
        must(me.gpu->peer(me.dev->g, other->g, &err));
    must(me.gpu->alloc(other->g, me.y.bytes, &to, &err));
    t = plain_copy(to, false, NULL);
    limit = t.median;
    note(same ? "plain device copy" : "plain peer copy", s, &t, limit, "itself");
    must(dev_table_make(me.dev, me.dev->stream, me.y.segs, me.y.n_segs, DEV_MOVE, &table, &err));
    if (same) {
        t = plain_copy(to, true, &table);
        note("one kernel, no digests", s, &t, limit, "plain copy");
        limit = t.median;
    }
    dev_table_free(me.dev, &table);
    me.gpu->free(other->g, to);
    return limit;
}

static void check(struct answer *a)
{
    uint64_t want[2];

    digest_slot(true, want);
    a->t.right &= memcmp(want, a->sum, sizeof(want)) == 0;
}

static void share_to(struct kid *k, const struct link_mem *mem, struct order *o, double *map_ms)
{
    o->what = DO_MAP;
    o->key = (struct link_key){ 0 };
    *map_ms = 0;
    do {
        must(link_cuda_ipc.share(me.ipc, mem, &o->key, &err));
        *map_ms += ask(k, o).open_ms;
    } while (++o->key.part < o->key.parts);
    o->key.n_fds = 0;
}

static void pulls(struct kid *k, const struct shape *s, struct order *o, double limit,
                  const char *what, bool same)
{
    char name[64];
    struct answer a;

    o->what = DO_PULL;
    o->rounds = rounds;
    a = ask(k, o);
    check(&a);
    snprintf(name, sizeof(name), "pull by %s, digests", what);
    note(name, s, &a.t, limit, same ? "one kernel" : "plain peer copy");
    o->what = DO_UNMAP;
    (void)ask(k, o);
}

static void handle_each(struct kid *k, const struct shape *s, struct order *o, double limit)
{
    struct piece *all = calloc(SHAPES_MAX, sizeof(*all));
    uint64_t size[SHAPES_MAX], addr[SHAPES_MAX];
    unsigned n = (unsigned)shape_tensors(s, size);

    for (unsigned i = 0; i < n; i++) {
        must(me.gpu->alloc(me.dev->g, size[i], &addr[i], &err));
        all[i].bytes = size[i];
        must(me.gpu->ipc_get(me.dev->g, addr[i], &all[i].h, &all[i].off, &err));
    }
    o->what = DO_HANDLES;
    o->rounds = rounds < 8 ? rounds : 8;
    o->n_handles = n;
    tell(k->fd, o);
    if (send(k->fd, all, n * sizeof(*all), MSG_NOSIGNAL) != (ssize_t)(n * sizeof(*all)))
        die("the other process", NULL);
    struct answer a;

    read_all(k->fd, &a, sizeof(a));
    note("a handle per tensor, opened each time", s, &a.t, limit, "plain copy");
    for (unsigned i = 0; i < n; i++)
        me.gpu->free(me.dev->g, addr[i]);
    free(all);
}

static void casts(struct kid *k, const struct shape *s, struct order *o)
{
    struct link_team team;
    struct answer a;
    struct times t;

    me.both[0] = me.place;
    me.both[1] = o->place;
    struct order n = *o;
    double limit = 0;

    n.place = me.place;
    n.rounds = rounds;
    for (int each = 0; each < 2; each++) {
        must(link_nccl.ticket(n.ticket, &err));
        n.what = each ? DO_RAW_EACH : DO_RAW;
        tell(k->fd, &n);
        t = raw_nccl(n.ticket, 0, each ? s : NULL, rounds);
        read_all(k->fd, &a, sizeof(a));
        if (!each)
            limit = a.t.median > t.median ? a.t.median : t.median;
        note(each ? "NCCL, a broadcast per tensor" : "NCCL, one message", s, &a.t, limit,
             each ? "NCCL, one message" : "itself");
    }
    must(link_nccl.ticket(n.ticket, &err));
    n.what = DO_NCCL;
    tell(k->fd, &n);
    team_of(&n, 0, &team);
    double open_ms = open_link(&link_nccl, &team, &me.nccl);

    read_all(k->fd, &a, sizeof(a));
    n.what = DO_CAST;
    tell(k->fd, &n);
    me.casts = true;
    (void)updates(rounds);
    me.casts = false;
    read_all(k->fd, &a, sizeof(a));
    check(&a);
    note("broadcast by NCCL, digests", s, &a.t, limit, "NCCL, one message");
    printf("{\"name\":\"%s communicator\",\"open_ms\":%.1f}\n", s->name, open_ms);
    link_nccl.close(FL_TAKE(me.nccl));
}

/* Random, and no two stretches of 32 MiB alike. */
static void slot_fill(void)
{
    enum { PART = 32 << 20 };
    uint64_t *part = malloc(PART), x = 88172645463325252ull;

    for (size_t i = 0; i < PART / 8; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        part[i] = x;
    }
    for (uint64_t at = 0; at < me.slot.bytes; at += PART) {
        part[at / PART % 1000] ^= at + 1;
        must(link_mem_write(&me.slot, at, part,
                            me.slot.bytes - at < PART ? me.slot.bytes - at : PART, &err));
    }
    free(part);
}

static void run_to(const char *self, const struct shape *s, const struct link_place *to, bool same)
{
    struct kid k = kid_new(self, to->gpu_uuid);
    struct order o = { .what = DO_SLOT, .shape = *s, .place = *to };
    struct answer a = ask(&k, &o);
    struct link_mem plain = { 0 };
    double limit, map_ms;
    uint64_t addr;

    printf("{\"name\":\"%s link opened\",\"ms\":%.1f}\n", s->name, a.open_ms);
    limit = peer_limit(s, to->gpu_uuid, same);
    share_to(&k, &me.slot, &o, &map_ms);
    printf("{\"name\":\"%s slot mapped\",\"chunks\":%u,\"ms\":%.3f}\n", s->name,
           link_pages_of(&me.slot)->n_chunks, map_ms);
    pulls(&k, s, &o, limit, "mapped chunks", same);
    if (me.place.legacy_ipc && me.gpu->alloc(me.dev->g, me.y.bytes, &addr, NULL) == FL_OK) {
        must(me.gpu->copy(me.dev->stream, addr, dev_addr(me.slot.addr), me.y.bytes, &err));
        must(me.gpu->stream_sync(me.dev->stream, &err));
        must(link_dev_foreign(me.place.gpu_uuid, addr, me.y.bytes, &plain, &err));
        share_to(&k, &plain, &o, &map_ms);
        pulls(&k, s, &o, limit, "one handle", same);
        link_dev_free(&plain);
        me.gpu->free(me.dev->g, addr);
    }
    if (me.place.legacy_ipc)
        handle_each(&k, s, &o, limit);
    if (!same && me.place.nccl_version)
        casts(&k, s, &o);
    kid_end(&k);
}

static void table(void)
{
    printf("\n%-48s %9s %9s %9s %9s  %6s %6s\n", "", "ms", "max", "cold", "device", "x", "GB/s");
    for (unsigned i = 0; i < n_lines; i++) {
        const struct line *l = &lines[i];

        printf("%-48s %9.3f %9.3f %9.3f %9.3f  %6.3f %6.0f%s\n", l->name, l->t.median, l->t.max,
               l->t.cold, l->t.device, l->t.median / l->limit, (double)l->bytes / l->t.median / 1e6,
               l->t.right ? "" : "  WRONG");
    }
}

static void places_of(const struct gpu_info *all, size_t n, struct link_place *out)
{
    struct gpu_found *found = calloc(n, sizeof(*found));

    for (size_t i = 0; i < n; i++)
        found[i] = (struct gpu_found){ .info = all[i],
                                       .opens = true,
                                       .fd_shares = all[i].posix_fd,
                                       .handle_shares = all[i].legacy_ipc,
                                       .peers = ~0ull };
    for (size_t i = 0; i < n; i++) {
        must(link_place_here(NULL, &out[i], &err));
        must(link_place_device(&out[i], all[i].uuid, found, n, &err));
    }
    free(found);
}

int main(int argc, char **argv)
{
    const struct shape *shapes[2] = { &shape_06, NULL };
    struct gpu_info all[GPU_MAX];
    struct link_place places[GPU_MAX];
    size_t n = GPU_MAX;

    if (argc == 3 && strcmp(argv[1], "--child") == 0)
        return child(argv[2]);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--big") == 0)
            shapes[1] = &shape_8;
        else if (strcmp(argv[i], "--tiny") == 0)
            shapes[0] = &shape_tiny;
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            rounds = (unsigned)atoi(argv[++i]);
    }
    rounds = rounds < 1 || rounds > ROUNDS_MAX ? 20 : rounds;
    must(gpu_pick(&me.gpu, &err));
    must(me.gpu->list(all, &n, &err));
    if (n == 0) {
        puts("{\"name\":\"bench_device\",\"skipped\":\"no device\"}");
        return 0;
    }
    places_of(all, n, places);
    side_open(all[0].uuid);
    me.place = places[0];
    struct link_team alone = { .members = &me.place, .n = 1 };

    (void)open_link(&link_cuda_ipc, &alone, &me.ipc);
    for (unsigned i = 0; i < 2 && shapes[i]; i++) {
        slot_new(shapes[i]);
        slot_fill();
        run_to(argv[0], shapes[i], &places[0], true);
        if (n > 1)
            run_to(argv[0], shapes[i], &places[1], false);
    }
    table();
    bool right = true;

    for (unsigned i = 0; i < n_lines; i++)
        right &= lines[i].t.right;
    return right ? 0 : 1;
}
