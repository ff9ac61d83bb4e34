"""Which device is which, who gets it, and who has it: the fake's devices under real daemons and processes."""
import os
import re
import subprocess

import harness
from harness import place, saying, wait_for
from seats import MIB, Seats, devices, fakes, refused, uuid
from submitting import BOTH, by_name, job

SPLIT = ["--actor-num-nodes=1", "--actor-num-gpus-per-node=1", "--rollout-num-gpus=1"]
HELD = {"SEATS_BYTES": str(64 * MIB)}  # a chunk of the arena


def opened(members):
    return {who: m["opened"] for who, m in members.items()}


def p23_devices_in_the_order_of_the_list():
    with place() as p:
        for bad, says in (("0,,1", "entry 2"), ("0,0", "0 is there twice"), ("3,9", "device 9 is not there")):
            r = p.furlong("start", "--head", "--port=0", "--dashboard-port=0", env=fakes(p, 4, bad))
            assert r.code != 0 and "CUDA_VISIBLE_DEVICES" in r.err and says in r.err, r
            assert not p.processes(), p.processes()
        p.start_head(env=fakes(p, 4, "3,1"))
        assert [(d["id"], d["uuid"]) for d in devices(p)] == [("3", uuid(3)), ("1", uuid(1))], devices(p)
        s = Seats(p, *SPLIT)
        assert opened(s.up()) == {("trainer", 0): [uuid(3)], ("rollout", 0): [uuid(1)]}, s.said()
        s.end()
        p.furlong("stop", check=0)
        p.start_head(env=fakes(p, 4, "1"))
        s = Seats(p, "--colocate=true", name="one")
        assert opened(s.up()) == {("trainer", 0): [uuid(1)], ("rollout", 0): [uuid(1)]}, s.said()
        s.end()


def p24_an_engine_in_a_view():
    with place() as p:
        p.start_head(env=fakes(p, 8, "4,5,6,7"))
        s = Seats(p, "--actor-num-gpus-per-node=2", "--rollout-num-gpus=2", "--rollout-num-gpus-per-engine=2")
        m = s.up()
        assert m["rollout", 0]["opened"] == [uuid(6), uuid(7)], m
        assert m["rollout", 0]["env"]["CUDA_VISIBLE_DEVICES"] == m["rollout", 0]["env"]["FURLONG_DEVICES"] == "6,7", m
        assert m["trainer", 1]["opened"] == [uuid(5)] and m["trainer", 1]["env"]["LOCAL_RANK"] == "0", m
        s.end()


def p25_uuids_and_prefixes():
    with place() as p:
        r = p.furlong("start", "--head", "--port=0", "--dashboard-port=0", env=fakes(p, 17, uuid(0)[:-1]))
        assert r.code != 0 and uuid(0) in r.err and uuid(1) in r.err and "write more of it" in r.err, r
        p.start_head(env=fakes(p, 17, f"{uuid(2)},{uuid(16)[:-1].lower()},0"))
        assert [d["uuid"] for d in devices(p)] == [uuid(2), uuid(16), uuid(0)], devices(p)
        s = Seats(p, *SPLIT[:2], "--rollout-num-gpus=2")
        assert opened(s.up()) == {("trainer", 0): [uuid(2)], ("rollout", 0): [uuid(16)], ("rollout", 1): [uuid(0)]}, s.said()
        s.end()


def p27_two_jobs_on_a_node():
    with place() as p:
        p.start_head(env=fakes(p, 8))
        flags = ["--actor-num-nodes=1", "--actor-num-gpus-per-node=2", "--rollout-num-gpus=2"]
        jobs = [Seats(p, *flags, name=n) for n in "ab"]
        seen = [sorted(u for m in j.up().values() for u in m["opened"]) for j in jobs]
        assert sorted(seen[0] + seen[1]) == [uuid(i) for i in range(8)], seen
        for j in jobs:
            j.end()


def measured(p, want):
    """Device id to the (role, rank) of the processes that have it open; want: how many processes in all."""
    def look():
        all_ = devices(p)
        return all_ if sum(len(d["processes"]) for d in all_) == want else None
    return {d["id"]: sorted((x["role"], x["rank"]) for x in d["processes"]) for d in wait_for(f"{want} holders", look)}


def p28_the_plan_is_what_happens():
    with place() as p:
        p.start_head(env={**fakes(p, 8), **HELD})
        s = Seats(p, "--actor-num-gpus-per-node=2", "--rollout-num-gpus=6")
        s.up()
        plan = {d: [(role, rank)] for role, rank, _, _, ids in s.layout() for d in ids}
        assert plan == {**{str(i): [("trainer", i)] for i in range(2)}, **{str(i + 2): [("rollout", i)] for i in range(6)}}, s.said()
        assert measured(p, 8) == plan, devices(p)
        s.end()
        assert measured(p, 0) == {str(i): [] for i in range(8)}


