"""The lines of Miles' launchers, as they are written there, on hosts with network, process and host names of their own
(the lines kill by name), with a stand-in for the training script and a private sshd."""
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time

import harness
from harness import BIN, hosts, wait_for

CLEAN = "pkill -9 sglang; sleep 0.3; ray stop --force; pkill -9 ray; pkill -9 miles; sleep 0.3; pkill -9 ray; pkill -9 miles; pkill -9 redis; true;"
CLEAN_EXTERNAL = "pkill -9 sglang; sleep 0.3; pkill -9 miles; sleep 0.3; pkill -9 miles; pkill -9 redis; true;"
FAN_OUT = '''for worker_ip in $(awk '{print $1}' hostfile); do
  if [[ "$worker_ip" == "10.77.0.1" ]]; then continue; fi
  ssh root@"${worker_ip}" \\
    "pkill -9 sglang ; ray stop --force ; pkill -9 miles ; ray start --address=10.77.0.1:6379 --num-gpus 8 --node-ip-address ${worker_ip} --disable-usage-stats" &
done
wait'''
SUBMIT = '''export no_proxy=127.0.0.1 && export PYTHONUNBUFFERED=1 && ray job submit %s--runtime-env-json='{"env_vars": {"PYTHONUNBUFFERED": "1", "MASTER_ADDR": "10.77.0.1", "PYTHONPATH": "/a b:/c"}}' -- python3 %s/train.py --actor-num-nodes 3 --colocate '''
STAND_IN = '''import os, sys
print("trained", sys.argv[1:], os.environ["MASTER_ADDR"], os.environ["PYTHONPATH"].split(":")[-2:], os.environ["RAY_ADDRESS"])
sys.exit(int(os.environ.get("FAIL", "0")))
'''


class Host:
    """bash lines on one of harness.hosts(), in a process namespace of its own whose first process never waits for others."""

    def __init__(self, place, i, shared):
        self.place, self.i = place, i
        self.env = {**place.env, "PATH": f"{shared}/bin:{os.environ['PATH']}", "FURLONG_TOKEN_PATH": f"{shared}/token", "no_proxy": ""}
        self.inside = subprocess.Popen(["ip", "netns", "exec", place.netns, "unshare", "-p", "-u", "-m", "-f", "--kill-child", "--mount-proc", "sh", "-c",
                                        f"hostname n{i}; echo up; exec sleep 100000"], stdout=subprocess.PIPE, text=True, env=self.env)
        assert self.inside.stdout.readline() == "up\n"
        with open(f"/proc/{self.inside.pid}/task/{self.inside.pid}/children", encoding="ascii") as f:
            self.pid = int(f.read().split()[0])

    def spawn(self, line, env=None, **kw):
        return subprocess.Popen(["nsenter", "-t", str(self.pid), "-n", "-p", "-u", "-m", f"--wd={self.place.root}", "bash", "-c", line], text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**self.env, **(env or {})}, **kw)

    def run(self, line, env=None, seconds=90):
        """(exit code, all it says)"""
        p = self.spawn(line, env)
        try:
            out, _ = p.communicate(timeout=seconds * harness.SLOW)
        except subprocess.TimeoutExpired:
            p.kill()
            raise AssertionError(f"not over after {seconds} s: {line}") from None
        return p.returncode, out

    def end(self):
        self.inside.send_signal(signal.SIGKILL)
        self.inside.wait()


@contextlib.contextmanager
def rack(n=3, ssh=True):
    if not shutil.which("sshd") and not os.path.exists("/usr/sbin/sshd"):
        raise harness.Skip("no sshd here: openssh-server")
    with hosts(n) as places:
        shared = tempfile.mkdtemp(prefix="fl-rack-", dir="/tmp")
        os.chmod(shared, 0o755)
        os.makedirs(f"{shared}/bin")
        os.symlink(f"{BIN}/furlong", f"{shared}/bin/ray")
        made = []
        try:
            for i, p in enumerate(places, 1):
                made.append(Host(p, i, shared))
                with open(f"{p.root}/train.py", "w", encoding="ascii") as f:
                    f.write(STAND_IN)
            with open(f"{places[0].root}/hostfile", "w", encoding="ascii") as f:
                f.writelines(f"10.77.0.{i} slots=8\n" for i in range(1, n + 1))
            if ssh:
                start_sshd(made, shared)
            yield made
        finally:
            for h in made:
                h.end()
            shutil.rmtree(shared, ignore_errors=True)


