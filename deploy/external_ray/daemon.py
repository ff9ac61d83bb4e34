"""One daemon of ours under a guard, and the actor that holds a node's: imported by the job's command, and by Ray's workers
on every node from the job's working_dir, so that paths are those of the node."""
import json
import os
import select
import subprocess
import sys
import time

import ray

from external_ray.guard import ORPHAN_S, sweep

HERE = os.path.dirname(os.path.abspath(__file__))
READY_S, GONE_S = 60, 45


class Refused(Exception):
    """One sentence for whoever submitted this."""


def amount(x):
    return f"{x:g}"


def own_programs(given):
    """The folder of Furlong's programs here: the one that is named, else what came along."""
    return given or os.path.join(os.path.dirname(HERE), "bin")


def clean_env(devices=None):
    """What daemons and workers get: nothing that is Ray's own, nor what this job's driver alone was given."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "FURLONG_RUNTIME", "FURLONG_STATE", "FURLONG_TOKEN",
                                                                     "MILES_SCRIPT_", "FURLONG_ADDRESS")) or k.startswith("RAY_memory_")}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    return env


class Daemon:
    """One program of ours under a guard. Its end is this object's or this process's, whichever comes first."""

    def __init__(self, argv, token, env):
        self.guard = subprocess.Popen([sys.executable, os.path.join(HERE, "guard.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      env=env, start_new_session=True, bufsize=0)  # select() sees all that was not read
        self.guard.stdin.write(json.dumps({"argv": argv, "token": token, "env": env}).encode() + b"\n")
        self.out, self.program = self.guard.stdout, os.path.basename(argv[0])
        self.guard.wait()
        self.over = self.folder = None  # its last line; its folder
        self.folder = (self.line(READY_S) or {}).get("folder")

    def line(self, seconds):
        """None: nothing was said in that time."""
        if self.over or not select.select([self.out], [], [], seconds)[0]:
            return self.over
        text = self.out.readline()
        said = json.loads(text) if text else {"ended": None, "why": "its guard was killed"}
        if not text and self.folder:
            sweep(self.folder)
        self.over = said if "ended" in said else None
        return said

    def ready(self):
        said = self.line(READY_S)
        if said is None:
            raise Refused(f"{self.program} on {os.uname().nodename} is not ready after {READY_S} s")
        if "error" in said or "ended" in said:
            raise Refused(f"{self.program} on {os.uname().nodename}: {said.get('error') or said.get('why') or 'ended at once'}")
        return said

    def end(self):
        """Asks for its end and waits until nothing of it is left."""
        if not self.guard.stdin.closed:
            self.guard.stdin.close()
        due = time.monotonic() + GONE_S
        while not self.over and (left := due - time.monotonic()) > 0:
            self.line(left)
        return self.over


def node_argv(programs, address, ip, name, cpus, gpus):
    argv = [os.path.join(programs, "furlong-node"), f"--address={address}", f"--node-ip-address={ip}", f"--node-name={name}", "--private",
            f"--orphan-timeout={ORPHAN_S}", f"--wait={READY_S - 10}", f"--num-gpus={gpus}"]
    return argv + ([f"--num-cpus={amount(cpus)}"] if cpus > 0 else [])


class FurlongNode:
    """The actor: holds a node's share of the placement group, and its daemon."""

    def start(self, programs, address, token, ip, name, cpus, gpus, logical):
        programs = own_programs(programs)
        devices = None if logical or not gpus else ",".join(str(x) for x in ray.get_gpu_ids())
        try:
            self.daemon = Daemon(node_argv(programs, address, ip, name, cpus, gpus), token, clean_env(devices))
            self.daemon.ready()
            return None
        except (Refused, OSError) as e:
            return str(e)

    def end(self):
        said = self.daemon.end() if hasattr(self, "daemon") else {}
        return said is not None
