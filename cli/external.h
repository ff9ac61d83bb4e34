/* cli/external.h - a cluster that is somebody else's: nothing of it is started or stopped
 *
 * With MILES_SCRIPT_EXTERNAL_RAY a run goes to the head at RAY_ADDRESS. One of ours takes it as any job. To one of
 * Ray's a job is submitted that brings Furlong's programs along and runs deploy/external_ray: a worker daemon a node in
 * a placement group of Ray's, the head and the run beside the driver, and everything given back at the end. */
#pragma once
#include "cli/launch.h"
#include "cli/ray_pack.h"

enum { EXTERNAL_HEADER_BYTES = 4096 };
struct external {
    struct cli_cluster cluster;
    bool ours;              /* Furlong answers, else Ray */
    char ray_version[32];
    char header_text[EXTERNAL_HEADER_BYTES];
};
bool external_asked(void);
/* Who answers at address, else at FURLONG_ADDRESS, RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else at 127.0.0.1:8265.
 * "auto": the head of ours or of Ray's that runs here. HOST:PORT may be the port that nodes join: then 8265 of HOST.
 *
 * FL_UNREACHABLE  nobody answers; FL_DENIED: another token is wanted; FL_UNSUPPORTED: no head, or Ray is too old */
enum fl_status external_find(const char *address, struct external *out, struct fl_err *err);

struct external_run { /* on a head of Ray's */
    const char *program, *id;
    const char *programs; /* folder of ours that is there on every node; NULL: they are sent */
    const struct launch *launch; /* whose --num-nodes, --node-gpus and --join-timeout count */
    const char *pass;            /* --pass-env, or NULL */
    const char *nodes;           /* names of the nodes to take, with commas between, or NULL */
    int64_t devices;           /* that the run needs at least                        */
    const char *const *words;  /* flags of furlong train, ended by NULL              */
    bool json;                 /* the step records to stdout, all else to stderr     */
    uint32_t away_max_ms;
};
/* Submits it and follows it to its end; the exit code of the verb. */
int external_run(const struct external *x, const struct external_run *r);

/* ==== for tests ==================================================================================== */
extern const struct ray_pack_file external_files[]; /* deploy/external_ray */
extern const size_t external_n_files;
/* The libraries of a program by what LD_TRACE_LOADED_OBJECTS prints of it, but those of the C library itself, which
 * each machine has its own of. Calls each(name, path). Pure. */
void external_libraries(const char *trace, void (*each)(void *arg, const char *name, const char *path), void *arg);
/* The runtime_env of the job: the package, and the variables that go along, pass (--pass-env) among them.
 * FL_INVALID: one of pass is not set here, or looks like a secret */
enum fl_status external_env(const char *uri, const char *pass, json_t **out, struct fl_err *err);
