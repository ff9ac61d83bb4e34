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
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
RAYENV = os.environ.get("FURLONG_TEST_RAYENV") or os.path.expanduser("~/.cache/furlong-test/ray")
PYTHON = os.path.join(RAYENV, "bin", "python")
PARTS_SECONDS = 600

# label (a pattern): words of docs/differences.md. What Ray says is not compared there, ours is held by the second pattern.
KNOWN = [
    (r"body: (no JSON|empty|a list|a text|a number)", "A body that is no JSON object", r'"status": 400'),
    (r"not utf-8: logs", "Output that is not UTF-8", "a\ufffdb"),
    (r"resources: .*, ended as", "A job that waits can be stopped", "STOPPED"),
    (r"package: another ending", "Names of packages", r'"status": 500'),
    (r"state: (limit too high|limit a word|filter without a value)", "Bad queries", r'"status": 400'),
]


def skip(why):
    print(f"1..0 # SKIP {why}")
    sys.exit(0)


def free_ports(n):
    """Above Ray's own range for workers, which it refuses."""
    out, held = [], []
    port = 21000 + os.getpid() % 4000
    while len(out) < n:
        port += 1
        s = socket.socket()
        try:
            s.bind(("127.0.0.1", port))
            held.append(s)
            out.append(port)
        except OSError:
            s.close()
    for s in held:
        s.close()
    return out


def need_ray():
    if os.path.exists(PYTHON) and subprocess.run([PYTHON, "-c", "import ray, aiohttp"], capture_output=True).returncode == 0:
        return
    try:
        os.makedirs(os.path.dirname(RAYENV), exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", RAYENV], check=True, capture_output=True, timeout=120)
        p = subprocess.run([PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "ray[default]"], capture_output=True,
                           text=True, timeout=900)
    except (subprocess.SubprocessError, OSError) as e:
        skip(f"no virtual environment with Ray can be made here: {e}")
    if p.returncode:
        lines = p.stderr.strip().splitlines()
        skip(f"Ray cannot be had from PyPI: {lines[-1] if lines else 'pip said nothing'}")


class Head:
    """One that was started, and the processes that are to go with it."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "FURLONG_"))}
        self.env["HOME"] = os.path.join(folder, "home")
        os.makedirs(self.env["HOME"])
        self.pids = []

    def run(self, *words, **kw):
        return subprocess.run(words, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120, **kw)

    def ours(self):
        """Processes whose command line or environment names this folder."""
        out = []
        for pid in os.listdir("/proc"):
            if not pid.isdigit() or int(pid) == os.getpid():
                continue
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    line = f.read()
                with open(f"/proc/{pid}/environ", "rb") as f:
                    line += f.read()
            except OSError:
                continue
            if self.folder.encode() in line:
                out.append(int(pid))
        return out

    def end(self):
        for _ in range(3):
            for pid in self.ours():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            time.sleep(0.2)


def start_ray(folder):
    h = Head(folder)
    gcs, http, agent, client = free_ports(4)
    p = h.run(os.path.join(RAYENV, "bin", "ray"), "start", "--head", f"--port={gcs}", f"--dashboard-port={http}", "--num-cpus=2",
              "--num-gpus=0", '--resources={"widget": 2}', "--disable-usage-stats", f"--temp-dir={folder}/t",
              f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}")
    h.address = f"http://127.0.0.1:{http}"
    h.why = None if p.returncode == 0 else (p.stderr or p.stdout)[-400:]
    return h


def start_ours(folder, build, version, commit):
    h = Head(folder)
    h.env.update(FURLONG_RUNTIME_DIR=f"{folder}/r", FURLONG_STATE_DIR=f"{folder}/s", FURLONG_RAY_VERSION=version,
                 FURLONG_RAY_COMMIT=commit, FURLONG_BIN_DIR=os.path.join(build, "bin"))
    gcs, http = free_ports(2)
    p = h.run(os.path.join(build, "bin", "furlong"), "start", "--head", "--port", str(gcs), "--dashboard-port", str(http), "--num-cpus",
              "2", "--num-gpus", "0", "--resources", '{"widget": 2}')
    h.address = f"http://127.0.0.1:{http}"
    h.why = None if p.returncode == 0 else (p.stderr or p.stdout)[-400:]
    return h


def drive(h, out):
    with open(out + ".log", "w") as log:
        p = subprocess.Popen([PYTHON, os.path.join(HERE, "drive.py"), h.address, out], env=h.env, cwd=h.folder, stdout=log, stderr=log)
    return p


def shown(v):
    return json.dumps(v, ensure_ascii=False, sort_keys=True)


def check(ray, own, documented):
    """One line a call; equal, or different on purpose, or wrong."""
    lines, bad = [], 0
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
        lines.append(f"{'ok' if good else 'not ok'} {len(lines) + 1} - {label}" + (f" (differs: {known[1]})" if known and good else ""))
        if not good:
            lines += [f"# ray:  {shown(a)}", f"# ours: {shown(b)}"]
    for k in KNOWN:
        if k[0] not in used:
            bad += 1
            lines.append(f"not ok {len(lines) + 1} - no call is named {k[0]} any more")
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
