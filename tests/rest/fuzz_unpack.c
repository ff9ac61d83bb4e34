/* Any bytes as an archive; what comes out stays inside. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/file.h"
#include "worker/node/unpack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char top[64], dir[80];

static void leave(void)
{
    (void)fl_tree_remove(top, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct unpack_limits limits = { 1 << 20, 64, 250 };

    if (!top[0]) {
        snprintf(top, sizeof(top), "/tmp/fuzz-unpack-%d", (int)getpid());
        snprintf(dir, sizeof(dir), "%s/in", top);
        atexit(leave);
    }
    if (mkdir(top, 0700) < 0 || mkdir(dir, 0700) < 0)
        abort();
    (void)unpack_zip_bytes((struct fl_bytes){ data, size }, dir, &limits, NULL);
    if (fl_tree_remove(dir, NULL) != FL_OK || rmdir(top) < 0)
        abort(); /* something lies beside the folder */
    return 0;
}
