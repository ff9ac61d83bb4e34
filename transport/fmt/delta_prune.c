/* transport/fmt/delta_prune.c - what a base has made superfluous
 *
 * Folders named as we name them are removed, and nothing else. Whoever has mapped their files reads
 * on. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/str.h"
#include "transport/fmt/delta_priv.h"

struct ours { /* a name in a folder of versions */
    bool base, part;
    int64_t version;
};

static bool name_is_ours(const char *name, struct ours *out)
{
    static const char *const kinds[] = { "weight_v", "base_v" };

    for (unsigned i = 0; i < FL_LEN(kinds); i++) {
        size_t n = strlen(kinds[i]);
        char digits[7];

        if (strncmp(name, kinds[i], n) != 0 || strspn(name + n, "0123456789") != 6)
            continue;
        fl_copy(digits, sizeof(digits), name + n);
        *out = (struct ours){ .base = i == 1, .part = i == 1 && !strcmp(name + n + 6, DELTA_PART) };
        return (name[n + 6] == '\0' || out->part) &&
               fl_parse_i64(digits, 0, 999999, &out->version, NULL) == FL_OK;
    }
    return false;
}

struct pruning {
    int64_t base;
    bool other; /* a base_v: then the weight_v of that version goes, too */
};

static bool goes(const struct pruning *p, const struct ours *o)
{
    return o->part || o->version < p->base || (o->version == p->base && p->other && !o->base);
}

/* Not a link, and not a file: those are somebody else's. */
static enum fl_status remove_folder(const char *path, struct fl_err *err)
{
    struct stat s;

    if (lstat(path, &s) < 0)
        return errno == ENOENT ? FL_OK : fl_fail_errno(err, "look at %s", path);
    if (!S_ISDIR(s.st_mode))
        return FL_OK;
    if (FL_FAULT("fmt.prune"))
        return fl_fail_errno(err, "remove folder %s", path);
    return fl_tree_remove(path, err);
}

/* What cannot be removed does not keep the rest: the last one's reason is told. */
static enum fl_status prune(const char *dir, const struct pruning *p, struct fl_err *err)
{
    DIR *d = opendir(dir);
    enum fl_status st = FL_OK, one;
    char path[FL_PATH_MAX];
    struct dirent *e;
    struct ours o;

    if (!d)
        return fl_fail_errno(err, "open folder %s", dir);
    while ((e = readdir(d))) {
        if (!name_is_ours(e->d_name, &o) || !goes(p, &o))
            continue;
        one = fl_path(path, err, "%s/%s", dir, e->d_name);
        if (one == FL_OK)
            one = remove_folder(path, err);
        st = one == FL_OK ? st : one;
    }
    closedir(d);
    return st;
}

enum fl_status delta_prune(const char *dir, int64_t base, struct fl_err *err)
{
    FL_AUTO(delta_version) struct delta_version *v = NULL;
    struct pruning p = { .base = base };
    enum fl_status st = delta_base_open(dir, base, &v, err);

    p.other = st == FL_OK;
    if (st == FL_NOT_FOUND)
        st = delta_open(dir, base, &v, err);
    if (st != FL_OK)
        return st;
    if (delta_base_of(v) != DELTA_NO_BASE)
        return fl_fail(err, FL_INVALID, "version %lld in %s is no base: it needs version %lld",
                       (long long)base, dir, (long long)delta_base_of(v));
    return prune(dir, &p, err);
}

enum fl_status delta_prune_all(const char *dir, struct fl_err *err)
{
    struct pruning all = { .base = INT64_MAX };

    FL_TRY(prune(dir, &all, err));
    if (rmdir(dir) < 0 && errno != ENOTEMPTY && errno != ENOENT)
        return fl_fail_errno(err, "remove folder %s", dir);
    return FL_OK;
}
