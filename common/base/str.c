#include "common/base/str.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

/* Room for more bytes and the terminator, or for as many of them as the bound allows. */
static size_t str_room(struct fl_str *s, size_t more)
{
    size_t left = s->max > s->len ? s->max - s->len : 0, take = more < left ? more : left;

    if (take < more)
        s->cut = true;
    if (!s->heap || s->len + take < s->cap)
        return take;
    size_t cap = s->cap ? s->cap : 64;
    while (cap <= s->len + take)
        cap *= 2;
    char *grown = realloc(s->data, cap);
    if (!grown) {
        s->cut = true;
        return s->cap > s->len ? s->cap - s->len - 1 : 0;
    }
    s->data = grown;
    s->cap = cap;
    return take;
}

void fl_str_add_bytes(struct fl_str *s, const void *data, size_t len)
{
    size_t take = str_room(s, len);

    if (!s->data || !s->cap)
        return;
    if (take)
        memcpy(s->data + s->len, data, take);
    s->len += take;
    s->data[s->len] = '\0';
}

void fl_str_addv(struct fl_str *s, const char *fmt, va_list ap)
{
    char small[256], *big = NULL;
    va_list again;

    va_copy(again, ap);
    int n = vsnprintf(small, sizeof(small), fmt, ap);
    if (n < 0 || (n >= (int)sizeof(small) && !(big = malloc((size_t)n + 1)))) {
        s->cut = true;
    } else if (big) {
        vsnprintf(big, (size_t)n + 1, fmt, again);
        fl_str_add_bytes(s, big, (size_t)n);
    } else {
        fl_str_add_bytes(s, small, (size_t)n);
    }
    va_end(again);
    free(big);
}

void fl_str_add(struct fl_str *s, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    fl_str_addv(s, fmt, ap);
    va_end(ap);
}

const char *fl_str_text(const struct fl_str *s)
{
    return s->data && s->len ? s->data : "";
}

void fl_str_fini(struct fl_str *s)
{
    if (s->heap) {
        free(s->data);
        s->data = NULL;
        s->cap = 0;
    }
    s->len = 0;
    s->cut = false;
}

size_t fl_copy(char *out, size_t cap, const char *text)
{
    size_t len = strlen(text), take = len < cap ? len : cap - 1;

    memcpy(out, text, take);
    out[take] = '\0';
    return len;
}

enum fl_status fl_parse_i64(const char *text, int64_t min, int64_t max, int64_t *out,
                            struct fl_err *err)
{
    char *end;

    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || isspace((unsigned char)*text))
        return fl_fail(err, FL_INVALID, "\"%s\" is not a whole number", text);
    if (errno == ERANGE || v < min || v > max)
        return fl_fail(err, FL_INVALID, "%s is not between %lld and %lld", text, (long long)min,
                       (long long)max);
    *out = v;
    return FL_OK;
}

enum fl_status fl_parse_f64(const char *text, double min, double max, double *out,
                            struct fl_err *err)
{
    char *end;
    double v = strtod(text, &end);

    if (end == text || *end || isspace((unsigned char)*text) || isnan(v))
        return fl_fail(err, FL_INVALID, "\"%s\" is not a number", text);
    if (v < min || v > max)
        return fl_fail(err, FL_INVALID, "%s is not between %g and %g", text, min, max);
    *out = v;
    return FL_OK;
}

enum fl_status fl_parse_bytes(const char *text, uint64_t max, uint64_t *out, struct fl_err *err)
{
    static const char prefixes[] = "kmgt";
    char *end;
    double v = strtod(text, &end), unit = 1;

    if (end == text || !isdigit((unsigned char)*text))
        return fl_fail(err, FL_INVALID, "\"%s\" is not a size such as 512MiB", text);
    const char *prefix = *end ? strchr(prefixes, tolower((unsigned char)*end)) : NULL;
    if (prefix) {
        double step = strcasecmp(end + 1, "b") == 0 ? 1000 : 1024;

        for (const char *p = prefixes; p <= prefix; p++)
            unit *= step;
        end++;
    }
    if (*end && strcasecmp(end, "b") != 0 && !(prefix && strcasecmp(end, "ib") == 0))
        return fl_fail(err, FL_INVALID, "\"%s\" is not a size such as 512MiB", text);
    if (!(v * unit <= (double)max) || v * unit >= 0x1p64)
        return fl_fail(err, FL_INVALID, "%s is more than %llu bytes", text,
                       (unsigned long long)max);
    *out = (uint64_t)(v * unit);
    return FL_OK;
}

const char *fl_bytes_text(char out[16], uint64_t bytes)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
    double v = (double)bytes;
    size_t u = 0;

    while (v >= 1024 && u + 1 < FL_LEN(units)) {
        v /= 1024;
        u++;
    }
    snprintf(out, 16, u && v < 100 ? "%.1f %s" : "%.0f %s", v, units[u]);
    return out;
}

/* Two letters in the wrong order are one mistake. */
unsigned fl_edit_distance(const char *a, const char *b)
{
    enum { LONGEST = 64 };
    unsigned rows[3][LONGEST + 1] = { 0 }, *now = rows[0];
    size_t la = strlen(a), lb = strlen(b);

    if (la > LONGEST || lb > LONGEST)
        return LONGEST;
    for (size_t j = 0; j <= lb; j++)
        now[j] = (unsigned)j;
    for (size_t i = 1; i <= la; i++) {
        const unsigned *before = rows[(i + 1) % 3], *last = rows[(i + 2) % 3];

        now = rows[i % 3];
        now[0] = (unsigned)i;
        for (size_t j = 1; j <= lb; j++) {
            unsigned best = last[j - 1] + (a[i - 1] != b[j - 1]);

            best = last[j] + 1 < best ? last[j] + 1 : best;
            best = now[j - 1] + 1 < best ? now[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = before[j - 2] + 1 < best ? before[j - 2] + 1 : best;
            now[j] = best;
        }
    }
    return now[lb];
}

bool fl_name_is_secret(const char *name)
{
    static const char *const words[] = { "token",      "secret",  "password", "passwd",
                                         "credential", "api_key", "apikey",   "private_key",
                                         "access_key", "auth_key" };

    for (size_t i = 0; i < FL_LEN(words); i++)
        if (strcasestr(name, words[i]))
            return true;
    return strcasecmp(name, "key") == 0;
}

size_t fl_utf8_len(const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    uint32_t c;
    size_t n;

    if (!len || p[0] < 0x80)
        return len != 0;
    n = p[0] >= 0xc2 && p[0] < 0xe0   ? 2
        : p[0] >= 0xe0 && p[0] < 0xf0 ? 3
        : p[0] >= 0xf0 && p[0] < 0xf5 ? 4
                                      : 0;
    if (!n || n > len)
        return 0;
    c = p[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (p[i] & 0x3f);
    }
    if ((n == 3 && (c < 0x800 || (c >= 0xd800 && c < 0xe000))) ||
        (n == 4 && (c < 0x10000 || c > 0x10ffff)))
        return 0;
    return n;
}

void fl_str_add_utf8(struct fl_str *out, const char *text, size_t len)
{
    size_t from = 0, at = 0;

    while (at < len) {
        size_t n = fl_utf8_len(text + at, len - at);

        if (n) {
            at += n;
            continue;
        }
        fl_str_add_bytes(out, text + from, at - from);
        fl_str_add_bytes(out, "\xef\xbf\xbd", 3);
        from = ++at;
    }
    fl_str_add_bytes(out, text + from, len - from);
}
