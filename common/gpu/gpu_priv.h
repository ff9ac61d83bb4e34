/* common/gpu/gpu_priv.h - shared by the tables */
#pragma once
#include "common/gpu/gpu.h"

void gpu_uuid_text(char out[GPU_UUID_BYTES], const uint8_t bytes[16]);
/* kernels/ as one fatbin; NULL in a build without nvcc */
extern const void *const gpu_kernels_image;
/* "fake", "fake:N", "fake:gb10" */
enum fl_status gpu_fake_shape(const char *word, struct fl_err *err);
