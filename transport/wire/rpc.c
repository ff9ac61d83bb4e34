/* gRPC, the C core: between head and daemons. The only file that includes it.
 *
 * A line is one call of one streaming method; its messages are pieces of the byte stream, cut
 * anywhere. One completion queue and one pump thread serve the process. The pump waits, drains what
 * is there, and posts it as one chain; everything that starts something runs on the loop thread.
 * Each operation in flight has a tag inside its line or port, and each tag comes back exactly once
 * before that memory goes. One receive is outstanding, and not arming it again is the
 * back-pressure; one send is in flight, and what gathers meanwhile is the next message. */
#include <assert.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/door/door.h"
#include "transport/tls/tls.h"
#include "transport/wire/resolve.h"
#include "transport/wire/sock.h"

enum {
    MESSAGE_BYTES = 4 << 20, /* of one gRPC message that we send       */
    MESSAGE_MAX = 8 << 20,   /* that we take: nothing is proved yet    */
    DRAIN = 64,              /* events of one chain                    */
    PART_MS = 1000,          /* for the last bytes of a line to leave  */
    LOOK_MS = 2000,          /* to find out why TLS was not to be      */
    SETTLE_MS = 5000,        /* gRPC's own limit is WIRE_AGAIN_MAX_MS  */
    KEEP_MS = 10000,
    KEEP_TIMEOUT_MS = 20000, /* longer than a head's silence of 15 s: its word that a node was given up still finds the connection */
    SERVER_KEEP_MS = 60000,
    KNOCKS = 256 /* connections that have said nothing yet */
};
#define NONE_SHOWN UINT_MAX
#define METHOD "/furlong.Wire/Stream"
#define MARK "furlong" /* in the server's first metadata: it is one of ours */

