#include "common/base/id.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

enum fl_status fl_random(void *out, size_t len, struct fl_err *err)
{
    uint8_t *at = out;

    while (len) {
        ssize_t n = getrandom(at, len, 0);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fl_fail_errno(err, "random bytes");
        at += n;
        len -= (size_t)n;
    }
    return FL_OK;
}

void fl_hex(char *out, const void *data, size_t len)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *b = data;

    for (size_t i = 0; i < len; i++) {
        *out++ = digits[b[i] >> 4];
        *out++ = digits[b[i] & 15];
    }
    *out = '\0';
}

static int hex_value(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

bool fl_hex_parse(const char *hex, void *out, size_t len)
{
    uint8_t *b = out;

    if (strlen(hex) != 2 * len)
        return false;
    for (size_t i = 0; i < 2 * len; i++)
        if (hex_value(hex[i]) < 0)
            return false;
    for (size_t i = 0; i < len; i++)
        b[i] = (uint8_t)(hex_value(hex[2 * i]) << 4 | hex_value(hex[2 * i + 1]));
    return true;
}

const char *fl_short(char out[FL_SHORT], const void *id)
{
    fl_hex(out, id, (FL_SHORT - 1) / 2);
    return out;
}

bool fl_term_older(const struct fl_term *a, const struct fl_term *than)
{
    return memcmp(a->cluster, than->cluster, sizeof(a->cluster)) == 0 && a->head < than->head;
}

bool fl_seat_ref_same(const struct fl_seat_ref *a, const struct fl_seat_ref *b)
{
    return memcmp(&a->id, &b->id, sizeof(a->id)) == 0 && a->attempt == b->attempt;
}
