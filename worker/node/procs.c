#include "worker/node/procs.h"

#include <stdio.h>
#include <unistd.h>

#include "common/base/usage.h"

static uint64_t cpu_before(const struct node_procs *p, int pid, uint64_t now)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->past[i].pid == pid && p->past[i].cpu_ms <= now)
            return p->past[i].cpu_ms;
    return now; /* seen for the first time */
}

static void add(struct node_procs *p, Fl__Beat *m, const char *component, int pid,
                uint64_t passed_ms, struct fl_usage *seen)
{
    size_t i = m->n_procs;

    if (pid <= 0 || i == NODE_PROCS || fl_usage_read(pid, &seen[i], NULL) != FL_OK)
        return;
    Fl__ProcUse *u = &p->uses[i];
    uint64_t used_ms = seen[i].cpu_ms - cpu_before(p, pid, seen[i].cpu_ms);

    *u = (Fl__ProcUse)FL__PROC_USE__INIT;
    snprintf(p->names[i], sizeof(p->names[i]), "%s", component);
    u->component = p->names[i];
    u->pid = pid;
    u->cpu_e2 = passed_ms ? (uint32_t)(used_ms * 10000 / passed_ms) : 0;
    u->rss = seen[i].rss_bytes;
    u->shared = seen[i].shared_bytes;
    u->fds = seen[i].fds;
    p->list[i] = u;
    m->n_procs++;
}

static void add_counts(struct node_procs *p, const struct node *n, Fl__Beat *m)
{
    const char *names[NODE_METRICS];
    double values[NODE_METRICS];

    m->n_counts = node_counts(n, names, values);
    for (size_t i = 0; i < m->n_counts; i++) {
        p->counts[i] = (Fl__NodeCount)FL__NODE_COUNT__INIT;
        p->counts[i].name = (char *)(uintptr_t)names[i];
        p->counts[i].value = values[i];
        p->count_list[i] = &p->counts[i];
    }
    m->counts = p->count_list;
}

void node_procs_add(struct node_procs *p, const struct node *n, Fl__Beat *m)
{
    struct fl_usage seen[NODE_PROCS];
    uint64_t now_ns = fl_loop_now_ns(n->loop);
    uint64_t passed_ms = p->looked_ns ? (now_ns - p->looked_ns) / 1000000 : 0;
    char name[48];

    if (p->beats++ % NODE_PROCS_EVERY)
        return;
    m->procs = p->list;
    add(p, m, "raylet", (int)getpid(), passed_ms, seen);
    for (const struct worker *w = n->workers; w; w = w->hh.next) {
        snprintf(name, sizeof(name), "ray::%.40s", w->spec->role);
        if (!w->gone)
            add(p, m, name, w->pid, passed_ms, seen);
    }
    p->n = m->n_procs;
    for (size_t i = 0; i < p->n; i++) {
        p->past[i].pid = p->uses[i].pid;
        p->past[i].cpu_ms = seen[i].cpu_ms;
    }
    p->looked_ns = now_ns;
    m->has_procs_told = m->procs_told = true;
    add_counts(p, n, m);
}
