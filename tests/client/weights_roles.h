/* tests/client/weights_roles.h - a trainer and an engine whose weights are a pattern of the version
 *
 * ON_DEVICE in the environment: the weights lie on the first device
 *
 * KEEP in the environment: the engine's weights are kept in host memory while they are out
 *
 * FAULT_1=SPEC: a fault point of the first attempt of rank 1 alone
 *
 * LIES=arena|plain|pool|row: the trainer gives its tensors where they lie: in the arena, in memory that has an IPC
 * handle, in memory that no other process can map, all in one of these as an engine would lay them out
 *
 * trainer: "write" body uint64 version: begin, write the pattern, publish; "abandon": begin, write something else, abandon
 * engine:  "drop", "drop_at_commit": drops the set, now or when a COMMIT waits, and accepts it anew
 *          "check": body "VERSION ok|wrong|none DIGEST0 paused|running resident-KiB pauses descriptors address"; descriptors:
 *          0 unless asked by "check_fds"
 *          LOADS=[+]FIFO: between join and accept it (+: the last rank alone) waits until somebody has opened and
 * closed the other end
 *          DIE_AT=VERSION in the environment: kills itself when that version is to be committed,
 * once (the file DIE_MARK is made first) */
#pragma once
#include <furlong/furlong.h>

int run_trainer(struct furlong *f); /* until it is stopped; 0, or 1 and a line on stderr */
int run_engine(struct furlong *f);
int play_role(const char *role); /* joins, runs, leaves: the exit code of a process */
