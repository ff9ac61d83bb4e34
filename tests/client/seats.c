#include "tests/client/seats.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <furlong/furlong.h>
#include "common/gpu/gpu.h"
#include "tests/t.h"

size_t seat_pack(const struct seat_words *w, uint8_t *out, size_t room, void (*bend)(Fl__Seat *s))
{
    static struct gpu_info all[GPU_MAX];
    static char *devices[GPU_MAX] = { "GPU-0", "GPU-1" }; /* where there are none */
    const struct gpu_ops *gpu;
    size_t n_devices = GPU_MAX;
    Fl__Seat s = FL__SEAT__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    Fl__NodeRef at = FL__NODE_REF__INIT;
    uint8_t node_id[28] = { 7 }, job[4] = { 1 };

    who.worker = (ProtobufCBinaryData){ 28, (uint8_t *)(uintptr_t)w->worker };
    who.attempt = w->attempt;
    at.id = (ProtobufCBinaryData){ 28, node_id };
    at.start = 1;
    s.abi = FURLONG_ABI;
    s.who = &who;
    s.at = &at;
    s.job = (ProtobufCBinaryData){ 4, job };
    s.job_name = "job-1";
    s.job_attempt = 1;
    s.role = (char *)(uintptr_t)(w->role ? w->role : "trainer");
    s.rank = w->rank;
    s.world = w->world ? w->world : 1;
    s.local_rank = w->rank;
    s.local_world = s.world;
    s.node = (char *)(uintptr_t)(w->node ? w->node : "gpu-a");
    s.address = (char *)(uintptr_t)(w->address ? w->address : "127.0.0.1");
    s.daemon_sock = (char *)(uintptr_t)(w->daemon_sock ? w->daemon_sock : "/nowhere/node.sock");
    s.peer_sock = (char *)(uintptr_t)(w->peer_sock ? w->peer_sock : "/nowhere/peer.sock");
    s.run_dir = (char *)(uintptr_t)(w->run_dir ? w->run_dir : "");
    s.n_device_uuids = 2;
    if (gpu_in_use() && gpu_pick(&gpu, NULL) == FL_OK &&
        gpu->list(all, &n_devices, NULL) == FL_OK && n_devices) {
        for (size_t i = 0; i < n_devices; i++)
            devices[i] = all[i].uuid;
        s.n_device_uuids = n_devices;
    }
    s.device_uuids = devices;
    s.master_addr = "127.0.0.1";
    s.master_port = 29500;
    s.key = (ProtobufCBinaryData){ 32, (uint8_t *)(uintptr_t)w->key };
    if (bend)
        bend(&s);
    t_true(fl__seat__get_packed_size(&s) <= room);
    return fl__seat__pack(&s, out);
}

int sealed_memfd(const void *data, size_t len, int seals)
{
    int fd = memfd_create("seat", MFD_ALLOW_SEALING);

    t_true(fd >= 0 && write(fd, data, len) == (ssize_t)len);
    t_true(!seals || fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

int seat_fd(const struct seat_words *w)
{
    uint8_t data[4096];
    size_t len = seat_pack(w, data, sizeof(data), NULL);

    return sealed_memfd(data, len, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
}
