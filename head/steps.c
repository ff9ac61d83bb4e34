#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/file.h"
#include "head/state.h"

enum { KEPT = HEAD_STEPS_KEPT, RECALL_BYTES = 8 << 20, LATE_MAX = 64 };

static bool is_object(const char *json, size_t len, json_error_t *why)
{
    json_t *parsed = json_loadb(json, len, JSON_REJECT_DUPLICATES, why);
    bool object = json_is_object(parsed);

    if (parsed && !object)
        (void)FL_COPY(why->text, "this is none");
    json_decref(parsed);
    return object;
}

static void put(struct steps *s, char *json_take)
{
    if (!s->json)
        s->json = must(calloc(KEPT, sizeof(*s->json)));
    char **at = &s->json[s->next % KEPT];
    free(*at);
    *at = json_take;
    s->next++;
}

/* A driver writes a step down, then tells it: what was read from its folder can still be told. */
static bool is_here(const struct steps *s, const char *json)
{
    for (uint64_t n = s->next; n > 0 && n + LATE_MAX > s->next; n--) {
        const char *one = steps_get(s, n - 1);

        if (one && strcmp(one, json) == 0)
            return true;
    }
    return false;
}

enum fl_status steps_add(struct job *j, const char *json, struct fl_err *err)
{
    struct steps *s = &j->steps;
    size_t len = strlen(json);
    json_error_t why;

    if (len > HEAD_STEP_BYTES)
        return fl_fail(err, FL_INVALID, "a step record of %zu bytes, at most %d are taken", len,
                       HEAD_STEP_BYTES);
    if (!is_object(json, len, &why))
        return fl_fail(err, FL_INVALID, "a step record is one JSON object: %s", why.text);
    if (!s->recalled || !is_here(s, json))
        put(s, must(strdup(json)));
    return FL_OK;
}

const char *steps_get(const struct steps *s, uint64_t number)
{
    return s->json && number < s->next && number + KEPT >= s->next ? s->json[number % KEPT] : NULL;
}

/* ---- from the run's folder, by a thread that may wait for a disk ---- */

struct recall {
    struct fl_work work;
    struct steps *steps; /* NULL: the job has gone meanwhile */
    char path[FL_PATH_MAX];
    char *lines[KEPT];
    size_t n; /* that were found; the last KEPT of them are there */
};

/* The last RECALL_BYTES, beginning with a whole line; NULL: nothing to be had. */
static char *read_end(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    char *text = NULL;

    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (text = malloc(RECALL_BYTES + 1)) != NULL) {
        off_t from = st.st_size > RECALL_BYTES ? st.st_size - RECALL_BYTES : 0;
        size_t len = 0;
        ssize_t n;

        while (len < RECALL_BYTES &&
               (n = pread(fd, text + len, RECALL_BYTES - len, from + (off_t)len)) > 0)
            len += (size_t)n;
        text[len] = '\0';
        char *line = from ? strchr(text, '\n') : NULL;
        if (line)
            memmove(text, line + 1, strlen(line + 1) + 1);
    }
    close(fd);
    return text;
}

static void recall_read(struct fl_work *w)
{
    struct recall *r = container_of(w, struct recall, work);
    char *text = read_end(r->path), *rest = text, *line;

    while (rest && (line = strsep(&rest, "\n")) != NULL &&
           rest) { /* the last has no end: half written */
        json_error_t why;
        size_t len = strlen(line);
        char *copy =
            len && len <= HEAD_STEP_BYTES && is_object(line, len, &why) ? strdup(line) : NULL;

        if (!copy)
            continue;
        free(r->lines[r->n % KEPT]);
        r->lines[r->n++ % KEPT] = copy;
    }
    free(text);
}

/* What was read, then what was told to this head meanwhile, each once. */
static void merge(struct steps *s, struct recall *r)
{
    struct steps told = *s;
    uint64_t at = told.next > KEPT ? told.next - KEPT : 0;
    const char *first = steps_get(&told, at);
    bool both = false;

    s->json = NULL;
    s->next = 0;
    for (size_t i = r->n > KEPT ? r->n - KEPT : 0; i < r->n; i++) {
        char *line = r->lines[i % KEPT];

        both |= first && strcmp(line, first) == 0;
        if (both)
            free(line);
        else
            put(s, line);
    }
    for (; at < told.next; at++)
        put(s, told.json[at % KEPT]);
    free(told.json);
}

static void recall_done(struct fl_work *w, enum fl_status st)
{
    struct recall *r = container_of(w, struct recall, work);

    (void)st;
    if (r->steps)
        merge(r->steps, r);
    for (size_t i = 0; i < KEPT && !r->steps; i++)
        free(r->lines[i]);
    if (r->steps) {
        r->steps->recall = NULL;
        followers_wake(container_of(r->steps, struct job, steps));
    }
    free(r);
}

void steps_recall(struct job *j)
{
    struct steps *s = &j->steps;
    struct fl_err err;

    if (s->recalled || !j->replayed || !j->rec->run_dir)
        return;
    s->recalled = true;
    struct recall *r = must(calloc(1, sizeof(*r)));
    if (fl_path(r->path, &err, "%s/steps.jsonl", j->rec->run_dir) != FL_OK) {
        free(r);
        return;
    }
    r->steps = s;
    r->work.work = recall_read;
    r->work.done = recall_done;
    s->recall = r;
    fl_work_start(j->head->loop, &r->work);
}

void steps_fini(struct steps *s)
{
    if (s->recall)
        s->recall->steps = NULL;
    for (size_t i = 0; s->json && i < KEPT; i++)
        free(s->json[i]);
    free(s->json);
    s->json = NULL;
}
