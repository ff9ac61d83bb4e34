/* python/furlong/src/dlpack.h - the part of DLPack's stable layout that is spoken here
 * (https://dmlc.github.io/dlpack/latest/c_api.html, unversioned capsules) */
#pragma once
#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };
enum {
    DL_INT = 0,
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_BFLOAT = 4,
    DL_COMPLEX = 5,
    DL_BOOL = 6,
    DL_F8_E4M3FN = 10,
    DL_F8_E5M2 = 12
};
struct dl_device {
    int32_t type, id;
};
struct dl_type {
    uint8_t code, bits;
    uint16_t lanes;
};
struct dl_tensor {
    void *data;
    struct dl_device device;
    int32_t ndim;
    struct dl_type dtype;
    int64_t *shape, *strides; /* strides NULL: row-major without gaps */
    uint64_t byte_offset;
};
struct dl_managed {
    struct dl_tensor t;
    void *ctx;
    void (*deleter)(struct dl_managed *self);
};
