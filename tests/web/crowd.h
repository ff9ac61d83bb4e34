/* tests/web/crowd.h - a head with many nodes and jobs, for the page and what it reads
 *
 * Written into the head's own tables, with no daemon behind any of it. Names are what an enemy
 * would choose. Node 0 has two devices with a trainer and two rollout processes of the job
 * "train-live". */
#pragma once
#include "head/state.h"

enum { CROWD_STEPS = 60 };
extern const char crowd_evil[]; /* markup, quotes, a turn of direction; a part of many names */

void crowd_make(struct head *h, unsigned nodes, unsigned jobs);
