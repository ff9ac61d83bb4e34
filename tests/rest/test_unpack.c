/* Archives of somebody else's making: nothing leaves the folder, nothing is left half done. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zip.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "tests/t.h"
#include "worker/node/stats.h"
#include "worker/node/unpack.h"

static const struct unpack_limits usual = UNPACK_LIMITS;

struct entry {
    const char *name, *text;
    unsigned mode; /* 0: none given */
};

/* An archive as bytes; names go in as they are. */
static struct fl_bytes make(const struct entry *e, size_t n)
{
    zip_error_t why;
    zip_source_t *to;
    zip_t *z;
    char *out;

    zip_error_init(&why);
    to = zip_source_buffer_create(NULL, 0, 0, &why);
    zip_source_keep(to);
    z = zip_open_from_source(to, ZIP_CREATE | ZIP_TRUNCATE, &why);
    for (size_t i = 0; i < n; i++) {
        zip_int64_t at = e[i].text ? zip_file_add(z, e[i].name,
                                                  zip_source_buffer(z, e[i].text, strlen(e[i].text), 0),
                                                  ZIP_FL_ENC_RAW)
                                   : zip_dir_add(z, e[i].name, ZIP_FL_ENC_RAW);

        t_true(at >= 0, "%s", e[i].name);
        if (e[i].mode)
            zip_file_set_external_attributes(z, (zip_uint64_t)at, 0, ZIP_OPSYS_UNIX,
                                             (zip_uint32_t)e[i].mode << 16);
    }
    t_int_eq(zip_close(z), 0);
    zip_stat_t st;
    zip_source_stat(to, &st);
    out = malloc(st.size);
    zip_source_open(to);
    t_int_eq(zip_source_read(to, out, st.size), (zip_int64_t)st.size);
    zip_source_close(to);
    zip_source_free(to);
    return (struct fl_bytes){ out, st.size };
}

static const char *fresh(void)
{
    const char *dir = t_path("unpacked");

    (void)fl_tree_remove(dir, NULL);
    t_int_eq(mkdir(dir, 0700), 0);
    return dir;
}

static void what_is_refused(void **unused)
{
    static const struct {
        const char *name;
        struct entry e[2];
        const char *says;
    } rows[] = {
        { "up", { { "../evil", "x", 0 } }, "leaves the folder" },
        { "up inside", { { "a/../../evil", "x", 0 } }, "leaves the folder" },
        { "dot", { { "./a", "x", 0 } }, "leaves the folder" },
        { "absolute", { { "/etc/evil", "x", 0 } }, "absolute" },
        { "backslash", { { "..\\evil", "x", 0 } }, "backslash" },
        { "empty part", { { "a//b", "x", 0 } }, "empty" },
        { "control", { { "a\nb", "x", 0 } }, "no text" },
        { "not utf-8", { { "a\xff", "x", 0 } }, "no text" },
        { "link", { { "a", "/etc", S_IFLNK | 0777 } }, "link" },
        { "device", { { "a", "", S_IFCHR | 0666 } }, "special" },
        { "below a file", { { "a", "x", 0 }, { "a/b", "y", 0 } }, "below one that is a file" },
        { "a folder that is a file", { { "a/b", "x", 0 }, { "a", "y", 0 } }, "twice" },
    };

    (void)unused;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct fl_bytes b = make(rows[i].e, rows[i].e[1].name ? 2 : 1);
        struct fl_err err = { 0 };

        t_int_eq(unpack_zip_bytes(b, fresh(), &usual, &err), FL_CORRUPT, "%s", rows[i].name);
        t_true(strstr(err.text, rows[i].says) != NULL, "%s: %s", rows[i].name, err.text);
        t_int_eq(access(t_path("evil"), F_OK), -1, "%s", rows[i].name);
        free((void *)(uintptr_t)b.data);
    }
}

static void what_is_taken(void **unused)
{
    static const struct entry e[] = { { "a/b/c.txt", "text", S_IFREG | 0640 },
                                      { "run.sh", "#!", S_IFREG | 04755 },
                                      { "empty/", NULL, 0 },
                                      { "a/d\xc3\xa9.txt", "", 0 } };
    const char *dir = fresh();
    struct fl_bytes b = make(e, FL_LEN(e));
    struct fl_err err = { 0 };
    struct stat sb;
    char path[1024];

    (void)unused;
    t_ok(unpack_zip_bytes(b, dir, &usual, &err), &err);
    snprintf(path, sizeof(path), "%s/a/b/c.txt", dir);
    t_int_eq(stat(path, &sb), 0);
    t_int_eq(sb.st_size, 4);
    snprintf(path, sizeof(path), "%s/run.sh", dir);
    t_int_eq(stat(path, &sb), 0);
    t_int_eq(sb.st_mode & 07777 & ~022, 0755 & ~022, "to be run, and nobody's by birth");
    snprintf(path, sizeof(path), "%s/empty", dir);
    t_true(stat(path, &sb) == 0 && S_ISDIR(sb.st_mode));
    free((void *)(uintptr_t)b.data);
}