struct rpc_tag {
    struct fl_task back;
    struct fl_loop *loop;
    bool ok;
    atomic_bool out; /* orders the loop's last touch before the pump's first */
    void (*done)(void *owner, bool ok);
    void *owner;
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

static enum fl_status hub_get(struct fl_err *err)
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

static void hub_put(void)
{
    pthread_mutex_lock(&hub.lock);
    hub.users--;
    pthread_mutex_unlock(&hub.lock);
}

/* ---- arguments: all that matter are set, none is left to a default */

static const grpc_arg channel_args[] = {
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
    ARG(GRPC_ARG_KEEPALIVE_TIME_MS, KEEP_MS),
    ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, KEEP_TIMEOUT_MS),
    ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
    ARG(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
    ARG(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, KEEP_MS / 2),
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
static const grpc_channel_args args = { FL_LEN(channel_args), (grpc_arg *)(uintptr_t)channel_args };

/* A server pings late. Where what a client says does not arrive but what is said to it does, TCP sends nothing behind a
 * ping that nobody acknowledges, and the word that the client was given up is what has to get through. */
static grpc_server *server_create(void)
{
    grpc_arg own[FL_LEN(channel_args)];

    memcpy(own, channel_args, sizeof(own));
    for (size_t i = 0; i < FL_LEN(own); i++)
        if (strcmp(own[i].key, GRPC_ARG_KEEPALIVE_TIME_MS) == 0)
            own[i].value.integer = SERVER_KEEP_MS;
    return grpc_server_create(&(grpc_channel_args){ FL_LEN(own), own }, NULL);
}

/* ---- a line */

struct rpc_line {
    struct wire_line k;
    grpc_channel *channel; /* client */
    grpc_call *call;
    struct rpc_tag first, recv, send, end, part;
    struct fl_task poke;
    struct fl_timer late;
    bool up, dropped, parted, over; /* over: the status is here, nothing more comes */
    bool blocked;                   /* a write waits for the send that is in flight */
    grpc_byte_buffer *incoming;     /* gRPC's while recv is out */
    grpc_byte_buffer *got;          /* being read               */
    grpc_byte_buffer_reader reader;
    grpc_slice slice; /* of got, from slice_off on */
    size_t slice_off;
    bool has_reader, has_slice;
    grpc_metadata_array metadata, trailing;
    grpc_status_code code;
    grpc_slice details;
    int cancelled; /* server: the client is gone */
    struct tls_id *tls;
    struct fl_work look; /* gRPC says too little of a connection that was not to be */
    struct fl_err why, found;
    char target[WIRE_HOST_MAX + 8];
};

static void part(struct rpc_line *k);

static void batch(struct rpc_line *k, struct rpc_tag *tag, const grpc_op *ops, size_t n)
{
    grpc_call_error rc;

    tag->out = true;
    rc = grpc_call_start_batch(k->call, ops, n, tag, NULL);
    if (rc != GRPC_CALL_OK) { /* ours: a batch that may not be started now */
        tag->ok = false;
        fl_post(k->k.loop, &tag->back);
    }
}

/* A channel that is destroyed between its own SETTINGS and the other side's leaves its socket open
 * for good (1.51.1), so one that is connecting goes once it has or has not. No loop waits for that:
 * the pump destroys it. */
struct leaving {
    struct rpc_tag settled;
    grpc_channel *channel;
};

static void channel_settled(void *owner, bool ok)
{
    struct leaving *v = owner;

    (void)ok; /* false: not by its deadline */
    grpc_channel_destroy(v->channel);
    free(v);
    hub_put();
}

static void channel_leave(grpc_channel *channel)
{
    bool connects = grpc_channel_check_connectivity_state(channel, 0) == GRPC_CHANNEL_CONNECTING;
    struct leaving *v = connects ? calloc(1, sizeof(*v)) : NULL;

    if (!v) {
        grpc_channel_destroy(channel);
        return;
    }
    (void)hub_get(NULL); /* it is up: the line holds it too */
    v->channel = channel;
    v->settled.owner = v;
    v->settled.done = channel_settled;
    v->settled.out = true;
    grpc_channel_watch_connectivity_state(
        channel, GRPC_CHANNEL_CONNECTING,
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(SETTLE_MS, GPR_TIMESPAN)),
        hub.cq, &v->settled);
}

static void line_free(struct rpc_line *k)
{
    if (k->has_slice)
        grpc_slice_unref(k->slice);
    if (k->has_reader)
        grpc_byte_buffer_reader_destroy(&k->reader);
    if (k->got)
        grpc_byte_buffer_destroy(k->got);
    if (k->call)
        grpc_call_unref(k->call);
    if (k->channel)
        channel_leave(k->channel);
    grpc_metadata_array_destroy(&k->metadata);
    grpc_metadata_array_destroy(&k->trailing);
    grpc_slice_unref(k->details);
    fl_timer_cancel(&k->late);
    fl_task_cancel(k->k.loop, &k->poke);
    fl_loop_release(k->k.loop);
    hub_put();
    free(k);
}

static void free_when_quiet(struct rpc_line *k)
{
    if (k->dropped && k->over && !k->look.loop && !k->first.out && !k->recv.out && !k->send.out &&
        !k->end.out && !k->part.out)
        line_free(k);
}

static void arm_recv(struct rpc_line *k)
{
    grpc_op op = { .op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &k->incoming };

    batch(k, &k->recv, &op, 1);
}

static void got_done(struct rpc_line *k)
{
    if (k->has_slice)
        grpc_slice_unref(k->slice);
    if (k->has_reader)
        grpc_byte_buffer_reader_destroy(&k->reader);
    k->has_slice = k->has_reader = false;
    grpc_byte_buffer_destroy(k->got);
    k->got = NULL;
    arm_recv(k);
}

static void recv_done(void *owner, bool ok)
{
    struct rpc_line *k = owner;

    k->got = k->incoming;
    k->incoming = NULL;
    if (!ok || !k->got)
        k->over |= !k->channel; /* a client of ours has ended: its status asks for no answer */
    if (k->dropped) {
        if (k->got)
            got_done(k); /* read and dropped, so that the end comes through */
        free_when_quiet(k);
        return;
    }
    if (k->got && (!ok || !grpc_byte_buffer_reader_init(&k->reader, k->got))) {
        grpc_byte_buffer_destroy(k->got);
        k->got = NULL;
        k->over = true;
    }
    k->has_reader = k->got != NULL;
    if (k->k.user)
        k->k.user->ready(k->k.arg, LINE_IN);
}

static bool next_slice(struct rpc_line *k)
{
    if (k->has_slice && k->slice_off < GRPC_SLICE_LENGTH(k->slice))
        return true;
    if (k->has_slice)
        grpc_slice_unref(k->slice);
    k->has_slice = grpc_byte_buffer_reader_next(&k->reader, &k->slice);
    k->slice_off = 0;
    return k->has_slice;
}

static enum fl_status hung_up(struct rpc_line *k, struct fl_err *err)
{
    char text[128] = "";
    size_t n = GRPC_SLICE_LENGTH(k->details);

