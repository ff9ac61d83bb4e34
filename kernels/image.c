/* The device code of kernels/, as one fatbin that the driver picks from. */
#include "common/gpu/gpu_priv.h"

__asm__(".section .rodata\n.balign 64\nfurlong_kernels_fatbin:\n.incbin \"" FURLONG_FATBIN "\"\n.byte 0\n.previous\n");
extern const unsigned char furlong_kernels_fatbin[] __attribute__((visibility("hidden")));
const void *const gpu_kernels_image = furlong_kernels_fatbin;
