"""TLS between hosts and to the head: a run over it, everything that listens, Ray's own client, and each thing that can be wrong."""
import contextlib
import os
import re
import shutil
import subprocess
import sys
import textwrap

from certs import Authority
from harness import BIN, SLOW, Result, Skip, hosts, main, place, saying, wait_for
from runs import SMALL, Run
from test_launch import TRAIN, nothing_left, ssh_hosts, write

HEAD = ["start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=2", "--node-name=n1"]
RAYENV = os.environ.get("FURLONG_TEST_RAYENV") or os.path.expanduser("~/.cache/furlong-test/ray")


@contextlib.contextmanager
def cluster(n=2, cover="all", start=True):
    """n hosts, each with a certificate of one CA for its address, and a head with its node on the first."""
    with hosts(n) as places:
        folder = os.path.dirname(places[0].root)
        ca = Authority(folder)
        for i, p in enumerate(places, 1):
            p.env.update(ca.certify(p.name, f"10.77.0.{i}"))
            if cover == "all":
                p.env["FURLONG_TLS"] = "all"
        if start:
            places[0].furlong(*HEAD, check=0)
        yield places, ca


def join(place, name, *more, env=None, check=None):
    return place.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=2", f"--node-name={name}", "--wait=10", *more, env=env, check=check)


def ray(place, *words, env=None, check=None):
    """The command by Ray's name."""
    link = f"{place.root}/named/ray"
    os.makedirs(os.path.dirname(link), exist_ok=True)
    if not os.path.lexists(link):
        os.symlink(f"{BIN}/furlong", link)
    words = [*(["ip", "netns", "exec", place.netns] if place.netns else []), link, *words]
    p = subprocess.run(words, env={**place.env, **(env or {})}, cwd=place.root, capture_output=True, text=True, timeout=60 * SLOW,
                       stdin=subprocess.DEVNULL)
    r = Result(words, p.returncode, p.stdout, p.stderr)
    assert check is None or r.code == check, f"exit {check} wanted: {r}"
    return r


def speaks_tls(place, address, port):
    """Whether a greeting of TLS is answered by one."""
    code = f"""
        import socket, ssl
        c = ssl.create_default_context()
        c.check_hostname, c.verify_mode = False, ssl.CERT_NONE
        try:
            c.wrap_socket(socket.create_connection(("{address}", {port}), 5)).version()
            print("yes")
        except ssl.SSLError as e:
            print("yes" if "ALERT" in str(e).upper() else "no")
        except (ConnectionError, TimeoutError):
            print("no")"""
    return subprocess.run(["ip", "netns", "exec", place.netns, sys.executable, "-c", textwrap.dedent(code)], capture_output=True,
                          text=True, check=True, timeout=30).stdout.strip() == "yes"


