#include "tests/link/pair.h"
#include "tests/t.h"

static const struct gpu_info *device(void)
{
    static struct gpu_info all[GPU_MAX];
    size_t n = FL_LEN(all);
    struct fl_err err = { 0 };

    if (!all[0].uuid[0])
        t_ok(gpu_fake.list(all, &n, &err), &err);
    return &all[0];
}

enum fl_status kind_mem(const struct kind *k, uint64_t bytes, struct link_mem *out,
                        struct fl_err *err)
{
    return k->on_device ? link_dev_alloc(device()->uuid, bytes, out, err)
                        : link_mem_alloc(bytes, out, err);
}

void kind_mem_drop(struct link_mem *m)
{
    if (m->on_device)
        link_dev_free(m);
    else
        link_mem_free(m);
}

void kind_place(const struct kind *k, struct link_place *out)
{
    struct fl_err err = { 0 };
    struct gpu_found found = {
        .info = *device(), .opens = true, .fd_shares = true, .handle_shares = true
    };

    t_ok(link_place_here(NULL, out, &err), &err);
    if (k->on_device)
        t_ok(link_place_device(out, device()->uuid, &found, 1, &err), &err);
}

void pair_open_end(struct pair *p, unsigned self, struct link **out)
{
    struct link_team team = { .members = p->places, .n = 2, .self = self };
    struct wait w = wait_for();
    struct fl_err err = { 0 };

    t_ok(p->ops->ticket(team.ticket, &err), &err);
    t_ok(p->ops->open(p->loop, &team, out, &w.op, &err), &err);
    t_int_eq(w.times, 0, "ready comes through the loop");
    t_until(p->loop, w.times == 1, 5000);
    t_ok(w.op.err.status, &w.op.err);
}

void pair_open(struct pair *p, const struct kind *k, uint64_t bytes)
{
    const struct link_ops *ops = k->ops;
    struct fl_err err = { 0 };
    struct link_key key = { 0 };
    uint64_t seed = 5;

    *p = (struct pair){ .ops = ops };
    t_ok(fl_loop_create(NULL, &p->loop, &err), &err);
    kind_place(k, &p->places[0]);
    p->places[1] = p->places[0];
    t_true(ops->reaches(&p->places[0], &p->places[1], &err), "%s", err.text);
    pair_open_end(p, 0, &p->from);
    pair_open_end(p, 1, &p->to);
    t_ok(kind_mem(k, bytes, &p->src, &err), &err);
    t_ok(kind_mem(k, bytes, &p->dst, &err), &err);
    for (uint64_t i = 0; i + 8 <= bytes; i += 8)
        *(uint64_t *)((char *)p->src.addr + i) = t_random(&seed);
    t_ok(ops->share(p->from, &p->src, &key, &err), &err);
    t_ok(ops->map(p->to, &key, false, &p->view, &err), &err);
    t_int_eq(p->view.bytes, bytes);
}

void pair_open_host(struct pair *p, const struct link_ops *ops, uint64_t bytes)
{
    struct kind k = { ops, false };

    pair_open(p, &k, bytes);
}

void pair_close(struct pair *p)
{
    p->ops->unmap(p->to, &p->view);
    p->ops->close(p->to);
    if (p->from)
        p->ops->close(p->from);
    fl_loop_destroy(p->loop);
    kind_mem_drop(&p->src);
    kind_mem_drop(&p->dst);
}

enum fl_status pair_pull(struct pair *p, const struct link_seg *segs, size_t n,
                         uint64_t (*digests)[2], struct link_op *op, struct fl_err *err)
{
    return p->ops->pull(p->to, &p->view, &p->dst, segs, n, digests, op, err);
}

struct link_seg stretch(size_t i, uint64_t bytes)
{
    return (struct link_seg){
        .from_off = i * bytes, .to_off = i * bytes, .run_bytes = bytes, .rows = 1
    };
}
