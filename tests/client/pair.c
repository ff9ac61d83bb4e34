#include "tests/client/pair.h"
#include "tests/client/fake.h"
#include "tests/t.h"

struct pair pair_make(void)
{
    struct pair p = { .fake = fake_create() };
    struct fl_err err;

    p.me = fake_joined(p.fake, "trainer", 0, 1);
    p.engine = server_start(fake_joined(p.fake, "rollout", 0, 2));
    t_ok(furlong_peer(p.me, "rollout", 0, &p.peer, &err), &err);
    return p;
}

void pair_end(struct pair *p)
{
    furlong_leave(p->me);
    if (p->engine)
        server_end(p->engine);
    fake_destroy(p->fake);
}

void pair_says(struct furlong_peer *p, uint32_t lane, const char *method, const char *want)
{
    struct furlong_answer a = { 0 };
    struct fl_err err;

    t_ok(furlong_ask(p, lane, method, NULL, 10000, &a, &err), &err);
    t_int_eq(a.body_bytes, strlen(want), "%s: %.*s", method, (int)a.body_bytes,
             (const char *)a.body);
    t_true(memcmp(a.body ? a.body : "", want, a.body_bytes) == 0);
    furlong_answer_free(&a);
}

void *pair_ask_in_thread(void *arg)
{
    struct asker *a = arg;

    a->st = furlong_ask(a->p, 0, a->method, NULL, 20000, NULL, &a->err);
    return NULL;
}
