/* tests/xfer/stall_link.h - links that a test holds in its hand
 *
 * stall: shm whose pulls can be made to wait, and whose abort, if any waited, is not quiet until the
 * test says so.
 * mail: a link of LINK_SEND and LINK_CAST without pages, inside one process: both sides act. */
#pragma once
#include "transport/link/link.h"

extern const struct link_ops link_stall, link_mail;
struct stall {
    bool stall_pulls, stall_quiet;
    unsigned waiting, quiets; /* pulls that wait; aborts that wait for quiet */
};
extern struct stall stall;
void stall_quiet_now(void); /* lets the aborts be quiet that wait for it */
void mail_cut(bool on);     /* sends fail from now on */
unsigned mail_open(void);   /* ends that are open */
