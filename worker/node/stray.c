#include "worker/node/stray.h"
#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/log.h"

struct stray {
    struct stray *next;
    struct node *node;
    struct proc *proc;
    char dir[FL_PATH_MAX];
};

static void remove_folder(const char *dir)
{
    struct fl_err err;

    if (fl_tree_remove(dir, &err) != FL_OK)
        fl_warn("stray folder not removed why=\"%s\"", err.text);
}

/* The folder of the other id, when its last worker is gone: rmdir refuses the ones that are not
 * empty. */
static void remove_above(const struct node *n, const char *dir)
{
    char w[FL_PATH_MAX], *slash;

    (void)FL_COPY(w, dir);
    slash = strrchr(w, '/');
    if (!slash || !strncmp(dir, n->dir, strlen(n->dir)))
        return;
    *slash = 0;
    if (rmdir(w) == 0 && (slash = strrchr(w, '/'))) {
        *slash = 0;
        remove_folder(w);
    }
}

static void on_started(void *arg, struct proc *p, int pid)
{
    (void)arg;
    (void)p;
    (void)pid;
}

static void on_gone(void *arg, struct proc *p, const struct proc_exit *x)
{
    struct stray *s = arg, **at = &s->node->strays;
    struct node *n = s->node;

    (void)p;
    fl_info("stray work ended dir=%s cause=%s", s->dir, proc_cause_name(x->cause));
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    remove_folder(s->dir);
    remove_above(n, s->dir);
    free(s);
    if (!n->strays)
        node_uplink_may(n->up);
}
static const struct proc_user user = { .started = on_started, .gone = on_gone };

void node_stray_end(struct node *n, const char *dir, const char *why)
{
    struct stray *s = calloc(1, sizeof(*s));
    struct fl_err err = { 0 };

    if (!s || !FL_COPY(s->dir, dir) ||
        n->cfg.proc->adopt(n->loop, dir, &user, s, &s->proc, &err) != FL_OK) {
        fl_error("what runs there is not known, and nothing is ended dir=%s why=\"%s\"", dir,
                 err.text);
        remove_folder(dir);
        remove_above(n, dir);
        free(s);
        return;
    }
    fl_warn("stray work is ended dir=%s why=\"%s\"", dir, why);
    s->node = n;
    s->next = n->strays;
    n->strays = s;
    n->cfg.proc->stop(s->proc, PROC_FENCED, why, NODE_FENCE_TERM_MS);
}

enum fl_status node_strays_claim(struct node *n, struct fl_err *err)
{
    char path[FL_PATH_MAX];

    FL_TRY(fl_path(path, err, "%s/state", n->dir));
    return fl_file_write(path, 0600, n->ident.dir, strlen(n->ident.dir), err);
}

static bool ours(const struct node *n, const char *dir)
{
    char path[FL_PATH_MAX], *text;
    size_t len;
    bool same = false;

    if (fl_path(path, NULL, "%s/state", dir) == FL_OK &&
        fl_file_read(path, FL_PATH_MAX, &text, &len, NULL) == FL_OK) {
        same = !strcmp(text, n->ident.dir);
        free(text);
    }
    return same;
}

static void end_all_in(struct node *n, const char *dir)
{
    static const char why[] = "the state folder of its node was lost";
    char w[FL_PATH_MAX], one[FL_PATH_MAX];
    struct dirent *e;
    unsigned found = 0;
    DIR *d;

    if (fl_path(w, NULL, "%s/w", dir) == FL_OK && (d = opendir(w))) {
        while ((e = readdir(d)))
            if (e->d_name[0] != '.' && fl_path(one, NULL, "%s/%s", w, e->d_name) == FL_OK) {
                node_stray_end(n, one, why);
                found++;
            }
        closedir(d);
    }
    if (!found)
        remove_folder(dir);
}

void node_strays_find(struct node *n)
{
    char dir[FL_PATH_MAX];
    struct dirent *e;
    DIR *d = opendir(n->runtime);

    while (d && (e = readdir(d)))
        if (!strncmp(e->d_name, "n-", 2) &&
            fl_path(dir, NULL, "%s/%s", n->runtime, e->d_name) == FL_OK && strcmp(dir, n->dir) &&
            ours(n, dir))
            end_all_in(n, dir);
    if (d)
        closedir(d);
}

void node_strays_forget(struct node *n)
{
    while (n->strays) {
        struct stray *s = n->strays;

        n->strays = s->next;
        n->cfg.proc->forget(s->proc);
        free(s);
    }
}
