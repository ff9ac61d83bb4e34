#pragma once

/* ==== include/furlong/types.h: what programs and the house share ===============================
 * The status says what a caller may do next; the rest is evidence. Numbers travel: append only. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum fl_status {
    FL_OK = 0,
    FL_AGAIN,       /* not now, nothing started; readiness is signalled; call again         */
    FL_INVALID,     /* argument, config or message is wrong; never again as it is           */
    FL_EXHAUSTED,   /* a limit was met; may fit later                                       */
    FL_UNREACHABLE, /* peer or device gone; what was in flight may or may not have happened */
    FL_UNSUPPORTED, /* this build or this machine cannot                                    */
    FL_CORRUPT,     /* checksum, framing or digest                                          */
    FL_STALE,       /* carries an older term, start, attempt, epoch or version              */
    FL_DENIED,      /* credentials                                                          */
    FL_EXISTS,
    FL_NOT_FOUND,
    FL_TIMEOUT,
    FL_CANCELLED,
    FL_INTERNAL, /* a defect of ours */
    FL_STATUS_COUNT
};
enum fl_origin {
    FL_FROM_SELF, FL_FROM_PEER, FL_FROM_ERRNO, FL_FROM_CUDA, FL_FROM_NCCL, FL_FROM_GRPC,
    FL_FROM_CURL, FL_FROM_SQLITE
};
struct fl_err {
    enum fl_status status;
    enum fl_origin origin;
    int native;     /* that origin's own number, 0 if none                       */
    char text[256]; /* one line, outermost context first; ends in "..." when cut */
};
enum fl_dtype { FL_F32, FL_F16, FL_BF16, FL_F8_E4M3, FL_F8_E5M2, FL_I64, FL_I32, FL_U8 };
enum { FL_DIMS = 8 };
#define FL_TRY(call)                                                                              \
    do {                                                                                          \
        enum fl_status fl_st_ = (call);                                                           \
        if (fl_st_ != FL_OK)                                                                      \
            return fl_st_;                                                                        \
    } while (0)