    if (!k->channel || k->code == GRPC_STATUS_OK || n == 0)
        return fl_fail(err, FL_UNREACHABLE, "the other side hung up");
    memcpy(text, GRPC_SLICE_START_PTR(k->details), n < sizeof(text) - 1 ? n : sizeof(text) - 1);
    fl_err_set(err, FL_UNREACHABLE, FL_FROM_GRPC, (int)k->code, "%s", text);
    return FL_UNREACHABLE;
}

static enum fl_status rpc_read(struct wire_line *line, const struct iovec *iov, unsigned n,
                               int fds[LINE_FDS], unsigned *n_fds, size_t *got, struct fl_err *err)
{
    struct rpc_line *k = container_of(line, struct rpc_line, k);
    size_t sum = 0;

    (void)fds;
    (void)n_fds;
    if (!k->got)
        return k->recv.out || !k->over ? FL_AGAIN : hung_up(k, err);
    for (unsigned i = 0; i < n; i++) {
        size_t at = 0;

        while (at < iov[i].iov_len && next_slice(k)) {
            size_t left = GRPC_SLICE_LENGTH(k->slice) - k->slice_off;
            size_t take = iov[i].iov_len - at < left ? iov[i].iov_len - at : left;

            memcpy((char *)iov[i].iov_base + at, GRPC_SLICE_START_PTR(k->slice) + k->slice_off,
                   take);
            k->slice_off += take;
            at += take;
        }
        sum += at;
        if (at < iov[i].iov_len)
            break;
    }
    if (next_slice(k))
        fl_post(line->loop, &k->poke);
    else
        got_done(k);
    *got = sum;
    return sum ? FL_OK : FL_AGAIN;
}

static void poked(struct fl_task *t)
{
    struct rpc_line *k = container_of(t, struct rpc_line, poke);

    if (!k->dropped && (k->got || k->over))
        k->k.user->ready(k->k.arg, LINE_IN);
}

static enum fl_status rpc_write(struct wire_line *line, const struct iovec *iov, unsigned n,
                                const int *fds, unsigned n_fds, size_t *wrote, struct fl_err *err)
{
    struct rpc_line *k = container_of(line, struct rpc_line, k);
    grpc_op op = { .op = GRPC_OP_SEND_MESSAGE };
    size_t sum = 0, at = 0;
    grpc_slice slice;

    (void)fds;
    (void)n_fds;
    if (k->over)
        return hung_up(k, err);
    if (k->send.out) {
        k->blocked = true;
        return FL_AGAIN;
    }
    for (unsigned i = 0; i < n; i++)
        sum += iov[i].iov_len;
    if (sum > MESSAGE_BYTES)
        sum = MESSAGE_BYTES;
    slice = grpc_slice_malloc(sum);
    for (unsigned i = 0; at < sum; i++) {
        size_t part_bytes = iov[i].iov_len < sum - at ? iov[i].iov_len : sum - at;

        memcpy(GRPC_SLICE_START_PTR(slice) + at, iov[i].iov_base, part_bytes);
        at += part_bytes;
    }
    op.data.send_message.send_message = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    batch(k, &k->send, &op, 1);
    grpc_byte_buffer_destroy(op.data.send_message.send_message);
    *wrote = sum;
    return FL_OK;
}

static void send_done(void *owner, bool ok)
{
    struct rpc_line *k = owner;
    bool blocked = k->blocked;

    (void)ok; /* a send that failed is followed by the end */
    k->blocked = false;
    if (k->dropped) {
        part(k);
        free_when_quiet(k);
    } else if (blocked) {
        k->k.user->ready(k->k.arg, LINE_OUT);
    }
}

/* ---- why there was no connection: gRPC does not tell a certificate that has expired from one of
 * another CA, nor a port that speaks TLS from one that is silent */

static void look_work(struct fl_work *w) /* pool thread */
{
    struct rpc_line *k = container_of(w, struct rpc_line, look);
    char host[WIRE_HOST_MAX];
    uint16_t port;

    if (wire_target_split(k->target, host, &port, NULL) != FL_OK)
        return;
    enum fl_status st = tls_diagnose(k->tls, host, port, LOOK_MS, &k->found);

    if (st == FL_OK && !k->tls)
        fl_fail(&k->found, FL_UNSUPPORTED,
                "%s speaks TLS and this side does not: set RAY_USE_TLS=1 and its three files",
                k->target);
    else if (st == FL_OK || !k->tls)
        k->found = k->why;
}

static void look_done(struct fl_work *w, enum fl_status st)
{
    struct rpc_line *k = container_of(w, struct rpc_line, look);
    bool known = st == FL_OK && (k->found.status == FL_DENIED || k->found.status == FL_UNSUPPORTED);
    struct fl_err err = known ? k->found : k->why;

    if (k->dropped) {
        free_when_quiet(k);
        return;
    }
    fl_wrap(&err, err.status, "connect to %s", k->target);
    k->k.user->down(k->k.arg, &err);
}

static bool nobody_there(const struct fl_err *why)
{
    static const char *const said[] = { "refused", "unreachable", "No route", "timed out",
                                        "resol" };

    for (size_t i = 0; i < FL_LEN(said); i++)
        if (strstr(why->text, said[i]))
            return true;
    return false;
}

static void end_done(void *owner, bool ok)
{
    struct rpc_line *k = owner;

    (void)ok;
    k->over = true;
    if (k->dropped) {
        free_when_quiet(k);
    } else if (k->channel && !k->up) {
        struct fl_err err;

        hung_up(k, &err);
        k->why = err;
        if (!nobody_there(&err)) {
            k->look = (struct fl_work){ .work = look_work, .done = look_done };
            fl_work_start(k->k.loop, &k->look);
            return;
        }
        fl_wrap(&err, FL_UNREACHABLE, "connect to %s", k->target);
        k->k.user->down(k->k.arg, &err);
    } else {
        fl_post(k->k.loop, &k->poke); /* behind a message that came in the same burst */
    }
}

/* ---- leaving: what was sent goes first, then our half is closed, then the other side has a second
 */

static void part_late(struct fl_timer *t, uint64_t now_ns)
{
    struct rpc_line *k = container_of(t, struct rpc_line, late);

    (void)now_ns;
    grpc_call_cancel(k->call, NULL);
}

static void part_done(void *owner, bool ok)
{
    (void)ok;
    free_when_quiet(owner);
}

static void part(struct rpc_line *k)
{
    grpc_slice none = grpc_empty_slice();
    grpc_op op = { .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT };

    if (k->parted || k->send.out)
        return;
    k->parted = true;
    if (!k->channel) {
        op.op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        op.data.send_status_from_server.status = GRPC_STATUS_OK;
        op.data.send_status_from_server.status_details = &none;
    }
    batch(k, &k->part, &op, 1);
}

static void rpc_drop(struct wire_line *line)
{
    struct rpc_line *k = container_of(line, struct rpc_line, k);

    k->dropped = true;
    fl_loop_hold(line->loop); /* until every tag is back */
    if (k->up) {
        k->late.fire = part_late;
        fl_timer_arm_in(line->loop, &k->late, PART_MS);
        part(k);
        if (k->got)
            got_done(k);
    } else if (k->call) {
        grpc_call_cancel(k->call, NULL);
    }
    free_when_quiet(k);
}

static const struct line_ops rpc_ops = { .write = rpc_write, .read = rpc_read, .drop = rpc_drop };

static void tag_init(struct rpc_tag *t, struct fl_loop *l, void *owner,
                     void (*done)(void *owner, bool ok))
{
    t->back.run = tag_back;
    t->loop = l;
    t->owner = owner;
    t->done = done;
}

static struct rpc_line *line_create(struct fl_loop *l, void (*first)(void *owner, bool ok))
{
    struct rpc_line *k = FL_FAULT("wire.line") ? NULL : calloc(1, sizeof(*k));

