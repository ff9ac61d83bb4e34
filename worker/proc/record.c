#include "worker/proc/record.h"
#include "worker/keep/form.h"
#include "common/base/file.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *proc_cause_name(enum proc_cause c)
{
    static const char *const names[] = {
        "exited",     "signalled",   "stopped", "guard",       "cgroup-oom",
        "kernel-oom", "exec-failed", "fenced",  "keeper-lost",
    };

    return c >= 0 && c < sizeof(names) / sizeof(names[0]) ? names[c] : "unknown";
}

static void take_text(char *out, size_t cap, const struct form_field *f)
{
    size_t n = f->len < cap - 1 ? f->len : cap - 1;

    memcpy(out, f->data, n);
    out[n] = 0;
}

static void take(struct proc_exit *x, const struct form_field *f)
{
    uint64_t v = form_u64(f);

    switch (f->tag) {
    case FORM_CAUSE:
        x->cause = v <= PROC_KEEPER_LOST ? (enum proc_cause)v : PROC_EXITED;
        break;
    case FORM_CODE:
        x->code = (int)v;
        break;
    case FORM_SIGNAL:
        x->signal = (int)v;
        break;
    case FORM_LIVED_MS:
        x->lived_ms = v;
        break;
    case FORM_PEAK:
        x->peak_bytes = v;
        break;
    case FORM_TREE_ENDED:
        x->tree_ended = (unsigned)v;
        break;
    case FORM_TREE_LEFT:
        x->tree_left = (unsigned)v;
        break;
    case FORM_WHY:
        take_text(x->why, sizeof(x->why), f);
        break;
    case FORM_LAST:
        take_text(x->last, sizeof(x->last), f);
        break;
    default:
        break;
    }
}

enum fl_status proc_record_read(const char *dir, struct proc_exit *out, struct fl_err *err)
{
    struct proc_exit x = { .code = -1 };
    struct form_field f;
    char path[512];
    char *raw;
    size_t len, at = 0;

    snprintf(path, sizeof(path), "%s/exit", dir);
    FL_TRY(fl_file_read(path, FORM_MAX, &raw, &len, err));
    if (!form_check(raw, len, FORM_EXIT)) {
        free(raw);
        return fl_fail(err, FL_CORRUPT, "%s is no whole exit record (%zu bytes)", path, len);
    }
    while (form_next(raw, len, &at, &f))
        take(&x, &f);
    free(raw);
    *out = x;
    return FL_OK;
}

enum fl_status proc_record_write(const char *dir, const struct proc_exit *x, struct fl_err *err)
{
    struct form f = { 0 };
    char path[512];

    form_begin(&f, FORM_EXIT);
    form_put_u64(&f, FORM_CAUSE, x->cause);
    form_put_u64(&f, FORM_LIVED_MS, x->lived_ms);
    form_put_u64(&f, FORM_TREE_ENDED, x->tree_ended);
    form_put_u64(&f, FORM_TREE_LEFT, x->tree_left);
    form_put_text(&f, FORM_WHY, x->why);
    form_put_text(&f, FORM_LAST, x->last);
    snprintf(path, sizeof(path), "%s/exit", dir);
    enum fl_status st = form_end(&f) ? fl_file_write(path, 0600, f.data, f.len, err)
                                     : fl_fail(err, FL_EXHAUSTED, "no memory for %s", path);

    form_fini(&f);
    return st;
}
