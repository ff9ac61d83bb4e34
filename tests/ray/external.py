"""A real Ray is the external cluster: a run of `furlong train` goes through it and leaves it as it was, whatever is killed.

Each host of such a cluster has network, process and mount namespaces of its own, and a first process that waits for the dead."""
import base64
import contextlib
import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))

import harness  # noqa: E402
from harness import BIN, hosts, place, wait_for  # noqa: E402
from heads import PYTHON, RAY, why_none  # noqa: E402

HTTP = "http://127.0.0.1:8265"
EXTERNAL = {"MILES_SCRIPT_EXTERNAL_RAY": "1"}
SLOW = harness.SLOW
FOLDER = [f"--ray-programs={BIN}"] if SLOW > 1 else []  # programs with sanitizers are larger than a package may be


class Host:
    """A place as a machine: what is started inside sees its own processes and network, and ends with it."""

    def __init__(self, p, address):
        self.place, self.address = p, address
        self.env = {**p.env, "RAY_TMPDIR": f"{p.root}/t", "PYTHONUNBUFFERED": "1", "no_proxy": "*"}
        os.makedirs(self.env["RAY_TMPDIR"], exist_ok=True)
        # Ray and all it starts know nothing of Furlong's folders
        self.ray_env = {k: v for k, v in self.env.items() if not k.startswith("FURLONG_")}
        net = ["ip", "netns", "exec", p.netns] if p.netns else []
        self.inside = subprocess.Popen([*net, "unshare", *([] if p.netns else ["-n"]), "-p", "-m", "-u", "-f", "--kill-child", "--mount-proc", "bash", "-c",
                                        f"hostname {p.name or 'n1'}; ip link set lo up; echo up; sleep 100000; :"], stdout=subprocess.PIPE, text=True,
                                       env=self.env)
        assert self.inside.stdout.readline() == "up\n"
        children = lambda pid: open(f"/proc/{pid}/task/{pid}/children", encoding="ascii").read().split()
        self.pid = wait_for("the first process", lambda: children(self.inside.pid))[0]

    def spawn(self, words, env=None, ray=False):
        return subprocess.Popen(["nsenter", "-t", self.pid, "-n", "-p", "-m", "-u", f"--wd={self.place.root}", *words], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env={**(self.ray_env if ray else self.env), **(env or {})})

    def run(self, words, env=None, seconds=120, ray=False):
        """(exit code, stdout, stderr)"""
        p = self.spawn(words, env, ray)
        try:
            out, err = p.communicate(timeout=seconds * SLOW)
        except subprocess.TimeoutExpired:
            p.kill()
            raise AssertionError(f"not over after {seconds} s: {words}\n{p.communicate()}") from None
        return p.returncode, out, err

    def ray(self, *words, **kw):
        return self.run([RAY, *words], ray=True, **kw)

    def train(self, *words, env=None, **kw):
        return self.run([f"{BIN}/furlong", "train", *FOLDER, *words], env={**EXTERNAL, **(env or {})}, **kw)

    def pids(self, pattern):
        """Of this host's own numbers."""
        return [int(x) for x in self.run(["pgrep", "-f", pattern])[1].split()]

    def kill(self, pattern):
        pids = self.pids(pattern)
        assert pids, f"nothing to kill: {pattern}\n{self.run(['ps', 'axww', '-o', 'args'])[1]}"
        self.run(["kill", "-9", *map(str, pids)])

    def processes(self):
        """All command lines but the idle workers that Ray keeps as it likes, and whoever asks."""
        lines = self.run(["ps", "axww", "-o", "ppid=,stat=,args="])[1].splitlines()
        rows = [x.split(None, 2) for x in lines]
        return sorted(r[2][:150] for r in rows if r[0] != "0" and "Z" not in r[1] and "ray::IDLE" not in r[2] and not r[2].startswith("ps axww"))

    def end(self):
        self.inside.send_signal(signal.SIGKILL)
        self.inside.wait()


