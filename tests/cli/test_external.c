/* What goes along to the nodes of an external Ray */
#include <stdlib.h>
#include <string.h>

#include "cli/external.h"
#include "common/base/str.h"
#include "tests/t.h"

static void collect(void *arg, const char *name, const char *path)
{
    struct fl_str *s = arg;

    fl_str_add(s, "%s=%s;", name, path);
}

static void libraries(void **state)
{
    static const char trace[] = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibgrpc.so.29 => /usr/lib/libgrpc.so.29 (0x0000)\n\tlibm.so.6 => /lib/libm.so.6 (0x0)\n"
                                "\tlibmicrohttpd.so.12 => /lib/libmicrohttpd.so.12 (0x0)\n\tlibc.so.6 => /lib/libc.so.6 (0x0)\n\t/lib64/ld-linux-x86-64.so.2 (0x0)\n"
                                "\tlibgone.so.1 => not found\n\tlibstdc++.so.6 => /lib/x/../libstdc++.so.6 (0x0)";
    char text[512];
    struct fl_str s = FL_STR_ON(text);

    (void)state;
    external_libraries(trace, collect, &s);
    t_str_eq(text, "libgrpc.so.29=/usr/lib/libgrpc.so.29;libmicrohttpd.so.12=/lib/libmicrohttpd.so.12;libstdc++.so.6=/lib/x/../libstdc++.so.6;");
    s.len = 0;
    text[0] = 0;
    external_libraries("", collect, &s);
    external_libraries("\tstatically linked\n", collect, &s);
    t_str_eq(text, "");
}

static void environment(void **state)
{
    static const struct { const char *name; bool travels; } rows[] = {
        { "NCCL_IB_HCA", true },      { "SGLANG_LOG", true },         { "FURLONG_RAY_PYTHON", true },  { "SGLANG_API_KEY", false },
        { "T_PATH", true },           { "RAY_AUTH_TOKEN", false },    { "FURLONG_TOKEN_PATH", false }, { "MILES_SCRIPT_EXTERNAL_RAY", false },
        { "HF_TOKEN", false },        { "https_proxy", false },       { "NO_PROXY", false },           { "FURLONG_RAY_SECRET", false },
    };
    struct fl_err err = { 0 };
    json_t *env;

    (void)state;
    for (size_t i = 0; i < FL_LEN(rows); i++)
        setenv(rows[i].name, "a=b c", 1);
    t_ok(external_env("gcs://x.zip", "T_PATH", &env, &err), &err);
    t_str_eq(cli_text(env, "working_dir"), "gcs://x.zip");
    for (size_t i = 0; i < FL_LEN(rows); i++)
        t_str_eq(cli_text(json_object_get(env, "env_vars"), rows[i].name), rows[i].travels ? "a=b c" : "", "%s", rows[i].name);
    json_decref(env);
    env = NULL;
    t_int_eq(external_env("gcs://x.zip", "T_PATH,HF_TOKEN", &env, &err), FL_INVALID);
    t_true(!env && strstr(err.text, "HF_TOKEN looks like a secret"), "%s", err.text);
}

static void files(void **state)
{
    bool start = false;

    (void)state;
    t_int_eq(external_n_files, 4);
    for (size_t i = 0; i < external_n_files; i++) {
        t_true(external_files[i].len > 100 && external_files[i].data);
        start |= strcmp(external_files[i].name, "external_ray/start") == 0 && external_files[i].mode == 0755;
    }
    t_true(start);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(libraries),
        cmocka_unit_test(environment),
        cmocka_unit_test(files),
    };

    return t_run("external", tests);
}
