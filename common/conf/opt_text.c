#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/str.h"
#include "common/conf/opt_priv.h"

enum { HELP_COLUMN = 34, HELP_WIDTH = 100 };

/* ==== help ========================================================================================= */
static void put_wrapped(FILE *to, const char *text, int column, int at)
{
    while (*text) {
        int len = (int)strcspn(text, " ");

        if (at > column && at + 1 + len > HELP_WIDTH) {
            fprintf(to, "\n%*s", column, "");
            at = column;
        } else if (at > column) {
            fputc(' ', to);
            at++;
        }
        fprintf(to, "%.*s", len, text);
        at += len;
        text += len;
        text += *text == ' ';
    }
    fputc('\n', to);
}

static void put_option(FILE *to, const struct fl_opt *p)
{
    char head[160], rest[640];
    struct fl_str h = FL_STR_ON(head), r = FL_STR_ON(rest);

    if (p->letter)
        fl_str_add(&h, "  -%c, ", p->letter);
    else
        fl_str_add(&h, "      ");
    fl_str_add(&h, p->off ? "--[no-]%s" : "--%s", p->name);
    if (p->kind != FL_OPT_SWITCH)
        fl_str_add(&h, "=%s", p->choices ? p->choices : p->arg ? p->arg : "VALUE");
    if (p->alias)
        fl_str_add(&h, ", --%s", p->alias);
    fl_str_add(&r, "%s", p->help);
    if (p->fallback && *p->fallback && !(p->kind == FL_OPT_SWITCH && strcmp(p->fallback, "false") == 0))
        fl_str_add(&r, " (default %s)", p->fallback);
    if (p->env)
        fl_str_add(&r, " [%s]", p->env);
    if (h.len >= HELP_COLUMN - 1)
        fprintf(to, "%s\n%*s", head, HELP_COLUMN, "");
    else
        fprintf(to, "%-*s", HELP_COLUMN, head);
    put_wrapped(to, rest, HELP_COLUMN, HELP_COLUMN);
}

void fl_opts_help(const struct fl_opts *o, FILE *to)
{
    fprintf(to, "Usage: %s %s\n", o->program, o->usage ? o->usage : "[OPTION...]");
    if (o->about)
        fprintf(to, "%s\n", o->about);
    for (size_t t = 0; t < FL_OPT_TABLES && o->tables[t].opts; t++) {
        fprintf(to, "\n");
        if (o->tables[t].title)
            fprintf(to, "%s:\n", o->tables[t].title);
        for (const struct fl_opt *p = o->tables[t].opts; p->name; p++)
            if (p->help)
                put_option(to, p);
    }
    if (o->takes_file) {
        fprintf(to, "%-*s", HELP_COLUMN, "      --" FILE_OPTION "=FILE");
        put_wrapped(to, "options from a JSON object of their names and values; the command line and the environment win",
                    HELP_COLUMN, HELP_COLUMN);
    }
    fprintf(to, "  -h, --help%*sthis text\n", HELP_COLUMN - 12, "");
    if (o->notes)
        fprintf(to, "\n%s\n", o->notes);
}

/* ==== extra words ================================================================================== */
/* Splits in place: quotes and backslashes as a shell, nothing is expanded. Returns how many words, or
 * -1 when a quote is not closed. words holds at most strlen(text) / 2 + 1. */
static int split(char *text, char **words)
{
    int n = 0;
    char *in = text, *out = text;

    for (;;) {
        while (*in == ' ' || *in == '\t' || *in == '\n')
            in++;
        if (!*in)
            return n;
        words[n++] = out;
        char quote = 0;
        for (; *in && (quote || !strchr(" \t\n", *in)); in++) {
            if (!quote && (*in == '\'' || *in == '"'))
                quote = *in;
            else if (quote && *in == quote)
                quote = 0;
            else if (*in == '\\' && quote != '\'' && in[1])
                *out++ = *++in;
            else
                *out++ = *in;
        }
        if (quote)
            return -1;
        in += *in != 0;
        *out++ = 0;
    }
}

