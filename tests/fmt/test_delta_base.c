/* bases made of versions, and what they make superfluous */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/str.h"
#include "tests/fmt/versions.h"

static bool is_there(const char *dir, const char *name)
{
    char path[FL_PATH_MAX];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    return access(path, F_OK) == 0;
}

/* A version that this build cannot read at all: whoever opens it fails. */
static void make_foreign(const char *dir, const char *name)
{
    char path[FL_PATH_MAX], *text;
    struct fl_err err = { 0 };
    size_t n;

    snprintf(path, sizeof(path), "%s/%s/model.safetensors.index.json", dir, name);
    t_ok(fl_file_read(path, 1 << 20, &text, &n, &err), &err);
    memcpy(strstr(text, "xxh3-128"), "blake--3", 8);
    t_ok(fl_file_write(path, 0600, text, n, &err), &err);
    free(text);
}

static void drop(const char *dir, const char *name)
{
    char path[FL_PATH_MAX];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    t_ok(fl_tree_remove(path, NULL), NULL);
}

static void make_file(const char *dir, const char *name)
{
    char path[FL_PATH_MAX];
    struct fl_err err = { 0 };

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    t_ok(fl_mkdirs(path, &err), &err);
    snprintf(path, sizeof(path), "%s/%s/x", dir, name);
    t_ok(fl_file_write(path, 0600, "x", 1, &err), &err);
}

/* A copy that was not there before is brought to that version. */
static void fresh_copy_is(const char *dir, int v)
{
    char local[FL_PATH_MAX];
    struct fl_err err = { 0 };

    fl_copy(local, sizeof(local), v_folder("fresh"));
    t_ok(delta_pull(dir, local, v, &err), &err);
    v_local_is(local, v);
}

static void a_base_has_the_bytes_of_its_chain(void **state)
{
    struct fl_err err = { 0 };
    char dir[FL_PATH_MAX], path[FL_PATH_MAX], *text;

    (void)state;
    for (unsigned i = 0; i < 4; i++) {
        uint64_t file_bytes = i / 2 % 2 ? 3000 : 0;

        fl_copy(dir, sizeof(dir), v_write_all("base", i % 2 ? DELTA_XOR : DELTA_OVERWRITE, 400));
        t_ok(delta_compact(dir, 2, file_bytes, NULL, &err), &err);
        drop(dir, "weight_v000000"); /* the next one begins at base_v2 */
        t_ok(delta_compact(dir, 4, file_bytes, NULL, &err), &err);
        t_refused(delta_compact(dir, 4, file_bytes, NULL, &err), FL_EXISTS, &err);
        t_refused(delta_compact(dir, 77, file_bytes, NULL, &err), FL_NOT_FOUND, &err);
        t_true(!is_there(dir, "base_v000077.part"), "nothing is left of it");
        for (int v = 2; v < V_VERSIONS; v++)
            fresh_copy_is(dir, v);
        struct st_reader *r;

        snprintf(path, sizeof(path), "%s/base_v000004", dir);
        t_ok(st_read_folder(path, &r, &err), &err);
        for (size_t t = 0; t < V_TENSORS; t++) /* as anybody reads it */
            t_mem_eq(st_find(r, v_shapes[t].name)->data, v_truth[4][t], v_bytes(t));
        st_reader_destroy(r);
        snprintf(path, sizeof(path), "%s/base_v000004/model.safetensors.index.json", dir);
        t_ok(fl_file_read(path, 100000, &text, NULL, &err), &err);
        t_has(text, "\"version\": 4");
        t_has(text, "\"compression_format\": \"none\"");
        t_has(text, "\"digest\": \"abc\"");
        t_has(text, file_bytes ? "model-00003-of-00003" : "model-00001-of-00001");
        t_true(!strstr(text, "base_version") && !strstr(text, "delta_encoding"), "%s", text);
        free(text);
    }
}

