#include "cli/yaml_print.h"

#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "common/base/str.h"

enum { STEP = 4, WIDTH = 80, KEY_MAX = 123 /* with "!!str" 128, as PyYAML counts */, NOTHING = -1 };

/* ==== the text that grows ========================================================================== */
struct printer {
    FILE *to;
    int column, indent;
    bool white, dashes; /* the last was a space; the line holds indentation and indicators alone */
    bool in_mapping;    /* what comes is the value of a key */
};

static void put(struct printer *p, const char *data, size_t bytes, int columns)
{
    fwrite(data, 1, bytes, p->to);
    p->column += columns;
}

static void end_line(struct printer *p)
{
    fputc('\n', p->to);
    p->column = 0;
    p->white = p->dashes = true;
}

static void new_line(struct printer *p)
{
    int indent = p->indent < 0 ? 0 : p->indent;

    if (!p->dashes || p->column > indent || (p->column == indent && !p->white))
        end_line(p);
    if (p->column < indent) {
        fprintf(p->to, "%*s", indent - p->column, "");
        p->column = indent;
        p->white = true;
    }
}

static void mark(struct printer *p, const char *text, bool apart, bool white, bool dashes)
{
    if (apart && !p->white)
        put(p, " ", 1, 1);
    put(p, text, strlen(text), (int)strlen(text));
    p->white = white;
    p->dashes = p->dashes && dashes;
}

/* ==== what a text looks like ======================================================================= */
struct text { /* by characters */
    uint32_t *c;
    size_t n;
};
struct look { bool lines, plain, single; };

static struct text decode(const char *s)
{
    struct text t = { calloc(strlen(s) + 1, sizeof(*t.c)), 0 };

    if (!t.c)
        abort();
    while (*s) {
        size_t n = fl_utf8_len(s, strlen(s));
        uint32_t c = (unsigned char)*s;

        if (n > 1) {
            c &= 0xffu >> (n + 1);
            for (size_t i = 1; i < n; i++)
                c = c << 6 | ((unsigned char)s[i] & 0x3f);
        }
        t.c[t.n++] = c;
        s += n ? n : 1;
    }
    return t;
}

static bool is_break(uint32_t c)
{
    return c == '\n' || c == 0x85 || c == 0x2028 || c == 0x2029;
}

static bool is_white(uint32_t c)
{
    return c == ' ' || c == '\t' || c == '\r' || is_break(c);
}

static bool one_of(uint32_t c, const char *set)
{
    return c && c < 128 && strchr(set, (int)c);
}

/* c would begin something other than a text there. */
static bool is_indicator(const struct text *t, size_t i, bool white_before)
{
    uint32_t c = t->c[i];
    bool white_behind = i + 1 >= t->n || is_white(t->c[i + 1]);

    if (i == 0)
        return one_of(c, "#,[]{}&*!|>'\"%@`") || (one_of(c, "?:-") && white_behind);
    return (c == ':' && white_behind) || (c == '#' && white_before);
}

static struct look look_at(const struct text *t)
{
    struct look k = { .plain = true, .single = true };
    bool white_before = true, indicators = false, special = false, edges, space_break = false, break_space = false;
    uint32_t before = 0;

    if (t->n == 0)
        return k;
    if (t->n >= 3 && t->c[0] == t->c[1] && t->c[1] == t->c[2] && (t->c[0] == '-' || t->c[0] == '.'))
        indicators = true;
    for (size_t i = 0; i < t->n; i++) {
        uint32_t c = t->c[i];

        indicators |= is_indicator(t, i, white_before);
        k.lines |= is_break(c);
        special |= c != '\n' && (c < 0x20 || c > 0x7e);
        break_space |= c == ' ' && is_break(before);
        space_break |= is_break(c) && before == ' ';
        white_before = is_white(c);
        before = c;
    }
    edges = t->c[0] == ' ' || is_break(t->c[0]) || before == ' ' || is_break(before);
    k.single = !break_space && !space_break && !special;
    k.plain = k.single && !edges && !k.lines && !indicators;
    return k;
}

