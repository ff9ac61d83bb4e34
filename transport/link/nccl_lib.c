#include "transport/link/nccl_api.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/base/log.h"
#include "common/base/str.h"
#include "transport/link/dev.h"

static struct nccl_api api;
static struct fl_err load_err;
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

/* Settings that decide how two ranks talk: where they differ, the set-up hangs or goes wrong. Names
 * of interfaces are not among them: those differ between hosts rightly. Sorted. */
static const char *const agreed[] = {
    "NCCL_ALGO",          "NCCL_BUFFSIZE",      "NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NET",          "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",   "NCCL_P2P_LEVEL",     "NCCL_PROTO",        "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
};

static enum fl_status look_up(void *lib, struct fl_err *err)
{
    static const char *const symbols[] = {
#define NCCL_SYMBOL(name, symbol, ...) symbol,
        NCCL_FUNCTIONS(NCCL_SYMBOL)
#undef NCCL_SYMBOL
    };
    void **const at[] = {
#define NCCL_PLACE(name, symbol, ...) (void **)&api.name,
        NCCL_FUNCTIONS(NCCL_PLACE)
#undef NCCL_PLACE
    };

    for (size_t i = 0; i < FL_LEN(symbols); i++) {
        *at[i] = dlsym(lib, symbols[i]);
        if (!*at[i])
            return fl_fail(err, FL_UNSUPPORTED, "NCCL without %s: older than 2.18", symbols[i]);
    }
    *(void **)&api.error_text = dlsym(lib, "ncclGetErrorString");
    int number = 0;

    if (!api.error_text || api.version(&number) != NCCL_OK || number < NCCL_OLDEST)
        return fl_fail(err, FL_UNSUPPORTED, "NCCL %d is older than %d", number, NCCL_OLDEST);
    api.number = (uint32_t)number;
    return FL_OK;
}

/* Where it stands, through the kernel: a literal that the program gave to putenv() cannot be
 * written to, and that is an error here, not a signal. */
static bool value_is_0_now(char *value)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) < 0)
        return false;
    bool done = write(ends[1], "0", 2) == 2 && read(ends[0], value, 2) == 2;

    close(ends[0]);
    close(ends[1]);
    return done;
}

/* Multicast over NVLink can put the host's devices out of service, and wins nothing for a
 * broadcast. The daemon turns it off before there is a process; where the job has turned it on the
 * value is changed in place, as threads of the program may be reading it: setenv() would move it.
 */
static void multicast_off(void)
{
    char *is = getenv("NCCL_NVLS_ENABLE");

    if (is && strcmp(is, "0") == 0)
        return;
    if (is && *is)
        fl_warn("NVLink multicast is turned off: NCCL_NVLS_ENABLE was %s", is);
    if (!is || !*is || !value_is_0_now(is)) /* not there: no daemon started this process */
        (void)setenv("NCCL_NVLS_ENABLE", "0", 1);
}

static void load(void)
{
    const char *path = getenv("FURLONG_NCCL");
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD); /* two in one process do not mix */

    multicast_off();
    if (!lib && path && *path)
        lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    else if (!lib)
        lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        fl_fail(&load_err, FL_UNSUPPORTED, "no NCCL: %s", dlerror());
    else
        load_err.status = look_up(lib, &load_err);
}

enum fl_status nccl_load(const struct nccl_api **out, struct fl_err *err)
{
    pthread_once(&load_once, load);
    if (load_err.status != FL_OK) {
        if (err)
            *err = load_err;
        return load_err.status;
    }
    *out = &api;
    return FL_OK;
}

void link_place_nccl(struct link_place *p)
{
    struct fl_str text = FL_STR_ON(p->nccl_env);
    const struct nccl_api *a;

    p->nccl_env[0] = 0;
    p->nccl_version = nccl_load(&a, NULL) == FL_OK ? a->number : 0;
    for (size_t i = 0; i < FL_LEN(agreed); i++) {
        const char *value = getenv(agreed[i]);

        if (value && *value)
            fl_str_add(&text, "%s%s=%s", text.len ? " " : "", agreed[i], value);
    }
}
