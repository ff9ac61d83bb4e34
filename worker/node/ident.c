#include "worker/node/ident.h"
#include "common/base/fault.h"
#include "common/base/id.h"
#include "common/base/str.h"
#include "common/conf/json.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

enum { IDENT_MAX = 64 << 10 };

static enum fl_status store(const struct node_ident *id, struct fl_err *err)
{
    char path[FL_PATH_MAX], node[2 * sizeof(id->me.id) + 1],
        cluster[2 * sizeof(id->highest.cluster) + 1];
    char text[512];
    int n;

    FL_HEX(id->me.id, node);
    FL_HEX(id->highest.cluster, cluster);
    n = snprintf(text, sizeof(text),
                 "{\"node\": \"%s\", \"start\": %llu, \"cluster\": \"%s\", \"term\": %llu}\n", node,
                 (unsigned long long)id->me.start, cluster, (unsigned long long)id->highest.head);
    FL_TRY(fl_path(path, err, "%s/node.json", id->dir));
    return fl_file_write(path, 0600, text, (size_t)n, err);
}

static enum fl_status parse(struct node_ident *id, const json_t *root, const char *path,
                            struct fl_err *err)
{
    struct fl_json_at at = fl_json_root(root, path);
    const char *node, *cluster;
    int64_t start, term;

    FL_TRY(fl_json_text(&at, "node", &node, err));
    FL_TRY(fl_json_text(&at, "cluster", &cluster, err));
    FL_TRY(fl_json_int(&at, "start", 1, INT64_MAX - 1, &start, err));
    FL_TRY(fl_json_int(&at, "term", 0, INT64_MAX, &term, err));
    if (!fl_hex_parse(node, &id->me.id, sizeof(id->me.id)))
        return fl_json_bad(&at, "node", err, "no id of %zu hex digits", 2 * sizeof(id->me.id));
    if (!fl_hex_parse(cluster, id->highest.cluster, sizeof(id->highest.cluster)))
        return fl_json_bad(&at, "cluster", err, "no id of %zu hex digits",
                           2 * sizeof(id->highest.cluster));
    id->me.start = (uint64_t)start;
    id->highest.head = (uint64_t)term;
    return FL_OK;
}

static enum fl_status load(struct node_ident *id, struct fl_err *err)
{
    char path[FL_PATH_MAX];
    json_t *root = NULL;
    enum fl_status st;

    FL_TRY(fl_path(path, err, "%s/node.json", id->dir));
    st = access(path, F_OK) < 0 && errno == ENOENT ? FL_NOT_FOUND
                                                   : fl_json_load(path, IDENT_MAX, &root, err);
    if (st == FL_NOT_FOUND)
        return fl_random(&id->me.id, sizeof(id->me.id), err);
    if (st == FL_OK)
        st = parse(id, root, path, err);
    json_decref(root);
    if (st == FL_INVALID)
        st = fl_wrap(err, FL_CORRUPT,
                     "this node's id cannot be read (remove the file to join as a new node)");
    return st;
}

static enum fl_status lock(struct node_ident *id, struct fl_err *err)
{
    char path[FL_PATH_MAX], text[32];

    FL_TRY(fl_path(path, err, "%s/lock", id->dir));
    id->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (id->lock_fd < 0)
        return fl_fail_errno(err, "open %s", path);
    if (flock(id->lock_fd, LOCK_EX | LOCK_NB) < 0) {
        ssize_t n = pread(id->lock_fd, text, sizeof(text) - 1, 0);

        text[n > 0 ? n : 0] = 0;
        return errno != EWOULDBLOCK
                   ? fl_fail_errno(err, "lock %s", path)
                   : fl_fail(
                         err, FL_EXISTS,
                         "another daemon, pid %.20s, has the state folder %.150s; stop it, or give "
                         "--state-dir another folder",
                         text[0] ? text : "unknown", id->dir);
    }
    int n = snprintf(text, sizeof(text), "%d", (int)getpid());

    if (ftruncate(id->lock_fd, 0) < 0 || pwrite(id->lock_fd, text, (size_t)n, 0) != n)
        return fl_fail_errno(err, "write %s", path);
    return FL_OK;
}

enum fl_status node_ident_open(const char *state_dir, struct node_ident *out, struct fl_err *err)
{
    struct node_ident id = { .lock_fd = -1 };
    char state[FL_PATH_MAX];
    enum fl_status st;

    FL_TRY(fl_state_dir(state_dir, state, err));
    FL_TRY(fl_path(id.dir, err, "%s/node", state));
    FL_TRY(fl_mkdirs(id.dir, err));
    st = lock(&id, err);
    if (st == FL_OK)
        st = load(&id, err);
    if (st == FL_OK) {
        id.me.start++;
        st = store(&id, err);
    }
    if (st != FL_OK) {
        node_ident_close(&id);
        return st;
    }
    *out = id;
    return FL_OK;
}

enum fl_status node_ident_restart(struct node_ident *id, struct fl_err *err)
{
    enum fl_status st;

    id->me.start++;
    st = store(id, err);
    if (st != FL_OK)
        id->me.start--;
    return st;
}

enum fl_status node_ident_heard(struct node_ident *id, const struct fl_term *term,
                                struct fl_err *err)
{
    struct fl_term was = id->highest;
    enum fl_status st;

    if (FL_SAME(was, *term))
        return FL_OK;
    id->highest = *term;
    st = store(id, err);
    if (st != FL_OK)
        id->highest = was;
    return st;
}

void node_ident_close(struct node_ident *id)
{
    if (id->lock_fd >= 0)
        close(id->lock_fd); /* the lock goes with it; the file stays for the next one */
    id->lock_fd = -1;
}
