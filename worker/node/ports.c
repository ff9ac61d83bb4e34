#include "worker/node/ports.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/log.h"
#include "common/base/port.h"
#include "worker/node/env.h"

enum { PORTS_FROM = 20000 };

static uint32_t number_of(const char *port) /* "NAME=PORT"; 0: "NAME" */
{
    const char *eq = strchr(port, '=');

    return eq ? (uint32_t)strtoul(eq + 1, NULL, 10) : 0;
}

/* Of leases that are gone, and of the one that asks again (0: none). */
static void given_forget(struct node *n, uint64_t lease)
{
    for (size_t i = n->n_given; i-- > 0;)
        if (n->given[i].lease == lease || !node_leases_has(n->leases, n->given[i].lease))
            n->given[i] = n->given[--n->n_given];
}

/* Where it meets its likes. Those were given with its lease, but the lease's own list goes with the
 * daemon, and an engine that is still loading outlives that. */
static bool meets_at(const Fl__WorkerSpec *s, uint32_t port)
{
    if (!s->master_port || port < s->master_port)
        return false;
    uint32_t n = node_is_engine(s) ? NODE_ENGINE_PORTS : 1;

    return port - s->master_port < n;
}

static bool is_given(const struct node *n, uint32_t port, const Fl__WorkerSpec *but)
{
    for (size_t i = 0; i < n->n_given; i++)
        if (n->given[i].port == port)
            return true;
    for (const struct worker *w = n->workers; w; w = w->hh.next) {
        if (!w->gone && meets_at(w->spec, port))
            return true;
        for (size_t i = 0; i < w->spec->n_ports && !w->gone && w->spec != but; i++)
            if (number_of(w->spec->ports[i]) == port)
                return true;
    }
    return false;
}

/* ---- beside the daemons of other clusters on this host ---- */

static struct port_hold *hold_of(const struct node *n, uint16_t port)
{
    for (size_t i = 0; i < n->n_holds; i++)
        if (n->holds[i].port == port)
            return &n->holds[i];
    return NULL;
}

static void let_go(struct node *n, struct port_hold *h)
{
    close(h->fd);
    *h = n->holds[--n->n_holds];
}

/* False: one of those has given it to its work. */
static bool hold(struct node *n, uint16_t port)
{
    struct port_hold *more;
    int fd = fl_port_hold(port);

    if (fd < 0 && errno == EADDRINUSE)
        return false;
    more = fd < 0 ? NULL : realloc(n->holds, (n->n_holds + 1) * sizeof(*more));
    if (more) {
        n->holds = more;
        n->holds[n->n_holds++] = (struct port_hold){ fd, port };
        return true;
    }
    if (!n->unheld_said)
        fl_warn("ports are given without being held against other clusters of this host port=%u "
                "why=\"%s\"",
                port, fd < 0 ? strerror(errno) : "no memory");
    n->unheld_said = true;
    if (fd >= 0)
        close(fd);
    return true;
}

void node_ports_settle(struct node *n)
{
    given_forget(n, 0);
    for (size_t i = n->n_holds; i-- > 0;)
        if (!is_given(n, n->holds[i].port, NULL))
            let_go(n, &n->holds[i]);
}

static void hold_again(struct node *n, uint32_t port)
{
    if (port && port <= 65535 && !hold_of(n, (uint16_t)port))
        (void)hold(
            n, (uint16_t)port); /* where another has it by now, ours has bound it, most likely */
}

void node_ports_again(struct node *n, const Fl__WorkerSpec *spec)
{
    for (size_t i = 0; i < spec->n_ports; i++)
        hold_again(n, number_of(spec->ports[i]));
    for (uint32_t i = 0; meets_at(spec, spec->master_port + i); i++)
        hold_again(n, spec->master_port + i);
}

void node_ports_fini(struct node *n)
{
    for (size_t i = 0; i < n->n_holds; i++)
        close(n->holds[i].fd);
    free(n->holds);
    n->holds = NULL;
    n->n_holds = 0;
}

/* ---- finding ---- */

/* What is held and not given was found a moment ago, for the same lease. */
static bool take(void *arg, uint16_t port)
{
    struct node *n = arg;

    return !is_given(n, port, NULL) && !hold_of(n, port) && hold(n, port);
}

static void drop(void *arg, uint16_t port)
{
    struct port_hold *h = hold_of(arg, port);

    if (h)
        let_go(arg, h);
}

/* count in a row from *from on; *from moves behind them. To the end of the numbers and once more
 * through all of them: what is not found then is not there. */
