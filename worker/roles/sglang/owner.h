/* worker/roles/sglang/owner.h - whose server answers at a port: the one that we started, or
 * another's
 *
 * Between the moment when a port was found free and the one when a server has loaded its model and
 * binds it, somebody else's server may come to listen there. It answers /health as well as ours
 * would. */
#pragma once
#include "common/base/base.h"

enum owner {
    OWNER_UNKNOWN, /* cannot be told: another user's process, or one that a container engine, or a
                      forwarder that has long been there, has for us */
    OWNER_OURS,
    OWNER_OTHERS
};
struct owner_us {
    int pid;            /* of the command, the leader of its process group */
    const char *socket; /* its FURLONG_SGLANG_SOCKET, which no other engine has */
};
/* who: who listens, for people. */
enum owner sglang_port_owner(uint16_t port, const struct owner_us *us, char *who, size_t cap);

/* ---- pure, for tests: what is known of one process that listens ---- */
struct owner_sign {
    bool below;         /* a child of pid, of any degree, or of its group */
    const char *socket; /* of its environment; NULL: none, or it may not be read */
};
enum owner sglang_owner_of(const struct owner_sign *s, const struct owner_us *us);
