/* gRPC's completion queue and its pump, and the arguments of channels and servers. */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "transport/wire/rpc_priv.h"

enum {
    MESSAGE_MAX = 8 << 20, /* that we take: nothing is proved yet */
    DRAIN = 64,            /* events of one chain                 */
    /* longer than a head's silence of 15 s: its word that a node was given up still finds the
     * connection */
    KEEP_TIMEOUT_MS = 20000,
    SERVER_KEEP_MS = 60000
};

/* ---- the queue and its pump, from the first use to the end of the process */

static struct {
    pthread_mutex_t lock;
    unsigned users; /* lines and ports that are not gone yet */
    grpc_completion_queue *cq;
    pthread_t pump;
    bool up;
} hub = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void tag_back(struct fl_task *t)
{
    struct rpc_tag *tag = container_of(t, struct rpc_tag, back);

    tag->out = false;
    tag->done(tag->owner, tag->ok);
}

static void *pump(void *arg)
{
    gpr_timespec never = gpr_inf_future(GPR_CLOCK_REALTIME);
    gpr_timespec past = gpr_inf_past(GPR_CLOCK_REALTIME);

    for (;;) {
        grpc_event ev = grpc_completion_queue_next(arg, never, NULL);
        struct fl_task *first = NULL, **end = &first;
        struct fl_loop *loop = NULL;

        for (unsigned n = 0; ev.type == GRPC_OP_COMPLETE; n++) {
            struct rpc_tag *tag = ev.tag;

            assert(atomic_load(&tag->out));
            tag->ok = ev.success;
            if (loop && tag->loop && tag->loop != loop) { /* several loops in a process: in tests */
                fl_post_chain(loop, first);
                first = NULL;
                end = &first;
            }
            if (tag->loop) {
                loop = tag->loop;
                tag->back.next = NULL;
                *end = &tag->back;
                end = &tag->back.next;
            } else {
                tag->done(tag->owner, ev.success); /* of no loop: see channel_leave() */
            }
            if (n + 1 == DRAIN)
                break;
            ev = grpc_completion_queue_next(arg, past, NULL);
        }
        if (first)
            fl_post_chain(loop, first);
        if (ev.type == GRPC_QUEUE_SHUTDOWN)
            return NULL; /* comes last: every tag has been posted */
    }
}

/* At exit: only when nothing of ours is open; a process that leaves in the middle just leaves. */
static void hub_end(void)
{
    pthread_mutex_lock(&hub.lock); /* the pump may give one back just now: channel_settled() */
    bool open = !hub.up || hub.users;

    pthread_mutex_unlock(&hub.lock);
    if (open)
        return;
    grpc_completion_queue_shutdown(hub.cq);
    pthread_join(hub.pump, NULL);
    grpc_completion_queue_destroy(hub.cq);
    grpc_shutdown_blocking();
    hub.up = false;
}

static enum fl_status hub_start(struct fl_err *err)
{
    sigset_t all, before;
    int rc;

    sigfillset(&all); /* signals are the loop's: none of gRPC's threads takes them */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    /* Its own resolver asks a name server for the family that the hosts file lacks, and waits for
     * it where there is none. */
    bool ours = !getenv("GRPC_DNS_RESOLVER") && setenv("GRPC_DNS_RESOLVER", "native", 0) == 0;

    grpc_init();
    if (ours)
        (void)unsetenv("GRPC_DNS_RESOLVER"); /* not for those that are started from here */
    hub.cq = grpc_completion_queue_create_for_next(NULL);
    rc = FL_FAULT("wire.pump") ? EAGAIN : pthread_create(&hub.pump, NULL, pump, hub.cq);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc == 0) {
        hub.up = true;
        atexit(hub_end);
        return FL_OK;
    }
    grpc_completion_queue_shutdown(hub.cq);
    (void)grpc_completion_queue_next(hub.cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    grpc_completion_queue_destroy(hub.cq);
    grpc_shutdown();
    errno = rc;
    return fl_fail_errno(err, "thread for gRPC");
}

enum fl_status rpc_hub_get(struct fl_err *err)
{
    enum fl_status st = FL_OK;

    pthread_mutex_lock(&hub.lock);
    if (!hub.up)
        st = hub_start(err);
    if (st == FL_OK)
        hub.users++;
    pthread_mutex_unlock(&hub.lock);
    return st;
}

void rpc_hub_put(void)
{
    pthread_mutex_lock(&hub.lock);
    hub.users--;
    pthread_mutex_unlock(&hub.lock);
}

grpc_completion_queue *rpc_queue(void)
{
    return hub.cq;
}

void rpc_tag_init(struct rpc_tag *t, struct fl_loop *l, void *owner,
                  void (*done)(void *owner, bool ok))
{
    t->back.run = tag_back;
    t->loop = l;
    t->owner = owner;
    t->done = done;
}

/* ---- arguments: all that matter are set, none is left to a default */

static const grpc_arg all_args[] = {
#define ARG(name, number)                                                                          \
    {                                                                                              \
        GRPC_ARG_INTEGER, (char *)(uintptr_t)(name),                                               \
        {                                                                                          \
            .integer = (number)                                                                    \
        }                                                                                          \
    }
    ARG(GRPC_ARG_ALLOW_REUSEPORT, 0), /* else two heads share a port without an error        */
    ARG(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
    ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, MESSAGE_MAX), /* not enforced in a minimal stack */
    ARG(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, MESSAGE_MAX),
    ARG(GRPC_ARG_MAX_CONCURRENT_STREAMS, 8),
    ARG(GRPC_ARG_MAX_METADATA_SIZE, 8 << 10),
    ARG(GRPC_ARG_KEEPALIVE_TIME_MS, RPC_KEEP_MS),
    ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, KEEP_TIMEOUT_MS),
    ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
    ARG(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
    ARG(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, RPC_KEEP_MS / 2),
    ARG(GRPC_ARG_HTTP2_BDP_PROBE, 0), /* its pings wake idle daemons */
    ARG(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, WIRE_AGAIN_MIN_MS),
    ARG(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, WIRE_AGAIN_MAX_MS),
    ARG(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, WIRE_AGAIN_MAX_MS),
    ARG(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, WIRE_CONNECT_MS),
    ARG(GRPC_ARG_MAX_CONNECTION_IDLE_MS, WIRE_CONNECT_MS), /* without a call: nobody of ours is */
    ARG(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),            /* one connection a line */
    ARG(GRPC_ARG_ENABLE_RETRIES, 0),
    ARG(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
    ARG(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0),
    ARG(GRPC_ARG_ENABLE_CHANNELZ, 0),
    ARG(GRPC_ARG_MAX_CHANNEL_TRACE_EVENT_MEMORY_PER_NODE, 0),
#undef ARG
};
const grpc_channel_args rpc_channel_args = { FL_LEN(all_args), (grpc_arg *)(uintptr_t)all_args };

/* A server pings late. Where what a client says does not arrive but what is said to it does, TCP
 * sends nothing behind a ping that nobody acknowledges, and the word that the client was given up
 * is what has to get through. */
grpc_server *rpc_server_create(void)
{
    grpc_arg own[FL_LEN(all_args)];

    memcpy(own, all_args, sizeof(own));
    for (size_t i = 0; i < FL_LEN(own); i++)
        if (strcmp(own[i].key, GRPC_ARG_KEEPALIVE_TIME_MS) == 0)
            own[i].value.integer = SERVER_KEEP_MS;
    return grpc_server_create(&(grpc_channel_args){ FL_LEN(own), own }, NULL);
}
