/* tests/xfer/rig_priv.h - what the files of the rig need of each other; tests include epoch_rig.h
 */
#pragma once
#include "tests/xfer/epoch_rig.h"

/* rig_model.c: the manifest of p, sealed; shard: its part of what can be cut, else all of it. */
void rig_lay_out(struct rig_proc *p, bool shard, bool head);

/* rig_proc.c */
void rig_devices_open(void);
struct rig_proc *rig_proc_add(struct rig *r, bool source, unsigned party, unsigned rank,
                              unsigned ranks, uint32_t attempt);
void rig_proc_close(struct rig_proc *p); /* its streams */
void rig_proc_fini(struct rig_proc *p);  /* its source or sink, and memory; streams last */
/* shared: the stream that the plane's processes have to it; else one more, of the driver's own. */
struct call_peer *rig_call(struct rig *r, struct rig_proc *to, bool shared);
