/* Death, silence and broken lines in each phase of an update, between real processes */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include "bench/plane_driver.h"

enum { BUCKETS = 6, DUE_MS = 1500, ANSWER_MS = 1500, SLACK_MS = 1000, LONG_MS = 20000, TURNS = 20 };
static struct plane *const d = &plane_d;
static struct plane_kid *const first = &plane_d.engines[0], *const second = &plane_d.engines[1];
static enum xfer_mode mode;
static unsigned wrong;
static char row[96];

static void expect(bool holds, const char *what)
{
    if (holds)
        return;
    wrong++;
    printf("# NOT SO: %s: %s (committed %u, left %u: %s; %s)\n", row, what, d->rep.n_committed,
           d->rep.n_left_behind, d->rep.first_left_behind.text, d->why.text);
}

/* In a line of JSON. */
static const char *unquoted(char *text)
{
    for (char *c = text; *c; c++)
        *c = *c == '"' ? '\'' : *c;
    return text;
}

/* ---- what happens to somebody who has come to a phase ---- */

enum how { KILL, STOP, CUT, BREAK, KILL_TRAINER, HOWS };
static const char *const how_names[HOWS] = { "killed", "stopped", "cut off", "line broken",
                                             "trainer killed" };
static struct {
    struct plane_kid *who; /* it stops there by itself */
    enum how how;
    bool done;
    unsigned turns; /* of the driver since the trainer's end, which it hears of before the engine
                       goes on */
} trap;

static void send_signal(pid_t pid, int number)
{
    if (pid > 0)
        (void)kill(pid, number);
}

/* Before the engine goes on nothing of it may come through any more. */
static void end_relay(pid_t pid, int number, int ends)
{
    siginfo_t si;

    send_signal(pid, number);
    while (pid > 0 && waitid(P_PID, (id_t)pid, &si, ends | WNOWAIT) < 0)
        ;
}

static void spring(void)
{
    siginfo_t si = { 0 };

    if (trap.done && trap.how == KILL_TRAINER && !d->trainer.pid && ++trap.turns == TURNS)
        send_signal(trap.who->pid, SIGCONT);
    if (trap.done || trap.who->pid <= 0 ||
        waitid(P_PID, (id_t)trap.who->pid, &si, WSTOPPED | WNOHANG) != 0 || !si.si_pid)
        return;
    trap.done = true;
    switch (trap.how) {
    case KILL:
        send_signal(trap.who->pid, SIGKILL);
        break;
    case CUT: /* nothing comes through, nothing breaks; the engine goes on */
        end_relay(trap.who->relay, SIGSTOP, WSTOPPED);
        send_signal(trap.who->pid, SIGCONT);
        break;
    case BREAK:
        end_relay(trap.who->relay, SIGKILL, WEXITED);
        send_signal(trap.who->pid, SIGCONT);
        break;
    case KILL_TRAINER:
        send_signal(d->trainer.pid, SIGKILL);
        break;
    default:
        break;
    }
}

static enum fl_status update_with_trap(struct plane_kid *who, const char *point, enum how how,
                                       const struct plane_ask *a)
{
    char spec[PLANE_SPEC];
    enum fl_status st;

    snprintf(spec, sizeof(spec), "%s=stop", point);
    plane_fault(who, spec);
    trap.who = who;
    trap.how = how;
    trap.done = false;
    trap.turns = 0;
    d->each_turn = spring;
    st = plane_update(a);
    d->each_turn = NULL;
    expect(trap.done, "it came there");
    return st;
}

/* ---- all is well again ---- */

static void advance(void)
{
    plane_next_version();
    expect(plane_update(&(struct plane_ask){
               .mode = mode, .slots = XFER_TWO_SLOTS, .due_ms = LONG_MS }) == FL_OK &&
               d->rep.n_committed == 2,
           "the next update reaches both");
    wrong += plane_roots_differ(row);
}

/* "Not now" is what an engine says that still ends the update before: a fill is asked for again
 * then. */
