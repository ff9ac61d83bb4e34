"""A training run as a test sees it: the command, and what its run folder says afterwards."""
import json
import os

from harness import wait_for

SMALL = ["--num-rollout=3", "--rollout-batch-size=8", "--n-samples-per-prompt=4", "--seed=7"]


class Run:
    def __init__(self, place, *flags, name="run", env=None):
        self.place, self.dir = place, f"{place.root}/{name}"
        self.flags, self.env = flags, env or {}

    def argv(self):
        return ["furlong", "train", f"--run-dir={self.dir}", *self.flags]

    def go(self, check=0, seconds=120):
        return self.place.run(*self.argv(), env=self.env, seconds=seconds, check=check)

    def start(self):
        return self.place.spawn(*self.argv(), env=self.env)

    def steps(self):
        """The whole lines of steps.jsonl so far."""
        path = f"{self.dir}/steps.jsonl"
        if not os.path.exists(path):
            return []
        with open(path, encoding="utf-8") as f:
            return [json.loads(x) for x in f.read().split("\n")[:-1]]

    def wait_step(self, n, seconds=60):
        return wait_for(f"step {n} of {self.dir}", lambda: len(self.steps()) > n, seconds)

    def digests(self):
        return [(s["step"], s["weights_version"], s["weights_digest"]) for s in self.steps()]
