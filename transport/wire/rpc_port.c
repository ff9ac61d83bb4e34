/* gRPC's server: a port, the connections that come in at it, and the calls that become lines. */
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "transport/door/door.h"
#include "transport/wire/resolve.h"
#include "transport/wire/rpc_priv.h"

enum { KNOCKS = 256 /* connections that have said nothing yet */ };
#define NONE_SHOWN UINT_MAX

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
    rpc_hub_put();
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
    if (grpc_server_request_call(p->server, &p->call, &p->details, &p->metadata, rpc_queue(),
                                 rpc_queue(), &p->next) != GRPC_CALL_OK)
        p->next.out = false; /* it is shutting down */
}

static void greeted(void *owner, bool ok)
{
    (void)ok; /* the end tells */
    rpc_free_when_quiet(owner);
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
    grpc_metadata mark = { .key = grpc_slice_from_static_string(RPC_MARK),
                           .value = grpc_slice_from_static_string("1") };
    grpc_op ops[2] = { { .op = GRPC_OP_SEND_INITIAL_METADATA },
                       { .op = GRPC_OP_RECV_CLOSE_ON_SERVER } };
    struct rpc_line *k;

    if (grpc_slice_str_cmp(p->details.method, RPC_METHOD) != 0) {
        refuse_call(p, GRPC_STATUS_UNIMPLEMENTED, "only " RPC_METHOD " is spoken here");
        return;
    }
    if (rpc_hub_get(NULL) != FL_OK || !(k = rpc_line_create(p->loop, greeted))) {
        refuse_call(p, GRPC_STATUS_RESOURCE_EXHAUSTED, "no memory");
        return;
    }
    k->call = p->call;
    k->up = true;
    peer_name(k->call, k->k.peer, sizeof(k->k.peer));
    ops[0].data.send_initial_metadata.count = 1;
    ops[0].data.send_initial_metadata.metadata = &mark;
    ops[1].data.recv_close_on_server.cancelled = &k->cancelled;
    rpc_batch(k, &k->end, &ops[1], 1);
    rpc_batch(k, &k->first, &ops[0], 1);
    rpc_arm_recv(k);
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
    grpc_server_shutdown_and_notify(p->server, rpc_queue(), &p->down);
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
    int one = 1, silent_ms = RPC_KEEP_MS;

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

enum fl_status rpc_listen(struct fl_loop *l, const struct stream_to *at, bool has_key,
                          void (*arrived)(void *arg, struct wire_line *k_take), void *arg,
                          struct wire_port **out, struct fl_err *err)
{
    static const struct wire_port_ops ops = { .close = rpc_close, .pause = rpc_pause };
    char real[sizeof(((struct wire_port *)0)->at)];
    struct rpc_port *p;
    enum fl_status st;
    int fd;

    FL_TRY(sock_open(at, has_key, &fd, real, sizeof(real), err));
    st = rpc_hub_get(err);
    if (st != FL_OK) {
        close(fd);
        return st;
    }
    p = FL_FAULT("wire.port") ? NULL : calloc(1, sizeof(*p));
    if (!p) {
        close(fd);
        rpc_hub_put();
        return fl_fail(err, FL_EXHAUSTED, "no memory to listen at %s", at->target);
    }
    p->p = (struct wire_port){ .ops = &ops, .arrived = arrived, .arg = arg };
    memcpy(p->p.at, real, sizeof(real));
    p->loop = l;
    grpc_call_details_init(&p->details);
    grpc_metadata_array_init(&p->metadata);
    rpc_tag_init(&p->next, l, p, called);
    rpc_tag_init(&p->down, l, p, port_down);
    p->server = rpc_server_create();
    grpc_server_register_completion_queue(p->server, rpc_queue(), NULL);
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
