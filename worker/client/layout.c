#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "common/base/log.h"
#include "common/base/str.h"
#include "worker.pb-c.h"
#include "worker/client/driver_priv.h"
#include "worker/client/uplink.h"

enum { FLAGS_MAX = 256, JSON_MAX = 64 << 20 };

static enum fl_status layout_take(void *arg, const struct wire_msg *reply, struct fl_err *err)
{
    struct furlong_layout *y = arg;

    y->pb = fl__layout__unpack(NULL, reply->head.body_bytes, reply->body);
    if (!y->pb || y->pb->group.len > sizeof(((struct furlong_group *)0)->id))
        return fl_fail(err, FL_CORRUPT, "the head's answer of %u bytes is no Layout",
                       reply->head.body_bytes);
    return FL_OK;
}

void layout_end(struct furlong_layout *y)
{
    struct client_driver *d = y->f->driver;

    pthread_mutex_lock(&d->mu);
    for (struct furlong_layout **at = &d->layouts; *at; at = &(*at)->next) {
        if (*at != y)
            continue;
        *at = y->next;
        break;
    }
    pthread_mutex_unlock(&d->mu);
    if (y->pb)
        fl__layout__free_unpacked(y->pb, NULL);
    free(y);
}

enum fl_status furlong_place(struct furlong *f, const struct furlong_flag *flags, size_t n,
                             struct furlong_layout **out, struct fl_err *err)
{
    Fl__Flag given[FLAGS_MAX], *list[FLAGS_MAX];
    Fl__Place m = FL__PLACE__INIT;
    struct client_driver *d;
    struct furlong_layout *y;
    enum fl_status st;

    FL_TRY(driver_of(f, &d, err));
    if (n > FLAGS_MAX)
        return fl_fail(err, FL_INVALID, "at most %d flags, not %zu", FLAGS_MAX, n);
    for (size_t i = 0; i < n; i++) {
        double seconds;

        if (!flags[i].name || !*flags[i].name)
            return fl_fail(err, FL_INVALID, "flag %zu has no name", i);
        if (strcmp(flags[i].name, "place-timeout") == 0) {
            if (!flags[i].value || fl_parse_f64(flags[i].value, 0, 4e6, &seconds, err) != FL_OK)
                return fl_fail(err, FL_INVALID, "--place-timeout needs seconds");
            m.has_wait_ms = seconds > 0;
            m.wait_ms = (uint32_t)(seconds * 1000);
            continue;
        }
        fl__flag__init(&given[m.n_flags]);
        given[m.n_flags].name = (char *)(uintptr_t)flags[i].name;
        given[m.n_flags].value = (char *)(uintptr_t)flags[i].value;
        list[m.n_flags] = &given[m.n_flags];
        m.n_flags++;
    }
    m.flags = list;
    y = calloc(1, sizeof(*y));
    if (!y)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a layout");
    y->f = f;
    st = client_relay_wait(f, FL_GROUP_PLACE, true, 0, &m.base, layout_take, y, err);
    if (st != FL_OK) {
        layout_end(y);
        return st;
    }
    pthread_mutex_lock(&d->mu);
    y->next = d->layouts;
    d->layouts = y;
    pthread_mutex_unlock(&d->mu);
    *out = y;
    return FL_OK;
}

void furlong_layout_print(const struct furlong_layout *y, int fd)
{
    size_t len = strlen(y->pb->text), done = 0;

    while (done < len) {
        ssize_t n = write(fd, y->pb->text + done, len - done);

        if (n <= 0)
            return; /* the reader is gone: printing is a courtesy */
        done += (size_t)n;
    }
}

uint32_t furlong_layout_count(const struct furlong_layout *y, const char *role)
{
    uint32_t n = 0;

    for (size_t i = 0; i < y->pb->n_ranks; i++)
        n += strcmp(y->pb->ranks[i]->role, role) == 0;
    return n;
}

