#include "cli/ray_pack.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "common/base/file.h"
#include "common/base/str.h"

enum { MAX_DEPTH = 64, MAX_RULES = 512, MAX_FOLDERS = 8192, SHOWN = 5, UPLOAD_MS = 600000, LOCAL_BYTES = 30, CENTRAL_BYTES = 46, END_BYTES = 22,
       LARGE_FILE = 5 << 20, DOS_1980 = 0x21, NAME_BYTES = 40 };

/* ==== a zip, stored: the bytes of a program are few, and loopback is fast ========================== */
struct bytes { unsigned char *data; size_t len, cap; };

static bool grow(struct bytes *b, size_t more)
{
    size_t cap = b->cap ? b->cap : 1 << 16;

    while (cap < b->len + more)
        cap *= 2;
    unsigned char *p = cap == b->cap ? b->data : realloc(b->data, cap);

    if (!p)
        return false;
    b->data = p;
    b->cap = cap;
    return true;
}

static void put(struct bytes *b, uint64_t v, size_t n) /* little endian, n bytes; there is room */
{
    for (; n > 0; n--, v >>= 8)
        b->data[b->len++] = (unsigned char)v;
}

static uint32_t crc32_of(const unsigned char *p, size_t n)
{
    static uint32_t table[256];
    uint32_t c = ~0u;

    for (uint32_t i = 0; i < 256 && !table[255]; i++) {
        uint32_t v = i;

        for (int k = 0; k < 8; k++)
            v = v & 1 ? 0xedb88320u ^ (v >> 1) : v >> 1;
        table[i] = v;
    }
    while (n--)
        c = table[(c ^ *p++) & 255] ^ (c >> 8);
    return ~c;
}

struct rule { char pattern[256]; size_t base; }; /* base: length of the folder it counts in */
struct folder { /* of those that are measured; a large file too */
    char *name; /* from the root on */
    uint64_t bytes, largest_child;
    size_t up; /* SIZE_MAX: the root */
    bool shown;
};
struct pack {
    struct bytes zip, central;
    uint32_t files;
    struct rule *rules;
    size_t n_rules;
    struct folder *folders; /* while it is measured: nothing is read then */
    size_t n_folders;
    uint64_t total;
    struct fl_err *err;
};

static enum fl_status add_entry(struct pack *p, const char *name, const unsigned char *data, size_t len, unsigned mode)
{
    size_t n = strlen(name);
    uint32_t crc = crc32_of(data, len);
    size_t at = p->zip.len;

    if (p->zip.len + p->central.len + len > RAY_PACK_MAX_BYTES || ++p->files > RAY_PACK_MAX_FILES)
        return fl_fail(p->err, FL_EXHAUSTED, "Package exceeds the maximum size of %d MiB with %.120s (%zu bytes)", RAY_PACK_MAX_BYTES >> 20, name, len);
    if (!grow(&p->zip, LOCAL_BYTES + n + len) || !grow(&p->central, CENTRAL_BYTES + n))
        return fl_fail(p->err, FL_EXHAUSTED, "no memory for a package of %zu bytes", p->zip.len + len);
    put(&p->zip, 0x04034b50, 4);
    put(&p->central, 0x02014b50, 4);
    put(&p->central, 0x0314, 2); /* made by: Unix, so that modes are read */
    for (int i = 0; i < 2; i++) {
        struct bytes *b = i ? &p->central : &p->zip;

        put(b, 20, 2);
        put(b, 0x800, 2); /* names are UTF-8 */
        put(b, 0, 2);     /* stored */
        put(b, (uint64_t)DOS_1980 << 16, 4);
        put(b, crc, 4);
        put(b, len, 4);
        put(b, len, 4);
        put(b, n, 2);
        put(b, 0, 2);
    }
    put(&p->central, 0, 6); /* comment, disk, attributes inside */
    put(&p->central, (uint64_t)mode << 16, 4);
    put(&p->central, at, 4);
    memcpy(p->zip.data + p->zip.len, name, n);
    memcpy(p->central.data + p->central.len, name, n);
    p->zip.len += n;
    p->central.len += n;
    if (len)
        memcpy(p->zip.data + p->zip.len, data, len);
    p->zip.len += len;
    return FL_OK;
}

