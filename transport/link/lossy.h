/* transport/link/lossy.h - for tests: shm with a bad day
 *
 * Pulls are counted from 1 over all lossy links of the process. Every pull is late by delay_ms; the
 * one of number cut moves half of its bytes and ends FL_UNREACHABLE; the one of number lost never
 * ends, until the link is aborted or closed. */
#pragma once
#include "transport/link/link.h"

struct link_lossy_script { unsigned delay_ms, cut, lost, pulls; };
extern struct link_lossy_script link_lossy_script;
extern const struct link_ops link_lossy;
