#include "worker/roles/sglang/adapter.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/loop.h"
#include "common/base/str.h"
#include "worker/roles/role.h"

enum {
    TURN_MS = 250, /* how soon the end of the server is seen by a thread that waits for events */
    DEATH_MS = 500 /* its sockets close a moment before its end can be seen */
};

static uint32_t deadline_ms(const struct adapter *a, const struct furlong_event *ev)
{
    uint32_t most = (uint32_t)(a->o.control_timeout_s * 1000);

    return ev->budget_ms && ev->budget_ms < most ? ev->budget_ms : most;
}

/* ---- events ---- */
static enum fl_status on_pause(struct adapter *a, bool pause, uint32_t ms, struct fl_err *err)
{
    if (a->paused == pause)
        return FL_OK;
    if (pause)
        FL_TRY(sglang_do(&a->server, "/pause_generation", json_pack("{s:s}", "mode", a->o.pause),
                         ms, err));
    else
        FL_TRY(sglang_do(&a->server, "/continue_generation", json_object(), ms, err));
    a->paused = pause;
    return FL_OK;
}

static json_t *tag_names(uint32_t tags)
{
    json_t *list = json_array();

    if (tags & FURLONG_TAG_WEIGHTS)
        json_array_append_new(list, json_string("weights"));
    if (tags & FURLONG_TAG_KV)
        json_array_append_new(list, json_string("kv_cache"));
    if (tags & FURLONG_TAG_GRAPH)
        json_array_append_new(list, json_string("cuda_graph"));
    return list;
}

/* A tag that is out or in already is no error: SGLang ends itself when told twice. */
static enum fl_status memory_move(struct adapter *a, uint32_t tags, bool out, uint32_t ms,
                                  struct fl_err *err)
{
    tags &= FURLONG_TAG_WEIGHTS | FURLONG_TAG_KV | FURLONG_TAG_GRAPH;
    tags &= out ? ~a->out : a->out;
    if (!tags)
        return FL_OK;
    if (!a->server.has_saver) /* it would answer yes, and free nothing */
        return fl_fail(
            err, FL_UNSUPPORTED,
            "SGLang was started without --enable-memory-saver and keeps its memory: start "
            "it with that, or the run with --no-offload-rollout");
    if (out && tags & FURLONG_TAG_KV) /* what is cached of older weights goes with it */
        FL_TRY(sglang_ask(&a->server, "/flush_cache", json_object(), ms, NULL, err));
    FL_TRY(sglang_ask(&a->server, out ? "/release_memory_occupation" : "/resume_memory_occupation",
                      json_pack("{s:o}", "tags", tag_names(tags)), ms, NULL, err));
    a->out = out ? a->out | tags : a->out & ~tags;
    return FL_OK;
}

static enum fl_status on_offload(struct adapter *a, const struct furlong_event *ev,
                                 struct fl_err *err)
{
    struct furlong_moved moved = { 0 };
    double from = role_now_s();

    if (ev->tags & FURLONG_TAG_WEIGHTS) /* gone with the plane's copy when this is answered */
        a->serves.version = FURLONG_NO_VERSION;
    FL_TRY(memory_move(a, ev->tags, true, deadline_ms(a, ev), err));
    if (ev->tags & FURLONG_TAG_WEIGHTS)
        furlong_reply(ev->call, NULL, 0);
    else
        role_reply_moved(ev->call, &moved, 0, role_now_s() - from);
    return FL_OK;
}

/* What cannot be refused, or leaves SGLang in a state that nobody knows, ends this attempt: the
 * next one starts a server, or attaches, and is filled. */
static enum fl_status on_event(struct adapter *a, const struct furlong_event *ev,
                               struct fl_err *err)
{
    const uint64_t none = 0;
    struct fl_err why = { 0 };

    switch (ev->what) {
    case FURLONG_CALL:
        if (!strcmp(ev->method, "generate"))
            calls_generate(a->calls, ev, &a->serves);
        else
            role_refuse(ev->call,
                        fl_fail(&why, FL_UNSUPPORTED, "the engine has no call '%.40s'", ev->method),
                        &why);
        return FL_OK;
    case FURLONG_COMMIT:
        return weights_commit(a->weights, ev->call, a->paused, deadline_ms(a, ev), &a->serves, err);
    case FURLONG_PAUSE:
        FL_TRY(on_pause(a, true, deadline_ms(a, ev), err));
        break;
    case FURLONG_RESUME:
        FL_TRY(on_pause(a, false, deadline_ms(a, ev), err));
        break;
    case FURLONG_OFFLOAD:
        return on_offload(a, ev, err);
    case FURLONG_ONLOAD:
        FL_TRY(memory_move(a, ev->tags, false, deadline_ms(a, ev), err));
        break;
    case FURLONG_SQUEEZE: /* its pools are fixed: nothing comes back but by offload */
        furlong_reply(ev->call, &none, sizeof(none));
        return FL_OK;
    case FURLONG_STOP:
        a->stopped = true;
        break;
    }
    furlong_reply(ev->call, NULL, 0);
    if (furlong_weights_version(weights_set(a->weights), NULL) == FURLONG_NO_VERSION)
        a->serves.version = FURLONG_NO_VERSION; /* a one-slot update takes it at PAUSE */
    return FL_OK;
}