static enum fl_status finish(struct pack *p)
{
    size_t at = p->zip.len;

    if (!grow(&p->zip, p->central.len + END_BYTES))
        return fl_fail(p->err, FL_EXHAUSTED, "no memory for a package of %zu bytes", at);
    memcpy(p->zip.data + at, p->central.data, p->central.len);
    p->zip.len += p->central.len;
    put(&p->zip, 0x06054b50, 4);
    put(&p->zip, 0, 4);
    put(&p->zip, p->files, 2);
    put(&p->zip, p->files, 2);
    put(&p->zip, p->central.len, 4);
    put(&p->zip, at, 4);
    put(&p->zip, 0, 2);
    return FL_OK;
}

/* ==== what belongs into it ========================================================================= */
static void add_rule(struct pack *p, const char *pattern, size_t base)
{
    size_t n = strcspn(pattern, "\r\n");

    while (n && (pattern[n - 1] == ' ' || pattern[n - 1] == '/'))
        n--;
    if (!n || n >= sizeof(p->rules->pattern) || pattern[0] == '#' || pattern[0] == '!' || p->n_rules == MAX_RULES)
        return;
    p->rules[p->n_rules] = (struct rule){ .base = base };
    memcpy(p->rules[p->n_rules++].pattern, pattern, n);
}

static bool left_out(const struct pack *p, const char *path, const char *name)
{
    for (size_t i = 0; i < p->n_rules; i++) {
        const char *pattern = p->rules[i].pattern, *rest = path + p->rules[i].base;
        bool deep = strchr(pattern, '/') != NULL; /* counts from its folder on, else at any depth */

        while (*rest == '/')
            rest++;
        if (fnmatch(pattern + (*pattern == '/'), deep ? rest : name, deep ? FNM_PATHNAME : 0) == 0)
            return true;
    }
    return false;
}

static void read_gitignore(struct pack *p, const char *dir)
{
    char path[FL_PATH_MAX], line[512];
    FILE *f = fl_path(path, NULL, "%s/.gitignore", dir) == FL_OK ? fopen(path, "re") : NULL;

    while (f && fgets(line, sizeof(line), f))
        add_rule(p, line, strlen(dir));
    if (f)
        fclose(f);
}

static int plain(const struct dirent *e)
{
    return strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
}

static enum fl_status add_file(struct pack *p, const char *path, const char *name, const struct stat *sb)
{
    char *data = NULL;
    size_t len = 0;
    enum fl_status st = FL_OK;

    if (sb->st_size > 0)
        st = fl_file_read(path, RAY_PACK_MAX_BYTES, &data, &len, p->err);
    if (st == FL_OK)
        st = add_entry(p, name, (const unsigned char *)data, len, sb->st_mode & 0xffff);
    free(data);
    return st;
}

/* What it adds to the package, to the byte. */
static void count_file(struct pack *p, const char *name, uint64_t len, size_t folder)
{
    uint64_t bytes = LOCAL_BYTES + CENTRAL_BYTES + 2 * strlen(name) + len;

    p->total += bytes;
    p->files++;
    for (; folder != SIZE_MAX; folder = p->folders[folder].up)
        p->folders[folder].bytes += bytes;
}

/* The record of a folder; beyond the bound those inside count for the folder around them. */
static size_t count_folder(struct pack *p, const char *name, size_t up)
{
    char *copy = p->n_folders < MAX_FOLDERS ? strdup(name) : NULL;

    if (!copy)
        return up;
    p->folders[p->n_folders] = (struct folder){ .name = copy, .up = up };
    return p->n_folders++;
}

static enum fl_status add_tree(struct pack *p, const char *dir, const char *prefix, unsigned depth, size_t folder);

