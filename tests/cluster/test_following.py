"""Jobs while they wait, run and end: what is said, whoever watches and whoever goes away. Named by the cases of people in
trouble that they hold."""
import os
import signal
import time

import harness
from cutter import cutter
from harness import hosts, place, wait_for
from submitting import BOTH, by_name, job, jobs, shared, submit


def counting(p, name, lines, code, then=""):
    """A job that prints a counter, a line whenever somebody has written to its pipe, so that a test knows where it is."""
    os.mkfifo(f"{p.root}/{name}")
    return f"exec 3<>{p.root}/{name}; i=0; while [ $i -lt {lines} ]; do read x <&3; i=$((i+1)); echo line $i; done; {then}exit {code}"


def feed(p, name):
    with open(f"{p.root}/{name}", "w", encoding="ascii") as f:
        f.write("go\n")


def p09_following_goes_on_over_cut_connections():
    p = shared()
    for program in BOTH:
        with cutter(p.info("h")[0]["http"].split("//")[-1]) as relay:
            name, seen = f"p09-{program[0]}", []
            relay.on_down = lambda data: seen.append(data)
            c = p.spawn(*program, f"--address={relay.url}", f"--submission-id={name}", "--", counting(p, f"{name}.pipe", 30, 3))
            for i in range(1, 31):
                feed(p, f"{name}.pipe")
                if i in (10, 20):  # with the line, or part of it, on its way
                    wait_for("the line", lambda: f"line {i}".encode() in b"".join(seen))
                    relay.cut()
                if i == 25:  # away for longer than one attempt
                    relay.away = True
                    relay.cut()
                    wait_for("an attempt that failed", lambda: job(p, name)["status"] == "RUNNING")
                    relay.away = False
            out, err = c.communicate(timeout=60 * harness.SLOW)
            lines = [x for x in out.split(f"Job '{name}' failed")[0].splitlines() if x.startswith("line ")]
            assert lines == [f"line {i}" for i in range(1, 31)], (program, lines)
            assert c.returncode == (3 if program[0] == "furlong" else 1) and relay.cuts == 3, (c.returncode, err)


def p10_a_lost_node_is_never_success():
    with hosts(2) as (head, other):
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--node-name=n1", check=0, env={"FURLONG_NODE_SILENT_MS": "1500"})
        other.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=2", "--node-name=n2", "--wait=30", check=0)
        by_name(head)
        waiting = []
        for program in BOTH:
            at = ["--address=http://10.77.0.1:8265"]
            waiting.append((program[0], head.spawn(*program, *at, "--working-dir=/" if program[0] == "furlong" else "--submission-id=r",
                                                   "--entrypoint-num-gpus=1", "--", f"echo $$ >{other.root}/{program[0]}.pid; sleep 1000")))
        wait_for("both jobs on n2", lambda: all(os.path.exists(f"{other.root}/{x[0]}.pid") for x in BOTH))
        harness.kill_all(other.root)
        for name, c in waiting:
            out, err = c.communicate(timeout=60 * harness.SLOW)
            assert c.returncode == 1 and "n2" in out + err and "failed" in out + err, (name, c.returncode, out, err)
        head.furlong("stop", check=0)


def p12_a_vanished_client_changes_nothing():
    p = shared()
    sub = p.spawn("furlong", "job", "submit", "--submission-id=p12", "--", counting(p, "p12.pipe", 2, 0))
    feed(p, "p12.pipe")
    wait_for("the job", lambda: job(p, "p12")["status"] == "RUNNING" if "p12" in jobs(p) else None)
    before = job(p, "p12")
    sub.send_signal(signal.SIGKILL)
    sub.communicate()
    follow = p.spawn("furlong", "job", "logs", "--follow", "p12")
    assert job(p, "p12") == before
    feed(p, "p12.pipe")
    out, err = follow.communicate(timeout=30 * harness.SLOW)
    assert follow.returncode == 0 and out == "line 1\nline 2\n", (out, err)
    assert job(p, "p12")["status"] == "SUCCEEDED"


def p13_the_connection_goes_with_the_job():
    """It drops with the last line, before that has arrived, and comes back a little later: the real end is reported."""
    p = shared()
    for program, code in zip(BOTH, (5, 1)):
        with cutter(p.info("h")[0]["http"].split("//")[-1]) as relay:
            name = f"p13-{program[0]}"

            def last(data):
                if b"the 42 end" in data and not relay.cuts:  # as the job says it, not its command line
                    relay.away = True
                    relay.cut()
            relay.on_down = last
            c = p.spawn(*program, f"--address={relay.url}", f"--submission-id={name}", "--", counting(p, f"{name}.pipe", 1, 5, "echo the $((40+2)) end; "))
            feed(p, f"{name}.pipe")
            wait_for("attempts that fail", lambda: relay.refused > 2)
            wait_for("the end of the job", lambda: jobs(p)[name]["status"] == "FAILED")
            relay.away = False
            out, err = c.communicate(timeout=30 * harness.SLOW)
            shown = out.split("Status message")[0]
            assert c.returncode == code and "fail" in out + err and shown.count("line 1\n") == 1 and shown.count("the 42 end\n") == 1, (program, c.returncode, out, err)


