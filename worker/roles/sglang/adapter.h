/* worker/roles/sglang/adapter.h - an SGLang server as a rollout engine of a run: docs/sglang.md */
#pragma once
#include "worker/roles/sglang/calls.h"
#include "worker/roles/sglang/loader.h"
#include "worker/roles/sglang/weights.h"

struct adapter {
    struct furlong *f;
    struct sglang_opts o;
    struct sglang_server server;
    struct loader loader;
    struct calls *calls;
    struct weights *weights;
    struct sglang_serves serves;
    bool paused, stopped; /* stopped: told to leave */
    uint32_t out;         /* tags that SGLang has released */
};
/* -1: go on; else exit with it. */
int adapter_options(struct sglang_opts *o, int argc, char **argv);
enum fl_status adapter_run(struct adapter *a, struct fl_err *err); /* until told to stop */
