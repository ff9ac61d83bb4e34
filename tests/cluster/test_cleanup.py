"""What is left when something ends: dead engines, interrupted clients, other people's processes on the same machine."""
import contextlib
import glob
import os
import shutil
import signal
import subprocess
import tempfile
import time

import harness
from harness import BIN, Place, alive, hosts, place, wait_for
from runs import Run
from seats import MIB, SEATS, Seats, devices, fakes
from submitting import by_name

FLAGS = ["--num-rollout=4", "--rollout-batch-size=8", "--n-samples-per-prompt=4", "--seed=7"]
HELD = {"SEATS_BYTES": str(64 * MIB)}


def text_of(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def p96_an_engine_killed_while_it_generates():
    """Its call ends at once, is made again elsewhere, and both are said; no step is lost or done by half."""
    with place() as p:
        os.makedirs(f"{p.root}/faults")
        run = Run(p, *FLAGS, "--rollout-num-gpus=2", env={"FURLONG_FAULT": "engine.step:6=kill", "FURLONG_FAULT_DIR": f"{p.root}/faults"})
        r = run.go()
        assert os.listdir(f"{p.root}/faults"), r
        assert [s["step"] for s in run.steps()] == [0, 1, 2, 3], run.steps()
        said = r.out + r.err
        assert "signal 9" in said and "it starts again as attempt 2" in said and "asked again" in said, r
        slowest = max(s["perf/rollout_time"] for s in run.steps())
        assert slowest < 5 * harness.SLOW, (slowest, r)
        assert p.left_behind() == []


def p98_an_engine_that_always_dies():
    with place() as p:
        p.start_head("--num-gpus=2", "--node-name=n1")
        run = Run(p, *FLAGS, "--max-restarts=2", "--rollout-cmd=sleep 0.1; echo no driver here >&2; exit 1")
        r = run.go(check=None)
        said = r.out + r.err
        assert r.code == 1 and "it starts again as attempt 3 in 0.2 s" in said, r
        assert said.count("it is not started again (2 restarts of 2)") == 1 and said.count("no driver here") == 3, r
        assert "the driver is not started again: rollout 0 has used its restarts; rollout 0 on n1: ended with exit code 1" in said, r
        trouble = p.furlong("status", "--json").json()["troubled"]
        assert [t["node"] for t in trouble] == ["n1"] and "3 workers ended on it" in trouble[0]["why"] and "exit code 1" in trouble[0]["why"], trouble
        assert "troubled:\n  node n1: " in p.furlong("status").out
        # a node that is well gets the next ones; the other one serves where it alone would do
        p.furlong("start", f"--address={p.info('h')[0]['address']}", "--node-name=n2", f"--state-dir={p.root}/n2", "--num-gpus=2", check=0)
        s = Seats(p, "--colocate=true", "--actor-num-nodes=1", "--actor-num-gpus-per-node=2", "--num-gpus-per-node=2", launch=("trainer",))
        s.up()
        assert {row[2] for row in s.layout()} == {"n2"}, s.said()
        s.end()


@contextlib.contextmanager
def two_hosts():
    with hosts(2) as (head, other):
        for i, p in enumerate((head, other), 1):
            where = ["--head", "--node-ip-address=10.77.0.1"] if i == 1 else ["--address=10.77.0.1:6379"]
            p.furlong("start", *where, f"--node-name=n{i}", "--wait=30", env={**fakes(p, 2), **HELD}, check=0)
        yield head, other


def holders(p):
    return [x for d in devices(p) for x in d["processes"]]


def p99_interrupted_or_killed_it_holds_no_device():
    with two_hosts() as (head, other):
        flags = ["--actor-num-nodes=2", "--actor-num-gpus-per-node=2", "--colocate=true"]
        for name in ("interrupted", "driver-killed", "clean"):
            with harness.saying(name):
                s = Seats(head, *flags, name=name)
                pids = [m["pid"] for m in s.up().values()]
                assert len(pids) == 8
                wait_for("that all hold theirs", lambda: len(holders(head)) == 8)
                if name == "clean":
                    s.end()
                    continue
                if name == "interrupted":
                    s.job.send_signal(signal.SIGINT)
                else:
                    driver = [pid for pid, cmd in head.processes() if cmd.startswith(f"{SEATS} drive")]
                    for pid in driver:
                        os.kill(pid, signal.SIGKILL)
                wait_for("no process of the job", lambda: not [x for x in pids if alive(x)], 10)
                wait_for("no device in use", lambda: not holders(head), 10)
                s.job.communicate(timeout=30 * harness.SLOW)
                assert s.job.returncode != 0


def p101_stop_leaves_others_alone():
    with place() as p, place() as q:
        shutil.copy(shutil.which("sleep"), f"{p.root}/furlong-node")
        other = subprocess.Popen([f"{p.root}/furlong-node", "1000"], env={})
        try:
            for x in (p, q):
                x.start_head("--num-gpus=1")
            mine = [i["pid"] for i in p.info("h") + p.info("n")]
            theirs = [i["pid"] for i in q.info("h") + q.info("n")]
            p.furlong("stop", check=0)
            assert not [x for x in mine if alive(x)] and all(alive(x) for x in theirs) and other.poll() is None
            p.start_head("--num-gpus=1")
            mine = [i["pid"] for i in p.info("h") + p.info("n")]
            by_name(p).run("ray", "stop", "--force", check=0)  # as launchers do it first of all
            assert not [x for x in mine if alive(x)]
            assert all(alive(x) for x in theirs) and other.poll() is None
            assert q.furlong("status", "--json", check=0).json()["state"] == "READY"
        finally:
            other.kill()
            other.wait()


@contextlib.contextmanager
def container(p):
    """Lines in a process namespace of their own, whose first process waits for nobody."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise harness.Skip("a process namespace needs root and unshare")
    first = subprocess.Popen(["unshare", "-p", "-m", "-f", "--kill-child", "--mount-proc", "sh", "-c", "echo up; exec sleep 100000"],
                             stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "up\n"
        with open(f"/proc/{first.pid}/task/{first.pid}/children", encoding="ascii") as f:
            pid = f.read().split()[0]
        env = {**p.env, "PATH": f"{BIN}:{os.environ['PATH']}"}
        line = lambda text: subprocess.Popen(["nsenter", "-t", pid, "-p", "-m", f"--wd={p.root}", "sh", "-c", text], env=env, text=True,
                                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        yield line
    finally:
        first.kill()
        first.wait()


def p100_the_first_process_waits_for_nobody():
    """Every end is waited for by us: what a job left behind, the tree of a keeper that was killed, the daemons of --block and of train.
    Of daemons that a command left behind, that first process alone may wait; they count as ended, and nothing else of ours is left."""
    with place() as p, container(p) as line:
        def run(text):
            out, _ = (c := line(text)).communicate(timeout=60 * harness.SLOW)
            return c.returncode, out

        def zombies():
            return sorted(x.split()[1] for x in run("ps -eo stat=,comm= | grep '^Z'")[1].splitlines())

        def whole(name):
            return f"\n{name}\n" in run("ps -eo args=")[1]

        blocked = line("furlong start --head --port=0 --dashboard-port=0 --num-gpus=1 --block")
        wait_for("the cluster", lambda: run("furlong status")[0] == 0)
        job = "(sleep 0.2 & setsid sh -c 'sleep 0.1 & exec sleep 1000' &) ; sleep 0.4"
        for _ in range(2):
            code, out = run(f'furlong job submit -- "{job}"')
            assert code == 0, out
        wait_for("no process of a job", lambda: not whole("sleep 1000"))
        wait_for("no zombie while it runs", lambda: not zombies())
        left = line("""furlong job submit --submission-id=k -- "sh -c 'true & setsid sleep 1001 & exec sleep 1001' & exec sleep 1001" """)
        wait_for("its tree", lambda: run("pgrep -xc sleep")[1] == "4\n")  # and the first process
        assert run("pkill -9 -x furlong-keep")[0] == 0
        out, _ = left.communicate(timeout=60 * harness.SLOW)
        assert left.returncode == 1 and "was killed and left no record" in out, out
        wait_for("nothing of its tree", lambda: not whole("sleep 1001") and not zombies())
        code, out = run("furlong stop")
        assert code == 0, out
        out, _ = blocked.communicate(timeout=30 * harness.SLOW)
        assert blocked.returncode == 0 and not zombies(), (blocked.returncode, out, zombies())
        code, out = run("furlong train --num-rollout=1 --rollout-batch-size=4")
        assert code == 0 and not zombies(), (out, zombies())
        for n in (1, 2):  # daemons that nobody started from here any more
            code, out = run("furlong start --head --port=0 --dashboard-port=0 --num-gpus=1 && furlong job submit -- true && furlong stop")
            assert code == 0 and "could not" not in out, out
            assert zombies() == ["furlong-head"] * n + ["furlong-node"] * n, zombies()


def test_who_has_joined_ends_with_a_killed_keeper():
    """Daemon and keepers are killed and nobody comes again; the shell in front of each program is ended by the kernel alone."""
    with place() as p:
        r = Run(p, "--num-rollout=100000", "--seed=3", f"--trainer-cmd=true; {BIN}/example-trainer", f"--rollout-cmd=true; {BIN}/example-engine")
        train = r.start()
        r.wait_step(0)
        named = lambda *names: [pid for pid, cmd in p.processes() if os.path.basename(cmd.split()[0]) in names]
        assert named("furlong-driver") and named("example-trainer") and named("example-engine"), p.processes()
        for names in (("furlong", "furlong-head", "furlong-node"), ("furlong-keep",)):
            for pid in named(*names):
                os.kill(pid, signal.SIGKILL)
        train.communicate()
        wait_for("nobody", lambda: not p.processes())


USERS = (23101, 23102)  # nobody else's


def of_user(uid, name=""):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid and name in text_of(f"/proc/{pid}/cmdline") and alive(int(pid)):
                found.append(int(pid))
    return found


def users_place(root, uid, inside):
    """What a user has who knows nothing: a home and no variables of ours; /tmp is the shared one of inside."""
    p = Place(f"{root}/{uid}")
    for k in ("FURLONG_RUNTIME_DIR", "FURLONG_STATE_DIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        p.env.pop(k, None)
    p.env["HOME"] = p.root
    os.chown(p.root, uid, uid)
    p.argv = lambda args: ["nsenter", "-t", inside, "-m", f"--wd={p.root}", "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups",
                           f"{BIN}/{args[0]}", *map(str, args[1:])]
    return p


@contextlib.contextmanager
def shared_machine():
    """Two users with a /tmp in common that is nobody else's."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        raise harness.Skip("other users need root and setpriv")
    root = tempfile.mkdtemp(prefix="fl-users-", dir="/var/tmp")
    os.chmod(root, 0o755)
    keep = subprocess.Popen(["unshare", "-m", "--propagation", "private", "sh", "-c", "mount -t tmpfs -o mode=1777 none /tmp && echo up && exec sleep 100000"],
                            stdout=subprocess.PIPE, text=True)
    places = []
    try:
        if keep.stdout.readline() != "up\n":
            raise harness.Skip("no mount namespace here")
        probe = subprocess.run(["setpriv", f"--reuid={USERS[0]}", f"--regid={USERS[0]}", "--clear-groups", "test", "-x", f"{BIN}/furlong"])
        if probe.returncode:
            raise harness.Skip(f"{BIN} cannot be entered by other users")
        places += [users_place(root, uid, str(keep.pid)) for uid in USERS]
        yield places, os.path.join("/proc", str(keep.pid), "root", "tmp")
    finally:
        for pid in [pid for uid in USERS for pid in of_user(uid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        keep.kill()
        keep.wait()
        shutil.rmtree(root, ignore_errors=True)


HEAD = ["start", "--head", "--port=0", "--dashboard-port=0", "--num-gpus=1"]


def p110_two_users_and_no_flags():
    with shared_machine() as (places, tmp):
        for uid, p in zip(USERS, places):
            r = p.furlong(*HEAD)
            assert r.code == 0, r
            st = os.stat(f"{tmp}/furlong-{uid}")
            assert (st.st_uid, st.st_mode & 0o777) == (uid, 0o700), st
        for p in places:
            assert len(p.furlong("list", "nodes", "--json", check=0).json()) == 1
            p.furlong("stop", check=0)
        # a folder of that name which is somebody else's is not used, and said to be
        for uid, p in zip(USERS, places):
            shutil.rmtree(f"{tmp}/furlong-{uid}", ignore_errors=True)
            os.mkdir(f"{tmp}/furlong-{uid}", 0o777)
            os.chown(f"{tmp}/furlong-{uid}", USERS[0] + USERS[1] - uid, 0)
            r = p.furlong(*HEAD)
            assert r.code == 1 and f"/tmp/furlong-{uid}" in r.err and "FURLONG_RUNTIME_DIR" in r.err, r
        p = places[0]
        r = p.furlong(*HEAD, env={"FURLONG_RUNTIME_DIR": f"{p.root}/{'x' * 100}"})
        assert r.code != 0 and "40 at most: sockets lie below it" in r.err, r
        r = p.furlong(*HEAD, env={"FURLONG_RUNTIME_DIR": f"{p.root}/mine"})
        assert r.code == 0 and os.stat(f"{p.root}/mine").st_mode & 0o777 == 0o700, r
        p.furlong("stop", env={"FURLONG_RUNTIME_DIR": f"{p.root}/mine"}, check=0)


def p117_runs_of_two_users_and_a_redis():
    with shared_machine() as ((a, b), _):
        shutil.copy(shutil.which("sleep"), f"{a.root}/redis-server")
        redis = subprocess.Popen([f"{a.root}/redis-server", "1000"])
        try:
            run_a = a.spawn("furlong", "train", "--num-rollout=100000", *FLAGS[1:], f"--run-dir={a.root}/run", stdout=open(f"{a.root}/out", "w", encoding="utf-8"), stderr=subprocess.STDOUT)
            steps = lambda p, name: text_of(f"{p.root}/{name}/steps.jsonl").count("\n") if os.path.exists(f"{p.root}/{name}/steps.jsonl") else 0
            wait_for("a step of A", lambda: steps(a, "run") > 0 or run_a.poll() is not None, 60)
            assert run_a.poll() is None, text_of(f"{a.root}/out")
            for k in range(2):  # begun, killed outright in the middle, and once more: what it left goes by itself
                run_b = b.spawn("furlong", "train", "--num-rollout=100000", *FLAGS[1:], f"--run-dir={b.root}/run{k}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                wait_for("a step of B", lambda k=k: steps(b, f"run{k}") > 0, 60)
                for pid in of_user(USERS[1], "furlong-head"):
                    os.kill(pid, signal.SIGKILL)
                run_b.kill()
                run_b.wait()
                wait_for("nothing of B", lambda: not of_user(USERS[1]), 60)
            assert redis.poll() is None and run_a.poll() is None
            before = steps(a, "run")
            wait_for("A goes on", lambda: steps(a, "run") > before, 60)
        finally:
            redis.kill()
            redis.wait()


if __name__ == "__main__":
    harness.main(dict(globals()))
