#include "cli/hosts.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/file.h"
#include "common/base/str.h"

enum { FILE_BYTES = 4 << 20 };

const char *host_bare(const char *name)
{
    const char *at = strrchr(name, '@');

    return at ? at + 1 : name;
}

void hosts_free(struct hosts *h)
{
    free(h->names);
    *h = (struct hosts){ 0 };
}

/* A name goes into a command line: no option, no shell's letters. */
static bool is_name(const char *s)
{
    return *s && *s != '-' && s[strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_@:")] == 0;
}

static enum fl_status add(struct hosts *h, const char *name, struct fl_err *err)
{
    if (!is_name(name))
        return fl_fail(err, FL_INVALID, "'%.80s' is no host name", name);
    for (size_t i = 0; i < h->n; i++)
        if (strcmp(h->names[i], name) == 0)
            return FL_OK;
    if (h->n == HOSTS_MAX)
        return fl_fail(err, FL_EXHAUSTED, "more than %d hosts", HOSTS_MAX);
    if ((h->n & (h->n - 1)) == 0) { /* room grows by doubling */
        void *p = realloc(h->names, (h->n ? 2 * h->n : 1) * sizeof(*h->names));

        if (!p)
            return fl_fail(err, FL_EXHAUSTED, "no memory for %zu hosts", h->n + 1);
        h->names = p;
    }
    snprintf(h->names[h->n++], HOST_BYTES, "%s", name);
    return FL_OK;
}

/* word may hold brackets: the first is opened here, the rest by the calls for each number. */
static enum fl_status expand(struct hosts *h, const char *word, struct fl_err *err)
{
    const char *open = strchr(word, '['), *close = open ? strchr(open, ']') : NULL;
    char name[HOST_BYTES];

    if (!open)
        return strlen(word) < HOST_BYTES ? add(h, word, err) : fl_fail(err, FL_INVALID, "'%.40s...' is longer than a host name", word);
    if (!close)
        return fl_fail(err, FL_INVALID, "'%.80s': ] is missing", word);
    for (const char *p = open + 1; p < close; p += *p == ',') {
        char *end;
        unsigned long from = isdigit((unsigned char)*p) ? strtoul(p, &end, 10) : 0, to = from;
        int width = 0;

        if (!isdigit((unsigned char)*p))
            return fl_fail(err, FL_INVALID, "'%.80s': a number is wanted at '%.10s'", word, p);
        width = (int)(end - p);
        p = end;
        if (*p == '-') {
            to = strtoul(p + 1, &end, 10);
            if (end == p + 1)
                return fl_fail(err, FL_INVALID, "'%.80s': a number is wanted behind the dash", word);
            p = end;
        }
        if ((*p != ',' && p != close) || to < from || to - from >= HOSTS_MAX)
            return fl_fail(err, FL_INVALID, "'%.80s': %lu-%lu is no range of at most %d", word, from, to, HOSTS_MAX);
        for (unsigned long i = from; i <= to; i++) {
            if (snprintf(name, sizeof(name), "%.*s%0*lu%s", (int)(open - word), word, width, i, close + 1) >= HOST_BYTES)
                return fl_fail(err, FL_INVALID, "'%.40s...' is longer than a host name", word);
            FL_TRY(expand(h, name, err));
        }
    }
    return close == open + 1 ? fl_fail(err, FL_INVALID, "'%.80s': nothing between the brackets", word) : FL_OK;
}

enum fl_status hosts_parse(const char *list, struct hosts *h, struct fl_err *err)
{
    const char *p = list;
    char word[1024];

    while (*p) {
        size_t n = 0;
        int depth = 0;

        p += strspn(p, ", \t\r\n");
        for (; p[n] && (depth > 0 || !strchr(", \t\r\n", p[n])); n++)
            depth += p[n] == '[' ? 1 : p[n] == ']' ? -1 : 0;
        if (n == 0)
            continue;
        if (n >= sizeof(word))
            return fl_fail(err, FL_INVALID, "'%.40s...' is longer than %zu bytes", p, sizeof(word) - 1);
        memcpy(word, p, n);
        word[n] = 0;
        FL_TRY(expand(h, word, err));
        p += n;
    }
    return FL_OK;
}

enum fl_status hosts_read(const char *path, struct hosts *h, struct fl_err *err)
{
    char *text, *save = NULL;
    size_t len, before = h->n;
    enum fl_status st = fl_file_read(path, FILE_BYTES, &text, &len, err);
    int number = 0;

    if (st != FL_OK)
        return st;
    for (char *line = text, *next; line && st == FL_OK; line = next) {
        struct fl_err why = { 0 };
        char *colon;

        next = strchr(line, '\n');
        if (next)
            *next++ = 0;
        number++;
        line[strcspn(line, "#")] = 0;
        line = strtok_r(line, " \t\r", &save); /* slots, sizes, ranks: not ours */
        if (!line)
            continue;
        colon = strchr(line, ':');
        if (colon && !strchr(colon + 1, ':')) /* "host:8"; two and more are an IPv6 address */
            *colon = 0;
        st = hosts_parse(line, h, &why);
        if (st != FL_OK)
            st = fl_fail(err, st, "%s line %d: %s", path, number, why.text);
    }
    free(text);
    if (st == FL_OK && h->n == before)
        st = fl_fail(err, FL_INVALID, "%s names no host", path);
    return st;
}