def p30_roles_that_share_devices():
    with place() as p:
        p.start_head(env={**fakes(p, 4), **HELD})
        s = Seats(p, "--colocate=true", "--use-critic=true", launch=("trainer", "critic", "rollout"))
        s.up()
        assert measured(p, 12) == {str(i): [("critic", i), ("rollout", i), ("trainer", i)] for i in range(4)}, devices(p)
        s.end()
        code, said = refused(p, "--colocate=true", "--use-critic=true", "--actor-num-nodes=1", "--actor-num-gpus-per-node=5")
        assert code == 2 and "can never fit: 5 GPU asked, 1 node has 4" in said, said


def p32_a_program_that_takes_another_device():
    with place() as p:
        p.start_head(env={**fakes(p, 4), **HELD, "SEATS_LIE": "2"})
        s = Seats(p, *SPLIT, launch=("trainer",))
        assert s.up()["trainer", 0]["env"]["FURLONG_DEVICES"] == "0"
        uses = lambda: [w for w in p.furlong("list", "workers", "--json").json() if w["role"] == "trainer" and w["uses"]]
        w = wait_for("what it uses", uses)[0]
        assert w["devices"] == ["0"] and [(u["uuid"], u["pci"], u["bytes"]) for u in w["uses"]] == [(uuid(2), "00000000:03:00.0", 64 * MIB)], w
        seen = [x for x in p.http("/metrics", raw=True).decode().splitlines() if x.startswith("ray_component_gpu") and 'Component="ray::trainer"' in x]
        assert {re.sub("{.*} .*", "", x): round(float(x.split()[-1]), 3) for x in seen} == {"ray_component_gpu_memory_mb": 67.109, "ray_component_gpu_percentage": 0}, seen
        note = f"trainer 0 on {p.info('n')[0]['name']}: its process {w['pid']} uses device 2 ({uuid(2)} at 00000000:03:00.0), and was given 0"
        wait_for("that it is said", lambda: s.said().count(note) == 1)
        s.end()


def join(p, name, *args):
    p.furlong("start", f"--address={p.info('h')[0]['address']}", f"--node-name={name}", f"--state-dir={p.root}/{name}", *args, check=0)


def p33_helpers_came_first():
    """Three nodes of one device and one core: a helper has a core, so nothing is reserved, and who is in the way is said."""
    with place() as p:
        p.start_head("--num-gpus=0", "--num-cpus=1", "--node-name=n1")
        for n in ("n2", "n3", "n4"):
            join(p, n, "--num-gpus=1", "--num-cpus=1", '--resources={"place": 1}')
        os.mkfifo(f"{p.root}/fifo")
        p.furlong("job", "submit", "--submission-id=helper", "--no-wait", "--entrypoint-num-cpus=1", '--entrypoint-resources={"place": 1}',
                      "--", "sh", "-c", f"read x < {p.root}/fifo", check=0)
        where = wait_for("the helper's place", lambda: p.furlong("list", "leases", "--json").json())[0]["node"]
        flags = ["--actor-num-nodes=3", "--actor-num-gpus-per-node=1", "--colocate=true"]
        blocker = f"node {where}: CPU 1 wanted, 0 free of 1 (held by helper)"
        code, said = refused(p, *flags, "--place-timeout=0.2")
        assert code == 1 and blocker in said, said
        assert [x["job"] for x in p.furlong("list", "leases", "--json").json()] == ["helper"], "nothing is kept of it"
        s = Seats(p, *flags, launch=("trainer",))
        wait_for("the reason in its log", lambda: "the placement group waits: not now: " in s.said() and blocker in s.said())
        with open(f"{p.root}/fifo", "w", encoding="utf-8"):
            pass
        assert len(s.up()) == 3, s.said()
        s.end()


