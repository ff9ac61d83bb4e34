#!/usr/bin/env python3
"""Words that do not belong into the house, and names that launchers kill by.

Usage: words.py ROOT; words.py --self-test
"""
import os
import re
import sys

FOLDERS = ["bench", "bin", "cli", "common", "deploy", "docs", "examples", "head", "include", "kernels", "placement", "python",
           "tests", "transport", "worker"]
TEXT = re.compile(r"\.(c|h|cu|py|md|proto|build|sh|txt|service|yaml|json)$|^[A-Za-z0-9_-]+$")
FORBIDDEN = [
    (re.compile(r"\b(TODO|FIXME|XXX)\b"), "unfinished"),
    (re.compile(r"(?<![\w.])/work/"), "a path of somebody's machine"),
    (re.compile(r"(?<!\w)/(home|root)/\w"), "a path of somebody's machine"),
    (re.compile(r"\b(issues?|PR|pull request) ?#?\d", re.I), "a number that only a tracker knows"),
]
# `pkill -9 ray`, and the same for sglang, miles and redis, end every process whose name contains the word.
KILLED_BY = re.compile(r"ray|miles|sglang|redis")
RENAMED = {"furlong-sglang"}  # calls itself by another name before it starts anything; a test looks
PROGRAM = re.compile(r"\bexecutable\s*\(\s*'([^']+)'")


def check(path, text):
    out = []
    for n, line in enumerate(text.split("\n"), 1):
        for pattern, why in FORBIDDEN:
            if pattern.search(line):
                out.append(f"{path}:{n}: {why}: {line.strip()[:80]}")
        for name in PROGRAM.findall(line) if path.endswith("meson.build") else []:
            if KILLED_BY.search(name) and name not in RENAMED:
                out.append(f"{path}:{n}: program {name}: launchers kill by that name")
    return out


def tree(root):
    for folder in FOLDERS:
        for at, dirs, names in os.walk(os.path.join(root, folder)):
            dirs[:] = [d for d in dirs if not d.startswith((".", "build", "__"))]
            for n in names:
                path = os.path.relpath(os.path.join(at, n), root)
                if TEXT.search(n) and path != "tests/lint/words.py":
                    with open(os.path.join(at, n), encoding="utf-8", errors="replace") as f:
                        yield path, f.read()


SELF = [
    ("a.c", "/* TODO: later */", 1), ("a.c", "x = TODOS;", 0), ("a.md", "see /work/shared", 1),
    ("a.md", "the frame/work/plan", 0), ("meson.build", "executable('furlong-head', 'a.c')", 0),
    ("meson.build", "executable('furlong-array', 'a.c')", 1), ("a.sh", "cd /home/me", 1), ("a.c", "getenv(\"HOME\")", 0),
    ("a.md", "see issue #3", 1), ("a.c", "/* Issues 4 and 5 */", 1), ("a.c", "an issue of three", 0), ("a.py", "'/root/x'", 1),
]


def main():
    if sys.argv[1:] == ["--self-test"]:
        bad = [row for row in SELF if len(check(row[0], row[1])) != row[2]]
        print("\n".join(f"self-test: {row}" for row in bad))
        return 1 if bad else 0
    said = [line for path, text in tree(sys.argv[1]) for line in check(path, text)]
    print("\n".join(said) if said else "no such word")
    return 1 if said else 0


sys.exit(main())