def start_sshd(made, shared):
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{shared}/{key}"], check=True)
    # `ssh root@IP` as the line has it: what a user has in ~/.ssh/config is given by a program of that name
    with open(f"{shared}/bin/ssh", "w", encoding="ascii") as f:
        f.write(f'#!/bin/sh\nexec {shutil.which("ssh")} -i {shared}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n')
    os.chmod(f"{shared}/bin/ssh", 0o755)
    for h in made[1:]:
        keep = " ".join(f'"{k}={v}"' for k, v in h.env.items() if k.startswith("FURLONG_") or k == "PATH")
        with open(f"{shared}/sshd{h.i}", "w", encoding="ascii") as f:
            f.write(f"Port 22\nListenAddress 10.77.0.{h.i}\nHostKey {shared}/host\nAuthorizedKeysFile {shared}/user.pub\nUsePAM no\nStrictModes no\n"
                    f"PidFile none\nLogLevel ERROR\nPermitRootLogin yes\nSetEnv {keep}\n")
        h.run(f"$(command -v sshd || echo /usr/sbin/sshd) -f {shared}/sshd{h.i}")
        wait_for(f"sshd on n{h.i}", lambda h=h: made[0].run(f"echo >/dev/tcp/10.77.0.{h.i}/22")[0] == 0)


def start_line(gpus=8):
    return f"export PYTHONUNBUFFERED=1 && ray start --head --node-ip-address 10.77.0.1 --num-gpus {gpus} --disable-usage-stats"


def gpus(host, n, seconds=60):
    wait_for(f"{n} GPUs", lambda: host.run(f"ray status | grep -q '/{n}\\.0 GPU'")[0] == 0, seconds)


def daemons(host):
    """Those that live: the first process of a host never waits for what it inherits."""
    return host.run("ps -C furlong-node -o pid=,stat= | grep -v Z")[1].split()


def trained(out):
    return "trained ['--actor-num-nodes', '3', '--colocate'] 10.77.0.1 ['/a b', '/c'] 10.77.0.1:6379" in out


def test_4_1_execute_train():
    with rack(1, ssh=False) as (head,):
        for _ in range(2):  # the second run clears what the first one left
            assert head.run(CLEAN)[0] == 0
            code, out = head.run(start_line())
            assert code == 0 and "ray start --address='10.77.0.1:6379'" in out, out
            code, out = head.run(SUBMIT % ('--address="http://127.0.0.1:8265" ', head.place.root))
            assert code == 0 and trained(out), out
        code, out = head.run((SUBMIT % ('--address="http://127.0.0.1:8265" ', head.place.root)).replace('"MASTER_ADDR"', '"FAIL": "7", "MASTER_ADDR"'))
        assert code == 1 and trained(out) and "failed" in out, out
        head.run(CLEAN)
        assert not daemons(head)


def test_4_5_A_fan_out():
    with rack() as (head, *others):
        for _ in range(2):
            head.run(CLEAN)
            assert head.run(start_line())[0] == 0
            code, out = head.run(FAN_OUT)
            gpus(head, 24)
            code, out = head.run(SUBMIT % ('--address="http://127.0.0.1:8265" ', head.place.root))
            assert code == 0 and trained(out), out


def test_4_5_A_on_an_external_cluster_is_refused():
    with rack() as (head, *others):
        head.run(start_line())
        for h in others:
            assert h.run(f"ray start --address=10.77.0.1:6379 --num-gpus 8 --node-ip-address 10.77.0.{h.i} --disable-usage-stats")[0] == 0
        gpus(head, 24)
        before = [daemons(h) for h in others]
        head.run(CLEAN_EXTERNAL)
        _, out = head.run(FAN_OUT)
        assert out.count("pass --no-join-ray-workers to the launcher") == 4, out  # the stop and the start of each
        assert [daemons(h) for h in others] == before and all(before), (before, out)
        code, out = head.run(SUBMIT % ("", head.place.root))
        assert code == 0 and trained(out), out
        assert others[0].run("ray stop --force")[1] == "Stopped all 1 Ray processes.\n"  # a stop that means it


def test_4_5_B_a_command_per_role():
    with rack(3, ssh=False) as (head, *others):
        worker = "pkill -9 sglang; sleep 0.3; ray stop --force; pkill -9 ray; pkill -9 miles; sleep 0.3; true;\n" \
                 "for i in $(seq 60); do (echo >/dev/tcp/10.77.0.1/6379) 2>/dev/null && break; sleep 0.5; done\n" \
                 "ray start --address=10.77.0.1:6379 --num-gpus=8 --disable-usage-stats --block"
        roles = [h.spawn(worker) for h in others]
        head.run(CLEAN)
        assert head.run(start_line(), env={"MASTER_ADDR": "10.77.0.1"})[0] == 0
        wait_for("all GPUs", lambda: "24.0 GPU" in head.run("ray status 2>/dev/null || true")[1], 60)
        assert head.run("ray status")[0] == 0
        code, out = head.run(SUBMIT % ('--address="http://127.0.0.1:8265" ', head.place.root))
        assert code == 0 and trained(out), out
        for h in others:
            h.run("ray stop --force")
        for r in roles:
            r.communicate(timeout=30 * harness.SLOW)
            assert r.returncode == 0, r.returncode


