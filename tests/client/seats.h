/* tests/client/seats.h - seats as a daemon would make them */
#pragma once
#include "worker.pb-c.h"

struct seat_words { /* what differs from test to test; zero: a good default */
    const char *role, *node, *address, *daemon_sock, *peer_sock, *run_dir;
    uint32_t rank, world, attempt;
    uint8_t worker[28], key[32];
};
/* A sealed memfd; the caller closes it. */
int seat_fd(const struct seat_words *w);
size_t seat_pack(const struct seat_words *w, uint8_t *out, size_t room, void (*bend)(Fl__Seat *s));
int sealed_memfd(const void *data, size_t len, int seals);
