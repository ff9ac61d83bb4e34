#include "worker/roles/prompts.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/conf/json.h"

/* A text, or a number as it would be written: labels are often numbers. */
static enum fl_status member(const struct fl_json_at *row, const char *key, const char *flag, char **out,
                             struct fl_err *err)
{
    char missing[80];

    const json_t *v = json_object_get(row->json, key);

    snprintf(missing, sizeof(missing), "is missing; --%s names the member to read", flag);
    if (json_is_string(v) && strlen(json_string_value(v)) != json_string_length(v))
        return fl_json_bad(row, key, err, "holds a zero byte");
    if (json_is_string(v))
        *out = strdup(json_string_value(v));
    else if (json_is_number(v))
        *out = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
    else
        return fl_json_bad(row, key, err, "%s", v ? "is neither a text nor a number" : missing);
    return *out ? FL_OK : fl_fail(err, FL_EXHAUSTED, "no memory for prompts");
}

static enum fl_status row_take(struct prompts *p, const char *where, const json_t *line,
                               const char *input_key, const char *label_key, struct fl_err *err)
{
    struct fl_json_at row = fl_json_root(line, where);

    if (p->n == PROMPTS_MAX)
        return fl_fail(err, FL_EXHAUSTED, "%s: more than %d prompts; split the file", where,
                       PROMPTS_MAX);
    if ((p->n & (p->n - 1)) == 0) { /* room doubles at each power of two */
        size_t room = p->n ? (size_t)p->n * 2 : 1;
        struct prompt *more = realloc(p->rows, room * sizeof(*more));

        if (!more)
            return fl_fail(err, FL_EXHAUSTED, "no memory for %zu prompts", room);
        p->rows = more;
    }
    p->rows[p->n] = (struct prompt){ 0 };
    struct prompt *to = &p->rows[p->n++];
    if (!json_is_object(line))
        return fl_json_bad(&row, NULL, err, "is no JSON object");
    FL_TRY(member(&row, input_key, "input-key", &to->input, err));
    FL_TRY(member(&row, label_key, "label-key", &to->label, err));
    return *to->input ? FL_OK : fl_json_bad(&row, input_key, err, "is empty");
}

enum fl_status prompts_load(const char *path, const char *input_key, const char *label_key,
                            struct prompts **out, struct fl_err *err)
{
    FL_AUTO(prompts) struct prompts *p = calloc(1, sizeof(*p));
    struct fl_json_lines *lines;
    enum fl_status st;
    json_t *line;

    if (!p)
        return fl_fail(err, FL_EXHAUSTED, "no memory for prompts");
    FL_TRY(fl_json_lines_open(path, PROMPT_LINE_MAX, &lines, err));
    while ((st = fl_json_lines_next(lines, &line, err)) == FL_OK) {
        st = row_take(p, fl_json_lines_where(lines), line, input_key, label_key, err);
        json_decref(line);
        if (st != FL_OK)
            break;
    }
    fl_json_lines_close(lines);
    if (st != FL_NOT_FOUND)
        return st;
    if (!p->n)
        return fl_fail(err, FL_INVALID, "%s: holds no prompt; one JSON object a line is wanted",
                       path);
    *out = FL_TAKE(p);
    return FL_OK;
}

void prompts_destroy(struct prompts *p)
{
    if (!p)
        return;
    for (uint32_t i = 0; i < p->n; i++) {
        free(p->rows[i].input);
        free(p->rows[i].label);
    }
    free(p->rows);
    free(p);
}

static bool readable(char out[1024], const char *dir, const char *tail, const char *name)
{
    return (size_t)snprintf(out, 1024, "%s%s/%s", dir, tail, name) < 1024 && access(out, R_OK) == 0;
}

enum fl_status prompts_shipped(const char *name, char out[1024], struct fl_err *err)
{
    const char *dir = getenv("FURLONG_DATA_DIR");
    char self[512];
    ssize_t len = readlink("/proc/self/exe", self, sizeof(self) - 1);

    if (dir && readable(out, dir, "", name))
        return FL_OK;
    self[len > 0 ? len : 0] = '\0';
    for (int up = 0; up < 2 && strrchr(self, '/'); up++)
        *strrchr(self, '/') = '\0';
    if (readable(out, self, "/share/furlong", name) || readable(out, FURLONG_SOURCE_DATA, "", name))
        return FL_OK;
    return fl_fail(err, FL_NOT_FOUND,
                   "%s is neither in %s/share/furlong nor in %s: give --prompt-data, or set "
                   "FURLONG_DATA_DIR",
                   name, self, FURLONG_SOURCE_DATA);
}

void alphabet_init(struct alphabet *a)
{
    *a = (struct alphabet){ 0 };
}

void alphabet_add(struct alphabet *a, const char *text)
{
    for (; *text; text++)
        a->token_of[(uint8_t)*text] = 1;
}

void alphabet_settle(struct alphabet *a)
{
    a->n = 1;
    for (int b = 0; b < 256; b++)
        if (a->token_of[b]) {
            a->byte_of[a->n] = (uint8_t)b;
            a->token_of[b] = (uint16_t)a->n++;
        }
}

void alphabet_to_hex(const struct alphabet *a, char out[ALPHABET_HEX])
{
    out[0] = '\0';
    for (uint32_t i = 1; i < a->n; i++)
        snprintf(out + 2 * (i - 1), 3, "%02x", a->byte_of[i]);
}

enum fl_status alphabet_of_hex(const char *hex, struct alphabet *out, struct fl_err *err)
{
    struct alphabet a;
    size_t len = strlen(hex);

    alphabet_init(&a);
    if (len == 0 || len % 2 || len > 510)
        return fl_fail(err, FL_INVALID, "an alphabet of %zu hex digits: must be 2 to 510, even",
                       len);
    for (size_t i = 0; i < len; i += 2) {
        unsigned b;

        if (!isxdigit((unsigned char)hex[i]) || !isxdigit((unsigned char)hex[i + 1]) ||
            sscanf(hex + i, "%2x", &b) != 1 || b == 0 || a.token_of[b])
            return fl_fail(err, FL_INVALID, "alphabet: '%.2s' is no new byte in hex", hex + i);
        a.token_of[b] = 1;
    }
    alphabet_settle(&a);
    *out = a;
    return FL_OK;
}

enum fl_status alphabet_encode(const struct alphabet *a, const char *text, int32_t *tokens,
                               uint32_t *n, struct fl_err *err)
{
    uint32_t len = 0;

    for (const char *c = text; *c; c++) {
        uint16_t t = a->token_of[(uint8_t)*c];

        if (!t)
            return fl_fail(err, FL_INVALID,
                           "'%.60s': the model's alphabet has no byte 0x%02x (position %td)", text,
                           (uint8_t)*c, c - text);
        tokens[len++] = t;
    }
    *n = len;
    return FL_OK;
}

void alphabet_decode(const struct alphabet *a, const int32_t *tokens, uint32_t n, char *text)
{
    uint32_t len = 0;

    for (uint32_t i = 0; i < n && tokens[i] > ALPHABET_END && (uint32_t)tokens[i] < a->n; i++)
        text[len++] = (char)a->byte_of[tokens[i]];
    text[len] = '\0';
}