static enum fl_status add_one(struct pack *p, const char *path, const char *name, const struct stat *sb, unsigned depth,
                              size_t folder)
{
    bool is_dir = S_ISDIR(sb->st_mode);

    if (!is_dir && !S_ISREG(sb->st_mode))
        return FL_OK; /* sockets and pipes do not travel */
    if (p->folders) {
        if (!is_dir && sb->st_size >= LARGE_FILE) /* named like a folder: leaving it out alone may do */
            folder = count_folder(p, name, folder);
        count_file(p, name, is_dir ? 0 : (uint64_t)sb->st_size, folder);
        return is_dir ? add_tree(p, path, name, depth + 1, count_folder(p, name, folder)) : FL_OK;
    }
    if (!is_dir)
        return add_file(p, path, name, sb);
    FL_TRY(add_entry(p, name, NULL, 0, sb->st_mode & 0xffff));
    return add_tree(p, path, name, depth + 1, SIZE_MAX);
}

static enum fl_status add_tree(struct pack *p, const char *dir, const char *prefix, unsigned depth, size_t folder)
{
    size_t rules = p->n_rules;
    struct dirent **list;
    enum fl_status st = FL_OK;
    int n;

    if (depth == MAX_DEPTH)
        return fl_fail(p->err, FL_INVALID, "%.160s: more than %d folders deep", dir, MAX_DEPTH);
    n = scandir(dir, &list, plain, alphasort); /* in order: the same folder gives the same package */
    if (n < 0)
        return fl_fail_errno(p->err, "read %s", dir);
    read_gitignore(p, dir);
    for (int i = 0; i < n; i++) {
        char path[FL_PATH_MAX], name[FL_PATH_MAX];
        struct stat sb;

        if (st == FL_OK)
            st = fl_path(path, p->err, "%s/%s", dir, list[i]->d_name);
        if (st == FL_OK && !left_out(p, path, list[i]->d_name) && stat(path, &sb) == 0) {
            st = fl_path(name, p->err, "%s%s%s", prefix, list[i]->d_name, S_ISDIR(sb.st_mode) ? "/" : "");
            if (st == FL_OK)
                st = add_one(p, path, name, &sb, depth, folder);
        }
        free(list[i]);
    }
    free(list);
    p->n_rules = rules;
    return st;
}

/* ==== how large it would be ======================================================================== */
/* The largest folder that is not shown yet, holds none that is and lies in none; one that is almost all of the
 * folder around it stands for that. */
static struct folder *next_largest(struct pack *p)
{
    struct folder *best = NULL;

    for (size_t i = 0; i < p->n_folders; i++) {
        struct folder *f = &p->folders[i];
        bool inside = f->shown;

        for (size_t up = f->up; up != SIZE_MAX && !inside; up = p->folders[up].up)
            inside = p->folders[up].shown;
        if (!inside && f->largest_child * 10 < f->bytes * 9 && (!best || f->bytes > best->bytes))
            best = f;
    }
    for (size_t up = best ? best->up : SIZE_MAX; up != SIZE_MAX; up = p->folders[up].up)
        p->folders[up].largest_child = UINT64_MAX / 10; /* holds one that is shown */
    if (best)
        best->shown = true;
    return best;
}

static void show_largest(struct pack *p, size_t prefix_len, FILE *say)
{
    json_t *leave = json_array();
    uint64_t left = p->total;
    struct folder *f;
    char size[16];

    for (size_t i = p->n_folders; i-- > 0;) { /* children come after their parents */
        size_t up = p->folders[i].up;

        if (up != SIZE_MAX && p->folders[i].bytes > p->folders[up].largest_child)
            p->folders[up].largest_child = p->folders[i].bytes;
    }
    fputs("largest folders and files:\n", say);
    for (size_t i = 0; i < SHOWN && (f = next_largest(p)); i++) {
        const char *name = f->name + prefix_len;

        fprintf(say, "  %10s  %s\n", fl_bytes_text(size, f->bytes), name);
        if (left > RAY_PACK_MAX_BYTES)
            json_array_append_new(leave, json_sprintf("/%s", name));
        left -= f->bytes;
    }
    char *list = json_dumps(leave, 0);

    fprintf(say, "leave them out with: --runtime-env-json='{\"excludes\": %s}'\n", list ? list : "[]");
    free(list);
    json_decref(leave);
}

