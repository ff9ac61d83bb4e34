#pragma once
#include <stdarg.h>
#include <stdatomic.h>
#include <furlong/types.h>

/* ==== common/base/base.h: the few words that every file uses ================================== */
enum fl_status fl_fail(struct fl_err *err, enum fl_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
enum fl_status fl_fail_errno(struct fl_err *err, const char *fmt, ...)
    __attribute__((format(printf, 2, 3))); /* status by one table from errno */
enum fl_status fl_wrap(struct fl_err *err, enum fl_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* What the three above share. The text is one line: control characters become spaces. */
void fl_err_set(struct fl_err *err, enum fl_status st, enum fl_origin origin, int native,
                const char *fmt, ...) __attribute__((format(printf, 5, 6)));
enum fl_status fl_status_of_errno(int err_no);
const char *fl_status_name(enum fl_status st); /* "FL_STALE" -> "stale"; never NULL */

#define FL_LEN(array) (sizeof(array) / sizeof((array)[0]))
#define container_of(ptr, type, member)                                                           \
    (__extension__({                                                                              \
        const __typeof__(((type *)0)->member) *fl_m_ = (ptr);                                     \
        (type *)((char *)(uintptr_t)fl_m_ - offsetof(type, member));                              \
    }))

#define FL_AUTO_DEFINE(x)                                                                         \
    static inline void x##_auto_(struct x **p) { x##_destroy(*p); }
#define FL_AUTO(x) __attribute__((cleanup(x##_auto_)))
#define FL_TAKE(p) (__extension__({ __typeof__(p) fl_t_ = (p); (p) = NULL; fl_t_; }))

struct fl_bytes { const void *data; size_t len; };         /* borrowed, unless a comment says not */
struct fl_amount { uint16_t resource; int64_t e4; };       /* 1/10000; resource: interned name    */
struct fl_job_id { uint8_t b[4]; };                        /* lengths as Ray's: ids can be shown  */
struct fl_node_id { uint8_t b[28]; };
struct fl_worker_id { uint8_t b[28]; };
struct fl_group_id { uint8_t b[18]; };

/* Who speaks, and since when. Whatever changes state at a receiver carries one of these; a receiver
 * that has seen a later one answers FL_STALE and changes nothing. Never a wall clock. */
struct fl_term { uint8_t cluster[16]; uint64_t head; };           /* +1 at each start of a head   */
struct fl_node_ref { struct fl_node_id id; uint64_t start; };     /* +1 at each start of a daemon */
struct fl_seat_ref { struct fl_worker_id id; uint32_t attempt; }; /* +1 when a rank starts again  */

