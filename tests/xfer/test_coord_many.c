/* What the coordinator does by itself for thousands of engines, in a time that nobody notices: its
 * loop is the driver's. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "tests/t.h"
#include "tests/xfer/stall_link.h"
#include "transport/xfer/coord_priv.h"

enum { ENGINES = 2000, LIMIT_MS = 3000 * T_SLOWDOWN }; /* of the processor; cubes of it are minutes */

static struct xfer_coord *c;
static struct fl_loop *loop;

static void manifest_into(struct co_member *m, const char *name)
{
    struct xfer_tensor t = { .name = name, .dtype = FL_F32, .ndim = 1, .shape = { 64 } };
    struct xfer_piece p = { .box = xfer_box_whole(&t) };
    uint64_t mem_bytes = 256;
    struct xfer_manifest man = { .who = m->me.who,
                                 .party = m->me.party,
                                 .tensors = &t,
                                 .pieces = &p,
                                 .mem_bytes = &mem_bytes,
                                 .n_tensors = 1,
                                 .n_pieces = 1,
                                 .n_mems = 1 };
    struct fl_err err = { 0 };
    void *image;
    size_t n;

    t_ok(xfer_manifest_seal(&man, &err), &err);
    t_ok(xfer_manifest_encode(&man, &image, &n, &err), &err);
    t_ok(xfer_manifest_decode(image, n, &m->manifest, &err), &err);
    free(image);
    m->digests = calloc(2, sizeof(*m->digests));
    m->n_digests = 1;
}

/* As if all had reported just now: nothing is asked of anybody. */
static void members_are(unsigned n_sources, uint64_t serving)
{
    static const struct link_ops *const links[] = { &link_mail };
    struct xfer_coord_opts o = { .set = "policy", .attempt = 1, .links = links, .n_links = 1 };
    struct fl_err err = { 0 };

    t_ok(fl_loop_create(NULL, &loop, &err), &err);
    t_ok(xfer_coord_create(loop, &o, &c, &err), &err);
    for (unsigned i = 0; i < n_sources + ENGINES; i++) {
        struct xfer_member me = { .party = i < n_sources ? i : i - n_sources };

        memcpy(me.who.id.b, &i, sizeof(i));
        me.who.attempt = 1;
        snprintf(me.name, sizeof(me.name), "%s %u", i < n_sources ? "trainer" : "rollout",
                 me.party);
        t_ok(xfer_coord_add_engine(c, NULL, &me, &err), &err);
    }
    unsigned i = 0;

    for (struct co_member *m = c->members; m; m = m->next, i++) {
        m->source = i < n_sources;
        m->known = m->fresh = true;
        manifest_into(m, "w");
        m->st.state = serving ? RX_SERVING : RX_EMPTY;
        m->st.has_serving = !m->source && serving && i + 1 < ENGINES;
        m->st.serving.number = serving;
        m->st.has_published = m->source;
        m->st.published = 1;
    }
}

static void members_go(void)
{
    xfer_coord_destroy(c);
    fl_loop_destroy(loop);
}

static unsigned ms_since(clock_t from)
{
    return (unsigned)((clock() - from) * 1000 / CLOCKS_PER_SEC);
}

/* One of all lacks the version: looked at once a second until it is filled. */
static void a_fill_of_one(void **state)
{
    struct fl_err err = { 0 };
    clock_t from;

    (void)state;
    members_are(0, 7);
    c->req = (struct xfer_request){ .kind = XFER_FILL, .party = XFER_ALL_PARTIES };
    from = clock();
    t_ok(co_decide(c, &err), &err);
    t_int_eq(c->target.number, 7);
    t_int_eq(c->n_takers, 1);
    t_true(ms_since(from) < LIMIT_MS, "%u ms for %d engines", ms_since(from), ENGINES);
    members_go();
}

/* All take the same bytes from one source. */
static void begins_of_a_broadcast(void **state)
{
    struct fl_err err = { 0 };
    clock_t from;

    (void)state;
    members_are(1, 0);
    c->req = (struct xfer_request){ .kind = XFER_ADVANCE,
                                    .mode = XFER_BROADCAST,
                                    .target = { .number = 1 } };
    from = clock();
    t_ok(co_decide(c, &err), &err);
    t_int_eq(c->n_takers, ENGINES);
    t_ok(co_plan(c, &err), &err);
    t_int_eq(c->plan->n_edges, 1);
    c->members->n_tickets = 1;
    c->members->tickets = calloc(2, sizeof(*c->members->tickets));
    for (struct co_member *m = c->members; m; m = m->next) {
        struct co_begin b;

        t_ok(co_begin_make(c, m, &b, &err), &err);
        t_int_eq(b.teams[0].t.n_members, ENGINES + 1);
        co_begin_free(&b);
    }
    t_true(ms_since(from) < LIMIT_MS, "%u ms for %d engines", ms_since(from), ENGINES);
    members_go();
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fill_of_one),
        cmocka_unit_test(begins_of_a_broadcast),
    };

    return t_run("coord_many", tests);
}