class Cluster:
    """A real Ray on these hosts; the first is its head."""

    def __init__(self, made, env=None, gpus=2, head=()):
        self.hosts, self.head, self.token = made, made[0], (env or {}).get("RAY_AUTH_TOKEN")
        for h in made:
            h.ray_env.update(env or {})
        code, out, err = self.head.ray("start", "--head", "--node-ip-address", self.head.address, f"--num-gpus={gpus}", "--num-cpus=4", "--disable-usage-stats", *head)
        assert code == 0, (out, err)
        for h in made[1:]:
            code, out, err = h.ray("start", f"--address={self.head.address}:6379", "--node-ip-address", h.address, f"--num-gpus={gpus}", "--num-cpus=4",
                                   "--disable-usage-stats", f"--temp-dir={h.env['RAY_TMPDIR']}/own")  # else the head's, and /tmp is one here
            assert code == 0, (out, err)
        wait_for("all nodes", lambda: len([n for n in self.rows("nodes") if n["state"] == "ALIVE"]) == len(made), 60)
        wait_for("all amounts", lambda: f"0.0/{gpus * len(made)}.0 GPU" in self.looks()["used"] or (gpus == 0 and self.looks()["used"]), 60)

    def get(self, path):
        bearer = ["-H", f"Authorization: Bearer {self.token}"] if self.token else []
        return json.loads(self.head.run(["curl", "-s", *bearer, HTTP + path])[1])

    def rows(self, kind):
        return self.get(f"/api/v0/{kind}?limit=1000&detail=1")["data"]["result"]["result"]

    def looks(self):
        """Everything that a run could leave: nodes, actors and groups that live, what is used, processes, files."""
        used = self.get("/api/cluster_status?format=1")["data"]["clusterStatus"]
        return {"nodes": sorted((n["node_id"], n["state"]) for n in self.rows("nodes")),
                "actors": sorted((a["class_name"], a["state"]) for a in self.rows("actors") if a["state"] != "DEAD"),
                "groups": sorted((g["name"], g["state"]) for g in self.rows("placement_groups") if g["state"] != "REMOVED"),
                "used": sorted(re.findall(r"^ (\S+/\S+ (?:CPU|GPU).*)$", used, re.M)),
                "processes": sorted((h.address, x) for h in self.hosts for x in h.processes()),
                "files": sorted(x for x in os.listdir("/tmp") if x.startswith("furlong-run-") and self.owns(x))}

    def owns(self, name):
        """Other tests of this machine may have theirs: the folder's own log says which head it belonged to."""
        with contextlib.suppress(OSError):
            return os.stat(f"/tmp/{name}").st_mtime > self.began
        return False

    began = time.time()

    def as_it_was(self, before, what, seconds=40):
        end = time.monotonic() + seconds * SLOW
        while (now := self.looks()) != before:
            if time.monotonic() > end:
                said = [f"{k}: {[x for x in now[k] if x not in before[k]]} is new, {[x for x in before[k] if x not in now[k]]} is gone"
                        for k in now if now[k] != before[k]]
                raise AssertionError(f"{what}: " + "\n".join(said))
            time.sleep(0.2)


def need():
    if os.geteuid() != 0:
        raise harness.Skip("namespaces need root")
    why = why_none()
    if why:
        raise harness.Skip(why)


@contextlib.contextmanager
def one(**kw):
    need()
    with place() as p:
        h = Host(p, "127.0.0.1")
        try:
            yield h, Cluster([h], **kw)
        finally:
            h.end()


def steps(out):
    return re.findall(r"(?m)^ +\d+ +[\d.]+ .*$", out)


