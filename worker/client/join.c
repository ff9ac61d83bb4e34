#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "worker/client/client.h"
#include "worker/client/driver.h"
#include "worker/client/peers.h"
#include "worker/client/sync.h"
#include "worker/client/uplink.h"
#include "worker/client/watch.h"
#include "worker/client/weights.h"

static atomic_bool joined_by_env; /* the seat of this process is taken */

/* ---- the thread ----------------------------------------------------------------------------- */
static void *loop_thread(void *arg)
{
    struct furlong *f = arg;

    fl_loop_run(f->loop);
    return NULL;
}

/* All signals stay with the threads of the program. */
static enum fl_status thread_start(struct furlong *f, struct fl_err *err)
{
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = FL_FAULT("client.thread") ? EAGAIN : pthread_create(&f->thread, NULL, loop_thread, f);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        return fl_fail(err, FL_EXHAUSTED, "%s: no thread for the sockets: errno %d", f->seat.name,
                       rc);
    (void)pthread_setname_np(f->thread, "furlong");
    f->thread_up = true;
    return FL_OK;
}

/* ---- in ------------------------------------------------------------------------------------- */
struct joining {
    struct client_sync sync;
    struct furlong *f;
};

static void join_begin(struct client_sync *s)
{
    struct furlong *f = container_of(s, struct joining, sync)->f;
    struct fl_err err;
    enum fl_status st = client_kept_open(f, &err);

    if (st == FL_OK)
        st = client_weights_open(f, &err);
    if (st == FL_OK)
        st = client_peers_open(f, &err);
    if (st == FL_OK)
        st = client_uplink_open(f, s, &err);
    if (st != FL_OK) /* else the daemon's answer ends it */
        client_sync_end(s, st, &err);
}

enum fl_status client_join(struct client_seat *seat, struct furlong **out, struct fl_err *err)
{
    struct furlong *f = calloc(1, sizeof(*f));
    struct joining j = { .f = f };
    enum fl_status st;

    client_here_mark();
    if (!f) {
        client_seat_fini(seat);
        return fl_fail(err, FL_EXHAUSTED, "no memory to join");
    }
    f->abi = FURLONG_ABI;
    f->keeper_fd = -1;
    f->seat = *seat;
    *seat = (struct client_seat){ 0 };
    inbox_init(&f->inbox);
    st = memory_init(&f->memory, f->seat.shown.run_dir, err);
    if (st == FL_OK)
        st = client_watch_open(f, err);
    if (st == FL_OK)
        st = fl_loop_create(NULL, &f->loop, err);
    if (st == FL_OK && strcmp(f->seat.shown.role, "driver") == 0)
        st = client_driver_open(f, err);
    if (st == FL_OK)
        st = thread_start(f, err);
    if (st == FL_OK)
        st = client_sync_run(f->loop, &j.sync, join_begin, err);
    if (st != FL_OK) {
        furlong_leave(f);
        return st;
    }
    *out = f;
    return FL_OK;
}

enum fl_status furlong_join(uint32_t abi, struct furlong **out, struct fl_err *err)
{
    struct client_seat seat = { 0 };
    enum fl_status st;

    if (abi == 0 || abi > FURLONG_ABI)
        return fl_fail(err, FL_UNSUPPORTED,
                       "the program was built for ABI %u, this libfurlong %s has 1 to %u", abi,
                       FURLONG_VERSION, FURLONG_ABI);
    if (atomic_exchange(&joined_by_env, true))
        return fl_fail(err, FL_UNSUPPORTED, "this process has joined already");
    st = client_seat_of_env(&seat, err);
    if (st == FL_OK)
        st = client_join(&seat, out, err);
    if (st == FL_OK) {
        (*out)->by_env = true;
        (*out)->abi = abi;
    } else {
        atomic_store(&joined_by_env, false);
    }
    return st;
}

const struct furlong_seat *furlong_seat(const struct furlong *f)
{
    return client_here(f, NULL) == FL_OK ? &f->seat.shown : NULL;
}

/* ---- out ------------------------------------------------------------------------------------ */
static void leave_begin(struct client_sync *s)
{
    struct furlong *f = container_of(s, struct joining, sync)->f;

    f->leaving = true;
    client_watch_stop(f);
    client_driver_close(f);
    client_peers_close(f);
    client_weights_close(f);
    client_uplink_close(f);
    client_kept_close(f);
    client_sync_end(s, FL_OK, NULL);
}

static void leave_politely(struct furlong *f)
{
    struct joining j = { .f = f };
    struct fl_err why;

    if (f->up) {
        client_driver_drain(f, CLIENT_LEAVE_MS);
        client_watch_drain(f, CLIENT_LEAVE_MS);
    }
    fl_fail(&why, FL_UNREACHABLE, "%s leaves", f->seat.name);
    inbox_close(&f->inbox, &why); /* nothing new gets in */
    client_calls_refuse_all(f);
    client_weights_drop_all(f);
    client_sync_run(f->loop, &j.sync, leave_begin, NULL);
}

void furlong_leave(struct furlong *f)
{
    if (!f || client_here(f, NULL) != FL_OK)
        return;
    if (f->thread_up) {
        leave_politely(f);
        fl_loop_stop(f->loop);
        pthread_join(f->thread, NULL);
    }
    fl_loop_destroy(f->loop);
    client_peers_free(f);
    client_driver_free(f);
    client_watch_free(f);
    memory_fini(&f->memory);
    inbox_fini(&f->inbox);
    client_seat_fini(&f->seat);
    if (f->by_env)
        atomic_store(&joined_by_env, false);
    free(f);
}

/* ---- memory --------------------------------------------------------------------------------- */
enum fl_status furlong_arena_alloc(struct furlong *f, enum furlong_tag tag, int device,
                                   size_t bytes, void **out, struct fl_err *err)
{
    FL_TRY(client_here(f, err));
    if (device < -1 || device >= (int)f->seat.shown.n_devices)
        return fl_fail(err, FL_INVALID, "device %d: this seat has %u; host memory is -1", device,
                       f->seat.shown.n_devices);
    return memory_alloc(&f->memory, device < 0 ? NULL : f->seat.shown.device_uuids[device], tag,
                        bytes, out, err);
}

void furlong_arena_free(struct furlong *f, void *p)
{
    if (p && client_here(f, NULL) == FL_OK)
        memory_free(&f->memory, p);
}

enum fl_status furlong_arena_keep(struct furlong *f, uint32_t tags, enum furlong_keep how,
                                  const char *folder, struct fl_err *err)
{
    FL_TRY(client_here(f, err));
    return memory_keep(&f->memory, tags, how, folder, err);
}

enum fl_status furlong_arena_offload(struct furlong *f, uint32_t tags, struct furlong_moved *out,
                                     struct fl_err *err)
{
    struct furlong_moved m = { 0 };

    FL_TRY(client_here(f, err));
    FL_TRY(client_weights_offload(f, tags, &m, err));
    if (out)
        *out = m;
    return FL_OK;
}

enum fl_status furlong_arena_onload(struct furlong *f, uint32_t tags, struct furlong_moved *out,
                                    struct fl_err *err)
{
    struct furlong_moved m = { 0 };

    FL_TRY(client_here(f, err));
    FL_TRY(client_weights_onload(f, tags, &m, err));
    if (out)
        *out = m;
    return FL_OK;
}
