/* Rows as Ray prints them: tests/data/yaml/rows.yaml is what its command prints of rows.json (PyYAML 6.0) */
#include <stdio.h>
#include <stdlib.h>

#include "cli/yaml_print.h"
#include "common/base/file.h"
#include "tests/t.h"

static void prints_as_ray(void **state)
{
    json_t *rows = json_load_file(T_DATA "/yaml/rows.json", JSON_REJECT_DUPLICATES, NULL), *none = json_array();
    struct fl_err err = { 0 };
    char *wanted, *got;
    size_t len;

    (void)state;
    t_true(rows != NULL);
    t_ok(fl_file_read(T_DATA "/yaml/rows.yaml", 1 << 20, &wanted, &len, &err), &err);
    got = yaml_text(rows);
    t_str_eq(got, wanted);
    free(got);
    got = yaml_text(none);
    t_str_eq(got, "--- []\n...\n");
    free(got);
    free(wanted);
    json_decref(none);
    json_decref(rows);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(prints_as_ray),
    };

    return t_run("yaml", tests);
}
