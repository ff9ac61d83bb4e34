/* tests/gpu/two.h - a second process of the same test program, and descriptors between the two */
#pragma once
#include <stddef.h>
#include <sys/types.h>

enum { TWO_FD = 3 };
/* Starts /proc/self/exe --second MODE with a socket as TWO_FD; *sock is this side's. */
pid_t two_start(const char *mode, int *sock);
void two_send(int sock, const void *data, size_t len, int fd); /* fd: -1 for none */
size_t two_take(int sock, void *into, size_t len, int *fd);    /* fewer at the end of the stream */
int two_end(pid_t pid, int sock);                              /* its wait status */
