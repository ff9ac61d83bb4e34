#!/usr/bin/env python3
"""Runs of examples/torch_grpo from a folder that bench/on_gpu_torch has made: one row each. Usage: run [FILE]

Peaks of memory first. Then colocated on one device, in the ways that weights are given, and split on two. A row holds when every step's engine
serves the trainer's version and log probabilities of both sides agree; the first one also has to learn."""
import json
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DEVICE = os.environ.get("GRPO_DEVICE", "cuda")  # cpu: tries the script where there is none
PYTHON = os.environ.get("GRPO_PYTHON", "python3")
WORDS = f"env -u LD_LIBRARY_PATH PYTHONPATH={HERE}/python PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=2"
BIG = "dim=1024, layers=12, heads=16, kv_heads=8, head_dim=64, ffn=3072"  # 0.5 GB in 32 bits
COLOCATE = ["--colocate"]
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ROWS = [  # name, devices, model, steps, flags, trainer's words, engine's words, environment
    ("colocated, slots of the plane", 1, "small", 40, COLOCATE, "", "", {}),
    ("colocated, slots", 1, "big", 5, COLOCATE, "", "", {}),
    ("colocated, fixed addresses", 1, "big", 5, COLOCATE, "", "--fixed-addresses", {}),
    ("colocated, copied", 1, "big", 5, COLOCATE + ["--colocate-transfer=copy"], "", "", {}),
    ("colocated, torch in the arena", 1, "big", 5, COLOCATE, "--give=arena", "", {}),
    ("colocated, torch's own memory", 1, "big", 5, COLOCATE, "--give=own", "", {}),
    ("colocated, expandable segments", 1, "big", 5, COLOCATE, "--give=own", "", SEGMENTS),
    ("colocated, peak on the device", 1, "big", 5, ["--colocate-memory-peak-device=gpu"], "", "", {}),
    ("split, broadcast", 2, "big", 5, ["--rollout-num-gpus=1"], "", "", {}),
    ("split, p2p", 2, "big", 5, ["--rollout-num-gpus=1", "--update-weight-transfer-mode=p2p"], "", "", {}),
]


def devices():
    if DEVICE == "cpu":
        return 1
    r = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return r.stdout.count("GPU ")


def make_model(folder, dims):
    code = (f"import sys; sys.path.insert(0, {HERE + '/torch_grpo'!r}); import make_model; "
            f"make_model.write({folder!r}, {HERE + '/data/lookup.jsonl'!r}, {dims})")
    subprocess.run([*WORDS.split(), PYTHON, "-c", code], check=True)


def train(place, row, models):
    name, _, size, steps, flags, trainer, engine, env = row
    folder = f"{place}/{len(os.listdir(place))}"
    words = lambda file, more: f"{WORDS} {PYTHON} {HERE}/torch_grpo/{file} --hf-checkpoint={models[size]} --device={DEVICE} {more}"
    lr = "3e-3" if size == "small" else "1e-4"
    argv = [f"{HERE}/bin/furlong", "train", f"--run-dir={folder}/run", f"--num-rollout={steps}", "--rollout-batch-size=32",
            "--n-samples-per-prompt=8", "--seed=7", "--ci-test", *flags,
            f"--trainer-cmd={words('trainer.py', f'--lr={lr} {trainer}')}", f"--rollout-cmd={words('engine.py', engine)}"]
    os.makedirs(folder)
    at = time.monotonic()
    with open(f"{folder}/out", "w", encoding="utf-8") as out:
        try:
            rc = subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, timeout=float(os.environ.get("GRPO_SECONDS", "75")), env={
                **os.environ, "HOME": place, "FURLONG_RUNTIME_DIR": f"{place}/r", "FURLONG_STATE_DIR": f"{place}/s",
                "FURLONG_BIN_DIR": f"{HERE}/bin", "FURLONG_DATA_DIR": f"{HERE}/data", "LD_LIBRARY_PATH": f"{HERE}/lib", "PATH": f"{HERE}/bin:{os.environ['PATH']}",
                **env}).returncode
        except subprocess.TimeoutExpired:
            rc = "late"
    try:
        with open(f"{folder}/run/steps.jsonl", encoding="utf-8") as f:
            done = [json.loads(line) for line in f if line.endswith("\n")]
    except FileNotFoundError:
        done = []
    return rc, done, time.monotonic() - at, folder


