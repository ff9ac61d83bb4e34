#include "worker/roles/mat.h"

#include <stdlib.h>
#include <string.h>

extern const struct mat_ops mat_base;
#if defined(__x86_64__)
extern const struct mat_ops mat_avx2;
#endif

const struct mat_ops *const *mat_all(size_t *n)
{
    static const struct mat_ops *const table[] = {
        &mat_base,
#if defined(__x86_64__)
        &mat_avx2, /* last: left out where the processor lacks it */
#endif
    };

    *n = 1;
#if defined(__x86_64__)
    *n += __builtin_cpu_supports("avx2") ? 1 : 0;
#endif
    return table;
}

const struct mat_ops *mat_pick(void)
{
    size_t n;
    const struct mat_ops *const *all = mat_all(&n);
    const char *want = getenv("FURLONG_MAT");

    for (size_t i = 0; want && i < n; i++)
        if (!strcmp(all[i]->name, want))
            return all[i];
    return all[n - 1];
}