    if (!k)
        return NULL;
    k->k = (struct wire_line){ .ops = &rpc_ops, .loop = l };
    k->poke.run = poked;
    k->details = grpc_empty_slice();
    grpc_metadata_array_init(&k->metadata);
    grpc_metadata_array_init(&k->trailing);
    tag_init(&k->first, l, k, first);
    tag_init(&k->recv, l, k, recv_done);
    tag_init(&k->send, l, k, send_done);
    tag_init(&k->end, l, k, end_done);
    tag_init(&k->part, l, k, part_done);
    return k;
}

/* ---- client */

static bool is_ours(const grpc_metadata_array *m)
{
    for (size_t i = 0; i < m->count; i++)
        if (grpc_slice_str_cmp(m->metadata[i].key, MARK) == 0)
            return true;
    return false;
}

/* NULL: no memory, or files that gRPC does not take. */
static grpc_channel_credentials *channel_creds(struct tls_id *id)
{
    struct tls_pem pem;

    if (!id)
        return grpc_insecure_credentials_create();
    (void)tls_id_look(id);
    if (tls_id_pem(id, &pem, NULL) != FL_OK)
        return NULL;
    grpc_ssl_pem_key_cert_pair pair = { pem.key, pem.cert };
    grpc_channel_credentials *c = grpc_ssl_credentials_create_ex(pem.ca, &pair, NULL, NULL);

    tls_pem_fini(&pem);
    return c;
}

static void dialled(void *owner, bool ok)
{
    struct rpc_line *k = owner;

    if (k->dropped) {
        free_when_quiet(k);
    } else if (ok && !k->over && is_ours(&k->metadata)) {
        k->up = true;
        arm_recv(k);
        k->k.user->up(k->k.arg);
    } /* else the end tells why */
}

static enum fl_status rpc_dial(struct fl_loop *l, const struct stream_to *to,
                               const struct line_user *user, void *arg, struct wire_line **out,
                               struct fl_err *err)
{
    char host[WIRE_HOST_MAX], target[WIRE_HOST_MAX + 16];
    grpc_channel_credentials *creds;
    struct rpc_line *k;
    uint16_t port;
    grpc_op ops[3] = { { .op = GRPC_OP_SEND_INITIAL_METADATA },
                       { .op = GRPC_OP_RECV_INITIAL_METADATA },
                       { .op = GRPC_OP_RECV_STATUS_ON_CLIENT } };

