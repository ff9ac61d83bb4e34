#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/base/str.h"
#include "worker/roles/sglang/weights.h"

static bool is_weights(const char *name)
{
    const char *dot = strrchr(name, '.');

    return dot && (!strcmp(dot, ".safetensors") || !strcmp(dot, ".bin") || !strcmp(dot, ".pt") ||
                   !strcmp(dot, ".pth") || strstr(name, ".safetensors.index.json") ||
                   strstr(name, ".bin.index.json"));
}

/* config.json, the tokenizer: SGLang takes the folder for a model. */
static enum fl_status link_rest(const char *model, const char *dir, struct fl_err *err)
{
    char from[FL_PATH_MAX], to[FL_PATH_MAX];
    DIR *d = opendir(model);
    struct dirent *e;
    enum fl_status st = d ? FL_OK : fl_fail_errno(err, "open %s", model);

    while (st == FL_OK && (e = readdir(d))) {
        if (e->d_name[0] == '.' || is_weights(e->d_name))
            continue;
        st = fl_path(from, err, "%s/%s", model, e->d_name);
        if (st == FL_OK)
            st = fl_path(to, err, "%s/%s", dir, e->d_name);
        if (st == FL_OK && symlink(from, to) != 0 && errno != EEXIST)
            st = fl_fail_errno(err, "link %s", to);
    }
    if (d)
        closedir(d);
    return st;
}

static enum fl_status room(const char *dir, uint64_t bytes, struct fl_err *err)
{
    struct statvfs fs;
    char need[16], have[16];

    if (statvfs(dir, &fs) != 0)
        return fl_fail_errno(err, "look at %s", dir);
    uint64_t avail = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (avail >= bytes + (bytes >> 6))
        return FL_OK;
    return fl_fail(err, FL_EXHAUSTED,
                   "%s has %s left, a version takes %s: --sglang-weights-dir names another folder",
                   dir, fl_bytes_text(have, avail), fl_bytes_text(need, bytes));
}

enum fl_status weights_disk_write(const char *dir, const char *model,
                                  const struct weights_version *v, char out[1024],
                                  struct fl_err *err)
{
    char folder[FL_PATH_MAX];
    const struct st_meta meta[] = { { "format", "pt" }, { "weight_version", v->label } };
    enum fl_status st = fl_mkdirs(dir, err);

    if (st == FL_OK)
        st = room(dir, v->bytes, err);
    if (st == FL_OK)
        st = fl_path(folder, err, "%s/weight_v%06ju", dir, (uintmax_t)v->number);
    if (st == FL_OK)
        st = fl_tree_remove(folder, err); /* of an attempt that did not end well */
    if (st != FL_OK)
        return st;
    st = fl_mkdirs(folder, err);
    if (st == FL_OK)
        st = st_write_folder(folder, v->t, v->n, meta, FL_LEN(meta), 0, err);
    if (st == FL_OK)
        st = link_rest(model, folder, err);
    if (st != FL_OK)
        (void)fl_tree_remove(folder, NULL); /* the reason is said already */
    else
        fl_copy(out, 1024, folder);
    return st;
}

void weights_disk_sweep(const char *dir, const char *keep)
{
    char path[FL_PATH_MAX];
    DIR *d = opendir(dir);
    struct dirent *e;

    while (d && (e = readdir(d)))
        if (!strncmp(e->d_name, "weight_v", 8) &&
            fl_path(path, NULL, "%s/%s", dir, e->d_name) == FL_OK &&
            (!keep || strcmp(path, keep) != 0))
            (void)fl_tree_remove(path, NULL); /* tried again after the next version */
    if (d)
        closedir(d);
}
