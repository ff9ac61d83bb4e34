/* What is read from outside as text: JSON, sizes, ids, fault lists. Nothing may crash, and what is
 * accepted must be in its bounds. */
#include <stdlib.h>

#include "common/base/id.h"
#include "common/base/str.h"
#include "common/conf/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void walk(const struct fl_json_at *at, unsigned depth)
{
    struct fl_json_at below;
    struct fl_err err;
    size_t n = 0;
    int64_t i;

    if (depth > FL_JSON_DEPTH)
        abort();
    if (fl_json_int(at, NULL, -5, 5, &i, &err) == FL_OK && (i < -5 || i > 5))
        abort();
    if (fl_json_array(at, NULL, &below, &n, &err) != FL_OK)
        return;
    for (size_t k = 0; k < n; k++) {
        struct fl_json_at item = fl_json_item(&below, k);

        walk(&item, depth + 1);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { MOST = 4096 };
    json_t *json = NULL;
    struct fl_err err = { 0 };
    uint64_t bytes;
    uint8_t id[28];

    if (fl_json_parse((const char *)data, size, "fuzz", MOST, &json, &err) == FL_OK) {
        struct fl_json_at root = fl_json_root(json, "fuzz");

        if (size > MOST)
            abort();
        walk(&root, 0);
        json_decref(json);
    } else if (!err.text[0]) {
        abort();
    }
    char *text = malloc(size + 1);
    if (!text)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    if (fl_parse_bytes(text, 1000, &bytes, &err) == FL_OK && bytes > 1000)
        abort();
    if (fl_hex_parse(text, id, sizeof(id)) && strlen(text) != 56)
        abort();
    free(text);
    return 0;
}
