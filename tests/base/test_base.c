#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/addr.h"
#include "common/base/fault.h"
#include "common/base/file.h"
#include "common/base/id.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/str.h"
#include "tests/t.h"

/* ---- errors ---- */

static void an_error_gathers_context(void **state)
{
    struct fl_err err = { 0 };

    (void)state;
    errno = ENOENT;
    t_int_eq(fl_fail_errno(&err, "open %s", "/x"), FL_NOT_FOUND);
    t_str_eq(err.text, "open /x: No such file or directory");
    t_int_eq(err.origin, FL_FROM_ERRNO);
    t_int_eq(err.native, ENOENT);
    t_int_eq(fl_wrap(&err, FL_INVALID, "loading %s", "run 7"), FL_INVALID);
    t_str_eq(err.text, "loading run 7: open /x: No such file or directory");
    t_int_eq(err.status, FL_INVALID);
    t_int_eq(err.native, ENOENT, "the evidence stays");
    t_int_eq(fl_fail(NULL, FL_STALE, "nobody asks"), FL_STALE);
    t_int_eq(fl_wrap(NULL, FL_STALE, "nobody asks"), FL_STALE);
    err = (struct fl_err){ 0 };
    fl_wrap(&err, FL_TIMEOUT, "alone");
    t_str_eq(err.text, "alone");
}

static void a_long_error_shows_that_it_was_cut(void **state)
{
    struct fl_err err = { 0 };
    char word[300];

    (void)state;
    memset(word, 'a', sizeof(word) - 1);
    word[sizeof(word) - 1] = '\0';
    fl_fail(&err, FL_INVALID, "%s", word);
    t_int_eq(strlen(err.text), 255);
    t_str_eq(err.text + 252, "...");
    fl_wrap(&err, FL_INVALID, "outermost");
    t_true(strncmp(err.text, "outermost: aaa", 14) == 0 && strlen(err.text) == 255);
    t_str_eq(err.text + 252, "...");
    for (size_t i = 0; i < 298; i += 2)
        memcpy(word + i, "\xc3\xa4", 2); /* never half a character */
    word[298] = '\0';
    for (int shift = 0; shift < 2; shift++) {
        fl_fail(&err, FL_INVALID, "%s%s", shift ? "x" : "", word);
        const char *p = err.text + shift;
        while (p[0] == '\xc3' && p[1] == '\xa4')
            p += 2;
        t_str_eq(p, "...");
    }
    fl_fail(&err, FL_INVALID, "one\nline\tonly");
    t_str_eq(err.text, "one line only");
}

static void every_status_has_a_name(void **state)
{
    (void)state;
    for (int st = 0; st < FL_STATUS_COUNT; st++)
        for (int other = 0; other < st; other++)
            t_true(strcmp(fl_status_name((enum fl_status)st),
                          fl_status_name((enum fl_status)other)) != 0,
                   "%d and %d", st, other);
    t_str_eq(fl_status_name((enum fl_status)99), "unknown status");
    for (int e = 1; e < 140; e++)
        t_true(fl_status_of_errno(e) != FL_OK, "errno %d", e);
}

/* ---- texts and numbers ---- */

static void a_text_stays_in_its_bounds(void **state)
{
    char small[8];
    struct fl_str s = FL_STR_ON(small), h = FL_STR_HEAP(1000);

    (void)state;
    fl_str_add(&s, "%d", 12345);
    t_true(!s.cut);
    fl_str_add(&s, "6789");
    t_str_eq(small, "1234567");
    t_true(s.cut);
    for (int i = 0; i < 300; i++)
        fl_str_add(&h, "%03d,", i);
    t_int_eq(h.len, 1000);
    t_true(h.cut && strncmp(h.data + 992, "248,249,", 8) == 0);
    fl_str_fini(&h);
    t_str_eq(fl_str_text(&h), "");
    t_true(!FL_COPY(small, "12345678") && strcmp(small, "1234567") == 0);
    t_true(FL_COPY(small, "1234567"));
}

