/* Who holds what, and what to say when there is no more. */
#include <string.h>

#include "common/base/str.h"
#include "transport/arena/arena_priv.h"

static uint64_t used_bytes(const struct region *r)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < r->n_high; i++)
        sum += r->chunks[i].used_bytes;
    return sum;
}

static uint64_t tag_usage(struct arena *a, const struct region *r, struct arena_tag_usage *u)
{
    *u = (struct arena_tag_usage){ .used_bytes = used_bytes(r), .out = r->out };
    for (size_t i = 0; i < r->n_high; i++) {
        uint64_t held = arena_chunk_held(a, r, i);

        u->held_bytes += held;
        u->shared_bytes += r->chunks[i].holders ? held : 0;
        u->chunks += r->chunks[i].state == CHUNK_IN;
        u->chunks_out += r->chunks[i].state == CHUNK_OUT;
    }
    return u->held_bytes;
}

static bool is_here(const struct arena *a, uint64_t serial)
{
    for (unsigned t = 0; t < ARENA_TAGS; t++)
        for (size_t i = 0; i < a->regions[t].n_high; i++)
            if (a->regions[t].chunks[i].state == CHUNK_IN &&
                a->regions[t].chunks[i].serial == serial)
                return true;
    return false;
}

/* Each chunk once, however many hold it. */
static uint64_t left_bytes(const struct arena *a)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < a->n_holdings; i++) {
        size_t k = 0;

        while (k < i && a->holdings[k].serial != a->holdings[i].serial)
            k++;
        if (k == i && !is_here(a, a->holdings[i].serial))
            sum += a->holdings[i].bytes;
    }
    return sum;
}

void arena_usage(struct arena *a, bool restart_peaks, struct arena_usage *out)
{
    struct arena_usage u = { 0 };

    pthread_mutex_lock(&a->mu);
    for (unsigned i = 0; i < ARENA_TAGS; i++)
        u.held_bytes += tag_usage(a, &a->regions[i], &u.tags[i]);
    u.left_bytes = left_bytes(a);
    u.viewed_bytes = a->viewed_bytes;
    u.peak_held_bytes = a->peak_bytes;
    u.pool_bytes = (uint64_t)a->pool.n_blocks * ARENA_BLOCK_BYTES;
    u.pool_used_bytes = (uint64_t)a->pool.n_taken * ARENA_BLOCK_BYTES;
    u.peak_pool_used_bytes = (uint64_t)a->pool.peak_taken * ARENA_BLOCK_BYTES;
    if (restart_peaks) {
        a->peak_bytes = a->chunks_bytes;
        a->pool.peak_taken = a->pool.n_taken;
    }
    pthread_mutex_unlock(&a->mu);
    *out = u;
}

uint64_t arena_left_bytes(struct arena *a)
{
    uint64_t left, total;

    return a->gpu->memory(a->g, &left, &total, NULL) == FL_OK ? left : UINT64_MAX;
}

size_t arena_holders(struct arena *a, struct arena_holding *out, size_t room)
{
    size_t n = 0;

    pthread_mutex_lock(&a->mu);
    for (size_t i = 0; i < a->n_holdings; i++) {
        const struct holding *h = &a->holdings[i];
        size_t k = 0;

        while (k < n && (out[k].tag != h->tag || strcmp(out[k].holder, h->holder) != 0))
            k++;
        if (k == n) {
            if (n == room)
                break;
            out[n] = (struct arena_holding){ .tag = h->tag };
            (void)FL_COPY(out[n++].holder, h->holder);
        }
        out[k].bytes += h->bytes;
    }
    pthread_mutex_unlock(&a->mu);
    return n;
}

/* ==== the sentence ==== */
void arena_say_full(struct arena *a, uint64_t wanted_bytes, struct fl_err *err)
{
    const struct region *weights = &a->regions[__builtin_ctz(FURLONG_TAG_WEIGHTS)],
                        *kv = &a->regions[__builtin_ctz(FURLONG_TAG_KV)];
    uint64_t free_bytes = 0, total = 0, missing = wanted_bytes;
    char text[256], size[16];
    unsigned said = 0;
    struct fl_str s = FL_STR_ON(text);

    if (a->gpu->memory(a->g, &free_bytes, &total, NULL) == FL_OK)
        missing -= free_bytes < missing ? free_bytes : missing;
    fl_str_add(&s, "%.12s has no %s more", a->info.uuid, fl_bytes_text(size, wanted_bytes));
    if (total)
        fl_str_add(&s, " (%s free)", fl_bytes_text(size, free_bytes));
    arena_say_others(a, &s);
    if (a->slots > 1 && used_bytes(weights))
        fl_str_add(&s, "; one slot of weights would save %s",
                   fl_bytes_text(size, used_bytes(weights) / a->slots));
    if (missing > 0 && missing <= used_bytes(kv))
        fl_str_add(&s, "; a kv_cache smaller by %s would make room", fl_bytes_text(size, missing));
    for (unsigned i = 0; i < ARENA_TAGS; i++) {
        struct arena_tag_usage u;

        if (tag_usage(a, &a->regions[i], &u))
            fl_str_add(&s, "%s %s %s", said++ ? "," : "; here:", arena_tag_name(1u << i),
                       fl_bytes_text(size, u.held_bytes));
    }
    (void)fl_fail(err, FL_EXHAUSTED, "%s", fl_str_text(&s));
}
