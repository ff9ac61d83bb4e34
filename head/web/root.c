#include "head/web/web.h"

void web_root(void *head, struct http_req *req)
{
    (void)head;
    http_reply_header(req, "Content-Security-Policy", "%s", web_page.policy);
    /* A second policy, because one header has at most 255 bytes here; both hold. */
    http_reply_header(req, "Content-Security-Policy",
                      "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                      "require-trusted-types-for 'script'; trusted-types 'none'");
    http_reply_header(req, "Referrer-Policy", "no-referrer");
    http_reply_bytes(req, 200, "text/html; charset=utf-8", web_page.html);
}
