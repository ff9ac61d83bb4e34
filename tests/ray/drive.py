"""Drives one head through Ray's own client and writes down what it answered, normalised.

    drive.py ADDRESS OUT.json        with the Python of the virtual environment that Ray is in

The same calls go to a real Ray head and to ours; compare.py holds the two files against each other. Whatever differs between
two runs of the same head (ids, times, ports, host) is replaced by a word; nothing else is.
"""
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib

import requests
from ray.job_submission import JobSubmissionClient

ADDRESS, OUT = sys.argv[1], sys.argv[2]
BIN = os.path.dirname(sys.executable)
SAID = []
MARK = f"t{os.getpid()}"
NAMES = {}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def name(short):
    """A submission id of this run, shown as its short form."""
    full = f"{MARK}-{short}"
    NAMES[full] = f"<{short}>"
    return full


def norm_text(t):
    t = ANSI.sub("", t)
    for full, short in sorted(NAMES.items(), key=lambda x: -len(x[0])):
        t = t.replace(full, short)
    t = t.replace(ADDRESS, "<http>").replace(ADDRESS.split("//")[1], "<http-address>")
    t = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", "<time>", t)
    t = re.sub(r"\.py:\d+ --", ".py:N --", t)
    t = re.sub(r"raysubmit_[A-HJ-NP-Za-km-z1-9]{16}(?![A-Za-z0-9])", "<generated id>", t)
    if "Traceback (most recent call last)" in t:  # a server in C has no Python frames: what it says is the last line
        t = [x for x in t.splitlines() if re.search(r"\w", x)][-1].strip()
    elif re.match(r"(TypeError|ValueError|RuntimeError): ", t):
        t = t.rstrip()
    # Ray writes it through a buffer that goes out when the shell runs already: anywhere in the log. That it is there is asked once.
    t = re.sub(r"Running entrypoint for job [^\n]*(\n|\Z)", "", t)
    t = re.sub(r"x{19000,20000}", "<about 20,000 x>", t)  # where it was cut depends on that line too
    m = re.search(r"last available logs \(truncated to 20,000 chars\):\n", t)
    if m:  # so one of the ten lines may be that one
        t = t[:m.end()] + "".join([x for x in t[m.end():].splitlines(True) if "Runtime env is setting up" not in x][-9:])
    return t if len(t) < 2000 else f"{t[:600]} <{len(t)} characters, {zlib.crc32(t.encode())}> {t[-200:]}"


def norm(v, key=None):
    if isinstance(v, dict):
        return {k: norm(x, k) for k, x in sorted(v.items())}
    if isinstance(v, (list, tuple)):
        return [norm(x) for x in v]
    if key in ("start_time", "end_time", "start_time_ms", "end_time_ms") and isinstance(v, int):
        return "<ms>" if v > 1_000_000_000_000 else v
    if key in ("driver_node_id", "node_id") and isinstance(v, str) and re.fullmatch(r"[0-9a-f]{32,}", v):
        return "<node>"
    if key == "driver_agent_http_address" and isinstance(v, str):
        return re.sub(r"http://[0-9.]+:\d+", "<agent>", v)
    if key == "session_name":
        return re.sub(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}_\d+", "<session>", v)
    return norm_text(v) if isinstance(v, str) else v


def say(label, what):
    SAID.append([label, norm(what)])
    print(f"{time.strftime('%H:%M:%S')} {label}: {json.dumps(SAID[-1][1])[:160]}", file=sys.stderr, flush=True)


def call(label, fn, *a, **kw):
    """What a call of the SDK gave: its value, or the exception's kind and text."""
    try:
        r = fn(*a, **kw)
        say(label, r.model_dump(mode="json") if hasattr(r, "model_dump") else r)
        return r
    except Exception as e:
        text = str(e)
        m = re.match(r"(?s)(Request failed with status code \d+: )(.*)\.\Z", text)  # the body stands inside
        say(label, {"raises": type(e).__name__, "text": m.group(1) + norm_text(m.group(2)) if m else text})
        return None


