/* tests/gpu/mem.h - memory that a test looks at wherever it lies: the host's, or a device's by its
 * table
 *
 * A device's memory is no memory of the program: what a test writes or reads there goes through
 * these. Where the address lies is asked of the driver each time, and what is on no device is the
 * host's. Each of them fails the test when the device does. One thread at a time. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool t_on_cuda(void); /* the devices here are real: what only the fake can do is skipped */

void t_mem_write(void *to, const void *from, size_t bytes); /* from: the host's */
void t_mem_read(void *to, const void *from, size_t bytes);  /* to: the host's   */
void t_mem_fill(void *to, uint8_t value, size_t bytes);
bool t_mem_same(const void *at, const void *wanted, size_t bytes); /* each of them anywhere */
uint8_t t_mem_byte(const void *at);
bool t_mem_there(const void *at); /* on a device, or such that the program can read it */

/* Somebody who takes the device's memory, but for so many bytes (as near as its allocator lets
 * one); 0: all of it. A device that does not say what it has is left alone. */
struct t_hog;
struct t_hog *t_hog_leave(const char *uuid, uint64_t leave_bytes);
void t_hog_end(struct t_hog *h);
