/* tests/worker/test_programs.c - furlong-node and furlong-keep as somebody types them: what is
 * wrong is said in one sentence with the value, exit code 2 for usage, and nothing is left */
#include "tests/t.h"
#include "common/base/base.h"
#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static const char *node_path, *keep_path;

struct said {
    int code;
    char text[8192], ready[2048];
};

static void read_all(int fd, char *out, size_t cap)
{
    size_t n = 0;
    ssize_t got;

    while (n < cap - 1 && (got = read(fd, out + n, cap - 1 - n)) > 0)
        n += (size_t)got;
    out[n] = 0;
    close(fd);
}

static void run(const char *program, char *const *args, struct said *out)
{
    posix_spawn_file_actions_t fa;
    int text[2], ready[2], status;
    char *argv[16] = { (char *)(uintptr_t)program };
    pid_t pid;

    for (size_t i = 0; args[i]; i++)
        argv[i + 1] = args[i];
    t_true(pipe2(text, O_CLOEXEC) == 0 && pipe2(ready, O_CLOEXEC) == 0);
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, text[1], 1);
    posix_spawn_file_actions_adddup2(&fa, text[1], 2);
    posix_spawn_file_actions_adddup2(&fa, ready[1], 9);
    t_int_eq(posix_spawn(&pid, program, &fa, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&fa);
    close(text[1]);
    close(ready[1]);
    read_all(text[0], out->text, sizeof(out->text));
    read_all(ready[0], out->ready, sizeof(out->ready));
    t_true(waitpid(pid, &status, 0) == pid);
    out->code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void bad_input(void **state)
{
    static const struct row {
        const char *name, *args; /* parted by blanks */
        int code;
        const char *says;
    } rows[] = {
        { "no head", "", 2, "--address=HOST:PORT" },
        { "unknown flag", "--adress=a:1", 2, "--address" },
        { "a word", "--address=127.0.0.1:9 now", 2, "'now'" },
        { "out of range", "--address=127.0.0.1:9 --num-gpus=5000", 2, "5000" },
        { "no number", "--address=127.0.0.1:9 --num-gpus=two", 2, "two" },
        { "no port", "--address=127.0.0.1 --wait=0", 2, "HOST:PORT" },
        { "port out of range", "--address=127.0.0.1:99999 --wait=0", 2, "99999" },
        { "an address that nobody has", "--address=127.0.0.1:9 --node-ip-address=203.0.113.9", 2,
          "203.0.113.9: no interface of this host has it" },
        { "labels", "--address=127.0.0.1:9 --labels=a", 2, "\"a\" is not KEY=VALUE" },
        { "resources", "--address=127.0.0.1:9 --resources=[1]", 2, "--resources" },
        { "name", "--address=127.0.0.1:9 --node-name=a/b", 2, "--node-name=a/b" },
        { "log level", "--address=127.0.0.1:9 --log-level=loud", 2, "loud" },
        { "long runtime folder",
          "--address=127.0.0.1:9 --runtime-dir=/tmp/0123456789012345678901234567890123456789", 2,
          "40 at most" },
        { "nobody there", "--address=127.0.0.1:9 --wait=0", 1, "no head at 127.0.0.1:9" },
    };

    (void)state;
    setenv("FURLONG_STATE_DIR", t_path("state"), 1);
    setenv("FURLONG_RUNTIME_DIR", t_path("run"), 1);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        char line[256], *args[16] = { (char *)(uintptr_t) "--ready-fd=9" };
        struct said said;
        size_t n = 1;

        snprintf(line, sizeof(line), "%s", rows[i].args);
        for (char *save, *p = strtok_r(line, " ", &save); p; p = strtok_r(NULL, " ", &save))
            args[n++] = p;
        run(node_path, args, &said);
        t_int_eq(said.code, rows[i].code, "%s: %s", rows[i].name, said.text);
        t_has(said.text, rows[i].says);
        if (said.ready[0]) { /* flags that do not parse end before there is a descriptor to write to
                              */
            t_has(said.ready, "{\"error\":");
            t_true(said.ready[strlen(said.ready) - 1] == '\n', "%s", rows[i].name);
        }
        t_true(rmdir(t_path("run")) == 0 || access(t_path("run"), F_OK) < 0, "%s leaves something",
               rows[i].name);
    }
}

static void keepers_refuse(void **state)
{
    static const struct row {
        const char *name, *arg, *says;
    } rows[] = {
        { "no spec", NULL, "usage: furlong-keep SPEC-FILE" },
        { "help", "--help", "usage" },
        { "missing", "/nowhere/spec", "/nowhere/spec" },
        { "not a spec", "/etc/passwd", "/etc/passwd is no whole spec" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        char *args[] = { (char *)(uintptr_t)rows[i].arg, NULL };
        struct said said;

        run(keep_path, args, &said);
        t_int_eq(said.code, 2, "%s", rows[i].name);
        t_has(said.text, rows[i].says);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_input),
        cmocka_unit_test(keepers_refuse),
    };

    if (argc != 3)
        return 2;
    node_path = argv[1];
    keep_path = argv[2];
    return t_run("programs", tests);
}
