/* common/base/addr.h - which of this host's addresses is meant, and HOST:PORT */
#pragma once
#include "common/base/base.h"

enum { FL_ADDR_MAX = 64 };
struct fl_addr {
    char text[FL_ADDR_MAX]; /* a literal, without brackets */
    char iface[32];         /* the interface that has it; "" when none is known */
    bool loopback;
    bool any;      /* a wildcard was asked: bind to all, text is what others are told */
    char why[160]; /* how it was found, for people */
};
/* The address of this host that asked means: a literal or a name of one, an interface's name, a subnet ("10.0.0.0/8":
 * the address in it, whatever its interface is called here), or a wildcard. NULL and a wildcard: the source address of
 * the way to toward ("HOST:PORT"; NULL: to the outside), which is what that host would answer to: neither the host's
 * name nor the first interface is asked. Names are looked up: this blocks.
 *
 * flag          names asked in errors: "--node-ip-address"
 * FL_INVALID    no interface has it; loopback while toward is another host; err lists what there is
 * FL_UNREACHABLE no way to toward now */
enum fl_status fl_addr_find(const char *flag, const char *asked, const char *toward, struct fl_addr *out, struct fl_err *err);

bool fl_addr_is_any(const char *asked); /* a wildcard */
/* Of this host alone: a literal of loopback, or localhost, with or without brackets and a port. No other name is looked up. */
bool fl_addr_is_loopback(const char *address);
struct sockaddr;
bool fl_sockaddr_is_loopback(const struct sockaddr *a); /* also as IPv6 writes IPv4; NULL: not */

/* "HOST:PORT", "[v6]:PORT" apart; host without brackets. FL_INVALID: names flag and the forms that are taken. */
enum fl_status fl_addr_split(const char *flag, const char *target, char host[256], char port[8], struct fl_err *err);
/* The same with the port given apart: "HOST", "v6", "[v6]" get it, what has one keeps it. out: "HOST:PORT". */
enum fl_status fl_addr_with_port(const char *flag, const char *target, int port, char *out, size_t cap, struct fl_err *err);