/* The changes are less to read than the base, which is for those who cannot follow them. */
static void a_copy_follows_the_changes(void **state)
{
    struct fl_err err = { 0 };
    char dir[FL_PATH_MAX], local[FL_PATH_MAX];

    (void)state;
    fl_copy(dir, sizeof(dir), v_write_all("follow", DELTA_OVERWRITE, 0));
    fl_copy(local, sizeof(local), v_folder("follow-local"));
    t_ok(delta_pull(dir, local, 2, &err), &err);
    t_ok(delta_compact(dir, 4, 0, NULL, &err), &err);
    make_foreign(dir, "base_v000004"); /* is not looked at */
    t_ok(delta_pull(dir, local, 4, &err), &err);
    v_local_is(local, 4);
    drop(dir, "base_v000004");
    t_ok(delta_compact(dir, 3, 0, NULL, &err), &err);
    drop(dir, "weight_v000002");
    fl_copy(local, sizeof(local), v_folder("follow-local"));
    t_refused(delta_pull(dir, local, 1, &err) == FL_OK ? delta_pull(dir, local, 2, &err) : FL_OK,
              FL_NOT_FOUND, &err);
    t_ok(delta_pull(dir, local, 4, &err), &err); /* missed what is gone */
    v_local_is(local, 4);
}

/* It is seen by the sums of what it is brought to: then it begins at a base. */
static void a_copy_that_is_damaged(void **state)
{
    struct fl_err err = { 0 };
    char dir[FL_PATH_MAX], local[FL_PATH_MAX], path[FL_PATH_MAX], *text;
    size_t n;

    (void)state;
    fl_copy(dir, sizeof(dir), v_write_all("hurt", DELTA_OVERWRITE, 0));
    fl_copy(local, sizeof(local), v_folder("hurt-local"));
    snprintf(path, sizeof(path), "%s/model.safetensors", local);
    t_ok(delta_pull(dir, local, 1, &err), &err);
    t_ok(fl_file_read(path, 1 << 20, &text, &n, &err), &err);
    char *at = memmem(text, n, v_truth[1][0], v_bytes(0));

    t_true(at != NULL, "the tensor is in the copy");
    at[7] ^= 1;
    t_ok(fl_file_write(path, 0600, text, n, &err), &err);
    free(text);
    t_ok(delta_pull(dir, local, 4, &err), &err);
    v_local_is(local, 4);
}

static void faults_at_a_base(void **state)
{
    char dir[FL_PATH_MAX];
    struct fl_err err = { 0 };
    int fds = t_open_fds();
    bool met = true;
    unsigned nth = 1;

    (void)state;
    fl_copy(dir, sizeof(dir), v_write_all("base-faults", DELTA_OVERWRITE, 0));
    for (; met; nth++) {
        fl_fault_arm(nth);
        enum fl_status st = delta_compact(dir, 3, 3000, NULL, &err);

        met = fl_fault_disarm();
        t_int_eq(st == FL_OK, !met, "nth=%u", nth);
        t_int_eq(is_there(dir, "base_v000003"), !met, "nth=%u", nth);
        t_true(!is_there(dir, "base_v000003.part"), "nth=%u", nth);
        t_int_eq(t_open_fds(), fds);
        fresh_copy_is(dir, 4);
    }
    t_true(nth > 15, "%u places", nth);
    atomic_int pace = DELTA_STOP;

    t_refused(delta_compact(dir, 4, 0, &pace, &err), FL_CANCELLED, &err);
    t_true(!is_there(dir, "base_v000004.part"), "nothing is left of it");
}

struct held {
    const char *dir;
    atomic_int pace;
    enum fl_status st;
};

static void *compact_held(void *arg)
{
    struct held *h = arg;

    h->st = delta_compact(h->dir, 3, 0, &h->pace, NULL);
    return NULL;
}

static void a_base_waits_where_it_is(void **state)
{
    char dir[FL_PATH_MAX];
    struct held h = { .dir = dir, .pace = DELTA_HOLD };
    pthread_t thread;

    (void)state;
    fl_copy(dir, sizeof(dir), v_write_all("held", DELTA_OVERWRITE, 0));
    t_int_eq(pthread_create(&thread, NULL, compact_held, &h), 0);
    for (unsigned i = 0; i < 5000 && !is_there(dir, "base_v000003.part"); i++)
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    t_true(is_there(dir, "base_v000003.part"), "it was begun");
    fresh_copy_is(dir, 4); /* meanwhile */
    t_true(!is_there(dir, "base_v000003"), "it waits");
    atomic_store(&h.pace, DELTA_GO);
    pthread_join(thread, NULL);
    t_int_eq(h.st, FL_OK);
    fresh_copy_is(dir, 3);
}

