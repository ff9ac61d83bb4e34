/* Compiled with MAT_OPS naming the table; see meson.build. Lanes are eight in every build, so that
 * a sum over lanes has the same order whether the machine holds them in one register or in two. */
#include "worker/roles/mat.h"

#include <math.h>
#include <string.h>

enum { LANES = 8 };
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
#define LOAD(p) (*(const v8 *)(p))
#define STORE(p) (*(v8 *)(p))
#define SELECT(mask, yes, no) ((v8)(((i8)(yes) & (i8)(mask)) | ((i8)(no) & ~(i8)(mask))))
#define INLINE static inline __attribute__((always_inline))

/* The one order of adding eight lanes: halves, then pairs two apart, then neighbours. */
INLINE float lanes_sum(const v8 *v)
{
    const float *f = (const float *)v;

    return ((f[0] + f[4]) + (f[2] + f[6])) + ((f[1] + f[5]) + (f[3] + f[7]));
}

INLINE float lanes_max(const v8 *v)
{
    const float *f = (const float *)v;
    float m = f[0];

    for (int i = 1; i < LANES; i++)
        m = f[i] > m ? f[i] : m;
    return m;
}

/* Four sums of lanes at once, each in the order of lanes_sum(). */
INLINE void lanes_sum4(float out[4], const v8 *a, const v8 *b, const v8 *c, const v8 *d)
{
#define FOLD(x) (((const v4 *)(x))[0] + ((const v4 *)(x))[1])
    v4 fa = FOLD(a), fb = FOLD(b), fc = FOLD(c), fd = FOLD(d);
#undef FOLD
    v4 x =
        __builtin_shufflevector(fa, fb, 0, 4, 1, 5) + __builtin_shufflevector(fa, fb, 2, 6, 3, 7);
    v4 y =
        __builtin_shufflevector(fc, fd, 0, 4, 1, 5) + __builtin_shufflevector(fc, fd, 2, 6, 3, 7);

    *(v4 *)out =
        __builtin_shufflevector(x, y, 0, 1, 4, 5) + __builtin_shufflevector(x, y, 2, 3, 6, 7);
}

INLINE float dot(const float *a, const float *b, size_t n)
{
    v8 s = { 0 };
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        s += LOAD(a + i) * LOAD(b + i);
    float r = lanes_sum(&s);
    for (; i < n; i++)
        r += a[i] * b[i];
    return r;
}

INLINE float dot3(const float *a, const float *b, const float *c, size_t n)
{
    v8 s = { 0 };
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        s += LOAD(a + i) * LOAD(b + i) * LOAD(c + i);
    float r = lanes_sum(&s);
    for (; i < n; i++)
        r += a[i] * b[i] * c[i];
    return r;
}

INLINE void axpy(float *y, float a, const float *x, size_t n)
{
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        STORE(y + i) += a * LOAD(x + i);
    for (; i < n; i++)
        y[i] += a * x[i];
}

/* ROWS rows of a against four rows of w. */
#define NT_TILE(ROWS)                                                                              \
    INLINE void nt_tile##ROWS(float *c, const float *a, const float *w, size_t k, size_t n)        \
    {                                                                                              \
        v8 s[ROWS][4] = { 0 };                                                                     \
        size_t i = 0;                                                                              \
                                                                                                   \
        for (; i + LANES <= k; i += LANES)                                                         \
            for (int r = 0; r < (ROWS); r++)                                                       \
                for (int o = 0; o < 4; o++)                                                        \
                    s[r][o] += LOAD(a + (size_t)r * k + i) * LOAD(w + (size_t)o * k + i);          \
        for (int r = 0; r < (ROWS); r++) {                                                         \
            float *to = c + (size_t)r * n;                                                         \
                                                                                                   \
            lanes_sum4(to, &s[r][0], &s[r][1], &s[r][2], &s[r][3]);                                \
            for (size_t t = i; t < k; t++)                                                         \
                for (int o = 0; o < 4; o++)                                                        \
                    to[o] += a[(size_t)r * k + t] * w[(size_t)o * k + t];                          \
        }                                                                                          \
    }
