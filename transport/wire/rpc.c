/* gRPC, the C core: between head and daemons. Lines, and how they are dialled.
 *
 * One receive is outstanding, and not arming it again is the back-pressure; one send is in flight,
 * and what gathers meanwhile is the next message. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "transport/wire/resolve.h"
#include "transport/wire/rpc_priv.h"

enum {
    MESSAGE_BYTES = 4 << 20, /* of one gRPC message that we send       */
    PART_MS = 1000,          /* for the last bytes of a line to leave  */
    LOOK_MS = 2000,          /* to find out why TLS was not to be      */
    SETTLE_MS = 5000         /* gRPC's own limit is WIRE_AGAIN_MAX_MS  */
};

/* ---- a line */

static void part(struct rpc_line *k);

void rpc_batch(struct rpc_line *k, struct rpc_tag *tag, const grpc_op *ops, size_t n)
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
    rpc_hub_put();
}

static void channel_leave(grpc_channel *channel)
{
    bool connects = grpc_channel_check_connectivity_state(channel, 0) == GRPC_CHANNEL_CONNECTING;
    struct leaving *v = connects ? calloc(1, sizeof(*v)) : NULL;

    if (!v) {
        grpc_channel_destroy(channel);
        return;
    }
    (void)rpc_hub_get(NULL); /* it is up: the line holds it too */
    v->channel = channel;
    v->settled.owner = v;
    v->settled.done = channel_settled;
    v->settled.out = true;
    grpc_channel_watch_connectivity_state(
        channel, GRPC_CHANNEL_CONNECTING,
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(SETTLE_MS, GPR_TIMESPAN)),
        rpc_queue(), &v->settled);
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
    rpc_hub_put();
    free(k);
}

void rpc_free_when_quiet(struct rpc_line *k)
{
    if (k->dropped && k->over && !k->look.loop && !k->first.out && !k->recv.out && !k->send.out &&
        !k->end.out && !k->part.out)
        line_free(k);
}

void rpc_arm_recv(struct rpc_line *k)
{
    grpc_op op = { .op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &k->incoming };

    rpc_batch(k, &k->recv, &op, 1);
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
    rpc_arm_recv(k);
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
        rpc_free_when_quiet(k);
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
    rpc_batch(k, &k->send, &op, 1);
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
        rpc_free_when_quiet(k);
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
        rpc_free_when_quiet(k);
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
        rpc_free_when_quiet(k);
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
    rpc_free_when_quiet(owner);
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
    rpc_batch(k, &k->part, &op, 1);
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
    rpc_free_when_quiet(k);
}

static const struct line_ops rpc_ops = { .write = rpc_write, .read = rpc_read, .drop = rpc_drop };

struct rpc_line *rpc_line_create(struct fl_loop *l, void (*first)(void *owner, bool ok))
{
    struct rpc_line *k = FL_FAULT("wire.line") ? NULL : calloc(1, sizeof(*k));

    if (!k)
        return NULL;
    k->k = (struct wire_line){ .ops = &rpc_ops, .loop = l };
    k->poke.run = poked;
    k->details = grpc_empty_slice();
    grpc_metadata_array_init(&k->metadata);
    grpc_metadata_array_init(&k->trailing);
    rpc_tag_init(&k->first, l, k, first);
    rpc_tag_init(&k->recv, l, k, recv_done);
    rpc_tag_init(&k->send, l, k, send_done);
    rpc_tag_init(&k->end, l, k, end_done);
    rpc_tag_init(&k->part, l, k, part_done);
    return k;
}

/* ---- client */

static bool is_ours(const grpc_metadata_array *m)
{
    for (size_t i = 0; i < m->count; i++)
        if (grpc_slice_str_cmp(m->metadata[i].key, RPC_MARK) == 0)
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
        rpc_free_when_quiet(k);
    } else if (ok && !k->over && is_ours(&k->metadata)) {
        k->up = true;
        rpc_arm_recv(k);
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
    FL_TRY(rpc_hub_get(err));
    k = rpc_line_create(l, dialled);
    if (!k) {
        rpc_hub_put();
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
    k->channel = grpc_channel_create(target, creds, &rpc_channel_args);
    grpc_channel_credentials_release(creds);
    k->call = grpc_channel_create_call(k->channel, NULL, GRPC_PROPAGATE_DEFAULTS, rpc_queue(),
                                       grpc_slice_from_static_string(RPC_METHOD), NULL,
                                       gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &k->metadata;
    ops[2].data.recv_status_on_client.trailing_metadata = &k->trailing;
    ops[2].data.recv_status_on_client.status = &k->code;
    ops[2].data.recv_status_on_client.status_details = &k->details;
    rpc_batch(k, &k->end, &ops[2], 1);
    rpc_batch(k, &k->first, ops, 2);
    *out = &k->k;
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