/* Runs work in a child where that place takes effect: waits until it has ended or stands. */
static pid_t child_at(const char *fault, enum fl_status (*work)(const char *dir, const char *local),
                      const char *dir, const char *local, int *status)
{
    pid_t pid = fork(); /* one thread, no device: a child may run on */

    if (pid == 0) {
        (void)fl_fault_set(fault, NULL);
        _exit((int)work(dir, local));
    }
    t_int_eq(waitpid(pid, status, WUNTRACED), pid);
    return pid;
}

static void child_goes_on(pid_t pid, enum fl_status wanted)
{
    int status;

    t_int_eq(kill(pid, SIGCONT), 0);
    t_int_eq(waitpid(pid, &status, 0), pid);
    t_true(WIFEXITED(status) && WEXITSTATUS(status) == (int)wanted, "status %d", status);
}

static enum fl_status compact_3(const char *dir, const char *local)
{
    (void)local;
    return delta_compact(dir, 3, 3000, NULL, NULL);
}

static enum fl_status pull_4(const char *dir, const char *local)
{
    return delta_pull(dir, local, 4, NULL);
}

static void killed_while_it_makes_a_base(void **state)
{
    static const char *const at[] = { "fmt.create:2=kill", "fmt.write:3=kill", "fmt.rename:2=kill",
                                      "fmt.index:1=kill", "fmt.compact:1=kill" };
    char dir[FL_PATH_MAX];
    struct fl_err err = { 0 };
    int status;

    (void)state;
    fl_copy(dir, sizeof(dir), v_write_all("base-killed", DELTA_XOR, 0));
    for (size_t i = 0; i < FL_LEN(at); i++) {
        (void)child_at(at[i], compact_3, dir, NULL, &status);
        t_true(WIFSIGNALED(status), "%s: the child was not killed", at[i]);
        t_true(is_there(dir, "base_v000003.part") && !is_there(dir, "base_v000003"), "%s", at[i]);
        fresh_copy_is(dir, 4);
    }
    t_ok(delta_compact(dir, 3, 0, NULL, &err), &err);
    t_true(!is_there(dir, "base_v000003.part"), "what the dead one left is gone");
    drop(dir, "weight_v000003");
    fresh_copy_is(dir, 4);
}

struct damage {
    const char *name, *file;
    long at; /* of the byte that is bent; -1: the file is cut, -2: it is gone */
};
static const struct damage damages[] = {
    { "a byte of a tensor", "model-00002-of-00003.safetensors", 900 },
    { "a cut file", "model-00002-of-00003.safetensors", -1 },
    { "a lost file", "model-00001-of-00003.safetensors", -2 },
    { "an index that is none", "model.safetensors.index.json", 0 },
};

static void do_damage(const char *dir, const struct damage *d)
{
    char path[FL_PATH_MAX], *text;
    struct fl_err err = { 0 };
    size_t n;

    snprintf(path, sizeof(path), "%s/base_v000002/%s", dir, d->file);
    t_ok(fl_file_read(path, 1 << 20, &text, &n, &err), &err);
    if (d->at == -2)
        t_int_eq(unlink(path), 0);
    else if (d->at == -1)
        t_int_eq(truncate(path, (off_t)n / 2), 0);
    else
        text[d->at] ^= 0x55;
    if (d->at >= 0)
        t_ok(fl_file_write(path, 0600, text, n, &err), &err);
    free(text);
}

static void damaged_bases(void **state)
{
    char dir[FL_PATH_MAX], local[FL_PATH_MAX];

    (void)state;
    for (size_t i = 0; i < FL_LEN(damages); i++) {
        const struct damage *d = &damages[i];
        struct fl_err err = { 0 };

        fl_copy(dir, sizeof(dir), v_write_all("damaged", DELTA_OVERWRITE, 0));
        t_ok(delta_compact(dir, 1, 0, NULL, &err), &err);
        t_ok(delta_compact(dir, 2, 3000, NULL, &err), &err);
        do_damage(dir, d);
        fresh_copy_is(dir, 4); /* by what is below it: here another base */
        drop(dir, "base_v000001");
        fresh_copy_is(dir, 4);
        t_ok(delta_compact(dir, 3, 0, NULL, &err), &err);
        drop(dir, "base_v000003");
        drop(dir, "weight_v000000");
        fl_copy(local, sizeof(local), v_folder("damaged-local"));
        t_refused(delta_pull(dir, local, 4, &err), FL_CORRUPT, &err);
        printf("# %s: %s\n", d->name, err.text);
        t_has(err.text, "base_v000002");
        t_has(err.text, "damaged");
        t_refused(delta_compact(dir, 4, 0, NULL, &err), FL_CORRUPT, &err);
        t_int_eq(delta_local_version(local), DELTA_NO_BASE);
    }
}

