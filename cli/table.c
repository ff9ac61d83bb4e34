#include "cli/table.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct cli_table {
    size_t n, rows, room;
    char **cells; /* row after row; the first row is the heads */
};

enum { SHOWN = 72 }; /* of a cell that others stand behind; --json has all of it */

/* Columns on the screen, not bytes: continuation bytes of UTF-8 take none. */
static size_t width_of(const char *s)
{
    size_t n = 0;

    for (; *s; s++)
        n += ((unsigned char)*s & 0xc0) != 0x80;
    return n;
}

static void shorten(char *c)
{
    size_t n = 0;

    if (width_of(c) <= SHOWN)
        return;
    for (; n < SHOWN - 3; n++)
        do
            c++;
        while (((unsigned char)*c & 0xc0) == 0x80);
    strcpy(c, "..."); /* four columns at least are left */
}

static char *cell_copy(const char *text)
{
    char *c = strndup(text ? text : "-", CLI_CELL_BYTES);

    if (!c)
        abort();
    for (char *p = c; *p; p++)
        if (iscntrl((unsigned char)*p)) /* a name must not be able to move the cursor */
            *p = ' ';
    return c;
}

static void add(struct cli_table *t, const char *const *cells)
{
    if (t->rows == t->room) {
        t->room = t->room ? 2 * t->room : 16;
        t->cells = reallocarray(t->cells, t->room * t->n, sizeof(*t->cells));
        if (!t->cells)
            abort();
    }
    for (size_t i = 0; i < t->n; i++) {
        char *c = t->cells[t->rows * t->n + i] = cell_copy(cells[i]);

        if (i + 1 < t->n)
            shorten(c);
    }
    t->rows++;
}

struct cli_table *cli_table_create(const char *const *heads, size_t n)
{
    struct cli_table *t = calloc(1, sizeof(*t));

    if (!t || n > CLI_COLUMNS)
        abort();
    t->n = n;
    add(t, heads);
    return t;
}

void cli_table_row(struct cli_table *t, const char *const *cells)
{
    add(t, cells);
}

static bool numeric(const char *s)
{
    return isdigit((unsigned char)*s) || (*s == '-' && isdigit((unsigned char)s[1]));
}

void cli_table_print(const struct cli_table *t, FILE *to)
{
    size_t width[CLI_COLUMNS] = { 0 };
    bool right[CLI_COLUMNS];

    for (size_t i = 0; i < t->n; i++) {
        right[i] = t->rows > 1;
        for (size_t r = 0; r < t->rows; r++) {
            const char *c = t->cells[r * t->n + i];

            if (width_of(c) > width[i])
                width[i] = width_of(c);
            if (r > 0 && !numeric(c) && strcmp(c, "-") != 0)
                right[i] = false;
        }
    }
    for (size_t r = 0; r < t->rows; r++)
        for (size_t i = 0; i < t->n; i++) {
            const char *c = t->cells[r * t->n + i];
            int pad = (int)(width[i] - width_of(c));
            bool last = i + 1 == t->n;

            if (right[i])
                fprintf(to, "%*s%s", pad, "", c);
            else
                fprintf(to, "%s%*s", c, last ? 0 : pad, "");
            fputs(last ? "\n" : "  ", to);
        }
}

void cli_table_destroy(struct cli_table *t)
{
    if (!t)
        return;
    for (size_t i = 0; i < t->rows * t->n; i++)
        free(t->cells[i]);
    free(t->cells);
    free(t);
}

const char *cli_duration(char out[24], double seconds)
{
    unsigned long s = seconds < 0 ? 0 : (unsigned long)(seconds + 0.5);

    if (s < 60)
        snprintf(out, 24, "%lus", s);
    else if (s < 3600)
        snprintf(out, 24, "%lum %lus", s / 60, s % 60);
    else if (s < 86400)
        snprintf(out, 24, "%luh %lum", s / 3600, s / 60 % 60);
    else
        snprintf(out, 24, "%lud %luh", s / 86400, s / 3600 % 24);
    return out;
}
