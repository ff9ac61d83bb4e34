"""Submitting: what arrives, what is refused and how, where the command runs, how it ends. Named by the cases of people in
trouble that they hold."""
import http.client
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time

import harness
from harness import hosts, place, wait_for
from submitting import BOTH, by_name, job, jobs, shared, submit

WORDS = ["{'a':{'b':1}}", '{"a": "b c"}', "", '"', "back\\", "*", "two\nlines", "größe ✓"]
DUMP = "import sys; print('ARGV', *(x.encode('utf-8', 'surrogateescape').hex() or '-' for x in sys.argv[1:]))"


def p01_one_string_is_a_shell_line():
    p = shared()
    for program in BOTH:
        r = submit(p, program, "--", f"cd {p.root} && echo a > f1 && cat f1 | tr a b; echo again > f2", check=0)
        assert "\nb\n" in "\n" + r.out and open(f"{p.root}/f2", encoding="ascii").read() == "again\n", r
        r = submit(p, program, "--", "python3", "-c", "import sys; print('x y', len(sys.argv))", "a b", check=0)
        assert "x y 2\n" in r.out, r
    r = p.furlong("job", "submit", "--", "no-such-program", "a b")
    assert r.code == 127 and "not found" in r.out and "tried on the driver's node: no-such-program 'a b'" in r.err, r
    r = p.furlong("job", "submit", "--", "echo test; exit 127")  # a line whose own code it is
    assert r.code == 127 and "test\n" in r.out, r


def p02_words_arrive_byte_for_byte():
    p = shared()
    wanted = subprocess.run(["python3", "-c", DUMP, *WORDS], capture_output=True, text=True, check=True).stdout
    for program in BOTH:
        r = submit(p, program, "--", "python3", "-c", DUMP, *WORDS, check=0)
        assert wanted in r.out, (wanted, r)


def p03_the_whole_line_runs_in_one_place():
    """Submitted from another host than the head's: all parts of the line run on the head."""
    with hosts(2) as (head, other):
        named = lambda p, name: lambda args: ["ip", "netns", "exec", p.netns, "unshare", "--uts", "sh", "-c",
                                              f'hostname {name} && exec "$0" "$@"', f"{harness.BIN}/furlong", *map(str, args[1:])]
        head.argv, other.argv = named(head, "the-head"), named(other, "a-laptop")
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", check=0)
        r = other.furlong("job", "submit", "--address=http://10.77.0.1:8265", "--working-dir=/", "--", "hostname; hostname && hostname", check=0)
        assert r.out.split() == ["the-head"] * 3, r
        head.furlong("stop", check=0)


def packages(p):
    return sorted(f"{base}/{f}" for base, _, files in os.walk(f"{p.root}/s") for f in files if "_ray_pkg_" in f)


def fill(folder, files, each):
    os.makedirs(folder)
    for i in range(files):
        fd = os.open(f"{folder}/f{i}", os.O_CREAT | os.O_WRONLY)
        os.ftruncate(fd, each)  # holes: a size without a disk
        os.close(fd)