static void numbers_are_whole_or_refused(void **state)
{
    static const struct row {
        const char *text;
        bool good;
        int64_t value;
    } ints[] = { { "7", true, 7 },    { "-7", true, -7 },  { "", false, 0 },
                 { " 7", false, 0 },  { "7 ", false, 0 },  { "7x", false, 0 },
                 { "101", false, 0 }, { "-11", false, 0 }, { "99999999999999999999", false, 0 },
                 { "0x10", false, 0 } };
    static const struct row bytes[] = {
        { "0", true, 0 },
        { "512", true, 512 },
        { "64k", true, 65536 },
        { "64K", true, 65536 },
        { "1KB", true, 1000 },
        { "1KiB", true, 1024 },
        { "512MiB", true, 512 << 20 },
        { "1.5G", true, 3ll << 29 },
        { "2TB", true, 2000000000000 },
        { "10b", true, 10 },
        { "1k5", false, 0 },
        { "k", false, 0 },
        { "-1", false, 0 },
        { "1PiB", false, 0 },
        { "1e30", false, 0 },
        { "nan", false, 0 },
        { "3TiB", false, 0 },
        { "1iB", false, 0 },
    };
    struct fl_err err = { 0 };

    (void)state;
    for (size_t i = 0; i < FL_LEN(ints); i++) {
        int64_t v = -99;
        enum fl_status st = fl_parse_i64(ints[i].text, -10, 100, &v, &err);

        t_int_eq(st, ints[i].good ? FL_OK : FL_INVALID, "%s", ints[i].text);
        t_int_eq(v, ints[i].good ? ints[i].value : -99, "%s", ints[i].text);
    }
    for (size_t i = 0; i < FL_LEN(bytes); i++) {
        uint64_t v = 99;
        enum fl_status st = fl_parse_bytes(bytes[i].text, 1ull << 41, &v, &err);

        t_int_eq(st, bytes[i].good ? FL_OK : FL_INVALID, "%s", bytes[i].text);
        t_int_eq(v, bytes[i].good ? bytes[i].value : 99, "%s", bytes[i].text);
    }
    double d = 0;
    t_ok(fl_parse_f64("1e-3", 0, 1, &d, &err), &err);
    t_true(d == 1e-3);
    t_int_eq(fl_parse_f64("inf", 0, 1, &d, &err), FL_INVALID);
    t_int_eq(fl_parse_f64("nan", 0, 1, &d, &err), FL_INVALID);
    t_int_eq(fl_parse_f64("1,5", 0, 2, &d, &err), FL_INVALID);
    char text[16];
    t_str_eq(fl_bytes_text(text, 1023), "1023 B");
    t_str_eq(fl_bytes_text(text, 3ull << 29), "1.5 GiB");
    t_str_eq(fl_bytes_text(text, UINT64_MAX), "16.0 EiB");
}

static void words_are_compared(void **state)
{
    (void)state;
    t_int_eq(fl_edit_distance("colocate", "colocate"), 0);
    t_int_eq(fl_edit_distance("colocat", "colocate"), 1);
    t_int_eq(fl_edit_distance("", "abc"), 3);
    t_int_eq(fl_edit_distance("kitten", "sitting"), 3);
    t_int_eq(fl_edit_distance("lits", "list"), 1);
    t_int_eq(fl_edit_distance("ab", "ba"), 1);
    t_int_eq(fl_edit_distance("ca", "abc"), 3);
    t_true(fl_name_is_secret("HF_TOKEN") && fl_name_is_secret("wandb_api_key"));
    t_true(fl_name_is_secret("KEY") && !fl_name_is_secret("input-key"));
    t_true(!fl_name_is_secret("PATH"));
}

static void loopback_is_known_by_its_address(void **state)
{
    static const struct {
        const char *address;
        bool loopback;
    } rows[] = { { "127.0.0.1", true },      { "127.0.0.1:6379", true },     { "127.9.9.9", true },  { "::1", true },
                 { "[::1]", true },          { "[::1]:6379", true },         { "localhost", true },  { "localhost:1", true },
                 { "127.0.0.1.evil", false }, { "127.evil.example:1", false }, { "10.0.0.1", false }, { "0.0.0.0", false },
                 { "::", false },            { "[::]:1", false },            { "::2:1", false },     { "fe80::1", false },
                 { "localhost.evil", false }, { "", false },                 { ":1", false },        { "[::1", false } };

    (void)state;
    for (unsigned i = 0; i < FL_LEN(rows); i++)
        t_int_eq(fl_addr_is_loopback(rows[i].address), rows[i].loopback, "%s", rows[i].address);
}

/* ---- ids and digests ---- */

