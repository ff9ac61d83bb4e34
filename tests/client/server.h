/* tests/client/server.h - a program in a thread of the test that answers by rule
 *
 *   echo     the same body and blob           refuse   FL_STALE "version 3 was asked for"
 *   hold     kept until "release" (lane 1)    leave    the program leaves without an answer
 *   count    body: how many calls so far      held?    "1" once one is held (lane 1)
 *                                             gone?    "1" once the held one is not wanted (lane 1)
 * Events of other kinds are noted by name and answered empty; squeeze gives back half. */
#pragma once
#include <furlong/furlong.h>

struct server;
struct server *server_start(struct furlong *f_take);
/* What came so far, "pause resume offload:8"; waits until it ends in the word. */
const char *server_seen(struct server *s, const char *last_word);
void server_end(struct server *s); /* stops by itself, leaves */
/* Ends when the program was told to (stop event, or furlong_next() failed); what it failed with. */
enum fl_status server_wait(struct server *s, struct fl_err *err);
