#!/usr/bin/env python3
"""A real Ray head and ours, driven by the same calls of Ray's own client: what they answer must be equal.

    compare.py BUILD-FOLDER          TAP; one line a call

Ray, newest on PyPI, goes into a virtual environment that is kept ($FURLONG_TEST_RAYENV, default ~/.cache/furlong-test/ray).
What differs on purpose stands in KNOWN with the line of docs/differences.md that says why; one that does not differ any more
is a failure too.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

from heads import PYTHON, need_ray, skip, start_ours, start_ray

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PARTS_SECONDS = 600

# label (a pattern): words of docs/differences.md. What Ray says is not compared there, ours is held by the second pattern.
KNOWN = [
    (r"body: (no JSON|empty|a list|a text|a number)", "A body that is no JSON object", r'"status": 400'),
    (r"not utf-8: logs", "Output that is not UTF-8", "a\ufffdb"),
    (r"resources: .*, ended as", "A job that waits can be stopped", "STOPPED"),
    (r"package: another ending", "Names of packages", r'"status": 500'),
    (r"state: (limit too high|limit a word|filter without a value)", "Bad queries", r'"status": 400'),
]


def drive(h, out):
    with open(out + ".log", "w") as log:
        p = subprocess.Popen([PYTHON, os.path.join(HERE, "drive.py"), h.address, out], env=h.env, cwd=h.folder, stdout=log, stderr=log)
    return p


def shown(v):
    return json.dumps(v, ensure_ascii=False, sort_keys=True)


def check(ray, own, documented):
    """One line a call; equal, or different on purpose, or wrong."""
    lines, bad, n = [], 0, 0
    theirs, ours = dict(ray), dict(own)
    used = set()
    for label in dict.fromkeys([x for x, _ in ray] + [x for x, _ in own]):
        a, b = theirs.get(label, "(not asked)"), ours.get(label, "(not asked)")
        known = next((k for k in KNOWN if re.fullmatch(k[0], label)), None)
        if known:
            used.add(known[0])
            good = known[1] in documented and bool(re.search(known[2], shown(b))) and a != b
        else:
            good = a == b
        bad += not good
        n += 1
        lines.append(f"{'ok' if good else 'not ok'} {n} - {label}" + (f" (differs: {known[1]})" if known and good else ""))
        if not good:
            lines += [f"# ray:  {shown(a)}", f"# ours: {shown(b)}"]
    for k in KNOWN:
        if k[0] not in used:
            bad += 1
            n += 1
            lines.append(f"not ok {n} - no call is named {k[0]} any more")
    return lines, bad


def self_test():
    """What is equal passes, what differs does not, and a difference that has gone is told."""
    global KNOWN
    same = [["a", {"x": 1}]]
    KNOWN = []
    assert check(same, [["a", {"x": 1}]], "")[1] == 0
    assert check(same, [["a", {"x": 2}]], "")[1] == 1
    assert check(same, [], "")[1] == 1
    KNOWN = [("a", "words", "2")]
    assert check(same, [["a", {"x": 2}]], "the words")[1] == 0
    assert check(same, [["a", {"x": 2}]], "other")[1] == 1
    assert check(same, [["a", {"x": 1}]], "the words")[1] == 1
    assert check([["b", 1]], [["b", 1]], "the words")[1] == 1
    print("1..1\nok 1 - what differs is told")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    build = os.path.abspath(sys.argv[1])
    need_ray()
    who = subprocess.run([PYTHON, "-c", "import ray; print(ray.__version__, ray.__commit__)"], capture_output=True, text=True, check=True)
    version, commit = who.stdout.split()
    with open(os.path.join(ROOT, "docs", "differences.md")) as f:
        documented = f.read()
    top = tempfile.mkdtemp(prefix="fr", dir="/tmp")
    heads, runs = [], []
    try:
        for name, start in (("ray", lambda d: start_ray(d)), ("own", lambda d: start_ours(d, build, version, commit))):
            folder = os.path.join(top, name)
            os.makedirs(folder)
            heads.append(start(folder))
            if heads[-1].why and name == "ray":
                skip(f"Ray {version} does not start here: {heads[-1].why}")
            if heads[-1].why:
                print(f"1..1\nnot ok 1 - our head starts\n# {heads[-1].why}")
                return 1
            runs.append((drive(heads[-1], os.path.join(top, name + ".json")), os.path.join(top, name + ".json")))
        said = []
        for p, out in runs:
            p.wait(timeout=PARTS_SECONDS)
            if p.returncode or not os.path.exists(out):
                with open(out + ".log") as f:
                    print("1..1\nnot ok 1 - the client ran to its end\n# " + f.read()[-3000:].replace("\n", "\n# "))
                return 1
            with open(out) as f:
                said.append(json.load(f))
    finally:
        for p, _ in runs:
            if p.poll() is None:
                p.kill()
        for h in heads:
            h.end()
        keep = os.environ.get("FURLONG_TEST_KEEP")
        if keep:
            for _, out in runs:
                if os.path.exists(out):
                    shutil.copy(out, keep)
        shutil.rmtree(top, ignore_errors=True)
    lines, bad = check(said[0], said[1], documented)
    print(f"# Ray {version}\n1..{sum(x.startswith(('ok', 'not ok')) for x in lines)}")
    print("\n".join(lines))
    return 1 if bad else 0


sys.exit(main())
