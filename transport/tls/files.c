#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "common/base/fault.h"
#include "common/base/loop.h"
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

static enum fl_status take(const char *what, const char *path, char **pem, struct fl_err *err)
{
    size_t len;
    enum fl_status st = FL_FAULT("tls.read")
                            ? fl_fail(err, FL_EXHAUSTED, "read %s: no memory", path)
                            : fl_file_read(path, PEM_MAX, pem, &len, err);

    return st == FL_OK ? FL_OK
                       : fl_wrap(err, st, "TLS %s (give a file that this user may read)", what);
}

void tls_pem_fini(struct tls_pem *pem)
{
    if (pem->key)
        explicit_bzero(pem->key, strlen(pem->key));
    free(pem->key);
    free(pem->cert);
    free(pem->ca);
    *pem = (struct tls_pem){ 0 };
}

static enum fl_status take_all(struct tls_id *id, struct tls_pem *out, struct fl_err *err)
{
    struct tls_pem pem = { .turn = out->turn };
    enum fl_status st = take("certificate", id->cert_path, &pem.cert, err);

    if (st == FL_OK)
        st = take("key", id->key_path, &pem.key, err);
    if (st == FL_OK)
        st = take("CA", id->ca_path, &pem.ca, err);
    if (st != FL_OK) {
        tls_pem_fini(&pem);
        return st;
    }
    *out = pem;
    return FL_OK;
}

static void stamp(const struct tls_id *id, struct tls_stamp out[3])
{
    const char *const paths[] = { id->cert_path, id->key_path, id->ca_path };
    struct stat at;

    memset(out, 0, 3 * sizeof(*out)); /* not there: that is one, too */
    for (int i = 0; i < 3; i++)
        if (stat(paths[i], &at) == 0)
            out[i] = (struct tls_stamp){ at.st_dev, at.st_ino, (uint64_t)at.st_size,
                                         (uint64_t)at.st_mtim.tv_sec * 1000000000 +
                                             (uint64_t)at.st_mtim.tv_nsec };
}

enum fl_status tls_id_create(const char *cert, const char *key, const char *ca, struct tls_id **out,
                             struct fl_err *err)
{
    FL_AUTO(tls_id) struct tls_id *id = calloc(1, sizeof(*id));

    if (!id)
        return fl_fail(err, FL_EXHAUSTED, "no memory for TLS");
    id->look_ns = 1000000000;
    FL_TRY(fl_path(id->cert_path, err, "%s", cert));
    FL_TRY(fl_path(id->key_path, err, "%s", key));
    FL_TRY(fl_path(id->ca_path, err, "%s", ca));
    stamp(id, id->seen);
    FL_TRY(take_all(id, &id->pem, err));
    id->looked_ns = fl_clock_boot_ns();
    *out = FL_TAKE(id);
    return FL_OK;
}

void tls_id_destroy(struct tls_id *id)
{
    if (!id)
        return;
    tls_sessions_end(id);
    tls_pem_fini(&id->pem);
    free(id);
}

/* ---- new ones in their place */

pthread_mutex_t tls_lock = PTHREAD_MUTEX_INITIALIZER;

/* What is being written just now is not taken: it is another file, or of another time, when all has
 * been read. */
static enum fl_status renew(struct tls_id *id, const struct tls_stamp now[3], bool *torn,
                            struct fl_err *err)
{
    struct tls_pem pem = { .turn = id->pem.turn + 1 };
    struct tls_stamp then[3];
    enum fl_status st = take_all(id, &pem, err);

    if (st == FL_OK)
        st = tls_sessions_check(id, err);
    stamp(id, then);
    *torn = memcmp(now, then, sizeof(then)) != 0;
    if (st != FL_OK || *torn) {
        tls_pem_fini(&pem);
        return st;
    }
    tls_pem_fini(&id->pem);
    id->pem = pem;
    tls_sessions_end(id); /* made anew by whoever needs one */
    return FL_OK;
}

void tls_look_locked(struct tls_id *id)
{
    struct tls_stamp now[3];
    struct fl_err why = { 0 };
    uint64_t now_ns = fl_clock_boot_ns();
    bool torn;

    if (now_ns - id->looked_ns < id->look_ns)
        return;
    id->looked_ns = now_ns;
    stamp(id, now);
    if (memcmp(now, id->seen, sizeof(now)) == 0)
        return;
    enum fl_status st = renew(id, now, &torn, &why);

    if (torn)
        return; /* again with the next connection */
    memcpy(id->seen, now, sizeof(now));
    if (id->renewed)
        id->renewed(id, st == FL_OK ? NULL : &why);
}

unsigned tls_id_look(struct tls_id *id)
{
    pthread_mutex_lock(&tls_lock);
    tls_look_locked(id);
    unsigned turn = id->pem.turn;

    pthread_mutex_unlock(&tls_lock);
    return turn;
}

enum fl_status tls_id_pem(struct tls_id *id, struct tls_pem *out, struct fl_err *err)
{
    struct tls_pem pem;

    pthread_mutex_lock(&tls_lock);
    pem = (struct tls_pem){ strdup(id->pem.cert), strdup(id->pem.key), strdup(id->pem.ca),
                            id->pem.turn };
    pthread_mutex_unlock(&tls_lock);
    if (pem.cert && pem.key && pem.ca) {
        *out = pem;
        return FL_OK;
    }
    tls_pem_fini(&pem);
    return fl_fail(err, FL_EXHAUSTED, "no memory for a certificate");
}