static enum fl_status serve(struct adapter *a, struct fl_err *err)
{
    struct furlong_event ev;

    while (!a->stopped) {
        enum fl_status st = furlong_next(a->f, FURLONG_MAIN, TURN_MS, &ev, err);

        if (calls_ended(a->calls, err))
            return err->status;
        if (st == FL_AGAIN)
            continue;
        FL_TRY(st);
        st = on_event(a, &ev, err);
        if (st != FL_OK) {
            struct pollfd child = { .fd = a->server.pidfd, .events = POLLIN };
            struct fl_err died = { 0 };

            if (st == FL_UNREACHABLE && a->server.pid)
                (void)poll(&child, 1, DEATH_MS);
            if (sglang_server_lives(&a->server, &died) != FL_OK)
                *err = died;
            role_refuse(ev.call, st, err);
            return st;
        }
    }
    return FL_OK;
}

/* ---- start ---- */
/* Before we join, so that the driver's --start-timeout watches over it and no event has to be
 * answered meanwhile. Whoever stops us now ends this process, and its keeper the server. */
static enum fl_status wait_healthy(struct adapter *a, struct fl_err *err)
{
    double end = role_now_s() + a->o.start_timeout_s;
    struct fl_err why = { 0 };

    for (;;) {
        struct pollfd child = { .fd = a->server.pidfd, .events = POLLIN };
        enum fl_status st = sglang_server_look(&a->server, &why);

        if (st != FL_AGAIN && err)
            *err = why;
        if (st != FL_AGAIN)
            return st;
        if (role_now_s() > end)
            return fl_fail(
                err, FL_TIMEOUT,
                "SGLang at %s is not healthy after %.0f s (--sglang-start-timeout); last: %.140s",
                a->server.url, a->o.start_timeout_s, why.text);
        (void)poll(&child, 1, TURN_MS); /* its death is seen at once */
    }
}

static void say_where(struct adapter *a)
{
    bool near = !strncmp(a->server.url, "http://127.0.0.1:", 17) ||
                !strncmp(a->server.url, "http://localhost:", 17);

    (void)FL_COPY(a->server.here, near ? "127.0.0.1" : furlong_seat(a->f)->address);
}

/* The seat holds the job's key: not for the server. */
static enum fl_status seat_keep(struct fl_err *err)
{
    const char *text = getenv("FURLONG_SEAT_FD");
    int64_t fd;

    if (!text)
        return fl_fail(err, FL_UNSUPPORTED,
                       "FURLONG_SEAT_FD is not set: this program is started by a daemon, see "
                       "furlong train --rollout-cmd");
    FL_TRY(fl_parse_i64(text, 0, INT32_MAX, &fd, err));
    if (fcntl((int)fd, F_SETFD, FD_CLOEXEC) != 0)
        return fl_fail_errno(err, "FURLONG_SEAT_FD=%s", text);
    return FL_OK;
}

static enum fl_status start(struct adapter *a, struct fl_err *err)
{
    uint32_t ms = (uint32_t)(a->o.control_timeout_s * 1000);

    a->serves.version = FURLONG_NO_VERSION;
    FL_TRY(seat_keep(err));
    FL_TRY(loader_open(&a->loader, a->o.socket, err));
    FL_TRY(sglang_server_start(&a->server, &a->o, a->loader.name, err));
    FL_TRY(wait_healthy(a, err));
    FL_TRY(furlong_join(FURLONG_ABI, &a->f, err));
    say_where(a);
    FL_TRY(sglang_server_about(&a->server, ms, err));
    /* paused by an attempt before us, which died: nobody else would wake it */
    FL_TRY(sglang_do(&a->server, "/continue_generation", json_object(), ms, err));
    FL_TRY(calls_create(&a->server, &a->calls, err));
    FL_TRY(weights_create(a->f, &a->o, &a->server, a->calls, &a->loader, &a->weights, err));
    fl_info("engine ready rank=%u SGLang=%s url=%s %s", furlong_seat(a->f)->rank, a->server.version,
            a->server.url, a->server.parallel);
    return FL_OK;
}

enum fl_status adapter_run(struct adapter *a, struct fl_err *err)
{
    enum fl_status st;

    a->server.pidfd = -1;
    a->loader.fd = -1;
    st = start(a, err);
    if (st == FL_OK)
        st = serve(a, err);
    calls_destroy(a->calls);
    weights_destroy(a->weights);
    sglang_server_stop(&a->server);
    loader_close(&a->loader);
    furlong_leave(a->f);
    return st;
}
