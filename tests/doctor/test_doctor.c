/* The judges of `furlong doctor`: numbers in, a sentence and its remedy out */
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/t.h"
#include "worker/doctor/doctor.h"

#define GIB ((uint64_t)1 << 30)
#define MIB ((uint64_t)1 << 20)

static const struct doctor_finding *only(const struct doctor_list *l, const char *row, enum doctor_state wanted, const char *text)
{
    t_int_eq(l->n, 1, "%s", row);
    t_str_eq(doctor_state_name(l->all[0].state), doctor_state_name(wanted), "%s", row);
    t_has(l->all[0].text, text);
    t_true((wanted == DOCTOR_WARN || wanted == DOCTOR_FAIL) == (l->all[0].remedy[0] != 0), "%s: a remedy with what is wrong", row);
    return &l->all[0];
}

static void shm(void **state) /* 64 MB, as containers give */
{
    static const struct { const char *name; uint64_t total, available; enum doctor_state wanted; const char *text; } rows[] = {
        { "docker's default", 64 * MIB, 64 * MIB, DOCTOR_WARN, "64.0 MiB free" },
        { "full",             8 * GIB,  3 * MIB,  DOCTOR_WARN, "3.0 MiB free of 8.0 GiB" },
        { "enough",           8 * GIB,  7 * GIB,  DOCTOR_OK,   "7.0 GiB" },
        { "none",             0,        0,        DOCTOR_WARN, "no tmpfs" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct doctor_list l = { 0 };

        doctor_judge_shm(rows[i].total, rows[i].available, &l);
        (void)only(&l, rows[i].name, rows[i].wanted, rows[i].text);
    }
}

static void open_files(void **state)
{
    static const struct { const char *name; uint64_t soft, hard; enum doctor_state wanted; const char *text; } rows[] = {
        { "raised by itself", 256,  1048576, DOCTOR_OK,   "soft limit 256, raised" },
        { "rather few",       256,  4096,    DOCTOR_WARN, "want 65536" },
        { "too few",          256,  256,     DOCTOR_FAIL, "1024 are needed" },
        { "unlimited",        1024, ~(uint64_t)0, DOCTOR_OK, "raised" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct doctor_list l = { 0 };

        doctor_judge_files(rows[i].soft, rows[i].hard, &l);
        (void)only(&l, rows[i].name, rows[i].wanted, rows[i].text);
    }
}

static void file_systems(void **state)
{
    static const struct { const char *name; long type; uint64_t available; enum doctor_state wanted; const char *text; } rows[] = {
        { "ext4",       0xef53,     50 * GIB, DOCTOR_OK,   "50.0 GiB free" },
        { "NFS",        0x6969,     50 * GIB, DOCTOR_FAIL, "is on NFS" },
        { "Lustre",     0x0bd00bd0, 50 * GIB, DOCTOR_FAIL, "is on Lustre" },
        { "CIFS",       (int)0xff534d42, 50 * GIB, DOCTOR_FAIL, "is on CIFS" }, /* f_type is signed on some */
        { "tmpfs",      0x01021994, 50 * GIB, DOCTOR_OK,   "forgets" },
        { "nearly full", 0xef53,    200 * MIB, DOCTOR_WARN, "200 MiB" },
        { "full",       0xef53,     1 * MIB,  DOCTOR_FAIL, "1.0 MiB" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct doctor_list l = { 0 };

        doctor_judge_fs("state folder", "/state/furlong", rows[i].type, rows[i].available, &l);
        (void)only(&l, rows[i].name, rows[i].wanted, rows[i].text);
    }
}

static void nccl(void **state)
{
    static const struct doctor_nccl one[] = { { "/usr/lib/libnccl.so.2.28.3", 22803 }, { "/venv/libnccl.so.2", 22803 }, { "/venv2/libnccl.so.2", 22809 } };
    struct doctor_list l = { 0 };

    (void)state;
    doctor_judge_nccl(one, 2, true, &l);
    (void)only(&l, "two copies of one version", DOCTOR_OK, "2.28.3");
    l.n = 0;
    doctor_judge_nccl(one, 3, true, &l);
    t_has(only(&l, "two versions", DOCTOR_WARN, "2.28.3 (/usr/lib/libnccl.so.2.28.3) and 2.28.9 (/venv2/libnccl.so.2)")->remedy, "same");
    l.n = 0;
    doctor_judge_nccl(NULL, 0, true, &l);
    (void)only(&l, "devices without it", DOCTOR_WARN, "TCP");
    l.n = 0;
    doctor_judge_nccl(NULL, 0, false, &l);
    (void)only(&l, "nobody misses it", DOCTOR_SKIP, "no libnccl");
}

static void ports_and_clock(void **state) /* the holder is named */
{
    struct doctor_list l = { 0 };

    (void)state;
    doctor_judge_port("worker daemons", 6379, false, "pid 12 (redis-server)", &l);
    (void)only(&l, "taken", DOCTOR_WARN, "6379 (worker daemons) is taken by pid 12 (redis-server)");
    l.n = 0;
    doctor_judge_port("worker daemons", 6379, true, "", &l);
    (void)only(&l, "free", DOCTOR_OK, "6379 is free");
    l.n = 0;
    doctor_judge_clock(false, &l);
    (void)only(&l, "free running", DOCTOR_WARN, "no time service");
    l.n = 0;
    doctor_judge_cpus(5, 64, &l);
    (void)only(&l, "a quota below the cores", DOCTOR_OK, "5 of 64");
}

static void a_full_list_stays_whole(void **state)
{
    struct doctor_list l = { 0 };

    (void)state;
    for (int i = 0; i < DOCTOR_MAX + 10; i++)
        doctor_judge_clock(true, &l);
    t_int_eq(l.n, DOCTOR_MAX);
}

static void this_machine(void **state)
{
    struct doctor_list l = { 0 };
    int before = t_open_fds();

    (void)state;
    doctor_look(&(struct doctor_ask){ .head = "127.0.0.1:1", .state_dir = t_tmp(), .ports = true }, &l);
    t_int_eq(t_open_fds(), before);
    bool address = false, head = false;

    for (size_t i = 0; i < l.n; i++) {
        address |= strcmp(l.all[i].check, "address") == 0 && l.all[i].state == DOCTOR_OK;
        head |= strcmp(l.all[i].check, "head") == 0 && l.all[i].state == DOCTOR_FAIL;
        t_true(l.all[i].text[0], "%s", l.all[i].check);
    }
    t_true(address, "127.0.0.1 answers itself");
    t_true(head, "nobody is at port 1");
}

/* A head that is asked for by its name is tried as one by its address is. */
static void a_head_has_a_name(void **state)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct doctor_list l = { 0 };
    char head[32];
    size_t i = 0;

    (void)state;
    t_true(bind(fd, (struct sockaddr *)&at, len) == 0 && listen(fd, 8) == 0 && getsockname(fd, (struct sockaddr *)&at, &len) == 0);
    snprintf(head, sizeof(head), "localhost:%u", ntohs(at.sin_port));
    doctor_look(&(struct doctor_ask){ .head = head, .state_dir = t_tmp() }, &l);
    while (i < l.n && strcmp(l.all[i].check, "head") != 0)
        i++;
    t_true(i < l.n && l.all[i].state == DOCTOR_OK, "%s", i < l.n ? l.all[i].text : "not looked at");
    close(fd);
}

static void links(void **state)
{
    static const struct { const char *name; struct doctor_link link; enum doctor_state wanted; const char *text; } rows[] = {
        { "small frames", { .hca = "rocep1s0f0", .iface = "enp1s0f0np0", .port = 1, .gbit = 200, .mtu = 1500, .up = true }, DOCTOR_WARN, "200 Gb/s with an MTU of 1500" },
        { "large frames", { .hca = "rocep1s0f0", .iface = "enp1s0f0np0", .port = 1, .gbit = 200, .mtu = 9000, .up = true }, DOCTOR_OK, "(enp1s0f0np0): 200 Gb/s, MTU 9000" },
        { "slow",         { .hca = "mlx4_0", .iface = "eth0", .port = 1, .gbit = 25, .mtu = 1500, .up = true }, DOCTOR_OK, "25 Gb/s" },
        { "InfiniBand",   { .hca = "mlx5_0", .port = 2, .gbit = 400, .up = true }, DOCTOR_OK, "mlx5_0 port 2: 400 Gb/s" },
        { "no cable",     { .hca = "mlx5_0", .iface = "eth0", .port = 1, .gbit = 200, .mtu = 1500 }, DOCTOR_OK, "is down" },
    };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct doctor_list l = { 0 };

        doctor_judge_link(&rows[i].link, &l);
        (void)only(&l, rows[i].name, rows[i].wanted, rows[i].text);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(shm), cmocka_unit_test(open_files), cmocka_unit_test(file_systems), cmocka_unit_test(nccl), cmocka_unit_test(links),
        cmocka_unit_test(ports_and_clock), cmocka_unit_test(a_full_list_stays_whole), cmocka_unit_test(this_machine),
        cmocka_unit_test(a_head_has_a_name),
    };

    return t_run("doctor", tests);
}
