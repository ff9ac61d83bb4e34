"""Each edge cut once, in a real run: what fails, what holds, and the sentence that says so (DESIGN 9)."""
import functools
import os
import signal

import harness
from harness import place, wait_for
from runs import Run

FLAGS = ["--num-rollout=6", "--rollout-batch-size=8", "--n-samples-per-prompt=4", "--seed=7", "--save-interval=1"]
MANY_BUCKETS = "--update-weight-buffer-size=16384"  # about twenty a version


def faulty(p, spec):
    """The environment in which spec happens once, in whichever process meets it first."""
    os.makedirs(f"{p.root}/faults", exist_ok=True)
    return {"FURLONG_FAULT": spec, "FURLONG_FAULT_DIR": f"{p.root}/faults"}


def happened(p):
    return os.listdir(f"{p.root}/faults")


def reference(p):
    """The weights after every step of a run in which nothing fails."""
    run = Run(p, *FLAGS, name="reference")
    run.go()
    return run.digests()


def of(p, name):
    return [pid for pid, cmd in p.processes() if cmd.split()[0].endswith(name)]


def last_of_each(run):
    """A step that was done again stands twice: the later one counts."""
    return sorted({s["step"]: (s["step"], s["weights_version"], s["weights_digest"]) for s in run.steps()}.values())


@functools.cache
def undisturbed():
    with place() as p:
        return reference(p)


def whole_run_with(spec, *flags, words=(), same=False):
    with place() as p:
        run = Run(p, *FLAGS, *flags, env=faulty(p, spec))
        r = run.go()
        assert happened(p), f"{spec} was never met: {r}"
        steps = [s["step"] for s in run.steps()]
        assert sorted(set(steps)) == list(range(6)), (steps, str(r))
        text = r.out + r.err
        missing = [w for w in words if w not in text]
        assert not missing, f"{missing} missing in: {r}"
        assert p.left_behind() == []
        assert not same or last_of_each(run) == undisturbed(), (last_of_each(run), undisturbed(), str(r))
        return last_of_each(run)


def test_engine_killed_in_the_middle_of_an_update():
    whole_run_with("xfer.bucket:40=kill", MANY_BUCKETS, words=["rollout 0", "signal 9"])


def test_one_of_two_engines_killed_the_other_commits_and_the_new_one_is_filled():
    whole_run_with("xfer.bucket:40=kill", MANY_BUCKETS, "--rollout-num-gpus=2", words=["rollout", "signal 9"])


def test_a_trainer_that_ends_by_itself_in_its_start():
    """It would do so again: the run ends with its last lines, and is not tried four times. What a signal ended is."""
    with place() as p:
        rows = [(["--trainer-cmd=echo no such model; exit 3"], {}, ["(trainer 0 local) no such model", "trainer 0 on local: ended with exit code 3 after"]),
                (["--trainer-cmd=exit 0"], {}, ["trainer 0 on local: ended with exit code 0 after"]),
                ([f"--trainer-cmd=FURLONG_FAULT=client.weights:1=fail {harness.BIN}/example-trainer"], {},  # it has joined by then
                 ["trainer 0 on local: ended with exit code 1 after"])]
        for i, (flags, env, words) in enumerate(rows):
            r = Run(p, *FLAGS, *flags, name=f"run{i}", env=env).go(check=2)
            text = r.out + r.err
            missing = [w for w in [*words, "before it had answered a call: it would do so again"] if w not in text]
            assert not missing and "attempt 2 of" not in text, (missing, str(r))
            assert p.left_behind() == []
    whole_run_with("client.weights:1=kill", words=["signal 9", "it starts again as attempt 2"])


def test_an_engine_that_ends_by_itself_in_its_start():
    """After it has joined: its next attempt is waited for, and the trainers do not start again with it."""
    with place() as p:
        once = f"FURLONG_FAULT=client.weights:1=fail FURLONG_FAULT_DIR={p.root}/faults"
        faulty(p, "")
        run = Run(p, *FLAGS, f"--rollout-cmd={once} {harness.BIN}/example-engine", f"--trainer-cmd={harness.BIN}/example-trainer")
        text = str(run.go())
        assert happened(p) and "driver 0 on" not in text and "it starts again as attempt 2" in text, text
        r = Run(p, *FLAGS, "--max-restarts=1", f"--rollout-cmd=FURLONG_FAULT=client.weights:1=fail {harness.BIN}/example-engine", name="never")
        text = str(r.go(check=1))
        assert text.count("rollout 0 on local: ended with exit code 1") >= 2 and "the driver is not started again: rollout 0 has used its restarts" in text, text
        assert p.left_behind() == []


