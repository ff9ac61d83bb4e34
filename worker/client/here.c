#include <sys/mman.h>
#include <unistd.h>
#include "worker/client/client.h"

/* A page that the kernel empties in a forked child: telling parent from child costs one load, while
 * getpid() is a system call. Kernels before 4.14 have no such pages: the pid is compared there. */
static atomic_uint *mark;
static atomic_int mark_pid;

void client_here_mark(void)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;

    pthread_mutex_lock(&once);
    if (!mark) {
        void *p = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (p != MAP_FAILED && madvise(p, 1, MADV_WIPEONFORK) == 0) {
            mark = p;
            atomic_store(mark, 1);
        } else if (p != MAP_FAILED) {
            munmap(p, (size_t)sysconf(_SC_PAGESIZE));
        }
    }
    atomic_store(&mark_pid, getpid());
    pthread_mutex_unlock(&once);
}

static bool same_process(void)
{
    if (mark)
        return atomic_load_explicit(mark, memory_order_relaxed) == 1;
    return atomic_load(&mark_pid) == getpid();
}

enum fl_status client_here(const struct furlong *f, struct fl_err *err)
{
    if (!f)
        return fl_fail(err, FL_INVALID, "no seat: furlong_join() comes first");
    if (same_process())
        return FL_OK;
    return fl_fail(err, FL_UNSUPPORTED,
                   "process %d is a forked child of the one that joined as %s: exec instead",
                   (int)getpid(), f->seat.name);
}