    FL_TRY(wire_target_split(to->target, host, &port, err));
    FL_TRY(hub_get(err));
    k = line_create(l, dialled);
    if (!k) {
        hub_put();
        return fl_fail(err, FL_EXHAUSTED, "no memory for a connection to %s", to->target);
    }
    k->k.user = user;
    k->k.arg = arg;
    snprintf(k->target, sizeof(k->target), "%s", to->target);
    snprintf(target, sizeof(target), "dns:///%s", k->target);
    k->tls = to->tls;
    creds = channel_creds(to->tls);
    if (!creds) {
        fl_loop_hold(l); /* as a line that is dropped */
        line_free(k);
        return fl_fail(err, FL_EXHAUSTED, "no memory for a connection to %s", to->target);
    }
    k->channel = grpc_channel_create(target, creds, &args);
    grpc_channel_credentials_release(creds);
    k->call = grpc_channel_create_call(k->channel, NULL, GRPC_PROPAGATE_DEFAULTS, hub.cq,
                                       grpc_slice_from_static_string(METHOD), NULL,
                                       gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &k->metadata;
    ops[2].data.recv_status_on_client.trailing_metadata = &k->trailing;
    ops[2].data.recv_status_on_client.status = &k->code;
    ops[2].data.recv_status_on_client.status_details = &k->details;
    batch(k, &k->end, &ops[2], 1);
    batch(k, &k->first, ops, 2);
    *out = &k->k;
    return FL_OK;
}

/* ---- server */

struct rpc_port {
    struct wire_port p;
    struct fl_loop *loop;
    grpc_server *server;
    grpc_server_credentials *creds;
    struct tls_id *tls;
    unsigned shown;    /* turn of the certificate; NONE_SHOWN before the first */
    struct door *door; /* without TLS: it listens, gRPC has the connections of who speaks it */
    struct rpc_tag next, down;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
    bool paused, closed;
};

/* gRPC asks with each connection that begins, one at a time, on whichever thread. */
static grpc_ssl_certificate_config_reload_status shown_now(void *arg,
                                                           grpc_ssl_server_certificate_config **out)
{
    struct rpc_port *p = arg;
    struct tls_pem pem;

    if (tls_id_look(p->tls) == p->shown)
        return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    if (tls_id_pem(p->tls, &pem, NULL) != FL_OK)
        return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_FAIL;
    grpc_ssl_pem_key_cert_pair pair = { pem.key, pem.cert };

    *out = grpc_ssl_server_certificate_config_create(pem.ca, &pair, 1);
    p->shown = pem.turn;
    tls_pem_fini(&pem);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

static grpc_server_credentials *server_creds(struct rpc_port *p)
{
    if (!p->tls)
        return grpc_insecure_server_credentials_create();
    return grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, shown_now, p));
}

static void port_free(struct rpc_port *p)
{
    if (p->next.out || p->down.out)
        return;
    grpc_server_destroy(p->server);
    grpc_server_credentials_release(p->creds);
    grpc_call_details_destroy(&p->details);
    grpc_metadata_array_destroy(&p->metadata);
    fl_loop_release(p->loop);
    hub_put();
    free(p);
}

static void next_call(struct rpc_port *p)
{
    if (p->paused || p->closed || p->next.out)
        return;
    grpc_call_details_destroy(&p->details);
    grpc_call_details_init(&p->details);
    grpc_metadata_array_destroy(&p->metadata);
    grpc_metadata_array_init(&p->metadata);
    p->next.out = true;
    if (grpc_server_request_call(p->server, &p->call, &p->details, &p->metadata, hub.cq, hub.cq,
                                 &p->next) != GRPC_CALL_OK)
        p->next.out = false; /* it is shutting down */
}

static void greeted(void *owner, bool ok)
{
    (void)ok; /* the end tells */
    free_when_quiet(owner);
}

static void refuse_call(struct rpc_port *p, grpc_status_code code, const char *why)
{
    grpc_call_cancel_with_status(p->call, code, why, NULL);
    grpc_call_unref(p->call);
}

/* For errors: "ipv4:127.0.0.1:4711", "ipv6:%5B::1%5D:4711"; a connection that came through the door
 * has its descriptor for a name, "fd:17". */
static void peer_name(grpc_call *call, char *out, size_t cap)
{
    char *peer = grpc_call_get_peer(call);
    const char *from = strchr(peer, ':');
    union wire_sockaddr sa;
    socklen_t len = sizeof(sa);
    int fd;

    if (sscanf(peer, "fd:%d", &fd) == 1 && getpeername(fd, &sa.sa, &len) == 0)
        wire_addr_text(&sa, out, cap);
    else
        snprintf(out, cap, "%s", from ? from + 1 : peer);
    gpr_free(peer);
}

static void take_call(struct rpc_port *p)
{
    grpc_metadata mark = { .key = grpc_slice_from_static_string(MARK),
                           .value = grpc_slice_from_static_string("1") };
    grpc_op ops[2] = { { .op = GRPC_OP_SEND_INITIAL_METADATA },
                       { .op = GRPC_OP_RECV_CLOSE_ON_SERVER } };
    struct rpc_line *k;

    if (grpc_slice_str_cmp(p->details.method, METHOD) != 0) {
        refuse_call(p, GRPC_STATUS_UNIMPLEMENTED, "only " METHOD " is spoken here");
        return;
    }
    if (hub_get(NULL) != FL_OK || !(k = line_create(p->loop, greeted))) {
        refuse_call(p, GRPC_STATUS_RESOURCE_EXHAUSTED, "no memory");
        return;
    }
    k->call = p->call;
    k->up = true;
    peer_name(k->call, k->k.peer, sizeof(k->k.peer));
    ops[0].data.send_initial_metadata.count = 1;
    ops[0].data.send_initial_metadata.metadata = &mark;
    ops[1].data.recv_close_on_server.cancelled = &k->cancelled;
    batch(k, &k->end, &ops[1], 1);
    batch(k, &k->first, &ops[0], 1);
    arm_recv(k);
    p->p.arrived(p->p.arg, &k->k);
}

static void called(void *owner, bool ok)
{
    struct rpc_port *p = owner;

    if (p->closed) {
        if (ok)
            refuse_call(p, GRPC_STATUS_UNAVAILABLE, "the server ends");
        port_free(p);
        return;
    }
    if (ok)
        take_call(p);
    next_call(p);
}

static void port_down(void *owner, bool ok)
{
    (void)ok;
    port_free(owner);
}

static void rpc_close(struct wire_port *port)
{
    struct rpc_port *p = container_of(port, struct rpc_port, p);

    p->closed = true;
    door_destroy(p->door);
    p->door = NULL;
    fl_loop_hold(p->loop); /* until the streams that were accepted have ended, too */
    p->down.out = true;
    grpc_server_shutdown_and_notify(p->server, hub.cq, &p->down);
}

static void rpc_pause(struct wire_port *port, bool on)
{
    struct rpc_port *p = container_of(port, struct rpc_port, p);

    p->paused = on;
    next_call(p);
}

/* What gRPC does to a socket that it accepts itself. */
static void come_in(void *arg, int fd, const struct sockaddr *from, socklen_t len)
{
    struct rpc_port *p = arg;
    int one = 1, silent_ms = KEEP_MS;

    (void)from;
    (void)len;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)); /* only slower without */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent_ms,
                     sizeof(silent_ms)); /* its pings say it, too */
    grpc_server_add_channel_from_fd(p->server, fd, p->creds);
}