def test_a_run_leaves_it_as_it_was():
    with one() as (h, c):
        before = c.looks()
        code, out, err = h.train("--num-rollout=3", "--submission-id=first")
        assert code == 0 and len(steps(out)) == 3 and "job first on Ray" in err and "2 GPUs" in out, (code, out, err)
        assert "job_manager.py" not in out and "Running entrypoint" not in out, out
        c.as_it_was(before, "a run")
        assert c.get("/api/jobs/first")["driver_exit_code"] == 0
        for address in ("127.0.0.1:8265", "127.0.0.1:6379", "auto"):
            code, out, err = h.train("--num-rollout=1", "--json", env={"RAY_ADDRESS": address})
            assert code == 0 and [json.loads(x)["step"] for x in out.splitlines()] == [0], (address, code, out, err)
        code, out, err = h.train("--num-rollout=1", "--submission-id=first")
        assert code == 1 and err.splitlines()[-1].endswith("has a job first already; give another --submission-id, or none"), (code, err)
        code, out, err = h.train("--num-rollout=1", "--actor-num-gpus-per-node=2", "--rollout-num-gpus=3")
        assert code == 1 and "the run needs 5 GPUs; this Ray cluster gives 2: 127.0.0.1 2" in out, (code, out, err)
        code, out, err = h.train("--num-rollout=1", "--trainer-cmd=exit 7")
        assert code == 2 and "trainer 0 on n1: ended with exit code 7" in out, (code, out, err)  # the run's own failure, which another try would not heal
        code, out, err = h.train("--num-rollout=1", "--ray-programs=/nowhere")
        assert code == 1 and "/nowhere/furlong-head" in out, (code, out, err)
        code, out, err = h.train("--num-rollout=1", f"--ray-programs={BIN}")
        assert code == 0 and len(steps(out)) == 1 and "4 files" in err, (code, out, err)
        unlike = f"{h.place.root}/python"  # the same Ray, that says it is another
        with open(unlike, "w", encoding="ascii") as f:
            f.write(f"#!/bin/sh\n[ \"$1\" = -c ] && exec {PYTHON} \"$@\"\nshift\nexec {PYTHON} -uc 'import sys, runpy, ray; ray.__version__ = \"2.1.0\"; "
                    "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name=\"__main__\")' \"$@\"\n")
        os.chmod(unlike, 0o755)
        code, out, err = h.train("--num-rollout=1", env={"FURLONG_RAY_PYTHON": unlike})
        assert code == 1 and "this Python's Ray 2.1.0 does not get into the cluster of Ray 2." in out and "ersion" in out, (code, out, err)
        os.symlink(f"{BIN}/furlong", f"{h.place.root}/ray")  # our command by Ray's name, towards Ray
        code, out, err = h.run([f"{h.place.root}/ray", "job", "submit", "--", "echo a; sleep 1; head -c 300000 /dev/zero | tr '\\0' y; echo; echo end; exit 3"])
        assert code == 1 and out.count("\na\n") == 1 and "\n" + "y" * 300000 + "\nend\n" in out and "failed" in out, (code, len(out), err)
        c.as_it_was(before, "all of them")


KILLS = [  # what runs when it is killed, by its command line; None: the client
    ("the head", "furlong-head --private"), ("the worker daemon", "furlong-node --address"), ("the bootstrap", "external_ray/bootstrap.py"),
    ("the actor", "^ray::FurlongNode"), ("the head's guard", "guard.py"), ("the run's follower", "bin/furlong train --address"),
]


def running(h, *words, env=None):
    p = h.spawn([f"{BIN}/furlong", "train", "--num-rollout=100000", *FOLDER, *words], env={**EXTERNAL, **(env or {})})
    read = ""
    while "\n     1 " not in read:  # the second step
        piece = p.stdout.readline()
        assert piece, (read, p.communicate())
        read += piece
    return p


