"""The command by Ray's name: each line of tests/data/ray/*.txt is what Ray 2.60.0 printed for the same command.

    test_ray.py --record RAY    writes those files anew from a real Ray (RAY: its `ray`); run it inside namespaces of
                                its own, since Ray stops whatever looks like Ray:
                                unshare -n -p -f --mount-proc python3 test_ray.py --record VENV/bin/ray"""
import os
import re
import shutil
import signal
import subprocess
import sys
import time

DATA = f"{os.path.dirname(os.path.abspath(__file__))}/../data/ray"
START = ["start", "--head", "--node-ip-address", "127.0.0.1", "--num-gpus", "2", "--num-cpus", "4", "--disable-usage-stats"]
HTTP = "http://127.0.0.1:8265"
# name, words, what must be in stderr. In order, on one cluster; a name that ends in _ is not kept as a file.
SCRIPT = [
    ("start_nothing", ["start"], "is a required flag unless starting a head node with"),
    ("start_unknown", ["start", "--head", "--no-such-flag"], "Error: No such option '--no-such-flag'."),
    ("start_port_of_worker", ["start", "--address=127.0.0.1:6379", "--port=1"], "should only be specified when starting head node with"),
    ("stop_nothing", ["stop"], ""),
    ("status_nothing", ["status"], "ConnectionError: Could not find any running Ray instance. Please specify the one to connect to by "
     "setting the `--address` flag or `RAY_ADDRESS` environment variable."),
    ("start_head", START, ""),
    ("start_again", START, "ConnectionError: Ray is trying to start at 127.0.0.1:6379, but is already running at 127.0.0.1:6379. "
     "Please specify a different port using the `--port` flag of `ray start` command."),
    ("submit", ["job", "submit", f"--address={HTTP}", "--submission-id=j1", '--runtime-env-json={"env_vars":{"A":"1"}}', "--", "echo", "hello", "a b"], ""),
    ("submit_fails", ["job", "submit", "--submission-id=j2", "--", "sh", "-c", "echo out; exit 3"], ""),
    ("submit_twice", ["job", "submit", "--submission-id=j1", "--", "true"], "Job with submission_id j1 already exists. Please use a different submission_id."),
    ("submit_no_wait", ["job", "submit", "--submission-id=j3", "--no-wait", "--", "sleep", "100"], ""),
    ("submit_nothing", ["job", "submit"], "Error: Missing argument 'ENTRYPOINT...'."),
    ("job_status", ["job", "status", "j1"], ""),
    ("job_status_failed", ["job", "status", "j2"], ""),
    ("job_logs", ["job", "logs", "j1"], ""),
    ("job_logs_follow", ["job", "logs", "-f", "j1"], ""),
    ("job_stop", ["job", "stop", "j3"], ""),
    ("job_status_stopped", ["job", "status", "j3"], ""),
    ("job_stop_again", ["job", "stop", "j3"], ""),
    ("job_unknown", ["job", "status", "nope"], "RuntimeError: Request failed with status code 404: Job nope does not exist."),
    ("health", ["health-check", "--address", "127.0.0.1:6379"], ""),
    ("status", ["status"], ""),
    ("start_worker", ["start", "--address=127.0.0.1:6379", "--num-gpus=2", "--num-cpus=4", "--disable-usage-stats"], ""),
    ("status_two", ["status"], ""),
    ("symmetric_no_command", ["symmetric-run", "--address", "127.0.0.1:6379"], "Error: No separator '--' found in arguments. Please use '--' to "
     "separate Ray start arguments and the entrypoint command."),
    ("symmetric_started", ["symmetric-run", "--address", "127.0.0.1:6379", "--", "echo", "hi"], "Error: Ray is already started on this node."),
    ("stop", ["stop"], ""),
    ("stop_again", ["stop", "--force"], ""),
    ("symmetric", ["symmetric-run", "--address", "127.0.0.1:6379", "--num-cpus", "2", "--", "sh", "-c", "echo hi; exit 4"], "Command failed with return code 4"),
]
# Lines that only one of the two has, each with its reason.
OF_RAY = [r"job_manager\.py", r"Running entrypoint for job", r"Runtime env is setting up",    # its supervisor's own lines in the job's log
          r"Send termination request", r"but process was already dead", r"^\d+/\d+ stopped",       # names its many processes
          r"object_store_memory", r"0B/.* memory",                # sizes of the machine
          r"^ray\.init\(", r"^import ray", r"has not exited yet"]  # how often it is asked depends on the time


