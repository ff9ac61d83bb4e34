/* which NCCL a process uses: the one that is in it, else the one that is named
 *
 *     test_nccl_loaded LIBRARY     its soname is NCCL's, as that of a library that PyTorch loads
 *
 * The choice is made once a process: each row is a child of its own. */
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
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

/* Threads of the program read its environment meanwhile: what is there does not move. */
static void multicast_is_off_whatever_it_was(void **state)
{
    enum { LITERAL = 5 };
    static const char literal[] = "NCCL_NVLS_ENABLE=1"; /* where nothing can be written */
    static const char *const rows[] = { "unset", "", "0", "1", "2 of them", "a literal" };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        pid_t pid = fork();

        if (pid == 0) {
            struct link_place p = { 0 };
            const char *before;

            if (i == 0)
                unsetenv("NCCL_NVLS_ENABLE");
            else if (i == LITERAL)
                putenv((char *)(uintptr_t)literal);
            else
                setenv("NCCL_NVLS_ENABLE", rows[i], 1);
            before = getenv("NCCL_NVLS_ENABLE");
            link_place_nccl(&p);
            _exit(p.nccl_version == NAMED && strcmp(p.nccl_env, "NCCL_NVLS_ENABLE=0") == 0 &&
                          (i < 2 || i == LITERAL || getenv("NCCL_NVLS_ENABLE") == before)
                      ? 0
                      : 1);
        }
        int how;

        t_int_eq(waitpid(pid, &how, 0), pid);
        t_int_eq(how, 0, "\"%s\"", rows[i]);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_one_in_the_process_is_used),
        cmocka_unit_test(none_is_version_0),
        cmocka_unit_test(multicast_is_off_whatever_it_was),
    };

    if (argc != 2 || !getenv("FURLONG_NCCL"))
        return 1;
    library = argv[1];
    return t_run("nccl in the process", tests);
}
