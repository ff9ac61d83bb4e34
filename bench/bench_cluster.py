"""bench_cluster.py BIN-DIR [--runs N] - what a user waits for: start to ready, submit of `true` to its exit; what idles.

Prints one JSON object a line. Each figure has the floor measured in the same run, and the ratio: for times the start
of as many programs that do nothing, for memory what an empty program holds."""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "cluster"))


def seconds(argv, env):
    begin = time.perf_counter()
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return time.perf_counter() - begin


def pss_mib(pid):
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Pss:")) / 1024


def line(name, unit, values, floor, floor_is, goal):
    value = statistics.median(values)
    print(json.dumps({"name": name, "unit": unit, "median": round(value, 2), "min": round(min(values), 2),
                      "max": round(max(values), 2), "runs": len(values), "limit": round(floor, 2), "limit_is": floor_is,
                      "ratio": round(value / floor, 2), "goal": goal}), flush=True)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("bin")
    args.add_argument("--runs", type=int, default=7)
    args = args.parse_args()
    os.environ["FURLONG_BIN_DIR"] = os.path.abspath(args.bin)
    import harness  # needs the folder of the programs

    start, submit, idle = [], [], []
    floor = 1e3 * statistics.median(seconds(["/bin/true"], os.environ) for _ in range(21))
    for _ in range(args.runs):
        root = tempfile.mkdtemp(prefix="fl-", dir="/tmp")
        p = harness.Place(root)
        try:
            furlong = f"{harness.BIN}/furlong"
            start.append(1e3 * seconds([furlong, "start", "--head", "--port=0", "--dashboard-port=0"], p.env))
            daemons = p.info("h") + p.info("n")
            seconds([furlong, "job", "submit", "--", "true"], p.env)
            submit.append(1e3 * seconds([furlong, "job", "submit", "--", "true"], p.env))
            idle.append(sum(pss_mib(d["pid"]) for d in daemons))
            subprocess.run([furlong, "stop"], env=p.env, check=True, stdout=subprocess.DEVNULL)
        finally:
            p.end()
            shutil.rmtree(root, ignore_errors=True)
    # furlong, furlong-head, furlong-node: three programs; a submit runs furlong, keeper, sh, true
    line("start to ready", "ms", start, 3 * floor, "three starts of /bin/true, one after the other", "under 100 ms")
    line("submit of true to its exit", "ms", submit, 4 * floor, "four starts of /bin/true", "under 200 ms")
    line("idle memory of head and daemon (PSS)", "MiB", idle, 40, "the goal", "under 40 MiB")


main()
