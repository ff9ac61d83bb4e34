/* kernels/digest_priv.h - each body by its number, so that tests can compare them */
#pragma once
#include <stdbool.h>
#include "kernels/digest.h"

size_t kernel_digest_bodies(void);
/* false: this machine cannot run that body, nothing was done. dst NULL: digest alone. */
bool kernel_digest_with(size_t body, uint64_t digest[2], void *dst, const void *run, size_t bytes,
                        uint64_t first_byte);
