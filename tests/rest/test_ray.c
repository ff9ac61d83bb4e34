/* What Ray's clients do to a head, over a real socket and by hand: following a log through a
 * WebSocket, packages, deleting, tokens, browsers. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/head/run.h"
#include "transport/http/http.h"

enum { ROOM = 1 << 20 };

struct line { /* a connection of a client that is written by hand */
    struct web *web;
    int fd;
    bool over; /* the other side has closed */
    size_t len;
    char *got;
};
struct web {
    struct run run;
    struct http_server *server;
};

static void web_start_with(struct web *w, const char *name, unsigned gpus)
{
    struct http_config c = { .arg = NULL };
    struct fl_err err = { 0 };

    run_start(&w->run, name, gpus, 0);
    c = (struct http_config){ .routes = head_routes(),
                              .arg = w->run.rig.head,
                              .allowed = head_allows,
                              .refuses = head_refuses,
                              .plain_errors = true,
                              .json_below = HEAD_OWN_PATHS };
    t_ok(http_server_create(w->run.rig.loop, &c, &w->server, &err), &err);
}

static void web_start(struct web *w, const char *name)
{
    web_start_with(w, name, 0);
}

static void web_end(struct web *w)
{
    http_server_destroy(w->server);
    run_end(&w->run);
}

static void line_open(struct line *l, struct web *w)
{
    struct sockaddr_in a = { .sin_family = AF_INET,
                             .sin_port = htons(http_server_port(w->server)) };

    *l = (struct line){ .web = w, .got = calloc(1, ROOM + 1) };
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    l->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    t_int_eq(connect(l->fd, (struct sockaddr *)&a, sizeof(a)), 0);
}

static void line_close(struct line *l)
{
    close(l->fd);
    free(l->got);
}

static void say(struct line *l, const void *bytes, size_t len)
{
    t_int_eq(send(l->fd, bytes, len, MSG_NOSIGNAL), (ssize_t)len);
}

/* Takes what there is; true so that it can stand in a condition. */
static bool take(struct line *l)
{
    ssize_t n = recv(l->fd, l->got + l->len, ROOM - l->len, MSG_DONTWAIT);

    if (n > 0)
        l->len += (size_t)n;
    l->over |= n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
    l->got[l->len] = '\0';
    return true;
}

/* One request that ends with its answer; the status. */
static int ask(struct web *w, const char *request, const char *body, char *out, size_t cap)
{
    struct line l;
    int status = 0;

    line_open(&l, w);
    say(&l, request, strlen(request));
    if (body)
        say(&l, body, strlen(body));
    UNTIL(&w->run.rig, take(&l) && l.over);
    (void)sscanf(l.got, "HTTP/1.1 %d", &status);
    if (out) {
        const char *at = strstr(l.got, "\r\n\r\n");

        (void)fl_copy(out, cap, at ? at + 4 : "");
    }
    line_close(&l);
    return status;
}

#define END "Host: localhost\r\nConnection: close\r\n"

/* ---- WebSocket ---- */

