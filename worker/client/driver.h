/* worker/client/driver.h - what a driver's library knows: members of its groups, and the weight
 * plane
 *
 * Loop thread, but for what driver.h gives to programs. In other processes there is no such object
 * and the functions here do nothing. */
#pragma once
#include "worker/client/peers.h"

enum fl_status client_driver_open(struct furlong *f, struct fl_err *err); /* role "driver" alone */
void client_driver_up(struct furlong *f); /* the daemon is there (again): list the members anew */
void client_driver_members(struct furlong *f, const void *body, size_t bytes); /* Members */
void client_driver_close(struct furlong *f); /* groups and planes end; loop thread */
/* A program's thread: until what was given back has reached the head, or wait_ms. */
void client_driver_drain(struct furlong *f, uint32_t wait_ms);
void client_driver_free(struct furlong *f); /* the loop has ended */

/* True when that member is in the list. */
bool client_driver_knows(struct furlong *f, const char *role, uint32_t rank,
                         struct client_where *at, uint32_t *state, char why[256]);
