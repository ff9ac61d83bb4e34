#include "worker/node/package.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utlist.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/proto/methods.h"
#include "common/proto/pb.h"
#include "worker/node/unpack.h"

enum {
    READ_MS = 30000,       /* for one piece                                  */
    TOTAL_MAX = 512 << 20, /* of a package, whatever the head says           */
    AGAIN_MS = 200,        /* when the stream takes no more calls right now  */
};

struct package { /* on its way */
    struct package *prev, *next;
    struct packages *of; /* NULL: the daemon is going; only the work is waited for */
    char name[160], part[FL_PATH_MAX], fresh[FL_PATH_MAX], path[FL_PATH_MAX];
    int fd;
    uint64_t offset;
    bool calling, unpacking;
    struct call_op op;
    struct fl_timer again;
    struct fl_work work;
    enum fl_status got; /* of the work */
    struct fl_err err;
};
struct wait { /* a start that waits for packages */
    struct wait *prev, *next;
    struct packages *of;
    struct call_req *req;
    Fl__WorkerSpec *spec;
};
struct packages {
    struct node *node;
    char dir[FL_PATH_MAX];
    struct package *coming;
    struct wait *waits;
    unsigned n_waits;
};

static bool name_ok(const char *name)
{
    size_t n = strlen(name);

    return n > 4 && n < 140 && name[0] != '.' && !strchr(name, '/') &&
           (strcmp(name + n - 4, ".zip") == 0 || strcmp(name + n - 4, ".whl") == 0);
}

/* "x.zip" lies in "x"; another kind keeps its ending. */
bool node_package_path(const struct packages *p, const char *name, char out[FL_PATH_MAX])
{
    size_t n = strlen(name);

    if (n > 4 && strcmp(name + n - 4, ".zip") == 0)
        n -= 4;
    return fl_path(out, NULL, "%s/%.*s", p->dir, (int)n, name) == FL_OK;
}

static bool is_here(const struct packages *p, const char *name)
{
    char path[FL_PATH_MAX];
    struct stat sb;

    return node_package_path(p, name, path) && lstat(path, &sb) == 0 && S_ISDIR(sb.st_mode);
}

static const char *nth(const Fl__WorkerSpec *s, size_t i)
{
    bool dir = s->working_dir && *s->working_dir;

    if (dir && i == 0)
        return s->working_dir;
    i -= dir;
    return i < s->n_py_modules ? s->py_modules[i] : NULL;
}

bool node_packages_ready(const struct packages *p, const Fl__WorkerSpec *spec)
{
    const char *name;

    for (size_t i = 0; (name = nth(spec, i)); i++)
        if (!is_here(p, name))
            return false;
    return true;
}

static bool names(const Fl__WorkerSpec *s, const char *name)
{
    const char *n;

    for (size_t i = 0; (n = nth(s, i)); i++)
        if (strcmp(n, name) == 0)
            return true;
    return false;
}

/* ---- starts that wait ---- */

static void wait_free(struct wait *w)
{
    DL_DELETE(w->of->waits, w);
    w->of->n_waits--;
    explicit_bzero(w->spec->key.data, w->spec->key.len);
    fl__worker_spec__free_unpacked(w->spec, NULL);
    free(w);
}

static void answer(struct wait *w, enum fl_status st, const struct fl_err *err)
{
    struct call_req *req = w->req;

    w->req = NULL;
    if (st == FL_OK)
        call_reply(req, (struct fl_bytes){ 0 }, (struct fl_bytes){ 0 });
    else
        call_fail(req, err);
}

static void refuse(struct wait *w, const struct fl_err *why)
{
    fl_warn("worker not started role=%s rank=%u why=\"%s\"", w->spec->role, w->spec->rank,
            why->text);
    answer(w, why->status, why);
    wait_free(w);
}

static void on_unwanted(void *arg, struct call_req *req)
{
    struct fl_err err;

    (void)req;
    fl_fail(&err, FL_AGAIN,
            "its packages are still on their way"); /* and go on: it is asked again */
    refuse(arg, &err);
}

static void start_ready(struct packages *p)
{
    struct wait *w, *next;
    struct fl_err err;

    DL_FOREACH_SAFE (p->waits, w, next) {
        if (!node_packages_ready(p, w->spec))
            continue;
        enum fl_status st = node_may_start(p->node)
                                ? worker_start(p->node, w->spec, &err)
                                : fl_fail(&err, FL_CANCELLED, "node %s is ending", p->node->name);

        if (st != FL_OK) {
            refuse(w, &err);
        } else {
            answer(w, FL_OK, NULL);
            wait_free(w);
        }
    }
}

void node_packages_drop(struct packages *p)
{
    struct fl_err err;

    fl_fail(&err, FL_UNREACHABLE, "the stream has ended");
    while (p && p->waits)
        refuse(p->waits, &err);
}

/* ---- one on its way ---- */

static void package_free(struct package *k)
{
    fl_timer_cancel(&k->again);
    if (k->fd >= 0)
        close(k->fd);
    (void)unlink(k->part);
    if (k->of)
        DL_DELETE(k->of->coming, k);
    free(k);
}

