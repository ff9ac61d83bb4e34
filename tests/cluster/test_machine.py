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
        assert "open files raised from=256 to=4096" in open(f"{p.root}/s/logs/furlong-node.log", encoding="utf-8").read()
        os.mkfifo(f"{p.root}/until")
        for i in range(64):
            p.http("/api/jobs/", {"entrypoint": f"ulimit -Sn; ulimit -Hn; read x < {p.root}/until; true", "submission_id": f"w{i}"})
        logs = [f"/api/furlong/jobs/w{i}/log" for i in range(64)]
        wait_for("64 workers at once", lambda: all(p.http(x, raw=True) == b"4096\n4096\n" for x in logs), 60)  # what the daemon raised is its workers' too
        assert len(os.listdir(f"/proc/{pid}/fd")) > 256, "they would have done with what the shell gives"
        os.close(os.open(f"{p.root}/until", os.O_WRONLY))
        wait_for("their end", lambda: {j["status"] for j in p.http("/api/jobs/")} == {"SUCCEEDED"}, 60)
        p.furlong("stop", check=0)


def p106_p107_little_shared_memory():
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise harness.Skip("a mount namespace needs root and unshare")
    with place() as p:
        small = under(p, "unshare", "-m", "--propagation", "private", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$0" "$@"')
        r = small.furlong("start", "--head", "--port=0", "--dashboard-port=0", "--num-gpus=2")
        assert r.code == 0 and "note: shm: /dev/shm has 64.0 MiB free of 64.0 MiB" in r.err and "--shm-size" in r.err, r
        p.furlong("train", "--num-rollout=2", "--rollout-batch-size=4", check=0)  # ours need none of it
        with open(f"/proc/{p.info('n')[0]['pid']}/mountinfo", encoding="ascii") as f:
            assert " /dev/shm " in f.read()
        used = os.statvfs(os.path.join("/proc", str(p.info("n")[0]["pid"]), "root", "dev", "shm"))
        assert used.f_blocks == used.f_bfree, "and nothing of it is set aside"
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
        assert [x["state"] for x in found] == ["warn", "warn"] and all(f"pid {pid} (furlong-head " in x["text"] for x in found), found
        r = p.furlong("start", "--head", "--num-gpus=0", env={"FURLONG_RUNTIME_DIR": f"{p.root}/r2", "FURLONG_STATE_DIR": f"{p.root}/s2"})
        assert r.code == 1 and "8265" in r.err and "in use by pid" in r.err, r
        p.furlong("stop", check=0)


if __name__ == "__main__":
    harness.main(dict(globals()))
