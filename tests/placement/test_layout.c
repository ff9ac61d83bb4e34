#include "tests/placement/snap.h"

#define FLAGS(...)                                                                                 \
    {                                                                                              \
        .actor_nodes = -1, .actor_gpus_per_node = -1, .rollout_gpus = -1, .gpus_per_engine = -1,   \
        .gpus_per_node = -1, .eval_gpus = -1, .gpus_per_eval_engine = -1, __VA_ARGS__              \
    }

static const struct row {
    const char *name;
    struct snap_node nodes[4];
    struct layout_flags flags;
    enum fl_status wanted;
    const char *text; /* of the layout, or a part of the error */
} rows[] = {
    { "two nodes of one GPU, colocated, two engines",
      { { .gpus = 1 }, { .gpus = 1 } },
      FLAGS(.actor_nodes = 2, .actor_gpus_per_node = 1, .gpus_per_node = 1, .gpus_per_engine = 1,
            .colocate = true),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-b  10.0.0.2  0\n"
      "rollout      0  gpu-a  10.0.0.1  0\n"
      "rollout      1  gpu-b  10.0.0.2  0\n"
      "derived --rollout-num-gpus 2: the trainer's, by --colocate\n" },
    { "two nodes of one GPU, colocated, one engine over both",
      { { .gpus = 1 }, { .gpus = 1 } },
      FLAGS(.actor_nodes = 2, .actor_gpus_per_node = 1, .gpus_per_node = 1, .gpus_per_engine = 2,
            .colocate = true),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-b  10.0.0.2  0\n"
      "rollout      0  gpu-a  10.0.0.1  0\n"
      "rollout      0  gpu-b  10.0.0.2  0  part 1\n"
      "derived --rollout-num-gpus 2: the trainer's, by --colocate\n" },
    { "two nodes of one GPU, split: the lower address trains",
      { { .gpus = 1 }, { .gpus = 1 } },
      FLAGS(.actor_nodes = 1, .actor_gpus_per_node = 1, .gpus_per_node = 1, .rollout_gpus = 1),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "rollout      0  gpu-b  10.0.0.2  0\n" },
    { "the forgotten --num-gpus-per-node comes from the nodes",
      { { .gpus = 1 }, { .gpus = 1 } },
      FLAGS(.actor_nodes = 2, .actor_gpus_per_node = 1, .gpus_per_engine = 1, .colocate = true),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-b  10.0.0.2  0\n"
      "rollout      0  gpu-a  10.0.0.1  0\n"
      "rollout      1  gpu-b  10.0.0.2  0\n"
      "derived --num-gpus-per-node 1: GPUs of each node\n"
      "derived --rollout-num-gpus 2: the trainer's, by --colocate\n" },
    { "and a wrong one is refused",
      { { .gpus = 1 }, { .gpus = 1 } },
      FLAGS(.actor_nodes = 2, .actor_gpus_per_node = 1, .gpus_per_node = 8, .colocate = true),
      FL_INVALID,
      "--num-gpus-per-node 8, but gpu-a has 1: the engine on gpu-b would be given an address of "
      "gpu-a; give 1 or leave it out" },
    { "a wider one harms nothing on one node",
      { { .gpus = 2 } },
      FLAGS(.actor_nodes = 1, .actor_gpus_per_node = 2, .gpus_per_node = 8, .colocate = true),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-a  10.0.0.1  1\n"
      "rollout      0  gpu-a  10.0.0.1  0\n"
      "rollout      1  gpu-a  10.0.0.1  1\n"
      "derived --rollout-num-gpus 2: the trainer's, by --colocate\n" },
    { "three hosts, split run of 2 x 2 and 2",
      { { .gpus = 2 }, { .gpus = 2 }, { .gpus = 2 } },
      FLAGS(.actor_nodes = 2, .actor_gpus_per_node = 2, .rollout_gpus = 2),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-a  10.0.0.1  1\n"
      "trainer      2  gpu-b  10.0.0.2  0\n"
      "trainer      3  gpu-b  10.0.0.2  1\n"
      "rollout      0  gpu-c  10.0.0.3  0\n"
      "rollout      1  gpu-c  10.0.0.3  1\n"
      "derived --num-gpus-per-node 2: GPUs of each node\n" },
    { "engine of two GPUs, critic, evaluation",
      { { .gpus = 4 }, { .gpus = 4 } },
      FLAGS(.actor_nodes = 1, .actor_gpus_per_node = 2, .rollout_gpus = 4, .gpus_per_engine = 2,
            .eval_gpus = 2, .gpus_per_eval_engine = 1, .critic = true),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-a  10.0.0.1  1\n"
      "critic       0  gpu-a  10.0.0.1  0\n"
      "critic       1  gpu-a  10.0.0.1  1\n"
      "rollout      0  gpu-a  10.0.0.1  2,3\n"
      "rollout      1  gpu-b  10.0.0.2  0,1\n"
      "eval         0  gpu-b  10.0.0.2  2\n"
      "eval         1  gpu-b  10.0.0.2  3\n"
      "derived --num-gpus-per-node 4: GPUs of each node\n" },
    { "nothing given, colocated: all that is there",
      { { .gpus = 2 }, { .gpus = 2 } },
      FLAGS(.colocate = true, .gpus_per_engine = 2),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-a  10.0.0.1  1\n"
      "trainer      2  gpu-b  10.0.0.2  0\n"
      "trainer      3  gpu-b  10.0.0.2  1\n"
      "rollout      0  gpu-a  10.0.0.1  0,1\n"
      "rollout      1  gpu-b  10.0.0.2  0,1\n"
      "derived --num-gpus-per-node 2: GPUs of each node\n"
      "derived --actor-num-nodes 2: nodes that have GPUs\n"
      "derived --actor-num-gpus-per-node 2: GPUs of each node\n"
      "derived --rollout-num-gpus 4: the trainer's, by --colocate\n" },
    { "nothing given, split, one node: half and half",
      { { .gpus = 2, .cpus = 1 } },
      FLAGS(.colocate = false),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "rollout      0  gpu-a  10.0.0.1  1\n"
      "derived --num-gpus-per-node 2: GPUs of each node\n"
      "derived --actor-num-nodes 1: one node has GPUs\n"
      "derived --actor-num-gpus-per-node 1: half of 2 GPUs\n"
      "derived --rollout-num-gpus 1: left beside 1 of the trainer\n" },
    { "nothing given, split, three nodes: whole nodes",
      { { .gpus = 1 }, { .gpus = 1 }, { .gpus = 1 } },
      FLAGS(.colocate = false),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "rollout      0  gpu-b  10.0.0.2  0\n"
      "rollout      1  gpu-c  10.0.0.3  0\n"
      "derived --num-gpus-per-node 1: GPUs of each node\n"
      "derived --actor-num-nodes 1: half of 3 nodes\n"
      "derived --actor-num-gpus-per-node 1: GPUs of each node\n"
      "derived --rollout-num-gpus 2: left beside 1 of the trainer\n" },
    { "engines given, the rest trains",
      { { .gpus = 2 }, { .gpus = 2 } },
      FLAGS(.rollout_gpus = 1),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-a  10.0.0.1  1\n"
      "rollout      0  gpu-b  10.0.0.2  0\n"
      "derived --num-gpus-per-node 2: GPUs of each node\n"
      "derived --actor-num-nodes 1: 3 GPUs are left beside the engines\n"
      "derived --actor-num-gpus-per-node 2: 3 of 4 GPUs are left beside the engines\n" },
    { "a GPU that holds no engine stays idle, as with Miles",
      { { .gpus = 3 } },
      FLAGS(.actor_gpus_per_node = 3, .gpus_per_engine = 2, .colocate = true),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-a  10.0.0.1  1\n"
      "trainer      2  gpu-a  10.0.0.1  2\n"
      "rollout      0  gpu-a  10.0.0.1  0,1\n"
      "derived --num-gpus-per-node 3: GPUs of each node\n"
      "derived --actor-num-nodes 1: its default\n"
      "derived --rollout-num-gpus 3: the trainer's, by --colocate\n" },
    { "debug: trainer alone",
      { { .gpus = 2 } },
      FLAGS(.debug_train_only = true),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-a  10.0.0.1  1\n"
      "derived --num-gpus-per-node 2: GPUs of each node\n"
      "derived --actor-num-nodes 1: nodes that have GPUs\n"
      "derived --actor-num-gpus-per-node 2: GPUs of each node\n" },
    { "debug: engines alone, the trainer's actors on their devices",
      { { .gpus = 2 }, { .gpus = 2 } },
      FLAGS(.debug_rollout_only = true, .rollout_gpus = 4, .gpus_per_engine = 2),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  0\n"
      "trainer      1  gpu-a  10.0.0.1  1\n"
      "trainer      2  gpu-b  10.0.0.2  0\n"
      "trainer      3  gpu-b  10.0.0.2  1\n"
      "rollout      0  gpu-a  10.0.0.1  0,1\n"
      "rollout      1  gpu-b  10.0.0.2  0,1\n"
      "derived --num-gpus-per-node 2: GPUs of each node\n"
      "derived --actor-num-gpus-per-node 2: by --debug-rollout-only\n"
      "derived --actor-num-nodes 2: by --debug-rollout-only\n" },
    { "devices that others hold are passed over",
      { { .gpus = 4, .busy = 0x3 } },
      FLAGS(.actor_nodes = 1, .actor_gpus_per_node = 2, .colocate = true, .gpus_per_engine = 2),
      FL_OK,
      "role      rank  node   address   devices\n"
      "trainer      0  gpu-a  10.0.0.1  2\n"
      "trainer      1  gpu-a  10.0.0.1  3\n"
      "rollout      0  gpu-a  10.0.0.1  2,3\n"
      "derived --num-gpus-per-node 4: GPUs of each node\n"
      "derived --rollout-num-gpus 2: the trainer's, by --colocate\n" },
    { "not now: others hold them",
      { { .gpus = 4, .busy = 0x7 } },
      FLAGS(.actor_nodes = 1, .actor_gpus_per_node = 2, .colocate = true),
      FL_EXHAUSTED,
      "not now: 2 GPU asked, 1 free of 4 on 1 node (gpu-a 1)" },
    { "more than exist",
      { { .gpus = 2 }, { .gpus = 1 } },
      FLAGS(.actor_nodes = 2, .actor_gpus_per_node = 4, .colocate = true),
      FL_INVALID,
      "can never fit: 8 GPU asked, 2 nodes together have 3 (gpu-a 2, gpu-b 1)" },
    { "one GPU, split",
      { { .gpus = 1 } },
      FLAGS(.colocate = false),
      FL_INVALID,
      "1 GPU on 1 node, 0 for engines: 1 left, and a trainer (--actor-num-nodes 1) beside an engine takes 2: use --colocate" },
    { "more nodes than there are, split",
      { { .gpus = 2 } },
      FLAGS(.actor_nodes = 2),
      FL_INVALID,
      "2 GPUs on 1 node, 0 for engines: 2 left, and a trainer (--actor-num-nodes 2) beside an engine takes 3: use --colocate" },
    { "engines take all",
      { { .gpus = 2 } },
      FLAGS(.rollout_gpus = 2),
      FL_INVALID,
      "2 GPUs on 1 node, 2 for engines: 0 left, and a trainer (--actor-num-nodes 1) takes 1: use --colocate" },
    { "no room for engines",
      { { .gpus = 2 } },
      FLAGS(.actor_nodes = 1, .actor_gpus_per_node = 2),
      FL_INVALID,
      "2 GPUs on 1 node, 2 for the trainer: 0 left for engines of 1; use --colocate" },
    { "an engine that would straddle",
      { { .gpus = 4 }, { .gpus = 4 } },
      FLAGS(.actor_nodes = 1, .actor_gpus_per_node = 3, .rollout_gpus = 4, .gpus_per_engine = 2),
      FL_INVALID,
      "an engine part of 2 GPUs (slots 3 to 4) would lie on gpu-a (4 GPUs) and gpu-b (4 GPUs)" },
    { "an engine over several nodes takes whole ones",
      { { .gpus = 4 }, { .gpus = 4 } },
      FLAGS(.gpus_per_engine = 6, .colocate = true),
      FL_INVALID,
      "--rollout-num-gpus-per-engine 6 is no multiple of --num-gpus-per-node 4" },
    { "an engine larger than all that there is for it",
      { { .gpus = 4 } },
      FLAGS(.actor_gpus_per_node = 2, .rollout_gpus = 2, .gpus_per_engine = 4),
      FL_INVALID,
      "--rollout-num-gpus 2 holds no engine of --rollout-num-gpus-per-engine 4" },
    { "no GPU anywhere",
      { { .cpus = 4 } },
      FLAGS(.colocate = true),
      FL_INVALID,
      "none of 1 nodes has GPUs and takes work: start nodes with --num-gpus N" },
    { "zero is no size",
      { { .gpus = 4 } },
      FLAGS(.actor_nodes = 0),
      FL_INVALID,
      "--actor-num-nodes 0: give 1 to 1048576" },
    { "both debug modes",
      { { .gpus = 4 } },
      FLAGS(.debug_train_only = true, .debug_rollout_only = true),
      FL_INVALID,
      "--debug-train-only and --debug-rollout-only: give one of them" },
    { "absurd sizes do not overflow",
      { { .gpus = 4 } },
      FLAGS(.actor_nodes = 1 << 20, .actor_gpus_per_node = 1 << 20),
      FL_INVALID,
      "more than 1048576 GPUs" },
};

