/* worker/roles/sglang/server.h - one SGLang server: started by us or found, asked by HTTP
 *
 * Paths and members: docs/sglang.md. What a server does not know it ignores, what it does not say
 * is taken as "no": releases differ. Everything here waits; calls of many at a time are in
 * calls.h. */
#pragma once
#include <jansson.h>
#include <sys/types.h>

#include "common/base/base.h"

struct sglang_opts {
    const char *cmd, *url, *model, *weights, *weights_dir, *socket, *pause, *api_key, *group_cmd;
    double start_timeout_s, control_timeout_s;
    int64_t slots;
    bool check_equal;
};
struct sglang_server {
    char url[256];
    char auth[512];
    const char *headers[3];
    pid_t pid; /* 0: found, not started; leader of its own process group */
    int pidfd;
    uint16_t port;      /* of our child */
    const char *socket; /* that it was given */
    bool others_said;
    /* what it said of itself */
    char version[64], model[1024], weight_version[128], parallel[64],
        here[64];       /* here: our address as it sees us */
    uint32_t tp, ranks; /* ranks: all that load weights */
    bool has_loader, has_saver;
};

/* --sglang-cmd: a shell runs it on a free port, socket (borrowed) in its environment; FL_AGAIN is
 * what look gives until it is healthy. --sglang-url: nothing is started. */
enum fl_status sglang_server_start(struct sglang_server *s, const struct sglang_opts *o,
                                   const char *socket, struct fl_err *err);
/* FL_AGAIN: not healthy yet, or another's server answers there; err says in which way.
 * FL_UNREACHABLE: our child has ended, and how. */
enum fl_status sglang_server_look(struct sglang_server *s, struct fl_err *err);
/* Fills what it says of itself. */
enum fl_status sglang_server_about(struct sglang_server *s, uint32_t ms, struct fl_err *err);
/* FL_UNREACHABLE: our child has ended, and how; else FL_OK. */
enum fl_status sglang_server_lives(struct sglang_server *s, struct fl_err *err);
/* Ends our child and its group; what left the group is ended by the keeper when we are gone. */
void sglang_server_stop(struct sglang_server *s);

/* POST, or GET without a body (body_take NULL). out may be NULL; json_null() for an answer without
 * one. FL_INVALID: refused (4xx), in the server's words; FL_UNREACHABLE: 5xx or no server;
 * FL_CORRUPT: no JSON. */
enum fl_status sglang_ask(const struct sglang_server *s, const char *path, json_t *body_take,
                          uint32_t ms, json_t **out, struct fl_err *err);
/* The same for an answer that is here. */
enum fl_status sglang_answer(const char *path, unsigned status, const char *body, size_t len,
                             json_t **out, struct fl_err *err);
/* sglang_ask(), and "success" of the answer: false is FL_INVALID with its message. */
enum fl_status sglang_do(const struct sglang_server *s, const char *path, json_t *body_take,
                         uint32_t ms, struct fl_err *err);
enum fl_status sglang_success(const char *path, const json_t *answer, struct fl_err *err);
