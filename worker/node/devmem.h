/* worker/node/devmem.h - is the memory of a worker's devices back after its end?
 *
 * The driver frees it late, about 80 ms after the process is gone, and process ids of NVML are the
 * host's. So the totals of a device are compared: before the worker started, and after it ended. A
 * device that another worker holds as well cannot be judged, nor can one that does not say. */
#pragma once
#include "worker/node/node_priv.h"

void node_devmem_before(struct worker *w);
/* true: back(w) follows, at the latest after 2 s; w->exit.device_bytes_left says what stayed. */
bool node_devmem_wait(struct worker *w, void (*back)(struct worker *w));
void node_devmem_drop(struct worker *w);
