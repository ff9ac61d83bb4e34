/* Jobs, their logs, the end of the head. */
#include "tests/head/run.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/file.h"

static void a_job_runs_on_the_heads_own_node(void **unused)
{
    struct rig r;
    struct fake a, b;

    (void)unused;
    rig_start(&r, "job", NULL);
    fake_up(&b, &r, "another", "10.0.0.2", 0);
    fake_cut(&b);
    (void)FL_COPY(b.boot_id, "boot-2");
    fake_again(&b);
    fake_up(&a, &r, "z-own", "10.0.0.1", 0);
    const Fl__EnvVar mine = { PROTOBUF_C_MESSAGE_INIT(&fl__env_var__descriptor), "COLOUR", "blue" },
                     *env = &mine;
    struct job_ask ask = { .env = &env, .n_env = 1, .cwd = "/tmp" };
    char *id = submit(&r, "echo 'hello world'", &ask);
    t_int_eq(strncmp(id, "raysubmit_", 10), 0);
    struct fake_worker *w = driver_of(&r, &a, id);
    t_str_eq(w->command, "/bin/sh -c echo 'hello world'");
    t_str_eq(w->cwd, "/tmp");
    t_has(w->env, "COLOUR=blue;");
    t_has(w->env, "FURLONG_ADDRESS=http://10.0.0.1:8265;");
    t_true(fake_worker(&b, "driver", 0) == NULL);
    fake_exit(&a, w, 0);
    UNTIL(&r, job(&r, id)->rec->cleaned);
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_SUCCEEDED);
    t_int_eq(job(&r, id)->rec->exit_code, 0);
    fake_down(&a);
    fake_down(&b);
    rig_end(&r);
}

static void a_failed_job_shows_its_code_and_last_lines(void **unused)
{
    struct rig r;
    struct fake a;
    uint64_t at = 0;
    char line[32];

    (void)unused;
    rig_start(&r, "fail", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    char *id = submit(&r, "exit 7", NULL);
    struct fake_worker *w = driver_of(&r, &a, id);
    for (int i = 0; i < 30; i++) {
        snprintf(line, sizeof(line), "line %d\n", i);
        at = fake_log(&a, w, 1, at, line);
    }
    fake_exit(&a, w, 7);
    UNTIL(&r, job_over(job(&r, id)));
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_FAILED);
    t_int_eq(job(&r, id)->rec->exit_code, 7);
    t_str_eq(job(&r, id)->rec->message, "Job entrypoint command failed with exit code 7, last "
                                        "available logs (truncated to 20,000 chars):\n"
                                        "line 20\nline 21\nline 22\nline 23\nline 24\nline "
                                        "25\nline 26\nline 27\nline 28\nline 29\n");
    fake_down(&a);
    rig_end(&r);
}

static void a_stopped_job_waits_for_its_end(void **unused)
{
    struct rig r;
    struct fake a;
    struct fl_err err;
    bool live = false;

    (void)unused;
    rig_start(&r, "stop", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    char *id = submit(&r, "sleep 100", NULL);
    struct fake_worker *w = driver_of(&r, &a, id);
    t_ok(job_stop(r.head, job(&r, id), NULL, &live, &err), &err);
    t_true(live);
    UNTIL(&r, w->stop_asked);
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_RUNNING);
    fake_exit(&a, w, 143);
    UNTIL(&r, job_over(job(&r, id)));
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_STOPPED);
    t_ok(job_stop(r.head, job(&r, id), NULL, &live, &err), &err);
    t_true(!live, "it has ended already");
    fake_down(&a);
    rig_end(&r);
}

static void a_job_waits_for_a_node_and_can_be_stopped_meanwhile(void **unused)
{
    struct rig r;
    struct fake a;
    char first[64], second[64];
    bool live;

    (void)unused;
    rig_start(&r, "pending", NULL);
    snprintf(first, sizeof(first), "%s", submit(&r, "true", NULL));
    snprintf(second, sizeof(second), "%s", submit(&r, "true", NULL));
    t_int_eq(job(&r, first)->rec->status, FL__JOB_STATUS__JOB_PENDING);
    t_ok(job_stop(r.head, job(&r, first), NULL, &live, NULL), NULL);
    UNTIL(&r, job(&r, first)->rec->status == FL__JOB_STATUS__JOB_STOPPED);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    driver_of(&r, &a, second);
    t_int_eq(a.n_workers, 1);
    fake_down(&a);
    rig_end(&r);
}