/* Does a plain text of these letters mean something else, by YAML 1.1? */
static bool is_other(const char *text)
{
    static const char *const patterns[] = {
        "^(~|null|Null|NULL||<<|=)$",
        "^(yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$",
        "^([-+]?0b[01_]+|[-+]?0[0-7_]+|[-+]?(0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+|[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+)$",
        "^([-+]?[0-9][0-9_]*\\.[0-9_]*([eE][-+][0-9]+)?|\\.[0-9][0-9_]*([eE][-+][0-9]+)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+\\.[0-9_]*|"
        "[-+]?\\.(inf|Inf|INF)|\\.(nan|NaN|NAN))$",
        "^[0-9]{4}-([0-9]{2}-[0-9]{2}|[0-9]{1,2}-[0-9]{1,2}([Tt]|[ \t]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}(\\.[0-9]*)?"
        "([ \t]*(Z|[-+][0-9]{1,2}(:[0-9]{2})?))?)$",
    };
    static regex_t made[FL_LEN(patterns)];
    static bool ready;

    for (size_t i = 0; i < FL_LEN(patterns) && !ready; i++)
        if (regcomp(&made[i], patterns[i], REG_EXTENDED | REG_NOSUB))
            abort(); /* ours, and constant */
    ready = true;
    for (size_t i = 0; i < FL_LEN(patterns); i++)
        if (regexec(&made[i], text, 0, NULL, 0) == 0)
            return true;
    return false;
}

/* ==== a text ======================================================================================= */
static void put_chars(struct printer *p, const struct text *t, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) /* others than ASCII are escaped before they get here */
        fputc((int)t->c[i], p->to);
    p->column += (int)(to - from);
}

static void put_plain(struct printer *p, const struct text *t, bool fold)
{
    size_t start = 0;
    bool spaces = false;

    if (!t->n)
        return;
    if (!p->white)
        put(p, " ", 1, 1);
    p->white = p->dashes = false;
    for (size_t end = 0; end <= t->n; end++) {
        bool space = end < t->n && t->c[end] == ' ';

        if (spaces && !space) {
            if (start + 1 == end && p->column > WIDTH && fold) {
                new_line(p);
                p->white = p->dashes = false;
            } else {
                put_chars(p, t, start, end);
            }
            start = end;
        } else if (!spaces && (space || end == t->n)) {
            put_chars(p, t, start, end);
            start = end;
        }
        spaces = space;
    }
}

static void put_single(struct printer *p, const struct text *t, bool fold)
{
    size_t start = 0;
    bool spaces = false, breaks = false;

    mark(p, "'", true, false, false);
    for (size_t end = 0; end <= t->n; end++) {
        uint32_t c = end < t->n ? t->c[end] : 0;
        bool over = end == t->n, quote = !over && c == '\'';

        if (spaces && c != ' ') {
            if (start + 1 == end && p->column > WIDTH && fold && start != 0 && end != t->n)
                new_line(p);
            else
                put_chars(p, t, start, end);
            start = end;
        } else if (breaks && (over || c != '\n')) {
            if (t->c[start] == '\n')
                end_line(p);
            for (size_t i = start; i < end; i++)
                end_line(p);
            new_line(p);
            start = end;
        } else if (!spaces && !breaks && (over || c == ' ' || c == '\n' || quote) && start < end) {
            put_chars(p, t, start, end);
            start = end;
        }
        if (quote) {
            put(p, "''", 2, 2);
            start = end + 1;
        }
        spaces = !over && c == ' ';
        breaks = !over && c == '\n';
    }
    mark(p, "'", false, false, false);
}

static int escaped(uint32_t c, char out[16])
{
    static const struct { uint32_t c; char as; } named[] = {
        { 0x07, 'a' }, { 0x08, 'b' }, { '\t', 't' }, { '\n', 'n' }, { 0x0b, 'v' }, { 0x0c, 'f' },    { '\r', 'r' },
        { 0x1b, 'e' }, { '"', '"' },  { '\\', '\\' }, { 0x85, 'N' }, { 0xa0, '_' }, { 0x2028, 'L' }, { 0x2029, 'P' },
    };

    for (size_t i = 0; i < FL_LEN(named); i++)
        if (named[i].c == c)
            return sprintf(out, "\\%c", named[i].as);
    return sprintf(out, c <= 0xff ? "\\x%02X" : c <= 0xffff ? "\\u%04X" : "\\U%08X", c);
}

static void put_double(struct printer *p, const struct text *t, bool fold)
{
    size_t start = 0;
    char e[16];

    mark(p, "\"", true, false, false);
    for (size_t end = 0; end <= t->n; end++) {
        uint32_t c = end < t->n ? t->c[end] : 0;

        if (end == t->n || c == '"' || c == '\\' || c < 0x20 || c > 0x7e) {
            if (start < end)
                put_chars(p, t, start, end);
            start = start < end ? end : start;
            if (end < t->n) {
                int n = escaped(c, e);

                put(p, e, (size_t)n, n);
                start = end + 1;
            }
        }
        if (end == 0 || end + 1 >= t->n || (c != ' ' && start < end) || p->column + (int)end - (int)start <= WIDTH || !fold)
            continue;
        if (start < end)
            put_chars(p, t, start, end);
        start = start < end ? end : start;
        put(p, "\\", 1, 1);
        new_line(p);
        p->white = p->dashes = false;
        if (t->c[start] == ' ')
            put(p, "\\", 1, 1);
    }
    mark(p, "\"", false, false, false);
}

