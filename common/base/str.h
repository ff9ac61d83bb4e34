/* common/base/str.h - bounded text */
#pragma once
#include <string.h>
#include "common/base/base.h"

/* A text that grows up to a bound and says when it was cut, on the caller's array or on the heap.
 * data is always terminated, "" at first. */
struct fl_str {
    char *data;
    size_t len, cap, max; /* max: longest text in bytes, without the terminator */
    bool heap, cut;       /* cut: something did not fit (or memory ended)       */
};
#define FL_STR_ON(array) { (array), 0, sizeof(array), sizeof(array) - 1, false, false }
#define FL_STR_HEAP(max_bytes) { NULL, 0, 0, (max_bytes), true, false }
void fl_str_add(struct fl_str *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void fl_str_addv(struct fl_str *s, const char *fmt, va_list ap);
void fl_str_add_bytes(struct fl_str *s, const void *data, size_t len);
void fl_str_add_utf8(struct fl_str *s, const char *text, size_t len); /* U+FFFD for what is no UTF-8 */
const char *fl_str_text(const struct fl_str *s); /* never NULL */
void fl_str_fini(struct fl_str *s);              /* heap: frees */

size_t fl_copy(char *out, size_t cap, const char *text); /* cuts; returns strlen(text) */
#define FL_COPY(array, text) (fl_copy((array), sizeof(array), (text)) < sizeof(array))

/* The whole text is one number in range, else FL_INVALID with the text and the range. */
enum fl_status fl_parse_i64(const char *text, int64_t min, int64_t max, int64_t *out,
                            struct fl_err *err);
enum fl_status fl_parse_f64(const char *text, double min, double max, double *out,
                            struct fl_err *err);
/* 512, 64k, 512MiB, 2G, 1.5GB: k M G T and with iB are powers of 1024, with B of 1000. */
enum fl_status fl_parse_bytes(const char *text, uint64_t max, uint64_t *out, struct fl_err *err);
const char *fl_bytes_text(char out[16], uint64_t bytes); /* "1.5 GiB"; returns out */

/* Bytes of the character that text begins with; 0: that is no UTF-8 (overlong, surrogate, cut). */
size_t fl_utf8_len(const char *text, size_t len);
unsigned fl_edit_distance(const char *a, const char *b); /* for "did you mean" */
bool fl_name_is_secret(const char *name); /* of a variable or flag whose value is masked */
