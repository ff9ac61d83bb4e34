/* A build without a CUDA compiler: the plain forms alone. */
#include "kernels/launch_priv.h"

const unsigned char kernels_image[1];
const uint64_t kernels_image_bytes = 0;