static void fill(void)
{
    struct plane_ask a = {
        .kind = XFER_FILL, .mode = XFER_AUTO, .slots = XFER_TWO_SLOTS, .due_ms = LONG_MS
    };
    uint64_t until = fl_clock_boot_ns() + LONG_MS * 1000000ull;
    enum fl_status st;

    do
        st = plane_update(&a);
    while (d->rep.first_left_behind.status == FL_AGAIN && fl_clock_boot_ns() < until);
    expect(st == FL_OK && d->rep.n_left_behind == 0, "it is filled");
    wrong += plane_roots_differ(row);
}

/* What it says it serves lies in its memory, whole: its last version or the new one. */
static bool serves_whole(struct plane_kid *k, uint64_t least, uint64_t most)
{
    struct plane_seen e;

    plane_look(k, &e);
    return e.addr && e.version.number >= least && e.version.number <= most &&
           memcmp(e.root, e.version.digest, sizeof(e.root)) == 0;
}

/* ---- engines ---- */

struct phase {
    const char *name, *point; /* of the engine */
    const char *says;
    bool may_have; /* the new version, whatever happens to it */
};
static const struct phase phases[] = {
    { "reconcile", "xfer.reconcile:1", "reconcile", false },
    { "begin", "xfer.begin:1", "stage", false },
    { "staging", "xfer.pull:1", "stage", false },
    { "half way", "xfer.bucket:3", "stage", false },
    { "verified", "xfer.verified:1", "", false }, /* stage, or commit by then */
    { "commit", "xfer.commit:1", "commit", true },
    { "flip", "plane.flip:1", "commit", true },
};

static void check_message(const struct phase *p)
{
    const char *says = d->rep.first_left_behind.text;

    expect(strstr(says, second->seat.me.name) == says, "the message names it and its host");
    expect(strstr(says, p->says) != NULL, "the message says in which phase");
    expect(strstr(says, "bucket") != NULL, "the message says at which bucket");
}

static void lose_engine(const struct phase *p, enum how how)
{
    struct plane_ask a = {
        .mode = mode, .slots = XFER_TWO_SLOTS, .least_engines = 1, .due_ms = DUE_MS
    };
    struct plane_seen e;
    double took, flipped;
    uint64_t began;

    snprintf(row, sizeof(row), "%s, %s at %s", xfer_mode_name(mode), how_names[how], p->name);
    plane_next_version();
    began = fl_clock_boot_ns();
    expect(update_with_trap(second, p->point, how, &a) == FL_OK, "the other one has the update");
    took = (double)(fl_clock_boot_ns() - began) / 1e6;
    expect(d->rep.n_committed == 1 && d->rep.n_left_behind == 1, "one commits, one is left behind");
    check_message(p);
    plane_look(first, &e);
    flipped = (double)(e.flipped_ns - began) / 1e6;
    expect(flipped < DUE_MS + SLACK_MS, "the other one has it inside the deadline");
    expect(took < DUE_MS + ANSWER_MS + SLACK_MS, "and the update is over");
    expect(serves_whole(first, d->version, d->version), "the other one serves it");
    printf("{\"name\":\"%s\",\"other_ms\":%.1f,\"ms\":%.1f,\"says\":\"%.200s\"}\n", row, flipped,
           took, unquoted(d->rep.first_left_behind.text));
    fflush(stdout);
    if (how == CUT || how == BREAK) /* alone, and served from by whoever reaches it */
        expect(serves_whole(second, d->version - 1, p->may_have ? d->version : d->version - 1),
               "cut off it serves one version, whole");
    if (how == CUT)
        send_signal(second->relay, SIGCONT);
    if (how == STOP)
        send_signal(second->pid, SIGCONT);
    if (how == KILL || how == BREAK) {
        if (how == BREAK)
            plane_gone(second, "its daemon is lost");
        plane_add_engine(1);
    }
    fill();
    advance();
}