def p14_codes_and_signals_are_numbers():
    p = shared()
    for name, line, code, number, sig in (("zero", "exit 0", 0, 0, None), ("seven", "exit 7", 7, 7, None), ("137", "exit 137", 137, 137, None),
                                          ("segv", "kill -SEGV $$", 139, 139, 11)):
        r = p.furlong("job", "submit", f"--submission-id=p14-{name}", "--", line)
        j = job(p, f"p14-{name}")
        assert r.code == code and (j["exit_code"], j["signal"]) == (number, sig), (name, r, j)
        follow = p.furlong("job", "logs", "--follow", f"p14-{name}")
        assert follow.code == code, follow
        r = submit(p, BOTH[1], f"--submission-id=p14-{name}-r", "--", line)
        assert r.code == (code != 0), r


def p15_who_waits_is_told_why():
    with place() as p:
        p.start_head("--num-gpus=8", "--num-cpus=4")
        p.furlong("job", "submit", "--submission-id=busy", "--no-wait", "--entrypoint-num-gpus=8", "--", "sleep 1000", check=0)
        wait_for("the busy one", lambda: job(p, "busy")["status"] == "RUNNING")
        rows = (("many", ["--entrypoint-num-gpus=9"], ["can never fit", "9 GPU", "8", "waits for other nodes"]),
                ("label", ['--entrypoint-label-selector={"rack": "seven"}'], ["can never fit", "rack", "waits for other nodes"]),
                ("later", ["--entrypoint-num-gpus=1"], ["not now", "1 GPU asked", "0 free of 8"]),
                ("elsewhere", ["--off-head"], ["no node but the head's own"]))
        clients, said = {}, set()
        for name, flags, _ in rows:
            clients[name] = p.spawn("furlong", "job", "submit", f"--submission-id={name}", *flags, "--", "true",
                                    stderr=open(f"{p.root}/{name}.err", "w", encoding="utf-8"))
        began = time.monotonic()
        for name, _, words in rows:
            told = lambda: [x for x in open(f"{p.root}/{name}.err", encoding="utf-8") if f"job {name} waits: " in x and all(w in x for w in words)]
            why = wait_for(f"why {name} waits", told, 5)[0].split("waits: ")[1].strip()
            j = job(p, name)
            assert j["status"] == "PENDING" and j["why"] == why, (why, j)
            assert why in p.furlong("job", "status", name, check=0).out
            said.add(why)
        assert len(said) == len(rows) and time.monotonic() - began < 5 * harness.SLOW, said
        p.furlong("job", "stop", "busy", check=0)
        clients["later"].communicate(timeout=30 * harness.SLOW)
        assert clients["later"].returncode == 0 and job(p, "later")["why"] is None
        for name in ("many", "label", "elsewhere"):
            p.furlong("job", "stop", name, check=0)


def p16_where_the_command_runs_and_why():
    with hosts(2) as (head, other):
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--num-cpus=0", "--node-name=n1", check=0)
        other.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=1", "--num-cpus=2", "--node-name=n2", "--wait=30", check=0)
        for name, flags, node, why in (("plain", [], "n1", "the head's own node, as the command asked for no resources"),
                                       ("cpus", ["--entrypoint-num-cpus=1"], "n2", "it has what the command asked for"),
                                       ("gpus", ["--entrypoint-num-gpus=0.5"], "n2", "it has what the command asked for"),
                                       ("off", ["--off-head"], "n2", "any node but the head's own was asked for"),
                                       ("both", ["--off-head", "--entrypoint-num-cpus=1"], "n2", "it has what the command asked for")):
            r = head.furlong("job", "submit", f"--submission-id={name}", "--working-dir=/", *flags, "--", "echo $FURLONG_NODE", check=0)
            assert r.out == f"{node}\n", (name, r)
            d = job(head, name)["driver"]
            assert d == {"node": node, "address": f"10.77.0.{node[1]}", "why": why}, d
            assert f"command on node {node} at {d['address']}: {why}" in head.furlong("job", "status", name, check=0).out
        other.furlong("stop", check=0)
        head.furlong("stop", check=0)


