"""test_headers.py INCLUDE-DIR HEADER... - each installed header alone, in every language that programs are written in, in TAP"""
import shutil
import subprocess
import sys

WAYS = [
    ("C99", ["cc", "-x", "c", "-std=c99", "-pedantic"]),
    ("GNU C17", ["cc", "-x", "c", "-std=gnu17", "-Wstrict-prototypes"]),
    ("C++17", ["c++", "-x", "c++", "-std=c++17"]),
]


def main():
    include, headers = sys.argv[1], sys.argv[2:]
    print(f"1..{len(WAYS) * len(headers)}")
    at, failed = 0, 0
    for name, command in WAYS:
        for header in headers:
            at += 1
            if not shutil.which(command[0]):
                print(f"ok {at} - {header} as {name} # SKIP no {command[0]} here")
                continue
            text = f"#include <furlong/{header}>\n#include <furlong/{header}>\nint main(void) {{ return 0; }}\n"
            ran = subprocess.run(command + ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", include, "-"], input=text,
                                 capture_output=True, text=True)
            failed += ran.returncode != 0
            print(f"{'not ok' if ran.returncode else 'ok'} {at} - {header} as {name}")
            for line in ran.stderr.splitlines()[:8]:
                print(f"# {line}")
    return failed > 0


sys.exit(main())