static enum fl_status find_row(struct node *n, uint16_t *from, uint32_t count, uint32_t *out,
                               struct fl_err *err)
{
    const struct port_taker taker = { take, drop, n };
    uint32_t have = 0, before = 0;

    for (unsigned around = 0; have < count;) {
        uint16_t port;

        FL_TRY(node_port_free(n->addr.text, &taker, from, &port, err));
        around += port <= before;
        before = port;
        if (around > 1)
            return fl_fail(err, FL_EXHAUSTED,
                           "no %u free ports in a row on node %s that no other work was given (%zu "
                           "are); end some, or "
                           "narrow net.ipv4.ip_local_port_range",
                           count, n->name, n->n_given);
        if (have && port != out[have - 1] + 1)
            for (; have; have--)
                drop(n, (uint16_t)out[have - 1]);
        out[have++] = port;
    }
    return FL_OK;
}

/* Whoever gets a port binds it minutes later, when its model is loaded: until its lease ends no
 * other group is told the same. */
enum fl_status node_ports_find(struct node *n, const Fl__LeasePrepare *m,
                               uint32_t ports[NODE_PORTS_MAX], struct fl_err *err)
{
    uint16_t from =
        m->has_ports_from && m->ports_from <= 65535 ? (uint16_t)m->ports_from : PORTS_FROM;
    uint32_t block = m->has_port_block && m->port_block ? m->port_block : 1;
    uint64_t lease = m->n_leases ? m->leases[0]->id : 0;

    given_forget(n, lease);
    node_ports_settle(n);
    if (m->free_ports > NODE_PORTS_MAX || n->n_given + m->free_ports > FL_LEN(n->given))
        return fl_fail(err, FL_EXHAUSTED,
                       "%u ports asked, at most %d at once, and %zu of %zu are given",
                       m->free_ports, NODE_PORTS_MAX, n->n_given, FL_LEN(n->given));
    for (uint32_t i = 0; i < m->free_ports; i += block)
        FL_TRY(find_row(n, &from, m->free_ports - i < block ? m->free_ports - i : block, &ports[i],
                        err));
    return FL_OK;
}

void node_ports_give(struct node *n, const Fl__LeasePrepare *m, const uint32_t *ports)
{
    for (uint32_t i = 0; i < m->free_ports && m->n_leases; i++) {
        n->given[n->n_given].port = (uint16_t)ports[i];
        n->given[n->n_given++].lease = m->leases[0]->id;
    }
    node_ports_settle(n);
}

static enum fl_status named_port(struct node *n, const Fl__WorkerSpec *spec, const char *port,
                                 struct fl_err *err)
{
    uint32_t number = number_of(port);
    char who[160];
    int len = (int)strcspn(port, "=");

    if (number < 1 || number > 65535)
        return fl_fail(err, FL_INVALID, "%.60s: a port is a number from 1 to 65535", port);
    if (fl_port_holder((uint16_t)number, who, sizeof(who)))
        return fl_fail(err, FL_EXISTS, "port %u (%.*s) of node %s is taken by %s", number, len,
                       port, n->name, who);
    if (is_given(n, number, spec))
        return fl_fail(err, FL_EXISTS,
                       "port %u (%.*s) of node %s is given to other work that has not bound it "
                       "yet; see furlong list ports",
                       number, len, port, n->name);
    if (!hold_of(n, (uint16_t)number) && !hold(n, (uint16_t)number)) /* twice: two names for one */
        return fl_fail(err, FL_EXISTS,
                       "port %u (%.*s) of node %s is given to work of another cluster on this host "
                       "that has not bound it yet",
                       number, len, port, n->name);
    return FL_OK;
}

enum fl_status node_ports_of_worker(struct node *n, Fl__WorkerSpec *spec, struct fl_err *err)
{
    if (spec->n_ports)
        node_ports_settle(n);
    for (size_t i = 0; i < spec->n_ports; i++)
        if (strchr(spec->ports[i], '='))
            FL_TRY(named_port(n, spec, spec->ports[i], err));
    for (size_t i = 0; i < spec->n_ports; i++) {
        uint16_t from = n->ports_from ? n->ports_from : PORTS_FROM;
        uint32_t port;
        char *both;

        if (strchr(spec->ports[i], '='))
            continue;
        FL_TRY(find_row(n, &from, 1, &port, err));
        n->ports_from =
            from; /* on and on: one that was just let go may linger with its last user */
        if (asprintf(&both, "%s=%u", spec->ports[i], port) < 0)
            return fl_fail(err, FL_EXHAUSTED, "no memory for a port");
        free(spec->ports[i]);
        spec->ports[i] = both;
    }
    return FL_OK;
}
