#include <stdio.h>

#include "head/rest/rest.h"

/* Whose process it is, as far as that is known; NULL: a stranger's, or of a worker that has gone
 * on. */
static struct seat *seat_of_use(struct head *h, const struct use *u)
{
    ProtobufCBinaryData id = BYTES_OF(u->who.id);
    struct seat *s = u->known ? seat_of(h, &id) : NULL;

    return s && s->rec->who->attempt == u->who.attempt ? s : NULL;
}

static json_t *bytes_of(const struct use *u)
{
    return u->has_bytes ? json_integer((json_int_t)u->bytes) : json_null();
}

/* "trainer 0 (pid 12, 1.5 GiB)" */
static json_t *holder_text(const struct seat *s, const struct use *u)
{
    char bytes[16] = "";
    bool said = u->has_bytes;

    if (said)
        (void)fl_bytes_text(bytes, u->bytes);
    if (s)
        return json_sprintf("%s %u (pid %d%s%s)", s->rec->role, s->rec->rank, u->pid,
                            said ? ", " : "", bytes);
    return json_sprintf("pid %d%s%s%s", u->pid, said ? " (" : "", bytes, said ? ")" : "");
}

/* The name of a lease's job, once. */
static void add_job(json_t *list, struct head *h, const Fl__Lease *l)
{
    const struct job *j = job_of(h, &l->job);
    const char *name = j ? j->rec->submission_id : "unknown";
    json_t *v;
    size_t i;

    json_array_foreach (list, i, v)
        if (strcmp(json_string_value(v), name) == 0)
            return;
    json_array_append_new(list, json_string(name));
}

static json_t *device_json(struct head *h, const struct node *n, uint32_t device)
{
    const Fl__Device *d = n->rec->inventory->devices[device];
    json_t *processes = json_array(), *held_by = json_array(), *given_to = json_array();
    const struct lease *l;
    struct unknown_lease *unknown;
    unsigned leases = 0;

    EACH_HELD (n, l)
        for (size_t k = 0; k < l->rec->n_devices; k++)
            if (l->rec->devices[k] == device) {
                add_job(given_to, h, l->rec);
                leases++;
            }
    LL_FOREACH (n->leases, unknown)
        for (size_t k = 0; k < unknown->lease->n_devices; k++)
            leases += unknown->lease->devices[k] == device;
    for (size_t i = 0; i < n->n_uses; i++) {
        const struct use *u = &n->uses[i];
        const struct seat *s = seat_of_use(h, u);

        if (u->device != device)
            continue;
        json_array_append_new(
            processes, json_pack("{s:i,s:o,s:o,s:o,s:o}", "pid", u->pid, "bytes", bytes_of(u),
                                 "job", s ? json_string(s->job->rec->submission_id) : json_null(),
                                 "role", s ? json_string(s->rec->role) : json_null(), "rank",
                                 s ? json_integer(s->rec->rank) : json_null()));
        json_array_append_new(held_by, holder_text(s, u));
    }
    return json_pack("{s:s,s:s,s:o,s:o,s:o,s:I,s:b,s:i,s:o,s:b,s:o,s:o,s:o}", "node", n->rec->name,
                     "id", d->id, "uuid", rest_text(d->uuid), "pci", rest_text(d->pci), "name",
                     rest_text(d->name), "memory_bytes", (json_int_t)d->memory_bytes, "logical",
                     (int)d->logical, "leases", (int)leases, "given_to", given_to, "told",
                     (int)n->uses_told, "processes", processes, "held_by", held_by, "slowed",
                     n->slowed_told ? json_boolean(device_slowed(n, device)) : json_null());
}

json_t *rest_devices_of(struct head *h, const struct node *n)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < n->rec->inventory->n_devices; i++)
        json_array_append_new(list, device_json(h, n, i));
    return list;
}

json_t *rest_devices_in(struct head *h, size_t most)
{
    json_t *list = json_array();
    struct node *n, *tmp;
    size_t all = 0;

    HASH_ITER (hh, h->nodes, n, tmp)
        all += n->rec->fate == FL__NODE_FATE__NODE_IN ? n->rec->inventory->n_devices : 0;
    if (all > most)
        return list;
    HASH_ITER (hh, h->nodes, n, tmp) {
        json_t *here = n->rec->fate == FL__NODE_FATE__NODE_IN ? rest_devices_of(h, n) : NULL;

        if (here)
            json_array_extend(list, here);
        json_decref(here);
    }
    return list;
}

void rest_devices(void *head, struct http_req *req)
{
    http_reply_json(req, 200, rest_devices_in(head, SIZE_MAX));
}

json_t *rest_given_to(const struct seat *s)
{
    json_t *list = json_array();
    struct lease *leases[SEAT_LEASES];
    size_t n = seat_leases(s, leases, SEAT_LEASES);

    for (size_t i = 0; i < n; i++) {
        const Fl__Lease *l = leases[i]->rec;
        const struct node *at = node_of(s->job->head, &l->at->id);

        for (size_t k = 0; at && k < l->n_devices; k++)
            if (l->devices[k] < at->rec->inventory->n_devices)
                json_array_append_new(list,
                                      json_string(at->rec->inventory->devices[l->devices[k]]->id));
    }
    return list;
}

json_t *rest_used_by(const struct seat *s)
{
    const struct node *n = seat_node(s);
    json_t *list = json_array();

    for (size_t i = 0; n && i < n->n_uses; i++) {
        const struct use *u = &n->uses[i];
        const Fl__Device *d = n->rec->inventory->devices[u->device];

        if (seat_of_use(s->job->head, u) == s)
            json_array_append_new(list, json_pack("{s:s,s:o,s:o,s:i,s:o}", "id", d->id, "uuid",
                                                  rest_text(d->uuid), "pci", rest_text(d->pci),
                                                  "pid", u->pid, "bytes", bytes_of(u)));
    }
    return list;
}