static void names_of_jobs_are_checked(void **unused)
{
    struct rig r;
    struct fl_err err = { 0 };
    char id[64];
    static const struct {
        const char *name;
        enum fl_status st;
    } rows[] = {
        { "my-job_1.x", FL_OK },
        { "my-job_1.x", FL_EXISTS },
        { "", FL_INVALID },
        { "../x", FL_INVALID },
        { "a/b", FL_INVALID },
        { ".hidden", FL_INVALID },
        { "with spaces, and é", FL_OK },
        { "a\tb", FL_INVALID },
        { "a\\b", FL_INVALID },
        { "0123456789012345678901234567890123456789012345678901234567890123", FL_INVALID },
    };

    (void)unused;
    rig_start(&r, "jobnames", NULL);
    for (size_t i = 0; i < FL_LEN(rows); i++) {
        struct job_ask ask = { .entrypoint = "true", .submission_id = rows[i].name };
        enum fl_status st = job_submit(r.head, &ask, NULL, id, &err);

        t_int_eq(st, rows[i].st, "%s", rows[i].name);
        if (st == FL_EXISTS)
            t_str_eq(err.text,
                     "Job with submission_id my-job_1.x already exists. Please use a different "
                     "submission_id.");
    }
    rig_end(&r);
}

static void a_full_disk_is_said_before_work_is_taken(void **unused)
{
    struct rig r;
    struct fl_err err = { 0 };
    struct job_ask ask = { .entrypoint = "true" };
    char id[64];

    (void)unused;
    rig_start(&r, "diskfull", NULL);
    fl_fault_set("journal.room:1=fail", NULL);
    t_refused(job_submit(r.head, &ask, NULL, id, &err), FL_EXHAUSTED, &err);
    fl_fault_set(NULL, NULL);
    t_int_eq(HASH_CNT(hh, r.head->jobs), 0);
    submit(&r, "true", NULL);
    rig_end(&r);
}

static void a_driver_starts_again_as_the_next_attempt(void **unused)
{
    struct rig r;
    struct fake a;
    struct job_ask ask = { .driver_restarts = 1 };

    (void)unused;
    rig_start(&r, "again", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    char *id = submit(&r, "flaky", &ask);
    struct fake_worker *w = driver_of(&r, &a, id);
    struct fl_seat_ref first = w->who;
    fake_exit(&a, w, 1);
    rig_turns(&r, 10);
    t_int_eq(a.n_workers, 1, "not before the back-off");
    rig_pass(&r, 1100);
    UNTIL(&r, a.n_workers == 2);
    w = fake_worker(&a, "driver", 0);
    t_mem_eq(&w->who.id, &first.id, sizeof(first.id), "the same seat");
    t_int_eq(w->who.attempt, 2);
    t_int_eq(job(&r, id)->rec->attempt, 2);
    t_true(!job_over(job(&r, id)));
    fake_exit(&a, w, 3);
    UNTIL(&r, job_over(job(&r, id)));
    t_int_eq(job(&r, id)->rec->exit_code, 3);
    fake_down(&a);
    rig_end(&r);
}

static void a_start_that_cannot_be_is_the_jobs_end(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "badstart", NULL);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    a.on_start = FL_INVALID;
    char *id = submit(&r, "nothing", NULL);
    UNTIL(&r, job_over(job(&r, id)));
    t_int_eq(job(&r, id)->rec->status, FL__JOB_STATUS__JOB_FAILED);
    t_has(job(&r, id)->rec->message, "no such program");
    fake_down(&a);
    rig_end(&r);
}

