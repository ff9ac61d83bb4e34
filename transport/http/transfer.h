/* transport/http/transfer.h - one request of libcurl, blocking or in the loop; private to http */
#pragma once
#include <curl/curl.h>

#include "transport/http/http.h"

enum {
    HTTP_TIMEOUT_MS = 30000,
    HTTP_CONNECT_MS = 10000,
    HTTP_ANSWER_MAX = 64 << 20,
    HTTP_HEADERS_MAX = 64 << 10
};
struct http_transfer {
    CURL *easy;
    struct curl_slist *headers;
    void *body; /* a copy, in the loop */
    struct http_ask ask;
    struct http_answer answer;
    size_t body_cap, headers_len, headers_cap;
    struct fl_err err; /* what a callback of ours stopped it with */
    char curl_error[CURL_ERROR_SIZE];
};
void http_transfer_start(void); /* libcurl, once a process */
/* Not moved after it. keep: body is copied. */
enum fl_status http_transfer_init(struct http_transfer *t, const struct http_ask *ask, bool keep,
                                  struct fl_err *err);
void http_transfer_fini(struct http_transfer *t);
/* What rc means; the answer is whole on FL_OK. */
enum fl_status http_transfer_result(struct http_transfer *t, CURLcode rc, struct fl_err *err);
