/* tests/link/pair.h - a source and a receiver on one loop, a memory each */
#pragma once
#include "tests/link/wait.h"
#include "transport/link/dev.h"

/* On the fake a device's memory is ordinary memory, so a test looks at it as at the host's. */
struct kind {
    const struct link_ops *ops;
    bool on_device; /* the first one */
};
struct pair {
    const struct link_ops *ops;
    struct fl_loop *loop;
    struct link_place places[2];
    struct link *from, *to;
    struct link_mem src, dst, view; /* src: random; view: of it, at the receiver */
};

enum fl_status kind_mem(const struct kind *k, uint64_t bytes, struct link_mem *out,
                        struct fl_err *err);
void kind_mem_drop(struct link_mem *m);
void kind_place(const struct kind *k, struct link_place *out);

void pair_open(struct pair *p, const struct kind *k, uint64_t bytes);
void pair_open_host(struct pair *p, const struct link_ops *ops, uint64_t bytes);
void pair_open_end(struct pair *p, unsigned self, struct link **out); /* self 0: the source */
void pair_close(struct pair *p);
/* From the view into dst. */
enum fl_status pair_pull(struct pair *p, const struct link_seg *segs, size_t n,
                         uint64_t (*digests)[2], struct link_op *op, struct fl_err *err);
struct link_seg stretch(size_t i, uint64_t bytes); /* the ith of that length, to where it was */
