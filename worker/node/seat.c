#include "worker/node/seat.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "furlong/furlong.h"

/* UUIDs for those that are hardware, ids for those that are not. */
static size_t device_names(const struct node *n, const Fl__WorkerSpec *s, char **out)
{
    for (size_t i = 0; i < s->n_device_ids; i++) {
        out[i] = s->device_ids[i];
        for (size_t k = 0; k < n->inventory->n_devices; k++) {
            const Fl__Device *d = n->inventory->devices[k];

            if (!strcmp(d->id, s->device_ids[i]) && d->uuid)
                out[i] = d->uuid;
        }
    }
    return s->n_device_ids;
}

static enum fl_status sealed(const uint8_t *data, size_t len, int *fd, struct fl_err *err)
{
    int f =
        FL_FAULT("node.seat") ? -1 : memfd_create("furlong-seat", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (f < 0 || write(f, data, len) != (ssize_t)len || lseek(f, 0, SEEK_SET) < 0 ||
        fcntl(f, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) < 0) {
        enum fl_status st = fl_fail_errno(err, "seat of %zu bytes", len);

        if (f >= 0)
            close(f);
        return st;
    }
    *fd = f;
    return FL_OK;
}

enum fl_status node_seat_make(const struct node *n, const struct worker *w, int *fd,
                              struct fl_err *err)
{
    const Fl__WorkerSpec *s = w->spec;
    Fl__NodeRef at = FL__NODE_REF__INIT;
    Fl__Seat m = FL__SEAT__INIT;
    char peer[FL_PATH_MAX], *devices[256];
    enum fl_status st;

    if (s->n_device_ids > FL_LEN(devices))
        return fl_fail(err, FL_INVALID, "%s: %zu devices, at most %zu", w->name, s->n_device_ids,
                       FL_LEN(devices));
    FL_TRY(fl_path(peer, err, "%s/peer.sock", w->dir));
    at.id = (ProtobufCBinaryData){ sizeof(n->ident.me.id), (uint8_t *)(uintptr_t)&n->ident.me.id };
    at.start = n->ident.me.start;
    m.abi = FURLONG_ABI;
    m.who = s->who;
    m.job = s->job;
    m.job_name = s->job_name;
    m.job_attempt = s->job_attempt;
    m.role = s->role;
    m.rank = s->rank;
    m.world = s->world;
    m.local_rank = s->local_rank;
    m.local_world = s->has_local_world ? s->local_world : 1;
    m.node = (char *)(uintptr_t)n->name;
    m.address = (char *)(uintptr_t)n->addr.text;
    m.daemon_sock = (char *)(uintptr_t)n->sock_path;
    m.peer_sock = peer;
    m.run_dir = s->run_dir ? s->run_dir : "";
    m.device_uuids = devices;
    m.n_device_uuids = device_names(n, s, devices);
    m.master_addr = s->master_addr ? s->master_addr : "";
    m.master_port = s->master_port;
    m.key = s->key;
    m.at = &at;
    if (n->cfg.tls) {
        m.tls_cert = n->cfg.tls->cert_path;
        m.tls_key = n->cfg.tls->key_path;
        m.tls_ca = n->cfg.tls->ca_path;
    }

    struct fl_bytes packed = node_pack(&m.base);

    if (!packed.data)
        return fl_fail(err, FL_EXHAUSTED, "no memory for the seat of %s", w->name);
    st = sealed(packed.data, packed.len, fd, err);
    explicit_bzero((void *)(uintptr_t)packed.data, packed.len);
    free((void *)(uintptr_t)packed.data);
    return st;
}
