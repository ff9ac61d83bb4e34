"""A head that comes back elsewhere, a way that is open on one side alone, and versions that differ."""
import os
import shutil
import subprocess

import harness
from harness import BIN, alive, hosts, place, wait_for
from seats import Seats


def under(p, *words):
    """The place with words before each of its commands, inside its network namespace."""
    q = harness.Place(p.root, p.netns)
    q.env, q.children = p.env, p.children
    q.argv = lambda args: ["ip", "netns", "exec", p.netns, *words, f"{BIN}/{args[0]}", *map(str, args[1:])]
    return q


def state(head, name):
    r = head.furlong("list", "nodes", "--json")
    return {n["name"]: n["state"] for n in r.json()}.get(name) if r.code == 0 else None


def p102_the_head_comes_back_at_another_address():
    """By name: the daemon looks the name up anew, joins again, and what ran goes on, once."""
    if os.geteuid() != 0:
        raise harness.Skip("a mount namespace needs root")
    with hosts(3) as (one, other, two):
        names = f"{other.root}/hosts"

        def head_is(address):
            with open(names, "w", encoding="ascii") as f:
                f.write(f"127.0.0.1 localhost\n{address} head.test\n")

        def start(p, address):
            env = {"FURLONG_STATE_DIR": f"{one.root}/s"}
            made = p.spawn("furlong-head", f"--node-ip-address={address}", env=env, stdout=subprocess.DEVNULL, stderr=open(f"{p.root}/head.err", "w", encoding="utf-8"))
            wait_for("the head", lambda: p.info("h"), 30)
            p.env["FURLONG_STATE_DIR"] = f"{one.root}/s"
            return made

        first = start(one, "10.77.0.1")
        head_is("10.77.0.1")
        inside = under(other, "unshare", "-m", "--propagation", "private", "sh", "-c", f'mount --bind {names} /etc/hosts && exec "$0" "$@"')
        inside.furlong("start", "--address=head.test:6379", "--node-name=n2", "--num-gpus=1", check=0)
        fifo = f"{other.root}/fifo"
        os.mkfifo(fifo)
        one.furlong("job", "submit", "--no-wait", "--submission-id=stays", "--", "sh", "-c", f"echo $$ > {other.root}/pid; read x < {fifo}; echo over", check=0)
        pid = int(wait_for("the job", lambda: os.path.exists(f"{other.root}/pid") and open(f"{other.root}/pid", encoding="ascii").read().strip()))
        first.kill()
        first.wait()
        start(two, "10.77.0.3")
        head_is("10.77.0.3")  # as a cluster's name service would say; written in place, as a mount sees it
        wait_for("n2 at the new head", lambda: state(two, "n2") == "READY", 30)
        workers = two.furlong("list", "workers", "--json").json()
        assert alive(pid) and [(w["role"], w["attempt"]) for w in workers] == [("driver", 1)], workers
        with open(fifo, "w", encoding="ascii") as f:
            f.write("go\n")
        r = two.furlong("job", "logs", "--follow", "stays")
        assert r.code == 0 and r.out.count("over") == 1, r


