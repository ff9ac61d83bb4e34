#include <stdio.h>

/* Debian's archive of jansson is compiled for programs: it reads libc's stdin, an object, in a way
 * that a shared object cannot. Only json_loadf() looks at it, for the name in its errors, and
 * nothing here calls that; so the linker is told (--wrap=stdin) to take this one. */
extern FILE *__wrap_stdin;
FILE *__wrap_stdin;