static void a_job_on_a_lost_node_fails_with_its_name(void **unused)
{
    struct rig r;
    struct fake a;

    (void)unused;
    rig_start(&r, "lostjob", NULL);
    fake_up(&a, &r, "gpu-a", "10.0.0.1", 0);
    char *id = submit(&r, "sleep 100", NULL);
    driver_of(&r, &a, id);
    fake_cut(&a);
    rig_pass(&r, 16000);
    UNTIL(&r, job_over(job(&r, id)));
    t_has(job(&r, id)->rec->message, "gpu-a");
    t_has(job(&r, id)->rec->message, "fenced");
    fake_again(&a);
    t_true(a.fenced);
    t_int_eq(a.workers[0].phase, FL__WORKER_PHASE__WORKER_GONE, "it is told to end what it ran");
    fake_down(&a);
    rig_end(&r);
}

static char *log_text(struct rig *r, const char *id)
{
    static char text[4096];
    char *got = NULL;
    size_t len;
    uint64_t from = 0;
    struct fl_err err = { 0 };

    t_ok(joblog_read(job(r, id), &from, sizeof(text) - 1, &got, &len, &err), &err);
    memcpy(text, got, len);
    text[len] = '\0';
    free(got);
    return text;
}

static void logs_are_prefixed_and_never_doubled(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "logs", 2, 0);
    Fl__Layout *y = place(&x, split_1_1, 4);
    free_msg(launch(&x, y, "rollout", 0));
    UNTIL(&x.rig, fake_worker(&x.a, "rollout", 0));
    struct fake_worker *w = fake_worker(&x.a, "rollout", 0);
    t_int_eq(fake_log(&x.a, x.driver, 1, 0, "one\n"), 4);
    t_int_eq(fake_log(&x.a, w, 1, 0, "ready\nset\n"), 10);
    t_int_eq(fake_log(&x.a, w, 2, 0, "oh\n"), 3);
    t_int_eq(fake_log(&x.a, x.driver, 1, 0, "one\n"), 4, "again: taken already");
    t_int_eq(fake_log(&x.a, x.driver, 1, 0, "one\ntwo\n"), 8, "half of it is new");
    t_int_eq(fake_log(&x.a, w, 1, 10, "no end"), 16);
    t_int_eq(fake_log(&x.a, w, 1, 16, " yet\n"), 21);
    const char *wanted = "one\n(rollout 0 a) ready\n(rollout 0 a) set\n(rollout 0 a) oh\ntwo\n"
                         "(rollout 0 a) no end yet\n";
    t_str_eq(log_text(&x.rig, x.job), wanted);
    rig_again(&x.rig);
    UNTIL(&x.rig, x.a.peer == NULL);
    fake_again(&x.a);
    t_int_eq(fake_log(&x.a, w, 1, 10, "no end"), 21, "a new head knows how far it is");
    t_str_eq(log_text(&x.rig, x.job), wanted);
    t_int_eq(fake_log(&x.a, w, 1, 500, "after a gap\n"), 512);
    fl_fault_set("joblog.write:1=fail", NULL);
    Fl__LogPush m = FL__LOG_PUSH__INIT;
    Fl__SeatRef who = FL__SEAT_REF__INIT;
    struct asked q;
    who.worker = BYTES_OF(w->who.id);
    who.attempt = w->who.attempt;
    m.who = &who;
    m.job = BYTES_OF(w->job);
    m.role = w->role;
    m.offset = 512;
    m.data = (ProtobufCBinaryData){ 5, (uint8_t *)"full\n" };
    m.has_stream = true;
    m.stream = 1;
    ask_start(&x.a, FL_LOG_PUSH, &m, &q);
    ask_wait(&x.a, &q);
    fl_fault_set(NULL, NULL);
    t_int_eq(q.st, FL_EXHAUSTED);
    ask_free(&q);
    t_int_eq(fake_log(&x.a, w, 1, 512, "full\n"), 517);
    t_has(log_text(&x.rig, x.job), "(rollout 0 a) after a gap\n(rollout 0 a) full\n");
    free_msg(y);
    run_end(&x);
}

