#include <stdio.h>
#include <sys/prctl.h>

#include "common/base/fault.h"
#include "worker/roles/sglang/adapter.h"

int main(int argc, char **argv)
{
    struct adapter a = { 0 };
    struct fl_err err = { 0 };
    int rc = adapter_options(&a.o, argc, argv);
    enum fl_status st;

    if (rc >= 0)
        return rc;
    /* launchers run `pkill -9 sglang` before they start: this process is not what they mean */
    (void)prctl(PR_SET_NAME, "furlong-engine"); /* cannot fail with a text */
    if (fl_fault_env(&err) != FL_OK) {
        fprintf(stderr, "furlong-sglang: %s\n", err.text);
        return 2;
    }
    st = adapter_run(&a, &err);
    if (st != FL_OK)
        fprintf(stderr, "furlong-sglang: %s\n", err.text);
    return st == FL_OK ? 0 : 1;
}