def listeners(place):
    """(address, port, program) of all TCP that listens in the place's namespace."""
    out = subprocess.run(["ip", "netns", "exec", place.netns, "ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    return [(m[1].strip("[]").removeprefix("::ffff:"), int(m[2]), m[3]) for m in re.finditer(r"LISTEN\s+\d+\s+\d+\s+(\S+):(\d+)\s+\S+\s+users:\(\(\"([^\"]+)", out)]


def test_a_run_over_hosts_and_all_that_listens_speaks_tls():
    with cluster(3) as (places, _):
        for i, p in enumerate(places[1:], 2):
            join(p, f"n{i}", check=0)
        run = Run(places[0], *SMALL, "--num-rollout=200", "--actor-num-nodes=2", "--actor-num-gpus-per-node=2", "--rollout-num-gpus=2",
                  "--num-gpus-per-node=2")
        p = run.start()
        run.wait_step(1)
        plain = {}
        for at in places:
            for address, port, program in listeners(at):
                if not speaks_tls(at, address, port):
                    plain.setdefault(program, []).append((at.name, address, port))
        # What moves weights between hosts by TCP is not encrypted, as NCCL's is not: docs/security.md says so.
        assert set(plain) <= {"furlong-trainer", "furlong-rollout"}, plain
        p.terminate()
        p.communicate(timeout=60 * SLOW)
        for at in reversed(places):
            at.furlong("stop", check=0)


def test_each_wrong_file_and_side_has_a_sentence():
    with cluster(2) as ((head, other), ca):
        folder = os.path.dirname(head.root)
        another = Authority(folder, "another-ca").certify("stranger", "10.77.0.2")
        elsewhere = ca.certify("elsewhere", "10.99.0.1")
        mixed = {**elsewhere, "RAY_TLS_SERVER_KEY": other.env["RAY_TLS_SERVER_KEY"]}
        off = {"RAY_USE_TLS": "0", "FURLONG_TLS": "off"}
        url = "https://10.77.0.1:8265"
        rows = [  # name, what is done, what is said
            ("no TLS here", lambda: join(other, "n2", env=off), ["speaks TLS and this side does not", "RAY_USE_TLS=1"]),
            ("another CA", lambda: join(other, "n2", env=another), ["10.77.0.1", "is not signed by the CA"]),
            ("another address", lambda: join(other, "n2", env=elsewhere), ["elsewhere.crt names 10.99.0.1 and not 10.77.0.2", "subjectAltName=IP:10.77.0.2"]),
            ("another key", lambda: join(other, "n2", env=mixed), ["n2.key does not fit the certificate", "name the key"]),
            ("no file", lambda: join(other, "n2", env={"RAY_TLS_CA_CERT": "/nowhere"}), ["/nowhere", "give a file that this user may read"]),
            ("no CA named", lambda: join(other, "n2", env={"RAY_TLS_CA_CERT": ""}), ["RAY_TLS_CA_CERT"]),
            ("plain HTTP", lambda: other.furlong("status", "--address=http://10.77.0.1:8265"), ["This port speaks TLS", "https://"]),
            ("no CA for HTTP", lambda: other.furlong("status", f"--address={url}", env={"RAY_TLS_CA_CERT": ""}), ["CA that is trusted here", "RAY_TLS_CA_CERT"]),
            ("Ray, no CA", lambda: ray(other, "job", "list", f"--address={url}", env={"RAY_TLS_CA_CERT": ""}), ["CA that is trusted here", "--verify=FILE"]),
        ]
        for name, do, says in rows:
            with saying(name):
                r = do()
                assert r.code != 0, r
                for part in says:
                    assert part in r.err + r.out, (part, r)
        for verify in (ca.ca, "false", "0"):
            ray(other, "job", "list", f"--address={url}", f"--verify={verify}", env={"RAY_TLS_CA_CERT": ""}, check=0)
        join(other, "n2", check=0)
        assert other.furlong("status", f"--address={url}", check=0)
        head.furlong("stop", check=0)


def test_rays_variable_alone_is_what_it_is_to_ray():
    with cluster(2, cover="nodes") as ((head, other), _):
        join(other, "n2", check=0)
        r = ray(other, "job", "list", "--address=http://10.77.0.1:8265", check=0)  # plain, as Ray's
        assert "[]" in r.out, r
        assert [a for a, port, _ in listeners(head) if port == 6379] and speaks_tls(head, "10.77.0.1", 6379)
        r = other.furlong("status", "--address=https://10.77.0.1:8265")
        assert r.code != 0 and "use http://" in r.err, r
        head.furlong("stop", check=0)


def test_certificates_are_replaced_while_all_goes_on():
    with cluster() as ((head, other), ca):
        join(other, "n2", check=0)
        head.furlong("job", "submit", "--submission-id=long", "--no-wait", "--", "sleep 1000", check=0)
        before = {p.name: [p.info(k)[0]["pid"] for k in ("h", "n") if p.info(k)] for p in (head, other)}
        fresh = Authority(os.path.dirname(head.root), "fresh")
        for i, p in enumerate((head, other), 1):  # as a tool for it does: the same names, other files
            for old, new in zip(*((e["RAY_TLS_SERVER_CERT"], e["RAY_TLS_SERVER_KEY"], e["RAY_TLS_CA_CERT"]) for e in (p.env, fresh.certify(f"fresh-{p.name}", f"10.77.0.{i}")))):
                shutil.copy(new, old + ".new")
                os.rename(old + ".new", old)
        logs = lambda p, name: open(f"{p.root}/s/logs/furlong-{name}.log", encoding="utf-8").read()
        # the command knows the new CA alone
        wait_for("the new certificate", lambda: other.furlong("status", "--address=https://10.77.0.1:8265").code == 0)
        assert "a new certificate is shown from now on" in logs(head, "head"), logs(head, "head")
        other.furlong("stop", check=0)
        join(other, "n3", check=0)  # a daemon that knows the new CA alone
        now = head.info("h")[0]["pid"], head.info("n")[0]["pid"]
        assert list(now) == before[head.name], (now, before)
        jobs = head.furlong("list", "jobs", "--address=https://10.77.0.1:8265", "--json", check=0).json()
        assert [j["status"] for j in jobs if j["submission_id"] == "long"] == ["RUNNING"], jobs
        for p in (other, head):
            p.furlong("stop", check=0)


def test_a_head_with_tls_says_where_http_is_not_encrypted():
    with cluster(1, cover="nodes", start=False) as ((head,), _):
        r = head.furlong(*HEAD, check=0)
        assert "note: HTTP at 10.77.0.1 is not encrypted" in r.err and "--tls=all" in r.err, r
        head.furlong("stop", check=0)
        r = head.furlong(*HEAD, "--dashboard-host=127.0.0.1", check=0)
        assert "not encrypted" not in r.err, r
        head.furlong("stop", check=0)


def test_a_launch_over_ssh_brings_the_flags_along():
    with ssh_hosts(2) as (places, root, env):
        tls = Authority(root).certify("all", "10.77.0.1", "10.77.0.2", "127.0.0.1")  # at the same path on every host
        file = write(f"{root}/hostfile", "10.77.0.1\nn2\n")
        r = places[0].furlong(*TRAIN, f"--hostfile={file}", "--node-gpus=2", "--keep-cluster", env={**env, **tls}, seconds=120)
        assert r.code == 0, r
        assert speaks_tls(places[0], "10.77.0.1", 6379)
        assert len(places[0].furlong("list", "nodes", "--json").json()) == 2
        places[0].furlong("stop", "--cluster", check=0)
        nothing_left(places)


RAY_SCRIPT = """
import asyncio, os, sys
from ray.job_submission import JobSubmissionClient
address, ca = sys.argv[1:]
c = JobSubmissionClient(address, verify=ca)
job = c.submit_job(entrypoint="for i in 1 2 3; do echo line $i; done")
async def tail():
    return "".join([x async for x in c.tail_job_logs(job)])
print("TAIL", repr(asyncio.run(tail())))
print("STATUS", c.get_job_status(job))
try:
    JobSubmissionClient(address.replace("https", "http"))
except Exception as e:
    print("PLAIN", e)
"""


def test_rays_client_over_https_and_wss():
    python = f"{RAYENV}/bin/python"
    if not os.path.exists(python):
        raise Skip(f"no Ray in {RAYENV}: tests/ray makes it")
    with place() as p:
        p.env.update(Authority(p.root).certify("here", "127.0.0.1", "localhost"), FURLONG_TLS="all")
        head = p.start_head()
        assert head["http"].startswith("https://127.0.0.1:"), head
        with open(f"{p.root}/script.py", "w", encoding="utf-8") as f:
            f.write(RAY_SCRIPT)
        env = {k: v for k, v in p.env.items() if not k.startswith(("RAY_", "FURLONG_"))}
        r = subprocess.run([python, "script.py", head["http"], p.env["RAY_TLS_CA_CERT"]], cwd=p.root, env=env, capture_output=True,
                           text=True, timeout=120 * SLOW)
        assert "\\nline 1\\nline 2\\nline 3\\n'" in r.stdout and "STATUS SUCCEEDED" in r.stdout, (r.stdout, r.stderr)
        assert "PLAIN 400 Client Error" in r.stdout, (r.stdout, r.stderr)
        r = ray(p, "job", "submit", "--", "echo", "hello", check=0)  # finds the head and its CA by head.json
        assert "hello" in r.out, r
        p.furlong("stop", check=0)


if __name__ == "__main__":
    main(dict(globals()))
