/* tests/client/pair.h - a driver, and one engine that answers by rule (server.h) */
#pragma once
#include "tests/client/server.h"

struct pair {
    struct fake *fake;
    struct furlong *me;
    struct server *engine;
    struct furlong_peer *peer;
};
struct pair pair_make(void);
void pair_end(struct pair *p);
/* The answer's body is these bytes. */
void pair_says(struct furlong_peer *p, uint32_t lane, const char *method, const char *want);

struct asker {
    struct furlong_peer *p;
    const char *method;
    enum fl_status st;
    struct fl_err err;
};
void *pair_ask_in_thread(void *asker);
