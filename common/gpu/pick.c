#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/gpu/gpu_priv.h"

struct gpu_code gpu_code;
struct fl_err gpu_none_why;
static const struct gpu_ops *picked;
static struct fl_err pick_err;
static pthread_once_t pick_once = PTHREAD_ONCE_INIT;

static void pick(void)
{
    const char *word = getenv("FURLONG_GPU");
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;

    if (!word || !*word) {
        enum fl_status st = gpu_cuda.list(all, &n, &gpu_none_why);

        picked = st == FL_OK && n > 0 ? &gpu_cuda : &gpu_none;
        if (st == FL_OK && n == 0)
            (void)fl_fail(&gpu_none_why, FL_UNSUPPORTED,
                          "the CUDA driver shows no device to this process");
    } else if (strcmp(word, "cuda") == 0)
        picked = &gpu_cuda;
    else if (strcmp(word, "none") == 0)
        picked = &gpu_none;
    else if (strcmp(word, "host") == 0)
        picked = &gpu_host;
    else if (gpu_fake_shape(word, &pick_err) == FL_OK)
        picked = &gpu_fake;
}

enum fl_status gpu_pick(const struct gpu_ops **out, struct fl_err *err)
{
    pthread_once(&pick_once, pick);
    if (!picked) {
        if (err)
            *err = pick_err;
        return pick_err.status;
    }
    *out = picked;
    return FL_OK;
}

bool gpu_in_use(void)
{
    const char *word = getenv("FURLONG_GPU");
    void *driver = word && *word ? NULL : dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);

    if (word && *word)
        return strcmp(word, "none") != 0;
    if (driver)
        dlclose(driver);
    return driver != NULL;
}

void gpu_code_set(const struct gpu_code *code)
{
    gpu_code = *code;
}

void gpu_uuid_text(char out[GPU_UUID_BYTES], const uint8_t b[16])
{
    snprintf(out, GPU_UUID_BYTES,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14],
             b[15]);
}
