#include "bench/plane_driver.h"
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench/must.h"
#include "common/base/id.h"
#include "common/base/str.h"

enum { LOOK_NS = 1000000 }; /* for the dead, so often at most */
extern char **environ;
struct plane plane_d;
static struct plane *const d = &plane_d;
static struct plane_opts opts;
static struct fl_err err;
static char folder[64];

/* ---- processes ---- */

/* Its end of the orders; what it is told first, until it is ready. */
static int spawn(const char *role, const void *first, size_t n, pid_t *pid)
{
    char *argv[] = { "bench_plane", (char *)(uintptr_t)role, NULL }, ready;
    posix_spawn_file_actions_t files;
    int ends[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        die("a socket pair", NULL);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, ends[1], PLANE_FD);
    if (posix_spawn(pid, "/proc/self/exe", &files, NULL, argv, environ) != 0)
        die(role, NULL);
    posix_spawn_file_actions_destroy(&files);
    close(ends[1]);
    if (write(ends[0], first, n) != (ssize_t)n || read(ends[0], &ready, 1) != 1)
        die(role, &(struct fl_err){ .text = "it does not start" });
    return ends[0];
}

static void end_process(pid_t *pid, int *fd)
{
    if (*pid <= 0)
        return;
    (void)kill(*pid, SIGKILL); /* ours, and not waited for yet */
    while (waitpid(*pid, NULL, 0) < 0 && errno == EINTR)
        ;
    close(*fd);
    *pid = 0;
    *fd = -1;
}

static void reach(struct plane_kid *k)
{
    struct stream_to st = { .target = k->seat.me.where, .again = true };
    struct wire_hello me = { .role = "worker" };
    struct stream *s;

    must(stream_connect(d->loop, &stream_sock, &st, &me, NULL, NULL, &s, &err));
    must(call_peer_create(s, NULL, 0, NULL, NULL, &k->peer, &err));
}

/* ---- seats ---- */

static void seat_of(struct plane_kid *k, const char *role, unsigned i)
{
    struct seat *s = &k->seat;
    bool trains = strcmp(role, "trainer") == 0;
    char host[32] = "";

    (void)gethostname(host, sizeof(host) - 1);
    s->shape = *opts.shape;
    s->place = trains ? *opts.trainer : *opts.engines;
    s->other = *opts.engines;
    s->fixed = opts.fixed && !trains;
    s->first_version = d->version + 1;
    s->me.who.id.b[0] = trains ? 1 : 2;
    s->me.who.id.b[1] = (uint8_t)i;
    s->me.who.attempt++;
    s->me.party = i;
    snprintf(s->me.name, sizeof(s->me.name), "%s %u on %.31s", role, i, host);
    snprintf(s->at, sizeof(s->at), "unix:%s/%s-%u", folder, role, i);
    memcpy(s->me.where, s->at, sizeof(s->at));
    s->via[0] = 0;
}

static const char *path_of(const char *target)
{
    return target + strlen("unix:");
}

/* In front of an engine, both ways. */
static void relay_for(struct plane_kid *k)
{
    struct relay r = { 0 };

    snprintf(k->seat.me.where, sizeof(k->seat.me.where), "%s-relay", k->seat.at);
    snprintf(k->seat.via, sizeof(k->seat.via), "%.80s-out", k->seat.at);
    memcpy(r.at[0], path_of(k->seat.me.where), strlen(path_of(k->seat.me.where)));
    memcpy(r.to[0], path_of(k->seat.at), strlen(path_of(k->seat.at)));
    memcpy(r.at[1], path_of(k->seat.via), strlen(path_of(k->seat.via)));
    memcpy(r.to[1], path_of(d->trainer.seat.at), strlen(path_of(d->trainer.seat.at)));
    k->relay_fd = spawn("--relay", &r, sizeof(r), &k->relay);
}

void plane_add_trainer(void)
{
    struct plane_kid *k = &d->trainer;

    seat_of(k, "trainer", 0);
    k->fd = spawn("--trainer", &k->seat, sizeof(k->seat), &k->pid);
    if (recv(k->fd, &d->limit_ms, sizeof(d->limit_ms), MSG_WAITALL) != (ssize_t)sizeof(d->limit_ms))
        die(k->seat.me.name, &(struct fl_err){ .text = "it names no limit" });
    reach(k);
    must(xfer_coord_add_source(d->coord, k->peer, &k->seat.me, &err));
}

void plane_add_engine(unsigned i)
{
    struct plane_kid *k = &d->engines[i];

    seat_of(k, "rollout", i);
    if (opts.relays)
        relay_for(k);
    k->fd = spawn("--engine", &k->seat, sizeof(k->seat), &k->pid);
    reach(k);
    must(xfer_coord_add_engine(d->coord, k->peer, &k->seat.me, &err));
}

void plane_gone(struct plane_kid *k, const char *how)
{
    struct fl_err why = { 0 };

    end_process(&k->pid, &k->fd);
    end_process(&k->relay, &k->relay_fd);
    fl_fail(&why, FL_UNREACHABLE, "%s", how);
    xfer_coord_gone(d->coord, k->seat.me.who, &why);
    call_peer_destroy(FL_TAKE(k->peer));
}

void plane_start(const struct plane_opts *o)
{
    struct xfer_coord_opts co = { .set = "policy", .attempt = 1, .bucket_bytes = o->bucket_bytes };

    if (!folder[0]) {
        snprintf(folder, sizeof(folder), "/tmp/bench-plane-XXXXXX");
        if (!mkdtemp(folder))
            die(folder, NULL);
    }
    opts = *o;
    *d = (struct plane){ .n_engines = o->n_engines };
    must(fl_loop_create(NULL, &d->loop, &err));
    must(xfer_coord_create(d->loop, &co, &d->coord, &err));
    plane_add_trainer();
    for (unsigned i = 0; i < o->n_engines; i++)
        plane_add_engine(i);
}

