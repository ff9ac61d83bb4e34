/* worker/client/weights.h - sets of weights that this process offers or accepts
 *
 * The loop owns source and sink; the program reads where its tensors lie. Where they lie changes on
 * the program's thread alone: in begin, in the answer to COMMIT, in those to OFFLOAD and to a PAUSE
 * of the plane. */
#pragma once
#include "worker/client/client.h"

/* loop thread: the port */
enum fl_status client_weights_open(struct furlong *f, struct fl_err *err);
void client_weights_drop_all(struct furlong *f);        /* a program's thread */
void client_weights_close(struct furlong *f); /* loop thread; none is left; NULL port is fine */

/* A program's thread. COMMIT, or PAUSE of the plane, is being answered: c->set's pointers
 * change. */
void client_weights_settle(struct furlong_call *c);
/* Arena and accepted weights together. */
enum fl_status client_weights_offload(struct furlong *f, uint32_t tags, struct furlong_moved *m,
                                      struct fl_err *err);
enum fl_status client_weights_onload(struct furlong *f, uint32_t tags, struct furlong_moved *m,
                                     struct fl_err *err);

/* How a sink reaches a source (xfer_member.where): "UNIX-PATH|HOST:PORT|BOOT-ID". */
struct client_where;
void client_where_print(const struct client_where *w, char out[192]);
bool client_where_parse(const char *text, struct client_where *out); /* who and name stay */
