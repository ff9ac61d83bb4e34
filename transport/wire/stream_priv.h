/* transport/wire/stream_priv.h - one stream over any carrier; private to wire and its tests */
#pragma once
#include "transport/wire/carrier.h"
#include "transport/wire/in.h"
#include "transport/wire/out.h"

enum wire_state {
    WIRE_DIALLING, /* the carrier connects                                        */
    WIRE_GREETING, /* HELLO goes to and fro                                       */
    WIRE_OPEN,
    WIRE_WAITING, /* between two connections                                     */
    WIRE_LEAVING, /* what is queued still leaves, BYE last                       */
    WIRE_GONE     /* freed at the end of the turn                                */
};
enum {
    WIRE_CONNECT_MS = 5000,
    WIRE_AGAIN_MIN_MS = 100,
    WIRE_AGAIN_MAX_MS = 2000,
    WIRE_LINGER_MS = 1000,
    WIRE_READS = 16,     /* reads for one readiness: others of the loop have their turn then */
    WIRE_GREETINGS = 256 /* of one server at the same time */
};
struct stream_server;
struct wire_stream {
    struct stream s;
    enum wire_state state;
    struct wire_line *line;
    struct wire_in in;
    struct wire_out out;
    bool reading, flushing, full, blocked; /* full: FL_AGAIN was said; blocked: the line takes no more */
    bool in_dirty;                         /* in is to be cleared when reading ends */
    bool told_lost, was_open;
    struct fl_task flush, reap;
    struct fl_timer due; /* of connect and HELLO, the next attempt, or lingering */
    struct fl_err why;
    unsigned again_ms;

    struct stream_to to; /* client; key and target are ours */
    char *target;
    uint8_t key[WIRE_KEY_MAX];
    struct wire_hello me, peer;
    uint8_t hello[2][WIRE_HELLO_BYTES]; /* as they went: client's, server's */
    unsigned step;                      /* the last step of HELLO that was received */
    char name[160];

    struct stream_server *server; /* while greeting */
    struct wire_stream *prev, *next;
};
struct stream_server {
    struct fl_loop *loop;
    const struct stream_ops *ops;
    struct wire_port *port;
    struct stream_to at;
    uint8_t key[WIRE_KEY_MAX];
    struct wire_hello me;
    void (*accepted)(void *arg, struct stream *s_take);
    void *arg;
    struct wire_stream *greeting;
    unsigned n_greeting;
};

static inline struct wire_stream *wire_stream_of(struct stream *s)
{
    return container_of(s, struct wire_stream, s);
}
/* stream.c */
enum fl_status wire_stream_create(struct fl_loop *l, const struct stream_ops *ops,
                                  const struct wire_hello *me, struct wire_stream **out,
                                  struct fl_err *err);
enum fl_status wire_key_load(const struct stream_to *to, uint8_t key[WIRE_KEY_MAX], size_t *len,
                             struct fl_err *err);
extern const struct line_user wire_stream_line;
enum fl_status wire_stream_put(struct wire_stream *w, const struct wire_msg *m, struct fl_err *err);
void wire_stream_break(struct wire_stream *w, const struct fl_err *why); /* the connection is over  */
void wire_stream_refuse(struct wire_stream *w, const struct fl_err *why); /* the same, told to the peer */
void wire_stream_opened(struct wire_stream *w);
enum fl_status wire_send(struct stream *s, const struct wire_msg *m, struct fl_err *err);
void wire_close(struct stream *s, const struct fl_err *why);
/* greet.c: each step of HELLO that came, on either side */
enum fl_status wire_greet_start(struct wire_stream *w, struct fl_err *err); /* client, line is up */
enum fl_status wire_greet(struct wire_stream *w, const struct wire_msg *m, struct fl_err *err);
/* server.c */
void wire_server_left(struct wire_stream *w); /* no longer greeting */