static void upgrade(struct line *l, struct web *w, const char *job)
{
    char request[512];

    line_open(l, w);
    snprintf(request, sizeof(request),
             "GET /api/jobs/%s/logs/tail HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
             "Connection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\n"
             "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
             job);
    say(l, request, strlen(request));
    UNTIL(&w->run.rig, take(l) && strstr(l->got, "\r\n\r\n"));
    t_true(strncmp(l->got, "HTTP/1.1 101", 12) == 0, "%.60s", l->got);
    t_true(strstr(l->got, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=") != NULL, "the key of RFC 6455's example");
    char *at = strstr(l->got, "\r\n\r\n") + 4;
    l->len -= (size_t)(at - l->got);
    memmove(l->got, at, l->len + 1);
}

/* Texts of all frames so far, one after the other; the code of a close frame, or 0. */
static unsigned texts(const struct line *l, struct fl_str *out)
{
    const uint8_t *p = (const uint8_t *)l->got, *end = p + l->len;

    while (end - p >= 2) {
        unsigned opcode = p[0] & 15;
        uint64_t n = p[1] & 127;
        size_t head = n == 126 ? 4 : n == 127 ? 10 : 2;

        t_true(!(p[1] & 128), "a server's frames are not masked");
        if ((size_t)(end - p) < head)
            break;
        if (n >= 126) {
            n = 0;
            for (size_t i = 2; i < head; i++)
                n = n << 8 | p[i];
        }
        if ((uint64_t)(end - p) < head + n)
            break;
        if (opcode == 8)
            return n >= 2 ? (unsigned)(p[head] << 8 | p[head + 1]) : 1005;
        if (opcode == 1)
            fl_str_add_bytes(out, p + head, (size_t)n);
        p += head + n;
    }
    return 0;
}

static bool has(struct line *l, const char *part, unsigned code)
{
    struct fl_str s = FL_STR_HEAP(ROOM);
    bool yes;

    take(l);
    yes = texts(l, &s) == code && strstr(fl_str_text(&s), part);
    fl_str_fini(&s);
    return yes;
}

static void a_log_is_followed_by_frames(void **unused)
{
    struct web w;
    struct line l, late;
    struct run *x = &w.run;

    (void)unused;
    web_start(&w, "tail");
    upgrade(&l, &w, x->job);
    UNTIL(&x->rig, has(&l, "Runtime env is setting up.\nRunning entrypoint for job", 0));
    fake_log(&x->a, x->driver, 1, 0, "one\n");
    UNTIL(&x->rig, has(&l, "one\n", 0));
    fake_log(&x->a, x->driver, 1, 4, "half");
    rig_turns(&x->rig, 20);
    t_true(!has(&l, "half", 0), "lines are whole");
    fake_log(&x->a, x->driver, 1, 8, " line\n");
    UNTIL(&x->rig, has(&l, "half line\n", 0));
    fake_log(&x->a, x->driver, 1, 14, "\xff no end");
    fake_exit(&x->a, x->driver, 0);
    UNTIL(&x->rig, has(&l, "\xef\xbf\xbd no end", 1000));
    upgrade(&late, &w, x->job);
    UNTIL(&x->rig, has(&late, "one\nhalf line\n", 1000));
    say(&l, "\x88\x82\0\0\0\0\x03\xe8", 8); /* its close frame, masked with zeros */
    UNTIL(&x->rig, take(&l) && l.over);
    line_close(&l);
    line_close(&late); /* without a word */
    rig_turns(&x->rig, 10);
    web_end(&w);
}

static void lines_of_any_length_are_followed(void **unused)
{
    static char big[200001];
    struct web w;
    struct line l;
    struct run *x = &w.run;
    uint64_t at = 0;

    (void)unused;
    web_start(&w, "longtail");
    memset(big, 'y', sizeof(big) - 1);
    upgrade(&l, &w, x->job);
    for (size_t i = 0; i < 4; i++, at += sizeof(big) - 1)
        fake_log(&x->a, x->driver, 1, at, big);
    fake_log(&x->a, x->driver, 1, at, "\nend\n");
    fake_exit(&x->a, x->driver, 0);
    UNTIL(&x->rig, has(&l, "y\nend\n", 1000));
    t_true(l.len > 800000, "%zu bytes", l.len);
    line_close(&l);
    web_end(&w);
}

static void what_is_no_websocket_is_refused(void **unused)
{
    static const struct {
        const char *name, *headers;
    } rows[] = {
        { "plain", "" },
        { "no key", "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" },
        { "another version", "Upgrade: websocket\r\nSec-WebSocket-Version: 8\r\nSec-WebSocket-Key: "
                             "dGhlIHNhbXBsZSBub25jZQ==\r\n" },
        { "a short key",
          "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: abc\r\n" },
    };
    struct web w;
    char request[512];

    (void)unused;
    web_start(&w, "nowebsocket");
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        snprintf(request, sizeof(request), "GET /api/jobs/%s/logs/tail HTTP/1.1\r\n%s" END "\r\n",
                 w.run.job, rows[i].headers);
        t_int_eq(ask(&w, request, NULL, NULL, 0), 400, "%s", rows[i].name);
    }
    t_int_eq(ask(&w, "GET /api/jobs/none/logs/tail HTTP/1.1\r\n" END "\r\n", NULL, NULL, 0), 404);
    web_end(&w);
}

static void a_head_that_ends_closes_its_followers(void **unused)
{
    struct web w;
    struct line l;

    (void)unused;
    web_start(&w, "tailend");
    upgrade(&l, &w, w.run.job);
    rig_turns(&w.run.rig, 5);
    web_end(&w);
    while (!l.over)
        take(&l);
    struct fl_str s = FL_STR_HEAP(ROOM);
    t_int_eq(texts(&l, &s), 1001);
    fl_str_fini(&s);
    line_close(&l);
}

/* ---- the log as one answer ---- */

static void read_log(struct line *l, struct web *w)
{
    char request[256];

    line_open(l, w);
    snprintf(request, sizeof(request), "GET /api/jobs/%s/logs HTTP/1.0\r\n" END "\r\n", w->run.job);
    say(l, request, strlen(request));
}

static void a_log_of_any_length_is_one_answer(void **unused)
{
    static char big[200001];
    static const char odd[] = "\n\"quoted\" back\\slash\ttab \x01 \xc3\xa9 \xff\n";
    static const char seen[] = "\n\"quoted\" back\\slash\ttab \x01 \xc3\xa9 \xef\xbf\xbd\n";
    struct web w;
    struct line l, left, cut;
    struct run *x = &w.run;
    uint64_t at = 0;

    (void)unused;
    web_start(&w, "wholelog");
    for (size_t i = 0; i < sizeof(big) - 2; i += 2)
        memcpy(big + i, "\xc3\xa9", 2); /* pieces end inside of characters */
    for (size_t i = 0; i < 3; i++, at += sizeof(big) - 1)
        fake_log(&x->a, x->driver, 1, at, big);
    fake_log(&x->a, x->driver, 1, at, odd);
    read_log(&left, &w);
    UNTIL(&x->rig, take(&left) && left.len > 1000);
    line_close(&left);
    read_log(&l, &w); /* of a job that runs: what there is now */
    UNTIL(&x->rig, take(&l) && l.over);
    const char *body = strstr(l.got, "\r\n\r\n");
    json_t *o = body ? json_loads(body + 4, JSON_REJECT_DUPLICATES, NULL) : NULL;
    const char *text = json_string_value(json_object_get(o, "logs"));
    t_true(text != NULL, "no JSON with \"logs\": ...%s", l.got + (l.len > 80 ? l.len - 80 : 0));
    const char *from =
        strchr(strchr(text, '\n') + 1, '\n') + 1; /* behind the two lines that Ray writes first */
    t_int_eq(strlen(from), 3 * (sizeof(big) - 1) + sizeof(seen) - 1);
    for (size_t i = 0; i < 3; i++)
        t_true(memcmp(from + i * (sizeof(big) - 1), big, sizeof(big) - 1) == 0, "part %zu", i);
    t_str_eq(from + 3 * (sizeof(big) - 1), seen);
    json_decref(o);
    line_close(&l);
    read_log(&cut, &w);
    UNTIL(&x->rig, take(&cut) && cut.len > 1000);
    web_end(&w); /* the head ends: what is missing is seen to be missing */
    while (!cut.over)
        take(&cut);
    t_true(cut.len < 600000 || strcmp(cut.got + cut.len - 2, "\"}") != 0, "%zu bytes, whole",
           cut.len);
    line_close(&cut);
}

/* ---- packages, and jobs that go ---- */

static void packages_are_kept_and_given(void **unused)
{
    struct web w;
    char text[512];

    (void)unused;
    web_start(&w, "packages");
    t_int_eq(ask(&w, "GET /api/packages/gcs/_ray_pkg_1.zip HTTP/1.1\r\n" END "\r\n", NULL, text,
                 sizeof(text)),
             404);
    t_str_eq(text, "Package gcs://_ray_pkg_1.zip does not exist");
    t_int_eq(
        ask(&w, "PUT /api/packages/gcs/_ray_pkg_1.zip HTTP/1.1\r\nContent-Length: 4\r\n" END "\r\n",
            "PK..", NULL, 0),
        200);
    t_int_eq(ask(&w, "GET /api/packages/gcs/_ray_pkg_1.zip HTTP/1.1\r\n" END "\r\n", NULL, NULL, 0),
             200);
    t_int_eq(ask(&w,
                 "PUT /api/packages/gcs/..%2Fevil.zip HTTP/1.1\r\nContent-Length: 1\r\n" END "\r\n",
                 "x", NULL, 0),
             404);
    t_int_eq(ask(&w, "PUT /api/packages/gcs/.evil.zip HTTP/1.1\r\nContent-Length: 1\r\n" END "\r\n",
                 "x", NULL, 0),
             500);
    t_int_eq(ask(&w, "PUT /api/packages/s3/a.zip HTTP/1.1\r\nContent-Length: 1\r\n" END "\r\n", "x",
                 NULL, 0),
             500);
    t_int_eq(ask(&w,
                 "PUT /api/packages/gcs/big.zip HTTP/1.1\r\nContent-Length: 104857601\r\n" END
                 "\r\n",
                 NULL, NULL, 0),
             413);
    static const char body[] =
        "{\"entrypoint\": \"x\", \"runtime_env\": {\"working_dir\": \"gcs://none.zip\"}}";
    char request[256];
    snprintf(request, sizeof(request),
             "POST /api/jobs/ HTTP/1.1\r\nContent-Length: %zu\r\n" END "\r\n", strlen(body));
    t_int_eq(ask(&w, request, body, text, sizeof(text)), 400);
    t_true(strstr(text, "Package gcs://none.zip does not exist") != NULL, "%s", text);
    web_end(&w);
}

static void an_ended_job_can_be_deleted(void **unused)
{
    struct web w;
    struct run *x = &w.run;
    char request[256], text[512];

    (void)unused;
    web_start(&w, "delete");
    snprintf(request, sizeof(request), "DELETE /api/jobs/%s HTTP/1.1\r\n" END "\r\n", x->job);
    t_int_eq(ask(&w, request, NULL, text, sizeof(text)), 500);
    t_true(strstr(text, "but it is in a non-terminal state RUNNING.") != NULL, "%s", text);
    fake_exit(&x->a, x->driver, 0);
    UNTIL(&x->rig, job_over(job_named(x->rig.head, x->job)));
    t_int_eq(ask(&w, request, NULL, text, sizeof(text)), 200);
    t_str_eq(text, "{\"deleted\":true}");
    UNTIL(&x->rig, !job_named(x->rig.head, x->job));
    t_int_eq(ask(&w, request, NULL, text, sizeof(text)), 404);
    web_end(&w);
}

static void a_job_that_never_starts_is_given_up(void **unused)
{
    struct rig r;
    struct fake a;
    Fl__Amount gpu = FL__AMOUNT__INIT;
    const Fl__Amount *wants = &gpu;
    struct job_ask ask = {
        .entrypoint = "x", .submission_id = "late", .wants = &wants, .n_wants = 1
    };
    char id[64];

    (void)unused;
    rig_start(&r, "startlate", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    gpu.name = "GPU";
    gpu.e4 = 10000;
    r.head->job_start_s = 5;
    t_int_eq(job_submit(r.head, &ask, NULL, id, NULL), FL_OK);
    rig_pass(&r, 4000);
    rig_turns(&r, 10);
    t_int_eq(job_named(r.head, "late")->rec->status, FL__JOB_STATUS__JOB_PENDING);
    rig_pass(&r, 1100);
    UNTIL(&r, job_over(job_named(r.head, "late")));
    const Fl__JobRec *rec = job_named(r.head, "late")->rec;
    t_int_eq(rec->status, FL__JOB_STATUS__JOB_FAILED);
    t_str_eq(rec->error_type, "JOB_SUPERVISOR_ACTOR_START_TIMEOUT");
    t_true(strstr(rec->message, "failed to start within 5 seconds.") != NULL, "%s", rec->message);
    fake_down(&a);
    rig_end(&r);
}

/* ---- who may ask ---- */

static void browsers_change_nothing(void **unused)
{
    static const char *const marks[] = { "Origin: http://evil.example",
                                         "Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors",
                                         "User-Agent: Mozilla/5.0" };
    static const char *const methods[] = { "POST", "PUT", "DELETE", "PATCH" };
    struct web w;
    char request[512], text[256], says[96];

    (void)unused;
    web_start(&w, "browser");
    for (size_t i = 0; i < FL_LEN(marks); i++)
        for (size_t k = 0; k < FL_LEN(methods); k++) {
            snprintf(request, sizeof(request), "%s /api/jobs/ HTTP/1.1\r\n%s\r\n" END "\r\n",
                     methods[k], marks[i]);
            t_int_eq(ask(&w, request, NULL, text, sizeof(text)), 405, "%s %s", methods[k],
                     marks[i]);
            snprintf(says, sizeof(says), "'%s' method not allowed for browser traffic.",
                     methods[k]);
            t_str_eq(text, says);
        }
    t_int_eq(ask(&w, "GET /api/version HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
                 NULL, NULL, 0),
             403);
    t_int_eq(ask(&w, "GET /api/version HTTP/1.1\r\nUser-Agent: Mozilla/5.0\r\n" END "\r\n", NULL,
                 NULL, 0),
             200);
    web_end(&w);
}

/* What is refused before anything of ours sees it, too: one shape below our own paths, Ray's text on Ray's. */
static void our_own_paths_tell_errors_as_json(void **unused)
{
    static const struct {
        const char *line, *headers;
        int status;
        const char *says; /* all of the body */
    } rows[] = {
        { "GET /api/furlong/nothing", "", 404, "{\"error\":\"there is no GET /api/furlong/nothing\"}" },
        { "GET /api/furlong/", "", 404, "{\"error\":\"there is no GET /api/furlong/\"}" },
        { "DELETE /api/furlong/nodes", "", 405, "{\"error\":\"DELETE is not for /api/furlong/nodes\"}" },
        { "POST /api/furlong/shutdown", "Origin: http://localhost\r\n", 405,
          "{\"error\":\"'POST' method not allowed for browser traffic.\"}" },
        { "GET /api/furlong/jobs/none", "", 404, "{\"error\":\"Job none does not exist\"}" },
        { "GET /api/nothing", "", 404, "404: Not Found" },
        { "DELETE /api/version", "", 405, "405: Method Not Allowed" },
        { "GET /api/furlongs", "", 404, "404: Not Found" },
    };
    struct web w;
    char request[512], text[512];

    (void)unused;
    web_start(&w, "shapes");
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        snprintf(request, sizeof(request), "%s HTTP/1.1\r\n%s" END "\r\n", rows[i].line, rows[i].headers);
        t_int_eq(ask(&w, request, NULL, text, sizeof(text)), rows[i].status, "%s", rows[i].line);
        t_str_eq(text, rows[i].says, "%s", rows[i].line);
    }
    (void)FL_COPY(w.run.rig.head->ray_token, "the-token");
    t_int_eq(ask(&w, "GET /api/furlong/nodes HTTP/1.1\r\n" END "\r\n", NULL, text, sizeof(text)), 401);
    t_str_eq(text, "{\"error\":\"Unauthorized: Missing authentication token\"}");
    web_end(&w);
}

static void rays_token_is_asked_where_it_is_on(void **unused)
{
    static const struct {
        const char *path, *headers;
        int status;
    } rows[] = {
        { "/api/version", "", 401 },
        { "/metrics", "", 401 },
        { "/api/gcs_healthz", "", 200 },
        { "/api/authentication_mode", "", 200 },
        { "/api/version", "Authorization: Bearer the-token\r\n", 200 },
        { "/api/version", "authorization: bearer the-token\r\n", 200 },
        { "/api/version", "Authorization: the-token\r\n", 403 },
        { "/api/version", "Authorization: Bearer the-tokem\r\n", 403 },
        { "/api/version", "X-Ray-Authorization: Bearer the-token\r\n", 200 },
        { "/api/version", "Cookie: ray-authentication-token=the-token\r\n", 200 },
        { "/api/version", "Authorization: Bearer bad\r\nX-Ray-Authorization: Bearer the-token\r\n",
          403 },
    };
    struct web w;
    char request[512], text[256];

    (void)unused;
    web_start(&w, "raytoken");
    (void)FL_COPY(w.run.rig.head->ray_token, "the-token");
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        snprintf(request, sizeof(request), "GET %s HTTP/1.1\r\n%s" END "\r\n", rows[i].path,
                 rows[i].headers);
        t_int_eq(ask(&w, request, NULL, text, sizeof(text)), rows[i].status, "%s %s", rows[i].path,
                 rows[i].headers);
        if (rows[i].status == 401)
            t_str_eq(text, "Unauthorized: Missing authentication token");
        if (rows[i].status == 403)
            t_str_eq(text, "Forbidden: Invalid authentication token");
    }
    web_end(&w);
}

