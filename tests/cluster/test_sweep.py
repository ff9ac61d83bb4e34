"""Whoever is killed, in whichever phase of a step, in every mode: the run ends as if nothing had been.

A process of the run stops itself in the phase (a fault point). It is the barrier: while it stands there the target is
killed, then it goes on. Each cell of the table is a cluster of its own; modes go round over the cells, so that every
target and every phase meets each mode."""
import contextlib
import functools
import os
import signal

import harness
from harness import place, wait_for
from runs import Run

FLAGS = ["--num-rollout=4", "--rollout-batch-size=4", "--n-samples-per-prompt=2", "--seed=7", "--save-interval=1",
         "--eval-interval=0"]
COLOCATE, ASYNC = "--colocate", "--async"
MODES = {
    "broadcast": ["--update-weight-transfer-mode=broadcast"],
    "p2p": ["--update-weight-transfer-mode=p2p"],
    "disk-delta": ["--update-weight-transfer-mode=disk-delta"],
    "share": [COLOCATE, "--colocate-transfer=share"],
    "copy": [COLOCATE, "--colocate-transfer=copy"],
    "one slot": ["--update-weight-slots=1"],
    "async": [ASYNC],
}
PHASES = {  # the place where a process stands, and which of its visits
    "generate": "engine.step:3",
    "train": "trainer.train:2",
    "begin": "trainer.begin:2",
    "write": "trainer.write:2",
    "publish": "trainer.publish:3",
    "give": "xfer.give:3",
    "verified": "xfer.verified:3",
    "commit": "engine.commit:3",
    "save": "ckpt.write:2",
}
ROLES = {"driver": "furlong-driver", "trainer": "furlong-trainer", "engine": "furlong-rollout"}
TARGETS = [*ROLES, *(f"keeper of the {r}" for r in ROLES), "daemon", "head", "client"]


@functools.cache
def undisturbed():
    with place() as p:
        run = Run(p, *FLAGS)
        run.go()
        return run.digests()


def state_of(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
        return f.read().rsplit(")", 1)[1].split()
    return ["X", 0]


class Cell:
    def __init__(self, p, phase, target, mode):
        self.p, self.phase, self.target, self.mode = p, phase, target, mode
        self.dir = f"{p.root}/faults"
        os.makedirs(self.dir)
        self.head = p.start_head("--num-gpus=2", env={"FURLONG_FAULT": PHASES[phase] + "=stop", "FURLONG_FAULT_DIR": self.dir})
        self.run = Run(p, *FLAGS, *MODES[mode])
        self.client = p.spawn(*self.run.argv(), stdout=open(f"{p.root}/out", "w"), stderr=open(f"{p.root}/err", "w"))

    def said(self):
        return "".join(open(f"{self.p.root}/{x}", encoding="utf-8", errors="replace").read() for x in ("out", "err"))

    def barrier(self):
        """The process that stands in the phase; None: this mode has no such place."""
        def look():
            for name in os.listdir(self.dir):
                with open(f"{self.dir}/{name}", encoding="ascii") as f:
                    pid = int(f.read().split("\n")[0] or 0)  # empty: it is being written
                if pid and state_of(pid)[0] == "T":
                    return pid
            return -1 if self.client.poll() is not None else None

        pid = wait_for("the phase, or the end of the run", look, 40)
        return pid if pid > 0 else None

    def pid(self):
        if self.target == "client":
            return self.client.pid
        if self.target in ("daemon", "head"):
            return self.p.info("n" if self.target == "daemon" else "h")[0]["pid"]
        role = self.target.rsplit(" ", 1)[-1]
        pid = [pid for pid, cmd in self.p.processes() if cmd.split()[0].endswith(ROLES[role])][0]
        return int(state_of(pid)[1]) if self.target.startswith("keeper") else pid

    def again(self):
        """Daemons are started again by whoever runs the cluster."""
        if self.target == "daemon":
            self.p.furlong("start", f"--address={self.head['address']}", "--num-gpus=2", "--node-ip-address=127.0.0.1", check=0)
        elif self.target == "head":
            port, http = (self.head[x].rsplit(":", 1)[1].rstrip("/") for x in ("address", "http"))
            self.p.spawn("furlong-head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={http}",
                         stdout=open(f"{self.p.root}/head.out", "w"), stderr=open(f"{self.p.root}/head.err", "w"))

    def end(self):
        """The exit code of the job."""
        if self.target == "client":
            job = self.p.furlong("job", "list", "--json", check=0).json()[0]["submission_id"]
            return self.p.furlong("logs", "--follow", job, seconds=60).code
        wait_for("the end of the run", lambda: self.client.poll() is not None, 60)
        return self.client.returncode

    def play(self):
        stands = self.barrier()
        if stands:
            pid = self.pid()
            os.kill(pid, signal.SIGKILL)
            if self.target != "client":
                wait_for(f"the end of {self.target}", lambda: not harness.alive(pid))
            else:
                self.client.wait()
            self.again()
            with contextlib.suppress(ProcessLookupError):
                os.kill(stands, signal.SIGCONT)
        code = self.end()
        got = sorted({s["step"]: (s["step"], s["weights_version"], s["weights_digest"]) for s in self.run.steps()}.values())
        assert code == 0, f"exit {code}"
        if self.mode == "async":  # a generation that is made again is made with later weights
            assert [g[:2] for g in got] == [w[:2] for w in undisturbed()], got
        else:
            assert got == undisturbed(), (got, undisturbed())
        self.p.furlong("stop", check=0)
        assert self.p.left_behind() == []
        return bool(stands)


def cell(phase, target, mode):
    with place() as p:
        c = Cell(p, phase, target, mode)
        try:
            return mode, c.play()
        except AssertionError as e:
            raise AssertionError(f"{target} killed in {phase}, {mode}: {e}; it said: {c.said()}") from None


def sweep(phase):
    modes = list(MODES)
    first = list(PHASES).index(phase)
    cells = [(phase, t, modes[(first + i) % len(modes)]) for i, t in enumerate(TARGETS)]
    undisturbed()
    met = dict(harness.together([(cell, *c) for c in cells]))
    assert sum(met.values()) >= 5, f"modes in which {phase} was met: {met}"


def make(phase):
    def test():
        sweep(phase)
    return test


for _phase in PHASES:
    globals()[f"test_killed_in_{_phase}"] = make(_phase)

if __name__ == "__main__":
    harness.main(dict(globals()))
