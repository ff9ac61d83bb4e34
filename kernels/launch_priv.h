/* kernels/launch_priv.h - the embedded device code */
#pragma once
#include <stdint.h>

extern const unsigned char kernels_image[] __attribute__((visibility("hidden")));
/* 0: a build without it */
extern const uint64_t kernels_image_bytes __attribute__((visibility("hidden")));