bool furlong_layout_rank(const struct furlong_layout *y, const char *role, uint32_t rank,
                         struct furlong_layout_rank *out)
{
    for (size_t i = 0; i < y->pb->n_ranks; i++) {
        const Fl__LayoutRank *r = y->pb->ranks[i];

        if (r->rank != rank || strcmp(r->role, role) != 0)
            continue;
        *out = (struct furlong_layout_rank){ .node = r->node,
                                             .address = r->address,
                                             .devices = (const char *const *)r->devices,
                                             .n_devices = (uint32_t)r->n_devices,
                                             .local_rank = r->local_rank,
                                             .local_world = r->local_world };
        return true;
    }
    return false;
}

/* ---- JSON ----------------------------------------------------------------------------------- */
static void add_text(struct fl_str *s, const char *text)
{
    fl_str_add_bytes(s, "\"", 1);
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fl_str_add(s, "\\%c", *c);
        else if ((unsigned char)*c < 0x20)
            fl_str_add(s, "\\u%04x", (unsigned)*c);
        else
            fl_str_add_bytes(s, c, 1);
    }
    fl_str_add_bytes(s, "\"", 1);
}

static void add_rank(struct fl_str *s, const Fl__LayoutRank *r)
{
    fl_str_add(s, "{\"rank\":%u,\"node\":", r->rank);
    add_text(s, r->node);
    fl_str_add(s, ",\"address\":");
    add_text(s, r->address);
    fl_str_add(s, ",\"local_rank\":%u,\"devices\":[", r->local_rank);
    for (size_t i = 0; i < r->n_devices; i++) {
        fl_str_add(s, i ? "," : "");
        add_text(s, r->devices[i]);
    }
    fl_str_add(s, "],\"bundles\":[");
    for (size_t i = 0; i < r->n_bundles; i++)
        fl_str_add(s, "%s%u", i ? "," : "", r->bundles[i]);
    fl_str_add(s, "]}");
}

/* Ranks come role by role; a role that comes again later would be a second key of the same name. */
static void add_roles(struct fl_str *s, const Fl__Layout *y)
{
    bool first_role = true;

    for (size_t i = 0; i < y->n_ranks; i++) {
        bool first = true;
        size_t k;

        for (k = 0; k < i && strcmp(y->ranks[k]->role, y->ranks[i]->role) != 0; k++)
            ;
        if (k < i)
            continue;
        fl_str_add(s, first_role ? "" : ",");
        first_role = false;
        add_text(s, y->ranks[i]->role);
        fl_str_add(s, ":[");
        for (k = i; k < y->n_ranks; k++) {
            if (strcmp(y->ranks[k]->role, y->ranks[i]->role) != 0)
                continue;
            fl_str_add(s, first ? "" : ",");
            add_rank(s, y->ranks[k]);
            first = false;
        }
        fl_str_add(s, "]");
    }
}

void furlong_layout_json(const struct furlong_layout *y, char **out)
{
    struct fl_str s = FL_STR_HEAP(JSON_MAX);

    fl_str_add(&s, "{\"group\":\"");
    for (size_t i = 0; i < y->pb->group.len; i++)
        fl_str_add(&s, "%02x", y->pb->group.data[i]);
    fl_str_add(&s, "\",\"master\":");
    add_text(&s, y->pb->master_addr);
    fl_str_add(&s, ",\"master_port\":%u,\"roles\":{", y->pb->master_port);
    add_roles(&s, y->pb);
    fl_str_add(&s, "},\"derived\":[");
    for (size_t i = 0; i < y->pb->n_derived; i++) {
        fl_str_add(&s, "%s{\"flag\":", i ? "," : "");
        add_text(&s, y->pb->derived[i]->flag);
        fl_str_add(&s, ",\"value\":");
        add_text(&s, y->pb->derived[i]->value);
        fl_str_add(&s, ",\"why\":");
        add_text(&s, y->pb->derived[i]->why);
        fl_str_add(&s, "}");
    }
    fl_str_add(&s, "]}");
    *out = s.cut ? NULL : FL_TAKE(s.data);
    fl_str_fini(&s);
}

void furlong_layout_free(struct furlong_layout *y)
{
    Fl__Group m = FL__GROUP__INIT;

    if (!y || client_here(y->f, NULL) != FL_OK)
        return;
    m.group = y->pb->group;
    driver_send_later(y->f->driver, FL_GROUP_END, &m.base);
    layout_end(y);
}
