/* transport/link/tcp_priv.h - the link between machines: one thread, its sockets, and the loop's
 * end of it
 *
 * The thread owns every socket. The loop gives it pulls under the lock and wakes it; it brings them
 * back as a list and posts one task. It never blocks but in epoll_wait, so the loop may join it.
 *
 * On a connection: ask (tcp_ask, then its runs), say (tcp_say, then the bytes), again and again.
 * The next ask may be under way while bytes come; it waits in the socket until its turn. */
#pragma once
#include <pthread.h>
#include <sys/queue.h>
#include "transport/link/dev.h"
#include "transport/link/link_priv.h"

enum {
    TCP_ASK_MAGIC = 0x71617466, /* "ftaq" */
    TCP_SAY_MAGIC = 0x79737466, /* "ftsy" */
    TCP_KEY_MAGIC = 0x6b637466, /* "ftck" */
    TCP_MAX_PULLS = 256,        /* in flight on a link; past it FL_AGAIN until one is back */
    TCP_MAX_RUNS = 1 << 20,     /* lines of an ask: 32 MiB */
    TCP_MAX_REGIONS = 2048,     /* a set lies in 1,024 memories at most */
    TCP_MAX_CONNS = 1024,       /* accepted ones; past it they wait in the backlog */
    TCP_CONNECT_MS = 5000,      /* and for the first ask of a stranger */
    TCP_STALL_MS = 30000, /* bytes are awaited and none come: the epoch's deadline is shorter */
    TCP_IOV = 64,
    TCP_CALL_BYTES = 1 << 20, /* one sendmsg or recvmsg */
    TCP_TURN_CALLS = 4,       /* of one connection, before the others are looked at */
    TCP_TOKEN = 16
};

struct tcp_ask { uint32_t magic, n_runs; uint64_t region, id; uint8_t token[TCP_TOKEN]; };
struct tcp_run { uint64_t off, bytes, step; uint32_t rows, pad; };
struct tcp_say { uint32_t magic, status; uint64_t id, bytes; char text[104]; };
struct tcp_key { /* in link_key.blob */
    uint32_t magic, pad;
    uint64_t region, bytes;
    uint8_t token[TCP_TOKEN];
    char addr[64];
    uint16_t port;
};
_Static_assert(sizeof(struct tcp_ask) == 40 && sizeof(struct tcp_run) == 32 &&
               sizeof(struct tcp_say) == 128, "wire format");
_Static_assert(sizeof(struct tcp_key) <= sizeof(((struct link_key *)0)->blob), "fits a key");

struct tcp_region { struct link_mem mem; };

struct tcp_pull {
    STAILQ_ENTRY(tcp_pull) next;
    struct link_op *op;
    struct tcp_key from;
    struct link_mem to;
    const struct link_seg *segs;
    size_t n;
    uint64_t (*digests)[2];
    uint64_t bytes, arrived, id, began_ns;
};
STAILQ_HEAD(tcp_pulls, tcp_pull);

/* What epoll's data points at. */
enum tcp_kind { TCP_WAKE, TCP_LISTENS, TCP_SERVES, TCP_TAKES };
struct tcp_end { enum tcp_kind kind; int fd; };

struct tcp_serving; /* an accepted connection: tcp_serve.c */
struct tcp_taking;  /* one that we opened: tcp_take.c      */
LIST_HEAD(tcp_servings, tcp_serving);
LIST_HEAD(tcp_takings, tcp_taking);

struct tcp {
    struct link base;
    /* loop and thread, under lock */
    pthread_mutex_t lock;
    struct tcp_pulls asked, over;
    struct tcp_region regions[TCP_MAX_REGIONS];
    uint64_t n_regions; /* so many there have been; the last TCP_MAX_REGIONS are known */
    bool stop;
    struct link_op *quiet; /* posted by the loop once the thread has gone */
    /* the loop alone */
    struct fl_task back;
    unsigned n_pulls;
    uint64_t next_id;
    unsigned delivering; /* one inside of another, when a callback closes the link */
    bool joined, closed;
    /* set before the thread starts */
    pthread_t thread;
    struct tcp_end wake, listener;
    int epoll;
    uint16_t port;
    char addr[64];
    uint8_t token[TCP_TOKEN];
    /* the thread alone */
    struct tcp_servings servings;
    struct tcp_takings takings;
    unsigned n_servings;
    bool accept_paused;
    char *bounce; /* TCP_CALL_BYTES, made when memory of a device is first met */
};

/* Thread only. */
void tcp_serve_accept(struct tcp *k);
void tcp_serve_ready(struct tcp *k, struct tcp_serving *c, unsigned events);
/* always brings p back by tcp_pull_over() */
void tcp_take_start(struct tcp *k, struct tcp_pull *p);
void tcp_take_ready(struct tcp *k, struct tcp_taking *c, unsigned events);
void tcp_take_late(struct tcp *k, uint64_t now_ns);  /* connects and pulls that took too long */
void tcp_serve_late(struct tcp *k, uint64_t now_ns); /* strangers that ask nothing           */
void tcp_serve_close_all(struct tcp *k);
void tcp_take_close_all(struct tcp *k);
struct tcp_serving *tcp_serving_of(struct tcp_end *e);
struct tcp_taking *tcp_taking_of(struct tcp_end *e);
/* p->op->err is set; the loop hears of it. */
void tcp_pull_over(struct tcp *k, struct tcp_pull *p);
bool tcp_bounce(struct tcp *k); /* false: no memory */
bool tcp_watch(struct tcp *k, struct tcp_end *e, unsigned events, bool first);
