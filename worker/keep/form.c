#include "worker/keep/form.h"
#include <stdlib.h>
#include <string.h>

/* A field: u16 tag, u16 zero, u32 length, the bytes, one zero byte (so that texts end). */
enum { MAGIC_BYTES = 4, HEAD_BYTES = 8 };

static bool form_room(struct form *f, size_t more)
{
    size_t cap = f->cap ? f->cap : 1024;

    if (f->failed || f->len + more > FORM_MAX) {
        f->failed = true;
        return false;
    }
    while (cap < f->len + more)
        cap *= 2;
    if (cap != f->cap) {
        uint8_t *d = realloc(f->data, cap);

        if (!d) {
            f->failed = true;
            return false;
        }
        f->data = d;
        f->cap = cap;
    }
    return true;
}

void form_begin(struct form *f, uint32_t magic)
{
    f->len = 0;
    f->failed = false;
    if (form_room(f, MAGIC_BYTES)) {
        memcpy(f->data, &magic, sizeof(magic));
        f->len = MAGIC_BYTES;
    }
}

void form_put(struct form *f, enum form_tag tag, const void *data, size_t len)
{
    uint16_t t = (uint16_t)tag;
    uint32_t n = (uint32_t)len;

    if (len > FORM_MAX || !form_room(f, HEAD_BYTES + len + 1)) {
        f->failed = true;
        return;
    }
    uint8_t *p = f->data + f->len;

    memcpy(p, &t, sizeof(t));
    memset(p + 2, 0, 2);
    memcpy(p + 4, &n, sizeof(n));
    if (len)
        memcpy(p + HEAD_BYTES, data, len);
    p[HEAD_BYTES + len] = 0;
    f->len += HEAD_BYTES + len + 1;
}

void form_put_text(struct form *f, enum form_tag tag, const char *text)
{
    if (text)
        form_put(f, tag, text, strlen(text));
}

void form_put_u64(struct form *f, enum form_tag tag, uint64_t v)
{
    form_put(f, tag, &v, sizeof(v));
}

bool form_end(struct form *f)
{
    form_put(f, FORM_END, NULL, 0);
    return !f->failed;
}

void form_fini(struct form *f)
{
    free(f->data);
    *f = (struct form){ 0 };
}

bool form_next(const void *data, size_t len, size_t *at, struct form_field *out)
{
    const uint8_t *p = data;
    size_t i = *at ? *at : MAGIC_BYTES;
    uint16_t tag;
    uint32_t n;

    if (i > len || len - i < HEAD_BYTES + 1)
        return false;
    memcpy(&tag, p + i, sizeof(tag));
    memcpy(&n, p + i + 4, sizeof(n));
    if (tag == FORM_END || n > len - i - HEAD_BYTES - 1)
        return false;
    *out = (struct form_field){ .tag = tag, .data = p + i + HEAD_BYTES, .len = n };
    *at = i + HEAD_BYTES + n + 1;
    return true;
}

bool form_check(const void *data, size_t len, uint32_t magic)
{
    const uint8_t *p = data;
    size_t at = 0, end = MAGIC_BYTES;
    struct form_field f;
    uint16_t tag;
    uint32_t n;

    if (len < MAGIC_BYTES || len > FORM_MAX || memcmp(p, &magic, sizeof(magic)) != 0)
        return false;
    while (form_next(data, len, &at, &f)) {
        if (((const char *)f.data)[f.len] != 0)
            return false;
        end = at;
    }
    if (len - end != HEAD_BYTES + 1)
        return false;
    memcpy(&tag, p + end, sizeof(tag));
    memcpy(&n, p + end + 4, sizeof(n));
    return tag == FORM_END && n == 0;
}

uint64_t form_u64(const struct form_field *f)
{
    uint64_t v = 0;

    if (f->len == sizeof(v))
        memcpy(&v, f->data, sizeof(v));
    return v;
}

const char *form_text(const struct form_field *f)
{
    return f->data;
}
