/* transport/door/door.h - who comes in at a port, told by the first bytes
 *
 * A listening socket of ours in front of a server of somebody else's (gRPC's, libmicrohttpd's). The first bytes of a
 * connection are looked at and stay in the socket. Who speaks what is spoken here is handed in; who speaks something
 * else is told so in one sentence, in that protocol's own way, and hung up on: HTTP/1 by an answer in plain text,
 * HTTP/2 (gRPC is that) by GOAWAY with the sentence as its debug text, TLS by the plain text too, for alerts carry no
 * words and every client of TLS knows text for a port without it.
 *
 * Who says nothing is hung up on after wait_ms, or as soon as the door is full and somebody else comes: the oldest
 * makes room. All on the loop thread. */
#pragma once
#include <sys/socket.h>

#include "common/base/base.h"
#include "common/base/loop.h"

enum door_speech {
    DOOR_HTTP2 = 1u << 0, /* by its preface: gRPC without TLS, too */
    DOOR_TLS = 1u << 1,
    DOOR_TEXT = 1u << 2 /* whatever else begins: HTTP/1, and what is nothing at all */
};
struct door_config { /* copied */
    unsigned speaks; /* DOOR_*: these are handed in */
    const char *status; /* of the answer to HTTP/1; NULL: "400 Bad Request" */
    const char *says;   /* one sentence for the others */
    unsigned max;       /* here and inside together */
    unsigned far_max;   /* of them from other hosts; 0: max */
    uint32_t wait_ms;   /* for the first bytes */
    void (*in)(void *arg, int fd_take, const struct sockaddr *from, socklen_t len);
    /* How many are inside, and how many of them from other hosts; NULL: nobody counts them. Whenever it becomes
     * less: door_look(). */
    unsigned (*inside)(void *arg, unsigned *far);
    void *arg;
};
struct door;
enum {
    DOOR_SAYS_MAX = 400,
    DOOR_NEEDS = 33 /* bytes tell HTTP/2: its preface, and the head of the SETTINGS that leave with it */
};
/* fd_take listens, without blocking; it is gone also on failure. */
enum fl_status door_create(struct fl_loop *l, int fd_take, const struct door_config *c, struct door **out,
                           struct fl_err *err);
/* Listens no more; who is still at the door is hung up on, who was handed in is not ours. NULL is fine. */
void door_destroy(struct door *d);
void door_says(struct door *d, const char *sentence); /* from now on */
void door_look(struct door *d);                       /* somebody inside has left */


/* ---- pure, for tests */
/* What the first n bytes are, one of DOOR_*; 0: that is not known before more come. whole: nothing more comes. */
unsigned door_speech(const void *first, size_t n, bool whole);
/* What is said to it; how long that is, cap at most. */
size_t door_answer(unsigned speech, const char *status, const char *says, void *out, size_t cap);
