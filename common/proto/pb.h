/* common/proto/pb.h - messages from outside: what protobuf-c takes on trust is looked at here
 *
 * protobuf-c bounds neither the memory that a body unpacks to (two bytes can become a struct of
 * hundreds) nor the numbers of enums. */
#pragma once
#include <protobuf-c/protobuf-c.h>

#include "common/base/base.h"

enum { PB_MEMORY_MAX = 256 << 20, PB_GROWTH = 64, PB_SLACK = 64 << 10 };

/* NULL: FL_CORRUPT (does not decode, a required field is missing, an enum has no such value) or
 * FL_EXHAUSTED (unpacks to more than PB_GROWTH times its size). Freed as ever:
 * protobuf_c_message_free_unpacked(m, NULL). */
void *pb_unpack(const ProtobufCMessageDescriptor *d, const void *data, size_t len, struct fl_err *err);
void *pb_unpack_within(const ProtobufCMessageDescriptor *d, const void *data, size_t len, size_t max_bytes,
                       struct fl_err *err);
