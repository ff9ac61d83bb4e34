/* worker/keep/output.h - a worker's out and err
 *
 * Plain files that the worker appends to: no pipe, so neither a daemon's nor a keeper's death can
 * end it by SIGPIPE. The bound holds by giving the oldest pages back: a hole at the front, so that
 * offsets stay good for whoever follows the file. A filesystem without holes gets its file emptied
 * instead. */
#pragma once
#include <stddef.h>
#include <stdint.h>

int output_open(const char *path); /* -1: errno */
/* Returns how full the file is in percent of the bound after it was held. max_bytes 0: no bound. */
unsigned output_hold(int fd, uint64_t max_bytes);
/* The end of the file, at most cap bytes, from the start of a line where there is one. */
size_t output_tail(int fd, char *buf, size_t cap);
