/* cli/quote.h - words as one shell line */
#pragma once

/* Each word so that a POSIX shell gives it back unchanged; plain words stay plain. free() it. */
char *cli_shell_line(const char *const *words);