/* err as it was met; what can be tried again later keeps its status. */
static void failed(struct package *k, const struct fl_err *why)
{
    struct packages *p = k->of;
    bool later = why->status == FL_UNREACHABLE || why->status == FL_CANCELLED ||
                 why->status == FL_TIMEOUT || why->status == FL_STALE;
    char name[sizeof(k->name)];
    struct wait *w, *next;
    struct fl_err err = *why;

    (void)FL_COPY(name, k->name);
    package_free(k);
    if (!later)
        fl_fail(&err, FL_CORRUPT, "package gcs://%s on node %s: %.160s", name, p->node->name,
                why->text);
    DL_FOREACH_SAFE (p->waits, w, next)
        if (names(w->spec, name))
            refuse(w, &err);
}

static void unpack(struct fl_work *work)
{
    static const struct unpack_limits limits = UNPACK_LIMITS;
    struct package *k = container_of(work, struct package, work);

    k->got = fl_tree_remove(k->fresh, &k->err);
    if (k->got == FL_OK)
        k->got = fl_mkdirs(k->fresh, &k->err);
    if (k->got == FL_OK)
        k->got = unpack_zip(k->part, k->fresh, &limits, &k->err);
    if (k->got == FL_OK && rename(k->fresh, k->path) < 0)
        k->got = fl_fail_errno(&k->err, "rename %s", k->fresh);
    if (k->got != FL_OK)
        (void)fl_tree_remove(k->fresh, NULL);
}

static void unpacked(struct fl_work *work, enum fl_status st)
{
    struct package *k = container_of(work, struct package, work);
    struct packages *p = k->of;

    k->unpacking = false;
    if (!p) {
        package_free(k);
        return;
    }
    if (st != FL_OK)
        fl_fail(&k->err, st, "not unpacked");
    else
        st = k->got;
    if (st != FL_OK) {
        struct fl_err err = k->err;

        failed(k, &err);
        return;
    }
    fl_info("package unpacked name=%s bytes=%llu", k->name, (unsigned long long)k->offset);
    package_free(k);
    start_ready(p);
}

static void read_on(struct package *k);

static void on_again(struct fl_timer *t, uint64_t now_ns)
{
    (void)now_ns;
    read_on(container_of(t, struct package, again));
}

static enum fl_status take_piece(struct package *k, const struct wire_msg *reply, bool *all,
                                 struct fl_err *err)
{
    Fl__PackagePiece *m =
        pb_unpack(&fl__package_piece__descriptor, reply->body, reply->head.body_bytes, err);
    uint64_t total = m ? m->total : 0, n = reply->head.blob_bytes;

    if (!m)
        return FL_CORRUPT;
    fl__package_piece__free_unpacked(m, NULL);
    if (total > TOTAL_MAX || n > total - k->offset || (n == 0 && k->offset < total))
        return fl_fail(err, FL_CORRUPT, "the head gave %llu bytes from %llu on, of %llu",
                       (unsigned long long)n, (unsigned long long)k->offset,
                       (unsigned long long)total);
    ssize_t w = FL_FAULT("package.part") ? (errno = ENOSPC, -1)
                                         : pwrite(k->fd, reply->blob, n, (off_t)k->offset);
    if (w != (ssize_t)n)
        return fl_fail_errno(err, "write %s", k->part);
    k->offset += n;
    *all = k->offset == total;
    return FL_OK;
}

static void on_piece(struct call_op *op, enum fl_status st, const struct wire_msg *reply,
                     const struct fl_err *why)
{
    struct package *k = container_of(op, struct package, op);
    struct fl_err err;
    bool all = false;

    k->calling = false;
    if (!k->of) {
        package_free(k);
        return;
    }
    if (st != FL_OK)
        err = *why;
    else
        st = take_piece(k, reply, &all, &err);
    if (st != FL_OK) {
        failed(k, &err);
    } else if (all) {
        k->unpacking = true;
        k->work = (struct fl_work){ .work = unpack, .done = unpacked };
        fl_work_start(k->of->node->loop, &k->work);
    } else {
        read_on(k);
    }
}

static void read_on(struct package *k)
{
    struct node *n = k->of->node;
    Fl__PackageRead m = FL__PACKAGE_READ__INIT;
    struct fl_err err;

    m.name = k->name;
    m.offset = k->offset;
    k->op = (struct call_op){ .done = on_piece };
    enum fl_status st =
        node_uplink_call(n->up, FL_PACKAGE_READ, LANE_PACKAGES,
                         fl_loop_now_ns(n->loop) + READ_MS * 1000000ull, &m.base, &k->op, &err);

    k->calling = st == FL_OK;
    if (st == FL_AGAIN)
        fl_timer_arm_in(n->loop, &k->again, AGAIN_MS);
    else if (st != FL_OK)
        failed(k, &err);
}

/* ---- room ---- */

static bool in_use(const struct packages *p, const char *folder)
{
    size_t n = strlen(folder);

    for (const struct worker *w = p->node->workers; w; w = w->hh.next) {
        const char *name;

        for (size_t i = 0; (name = nth(w->spec, i)); i++)
            if (strncmp(name, folder, n) == 0 && (!name[n] || strcmp(name + n, ".zip") == 0))
                return true;
    }
    return false;
}

