/* Every request of a command carries what finds and opens the cluster */
#include <stdlib.h>
#include <string.h>

#include "cli/api.h"
#include "tests/t.h"

static void test_a_request_has_all_of_the_cluster(void **state)
{
    struct cli_cluster c = { .url = "https://head:8265", .headers = { "X-A: 1", "X-B: 2" }, .ca = "/tmp/ca.crt", .answer_max_bytes = 7 };
    struct cli_request r;
    struct fl_err err = { 0 };
    char bearer[CLI_TOKEN_BYTES + 32];

    (void)state;
    memset(c.token, 't', sizeof(c.token) - 1); /* the longest */
    snprintf(bearer, sizeof(bearer), "Authorization: Bearer %s", c.token);
    t_ok(cli_request(&c, "POST", "/api/jobs/", "Content-Type: application/json", 1234, &r, &err), &err);
    t_str_eq(r.ask.url, "https://head:8265/api/jobs/");
    t_str_eq(r.ask.method, "POST");
    t_str_eq(r.ask.headers[0], "Content-Type: application/json");
    t_str_eq(r.ask.headers[1], "X-A: 1");
    t_str_eq(r.ask.headers[2], "X-B: 2");
    t_str_eq(r.ask.headers[3], bearer);
    t_true(!r.ask.headers[4]);
    t_str_eq(r.ask.ca_path, "/tmp/ca.crt");
    t_int_eq(r.ask.timeout_ms, 1234);
    t_int_eq(r.ask.answer_max_bytes, 7);
}

static void test_nothing_is_shown_where_there_is_nothing(void **state)
{
    struct cli_cluster c = { .url = "http://head:8265", .unverified = true };
    struct cli_request r;
    struct fl_err err = { 0 };
    char path[2000];

    (void)state;
    setenv("RAY_TLS_CA_CERT", "/tmp/rays.crt", 1);
    t_ok(cli_request(&c, NULL, "/", NULL, 0, &r, &err), &err);
    t_true(!r.ask.headers[0] && !r.ask.method && r.ask.unverified);
    t_str_eq(r.ask.ca_path, "/tmp/rays.crt");
    unsetenv("RAY_TLS_CA_CERT");
    t_ok(cli_request(&c, NULL, "/api/jobs/a b%c#\xc3\xa9/logs?x=%20&y={1}", NULL, 0, &r, &err), &err);
    t_str_eq(r.ask.url, "http://head:8265/api/jobs/a%20b%25c%23%C3%A9/logs?x=%20&y=%7B1%7D");
    memset(path, 'x', sizeof(path) - 1);
    path[0] = '/';
    path[sizeof(path) - 1] = 0;
    t_refused(cli_request(&c, NULL, path, NULL, 0, &r, &err), FL_INVALID, &err);
    t_has(err.text, "too long");
}

int main(void)
{
    static const struct CMUnitTest tests[] = { cmocka_unit_test(test_a_request_has_all_of_the_cluster),
                                               cmocka_unit_test(test_nothing_is_shown_where_there_is_nothing) };

    return t_run("request", tests);
}
