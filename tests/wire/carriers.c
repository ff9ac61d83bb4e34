#include "tests/wire/rig.h"

static struct lossy_plan over_pair = {
    .over = &stream_pair, .seed = 1, .chunk_max = 200, .again_pct = 20
};
static struct lossy_plan over_sock = {
    .over = &stream_sock, .seed = 2, .chunk_max = 900, .again_pct = 20
};
static struct lossy_plan over_rpc = {
    .over = &stream_rpc, .seed = 3, .chunk_max = 5000, .again_pct = 20
};
static struct lossy_plan over_tls = {
    .over = &stream_sock, .seed = 4, .chunk_max = 900, .again_pct = 20
};
const struct carrier carriers[] = {
    { "unix", &stream_sock, "unix:*", NULL },
    { "tcp", &stream_sock, "127.0.0.1:0", NULL },
    { "tcp6", &stream_sock, "[::1]:0", NULL },
    { "pair", &stream_pair, "pair:x", NULL },
    { "rpc", &stream_rpc, "127.0.0.1:0", NULL },
    { "lossy pair", &stream_lossy, "pair:x", &over_pair },
    { "rpc6", &stream_rpc, "[::1]:0", NULL },
    { "lossy unix", &stream_lossy, "unix:*", &over_sock },
    { "lossy rpc", &stream_lossy, "127.0.0.1:0", &over_rpc },
    { "tcp, TLS", &stream_sock, "127.0.0.1:0", NULL, true },
    { "tcp6, TLS", &stream_sock, "[::1]:0", NULL, true },
    { "lossy tcp, TLS", &stream_lossy, "127.0.0.1:0", &over_tls, true },
    { "rpc, TLS", &stream_rpc, "127.0.0.1:0", NULL, true },
    { "rpc6, TLS", &stream_rpc, "[::1]:0", NULL, true },
    { 0 },
};
