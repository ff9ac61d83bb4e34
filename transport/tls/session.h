/* transport/tls/session.h - private to tls and its tests */
#pragma once
#include <pthread.h>

#include "transport/tls/tls.h"

void tls_sessions_end(struct tls_id *id); /* what session.c keeps in it */
enum fl_status tls_sessions_check(const struct tls_id *id, struct fl_err *err); /* could new ones be made? */
extern pthread_mutex_t tls_lock;     /* of every tls_id: what is in it may be taken anew */
void tls_look_locked(struct tls_id *id); /* tls_id_look() for who holds it */
/* A certificate that was not taken, by its verify result of libssl. */
enum fl_status tls_refusal(const char *whose, const char *ca_path, long verify_result,
                           struct fl_err *err);