def p05_a_folder_that_is_too_large_is_refused_here():
    p = shared()
    wd = f"{p.root}/p05"
    fill(f"{wd}/.git/objects", 300, 1 << 20)  # never sent
    with open(f"{wd}/main.py", "w", encoding="ascii") as f:
        f.write("print('ran')")
    r = p.furlong("job", "submit", f"--upload={wd}", "--", "python3", "main.py", check=0)
    assert r.out == "ran\n", r
    fill(f"{wd}/wandb/run-1/files", 60000, 2048)
    fill(f"{wd}/data/raw", 3, 20 << 20)
    for name in "abcde":
        fill(f"{wd}/small-{name}", 1, ord(name) << 10)
    for program, flag in zip(BOTH, ("--upload", "--working-dir")):
        before, uploads = set(jobs(p)), packages(p)
        began = time.monotonic()
        r = submit(p, program, f"{flag}={wd}", "--", "true")
        took = time.monotonic() - began
        assert r.code == 1 and took < 2 * harness.SLOW, (took, r)
        lines = r.err.splitlines()
        assert "exceeds the maximum size: it has 18" in lines[-1] and "at most 100 MiB" in lines[-1], r
        shown = [x.split()[-1] for x in lines[lines.index("largest folders and files:") + 1:][:5]]
        assert shown == ["wandb/run-1/files/", "data/raw/", "small-e/", "small-d/", "small-c/"], r
        words = [x for x in lines if x.startswith("leave them out with: ")][0].split(": ", 1)[1]
        assert set(jobs(p)) == before and packages(p) == uploads, "something was sent"
        line = f"{' '.join(program)} --address={p.info('h')[0]['http']} {words} {flag}={wd} -- python3 main.py"
        q = subprocess.run(["bash", "-c", f'"$@" {line.split(" ", 1)[1]}', "sh", *p.argv([program[0]])], env=p.env, capture_output=True, text=True)
        assert q.returncode == 0 and "ran\n" in q.stdout, (line, q)  # the words help as they are
    shutil.rmtree(wd)


def p06_one_limit_on_every_path():
    p = shared()
    at = p.info("h")[0]["http"].split("//")[-1]
    assert "at most 100 MiB" in p.furlong("job", "submit", "--help", check=0).out
    for mib, wanted in ((99, True), (101, False), (499, False), (501, False)):
        wd = f"{p.root}/p06-{mib}"
        fill(wd, 1, mib << 20)
        for program, flag in zip(BOTH, ("--upload", "--working-dir")):
            r = submit(p, program, f"{flag}={wd}", "--no-wait", "--", "true", seconds=120)
            assert (r.code == 0) == wanted, (mib, r)
            assert wanted or "at most 100 MiB" in r.err, r
        # the same bytes by hand: refused by their length, before they are sent
        c = http_connection(at)
        c.putrequest("PUT", f"/api/packages/gcs/_ray_pkg_{mib:016x}.zip")
        c.putheader("Content-Length", str((mib << 20) + 200))
        c.endheaders()
        if wanted:
            piece = bytes(1 << 20)
            for _ in range(mib):
                c.send(piece)
            c.send(bytes(200))
        a = c.getresponse()
        assert (a.status == 200) == wanted and (wanted or a.status == 413), (mib, a.status, a.read())
        c.close()
        shutil.rmtree(wd)


def http_connection(at):
    return http.client.HTTPConnection(at, timeout=60 * harness.SLOW)


def p07_mistakes_in_an_environment_are_named():
    p = shared()
    before = set(jobs(p))
    rows = (  # text, words of the one line
        ('{"pypi": ["torch"]}', ["'pypi' is not known", "env_vars, working_dir"]),
        ('{"env_vars": {"N": 3}}', ["env_vars.N", "a number", "a text is wanted"]),
        ('{"env_vars": {"A": "1",}}', ["line 1, column 24"]),
        ("{'env_vars': {}}", ["line 1, column 2", "double quotes"]))
    said = set()
    for text, words in rows:
        r = p.furlong("job", "submit", f"--runtime-env-json={text}", "--", "true")
        assert r.code == 2 and r.err.count("\n") == 1 and all(w in r.err for w in words), (words, r)
        said.add(r.err)
    assert len(said) == len(rows) and set(jobs(p)) == before
    code, answer = post(p, "/api/jobs/", {"entrypoint": "true", "runtime_env": {"pypi": ["torch"]}})
    assert code == 400 and "pypi" in answer and set(jobs(p)) == before, (code, answer)


def post(p, path, body):
    c = http_connection(p.info("h")[0]["http"].split("//")[-1])
    c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    a = c.getresponse()
    return a.status, a.read().decode()


