/* worker/doctor/priv.h */
#pragma once
#include "worker/doctor/doctor.h"

void doctor_say(struct doctor_list *l, const char *check, enum doctor_state s, const char *remedy, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
void doctor_look_fabric(struct doctor_list *l); /* adapters of InfiniBand and RoCE, by sysfs */
void doctor_look_sockets(struct doctor_list *l); /* of what runs here of a cluster, as far as this user may see */
