/* transport/wire/sock.h - sockets: lines and listeners; private to wire and its tests */
#pragma once
#include "transport/wire/stream_priv.h"

/* A line over a connected, non-blocking socket; fd is gone also on failure. FL_DENIED: another
 * user. tls: NULL or, over TCP, who we are to the one who dialled. */
enum fl_status sock_line_of(struct fl_loop *l, int fd_take, struct tls_id *tls,
                            struct wire_line **out, struct fl_err *err);
enum fl_status sock_listen(struct fl_loop *l, const struct stream_to *at, bool has_key,
                           void (*arrived)(void *arg, struct wire_line *k_take), void *arg,
                           struct wire_port **out, struct fl_err *err);
/* A TCP listener without a server; real: its target, with the real port. FL_EXISTS, FL_UNREACHABLE, FL_DENIED
 * and FL_INVALID say why there is none. */
enum fl_status sock_open(const struct stream_to *at, bool has_key, int *out, char *real, size_t cap,
                         struct fl_err *err);
