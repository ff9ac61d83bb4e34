#include "common/conf/opt.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/str.h"
#include "common/conf/opt_priv.h"

struct fl_opt_ref fl_opts_at(const struct fl_opts *o, size_t i)
{
    for (size_t t = 0; t < FL_OPT_TABLES && o->tables[t].opts; t++)
        for (const struct fl_opt *p = o->tables[t].opts; p->name; p++)
            if (i-- == 0)
                return (struct fl_opt_ref){ p, (char *)o->tables[t].into + p->at, t };
    return (struct fl_opt_ref){ 0 };
}

static bool is_name(const struct fl_opt *p, const char *name, size_t len)
{
    return (strlen(p->name) == len && memcmp(p->name, name, len) == 0) ||
           (p->alias && strlen(p->alias) == len && memcmp(p->alias, name, len) == 0);
}

/* Position by name; SIZE_MAX: none. *off: it was --no-NAME. */
static size_t find(const struct fl_opts *o, const char *name, size_t len, bool *off)
{
    struct fl_opt_ref r;

    for (size_t i = 0; (r = fl_opts_at(o, i)).opt; i++) {
        *off = false;
        if (is_name(r.opt, name, len))
            return i;
        *off = r.opt->off && len > 3 && memcmp(name, "no-", 3) == 0;
        if (*off && is_name(r.opt, name + 3, len - 3))
            return i;
    }
    return SIZE_MAX;
}

static enum fl_status unknown(const struct fl_opts *o, const char *origin, const char *word,
                              size_t len, struct fl_err *err)
{
    char asked[64], best[80] = "", no[80];
    unsigned least = 4; /* further away it is another word, not a slip */
    struct fl_opt_ref r;

    snprintf(asked, sizeof(asked), "%.*s", (int)len, word);
    if (o->takes_file && fl_edit_distance(asked, FILE_OPTION) < least) {
        least = fl_edit_distance(asked, FILE_OPTION);
        snprintf(best, sizeof(best), "%s", FILE_OPTION);
    }
    for (size_t i = 0; (r = fl_opts_at(o, i)).opt; i++) {
        snprintf(no, sizeof(no), "no-%s", r.opt->name);
        const char *names[] = { r.opt->name, r.opt->alias, r.opt->off ? no : NULL };

        for (size_t k = 0; k < FL_LEN(names); k++) {
            unsigned d = names[k] ? fl_edit_distance(asked, names[k]) : least;

            if (d < least) {
                least = d;
                snprintf(best, sizeof(best), "%s", names[k]);
            }
        }
    }
    if (*best)
        return fl_fail(err, FL_INVALID, "%sunknown option --%s; did you mean --%s?", origin, asked, best);
    return fl_fail(err, FL_INVALID, "%sunknown option --%s; see %s --help", origin, asked, o->program);
}

static bool is_choice(const char *choices, const char *value)
{
    size_t len = strlen(value);

    for (const char *c = choices; c; c = strchr(c, '|') ? strchr(c, '|') + 1 : NULL)
        if (strcspn(c, "|") == len && memcmp(c, value, len) == 0)
            return true;
    return false;
}

static enum fl_status set_switch(const struct fl_opt_ref *r, const char *value, struct fl_err *err)
{
    bool on = is_choice("1|true|yes|on", value);

    if (!on && !is_choice("0|false|no|off|", value))
        return fl_fail(err, FL_INVALID, "'%.60s' is neither true nor false", value);
    *(bool *)r->at = on;
    return FL_OK;
}

static enum fl_status set(const struct fl_opt_ref *r, const char *value, struct fl_err *err)
{
    const struct fl_opt *p = r->opt;
    bool any = p->min == 0 && p->max == 0;
    uint64_t bytes;
    int64_t n;

