/* cli/api.h - which cluster is meant, and one request to its head */
#pragma once
#include <jansson.h>

#include "common/base/base.h"
#include "common/base/file.h"
#include "transport/http/http.h"

enum { CLI_URL_BYTES = 256, CLI_HEADERS = 8, CLI_TOKEN_BYTES = 512 };
struct cli_cluster {
    char url[CLI_URL_BYTES]; /* http://HOST:PORT, no slash at the end */
    char token[CLI_TOKEN_BYTES];          /* "" when there is none to show         */
    const char *headers[CLI_HEADERS]; /* of each request besides, or NULL */
    size_t answer_max_bytes; /* 0: 64 MiB */
    char ca[FL_PATH_MAX]; /* of https: a file of certificates that are trusted; "": RAY_TLS_CA_CERT, or the system's */
    bool unverified;      /* of https: whoever answers is believed */
};
struct cli_request { /* ask points into it: it stays where it is */
    struct http_ask ask;
    char url[CLI_URL_BYTES + 512], bearer[CLI_TOKEN_BYTES + 32];
    const char *headers[CLI_HEADERS + 3];
};
/* A request to the cluster as all are made: its address, token and headers, and how its certificate is judged. For those
 * that cli_ask() does not make. method NULL: as http_ask has it; path begins with /; own: one header more, or NULL.
 *
 * FL_INVALID: the path is too long */
enum fl_status cli_request(const struct cli_cluster *c, const char *method, const char *path, const char *own,
                           uint32_t timeout_ms, struct cli_request *r, struct fl_err *err);

/* The cluster that address names, else FURLONG_ADDRESS, else RAY_ADDRESS, else the head that runs here.
 *
 * address        "http://HOST:PORT", "HOST:PORT", "auto" (the head that runs here) or NULL
 * FL_NOT_FOUND   none is named and none runs here (private ones of other runs do not count)
 * FL_INVALID     not an address, or several heads run here: err lists them */
enum fl_status cli_cluster_find(const char *address, struct cli_cluster *out, struct fl_err *err);

enum fl_status cli_url_of(const char *address, char url[CLI_URL_BYTES], struct fl_err *err); /* [http://]HOST:PORT */
void cli_token(char *out, size_t cap);        /* the one that this user has, or "" */
void cli_token_of_ray(char *out, size_t cap); /* RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token, or "" */

enum fl_status cli_token_keep(const char *token, struct fl_err *err); /* in the file where it is looked for */
/* A new one, in the file that Ray's clients read: RAY_AUTH_TOKEN_PATH, else ~/.ray/auth_token; 0600. */
enum fl_status cli_token_make(char *out, size_t cap, struct fl_err *err);

/* Adds those of a JSON object, as RAY_JOB_HEADERS has it, at most CLI_HEADERS; an Authorization of the user's own takes the
 * token's place. text holds them for as long as c is used. FL_INVALID: no JSON object, or longer than cap. */
enum fl_status cli_headers(struct cli_cluster *c, const char *json, char *text, size_t cap, struct fl_err *err);
/* One request, its answer whatever the status is: http_answer_fini(out). */
enum fl_status cli_ask(const struct cli_cluster *c, const char *method, const char *path,
                       const json_t *body, uint32_t timeout_ms, struct http_answer *out,
                       struct fl_err *err);
/* Asks GET /api/version who answers: a head of ours says so in a header of every answer, whatever its status.
 *
 * *version (NULL: not wanted) is what it answered, the caller's to json_decref(); NULL when that was no version
 * FL_DENIED  a head of Ray's that wants another token, with its words; of ours the token is tried later */
enum fl_status cli_is_ours(const struct cli_cluster *c, bool *ours, json_t **version, struct fl_err *err);
/* One request, one JSON answer. path begins with /; body is borrowed, NULL: a GET unless method says.
 *
 * *out (NULL: not wanted) is the caller's to json_decref(). An answer with an error becomes the status
 * that fits it, its sentence is err's: FL_NOT_FOUND 404, FL_DENIED 401 and 403, FL_EXISTS 409, ... */
enum fl_status cli_call(const struct cli_cluster *c, const char *method, const char *path,
                        const json_t *body, uint32_t timeout_ms, json_t **out, struct fl_err *err);
/* The same with the answer as it came: http_answer_fini(out). Errors as above. */
enum fl_status cli_fetch(const struct cli_cluster *c, const char *method, const char *path,
                         const json_t *body, uint32_t timeout_ms, struct http_answer *out,
                         struct fl_err *err);

/* Members of answers: "" and 0 where they are absent or of another type. */
const char *cli_text(const json_t *o, const char *name);
int64_t cli_int(const json_t *o, const char *name);
double cli_real(const json_t *o, const char *name);
bool cli_job_over(const char *status); /* SUCCEEDED, FAILED or STOPPED */
