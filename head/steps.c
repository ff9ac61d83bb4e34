#include <jansson.h>
#include <stdlib.h>

#include "head/state.h"

enum { KEPT = HEAD_STEPS_KEPT };

enum fl_status steps_add(struct job *j, const char *json, struct fl_err *err)
{
    struct steps *s = &j->steps;
    size_t len = strlen(json);
    json_error_t why;

    if (len > HEAD_STEP_BYTES)
        return fl_fail(err, FL_INVALID, "a step record of %zu bytes, at most %d are taken", len,
                       HEAD_STEP_BYTES);
    json_t *parsed = json_loadb(json, len, JSON_REJECT_DUPLICATES, &why);
    bool object = json_is_object(parsed);
    json_decref(parsed);
    if (!object)
        return fl_fail(err, FL_INVALID, "a step record is one JSON object: %s",
                       parsed ? "this is none" : why.text);
    if (!s->json)
        s->json = must(calloc(KEPT, sizeof(*s->json)));
    char **at = &s->json[s->next % KEPT];
    free(*at);
    *at = must(strdup(json));
    s->next++;
    return FL_OK;
}

const char *steps_get(const struct steps *s, uint64_t number)
{
    return s->json && number < s->next && number + KEPT >= s->next ? s->json[number % KEPT] : NULL;
}

void steps_fini(struct steps *s)
{
    for (size_t i = 0; s->json && i < KEPT; i++)
        free(s->json[i]);
    free(s->json);
    s->json = NULL;
}
