"""Placements without training: tests/cluster/seats.c under a daemon whose devices are the fake's."""
import json
import os

import harness
from harness import wait_for

SEATS = os.environ["FURLONG_SEATS"]
MIB = 1 << 20


def uuid(i):
    """Of the fake's device i (common/gpu/fake.c)."""
    h = (b"furlong fake ".ljust(15, b"\0") + bytes([i])).hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def fakes(p, n, visible=None, **env):
    """What a daemon of p needs in its environment to have n devices."""
    os.makedirs(f"{p.root}/held", exist_ok=True)
    env = {"FURLONG_GPU": f"fake:{n}", "FURLONG_GPU_FAKE_DIR": f"{p.root}/held", **env}
    return env if visible is None else {**env, "CUDA_VISIBLE_DEVICES": visible}


class Seats:
    """A job that places by flags, launches the roles, and stays until end()."""

    def __init__(self, p, *flags, launch=("trainer", "rollout"), name="seats", submit=()):
        self.place, self.fifo, self.out = p, f"{p.root}/{name}.fifo", f"{p.root}/{name}.out"
        os.mkfifo(self.fifo)
        words = [SEATS, "drive", f"--until={self.fifo}", *(f"--launch={r}" for r in launch), *flags]
        self.job = p.spawn("furlong", "job", "submit", f"--submission-id={name}", *submit, "--", *words,
                           stdout=open(self.out, "w", encoding="utf-8"), stderr=open(self.out + ".err", "w", encoding="utf-8"))

    def said(self):
        with open(self.out, encoding="utf-8") as f, open(self.out + ".err", encoding="utf-8") as e:
            return f.read() + e.read()

    def up(self):
        """All members have joined: what each of them saw, by role and rank."""
        wait_for("the members", lambda: "\nup\n" in self.said() or self.job.poll() is not None, 60)
        assert self.job.poll() is None, self.said()
        members = [json.loads(line) for line in self.said().splitlines() if line.startswith("{")]
        return {(m["role"], m["rank"]): m for m in members}

    def layout(self):
        """[(role, rank, node, address, [devices])] as it was printed before anything was launched."""
        rows = [line.split() for line in self.said().split("\n{")[0].splitlines() if " of " in line and " devices " in line]
        return [(r[0], int(r[1]), r[4], r[5], r[7].split(",")) for r in rows]

    def end(self):
        with open(self.fifo, "w", encoding="utf-8"):
            pass
        self.job.communicate(timeout=30 * harness.SLOW)
        assert self.job.returncode == 0, self.said()


def refused(p, *flags):
    """The driver's exit code and words."""
    r = p.furlong("job", "submit", "--", SEATS, "drive", *flags)
    return r.code, r.out + r.err


def devices(p):
    return p.furlong("list", "devices", "--json", check=0).json()
