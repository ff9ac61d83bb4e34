/* transport/xfer/xfer.h - the words of the weight plane: versions, manifests, plans, epochs */
#pragma once
#include "transport/call/call.h"
#include "transport/xfer/manifest.h"
#include "transport/xfer/plan.h"

struct xfer_epoch { uint32_t attempt, seq; }; /* attempt: of the driver, from the head */
