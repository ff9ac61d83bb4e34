#include "core.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>

struct py_op *op_new(size_t size, void (*work)(struct py_op *), void (*fini)(struct py_op *))
{
    struct py_op *op = calloc(1, size);
    pthread_condattr_t a;

    if (!op) {
        PyErr_NoMemory();
        return NULL;
    }
    op->work = work;
    op->fini = fini;
    pthread_mutex_init(&op->mu, NULL);
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(&op->ended, &a);
    pthread_condattr_destroy(&a);
    return op;
}

void op_free(struct py_op *op)
{
    if (!op)
        return;
    if (op->fini)
        op->fini(op);
    core_bytes_fini(&op->held[0]);
    core_bytes_fini(&op->held[1]);
    Py_XDECREF(op->keep);
    pthread_cond_destroy(&op->ended);
    pthread_mutex_destroy(&op->mu);
    free(op);
}

static void *op_thread(void *arg)
{
    struct py_op *op = arg;

    op->work(op);
    pthread_mutex_lock(&op->mu);
    op->over = true;
    pthread_cond_signal(&op->ended);
    pthread_mutex_unlock(&op->mu); /* the last touch: whoever sees `over` under mu may free */
    return NULL;
}

static bool thread_start(struct py_op *op)
{
    sigset_t all, before;
    pthread_t t;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&t, NULL, op_thread, op);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc == 0)
        pthread_detach(t);
    return rc == 0;
}

static bool over_in_slice(struct py_op *op)
{
    struct timespec until;
    bool over;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += SLICE_MS * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_mutex_lock(&op->mu);
    while (!op->over && pthread_cond_timedwait(&op->ended, &op->mu, &until) == 0)
        ;
    over = op->over;
    pthread_mutex_unlock(&op->mu);
    return over;
}

static struct py_op *lost; /* those without a seat */

void op_sweep(struct py_op **adrift)
{
    for (struct py_op **at = adrift; *at;) {
        struct py_op *op = *at;
        bool over;

        pthread_mutex_lock(&op->mu);
        over = op->over;
        pthread_mutex_unlock(&op->mu);
        if (over) {
            *at = op->next;
            op_free(op);
        } else {
            at = &op->next;
        }
    }
}

int op_run(struct py_run *r, struct py_op *op)
{
    struct py_op **adrift = r ? &r->adrift : &lost;
    bool over = false;
    int rc = 0;

    op_sweep(adrift);
    if (!thread_start(op)) {
        Py_BEGIN_ALLOW_THREADS op->work(op);
        Py_END_ALLOW_THREADS return 0;
    }
    while (!over && rc == 0) {
        Py_BEGIN_ALLOW_THREADS over = over_in_slice(op);
        Py_END_ALLOW_THREADS if (!over) rc = r ? run_look(r) : PyErr_CheckSignals();
    }
    if (rc == 0)
        return 0;
    op->next = *adrift; /* it ends when the library lets it; nobody waits for it */
    *adrift = op;
    return -1;
}
