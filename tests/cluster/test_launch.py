"""Runs on several hosts by one command: who is waited for, who is missing, over ssh, and what a failure leaves."""
import contextlib
import os
import shutil
import tempfile
import time

import harness
from harness import hosts, wait_for
from runs import SMALL
from sshd import sshd

TRAIN = ["train", *SMALL, "--actor-num-nodes=2", "--actor-num-gpus-per-node=1", "--rollout-num-gpus=2", "--num-gpus-per-node=1"]
HEAD = {"MASTER_ADDR": "10.77.0.1", "no_proxy": "", "http_proxy": "http://10.77.0.99:1", "https_proxy": "http://10.77.0.99:1"}


@contextlib.contextmanager
def ssh_hosts(n):
    with hosts(n) as places:
        root = tempfile.mkdtemp(prefix="fl-ssh-", dir="/tmp")
        os.chmod(root, 0o755)
        for i, p in enumerate(places, 1):  # ssh brings a token of its own
            p.env["FURLONG_TOKEN_PATH"] = f"{p.root}/token"
        try:
            with sshd(places, root) as words:
                yield places, root, {**HEAD, "FURLONG_SSH": words}
        finally:
            shutil.rmtree(root, ignore_errors=True)


def write(path, text):
    with open(path, "w", encoding="ascii") as f:
        f.write(text)
    return path


def nothing_left(places):
    wait_for("no process left", lambda: not [x for p in places for x in p.processes() if "sshd" not in x[1] and "ssh:" not in x[1]], 30)


def p34_one_command_per_role():
    """4 nodes are declared; the last comes late; the run waits, says so, and starts when it is there."""
    with hosts(4) as (head, *others):
        join = lambda i, p: p.spawn("furlong", "start", "--address=10.77.0.1:6379", "--block", "--wait=300", f"--node-name=n{i}", "--num-gpus=1")
        early = [join(i, p) for i, p in enumerate(others[:2], 2)]  # before there is a head
        run = head.spawn("furlong", *TRAIN, "--nodes=n[2-4]", "--node-gpus=1", env=HEAD, stderr=open(f"{head.root}/err", "w", encoding="utf-8"))
        said = lambda: open(f"{head.root}/err", encoding="utf-8").read()
        wait_for("who is missing", lambda: "2/3 nodes, missing n4" in said(), 60)
        late = join(4, others[2])
        out, _ = run.communicate(timeout=120 * harness.SLOW)
        assert run.returncode == 0, (out, said())
        assert "3/3 nodes" in said(), said()
        for p in [*early, late]:  # the cluster was the run's: each role's command ends with it
            out, err = p.communicate(timeout=30)
            assert p.returncode == 0 and "the cluster has ended" in err, (p.returncode, out, err)
        nothing_left([head, *others])


def p34_who_never_joins_is_named():
    with hosts(3) as (head, other, _):
        p = other.spawn("furlong", "start", "--address=10.77.0.1:6379", "--wait=300", "--node-name=n2", "--num-gpus=1")
        r = head.furlong(*TRAIN, "--nodes=n2,n3", "--node-gpus=1", "--join-timeout=6", env=HEAD)
        assert r.code == 1 and "1/2 nodes, missing n3" in r.err.splitlines()[-1], r
        p.communicate(timeout=60)
        assert not head.processes(), head.processes()
        r = head.furlong(*TRAIN, "--num-nodes=3", "--node-gpus=1", "--join-timeout=3", env=HEAD)
        assert r.code == 1 and "/3 nodes" in r.err.splitlines()[-1], r
        r = head.furlong(*TRAIN, "--num-nodes=3")
        assert r.code == 2 and "--head-ip or MASTER_ADDR" in r.err, r


def test_over_ssh():
    with ssh_hosts(4) as (places, root, env):
        head = places[0]
        file = write(f"{root}/hostfile", "# rack 7\nn2 slots=1\n\nroot@n3 max_slots=2  # second\n10.77.0.4:1\n10.77.0.1\n")
        r = head.furlong(*TRAIN, f"--hostfile={file}", "--node-gpus=1", env=env, seconds=120)
        assert r.code == 0, r
        assert "starting worker daemons on 3 hosts" in r.err, r
        nothing_left(places)
        # Slurm's way to write it; the cluster stays, is found by the second launch, and is ended by hand
        r = head.furlong(*TRAIN, "--hosts=n[2-3],n4", "--node-gpus=1", "--keep-cluster", env=env, seconds=120)
        assert r.code == 0, r
        r = head.furlong(*TRAIN, "--hosts=n[2-3],n4", env=env, seconds=120)
        assert r.code == 0, r
        assert len(head.furlong("list", "nodes", "--json").json()) == 4
        head.furlong("stop", "--cluster", check=0)
        nothing_left(places)


def p119_a_host_that_fails_is_named_and_nothing_is_left():
    with ssh_hosts(3) as (places, root, env):
        broken = write(f"{root}/broken-shell", "#!/bin/sh\necho this shell is broken >&2\nexit 9\n")
        os.chmod(broken, 0o755)
        for name, line, wanted in (
                ("unknown host", "nowhere.invalid", "nowhere.invalid: "),
                ("nobody answers", "10.77.0.77", "10.77.0.77: "),
                ("broken login shell", "n3", "n3: this shell is broken (exit code 9)")):
            began = time.monotonic()
            file = write(f"{root}/hosts", f"n2\n\n# a comment\n{line}\n")
            if line == "n3":
                key = open(f"{root}/user.pub", encoding="ascii").read()
                write(f"{root}/authorized3", f'command="{broken}" {key}')
            r = places[0].furlong(*TRAIN, f"--hostfile={file}", "--node-gpus=1", env=env, seconds=60)
            assert r.code == 1 and wanted in r.err.splitlines()[-1], f"{name}: {r}"
            assert time.monotonic() - began < 30 * harness.SLOW, (name, time.monotonic() - began)
            nothing_left(places)
        for text, wanted in (("", "names no host"), ("n[1-\n", "line 1"), ("n2\n-oProxyCommand=x\n", "line 2: '-oProxyCommand=x' is no host name")):
            r = places[0].furlong(*TRAIN, f"--hostfile={write(f'{root}/hosts', text)}", env=env)
            assert r.code == 2 and wanted in r.err, r
            assert not places[0].processes()


def test_a_fan_out_over_an_external_cluster_is_refused():
    with hosts(1) as (head,):
        r = head.furlong(*TRAIN, "--hosts=n2,n3", env={**HEAD, "MILES_SCRIPT_EXTERNAL_RAY": "1"})
        assert r.code == 2 and "--no-join-ray-workers" in r.err, r
        assert not head.processes()


def test_master_addr_is_the_heads():
    with hosts(2) as (head, other):
        head.furlong("start", "--head", "--num-gpus=1", env=HEAD, check=0)
        assert head.info("h")[0]["address"] == "10.77.0.1:6379"
        other.furlong("start", "--num-gpus=1", "--node-name=n2", env=HEAD, check=0)
        assert other.info("n")[0]["address"] == "10.77.0.2", other.info("n")
        r = other.furlong("train", *SMALL, "--num-nodes=2", env={**HEAD, "FURLONG_RUNTIME_DIR": f"{other.root}/x"})
        assert r.code == 2 and "MASTER_ADDR" in r.err and "not an address of this machine" in r.err, r
        for p in (other, head):
            p.furlong("stop", check=0)


if __name__ == "__main__":
    harness.main(dict(globals()))
