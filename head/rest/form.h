/* head/rest/form.h - the body of a submission, understood or refused; does nothing
 *
 * What is wrong is said in the words that Ray's own server has for it, which its users search for.
 */
#pragma once
#include <jansson.h>

#include "head/state.h"

enum { FORM_WANTS_MAX = 64, FORM_MODULES_MAX = 64, FORM_PORTS_MAX = 16 };

struct form { /* zeroed; ask borrows from it and from the JSON that it was read from */
    struct job_ask ask;
    Fl__Amount amounts[FORM_WANTS_MAX], *amount_list[FORM_WANTS_MAX];
    Fl__Label *labels, **label_list;
    Fl__EnvVar *env, **env_list;
    const char *modules[FORM_MODULES_MAX], *ports[FORM_PORTS_MAX];
    char *runtime_env, *metadata;
    bool bad_type; /* refused as Python's TypeError, else as its ValueError */
};
enum fl_status form_read(struct form *f, const json_t *body, struct fl_err *err);
void form_fini(struct form *f);
