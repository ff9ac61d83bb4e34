/* cli/table.h - rows of text in columns, for people
 *
 * Columns are as wide as their widest cell; cells that look like numbers are set to the right. */
#pragma once
#include <stdio.h>

enum { CLI_COLUMNS = 12, CLI_CELL_BYTES = 512 };
struct cli_table;

struct cli_table *cli_table_create(const char *const *heads, size_t n); /* aborts without memory */
void cli_table_row(struct cli_table *t, const char *const *cells);      /* copied; NULL: "-" */
void cli_table_print(const struct cli_table *t, FILE *to);              /* nothing but heads: heads */
void cli_table_destroy(struct cli_table *t);

/* 3723 seconds as "1h 2m"; out has room for 24. */
const char *cli_duration(char out[24], double seconds);