def p35_cores_are_short():
    """Devices are free and cores are not: who waits is told which, at once, on the terminal that it waits on."""
    short = ": 60 CPU asked, 1 node has 16 ("
    with place() as p:
        p.start_head("--num-gpus=8", "--num-cpus=16")
        by_name(p)
        for program in BOTH:
            name = f"p35-{program[0]}"
            at = [f"--address={p.info('h')[0]['http']}"] if program[0] == "ray" else []
            err = open(f"{p.root}/{name}.err", "w+", encoding="utf-8")
            c = p.spawn(*program, *at, f"--submission-id={name}", "--entrypoint-num-gpus=6", "--entrypoint-num-cpus=60", "--", "true", stderr=err)
            told = lambda name=name: [x for x in open(f"{p.root}/{name}.err", encoding="utf-8") if f"job {name} waits: " in x and short in x]
            wait_for(f"the reason, said to {program[0]}'s user", told, 5)
            assert short in job(p, name)["why"] and short in p.furlong("status", check=0).out, name
            p.furlong("job", "stop", name, check=0)
            c.communicate(timeout=30 * harness.SLOW)
        p.furlong("stop", check=0)
        p.start_head("--num-gpus=8", "--num-cpus=4")  # a run takes a share of what cores there are: that alone holds none up
        s = Seats(p, "--actor-num-nodes=1", "--actor-num-gpus-per-node=6", "--num-gpus-per-node=8", "--debug-train-only=true", launch=("trainer",))
        assert len(s.up()) == 6, s.said()
        s.end()


def p39_a_quota_of_cores_and_memory():
    base = "/sys/fs/cgroup"
    unified = os.path.exists(f"{base}/cgroup.controllers")
    limits = {"cpu": [("cpu.max", "150000 100000")], "memory": [("memory.max", str(3 << 30))]} if unified else \
        {"cpu": [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "150000")], "memory": [("memory.limit_in_bytes", str(3 << 30))]}
    name, made = f"furlong-test-{os.getpid()}", []
    with place() as p:
        try:
            for controller, files in limits.items():
                d = f"{base}/{name}" if unified else f"{base}/{controller}/{name}"
                if d not in made:
                    os.mkdir(d)
                    made.append(d)
                for file, text in files:
                    with open(f"{d}/{file}", "w", encoding="ascii") as f:
                        f.write(text)
            enter = "; ".join(f"echo $$ > {d}/cgroup.procs" for d in made)
            p.argv = lambda args: ["sh", "-c", f'{enter}; exec "$0" "$@"', f"{harness.BIN}/{args[0]}", *map(str, args[1:])]
            p.start_head("--num-gpus=0")
        except OSError as e:
            raise harness.Skip(f"no cgroup of one's own here: {e}") from None
        else:
            r = p.furlong("list", "nodes", "--json").json()[0]["resources"]
            assert (r["CPU"]["total"], r["memory"]["total"]) == (min(1.5, os.cpu_count()), 3 << 30), r
        finally:
            p.end()
            for d in made:
                wait_for(f"{d} empty", lambda d=d: not open(f"{d}/cgroup.procs", encoding="ascii").read())
                os.rmdir(d)


def p38_status_says_who_has_a_device():
    with place() as p:
        p.start_head(env={**fakes(p, 1), **HELD})
        assert "nobody" in wait_for("the driver's table", lambda: (t := p.furlong("status", check=0).out) and "held by" in t and t)
        s = Seats(p, "--colocate=true")
        m = s.up()
        want = "rollout 0 (pid {}, 64.0 MiB)", "trainer 0 (pid {}, 64.0 MiB)"
        want = [t.format(m[t.split()[0], 0]["pid"]) for t in want]
        text = wait_for("both", lambda: (t := p.furlong("status", check=0).out) and all(w in t for w in want) and t)
        row = [line.split() for line in text.splitlines() if line.startswith("GPU ")]
        assert row[0][1:] == ["1", "1"], text  # one device, used: no parts of it
        s.end()


def p122_a_product_of_no_name():
    with place() as p:
        for n in (1, 4, 8):
            with saying(f"{n} devices"):
                p.start_head(env={**fakes(p, n), "FURLONG_GPU_FAKE_NAME": "Fictional Q9000X", "FURLONG_GPU_FAKE_BYTES": "7GiB"})
                assert [(d["name"], d["memory_bytes"]) for d in devices(p)] == [("Fictional Q9000X", 7 << 30)] * n, devices(p)
                r = p.furlong("job", "submit", "--", os.environ["FURLONG_SEATS"], "drive", "--colocate=true", check=0)
                assert f"derived: --num-gpus-per-node {n} (GPUs of each node)" in r.out, r
                p.furlong("stop", check=0)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    tables = subprocess.run(["grep", "-rnE", r"\b[ABHL][1-9]0?0\b|GB[1-9]00|RTX|Instinct|MI[23]..", *(f"{root}/{d}" for d in ("placement", "head", "worker/node", "common/conf"))],
                            capture_output=True, text=True).stdout
    assert not tables, tables


if __name__ == "__main__":
    harness.main(dict(globals()))
