"""deploy/slurm on a real controller with two virtual nodes of this machine."""
import os
import re
import shutil
import subprocess

import harness
from harness import place, wait_for
from runs import SMALL
from slurm import free_port, slurm

SCRIPT = f"{os.path.dirname(os.path.abspath(__file__))}/../../deploy/slurm/furlong.sbatch"
RUN = [*SMALL, "--actor-num-nodes=1", "--actor-num-gpus-per-node=1", "--rollout-num-gpus=1", "--num-gpus-per-node=1"]


def submit(p, env, *words):
    """(state, exit code, output) of the job."""
    env = {**p.env, **env, "FURLONG": f"{harness.BIN}/furlong", "HEAD_ADDR": "127.0.0.1", "FURLONG_NODE_GPUS": "1", "FURLONG_PORT": str(free_port())}
    r = subprocess.run(["sbatch", "--parsable", "--nodes=2", "-o", f"{p.root}/job.out", SCRIPT, *words], env=env, cwd=p.root,
                       capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    job = r.stdout.strip()
    show = lambda: subprocess.run(["scontrol", "show", "job", job], env=env, capture_output=True, text=True).stdout
    wait_for("the job's end", lambda: re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|NODE_FAIL|TIMEOUT)", show()), 180)
    with open(f"{p.root}/job.out", encoding="utf-8") as f:
        return re.search(r"JobState=(\w+)", show())[1], int(re.search(r"ExitCode=(\d+)", show())[1]), f.read()


def nothing_left():
    wait_for("no daemon of the job", lambda: not subprocess.run(["pgrep", "-f", "fl-.*/job|/tmp/fl-[0-9]+-[01]"], capture_output=True).stdout, 30)


def test_a_run_on_two_nodes():
    with place() as p:
        os.makedirs(f"{p.root}/slurm")
        with slurm(f"{p.root}/slurm") as env:
            state, code, out = submit(p, env, *RUN, f"--run-dir={p.root}/run")
            assert (state, code) == ("COMPLETED", 0), out
            assert os.path.exists(f"{p.root}/run/steps.jsonl"), out
            assert len(open(f"{p.root}/run/steps.jsonl", encoding="utf-8").readlines()) == 3, out
            nothing_left()
            # The run's exit code is the job's.
            state, code, out = submit(p, env, *RUN, "--no-such-flag")
            assert state == "FAILED" and code == 2, (state, code, out)
            nothing_left()


if __name__ == "__main__":
    harness.main(dict(globals()))