def test_an_engine_that_fails_in_an_answer_and_lives_on():
    """An exception in a program's generate: what was asked goes to another engine, the driver and the trainers go on."""
    undisturbed()
    whole_run_with("engine.answer:3=fail,engine.answer:5=fail", "--rollout-num-gpus=2", words=["asked again", "out of memory"],
                   same=True)


def test_an_engine_that_fails_in_every_answer():
    """Three times is enough: it would not end in the same process. The driver's next attempt goes on."""
    spec = ",".join(f"engine.answer:{n}=fail" for n in range(1, 9))
    whole_run_with(spec, words=["generate: rollout 0: generate: RuntimeError: out of memory (asked 3 times)", "it starts again as attempt 2"])


def test_engine_killed_while_the_other_gave_its_weights_away():
    """It is filled at once, though the other cannot be filled now: the run waits for it before it goes on."""
    undisturbed()
    whole_run_with("xfer.offload:3=kill", "--colocate", "--actor-num-gpus-per-node=2", words=["rollout", "signal 9"], same=True)


HANGS = {  # where: fault, flags, what the run says about who hangs and in what
    "an engine, staging": ("xfer.bucket:40=stop", [MANY_BUCKETS, "--update-weight-timeout=2"],
                           ["rollout ", "stage: late, last heard in S", "it starts again as attempt 2"]),
    "an engine, staging, one is enough": (
        "xfer.bucket:40=stop", [MANY_BUCKETS, "--update-weight-timeout=2", "--update-weight-min-engines=1"],
        ["committed=1 left_behind=1", "it starts again as attempt 2"]),
    "an engine, committing": ("engine.commit:2=stop", ["--update-weight-timeout=2"],
                              ["commit: bucket ", ": no answer in 2.0 s", "committed=1 left_behind=1", "as attempt 2"]),
    "an engine, generating": ("engine.step:3=stop", ["--silence-timeout=2"],
                              ["generate: no answer in 2 s", "it starts again as attempt 2"]),
    "a trainer, writing": ("trainer.write:3=stop", ["--silence-timeout=2"],
                           ["trainer 0 on local: train: no answer in 2 s", "trainers go on at step 2"]),
    "a trainer, giving": ("xfer.give:3=stop", ["--update-weight-timeout=2"],
                          ["trainer 0 on local: begin at the source: no answer", "it is ended", "trainers go on at step"]),
}


def test_who_hangs_is_named_ended_and_started_again():
    def one(where, spec, flags, words):
        with harness.saying(where):
            whole_run_with(spec, "--rollout-num-gpus=2", *flags, words=words, same=True)

    undisturbed()
    harness.together([(one, where, *row) for where, row in HANGS.items()])


def test_trainer_killed_in_the_middle_of_a_write():
    with place() as p:
        wanted = reference(p)
        got = whole_run_with("trainer.write:3=kill", words=["trainer 0", "signal 9"])
        assert got == wanted, (got, wanted)


def test_driver_killed_between_verified_and_commit():
    whole_run_with("xfer.decided:3=kill", words=["driver"])


def test_keeper_killed():
    with place() as p:
        run = Run(p, *FLAGS)
        sub = run.start()
        run.wait_step(0)
        engine = wait_for("the engine", lambda: of(p, "furlong-rollout"))[0]
        with open(f"/proc/{engine}/stat", encoding="ascii") as f:
            keeper = int(f.read().rsplit(")", 1)[1].split()[1])
        os.kill(keeper, signal.SIGKILL)
        out, err = sub.communicate(timeout=120 * harness.SLOW)
        assert sub.returncode == 0, (out, err)
        assert "keeper" in out + err, (out, err)
        assert not harness.alive(engine)
        assert p.left_behind() == []


def test_daemon_killed_and_started_again_adopts():
    with place() as p:
        p.start_head("--num-gpus=2")
        run = Run(p, "--num-rollout=12", *FLAGS[1:])
        sub = run.start()
        run.wait_step(1)
        node, head = p.info("n")[0], p.info("h")[0]
        workers = sorted(of(p, "furlong-rollout") + of(p, "furlong-trainer") + of(p, "furlong-driver"))
        os.kill(node["pid"], signal.SIGKILL)
        wait_for("the daemon's end", lambda: not harness.alive(node["pid"]))
        p.furlong("start", f"--address={head['address']}", "--num-gpus=2", "--node-ip-address=127.0.0.1", check=0)
        assert sorted(of(p, "furlong-rollout") + of(p, "furlong-trainer") + of(p, "furlong-driver")) == workers
        out, err = sub.communicate(timeout=120 * harness.SLOW)
        assert sub.returncode == 0, (out, err)
        assert [s["step"] for s in run.steps()] == list(range(12))
        p.furlong("stop", check=0)
        assert p.left_behind() == []


