#include <stdlib.h>

#include "common/base/fault.h"
#include "common/proto/pb.h"
#include "node.pb-c.h"
#include "tests/t.h"

static size_t pack(const ProtobufCMessage *m, uint8_t *out)
{
    return protobuf_c_message_pack(m, out);
}

static void unpacks(void **state)
{
    Fl__Amount cpu = FL__AMOUNT__INIT, *amounts[] = { &cpu };
    Fl__Inventory inv = FL__INVENTORY__INIT, *got;
    struct fl_err err = { 0 };
    uint8_t buf[100];
    size_t n;

    (void)state;
    cpu.name = (char *)(uintptr_t) "CPU";
    cpu.e4 = 40000;
    inv.n_total = 1;
    inv.total = amounts;
    n = pack(&inv.base, buf);
    got = pb_unpack(&fl__inventory__descriptor, buf, n, &err);
    t_true(got && got->n_total == 1, "%s", err.text);
    t_str_eq(got->total[0]->name, "CPU");
    protobuf_c_message_free_unpacked(&got->base, NULL);
    for (size_t cut = 1; cut < n; cut++) { /* at each byte: refused, or less of it */
        got = pb_unpack(&fl__inventory__descriptor, buf, cut, &err);
        if (got)
            protobuf_c_message_free_unpacked(&got->base, NULL);
        else
            t_int_eq(err.status, FL_CORRUPT);
    }
}

static void checks_enums_at_every_depth(void **state)
{
    static const struct {
        const char *name;
        int value;
        bool ok;
    } rows[] = {
        { "known", 1, true },
        { "unknown", 9, false },
        { "negative", -1, false },
    };

    (void)state;
    for (unsigned i = 0; i < FL_LEN(rows); i++) {
        Fl__Term term = FL__TERM__INIT;
        Fl__NodeRef at = FL__NODE_REF__INIT;
        Fl__Lease lease = FL__LEASE__INIT, *leases[] = { &lease };
        Fl__LeasePrepare all = FL__LEASE_PREPARE__INIT;
        struct fl_err err = { 0 };
        uint8_t buf[200];
        size_t n;
        void *m;

        lease.by = &term;
        lease.at = &at;
        lease.has_state = true;
        lease.state = (Fl__LeaseState)rows[i].value;
        all.n_leases = 1;
        all.leases = leases;
        n = pack(&all.base, buf);
        m = pb_unpack(&fl__lease_prepare__descriptor, buf, n, &err);
        t_true((m != NULL) == rows[i].ok, "%s", rows[i].name);
        if (m) {
            protobuf_c_message_free_unpacked(m, NULL);
        } else {
            t_int_eq(err.status, FL_CORRUPT);
            t_has(err.text, "state");
        }
    }
}

static void bounds_what_a_body_grows_to(void **state)
{
    enum { N = 20000 };
    uint8_t *body = calloc(N, 1);
    struct fl_err err = { 0 };
    void *m;

    (void)state;
    for (size_t i = 0; i < N; i += 2) /* fields that nobody knows: two bytes each, and kept */
        body[i] = 0x78;
    m = pb_unpack(&fl__inventory__descriptor, body, N, &err);
    t_true(m != NULL, "%s", err.text);
    protobuf_c_message_free_unpacked(m, NULL);
    t_true(!pb_unpack_within(&fl__inventory__descriptor, body, N, N * 4, &err));
    t_int_eq(err.status, FL_EXHAUSTED, "%s", err.text);
    free(body);
    fl_fault_arm(1);
    t_true(!pb_unpack(&fl__inventory__descriptor, "", 0, &err));
    t_true(fl_fault_disarm());
    t_int_eq(err.status, FL_EXHAUSTED);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(unpacks),
        cmocka_unit_test(checks_enums_at_every_depth),
        cmocka_unit_test(bounds_what_a_body_grows_to),
    };

    return t_run("pb", tests);
}
