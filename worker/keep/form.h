/* worker/keep/form.h - the keeper's files and messages: tagged fields behind one magic word
 *
 * Needs nothing but libc: the keeper is static and small. The same words are in the spec that the
 * daemon writes, the exit record that the keeper leaves, and the messages between them. Little
 * endian; a reader skips tags that it does not know, so either side may be the newer one. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FORM_SPEC = 0x314b4c46,
    FORM_EXIT = 0x324b4c46,
    FORM_STATE = 0x334b4c46,
    FORM_STOP = 0x344b4c46
};
enum { FORM_MAX = 8 << 20, FORM_MSG_MAX = 4096, FORM_LAST_MAX = 2048, FORM_WHY_MAX = 255 };

enum form_tag {
    FORM_END = 0, /* closes a form: what lacks it was cut */
    FORM_WORKER,  /* 28 bytes */
    FORM_ATTEMPT,
    FORM_ARG, /* one each, in order */
    FORM_ENV,
    FORM_CWD,
    FORM_DIR,
    FORM_OUT,
    FORM_ERR,
    FORM_MEMORY_MAX,
    FORM_LOG_MAX,
    FORM_TERM_MS,
    FORM_KILL_MS,
    FORM_HAS_SEAT,
    FORM_CAUSE, /* enum proc_cause */
    FORM_CODE,
    FORM_SIGNAL,
    FORM_LIVED_MS,
    FORM_PEAK,
    FORM_TREE_ENDED,
    FORM_TREE_LEFT,
    FORM_WHY,
    FORM_LAST,
    FORM_PHASE,      /* enum keep_phase              */
    FORM_PID,        /* of the worker                */
    FORM_START_TIME, /* of the worker, in clock ticks */
    FORM_KEEPER,     /* pid of the keeper            */
    FORM_GROUP,      /* text: which cgroup it has, or why none */
    FORM_ORPHAN_MS,  /* without a daemon for so long: ends its worker; 0: never */
    FORM_STOP_SIGNAL, /* the first word of a stop; absent: SIGTERM */
    FORM_TAG_COUNT
};
enum keep_phase { KEEP_STARTING, KEEP_RUNNING, KEEP_ENDING, KEEP_ENDED };

struct form { /* grows; zero-initialised or from form_begin; free(data) is the owner's */
    uint8_t *data;
    size_t len, cap;
    bool failed; /* no memory, or over FORM_MAX: the form is not to be used */
};
void form_begin(struct form *f, uint32_t magic);
void form_put(struct form *f, enum form_tag tag, const void *data, size_t len);
void form_put_text(struct form *f, enum form_tag tag, const char *text); /* NULL: nothing */
void form_put_u64(struct form *f, enum form_tag tag, uint64_t v);
bool form_end(struct form *f); /* false: failed */
void form_fini(struct form *f);

struct form_field {
    enum form_tag tag;
    const void *data; /* texts end in a zero byte inside len + 1, checked by form_check */
    size_t len;
};
/* Is this a whole form of that kind? Every length is checked, and FORM_END is there. Readers call
 * it first; form_next then needs no further checks. */
bool form_check(const void *data, size_t len, uint32_t magic);
/* *at: 0 to begin with. false: the end. */
bool form_next(const void *data, size_t len, size_t *at, struct form_field *out);
uint64_t form_u64(const struct form_field *f); /* 0 when it is no number */
const char *form_text(const struct form_field *f);
