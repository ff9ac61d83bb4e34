#!/usr/bin/env python3
"""What holds for every program of bin/: FURLONG_FAULT is honoured, and a word of it that cannot be is refused.

test_faults.py PROGRAM...    all that are built; one without a row below fails"""
import fcntl
import os
import signal
import subprocess
import sys
import tempfile

LAUNCHED = ["--alphabet=6162"]  # what the driver gives to its trainers and engines
JOIN = ["--address=127.0.0.1:9", "--wait=0"]
FAKE = {"FURLONG_GPU": "fake"}

# name: arguments, a place that it meets with them (None: elsewhere, as the comment says), more of its environment
ROWS = {
    "furlong": (["start", "--head"], "cli.spawn", {}),
    "ray": (["start", "--head"], "cli.spawn", {}),
    "furlong-head": ([], "base.epoll", {}),
    "furlong-node": (JOIN, "base.epoll", {}),
    "furlong-keep": (["/nowhere/spec"], None, {}),  # tests/worker/test_proc.c kills it at each of its places
    "furlong-doctor": (["--no-devices"], None, {}),  # it looks with its own eyes: no place of its own
    "furlong-probe": ([], "gpu.context", FAKE),
    "furlong-driver": ([], "client.seat", {}),
    "furlong-trainer": (LAUNCHED, "client.seat", {}),
    "furlong-rollout": (LAUNCHED, "client.seat", {}),
    "furlong-sglang": (["--sglang-cmd=true"], "sglang.spawn", {}),
    "example-trainer": ([], "client.seat", {}),
    "example-engine": ([], "client.seat", {}),
}
LIBRARY_ONLY = ("example-trainer", "example-engine")  # their main() knows the public headers alone


def sealed():
    """A seat that is read, and then found to be none."""
    fd = os.memfd_create("seat", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, b"no seat")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return fd


def run(path, args, spec, more, root):
    seat = sealed()
    env = dict(os.environ, FURLONG_FAULT=spec, FURLONG_SEAT_FD=str(seat), FURLONG_STATE_DIR=f"{root}/s",
               FURLONG_RUNTIME_DIR=f"{root}/r", HOME=root, **more)
    try:
        return subprocess.run([path, *args], env=env, pass_fds=[seat], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=60)
    finally:
        os.close(seat)


def refuses(path, name, root):
    args, _, more = ROWS[name]
    p = run(path, args, "nonsense", more, root)
    wanted = "fault points ignored" if name in LIBRARY_ONLY else "FURLONG_FAULT: fault \"nonsense\""
    assert wanted in p.stderr, f"stderr: {p.stderr!r}"
    assert p.returncode != 0 and (name in LIBRARY_ONLY or p.returncode == 2), f"exit code {p.returncode}"


def obeys(path, name, root):
    args, place, more = ROWS[name]
    p = run(path, args, f"{place}:1=kill", more, root)
    assert p.returncode == -signal.SIGKILL, f"{place}: exit code {p.returncode}, stderr: {p.stderr!r}"


def main(paths):
    programs = {os.path.basename(p): os.path.abspath(p) for p in paths}
    n, bad = 0, 0
    with tempfile.TemporaryDirectory(prefix="fl-") as root:
        os.symlink(programs["furlong"], f"{root}/ray")
        programs["ray"] = f"{root}/ray"
        for name, path in sorted(programs.items()):
            for what, check in (("refuses", refuses), ("obeys", obeys)):
                if what == "obeys" and name in ROWS and ROWS[name][1] is None:
                    continue
                n += 1
                try:
                    assert name in ROWS, "no row: add one"
                    check(path, name, root)
                    print(f"ok {n} - {name} {what}")
                except (AssertionError, subprocess.TimeoutExpired) as e:
                    bad += 1
                    print(f"not ok {n} - {name} {what}\n# {e}")
    print(f"1..{n}")
    return 1 if bad else 0


sys.exit(main(sys.argv[1:]))
