/* tests/worker/fuzz_form.c - forms from anywhere: checked, then walked without a further look */
#include "worker/keep/form.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint32_t kinds[] = { FORM_SPEC, FORM_EXIT, FORM_STATE, FORM_STOP };
    uint8_t *copy = malloc(size + 4); /* exactly as long, so that a step too far is seen */

    if (!copy)
        return 0;
    for (unsigned i = 0; i < 4; i++) {
        struct form_field f;
        size_t at = 0;

        memcpy(copy, &kinds[i], 4); /* the magic word is not to be guessed */
        memcpy(copy + 4, data, size);
        if (!form_check(copy, size + 4, kinds[i]))
            continue;
        while (form_next(copy, size + 4, &at, &f))
            if (strlen(form_text(&f)) > f.len || (f.len != 8 && form_u64(&f)))
                abort();
    }
    free(copy);
    return 0;
}
