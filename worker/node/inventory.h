/* worker/node/inventory.h - what this node has to give */
#pragma once
#include "common/base/base.h"
#include "node.pb-c.h"

struct node_config;
struct gpu_watch;

/* Pure parts, for rows of tests. */
uint64_t node_cpu_limit_e4(
    const char *cpu_max); /* "200000 100000" -> 20000; "max ..": UINT64_MAX */
enum fl_status node_labels_parse(const char *text, Fl__Inventory *into, struct fl_err *err);
enum fl_status node_resources_parse(const char *json, Fl__Inventory *into, struct fl_err *err);

/* What the machine, its cgroups and cfg leave: cores of the affinity and the tightest quota, memory
 * of the tightest limit, devices. visible: the value of CUDA_VISIBLE_DEVICES or NULL. nvml_lib
 * NULL: the system's. *watch, if wanted: left open when there are devices that are not logical,
 * else NULL. *out: fl__inventory__free_unpacked(out, NULL). FL_INVALID
 * names the flag. */
enum fl_status node_inventory_make(const struct node_config *cfg, const char *visible,
                                   const char *nvml_lib, struct gpu_watch **watch,
                                   Fl__Inventory **out, struct fl_err *err);
/* node:ADDR, once the address is known. */
enum fl_status node_inventory_at(Fl__Inventory *inv, const char *addr, struct fl_err *err);
const char *node_inventory_text(const Fl__Inventory *inv, char out[256]); /* one line */
uint64_t node_memory_available(void);                                     /* now; bytes */
unsigned node_load_e2(void); /* run queue over the last minute, 1/100 */