def p08_the_same_environment_in_three_ways():
    p = shared()
    env = {"env_vars": {"A": "x: y", "LINES": "one\ntwo\n", "N": "12", "YES": "yes"}, "config": {"setup_timeout_seconds": 30}, "excludes": ["*.bin", "/data/"]}
    yaml = "# as people write it\nenv_vars:\n  A: 'x: y'\n  LINES: |\n    one\n    two\n  N: \"12\"\n  YES: \"yes\"\n" \
           "config: {setup_timeout_seconds: 30}\nexcludes:\n  - '*.bin'\n  - /data/\n"
    for name, text in (("e.json", json.dumps(env)), ("e.yaml", yaml), ("j.yaml", json.dumps(env)), ("bad.yaml", "env_vars:\n  A: [1\nB: 2\n"),
                       ("number.yaml", "env_vars:\n  N: 12\n")):
        with open(f"{p.root}/{name}", "w", encoding="utf-8") as f:
            f.write(text)
    if "YAML is not read by this build" in p.furlong("job", "submit", "--no-wait", f"--runtime-env={p.root}/e.yaml", "--", "true").err:
        raise harness.Skip("built without libyaml: JSON alone is read")
    for program in BOTH:
        kept = []
        for how in (f"--runtime-env-json={json.dumps(env)}", f"--runtime-env={p.root}/e.json", f"--runtime-env={p.root}/e.yaml", f"--runtime-env={p.root}/j.yaml"):
            name = f"p08-{program[0]}-{len(kept)}"
            submit(p, program, how, f"--submission-id={name}", "--", "true", check=0)
            kept.append(job(p, name)["runtime_env"])
        assert all(k == kept[0] for k in kept) and {**kept[0], "env_vars": {k: v for k, v in kept[0]["env_vars"].items() if k in env["env_vars"]}} == env, kept
    for name, words in (("bad.yaml", ["bad.yaml", "line 3"]), ("number.yaml", ["env_vars.N", "a text is wanted"]),
                        ("none.yaml", ["--runtime-env", "none.yaml", "No such file"])):
        r = p.furlong("job", "submit", f"--runtime-env={p.root}/{name}", "--", "true")
        assert r.code == 2 and all(w in r.err for w in words), r


class Refusing(http.server.BaseHTTPRequestHandler):
    """A server that takes no package, as behind a gateway with a limit of its own."""

    def do_GET(self):
        self.answer(404, b"not here")

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(507, b"no space for packages")

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def p18_errors_are_seen_through_pipes():
    p = shared()
    fill(f"{p.root}/p18", 1, 1000)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for program, flag in zip(BOTH, ("--upload", "--working-dir")):
            c = p.spawn(*program, f"--address=http://127.0.0.1:{server.server_address[1]}", f"{flag}={p.root}/p18", "--", "true")
            said = c.stderr.readline()  # before the command has ended: nothing is kept in a buffer
            out, err = c.communicate(timeout=30 * harness.SLOW)
            assert c.returncode == 1 and "507" in said + err and "no space for packages" in said + err and "507" not in out, (program, said, out, err)
    finally:
        server.shutdown()
        server.server_close()


