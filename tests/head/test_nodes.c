/* Joining, silence, fencing. */
#include "tests/head/run.h"

static void every_node_state_can_be_left(void **unused)
{
    (void)unused;
    for (int s = 0; s < NODE_STATES; s++) {
        bool in = s == NODE_LOST, out = false; /* what was never seen begins as LOST */

        for (size_t i = 0; i < node_edges_n; i++) {
            in |= (int)node_edges[i].to == s;
            out |= (int)node_edges[i].from == s;
            for (size_t k = 0; k < i; k++)
                t_true(node_edges[i].from != node_edges[k].from ||
                           node_edges[i].on != node_edges[k].on,
                       "two edges from %s on one event", node_state_name(node_edges[i].from));
        }
        t_true(in && out, "%s", node_state_name(s));
    }
}

static void a_node_joins_and_is_ready(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "join", NULL);
    UNTIL(&r, r.head->state == HEAD_READY); /* nobody to wait for */
    fake_up(&a, &r, "a", "10.0.0.1", 2);
    t_int_eq(a.reply->beat_ms, 1000);
    t_int_eq(a.reply->silent_ms, 15000);
    t_true(!a.reply->fenced);
    fake_down(&a);
    UNTIL(&r, r.head->nodes->state == NODE_SUSPECT);
    rig_end(&r);
}

/* ---- the address is dialled before it is believed */

static void hang_up(void *arg, struct stream *s)
{
    (void)arg;
    stream_close(s, NULL);
}

static void an_address_is_dialled_back(void **unused)
{
    static const struct {
        const char *name, *head_ip, *address;
        bool listens;
        uint8_t other_id; /* of who listens: 0, the node itself */
        const char *key;  /* of who listens */
        enum fl_status wanted;
        const char *says, *remedy;
    } rows[] = {
        { "it answers", "127.0.0.1", "127.0.0.1", true, 0, "the token", FL_OK, "", "" },
        { "nobody answers", "127.0.0.1", "127.0.0.1", false, 0, NULL, FL_INVALID,
          "node n gives the address 127.0.0.1, where the head at 127.0.0.1 does not reach it", "--node-ip-address" },
        { "another node answers", "127.0.0.1", "127.0.0.1", true, 7, "the token", FL_INVALID, "another node answers",
          "--node-ip-address" },
        { "one of another cluster answers", "127.0.0.1", "127.0.0.1", true, 0, "another", FL_INVALID, "another key",
          "--node-ip-address" },
        { "loopback, and the head is not", "10.0.0.1", "127.0.0.1", true, 0, "the token", FL_INVALID,
          "which is this or that host to each that dials it", "--node-ip-address" },
    };

    (void)unused;
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct head_config like = { .token = "the token" };
        struct stream_server *server = NULL;
        struct fl_err err = { 0 };
        struct fake n;
        struct rig r;
        char name[16];

        snprintf(name, sizeof(name), "dial%zu", i);
        rig_start(&r, name, &like);
        (void)FL_COPY(r.head->node_ip, rows[i].head_ip);
        fake_init(&n, &r, "n", rows[i].address, 0);
        struct wire_hello me = { .role = "node", .node = n.who };
        me.node.id.b[0] ^= rows[i].other_id;
        struct stream_to at = { .target = "127.0.0.1:0",
                                .key = { rows[i].key, rows[i].key ? strlen(rows[i].key) : 0 } };
        if (rows[i].listens) {
            t_ok(stream_listen(r.loop, &stream_sock, &at, &me, hang_up, NULL, &server, &err), &err);
            n.dial_port = (uint32_t)atoi(strrchr(stream_server_at(server), ':') + 1);
        } else {
            n.dial_port = 1;
        }
        fake_connect(&n);
        fake_join(&n);
        t_int_eq(n.join_status, rows[i].wanted, "%s: %s", rows[i].name, n.join_text);
        t_has(n.join_text, rows[i].says);
        t_has(n.join_text, rows[i].remedy);
        stream_server_destroy(server);
        fake_down(&n);
        rig_end(&r);
    }
}

static void names_are_unique_among_live_nodes(void **unused)
{
    struct rig r;
    struct fake a, b;

    (void)unused;
    rig_start(&r, "names", NULL);
    fake_up(&a, &r, "same", "10.0.0.1", 0);
    fake_init(&b, &r, "same", "10.0.0.2", 0);
    fake_connect(&b);
    fake_join(&b);
    t_int_eq(b.join_status, FL_EXISTS);
    t_has(b.join_text, "10.0.0.1");
    t_has(b.join_text, "10.0.0.2");
    fake_cut(&a);
    fake_join(&b);
    t_int_eq(b.join_status, FL_AGAIN, "the first is silent: the second waits");
    rig_pass(&r, 16000); /* given up */
    fake_join(&b);
    t_int_eq(b.join_status, FL_OK, "%s", b.join_text);
    fake_down(&a);
    fake_down(&b);
    rig_end(&r);
}

