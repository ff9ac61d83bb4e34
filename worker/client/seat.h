/* worker/client/seat.h - the seat that the daemon prepared: a sealed memfd with a Seat message
 *
 * Nothing of it may be believed before its seals hold: a memfd without them could be cut short
 * under the reader (SIGBUS) or changed after it was checked. */
#pragma once
#include <furlong/furlong.h>
#include "common/base/base.h"

enum { CLIENT_SEAT_MAX = 256 << 10, CLIENT_KEY = 32, CLIENT_DEVICES_MAX = 1024, CLIENT_NAME = 160 };
struct client_seat {
    struct furlong_seat shown; /* points into pb */
    struct fl_seat_ref who;
    struct fl_node_ref at;
    uint8_t key[CLIENT_KEY];
    const char *daemon_sock, *peer_sock; /* point into pb */
    char name[CLIENT_NAME];              /* "rollout 3 on gpu-b" */
    char boot_id[37];
    struct Fl__Seat *pb;
    struct tls_id *tls; /* who this node is to other hosts; NULL: they are spoken to plainly */
};
/* By the number in FURLONG_SEAT_FD, which stays open but is not inherited any further.
 * FL_UNSUPPORTED: the variable is not set, or the daemon speaks another ABI. FL_INVALID: what is
 * there is no sealed seat. */
enum fl_status client_seat_of_env(struct client_seat *out, struct fl_err *err);
enum fl_status client_seat_read(int fd, struct client_seat *out, struct fl_err *err);
enum fl_status client_seat_decode(const void *data, size_t len, struct client_seat *out,
                                  struct fl_err *err);
void client_seat_fini(struct client_seat *s);
