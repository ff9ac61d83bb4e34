/* transport/tls/session.h - private to tls and its tests */
#pragma once
#include "transport/tls/tls.h"

void tls_sessions_end(struct tls_id *id); /* what session.c keeps in it */
/* A certificate that was not taken, by its verify result of libssl. */
enum fl_status tls_refusal(const char *whose, const char *ca_path, long verify_result,
                           struct fl_err *err);
