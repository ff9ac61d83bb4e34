#include <stdlib.h>
#include <unistd.h>
#include "common/base/log.h"
#include "worker.pb-c.h"
#include "worker/client/driver_priv.h"
#include "worker/client/uplink.h"

enum { ARGS_MAX = 4096, END_MS = 60000 };

/* ---- waiting -------------------------------------------------------------------------------- */
enum standing { STANDS_READY, STANDS_LATE, STANDS_OVER, STANDS_UNRUNNABLE };

/* mu is held. The first that has ended for good decides; else those that are late are named. */
static enum standing group_standing(const struct furlong_group *g, const uint32_t *after,
                                    struct fl_str *who)
{
    bool feeds = plane_feeds(g->d, g->role);
    enum standing all = STANDS_READY;

    for (uint32_t i = 0; i < g->n; i++) {
        struct member *m = member_find(g->d, g->role, i);
        bool old = after && m && m->at.who.attempt <= after[i];

        if (m && m->state == FURLONG_ENDED && !old) {
            who->len = 0;
            member_print(m, who);
            fl_str_add(who, " ended: %s", *m->why ? m->why : "no cause is known");
            return m->unrunnable ? STANDS_UNRUNNABLE : STANDS_OVER;
        }
        if (m && m->state == FURLONG_LIVE && !old && (!feeds || m->holds))
            continue;
        all = STANDS_LATE;
        fl_str_add(who, "%s", who->len ? "; " : "");
        if (m)
            member_print(m, who);
        else
            fl_str_add(who, "%s %u", g->role, i);
        fl_str_add(who, !m || m->state != FURLONG_LIVE || old ? " has not joined"
                                                              : " has no weights yet");
        if (m && *m->why && m->state != FURLONG_LIVE)
            fl_str_add(who, " (the attempt before: %s)", m->why);
    }
    return all;
}

static enum fl_status group_wait(struct furlong_group *g, const uint32_t *after, uint32_t budget_ms,
                                 struct fl_err *err)
{
    bool forever = budget_ms == 0 || budget_ms == FURLONG_FOREVER;
    struct timespec until = client_until(forever ? 0 : budget_ms);
    struct client_driver *d = g->d;
    char text[240];
    struct fl_str who;
    enum standing is;
    bool late = false;

    pthread_mutex_lock(&d->mu);
    for (;;) {
        who = (struct fl_str)FL_STR_ON(text);
        *text = '\0';
        is = group_standing(g, after, &who);
        if (is != STANDS_LATE || late)
            break;
        late =
            !client_cond_wait(&d->changed, &d->mu, forever ? FURLONG_FOREVER : budget_ms, &until);
    }
    pthread_mutex_unlock(&d->mu);
    if (is == STANDS_READY)
        return FL_OK;
    return fl_fail(err,
                   is == STANDS_UNRUNNABLE ? FL_NOT_FOUND
                   : is == STANDS_OVER     ? FL_UNREACHABLE
                                           : FL_TIMEOUT,
                   "%s", text);
}

/* Of a budget that began at from_ns, for group_wait(): one that is over leaves a look. */
static uint32_t budget_left(uint32_t budget_ms, uint64_t from_ns)
{
    uint64_t spent_ms = (fl_clock_boot_ns() - from_ns) / 1000000;

    if (budget_ms == 0 || budget_ms == FURLONG_FOREVER)
        return budget_ms;
    return spent_ms < budget_ms ? (uint32_t)(budget_ms - spent_ms) : 1;
}

enum fl_status furlong_group_wait(struct furlong_group *g, uint32_t budget_ms, struct fl_err *err)
{
    FL_TRY(client_here(g->d->f, err));
    return group_wait(g, NULL, budget_ms, err);
}

/* ---- launching ------------------------------------------------------------------------------ */
static enum fl_status take_members(void *arg, const struct wire_msg *reply, struct fl_err *err)
{
    return members_take(arg, reply->body, reply->head.body_bytes, err);
}

static size_t count_of(char *const list[])
{
    size_t n = 0;

    while (list && list[n])
        n++;
    return n;
}

