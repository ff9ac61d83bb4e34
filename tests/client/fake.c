#include "tests/client/fake_priv.h"

#include <poll.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/pidfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/str.h"
#include "common/proto/methods.h"
#include "tests/client/seats.h"
#include "tests/t.h"

extern char **environ;

void changed(struct fake *f)
{
    pthread_cond_broadcast(&f->changed);
}

struct worker *find(struct fake *f, const char *role, uint32_t rank)
{
    for (unsigned i = 0; i < f->n_workers; i++)
        if (f->workers[i].rank == rank && strcmp(f->workers[i].role, role) == 0)
            return &f->workers[i];
    return NULL;
}

static void worker_id(const struct worker *w, uint8_t id[28])
{
    memset(id, 0, 28);
    snprintf((char *)id, 28, "%.20s-%u", w->role, w->rank);
}

static void worker_again(struct fl_timer *t, uint64_t now_ns)
{
    struct worker *w = container_of(t, struct worker, again);

    (void)now_ns;
    fake_worker_spawn(w);
}

struct worker *worker_of(struct fake *f, const char *role, uint32_t rank, uint32_t world)
{
    struct worker *w = find(f, role, rank);

    if (w)
        return w;
    t_true(f->n_workers < WORKERS);
    w = &f->workers[f->n_workers++];
    *w = (struct worker){
        .f = f, .rank = rank, .world = world, .pidfd = -1, .again.fire = worker_again
    };
    (void)FL_COPY(w->role, role);
    snprintf(w->name, sizeof(w->name), "%.16s-%u", role, rank);
    return w;
}

/* ---- members -------------------------------------------------------------------------------- */
void fake_where_fill(const struct worker *w, struct where_pb *p)
{
    static char boot[37];

    if (!*boot) {
        FILE *in = fopen("/proc/sys/kernel/random/boot_id", "re");

        t_true(in && fgets(boot, sizeof(boot), in));
        fclose(in);
    }
    fl__where__init(&p->w);
    fl__seat_ref__init(&p->who);
    worker_id(w, p->id);
    p->who.worker = (ProtobufCBinaryData){ 28, p->id };
    p->who.attempt = w->attempt;
    p->w.who = &p->who;
    p->w.role = (char *)(uintptr_t)w->role;
    p->w.rank = w->rank;
    p->w.state = w->state;
    p->w.node = "gpu-a";
    p->w.boot_id = w->f->far ? (char *)(uintptr_t) "another machine" : boot;
    p->w.tcp = (char *)(uintptr_t)w->tcp;
    p->w.unix_path = (char *)(uintptr_t)w->unix_path;
    p->w.why = (char *)(uintptr_t)w->why;
}

size_t fake_members_pack(struct fake *f, const char *role, uint8_t **out)
{
    static struct where_pb parts[WORKERS];
    Fl__Where *list[WORKERS];
    Fl__Members m = FL__MEMBERS__INIT;
    size_t n = 0, len;

    for (unsigned i = 0; i < f->n_workers; i++) {
        if (role && strcmp(f->workers[i].role, role) != 0)
            continue;
        fake_where_fill(&f->workers[i], &parts[n]);
        list[n] = &parts[n].w;
        n++;
    }
    m.n_members = n;
    m.members = list;
    len = fl__members__get_packed_size(&m);
    *out = malloc(len + 1);
    return fl__members__pack(&m, *out);
}

void tell_driver(struct fake *f)
{
    struct worker *d = find(f, "driver", 0);
    uint8_t *body;
    size_t len;

    if (!d || !d->guest || !f->listed)
        return;
    len = fake_members_pack(f, NULL, &body);
    (void)call_event(d->guest->call, FL_EV_MEMBERS, 0, (struct fl_bytes){ body, len }, NULL);
    free(body);
}

/* ---- programs ------------------------------------------------------------------------------- */
int worker_seat(struct worker *w)
{
    struct seat_words s = { .role = w->role,
                            .rank = w->rank,
                            .world = w->world,
                            .attempt = w->attempt,
                            .daemon_sock = w->f->sock,
                            .peer_sock = w->sock,
                            .run_dir = w->dir };

    snprintf(w->dir, sizeof(w->dir), "%s/%u-%s.%u", t_tmp(), w->f->number, w->name, w->attempt);
    mkdir(w->dir, 0700);
    snprintf(w->sock, sizeof(w->sock), "%s/p", w->dir);
    worker_id(w, s.worker);
    memcpy(s.key, w->f->key, sizeof(s.key));
    w->known = true;
    w->state = FURLONG_STARTING;
    return seat_fd(&s);
}