def test_whatever_is_killed():
    with one() as (h, c):
        before = c.looks()
        for point in ("connect", "group", "head", "daemons", "run"):
            code, out, err = h.train("--num-rollout=100000", env={"FURLONG_RAY_FAULT": point})
            assert code not in (0, None) and f"killed at {point}" in out, (point, code, out, err)
            c.as_it_was(before, f"the bootstrap killed at {point}")
        for what, pattern in KILLS:
            p = running(h)
            h.kill(pattern)
            out, err = p.communicate(timeout=90 * SLOW)
            assert p.returncode not in (0, None), (what, out, err)
            c.as_it_was(before, f"{what} killed")
        p = running(h)  # the driver of the run starts again and goes on; then the user stops it
        h.kill("furlong-driver")
        while "restart" not in (line := p.stdout.readline()) and "again" not in line:
            assert line, p.communicate()
        p.send_signal(signal.SIGINT)
        h.run(["pkill", "-INT", "-f", "furlong train --num-rollout"])
        out, err = p.communicate(timeout=60 * SLOW)
        assert p.returncode != 0 and "was stopped" in err, (p.returncode, out, err)
        c.as_it_was(before, "stopped by Ctrl-C")
        p = running(h, "--submission-id=byray")
        code, out, err = h.ray("job", "stop", "byray", "--address", HTTP)
        assert code == 0, (out, err)
        out, err = p.communicate(timeout=60 * SLOW)
        assert p.returncode != 0 and "was stopped" in err, (p.returncode, out, err)
        c.as_it_was(before, "stopped by Ray's command")
        p = running(h, "--submission-id=alone")
        h.kill("furlong train --num-rollout=100000 .*--submission-id=alone$")  # the client; what it submitted goes on
        p.communicate()
        began = h.pids("furlong-trainer")
        time.sleep(3)
        assert began and h.pids("furlong-trainer") == began and c.get("/api/jobs/alone")["status"] == "RUNNING"
        h.ray("job", "stop", "alone", "--address", HTTP)
        c.as_it_was(before, "a client killed, its job stopped later")


@contextlib.contextmanager
def two(**kw):
    need()
    with hosts(2) as places:
        made = []
        try:
            for i, p in enumerate(places, 1):
                made.append(Host(p, f"10.77.0.{i}"))
            yield made, Cluster(made, **kw)
        finally:
            for h in made:
                h.end()


def test_two_nodes_and_a_token():
    token = "7f" * 32
    with two(env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}) as ((head, other), c):
        before = c.looks()
        code, _, err = head.train("--num-rollout=1")
        assert code == 1 and "the cluster wants a token: RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH names it" in err and "401: Unauthorized" in err, err
        code, _, err = head.train("--num-rollout=1", env={"RAY_AUTH_TOKEN": "wrong"})
        assert code == 1 and "a token that is not this cluster's" in err and "403: Forbidden" in err, err
        mine = {"RAY_AUTH_TOKEN": token}
        p = running(head, env=mine)
        assert [len(h.pids("furlong-node --address")) for h in (head, other)] == [1, 1]
        assert not head.pids(token) and not other.pids(token)
        secret = [open(f"/tmp/{x}/token", encoding="ascii").read() for x in c.looks()["files"]]
        assert len(set(secret)) == 1 and len(secret) == 3 and not head.pids(secret[0]), secret  # head, and two daemons
        assert any(u.startswith("4.0/4.0 GPU") for u in c.looks()["used"]) and [g for _, g in c.looks()["groups"]] == ["CREATED"]
        head.run(["pkill", "-INT", "-f", "furlong train --num-rollout"])
        p.communicate(timeout=60 * SLOW)
        c.as_it_was(before, "a run on two nodes")
        code, out, err = head.train("--num-rollout=1", "--num-nodes=1", env=mine)
        assert code == 0 and "furlong: 1 nodes: 10.77.0.1 2 GPUs" in out, (code, out, err)
        code, out, err = head.train("--num-rollout=1", "--nodes=n2", env=mine)  # the run's driver is beside the head, on n1
        assert code == 0 and "furlong: 1 nodes: 10.77.0.2 2 GPUs" in out, (code, out, err)
        code, out, err = head.train("--num-rollout=1", "--nodes=n[2-3]", env=mine)
        assert code == 1 and "--nodes: n3 is no node of this Ray cluster; it has n1, n2" in out, (code, out, err)
        # somebody else holds a device of n2
        hold = head.spawn([PYTHON, "-c", "import ray, time\nray.init(address='auto', log_to_driver=False)\n"
                           "@ray.remote(num_gpus=1, resources={'node:10.77.0.2': 0.01})\nclass A:\n    def f(self): return 1\n"
                           "a = A.remote(); ray.get(a.f.remote()); print('held', flush=True); time.sleep(1000)"], ray=True)
        assert "held" in hold.stdout.readline()
        code, out, err = head.train("--num-rollout=1", "--join-timeout=5", env=mine)
        assert code == 1 and "furlong: Ray has not given the nodes after 5 s: 10.77.0.2 lacks GPU: 2 asked, 1 of 2 free" in out, (code, out, err)
        code, out, err = head.train("--num-rollout=1", "--node-gpus=1", env=mine)  # what is free is enough
        assert code == 0 and "10.77.0.1 1 GPUs, 10.77.0.2 1 GPUs" in out, (code, out, err)
        head.run(["pkill", "-9", "-f", "ray.init.address"])
        hold.communicate()
        c.as_it_was(before, "all of them")