/* NAME=VALUE cut at its first =. */
static enum fl_status env_fill(char *const env[], size_t n, Fl__EnvVar *vars, Fl__EnvVar **list,
                               char **copies, struct fl_err *err)
{
    for (size_t i = 0; i < n; i++) {
        char *eq;

        copies[i] = strdup(env[i]);
        if (!copies[i])
            return fl_fail(err, FL_EXHAUSTED, "no memory for the environment");
        eq = strchr(copies[i], '=');
        if (!eq || eq == copies[i])
            return fl_fail(err, FL_INVALID, "environment: '%.60s' is not NAME=VALUE", env[i]);
        *eq = '\0';
        fl__env_var__init(&vars[i]);
        vars[i].name = copies[i];
        vars[i].value = eq + 1;
        list[i] = &vars[i];
    }
    return FL_OK;
}

static enum fl_status launch_send(struct furlong_group *g, char *const argv[], char *const env[],
                                  const struct furlong_launch_opts *o, struct fl_err *err)
{
    size_t n_env = count_of(env), i;
    Fl__EnvVar *vars = calloc(n_env + 1, sizeof(*vars)), **list = calloc(n_env + 1, sizeof(*list));
    char **copies = calloc(n_env + 1, sizeof(*copies)), *cwd = NULL;
    Fl__Launch m = FL__LAUNCH__INIT;
    enum fl_status st = FL_OK;

    if (!o->cwd)
        cwd = getcwd(NULL, 0);
    if (!vars || !list || !copies || (!o->cwd && !cwd))
        st = fl_fail(err, FL_EXHAUSTED, "%s: no memory to launch, or no working folder", g->role);
    if (st == FL_OK)
        st = env_fill(env, n_env, vars, list, copies, err);
    m.group.data = g->id;
    m.group.len = g->id_bytes;
    m.role = g->role;
    m.n_argv = count_of(argv);
    m.argv = (char **)(uintptr_t)argv;
    m.n_env = n_env;
    m.env = list;
    m.cwd = o->cwd ? (char *)(uintptr_t)o->cwd : cwd;
    m.has_restart_max = m.has_backoff_ms = m.has_backoff_max_ms = true;
    m.restart_max = o->restart_max;
    m.backoff_ms = o->backoff_ms;
    m.backoff_max_ms = o->backoff_max_ms;
    if (st == FL_OK)
        st = client_relay_wait(g->d->f, FL_WORKERS_LAUNCH, true, o->start_ms, &m.base, take_members,
                               g->d, err);
    for (i = 0; copies && i < n_env; i++)
        free(copies[i]);
    free(copies);
    free(list);
    free(vars);
    free(cwd);
    return st;
}

void group_free(struct furlong_group *g)
{
    struct client_driver *d = g->d;

    pthread_mutex_lock(&d->mu);
    for (struct furlong_group **at = &d->groups; *at; at = &(*at)->next) {
        if (*at != g)
            continue;
        *at = g->next;
        break;
    }
    pthread_mutex_unlock(&d->mu);
    free(g->peers);
    free(g);
}

static enum fl_status group_new(const struct furlong_layout *y, struct client_driver *d,
                                const char *role, struct furlong_group **out, struct fl_err *err)
{
    uint32_t n = furlong_layout_count(y, role);
    struct furlong_group *g;

    if (n == 0)
        return fl_fail(err, FL_NOT_FOUND, "the layout has no %s", role);
    g = calloc(1, sizeof(*g));
    if (g)
        g->peers = calloc(n, sizeof(struct furlong_peer *));
    if (!g || !g->peers || !FL_COPY(g->role, role)) {
        if (g)
            free(g->peers);
        free(g);
        return fl_fail(err, FL_EXHAUSTED, "no memory for %u of %s", n, role);
    }
    g->d = d;
    g->n = n;
    g->id_bytes = y->pb->group.len;
    memcpy(g->id, y->pb->group.data, g->id_bytes);
    for (uint32_t i = 0; i < n; i++) {
        enum fl_status st = furlong_peer(d->f, role, i, &g->peers[i], err);

        if (st != FL_OK) {
            group_free(g);
            return st;
        }
    }
    *out = g;
    return FL_OK;
}

