/* A head with a crowd in it, served until standard input ends: serve STATE-DIR NODES JOBS. Its
 * first line is its address. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/web/crowd.h"
#include "transport/http/http.h"

static void on_input(void *arg, unsigned events)
{
    char room[64];

    (void)events;
    if (read(STDIN_FILENO, room, sizeof(room)) <= 0)
        fl_loop_stop(arg);
}

int main(int argc, char **argv)
{
    struct head_config cfg = { .beat_ms = 3600 * 1000, .silent_ms = 24 * 3600 * 1000 };
    struct http_config web = { .routes = head_routes(), .allowed = head_allows };
    struct fl_loop *loop = NULL;
    struct head *head = NULL;
    struct http_server *server = NULL;
    struct fl_watch *input = NULL;
    struct fl_err err = { 0 };

    if (argc != 4)
        return 2;
    signal(SIGPIPE, SIG_IGN);
    cfg.state_dir = argv[1];
    if (fl_loop_create(NULL, &loop, &err) != FL_OK || head_create(loop, &cfg, &head, &err) != FL_OK)
        goto failed;
    crowd_make(head, (unsigned)atoi(argv[2]), (unsigned)atoi(argv[3]));
    web.arg = head;
    if (http_server_create(loop, &web, &server, &err) != FL_OK ||
        fl_watch_create(loop, STDIN_FILENO, POLLIN | POLLHUP, on_input, loop, &input, &err) !=
            FL_OK)
        goto failed;
    printf("http://127.0.0.1:%u\n", http_server_port(server));
    fflush(stdout);
    fl_loop_run(loop);
failed:
    fl_watch_destroy(input);
    http_server_destroy(server);
    head_destroy(head);
    fl_loop_destroy(loop);
    if (err.status != FL_OK)
        fprintf(stderr, "serve: %s\n", err.text);
    return err.status != FL_OK;
}
