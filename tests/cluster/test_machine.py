"""What a machine can be like: few files, little shared memory, part of the cores, a taken port, names that mislead."""
import os
import shutil
import subprocess

import harness
from harness import BIN, Place, hosts, place, wait_for


def under(p, *words):
    """The place with words before each of its commands."""
    q = Place(p.root, p.netns)
    q.env, q.children = p.env, p.children
    q.argv = lambda args: [*words, f"{BIN}/{args[0]}", *map(str, args[1:])]
    return q


def p105_low_open_file_limit():
    with place() as p:
        r = under(p, "prlimit", "--nofile=256:512").furlong("start", "--head", "--port=0", "--dashboard-port=0", "--num-gpus=1")
        assert r.code == 1 and "at most 512 may be open (soft limit 256); 1024 are needed" in r.err and "ulimit" in r.err, r
        assert not p.processes(), p.processes()
        r = under(p, "prlimit", "--nofile=256:4096").furlong("start", "--head", "--port=0", "--dashboard-port=0", "--num-gpus=1")
        assert r.code == 0 and "note: open files: at most 4096" in r.err, r
        pid = p.info("n")[0]["pid"]
        limits = open(f"/proc/{pid}/limits", encoding="ascii").read()
        assert [x.split()[3:5] for x in limits.splitlines() if x.startswith("Max open files")] == [["4096", "4096"]], limits
        p.furlong("stop", check=0)


def p106_p107_little_shared_memory():
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise harness.Skip("a mount namespace needs root and unshare")
    with place() as p:
        small = under(p, "unshare", "-m", "--propagation", "private", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$0" "$@"')
        r = small.furlong("start", "--head", "--port=0", "--dashboard-port=0", "--num-gpus=2")
        assert r.code == 0 and "note: shm: /dev/shm has 64.0 MiB free of 64.0 MiB" in r.err and "--shm-size" in r.err, r
        p.furlong("train", "--num-rollout=2", "--rollout-batch-size=4", check=0)  # ours need none of it
        r = small.furlong("doctor", "--json")
        assert [(x["state"], x["remedy"] != "") for x in r.json() if x["check"] == "shm"] == [("warn", True)], r
        p.furlong("stop", check=0)


def p39_the_cores_that_may_be_used():
    cores = sorted(os.sched_getaffinity(0))
    with place() as p:
        under(p, "taskset", "-c", str(cores[0])).start_head("--num-gpus=0")
        assert p.furlong("list", "nodes", "--json").json()[0]["resources"]["CPU"]["total"] == 1
        p.furlong("stop", check=0)


def test_who_has_the_port():
    with hosts(1) as (p,):
        p.furlong("start", "--head", "--num-gpus=0", check=0)
        found = [x for x in p.furlong("doctor", "--json", "--no-devices").json() if x["check"] == "ports"]
        pid = p.info("h")[0]["pid"]
        assert [x["state"] for x in found] == ["warn", "warn"] and all(f"pid {pid} (furlong-head)" in x["text"] for x in found), found
        r = p.furlong("start", "--head", "--num-gpus=0", env={"FURLONG_RUNTIME_DIR": f"{p.root}/r2", "FURLONG_STATE_DIR": f"{p.root}/s2"})
        assert r.code == 1 and "8265" in r.err and "in use" in r.err, r
        p.furlong("stop", check=0)


def test_the_hosts_name_does_not_count():
    """The name leads to 127.0.1.1, as on Debian: the address is the source of the way to the head."""
    if os.geteuid() != 0:
        raise harness.Skip("a mount namespace needs root")
    with hosts(2) as (head, other):
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--node-name=n1", check=0)
        with open(f"{other.root}-hosts", "w", encoding="ascii") as f:
            f.write(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n")
        odd = under(other, "ip", "netns", "exec", other.netns, "unshare", "-m", "--propagation", "private", "sh", "-c",
                    f'mount --bind {other.root}-hosts /etc/hosts && exec "$0" "$@"')
        odd.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=0", "--node-name=n2", check=0)
        assert other.info("n")[0]["address"] == "10.77.0.2"
        log = open(f"{other.root}/s/logs/furlong-node.log", encoding="utf-8").read()
        assert "own address=10.77.0.2 interface=eth0: the source of the way to the head" in log, log
        r = other.furlong("start", "--address=10.77.0.1:6379", "--node-ip-address=10.99.0.1", f"--state-dir={other.root}/s9", "--node-name=n9")
        assert r.code != 0 and "no interface of this host has it" in r.err, r
        r = other.furlong("doctor", "--address=10.77.0.1:6379", "--json", "--no-devices")
        found = {x["check"]: x for x in r.json()}
        assert found["address"]["state"] == "ok" and found["address"]["text"].startswith("10.77.0.2 on eth0"), found
        assert found["head"]["state"] == "ok", found
        subprocess.run(["ip", "-n", head.netns, "link", "set", "eth0", "down"], check=True)
        r = other.furlong("doctor", "--address=10.77.0.1:6379", "--json", "--no-devices")
        assert r.code == 1 and [x["state"] for x in r.json() if x["check"] == "head"] == ["fail"], r


def test_two_installs():
    with place() as p:
        os.makedirs(f"{p.root}/other")
        shutil.copy(f"{BIN}/furlong", f"{p.root}/other/furlong")
        r = p.furlong("doctor", "--json", "--no-devices", env={"PATH": f"{p.root}/other:{p.env['PATH']}"})
        found = [x for x in r.json() if x["check"] == "programs"]
        assert len(found) == 1 and f"{p.root}/other/furlong" in found[0]["text"] and os.path.realpath(BIN) in found[0]["text"], found


if __name__ == "__main__":
    harness.main(dict(globals()))
