/* worker/roles/mat.h - the arithmetic of the built-in model
 *
 * Every result has one order of summation: it depends neither on the size of the batch nor on the
 * instruction set, and nothing contracts a multiply and an add. So an engine that decodes token by
 * token computes what a trainer computes over whole sequences, and two machines agree bit by bit.
 * The same file is compiled once per instruction set; mat_pick() takes the best one that runs here. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct mat_adam {
    float lr, beta1, beta2, eps, decay;
    float fix1, fix2; /* 1 / (1 - beta^t) */
    float scale;      /* of the gradient: clipping */
};

struct mat_ops {
    const char *name;
    /* c[m,n] = a[m,k] w[n,k]^T: a linear layer with its weight as it is stored */
    void (*nt)(float *c, const float *a, const float *w, size_t m, size_t k, size_t n);
    /* c[m,n] (+)= a[m,k] b[k,n]: its gradient by the input */
    void (*nn)(float *c, const float *a, const float *b, size_t m, size_t k, size_t n, bool add);
    /* c[k,n] += a[m,k]^T b[m,n]: its gradient by the weight */
    void (*tn)(float *c, const float *a, const float *b, size_t m, size_t k, size_t n);

    void (*add)(float *y, const float *x, size_t n);
    void (*norm)(float *y, float *inv, const float *x, const float *w, size_t rows, size_t d,
                 float eps);
    void (*norm_back)(float *dx_add, float *dw_add, const float *dy, const float *x, const float *w,
                      const float *inv, size_t rows, size_t d);
    /* Rotates pairs (i, i + half) of each head; back: the other way round. cs: cos, then sin. */
    void (*rope)(float *x, size_t heads, size_t half, const float *cs, bool back);
    /* One head of one row over keys 0..n-1; k and v advance by stride. p: n floats of scratch. */
    void (*attend)(float *out, float *lse, const float *q, const float *k, const float *v,
                   size_t stride, size_t n, size_t hd, float scale, float *p);
    /* All of d* are added to. p, dp: n floats of scratch each. */
    void (*attend_back)(float *dq, float *dk, float *dv, const float *dout, float lse,
                        const float *q, const float *k, const float *v, size_t stride, size_t n,
                        size_t hd, float scale, float *p, float *dp);
    void (*swiglu)(float *y, const float *gate, const float *up, size_t n);
    void (*swiglu_back)(float *dgate, float *dup, const float *dy, const float *gate,
                        const float *up, size_t n);
    /* In place: x scaled by inv_temp becomes log softmax; returns nothing else */
    void (*log_softmax)(float *x, size_t n, float inv_temp);
    void (*exp)(float *y, const float *x, size_t n);
    double (*sumsq)(const float *x, size_t n);
    void (*adam)(float *w, float *m, float *v, const float *g, size_t n, const struct mat_adam *a);
};
const struct mat_ops *mat_pick(void);             /* FURLONG_MAT=base|avx2 chooses by hand */
const struct mat_ops *const *mat_all(size_t *n); /* those that run here: for tests */
