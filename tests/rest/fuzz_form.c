/* Any bytes as the body of a submission. */
#include <stdlib.h>

#include "common/conf/json.h"
#include "head/rest/form.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct form f = { 0 };
    struct fl_err err;
    json_t *o = NULL;

    if (fl_json_parse((const char *)data, size, "body", 1 << 20, &o, &err) == FL_OK && json_is_object(o) &&
        form_read(&f, o, &err) == FL_OK && !f.ask.entrypoint)
        abort(); /* what was taken has a command */
    form_fini(&f);
    json_decref(o);
    return 0;
}