def normal(text, exact):
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t[A-Z]+ \S+:\d+ -- ", "", text)
    text = re.sub(r"(\d+/\d+ stopped\.)+(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t\w+ \S+ -- )?", "\n", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t[A-Z]+ \S+:\d+ -- ", "\n", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+", "TIME", text)
    text = re.sub(r"(?<![0-9a-f])[0-9a-f]{56}(?![0-9a-f])", "ID", text)
    text = re.sub(r"Stopped all \d+ Ray", "Stopped all N Ray", text)
    lines = [x if exact else x.strip() for x in text.splitlines()]
    return [x for x in lines if not any(re.search(p, x) for p in OF_RAY) and (exact or x)]


def golden(name):
    with open(f"{DATA}/{name}.txt", encoding="utf-8") as f:
        return f.read().splitlines()


def play(run):
    """Every line of the script by run(words) -> (exit code, stdout, stderr): (name, exit, lines, stderr)."""
    for name, words, err in SCRIPT:
        code, out, said = run(words)
        for _ in range(20):  # Ray's status takes some seconds to know its nodes
            if not name.startswith("status") or ("No cluster status" not in out and (name != "status_two" or out.count(" 1 node_") == 2)):
                break
            time.sleep(1)
            code, out, said = run(words)
        yield name, err, code, normal(out, name.startswith("status")), said


