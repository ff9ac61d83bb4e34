/* tests/certs.h - a CA and certificates of it, made for one test and gone with its folder */
#pragma once
#include "transport/tls/tls.h"

struct t_cert { /* PEM files in the test's folder */
    char cert[FL_PATH_MAX], key[FL_PATH_MAX];
    void *x509, *pkey;
};
/* name is that of the files, too. by NULL: a CA of its own. names as openssl writes them,
 * "IP:127.0.0.1,DNS:head"; from and to are days from now. */
void t_cert_make(struct t_cert *c, const char *name, const struct t_cert *by, const char *names,
                 int from, int to);
void t_cert_free(struct t_cert *c);
/* The content of the file from in the place of the file to, at once. */
void t_put(const char *to, const char *from);
/* Of a certificate of ca for 127.0.0.1, ::1 and localhost. */
struct tls_id *t_tls_id(const char *name, const struct t_cert *ca);