    switch (p->kind) {
    case FL_OPT_SWITCH:
        return set_switch(r, value, err);
    case FL_OPT_INT:
        FL_TRY(fl_parse_i64(value, any ? INT64_MIN : (int64_t)p->min,
                            any || p->max >= 9.2e18 ? INT64_MAX : (int64_t)p->max, &n, err));
        *(int64_t *)r->at = n;
        return FL_OK;
    case FL_OPT_REAL:
        return fl_parse_f64(value, any ? -HUGE_VAL : p->min, any ? HUGE_VAL : p->max,
                            (double *)r->at, err);
    case FL_OPT_BYTES:
        FL_TRY(fl_parse_bytes(value, any || p->max >= 0x1p63 ? UINT64_MAX : (uint64_t)p->max, &bytes, err));
        if (!any && (double)bytes < p->min)
            return fl_fail(err, FL_INVALID, "%s is less than %.0f bytes", value, p->min);
        *(uint64_t *)r->at = bytes;
        return FL_OK;
    case FL_OPT_TEXT:
        if (p->choices && !is_choice(p->choices, value))
            return fl_fail(err, FL_INVALID, "'%.60s' is none of %s", value, p->choices);
        *(const char **)r->at = value;
        return FL_OK;
    }
    return fl_fail(err, FL_INTERNAL, "option of kind %d", (int)p->kind);
}

static enum fl_status give(struct fl_opts *o, size_t i, enum fl_opt_from from, const char *origin,
                           const char *value, struct fl_err *err)
{
    struct fl_opt_ref r = fl_opts_at(o, i);
    enum fl_status st;

    if (from < o->from[i])
        return FL_OK;
    st = set(&r, value, err);
    if (st != FL_OK)
        return fl_wrap(err, st, "%s--%s", origin, r.opt->name);
    o->from[i] = (uint8_t)from;
    return FL_OK;
}

static enum fl_status preset(struct fl_opts *o, struct fl_err *err)
{
    struct fl_opt_ref r;

    for (size_t i = 0; (r = fl_opts_at(o, i)).opt; i++) {
        const char *env = r.opt->env ? getenv(r.opt->env) : NULL;
        char origin[80];

        if (i >= FL_OPT_MAX)
            return fl_fail(err, FL_INTERNAL, "more than %d options", FL_OPT_MAX);
        if (r.opt->fallback)
            FL_TRY(give(o, i, FL_OPT_DEFAULT, "default of ", r.opt->fallback, err));
        snprintf(origin, sizeof(origin), "%s, which is ", r.opt->env ? r.opt->env : "");
        if (env && *env)
            FL_TRY(give(o, i, FL_OPT_ENV, origin, env, err));
    }
    return FL_OK;
}

enum fl_status fl_opts_named(struct fl_opts *o, enum fl_opt_from from, const char *origin, const char *name,
                             const char *value, struct fl_err *err)
{
    bool off = false;
    size_t i = find(o, name, strlen(name), &off);

    if (i == SIZE_MAX || off)
        return unknown(o, origin, name, strlen(name), err);
    return give(o, i, from, origin, value, err);
}

/* argv[*i] is --config, on the command line. */
static bool is_file(const struct fl_opts *o, enum fl_opt_from from, const char *word)
{
    size_t len = strlen("--" FILE_OPTION);

    return o->takes_file && from == FL_OPT_LINE && strncmp(word, "--" FILE_OPTION, len) == 0 && (!word[len] || word[len] == '=');
}

static enum fl_status take_file(struct fl_opts *o, int argc, char **argv, int *i, struct fl_err *err)
{
    const char *value = strchr(argv[(*i)++], '=');

    if (!value && *i == argc)
        return fl_fail(err, FL_INVALID, "--" FILE_OPTION ": FILE is missing");
    o->file = value ? value + 1 : argv[(*i)++];
    return FL_OK;
}

