/* tests/client/fake.h - a daemon and a head in one thread of the test, as far as libfurlong sees
 * them
 *
 * Serves node.sock over the real stream and call code, keeps the directory, launches programs as
 * child processes (this test program again, with the role as its first argument), starts them again
 * and tells the driver. Any thread may call. */
#pragma once
#include <furlong/driver.h>

struct fake;
struct fake *fake_create(void);    /* below t_tmp() */
void fake_destroy(struct fake *f); /* children still running are killed; it fails the test */

/* A program in this process. The caller leaves it. */
enum fl_status fake_join(struct fake *f, const char *role, uint32_t rank, uint32_t world,
                         uint32_t attempt, struct furlong **out, struct fl_err *err);
struct furlong *fake_joined(struct fake *f, const char *role, uint32_t rank, uint32_t world);
/* The seat itself, for those that join by other ways; the caller closes it. */
int fake_seat(struct fake *f, const char *role, uint32_t rank, uint32_t world, uint32_t attempt);
void fake_ended(struct fake *f, const char *role, uint32_t rank,
                const char *why); /* the directory hears it */

/* The daemon: away (its socket gone, streams cut), and back with what it knew. */
void fake_down(struct fake *f);
void fake_up(struct fake *f);
void fake_far(struct fake *f,
              bool far); /* the directory says that all others are on another machine */
void fake_head_away(struct fake *f,
                    bool away); /* relayed calls are answered FL_UNREACHABLE meanwhile */
void fake_forget(struct fake *f, const char *role,
                 uint32_t rank); /* its seat goes to the next attempt */

void fake_stop(struct fake *f, const char *role, uint32_t rank, uint32_t budget_ms);
enum fl_status fake_squeeze(struct fake *f, const char *role, uint32_t rank, uint64_t bytes,
                            uint64_t *out, struct fl_err *err);
void fake_kill(struct fake *f, const char *role, uint32_t rank, int signal);

/* What arrived; waits up to 10 s for at least n of them. */
unsigned fake_steps(struct fake *f, unsigned n, char last[256]);
double fake_metric(struct fake *f, const char *name,
                   double wanted); /* waits for it; the last value */
uint64_t fake_progress(struct fake *f, uint64_t wanted);
unsigned fake_finds(struct fake *f);                    /* how often the directory was asked */
unsigned fake_running(struct fake *f, unsigned wanted); /* children; waits */

/* For main(): the role to play as a child; NULL: this is the test itself. */
const char *fake_role(int argc, char **argv);
