/* worker/client/driver_priv.h - what members.c, group.c, layout.c and the planes share */
#pragma once
#include "common/base/str.h"
#include "worker/client/driver.h"
#include "worker/client/sync.h"

enum { DRIVER_MEMBERS_MAX = 65536 };
struct member {
    char role[32];
    uint32_t rank, state;
    struct client_where at;
    char node[64], why[256];
    bool holds;            /* a version of the plane that ends here */
    bool unrunnable;       /* ENDED because its command could not be run */
    int exit_code;         /* of the end that why tells of; -1: it did not end by itself */
    uint32_t late_attempt; /* that was waited for in vain; 0: none */
    bool late_answers;
    char late_why[256];
};
struct plane;
struct client_driver {
    struct furlong *f;
    pthread_mutex_t mu;
    pthread_cond_t changed;
    struct member *members; /* under mu; the loop alone writes */
    size_t n_members, room_members;
    unsigned giving_back;           /* relays in the background, under mu */
    struct furlong_group *groups;   /* that were not ended, and ... */
    struct furlong_layout *layouts; /* ... not freed: go with the seat; under mu */
    /* loop thread */
    struct client_relay list;
    bool listing;
    struct plane *planes;
};
struct furlong_group {
    struct client_driver *d;
    char role[32];
    uint8_t id[64]; /* of the placement group */
    size_t id_bytes;
    uint32_t n;
    struct furlong_peer **peers;
    struct furlong_group *next;
};
void group_free(struct furlong_group *g);
struct furlong_layout {
    struct furlong *f;
    struct furlong_layout *next;
    struct Fl__Layout *pb;
};

void layout_end(struct furlong_layout *y);

enum fl_status driver_of(struct furlong *f, struct client_driver **out, struct fl_err *err);
/* mu is held. NULL: not in the list. */
struct member *member_find(struct client_driver *d, const char *role, uint32_t rank);
/* "rollout 3 on gpu-b, attempt 2" */
void member_print(const struct member *m, struct fl_str *out);
/* Loop thread: Members, from a reply or an event. */
enum fl_status members_take(struct client_driver *d, const void *body, size_t bytes,
                            struct fl_err *err);

/* The message in the background, made again until the head has it, 60 s at most. Any thread. */
struct ProtobufCMessage;
void driver_send_later(struct client_driver *d, uint16_t method, const struct ProtobufCMessage *m);

void plane_group_ends(struct furlong_group *g); /* a program's thread */
/* Any thread. The last word about who was waited for in vain: furlong_group_late(). */
void member_is_late(struct client_driver *d, const char *role, uint32_t rank, uint32_t attempt,
                    bool answers, const char *why);
void group_none_late(struct furlong_group *g);
/* mu held: members of that role hold versions */
bool plane_feeds(struct client_driver *d, const char *role);
void planes_heard(struct client_driver *d); /* loop thread: the list of members changed */
void planes_close(struct client_driver *d); /* loop thread */