/* ---- views ---- */

/* A line of what a process does on a device, where its driver told it; nothing at all where there is none. */
static void devices_have_their_users(void **unused)
{
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    Fl__DeviceUse use[3] = { FL__DEVICE_USE__INIT, FL__DEVICE_USE__INIT, FL__DEVICE_USE__INIT };
    Fl__DeviceUse *list[3] = { &use[0], &use[1], &use[2] };
    Fl__Beat beat = FL__BEAT__INIT;
    static const char request[] = "GET /metrics HTTP/1.1\r\n" END "\r\n";
    static char text[ROOM];
    struct node *n;
    struct web w;

    (void)unused;
    web_start_with(&w, "devices", 2);
    t_int_eq(ask(&w, request, NULL, text, sizeof(text)), 200);
    t_true(!strstr(text, "ray_component_gpu"), "of devices that nobody uses");
    who.worker = (ProtobufCBinaryData){ sizeof(w.run.driver->who.id), (uint8_t *)&w.run.driver->who.id };
    who.attempt = w.run.driver->who.attempt;
    for (int i = 0; i < 3; i++) {
        use[i].device = (uint32_t)i % 2;
        use[i].pid = 100 + i;
        use[i].who = i < 2 ? &who : NULL; /* the last one is a stranger's */
        use[i].has_bytes = use[i].has_sm_pct = i != 1;
        use[i].bytes = 64000000;
        use[i].sm_pct = 37;
    }
    beat.has_uses_told = beat.uses_told = true;
    beat.uses = list;
    beat.n_uses = 3;
    for (n = w.run.rig.head->nodes; n && n->rec->inventory->n_devices != 2; n = n->hh.next)
        ;
    t_true(n != NULL);
    uses_take(n, &beat);
    t_int_eq(ask(&w, request, NULL, text, sizeof(text)), 200);
    t_has(text, "# TYPE ray_component_gpu_percentage gauge\n");
    t_has(text, ",Component=\"ray::driver\",pid=\"100\",GpuIndex=\"0\"} 37\n");
    t_has(text, ",Component=\"ray::driver\",pid=\"100\",GpuIndex=\"0\"} 64\n");
    t_true(!strstr(text, "pid=\"101\"") && !strstr(text, "pid=\"102\""), "what was not told, and whose it is not known");
    beat.n_uses = 0;
    uses_take(n, &beat);
    t_int_eq(ask(&w, request, NULL, text, sizeof(text)), 200);
    t_true(!strstr(text, "ray_component_gpu"));
    web_end(&w);
}

