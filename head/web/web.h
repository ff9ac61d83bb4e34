/* head/web/web.h - the page at /, and what it reads beside the lists of head/rest
 *
 * The page is one file without anything from outside (page.html, page.css, *.js, joined when
 * this is built). It holds no data, so it is given to everybody; what it asks for is guarded as any
 * other request. A browser shows some rows of a list at a time: these answers are such pieces, in
 * an order that stays, and cost one walk over the tables however many nodes and jobs there are. */
#pragma once
#include "common/base/base.h"
#include "transport/http/http.h"

struct web_page {
    struct fl_bytes html;
    const char *
        policy; /* Content-Security-Policy: the digests of its own script and style, nothing else */
};
extern const struct web_page web_page; /* made by join.py */

void web_root(void *head, struct http_req *req);

/* A piece of a list: ?first=N&count=M, at most WEB_COUNT_MAX, and ?find=TEXT, any case. */
enum { WEB_COUNT = 50, WEB_COUNT_MAX = 200 };
void web_browse_jobs(void *head, struct http_req *req);  /* newest first; ?status=S           */
void web_browse_job(void *head, struct http_req *req);   /* one, its groups, a piece of its seats */
void web_browse_nodes(void *head, struct http_req *req); /* ?state=S, ?order=name|memory      */
