#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/str.h"
#include "transport/tls/session.h"

static void time_text(const ASN1_TIME *t, char *out, size_t cap)
{
    struct tm tm = { 0 };

    if (ASN1_TIME_to_tm(t, &tm) != 1 || strftime(out, cap, "%Y-%m-%d %H:%M UTC", &tm) == 0)
        (void)fl_copy(out, cap, "an unknown time");
}

static X509 *first_cert(const char *pem)
{
    BIO *b = BIO_new_mem_buf(pem, -1);
    X509 *x = b ? PEM_read_bio_X509(b, NULL, NULL, NULL) : NULL;

    BIO_free(b);
    ERR_clear_error();
    return x;
}

static EVP_PKEY *read_key(const char *pem)
{
    BIO *b = BIO_new_mem_buf(pem, -1);
    EVP_PKEY *k = b ? PEM_read_bio_PrivateKey(b, NULL, NULL, (void *)"") : NULL;

    BIO_free(b);
    ERR_clear_error();
    return k;
}

static enum fl_status in_time(const char *what, const char *path, const X509 *x, struct fl_err *err)
{
    char when[40];

    if (X509_cmp_current_time(X509_get0_notAfter(x)) < 0) {
        time_text(X509_get0_notAfter(x), when, sizeof(when));
        return fl_fail(err, FL_INVALID, "TLS %s %s has expired at %s: make a new one", what, path,
                       when);
    }
    if (X509_cmp_current_time(X509_get0_notBefore(x)) > 0) {
        time_text(X509_get0_notBefore(x), when, sizeof(when));
        return fl_fail(err, FL_INVALID,
                       "TLS %s %s is not valid before %s: look at this host's clock, or make a new "
                       "one",
                       what, path, when);
    }
    return FL_OK;
}

/* All certificates of the CA file are trusted; what follows the first in the other one is its
 * chain. */
static bool signed_by(const struct tls_id *id, X509 *cert, const char **why)
{
    X509_STORE *store = X509_STORE_new();
    X509_STORE_CTX *ctx = X509_STORE_CTX_new();
    STACK_OF(X509) *chain = sk_X509_new_null();
    BIO *b;
    X509 *x;
    bool ok = false;

    b = BIO_new_mem_buf(id->pem.ca, -1);
    while (store && b && (x = PEM_read_bio_X509(b, NULL, NULL, NULL))) {
        X509_STORE_add_cert(store, x);
        X509_free(x);
    }
    BIO_free(b);
    b = BIO_new_mem_buf(id->pem.cert, -1);
    while (chain && b && (x = PEM_read_bio_X509(b, NULL, NULL, NULL)))
        sk_X509_push(chain, x);
    BIO_free(b);
    *why = "no memory";
    if (store && ctx && chain && X509_STORE_CTX_init(ctx, store, cert, chain) == 1) {
        ok = X509_verify_cert(ctx) == 1;
        *why = X509_verify_cert_error_string(X509_STORE_CTX_get_error(ctx));
    }
    sk_X509_pop_free(chain, X509_free);
    X509_STORE_CTX_free(ctx);
    X509_STORE_free(store);
    ERR_clear_error();
    return ok;
}

static enum fl_status check_all(const struct tls_id *id, X509 *cert, X509 *ca, EVP_PKEY *key,
                                struct fl_err *err)
{
    const char *why;

    if (!cert)
        return fl_fail(err, FL_INVALID, "TLS certificate %s holds no certificate in PEM",
                       id->cert_path);
    if (!key)
        return fl_fail(err, FL_INVALID,
                       "TLS key %s holds no private key in PEM that opens without a password",
                       id->key_path);
    if (!ca)
        return fl_fail(err, FL_INVALID, "TLS CA %s holds no certificate in PEM", id->ca_path);
    FL_TRY(in_time("certificate", id->cert_path, cert, err));
    FL_TRY(in_time("CA", id->ca_path, ca, err));
    if (X509_check_private_key(cert, key) != 1) {
        ERR_clear_error();
        return fl_fail(err, FL_INVALID,
                       "TLS key %s does not fit the certificate %s: name the key that it was made "
                       "with",
                       id->key_path, id->cert_path);
    }
    if (X509_check_purpose(cert, X509_PURPOSE_SSL_SERVER, 0) != 1 ||
        X509_check_purpose(cert, X509_PURPOSE_SSL_CLIENT, 0) != 1)
        return fl_fail(
            err, FL_INVALID,
            "TLS certificate %s is for one side of a connection alone and is shown by both: "
            "make it with extendedKeyUsage=serverAuth,clientAuth, or without",
            id->cert_path);
    if (!signed_by(id, cert, &why))
        return fl_fail(
            err, FL_INVALID,
            "TLS certificate %s is not signed by the CA %s (%s): name the CA that signed "
            "it",
            id->cert_path, id->ca_path, why);
    return FL_OK;
}