enum fl_status fl_opts_extra(struct fl_opts *o, const char *origin, const char *text, char **keep,
                             struct fl_err *err)
{
    size_t len = strlen(text);
    char from[96];
    struct fl_opts line = *o; /* its words stay those of the command line */

    *keep = malloc(len + 1);
    char **words = calloc(len / 2 + 2, sizeof(*words));

    if (!*keep || !words) {
        free(words);
        return fl_fail(err, FL_EXHAUSTED, "no memory for %s", origin);
    }
    memcpy(*keep, text, len + 1);
    snprintf(from, sizeof(from), "%s: ", origin);
    int n = split(*keep, words);
    enum fl_status st = n < 0 ? fl_fail(err, FL_INVALID, "%s: a quote is not closed", origin)
                              : fl_opts_line(&line, FL_OPT_EXTRA, from, n, words, err);

    memcpy(o->from, line.from, sizeof(o->from));
    if (st == FL_OK && line.n_words)
        st = fl_fail(err, FL_INVALID, "%s: '%.60s' is no option", origin, words[0]);
    free(words);
    return st;
}

/* ==== record ======================================================================================= */
static json_t *value_of(const struct fl_opt_ref *r)
{
    const char *text;

    switch (r->opt->kind) {
    case FL_OPT_SWITCH: return json_boolean(*(bool *)r->at);
    case FL_OPT_INT: return json_integer(*(int64_t *)r->at);
    case FL_OPT_REAL: return json_real(*(double *)r->at);
    case FL_OPT_BYTES: return json_integer((json_int_t) * (uint64_t *)r->at);
    case FL_OPT_TEXT:
        text = *(const char **)r->at;
        return fl_name_is_secret(r->opt->name) ? json_string("***") : text ? json_string(text) : json_null();
    }
    return NULL;
}

json_t *fl_opts_json(const struct fl_opts *o, size_t table)
{
    json_t *out = json_object();
    struct fl_opt_ref r;

    for (size_t i = 0; out && (r = fl_opts_at(o, i)).opt; i++)
        if (r.table == table && o->from[i] != FL_OPT_UNSET &&
            json_object_set_new(out, r.opt->name, value_of(&r)) < 0) {
            json_decref(out);
            out = NULL;
        }
    return out;
}

static char *word_of(const struct fl_opt_ref *r)
{
    char *w = NULL;
    int n = -1;

    switch (r->opt->kind) {
    case FL_OPT_SWITCH:
        n = *(bool *)r->at || r->opt->off
                ? asprintf(&w, "--%s%s", *(bool *)r->at ? "" : "no-", r->opt->name)
                : asprintf(&w, "--%s=false", r->opt->name);
        break;
    case FL_OPT_INT: n = asprintf(&w, "--%s=%" PRId64, r->opt->name, *(int64_t *)r->at); break;
    case FL_OPT_REAL: n = asprintf(&w, "--%s=%.17g", r->opt->name, *(double *)r->at); break;
    case FL_OPT_BYTES: n = asprintf(&w, "--%s=%" PRIu64, r->opt->name, *(uint64_t *)r->at); break;
    case FL_OPT_TEXT: n = asprintf(&w, "--%s=%s", r->opt->name, *(const char **)r->at); break;
    }
    return n < 0 ? NULL : w;
}

char **fl_opts_words(const struct fl_opts *o, size_t table)
{
    char **words = calloc(FL_OPT_MAX + 1, sizeof(*words));
    struct fl_opt_ref r;
    size_t n = 0;

    for (size_t i = 0; words && (r = fl_opts_at(o, i)).opt; i++)
        if (r.table == table && o->from[i] > FL_OPT_DEFAULT && !(words[n++] = word_of(&r))) {
            fl_words_free(words);
            return NULL;
        }
    return words;
}

void fl_words_free(char **words)
{
    for (char **w = words; w && *w; w++)
        free(*w);
    free(words);
}