def test_4_5_C_slurm_example():
    with rack(3, ssh=False) as (head, *others):
        workers = [h.spawn(f"until ray start --address=10.77.0.1:6379 --num-gpus=4 --disable-usage-stats --block; do touch {h.place.root}/failed; sleep 0.5; done")
                   for h in others]
        wait_for("each to have failed once", lambda: all(os.path.exists(f"{h.place.root}/failed") for h in others))
        assert head.run("ray start --head --node-ip-address=10.77.0.1 --port=6379 --num-gpus=4 --disable-usage-stats")[0] == 0
        code, _ = head.run("for i in $(seq 90); do ray status | grep -q '/12\\.0 GPU' && exit 0; sleep 1; done; exit 1", seconds=100)
        assert code == 0
        code, out = head.run(SUBMIT % ("", head.place.root), env={"MILES_SCRIPT_EXTERNAL_RAY": "1"})
        assert code == 0 and trained(out), out
        for h in others:
            h.run("ray stop")
        for w in workers:
            w.communicate(timeout=30 * harness.SLOW)
            assert w.returncode == 0


def test_4_5_E_external():
    with rack(2, ssh=False) as (head, other):
        head.run("ray start --head --port=6379 --node-ip-address=10.77.0.1 --dashboard-host=0.0.0.0 --num-gpus=8")
        assert other.run("ray start --address 10.77.0.1:6379 --num-gpus 8")[0] == 0
        before = daemons(head) + daemons(other)
        head.run(CLEAN_EXTERNAL)
        for where, address in ((head, "http://10.77.0.1:8265"), (other, "http://10.77.0.1:8265"), (head, "auto")):
            code, out = where.run(SUBMIT % ("", head.place.root), env={"MILES_SCRIPT_EXTERNAL_RAY": "1", "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"})
            assert code == 0 and trained(out), (address, out)
        assert daemons(head) + daemons(other) == before


def test_symmetric_run_over_several_nodes():
    """The same line on each: the node that has the address runs the command when all are there; all end with it, with its code."""
    with rack(3, ssh=False) as all_of_them:
        for line, wanted in (("ray symmetric-run --address 10.77.0.1:6379 --min-nodes 3 --num-gpus 4 -- sh -c 'ray status; exit 5'", 5),
                             ("ray symmetric-run --address 10.77.0.1:6379 --min-nodes 2 --num-gpus 1 -- python3 train.py", 0)):
            hosts_of = all_of_them if "--min-nodes 3" in line else all_of_them[:2]
            others = [h.spawn(line) for h in hosts_of[1:]]  # before there is a head
            time.sleep(0.5)
            code, out = hosts_of[0].run(line, env={"MASTER_ADDR": "10.77.0.1", "PYTHONPATH": "/x:/y"})
            assert code == wanted, (line, code, out)
            assert "On head node. Starting Ray cluster head..." in out and "Running command on head node" in out, out
            assert ("/12.0 GPU" in out and "Command failed with return code 5" in out) if wanted else "trained [] 10.77.0.1" in out, out
            for p in others:
                said, _ = p.communicate(timeout=60 * harness.SLOW)
                assert p.returncode == 0 and "On worker node. Connecting to Ray cluster at 10.77.0.1:6379" in said and "Ray cluster is ready!" in said, (p.returncode, said)
            assert not [d for h in hosts_of for d in daemons(h)]
        wait = "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=2 ray symmetric-run --address 10.77.0.1:6379 --min-nodes 3 --num-gpus 1 -- true"
        code, out = all_of_them[0].run(wait)
        assert code == 1 and "Timed out waiting for other nodes to start." in out, out
        code, out = all_of_them[1].run(wait)
        assert code == 1 and "Timed out waiting for head node to start." in out, out
        assert not [d for h in all_of_them for d in daemons(h)]


def test_4_6_all_forms():
    with rack(2, ssh=False) as (head, other):
        for line in ("ray start --head --port=6379 --node-ip-address 10.77.0.1",
                     "ray start --head --node-ip-address=10.77.0.1 --port 6379 --num-gpus=8 --disable-usage-stats --dashboard-host 0.0.0.0 --dashboard-port 8265",
                     "ray start --head --node-ip-address 10.77.0.1 --num-gpus 8 --dashboard-host=0.0.0.0 --dashboard-port=8265 --temp-dir /tmp/x"):
            code, out = head.run(line)
            assert code == 0, out
            code, out = other.run("ray start --address 10.77.0.1:6379 --num-gpus 8 --node-ip-address 10.77.0.2 --disable-usage-stats")
            assert code == 0, out
            for submit in ("--address=http://127.0.0.1:8265", "--address=http://10.77.0.1:8265", "--address=auto", "--address=$RAY_ADDRESS", ""):
                if "0.0.0.0" not in line and "10.77" in submit:
                    continue
                name = shlex.quote(f"s{time.monotonic_ns()}")
                code, out = head.run(f"RAY_ADDRESS= ; ray job submit {submit} --submission-id {name} --runtime-env-json='{{}}' --no-wait -- echo 'a  b'")
                assert code == 0, (submit, out)
                assert f"Job '{name}' submitted successfully" in out
            assert "/8.0 GPU" in head.run("ray status")[1] or "/16.0 GPU" in head.run("ray status")[1]
            for h in (other, head):
                assert "Stopped all" in h.run("ray stop")[1]


if __name__ == "__main__":
    harness.main(dict(globals()))
