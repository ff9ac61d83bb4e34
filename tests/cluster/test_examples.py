"""The example trainer and engine, as a user's own programs: what docs/roles.md says is enough to be one."""
import os
import signal

import harness
from harness import place
from runs import Run

BIN = os.environ["FURLONG_BIN_DIR"]
OWN = [f"--trainer-cmd={BIN}/example-trainer", f"--rollout-cmd={BIN}/example-engine", "--seed=3"]


def test_they_are_short():
    here = os.path.dirname(os.path.abspath(__file__))
    for name in ("trainer.c", "engine.c"):
        with open(os.path.join(here, "../../examples", name)) as f:
            n = len(f.readlines())
        assert n < 150, f"examples/{name} has {n} lines: a reader takes in 150"


def test_they_learn():
    with place() as p:
        run = Run(p, *OWN, "--num-rollout=150", "--eval-interval=150")
        run.go()
        steps = run.steps()
        last = sum(s["reward_mean"] for s in steps[-10:]) / 10
        assert len(steps) == 150 and steps[0]["reward_mean"] < 0.2 and last > 0.6, (steps[0], last)
        assert steps[-1]["eval_reward_mean"] > 0.5, "held-out prompts are answered too"
        assert all(s["train_rollout_logprob_abs_diff"] < 1e-4 for s in steps), "one model on both sides"
        assert p.left_behind() == []


def test_both_sides_start_at_the_same_time():
    """On devices of their own: each opens its end of a pipe before it goes on, which waits for the other's."""
    with place() as p:
        os.mkfifo(f"{p.root}/meet")
        Run(p, f"--trainer-cmd=echo > {p.root}/meet; {BIN}/example-trainer", f"--rollout-cmd=cat {p.root}/meet; {BIN}/example-engine",
            "--num-rollout=1", "--start-timeout=60").go()
        assert p.left_behind() == []


def test_ways_and_ranks_give_the_same_weights():
    first = None
    with place() as p:
        for name, flags in {"split": [], "colocated": ["--colocate"], "p2p": ["--update-weight-transfer-mode=p2p"],
                            "two-ranks": ["--actor-num-gpus-per-node=2"]}.items():
            run = Run(p, *OWN, "--num-rollout=3", *flags, name=name)
            run.go()
            got = [d for _, _, d in run.digests()]
            first = first or got
            assert len(got) == 3 and got == first, (name, got, first)
        assert p.left_behind() == []


def test_they_resume():
    with place() as p:
        ckpt = f"--save={p.root}/ckpt"
        Run(p, *OWN, "--num-rollout=2", "--save-interval=1", ckpt, name="first").go()
        whole, second = Run(p, *OWN, "--num-rollout=4", name="whole"), Run(p, *OWN, "--num-rollout=4", ckpt, name="second")
        second.flags += (f"--load={p.root}/ckpt",)
        whole.go()
        second.go()
        assert second.digests() == whole.digests()[2:], (second.digests(), whole.digests())


DEVICES = {"FURLONG_GPU": "fake:2", "FURLONG_ARENA_WEIGHTS_CHUNK": "2MiB"}


def test_weights_on_devices_are_the_same():
    """Colocated on one device, in each way, and split on two: the digests are those of a run in host memory."""
    with place() as p:
        plain = Run(p, *OWN, "--num-rollout=3", name="host")
        plain.go()
        colocate = ["--colocate"]
        for name, flags, mode in [("auto", colocate, "share"), ("copy", [*colocate, "--colocate-transfer=copy"], "copy"),
                                  ("peak", ["--colocate-memory-peak-device=gpu"], "share"),
                                  ("p2p", ["--rollout-num-gpus=1", "--update-weight-transfer-mode=p2p"], "p2p"),
                                  ("broadcast", ["--rollout-num-gpus=1"], "broadcast")]:
            run = Run(p, *OWN, "--num-rollout=3", *flags, name=name, env=DEVICES)
            run.go()
            assert run.digests() == plain.digests(), (name, run.digests(), plain.digests())
            assert {s["transfer_mode"] for s in run.steps()} == {mode}, (name, [s["transfer_mode"] for s in run.steps()])
        assert p.left_behind() == []


def test_a_killed_engine_on_a_device_is_filled():
    with place() as p:
        run = Run(p, *OWN, "--num-rollout=60", "--colocate", "--actor-num-gpus-per-node=2", env=DEVICES)
        driver = run.start()
        run.wait_step(3)
        engines = harness.wait_for("the engines", lambda: [x for x, c in p.processes() if c.split()[0] == f"{BIN}/example-engine"])
        os.kill(engines[0], signal.SIGKILL)
        out, err = driver.communicate(timeout=120 * harness.SLOW)
        assert driver.returncode == 0, out + err
        steps = run.steps()
        assert len(steps) == 60 and steps[-1]["engines_updated"] == len(engines) and steps[-1]["driver_attempt"] == 1, steps[-1]
        assert all(s["train_rollout_logprob_abs_diff"] < 1e-4 for s in steps), "one model on both sides"


if __name__ == "__main__":
    harness.main(dict(globals()))