def mean(xs):
    return sum(xs) / max(len(xs), 1)


def holds(row, rc, steps):
    gap = max((s["train_rollout_logprob_abs_diff"] or 0 for s in steps), default=1)
    rewards = [s["reward_mean"] for s in steps]
    learns = row[2] != "small" or mean(rewards[-10:]) > mean(rewards[:10]) + 0.1
    return rc == 0 and len(steps) == row[3] and gap < 1e-2 and learns


def said(folder):
    """The last lines of the run, and what any worker's log says of weights."""
    lines = []
    for at, _, files in os.walk(folder):
        for name in files:
            if name in ("out",) or "stderr" in name or name.endswith(".log") or name.endswith(".err"):
                with open(f"{at}/{name}", encoding="utf-8", errors="replace") as f:
                    lines += [f"{name}: {line.rstrip()}" for line in f.read().splitlines()[-12:]]
    return lines


def peaks():
    """The table of device and host memory, phase by phase; whether it held."""
    r = subprocess.run([f"{HERE}/bin/test_client_peak"], capture_output=True, text=True, timeout=120, env={
        **os.environ, "PEAK_UNIT_MIB": "512" if DEVICE != "cpu" else "2", "FURLONG_GPU": "cuda" if DEVICE != "cpu" else "fake",
        "FURLONG_ARENA_WEIGHTS_CHUNK": "2MiB" if DEVICE == "cpu" else "", "FURLONG_ARENA_CHUNK": "2MiB" if DEVICE == "cpu" else "",
        "FURLONG_BIN_DIR": f"{HERE}/bin", "LD_LIBRARY_PATH": f"{HERE}/lib"})
    print("\n".join(x for x in r.stdout.splitlines() if x.startswith(("#", "not ok"))), flush=True)
    return r.returncode == 0


def main():
    place = tempfile.mkdtemp(prefix="grpo-", dir="/tmp")
    out = open(sys.argv[1], "w", encoding="utf-8") if len(sys.argv) > 1 else None
    os.makedirs(f"{place}/runs")
    models = {"small": f"{place}/small", "big": f"{place}/big"}
    make_model(models["small"], "")
    make_model(models["big"], BIG if DEVICE != "cpu" else "")
    n, wrong, wanted = devices(), not peaks(), os.environ.get("GRPO_ROWS")
    print(f"{'run':34} {'holds':5} {'steps':>5} {'wall s':>6} {'mode':>9} {'MB':>7} {'move ms':>8} {'pause ms':>8} {'update s':>8} {'reward':>13}")
    for i, row in enumerate(ROWS):
        if row[1] > n or (wanted and str(i) not in wanted.split(",")):
            continue
        rc, steps, wall, folder = train(f"{place}/runs", row, models)
        good = holds(row, rc, steps)
        wrong += not good
        warm = steps[1:] or steps
        get = lambda key: mean([s.get(key) or 0 for s in warm])
        line = {"run": row[0], "holds": good, "steps": len(steps), "wall_s": round(wall, 1),
                "mode": warm[-1]["transfer_mode"] if warm else "-", "bytes": warm[-1]["perf/update_weights_bytes"] if warm else 0,
                "move_ms": round(get("perf/update_weights_move_time") * 1e3, 3),
                "pause_ms": round(get("perf/update_weights_pause_time") * 1e3, 3),
                "update_s": round(get("perf/update_weights_time"), 4),
                "reward": [round(mean([s["reward_mean"] for s in part]), 3) for part in (steps[:10], steps[-10:])]}
        print(f"{line['run']:34} {str(good):5} {line['steps']:5} {line['wall_s']:6} {line['mode']:>9} {line['bytes'] / 1e6:7.1f} "
              f"{line['move_ms']:8} {line['pause_ms']:8} {line['update_s']:8} {line['reward'][0]:6} {line['reward'][1]:6}", flush=True)
        if out:
            print(json.dumps(line), file=out, flush=True)
        if not good:
            print("\n".join(["  " + x[:220] for x in said(folder)[-16:]]), flush=True)
    return min(wrong, 1)


sys.exit(main())