static enum fl_status lay_out(const struct layout_flags *flags, const struct placement_snapshot *s,
                              struct fl_str *text, struct fl_err *err)
{
    struct placement_request *req = NULL;
    struct placement_plan *plan = NULL;
    struct layout *y = NULL;

    enum fl_status st = layout_request(flags, s, &req, err);
    if (st == FL_OK)
        st = placement_solve(s, req, &plan, NULL, NULL, err);
    if (st == FL_OK)
        st = layout_assign(flags, s, plan, &y, err);
    if (st == FL_OK)
        layout_text(y, s, plan, text);
    layout_destroy(y);
    placement_plan_destroy(plan);
    placement_request_destroy(req);
    return st;
}

static void each_row_is_laid_out(void **state)
{
    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        const struct row *r = &rows[i];
        struct snap *x = snap_new(r->nodes);
        struct fl_str text = FL_STR_HEAP(1 << 16);
        struct fl_err err = { 0 };
        enum fl_status st = lay_out(&r->flags, &x->s, &text, &err);

        t_int_eq(st, r->wanted, "%s: %s", r->name, err.text);
        if (st == FL_OK)
            t_str_eq(fl_str_text(&text), r->text, "%s", r->name);
        else
            t_true(strstr(err.text, r->text), "%s: %s", r->name, err.text);
        fl_str_fini(&text);
        free(x);
    }
}