static void a_cloned_disk_is_refused(void **unused)
{
    struct rig r;
    struct fake a, b;

    (void)unused;
    rig_start(&r, "clone", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    fake_init(&b, &r, "b", "10.0.0.2", 0);
    b.who = a.who;
    (void)FL_COPY(b.boot_id, "boot-2");
    fake_connect(&b);
    fake_join(&b);
    t_int_eq(b.join_status, FL_EXISTS);
    t_has(b.join_text, "copied disk");
    t_true(r.head->nodes->state == NODE_READY, "the first is not disturbed");
    fake_down(&b);
    fake_init(&b, &r, "a", "10.0.0.1", 0);
    b.who = a.who;
    b.who.start = 0;
    fake_connect(&b);
    fake_join(&b);
    t_int_eq(b.join_status, FL_INVALID);
    fake_down(&b);
    fake_down(&a);
    rig_end(&r);
}

static void a_silent_node_is_fenced_once(void **unused)
{
    struct rig r;
    struct fake a;
    struct node *n;

    (void)unused;
    rig_start(&r, "silent", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    n = r.head->nodes;
    for (int i = 0; i < 30; i++) {
        rig_pass(&r, 1000);
        fake_beat(&a);
    }
    t_int_eq(n->state, NODE_READY, "beats keep it");
    rig_pass(&r, 4000);
    t_int_eq(n->state, NODE_SUSPECT);
    fake_beat(&a);
    t_int_eq(n->state, NODE_READY, "a beat brings it back");
    rig_pass(&r, 16000);
    t_int_eq(n->state, NODE_LOST);
    t_int_eq(n->rec->fate, FL__NODE_FATE__NODE_FENCED);
    UNTIL(&r, a.peer == NULL);
    t_int_eq(a.told_fenced, 1, "on the way that may still be open");
    fake_connect(&a);
    fake_join(&a);
    t_true(a.fenced, "it hears so");
    t_int_eq(n->state, NODE_LOST);
    a.who.start++;
    fake_cut(&a);
    a.fenced = false;
    fake_connect(&a);
    fake_join(&a);
    t_true(a.joined, "%s", a.join_text);
    UNTIL(&r, n->state == NODE_READY);
    t_int_eq(fl_metric_value(r.head->count.fenced), 1);
    fake_down(&a);
    rig_end(&r);
}

static void a_head_that_was_away_blames_nobody(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "away", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    rig_pass(&r, 1000);
    r.clock.now_ns += 3600ull * 1000000000; /* the machine slept: an hour in one turn */
    rig_turns(&r, 4);
    t_int_eq(r.head->nodes->state, NODE_READY);
    rig_pass(&r, 16000);
    t_int_eq(r.head->nodes->state, NODE_LOST, "silence of its own still counts");
    fake_down(&a);
    rig_end(&r);
}

static void a_node_that_leaves_is_not_waited_for(void **unused)
{
    struct rig r;
    struct fake a;
    struct asked q;
    Fl__Shutdown bye = FL__SHUTDOWN__INIT;

    (void)unused;
    rig_start(&r, "leave", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    ask_start(&a, FL_NODE_LEAVE, &bye, &q);
    ask_wait(&a, &q);
    t_int_eq(q.st, FL_OK);
    ask_free(&q);
    t_int_eq(r.head->nodes->state, NODE_GONE);
    fake_down(&a);
    rig_again(&r);
    UNTIL(&r, r.head->state == HEAD_READY);
    rig_end(&r);
}

static void nodes_that_are_out_are_forgotten_in_the_end(void **unused)
{
    struct rig r;
    Fl__NodeRec rec = FL__NODE_REC__INIT;
    Fl__NodeRef who = FL__NODE_REF__INIT;
    Fl__Inventory inv = FL__INVENTORY__INIT;
    struct fl_node_id id = { { 0 } };

    (void)unused;
    rig_start(&r, "forget", NULL);
    rec.who = &who;
    rec.name = "old";
    rec.address = "10.0.0.9";
    rec.boot_id = "b";
    rec.inventory = &inv;
    rec.has_fate = true;
    rec.fate = FL__NODE_FATE__NODE_FENCED;
    who.id = BYTES_OF(id);
    who.start = 1;
    for (int i = 0; i < HEAD_NODES_OUT + 3; i++) {
        id.b[0] = (uint8_t)i;
        id.b[1] = (uint8_t)(i >> 8);
        t_ok(head_record(r.head, REC_NODE, &rec, NULL, NULL), NULL);
    }
    rig_pass(&r, 5000);
    t_int_eq(HASH_COUNT(r.head->nodes), HEAD_NODES_OUT);
    memset(&id, 0, sizeof(id));
    t_true(!node_find(r.head, &id), "the oldest first");
    rig_end(&r);
}

static void who_has_not_joined_is_not_heard(void **unused)
{
    struct rig r;
    struct fake a;
    struct asked q;
    Fl__WorkerState w = FL__WORKER_STATE__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;

    (void)unused;
    rig_start(&r, "unjoined", NULL);
    fake_init(&a, &r, "a", "10.0.0.1", 0);
    fake_connect(&a);
    who.worker = BYTES_OF(a.who.id);
    w.who = &who;
    w.job = (ProtobufCBinaryData){ 4, (uint8_t *)"0000" };
    w.role = "driver";
    ask_start(&a, FL_WORKER_CHANGED, &w, &q);
    ask_wait(&a, &q);
    t_int_eq(q.st, FL_STALE);
    ask_free(&q);
    fake_down(&a);
    rig_end(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_node_state_can_be_left),
        cmocka_unit_test(a_node_joins_and_is_ready),
        cmocka_unit_test(an_address_is_dialled_back),
        cmocka_unit_test(names_are_unique_among_live_nodes),
        cmocka_unit_test(a_cloned_disk_is_refused),
        cmocka_unit_test(a_silent_node_is_fenced_once),
        cmocka_unit_test(a_head_that_was_away_blames_nobody),
        cmocka_unit_test(a_node_that_leaves_is_not_waited_for),
        cmocka_unit_test(nodes_that_are_out_are_forgotten_in_the_end),
        cmocka_unit_test(who_has_not_joined_is_not_heard),
    };

    return t_run("nodes", tests);
}