def record(ray):
    env = dict(os.environ, HOME="/tmp/ray-home", RAY_TMPDIR="/tmp/ray-home/t", PYTHONUNBUFFERED="1", PATH=f"{os.path.dirname(ray)}:{os.environ['PATH']}")
    os.makedirs(env["RAY_TMPDIR"], exist_ok=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def run(words):
        p = subprocess.run([ray, *words], env=env, capture_output=True, text=True, timeout=180, check=False)
        return p.returncode, p.stdout, p.stderr
    for name, err, code, lines, said in play(run):
        assert err in re.sub(r"\x1b\[[0-9;]*m", "", said), (name, err, said)
        with open(f"{DATA}/{name}.txt", "w", encoding="utf-8") as f:
            f.write("\n".join([f"exit {code}", *lines]) + "\n")


if sys.argv[1:2] == ["--record"]:
    record(sys.argv[2])
    sys.exit(0)

import harness  # noqa: E402  what records needs no build of ours
from harness import BIN, place, wait_for  # noqa: E402


class RayPlace:
    """A Place in network and process namespaces of its own, where 6379 and 8265 are free and nobody else is killed."""

    def __init__(self, p, env=None, reaps=False):
        """reaps: the first process waits for what it inherits. Ours need no such thing; Ray's stop counts the dead."""
        if os.geteuid() != 0 or not shutil.which("unshare"):
            raise harness.Skip("namespaces need root and unshare")
        self.place, self.env = p, {**p.env, **(env or {})}
        os.makedirs(f"{p.root}/ray", exist_ok=True)
        os.symlink(f"{BIN}/furlong", f"{p.root}/ray/ray")
        self.env["PATH"] = f"{p.root}/ray:{self.env['PATH']}"
        self.inside = subprocess.Popen(["unshare", "-n", "-p", "-f", "--kill-child", "--mount-proc", "bash", "-c",
                                        "ip link set lo up; echo up; " + ("sleep 1000; :" if reaps else "exec sleep 1000")], stdout=subprocess.PIPE, text=True, env=self.env)
        assert self.inside.stdout.readline() == "up\n"
        with open(f"/proc/{self.inside.pid}/task/{self.inside.pid}/children", encoding="ascii") as f:
            self.pid = int(f.read().split()[0])

    def run(self, words, seconds=60, env=None, cwd=None):
        """(exit code, stdout, stderr) of a command inside."""
        p = subprocess.Popen(["nsenter", "-t", str(self.pid), "-n", "-p", "-m", f"--wd={cwd or self.place.root}", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             stdin=subprocess.DEVNULL, text=True, env={**self.env, **(env or {})})
        try:
            out, err = p.communicate(timeout=seconds * harness.SLOW)
        except subprocess.TimeoutExpired:
            p.kill()
            raise AssertionError(f"not over after {seconds} s: {words}") from None
        return p.returncode, out, err

    def sh(self, line, **kw):
        return self.run(["bash", "-c", line], **kw)

    def end(self):
        self.inside.send_signal(signal.SIGKILL)  # the first process of the namespace: all others go with it
        self.inside.wait()


def inside(test):
    def run():
        with place() as p:
            r = RayPlace(p)
            try:
                test(r)
            finally:
                r.end()
    return run


@inside
def test_the_same_words_as_ray(r):
    bad = []
    for name, err, code, lines, said in play(lambda words: r.run(["ray", *words])):
        if [f"exit {code}", *lines] != golden(name):
            bad.append(f"{name}: wanted {golden(name)}\n  got {[f'exit {code}', *lines]}\n  {said}")
        if err not in said:
            bad.append(f"{name}: '{err}' is not in stderr: {said}")
    assert not bad, "\n".join(bad)


def test_a_real_ray_still_says_so():
    ray = os.environ.get("FURLONG_TEST_RAY", "")
    if not os.path.exists(ray):
        raise harness.Skip("no real Ray: name its command in FURLONG_TEST_RAY")
    with place() as p:
        r = RayPlace(p, {"RAY_TMPDIR": f"{p.root}/t"}, reaps=True)
        try:
            bad = []
            for name, _, code, lines, _ in play(lambda words: r.run([ray, *words], seconds=180)):
                if [f"exit {code}", *lines] != golden(name):
                    bad.append(f"{name}: wanted {golden(name)}\n  got {[f'exit {code}', *lines]}")
            assert not bad, "\n".join(bad)
        finally:
            r.end()


@inside
def test_what_launchers_look_for(r):
    r.sh("ray start --head --node-ip-address 127.0.0.1 --num-gpus 128 --disable-usage-stats")
    assert r.sh("ray status | grep -q '/128.0 GPU'")[0] == 0
    assert r.sh(r"ray status | grep -oP '(?<=/)\d+\.\d+(?=\s*GPU)' | head -n 1")[1] == "128.0\n"
    assert r.sh("ray status | grep -c node_")[1] == "1\n"
    code, out, _ = r.sh("ps axww -o args | grep -v grep | grep dashboard | grep -o -e '--node-ip-address=[^ ]*' -e '--dashboard-port=[^ ]*'")
    assert code == 0 and out.split() == ["--node-ip-address=127.0.0.1", "--dashboard-port=8265"], out
    # The address of other clusters is refused at once when nobody is there; stdout of a job is the job's alone
    code, out, _ = r.sh("ray job submit --address=http://127.0.0.1:8265 --submission-id=x -- echo only | sed '1,/^Tailing/d' | sed '/^$/,$d'")
    assert out == "only\n", out


@inside
def test_flags_that_mean_nothing_are_named_once(r):
    code, _, err = r.sh("ray start --head --temp-dir=/x --object-store-memory 100000000 --min-worker-port 1 --min-worker-port 2 --num-gpus 1")
    assert code == 0, err
    assert err.count("--min-worker-port") == 1 and "--temp-dir, --object-store-memory" in err, err
    code, _, err = r.sh("ray job submit --log-style=record --verify False --no-wait -- true")
    assert code == 0 and err.count("\n") == 1 and "--log-style" in err, err


@inside
def test_names_survive_the_launchers_kills(r):
    """A run that is followed, a blocked start, the daemons and the workers all live on."""
    follow = "(ray start --head --num-gpus=1 --block; echo $? >block.rc) >block.out 2>&1 &\n" \
             "for i in $(seq 100); do grep -q runtime.started block.out 2>/dev/null && break; sleep 0.1; done\n" \
             "(ray job submit --submission-id=j -- 'sleep 3; echo finished'; echo $? >follow.rc) >follow.out 2>&1 &\n" \
             "for i in $(seq 100); do grep -q Tailing follow.out 2>/dev/null && break; sleep 0.1; done\n" \
             "pkill -9 sglang; pkill -9 miles; pkill -9 redis; pkill -9 ray\nwait %2\ncat follow.rc follow.out"
    code, out, err = r.sh(follow)
    assert out.startswith("0\n") and "finished" in out and "succeeded" in out, (code, out, err)
    assert not os.path.exists(f"{r.place.root}/block.rc")
    assert r.sh("ray stop --force")[1] == "Stopped all 2 Ray processes.\n"
    wait_for("the blocked start's end", lambda: os.path.exists(f"{r.place.root}/block.rc") and open(f"{r.place.root}/block.rc").read())


@inside
def test_stop_ends_what_is_ours_alone(r):
    """A process with the daemon's name, another user's cluster (another runtime folder) live on; workers end."""
    r.sh("ray start --head --num-gpus=1")
    r.sh("FURLONG_RUNTIME_DIR=$HOME/o FURLONG_STATE_DIR=$HOME/os ray start --head --num-gpus=1 --port=7000 --dashboard-port=7001")
    r.sh("cp /bin/sleep furlong-node; ./furlong-node 1000 >/dev/null 2>&1 & echo $! >bystander")
    r.sh("ray job submit --address=http://127.0.0.1:8265 --no-wait -- 'setsid sleep 1234 & sleep 1234'")
    r.sh("for i in $(seq 100); do [ $(pgrep -fc 'sleep 1234') -ge 2 ] && break; sleep 0.1; done")
    assert r.sh("ray stop --force")[1] == "Stopped all 2 Ray processes.\n"
    assert r.sh("pgrep -f '^sleep 1234'")[0] == 1, "the job's processes run on"
    assert r.sh("kill -0 $(cat bystander)")[0] == 0
    assert r.sh("FURLONG_RUNTIME_DIR=$HOME/o FURLONG_STATE_DIR=$HOME/os ray status | grep -c node_")[1] == "1\n"


@inside
def test_block_ends_as_its_daemon_did(r):
    line = "(ray start --head --num-gpus=1 --block; echo $? >rc) >out 2>&1 & for i in $(seq 100); do grep -q runtime.started out " \
           "2>/dev/null && break; sleep 0.1; done; kill -%s $(pgrep -x furlong-node); wait; cat rc out"
    out = r.sh(line % "KILL")[1]
    assert out.startswith("1\n") and "Some Ray subprocesses exited unexpectedly:" in out and "[exit code=-9]" in out, out
    assert "Remaining processes will be killed." in out
    assert r.sh("pgrep -x furlong-head")[0] == 1
    out = r.sh(line % "TERM")[1]
    assert out.startswith("0\n") and "exited unexpectedly:" not in out, out


@inside
def test_dashboard_port_moves_on(r):
    """As in Ray: 8265 taken and none asked for gives the next one."""
    r.sh("python3 -m http.server --bind 127.0.0.1 8265 >/dev/null 2>&1 & for i in $(seq 100); do (echo >/dev/tcp/127.0.0.1/8265) 2>/dev/null && break; sleep 0.1; done")
    code, out, err = r.sh("ray start --head --num-gpus=1")
    assert code == 0 and "    127.0.0.1:8266\n" in out, (out, err)
    assert r.sh("ray job submit -- true")[0] == 0


@inside
def test_folders_and_lists(r):
    """A working dir is packed, sent and unpacked; what .gitignore names, and .git, stays at home. Lists and counts."""
    r.sh("ray start --head --num-gpus=2")
    r.sh("mkdir -p wd/sub wd/.git wd/empty; echo 'print(open(\"sub/x\").read())' >wd/m.py; echo from the package >wd/sub/x; touch wd/a.log wd/b.bin; "
         "echo '*.log' >wd/.gitignore; chmod 755 wd/sub; printf '#!/bin/sh\necho ran' >wd/tool; chmod 755 wd/tool")
    for _ in range(2):  # the second finds the package there
        code, out, err = r.sh("""ray job submit --working-dir wd --runtime-env-json='{"excludes": ["*.bin"]}' -- 'python3 m.py; ./tool; ls -A | xargs; pwd'""")
        assert code == 0 and "from the package" in out and "\nran\n" in out and "\n.gitignore empty m.py sub tool\n" in out, (out, err)
        assert f"{r.place.root}/wd" not in out, out
    code, _, err = r.sh("ray job submit --working-dir nowhere -- true")
    assert code == 1 and "No such file" in err, err
    r.sh("ray job submit --submission-id=bad -- false")
    code, out, _ = r.sh("ray list nodes")
    assert code == 0 and "Total: 1" in out and "NODE_ID" in out and "GPU: 2.0" in out and " GiB" in out, out
    import json
    code, out, _ = r.sh("ray list nodes --format json")
    assert json.loads(out)[0]["state"] == "ALIVE", out
    code, out, _ = r.sh("ray list jobs -f status=FAILED --format json")
    assert [j["submission_id"] for j in json.loads(out)] == ["bad"], out
    assert [j["submission_id"] for j in json.loads(r.sh("ray list jobs --filter 'status!=FAILED' --format=json")[1])] != ["bad"]
    for words, wanted in (("list nonsense", "'nonsense' is not one of 'actors'"), ("list jobs -f status", "is not supported"), ("list", "Missing argument")):
        code, _, err = r.sh(f"ray {words}")
        assert code == 2 and wanted in err, (words, err)
    assert r.sh("ray list actors")[1] == "No resource in the cluster\n"
    assert "total_tasks: 0" in r.sh("ray summary tasks")[1] and "total_actors: 0" in r.sh("ray summary actors")[1]
    assert r.sh("ray job delete bad")[1].endswith("Job 'bad' deleted successfully\n")
    assert "metadata={}, runtime_env={" in r.sh("ray job list")[1]


@inside
def test_labels_from_a_file_and_rows_as_yaml(r):
    write = lambda name, text: open(f"{r.place.root}/{name}", "w", encoding="utf-8").write(text)
    write("labels.yaml", "gpu_type: A100  # a comment\nregion: us\nexample.com/rack: r7\n")
    code, _, err = r.sh("ray start --head --num-gpus=1 --labels-file labels.yaml --labels region=eu,tier=a")
    assert code == 0, err
    code, out, _ = r.sh("ray list nodes --format yaml")
    assert code == 0 and out.startswith("---\n-   node_id: ") and out.endswith("\n...\n\n"), out
    for line in ("    state: ALIVE", "        GPU: 1.0", "        gpu_type: A100", "        region: eu", "        tier: a", "        example.com/rack: r7"):
        assert f"\n{line}\n" in out, (line, out)
    assert r.sh("ray list nodes --detail")[1].startswith("---\n-   node_id: ")  # as in Ray
    assert r.sh("ray list actors --format=yaml")[1] == "--- []\n...\n\n"
    r.sh("ray stop")
    for text, wanted in (("a: [1\n", "line 2"), ("- a\n", "not a key-value pair map"), ("a: 1\n", 'The value of "a" is not string type.'),
                         ("a: x y\n", "Invalid label key value `x y`"), ("-a: x\n", "Invalid label key name `-a`"), ("a: x\na: y\n", "line 2")):
        write("bad.yaml", text)
        code, _, err = r.sh("ray start --head --labels-file bad.yaml")
        assert code == 1 and wanted in err and "is not a valid YAML file" in err, (text, err)
    code, _, err = r.sh("ray start --head --labels-file nowhere.yaml")
    assert code == 1 and "nowhere.yaml" in err, err
    assert r.sh("ps -C furlong-head -o stat= | grep -v Z")[0] == 1  # this first process waits for nobody


@inside
def test_the_signal_that_asks_a_job_to_end(r):
    """RAY_JOB_STOP_SIGNAL of the job, or of the cluster's environment."""
    job = "trap 'echo by INT; exit 0' INT; trap 'echo by TERM; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    for k, (cluster, env, wanted) in enumerate((("", "{}", "by TERM"), ("", '{"RAY_JOB_STOP_SIGNAL": "SIGINT"}', "by INT"), ("SIGINT", "{}", "by INT"),
                                                ("SIGINT", '{"RAY_JOB_STOP_SIGNAL": "SIGTERM"}', "by TERM"), ("SIGHUP", "{}", "by TERM"))):
        r.sh("ray stop")
        r.sh("ray start --head --num-gpus=1", env={"RAY_JOB_STOP_SIGNAL": cluster} if cluster else None)
        r.run(["ray", "job", "submit", "--no-wait", f"--submission-id=s{k}", "--runtime-env-json", '{"env_vars": %s}' % env, "--", job])
        wait_for("its first line", lambda k=k: "up" in r.sh(f"ray job logs s{k}")[1])
        assert r.sh(f"ray job stop s{k}")[0] == 0
        assert wanted in r.sh(f"ray job logs s{k}")[1], (cluster, env, r.sh(f"ray job logs s{k}")[1])