/* gRPC takes a connection from somebody else's hands without TLS alone: with it, it listens itself,
 * and who comes without TLS is hung up on. */
static enum fl_status port_open(struct rpc_port *p, const struct stream_to *at, int fd_take,
                                struct fl_err *err)
{
    struct door_config door = { .speaks = DOOR_HTTP2,
                                .status = "421 Misdirected Request",
                                .says = at->says ? at->says : "This port speaks gRPC, without TLS",
                                .max = KNOCKS,
                                .wait_ms = WIRE_CONNECT_MS,
                                .in = come_in,
                                .arg = p };
    struct wire_addrs a;
    char host[WIRE_HOST_MAX];
    uint16_t port;
    int got;

    if (!at->tls)
        return door_create(p->loop, fd_take, &door, &p->door, err);
    close(fd_take); /* it could be had: gRPC says only that it failed, sock_open() said why */
    FL_TRY(wire_target_split(at->target, host, &port, err));
    (void)wire_addr_parse(host, port, &a); /* sock_open() has parsed it */
    wire_addr_text(&a.a[0].u, p->p.at, sizeof(p->p.at));
    got = FL_FAULT("wire.bind") ? 0 : grpc_server_add_http2_port(p->server, p->p.at, p->creds);
    if (got <= 0)
        return fl_fail(err, FL_EXISTS, "%s is in use by another process: choose another one",
                       at->target);
    (void)wire_addr_parse(host, (uint16_t)got, &a);
    wire_addr_text(&a.a[0].u, p->p.at, sizeof(p->p.at));
    return FL_OK;
}

