/* common/gpu/gpu_priv.h - shared by the tables */
#pragma once
#include "common/gpu/gpu.h"

void gpu_uuid_text(char out[GPU_UUID_BYTES], const uint8_t bytes[16]);
extern struct fl_err gpu_none_why; /* why gpu_none was picked; no text: it was asked for */
extern struct gpu_code gpu_code; /* of kernels/; all zero until it is noted */
/* "fake", "fake:N", "fake:gb10" */
enum fl_status gpu_fake_shape(const char *word, struct fl_err *err);
/* Private pages of the host, huge where the kernel gives them, each one touched by a few threads:
 * what is pinned page by page by one thread takes twice as long. The caller unmaps. */
enum fl_status gpu_touched_pages(uint64_t bytes, void **out, struct fl_err *err);
