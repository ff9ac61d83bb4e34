/* common/conf/opts.h - one table of options gives flags, environment, file, help, unit and range
 *
 *     struct args { int64_t port; const char *host; bool idle; };
 *     static const struct fl_opt options[] = {
 *         { .name = "port", .kind = FL_OPT_INT, .at = offsetof(struct args, port), .arg = "N",
 *           .value = "6379", .max = 65535, .env = "FURLONG_PORT", .help = "listen there; 0: any" },
 *         { .name = "host", .aliases = "node-ip-address", .kind = FL_OPT_TEXT, ... },
 *         { .name = "until-idle", .kind = FL_OPT_FLAG, ... },
 *     };
 *     static const struct fl_opts table = { .program = "furlong-head", .options = options,
 *                                           .n = FL_LEN(options), .about = "the cluster's head" };
 *     struct args args;
 *     fl_opts_main(&table, argc, argv, &args, NULL); // leaves with 0 (--help) or 2 (usage)
 *
 * What is given on the line wins over the environment, that over the file, that over .value. */
#pragma once
#include <stdio.h>

#include "common/base/base.h"

enum fl_opt_kind {     /* type at offset .at                                                  */
    FL_OPT_FLAG,       /* bool: --x                                                           */
    FL_OPT_SWITCH,     /* int: --x 1, --no-x 0, not given -1 (or what .value says: "1", "0")  */
    FL_OPT_INT,        /* int64_t                                                             */
    FL_OPT_REAL,       /* double                                                              */
    FL_OPT_BYTES,      /* uint64_t: 512MiB                                                    */
    FL_OPT_TEXT,       /* const char *, NULL if not given and without .value                  */
    FL_OPT_CHOICE,     /* int: place in .choices ("share|copy|auto")                          */
    FL_OPT_WORDS,      /* struct fl_words: --x a b c, up to the next flag; commas split too   */
    FL_OPT_EACH        /* struct fl_words: --x a --x b, one word each time                    */
};
enum { FL_WORDS_MAX = 32, FL_OPTS_MAX = 192 };
struct fl_words { const char *word[FL_WORDS_MAX]; size_t n; };

struct fl_opt {
    const char *name;    /* --name, without the dashes                                       */
    const char *aliases; /* other names, by spaces                                           */
    char letter;         /* -l, 0: none                                                      */
    enum fl_opt_kind kind;
    size_t at;
    const char *arg;   /* in the help: "N", "HOST:PORT"                                      */
    const char *value; /* if not given, parsed like a given one; NULL: zero, NULL, -1 or {}  */
    const char *env;   /* variable that gives it; "" and unset are not given                 */
    double min, max;   /* INT, REAL, BYTES; both 0: as far as the type reaches               */
    const char *choices;
    const char *unit; /* "s", "tokens": in the help and in errors                            */
    const char *help; /* NULL: taken, not shown                                              */
    const char *group; /* heading in the help; of this option and those that follow          */
};
enum fl_opts_rest {
    FL_REST_NONE,    /* any other word is an error                       */
    FL_REST_MIXED,   /* words may stand anywhere; "--" ends the options  */
    FL_REST_COMMAND  /* the first other word, or "--", ends the options  */
};
struct fl_opts {
    const char *program;
    const char *usage; /* behind the program's name; NULL: "[OPTIONS]" */
    const char *about; /* below it                                     */
    const char *end;   /* last lines of the help, NULL: none           */
    enum fl_opts_rest rest;
    const struct fl_opt *options;
    size_t n;
};

enum fl_opts_from { FL_FROM_NOWHERE, FL_FROM_DEFAULT, FL_FROM_FILE, FL_FROM_ENV, FL_FROM_LINE };
struct fl_opts_given { /* zero it; NULL where nobody asks */
    unsigned char from[FL_OPTS_MAX]; /* enum fl_opts_from, by place in the table */
    char **rest;                     /* the other words, in their order, NULL at the end */
    int n_rest;
    char *kept; /* texts of the file; free by fl_opts_given_fini */
    bool help, version; /* asked for: nothing else was looked at */
};

/* argv is borrowed for as long as target is used. FL_INVALID: one sentence, with the nearest known
 * flag for an unknown one; target is then unspecified. file: JSON object of names and values, NULL:
 * none. */
enum fl_status fl_opts_parse(const struct fl_opts *o, int argc, char **argv, const char *file,
                             void *target, struct fl_opts_given *given, struct fl_err *err);
void fl_opts_given_fini(struct fl_opts_given *given);
/* For main(): parses argv[1..]; prints help or version and leaves with 0; an error leaves with 2. */
void fl_opts_main(const struct fl_opts *o, int argc, char **argv, void *target,
                  struct fl_opts_given *given);
enum fl_opts_from fl_opts_from(const struct fl_opts *o, const struct fl_opts_given *given,
                               const char *name); /* who gave it; the name must be in the table */
void fl_opts_help(const struct fl_opts *o, FILE *to);
/* The known flag or word nearest to text within two edits or a third of it, else NULL. */
const char *fl_nearest(const char *text, const char *const *known, size_t n);
