#include "tests/certs.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdlib.h>

#include "common/base/file.h"
#include "tests/t.h"

static void extend(X509 *x, X509 *issuer, int nid, const char *value)
{
    X509V3_CTX ctx;
    X509_EXTENSION *e;

    X509V3_set_ctx(&ctx, issuer, x, NULL, NULL, 0);
    e = X509V3_EXT_conf_nid(NULL, &ctx, nid, value);
    t_true(e && X509_add_ext(x, e, -1) == 1, "extension %s", value);
    X509_EXTENSION_free(e);
}

static void write_files(struct t_cert *c, const char *name)
{
    FILE *f;

    snprintf(c->cert, sizeof(c->cert), "%s/%s.crt", t_tmp(), name);
    snprintf(c->key, sizeof(c->key), "%s/%s.key", t_tmp(), name);
    f = fopen(c->cert, "we");
    t_true(f && PEM_write_X509(f, c->x509) == 1);
    fclose(f);
    f = fopen(c->key, "we");
    t_true(f && PEM_write_PrivateKey(f, c->pkey, NULL, NULL, 0, NULL, NULL) == 1);
    fclose(f);
}

void t_cert_make(struct t_cert *c, const char *name, const struct t_cert *by, const char *names,
                 int from, int to)
{
    X509 *x = X509_new(), *issuer = by ? by->x509 : x;
    X509_NAME *subject = X509_NAME_new();
    uint64_t serial = 0;

    *c = (struct t_cert){ .x509 = x, .pkey = EVP_EC_gen("P-256") };
    t_true(x && c->pkey && subject && RAND_bytes((unsigned char *)&serial, sizeof(serial)) == 1);
    X509_set_version(x, 2);
    ASN1_INTEGER_set_uint64(X509_get_serialNumber(x), serial >> 1);
    X509_time_adj_ex(X509_getm_notBefore(x), from, -60, NULL);
    X509_time_adj_ex(X509_getm_notAfter(x), to, 0, NULL);
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, (const unsigned char *)name, -1, -1, 0);
    X509_set_subject_name(x, subject);
    X509_set_issuer_name(x, by ? X509_get_subject_name(issuer) : subject);
    X509_NAME_free(subject);
    X509_set_pubkey(x, c->pkey);
    extend(x, issuer, NID_basic_constraints, by ? "critical,CA:FALSE" : "critical,CA:TRUE");
    if (!by)
        extend(x, issuer, NID_key_usage, "critical,keyCertSign,cRLSign");
    if (names)
        extend(x, issuer, NID_subject_alt_name, names);
    t_true(X509_sign(x, by ? by->pkey : c->pkey, EVP_sha256()) > 0);
    write_files(c, name);
}

void t_cert_free(struct t_cert *c)
{
    X509_free(c->x509);
    EVP_PKEY_free(c->pkey);
    *c = (struct t_cert){ 0 };
}

struct tls_id *t_tls_id(const char *name, const struct t_cert *ca)
{
    struct fl_err err = { 0 };
    struct tls_id *id = NULL;
    struct t_cert c;

    t_cert_make(&c, name, ca, "IP:127.0.0.1,IP:::1,DNS:localhost", 0, 2);
    t_ok(tls_id_create(c.cert, c.key, ca->cert, &id, &err), &err);
    t_cert_free(&c);
    return id;
}

void t_put(const char *to, const char *from)
{
    struct fl_err err = { 0 };
    char *text;
    size_t len;

    t_ok(fl_file_read(from, 1 << 20, &text, &len, &err), &err);
    t_ok(fl_file_write(to, 0600, text, len, &err), &err);
    free(text);
}