def test_two_raylets_on_one_machine():
    """They share Ray's folder, and the second one unpacks the package anew while the first one's processes run from it."""
    with one() as (h, c):
        code, out, err = h.ray("start", "--address=127.0.0.1:6379", "--num-gpus=2", "--num-cpus=4", "--disable-usage-stats")
        assert code == 0, (out, err)
        wait_for("both", lambda: c.looks()["used"] == ["0.0/4.0 GPU", "0.0/8.0 CPU"] and len(c.looks()["nodes"]) == 2, 60)
        before = c.looks()
        p = running(h)
        assert len(h.pids("furlong-node --address")) == 2
        h.run(["pkill", "-INT", "-f", "furlong train --num-rollout"])
        out, err = p.communicate(timeout=60 * SLOW)
        assert "was stopped" in err, err
        c.as_it_was(before, "a run on both")


def test_a_ray_without_devices():
    with one(gpus=0) as (h, c):
        before = c.looks()
        code, out, err = h.train("--num-rollout=2")
        assert code == 0 and "this Ray cluster has no GPU: 2 logical devices a node" in out and len(steps(out)) == 2, (code, out, err)
        c.as_it_was(before, "a run")


def test_a_head_of_ours_takes_it_as_a_job():
    """Nothing is started or stopped; its port for nodes and `auto` find it too."""
    with place() as p:
        p.start_head("--num-gpus=2")
        before = sorted(p.processes())
        info = p.info("h")[0]
        for address in (info["http"], "auto"):
            r = p.furlong("train", "--num-rollout=2", env={**EXTERNAL, "RAY_ADDRESS": address})
            assert r.code == 0 and "(private)" not in r.err and len(steps(r.out)) == 2, r
            wait_for("as it was", lambda: sorted(p.processes()) == before)
        r = p.furlong("train", "--num-rollout=1", "--hosts=n2,n3", env={**EXTERNAL, "RAY_ADDRESS": info["http"]})
        assert r.code == 2 and "--no-join-ray-workers" in r.err, r
        r = p.furlong("train", "--num-rollout=1", "--num-gpus=1", env={**EXTERNAL, "RAY_ADDRESS": info["http"]})
        assert r.code == 2 and "takes its nodes as they are" in r.err, r
        with harness._opener.open(f"http://{info['http'].split('//')[-1]}/api/version") as a:
            assert a.headers["X-Furlong-Version"] and sorted(json.load(a)) == ["ray_commit", "ray_version", "session_name", "version"]