static enum fl_status rpc_listen(struct fl_loop *l, const struct stream_to *at, bool has_key,
                                 void (*arrived)(void *arg, struct wire_line *k_take), void *arg,
                                 struct wire_port **out, struct fl_err *err)
{
    static const struct wire_port_ops ops = { .close = rpc_close, .pause = rpc_pause };
    char real[sizeof(((struct wire_port *)0)->at)];
    struct rpc_port *p;
    enum fl_status st;
    int fd;

    FL_TRY(sock_open(at, has_key, &fd, real, sizeof(real), err));
    st = hub_get(err);
    if (st != FL_OK) {
        close(fd);
        return st;
    }
    p = FL_FAULT("wire.port") ? NULL : calloc(1, sizeof(*p));
    if (!p) {
        close(fd);
        hub_put();
        return fl_fail(err, FL_EXHAUSTED, "no memory to listen at %s", at->target);
    }
    p->p = (struct wire_port){ .ops = &ops, .arrived = arrived, .arg = arg };
    memcpy(p->p.at, real, sizeof(real));
    p->loop = l;
    grpc_call_details_init(&p->details);
    grpc_metadata_array_init(&p->metadata);
    tag_init(&p->next, l, p, called);
    tag_init(&p->down, l, p, port_down);
    p->server = server_create();
    grpc_server_register_completion_queue(p->server, hub.cq, NULL);
    p->tls = at->tls;
    p->shown = NONE_SHOWN;
    p->creds = server_creds(p);
    st = port_open(p, at, fd, err);
    grpc_server_start(p->server);
    if (st != FL_OK) {
        rpc_close(&p->p);
        return st;
    }
    next_call(p);
    *out = &p->p;
    return FL_OK;
}

static const struct wire_carrier rpc_carrier = { .dial = rpc_dial, .listen = rpc_listen };
const struct stream_ops stream_rpc = {
    .name = "rpc",
    .caps = 0,
    .send = wire_send,
    .close = wire_close,
    .carrier = &rpc_carrier,
};