NT_TILE(1)
NT_TILE(3)

static void nt(float *c, const float *a, const float *w, size_t m, size_t k, size_t n)
{
    size_t o = 0;

    for (; o + 4 <= n; o += 4) { /* four rows of w stay in the first cache over all of a */
        size_t r = 0;

        for (; r + 3 <= m; r += 3)
            nt_tile3(c + r * n + o, a + r * k, w + o * k, k, n);
        for (; r < m; r++)
            nt_tile1(c + r * n + o, a + r * k, w + o * k, k, n);
    }
    for (; o < n; o++)
        for (size_t r = 0; r < m; r++)
            c[r * n + o] = dot(a + r * k, w + o * k, k);
}

/* Four rows by two registers of c; A(r, t) is a's factor for row r at t. The sum over t is one
 * chain per element. */
#define OUTER_TILE(NAME, ROWS, A)                                                                  \
    INLINE void NAME(float *c, const float *a, const float *b, size_t lda, size_t steps, size_t n, \
                     bool add)                                                                     \
    {                                                                                              \
        v8 s[ROWS][2] = { 0 };                                                                     \
                                                                                                   \
        for (size_t t = 0; t < steps; t++) {                                                       \
            v8 b0 = LOAD(b + t * n), b1 = LOAD(b + t * n + LANES);                                 \
                                                                                                   \
            for (size_t r = 0; r < (ROWS); r++) {                                                  \
                s[r][0] += (A)*b0;                                                                 \
                s[r][1] += (A)*b1;                                                                 \
            }                                                                                      \
        }                                                                                          \
        for (size_t r = 0; r < (ROWS); r++) {                                                      \
            float *to = c + r * n;                                                                 \
                                                                                                   \
            for (size_t h = 0; h < 2; h++) {                                                       \
                if (add)                                                                           \
                    s[r][h] += LOAD(to + h * LANES);                                               \
                STORE(to + h * LANES) = s[r][h];                                                   \
            }                                                                                      \
        }                                                                                          \
    }
OUTER_TILE(nn_tile4, 4, a[r * lda + t])
OUTER_TILE(nn_tile1, 1, a[r * lda + t])
OUTER_TILE(tn_tile4, 4, a[t * lda + r])
OUTER_TILE(tn_tile1, 1, a[t * lda + r])

static void nn(float *c, const float *a, const float *b, size_t m, size_t k, size_t n, bool add)
{
    size_t j = 0;

    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        size_t r = 0;

        for (; r + 4 <= m; r += 4)
            nn_tile4(c + r * n + j, a + r * k, b + j, k, k, n, add);
        for (; r < m; r++)
            nn_tile1(c + r * n + j, a + r * k, b + j, k, k, n, add);
    }
    for (; j < n; j++)
        for (size_t r = 0; r < m; r++) {
            float s = 0;

            for (size_t t = 0; t < k; t++)
                s += a[r * k + t] * b[t * n + j];
            c[r * n + j] = add ? c[r * n + j] + s : s;
        }
}

static void tn(float *c, const float *a, const float *b, size_t m, size_t k, size_t n)
{
    size_t j = 0;

    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        size_t r = 0;

        for (; r + 4 <= k; r += 4)
            tn_tile4(c + r * n + j, a + r, b + j, k, m, n, true);
        for (; r < k; r++)
            tn_tile1(c + r * n + j, a + r, b + j, k, m, n, true);
    }
    for (; j < n; j++)
        for (size_t r = 0; r < k; r++) {
            float s = 0;

            for (size_t t = 0; t < m; t++)
                s += a[t * k + r] * b[t * n + j];
            c[r * n + j] += s;
        }
}

static void add(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] += x[i];
}

/* exp by 2^k times a polynomial (the Taylor series of e^r to r^7; |r| <= ln2/2, error below one
 * unit in the last place), because libm's differs between instruction sets. Flushes to zero below
 * -87 and stays finite above 88. */