static void ids_are_shown_and_read(void **state)
{
    struct fl_worker_id a, b;
    struct fl_err err = { 0 };
    char text[57], brief[FL_SHORT];

    (void)state;
    t_ok(fl_random(&a, sizeof(a), &err), &err);
    t_ok(fl_random(&b, sizeof(b), &err), &err);
    t_true(!FL_SAME(a, b));
    FL_HEX(a, text);
    t_true(fl_hex_parse(text, &b, sizeof(b)) && FL_SAME(a, b));
    fl_short(brief, &a);
    t_true(strlen(brief) == 8 && strncmp(text, brief, 8) == 0);
    text[55] = 'g';
    memset(&b, 7, sizeof(b));
    t_true(!fl_hex_parse(text, &b, sizeof(b)) && b.b[0] == 7, "untouched");
    t_true(!fl_hex_parse("00", &b, sizeof(b)));
    struct fl_term x = { { 1 }, 4 }, y = { { 1 }, 5 }, z = { { 2 }, 9 };
    t_true(fl_term_older(&x, &y) && !fl_term_older(&y, &x) && !fl_term_older(&x, &z));
}

/* FIPS 180-4 examples (NIST) and RFC 4231 */
static void digests_are_the_standards(void **state)
{
    static const struct row {
        const char *text, *hex;
    } sha[] = {
        { "", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" },
        { "abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" },
        { "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1" },
        { "abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqr"
          "l"
          "mnopqrsmnopqrstnopqrstu",
          "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1" },
    };
    static const struct mac {
        uint8_t key_byte;
        size_t key_len;
        const char *key, *data, *hex;
    } macs[] = {
        { 0x0b, 20, NULL, "Hi There",
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7" },
        { 0, 4, "Jefe", "what do ya want for nothing?",
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843" },
        { 0xaa, 131, NULL, "Test Using Larger Than Block-Size Key - Hash Key First",
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54" },
    };
    uint8_t out[32], key[131], million[1000];
    struct fl_sha256 s;
    char hex[65];

    (void)state;
    for (size_t i = 0; i < FL_LEN(sha); i++)
        for (size_t step = 1; step < 70; step += 17) { /* in pieces of any size */
            size_t len = strlen(sha[i].text);

            fl_sha256_init(&s);
            for (size_t at = 0; at < len; at += step)
                fl_sha256_add(&s, sha[i].text + at, at + step < len ? step : len - at);
            fl_sha256_end(&s, out);
            fl_hex(hex, out, sizeof(out));
            t_str_eq(hex, sha[i].hex, "row %zu in steps of %zu", i, step);
        }
    memset(million, 'a', sizeof(million));
    fl_sha256_init(&s);
    for (int i = 0; i < 1000; i++)
        fl_sha256_add(&s, million, sizeof(million));
    fl_sha256_end(&s, out);
    fl_hex(hex, out, sizeof(out));
    t_str_eq(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    for (size_t i = 0; i < FL_LEN(macs); i++) {
        const struct mac *m = &macs[i];
        struct fl_bytes parts[] = { { m->data, 5 }, { m->data + 5, strlen(m->data) - 5 } };

        memset(key, m->key_byte, sizeof(key));
        if (m->key)
            memcpy(key, m->key, m->key_len);
        fl_hmac_sha256(key, m->key_len, parts, 2, out);
        fl_hex(hex, out, sizeof(out));
        t_str_eq(hex, m->hex, "row %zu", i);
    }
    t_true(fl_equal_ct("abc", "abc", 3) && !fl_equal_ct("abc", "abd", 3));
    t_true(fl_equal_ct("abc", "xyz", 0));
}

/* ---- files ---- */

static void a_file_is_whole_or_as_before(void **state)
{
    const char *path = t_path("state.json");
    struct fl_err err = { 0 };
    char *text = NULL;
    size_t len = 0;
    struct stat st;

    (void)state;
    t_ok(fl_file_write(path, 0600, "old", 3, &err), &err);
    t_int_eq(stat(path, &st), 0);
    t_int_eq(st.st_mode & 0777, 0600);
    int fds = t_open_fds();
    enum fl_status done = FL_INTERNAL;
    for (unsigned nth = 1; done != FL_OK; nth++) {
        fl_fault_arm(nth);
        done = fl_file_write(path, 0600, "new", 3, &err);
        fl_fault_disarm();
        t_int_eq(t_open_fds(), fds, "nth=%u", nth);
        t_ok(fl_file_read(path, 100, &text, &len, &err), &err);
        t_str_eq(text, done == FL_OK ? "new" : "old", "nth=%u", nth);
        free(text);
        t_true(done == FL_OK || nth < 10, "nth=%u", nth);
    }
    char *names = NULL;
    t_int_eq(asprintf(&names, "ls %s | grep -c new-", t_tmp()) > 0, 1);
    FILE *p = popen(names, "r");
    int left = -1;
    t_int_eq(fscanf(p, "%d", &left), 1);
    pclose(p);
    free(names);
    t_int_eq(left, 0, "temporary names");
    t_refused(fl_file_read(path, 2, &text, &len, &err), FL_EXHAUSTED, &err);
    t_has(err.text, "longer than 2 bytes");
    t_refused(fl_file_read(t_path("absent"), 2, &text, &len, &err), FL_NOT_FOUND, &err);
    t_refused(fl_file_read(t_tmp(), 100, &text, &len, &err), FL_INVALID, &err);
    t_ok(fl_file_read("/proc/self/stat", 4096, &text, &len, &err), &err);
    t_true(len > 10);
    free(text);
}

static void folders_come_and_go(void **state)
{
    const char *deep = t_path("a/b/c"), *top = t_path("a"), *file = t_path("a/file");
    struct fl_err err = { 0 };
    struct stat st;

    (void)state;
    t_ok(fl_mkdirs(deep, &err), &err);
    t_ok(fl_mkdirs(deep, &err), &err);
    t_int_eq(stat(deep, &st), 0);
    t_int_eq(st.st_mode & 0777, 0700);
    t_ok(fl_file_write(file, 0600, "x", 1, &err), &err);
    t_true(fl_mkdirs(file, &err) == FL_EXISTS, "%s", err.text);
    t_int_eq(symlink("/etc", t_path("a/link")), 0);
    t_ok(fl_tree_remove(top, &err), &err);
    t_true(stat(top, &st) < 0 && errno == ENOENT);
    t_true(stat("/etc/passwd", &st) == 0, "a link was followed");
    t_ok(fl_tree_remove(top, &err), &err);
}

static void where_things_live(void **state)
{
    char out[FL_PATH_MAX], mine[FL_PATH_MAX];
    struct fl_err err = { 0 };
    struct sockaddr_un un;

    (void)state;
    setenv("FURLONG_RUNTIME_DIR", t_path("run"), 1);
    t_ok(fl_runtime_dir(NULL, out, &err), &err);
    t_str_eq(out, t_path("run"));
    t_ok(fl_runtime_dir(t_path("flag"), out, &err), &err);
    t_str_eq(out, t_path("flag"), "a flag wins");
    setenv("FURLONG_RUNTIME_DIR", t_path("much-too-long-for-sockets-to-lie-below-it"), 1);
    t_refused(fl_runtime_dir(NULL, out, &err), FL_INVALID, &err);
    t_has(err.text, "40 at most");
    t_refused(fl_runtime_dir("relative", out, &err), FL_INVALID, &err);
    unsetenv("FURLONG_RUNTIME_DIR");
    unsetenv("XDG_RUNTIME_DIR");
    snprintf(mine, sizeof(mine), "/tmp/furlong-%u", (unsigned)geteuid());
    bool was = access(mine, F_OK) == 0;
    t_ok(fl_runtime_dir(NULL, out, &err), &err);
    t_str_eq(out, mine);
    if (!was)
        (void)rmdir(mine); /* somebody else's by now, if it is not empty */
    unsetenv("FURLONG_STATE_DIR");
    setenv("XDG_STATE_HOME", t_path("xdg"), 1);
    t_ok(fl_state_dir(NULL, out, &err), &err);
    t_has(out, "/xdg/furlong");
    t_refused(fl_program_path("furlong-nothing", out, &err), FL_NOT_FOUND, &err);
    setenv("FURLONG_BIN_DIR", "/bin", 1);
    t_ok(fl_program_path("sh", out, &err), &err);
    t_str_eq(out, "/bin/sh");
    unsetenv("FURLONG_BIN_DIR");

    char path[120];
    memset(path, 'p', sizeof(path));
    path[107] = '\0';
    t_ok(fl_unix_addr(path, &un, &err), &err);
    path[107] = 'p';
    path[108] = '\0';
    t_refused(fl_unix_addr(path, &un, &err), FL_INVALID, &err);
    t_has(err.text, "108 bytes, 107 at most");
}

static void a_process_is_a_pid_and_a_start(void **state)
{
    struct fl_err err = { 0 };
    uint64_t mine = 0, its = 0;

    (void)state;
    t_ok(fl_pid_start_time(getpid(), &mine, &err), &err);
    t_true(mine > 0 && fl_pid_alive(getpid(), mine) && !fl_pid_alive(getpid(), mine + 1));
    pid_t pid = fork();
    if (pid == 0)
        _exit(0);
    t_int_eq(waitid(P_PID, (id_t)pid, &(siginfo_t){ 0 }, WEXITED | WNOWAIT), 0);
    t_ok(fl_pid_start_time(pid, &its, &err), &err);
    t_true(!fl_pid_alive(pid, its), "a zombie");
    t_int_eq(waitpid(pid, NULL, 0), pid);
    t_refused(fl_pid_start_time(pid, &its, &err), FL_NOT_FOUND, &err);
    t_true(!fl_pid_alive(0, mine));
}

/* ---- log ---- */

static void a_log_line_is_one_line(void **state)
{
    int saved = dup(STDERR_FILENO), fd[2];
    char text[4096], head[64];
    struct fl_err err = { 0 };

    (void)state;
    t_int_eq(pipe(fd), 0);
    dup2(fd[1], STDERR_FILENO);
    t_ok(fl_log_level_set("warn", &err), &err);
    fl_info("not said");
    fl_debug("nor this");
    errno = EIO;
    fl_warn("node lost node=%d why=\"%s\"", 7, "two\nlines\x1b[31m");
    int kept = errno;
    memset(text, 'y', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    fl_error("%s", text);
    t_true(!fl_log_on(FL_LOG_INFO));
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(fd[1]);
    t_int_eq(kept, EIO, "a log line changes no errno");
    ssize_t n = read(fd[0], text, sizeof(text) - 1);
    close(fd[0]);
    t_true(n > 0);
    text[n] = '\0';
    t_int_eq(sscanf(text, "%*4d-%*2d-%*2dT%*2d:%*2d:%*2d.%*3dZ %63s", head), 1);
    t_str_eq(head, "warn");
    t_has(text, "Z warn node lost node=7 why=\"two\\x0alines\\x1b[31m\"\n");
    t_true(strcmp(text + n - 5, "y...\n") == 0, "cut");
    t_refused(fl_log_level_set("loud", &err), FL_INVALID, &err);
    t_ok(fl_log_level_set("info", &err), &err);
}

/* ---- metrics ---- */

static const double bounds[] = { 0.1, 1, 10 };
static const struct fl_metric_name beats = { FL_COUNTER, "furlong_beats_total", "Beats seen", NULL,
                                             0 };
static const struct fl_metric_name depth = { FL_GAUGE, "furlong_depth", "a\\b\nc", NULL, 0 };
static const struct fl_metric_name waits = { FL_HISTOGRAM, "furlong_wait_seconds", "Waits", bounds,
                                             3 };

static void metrics_are_written_as_prometheus_reads(void **state)
{
    struct fl_metric_label a[] = { { "node", "gpu-\"a\"" }, { "job", "x" } };
    struct fl_metric *c = NULL, *same = NULL, *other = NULL, *g = NULL, *h = NULL;
    struct fl_metrics *m = NULL;
    struct fl_str text = FL_STR_HEAP(1 << 16);
    struct fl_err err = { 0 };

    (void)state;
    t_ok(fl_metrics_create(&m, &err), &err);
    t_ok(fl_metric(m, &beats, a, 2, &c, &err), &err);
    t_ok(fl_metric(m, &beats, a, 2, &same, &err), &err);
    t_ok(fl_metric(m, &beats, a, 1, &other, &err), &err);
    t_true(c == same && c != other);
    t_ok(fl_metric(m, &depth, NULL, 0, &g, &err), &err);
    t_ok(fl_metric(m, &waits, NULL, 0, &h, &err), &err);
    fl_metric_add(c, 2);
    fl_metric_add(c, -5); /* counters only rise */
    fl_metric_set(g, -1.5);
    fl_metric_add(g, -0.25);
    fl_metric_observe(h, 0.1);
    fl_metric_observe(h, 5);
    fl_metric_observe(h, 50);
    fl_metric_add(NULL, 1);
    t_true(fl_metric_value(c) == 2 && fl_metric_value(h) == 3);
    fl_metrics_text(m, &text);
    t_str_eq(fl_str_text(&text), "# HELP furlong_beats_total Beats seen\n"
                                 "# TYPE furlong_beats_total counter\n"
                                 "furlong_beats_total{node=\"gpu-\\\"a\\\"\",job=\"x\"} 2\n"
                                 "furlong_beats_total{node=\"gpu-\\\"a\\\"\"} 0\n"
                                 "# HELP furlong_depth a\\\\b\\nc\n"
                                 "# TYPE furlong_depth gauge\n"
                                 "furlong_depth -1.75\n"
                                 "# HELP furlong_wait_seconds Waits\n"
                                 "# TYPE furlong_wait_seconds histogram\n"
                                 "furlong_wait_seconds_bucket{le=\"0.1\"} 1\n"
                                 "furlong_wait_seconds_bucket{le=\"1\"} 1\n"
                                 "furlong_wait_seconds_bucket{le=\"10\"} 2\n"
                                 "furlong_wait_seconds_bucket{le=\"+Inf\"} 3\n"
                                 "furlong_wait_seconds_sum 55.100000000000001\n"
                                 "furlong_wait_seconds_count 3\n");
    fl_metric_drop(other); /* the last one of its list */
    t_ok(fl_metric(m, &beats, NULL, 0, &other, &err), &err);
    fl_str_fini(&text);
    fl_metrics_text(m, &text);
    t_has(text.data, "} 2\nfurlong_beats_total 0\n");
    fl_str_fini(&text);
    fl_metrics_destroy(m);
}

static void bad_metrics_are_refused(void **state)
{
    static const struct fl_metric_name space = { FL_COUNTER, "a b", "", NULL, 0 };
    static const struct fl_metric_name other = { FL_GAUGE, "furlong_beats_total", "", NULL, 0 };
    struct fl_metric_label bad = { "a-b", "x" }, many = { "id", NULL };
    struct fl_metrics *m = NULL;
    struct fl_metric *x = NULL;
    struct fl_err err = { 0 };
    char value[16];

    (void)state;
    t_ok(fl_metrics_create(&m, &err), &err);
    t_refused(fl_metric(m, &space, NULL, 0, &x, &err), FL_INVALID, &err);
    t_refused(fl_metric(m, &beats, &bad, 1, &x, &err), FL_INVALID, &err);
    t_ok(fl_metric(m, &beats, NULL, 0, &x, &err), &err);
    t_refused(fl_metric(m, &other, NULL, 0, &x, &err), FL_INVALID, &err);
    many.value = value;
    for (int i = 1; i < FL_METRIC_SERIES_MAX; i++) {
        snprintf(value, sizeof(value), "%d", i);
        t_int_eq(fl_metric(m, &beats, &many, 1, &x, NULL), FL_OK, "series %d", i);
    }
    many.value = "one more";
    t_refused(fl_metric(m, &beats, &many, 1, &x, &err), FL_EXHAUSTED, &err);
    fl_metrics_destroy(m);
}

/* ---- faults ---- */

static void the_nth_time_fails(void **state)
{
    struct fl_err err = { 0 };
    char met[8] = "";

    (void)state;
    t_ok(fl_fault_set("x.a:2=fail,x.b:1=fail", &err), &err);
    for (int i = 0; i < 4; i++)
        strcat(met, FL_FAULT("x.a") ? "!" : ".");
    t_str_eq(met, ".!..");
    errno = 0;
    t_true(FL_FAULT("x.b") && errno == EIO);
    t_true(!FL_FAULT("x.c"));
    t_ok(fl_fault_set(NULL, &err), &err);
    t_true(!FL_FAULT("x.b"));
    static const char *const bad[] = { "x",       "x:1",      "x:0=fail", "x:y=fail",
                                       ":1=fail", "x:1=boom", "x=fail:1" };
    for (size_t i = 0; i < FL_LEN(bad); i++) {
        t_refused(fl_fault_set(bad[i], &err), FL_INVALID, &err);
        t_has(err.text, bad[i]);
    }
}

static int end_of_child(const char *faults, const char *dir)
{
    int st = 0;
    pid_t pid = fork();

    if (pid == 0) {
        setenv("FURLONG_FAULT_DIR", dir, 1);
        if (fl_fault_set(faults, NULL) != FL_OK)
            _exit(3);
        _exit(FL_FAULT("x.kill") ? 4 : 5);
    }
    t_int_eq(waitpid(pid, &st, WUNTRACED), pid);
    if (WIFSTOPPED(st)) {
        kill(pid, SIGCONT);
        t_int_eq(waitpid(pid, &st, 0), pid);
        return 1000 + WEXITSTATUS(st);
    }
    return WIFSIGNALED(st) ? 100 + WTERMSIG(st) : WEXITSTATUS(st);
}

static void a_fault_kills_or_stops_once_for_all_processes(void **state)
{
    struct fl_err err = { 0 };
    struct stat st;

    (void)state;
    t_int_eq(end_of_child("x.kill:1=kill", ""), 100 + SIGKILL);
    t_int_eq(end_of_child("x.kill:1=stop", ""), 1005, "stopped, then went on");
    t_int_eq(end_of_child("x.kill:2=kill", ""), 5);
    t_ok(fl_mkdirs(t_path("faults"), &err), &err);
    t_int_eq(end_of_child("x.kill:1=kill", t_path("faults")), 100 + SIGKILL);
    t_int_eq(stat(t_path("faults/x.kill:1"), &st), 0);
    t_int_eq(end_of_child("x.kill:1=kill", t_path("faults")), 5, "started again: spared");
}

static void the_sweep_meets_each_place_once(void **state)
{
    (void)state;
    for (unsigned nth = 1; nth <= 4; nth++) {
        unsigned failed = 0;

        fl_fault_arm(nth);
        for (unsigned i = 1; i <= 3; i++)
            failed += FL_FAULT("x.any") ? i : 0;
        t_int_eq(fl_fault_disarm(), nth <= 3);
        t_int_eq(failed, nth <= 3 ? nth : 0);
    }
    t_true(!FL_FAULT("x.any"));
}

/* ---- signals ---- */

static int got_signal, got_from;
static struct fl_signals *signals;

static void on_signal(void *arg, int signo, int from_pid)
{
    got_signal = signo;
    got_from = from_pid;
    if (arg) { /* the usual way out: everything is torn down from here */
        fl_signals_destroy(signals);
        signals = NULL;
    }
}

static void a_signal_is_an_event(void **state)
{
    static const int which[] = { SIGUSR1, SIGUSR2 };
    struct fl_loop *l = NULL;
    struct fl_err err = { 0 };
    sigset_t now;
    int fds = t_open_fds();

    (void)state;
    t_ok(fl_loop_create(NULL, &l, &err), &err);
    for (int destroys = 0; destroys < 2; destroys++) {
        t_ok(fl_signals_create(l, which, 2, on_signal, destroys ? l : NULL, &signals, &err), &err);
        kill(getpid(), SIGUSR2);
        got_signal = 0;
        t_until(l, got_signal, 5000);
        t_int_eq(got_signal, SIGUSR2);
        t_int_eq(got_from, getpid());
        if (!destroys)
            fl_signals_destroy(signals);
    }
    t_true(!signals);
    t_ok(fl_signals_create(l, which, 2, on_signal, NULL, &signals, &err), &err);
    fl_signals_destroy(signals);
    sigprocmask(SIG_BLOCK, NULL, &now);
    t_true(!sigismember(&now, SIGUSR1) && !sigismember(&now, SIGUSR2), "as before");
    fl_loop_destroy(l);
    t_int_eq(t_open_fds(), fds);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_error_gathers_context),
        cmocka_unit_test(a_long_error_shows_that_it_was_cut),
        cmocka_unit_test(every_status_has_a_name),
        cmocka_unit_test(a_text_stays_in_its_bounds),
        cmocka_unit_test(numbers_are_whole_or_refused),
        cmocka_unit_test(words_are_compared),
        cmocka_unit_test(loopback_is_known_by_its_address),
        cmocka_unit_test(ids_are_shown_and_read),
        cmocka_unit_test(digests_are_the_standards),
        cmocka_unit_test(a_file_is_whole_or_as_before),
        cmocka_unit_test(folders_come_and_go),
        cmocka_unit_test(where_things_live),
        cmocka_unit_test(a_process_is_a_pid_and_a_start),
        cmocka_unit_test(a_log_line_is_one_line),
        cmocka_unit_test(metrics_are_written_as_prometheus_reads),
        cmocka_unit_test(bad_metrics_are_refused),
        cmocka_unit_test(the_nth_time_fails),
        cmocka_unit_test(a_fault_kills_or_stops_once_for_all_processes),
        cmocka_unit_test(the_sweep_meets_each_place_once),
        cmocka_unit_test(a_signal_is_an_event),
    };

    return t_run("base", tests);
}
