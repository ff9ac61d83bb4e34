#include "transport/xfer/parcel.h"
#include <stdlib.h>
#include <string.h>
#include "kernels/digest.h"

static bool grow(void **array, size_t *cap, size_t want, size_t each)
{
    size_t to = *cap ? *cap * 2 : 64;
    void *p;

    if (want <= *cap)
        return true;
    p = reallocarray(*array, to, each);
    if (!p)
        return false;
    *array = p;
    *cap = to;
    return true;
}

static bool add_run(struct parcels *ps, const struct parcel_run *r)
{
    if (!grow((void **)&ps->runs, &ps->runs_cap, ps->n_runs + 1, sizeof(*ps->runs)))
        return false;
    ps->runs[ps->n_runs++] = *r;
    return true;
}

static struct parcel *add_parcel(struct parcels *ps, size_t first_run, bool packed)
{
    if (!grow((void **)&ps->p, &ps->p_cap, ps->n + 1, sizeof(*ps->p)))
        return NULL;
    ps->p[ps->n] = (struct parcel){ .packed = packed,
                                    .from_off = ps->runs[first_run].from_off,
                                    .to_off = ps->runs[first_run].to_off,
                                    .first_run = first_run };
    return &ps->p[ps->n++];
}

/* Every row of every segment, long ones cut to PARCEL_DIRECT_MAX. */
static bool list_runs(const struct link_seg *segs, size_t n, struct parcels *ps)
{
    for (size_t s = 0; s < n; s++)
        for (uint32_t row = 0; row < segs[s].rows; row++)
            for (uint64_t at = 0; at < segs[s].run_bytes; at += PARCEL_DIRECT_MAX) {
                uint64_t left = segs[s].run_bytes - at;
                struct parcel_run r = { .from_off = segs[s].from_off + row * segs[s].from_step + at,
                                        .to_off = segs[s].to_off + row * segs[s].to_step + at,
                                        .first_byte =
                                            segs[s].first_byte + row * segs[s].byte_step + at,
                                        .bytes =
                                            left < PARCEL_DIRECT_MAX ? left : PARCEL_DIRECT_MAX,
                                        .seg = (uint32_t)s };

                if (!add_run(ps, &r))
                    return false;
            }
    return true;
}

/* How many runs from first on lie one behind the other on both sides, within one parcel. */
static size_t stretch(const struct parcels *ps, size_t first, uint64_t *bytes)
{
    size_t i = first + 1;

    *bytes = ps->runs[first].bytes;
    for (; i < ps->n_runs; i++) {
        const struct parcel_run *a = &ps->runs[i - 1], *b = &ps->runs[i];

        if (a->from_off + a->bytes != b->from_off || a->to_off + a->bytes != b->to_off ||
            *bytes + b->bytes > PARCEL_DIRECT_MAX)
            break;
        *bytes += b->bytes;
    }
    return i - first;
}

enum fl_status parcels_cut(const struct link_seg *segs, size_t n, struct parcels *out,
                           struct fl_err *err)
{
    struct parcels ps = { 0 };
    struct parcel *open = NULL; /* packed, and there may be room left in it */

    if (!list_runs(segs, n, &ps))
        goto no_memory;
    for (size_t i = 0; i < ps.n_runs;) {
        uint64_t bytes;
        size_t runs = stretch(&ps, i, &bytes);
        bool direct = bytes >= PARCEL_DIRECT_MIN;

        if (direct)
            open = NULL;
        if (direct || !open || open->bytes + bytes > PARCEL_PACKED_MAX) {
            struct parcel *p = add_parcel(&ps, i, !direct);

            if (!p)
                goto no_memory;
            p->bytes = bytes;
            p->n_runs = runs;
            open = direct ? NULL : p;
        } else {
            open->bytes += bytes;
            open->n_runs += runs;
        }
        i += runs;
    }
    *out = ps;
    return FL_OK;
no_memory:
    parcels_fini(&ps);
    return fl_fail(err, FL_EXHAUSTED, "no memory to cut a bucket of %zu segments", n);
}

void parcels_fini(struct parcels *p)
{
    free(p->p);
    free(p->runs);
    *p = (struct parcels){ 0 };
}

void parcel_pack(const struct parcels *ps, size_t i, const void *from_mem, void *packed)
{
    const struct parcel *p = &ps->p[i];
    char *to = packed;

    for (size_t r = p->first_run; r < p->first_run + p->n_runs; r++) {
        memcpy(to, (const char *)from_mem + ps->runs[r].from_off, ps->runs[r].bytes);
        to += ps->runs[r].bytes;
    }
}

void parcel_land(const struct parcels *ps, size_t i, const void *packed, void *to_mem,
                 uint64_t (*digests)[2])
{
    const struct parcel *p = &ps->p[i];
    const char *from = packed;

    for (size_t r = p->first_run; r < p->first_run + p->n_runs; r++) {
        const struct parcel_run *run = &ps->runs[r];
        char *to = (char *)to_mem + run->to_off;

        if (from) {
            kernel_digest_copy(digests[run->seg], to, from, run->bytes, run->first_byte);
            from += run->bytes;
        } else {
            kernel_digest_add(digests[run->seg], to, run->bytes, run->first_byte);
        }
    }
}