/* What a daemon told of heat is a gauge and a member of the device; what it did not tell is neither yes nor no. */
static void slowed_devices_are_shown(void **unused)
{
    static const char metrics[] = "GET /metrics HTTP/1.1\r\n" END "\r\n", devices[] = "GET /api/furlong/devices HTTP/1.1\r\n" END "\r\n";
    Fl__Beat beat = FL__BEAT__INIT;
    uint32_t hot[2] = { 1, 99 };
    static char text[ROOM];
    struct node *n;
    struct web w;

    (void)unused;
    web_start_with(&w, "slowed", 2);
    for (n = w.run.rig.head->nodes; n && n->rec->inventory->n_devices != 2; n = n->hh.next)
        ;
    t_true(n != NULL);
    t_int_eq(ask(&w, metrics, NULL, text, sizeof(text)), 200);
    t_true(!strstr(text, "furlong_device_slowed"), "nobody tells");
    t_int_eq(ask(&w, devices, NULL, text, sizeof(text)), 200);
    t_has(text, "\"slowed\":null");
    beat.has_slowed_told = beat.slowed_told = true;
    beat.slowed = hot;
    beat.n_slowed = 2; /* the second one is not there */
    slowed_take(n, &beat);
    t_int_eq(ask(&w, metrics, NULL, text, sizeof(text)), 200);
    t_has(text, "# TYPE furlong_device_slowed gauge\n");
    t_has(text, "device=\"0\"} 0\n");
    t_has(text, "device=\"1\"} 1\n");
    t_int_eq(ask(&w, devices, NULL, text, sizeof(text)), 200);
    t_has(text, "\"slowed\":true");
    t_has(text, "\"slowed\":false");
    slowed_take(n, &(Fl__Beat)FL__BEAT__INIT);
    t_int_eq(ask(&w, devices, NULL, text, sizeof(text)), 200);
    t_true(!strstr(text, "\"slowed\":true"), "a beat that says nothing of it");
    web_end(&w);
}