def p19_the_other_port_says_so():
    with place() as p:
        p.start_head("--num-gpus=0")
        daemons, commands = p.info("h")[0]["address"], p.info("h")[0]["http"].split("//")[-1]
        log = lambda: open(f"{p.root}/s/logs/furlong-head.log", encoding="utf-8").read()
        before = log().count("\n")
        for program in (("furlong", "job", "submit"), ("furlong", "status"), ("furlong", "job", "list")):
            r = p.run(*program, f"--address=http://{daemons}", *(["--", "true"] if "submit" in program else []))
            assert r.code != 0 and r.err.count("\n") == 1 and f"is the port that worker daemons join: commands, jobs and browsers go to http://{commands}" in r.err, r
        r = p.furlong("start", f"--address={commands}", f"--state-dir={p.root}/s2")
        assert r.code != 0 and r.err.count("\n") == 1 and f"worker daemons join it at {daemons}" in r.err, r
        jobs_go, daemons_join = f"commands, jobs and browsers go to http://{commands}", f"worker daemons join at {daemons}"
        hello = b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03"
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
        for at, words, told in ((daemons, b"POST /api/jobs/ HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", jobs_go), (daemons, b"x" * 3, jobs_go),
                                (daemons, hello, jobs_go), (commands, preface, daemons_join), (commands, hello, daemons_join)):
            with socket.create_connection((at.split(":")[0], int(at.split(":")[1])), timeout=30 * harness.SLOW) as s:
                s.sendall(words)
                s.shutdown(socket.SHUT_WR)
                heard = b"".join(iter(lambda: s.recv(65536), b""))  # it ends
                assert heard.count(told.encode()) == 1 and len(heard) < 600, (words, heard)
        curl = lambda *a: subprocess.run(["curl", "-sS", "--noproxy", "*", "--max-time", str(30 * harness.SLOW), *a], capture_output=True, text=True)
        r = curl("-w", "%{http_code}", f"http://{daemons}/api/version")
        assert r.returncode == 0 and r.stdout == f"This is the port that worker daemons join: {jobs_go}\n421", r
        r = curl("--http2-prior-knowledge", f"http://{commands}/api/version")  # it asks again as it is told to, or gives up: it does not wait
        assert r.returncode == 0 and "ray_version" in r.stdout or r.returncode not in (0, 28), r
        r = p.furlong("job", "submit", "--", "echo still here", check=0)
        assert r.out == "still here\n", r
        assert log().count("\n") < before + 10, log()
        p.furlong("stop", check=0)