void plane_stop(void)
{
    xfer_coord_destroy(FL_TAKE(d->coord));
    for (unsigned i = 0; i <= d->n_engines; i++) {
        struct plane_kid *k = i < d->n_engines ? &d->engines[i] : &d->trainer;

        call_peer_destroy(FL_TAKE(k->peer));
        end_process(&k->pid, &k->fd);
        end_process(&k->relay, &k->relay_fd);
    }
    fl_loop_destroy(FL_TAKE(d->loop));
}

void plane_clean(void)
{
    DIR *dir = folder[0] ? opendir(folder) : NULL;
    char path[400];

    for (struct dirent *e; dir && (e = readdir(dir));) {
        snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
        (void)unlink(path);
    }
    if (dir)
        closedir(dir);
    (void)rmdir(folder);
}

/* ---- orders ---- */

void plane_order(struct plane_kid *k, char what)
{
    if (send(k->fd, &what, 1, MSG_NOSIGNAL) == 1)
        return;
    die(k->seat.me.name, &(struct fl_err){ .text = "it takes no orders" });
}

static void answer(struct plane_kid *k, void *out, size_t n)
{
    if (recv(k->fd, out, n, MSG_WAITALL) == (ssize_t)n)
        return;
    fprintf(stderr, "bench_plane: %s does not answer\n", k->seat.me.name);
    exit(1);
}

void plane_look(struct plane_kid *k, struct plane_seen *out)
{
    plane_order(k, PLANE_LOOK);
    answer(k, out, sizeof(*out));
}

void plane_fault(struct plane_kid *k, const char *spec)
{
    char text[PLANE_SPEC] = "", done;

    if (!fl_copy(text, sizeof(text), spec))
        exit(1);
    plane_order(k, PLANE_FAULT);
    if (send(k->fd, text, sizeof(text), MSG_NOSIGNAL) != (ssize_t)sizeof(text))
        exit(1);
    answer(k, &done, 1);
}

void plane_next_version(void)
{
    unsigned char st = 255;

    plane_order(&d->trainer, PLANE_NEXT);
    while (recv(d->trainer.fd, &st, 1, MSG_DONTWAIT) <
           0) /* begin asks the driver: the loop must turn */
        fl_loop_turn(d->loop, 1);
    if (st != FL_OK) {
        fprintf(stderr, "bench_plane: the trainer has not published: status %u\n", st);
        exit(1);
    }
    d->version++;
}

void plane_rest(unsigned ms)
{
    uint64_t until = fl_clock_boot_ns() + ms * 1000000ull, now;

    while ((now = fl_clock_boot_ns()) < until)
        fl_loop_turn(d->loop, (int)((until - now + 999999) / 1000000));
}

/* ---- updates ---- */

static void on_run(struct xfer_run *r, enum fl_status st, const struct xfer_report *rep,
                   const struct fl_err *e)
{
    (void)r;
    d->running = false;
    d->st = st;
    d->rep = *rep;
    d->why = *e;
}

/* As keepers notice it. */
static void bury_the_dead(void)
{
    for (unsigned i = 0; i <= d->n_engines; i++) {
        struct plane_kid *k = i < d->n_engines ? &d->engines[i] : &d->trainer;
        siginfo_t si = { 0 };

        if (k->pid > 0 && waitid(P_PID, (id_t)k->pid, &si, WEXITED | WNOHANG | WNOWAIT) == 0 &&
            si.si_pid)
            plane_gone(k, "killed by signal 9");
    }
}

enum fl_status plane_update(const struct plane_ask *a)
{
    struct xfer_request q = { .kind = a->kind,
                              .target = { .number = a->kind == XFER_ADVANCE ? d->version : 0 },
                              .mode = a->mode,
                              .slots = a->slots,
                              .party = XFER_ALL_PARTIES,
                              .least_engines = a->least_engines,
                              .due_ns = fl_clock_boot_ns() + a->due_ms * 1000000ull };
    static struct xfer_run run = { .done = on_run };
    uint64_t look_ns = 0, now;

    fl_loop_turn(d->loop, 0);
    d->running = true;
    must(xfer_start(d->coord, &q, &run, &err));
    while (d->running) {
        fl_loop_turn(d->loop, 1);
        if (d->each_turn)
            d->each_turn();
        now = fl_clock_boot_ns();
        if (now < look_ns)
            continue;
        look_ns = now + LOOK_NS; /* a loop that does not sleep is not held up each turn */
        bury_the_dead();
    }
    return d->st;
}

unsigned plane_roots_differ(const char *when)
{
    unsigned differ = 0;

    for (unsigned i = 0; i < d->n_engines; i++) {
        struct plane_seen e;

        plane_look(&d->engines[i], &e);
        if (e.addr && xfer_version_same(&e.version, &d->rep.now) &&
            memcmp(e.root, d->rep.now.digest, sizeof(e.root)) == 0)
            continue;
        differ++;
        printf("# NOT SO: %s: %s says version %" PRIu64 ", digest %016" PRIx64
               ", its memory %016" PRIx64 "; the trainer version %" PRIu64 ", %016" PRIx64 " %s\n",
               when, d->engines[i].seat.me.name, e.version.number, e.version.digest[0], e.root[0],
               d->rep.now.number, d->rep.now.digest[0], e.says);
    }
    return differ;
}
