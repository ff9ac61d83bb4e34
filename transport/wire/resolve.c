#include "transport/wire/resolve.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"
#include "common/base/file.h"

enum fl_status wire_addr_unix(const char *path, struct wire_addrs *out, struct fl_err *err)
{
    struct wire_addrs a = { .n = 1 };

    FL_TRY(fl_unix_addr(path, &a.a[0].u.un, err));
    a.a[0].len = sizeof(struct sockaddr_un);
    *out = a;
    return FL_OK;
}

bool wire_addr_parse(const char *host, uint16_t port, struct wire_addrs *out)
{
    struct wire_addrs a = { .n = 1 };
    union wire_sockaddr *u = &a.a[0].u;

    if (strcmp(host, "localhost") == 0)
        host = "127.0.0.1";
    if (inet_pton(AF_INET, host, &u->v4.sin_addr) == 1) {
        u->v4.sin_family = AF_INET;
        u->v4.sin_port = htons(port);
        a.a[0].len = sizeof(u->v4);
    } else if (inet_pton(AF_INET6, host, &u->v6.sin6_addr) == 1) {
        u->v6.sin6_family = AF_INET6;
        u->v6.sin6_port = htons(port);
        a.a[0].len = sizeof(u->v6);
    } else {
        return false;
    }
    *out = a;
    return true;
}

void wire_addr_text(const union wire_sockaddr *sa, char *out, size_t cap)
{
    char host[INET6_ADDRSTRLEN] = "";

    if (sa->sa.sa_family == AF_INET) {
        inet_ntop(AF_INET, &sa->v4.sin_addr, host, sizeof(host));
        snprintf(out, cap, "%s:%u", host, ntohs(sa->v4.sin_port));
    } else {
        inet_ntop(AF_INET6, &sa->v6.sin6_addr, host, sizeof(host));
        snprintf(out, cap, "[%s]:%u", host, ntohs(sa->v6.sin6_port));
    }
}

struct wire_resolve {
    struct fl_work work;
    char host[WIRE_HOST_MAX], port[8];
    void (*done)(void *arg, enum fl_status st, const struct wire_addrs *addrs,
                 const struct fl_err *why);
    void *arg;
    int rc;
    struct wire_addrs addrs;
};

static void look_up(struct fl_work *w) /* pool thread */
{
    struct wire_resolve *r = container_of(w, struct wire_resolve, work);
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *list = NULL;

    r->rc = FL_FAULT("wire.resolve") ? EAI_FAIL : getaddrinfo(r->host, r->port, &hints, &list);
    for (struct addrinfo *a = list; r->rc == 0 && a && r->addrs.n < WIRE_ADDRS; a = a->ai_next) {
        struct wire_addr *to = &r->addrs.a[r->addrs.n];

        if (a->ai_addrlen > sizeof(to->u))
            continue;
        memcpy(&to->u, a->ai_addr, a->ai_addrlen);
        to->len = a->ai_addrlen;
        r->addrs.n++;
    }
    if (list)
        freeaddrinfo(list);
}

static void looked_up(struct fl_work *w, enum fl_status st)
{
    struct wire_resolve *r = container_of(w, struct wire_resolve, work);
    struct fl_err err = { 0 };

    if (st != FL_OK)
        fl_fail(&err, st, "look up host %s", r->host);
    else if (r->rc != 0 || r->addrs.n == 0)
        st = fl_fail(&err, FL_UNREACHABLE, "look up host %s: %s", r->host,
                     r->rc ? gai_strerror(r->rc) : "no address");
    if (r->done)
        r->done(r->arg, st, &r->addrs, &err);
    free(r);
}

enum fl_status wire_resolve(struct fl_loop *l, const char *host, uint16_t port,
                            void (*done)(void *arg, enum fl_status st,
                                         const struct wire_addrs *addrs, const struct fl_err *why),
                            void *arg, struct wire_resolve **out, struct fl_err *err)
{
    struct wire_resolve *r = calloc(1, sizeof(*r));

    if (!r)
        return fl_fail(err, FL_EXHAUSTED, "no memory to look up %s", host);
    r->work = (struct fl_work){ .work = look_up, .done = looked_up };
    r->done = done;
    r->arg = arg;
    snprintf(r->host, sizeof(r->host), "%s", host);
    snprintf(r->port, sizeof(r->port), "%u", port);
    *out = r;
    fl_work_start(l, &r->work);
    return FL_OK;
}

void wire_resolve_forget(struct wire_resolve *r)
{
    if (r)
        r->done = NULL;
}
