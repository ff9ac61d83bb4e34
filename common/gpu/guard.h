/* common/gpu/guard.h - the fake's memory as a device's: the program itself may not touch it
 *
 * FURLONG_GPU_FAKE_GUARD=1: what the fake has mapped is closed but while a function of its table
 * copies, fills or launches. Whoever reads or writes it as if it were the host's is ended by a
 * signal, as with a real device, where no device is. Other threads' faults go unseen while one of
 * them has it open: it finds mistakes, it forbids nothing. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

bool guard_on(void);
/* A mapping that has come, with the rights that it has while it is open, and one that goes. */
void guard_add(uint64_t addr, uint64_t bytes, int prot);
void guard_remove(uint64_t addr, uint64_t bytes); /* all that begin there; first */
/* Open and close nest, of all threads together. No guard: nothing. */
void guard_open(void);
void guard_close(void);
