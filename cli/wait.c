#include "cli/wait.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "cli/interrupt.h"
#include "common/base/str.h"

enum { LOOK_MS = 200, ASK_MS = 5000, NAMED = 8 };

static bool ready(const json_t *n)
{
    return strcmp(cli_text(n, "state"), "READY") == 0;
}

static bool is_same(const char *a, const char *b)
{
    size_t la = strcspn(a, "."), lb = strcspn(b, ".");
    bool address = a[strspn(a, "0123456789.")] == 0 || b[strspn(b, "0123456789.")] == 0 || strchr(a, ':') || strchr(b, ':');

    return strcasecmp(a, b) == 0 || (!address && la == lb && strncasecmp(a, b, la) == 0);
}

static bool joined(const json_t *nodes, const char *name)
{
    const json_t *n;
    size_t i;

    json_array_foreach((json_t *)nodes, i, n)
        if (ready(n) && (is_same(cli_text(n, "name"), name) || is_same(cli_text(n, "address"), name)))
            return true;
    return false;
}

void wait_look(const json_t *nodes, const struct wait_for *w, struct wait_view *out)
{
    struct fl_str missing = FL_STR_ON(out->missing);
    size_t i, live = 0, lacking = 0;
    const json_t *n;

    *out = (struct wait_view){ 0 };
    json_array_foreach((json_t *)nodes, i, n) {
        live += ready(n);
        if (ready(n))
            out->gpus += cli_real(json_object_get(json_object_get(n, "resources"), "GPU"), "total");
    }
    if (w->names) {
        out->wanted = w->names->n;
        for (i = 0; i < w->names->n; i++) {
            const char *name = host_bare(w->names->names[i]);

            if (joined(nodes, name))
                out->joined++;
            else if (lacking++ < NAMED)
                fl_str_add(&missing, "%s%s", lacking > 1 ? ", " : "", name);
        }
        if (lacking > NAMED)
            fl_str_add(&missing, " and %zu more", lacking - NAMED);
    } else {
        out->joined = live;
        out->wanted = (size_t)w->nodes;
    }
    out->enough = out->joined >= out->wanted && out->gpus + 1e-6 >= w->gpus;
}

static void say(const struct wait_for *w, const struct wait_view *v, char *text, size_t cap)
{
    struct fl_str s = { text, 0, cap, cap - 1, false, false };

    if (v->wanted)
        fl_str_add(&s, "%zu/%zu nodes%s%s", v->joined, v->wanted, *v->missing ? ", missing " : "", v->missing);
    if (w->gpus > 0 && (v->gpus < w->gpus || !v->wanted))
        fl_str_add(&s, "%s%g/%g GPUs%s", s.len ? ", " : "", v->gpus, w->gpus, v->wanted ? "" : " have joined");
}

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

enum fl_status wait_for_nodes(const struct cli_cluster *c, const struct wait_for *w, uint32_t wait_ms, struct fl_err *err)
{
    uint64_t due = now_ms() + wait_ms;
    char said[512] = "", text[512] = "";

    for (;;) {
        struct wait_view v = { 0 };
        json_t *nodes;
        enum fl_status st = cli_call(c, "GET", "/api/furlong/nodes", NULL, ASK_MS, &nodes, err);

        if (st == FL_DENIED)
            return st;
        if (st == FL_OK) {
            wait_look(nodes, w, &v);
            json_decref(nodes);
            *text = 0;
            say(w, &v, text, sizeof(text));
            if (strcmp(text, said) != 0 && (*said || !v.enough)) /* nothing is said when all are there at once */
                fprintf(stderr, "%s\n", text);
            (void)FL_COPY(said, text);
            if (v.enough)
                return FL_OK;
        }
        if (now_ms() >= due)
            return fl_fail(err, FL_TIMEOUT, "not there within %u s: %s", wait_ms / 1000, *text ? text : "the head does not answer");
        struct pollfd p = { .fd = cli_signals_fd(), .events = POLLIN };

        (void)poll(&p, 1, LOOK_MS);
        FL_TRY(cli_interrupted(err, "nodes: %s", *text ? text : "the head does not answer"));
    }
}
