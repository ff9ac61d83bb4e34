#!/usr/bin/env python3
"""The HTTP table of docs/protocol.md names the routes of head/rest/routes.c, all of them and no other.

routes.py ROOT          check
routes.py --self-test   check that the check can fail"""
import pathlib
import re
import sys

ROUTE = re.compile(r'^\s*\{ "([A-Z]+)",\s+"([^"]+)"', re.M)
TOLD = re.compile(r"`(GET|POST|PUT|DELETE) (/[^`?]*)")


def in_code(text):
    return {f"{method} {re.sub(r'{[a-z]+}', '*', path)}" for method, path in ROUTE.findall(text)}


def in_table(text):
    """From the first column of table rows alone, in their order; words in capitals stand for what varies."""
    told = []
    for line in text.split("\n"):
        if line.startswith("| `"):
            for method, path in TOLD.findall(line.split(" | ")[0]):
                told.append(f"{method} {re.sub(r'(?<=/)[A-Z]+(?=/|$)', '*', path.strip())}")
    return told


def check(code, table):
    there, rows = in_code(code), in_table(table)
    told = set(rows)
    return ([f"docs/protocol.md does not tell of {r}" for r in sorted(there - told)] +
            [f"docs/protocol.md tells of {r}, which head/rest/routes.c does not have" for r in sorted(told - there)] +
            [f"docs/protocol.md tells of {r} in more than one row" for r in sorted(told) if rows.count(r) > 1] +
            ([] if there else ["no route was found in head/rest/routes.c"]))


def self_test():
    code = '    { "GET",    "/", a },\n    { "GET",    "/api/jobs/{id}", b },\n'
    good = "| `GET /` | page |\n| `GET /api/jobs/ID` | one, not `GET /other` |\n"
    rows = [("good", code, good, 0), ("not told", code + '    { "POST",   "/x", c },\n', good, 1),
            ("told twice", code, good + "| `GET /` | once more |\n", 1),
            ("not there", code, good + "| `POST /x?a=B` | |\n", 1), ("no routes", "", "", 1)]
    return [f"{name}: {check(c, t)}" for name, c, t, n in rows if len(check(c, t)) != n]


def main():
    if sys.argv[1] == "--self-test":
        wrong = self_test()
    else:
        root = pathlib.Path(sys.argv[1])
        wrong = check((root / "head/rest/routes.c").read_text(encoding="utf-8"),
                      (root / "docs/protocol.md").read_text(encoding="utf-8"))
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


sys.exit(main())