static void worker_over(struct worker *w)
{
    if (w->restarts_left) {
        w->restarts_left--;
        w->attempt++;
        w->state = FURLONG_STARTING;
        fl_timer_arm_in(w->f->loop, &w->again, w->backoff_ms);
        w->backoff_ms *= 2;
    } else {
        w->state = FURLONG_ENDED;
    }
    tell_driver(w->f);
}

static void worker_exited(void *arg, unsigned events)
{
    struct worker *w = arg;
    siginfo_t info = { 0 };

    (void)events;
    if (waitid(P_PID, (id_t)w->pid, &info, WEXITED | WNOHANG) < 0 || info.si_pid != w->pid)
        return;
    fl_watch_destroy(w->watch);
    close(w->pidfd);
    w->watch = NULL;
    w->pidfd = -1;
    w->pid = 0;
    snprintf(w->why, sizeof(w->why), info.si_code == CLD_EXITED ? "exit code %d" : "signal %d",
             info.si_status);
    pthread_mutex_lock(&w->f->mu);
    w->f->n_running--;
    changed(w->f);
    pthread_mutex_unlock(&w->f->mu);
    worker_over(w);
}

void fake_worker_spawn(struct worker *w)
{
    posix_spawn_file_actions_t fa;
    char number[32];
    int fd = worker_seat(w);
    size_t n = 0;
    char *env[256];

    snprintf(number, sizeof(number), "FURLONG_SEAT_FD=%d", 100);
    for (char **e = environ; *e && n < 200; e++)
        env[n++] = *e;
    for (char **e = w->env; e && *e; e++)
        env[n++] = *e;
    env[n++] = number;
    env[n++] = "FURLONG_DAEMON_AWAY_MS=5000"; /* nothing outlives a test that died */
    env[n] = NULL;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, fd, 100);
    t_true(posix_spawn(&w->pid, w->argv[0], &fa, NULL, w->argv, env) == 0);
    posix_spawn_file_actions_destroy(&fa);
    close(fd);
    w->pidfd = pidfd_open(w->pid, 0);
    t_true(w->pidfd >= 0);
    t_true(fl_watch_create(w->f->loop, w->pidfd, POLLIN, worker_exited, w, &w->watch, NULL) ==
           FL_OK);
    pthread_mutex_lock(&w->f->mu);
    w->f->n_running++;
    pthread_mutex_unlock(&w->f->mu);
    tell_driver(w->f);
}

/* ---- streams -------------------------------------------------------------------------------- */
static void guest_end(struct guest *g)
{
    for (struct guest **at = &g->f->guests; *at; at = &(*at)->next) {
        if (*at != g)
            continue;
        *at = g->next;
        break;
    }
    if (g->w && g->w->guest == g)
        g->w->guest = NULL;
    call_peer_destroy(g->call);
    free(g);
}

static void guest_opened(void *service, const struct wire_hello *peer)
{
    struct guest *g = service;

    for (unsigned i = 0; i < g->f->n_workers; i++) {
        uint8_t id[28];

        worker_id(&g->f->workers[i], id);
        if (memcmp(id, peer->seat.id.b, 28) == 0)
            g->w = &g->f->workers[i];
    }
    g->w->guest = g;
}

static void guest_closed(void *service, const struct fl_err *why)
{
    (void)why;
    guest_end(service);
}

static const struct call_life guest_life = { .opened = guest_opened, .closed = guest_closed };

static void accepted(void *arg, struct stream *s)
{
    struct fake *f = arg;
    struct guest *g = calloc(1, sizeof(*g));

    g->f = f;
    g->next = f->guests;
    f->guests = g;
    t_true(call_peer_create(s, fake_methods, fake_n_methods, &guest_life, g, &g->call, NULL) ==
           FL_OK);
}

static enum fl_status admit(void *arg, const struct wire_hello *peer, struct fl_err *err)
{
    struct fake *f = arg;

    for (unsigned i = 0; i < f->n_workers; i++) {
        uint8_t id[28];

        worker_id(&f->workers[i], id);
        if (memcmp(id, peer->seat.id.b, 28) == 0 && f->workers[i].attempt == peer->seat.attempt &&
            f->workers[i].known)
            return FL_OK;
    }
    return fl_fail(err, FL_STALE, "this daemon did not start that seat");
}

void up(struct fake *f)
{
    struct wire_hello me = { .role = "node" };
    char target[320];
    struct stream_to at = { .target = target, .key = { f->key, sizeof(f->key) }, .admit = admit };
    struct fl_err err;

    snprintf(target, sizeof(target), "unix:%s", f->sock);
    t_ok(stream_listen(f->loop, &stream_sock, &at, &me, accepted, f, &f->server, &err), &err);
}

void down(struct fake *f)
{
    f->listed = false;
    stream_server_destroy(FL_TAKE(f->server));
    while (f->guests)
        guest_end(f->guests);
}
