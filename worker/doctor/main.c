/* furlong-doctor: looks at this machine and says what would fail, with remedies */
#include <jansson.h>
#include <stdio.h>

#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/conf/opt.h"
#include "worker/doctor/doctor.h"
#include "worker/node/addr.h"

struct args { const char *address, *state_dir; bool json, no_devices; };
static const struct fl_opt opts[] = {
    { FL_OPT_TEXT, "address", .arg = "HOST:PORT", .at = offsetof(struct args, address), .help = "of the head that this node will join (6379)" },
    { FL_OPT_TEXT, "state-dir", .arg = "FOLDER", .at = offsetof(struct args, state_dir), .help = "as the daemons will get it" },
    { FL_OPT_SWITCH, "no-devices", .at = offsetof(struct args, no_devices), .help = "leave GPUs and shared memory between processes alone" },
    { FL_OPT_SWITCH, "json", .at = offsetof(struct args, json), .help = "print JSON" },
    { 0 }
};

static void print_json(const struct doctor_list *l)
{
    json_t *all = json_array();

    for (size_t i = 0; i < l->n; i++)
        json_array_append_new(all, json_pack("{ss ss ss ss}", "check", l->all[i].check, "state", doctor_state_name(l->all[i].state),
                                             "text", l->all[i].text, "remedy", l->all[i].remedy));
    json_dumpf(all, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(all);
}

static void print_text(const struct doctor_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        const struct doctor_finding *f = &l->all[i];

        printf("%-4s  %-14s  %s\n", doctor_state_name(f->state), f->check, f->text);
        if (*f->remedy)
            printf("%-22s  -> %s\n", "", f->remedy);
    }
}

int main(int argc, char **argv)
{
    struct args a = { 0 };
    struct fl_opts o = { .program = "furlong doctor", .usage = "[OPTION...]",
                         .about = "What of this machine would make a run fail later, each with its remedy. Exit code 1 if anything would.",
                         .tables = { { NULL, opts, &a } } };
    static struct doctor_list found;
    char probe[FL_PATH_MAX];
    struct fl_err err = { 0 };
    int rc = fl_opts_main(&o, argc, argv);

    if (rc >= 0)
        return rc;
    if (o.n_words || fl_fault_env(&err) != FL_OK || (a.address && node_addr_check(a.address, &err) != FL_OK)) {
        fprintf(stderr, "furlong doctor: %s\n", o.n_words ? "takes no words, see --help" : err.text);
        return 2;
    }
    struct doctor_ask ask = { .head = a.address, .state_dir = a.state_dir, .ports = !a.address,
                              .probe = !a.no_devices && fl_program_path("furlong-probe", probe, NULL) == FL_OK ? probe : NULL };

    doctor_look(&ask, &found);
    if (a.json)
        print_json(&found);
    else
        print_text(&found);
    for (size_t i = 0; i < found.n; i++)
        rc = found.all[i].state == DOCTOR_FAIL ? 1 : rc;
    return rc > 0 ? 1 : 0;
}
