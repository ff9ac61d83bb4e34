#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/base/fault.h"
#include "common/base/str.h"
#include "transport/tls/session.h"

enum { PEM_MAX = 1 << 20 };

#define AT(member) .at = offsetof(struct tls_opts, member)
// clang-format off
const struct fl_opt tls_opt_table[] = {
    { FL_OPT_TEXT, "tls", .arg = "WHERE", .choices = "off|nodes|all", .env = "FURLONG_TLS", AT(cover),
      .help = "nodes: between hosts, as RAY_USE_TLS=1; all: the head's HTTP too" },
    { FL_OPT_TEXT, "tls-cert", .arg = "FILE", .env = "RAY_TLS_SERVER_CERT", AT(cert),
      .help = "certificate of this node, PEM, with its address in it" },
    { FL_OPT_TEXT, "tls-key", .arg = "FILE", .env = "RAY_TLS_SERVER_KEY", AT(key), .help = "its private key" },
    { FL_OPT_TEXT, "tls-ca", .arg = "FILE", .env = "RAY_TLS_CA_CERT", AT(ca),
      .help = "certificate of the CA that signed those of all nodes" },
    { 0 },
};
// clang-format on

static bool ray_says_so(void)
{
    const char *v = getenv("RAY_USE_TLS");

    return v && (strcmp(v, "1") == 0 || strcasecmp(v, "true") == 0);
}

enum fl_status tls_opts_cover(const struct tls_opts *o, enum tls_cover *out, struct fl_err *err)
{
    const struct {
        const char *file, *flag, *env, *what;
    } wanted[] = {
        { o->cert, "--tls-cert", "RAY_TLS_SERVER_CERT", "this node's certificate" },
        { o->key, "--tls-key", "RAY_TLS_SERVER_KEY", "the key of this node's certificate" },
        { o->ca, "--tls-ca", "RAY_TLS_CA_CERT", "the CA's certificate" },
    };
    enum tls_cover cover = !o->cover                      ? (ray_says_so() ? TLS_NODES : TLS_OFF)
                           : strcmp(o->cover, "all") == 0 ? TLS_ALL
                           : strcmp(o->cover, "off") == 0 ? TLS_OFF
                                                          : TLS_NODES;

    for (size_t i = 0; cover != TLS_OFF && i < FL_LEN(wanted); i++)
        if (!wanted[i].file || !*wanted[i].file)
            return fl_fail(err, FL_INVALID, "TLS is on (%s) and %s is not named: give %s or set %s",
                           o->cover ? "--tls" : "RAY_USE_TLS=1", wanted[i].what, wanted[i].flag,
                           wanted[i].env);
    *out = cover;
    return FL_OK;
}

static enum fl_status take(const char *what, const char *path, char kept[FL_PATH_MAX], char **pem,
                           struct fl_err *err)
{
    size_t len;

    FL_TRY(fl_path(kept, err, "%s", path));
    enum fl_status st = FL_FAULT("tls.read")
                            ? fl_fail(err, FL_EXHAUSTED, "read %s: no memory", path)
                            : fl_file_read(path, PEM_MAX, pem, &len, err);

    return st == FL_OK ? FL_OK
                       : fl_wrap(err, st, "TLS %s (give a file that this user may read)", what);
}

enum fl_status tls_id_create(const char *cert, const char *key, const char *ca, struct tls_id **out,
                             struct fl_err *err)
{
    FL_AUTO(tls_id) struct tls_id *id = calloc(1, sizeof(*id));

    if (!id)
        return fl_fail(err, FL_EXHAUSTED, "no memory for TLS");
    FL_TRY(take("certificate", cert, id->cert_path, &id->cert, err));
    FL_TRY(take("key", key, id->key_path, &id->key, err));
    FL_TRY(take("CA", ca, id->ca_path, &id->ca, err));
    *out = FL_TAKE(id);
    return FL_OK;
}

void tls_id_destroy(struct tls_id *id)
{
    if (!id)
        return;
    tls_sessions_end(id);
    if (id->key)
        explicit_bzero(id->key, strlen(id->key));
    free(id->key);
    free(id->cert);
    free(id->ca);
    free(id);
}
