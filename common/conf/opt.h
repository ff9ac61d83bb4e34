/* common/conf/opt.h - option tables: one table makes the parser, the environment, the record and the help
 *
 * A value comes from the first of: command line, extra words (MILES_EXTRA_ARGS), environment, file,
 * default.
 * "--name=value", "--name value" and "-x value" are the same; "--" ends the options. Errors name the
 * option and the value and, where a name is not known, the nearest one that is. */
#pragma once
#include <jansson.h>
#include <stdio.h>

#include "common/base/base.h"

enum fl_opt_kind { /* the member of the struct that it goes to */
    FL_OPT_SWITCH, /* bool; --name, and --no-name where .off is set     */
    FL_OPT_INT,    /* int64_t, between min and max                      */
    FL_OPT_REAL,   /* double, between min and max                       */
    FL_OPT_BYTES,  /* uint64_t: 512, 64k, 2GiB                          */
    FL_OPT_TEXT    /* const char *, lives as long as argv               */
};
struct fl_opt {
    enum fl_opt_kind kind;
    const char *name, *alias; /* without dashes; alias or NULL                               */
    char letter;              /* 0: none                                                     */
    bool off;                 /* SWITCH: --no-name turns it off                              */
    const char *arg;          /* of the help: N, HOST:PORT, SECONDS; the unit where there is one */
    const char *env;          /* or NULL                                                     */
    const char *fallback;     /* as text; NULL: the member is left as it was                 */
    double min, max;          /* of INT, REAL and BYTES; both 0: any                         */
    const char *choices;      /* of TEXT: "a|b|c", or NULL                                   */
    size_t at;                /* offsetof                                                    */
    const char *help;         /* NULL: not shown                                             */
};
struct fl_opt_table {
    const char *title;         /* heading in the help, or NULL */
    const struct fl_opt *opts; /* ended by a NULL name         */
    void *into;
};
enum fl_opt_from { FL_OPT_UNSET, FL_OPT_DEFAULT, FL_OPT_FILE, FL_OPT_ENV, FL_OPT_EXTRA, FL_OPT_LINE };
enum { FL_OPT_TABLES = 8, FL_OPT_MAX = 192 };
struct fl_opts {
    const char *program, *usage; /* "furlong start", "--head | --address HOST:PORT [OPTION...]" */
    const char *about, *notes;   /* above and below the list in the help; notes may be NULL */
    struct fl_opt_table tables[FL_OPT_TABLES];
    bool first_word_ends; /* options end at the first word that is none: a command follows */
    bool takes_file;      /* --config=FILE, read by fl_opts_parse() as by fl_opts_file() */
    /* out */
    char **words;   /* what is no option, in order: the front of argv, rearranged */
    size_t n_words;
    uint8_t from[FL_OPT_MAX]; /* enum fl_opt_from, by position over all tables */
    const char *file;         /* --config, or NULL */
    json_t *file_kept;        /* what values point into */
};

/* Defaults, environment, then argv[1..argc). FL_INVALID: err says what is wrong; FL_CANCELLED: --help
 * was asked for. The struct may be half filled then. */
enum fl_status fl_opts_parse(struct fl_opts *o, int argc, char **argv, struct fl_err *err);
void fl_opts_fini(struct fl_opts *o); /* of one that takes a file; texts that came from it are gone then */
/* The same for main(): prints the help (stdout) or the sentence (stderr). -1: go on; else exit with it. */
int fl_opts_main(struct fl_opts *o, int argc, char **argv);
/* Words that count less than the command line, more than the environment; after fl_opts_parse. origin
 * names where they are from in errors. text is split as a shell would, without expansion; *keep holds
 * the words that values point into: free() it last. */
enum fl_status fl_opts_extra(struct fl_opts *o, const char *origin, const char *text, char **keep,
                             struct fl_err *err);
/* A JSON object of names and values ("num-rollout": 20, "colocate": true), as in a run.json's flags;
 * null is passed over. Counts less than the environment; after fl_opts_parse. *keep holds the texts
 * that values point into: json_decref() it last. */
enum fl_status fl_opts_file(struct fl_opts *o, const char *path, json_t **keep, struct fl_err *err);
void fl_opts_help(const struct fl_opts *o, FILE *to);

/* word is an option of o, without its value, that takes one in the next word. */
bool fl_opts_takes_value(const struct fl_opts *o, const char *word);
enum fl_opt_from fl_opts_from(const struct fl_opts *o, const char *name); /* FL_OPT_UNSET: no such */
static inline bool fl_opts_given(const struct fl_opts *o, const char *name)
{
    return fl_opts_from(o, name) > FL_OPT_DEFAULT;
}
/* Every option of table i that has a value, by name; secrets as "***". NULL when memory ends. */
json_t *fl_opts_json(const struct fl_opts *o, size_t table);
/* "--name=value" for each option of table i that was given: the words that another program needs to be
 * called the same way. Ended by NULL; fl_words_free(). NULL when memory ends. */
char **fl_opts_words(const struct fl_opts *o, size_t table);
void fl_words_free(char **words);
