/* worker/client/inbox.h - what came in and waits for the program: lanes of calls, each answered
 * once
 *
 * The loop puts calls in, the program's threads take them out and give answers, which go back to
 * the loop as posted tasks. A call is alive from inbox_put() to its answer, whether it waits in a
 * lane or is in hand; inbox_close() lets waiting calls be taken first and then gives every lane its
 * reason. */
#pragma once
#include <pthread.h>
#include <furlong/furlong.h>
#include "common/base/base.h"
#include "common/base/loop.h"
#include "transport/call/call.h"

struct inbox;
struct furlong_call {
    struct furlong_call *next;          /* in its lane                       */
    struct furlong_call *older, *newer; /* all that are alive              */
    struct furlong *f;
    struct furlong_event ev;
    uint64_t due_ns; /* CLOCK_BOOTTIME; 0: none */
    uint32_t lane;
    bool waiting; /* in its lane; under the inbox's mutex */
    atomic_bool unwanted;
    struct call_req *req; /* loop thread; NULL: nobody to answer (STOP) */
    struct Fl__Ask *ask;  /* owns method, from, body                    */
    void *blob;
    bool bare;                   /* the answer's body goes as it is, not in an Answer (SQUEEZE) */
    struct furlong_weights *set; /* COMMIT and PAUSE of the weight plane, with */
    struct fl_task *then;        /* what is posted when it is answered         */
    struct furlong_moved moved;  /* OFFLOAD, ONLOAD                            */

    struct fl_task back; /* the answer, on its way to the loop */
    struct fl_err refused;
    void *body; /* packed Answer, or as it is */
    size_t body_bytes;
    struct furlong_data lent; /* blob of the answer ... */
    struct wire_hold hold;
    void *copied;             /* ... or its copy        */
    struct client_sync *sent; /* whoever waits for it   */
};

struct inbox_lane {
    pthread_cond_t came;
    struct furlong_call *first, **last;
    uint32_t n, waiters;
};
struct inbox {
    pthread_mutex_t mu;
    struct inbox_lane lanes[FURLONG_LANES];
    struct furlong_call alive; /* ring of all */
    struct fl_err over;        /* status FL_OK: open */
};
void inbox_init(struct inbox *b);
void inbox_fini(struct inbox *b); /* nothing is alive any more */

/* Loop thread. FL_EXHAUSTED: FURLONG_QUEUE_MAX wait in that lane; FL_INVALID: no such lane. Then c
 * is still the caller's. */
enum fl_status inbox_put(struct inbox *b, struct furlong_call *c, struct fl_err *err);
/* any thread; the first reason stays */
void inbox_close(struct inbox *b, const struct fl_err *why);
/* Any thread: the next of the lane. FL_AGAIN: none in wait_ms; else why the inbox is closed. */
enum fl_status inbox_take(struct inbox *b, uint32_t lane, uint32_t wait_ms,
                          struct furlong_call **out, struct fl_err *err);
/* One of that set that nobody has taken yet, and nobody will: the caller answers it. NULL: none. */
struct furlong_call *inbox_take_of(struct inbox *b, const struct furlong_weights *set);
struct furlong_call *inbox_any(struct inbox *b); /* that is alive, in hand or waiting; NULL: none */
/* answered: no longer alive, nor waiting */
void inbox_forget(struct inbox *b, struct furlong_call *c);
