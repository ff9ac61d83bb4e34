#include "worker/client/seat.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/tls/tls.h"
#include "worker.pb-c.h"

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE };

static void boot_id_read(char out[37])
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, out, 36);

    out[n == 36 ? 36 : 0] = '\0'; /* unknown: no peer is taken for local */
    if (fd >= 0)
        close(fd);
}

static enum fl_status seat_check(const Fl__Seat *pb, struct fl_err *err)
{
    if (pb->abi == 0 || pb->abi > FURLONG_ABI) /* of an older daemon: nothing in it has changed */
        return fl_fail(
            err, FL_UNSUPPORTED,
            "the daemon prepared a seat of ABI %u, this libfurlong speaks %u: install both "
            "from one version",
            pb->abi, FURLONG_ABI);
    if (pb->who->worker.len != sizeof(struct fl_worker_id) ||
        pb->at->id.len != sizeof(struct fl_node_id) || pb->key.len != CLIENT_KEY)
        return fl_fail(err, FL_INVALID,
                       "seat: ids of %zu and %zu bytes, key of %zu; want %zu, %zu, %d",
                       pb->who->worker.len, pb->at->id.len, pb->key.len,
                       sizeof(struct fl_worker_id), sizeof(struct fl_node_id), CLIENT_KEY);
    if (pb->world == 0 || pb->rank >= pb->world)
        return fl_fail(err, FL_INVALID, "seat: rank %u of %u", pb->rank, pb->world);
    if (pb->local_world == 0 || pb->local_rank >= pb->local_world)
        return fl_fail(err, FL_INVALID, "seat: local rank %u of %u", pb->local_rank,
                       pb->local_world);
    if (pb->master_port > UINT16_MAX)
        return fl_fail(err, FL_INVALID, "seat: master port %u", pb->master_port);
    if (!*pb->role || !*pb->daemon_sock || !*pb->peer_sock)
        return fl_fail(err, FL_INVALID, "seat: role, daemon_sock or peer_sock is empty");
    if (pb->n_device_uuids > CLIENT_DEVICES_MAX)
        return fl_fail(err, FL_INVALID, "seat: %zu devices, at most %d", pb->n_device_uuids,
                       CLIENT_DEVICES_MAX);
    return FL_OK;
}

enum fl_status client_seat_decode(const void *data, size_t len, struct client_seat *out,
                                  struct fl_err *err)
{
    Fl__Seat *pb = fl__seat__unpack(NULL, len, data);
    struct client_seat s;

    if (!pb)
        return fl_fail(err, FL_INVALID, "seat: %zu bytes that are no Seat message", len);
    if (seat_check(pb, err) != FL_OK) {
        fl__seat__free_unpacked(pb, NULL);
        return err ? err->status : FL_INVALID;
    }
    s = (struct client_seat){
        .shown = { .job = pb->job_name,
                   .role = pb->role,
                   .node = pb->node,
                   .address = pb->address,
                   .run_dir = pb->run_dir,
                   .rank = pb->rank,
                   .world = pb->world,
                   .local_rank = pb->local_rank,
                   .local_world = pb->local_world,
                   .attempt = pb->who->attempt,
                   .device_uuids = (const char *const *)pb->device_uuids,
                   .n_devices = (uint32_t)pb->n_device_uuids,
                   .master_addr = pb->master_addr,
                   .master_port = (uint16_t)pb->master_port },
        .who.attempt = pb->who->attempt,
        .at.start = pb->at->start,
        .daemon_sock = pb->daemon_sock,
        .peer_sock = pb->peer_sock,
        .pb = pb,
    };
    memcpy(&s.who.id, pb->who->worker.data, sizeof(s.who.id));
    memcpy(&s.at.id, pb->at->id.data, sizeof(s.at.id));
    memcpy(s.key, pb->key.data, sizeof(s.key));
    explicit_bzero(pb->key.data, pb->key.len);
    boot_id_read(s.boot_id);
    snprintf(s.name, sizeof(s.name), "%.60s %u on %.60s", pb->role, pb->rank, pb->node);
    if (pb->tls_cert && pb->tls_key && pb->tls_ca) {
        enum fl_status st = tls_id_create(pb->tls_cert, pb->tls_key, pb->tls_ca, &s.tls, err);

        if (st != FL_OK) {
            client_seat_fini(&s);
            return st;
        }
    }
    *out = s;
    return FL_OK;
}

enum fl_status client_seat_read(int fd, struct client_seat *out, struct fl_err *err)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    enum fl_status status;
    void *data;
    ssize_t n;

    if (seals < 0 || fstat(fd, &st) < 0)
        return fl_fail(err, FL_INVALID, "descriptor %d is no sealed memory: errno %d", fd, errno);
    if ((seals & SEALS) != SEALS)
        return fl_fail(err, FL_INVALID, "descriptor %d lacks seals: has %#x, wants %#x", fd,
                       (unsigned)seals, (unsigned)SEALS);
    if (st.st_size <= 0 || st.st_size > CLIENT_SEAT_MAX)
        return fl_fail(err, FL_INVALID, "descriptor %d holds %lld bytes, a seat has 1 to %d", fd,
                       (long long)st.st_size, CLIENT_SEAT_MAX);
    data = malloc((size_t)st.st_size);
    if (!data)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a seat of %lld bytes",
                       (long long)st.st_size);
    n = FL_FAULT("client.seat") ? -1 : pread(fd, data, (size_t)st.st_size, 0);
    if (n == (ssize_t)st.st_size)
        status = client_seat_decode(data, (size_t)n, out, err);
    else
        status = fl_fail_errno(err, "read %lld bytes of the seat from descriptor %d",
                               (long long)st.st_size, fd);
    explicit_bzero(data, (size_t)st.st_size);
    free(data);
    return status;
}

enum fl_status client_seat_of_env(struct client_seat *out, struct fl_err *err)
{
    const char *text = getenv("FURLONG_SEAT_FD");
    int64_t fd;

    if (!text)
        return fl_fail(err, FL_UNSUPPORTED,
                       "FURLONG_SEAT_FD is not set: this program has to be started by a Furlong "
                       "daemon, as by furlong train --trainer-cmd");
    if (fl_parse_i64(text, 0, INT32_MAX, &fd, NULL) != FL_OK)
        return fl_fail(err, FL_INVALID, "FURLONG_SEAT_FD=%.40s is no descriptor number", text);
    FL_TRY(client_seat_read((int)fd, out, err));
    (void)fcntl((int)fd, F_SETFD, FD_CLOEXEC); /* it was good a line above */
    return FL_OK;
}

void client_seat_fini(struct client_seat *s)
{
    explicit_bzero(s->key, sizeof(s->key));
    tls_id_destroy(s->tls);
    s->tls = NULL;
    if (s->pb)
        fl__seat__free_unpacked(s->pb, NULL);
    s->pb = NULL;
}