static void ranks_ports_and_masters(void **state)
{
    static const struct snap_node nodes[] = { { .gpus = 4, .busy = 0x3 }, { .gpus = 4 }, { 0 } };
    struct layout_flags flags =
        FLAGS(.actor_nodes = 1, .actor_gpus_per_node = 2, .rollout_gpus = 4, .gpus_per_engine = 1);
    struct snap *x = snap_new(nodes);
    struct placement_request *req = NULL;
    struct placement_plan *plan = NULL;
    struct layout *y = NULL;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(layout_request(&flags, &x->s, &req, &err), &err);
    t_int_eq(req->strategy, PLACEMENT_PACK);
    t_int_eq(req->n_bundles, 6);
    t_int_eq(req->bundles[0].n_wants, 2);
    t_ok(placement_solve(&x->s, req, &plan, NULL, NULL, &err), &err);
    t_ok(layout_assign(&flags, &x->s, plan, &y, &err), &err);
    t_int_eq(y->n_actors, 2);
    t_int_eq(y->actors[0].local_rank, 2, "its device's place in the node's list");
    t_int_eq(y->actors[1].local_rank, 3);
    t_int_eq(y->master_node, 0);
    t_int_eq(y->n_engines, 4);
    for (uint32_t i = 0; i < 4; i++) {
        t_int_eq(y->engines[i].node, 1);
        t_int_eq(y->engines[i].base_port, 15000 + 3 * i);
        t_int_eq(y->engines[i].part_of, i);
        t_int_eq(y->engines[i].first_slot, 2 + i);
    }
    t_int_eq(y->flags.gpus_per_node, 4);
    layout_destroy(y);
    placement_plan_destroy(plan);
    placement_request_destroy(req);
    free(x);
}