/* argv[*i] is an option; *i moves past what it takes. */
static enum fl_status take(struct fl_opts *o, enum fl_opt_from from, const char *origin, int argc,
                           char **argv, int *i, struct fl_err *err)
{
    const char *word = argv[*i], *value = NULL;
    struct fl_opt_ref r = { 0 };
    bool off = false;
    size_t at = SIZE_MAX;

    if (word[1] != '-') { /* a letter, its value in the next word */
        for (at = 0; (r = fl_opts_at(o, at)).opt && r.opt->letter != word[1]; at++)
            ;
        if (!r.opt || word[2])
            return fl_fail(err, FL_INVALID, "%sunknown option %s; see %s --help", origin, word,
                           o->program);
    } else {
        size_t len = strcspn(word + 2, "=");

        at = find(o, word + 2, len, &off);
        if (at == SIZE_MAX)
            return unknown(o, origin, word + 2, len, err);
        r = fl_opts_at(o, at);
        value = word[2 + len] ? word + 3 + len : NULL;
    }
    ++*i;
    if (r.opt->kind == FL_OPT_SWITCH) {
        if (off && value)
            return fl_fail(err, FL_INVALID, "%s%s: takes no value", origin, word);
        return give(o, at, from, origin, off ? "false" : value ? value : "true", err);
    }
    if (!value && *i < argc)
        value = argv[(*i)++];
    if (!value)
        return fl_fail(err, FL_INVALID, "%s--%s: %s is missing", origin, r.opt->name,
                       r.opt->arg ? r.opt->arg : "its value");
    return give(o, at, from, origin, value, err);
}

enum fl_status fl_opts_line(struct fl_opts *o, enum fl_opt_from from, const char *origin, int argc,
                            char **argv, struct fl_err *err)
{
    int i = 0;

    o->words = argv;
    o->n_words = 0;
    while (i < argc) {
        char *w = argv[i];

        if (strcmp(w, "--") == 0) {
            for (i++; i < argc; i++)
                argv[o->n_words++] = argv[i];
            break;
        }
        if (strcmp(w, "--help") == 0 || strcmp(w, "-h") == 0)
            return fl_fail(err, FL_CANCELLED, "help was asked for");
        if (is_file(o, from, w)) {
            FL_TRY(take_file(o, argc, argv, &i, err));
            continue;
        }
        if (w[0] == '-' && w[1]) {
            FL_TRY(take(o, from, origin, argc, argv, &i, err));
            continue;
        }
        argv[o->n_words++] = argv[i++];
        if (o->first_word_ends)
            while (i < argc)
                argv[o->n_words++] = argv[i++];
    }
    return FL_OK;
}

enum fl_status fl_opts_parse(struct fl_opts *o, int argc, char **argv, struct fl_err *err)
{
    FL_TRY(preset(o, err));
    FL_TRY(fl_opts_line(o, FL_OPT_LINE, "", argc > 0 ? argc - 1 : 0, argv + 1, err));
    return o->file ? fl_opts_file(o, o->file, &o->file_kept, err) : FL_OK;
}

void fl_opts_fini(struct fl_opts *o)
{
    json_decref(o->file_kept);
    o->file_kept = NULL;
}

int fl_opts_main(struct fl_opts *o, int argc, char **argv)
{
    struct fl_err err = { 0 };
    enum fl_status st = fl_opts_parse(o, argc, argv, &err);

    if (st == FL_OK)
        return -1;
    if (st == FL_CANCELLED) {
        fl_opts_help(o, stdout);
        return fflush(stdout) == 0 ? 0 : 1;
    }
    fprintf(stderr, "%s: %s\n", o->program, err.text);
    return 2;
}

bool fl_opts_takes_value(const struct fl_opts *o, const char *word)
{
    struct fl_opt_ref r;
    bool off;
    size_t i = 0;

    if (word[0] != '-' || !word[1] || strchr(word, '='))
        return false;
    if (is_file(o, FL_OPT_LINE, word))
        return true;
    if (word[1] == '-')
        i = find(o, word + 2, strlen(word + 2), &off);
    else
        while ((r = fl_opts_at(o, i)).opt && r.opt->letter != word[1])
            i++;
    r = fl_opts_at(o, i);
    return r.opt && r.opt->kind != FL_OPT_SWITCH;
}

enum fl_opt_from fl_opts_from(const struct fl_opts *o, const char *name)
{
    bool off;
    size_t i = find(o, name, strlen(name), &off);

    return i == SIZE_MAX ? FL_OPT_UNSET : (enum fl_opt_from)o->from[i];
}
