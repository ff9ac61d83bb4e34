/* tests/cluster/next_protocol.c - HELLO as a release of the next protocol says it: linked into a whole
 * worker daemon, in front of the one of this release */
#include "transport/wire/wire.h"

#define WIRE_MAJOR 2
#include "transport/wire/frame.c"
