/* tests/client/weights_roles.h - a trainer and an engine whose weights are a pattern of the version
 *
 * trainer: "write" body uint64 version: begin, write the pattern, publish
 * engine:  "check": body "VERSION ok|wrong|none DIGEST0 paused|running resident-KiB pauses"
 *          LOADS=[+]FIFO: between join and accept it (+: the last rank alone) waits until somebody has opened and
 * closed the other end
 *          DIE_AT=VERSION in the environment: kills itself when that version is to be committed,
 * once (the file DIE_MARK is made first) */
#pragma once
#include <furlong/furlong.h>

int play_trainer(void);
int play_engine(void);
