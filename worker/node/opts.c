#include "worker/node/node.h"
#include "common/conf/opt.h"

#define AT(member) .at = offsetof(struct node_config, member)
// clang-format off
const struct fl_opt node_opts[] = {
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", AT(address),
      .help = "of the head" },
    { FL_OPT_TEXT, "node-ip-address", .arg = "ADDRESS", .env = "FURLONG_NODE_IP", AT(ip),
      .help = "where this node is reached; default: the source address of the way to the head" },
    { FL_OPT_TEXT, "node-name", .arg = "NAME", AT(name),
      .help = "label, unique in the cluster; default: the host's name" },
    { FL_OPT_REAL, "num-cpus", .arg = "N", .fallback = "-1", .min = -1, .max = 1e6, AT(cpus),
      .help = "default: what affinity and cgroup leave" },
    { FL_OPT_INT, "num-gpus", .arg = "N", .fallback = "-1", .min = -1, .max = 1024, AT(gpus),
      .help = "so many logical devices; default: the GPUs of CUDA_VISIBLE_DEVICES, else all" },
    { FL_OPT_BYTES, "memory", .arg = "BYTES", .fallback = "0", AT(memory_bytes),
      .help = "default: of the machine, or its tightest cgroup" },
    { FL_OPT_TEXT, "resources", .arg = "JSON", AT(resources),
      .help = "further amounts: {\"disk\": 2, \"license\": 0.5}" },
    { FL_OPT_TEXT, "labels", .arg = "K=V,...", AT(labels),
      .help = "for placement by label" },
    { FL_OPT_TEXT, "state-dir", .arg = "DIR", AT(state_dir),
      .help = "id and start counter of the node" },
    { FL_OPT_TEXT, "runtime-dir", .arg = "DIR", AT(runtime_dir),
      .help = "sockets, and a folder a worker" },
    { FL_OPT_INT, "ready-fd", .arg = "N", .fallback = "-1", .min = -1, .max = 1 << 20, AT(ready_fd),
      .help = "gets node.json as one line, or {\"error\": ...}" },
    { FL_OPT_INT, "orphan-timeout", .arg = "SECONDS", .fallback = "0", .max = 31536000, AT(orphan_s),
      .help = "without a head for so long: ends its workers and itself; workers without it for so long end; 0: never" },
    { FL_OPT_INT, "wait", .arg = "SECONDS", .fallback = "30", .max = 86400, AT(wait_s),
      .help = "how long to wait for the head at the start" },
    { FL_OPT_BYTES, "log-max-bytes", .arg = "BYTES", .fallback = "64MiB", AT(log_max_bytes),
      .help = "of each output of each worker: older ones are given back" },
    { FL_OPT_SWITCH, "private", AT(is_private),
      .help = "of a private cluster: `furlong stop` leaves it to the run that started it" },
    { FL_OPT_TEXT, "log-level", .arg = "LEVEL", .choices = "error|warn|info|debug", AT(log_level),
      .help = "default info" },
    { 0 },
};
// clang-format on
