#include "worker/keep/keeper.h"
#include "common/base/file.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t count(const uint8_t *raw, size_t len, enum form_tag tag)
{
    struct form_field f;
    size_t at = 0, n = 0;

    while (form_next(raw, len, &at, &f))
        n += f.tag == tag;
    return n;
}

static void take(struct keep_spec *s, const struct form_field *f, size_t *n_arg, size_t *n_env)
{
    char *text = (char *)form_text(f);

    switch (f->tag) {
    case FORM_ARG:
        s->argv[(*n_arg)++] = text;
        break;
    case FORM_ENV:
        s->env[(*n_env)++] = text;
        break;
    case FORM_CWD:
        s->cwd = text;
        break;
    case FORM_DIR:
        s->dir = text;
        break;
    case FORM_OUT:
        s->out_path = text;
        break;
    case FORM_ERR:
        s->err_path = text;
        break;
    case FORM_MEMORY_MAX:
        s->memory_max_bytes = form_u64(f);
        break;
    case FORM_LOG_MAX:
        s->log_max_bytes = form_u64(f);
        break;
    case FORM_TERM_MS:
        s->term_ms = (uint32_t)form_u64(f);
        break;
    case FORM_KILL_MS:
        s->kill_ms = (uint32_t)form_u64(f);
        break;
    case FORM_ORPHAN_MS:
        s->orphan_ms = (uint32_t)form_u64(f);
        break;
    case FORM_STOP_SIGNAL:
        s->stop_signal = form_u64(f) == SIGINT ? SIGINT : SIGTERM;
        break;
    case FORM_HAS_SEAT:
        s->has_seat = form_u64(f) != 0;
        break;
    default: /* a newer daemon says more */
        break;
    }
}

void keep_spec_free(struct keep_spec *s)
{
    free(s->argv);
    free(s->env);
    free(s->raw);
}

bool keep_spec_read(const char *path, struct keep_spec *out, char why[256])
{
    size_t len, at = 0, n_arg = 0, n_env = 0;
    struct keep_spec s = { .term_ms = 10000, .kill_ms = 5000, .stop_signal = SIGTERM };
    struct form_field f;
    struct fl_err err;
    char *raw;

    if (fl_file_read(path, FORM_MAX, &raw, &len, &err) != FL_OK) {
        snprintf(why, 256, "%s", err.text);
        return false;
    }
    s.raw = (uint8_t *)raw;
    if (!form_check(s.raw, len, FORM_SPEC)) {
        snprintf(why, 256, "%s is no whole spec (%zu bytes)", path, len);
        free(s.raw);
        return false;
    }
    s.argv = calloc(count(s.raw, len, FORM_ARG) + 1, sizeof(*s.argv));
    s.env = calloc(count(s.raw, len, FORM_ENV) + 1, sizeof(*s.env));
    while (s.argv && s.env && form_next(s.raw, len, &at, &f))
        take(&s, &f, &n_arg, &n_env);
    if (n_arg == 0 || !s.dir || !s.out_path || !s.err_path) {
        snprintf(why, 256, "the spec %s lacks %s", path,
                 !s.dir       ? "the folder"
                 : n_arg == 0 ? "a command"
                              : "an output path");
        keep_spec_free(&s);
        return false;
    }
    const char *slash = strrchr(s.dir, '/');

    snprintf(s.name, sizeof(s.name), "furlong-%.24s", slash ? slash + 1 : s.dir);
    *out = s;
    return true;
}