def http(label, method, path, body=None, headers=None, only=None, keep=True):
    """What a plain request gave: status, type and body."""
    r = requests.request(method, ADDRESS + path, data=body, headers=headers or {}, timeout=60)
    kind = r.headers.get("Content-Type", "")
    what = {"status": r.status_code, "type": kind, "body": r.text}
    if kind.startswith("application/json"):
        what["body"] = r.json()
    if only:
        what["body"] = only(what["body"])
    if keep:
        say(label, what)
    return r


def wait(client, job, states=("SUCCEEDED", "FAILED", "STOPPED"), seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        s = client.get_job_status(job)
        if str(s) in states:
            return str(s)
        time.sleep(0.05)
    return f"still {s} after {seconds} s"


def cli(label, *words, env=None, stdin=None):
    e = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    e.update({"RAY_ADDRESS": ADDRESS, "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}, **(env or {}))
    p = subprocess.run([os.path.join(BIN, "ray"), "job", *words], env=e, capture_output=True, text=True, timeout=120,
                       stdin=subprocess.DEVNULL)
    out = [x for x in norm_text_lines(p.stdout)]
    say(label, {"exit": p.returncode, "stdout": out, "stderr": last_line(p.stderr)})
    return p


def norm_text_lines(t):
    # The command shows its lines behind its own place in Ray's source when no terminal is there.
    return [re.sub(r"^(INFO cli.py -- )?<time>\s+(\w+) (\w+\.py):N -- ", r"\2 \3 -- ", x) for x in norm_text(t).splitlines()]


def last_line(t):
    lines = [x for x in norm_text_lines(t) if re.search(r"\w", x) and "WebSocket closed" not in x]
    said = lines[-1] if lines else ""
    m = re.match(r"RuntimeError: Request failed with status code \d+: (\w+Error: .*)", said)  # Ray's has lines of Python between them
    return (m.group(1) if m else said).rstrip(".")


def tail(client, job):
    async def read():
        out = ""
        async for piece in client.tail_job_logs(job):
            out += piece
        return out
    return asyncio.run(read())


def submit_and_log(client, label, command, **kw):
    job = client.submit_job(entrypoint=command, submission_id=name(label), **kw)
    state = wait(client, job)
    call(f"{label}: info", client.get_job_info, job)
    call(f"{label}: logs", client.get_job_logs, job)
    return job, state


# ---- what is called ---------------------------------------------------------------------------------------------------------

def version(client):
    import ray
    r = http("version", "GET", "/api/version")
    say("version: is the client's", [r.json().get("ray_version") == ray.__version__, r.json().get("ray_commit") == ray.__commit__])
    call("sdk: version", client.get_version)


def ends(client):
    submit_and_log(client, "ok", "echo hello; echo there >&2")
    say("log: its first lines", [bool(re.search(p, client.get_job_logs(name("ok")), re.M)) for p in (
        r"\A\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\tINFO job_manager\.py:\d+ -- Runtime env is setting up\.$",
        r"^Running entrypoint for job \S+-ok: echo hello; echo there >&2$")])
    submit_and_log(client, "exit 7", "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo line $i; done; exit 7")
    submit_and_log(client, "silent 3", "exit 3")
    submit_and_log(client, "not found", "no-such-command-at-all x")
    submit_and_log(client, "killed", "kill -9 $$")
    submit_and_log(client, "segv", "kill -SEGV $$")
    submit_and_log(client, "sh says 137", "sh -c 'kill -9 $$'; exit $?")
    submit_and_log(client, "syntax", "if then")
    submit_and_log(client, "empty", "")
    submit_and_log(client, "quotes", """echo "hello 'world'" '$HOME' \\" é""")
    submit_and_log(client, "no newline", "printf 'one\\ntwo'")
    submit_and_log(client, "long line", "head -c 50000 /dev/zero | tr '\\0' x; exit 5")
    submit_and_log(client, "not utf-8", "printf 'a\\377b\\n'")
    submit_and_log(client, "many", "seq 1 30000")


def form(client):
    def body(label, o, **kw):
        http(f"body: {label}", "POST", "/api/jobs/", json.dumps(o) if not isinstance(o, str) else o,
             {"Content-Type": "application/json"}, **kw)
    generated = {"job_id", "submission_id"}
    body("only entrypoint", {"entrypoint": "true"}, only=lambda b: sorted(b) == sorted(generated) and b["job_id"] == b["submission_id"]
         and bool(re.fullmatch("raysubmit_[A-HJ-NP-Za-km-z1-9]{16}", b["job_id"])))
    body("no entrypoint", {})
    body("null entrypoint", {"entrypoint": None})
    body("entrypoint a number", {"entrypoint": 1})
    body("entrypoint a list", {"entrypoint": ["a"]})
    body("entrypoint a bool", {"entrypoint": True})
    body("id a number", {"entrypoint": "true", "submission_id": 5})
    body("job id a number", {"entrypoint": "true", "job_id": 5.5})
    body("runtime env a list", {"entrypoint": "true", "runtime_env": []})
    body("runtime env a text", {"entrypoint": "true", "runtime_env": "x"})
    body("metadata a text", {"entrypoint": "true", "metadata": "x"})
    body("metadata value a number", {"entrypoint": "true", "metadata": {"a": 1}})
    body("metadata value an object", {"entrypoint": "true", "metadata": {"a": {}}})
    body("cpus a text", {"entrypoint": "true", "entrypoint_num_cpus": "1"})
    body("gpus a text", {"entrypoint": "true", "entrypoint_num_gpus": "1"})
    body("memory a fraction", {"entrypoint": "true", "entrypoint_memory": 1.5})
    body("resources a list", {"entrypoint": "true", "entrypoint_resources": [1]})
    body("resources value a text", {"entrypoint": "true", "entrypoint_resources": {"a": "1"}})
    body("selector a text", {"entrypoint": "true", "entrypoint_label_selector": "a"})
    body("selector value a number", {"entrypoint": "true", "entrypoint_label_selector": {"a": 1}})
    body("unknown key", {"entrypoint": "true", "nonsense": 1})
    body("two unknown keys", {"entrypoint": "true", "nonsense": 1, "more": 2})
    body("unknown key that is null", {"entrypoint": "true", "nonsense": None, "submission_id": name("nullkey")})
    body("job_id in place of submission_id", {"entrypoint": "true", "job_id": name("byjobid")})
    body("both ids", {"entrypoint": "true", "job_id": name("loser"), "submission_id": name("winner")})
    status = lambda b: "text"  # the JSON reader's own words are no contract
    for label, text in (("no JSON", "{"), ("empty", ""), ("a list", "[]"), ("a text", '"x"'), ("a number", "3")):
        http(f"body: {label}", "POST", "/api/jobs/", text, {"Content-Type": "application/json"}, only=status)


def paths(client):
    http("path: no slash", "GET", "/api/jobs")
    http("path: no slash, posted", "POST", "/api/jobs", "{}")
    http("path: unknown", "GET", "/api/nothing")
    http("path: put a job", "PUT", "/api/jobs/", "{}", only=lambda b: "text")
    job = name("ok")
    for method, path in (("GET", ""), ("POST", "/stop"), ("DELETE", ""), ("GET", "/logs")):
        http(f"unknown id: {method} {path}", method, f"/api/jobs/no-such-job{path}")
    http("unknown id: tail", "GET", "/api/jobs/no-such-job/logs/tail")
    http("unknown action", "GET", f"/api/jobs/{job}/nothing")
    http("details: raw", "GET", f"/api/jobs/{job}")
    http("stop: of an ended one", "POST", f"/api/jobs/{job}/stop")
    r = http("list: raw", "GET", "/api/jobs/", keep=False)
    say("list: raw", {"status": r.status_code, "type": r.headers["Content-Type"], "keys": sorted({k for j in r.json() for k in j}),
                      "types": sorted({j["type"] for j in r.json()})})
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for h in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Mode": "cors"},
                  {"User-Agent": "Mozilla/5.0 (X11)"}):
            http(f"browser: {method} {next(iter(h))}", method, "/api/jobs/" if method != "DELETE" else f"/api/jobs/{job}",
                 json.dumps({"entrypoint": "true"}) if method in ("POST", "PUT", "PATCH") else None, h)


def ids(client):
    job = name("twice")
    call("ids: first", client.submit_job, entrypoint="true", submission_id=job)
    wait(client, job)
    call("ids: duplicate", client.submit_job, entrypoint="true", submission_id=job)
    call("ids: unknown status", client.get_job_status, "nope")
    call("ids: unknown info", client.get_job_info, "nope")
    call("ids: unknown logs", client.get_job_logs, "nope")
    call("ids: unknown stop", client.stop_job, "nope")
    call("ids: unknown delete", client.delete_job, "nope")
    call("ids: delete", client.delete_job, job)
    call("ids: deleted status", client.get_job_status, job)
    call("ids: again after delete", client.submit_job, entrypoint="true", submission_id=job)
    wait(client, job)
    call("ids: odd", client.submit_job, entrypoint="true", submission_id=name("with.dots_and-dashes"))


def stops(client):
    job = client.submit_job(entrypoint="echo up; sleep 100", submission_id=name("stopped"))
    wait(client, job, ("RUNNING",))
    call("stop: info while it runs", client.get_job_info, job)
    call("stop: delete while it runs", client.delete_job, job)
    call("stop: asked", client.stop_job, job)
    say("stop: ended as", wait(client, job))
    call("stop: info", client.get_job_info, job)
    time.sleep(2)  # until then Ray's supervisor may still be there, and says true
    call("stop: again", client.stop_job, job)
    trap = "trap 'echo saving; sleep 1; echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    job = client.submit_job(entrypoint=trap, submission_id=name("saves"))
    while "up\n" not in client.get_job_logs(job):
        time.sleep(0.05)
    client.stop_job(job)
    say("stop: one that saves", wait(client, job))
    call("stop: what it said", lambda: client.get_job_logs(job).replace("Terminated\n", ""))  # of the sleep, if one was asleep just then
    deaf = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    job = client.submit_job(entrypoint=deaf, submission_id=name("deaf"))
    while "up\n" not in client.get_job_logs(job):
        time.sleep(0.05)
    t = time.monotonic()
    client.stop_job(job)
    say("stop: one that does not hear", [wait(client, job), "waited for its 3 s" if 2.5 < time.monotonic() - t < 8 else
                                         f"{time.monotonic() - t:.1f} s"])


def environment(client):
    show = "env | grep -E '^(FOO|EMPTY|PYTHONUNBUFFERED|RAY_EXPERIMENTAL_NOSET|RAY_JOB_CONFIG)' | sort"
    env = {"env_vars": {"FOO": "a=b 'c' \"d\"", "EMPTY": "", "PYTHONUNBUFFERED": "0"}}
    job = client.submit_job(entrypoint="echo FOO=$FOO EMPTY=${EMPTY-unset} $PYTHONUNBUFFERED", submission_id=name("env"), runtime_env=env,
                            metadata={"a": "b", "job_name": "mine"})
    wait(client, job)
    call("env: info", client.get_job_info, job)
    call("env: logs", client.get_job_logs, job)
    job = client.submit_job(entrypoint=show, submission_id=name("shown"), metadata={"k": "v é"})
    wait(client, job)
    text = client.get_job_logs(job)
    config = re.search(r"RAY_JOB_CONFIG_JSON_ENV_VAR=(.*)", text)
    say("env: what a driver gets", [x for x in text.splitlines() if x.startswith(("RAY_EXP", "PYTHONUN"))])
    say("env: job config", json.loads(config.group(1)) if config else None)
    job = client.submit_job(entrypoint="pwd", submission_id=name("cwd"))
    wait(client, job)
    say("env: starts where the head was started", os.getcwd() in client.get_job_logs(job).splitlines())
    job = client.submit_job(entrypoint="echo $RAY_ADDRESS", submission_id=name("address"))
    wait(client, job)
    say("env: RAY_ADDRESS", bool(re.search(r"^[0-9.]+:\d+$", client.get_job_logs(job), re.M)))
    job = client.submit_job(entrypoint="ps -o pid=,pgid=,sid= -p $$ | awk '{print ($1 == $2 && $2 == $3)}'", submission_id=name("session"))
    wait(client, job)
    call("env: own session", client.get_job_logs, job)
    for label, value in (("null", None), ("empty", {}), ("no vars", {"env_vars": {}})):
        job = client.submit_job(entrypoint="true", submission_id=name(f"env {label}").replace(" ", "-"), runtime_env=value)
        wait(client, job)
        say(f"env: {label} comes back as", client.get_job_info(job).runtime_env)


def resources(client):
    for label, kw in (("cpus", {"entrypoint_num_cpus": 1}), ("half a cpu", {"entrypoint_num_cpus": 0.5}),
                      ("memory", {"entrypoint_memory": 1 << 20}), ("own", {"entrypoint_resources": {"widget": 1}})):
        job = client.submit_job(entrypoint="echo ran", submission_id=name("res-" + label.replace(" ", "-")), **kw)
        say(f"resources: {label}", wait(client, job))
        call(f"resources: {label}: info", client.get_job_info, job)
    for label, kw in (("too many cpus", {"entrypoint_num_cpus": 99}), ("a gpu", {"entrypoint_num_gpus": 1}),
                      ("unknown", {"entrypoint_resources": {"unobtainium": 1}}),
                      ("with an environment", {"entrypoint_num_cpus": 99, "runtime_env": {"env_vars": {"A": "1"}}})):
        job = client.submit_job(entrypoint="true", submission_id=name("wait-" + label.replace(" ", "-")), **kw)
        call(f"resources: {label}", client.get_job_info, job)
        time.sleep(1)
        call(f"resources: {label}, later", client.get_job_info, job)
        call(f"resources: {label}, stopped", client.stop_job, job)
        say(f"resources: {label}, ended as", wait(client, job, seconds=3))
        call(f"resources: {label}, logs", client.get_job_logs, job)


def packages(client):
    with tempfile.TemporaryDirectory() as d:
        NAMES[d] = "<folder>"
        os.makedirs(f"{d}/project/sub/empty")
        os.makedirs(f"{d}/mods/mymod")
        for path, text in (("project/main.py", "import helper, sub.deep, os; print(helper.X, sub.deep.Y, sorted(os.listdir('.')))"),
                           ("project/helper.py", "X = 'helped'\n"), ("project/sub/__init__.py", ""), ("project/sub/deep.py", "Y = 'deep'\n"),
                           ("project/run.sh", "echo run; pwd | grep -c _ray_pkg_\n"), ("project/left.out", "no"),
                           ("mods/mymod/__init__.py", "Z = 'module'\n")):
            with open(f"{d}/{path}", "w") as f:
                f.write(text)
        os.chmod(f"{d}/project/run.sh", 0o755)
        env = {"working_dir": f"{d}/project", "excludes": ["*.out"]}
        job = client.submit_job(entrypoint=f"{sys.executable} main.py && ./run.sh", submission_id=name("workdir"), runtime_env=env)
        say("packages: working_dir", wait(client, job))
        call("packages: working_dir: info", client.get_job_info, job)
        call("packages: working_dir: logs", client.get_job_logs, job)
        env = {"working_dir": f"{d}/project", "py_modules": [f"{d}/mods/mymod"], "env_vars": {"A": "1"}}
        job = client.submit_job(entrypoint=f"{sys.executable} -c 'import mymod, helper; print(mymod.Z, helper.X)'", submission_id=name("modules"),
                                runtime_env=env)
        say("packages: py_modules", wait(client, job))
        call("packages: py_modules: info", client.get_job_info, job)
        call("packages: py_modules: logs", client.get_job_logs, job)
        with zipfile.ZipFile(f"{d}/w.zip", "w") as z:
            z.writestr(zipfile.ZipInfo("helper.py"), "X = 'helped'\n")
        job = client.submit_job(entrypoint="ls", submission_id=name("zipped"), runtime_env={"working_dir": f"{d}/w.zip"})
        say("packages: a zip", wait(client, job))
        call("packages: a zip: info", client.get_job_info, job)
        call("packages: a zip: logs", client.get_job_logs, job)
        call("packages: not there", client.submit_job, entrypoint="true", submission_id=name("nodir"), runtime_env={"working_dir": f"{d}/none"})
        call("packages: bad address", client.submit_job, entrypoint="true", submission_id=name("baduri"), runtime_env={"working_dir": "s3://not_a_zip"})
        raw = open(f"{d}/w.zip", "rb").read()
        pkg = "_ray_pkg_" + f"{os.getpid():016x}" + ".zip"
        NAMES[pkg] = "<package>"
        http("package: unknown", "GET", f"/api/packages/gcs/{pkg}")
        http("package: put", "PUT", f"/api/packages/gcs/{pkg}", raw)
        http("package: known", "GET", f"/api/packages/gcs/{pkg}")
        http("package: put again", "PUT", f"/api/packages/gcs/{pkg}", raw)
        bad = pkg.replace("_ray_pkg_", "_ray_pkg_f")
        NAMES[bad] = "<damaged>"
        http("package: put, no zip", "PUT", f"/api/packages/gcs/{bad}", b"this is no archive")
        job = client.submit_job(entrypoint="true", submission_id=name("damaged"), runtime_env={"working_dir": f"gcs://{bad}"})
        say("packages: damaged", wait(client, job))
        i = client.get_job_info(job)
        say("packages: damaged: info", [i.error_type, i.driver_exit_code, i.message.startswith("runtime_env setup failed: ")])
        http("package: one part", "GET", "/api/packages/x")
        http("package: too large", "PUT", "/api/packages/gcs/_ray_pkg_ffffffffffffffff.zip", b"\0" * (101 << 20), only=lambda b: "text")
        http("package: another ending", "PUT", "/api/packages/gcs/_ray_pkg_ffffffffffffffff.txt", b"x", only=lambda b: "text")
        job = client.submit_job(entrypoint="cat helper.py", submission_id=name("byuri"), runtime_env={"working_dir": f"gcs://{pkg}"})
        say("packages: by its uri", wait(client, job))
        call("packages: by its uri: logs", client.get_job_logs, job)


def tails(client):
    job = client.submit_job(entrypoint="for i in 1 2 3; do echo $i; sleep 0.3; done", submission_id=name("tailed"))
    call("tail: of one that runs", tail, client, job)
    call("tail: of one that has ended", tail, client, job)
    call("tail: unknown", tail, client, "nope")
    job = client.submit_job(entrypoint="head -c 300000 /dev/zero | tr '\\0' y; echo; echo end", submission_id=name("tail-long"))
    text = tail(client, job)
    say("tail: a long line", [len(re.sub(r"(?s)\A.*?Running entrypoint[^\n]*\n", "", text)), text.endswith("y\nend\n")])
    job = client.submit_job(entrypoint="exit 4", submission_id=name("tail-fails"))
    call("tail: of one that fails", tail, client, job)


def commands(client):
    cli("cli: submit", "submit", "--submission-id", name("cli-ok"), "--", "echo", "hello 'world'")
    cli("cli: submit fails", "submit", "--submission-id", name("cli-fails"), "--", "sh", "-c", "echo out; exit 9")
    cli("cli: no wait", "submit", "--no-wait", "--submission-id", name("cli-nowait"), "--", "sleep", "0.1")
    cli("cli: duplicate", "submit", "--submission-id", name("cli-ok"), "--", "true")
    wait(client, name("cli-nowait"))
    cli("cli: status", "status", name("cli-ok"))
    cli("cli: status of a failed one", "status", name("cli-fails"))
    cli("cli: status of none", "status", "nope")
    cli("cli: logs", "logs", name("cli-ok"))
    cli("cli: logs followed", "logs", "--follow", name("cli-ok"))
    cli("cli: logs of none", "logs", "nope")
    p = cli("cli: metadata, environment", "submit", "--submission-id", name("cli-env"), "--metadata-json", '{"a": "b"}', "--runtime-env-json",
            '{"env_vars": {"V": "x y"}}', "--entrypoint-num-cpus", "1", "--", "printenv", "V")
    call("cli: metadata, environment: info", client.get_job_info, name("cli-env"))
    with tempfile.TemporaryDirectory() as d:
        with open(f"{d}/s.py", "w") as f:
            f.write("print('from the folder')\n")
        r = subprocess.run([os.path.join(BIN, "ray"), "job", "submit", "--submission-id", name("cli-dir"), "--working-dir", d, "--",
                            sys.executable, "s.py"], env=dict(os.environ, RAY_ADDRESS=ADDRESS), capture_output=True, text=True, timeout=120)
        say("cli: working dir", [r.returncode, "from the folder" in r.stdout])
    client.submit_job(entrypoint="sleep 100", submission_id=name("cli-stop"))
    wait(client, name("cli-stop"), ("RUNNING",))
    cli("cli: stop, no wait", "stop", "--no-wait", name("cli-stop"))
    wait(client, name("cli-stop"))
    cli("cli: stop of an ended one", "stop", name("cli-stop"))
    cli("cli: delete", "delete", name("cli-stop"))
    cli("cli: delete of none", "delete", "nope")
    client.submit_job(entrypoint="sleep 100", submission_id=name("cli-live"))
    wait(client, name("cli-live"), ("RUNNING",))
    cli("cli: delete of a live one", "delete", name("cli-live"))
    client.stop_job(name("cli-live"))
    wait(client, name("cli-live"))
    p = subprocess.run([os.path.join(BIN, "ray"), "job", "list"], env=dict(os.environ, RAY_ADDRESS=ADDRESS), capture_output=True, text=True,
                       timeout=60)
    # A real Ray's supervisor may write a job that was stopped without waiting, and deleted, down once more.
    rows = sorted(norm_text(x) for x in re.findall(r"submission_id='([^']*)'", p.stdout) if x != name("cli-stop"))
    say("cli: list", [p.returncode, sorted(set(rows)), last_line(p.stderr) if p.returncode else ""])


def states(client):
    jobs = [["filter_keys", "submission_id"], ["filter_predicates", "="], ["filter_values", name("ok")]]
    query = "&".join(f"{k}={v}" for k, v in jobs)
    shape = lambda b: {"result": b["result"], "msg": b["msg"], "data": sorted(b["data"]), "inner": sorted((b["data"].get("result") or {}))}
    for kind in ("actors", "nodes", "placement_groups", "jobs", "tasks", "workers", "objects", "runtime_envs"):
        http(f"state: {kind}", "GET", f"/api/v0/{kind}", only=shape)
    def rows(b):  # how many jobs there are by now differs; how many fit does not
        r = b["data"]["result"]
        return {"result": b["result"], "msg": b["msg"], **{k: v for k, v in r.items() if k not in ("total", "num_after_truncation")},
                "counts": r["total"] == r["num_after_truncation"] > 1}
    http("state: one job", "GET", f"/api/v0/jobs?{query}", only=rows)
    http("state: one job, detail", "GET", f"/api/v0/jobs?{query}&detail=1", only=rows)
    http("state: one job, in capitals", "GET", f"/api/v0/jobs?{query.replace(name('ok'), name('ok').upper())}", only=rows)
    http("state: two filters", "GET", f"/api/v0/jobs?{query}&filter_keys=status&filter_predicates=%3D&filter_values=FAILED",
         only=lambda b: b["data"]["result"]["num_filtered"])
    http("state: not that job", "GET", f"/api/v0/jobs?{query.replace('predicates==', 'predicates=!=')}",
         only=lambda b: all(j["submission_id"] != name("ok") for j in b["data"]["result"]["result"]))
    http("state: limit 1", "GET", "/api/v0/jobs?limit=1", only=lambda b: [len(b["data"]["result"]["result"]), b["data"]["result"]["total"] > 1])
    http("state: limit too high", "GET", "/api/v0/jobs?limit=10001")
    http("state: limit a word", "GET", "/api/v0/jobs?limit=x", only=lambda b: "text")
    http("state: unknown predicate", "GET", "/api/v0/nodes?filter_keys=state&filter_predicates=%3C&filter_values=a", only=lambda b: "text")
    http("state: unknown key", "GET", "/api/v0/nodes?filter_keys=nonsense&filter_predicates=%3D&filter_values=a", only=lambda b: "text")
    http("state: filter without a value", "GET", "/api/v0/nodes?filter_keys=state&filter_predicates=%3D", only=lambda b: "text")
    http("state: nodes", "GET", "/api/v0/nodes", only=lambda b: [[sorted(r), r["is_head_node"], r["state"], r["state_message"]] for r in
                                                                b["data"]["result"]["result"]])
    http("state: nodes, detail", "GET", "/api/v0/nodes?detail=true", only=lambda b: [sorted(r) for r in b["data"]["result"]["result"]])
    http("state: dead nodes", "GET", "/api/v0/nodes?filter_keys=state&filter_predicates=%3D&filter_values=dead",
         only=lambda b: [b["data"]["result"]["num_filtered"], b["data"]["result"]["result"]])
    for kind in ("actors", "tasks", "objects"):
        http(f"state: {kind} summarized", "GET", f"/api/v0/{kind}/summarize", only=shape)
    http("state: unknown kind", "GET", "/api/v0/nonsense")
    http("state: logs of no node", "GET", "/api/v0/logs")


def others(client):
    http("nodes: summary", "GET", "/nodes?view=summary", only=lambda b: {
        "result": b["result"], "msg": b["msg"], "data": sorted(b["data"]),
        "rows": [{"raylet": {k: r["raylet"].get(k) for k in ("state", "isHeadNode", "stateMessage")},
                  "kinds": {k: type(r.get(k)).__name__ for k in ("now", "hostname", "ip", "cpu", "cpus", "mem", "shm", "bootTime",
                                                               "loadAvg", "disk", "diskIo", "gpus", "network", "networkSpeed", "workers")},
                  "mem": len(r["mem"])} for r in b["data"]["summary"]]})
    http("nodes: host names", "GET", "/nodes?view=hostNameList", only=lambda b: [b["result"], b["msg"], sorted(b["data"]),
                                                                               len(b["data"]["hostNameList"])])
    http("nodes: no view", "GET", "/nodes")
    http("cluster status", "GET", "/api/cluster_status", only=lambda b: [b["result"], b["msg"], sorted(b["data"])])
    http("cluster status: text", "GET", "/api/cluster_status?format=1", only=lambda b: [
        b["result"], b["msg"], sorted(b["data"]), [re.sub(r"[\d.]+[A-Za-z]*/[\d.]+[A-Za-z]*", "U/T", x) for x in
                                                    b["data"]["clusterStatus"].splitlines() if re.search("CPU|Resources|Usage|Pending|Node status|Active", x) and "{" not in x]])
    http("health: gcs", "GET", "/api/gcs_healthz")
    http("health: dashboard", "GET", "/api/healthz")
    http("authentication mode", "GET", "/api/authentication_mode")
    http("authenticate when it is off", "POST", "/api/authenticate")
    http("grafana", "GET", "/api/grafana_health", only=lambda b: [b["result"], b["msg"]])
    http("prometheus", "GET", "/api/prometheus_health", only=lambda b: [b["result"], b["msg"]])
    http("usage stats", "GET", "/usage_stats_enabled")
    http("activities", "GET", "/api/component_activities", only=lambda b: [sorted(b), sorted(b["driver"]), b["driver"]["is_active"]])
    http("timezone", "GET", "/timezone", only=lambda b: sorted(b))


def main():
    client = JobSubmissionClient(ADDRESS)
    only = os.environ.get("PARTS")
    for part in (version, ends, form, paths, ids, stops, environment, resources, packages, tails, commands, states, others):
        if only and part.__name__ not in only.split(","):
            continue
        try:
            part(client)
        except Exception as e:  # what one part cannot do must not hide the others
            say(f"{part.__name__}: broke off", f"{type(e).__name__}: {e}"[:300])
    with open(OUT, "w") as f:
        json.dump(SAID, f, indent=1, ensure_ascii=False)


main()
