#include "cli/env.h"

enum fl_status cli_yaml_parse(const char *text, size_t len, const char *what, json_t **out, struct fl_err *err)
{
    (void)text;
    (void)len;
    (void)out;
    return fl_fail(err, FL_UNSUPPORTED, "%.160s: YAML is not read by this build (libyaml was not there); write it as JSON", what);
}