/* ---- pruning ---- */

static void prune_leaves_what_others_have_there(void **state)
{
    static const char *const theirs[] = { "weight_v00001",       "weight_v0000001",
                                          "weight_v000001.bak",  "base_v000001.x",
                                          "weight_v000000.part", "notes",
                                          "xweight_v000001",     "base_v" };
    struct fl_err err = { 0 };
    char dir[FL_PATH_MAX], path[FL_PATH_MAX];

    (void)state;
    fl_copy(dir, sizeof(dir), v_write_all("prune", DELTA_OVERWRITE, 0));
    for (size_t i = 0; i < FL_LEN(theirs); i++)
        make_file(dir, theirs[i]);
    snprintf(path, sizeof(path), "%s/base_v000000", dir); /* a link, and a file, of such a name */
    t_int_eq(symlink("notes", path), 0);
    snprintf(path, sizeof(path), "%s/base_v000001", dir);
    t_ok(fl_file_write(path, 0600, "x", 1, &err), &err);
    t_refused(delta_prune(dir, 2, &err), FL_INVALID, &err); /* not a base */
    t_refused(delta_prune(dir, 9, &err), FL_NOT_FOUND, &err);
    t_true(is_there(dir, "weight_v000000"), "nothing was removed");
    t_ok(delta_compact(dir, 2, 0, NULL, &err), &err);
    t_ok(delta_compact(dir, 3, 0, NULL, &err), &err);
    make_file(dir, "base_v000004.part");
    for (unsigned again = 0; again < 2; again++) {
        t_ok(delta_prune(dir, 3, &err), &err);
        t_true(!is_there(dir, "weight_v000000") && !is_there(dir, "weight_v000001") &&
                   !is_there(dir, "weight_v000002") && !is_there(dir, "weight_v000003") &&
                   !is_there(dir, "base_v000002") && !is_there(dir, "base_v000004.part"),
               "all that is superfluous is gone");
        fresh_copy_is(dir, 3);
        fresh_copy_is(dir, 4);
    }
    t_ok(delta_prune_all(dir, &err), &err);
    t_true(!is_there(dir, "weight_v000004") && !is_there(dir, "base_v000003"), "all are gone");
    for (size_t i = 0; i < FL_LEN(theirs); i++) {
        snprintf(path, sizeof(path), "%s/x", theirs[i]);
        t_true(is_there(dir, path), "%s is there", path);
        drop(dir, theirs[i]);
    }
    t_true(is_there(dir, "base_v000001"), "a file is no version");
    drop(dir, "base_v000000");
    drop(dir, "base_v000001");
    t_ok(delta_prune_all(dir, &err), &err);
    t_true(access(dir, F_OK) < 0, "the folder went with the last of them");
}

static void faults_of_pruning(void **state)
{
    struct fl_err err = { 0 };
    char dir[FL_PATH_MAX];

    (void)state;
    fl_copy(dir, sizeof(dir), v_write_all("prune-faults", DELTA_OVERWRITE, 0));
    t_ok(delta_compact(dir, 4, 0, NULL, &err), &err);
    t_ok(fl_fault_set("fmt.prune:2=fail", &err), &err);
    t_true(delta_prune(dir, 4, &err) != FL_OK, "one could not be removed");
    t_has(err.text, "weight_v00000");
    t_ok(fl_fault_set(NULL, NULL), NULL);
    t_int_eq(is_there(dir, "weight_v000000") + is_there(dir, "weight_v000001") +
                 is_there(dir, "weight_v000002") + is_there(dir, "weight_v000003") +
                 is_there(dir, "weight_v000004"),
             1, "the others were");
    fresh_copy_is(dir, 4);
    t_ok(delta_prune(dir, 4, &err), &err);
    fresh_copy_is(dir, 4);
}