def p103_a_way_that_is_open_on_one_side():
    """What a node says does not arrive any more: both sides come to the same end in time. What the head says still arrives, or
    nothing does: then the node's own clock (--orphan-timeout) is what ends its work, or the word that it hears on its return."""
    if not shutil.which("iptables"):
        raise harness.Skip("no iptables here")
    silent = 2
    for cut, own_clock in (("node to head", False), ("both ways", False), ("both ways", True)):
        with harness.saying(f"{cut}, {'with --orphan-timeout' if own_clock else 'by default'}"), hosts(2) as (head, other):
            head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--node-name=n1", env={"FURLONG_NODE_SILENT_MS": f"{silent}000"}, check=0)
            other.spawn("furlong-node", "--address=10.77.0.1:6379", "--node-name=n2", "--num-gpus=1", f"--orphan-timeout={silent if own_clock else 0}",
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for("n2", lambda: state(head, "n2") == "READY", 30)
            head.spawn("furlong", "job", "submit", "--entrypoint-num-gpus=1", "--", "sh", "-c", f"echo $$ > {other.root}/pid; sleep 1000")
            pid = int(wait_for("the job on n2", lambda: os.path.exists(f"{other.root}/pid") and open(f"{other.root}/pid", encoding="ascii").read().strip()))

            def way(what, sides=(("OUTPUT", "-d"), ("INPUT", "-s"))[:1 if cut == "node to head" else 2]):
                for chain, whom in sides:
                    subprocess.run(["ip", "netns", "exec", other.netns, "iptables", what, chain, whom, "10.77.0.1", "-j", "DROP"], check=True, capture_output=True)
            way("-A")
            wait_for("the head's verdict", lambda: state(head, "n2") == "LOST", 30)
            if cut == "both ways" and not own_clock:
                wait_for("the node's word", lambda: other.info("n") and not other.info("n")[0]["joined"], 60)
                assert alive(pid), "nobody told it"
                way("-D")
            wait_for("the end of its work", lambda: not alive(pid), 30)
            if own_clock:
                continue
            if cut == "node to head":
                assert state(head, "n2") == "LOST", "the way is still shut: it heard so by the other one"
                way("-D")
            wait_for("n2 back", lambda: state(head, "n2") == "READY", 60)
            r = head.furlong("job", "submit", "--working-dir=/", "--entrypoint-num-gpus=1", "--", "echo $FURLONG_NODE", check=0)
            assert r.out == "n2\n", r


def other_release(p):
    """The programs as of another release: all that differs is the word for it."""
    d = f"{p.root}/other"
    os.makedirs(d)
    own = subprocess.run([f"{BIN}/furlong", "--version"], capture_output=True, text=True).stdout.split()[-1]
    other = own[:-1] + ("9" if own[-1] != "9" else "8")
    for name in os.listdir(BIN):
        if name.startswith("furlong") and os.path.isfile(f"{BIN}/{name}"):
            with open(f"{BIN}/{name}", "rb") as f:
                code = f.read()
            with open(f"{d}/{name}", "wb") as f:
                f.write(code.replace(own.encode() + b"\0", other.encode() + b"\0"))
            os.chmod(f"{d}/{name}", 0o755)
    return d, own, other


def p108_another_release_of_the_same_protocol():
    with place() as p:
        d, own, other = other_release(p)
        p.start_head("--num-gpus=0")
        address = p.info("h")[0]["address"]
        r = p.furlong("start", f"--address={address}", "--node-name=n2", "--num-gpus=1", f"--state-dir={p.root}/n2",
                      env={"FURLONG_BIN_DIR": d})
        note = f"note: versions: the head at {address} is of release {own} and this daemon of {other}; both speak protocol 1, so it joins"
        assert r.code == 0 and note in r.err, r
        assert {n["name"]: n["state"] for n in p.furlong("list", "nodes", "--json").json()}["n2"] == "READY"
        assert p.furlong("job", "submit", "--entrypoint-num-gpus=1", "--", "echo", "ran", check=0).out.count("ran") == 1


def p108_another_protocol():
    """A whole daemon of the next protocol: refused with both versions and its name, where it was started and where the head writes."""
    with place() as p:
        d = f"{p.root}/next"
        os.makedirs(d)
        for name in os.listdir(BIN):
            if name.startswith("furlong") and os.path.isfile(f"{BIN}/{name}"):
                os.symlink(f"{BIN}/{name}" if name != "furlong-node" else os.environ["FURLONG_NODE_NEXT"], f"{d}/{name}")
        p.start_head("--num-gpus=0", "--node-name=n1")
        own = subprocess.run([f"{BIN}/furlong", "--version"], capture_output=True, text=True).stdout.split()[-1]
        r = p.furlong("start", f"--address={p.info('h')[0]['address']}", "--node-name=n2", "--num-gpus=1", f"--state-dir={p.root}/n2", env={"FURLONG_BIN_DIR": d})
        both = f"the peer (node {own}) speaks version 2.0 of the protocol and this side ({own}) 1.0: use the same release on both"
        assert r.code == 1 and r.err.count("\n") == 1 and "node n2 cannot join: " in r.err and both in r.err, r
        with open(f"{p.root}/s/logs/furlong-head.log", encoding="utf-8") as f:
            assert f.read().count(both) == 1
        assert [n["name"] for n in p.furlong("list", "nodes", "--json").json()] == ["n1"] and len(p.info("n")) == 1


def p109_two_installs():
    """A client of another release says so, with both places, and does what it was asked; doctor names the other one on PATH."""
    with place() as p:
        d, own, other = other_release(p)
        p.start_head("--num-gpus=0")
        q = harness.Place(p.root)
        q.env, q.children = p.env, p.children
        q.argv = lambda args: [f"{d}/{args[0]}", *args[1:]]
        r = q.furlong("status", "--json")
        wanted = f"furlong: note: this is release {other} ({d}/furlong), the head at "
        assert r.code == 0 and r.json()["state"] == "READY" and r.err.startswith(wanted) and f"is {own} ({os.path.realpath(BIN)}/furlong-head)" in r.err, r
        assert "note" not in p.furlong("status", check=0).err
        found = [x for x in p.furlong("doctor", "--json", "--no-devices", env={"PATH": f"{d}:{p.env['PATH']}"}).json() if x["check"] == "programs"]
        assert len(found) == 1 and f"{d}/furlong" in found[0]["text"] and os.path.realpath(BIN) in found[0]["text"], found


def p123_a_variable_that_the_engine_renamed():
    """What each process was given is on record, to the letter. (Where an engine can be asked: tests/sglang, p123.)"""
    with place() as p:
        p.start_head("--num-gpus=2")
        s = Seats(p, "--actor-num-nodes=1", "--actor-num-gpus-per-node=1", "--rollout-num-gpus=1",
                  submit=['--runtime-env-json={"env_vars": {"SGLANG_ENABLE_OLD_NAME": "0", "EMPTY": ""}}'])
        s.up()
        record = p.http("/api/furlong/jobs/seats/env")
        seen = {(x["role"], x["rank"]): x["env"] for x in record["workers"]}
        for who in (("trainer", 0), ("rollout", 0)):
            assert seen[who]["SGLANG_ENABLE_OLD_NAME"] == "0" and seen[who]["EMPTY"] == "", seen[who]
            assert seen[who]["CUDA_VISIBLE_DEVICES"] == str(who[0] == "rollout" and 1 or 0), seen[who]
        s.end()


if __name__ == "__main__":
    harness.main(dict(globals()))
