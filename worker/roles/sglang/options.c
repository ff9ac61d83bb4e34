#include <stdio.h>
#include <string.h>

#include "common/conf/opt.h"
#include "worker/roles/sglang/adapter.h"

#define AT(m) .at = offsetof(struct sglang_opts, m)
/* clang-format off */
static const struct fl_opt table[] = {
    { .kind = FL_OPT_TEXT, .name = "sglang-cmd", .arg = "COMMAND", AT(cmd),
      .help = "starts the server; {port} is its port, else --host 127.0.0.1 --port N is added" },
    { .kind = FL_OPT_TEXT, .name = "sglang-url", .arg = "URL", AT(url),
      .help = "attach to a server that runs" },
    { .kind = FL_OPT_TEXT, .name = "sglang-api-key", .arg = "KEY", .env = "SGLANG_API_KEY",
      AT(api_key), .help = "of the server (--api-key, --admin-api-key)" },
    { .kind = FL_OPT_TEXT, .name = "sglang-model", .arg = "FOLDER", AT(model),
      .help = "whose tensors are updated; default: the server's model path" },
    { .kind = FL_OPT_TEXT, .name = "sglang-weights", .arg = "WAY",
      .fallback = "auto", .choices = "auto|loader|group|disk",
      AT(weights), .help = "how new weights reach the server" },
    { .kind = FL_OPT_TEXT, .name = "sglang-weights-dir", .arg = "FOLDER", AT(weights_dir),
      .help = "where disk writes them; default /dev/shm; the server must see it" },
    { .kind = FL_OPT_TEXT, .name = "sglang-group-cmd", .arg = "COMMAND", AT(group_cmd),
      .help = "rank 0 of an NCCL group: python3 -m furlong_sglang.group, on a device of its own" },
    { .kind = FL_OPT_TEXT, .name = "sglang-socket", .arg = "@NAME", AT(socket),
      .help = "where the loader of an attached server comes: its FURLONG_SGLANG_SOCKET" },
    { .kind = FL_OPT_TEXT, .name = "sglang-pause", .arg = "MODE",
      .fallback = "in_place", .choices = "in_place|retract|abort",
      AT(pause), .help = "what a pause does with running requests" },
    { .kind = FL_OPT_REAL, .name = "sglang-start-timeout", .arg = "SECONDS",
      .fallback = "300", .min = 1, .max = 86400,
      AT(start_timeout_s), .help = "until the server is healthy" },
    { .kind = FL_OPT_REAL, .name = "sglang-control-timeout", .arg = "SECONDS",
      .fallback = "120", .min = 0.1, .max = 86400,
      AT(control_timeout_s), .help = "of one pause, release or update" },
    { .kind = FL_OPT_INT, .name = "update-weight-slots", .arg = "N",
      .fallback = "0", .min = 0, .max = 2,
      AT(slots), .help = "of this adapter's own memory; as for furlong train" },
    { .kind = FL_OPT_SWITCH, .name = "check-weight-update-equal", .off = true, AT(check_equal),
      .help = "read all bytes once more before they are loaded" },
    { .name = NULL },
};
/* clang-format on */

int adapter_options(struct sglang_opts *o, int argc, char **argv)
{
    struct fl_opts p = {
        .program = "furlong-sglang",
        .usage = "--sglang-cmd COMMAND | --sglang-url URL [OPTION...]",
        .about = "A rollout engine for furlong train --rollout-cmd: an SGLang server behind it.",
        .tables = { { NULL, table, o } },
    };
    int rc;

    *o = (struct sglang_opts){ 0 };
    rc = fl_opts_main(&p, argc, argv);
    if (rc >= 0)
        return rc;
    const char *wrong = NULL;
    if (!o->cmd == !o->url)
        wrong = "give one of --sglang-cmd and --sglang-url";
    else if (o->url && strncmp(o->url, "http://", 7) != 0 && strncmp(o->url, "https://", 8) != 0)
        wrong = "--sglang-url begins with http:// or https://";
    else if (!strcmp(o->weights, "group") && !o->group_cmd)
        wrong = "--sglang-weights group needs --sglang-group-cmd";
    else if (p.n_words)
        wrong = "words that are no option";
    if (!wrong)
        return -1;
    fprintf(stderr, "furlong-sglang: %s\n", wrong);
    return 2;
}