@inside
def test_addresses(r):
    r.sh("ray start --head --num-gpus=1")
    assert r.sh("RAY_ADDRESS=127.0.0.1:6379 ray status")[0] == 0
    assert r.sh("ray status --address 127.0.0.1:6379")[0] == 0
    assert r.sh("ray job submit --address=auto -- true")[0] == 0
    assert r.sh("RAY_ADDRESS= ray job submit -- true")[0] == 0
    assert r.sh("RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265/ RAY_ADDRESS=http://127.0.0.1:1 ray job list")[0] == 0
    for address in ("127.0.0.1:8265", "ray://127.0.0.1:10001", "http://127.0.0.1:1"):
        began = time.monotonic()
        code, _, err = r.sh(f"ray job list --address={address}")
        assert code == 1 and "ConnectionError" in err and time.monotonic() - began < 5 * harness.SLOW, (address, code, err)
    train = f"{BIN}/furlong train --colocate --num-rollout=1 --rollout-batch-size=4"
    for address in ("auto", "127.0.0.1:8265", "127.0.0.1:6379", "http://127.0.0.1:8265/"):  # an external cluster, also by the port that daemons join
        code, _, err = r.sh(train, env={"MILES_SCRIPT_EXTERNAL_RAY": "1", "RAY_ADDRESS": address})
        assert code == 0 and " on http://127.0.0.1:8265, " in err, (address, err)
    code, _, err = r.sh(train, env={"MILES_SCRIPT_EXTERNAL_RAY": "1", "RAY_ADDRESS": "http://127.0.0.1:6379"})
    assert code == 2 and "commands, jobs and browsers go to http://127.0.0.1:8265" in err, err
    code, _, err = r.sh("ray job list", env={"RAY_JOB_HEADERS": "no json"})
    assert code == 1 and "JSON" in err, err


if __name__ == "__main__":
    harness.main(dict(globals()))