def p20_submitting_right_after_starting():
    """As in one shell script: start, submit, stop; and again."""
    line = f"for i in $(seq 10); do {harness.BIN}/furlong start --head --port=0 --dashboard-port=0 --num-gpus=0 >out 2>&1 && " \
           f"for k in 1 2 3 4 5; do {harness.BIN}/furlong job submit --no-wait -- true >>out 2>&1 && echo accepted; done; " \
           f"{harness.BIN}/furlong stop >>out 2>&1; done"
    with place() as p:
        r = subprocess.run(["bash", "-c", line], env=p.env, cwd=p.root, capture_output=True, text=True, timeout=120 * harness.SLOW)
        assert r.stdout.split() == ["accepted"] * 50, (r, open(f"{p.root}/out", encoding="utf-8").read())
        with subprocess.Popen(["python3", "-m", "http.server", "--bind", "127.0.0.1", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env={**os.environ, "PYTHONUNBUFFERED": "1"}) as other:
            port = re.search(r"port (\d+)", other.stdout.readline())[1]
            try:
                for mine, free in (("--port", "--dashboard-port"), ("--dashboard-port", "--port")):
                    r = p.furlong("start", "--head", f"{mine}={port}", f"{free}=0")
                    assert r.code == 1 and f"{mine}={port}: in use by pid {other.pid} (python3 -m http.server" in r.err, r
                    assert not p.processes(), p.processes()
            finally:
                other.kill()


PROXIES = {n: "http://127.0.0.1:9" for n in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")}


def p21_proxies_are_not_for_the_cluster():
    with hosts(2) as (head, other):
        for p in (head, other):
            p.env.update(PROXIES, no_proxy="", NO_PROXY="")
            by_name(p)
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=1", "--node-name=n1", check=0)
        other.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=1", "--node-name=n2", "--wait=30", check=0)
        for program in BOTH:
            r = other.run(*program, "--address=http://10.77.0.1:8265", *(["--working-dir=/"] if program[0] == "furlong" else []), "--", "echo through", check=0)
            assert "through\n" in r.out, r
        other.furlong("status", "--address=http://10.77.0.1:8265", check=0)
        r = other.furlong("doctor", "--address=10.77.0.1:6379", "--json", "--no-devices")
        assert [x["state"] for x in r.json() if x["check"] == "head"] == ["ok"], r
        head.furlong("train", "--num-rollout=1", "--rollout-batch-size=4", "--n-samples-per-prompt=2", "--actor-num-nodes=1", "--actor-num-gpus-per-node=1",
                     "--rollout-num-gpus=1", "--num-gpus-per-node=1", check=0)  # engine and trainer on two hosts
        for p in (other, head):
            p.furlong("stop", check=0)


def p118_what_goes_along_from_the_shell():
    with hosts(2) as (head, other):
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=1", "--node-name=n1", check=0)
        other.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=1", "--node-name=n2", "--wait=30", check=0)
        mine = {"FOO": "a='b c' d", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "no_proxy": "10.0.0.0/8", "HF_HOME": "/data/hf", "WANDB_API_KEY": "s3cret", "BAR": "stays",
                "NCCL_SOCKET_IFNAME": "of-this-machine", "LINES": "one\ntwo"}
        jobs_of = (("plain", [], {}), ("off", ["--off-head"], {}), ("proxy", ["--off-head"], {"https_proxy": "http://proxy:3128"}))
        for name, flags, more in jobs_of:
            head.furlong("job", "submit", f"--submission-id={name}", "--no-wait", "--working-dir=/", "--pass-env=FOO,LINES", *flags, "--", "sleep 1000", env={**mine, **more}, check=0)
        r = head.furlong("job", "submit", "--pass-env=NOT_SET_HERE", "--", "true")
        assert r.code == 2 and "NOT_SET_HERE is not set here" in r.err, r
        for name, _, more in jobs_of:
            wait_for("its process", lambda: job(head, name)["status"] == "RUNNING")
            workers = head.furlong("job", "env", name, "--json", check=0).json()["workers"]
            assert len(workers) == 1 and workers[0]["node"] == ("n1" if name == "plain" else "n2"), workers
            env = workers[0]["env"]
            for k in ("FOO", "NCCL_IB_HCA", "HF_HOME", "LINES"):
                assert env[k] == mine[k], (k, env[k])
            assert "BAR" not in env and env["WANDB_API_KEY"] == "***" and env["NCCL_SOCKET_IFNAME"] == "=eth0", env
            if more:  # what the user wrote stays in front, and all nodes are kept from the proxy
                assert env["no_proxy"].startswith("10.0.0.0/8,") and {"127.0.0.1", "10.77.0.1", "10.77.0.2"} <= set(env["no_proxy"].split(",")), env
                assert env["https_proxy"] == more["https_proxy"] and env["NO_PROXY"] == env["no_proxy"], env
            else:
                assert env["no_proxy"] == "10.0.0.0/8", env
            text = head.furlong("job", "env", name, check=0).out
            assert "NCCL_IB_HCA==mlx5_0:1,mlx5_1:1" in text and "s3cret" not in text, text
            head.furlong("job", "stop", name, check=0)
        # a run's driver, trainer and engine, on both nodes
        split = ["--actor-num-nodes=1", "--actor-num-gpus-per-node=1", "--rollout-num-gpus=1", "--num-gpus-per-node=1"]
        r = head.furlong("train", *split, "--pass-env=NOT_SET_HERE")
        assert r.code == 2 and "NOT_SET_HERE is not set here" in r.err and "train" not in jobs(head), r
        run = head.spawn("furlong", "train", "--num-rollout=100000", *split, f"--run-dir={head.root}/run", "--submission-id=train", "--pass-env=FOO,LINES", env=mine,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # one that is about to start has no environment yet
        roles = lambda: (w := head.furlong("job", "env", "train", "--json").out) and len(w := json.loads(w)["workers"]) == 3 and all("env" in x for x in w) and w
        workers = wait_for("driver, trainer and engine", roles)
        assert sorted(w["role"] for w in workers) == ["driver", "rollout", "trainer"] and {w["node"] for w in workers} == {"n1", "n2"}, workers
        for w in workers:
            assert all(w["env"][k] == mine[k] for k in ("FOO", "NCCL_IB_HCA", "HF_HOME", "LINES", "no_proxy")), w
            assert "BAR" not in w["env"] and w["env"]["WANDB_API_KEY"] == "***" and w["env"]["NCCL_SOCKET_IFNAME"] == "=eth0", w
        head.furlong("job", "stop", "train", check=0)
        run.communicate(timeout=60 * harness.SLOW)
        for p in (other, head):
            p.furlong("stop", check=0)


if __name__ == "__main__":
    harness.main(dict(globals()))