static void role_end(struct furlong_group *g, const char *why)
{
    Fl__Role m = FL__ROLE__INIT;
    struct fl_err err;

    m.group.data = g->id;
    m.group.len = g->id_bytes;
    m.role = g->role;
    m.why = (char *)(uintptr_t)why;
    if (client_relay_wait(g->d->f, FL_ROLE_END, true, END_MS, &m.base, NULL, NULL, &err) != FL_OK &&
        err.status != FL_NOT_FOUND)
        fl_warn("role not ended role=%s why=%s", g->role, err.text);
}

enum fl_status furlong_launch_start(struct furlong *f, const struct furlong_layout *y,
                                    const char *role, char *const argv[], char *const env[],
                                    const struct furlong_launch_opts *o, struct furlong_group **out,
                                    struct fl_err *err)
{
    struct furlong_launch_opts none = { 0 };
    struct furlong_group *g = NULL;
    struct client_driver *d;
    enum fl_status st;

    FL_TRY(driver_of(f, &d, err));
    if (!argv || !argv[0] || count_of(argv) > ARGS_MAX || count_of(env) > ARGS_MAX)
        return fl_fail(err, FL_INVALID, "%s: 1 to %d arguments, up to %d variables", role, ARGS_MAX,
                       ARGS_MAX);
    FL_TRY(group_new(y, d, role, &g, err));
    st = launch_send(g, argv, env, o ? o : &none, err);
    if (st != FL_OK) {
        group_free(g);
        return fl_wrap(err, st, "launch %s", role);
    }
    pthread_mutex_lock(&d->mu);
    g->next = d->groups;
    d->groups = g;
    pthread_mutex_unlock(&d->mu);
    *out = g;
    return FL_OK;
}

enum fl_status furlong_launch(struct furlong *f, const struct furlong_layout *y, const char *role,
                              char *const argv[], char *const env[],
                              const struct furlong_launch_opts *o, struct furlong_group **out,
                              struct fl_err *err)
{
    uint64_t from = fl_clock_boot_ns();
    struct furlong_group *g;

    FL_TRY(furlong_launch_start(f, y, role, argv, env, o, &g, err));
    enum fl_status st = group_wait(g, NULL, budget_left(o ? o->start_ms : 0, from), err);

    if (st != FL_OK) {
        role_end(g, "not all of its members joined");
        group_free(g);
        return fl_wrap(err, st, "launch %s", role);
    }
    *out = g;
    return FL_OK;
}

enum fl_status furlong_group_restart(struct furlong_group *g, uint32_t budget_ms,
                                     struct fl_err *err)
{
    uint64_t from = fl_clock_boot_ns();
    Fl__Role m = FL__ROLE__INIT;
    uint32_t *after;
    enum fl_status st;

    FL_TRY(client_here(g->d->f, err));
    after = calloc(g->n, sizeof(*after));
    if (!after)
        return fl_fail(err, FL_EXHAUSTED, "no memory to restart %s", g->role);
    pthread_mutex_lock(&g->d->mu);
    for (uint32_t i = 0; i < g->n; i++) {
        struct member *x = member_find(g->d, g->role, i);

        after[i] = x ? x->at.who.attempt : 0;
    }
    pthread_mutex_unlock(&g->d->mu);
    m.group.data = g->id;
    m.group.len = g->id_bytes;
    m.role = g->role;
    st = client_relay_wait(g->d->f, FL_ROLE_RESTART, false, budget_ms, &m.base, take_members, g->d,
                           err);
    if (st == FL_OK)
        st = group_wait(g, after, budget_left(budget_ms, from), err);
    free(after);
    return st == FL_OK ? FL_OK : fl_wrap(err, st, "restart %s", g->role);
}

/* ---- looking -------------------------------------------------------------------------------- */
uint32_t furlong_group_size(const struct furlong_group *g)
{
    return g->n;
}

struct furlong_peer *furlong_group_peer(struct furlong_group *g, uint32_t i)
{
    return i < g->n ? g->peers[i] : NULL;
}

void furlong_group_member(struct furlong_group *g, uint32_t i, struct furlong_member *out)
{
    struct client_driver *d = g->d;
    struct member *m;

    *out = (struct furlong_member){ .rank = i };
    if (client_here(d->f, NULL) != FL_OK)
        return;
    pthread_mutex_lock(&d->mu);
    m = member_find(d, g->role, i);
    if (m) {
        out->attempt = m->at.who.attempt;
        out->state = (enum furlong_member_state)m->state;
        (void)FL_COPY(out->node, m->node);
        (void)FL_COPY(out->why, m->why);
    }
    pthread_mutex_unlock(&d->mu);
}

