#include "transport/link/link_priv.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "common/base/file.h"
#include "common/base/str.h"

const struct link_ops *const link_table[] = { &link_shm, &link_cuda_ipc, &link_nccl, &link_tcp };
const size_t link_table_n = FL_LEN(link_table);

static uint64_t namespace_of(const char *path)
{
    struct stat s;

    return stat(path, &s) == 0 ? s.st_ino : 0; /* 0 is nobody's: reaches nothing */
}

enum fl_status link_place_here(const char *addr, struct link_place *out, struct fl_err *err)
{
    struct link_place p = { .pid_ns = namespace_of("/proc/self/ns/pid"),
                            .ipc_ns = namespace_of("/proc/self/ns/ipc") };
    char *boot;

    if (!addr || !addr[0])
        addr = "127.0.0.1";
    if (!FL_COPY(p.addr, addr))
        return fl_fail(err, FL_INVALID, "address %.80s is longer than %zu bytes", addr,
                       sizeof(p.addr) - 1);
    FL_TRY(fl_file_read("/proc/sys/kernel/random/boot_id", 64, &boot, NULL, err));
    boot[strcspn(boot, "\n")] = 0;
    fl_copy(p.host_boot, sizeof(p.host_boot), boot);
    free(boot);
    *out = p;
    return FL_OK;
}

void link_op_set(struct link_op *op, enum fl_status st, const char *fmt, ...)
{
    va_list ap;
    char text[sizeof(op->err.text)];

    op->err = (struct fl_err){ .status = st };
    if (st == FL_OK)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fl_fail(&op->err, st, "%s", text);
}

static void op_back(struct fl_task *t)
{
    struct link_op *op = container_of(t, struct link_op, back);

    op->done(op);
}

void link_op_end(struct fl_loop *l, struct link_op *op)
{
    op->back.run = op_back;
    fl_post(l, &op->back);
}

static void tell_run(struct fl_task *t)
{
    struct link *k = container_of(t, struct link, tell);
    struct link_op *ready = FL_TAKE(k->ready), *quiet = FL_TAKE(k->quiet);

    if (ready) /* may close the link: k is not touched from here on */
        ready->done(ready);
    if (quiet)
        quiet->done(quiet);
}

static void tell(struct link *k, struct link_op **which, struct link_op *op)
{
    link_op_set(op, FL_OK, "%s", "");
    *which = op;
    k->tell.run = tell_run;
    fl_post(k->loop, &k->tell);
}

void link_tell_ready(struct link *k, struct link_op *ready)
{
    tell(k, &k->ready, ready);
}

void link_tell_quiet(struct link *k, struct link_op *quiet)
{
    tell(k, &k->quiet, quiet);
}

void link_tell_now(struct link *k)
{
    fl_task_cancel(k->loop, &k->tell);
    tell_run(&k->tell);
}

static bool seg_fits(uint64_t off, uint64_t step, const struct link_seg *s, uint64_t room)
{
    uint64_t end;

    return !__builtin_mul_overflow(step, s->rows - 1ull, &end) &&
           !__builtin_add_overflow(end, off, &end) &&
           !__builtin_add_overflow(end, s->run_bytes, &end) && end <= room;
}

static enum fl_status check_seg(const struct link_seg *s, size_t i, uint64_t off, uint64_t step,
                                uint64_t room, const char *whose, uint64_t *sum, struct fl_err *err)
{
    uint64_t part;

    if (s->rows && s->run_bytes && seg_fits(off, step, s, room) &&
        !__builtin_mul_overflow(s->run_bytes, s->rows, &part) &&
        !__builtin_add_overflow(*sum, part, sum))
        return FL_OK;
    return fl_fail(
        err, FL_INVALID,
        "segment %zu: %u runs of %llu bytes, %llu apart, from %llu on, in %s memory of %llu", i,
        s->rows, (unsigned long long)s->run_bytes, (unsigned long long)step,
        (unsigned long long)off, whose, (unsigned long long)room);
}

enum fl_status link_check_side(const struct link_seg *segs, size_t n, uint64_t room, bool from,
                               uint64_t *bytes, struct fl_err *err)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++)
        FL_TRY(check_seg(&segs[i], i, from ? segs[i].from_off : segs[i].to_off,
                         from ? segs[i].from_step : segs[i].to_step, room,
                         from ? "the source's" : "the receiver's", &sum, err));
    *bytes = sum;
    return FL_OK;
}

enum fl_status link_check_segs(const struct link_seg *segs, size_t n, uint64_t from_bytes,
                               uint64_t to_bytes, uint64_t *bytes, struct fl_err *err)
{
    FL_TRY(link_check_side(segs, n, from_bytes, true, bytes, err));
    return link_check_side(segs, n, to_bytes, false, bytes, err);
}

enum fl_status link_no_ticket(uint8_t out[256], struct fl_err *err)
{
    (void)err;
    memset(out, 0, 256);
    return FL_OK;
}

enum fl_status link_no_send(struct link *k, unsigned to, struct link_span what, struct link_op *op,
                            struct fl_err *err)
{
    (void)k, (void)to, (void)what, (void)op;
    return fl_fail(err, FL_UNSUPPORTED, "this link does not send, it is pulled from");
}

enum fl_status link_no_recv(struct link *k, unsigned from, struct link_span where,
                            struct link_op *op, struct fl_err *err)
{
    (void)k, (void)from, (void)where, (void)op;
    return fl_fail(err, FL_UNSUPPORTED, "this link does not receive, it pulls");
}

enum fl_status link_no_cast(struct link *k, unsigned root, struct link_span what,
                            struct link_op *op, struct fl_err *err)
{
    (void)k, (void)root, (void)what, (void)op;
    return fl_fail(err, FL_UNSUPPORTED, "this link does not cast, each member pulls");
}

enum fl_status link_no_cast_segs(struct link *k, unsigned root, const struct link_mem *mem,
                                 const struct link_seg *segs, size_t n, uint64_t (*digests)[2],
                                 struct link_op *op, struct fl_err *err)
{
    (void)k, (void)root, (void)mem, (void)segs, (void)n, (void)digests, (void)op;
    return fl_fail(err, FL_UNSUPPORTED, "this link does not cast, each member pulls");
}

unsigned link_no_progress(struct link *k)
{
    (void)k;
    return 0;
}

int link_no_event_fd(struct link *k)
{
    (void)k;
    return -1;
}
