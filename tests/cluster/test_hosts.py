"""Three hosts with addresses of their own: one command per role, a split run over them, and a host that goes away."""
import contextlib
import json
import os
import subprocess

import harness
from harness import hosts, wait_for
from runs import SMALL, Run


@contextlib.contextmanager
def cluster(gpus):
    """A head on the first host; one worker daemon on each, with gpus[i] devices."""
    with hosts(len(gpus)) as places:
        head, *others = places
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", f"--num-gpus={gpus[0]}", "--node-name=n1", check=0)
        for i, p in enumerate(others, 2):
            p.furlong("start", "--address=10.77.0.1:6379", f"--num-gpus={gpus[i - 1]}", f"--node-name=n{i}", "--wait=30", check=0)
        yield places


def test_split_run_over_three_hosts():
    with cluster([2, 2, 2]) as places:
        run = Run(places[0], *SMALL, "--actor-num-nodes=2", "--actor-num-gpus-per-node=2", "--rollout-num-gpus=2",
                  "--num-gpus-per-node=2")
        r = run.go()
        with open(f"{run.dir}/run.json", encoding="utf-8") as f:
            roles = json.load(f)["placement"]["roles"]
        where = [(role, x["rank"], x["address"], x["devices"]) for role in ("trainer", "rollout") for x in roles[role]]
        assert where == [("trainer", 0, "10.77.0.1", ["0"]), ("trainer", 1, "10.77.0.1", ["1"]),
                         ("trainer", 2, "10.77.0.2", ["0"]), ("trainer", 3, "10.77.0.2", ["1"]),
                         ("rollout", 0, "10.77.0.3", ["0"]), ("rollout", 1, "10.77.0.3", ["1"])], where
        for address in ("10.77.0.1", "10.77.0.2", "10.77.0.3"):
            assert address in r.out, r
        assert len(run.steps()) == 3
        for p in reversed(places):
            p.furlong("stop", check=0)
        assert [x for p in places for x in p.left_behind()] == []


def test_a_token_is_asked_for_beyond_loopback():
    with cluster([1, 1]) as (head, other):
        with open(f"{other.root}/wrong", "w", encoding="ascii") as f:
            f.write("0" * 64)
        r = other.furlong("status", "--address=http://10.77.0.1:8265", env={"FURLONG_TOKEN_PATH": f"{other.root}/wrong"})
        assert r.code == 1 and "token" in r.err, r
        other.furlong("status", "--address=http://10.77.0.1:8265", check=0)
        r = other.furlong("start", "--address=10.77.0.1:6379", "--node-name=n9", f"--state-dir={other.root}/s9", "--wait=5",
                          env={"FURLONG_TOKEN_PATH": f"{other.root}/wrong", "FURLONG_RUNTIME_DIR": f"{other.root}/r9"})
        assert r.code == 1 and "token" in r.err, r
        head.furlong("stop")


def test_a_lost_host_is_fenced_once_and_ends_its_work_when_it_is_back():
    with hosts(2) as (head, other):
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--node-name=n1", check=0,
                     env={"FURLONG_NODE_SILENT_MS": "1500"})
        other.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=1", "--node-name=n2", "--wait=30", check=0)
        sub = head.spawn("furlong", "job", "submit", "--entrypoint-num-gpus=1", "--", "sh", "-c", f"echo $$ > {other.root}/pid; sleep 1000")
        pid = int(wait_for("the job on n2", lambda: open(f"{other.root}/pid").read().strip() if os.path.exists(f"{other.root}/pid") else None))
        cut = lambda how: subprocess.run(["ip", "-n", other.netns, "link", "set", "eth0", how], check=True)
        state = lambda: {n["name"]: n["state"] for n in head.furlong("list", "nodes", "--json").json()}
        cut("down")
        wait_for("n2 lost", lambda: state().get("n2") == "LOST", 30)
        out, err = sub.communicate(timeout=30 * harness.SLOW)
        assert sub.returncode != 0 and "n2" in err, (sub.returncode, out, err)
        assert harness.alive(pid), "nothing told it yet"
        cut("up")
        subprocess.run(["ip", "-n", other.netns, "route", "add", "default", "dev", "eth0"], capture_output=True)
        wait_for("the fenced work's end", lambda: not harness.alive(pid), 30)
        wait_for("n2 back", lambda: state().get("n2") == "READY", 30)


def second_interface(place, address):
    """One more network card, on a wire that leads to no other host."""
    hub = place.netns.rsplit("n", 1)[0] + "b"
    for words in (["link", "add", "other0", "type", "veth", "peer", "name", "nowhere0", "netns", hub],
                  ["addr", "add", f"{address}/24", "dev", "other0"], ["link", "set", "other0", "up"]):
        subprocess.run(["ip", "-n", place.netns, *words], check=True, capture_output=True)
    subprocess.run(["ip", "-n", hub, "link", "set", "nowhere0", "up"], check=True, capture_output=True)


def listening(place):
    out = subprocess.run(["ip", "netns", "exec", place.netns, "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rsplit(":", 1)[0] for line in out.splitlines()}


def p42_a_node_is_dialled_back_at_the_address_it_gives():
    with hosts(2) as (head, other):
        second_interface(other, "10.88.0.2")
        subprocess.run(["ip", "-n", head.netns, "route", "add", "unreachable", "10.88.0.0/24"], check=True)
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--node-name=n1", check=0)
        r = other.furlong("start", "--address=10.77.0.1:6379", "--node-name=n2", "--node-ip-address=10.88.0.2", "--wait=20")
        assert r.code == 2, r
        for part in ("node n2 gives the address 10.88.0.2", "the head at 10.77.0.1 does not reach it", "--node-ip-address", "it came from 10.77.0.2"):
            assert part in r.err, (part, r)
        assert listening(other) == set(), listening(other)
        assert [n["name"] for n in head.furlong("list", "nodes", "--json").json()] == ["n1"]


def p42_p43_the_address_of_the_way_to_the_head_goes_to_every_channel():
    with hosts(2) as (head, other):
        second_interface(other, "10.88.0.2")
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=2", "--node-name=n1", check=0)
        other.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=2", "--node-name=n2", "--wait=30", check=0)
        assert {n["name"]: n["address"] for n in head.furlong("list", "nodes", "--json").json()} == {"n1": "10.77.0.1", "n2": "10.77.0.2"}
        r = head.furlong("job", "submit", "--entrypoint-num-gpus=2", "--", "sh", "-c", "hostname >/dev/null; env", check=0)
        where = dict(line.split("=", 1) for line in r.out.splitlines() if "=" in line)
        own = where["FURLONG_NODE_IP"]
        assert own in ("10.77.0.1", "10.77.0.2"), where
        assert where["NCCL_SOCKET_IFNAME"] == "=eth0" and where["GLOO_SOCKET_IFNAME"] == "eth0", where
        assert [where[k] for k in ("MILES_HOST_IP", "SGLANG_HOST_IP", "VLLM_HOST_IP")] == [own] * 3, where
        run = Run(head, *SMALL, "--num-rollout=200", "--actor-num-nodes=1", "--actor-num-gpus-per-node=2", "--rollout-num-gpus=2", "--num-gpus-per-node=2")
        p = run.start()
        run.wait_step(1)
        # Our own sockets: each listens at the node's address and nowhere else.
        assert listening(other) == {"10.77.0.2"}, listening(other)
        assert listening(head) <= {"10.77.0.1", "[::ffff:10.77.0.1]"}, listening(head)
        p.terminate()
        p.communicate(timeout=60 * harness.SLOW)


if __name__ == "__main__":
    harness.main(dict(globals()))
