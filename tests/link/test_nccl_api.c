/* what is used of NCCL, compared with its own header */
#include <nccl.h>
#include "tests/t.h"
#include "transport/link/nccl_api.h"

#define SAME(field, theirs)                                                                        \
    _Static_assert(offsetof(struct nccl_config, field) == offsetof(ncclConfig_t, theirs), #field)
SAME(size, size);
SAME(magic, magic);
SAME(version, version);
SAME(blocking, blocking);
SAME(cga_cluster_size, cgaClusterSize);
SAME(min_ctas, minCTAs);
SAME(max_ctas, maxCTAs);
SAME(net_name, netName);
SAME(split_share, splitShare);
_Static_assert(sizeof(struct nccl_id) == sizeof(ncclUniqueId), "id");
_Static_assert(NCCL_OK == (int)ncclSuccess && NCCL_IN_PROGRESS == (int)ncclInProgress, "results");
_Static_assert(NCCL_UINT8 == (int)ncclUint8, "types");

static void the_same_numbers(void **state)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    (void)state;
    t_int_eq(config.magic, NCCL_CONFIG_MAGIC);
    t_int_eq(config.minCTAs, NCCL_UNDEFINED);
    t_int_eq(config.splitShare, NCCL_UNDEFINED);
    t_true(config.version >= NCCL_CONFIG_VERSION);
}

int main(void)
{
    static const struct CMUnitTest tests[] = { cmocka_unit_test(the_same_numbers) };

    return t_run("nccl header", tests);
}
