"""Many engines on many nodes, all at once: all there in bounded time, or who is missing, by name."""
import re
import time

import harness
from harness import place, wait_for
from seats import Seats

NODES, EACH = 8, 8
FLAGS = ["--debug-rollout-only=true", f"--rollout-num-gpus={NODES * EACH}", f"--num-gpus-per-node={EACH}"]


def crowd(p, **env):
    p.start_head("--num-gpus=0", "--num-cpus=2", env=env)
    head = p.info("h")[0]["address"]
    starts = [p.spawn("furlong", "start", f"--address={head}", f"--node-name=n{i}", f"--state-dir={p.root}/n{i}", f"--num-gpus={EACH}", f"--num-cpus={EACH}",
                      "--wait=120") for i in range(NODES)]
    for s in starts:
        out, err = s.communicate(timeout=120 * harness.SLOW)
        assert s.returncode == 0, (out, err)


def p37_64_engines_at_once():
    with place() as p:
        crowd(p)
        began = time.monotonic()
        s = Seats(p, *FLAGS, launch=("rollout",))
        wait_for("all of them", lambda: "\nup\n" in s.said() or s.job.poll() is not None, 120)
        assert len(s.up()) == NODES * EACH, s.said()
        print(f"# {NODES * EACH} engines after {time.monotonic() - began:.1f} s")
        where = [row[2] for row in s.layout() if row[0] == "rollout"]
        blocks = [where[i:i + EACH] for i in range(0, len(where), EACH)]
        assert len(blocks) == NODES == len(set(where)) and all(len(set(b)) == 1 for b in blocks), where
        s.end()


def p37_who_is_missing():
    with place() as p:
        crowd(p, FURLONG_LATE_MS="3000")
        s = Seats(p, *FLAGS, launch=("rollout",), submit=['--runtime-env-json={"env_vars": {"SEATS_MUTE": "17"}}'])
        note = wait_for("the report", lambda: [x for x in s.said().splitlines() if "missing: 17 on n" in x], 120)[0]
        assert re.search(r"63 of 64 of role rollout have joined after 3 s; missing: 17 on n\d \(127.0.0.1:\d+, has not joined\)$", note), note
        p.furlong("job", "stop", "seats", check=0)


if __name__ == "__main__":
    harness.main(dict(globals()))