/* ---- the trainer ---- */

struct loss {
    const char *name, *point;
    bool at_engine; /* the first engine has come there, not the trainer */
    bool dirty;     /* with one slot */
    bool may_have;  /* all of it was there: the new version may be served */
};
static const struct loss losses[] = {
    { "reconcile", "xfer.reconcile:1", false, false, false },
    { "key", "xfer.key:1", false, true, false },
    { "staging", "xfer.pull:1", true, true, false },
    { "half way", "xfer.bucket:3", true, true, false },
    { "verified", "xfer.verified:1", true, true, true },
};

static void check_left(const struct loss *l, struct plane_kid *k, enum xfer_slots slots)
{
    struct plane_seen e;

    if (slots == XFER_TWO_SLOTS || !l->dirty) {
        expect(serves_whole(k, d->version - 1, l->may_have ? d->version : d->version - 1),
               "the old version is served, whole");
        return;
    }
    plane_look(k, &e);
    if (e.addr && l->at_engine) { /* all of it had been on its way, and there is no way back */
        expect(serves_whole(k, d->version, d->version), "the new version is served, whole");
        return;
    }
    expect(!e.addr, "nothing is served");
    expect(strstr(e.says, "weights incomplete: version") == e.says, "it says why");
}

static void lose_trainer(const struct loss *l, enum xfer_slots slots)
{
    struct plane_ask a = { .mode = mode, .slots = slots, .due_ms = LONG_MS };
    uint64_t began;
    struct plane_seen e;
    enum fl_status st;

    snprintf(row, sizeof(row), "%s, trainer killed at %s, %s", xfer_mode_name(mode), l->name,
             slots == XFER_ONE_SLOT ? "one slot" : "two slots");
    plane_next_version();
    began = fl_clock_boot_ns();
    st = update_with_trap(l->at_engine ? first : &d->trainer, l->point,
                          l->at_engine ? KILL_TRAINER : KILL, &a);
    double took = (double)(fl_clock_boot_ns() - began) / 1e6;

    expect(st != FL_OK || l->may_have, "the update fails");
    expect(took < LONG_MS / 4, "a death that is known is not waited for");
    check_left(l, first, slots);
    check_left(l, second, slots);
    plane_look(first, &e);
    printf("{\"name\":\"%s\",\"ms\":%.1f,\"says\":\"%.160s\",\"engine\":\"%.160s\"}\n", row, took,
           unquoted(d->why.text), unquoted(e.says));
    fflush(stdout);
    if (d->trainer.pid)
        plane_gone(&d->trainer, "killed by signal 9");
    plane_add_trainer();
    advance();
}

/* ---- all ---- */

static uint64_t bytes_of(const struct shape *s)
{
    uint64_t size[SHAPES_MAX], sum = 0;
    size_t n = shape_tensors(s, size);

    for (size_t i = 0; i < n; i++)
        sum += size[i];
    return sum;
}

unsigned plane_faults(const struct shape *s, const struct link_place *from,
                      const struct link_place *to)
{
    struct plane_opts o = { .shape = s,
                            .trainer = from,
                            .engines = to,
                            .n_engines = 2,
                            .relays = true,
                            .bucket_bytes = bytes_of(s) / BUCKETS };

    mode = from == to ? XFER_COPY : XFER_P2P;
    snprintf(row, sizeof(row), "%s, before", xfer_mode_name(mode));
    plane_start(&o);
    advance();
    advance();
    for (size_t i = 0; i < sizeof(phases) / sizeof(phases[0]); i++)
        for (enum how how = KILL; how <= BREAK; how++)
            lose_engine(&phases[i], how);
    for (size_t i = 0; i < sizeof(losses) / sizeof(losses[0]); i++)
        for (enum xfer_slots slots = XFER_TWO_SLOTS; slots <= XFER_ONE_SLOT; slots++)
            lose_trainer(&losses[i], slots);
    plane_stop();
    return wrong;
}
