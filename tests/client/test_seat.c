#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "tests/client/seats.h"
#include "tests/t.h"
#include "worker/client/seat.h"

enum { ALL = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE };

static void is_read(void **state)
{
    struct seat_words w = {
        .role = "rollout", .rank = 3, .world = 4, .attempt = 2, .worker = { 9 }, .key = { 5 }
    };
    struct client_seat s = { 0 };
    struct fl_err err;
    int fd = seat_fd(&w);

    (void)state;
    t_ok(client_seat_read(fd, &s, &err), &err);
    close(fd);
    t_str_eq(s.shown.role, "rollout");
    t_str_eq(s.name, "rollout 3 on gpu-a");
    t_int_eq(s.shown.rank, 3);
    t_int_eq(s.shown.world, 4);
    t_int_eq(s.shown.attempt, 2);
    t_int_eq(s.shown.n_devices, 2);
    t_str_eq(s.shown.device_uuids[1], "GPU-1");
    t_int_eq(s.who.attempt, 2);
    t_int_eq(s.who.id.b[0], 9);
    t_int_eq(s.key[0], 5);
    t_int_eq(s.shown.master_port, 29500);
    t_int_eq(strlen(s.boot_id), 36);
    client_seat_fini(&s);
    t_int_eq(s.key[0], 0, "the key is wiped");
}

static void bad_abi(Fl__Seat *s)
{
    s->abi = FURLONG_ABI + 1;
}
static void bad_rank(Fl__Seat *s)
{
    s->rank = s->world;
}
static void bad_local(Fl__Seat *s)
{
    s->local_world = 0;
}
static void bad_key(Fl__Seat *s)
{
    s->key.len = 31;
}
static void bad_worker(Fl__Seat *s)
{
    s->who->worker.len = 27;
}
static void bad_port(Fl__Seat *s)
{
    s->master_port = 65536;
}
static void bad_role(Fl__Seat *s)
{
    s->role = "";
}
static void bad_sock(Fl__Seat *s)
{
    s->daemon_sock = "";
}

static void content_is_checked(void **state)
{
    static const struct {
        const char *name;
        void (*bend)(Fl__Seat *s);
        enum fl_status want;
        const char *says;
    } rows[] = {
        { "another ABI", bad_abi, FL_UNSUPPORTED, "a seat of ABI" },
        { "rank past the world", bad_rank, FL_INVALID, "rank 1 of 1" },
        { "local world of none", bad_local, FL_INVALID, "local rank 0 of 0" },
        { "short key", bad_key, FL_INVALID, "key of 31" },
        { "short id", bad_worker, FL_INVALID, "27" },
        { "port", bad_port, FL_INVALID, "65536" },
        { "no role", bad_role, FL_INVALID, "empty" },
        { "no socket", bad_sock, FL_INVALID, "empty" },
    };
    struct seat_words w = { 0 };

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct client_seat s = { 0 };
        struct fl_err err = { 0 };
        uint8_t data[4096];
        size_t len = seat_pack(&w, data, sizeof(data), rows[i].bend);

        t_refused(client_seat_decode(data, len, &s, &err), rows[i].want, &err);
        t_has(err.text, rows[i].says);
        t_true(!s.pb, "%s: untouched", rows[i].name);
    }
}

static void seals_are_checked(void **state)
{
    struct client_seat s = { 0 };
    struct fl_err err = { 0 };
    uint8_t data[4096];
    size_t len = seat_pack(&(struct seat_words){ 0 }, data, sizeof(data), NULL);
    static const int lacking[] = { 0, F_SEAL_SHRINK | F_SEAL_GROW, F_SEAL_WRITE | F_SEAL_SHRINK };
    int fd;

    (void)state;
    for (size_t i = 0; i < FL_LEN(lacking); i++) {
        fd = sealed_memfd(data, len, lacking[i]);
        t_refused(client_seat_read(fd, &s, &err), FL_INVALID, &err);
        t_has(err.text, "seals");
        close(fd);
    }
    fd = sealed_memfd("", 0, ALL);
    t_refused(client_seat_read(fd, &s, &err), FL_INVALID, &err);
    close(fd);
    fd = sealed_memfd("garbage", 7, ALL);
    t_refused(client_seat_read(fd, &s, &err), FL_INVALID, &err);
    close(fd);
    fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    t_refused(client_seat_read(fd, &s, &err), FL_INVALID, &err);
    close(fd);
    t_refused(client_seat_read(-1, &s, &err), FL_INVALID, &err);
}

static void environment(void **state)
{
    struct client_seat s = { 0 };
    struct fl_err err = { 0 };
    char text[16];
    int fd;

    (void)state;
    unsetenv("FURLONG_SEAT_FD");
    t_refused(client_seat_of_env(&s, &err), FL_UNSUPPORTED, &err);
    t_has(err.text, "FURLONG_SEAT_FD");
    setenv("FURLONG_SEAT_FD", "three", 1);
    t_refused(client_seat_of_env(&s, &err), FL_INVALID, &err);
    fd = seat_fd(&(struct seat_words){ 0 });
    snprintf(text, sizeof(text), "%d", fd);
    setenv("FURLONG_SEAT_FD", text, 1);
    t_ok(client_seat_of_env(&s, &err), &err);
    t_true(fcntl(fd, F_GETFD) & FD_CLOEXEC, "not inherited any further");
    client_seat_fini(&s);
    fl_fault_set("client.seat:1=fail", NULL);
    t_true(client_seat_of_env(&s, &err) != FL_OK);
    fl_fault_set("", NULL);
    close(fd);
    unsetenv("FURLONG_SEAT_FD");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_read),
        cmocka_unit_test(content_is_checked),
        cmocka_unit_test(seals_are_checked),
        cmocka_unit_test(environment),
    };

    return t_run("client seat", tests);
}
