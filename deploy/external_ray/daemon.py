"""One daemon of ours under a guard, and the actor that holds a node's.

Travels to Ray's workers by value (bootstrap.py), for on a node whose package is being unpacked anew an import would fail:
nothing here may depend on where this file lies."""
import json
import os
import select
import subprocess
import sys
import time

import ray

from external_ray import guard

with open(guard.__file__, encoding="utf-8") as f:
    GUARD = f.read().encode()
READY_S, GONE_S = 60, 45


class Refused(Exception):
    """One sentence for whoever submitted this."""


def amount(x):
    return f"{x:g}"


def clean_env(devices=None):
    """What daemons and workers get: nothing that is Ray's own, nor what this job's driver alone was given."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "FURLONG_RUNTIME", "FURLONG_STATE", "FURLONG_TOKEN",
                                                                     "MILES_SCRIPT_", "FURLONG_ADDRESS")) or k.startswith("RAY_memory_")}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    return env


class Daemon:
    """A guard with the programs, and one of them when start() says which. Their end is this object's or this process's,
    whichever comes first."""

    def __init__(self, programs, package, files):
        """programs: a folder that is there; None: the files of package, taken into the guard's folder."""
        self.guard = subprocess.Popen([sys.executable, "-c", guard.READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_env(),
                                      start_new_session=True, bufsize=0)  # select() sees all that was not read
        self.out, self.program = self.guard.stdout, "the guard"
        self.over = self.folder = None  # its last line; its folder
        self.tell_bytes(b"%8d" % len(GUARD) + GUARD)
        self.tell({"package": None if programs else package, "files": files})
        self.guard.wait()
        self.folder = self.ready()["folder"]
        self.programs = programs or f"{self.folder}/p/bin"

    def tell_bytes(self, data):
        while data:
            data = data[self.guard.stdin.write(data):]

    def tell(self, what):
        self.tell_bytes(json.dumps(what).encode() + b"\n")

    def line(self, seconds):
        """None: nothing was said in that time."""
        if self.over or not select.select([self.out], [], [], seconds)[0]:
            return self.over
        text = self.out.readline()
        said = json.loads(text) if text else {"ended": None, "why": "its guard was killed"}
        if not text and self.folder:
            guard.sweep(self.folder)
        self.over = said if "ended" in said else None
        return said

    def ready(self):
        said = self.line(READY_S)
        if said is None:
            raise Refused(f"{self.program} on {os.uname().nodename} is not ready after {READY_S} s")
        if "error" in said or "ended" in said:
            raise Refused(f"{self.program} on {os.uname().nodename}: {said.get('error') or said.get('why') or 'ended at once'}")
        return said

    def start(self, argv, token, env):
        """argv: the name of the program first. What it says of itself once it serves."""
        self.program = argv[0]
        self.tell({"argv": [f"{self.programs}/{argv[0]}", *argv[1:]], "token": token, "env": env})
        return self.ready()

    def leave(self):
        if not self.guard.stdin.closed:
            self.guard.stdin.close()

    def end(self):
        """Asks for its end and waits until nothing of it is left."""
        self.leave()
        due = time.monotonic() + GONE_S
        while not self.over and (left := due - time.monotonic()) > 0:
            self.line(left)
        return self.over


def node_argv(address, ip, name, cpus, gpus):
    argv = ["furlong-node", f"--address={address}", f"--node-ip-address={ip}", f"--node-name={name}", "--private",
            f"--orphan-timeout={guard.ORPHAN_S}", f"--wait={READY_S - 10}", f"--num-gpus={gpus}"]
    return argv + ([f"--num-cpus={amount(cpus)}"] if cpus > 0 else [])


class FurlongNode:
    """The actor: holds a node's share of the placement group, and its daemon."""

    def start(self, programs, files, address, token, ip, name, cpus, gpus, logical):
        """None, or why it is not there."""
        devices = None if logical or not gpus else ",".join(str(x) for x in ray.get_gpu_ids())
        try:
            self.daemon = Daemon(programs, os.getcwd(), files)  # Ray starts its workers in the package
            self.daemon.start(node_argv(address, ip, name, cpus, gpus), token, clean_env(devices))
            return None
        except (Refused, OSError) as e:
            return str(e)

    def end(self):
        return self.daemon.end() is not None if hasattr(self, "daemon") else True