INLINE void exp8(v8 *x)
{
    const v8 lo = { -87, -87, -87, -87, -87, -87, -87, -87 };
    const v8 hi = { 88, 88, 88, 88, 88, 88, 88, 88 };
    v8 v = *x;
    i8 dead = v < lo;

    v = SELECT(v < lo, lo, v);
    v = SELECT(v > hi, hi, v);
    v8 shifted = v * 1.44269504088896341f + 12582912.f; /* 1.5 * 2^23: rounds to an integer */
    v8 k = shifted - 12582912.f;
    v8 r = (v - k * 0.693359375f) - k * -2.12194440e-4f;
    v8 p = r * (1.f / 5040) + (1.f / 720);

    p = p * r + (1.f / 120);
    p = p * r + (1.f / 24);
    p = p * r + (1.f / 6);
    p = p * r + 0.5f;
    p = p * r * r + r + 1.f;
    i8 power = ((i8)shifted << 23) + (127 << 23);
    *x = (v8)((i8)(p * (v8)power) & ~dead);
}

static void exp_n(float *y, const float *x, size_t n)
{
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        v8 v = LOAD(x + i);

        exp8(&v);
        STORE(y + i) = v;
    }
    if (i < n) {
        v8 v = { 0 };

        memcpy(&v, x + i, (n - i) * sizeof(*x));
        exp8(&v);
        memcpy(y + i, &v, (n - i) * sizeof(*y));
    }
}

static void norm(float *y, float *inv, const float *x, const float *w, size_t rows, size_t d,
                 float eps)
{
    for (size_t r = 0; r < rows; r++, x += d, y += d) {
        inv[r] = 1.f / sqrtf(dot(x, x, d) / (float)d + eps);
        for (size_t i = 0; i < d; i++)
            y[i] = x[i] * inv[r] * w[i];
    }
}

static void norm_back(float *dx_add, float *dw_add, const float *dy, const float *x, const float *w,
                      const float *inv, size_t rows, size_t d)
{
    for (size_t r = 0; r < rows; r++, x += d, dy += d, dx_add += d) {
        float s = inv[r], c = dot3(dy, w, x, d) * s * s * s / (float)d;

        for (size_t i = 0; i < d; i++) {
            dx_add[i] += dy[i] * w[i] * s - x[i] * c;
            dw_add[i] += dy[i] * x[i] * s;
        }
    }
}

static void rope(float *x, size_t heads, size_t half, const float *cs, bool back)
{
    const float *co = cs, *si = cs + half;
    float sign = back ? -1.f : 1.f;

    for (size_t h = 0; h < heads; h++, x += 2 * half)
        for (size_t i = 0; i < half; i++) {
            float a = x[i], b = x[i + half], s = sign * si[i];

            x[i] = a * co[i] - b * s;
            x[i + half] = b * co[i] + a * s;
        }
}

INLINE float max_of(const float *x, size_t n)
{
    v8 m = {
        -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY
    };
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        v8 v = LOAD(x + i);

        m = SELECT(v > m, v, m);
    }
    float r = lanes_max(&m);
    for (; i < n; i++)
        r = x[i] > r ? x[i] : r;
    return r;
}

INLINE float sum_of(const float *x, size_t n)
{
    v8 s = { 0 };
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        s += LOAD(x + i);
    float r = lanes_sum(&s);
    for (; i < n; i++)
        r += x[i];
    return r;
}

static void attend(float *out, float *lse, const float *q, const float *k, const float *v,
                   size_t stride, size_t n, size_t hd, float scale, float *p)
{
    for (size_t j = 0; j < n; j++)
        p[j] = dot(q, k + j * stride, hd) * scale;
    float top = max_of(p, n);
    for (size_t j = 0; j < n; j++)
        p[j] -= top;
    exp_n(p, p, n);
    float sum = sum_of(p, n), part = 1.f / sum;
    memset(out, 0, hd * sizeof(*out));
    for (size_t j = 0; j < n; j++)
        axpy(out, p[j] * part, v + j * stride, hd);
    *lse = top + logf(sum);
}

