#include "worker/roles/role.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/fault.h"
#include "common/conf/json.h"
#include "worker/roles/config.h"

/* clang-format off */
static const struct fl_opt role_opts[] = {
    { .kind = FL_OPT_TEXT, .name = "alphabet", .arg = "HEX", .at = offsetof(struct role_args, alphabet_hex), .help = "bytes that are tokens 1, 2, ..." },
    { .kind = FL_OPT_INT, .name = "vocab-size", .arg = "N", .fallback = "0", .min = 0, .max = 1 << 20, .at = offsetof(struct role_args, vocab_size), .help = "tokens; 0: as the alphabet" },
    { .name = NULL },
};
/* clang-format on */

static enum fl_status settle(struct role_args *a, struct fl_err *err)
{
    if (!a->alphabet_hex)
        return fl_fail(err, FL_INVALID,
                       "--alphabet is missing: this program is started by furlong-driver");
    FL_TRY(alphabet_of_hex(a->alphabet_hex, &a->alphabet, err));
    a->config =
        model_config_of_flags(&a->flags, a->vocab_size ? (uint32_t)a->vocab_size : a->alphabet.n);
    if (a->config.vocab < a->alphabet.n)
        return fl_fail(
            err, FL_INVALID,
            "--vocab-size %u holds no alphabet of %u; give at least so many, or leave it out",
            a->config.vocab, a->alphabet.n);
    return model_config_check(&a->config, err);
}

/* -1: go on; else exit with it. */
static int args_take(struct role_args *a, const char *program, int argc, char **argv)
{
    struct fl_err err = { 0 };
    enum fl_status st = fl_fault_env(&err);

    *a = (struct role_args){ 0 };
    a->opts.program = program;
    a->opts.usage = "[OPTION...]";
    train_flags_tables(&a->flags, a->opts.tables);
    a->opts.tables[TRAIN_FLAG_TABLES] =
        (struct fl_opt_table){ "Given by the driver", role_opts, a };
    if (st == FL_OK)
        st = train_flags_parse(&a->flags, &a->opts, argc, argv, &err);
    if (st == FL_CANCELLED) {
        fl_opts_help(&a->opts, stdout);
        return 0;
    }
    if (st == FL_OK)
        st = settle(a, &err);
    if (st == FL_OK)
        return -1;
    fprintf(stderr, "%s: %s\n", program, err.text);
    return 2;
}

int role_main(const char *program, int argc, char **argv, struct role_args *args,
              struct furlong **f, enum fl_status (*run)(struct fl_err *err))
{
    struct fl_err err = { 0 };
    int rc = args_take(args, program, argc, argv);

    if (rc < 0) {
        enum fl_status st = furlong_join(FURLONG_ABI, f, &err);

        if (st == FL_OK)
            st = run(&err);
        if (st != FL_OK)
            fprintf(stderr, "%s: %s\n", program, err.text);
        furlong_leave(*f);
        rc = st == FL_OK ? 0 : 1;
    }
    train_flags_fini(&args->flags);
    return rc;
}

struct furlong_tensor *role_tensors(const struct model_layout *l)
{
    struct furlong_tensor *t = calloc(l->n, sizeof(*t));

    for (uint32_t i = 0; t && i < l->n; i++) {
        t[i].name = l->tensors[i].name;
        t[i].dtype = FL_F32;
        t[i].ndim = l->tensors[i].ndim;
        memcpy(t[i].shape, l->tensors[i].shape, sizeof(l->tensors[i].shape));
    }
    return t;
}

enum fl_status role_body(const struct furlong_event *ev, json_t **out, struct fl_err *err)
{
    FL_TRY(fl_json_parse(ev->body_bytes ? ev->body : "{}", ev->body_bytes ? ev->body_bytes : 2,
                         ev->method, FL_JSON_MAX, out, err));
    if (json_is_object(*out))
        return FL_OK;
    json_decref(*out);
    return fl_fail(err, FL_INVALID, "%s: the body is no JSON object", ev->method);
}

void role_reply(struct furlong_call *c, json_t *body_take, const void *blob, size_t bytes)
{
    char *text = body_take ? json_dumps(body_take, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    struct furlong_data d = { text, text ? strlen(text) : 0, blob, bytes };

    json_decref(body_take);
    if (text) {
        furlong_reply_data(c, &d);
    } else {
        struct fl_err err = { .status = FL_EXHAUSTED, .text = "no memory for an answer" };

        furlong_refuse(c, &err);
    }
    free(text);
}

void role_refuse(struct furlong_call *c, enum fl_status st, const struct fl_err *err)
{
    struct fl_err why = *err;

    why.status = st;
    furlong_refuse(c, &why);
}

double role_now_s(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_BOOTTIME, &t); /* cannot fail with a known clock */
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void role_reply_moved(struct furlong_call *c, const struct furlong_moved *m, size_t own_bytes,
                      double own_s)
{
    role_reply(c,
               json_pack("{s:f, s:f, s:I, s:I, s:I}", "setup_s", m->setup_s + own_s, "copy_s",
                         m->copy_s, "dropped_bytes", (json_int_t)(m->dropped_bytes + own_bytes),
                         "kept_bytes", (json_int_t)m->kept_bytes, "written_bytes",
                         (json_int_t)m->written_bytes),
               NULL, 0);
}