/* is_text: quotes where plain letters would mean something else. */
static void put_scalar(struct printer *p, const char *s, bool is_text, bool key)
{
    struct text t = decode(s);
    struct look k = look_at(&t);
    int was = p->indent;

    p->indent = was < 0 ? STEP : was + STEP; /* where it goes on when it is folded */
    if (k.plain && !(is_text && is_other(s)) && !(key && t.n == 0))
        put_plain(p, &t, !key);
    else if (k.single && !(key && k.lines))
        put_single(p, &t, !key);
    else
        put_double(p, &t, !key);
    p->indent = was;
    free(t.c);
}

/* As Python writes it: the fewest digits that read back, with a point; the power is YAML's only behind one. */
static void real_text(double d, char *out, size_t cap)
{
    char *at;

    for (int digits = 1; digits <= 17; digits++) {
        snprintf(out, cap, "%.*g", digits, d);
        if (strtod(out, NULL) == d)
            break;
    }
    double size = d < 0 ? -d : d;

    if (size >= 1e-4 && size < 1e16 && strchr(out, 'e')) /* Python changes to a power at 1e16, whatever the digits are */
        snprintf(out, cap, "%.1f", d);
    else if (size >= 1e16 && !strchr(out, 'e'))
        snprintf(out, cap, "%.16e", d);
    at = strchr(out, 'e');
    if (strchr(out, '.') || strlen(out) + 3 > cap)
        return;
    if (!at)
        at = out + strlen(out);
    memmove(at + 2, at, strlen(at) + 1);
    memcpy(at, ".0", 2);
}

/* ==== the tree ===================================================================================== */
static void put_value(struct printer *p, const json_t *v, bool of_key);

static void put_object(struct printer *p, const json_t *v)
{
    int was = p->indent;
    const char *key;
    json_t *item;

    p->indent = was < 0 ? 0 : was + STEP;
    json_object_foreach((json_t *)v, key, item) {
        struct text t = decode(key);
        bool simple = t.n > 0 && t.n < KEY_MAX && !look_at(&t).lines;

        free(t.c);
        new_line(p);
        if (!simple)
            mark(p, "?", true, false, true);
        put_scalar(p, key, true, simple);
        if (!simple)
            new_line(p);
        mark(p, ":", !simple, false, !simple);
        put_value(p, item, true);
    }
    p->indent = was;
}

static void put_array(struct printer *p, const json_t *v, bool of_key)
{
    int was = p->indent;
    json_t *item;
    size_t i;

    if (was < 0)
        p->indent = 0;
    else if (!of_key || p->dashes) /* below a key they stand where the key does */
        p->indent = was + STEP;
    json_array_foreach((json_t *)v, i, item) {
        new_line(p);
        mark(p, "-", true, false, true);
        put_value(p, item, false);
    }
    p->indent = was;
}

static void put_value(struct printer *p, const json_t *v, bool of_key)
{
    char text[64];

    switch (json_typeof(v)) {
    case JSON_OBJECT:
        if (json_object_size(v))
            put_object(p, v);
        else
            mark(p, "{}", true, false, false);
        return;
    case JSON_ARRAY:
        if (json_array_size(v))
            put_array(p, v, of_key);
        else
            mark(p, "[]", true, false, false);
        return;
    case JSON_STRING: put_scalar(p, json_string_value(v), true, false); return;
    case JSON_INTEGER: snprintf(text, sizeof(text), "%lld", (long long)json_integer_value(v)); break;
    case JSON_REAL: real_text(json_real_value(v), text, sizeof(text)); break;
    default: (void)FL_COPY(text, json_is_true(v) ? "true" : json_is_false(v) ? "false" : "null");
    }
    put_scalar(p, text, false, false);
}

char *yaml_text(const json_t *v)
{
    char *text = NULL;
    size_t len;
    struct printer p = { .to = open_memstream(&text, &len), .indent = NOTHING, .white = true, .dashes = true };

    if (!p.to)
        abort();
    mark(&p, "---", true, false, false);
    put_value(&p, v, false);
    new_line(&p);
    mark(&p, "...", true, false, false);
    end_line(&p);
    if (fclose(p.to) != 0)
        abort();
    return text;
}
