/* What somebody speaks, and how to tell them something in it. */
#include <stdio.h>
#include <string.h>

#include "transport/door/door.h"

enum {
    TLS_GREETING = 0x16, /* first byte of a record that begins TLS */
    FRAME = 9,           /* head of a frame of HTTP/2 */
    SETTINGS = 4,
    GOAWAY = 7,
    HTTP_1_1_REQUIRED = 0xd /* clients that can, ask again in HTTP/1.1 */
};
static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
_Static_assert(DOOR_NEEDS == sizeof(preface) - 1 + FRAME, "preface and the head of a frame");

unsigned door_speech(const void *first, size_t n, bool whole)
{
    enum { PREFACE = sizeof(preface) - 1 };
    size_t common = n < PREFACE ? n : PREFACE;

    if (n && *(const uint8_t *)first == TLS_GREETING)
        return DOOR_TLS;
    if (n && memcmp(first, preface, common) != 0)
        return DOOR_TEXT;
    if (n >= DOOR_NEEDS)
        return DOOR_HTTP2;
    return !whole ? 0 : n >= PREFACE ? DOOR_HTTP2 : DOOR_TEXT;
}

static void frame_head(uint8_t out[FRAME], uint8_t type, size_t len)
{
    memset(out, 0, FRAME);
    out[1] = (uint8_t)(len >> 8);
    out[2] = (uint8_t)len;
    out[3] = type;
}

size_t door_answer(unsigned speech, const char *status, const char *says, void *out, size_t cap)
{
    enum { LAST_AND_CODE = 8 };
    size_t len = strnlen(says, DOOR_SAYS_MAX);
    uint8_t *p = out;
    int n;

    if (speech != DOOR_HTTP2) {
        n = snprintf(
            out, cap,
            "HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %zu\r\n"
            "X-Furlong-Version: " FURLONG_VERSION "\r\nConnection: close\r\n\r\n%.*s\n",
            status ? status : "400 Bad Request", len + 1, (int)len, says);
        return n < 0 ? 0 : (size_t)n < cap ? (size_t)n : cap - 1;
    }
    if (cap < 2 * FRAME + LAST_AND_CODE + len)
        return 0;
    frame_head(p, SETTINGS, 0);
    frame_head(p + FRAME, GOAWAY, LAST_AND_CODE + len);
    p += 2 * FRAME;
    memset(p, 0, LAST_AND_CODE);
    p[LAST_AND_CODE - 1] = HTTP_1_1_REQUIRED;
    memcpy(p + LAST_AND_CODE, says, len);
    return 2 * FRAME + LAST_AND_CODE + len;
}
