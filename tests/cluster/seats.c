/* tests/cluster/seats.c - a driver that only places and launches, and a worker that only holds its
 * devices
 *
 *     seats drive [--until=FIFO] [--launch=ROLE]... [--PLACEMENT-FLAG=VALUE]...
 *     seats hold
 *
 * The driver prints the layout, then one JSON line a member (what the process itself sees), then
 * "up", and waits until somebody has opened the FIFO. A worker opens each device of its seat and
 * takes $SEATS_BYTES of it; with $SEATS_LIE=I rank 0 takes the machine's device I instead, whatever
 * it was given; rank $SEATS_MUTE never joins. */
#include <fcntl.h>
#include <furlong/driver.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/gpu/gpu.h"

static int failed(const char *what, const struct fl_err *err)
{
    fprintf(stderr, "seats: %s: %s\n", what, err->text);
    return 1;
}

/* ---- a worker ----------------------------------------------------------------------------------
 */

static enum fl_status lie(const char *device, size_t bytes, char uuid[GPU_UUID_BYTES],
                          struct fl_err *err)
{
    const struct gpu_ops *ops;
    struct gpu_info all[GPU_MAX];
    size_t n = GPU_MAX;
    struct gpu *g;
    uint64_t addr;

    setenv("CUDA_VISIBLE_DEVICES", device, 1);
    FL_TRY(gpu_pick(&ops, err));
    FL_TRY(ops->list(all, &n, err));
    FL_TRY(ops->open(all[0].uuid, &g, err)); /* closed by the end of the process */
    memcpy(uuid, all[0].uuid, GPU_UUID_BYTES);
    return bytes ? ops->alloc(g, bytes, &addr, err) : FL_OK;
}

static json_t *env_json(void)
{
    static const char *const names[] = { "CUDA_VISIBLE_DEVICES", "FURLONG_DEVICES",
                                         "LOCAL_RANK",           "RANK",
                                         "MASTER_ADDR",          "MASTER_PORT" };
    json_t *o = json_object();

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (getenv(names[i]))
            json_object_set_new(o, names[i], json_string(getenv(names[i])));
    return o;
}

static void answer(struct furlong *f, const struct furlong_event *ev, const json_t *opened)
{
    const struct furlong_seat *s = furlong_seat(f);
    json_t *o = json_pack("{s:s,s:i,s:s,s:s,s:i,s:O,s:o}", "role", s->role, "rank", (int)s->rank,
                          "node", s->node, "address", s->address, "pid", (int)getpid(), "opened",
                          opened, "env", env_json());
    char *text = json_dumps(o, JSON_COMPACT);

    furlong_reply(ev->call, text, strlen(text));
    free(text);
    json_decref(o);
}

static int hold(void)
{
    const char *bytes = getenv("SEATS_BYTES"), *other = getenv("SEATS_LIE");
    size_t n = bytes ? strtoull(bytes, NULL, 10) : 0;
    json_t *opened = json_array();
    struct furlong_event ev;
    struct furlong *f;
    struct fl_err err;
    void *p;

    const char *mute = getenv("SEATS_MUTE"), *rank = getenv("FURLONG_RANK");

    if (mute && rank && strcmp(mute, rank) == 0)
        pause(); /* until it is ended */
    if (furlong_join(FURLONG_ABI, &f, &err) != FL_OK)
        return failed("join", &err);
    const struct furlong_seat *s = furlong_seat(f);
    char uuid[GPU_UUID_BYTES];

    if (other && s->rank == 0) {
        if (lie(other, n, uuid, &err) != FL_OK)
            return failed("the other device", &err);
        json_array_append_new(opened, json_string(uuid));
    } else {
        for (uint32_t i = 0; i < s->n_devices; i++) {
            if (n && furlong_arena_alloc(f, FURLONG_TAG_DEFAULT, (int)i, n, &p, &err) != FL_OK)
                return failed("memory of its device", &err);
            json_array_append_new(opened, json_string(s->device_uuids[i]));
        }
    }
    while (furlong_next(f, FURLONG_MAIN, FURLONG_FOREVER, &ev, &err) == FL_OK) {
        bool over = ev.what == FURLONG_STOP;

        if (ev.what == FURLONG_CALL)
            answer(f, &ev, opened);
        else
            furlong_reply(ev.call, NULL, 0);
        if (over)
            break;
    }
    furlong_leave(f);
    json_decref(opened);
    return 0;
}

/* ---- the driver --------------------------------------------------------------------------------
 */

enum { FLAGS = 16, ROLES = 4, ASK_MS = 60000 };

static enum fl_status show(struct furlong_group *g, struct fl_err *err)
{
    for (uint32_t i = 0; i < furlong_group_size(g); i++) {
        struct furlong_answer a;

        FL_TRY(furlong_ask(furlong_group_peer(g, i), FURLONG_MAIN, "where", NULL, ASK_MS, &a, err));
        printf("%.*s\n", (int)a.body_bytes, (const char *)a.body);
        furlong_answer_free(&a);
    }
    return FL_OK;
}

static int drive(int argc, char **argv)
{
    struct furlong_flag flags[FLAGS];
    struct furlong_group *groups[ROLES];
    const char *roles[ROLES], *until = NULL;
    size_t n_flags = 0, n_roles = 0;
    struct furlong_layout *y;
    struct furlong *f;
    struct fl_err err;
    enum fl_status st;
    char self[4096], *words[] = { self, "hold", NULL };
    ssize_t len = readlink("/proc/self/exe", self, sizeof(self) - 1);

    self[len > 0 ? len : 0] = '\0';
    for (int i = 0; i < argc; i++) {
        char *name = argv[i] + 2, *value = strchr(name, '=');

        if (value)
            *value++ = '\0';
        if (strcmp(name, "until") == 0)
            until = value;
        else if (strcmp(name, "launch") == 0 && n_roles < ROLES)
            roles[n_roles++] = value;
        else if (n_flags < FLAGS)
            flags[n_flags++] = (struct furlong_flag){ name, value };
    }
    if (furlong_join(FURLONG_ABI, &f, &err) != FL_OK)
        return failed("join", &err);
    if ((st = furlong_place(f, flags, n_flags, &y, &err)) != FL_OK) {
        furlong_leave(f);
        (void)failed("place", &err);
        return st == FL_INVALID ? 2 : 1;
    }
    furlong_layout_print(y, 1);
    for (size_t i = 0; i < n_roles && st == FL_OK; i++) {
        st = furlong_launch(f, y, roles[i], words, NULL, NULL, &groups[i], &err);
        if (st == FL_OK)
            st = show(groups[i], &err);
    }
    if (st != FL_OK)
        return failed("launch", &err);
    puts("up");
    fflush(stdout);
    if (until)
        close(open(until, O_RDONLY | O_CLOEXEC));
    for (size_t i = 0; i < n_roles; i++)
        furlong_group_end(groups[i]);
    furlong_layout_free(y);
    furlong_leave(f);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "hold") == 0)
        return hold();
    if (argc > 1 && strcmp(argv[1], "drive") == 0)
        return drive(argc - 2, argv + 2);
    fputs("seats drive|hold: see its source\n", stderr);
    return 2;
}
