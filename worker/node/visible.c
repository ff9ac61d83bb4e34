#include "worker/node/visible.h"
#include "common/base/str.h"
#include <ctype.h>
#include <stdlib.h>
#include <strings.h>

static bool is_number(const char *s)
{
    return *s && strspn(s, "0123456789") == strlen(s) && strlen(s) < 6;
}

static bool is_uuid(const char *s)
{
    return !strncasecmp(s, "GPU-", 4) || !strncasecmp(s, "MIG-", 4);
}

/* Without the white space around it; false: it does not fit. */
static bool entry_copy(char out[NODE_DEVICE_ID], const char *from, size_t len)
{
    while (len && isspace((unsigned char)*from)) {
        from++;
        len--;
    }
    while (len && isspace((unsigned char)from[len - 1]))
        len--;
    if (len >= NODE_DEVICE_ID)
        return false;
    memcpy(out, from, len);
    out[len] = 0;
    return true;
}

static enum fl_status take(const char *what, const char *list, struct node_visible *v,
                           const char *from, size_t len, struct fl_err *err)
{
    char *id = v->id[v->n];

    if (v->n == NODE_DEVICES_MAX)
        return fl_fail(err, FL_INVALID, "%s=%.80s...: more than %d devices", what, list,
                       NODE_DEVICES_MAX);
    if (!entry_copy(id, from, len) || (!is_number(id) && !is_uuid(id)))
        return fl_fail(err, FL_INVALID,
                       "%s=%.80s: entry %zu (\"%.*s\") is neither a number nor a GPU UUID", what,
                       list, v->n + 1, (int)(len < 60 ? len : 60), from);
    for (size_t i = 0; i < v->n; i++)
        if (!strcasecmp(v->id[i], id))
            return fl_fail(err, FL_INVALID, "%s=%.80s: %s is there twice", what, list, id);
    v->n++;
    return FL_OK;
}

enum fl_status node_visible_parse(const char *what, const char *list, struct node_visible *out,
                                  struct fl_err *err)
{
    out->n = 0;
    out->set = list != NULL;
    if (!list || !*list || !strcmp(list, "NoDevFiles") || !strcmp(list, "-1"))
        return FL_OK;
    for (const char *at = list;; at++) {
        size_t len = strcspn(at, ",");

        FL_TRY(take(what, list, out, at, len, err));
        at += len;
        if (!*at)
            return FL_OK;
    }
}

enum fl_status node_visible_find(const char *entry, const char *const *uuids, size_t n, size_t *out,
                                 struct fl_err *err)
{
    size_t found = n;

    if (is_number(entry)) {
        size_t i = (size_t)atoi(entry);

        if (i >= n)
            return fl_fail(err, FL_NOT_FOUND,
                           "device %s is not there: this machine has %zu, numbered from 0", entry,
                           n);
        *out = i;
        return FL_OK;
    }
    for (size_t i = 0; i < n; i++) {
        if (strncasecmp(uuids[i], entry, strlen(entry)))
            continue;
        if (found < n)
            return fl_fail(err, FL_INVALID, "device %s fits %s and %s: write more of it", entry,
                           uuids[found], uuids[i]);
        found = i;
    }
    if (found == n)
        return fl_fail(err, FL_NOT_FOUND,
                       "no device of this machine has the UUID %s; nvidia-smi -L lists them",
                       entry);
    *out = found;
    return FL_OK;
}

int node_visible_index(const char *list, const char *id)
{
    char entry[NODE_DEVICE_ID];
    int n = 0;

    for (const char *at = list; *at; n++) {
        size_t len = strcspn(at, ",");

        if (entry_copy(entry, at, len) && !strcasecmp(entry, id))
            return n;
        at += len;
        at += *at == ',';
    }
    return -1;
}

bool node_truthy(const char *value)
{
    return value && (!strcmp(value, "1") || !strcasecmp(value, "true") ||
                     !strcasecmp(value, "yes") || !strcasecmp(value, "on"));
}