static void few_cores_are_shared(void **state)
{
    static const struct snap_node nodes[] = { { .gpus = 4, .cpus = 2 }, { 0 } };
    struct layout_flags flags = FLAGS(.colocate = true);
    struct snap *x = snap_new(nodes);
    struct placement_request *req = NULL;
    struct fl_err err = { 0 };

    (void)state;
    t_ok(layout_request(&flags, &x->s, &req, &err), &err);
    t_int_eq(req->bundles[0].wants[1].resource, RES_CPU);
    t_int_eq(req->bundles[0].wants[1].e4, PLACEMENT_ONE / 2);
    placement_request_destroy(req);
    free(x);
}

/* Whatever the nodes and the flags: an answer is whole, on devices that exist, each once; a refusal
 * has a sentence. And the same question gets the same answer. */
static void random_runs_are_whole(void **state)
{
    uint64_t seed = 11;
    unsigned good = 0;

    (void)state;
    for (int round = 0; round < 3000; round++) {
        struct snap_node nodes[6] = { 0 };
        struct layout_flags f = FLAGS(.colocate = t_random(&seed) % 2);
        struct fl_str a = FL_STR_HEAP(1 << 16), b = FL_STR_HEAP(1 << 16);
        struct fl_err err = { 0 }, again = { 0 };

        for (size_t i = 0, n = 1 + t_random(&seed) % 5; i < n; i++)
            nodes[i] = (struct snap_node){ .gpus = (int)(t_random(&seed) % 9),
                                           .cpus = 16,
                                           .busy = (int)(t_random(&seed) & t_random(&seed) & 15) };
        int32_t *const sizes[] = { &f.actor_nodes,     &f.actor_gpus_per_node, &f.rollout_gpus,
                                   &f.gpus_per_engine, &f.gpus_per_node,       &f.eval_gpus };
        for (size_t i = 0; i < FL_LEN(sizes); i++)
            if (t_random(&seed) % 3 == 0)
                *sizes[i] = (int32_t)(t_random(&seed) % 5);
        f.debug_train_only = t_random(&seed) % 8 == 0;
        f.debug_rollout_only = t_random(&seed) % 8 == 0;

        struct snap *x = snap_new(nodes);
        enum fl_status st = lay_out(&f, &x->s, &a, &err);
        t_int_eq(lay_out(&f, &x->s, &b, &again), st, "round %d", round);
        t_str_eq(fl_str_text(&b), fl_str_text(&a), "round %d", round);
        if (st == FL_OK)
            good++;
        else
            t_refused(st, err.status, &err);
        t_true(st == FL_OK || st == FL_INVALID || st == FL_EXHAUSTED, "round %d: %s", round,
               err.text);
        fl_str_fini(&a);
        fl_str_fini(&b);
        free(x);
    }
    t_true(good > 300, "only %u rounds had an answer", good);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_row_is_laid_out),
        cmocka_unit_test(ranks_ports_and_masters),
        cmocka_unit_test(few_cores_are_shared),
        cmocka_unit_test(random_runs_are_whole),
    };

    return t_run("layout", tests);
}