static void a_kill_between_mark_and_bytes_loses_and_doubles_nothing(void **unused)
{
    struct run x;
    int status;

    (void)unused;
    run_start(&x, "logkill", 0, 0);
    fake_log(&x.a, x.driver, 1, 0, "one\n");
    joblog_close(job(&x.rig, x.job));
    pid_t pid = fork();
    if (pid == 0) {
        Fl__LogPush m = FL__LOG_PUSH__INIT;
        Fl__SeatRef who = FL__SEAT_REF__INIT;
        uint64_t next;

        who.worker = BYTES_OF(x.driver->who.id);
        who.attempt = 1;
        m.who = &who;
        m.role = "driver";
        m.offset = 4;
        m.data = (ProtobufCBinaryData){ 4, (uint8_t *)"two\n" };
        m.stream = 1;
        fl_fault_set("joblog.marked:1=kill", NULL);
        joblog_push(job_named(x.rig.head, x.job), &m, "a", &next, NULL);
        _exit(3);
    }
    t_int_eq(waitpid(pid, &status, 0), pid);
    t_true(WIFSIGNALED(status));
    t_int_eq(fake_log(&x.a, x.driver, 1, 4, "two\n"), 8);
    t_str_eq(log_text(&x.rig, x.job), "one\ntwo\n");
    run_end(&x);
}

static void a_log_gives_its_oldest_part_back(void **unused)
{
    struct run x;
    char line[1001];
    uint64_t at = 0, from = 0;
    char *got = NULL;
    size_t len;
    struct stat sb;
    char path[1200];

    (void)unused;
    run_start(&x, "bounded", 0, 0);
    x.rig.head->cfg.log_keep_bytes = 64 << 10;
    memset(line, 'x', 999);
    strcpy(line + 999, "\n");
    for (int i = 0; i < 400; i++)
        at = fake_log(&x.a, x.driver, 1, at, line);
    t_int_eq(joblog_end(job(&x.rig, x.job)), 400000, "offsets stay");
    t_ok(joblog_read(job(&x.rig, x.job), &from, 1 << 20, &got, &len, NULL), NULL);
    t_true(from >= 400000 - (96 << 10) && from % 1000 == 0, "from %d", (int)from);
    t_int_eq(from + len, 400000);
    t_int_eq(memcmp(got, line, 1000), 0, "whole lines");
    free(got);
    snprintf(path, sizeof(path), "%s/logs/%s.log", x.rig.state_dir, x.job);
    t_int_eq(stat(path, &sb), 0);
    t_true(sb.st_blocks * 512 <= (100 << 10), "%d KiB on disk", (int)(sb.st_blocks / 2));
    run_end(&x);
}

/* The page of a head that began in the middle of a run shows all of it. */
static void steps_from_before_this_head_come_from_the_folder(void **unused)
{
    struct run x;
    struct job *j;
    struct fl_err err;
    char dir[200], path[256], json[32];
    FILE *f;

    (void)unused;
    run_start(&x, "recalled", 0, 0);
    j = job(&x.rig, x.job);
    snprintf(dir, sizeof(dir), "%s/a-run", t_tmp());
    t_ok(fl_mkdirs(dir, &err), &err);
    snprintf(path, sizeof(path), "%s/steps.jsonl", dir);
    f = fopen(path, "w");
    for (int i = 0; i < 10; i++)
        fprintf(f, "{\"step\": %d}\n", i);
    fprintf(f, "no JSON\n{\"step\": 10"); /* being written */
    fclose(f);
    free(j->rec->run_dir);
    j->rec->run_dir = strdup(dir);
    j->replayed = true;
    for (int i = 7; i < 9; i++) { /* told to this head before anybody asked */
        snprintf(json, sizeof(json), "{\"step\": %d}", i);
        t_ok(steps_add(j, json, &err), &err);
    }
    steps_recall(j);
    UNTIL(&x.rig, !j->steps.recall);
    t_int_eq(j->steps.next, 9);
    for (int i = 9; i < 12; i++) { /* 9 was written down before it was told */
        snprintf(json, sizeof(json), "{\"step\": %d}", i);
        t_ok(steps_add(j, json, &err), &err);
        t_ok(steps_add(j, json, &err), &err);
    }
    t_int_eq(j->steps.next, 12);
    for (int i = 0; i < 12; i++) {
        snprintf(json, sizeof(json), "{\"step\": %d}", i);
        t_str_eq(steps_get(&j->steps, (uint64_t)i), json);
    }
    run_end(&x);
}

