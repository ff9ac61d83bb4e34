#include "worker/node/disk.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/loop.h"
#include "common/base/str.h"

struct node_disk {
    char path[FL_PATH_MAX];
    int (*ask)(const char *path, struct statvfs *v);
    uint64_t asked_ns;    /* the loop's */
    pthread_mutex_t lock; /* of what follows */
    unsigned holders;     /* the daemon, and the thread that asks */
    bool asking, known;
    uint64_t total, free;
};

static void let_go(struct node_disk *d)
{
    pthread_mutex_lock(&d->lock);
    bool last = --d->holders == 0;
    pthread_mutex_unlock(&d->lock);
    if (!last)
        return;
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static void *look(void *arg)
{
    struct node_disk *d = arg;
    uint64_t from = fl_clock_boot_ns();
    struct statvfs v;
    bool ok = d->ask(d->path, &v) == 0;
    uint64_t took_ms = (fl_clock_boot_ns() - from) / 1000000;

    if (took_ms > NODE_DISK_LATE_MS) /* said here: the log may lie there, too */
        fl_warn("the state folder's file system did not answer, its room was not told path=%s "
                "for_ms=%llu",
                d->path, (unsigned long long)took_ms);
    pthread_mutex_lock(&d->lock);
    d->asking = false;
    d->known = ok;
    d->total = ok ? (uint64_t)v.f_blocks * v.f_frsize : 0;
    d->free = ok ? (uint64_t)v.f_bavail * v.f_frsize : 0;
    pthread_mutex_unlock(&d->lock);
    let_go(d);
    return NULL;
}

/* With every signal blocked: they are the loop's. */
static bool look_start(struct node_disk *d)
{
    pthread_attr_t how;
    pthread_t thread;
    sigset_t all, old;
    bool ok;

    pthread_attr_init(&how);
    pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    ok = !FL_FAULT("node.disk") && pthread_create(&thread, &how, look, d) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&how);
    return ok;
}

void node_disk_look(struct node_disk *d, uint64_t now_ns)
{
    pthread_mutex_lock(&d->lock);
    bool busy = d->asking;

    d->asking = true;
    d->holders += !busy;
    pthread_mutex_unlock(&d->lock);
    if (busy)
        return;
    d->asked_ns = now_ns;
    if (look_start(d))
        return;
    pthread_mutex_lock(&d->lock);
    d->asking = d->known = false; /* no thread to be had: at the next beat */
    pthread_mutex_unlock(&d->lock);
    let_go(d);
}

void node_disk_fill(struct node_disk *d, uint64_t now_ns, Fl__NodeStats *out)
{
    pthread_mutex_lock(&d->lock);
    bool late = d->asking && now_ns - d->asked_ns > NODE_DISK_LATE_MS * 1000000ull;

    if (d->known && !late) {
        out->has_disk_total = out->has_disk_free = true;
        out->disk_total = d->total;
        out->disk_free = d->free;
    }
    pthread_mutex_unlock(&d->lock);
}

enum fl_status node_disk_create(const char *path, int (*ask)(const char *path, struct statvfs *v),
                                struct node_disk **out, struct fl_err *err)
{
    struct node_disk *d = calloc(1, sizeof(*d));

    if (!d)
        return fl_fail(err, FL_EXHAUSTED, "no memory to watch the room in %s", path);
    (void)FL_COPY(d->path, path);
    d->ask = ask;
    d->holders = 1;
    pthread_mutex_init(&d->lock, NULL);
    *out = d;
    return FL_OK;
}

void node_disk_destroy(struct node_disk *d)
{
    if (d)
        let_go(d);
}
