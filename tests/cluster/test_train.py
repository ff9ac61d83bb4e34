"""Whole runs on one machine: every column of the step table, every mode, the same weights in all of them."""
import json
import os

import harness
from harness import place
from runs import SMALL, Run

PERF = ["step_time", "rollout_time", "train_time", "train_wait_time", "update_weights_time", "sleep_time", "wake_up_time",
        "finalize_and_resume_engines_time", "engine_release_time", "sleep_setup_time", "sleep_copy_time",
        "wake_up_setup_time", "wake_up_copy_time", "engine_idle_time", "update_weights_share"]
FIELDS = ["step", "reward_mean", "response_len_mean", "weights_version", "weights_digest",
          "train_rollout_logprob_abs_diff", *("perf/" + p for p in PERF)]
WAYS = {  # name: flags; all must give the same weights after every step
    "split broadcast": ["--update-weight-transfer-mode=broadcast"],
    "split p2p": ["--update-weight-transfer-mode=p2p"],
    "split disk-delta": ["--update-weight-transfer-mode=disk-delta"],
    "split auto": ["--update-weight-transfer-mode=auto"],
    "colocated share": ["--colocate", "--colocate-transfer=share"],
    "colocated copy": ["--colocate", "--colocate-transfer=copy"],
    "colocated, peak on the device": ["--colocate-memory-peak-device=gpu"],
    "small buckets": ["--update-weight-buffer-size=4096"],
}


def test_a_run_leaves_its_record_and_nothing_else():
    with place() as p:
        run = Run(p, *SMALL)
        r = run.go()
        assert "reward" in r.out, r
        with open(f"{run.dir}/run.json", encoding="utf-8") as f:
            about = json.load(f)
        assert {"flags", "nodes", "placement"} <= about.keys(), about.keys()
        steps = run.steps()
        logs = [f for f in os.listdir(f"{run.dir}/logs") if f.startswith("train_")]
        with open(f"{run.dir}/logs/{logs[0]}", encoding="utf-8") as f:
            assert f.read() == r.out, "the run's log is what was shown"
        assert [s["step"] for s in steps] == [0, 1, 2], steps
        for s in steps:
            missing = [f for f in FIELDS if f not in s]
            assert not missing, f"step {s['step']} lacks {missing}"
            assert s["train_rollout_logprob_abs_diff"] < 1e-4, s
        assert p.left_behind() == []


def test_every_way_gives_the_same_weights():
    first = None
    with place() as p:
        for name, flags in WAYS.items():
            run = Run(p, *SMALL, *flags, name=name.replace(" ", "-").replace(",", ""))
            r = run.go()
            got = run.digests()
            assert len(got) == 3, (name, got)
            turned = (r.out + r.err).count("turns --colocate on")
            assert turned == (name == "colocated, peak on the device"), f"{name}: said {turned} times\n{r}"
            first = first or (name, got)
            assert got == first[1], f"{name} differs from {first[0]}: {got} and {first[1]}"
        assert p.left_behind() == []


def test_json_prints_the_step_objects_alone():
    with place() as p:
        run = Run(p, *SMALL, "--json")
        lines = [json.loads(x) for x in run.go().out.splitlines()]
        assert lines == run.steps()


def test_a_run_resumes_under_another_number_of_ranks():
    with place() as p:
        first = Run(p, *SMALL, "--save-interval=1", f"--save={p.root}/ckpt", name="first")
        first.go()
        second = Run(p, "--num-rollout=5", *SMALL[1:], f"--load={p.root}/ckpt", f"--save={p.root}/ckpt",
                     "--save-interval=1", "--actor-num-gpus-per-node=2", name="second")
        second.go()
        assert [s["step"] for s in second.steps()] == [3, 4], second.steps()


def test_two_trainer_ranks_agree_with_one():
    with place() as p:
        one, two = Run(p, *SMALL, name="one"), Run(p, *SMALL, "--actor-num-gpus-per-node=2", name="two")
        one.go()
        two.go()
        a, b = one.steps()[0], two.steps()[0]
        assert a["reward_mean"] == b["reward_mean"]
        assert abs(a["grad_norm"] - b["grad_norm"]) <= 1e-5 * abs(a["grad_norm"]), (a, b)


def test_async_overlaps_and_never_updates_during_a_generation():
    with place() as p:
        run = Run(p, *SMALL, "--num-rollout=4", "--async", "--update-weights-interval=2")
        run.go()
        steps = run.steps()
        assert len(steps) == 4
        assert max(s["staleness_mean"] for s in steps) >= 1, steps
        assert [s["weights_version"] for s in steps] == sorted(s["weights_version"] for s in steps)


def test_the_default_run_learns():
    if harness.SLOW > 1:
        raise harness.Skip("a sanitizer's speed says nothing about 90 s; the release build shows it")
    with place() as p:
        run = Run(p)
        run.go(seconds=90)
        steps = run.steps()
        assert steps[0]["reward_mean"] < 0.2, steps[0]
        assert steps[-1]["reward_mean"] > 0.9, steps[-1]
        held_out = [s["eval_reward_mean"] for s in steps if s.get("eval_reward_mean") is not None]
        assert held_out[-1] > 0.8, held_out
        assert p.left_behind() == []


def test_existing_cluster_is_used_and_left_running():
    with place() as p:
        p.start_head("--num-gpus=2")
        before = sorted(x["pid"] for x in p.info("h") + p.info("n"))
        Run(p, *SMALL).go()
        assert sorted(x["pid"] for x in p.info("h") + p.info("n")) == before
        p.furlong("stop", check=0)
        assert p.left_behind() == []


def test_reward_command():
    with place() as p:
        script = f"{p.root}/reward"
        with open(script, "w", encoding="utf-8") as f:
            f.write("#!/bin/sh\nwhile read -r line; do echo 0.25; done\n")
        os.chmod(script, 0o755)
        run = Run(p, *SMALL, f"--reward-cmd={script}")
        run.go()
        assert all(s["reward_mean"] == 0.25 for s in run.steps())


if __name__ == "__main__":
    harness.main(dict(globals()))