static void steps_are_kept_in_a_ring(void **unused)
{
    struct run x;
    struct asked q;
    Fl__StepRecord m = FL__STEP_RECORD__INIT;
    char json[64];
    struct fl_err err = { 0 };

    (void)unused;
    run_start(&x, "steps", 0, 0);
    m.json = "{\"step\": 0}";
    ask_relay(&x.a, x.driver, FL_STEP_RECORD, &m, &q);
    ask_wait(&x.a, &q);
    t_int_eq(q.st, FL_OK);
    ask_free(&q);
    struct job *j = job(&x.rig, x.job);
    t_refused(steps_add(j, "[1]", &err), FL_INVALID, &err);
    t_refused(steps_add(j, "{\"a\":1,\"a\":2}", &err), FL_INVALID, &err);
    for (int i = 1; i < 1500; i++) {
        snprintf(json, sizeof(json), "{\"step\": %d}", i);
        t_ok(steps_add(j, json, &err), &err);
    }
    t_int_eq(j->steps.next, 1500);
    t_true(steps_get(&j->steps, 475) == NULL);
    t_str_eq(steps_get(&j->steps, 476), "{\"step\": 476}");
    t_str_eq(steps_get(&j->steps, 1499), "{\"step\": 1499}");
    t_true(steps_get(&j->steps, 1500) == NULL);
    run_end(&x);
}

static void until_idle_ends_with_its_jobs(void **unused)
{
    struct rig r;
    struct fake a;
    struct head_config cfg = { .until_idle = true };

    (void)unused;
    rig_start(&r, "idle", &cfg);
    fake_up(&a, &r, "a", "10.0.0.1", 0);
    rig_pass(&r, 10000);
    fake_beat(&a);
    t_int_eq(r.ended, 0, "the first job may still come");
    char *id = submit(&r, "true", NULL);
    struct fake_worker *w = driver_of(&r, &a, id);
    fake_exit(&a, w, 0);
    UNTIL(&r, job(&r, id)->rec->cleaned);
    rig_pass(&r, 1000);
    fake_beat(&a);
    t_int_eq(r.ended, 0, "who submitted it has not read its end yet");
    rig_pass(&r, 6000);
    UNTIL(&r, a.shutdowns == 1);
    UNTIL(&r, r.ended == 1);
    fake_down(&a);
    rig_end(&r);
}

static void until_idle_does_not_wait_for_ever_for_a_first_job(void **unused)
{
    struct rig r;
    struct head_config cfg = { .until_idle = true };

    (void)unused;
    rig_start(&r, "nojob", &cfg);
    rig_pass(&r, 110000);
    t_int_eq(r.ended, 0);
    rig_pass(&r, 20000);
    t_int_eq(r.ended, 1);
    rig_end(&r);
}

static void shutdown_ends_jobs_then_daemons(void **unused)
{
    struct run x;
    struct fl_err err = { 0 };
    struct job_ask ask = { .entrypoint = "true" };
    char id[64];

    (void)unused;
    run_start(&x, "shutdown", 0, 0);
    head_shutdown(x.rig.head, "the test says so");
    t_refused(job_submit(x.rig.head, &ask, NULL, id, &err), FL_CANCELLED, &err);
    UNTIL(&x.rig, x.driver->stop_asked);
    t_int_eq(x.a.shutdowns, 0, "jobs first");
    fake_exit(&x.a, x.driver, 143);
    UNTIL(&x.rig, x.a.shutdowns == 1);
    rig_pass(&x.rig, 6000);
    UNTIL(&x.rig, x.rig.ended == 1);
    run_end(&x);
}