static void lists_take_filters(void **unused)
{
    static const struct {
        const char *query;
        int status;
        const char *says;
    } rows[] = {
        { "nodes", 200, "\"num_filtered\":2" },
        { "nodes?filter_keys=state&filter_predicates=%3D&filter_values=alive", 200,
          "\"num_filtered\":2" },
        { "nodes?filter_keys=state&filter_predicates=!%3D&filter_values=ALIVE", 200,
          "\"num_filtered\":0" },
        { "nodes?filter_keys=node_name&filter_predicates=%3D&filter_values=a", 200,
          "\"num_filtered\":1" },
        { "nodes?limit=1", 200, "\"num_filtered\":2" },
        { "nodes?limit=10001", 400, "exceeds the supported limit 10000" },
        { "nodes?limit=many", 400, "many" },
        { "nodes?filter_keys=nonsense&filter_predicates=%3D&filter_values=a", 400,
          "filter column nonsense" },
        { "nodes?filter_keys=state&filter_predicates=%3C&filter_values=a", 400,
          "filter predicate < is given" },
        { "nodes?filter_keys=state&filter_predicates=%3D", 400, "a filter is" },
        { "workers?filter_keys=is_alive&filter_predicates=%3D&filter_values=true", 200,
          "\"worker_type\":\"DRIVER\"" },
        { "tasks", 200, "\"total\":0" },
        { "actors/summarize", 200, "\"total_actors\":0" },
        { "wonders", 404, "404" },
        { "logs", 400, "Both node id and node ip are not provided" },
    };
    struct web w;
    char request[512], text[4096];

    (void)unused;
    web_start(&w, "lists");
    struct fake b;
    fake_up(&b, &w.run.rig, "b", "10.0.0.2", 0);
    rig_turns(&w.run.rig, 10);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        snprintf(request, sizeof(request), "GET /api/v0/%s HTTP/1.1\r\n" END "\r\n", rows[i].query);
        t_int_eq(ask(&w, request, NULL, text, sizeof(text)), rows[i].status, "%s", rows[i].query);
        t_true(strstr(text, rows[i].says) != NULL, "%s: %.300s", rows[i].query, text);
    }
    fake_down(&b);
    web_end(&w);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_log_is_followed_by_frames),
        cmocka_unit_test(lines_of_any_length_are_followed),
        cmocka_unit_test(what_is_no_websocket_is_refused),
        cmocka_unit_test(a_head_that_ends_closes_its_followers),
        cmocka_unit_test(a_log_of_any_length_is_one_answer),
        cmocka_unit_test(packages_are_kept_and_given),
        cmocka_unit_test(an_ended_job_can_be_deleted),
        cmocka_unit_test(a_job_that_never_starts_is_given_up),
        cmocka_unit_test(browsers_change_nothing),
        cmocka_unit_test(our_own_paths_tell_errors_as_json),
        cmocka_unit_test(rays_token_is_asked_where_it_is_on),
        cmocka_unit_test(devices_have_their_users),
        cmocka_unit_test(slowed_devices_are_shown),
        cmocka_unit_test(lists_take_filters),
    };

    return t_run("ray", tests);
}
