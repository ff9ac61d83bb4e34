/* transport/tls/tls.h - TLS between hosts: three files, checked before anything speaks with them
 *
 * Ray's names: RAY_USE_TLS=1 with RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT. Both
 * sides of a connection show a certificate of that CA (mutual TLS), and whoever dials looks for the
 * address that it dialled in the other's certificate. */
#pragma once
#include <sys/uio.h>

#include "common/base/base.h"
#include "common/base/file.h"
#include "common/conf/opt.h"

/* ---- which ---- */
enum tls_cover {
    TLS_OFF,
    TLS_NODES, /* between hosts: what RAY_USE_TLS means to Ray, whose HTTP stays as it is */
    TLS_ALL    /* the head's HTTP too */
};
struct tls_opts {
    const char *cover, *cert, *key, *ca;
};
extern const struct fl_opt tls_opt_table[]; /* of a struct tls_opts */

struct tls_pem {
    char *cert, *key, *ca; /* as it was in the files */
    unsigned turn;         /* how often they were taken anew until then */
};
struct tls_id { /* who this process is, to others; open, but what follows is read and written by tls alone */
    char cert_path[FL_PATH_MAX], key_path[FL_PATH_MAX], ca_path[FL_PATH_MAX];
    /* Set it before the first connection. New files were taken (why NULL), or they do not fit and the old ones stay.
     * On any thread, and it must not come back to tls: for the log. */
    void (*renewed)(const struct tls_id *id, const struct fl_err *why);
    uint64_t look_ns; /* the files are looked at no more often: a second */

    struct tls_pem pem;
    void *session[2];
    struct tls_stamp {
        uint64_t device, file, bytes, changed_ns;
    } seen[3];
    uint64_t looked_ns;
};
/* Which it is, by the options and RAY_USE_TLS. FL_INVALID: on, and a file is not named. */
enum fl_status tls_opts_cover(const struct tls_opts *o, enum tls_cover *out, struct fl_err *err);
/* Reads the files, no more. FL_NOT_FOUND, FL_DENIED: one cannot be read. */
enum fl_status tls_id_create(const char *cert, const char *key, const char *ca, struct tls_id **out,
                             struct fl_err *err);
void tls_id_destroy(struct tls_id *id);
FL_AUTO_DEFINE(tls_id)
/* Certificates of a service that runs for weeks are replaced under it. Whoever begins a connection looks whether the
 * files have become others; if all three were read whole and key and certificate are a pair, they are shown from then on,
 * connections that are open keep what they have. Any thread. Sessions look by themselves. The turn: see tls_pem. */
unsigned tls_id_look(struct tls_id *id);
enum fl_status tls_id_pem(struct tls_id *id, struct tls_pem *out, struct fl_err *err); /* a copy; tls_pem_fini() */
void tls_pem_fini(struct tls_pem *pem);

/* ---- whether they fit (check.c, which alone links libcrypto) ---- */
/* PEM, in their time, key and certificate a pair, signed by the CA. FL_INVALID: one sentence with
 * the file and the remedy. */
enum fl_status tls_id_check(const struct tls_id *id, struct fl_err *err);
/* The certificate names host, an address or a name; else FL_INVALID says what it names. */
enum fl_status tls_id_names(const struct tls_id *id, const char *host, struct fl_err *err);
/* All of it, for a program: what becomes of new files is in its log. *out stays NULL with TLS_OFF. */
enum fl_status tls_load(const struct tls_opts *o, enum tls_cover *cover, struct tls_id **out,
                        struct fl_err *err);

/* ---- a connection (session.c: libssl is found by dlopen, once somebody asks) ---- */
struct tls_session;
/* On a connected socket that stays the caller's. host: whom we dialled; NULL: we were dialled.
 * FL_UNSUPPORTED: this machine has no libssl. */
enum fl_status tls_session_create(struct tls_id *id, int fd, const char *host,
                                  struct tls_session **out, struct fl_err *err);
void tls_session_destroy(struct tls_session *s);
/* The three below: FL_AGAIN with what to poll for in *events. FL_DENIED: a certificate, this side's
 * or the other's, is not taken; FL_UNSUPPORTED: the other side speaks no TLS; FL_UNREACHABLE: it
 * hung up. */
enum fl_status tls_session_shake(struct tls_session *s, unsigned *events, struct fl_err *err);
/* After FL_AGAIN the same bytes come first again: part of them may have gone. */
enum fl_status tls_session_write(struct tls_session *s, const struct iovec *iov, unsigned n,
                                 size_t *wrote, unsigned *events, struct fl_err *err);
enum fl_status tls_session_read(struct tls_session *s, const struct iovec *iov, unsigned n,
                                size_t *got, unsigned *events, struct fl_err *err);
bool tls_session_has(const struct tls_session *s); /* bytes that no poll tells of */

/* Dials and greets, for the sentence that a library does not give: FL_OK, all is well with TLS
 * there. id NULL: only whether that side speaks TLS (FL_UNSUPPORTED: it does not). Blocks up to
 * wait_ms. */
enum fl_status tls_diagnose(struct tls_id *id, const char *host, uint16_t port, uint32_t wait_ms,
                            struct fl_err *err);
