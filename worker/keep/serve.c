#include "worker/keep/keeper.h"
#include "common/base/fault.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

bool keep_listen(struct keeper *k, char why[256])
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };

    if (snprintf(at.sun_path, sizeof(at.sun_path), "%s/keep.sock", k->spec.dir) >=
        (int)sizeof(at.sun_path)) {
        snprintf(why, 256, "the path %.120s/keep.sock is too long for a socket (%zu bytes)",
                 k->spec.dir, sizeof(at.sun_path) - 1);
        return false;
    }
    (void)unlink(at.sun_path); /* of an earlier keeper of this folder, or none */
    k->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (k->listen_fd < 0 || FL_FAULT("keep.listen") ||
        bind(k->listen_fd, (struct sockaddr *)&at, sizeof(at)) < 0 ||
        listen(k->listen_fd, KEEP_CLIENTS) < 0) {
        snprintf(why, 256, "cannot listen at %s: %s", at.sun_path, strerror(errno));
        return false;
    }
    return true;
}

static bool send_state(struct keeper *k, int fd)
{
    struct form f = { 0 };
    bool ok;

    form_begin(&f, FORM_STATE);
    form_put_u64(&f, FORM_PHASE, k->phase);
    if (k->executed) {
        form_put_u64(&f, FORM_PID, (uint64_t)k->worker);
        form_put_u64(&f, FORM_START_TIME, k->worker_start);
    }
    form_put_u64(&f, FORM_KEEPER, (uint64_t)getpid());
    form_put_text(&f, FORM_GROUP, k->group.text);
    ok = form_end(&f) && send(fd, f.data, f.len, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)f.len;
    form_fini(&f);
    return ok;
}

static void drop(struct keeper *k, unsigned i)
{
    close(k->clients[i]);
    k->clients[i] = -1;
}

void keep_tell(struct keeper *k)
{
    for (unsigned i = 0; i < KEEP_CLIENTS; i++)
        if (k->clients[i] >= 0 && !send_state(k, k->clients[i]))
            drop(k, i);
}

static bool same_user(int fd)
{
    struct ucred who;
    socklen_t len = sizeof(who);

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len) == 0 &&
           (who.uid == geteuid() || who.uid == 0);
}

void keep_accept(struct keeper *k)
{
    int fd = accept4(k->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return;
    for (unsigned i = 0; i < KEEP_CLIENTS && same_user(fd); i++)
        if (k->clients[i] < 0) {
            k->clients[i] = fd;
            if (!send_state(k, fd))
                drop(k, i);
            return;
        }
    close(fd); /* another user, or more at once than anybody needs */
}

void keep_client_read(struct keeper *k, unsigned i)
{
    uint8_t buf[FORM_MSG_MAX];
    ssize_t n = recv(k->clients[i], buf, sizeof(buf), MSG_DONTWAIT);
    uint64_t cause = PROC_STOPPED, term_ms = k->spec.term_ms, kill_ms = k->spec.kill_ms;
    const char *text = NULL;
    struct form_field f;
    size_t at = 0;

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) { /* a daemon that goes ends nothing */
        drop(k, i);
        return;
    }
    if (!form_check(buf, (size_t)n, FORM_STOP))
        return;
    while (form_next(buf, (size_t)n, &at, &f)) {
        if (f.tag == FORM_CAUSE)
            cause = form_u64(&f);
        else if (f.tag == FORM_TERM_MS)
            term_ms = form_u64(&f);
        else if (f.tag == FORM_KILL_MS)
            kill_ms = form_u64(&f);
        else if (f.tag == FORM_WHY)
            text = form_text(&f);
    }
    if (cause > PROC_KEEPER_LOST)
        cause = PROC_STOPPED;
    keep_stop(k, (enum proc_cause)cause, text,
              term_ms > UINT32_MAX ? UINT32_MAX : (uint32_t)term_ms,
              kill_ms > UINT32_MAX ? UINT32_MAX : (uint32_t)kill_ms);
    keep_tell(k);
}