HANDLER = """
import os, signal, subprocess, sys, time
root = sys.argv[1]
child = subprocess.Popen(["setsid", "sh", "-c", "trap '' TERM; echo $$ >%s/deaf; while :; do sleep 0.1; done" % root])
def save(*_):
    os.write(1, b"saving\\n")
    open(f"{root}/go", "r").read()  # as long as it takes
    open(f"{root}/checkpoint", "w").write("whole")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
while not os.path.exists(f"{root}/deaf"):
    time.sleep(0.01)
print("ready", flush=True)
while True:
    signal.pause()
"""


def p17_stop_waits_for_a_handler_and_leaves_nothing():
    with place() as p:
        p.start_head("--num-gpus=0", env={"RAY_JOB_STOP_WAIT_TIME_S": "6"})
        with open(f"{p.root}/x.py", "w", encoding="ascii") as f:
            f.write(HANDLER)
        os.mkfifo(f"{p.root}/go")
        p.furlong("job", "submit", "--submission-id=j", "--no-wait", "--", f'sh -c "python3 {p.root}/x.py {p.root}; true"', check=0)
        wait_for("the handler", lambda: "ready" in p.furlong("job", "logs", "j", check=0).out)
        stop = p.spawn("furlong", "job", "stop", "j")
        wait_for("the handler's word", lambda: "saving" in p.furlong("job", "logs", "j", check=0).out)
        assert stop.poll() is None and job(p, "j")["status"] == "RUNNING", "it does not return before the handler has"
        feed(p, "go")
        assert wait_for("the checkpoint", lambda: os.path.exists(f"{p.root}/checkpoint") and open(f"{p.root}/checkpoint", encoding="ascii").read()) == "whole"
        deaf = int(open(f"{p.root}/deaf", encoding="ascii").read())
        out, err = stop.communicate(timeout=60 * harness.SLOW)
        assert stop.returncode == 0 and out == "stopped\n", (out, err)
        assert not harness.alive(deaf) and job(p, "j")["status"] == "STOPPED"
        left = [c for _, c in p.processes() if "x.py" in c or "trap" in c]
        assert not left, left
        p.furlong("stop", check=0)


def test_a_job_that_waits_is_stopped_by_ctrl_c():
    """The head's answer to the stop and the job's end may come in any order; a token may be long."""
    with place() as p:
        p.env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="t" * 250)
        p.start_head("--num-gpus=0")
        with open(f"{p.root}/err", "w", encoding="utf-8") as err:
            c = p.spawn("furlong", "job", "submit", "--submission-id=w", "--off-head", "--", "true", stderr=err)
        said = lambda: open(f"{p.root}/err", encoding="utf-8").read()
        wait_for("why it waits", lambda: "job w waits: no node but the head's own is there" in said())
        c.send_signal(signal.SIGINT)
        c.communicate(timeout=30 * harness.SLOW)
        assert c.returncode == 1 and "stopping job w" in said() and "job w was stopped" in said() and "was not stopped" not in said(), said()
        r = p.furlong("job", "stop", "none")
        assert r.code == 1 and r.err == "furlong job stop: Job none does not exist\n", r
        p.furlong("stop", check=0)


def test_what_a_list_says_of_jobs():
    p = shared()
    assert p.furlong("job", "submit", "--submission-id=l1", "--", "echo a lot; exit 7").code == 7
    row = [x for x in p.furlong("job", "list", check=0).out.splitlines() if x.startswith("l1 ")]
    assert len(row) == 1 and row[0].endswith("Job entrypoint command failed with exit code 7"), row
    said = p.furlong("job", "status", "l1", check=0).out
    assert "exit code 7\n" in said and "what it printed: furlong job logs l1\n" in said and "Runtime env" not in said, said
    p.furlong("job", "submit", "--submission-id=l2", "--no-wait", "--entrypoint-num-gpus=1", "--", "sleep 1000", check=0)
    wait_for("the device", lambda: [x for x in p.furlong("list", "devices", check=0).out.splitlines() if "logical" in x and " l2 " in x])
    p.furlong("job", "stop", "l2", check=0)
    wait_for("its device back", lambda: " l2 " not in p.furlong("list", "devices", check=0).out)
    odd = "a b%c #1"
    r = p.furlong("job", "submit", f"--submission-id={odd}", "--", "echo odd")
    assert r.code == 0 and r.out == "odd\n", r
    for words, out in ((["logs", odd], "odd\n"), (["stop", odd], "it had ended already\n")):
        assert p.furlong("job", *words, check=0).out == out, words
    assert f"job {odd}: SUCCEEDED" in p.furlong("job", "status", odd, check=0).out
    r = p.furlong("status", "--address=127.0.0.1:1")
    assert r.code == 1 and r.err.count("http://127.0.0.1:1") == 1 and "onnect" in r.err, r
    r = p.furlong("list", "nodess")
    assert r.code == 2 and r.err.endswith("is none of nodes, devices, jobs, workers, groups, leases, ports; did you mean nodes?\n"), r


if __name__ == "__main__":
    harness.main(dict(globals()))
