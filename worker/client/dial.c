#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/xfer/port.h"
#include "worker/client/peers.h"
#include "worker/client/weights.h"

/* ---- reaching sources ----------------------------------------------------------------------- */
void client_where_print(const struct client_where *w, char out[192])
{
    snprintf(out, 192, "%.107s|%.40s|%.36s", w->unix_path, w->tcp, w->boot_id);
}

static bool part(const char **text, char *out, size_t room)
{
    size_t n = strcspn(*text, "|");

    if (n >= room)
        return false;
    memcpy(out, *text, n);
    out[n] = '\0';
    *text += n + ((*text)[n] == '|');
    return true;
}

bool client_where_parse(const char *text, struct client_where *out)
{
    return part(&text, out->unix_path, sizeof(out->unix_path)) &&
           part(&text, out->tcp, sizeof(out->tcp)) &&
           part(&text, out->boot_id, sizeof(out->boot_id)) && !*text;
}

struct plane_dial {
    struct client_conn_user user;
    struct xfer_dial *dial;
    struct plane_dial *next;
};

static struct plane_dial *dial_take(struct furlong *f, struct xfer_dial *d)
{
    for (struct plane_dial **at = &f->dials; *at; at = &(*at)->next) {
        struct plane_dial *p = *at;

        if (p->dial != d)
            continue;
        *at = p->next;
        client_conn_drop(&p->user);
        return p;
    }
    return NULL;
}

static void dial_opened(struct client_conn_user *u, struct call_peer *call)
{
    struct xfer_dial *d = container_of(u, struct plane_dial, user)->dial;

    free(dial_take(u->f, d));
    d->done(d, FL_OK, call, NULL);
}

static void dial_closed(struct client_conn_user *u, const struct fl_err *why)
{
    struct xfer_dial *d = container_of(u, struct plane_dial, user)->dial;

    free(dial_take(u->f, d));
    d->done(d, why->status, NULL, why);
}

static void dial(void *arg, const struct xfer_member *who, struct xfer_dial *d)
{
    struct furlong *f = arg;
    struct plane_dial *p = FL_FAULT("client.dial") ? NULL : calloc(1, sizeof(*p));
    struct client_where at = { .who = who->who };
    struct fl_err err;
    enum fl_status st;

    if (!p) {
        fl_fail(&err, FL_EXHAUSTED, "no memory to reach %s", who->name);
        d->done(d, FL_EXHAUSTED, NULL, &err);
        return;
    }
    (void)FL_COPY(at.name, who->name);
    p->dial = d;
    p->user = (struct client_conn_user){ .f = f, .opened = dial_opened, .closed = dial_closed };
    p->next = f->dials;
    f->dials = p;
    st = client_where_parse(who->where, &at)
             ? client_conn_use(f, &at, &p->user, &err)
             : fl_fail(&err, FL_CORRUPT, "%s: no address in '%.60s'", who->name, who->where);
    if (st == FL_OK)
        return;
    free(dial_take(f, d));
    d->done(d, st, NULL, &err);
}

static void undial(void *arg, struct xfer_dial *d)
{
    free(dial_take(arg, d));
}

enum fl_status client_weights_open(struct furlong *f, struct fl_err *err)
{
    const struct xfer_dialer dialer = { .arg = f, .dial = dial, .undial = undial };

    return xfer_port_create(f->loop, &dialer, &f->port, err);
}

void client_weights_close(struct furlong *f)
{
    xfer_port_destroy(f->port);
    f->port = NULL;
}