int furlong_member_exit_code(struct furlong_group *g, uint32_t i)
{
    struct member *m;
    int code = -1;

    if (client_here(g->d->f, NULL) != FL_OK)
        return -1;
    pthread_mutex_lock(&g->d->mu);
    m = member_find(g->d, g->role, i);
    if (m && *m->why)
        code = m->exit_code;
    pthread_mutex_unlock(&g->d->mu);
    return code;
}

enum furlong_late furlong_group_late(struct furlong_group *g, uint32_t i,
                                     struct furlong_member *out)
{
    struct client_driver *d = g->d;
    enum furlong_late late = FURLONG_IN_TIME;
    struct member *m;

    furlong_group_member(g, i, out);
    pthread_mutex_lock(&d->mu);
    m = member_find(d, g->role, i);
    if (m && m->late_attempt && m->late_attempt == m->at.who.attempt && m->state != FURLONG_ENDED) {
        late = m->late_answers ? FURLONG_SLOW : FURLONG_SILENT;
        out->attempt = m->late_attempt;
        (void)FL_COPY(out->why, m->late_why);
    }
    pthread_mutex_unlock(&d->mu);
    return late;
}

/* ---- ending one --------------------------------------------------------------------------- */
/* mu is held. */
static bool attempt_over(struct furlong_group *g, uint32_t i, uint32_t attempt)
{
    struct member *m = member_find(g->d, g->role, i);

    return !m || m->at.who.attempt > attempt ||
           (m->at.who.attempt == attempt && m->state == FURLONG_ENDED);
}

enum fl_status furlong_member_end(struct furlong_group *g, uint32_t i, uint32_t attempt,
                                  const char *why, uint32_t budget_ms, struct fl_err *err)
{
    struct timespec until = client_until(budget_ms);
    Fl__MemberEnd m = FL__MEMBER_END__INIT;
    struct client_driver *d = g->d;
    bool late = false, over;

    FL_TRY(client_here(d->f, err));
    if (i >= g->n)
        return fl_fail(err, FL_NOT_FOUND, "%s has no rank %u, it has %u", g->role, i, g->n);
    m.group.data = g->id;
    m.group.len = g->id_bytes;
    m.role = g->role;
    m.rank = i;
    m.attempt = attempt;
    m.why = (char *)(uintptr_t)(why ? why : "the driver ends it");
    FL_TRY(client_relay_wait(d->f, FL_MEMBER_END, true, budget_ms, &m.base, NULL, NULL, err));
    pthread_mutex_lock(&d->mu);
    while (!(over = attempt_over(g, i, attempt)) && !late)
        late = !client_cond_wait(&d->changed, &d->mu, budget_ms, &until);
    pthread_mutex_unlock(&d->mu);
    return over ? FL_OK
                : fl_fail(err, FL_TIMEOUT,
                          "%s %u, attempt %u, has not ended in %.1f s, though killed", g->role, i,
                          attempt, budget_ms / 1000.0);
}

/* ---- ending --------------------------------------------------------------------------------- */
static bool all_ended(struct furlong_group *g)
{
    for (uint32_t i = 0; i < g->n; i++) {
        struct member *m = member_find(g->d, g->role, i);

        if (m && m->state != FURLONG_ENDED)
            return false;
    }
    return true;
}

void furlong_group_end(struct furlong_group *g)
{
    struct timespec until = client_until(END_MS);
    bool late = false;

    if (!g || client_here(g->d->f, NULL) != FL_OK)
        return;
    plane_group_ends(g);
    role_end(g, "the driver ends it");
    pthread_mutex_lock(&g->d->mu);
    while (!all_ended(g) && !late)
        late = !client_cond_wait(&g->d->changed, &g->d->mu, END_MS, &until);
    pthread_mutex_unlock(&g->d->mu);
    if (late)
        fl_warn("members still end role=%s waited_ms=%d", g->role, END_MS);
    group_free(g);
}
