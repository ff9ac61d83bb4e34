/* worker/roles/prompts.h - prompt files, and the alphabet that they are written in
 *
 * One JSON object a line. The built-in model reads bytes: its alphabet is the set of bytes that
 * occur in the prompts and labels of the run, each one token, and token 0 ends an answer. */
#pragma once
#include "common/base/base.h"

enum { PROMPTS_MAX = 1 << 24, PROMPT_LINE_MAX = 1 << 20 };
struct prompt { char *input, *label; };
struct prompts { struct prompt *rows; uint32_t n; };

/* FL_INVALID: "FILE line N: ..." for what is no JSON or lacks a member. FL_NOT_FOUND: no such file. */
enum fl_status prompts_load(const char *path, const char *input_key, const char *label_key,
                            struct prompts **out, struct fl_err *err);
void prompts_destroy(struct prompts *p);
FL_AUTO_DEFINE(prompts)
/* A file that ships: $FURLONG_DATA_DIR, beside the installed programs, or the source tree's. */
enum fl_status prompts_shipped(const char *name, char out[1024], struct fl_err *err);

enum { ALPHABET_END = 0, ALPHABET_MAX = 257, ALPHABET_HEX = 513 };
struct alphabet {
    uint32_t n;            /* tokens, the end included           */
    uint8_t byte_of[257];  /* by token, from 1 on; bytes ascend  */
    uint16_t token_of[256]; /* 0: not in it                      */
};
void alphabet_init(struct alphabet *a);
void alphabet_add(struct alphabet *a, const char *text); /* then alphabet_settle */
void alphabet_settle(struct alphabet *a);
void alphabet_to_hex(const struct alphabet *a, char out[ALPHABET_HEX]);
enum fl_status alphabet_of_hex(const char *hex, struct alphabet *out, struct fl_err *err);
/* tokens: room for strlen(text). FL_INVALID: names the byte that the alphabet lacks. */
enum fl_status alphabet_encode(const struct alphabet *a, const char *text, int32_t *tokens,
                               uint32_t *n, struct fl_err *err);
/* Up to the end token; text: room for n + 1. */
void alphabet_decode(const struct alphabet *a, const int32_t *tokens, uint32_t n, char *text);
