/* Any bytes as records of the journal and as what daemons say: nothing but a sentence may come of
 * it. */
#include <stdlib.h>

#include "head/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void drop(struct journal_emit *e, uint16_t kind, struct fl_bytes body)
{
    (void)e, (void)kind, (void)body;
}

/* kind, length in two bytes, body; again and again */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct head *h = calloc(1, sizeof(*h));
    struct journal_emit e = { .put = drop };

    if (!h)
        abort();
    while (size >= 3) {
        size_t len = (size_t)data[1] << 8 | data[2];

        len = len < size - 3 ? len : size - 3;
        for (size_t i = 0; i < head_apply_n; i++)
            if (head_apply[i].kind == data[0] % (head_apply_n + 1))
                head_apply[i].apply(h, (struct fl_bytes){ data + 3, len });
        data += 3 + len;
        size -= 3 + len;
    }
    head_snapshot(h, &e);
    tables_free(h);
    free(h);
    return 0;
}