static enum fl_status measure(struct pack *p, const char *dir, const char *prefix, FILE *say)
{
    char total[16], most[16];
    enum fl_status st;

    p->folders = calloc(MAX_FOLDERS, sizeof(*p->folders));
    if (!p->folders)
        return fl_fail(p->err, FL_EXHAUSTED, "no memory to measure %.160s", dir);
    p->total = END_BYTES;
    st = add_tree(p, dir, prefix, 0, SIZE_MAX);
    if (st == FL_OK && (p->total > RAY_PACK_MAX_BYTES || p->files > RAY_PACK_MAX_FILES)) {
        show_largest(p, strlen(prefix), say);
        st = fl_fail(p->err, FL_EXHAUSTED, "Package at %.100s exceeds the maximum size: it has %s in %u files, at most %s and %d files are taken",
                     dir, fl_bytes_text(total, p->total), p->files, fl_bytes_text(most, RAY_PACK_MAX_BYTES), RAY_PACK_MAX_FILES);
    }
    for (size_t i = 0; i < p->n_folders; i++)
        free(p->folders[i].name);
    free(p->folders);
    p->folders = NULL;
    p->n_folders = 0;
    p->files = 0;
    return st;
}

static enum fl_status make(const char *dir, const char *prefix, const json_t *excludes, FILE *say, struct bytes *out,
                           struct fl_err *err)
{
    static const char *const always[] = { ".git", ".venv", "venv", "__pycache__" };
    struct pack p = { .err = err, .rules = calloc(MAX_RULES, sizeof(struct rule)) };
    const json_t *e;
    size_t i;

    if (!p.rules)
        return fl_fail(err, FL_EXHAUSTED, "no memory for a package");
    for (i = 0; i < FL_LEN(always); i++)
        add_rule(&p, always[i], strlen(dir));
    json_array_foreach((json_t *)excludes, i, e)
        add_rule(&p, json_string_value(e) ? json_string_value(e) : "", strlen(dir));
    enum fl_status st = measure(&p, dir, prefix, say);

    if (st == FL_OK)
        st = add_tree(&p, dir, prefix, 0, SIZE_MAX);
    if (st == FL_OK)
        st = finish(&p);
    free(p.rules);
    free(p.central.data);
    if (st == FL_OK)
        *out = p.zip;
    else
        free(p.zip.data);
    return st;
}

/* ==== to the head ================================================================================== */
static enum fl_status upload(const struct cli_cluster *c, const char *name, const struct bytes *zip, struct fl_err *err)
{
    char path[128];
    struct http_answer a = { 0 };
    struct cli_request r;
    enum fl_status st;

    snprintf(path, sizeof(path), "/api/packages/gcs/%s", name);
    FL_TRY(cli_ask(c, "GET", path, NULL, 30000, &a, err));
    unsigned status = a.status;

    http_answer_fini(&a);
    if (status == 200) /* it is there */
        return FL_OK;
    FL_TRY(cli_request(c, "PUT", path, "Content-Type: application/octet-stream", UPLOAD_MS, &r, err));
    r.ask.body = (struct fl_bytes){ zip->data, zip->len };
    st = http_fetch(&r.ask, &a, err);
    if (st == FL_OK && a.status != 200)
        st = fl_fail(err, a.status >= 500 || a.status == 413 ? FL_EXHAUSTED : FL_INVALID, "%s: a package of %zu bytes is answered %u: %.160s", r.url, zip->len, a.status,
                     a.body ? a.body : "");
    http_answer_fini(&a);
    return st;
}

