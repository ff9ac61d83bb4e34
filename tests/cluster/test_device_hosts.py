"""Placement over hosts with addresses of their own: which rank is where, whatever the order they came in; and many engines."""
import subprocess

import harness
from harness import hosts, place, wait_for
from seats import SEATS, Seats, fakes

PLACE = "--actor-num-nodes=3", "--actor-num-gpus-per-node=2", "--num-gpus-per-node=2"


def p31_ranks_lie_the_same_every_time():
    """10.77.0.2 before 10.77.0.10, each node's ranks together, for every order of joining and in every launch."""
    with hosts(4) as (head, *others):
        addresses = ["10.77.0.2", "10.77.0.3", "10.77.0.10"]
        subprocess.run(["ip", "-n", others[2].netns, "addr", "add", "10.77.0.10/24", "dev", "eth0"], check=True)
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--node-name=head", check=0)
        wanted = [("trainer", r, f"n{2 + r // 2}", addresses[r // 2], [str(r % 2)]) for r in range(6)]
        for k, order in enumerate(([2, 0, 1], [1, 2, 0])):
            for i in order:
                others[i].furlong("start", "--address=10.77.0.1:6379", "--num-gpus=2", f"--node-name=n{i + 2}", f"--node-ip-address={addresses[i]}", check=0)
            for n in range(5):
                s = Seats(head, *PLACE, "--debug-train-only=true", launch=(), name=f"s{k}{n}")
                wait_for("its layout", lambda s=s: "up" in s.said())
                assert s.layout() == wanted, s.said()
                s.end()
            for p in others:
                p.furlong("stop", check=0)


def p36_a_head_without_devices():
    with hosts(3) as (head, *others):
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--node-name=head", check=0)
        for i, p in enumerate(others, 2):
            p.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=2", f"--node-name=n{i}", check=0)
        s = Seats(head, "--colocate=true", launch=("trainer",))
        m = s.up()
        assert "derived: --actor-num-nodes 2 (nodes that have GPUs)" in s.said(), s.said()
        assert {x["env"]["MASTER_ADDR"] for x in m.values()} == {"10.77.0.2"} and m["trainer", 0]["address"] == "10.77.0.2", m
        s.end()
        r = head.furlong("job", "submit", "--", SEATS, "drive", *PLACE, "--debug-train-only=true")
        assert r.code == 2 and "can never fit: 6 GPU asked, 3 nodes together have 4 (n2 2, n3 2)" in r.out, r


if __name__ == "__main__":
    harness.main(dict(globals()))
