/* bench/median.h - the middle of what was measured */
#pragma once
#include <stdlib.h>

static inline int median_order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static inline double median(double *v, size_t n) /* sorts v */
{
    qsort(v, n, sizeof(*v), median_order);
    return v[n / 2];
}
