/* cli/yaml_print.h - a tree of JSON as the YAML that Ray's command prints */
#pragma once
#include <jansson.h>

/* As PyYAML's dump does with indent 4, members in their order, "---" before and "..." behind: plain where a text reads
 * back as itself, else between quotes, folded at 80 columns. No need of libyaml, whose folding differs. free() it. */
char *yaml_text(const json_t *v);
