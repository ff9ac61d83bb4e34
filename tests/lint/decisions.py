#!/usr/bin/env python3
"""Decisions are numbered 001, 002, ... in the order they came, and each says problem, decision and consequence.

decisions.py ROOT          check ROOT/docs/decisions
decisions.py --self-test   check that the check can fail"""
import pathlib
import re
import sys

PARTS = ("Problem", "Decision", "Consequence")


def check(texts):
    """texts: file name -> text. What is wrong, a sentence each."""
    wrong, taken = [], {}
    for name in sorted(texts):
        m = re.fullmatch(r"(\d{3})-[a-z0-9-]+\.md", name)
        if not m:
            wrong.append(f"{name}: a name is NNN-words-with-dashes.md")
            continue
        n = int(m[1])
        if n in taken:
            wrong.append(f"{name}: {m[1]} is {taken[n]} already; take the next free number")
        taken.setdefault(n, name)
        if not re.match(r"# (?!\d)\S", texts[name]):
            wrong.append(f"{name}: the first line is not \"# \" and a title without its number")
        wrong += [f"{name}: no **{p}.**" for p in PARTS if f"**{p}.**" not in texts[name]]
    wrong += [f"{n:03d} is missing; numbers have no gaps" for n in range(1, max(taken, default=0)) if n not in taken]
    return wrong


def self_test():
    body = "# A title\n\n" + "\n".join(f"**{p}.** x" for p in PARTS)
    good = {"001-a.md": body, "002-b-c.md": body}
    rows = {
        "good": (good, 0),
        "two of a number": (good | {"002-d.md": body}, 1),
        "a gap": (good | {"004-d.md": body}, 1),
        "a name of another form": (good | {"0003-d.md": body}, 1),
        "a part is missing": (good | {"003-d.md": body.replace("**Decision.**", "")}, 1),
        "the number is in the title": (good | {"003-d.md": body.replace("# A", "# 003 A")}, 1),
    }
    return [f"{name}: {check(texts)}" for name, (texts, n) in rows.items() if len(check(texts)) != n]


def main():
    if sys.argv[1] == "--self-test":
        wrong = self_test()
    else:
        folder = pathlib.Path(sys.argv[1], "docs/decisions")
        wrong = check({p.name: p.read_text(encoding="utf-8") for p in folder.iterdir()})
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


sys.exit(main())