def test_head_killed_and_started_again_the_run_never_noticed():
    with place() as p:
        head = p.start_head("--num-gpus=2")
        run = Run(p, "--num-rollout=12", *FLAGS[1:])
        sub = run.start()
        run.wait_step(1)
        os.kill(head["pid"], signal.SIGKILL)
        before = len(run.steps())
        run.wait_step(before + 1)
        port, http = head["address"].rsplit(":", 1)[1], head["http"].rsplit(":", 1)[1].rstrip("/")
        p.spawn("furlong-head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={http}",
                stdout=open(f"{p.root}/head2.log", "w"), stderr=open(f"{p.root}/head2.err", "w"))
        out, err = sub.communicate(timeout=120 * harness.SLOW)
        assert sub.returncode == 0, (out, err)
        assert [s["step"] for s in run.steps()] == list(range(12))
        job = p.furlong("job", "list", "--json", check=0).json()[0]
        assert job["status"] == "SUCCEEDED", job
        assert p.furlong("status", "--json").json()["term"] == head["term"] + 1


def test_client_killed_the_job_goes_on():
    with place() as p:
        p.start_head("--num-gpus=2")
        run = Run(p, *FLAGS)
        sub = run.start()
        run.wait_step(0)
        sub.send_signal(signal.SIGKILL)
        sub.communicate()
        job = p.furlong("job", "list", "--json", check=0).json()[0]["submission_id"]
        r = p.furlong("logs", "--follow", job, seconds=120)
        assert r.code == 0, r
        assert [s["step"] for s in run.steps()] == list(range(6))


def test_ctrl_c_stops_the_job_and_leaves_nothing():
    with place() as p:
        run = Run(p, "--num-rollout=1000", *FLAGS[1:])
        sub = run.start()
        run.wait_step(0)
        sub.send_signal(signal.SIGINT)
        out, err = sub.communicate(timeout=60 * harness.SLOW)
        assert sub.returncode not in (0, None), (sub.returncode, out, err)
        assert "stopping job" in err, err
        assert p.left_behind() == []


PRIVATE = {"n": "the worker daemon of this private cluster", "h": "the head of this private cluster"}


def lose(kind, words, watched):
    with place() as p, harness.saying(words):
        # no checkpoints: a trainer that is killed in one leaves its .part, which the next run takes away
        run = Run(p, "--num-rollout=100000", *FLAGS[1:-1], "--save-interval=0", env={} if watched else {"FURLONG_NODE_SILENT_MS": "1500"})
        sub = run.start()
        run.wait_step(0)
        if not watched:
            sub.kill()
            sub.communicate()
        os.kill(p.info(kind)[0]["pid"], signal.SIGKILL)
        if not watched:
            wait_for("the end of all of it", lambda: not p.processes(), 30)
            return
        out, err = sub.communicate(timeout=30 * harness.SLOW)
        assert sub.returncode == 1 and words in err, (sub.returncode, out, err)
        wait_for("nothing is left", lambda: not p.left_behind(), 10)  # keepers without a daemon end their workers


def test_a_private_cluster_that_loses_its_head_or_daemon_ends_by_itself_and_says_so():
    harness.together([(lose, *row, watched) for watched in (True, False) for row in PRIVATE.items()], 4)


def test_a_head_on_an_older_journal_harms_nothing():
    import shutil
    with place() as p:
        head = p.start_head("--num-gpus=2")
        shutil.copytree(f"{p.root}/s", f"{p.root}/old")
        run = Run(p, "--num-rollout=12", *FLAGS[1:])
        sub = run.start()
        run.wait_step(1)
        os.kill(head["pid"], signal.SIGKILL)
        wait_for("the head's end", lambda: not harness.alive(head["pid"]))
        port, http = head["address"].rsplit(":", 1)[1], head["http"].rsplit(":", 1)[1].rstrip("/")
        p.spawn("furlong-head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={http}",
                f"--state-dir={p.root}/old", stdout=open(f"{p.root}/head2.log", "w"), stderr=open(f"{p.root}/head2.err", "w"))

        def unknown():
            r = p.furlong("list", "workers", "--json")
            return r.code == 0 and [w for w in r.json() if w["state"].lower() == "unknown"]

        wait_for("work that the journal does not know, shown", unknown, 30)
        with open(f"{p.root}/head2.err", encoding="utf-8") as f:
            said = f.read()
        assert "older" in said, said
        assert of(p, "furlong-driver"), "the work runs on"
        sub.kill()


if __name__ == "__main__":
    harness.main(dict(globals()))
