#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/file.h"
#include "common/base/str.h"
#include "worker/doctor/priv.h"

enum { VALUE_MAX = 128, PORTS = 8, FAST_GBIT = 100, MTU_JUMBO = 4000 };

void doctor_judge_link(const struct doctor_link *k, struct doctor_list *out)
{
    char name[128], remedy[128];

    snprintf(name, sizeof(name), "%s port %u%s%s%s", k->hca, k->port, *k->iface ? " (" : "", k->iface, *k->iface ? ")" : "");
    if (!k->up) {
        doctor_say(out, "fabric", DOCTOR_OK, "", "%s is down: nothing goes that way", name);
    } else if (*k->iface && k->gbit >= FAST_GBIT && k->mtu < MTU_JUMBO) {
        snprintf(remedy, sizeof(remedy), "ip link set %s mtu 9000, on each node and on the switch between", k->iface);
        doctor_say(out, "fabric", DOCTOR_WARN, remedy, "%s: %u Gb/s with an MTU of %u, which reaches a fraction of that", name, k->gbit, k->mtu);
    } else if (*k->iface) {
        doctor_say(out, "fabric", DOCTOR_OK, "", "%s: %u Gb/s, MTU %u", name, k->gbit, k->mtu);
    } else {
        doctor_say(out, "fabric", DOCTOR_OK, "", "%s: %u Gb/s", name, k->gbit);
    }
}

/* The first line of a file of sysfs; "" when it cannot be read. */
static const char *value(char out[VALUE_MAX], const char *path)
{
    FILE *f = fopen(path, "re");

    out[0] = '\0';
    if (f && !fgets(out, VALUE_MAX, f))
        out[0] = '\0';
    if (f)
        fclose(f);
    out[strcspn(out, "\n")] = '\0';
    return out;
}

/* The network interface of an adapter, where it is Ethernet. */
static void find_iface(const char *device, struct doctor_link *k)
{
    char path[FL_PATH_MAX], text[VALUE_MAX];
    DIR *d = fl_path(path, NULL, "%s/device/net", device) == FL_OK ? opendir(path) : NULL;

    for (struct dirent *e; d && !*k->iface && (e = readdir(d));)
        if (e->d_name[0] != '.' && FL_COPY(k->iface, e->d_name) && fl_path(path, NULL, "%s/device/net/%s/mtu", device, e->d_name) == FL_OK)
            k->mtu = (unsigned)strtoul(value(text, path), NULL, 10);
    if (d)
        closedir(d);
}

void doctor_look_fabric(struct doctor_list *l)
{
    static const char root[] = "/sys/class/infiniband";
    char device[FL_PATH_MAX], path[FL_PATH_MAX], text[VALUE_MAX];
    DIR *d = opendir(root);

    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.' || fl_path(device, NULL, "%s/%s", root, e->d_name) != FL_OK)
            continue;
        for (unsigned port = 1; port <= PORTS; port++) {
            struct doctor_link k = { .port = port };

            if (!FL_COPY(k.hca, e->d_name) || fl_path(path, NULL, "%s/ports/%u/state", device, port) != FL_OK || !*value(text, path))
                break;
            k.up = strstr(text, "ACTIVE") != NULL; /* "4: ACTIVE" */
            if (fl_path(path, NULL, "%s/ports/%u/rate", device, port) == FL_OK)
                k.gbit = (unsigned)strtoul(value(text, path), NULL, 10); /* "200 Gb/sec (4X HDR)" */
            find_iface(device, &k);
            doctor_judge_link(&k, l);
        }
    }
    if (d)
        closedir(d);
}