/* The longest unused goes; its folder's time is that of its making, which is near enough. */
static void sweep(struct packages *p)
{
    char path[FL_PATH_MAX], oldest[FL_PATH_MAX] = "";
    time_t when = 0;
    unsigned unused = 0;
    struct dirent *e;
    struct stat sb;
    DIR *d = opendir(p->dir);

    while (d && (e = readdir(d))) {
        if (e->d_name[0] == '.' || in_use(p, e->d_name) ||
            fl_path(path, NULL, "%s/%s", p->dir, e->d_name) != FL_OK || lstat(path, &sb) < 0 ||
            !S_ISDIR(sb.st_mode))
            continue;
        unused++;
        if (!oldest[0] || sb.st_mtime < when) {
            when = sb.st_mtime;
            (void)FL_COPY(oldest, path);
        }
    }
    if (d)
        closedir(d);
    if (unused > PACKAGES_KEPT && fl_tree_remove(oldest, NULL) == FL_OK)
        fl_info("package dropped path=%s", oldest);
}

/* ---- asking ---- */

static enum fl_status begin(struct packages *p, const char *name, struct fl_err *err)
{
    struct package *k;

    DL_FOREACH (p->coming, k)
        if (strcmp(k->name, name) == 0)
            return FL_OK;
    if (!name_ok(name))
        return fl_fail(err, FL_CORRUPT, "\"%.80s\" is no name of a package", name);
    sweep(p);
    k = FL_FAULT("package.new") ? NULL : calloc(1, sizeof(*k));
    if (!k)
        return fl_fail(err, FL_EXHAUSTED, "no memory for package %s", name);
    k->again.fire = on_again;
    (void)FL_COPY(k->name, name);
    enum fl_status st = fl_path(k->part, err, "%s/.%s.part", p->dir, name);
    if (st == FL_OK)
        st = fl_path(k->fresh, err, "%s/.%s.new", p->dir, name);
    if (st == FL_OK && !node_package_path(p, name, k->path))
        st = fl_fail(err, FL_INVALID, "the path of package %s is too long", name);
    k->fd = st == FL_OK ? open(k->part, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    if (st == FL_OK && k->fd < 0)
        st = fl_fail_errno(err, "make %s", k->part);
    if (st != FL_OK) {
        free(k);
        return st;
    }
    k->of = p;
    DL_APPEND(p->coming, k);
    fl_info("package is read from the head name=%s", name);
    read_on(k);
    return FL_OK;
}

void node_packages_start(struct packages *p, struct call_req *req, Fl__WorkerSpec *spec)
{
    struct wait *w = p->n_waits < PACKAGE_WAITS_MAX ? calloc(1, sizeof(*w)) : NULL;
    const char *name;
    struct fl_err err;

    if (!w) {
        fl_fail(&err, FL_AGAIN, "%u starts wait for packages already", p->n_waits);
        call_fail(req, &err);
        explicit_bzero(spec->key.data, spec->key.len);
        fl__worker_spec__free_unpacked(spec, NULL);
        return;
    }
    *w = (struct wait){ .of = p, .req = req, .spec = spec };
    DL_APPEND(p->waits, w);
    p->n_waits++;
    call_on_unwanted(req, on_unwanted, w);
    /* A package that cannot even be begun refuses all that wait for it, this one too. */
    for (size_t i = 0; (name = nth(spec, i)); i++) {
        struct wait *still;

        if (!is_here(p, name) && begin(p, name, &err) != FL_OK) {
            refuse(w, &err);
            return;
        }
        DL_SEARCH_SCALAR(p->waits, still, req, req);
        if (!still)
            return;
    }
    start_ready(p);
}

/* ---- life ---- */

enum fl_status node_packages_create(struct node *n, struct packages **out, struct fl_err *err)
{
    struct packages *p = calloc(1, sizeof(*p));
    char path[FL_PATH_MAX];
    struct dirent *e;
    DIR *d;

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for packages");
    p->node = n;
    enum fl_status st = fl_path(p->dir, err, "%s/packages", n->ident.dir);
    if (st == FL_OK)
        st = fl_mkdirs(p->dir, err);
    if (st != FL_OK) {
        free(p);
        return st;
    }
    d = opendir(p->dir);
    while (d && (e = readdir(d))) /* of an earlier start, not finished */
        if (e->d_name[0] == '.' && e->d_name[1] && e->d_name[1] != '.' &&
            fl_path(path, NULL, "%s/%s", p->dir, e->d_name) == FL_OK)
            (void)fl_tree_remove(path, NULL);
    if (d)
        closedir(d);
    *out = p;
    return FL_OK;
}

void node_packages_destroy(struct packages *p)
{
    struct package *k, *next;

    if (!p)
        return;
    node_packages_drop(p);
    DL_FOREACH_SAFE (p->coming, k, next) {
        DL_DELETE(p->coming, k);
        k->of = NULL;
        if (k->calling)
            call_cancel(&k->op); /* comes back, and frees it */
        else if (!k->unpacking)
            package_free(k);
    }
    free(p);
}
