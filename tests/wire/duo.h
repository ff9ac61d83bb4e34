/* tests/wire/duo.h - one side asks, the other serves, over each carrier in turn */
#pragma once
#include "tests/wire/rig.h"
#include "transport/call/call.h"

enum { ECHO = 1, KEEP, FAIL, GIVE_FD, BULK, NOTE, ONE_BY_ONE, UNKNOWN = 99 };
enum { KEPT = 4096 };
struct side {
    struct call_peer *peer;
    unsigned opened, lost, closed, ready;
    struct fl_err why;
    struct call_req *kept[KEPT];
    unsigned n_kept, n_notes, n_unwanted, n_served, n_lost_rooms;
    uint32_t budget_ms;
    uint64_t order[KEPT]; /* first number of each body that was served */
    uint8_t *room;
    struct lent {
        struct wire_hold hold;
        unsigned freed;
    } lent;
};
struct duo {
    const struct carrier *c;
    struct fl_loop *loop;
    struct fl_held_clock held;
    struct stream_server *server;
    struct side a, b; /* a asks, b serves */
    struct stream_to to, at;
    char target[200];
    int fds_before;
};
struct ask {
    struct call_op op;
    unsigned done;
    enum fl_status st;
    struct fl_err err;
    uint8_t *body, *blob, *room;
    size_t body_len, blob_len;
    int fd;
    void (*then)(struct ask *a);
    struct duo *d;
};

#define duo_until(d, cond)                                                                         \
    do {                                                                                           \
        uint64_t end_ = fl_clock_boot_ns() + 10000000000u;                                         \
        while (!(cond)) {                                                                          \
            t_true(fl_clock_boot_ns() < end_, "waited for " #cond " over %s", (d)->c->name);       \
            fl_loop_turn((d)->loop, 5);                                                            \
        }                                                                                          \
    } while (0)

void duo_dial(struct duo *d);
void duo_init(struct duo *d, const struct carrier *c);
void duo_open(struct duo *d, const struct carrier *c);
void duo_fini(struct duo *d);
void ask_done(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
              const struct fl_err *err);
enum fl_status ask_sized(struct duo *d, struct ask *a, uint16_t method, uint32_t lane,
                         uint64_t number, size_t body, size_t blob, uint64_t due_ns,
                         struct fl_err *err);
void ask(struct duo *d, struct ask *a, uint16_t method, uint32_t lane, uint64_t number);
void ask_fini(struct ask *a);
void reply_kept(struct side *s, unsigned i);
bool all_done(const struct ask *a, unsigned n);