static void package_name(const struct bytes *zip, char name[NAME_BYTES])
{
    snprintf(name, NAME_BYTES, "_ray_pkg_%016llx.zip", (unsigned long long)XXH3_64bits(zip->data, zip->len));
}

static enum fl_status pack_one(const struct cli_cluster *c, const char *given, bool module, const json_t *excludes,
                               FILE *say, json_t **uri, struct fl_err *err)
{
    char dir[4096], prefix[300] = "", name[NAME_BYTES];
    struct bytes zip = { 0 };
    struct stat sb;
    const char *dot = strrchr(given, '.');

    if (strstr(given, "://"))
        return FL_OK;
    if (!realpath(given, dir) || stat(dir, &sb) < 0)
        return fl_fail(err, FL_NOT_FOUND, "working_dir or py_modules: '%.160s': %s", given, strerror(errno));
    if (S_ISDIR(sb.st_mode)) {
        if (module)
            snprintf(prefix, sizeof(prefix), "%.256s/", strrchr(dir, '/') + 1);
        FL_TRY(make(dir, prefix, excludes, say, &zip, err));
    } else if (dot && strcmp(dot, ".zip") == 0) {
        char *text;

        FL_TRY(fl_file_read(dir, RAY_PACK_MAX_BYTES, &text, &zip.len, err));
        zip.data = (unsigned char *)text;
    } else {
        return fl_fail(err, FL_INVALID, "'%.160s' is neither a folder nor a .zip file", given);
    }
    package_name(&zip, name);
    enum fl_status st = upload(c, name, &zip, err);

    free(zip.data);
    if (st == FL_OK)
        *uri = json_sprintf("gcs://%s", name);
    return st;
}

enum fl_status ray_pack_list(const struct cli_cluster *c, const struct ray_pack_file *files, size_t n, char uri[RAY_PACK_URI_BYTES],
                             size_t *bytes, struct fl_err *err)
{
    struct pack p = { .err = err };
    char name[NAME_BYTES];
    enum fl_status st = FL_OK;

    for (size_t i = 0; i < n && st == FL_OK; i++) {
        struct stat sb = { .st_mode = S_IFREG | (files[i].mode & 0777) };

        if (!files[i].path)
            st = add_entry(&p, files[i].name, files[i].data, files[i].len, sb.st_mode);
        else if (stat(files[i].path, &sb) < 0)
            st = fl_fail_errno(err, "%s", files[i].path);
        else
            st = add_file(&p, files[i].path, files[i].name, &sb);
    }
    if (st == FL_OK)
        st = finish(&p);
    if (st == FL_OK && p.zip.len > RAY_PACK_HTTP_BYTES)
        st = fl_fail(err, FL_EXHAUSTED, "the package has %zu bytes, a head of Ray's takes %d", p.zip.len, RAY_PACK_HTTP_BYTES);
    if (st == FL_OK) {
        package_name(&p.zip, name);
        st = upload(c, name, &p.zip, err);
    }
    if (st == FL_OK) {
        snprintf(uri, RAY_PACK_URI_BYTES, "gcs://%s", name);
        *bytes = p.zip.len;
    }
    free(p.central.data);
    free(p.zip.data);
    return st;
}

enum fl_status ray_pack_env(const struct cli_cluster *c, json_t *env, FILE *say, struct fl_err *err)
{
    const char *dir = json_string_value(json_object_get(env, "working_dir"));
    const json_t *excludes = json_object_get(env, "excludes");
    json_t *modules = json_object_get(env, "py_modules"), *uri = NULL;

    if (dir)
        FL_TRY(pack_one(c, dir, false, excludes, say, &uri, err));
    if (uri)
        json_object_set_new(env, "working_dir", uri);
    for (size_t i = 0; i < json_array_size(modules); i++) {
        const char *m = json_string_value(json_array_get(modules, i));

        uri = NULL;
        if (m)
            FL_TRY(pack_one(c, m, true, excludes, say, &uri, err));
        if (uri)
            json_array_set_new(modules, i, uri);
    }
    return FL_OK;
}