/* A reader that has found its versions reads on; one that has not looks once more. */
static void a_late_reader(void **state)
{
    static const char *const at[] = { "fmt.create:1=stop", "fmt.chain:3=stop" };
    char dir[FL_PATH_MAX], local[FL_PATH_MAX];
    struct fl_err err = { 0 };
    int status;

    (void)state;
    for (size_t i = 0; i < FL_LEN(at); i++) {
        fl_copy(dir, sizeof(dir), v_write_all("late", DELTA_OVERWRITE, 0));
        fl_copy(local, sizeof(local), v_folder("late-local"));
        pid_t pid = child_at(at[i], pull_4, dir, local, &status);

        t_true(WIFSTOPPED(status), "%s: the reader did not come by", at[i]);
        t_ok(delta_compact(dir, 4, 0, NULL, &err), &err);
        t_ok(delta_prune(dir, 4, &err), &err);
        child_goes_on(pid, FL_OK);
        v_local_is(local, 4);
    }
}

static bool has_open(pid_t pid, const char *path)
{
    char fds[64], name[FL_PATH_MAX * 2], to[FL_PATH_MAX];
    struct dirent *e;
    bool found = false;

    snprintf(fds, sizeof(fds), "/proc/%d/fd", (int)pid);
    DIR *d = opendir(fds);

    while (d && (e = readdir(d))) {
        snprintf(name, sizeof(name), "%s/%s", fds, e->d_name);
        ssize_t n = readlink(name, to, sizeof(to) - 1);

        to[n > 0 ? n : 0] = '\0';
        found |= strcmp(to, path) == 0;
    }
    if (d)
        closedir(d);
    return found;
}

static enum fl_status forget(const char *dir, const char *local)
{
    (void)dir;
    return delta_forget(local, NULL);
}

static void a_copy_is_forgotten(void **state)
{
    char dir[FL_PATH_MAX], local[FL_PATH_MAX], lock[FL_PATH_MAX];
    struct fl_err err = { 0 };
    int status;

    (void)state;
    fl_copy(dir, sizeof(dir), v_write_all("forget", DELTA_OVERWRITE, 0));
    fl_copy(local, sizeof(local), v_folder("forget-local"));
    snprintf(lock, sizeof(lock), "%s/.lock", local);
    t_ok(delta_pull(dir, local, 1, &err), &err);
    int fd = open(lock, O_RDWR | O_CLOEXEC);

    t_int_eq(flock(fd, LOCK_EX), 0);
    t_refused(delta_forget(local, &err), FL_AGAIN, &err);
    v_local_is(local, 1);
    close(fd);
    make_file(local, "notes");
    t_ok(delta_forget(local, &err), &err);
    t_true(!is_there(local, "model.safetensors") && is_there(local, "notes/x"), "ours alone");
    drop(local, "notes");
    t_ok(delta_forget(local, &err), &err);
    t_true(access(local, F_OK) < 0, "the folder went, too");

    t_ok(delta_pull(dir, local, 1, &err), &err); /* somebody waits while it is forgotten */
    pid_t goes = child_at("fmt.forget:3=stop", forget, dir, local, &status);
    pid_t waits = fork();

    if (waits == 0)
        _exit((int)pull_4(dir, local));
    for (unsigned i = 0; i < 3000 && !has_open(waits, lock); i++)
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    child_goes_on(goes, FL_OK);
    t_int_eq(waitpid(waits, &status, 0), waits);
    t_true(WIFEXITED(status) && WEXITSTATUS(status) == FL_OK, "status %d", status);
    v_local_is(local, 4);
    t_true(is_there(local, ".lock"), "its lock is there for the next one");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_base_has_the_bytes_of_its_chain),
        cmocka_unit_test(a_copy_follows_the_changes),
        cmocka_unit_test(a_copy_that_is_damaged),
        cmocka_unit_test(faults_at_a_base),
        cmocka_unit_test(a_base_waits_where_it_is),
        cmocka_unit_test(killed_while_it_makes_a_base),
        cmocka_unit_test(damaged_bases),
        cmocka_unit_test(prune_leaves_what_others_have_there),
        cmocka_unit_test(faults_of_pruning),
        cmocka_unit_test(a_late_reader),
        cmocka_unit_test(a_copy_is_forgotten),
    };

    v_make();
    return t_run("delta_base", tests);
}
