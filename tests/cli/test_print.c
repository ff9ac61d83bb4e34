/* Tables, sizes and shell lines, as a user reads them. */
#include <stdlib.h>

#include "cli/quote.h"
#include "cli/table.h"
#include "common/base/str.h"
#include "tests/t.h"

static void test_columns_line_up(void **state)
{
    struct cli_table *t = cli_table_create((const char *const[]){ "name", "n", "why" }, 3);
    char *text;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    (void)state;
    cli_table_row(t, (const char *const[]){ "übung", "7", "a\033[2Jb" });
    cli_table_row(t, (const char *const[]){ "x", "1200", NULL });
    cli_table_print(t, to);
    fclose(to);
    t_str_eq(text, "name      n  why\n"
                   "übung     7  a [2Jb\n"
                   "x      1200  -\n");
    free(text);
    cli_table_destroy(t);
}

/* A command line of a page does not push the columns behind it off the screen; the last column is whole. */
static void test_a_long_cell_is_shortened(void **state)
{
    struct cli_table *t = cli_table_create((const char *const[]){ "command", "why" }, 2);
    char longer[200] = "", *text;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    (void)state;
    for (int i = 0; i < 40; i++)
        strcat(longer, "\u00fcx");
    cli_table_row(t, (const char *const[]){ longer, longer });
    cli_table_print(t, to);
    fclose(to);
    const char *row = strchr(text, '\n') + 1;

    t_true(strncmp(row, longer, 104) == 0 && strncmp(row + 104, "...  ", 5) == 0, "69 columns, cut between two letters: %s", row);
    t_has(row + 109, longer);
    free(text);
    cli_table_destroy(t);
}

static void test_sizes(void **state)
{
    char b[24];

    (void)state;
    t_str_eq(fl_bytes_text(b, 512), "512 B");
    t_str_eq(fl_bytes_text(b, 1536), "1.5 KiB");
    t_str_eq(fl_bytes_text(b, 3ull << 30), "3.0 GiB");
    t_str_eq(cli_duration(b, 59.7), "1m 0s");
    t_str_eq(cli_duration(b, 3723), "1h 2m");
    t_str_eq(cli_duration(b, 200000), "2d 7h");
}

/* What a real shell makes of the line is what went in. */
static void test_a_shell_gives_the_words_back(void **state)
{
    static const char *const words[] = { "printf", "<%s>", "plain", "a b", "it's", "$HOME", "`id`", "", "\"q\"",
                                         "new\nline", "~", "*", "-n", "back\\slash", NULL };
    char *line = cli_shell_line(words), wanted[256] = "", got[256];

    (void)state;
    for (size_t i = 2; words[i]; i++)
        snprintf(wanted + strlen(wanted), sizeof(wanted) - strlen(wanted), "<%s>", words[i]);
    FILE *sh = popen(line, "r");
    t_true(sh != NULL);
    size_t n = fread(got, 1, sizeof(got) - 1, sh);
    got[n] = 0;
    t_int_eq(pclose(sh), 0);
    t_str_eq(got, wanted);
    free(line);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_columns_line_up), cmocka_unit_test(test_a_long_cell_is_shortened), cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_a_shell_gives_the_words_back),
    };
    return t_run("print", tests);
}