static void attend_back(float *dq, float *dk, float *dv, const float *dout, float lse,
                        const float *q, const float *k, const float *v, size_t stride, size_t n,
                        size_t hd, float scale, float *p, float *dp)
{
    float mean = 0;

    for (size_t j = 0; j < n; j++)
        p[j] = dot(q, k + j * stride, hd) * scale - lse;
    exp_n(p, p, n);
    for (size_t j = 0; j < n; j++) {
        dp[j] = dot(dout, v + j * stride, hd);
        mean += p[j] * dp[j];
        axpy(dv + j * stride, p[j], dout, hd);
    }
    for (size_t j = 0; j < n; j++) {
        float ds = p[j] * (dp[j] - mean) * scale;

        axpy(dq, ds, k + j * stride, hd);
        axpy(dk + j * stride, ds, q, hd);
    }
}

enum { STRIP = 64 }; /* elements whose sigmoid is held at once */
INLINE void sigmoid_strip(float *s, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        s[i] = -x[i];
    exp_n(s, s, n);
    for (size_t i = 0; i < n; i++)
        s[i] = 1.f / (1.f + s[i]);
}

static void swiglu(float *y, const float *gate, const float *up, size_t n)
{
    float s[STRIP];

    for (size_t at = 0; at < n; at += STRIP) {
        size_t len = n - at < STRIP ? n - at : STRIP;

        sigmoid_strip(s, gate + at, len);
        for (size_t i = 0; i < len; i++)
            y[at + i] = gate[at + i] * s[i] * up[at + i];
    }
}

static void swiglu_back(float *dgate, float *dup, const float *dy, const float *gate,
                        const float *up, size_t n)
{
    float s[STRIP];

    for (size_t at = 0; at < n; at += STRIP) {
        size_t len = n - at < STRIP ? n - at : STRIP;

        sigmoid_strip(s, gate + at, len);
        for (size_t i = 0; i < len; i++) {
            float g = gate[at + i], d = dy[at + i];

            dup[at + i] = d * g * s[i];
            dgate[at + i] = d * up[at + i] * s[i] * (1.f + g * (1.f - s[i]));
        }
    }
}

static void log_softmax(float *x, size_t n, float inv_temp)
{
    enum { CHUNK = 256 };
    float e[CHUNK], sum = 0;

    for (size_t i = 0; i < n; i++)
        x[i] *= inv_temp;
    float top = max_of(x, n);
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t len = n - at < CHUNK ? n - at : CHUNK;

        for (size_t i = 0; i < len; i++)
            e[i] = x[at + i] - top;
        exp_n(e, e, len);
        sum += sum_of(e, len);
    }
    float lse = top + logf(sum);
    for (size_t i = 0; i < n; i++)
        x[i] -= lse;
}

static double sumsq(const float *x, size_t n)
{
    double s[4] = { 0 };
    size_t i = 0;

    for (; i + 4 <= n; i += 4)
        for (int l = 0; l < 4; l++)
            s[l] += (double)x[i + (size_t)l] * (double)x[i + (size_t)l];
    for (; i < n; i++)
        s[0] += (double)x[i] * (double)x[i];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

static void adam(float *w, float *m, float *v, const float *g, size_t n, const struct mat_adam *a)
{
    for (size_t i = 0; i < n; i++) {
        float d = g[i] * a->scale;

        m[i] = a->beta1 * m[i] + (1.f - a->beta1) * d;
        v[i] = a->beta2 * v[i] + (1.f - a->beta2) * d * d;
        w[i] -= a->lr * (m[i] * a->fix1 / (sqrtf(v[i] * a->fix2) + a->eps) + a->decay * w[i]);
    }
}

extern const struct mat_ops MAT_OPS;
const struct mat_ops MAT_OPS = {
    .name = MAT_NAME,
    .nt = nt,
    .nn = nn,
    .tn = tn,
    .add = add,
    .norm = norm,
    .norm_back = norm_back,
    .rope = rope,
    .attend = attend,
    .attend_back = attend_back,
    .swiglu = swiglu,
    .swiglu_back = swiglu_back,
    .log_softmax = log_softmax,
    .exp = exp_n,
    .sumsq = sumsq,
    .adam = adam,
};
