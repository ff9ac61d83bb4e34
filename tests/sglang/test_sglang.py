"""furlong train --rollout-cmd "furlong-sglang --sglang-cmd ..." with a stand-in for the server: whole runs, each way
of the weights, and each fault as a user sees it."""
import json
import os
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.environ["FURLONG_HARNESS_DIR"])
import harness  # noqa: found there
from harness import BIN, place, saying, wait_for  # noqa
from runs import Run  # noqa

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = ["--num-rollout=2", "--rollout-batch-size=4", "--n-samples-per-prompt=64", "--seed=4", "--rollout-max-response-len=1"]


def model(p):
    """A folder as SGLang has it: config, and weights that are not the trainer's, so that an engine that was not updated is seen."""
    d = f"{p.root}/model"
    os.makedirs(d, exist_ok=True)
    head = json.dumps({"policy.table": {"dtype": "F32", "shape": [16384, 128], "data_offsets": [0, 16384 * 128 * 4]}}).encode()
    head += b" " * (-len(head) % 8)
    with open(f"{d}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head + struct.pack("<128f", *(i % 13 * 0.5 for i in range(128))) * 16384)
    with open(f"{d}/config.json", "w", encoding="utf-8") as f:
        json.dump({"architectures": ["Table"]}, f)
    return d


def stand_in(p, *args):
    return f"{sys.executable} {HERE}/stand_in.py --model-path {model(p)} --notes {p.root}/notes {' '.join(args)}"


def run(p, *adapter, server=(), flags=(), steps=None, name="run"):
    cmd = f"{BIN}/furlong-sglang --sglang-cmd \"{stand_in(p, *server)}\" {' '.join(adapter)}"
    p.env["PYTHONPATH"] = f"{HERE}/fake"  # torch, as far as the loader needs it
    return Run(p, f"--trainer-cmd={BIN}/example-trainer", f"--rollout-cmd={cmd}", *SMALL, *flags, name=name)


def notes(p):
    with open(f"{p.root}/notes", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def paths(p):
    return [n[0] for n in notes(p)]


def log(p, r):
    """What the processes of a run wrote, from the job's log."""
    text = ""
    for base, _, files in os.walk(r.dir):
        for f in files:
            if f.endswith(".log"):
                with open(f"{base}/{f}", encoding="utf-8", errors="replace") as g:
                    text += g.read()
    return text


def whole(p, r):
    """Every step, the same weights on both sides, nothing that the server found wrong, nothing left."""
    steps = r.steps()
    assert len(steps) == 2, (steps, log(p, r))
    assert all(s["train_rollout_logprob_abs_diff"] < 1e-4 for s in steps), steps
    updates = {n[1]["weight_version"] for n in notes(p) if isinstance(n[1], dict) and "weight_version" in n[1]}
    assert len({v.split(":")[1] for v in updates}) > 1, ("the trainer learned nothing: another --seed", updates)
    broken = [n for n in notes(p) if n[0] == "broken"]
    assert not broken, broken
    assert p.left_behind() == []
    assert not [d for d in os.listdir("/dev/shm") if d.startswith(f"furlong-sglang-{os.geteuid()}-")]


def test_weights_by_the_loader():
    with place() as p:
        r = run(p)
        said = r.go()
        whole(p, r)
        assert "/update_weights_from_tensor" in paths(p) and "/update_weights_from_disk" not in paths(p), (paths(p), said)
        loaded = [n[1]["weight_version"] for n in notes(p) if n[0] == "/update_weights_from_tensor"]
        assert [v.split(":")[0] for v in loaded][0] == "0" and len(set(loaded)) == len(loaded) >= 2, loaded
        assert all(len(v.split(":")[1]) == 32 for v in loaded), loaded
        assert r.steps()[0]["weights_digest"] in {v.split(":")[1] for v in loaded}, (r.steps()[0], loaded)


def test_weights_by_disk():
    with place() as p:
        r = run(p, "--sglang-weights=disk")
        r.go()
        whole(p, r)
        disk = [n[1] for n in notes(p) if n[0] == "/update_weights_from_disk"]
        assert len(disk) >= 2 and "/update_weights_from_tensor" not in paths(p), paths(p)
        assert all(n["flush_cache"] and "weight_v" in n["model_path"] for n in disk), disk


GROUP = f"--sglang-group-cmd=\"{sys.executable} -m furlong_sglang.group\""


def test_weights_by_a_group():
    with place() as p:
        p.env["FURLONG_SGLANG_BACKEND"] = "gloo"
        r = run(p, "--sglang-weights=group", GROUP)
        r.go()
        whole(p, r)
        assert paths(p).count("/init_weights_update_group") == 1, "made once"
        assert paths(p).count("/update_weights_from_distributed") >= 2 and "/update_weights_from_disk" not in paths(p), paths(p)


def test_attached():
    """A server of somebody else's: with the adapter's socket in its environment, and without; it runs on."""
    for name, way in {"with the socket": "/update_weights_from_tensor", "without": "/update_weights_from_disk"}.items():
        with place() as p, saying(name):
            socket = f"@furlong-test-{os.getpid()}"
            env = {**os.environ, "PYTHONPATH": f"{HERE}/fake:{HERE}/../../python"}
            env.pop("FURLONG_SGLANG_SOCKET", None)
            if name == "with the socket":
                env["FURLONG_SGLANG_SOCKET"] = socket
            server = subprocess.Popen(stand_in(p, "--port=0 --alone --custom-weight-loader furlong_sglang.load").split(), env=env,
                                      stdout=subprocess.PIPE, text=True, start_new_session=True)
            try:
                port = server.stdout.readline().strip().rpartition("port=")[2]
                cmd = f"{BIN}/furlong-sglang --sglang-url=http://127.0.0.1:{port}/ --sglang-socket={socket}"
                r = Run(p, f"--trainer-cmd={BIN}/example-trainer", f"--rollout-cmd={cmd}", *SMALL)
                r.go()
                whole(p, r)
                assert way in paths(p) and server.poll() is None, paths(p)
            finally:
                os.killpg(server.pid, 9)
                server.communicate()


def test_one_slot_and_colocated():
    for name, flags in {"one slot": ["--update-weight-slots=1"], "colocated": ["--colocate"]}.items():
        with place() as p, saying(name):
            r = run(p, *[f for f in flags if "slots" in f], server=["--enable-memory-saver"], flags=flags)
            r.go()
            whole(p, r)
            if name == "colocated":
                tags = [n[1]["tags"] for n in notes(p) if n[0] == "/release_memory_occupation"]
                back = [n[1]["tags"] for n in notes(p) if n[0] == "/resume_memory_occupation"]
                assert any("kv_cache" in t for t in tags) and sorted(map(str, back)) == sorted(map(str, tags))[:len(back)], (tags, back)


def test_fallbacks_are_said():
    rows = {  # fault: the way that is given up, why, the one that is taken
        "loader-fails": ("loader", "/update_weights_from_tensor", "shape of lm_head.weight", "/update_weights_from_disk", []),
        "no-loader-rank": ("loader", "/update_weights_from_tensor", "0 of 1 ranks", "/update_weights_from_distributed", [GROUP]),
        "no-group": ("group", "/init_weights_update_group", "NCCL version mismatch", "/update_weights_from_disk",
                     ["--sglang-group-cmd=\"exec cat <&3 >&3\""]),
    }
    for fault, (way, path, why, then, flags) in rows.items():
        with place() as p, saying(fault):
            p.env["FURLONG_SGLANG_BACKEND"] = "gloo"
            r = run(p, *flags, server=[f"--fault={fault}", *(["--custom-weight-loader"] if way == "group" else [])])
            r.go()
            whole(p, r)
            text = log(p, r)
            assert text.count(f"weights go by {way} no more") == 1 and why in text, text
            assert paths(p).count(path) == 1 and then in paths(p), paths(p)


def test_an_older_release():
    with place() as p:
        r = run(p, server=["--fault=old-release"])
        r.go()
        whole(p, r)
        first = [n[1] for n in notes(p) if n[0] == "/generate"]
        assert "return_prompt_token_ids" in first[0] and first[-1].get("logprob_start_len") == 0, (first[0], first[-1])


def test_slow_start():
    with place() as p:
        r = run(p, server=["--fault=slow-start"])
        r.go()
        whole(p, r)


def test_another_clusters_server_is_not_taken_for_ours():
    """Both were told the same port; the other's binds it first, while ours still loads. It is asked nothing but its health."""
    with place() as p:
        os.mkfifo(f"{p.root}/go")
        with open(f"{p.root}/late", "w", encoding="utf-8") as f:
            f.write(f"echo $1 >{p.root}/port; read x <{p.root}/go; port=$1; shift; exec {stand_in(p)} --port $port $*\n")
        cmd = f"{BIN}/furlong-sglang --sglang-cmd 'sh {p.root}/late {{port}}'"
        p.env["PYTHONPATH"] = f"{HERE}/fake"
        r = Run(p, f"--trainer-cmd={BIN}/example-trainer", f"--rollout-cmd={cmd}", *SMALL, "--max-restarts=0")
        mine = r.start()
        port = wait_for("the port", lambda: os.path.exists(f"{p.root}/port") and open(f"{p.root}/port", encoding="ascii").read().strip(), 60)
        env = {**p.env, "FURLONG_SGLANG_SOCKET": "@of-another-engine"}
        other = subprocess.Popen([sys.executable, f"{HERE}/stand_in.py", "--model-path", model(p), "--notes", f"{p.root}/others", "--alone", "--port", port],
                                 env=env, start_new_session=True)
        try:
            wait_for("the other one is met", lambda: f"port={port} by=\"pid {other.pid} (" in log(p, r), 60)
        finally:
            os.killpg(other.pid, 9)
            other.communicate()
        with open(f"{p.root}/go", "w", encoding="ascii") as f:
            f.write("\n")
        out, err = mine.communicate(timeout=120 * harness.SLOW)
        assert mine.returncode == 0, (out, err, log(p, r))
        whole(p, r)
        if os.path.exists(f"{p.root}/others"):
            with open(f"{p.root}/others", encoding="utf-8") as f:
                assert {json.loads(x)[0] for x in f} <= {"/health"}, "asked for more"


def test_it_comes_back():
    """Faults that one restart, or one more try, heals: the run ends well, and the reason was said."""
    rows = {  # the fault: what is said, restarts
        "abort:2": ("Abort in waiting queue", 0),
        "die:2": ("ended by signal 9", 1),
        "500:2": ("illegal memory access", 1),
        "no-json:2": ("is no JSON", 1),
        "not-what-was-asked:2": ("255 samples", 1),
        "die-in-update:2": ("exit code 3", 1),
        "version:2": ("weight_version '41'", 1),  # as of a server that was started again under the adapter
    }
    for fault, (why, restarts) in rows.items():
        with place() as p, saying(fault):
            r = run(p, server=[f"$(test -e {p.root}/second || echo --fault={fault}; touch {p.root}/second)"], flags=["--max-restarts=3"])
            r.go()
            steps, text = r.steps(), log(p, r)
            assert len(steps) == 2 and why in text, (fault, steps, text)
            assert paths(p).count("/server_info") == 1 + restarts, (fault, paths(p))
            assert p.left_behind() == []


def test_every_place_that_can_fail():
    """Each fails once; the run goes on by the next attempt, another try, or another way."""
    for point in ("spawn", "thread", "body", "head", "commit", "group"):
        with place() as p, saying(point):
            os.makedirs(f"{p.root}/faults")
            p.env["FURLONG_SGLANG_BACKEND"] = "gloo"
            r = run(p, *([GROUP] if point == "group" else []), server=["--custom-weight-loader"] if point == "group" else [])
            r.env = {"FURLONG_FAULT": f"sglang.{point}:{1 if point != 'body' else 2}=fail", "FURLONG_FAULT_DIR": f"{p.root}/faults"}
            r.go()
            assert len(r.steps()) == 2 and p.left_behind() == [], (r.steps(), log(p, r))
            assert os.listdir(f"{p.root}/faults"), "the place was not met"


def p123_a_variable_that_this_release_does_not_read():
    """Said once an engine, with the release and the nearest name that it reads; those that it reads, and others' variables, are not."""
    with place() as p:
        p.env.update(SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK="1", SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK="1", SGLANG_QQ="1", OTHER="1")
        r = run(p)
        said = r.go()
        whole(p, r)
        notes_ = sorted(x[x.index("note: SGLang"):] for x in said.out.splitlines() if "does not read the variable" in x)
        assert [x.split(" (furlong")[0] for x in notes_] == [
            "note: SGLang 0.0.stand-in does not read the variable SGLANG_QQ",
            "note: SGLang 0.0.stand-in does not read the variable SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK; "
            "the nearest that it reads is SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"], (notes_, said)


def p126_connections_that_are_lost():
    """At random requests are answered by a reset, one in ten of them, for a step makes one an engine and one in 500 would take hours to
    show: each is made once more, then by another call; the run goes on without a restart, and the steps say how often."""
    with place() as p:
        r = run(p, server=["--fault=reset:10"], flags=["--max-restarts=0", "--num-rollout=60", "--n-samples-per-prompt=2"])
        said = r.go(seconds=200)
        steps, asked = r.steps(), paths(p)
        assert [s["step"] for s in steps] == list(range(60)) and asked.count("/server_info") == 1, (steps, str(said))
        lost = asked.count("reset") // 2  # libcurl made each once more by itself
        again = sum(int(w.split(" requests asked again")[0].split()[-1]) for s in steps for w in (s.get("unclean_why") or {}).values() if "asked again" in w)
        assert lost >= 3 and again == lost, (lost, again, [s.get("unclean_why") for s in steps])
        assert all(s["train_rollout_logprob_abs_diff"] < 1e-4 for s in steps), steps
        assert p.left_behind() == []


def test_it_does_not_come_back():
    rows = {  # fault: what the command says, flags of the adapter
        "die-at-start": ("exit code 1", []),
        "never-healthy": ("is not healthy after 2 s", ["--sglang-start-timeout=2"]),
        "disk-refused": ("no such folder", ["--sglang-weights=disk"]),
    }
    for fault, (why, flags) in rows.items():
        with place() as p, saying(fault):
            r = run(p, *flags, server=[f"--fault={fault}"], flags=["--max-restarts=0"])
            said = r.go(check=None)
            assert said.code not in (0, 2) and why in said.out + said.err + log(p, r), (said, log(p, r))
            assert p.left_behind() == []


def p90_a_release_that_frees_nothing_is_refused():
    with place() as p:
        said = run(p, flags=["--colocate", "--max-restarts=0"]).go(check=None)
        assert said.code != 0 and "without --enable-memory-saver" in said.out + said.err, said
        assert "/release_memory_occupation" not in paths(p) and p.left_behind() == []


def p93_what_a_server_says_as_it_dies_is_in_the_error():
    with place() as p:
        r = run(p, server=["--fault=assert-at-start"], flags=["--max-restarts=0"])
        began = time.monotonic()
        said = r.go(check=None)
        assert said.code not in (0, 2) and "Only hook_mode=preload supports pauseable CUDA Graph" in said.out + said.err, said
        assert time.monotonic() - began < 30 * harness.SLOW, "nobody waits for it to become healthy"
        assert p.left_behind() == []


def test_another_version():
    """Somebody else updates the server: its samples are refused with both words, and the run does not take them."""
    with place() as p:
        r = run(p, server=["--fault=version"], flags=["--silence-timeout=3", "--max-restarts=0"])
        said = r.go(check=None)
        assert said.code not in (0, 2) and "weight_version '41'" in said.out + said.err + log(p, r), (said, log(p, r))
        assert p.left_behind() == []


def test_hang():
    with place() as p:
        r = run(p, server=[f"$(test -e {p.root}/second || echo --fault=hang:2; touch {p.root}/second)"],
                flags=["--silence-timeout=4", "--max-restarts=2"])
        r.go()
        assert len(r.steps()) == 2 and "no answer in" in log(p, r), log(p, r)
        assert p.left_behind() == []


def test_its_name():
    """pkill -9 sglang, which launchers run, does not mean the adapter."""
    with place() as p:
        r = run(p, flags=["--num-rollout=1000"])
        proc = r.start()
        r.wait_step(0)
        found = [pid for pid, cmd in p.processes() if cmd.startswith(f"{BIN}/furlong-sglang")]
        assert found, p.processes()
        for pid in found:
            with open(f"/proc/{pid}/comm", encoding="ascii") as f:
                assert f.read().strip() == "furlong-engine"
        proc.send_signal(2)
        wait_for("the end", lambda: proc.poll() is not None, 30)
        wait_for("nothing left", lambda: p.left_behind() == [], 20)


def test_nothing_is_left_when_daemon_and_keepers_are_killed():
    """And no daemon comes again: each worker ends with its keeper, and the server with its adapter."""
    with place() as p:
        r = run(p, server=["--alone"], flags=["--num-rollout=1000"])
        proc = r.start()
        r.wait_step(0)
        named = lambda *names: [pid for pid, cmd in p.processes() if os.path.basename(cmd.split()[0]) in names]
        assert [c for _, c in p.processes() if "stand_in.py" in c] and len(named("furlong-keep")) == 3, p.processes()
        for names in (("furlong", "furlong-head", "furlong-node"), ("furlong-keep",)):
            for pid in named(*names):
                os.kill(pid, 9)
        proc.communicate()
        wait_for("nobody", lambda: not p.processes())


def test_usage():
    with place() as p:
        for words, why in {(): "give one of", ("--sglang-cmd=a", "--sglang-url=b"): "give one of", ("--sglang-url=b",): "begins with",
                           ("--sglang-cmd=a", "--sglang-weights=group"): "--sglang-group-cmd"}.items():
            said = p.run("furlong-sglang", *words, check=2)
            assert why in said.err, said
        said = p.run("furlong-sglang", "--sglang-cmd=true", check=1)
        assert "daemon" in said.err, said


if __name__ == "__main__":
    harness.main(dict(globals()))
