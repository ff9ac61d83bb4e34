/* which NCCL a process uses: the one that is in it, else the one that is named
 *
 *     test_nccl_loaded LIBRARY     its soname is NCCL's, as that of a library that PyTorch loads
 *
 * The choice is made once a process: each row is a child of its own. */
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "common/base/str.h"
#include "tests/t.h"
#include "transport/link/dev.h"

enum { NAMED = 22809, IN_PROCESS = 22703 }; /* versions: of $FURLONG_NCCL, and of LIBRARY */
static const char *library;

static uint32_t version_where(bool loaded, const char *named)
{
    uint32_t version = UINT32_MAX;
    int ends[2];

    t_int_eq(pipe(ends), 0);
    pid_t pid = fork();

    if (pid == 0) {
        struct link_place p = { 0 };

        if (named)
            setenv("FURLONG_NCCL", named, 1);
        if (loaded && !dlopen(library, RTLD_NOW | RTLD_LOCAL))
            _exit(1);
        link_place_nccl(&p);
        _exit(write(ends[1], &p.nccl_version, sizeof(p.nccl_version)) < 0);
    }
    close(ends[1]);
    t_int_eq(read(ends[0], &version, sizeof(version)), sizeof(version));
    close(ends[0]);
    int how;

    t_int_eq(waitpid(pid, &how, 0), pid);
    t_int_eq(how, 0);
    return version;
}

static void the_one_in_the_process_is_used(void **state)
{
    (void)state;
    t_int_eq(version_where(false, NULL), NAMED);
    t_int_eq(version_where(true, NULL), IN_PROCESS, "two of them do not mix");
}

static void none_is_version_0(void **state)
{
    (void)state;
    t_int_eq(version_where(false, "/nowhere/libnccl.so"), 0);
    t_int_eq(version_where(true, "/nowhere/libnccl.so"), IN_PROCESS);
}

/* The environment is the program's, whose threads read it meanwhile: nothing is put there. */
static void the_environment_stays_as_it_was(void **state)
{
    static const struct {
        const char *is, *told;
    } rows[] = { { NULL, "" }, { "0", "NCCL_NVLS_ENABLE=0" }, { "1", "NCCL_NVLS_ENABLE=1" } };
    char was[8];

    (void)state;
    t_true(FL_COPY(was, getenv("NCCL_NVLS_ENABLE")));
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        if (rows[i].is)
            setenv("NCCL_NVLS_ENABLE", rows[i].is, 1);
        else
            unsetenv("NCCL_NVLS_ENABLE");
        pid_t pid = fork();

        if (pid == 0) {
            struct link_place p = { 0 };
            const char *is;

            link_place_nccl(&p);
            is = getenv("NCCL_NVLS_ENABLE");
            _exit(p.nccl_version == NAMED && strcmp(p.nccl_env, rows[i].told) == 0 &&
                          strcmp(is ? is : "none", rows[i].is ? rows[i].is : "none") == 0
                      ? 0
                      : 1);
        }
        int how;

        t_int_eq(waitpid(pid, &how, 0), pid);
        t_int_eq(how, 0, "%s", rows[i].is ? rows[i].is : "unset");
    }
    setenv("NCCL_NVLS_ENABLE", was, 1);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_one_in_the_process_is_used),
        cmocka_unit_test(none_is_version_0),
        cmocka_unit_test(the_environment_stays_as_it_was),
    };

    if (argc != 2 || !getenv("FURLONG_NCCL"))
        return 1;
    library = argv[1];
    return t_run("nccl in the process", tests);
}