def test_a_guard_ends_whose_starter_dies_while_it_speaks():
    """Its source comes in through a pipe: cut anywhere, nothing of it stays."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy", "external_ray"))
    import guard
    for said in (b"", b"%8d" % 100, b"%8d" % 100 + b"import os"):
        g = subprocess.Popen([sys.executable, "-c", guard.READ], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        g.stdin.write(said)
        g.stdin.close()
        assert g.wait(timeout=20 * harness.SLOW) == 1, said


class Fake(http.server.BaseHTTPRequestHandler):
    """A head of somebody's that answers one thing."""
    answer = (200, "{}")

    def do_GET(self):
        code, text = self.answer
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def test_what_cannot_be_used_is_said():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_port}"
    old = '{"version": "2", "ray_version": "2.1.0", "ray_commit": "x", "session_name": "s"}'
    try:
        with place() as p:
            for name, answer, wanted in (
                    ("no head", (200, "<html>"), f"{at} is no head of a cluster"),
                    ("not found", (404, "no"), "/api/version answered 404: no"),
                    ("too old", (200, old), "Ray 2.1.0 at " + at + " is too old: its Jobs API has version 2, 4 is needed"),
                    ("no token", (401, "Unauthorized: Missing authentication token"), "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH names it"),
                    ("broken", (500, "x"), "answered 500")):
                Fake.answer = answer
                with harness.saying(name):
                    r = p.furlong("train", "--num-rollout=1", env={**EXTERNAL, "RAY_ADDRESS": at})
                    assert r.code == 1 and wanted in r.err and len(r.err.splitlines()) == 1, r
            for address in ("http://127.0.0.1:1", "127.0.0.1:1"):
                r = p.furlong("train", "--num-rollout=1", env={**EXTERNAL, "RAY_ADDRESS": address})
                assert r.code == 1 and "no cluster is started, and none answers" in r.err and "127.0.0.1:1" in r.err, r
            r = p.furlong("train", "--num-rollout=1", env={**EXTERNAL, "RAY_ADDRESS": "ray://x:10001"})
            assert r.code == 2 and "HOST:PORT or http://HOST:PORT" in r.err, r
            assert not p.processes() and not os.path.isdir(f"{p.root}/s/runs"), p.processes()
            r = p.furlong("train", "--num-rollout=1", env={"MILES_SCRIPT_EXTERNAL_RAY": "false"})  # a private cluster, as ever
            assert r.code == 0 and "(private)" in r.err, r
    finally:
        server.shutdown()


class Ray(http.server.BaseHTTPRequestHandler):
    """A head as Ray's whose connections break: each reading of the log ends where the next row says."""
    protocol_version = "HTTP/1.1"
    log = "".join(f"line {i}\n" for i in range(200)) + "a zero \0 byte\n"
    cuts, asked = [], []  # bytes of the log that a connection gets before it breaks; -1: no socket, 400

    def answer(self, text, code=200, kind="application/json"):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        over = not self.cuts
        if self.path == "/api/version":
            self.answer('{"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"}')
        elif self.path.endswith("/logs/tail"):
            self.tail()
        elif self.path.endswith("/logs"):
            self.asked.append("whole")
            self.answer(json.dumps({"logs": self.log if over else self.log[:700]}))
        elif "/api/jobs/" in self.path:
            self.answer(json.dumps({"status": "FAILED" if over else "RUNNING", "driver_exit_code": 9 if over else None, "message": ""}))
        else:
            self.answer("")

    do_PUT = lambda self: (self.rfile.read(int(self.headers["Content-Length"])), self.answer(""))
    do_POST = lambda self: (self.rfile.read(int(self.headers["Content-Length"])), self.answer('{"submission_id": "j"}'))

    def tail(self):
        cut = self.cuts.pop(0) if self.cuts else None
        if cut == -1:
            self.answer("no sockets here", 400, "text/plain")
            return
        key = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
        self.wfile.write(f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {key}\r\n\r\n".encode())
        data = self.log[:cut].encode() if cut else self.log.encode()
        for at in range(0, len(data), 100):
            piece = data[at:at + 100]
            self.wfile.write(bytes([0x81, len(piece)]) + piece)
        if cut is None:
            self.wfile.write(b"\x88\x02\x03\xe8")  # a proper close
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_):
        pass


def test_a_log_that_breaks_is_read_on():
    """Nothing twice, nothing lost, and the exit code of the job: cut inside lines, early, often; and where no socket gets through."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ray)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with place() as p:
            for name, cuts, whole in (("whole", [], 1), ("one break", [333], 1), ("two, the second is shorter", [500, 100], 1),
                                      ("no sockets", [-1, -1, -1], 2), ("one refusal", [-1, 50], 1)):
                Ray.cuts[:], Ray.asked[:] = cuts, []
                with harness.saying(name):
                    r = p.furlong("train", "--num-rollout=1", f"--ray-programs={BIN}", env={**EXTERNAL, "RAY_ADDRESS": f"http://127.0.0.1:{server.server_port}"})
                    assert r.code == 9 and r.out == Ray.log, r
                    assert len(Ray.asked) >= whole and "job train_" in r.err, (Ray.asked, r)
    finally:
        server.shutdown()


if __name__ == "__main__":
    harness.main(dict(globals()))