enum fl_status tls_id_check(const struct tls_id *id, struct fl_err *err)
{
    X509 *cert = first_cert(id->pem.cert), *ca = first_cert(id->pem.ca);
    EVP_PKEY *key = read_key(id->pem.key);
    enum fl_status st = check_all(id, cert, ca, key, err);

    EVP_PKEY_free(key);
    X509_free(cert);
    X509_free(ca);
    return st;
}

static void names_of(const X509 *cert, struct fl_str *out)
{
    GENERAL_NAMES *all = X509_get_ext_d2i(cert, NID_subject_alt_name, NULL, NULL);

    for (int i = 0; i < sk_GENERAL_NAME_num(all); i++) {
        const GENERAL_NAME *n = sk_GENERAL_NAME_value(all, i);
        char text[INET6_ADDRSTRLEN] = "";

        if (n->type == GEN_DNS)
            fl_str_add(out, "%s%.*s", out->len ? ", " : "", ASN1_STRING_length(n->d.dNSName),
                       (const char *)ASN1_STRING_get0_data(n->d.dNSName));
        if (n->type == GEN_IPADD &&
            inet_ntop(ASN1_STRING_length(n->d.iPAddress) == 4 ? AF_INET : AF_INET6,
                      ASN1_STRING_get0_data(n->d.iPAddress), text, sizeof(text)))
            fl_str_add(out, "%s%s", out->len ? ", " : "", text);
    }
    GENERAL_NAMES_free(all);
}

enum fl_status tls_id_names(const struct tls_id *id, const char *host, struct fl_err *err)
{
    char list[120];
    struct fl_str names = FL_STR_ON(list);
    struct in6_addr any;
    bool address = inet_pton(AF_INET, host, &any) == 1 || inet_pton(AF_INET6, host, &any) == 1;
    pthread_mutex_lock(&tls_lock);
    X509 *cert = first_cert(id->pem.cert);

    pthread_mutex_unlock(&tls_lock);
    bool ok = cert && (address ? X509_check_ip_asc(cert, host, 0)
                               : X509_check_host(cert, host, 0, 0, NULL)) == 1;

    if (cert && !ok)
        names_of(cert, &names);
    X509_free(cert);
    ERR_clear_error();
    if (ok)
        return FL_OK;
    return fl_fail(err, FL_INVALID,
                   "TLS certificate %s names %s and not %s: make it with subjectAltName=%s:%s",
                   id->cert_path, names.len ? fl_str_text(&names) : "nothing", host,
                   address ? "IP" : "DNS", host);
}

static void note(const struct tls_id *id, const struct fl_err *why)
{
    if (!why)
        fl_info("a new certificate is shown from now on file=%s", id->cert_path);
    else
        fl_warn("the new certificate is not taken, the old one is shown on file=%s why=\"%s\"", id->cert_path, why->text);
}

enum fl_status tls_load(const struct tls_opts *o, enum tls_cover *cover, struct tls_id **out,
                        struct fl_err *err)
{
    FL_AUTO(tls_id) struct tls_id *id = NULL;

    FL_TRY(tls_opts_cover(o, cover, err));
    if (*cover == TLS_OFF)
        return FL_OK;
    FL_TRY(tls_id_create(o->cert, o->key, o->ca, &id, err));
    FL_TRY(tls_id_check(id, err));
    id->renewed = note;
    *out = FL_TAKE(id);
    return FL_OK;
}
