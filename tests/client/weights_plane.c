#include "tests/client/weights_plane.h"
#include <sys/stat.h>
#include <unistd.h>
#include "tests/t.h"

static char folder[300]; /* of disk-delta: a new one for each plane */

struct furlong_group *plane_launch(struct plane *p, const char *role, const char *play,
                                   unsigned world, const char *more)
{
    struct furlong_launch_opts o = {
        .restart_max = 2, .backoff_ms = 5, .backoff_max_ms = 50, .start_ms = 20000
    };
    char words[64], mark[300], *argv[] = { "/proc/self/exe", (char *)(uintptr_t)play, NULL };
    char *env[] = { words, mark, more ? (char *)(uintptr_t)more : NULL, NULL };
    struct furlong_group *g = NULL;
    struct fl_err err;

    snprintf(words, sizeof(words), "FAKE_WORLD=%u", world);
    snprintf(mark, sizeof(mark), "DIE_MARK=%s/died", t_tmp());
    t_ok(furlong_launch(p->me, p->layout, role, argv, env, &o, &g, &err), &err);
    return g;
}

struct plane plane_make(unsigned trainers, unsigned engines, const char *trainer_env,
                        const char *engine_env)
{
    struct plane p = { .fake = fake_create() };
    char n[2][8];
    struct furlong_flag flags[] = { { "trainer", n[0] }, { "rollout", n[1] } };
    static unsigned made;
    struct fl_err err;

    (void)unlink(t_path("died"));
    snprintf(folder, sizeof(folder), "%s/delta%u", t_tmp(), made++);
    t_true(mkdir(folder, 0700) == 0);
    snprintf(n[0], sizeof(n[0]), "%u", trainers);
    snprintf(n[1], sizeof(n[1]), "%u", engines);
    p.me = fake_joined(p.fake, "driver", 0, 1);
    t_ok(furlong_place(p.me, flags, 2, &p.layout, &err), &err);
    p.trainers = plane_launch(&p, "trainer", "trainer", trainers, trainer_env);
    p.engines = plane_launch(&p, "rollout", "engine", engines, engine_env);
    return p;
}

void plane_end(struct plane *p)
{
    furlong_group_end(p->engines);
    furlong_group_end(p->trainers);
    furlong_layout_free(p->layout);
    furlong_leave(p->me);
    fake_destroy(p->fake);
}

struct seen plane_look_how(struct plane *p, uint32_t engine, const char *method)
{
    struct furlong_answer a = { 0 };
    struct seen s = { 0 };
    struct fl_err err;
    char text[160] = "";

    t_ok(furlong_ask(furlong_group_peer(p->engines, engine), 0, method, NULL, 10000, &a, &err),
         &err);
    memcpy(text, a.body, a.body_bytes);
    t_int_eq(sscanf(text, "%lld %15s %23s %15s %ld %u %d %23s", &s.version, s.verdict, s.digest,
                    s.paused, &s.kib, &s.pauses, &s.fds, s.at),
             8, "%s", text);
    furlong_answer_free(&a);
    return s;
}

struct seen plane_look(struct plane *p, uint32_t engine)
{
    return plane_look_how(p, engine, "check");
}

void plane_write(struct plane *p, uint64_t version)
{
    struct fl_err err;

    t_ok(furlong_ask_all(p->trainers, "write", &(struct furlong_data){ &version, 8, NULL, 0 },
                         20000, NULL, &err),
         &err);
}

static struct furlong_report run(struct plane *p, struct furlong_update how)
{
    struct furlong_report r = { 0 };
    struct fl_err err;

    how.set = "policy";
    how.budget_ms = 20000;
    how.dir = strcmp(how.mode, "disk-delta") == 0 ? folder : NULL;
    t_ok(furlong_update(p->trainers, p->engines, &how, &r, &err), &err);
    t_int_eq(r.version, how.version);
    return r;
}

struct furlong_report plane_update(struct plane *p, uint64_t version, const char *mode,
                                   uint32_t slots)
{
    return run(p, (struct furlong_update){ .version = version, .mode = mode, .slots = slots });
}

struct furlong_report plane_update_by(struct plane *p, uint64_t version, const char *mode,
                                      uint64_t bucket_bytes)
{
    struct furlong_report r = run(
        p,
        (struct furlong_update){ .version = version, .mode = mode, .bucket_bytes = bucket_bytes });

    t_int_eq(r.committed, furlong_group_size(p->engines), "%s", r.first_behind.text);
    return r;
}

void plane_serves(struct plane *p, uint32_t engine, long long version)
{
    struct seen s = plane_look(p, engine);

    t_int_eq(s.version, version, "engine %u", engine);
    t_str_eq(s.verdict, "ok");
    t_str_eq(s.paused, "running");
}

void plane_comes(struct plane *p, uint64_t v, const char *mode)
{
    if (v)
        plane_write(p, v);
    plane_update_by(p, v, mode, 64 << 10);
    plane_serves(p, 0, (long long)v);
    plane_serves(p, 1, (long long)v);
}
