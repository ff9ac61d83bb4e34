/* worker/roles/sglang/calls.h - generate calls in flight, and a look at the server now and then
 *
 * One thread with a loop of its own sends and receives, so that calls run beside each other and
 * beside the program's thread, which hears events. It answers each call itself. What ends the
 * program (the child died, the server answers nothing, three broken answers in a row) is kept in
 * calls_ended(). */
#pragma once
#include "worker/roles/sglang/gen.h"
#include "worker/roles/sglang/server.h"

enum { SGLANG_IN_FLIGHT = 256 }; /* beyond: FL_AGAIN, and the driver asks another engine */
enum { SGLANG_LOOK_MS = 10000, SGLANG_STRIKES = 3 };
enum { SGLANG_LOOKS = 3 }; /* a server that answers none of 3 looks is given up */

struct calls;
enum fl_status calls_create(struct sglang_server *s, struct calls **out, struct fl_err *err);
/* Answers ev->call, now or later. */
void calls_generate(struct calls *c, const struct furlong_event *ev,
                    const struct sglang_serves *now);
uint32_t calls_in_flight(const struct calls *c);
/* POST from the loop's thread; FL_OK: done_fd is readable when it is over, then
 * calls_post_end(). */
struct calls_post;
enum fl_status calls_post_start(struct calls *c, const char *path, json_t *body_take, uint32_t ms,
                                struct calls_post **out, int *done_fd, struct fl_err *err);
/* Waits for it. out: as sglang_ask(). */
enum fl_status calls_post_end(struct calls_post *p, json_t **out, struct fl_err *err);
struct sglang_server *calls_server(const struct calls *c);
bool calls_ended(struct calls *c, struct fl_err *err);
void calls_destroy(struct calls *c); /* refuses what is in flight; NULL is fine */
FL_AUTO_DEFINE(calls)
