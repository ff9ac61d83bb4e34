#include "cli/quote.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";

static void put_word(FILE *to, const char *w)
{
    if (*w && w[strspn(w, plain)] == 0) {
        fputs(w, to);
        return;
    }
    fputc('\'', to);
    for (; *w; w++)
        if (*w == '\'')
            fputs("'\\''", to);
        else
            fputc(*w, to);
    fputc('\'', to);
}

char *cli_shell_line(const char *const *words)
{
    char *line = NULL;
    size_t len;
    FILE *to = open_memstream(&line, &len);

    if (!to)
        abort();
    for (size_t i = 0; words[i]; i++) {
        if (i)
            fputc(' ', to);
        put_word(to, words[i]);
    }
    if (fclose(to) != 0)
        abort();
    return line;
}