static void bombs_are_cut(void **unused)
{
    static const struct unpack_limits few = { 1 << 20, 2, 250 }, small = { 1000, 10, 250 };
    static char zeros[1 << 20];
    const struct entry three[] = { { "a", "", 0 }, { "b", "", 0 }, { "c", "", 0 } };
    struct fl_err err = { 0 };
    struct fl_bytes b = make(three, 3);

    (void)unused;
    t_int_eq(unpack_zip_bytes(b, fresh(), &few, &err), FL_CORRUPT);
    t_true(strstr(err.text, "3 entries") != NULL, "%s", err.text);
    free((void *)(uintptr_t)b.data);
    memset(zeros, 'z', sizeof(zeros) - 1);
    b = make(&(struct entry){ "big", zeros, 0 }, 1);
    t_int_eq(unpack_zip_bytes(b, fresh(), &small, &err), FL_CORRUPT);
    t_true(strstr(err.text, "unpacks to more") != NULL, "%s", err.text);
    free((void *)(uintptr_t)b.data);
}

static void damage_is_seen(void **unused)
{
    static const struct entry e = { "file", "some text that is long enough to be damaged", 0 };
    struct fl_bytes b = make(&e, 1);
    unsigned char *p = (unsigned char *)(uintptr_t)b.data;
    struct fl_err err = { 0 };

    (void)unused;
    t_int_eq(unpack_zip_bytes((struct fl_bytes){ "no zip at all", 13 }, fresh(), &usual, &err), FL_CORRUPT);
    t_int_eq(unpack_zip_bytes((struct fl_bytes){ b.data, b.len / 2 }, fresh(), &usual, &err), FL_CORRUPT);
    p[40] ^= 0x55; /* of the file's bytes */
    t_int_eq(unpack_zip_bytes(b, fresh(), &usual, &err), FL_CORRUPT);
    free(p);
}

static void every_fault_is_told(void **unused)
{
    static const struct entry e[] = { { "a/b", "x", 0 }, { "c", "y", 0 } };
    struct fl_bytes b = make(e, 2);
    enum fl_status st = FL_INTERNAL;
    int before = t_open_fds();

    (void)unused;
    for (unsigned nth = 1; st != FL_OK && nth < 50; nth++) {
        fl_fault_arm(nth);
        st = unpack_zip_bytes(b, fresh(), &usual, NULL);
        fl_fault_disarm();
        t_int_eq(t_open_fds(), before, "nth=%u", nth);
    }
    t_int_eq(st, FL_OK);
    free((void *)(uintptr_t)b.data);
}

static void the_hosts_numbers(void **unused)
{
    uint64_t a = 0, b = 0, boot = 0;

    (void)unused;
    t_true(node_stats_cpu("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\nbtime 1700000000\n", &a, &b, &boot));
    t_int_eq(a, 150);
    t_int_eq(b, 1000);
    t_int_eq(boot, 1700000000);
    t_true(!node_stats_cpu("cpux", &a, &b, &boot));
    node_stats_net("Inter-| Receive\n face |bytes\n    lo: 7 0 0 0 0 0 0 0 7 0\n  eth0: 10 1 0 0 0 0 0 0 20 2 0\n"
                   " eth1:5 1 0 0 0 0 0 0 6 2\n", &a, &b);
    t_int_eq(a, 15);
    t_int_eq(b, 26);
    node_stats_disks("   8 0 sda 1 0 4 0 1 0 6 0 0 0 0\n   8 1 sda1 1 0 4 0 1 0 6 0\n 259 0 nvme0n1 1 0 2 0 1 0 2 0\n"
                     " 259 1 nvme0n1p1 1 0 9 0 1 0 9 0\n   7 0 loop0 1 0 9 0 1 0 9 0\n", &a, &b);
    t_int_eq(a, 6 * 512);
    t_int_eq(b, 8 * 512);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_refused),   cmocka_unit_test(what_is_taken),
        cmocka_unit_test(bombs_are_cut),     cmocka_unit_test(damage_is_seen),
        cmocka_unit_test(every_fault_is_told), cmocka_unit_test(the_hosts_numbers),
    };

    return t_run("unpack", tests);
}