static void a_daemon_that_does_not_leave_is_not_waited_for_longer(void **unused)
{
    struct run x;

    (void)unused;
    run_start(&x, "stuck", 0, 0);
    x.a.leaves = false;
    head_shutdown(x.rig.head, "the test says so");
    for (int i = 0; i < 16; i++) { /* a driver that never ends */
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
    }
    UNTIL(&x.rig, x.a.shutdowns == 1);
    t_int_eq(x.rig.ended, 0);
    for (int i = 0; i < 16; i++) {
        rig_pass(&x.rig, 1000);
        fake_beat(&x.a);
    }
    t_int_eq(x.rig.ended, 1);
    run_end(&x);
}

/* Each record that can be refused is refused once; what was asked for comes about all the same. */
static void a_journal_that_refuses_now_and_then_loses_nothing(void **unused)
{
    enum { TRIES = 128 }; /* held time passes at once, the journal's thread needs its own */

    (void)unused;
    for (unsigned nth = 1; nth < 60; nth += 3) {
        struct rig r;
        struct fake a;
        char name[32], spec[64];
        struct job_ask ask = { .entrypoint = "true" };
        char id[64];

        snprintf(name, sizeof(name), "refuse%u", nth);
        rig_start(&r, name, NULL);
        fake_up(&a, &r, "a", "10.0.0.1", 0);
        t_ok(job_submit(r.head, &ask, NULL, id, NULL), NULL);
        snprintf(spec, sizeof(spec), "journal.queue:%u=fail", nth);
        fl_fault_set(spec, NULL);
        for (int i = 0; i < TRIES && a.n_workers == 0; i++) {
            rig_pass(&r, 500);
            fake_beat(&a);
        }
        t_int_eq(a.n_workers, 1, "nth=%u", nth);
        while (fake_exit_try(&a, &a.workers[0], 4) !=
               FL_OK) /* as a daemon does, until acknowledged */
            rig_pass(&r, 100);
        for (int i = 0; i < TRIES && !job(&r, id)->rec->cleaned; i++) {
            rig_pass(&r, 500);
            fake_beat(&a);
        }
        fl_fault_set(NULL, NULL);
        t_true(job(&r, id)->rec->cleaned, "nth=%u", nth);
        t_int_eq(job(&r, id)->rec->exit_code, 4, "nth=%u", nth);
        t_int_eq(a.n_workers, 1, "nth=%u", nth);
        fake_down(&a);
        rig_end(&r);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_job_runs_on_the_heads_own_node),
        cmocka_unit_test(a_failed_job_shows_its_code_and_last_lines),
        cmocka_unit_test(a_stopped_job_waits_for_its_end),
        cmocka_unit_test(a_job_waits_for_a_node_and_can_be_stopped_meanwhile),
        cmocka_unit_test(names_of_jobs_are_checked),
        cmocka_unit_test(a_full_disk_is_said_before_work_is_taken),
        cmocka_unit_test(a_driver_starts_again_as_the_next_attempt),
        cmocka_unit_test(a_start_that_cannot_be_is_the_jobs_end),
        cmocka_unit_test(a_job_on_a_lost_node_fails_with_its_name),
        cmocka_unit_test(logs_are_prefixed_and_never_doubled),
        cmocka_unit_test(a_kill_between_mark_and_bytes_loses_and_doubles_nothing),
        cmocka_unit_test(a_log_gives_its_oldest_part_back),
        cmocka_unit_test(steps_are_kept_in_a_ring),
        cmocka_unit_test(steps_from_before_this_head_come_from_the_folder),
        cmocka_unit_test(until_idle_ends_with_its_jobs),
        cmocka_unit_test(until_idle_does_not_wait_for_ever_for_a_first_job),
        cmocka_unit_test(shutdown_ends_jobs_then_daemons),
        cmocka_unit_test(a_daemon_that_does_not_leave_is_not_waited_for_longer),
        cmocka_unit_test(a_journal_that_refuses_now_and_then_loses_nothing),
    };

    return t_run("jobs", tests);
}
