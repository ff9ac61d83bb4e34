"""A run of Furlong inside a Ray cluster: the command of the job that `furlong train` submits there.

With Ray's own API it reserves each node's devices and cores in one placement group, starts one worker daemon a node in an
actor of that group, starts the head beside itself, gives the run to it, follows it, and returns its exit code. All goes at the
end, and when any part of it is killed: daemons belong to guards (guard.py), which see their starter end; actors and the group
belong to this job of Ray.

    bootstrap.py [--devices=N] [--nodes=A,B | --num-nodes=N] [--node-gpus=N] [--join-timeout=S] [--programs=FOLDER]
                 [--cwd=FOLDER] [--cluster-version=V] -- FLAG of furlong train...

FURLONG_RAY_FAULT=POINT makes it kill itself there: connect, group, daemons, head, run."""
import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time

import ray
from ray import cloudpickle
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from external_ray import daemon, guard  # noqa: E402
from external_ray.daemon import GONE_S, Daemon, FurlongNode, Refused, amount, clean_env, node_argv  # noqa: E402

for module in (daemon, guard):
    cloudpickle.register_pickle_by_value(module)
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

ACTOR_S, HEAD_S = 120, 5
ID = "ray.io/node-id"


def say(text):
    print(f"furlong: {text}", flush=True)


@contextlib.contextmanager
def quiet():
    """What Ray's core prints about this host is no part of the run's output, unless it fails."""
    with tempfile.TemporaryFile() as kept:
        was = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(was, kept.read())
            raise
        finally:
            os.dup2(was, 2)
            os.close(was)


def fault(point):
    if os.environ.get("FURLONG_RAY_FAULT") == point:
        say(f"killed at {point}, as FURLONG_RAY_FAULT says")
        os.kill(os.getpid(), signal.SIGKILL)


def programs_of(package):
    """{name: bytes} of what came along, to be told from what is being unpacked."""
    found = {}
    for part in ("bin", "lib"):
        for name in os.listdir(f"{package}/{part}") if os.path.isdir(f"{package}/{part}") else []:
            found[f"{part}/{name}"] = os.path.getsize(f"{package}/{part}/{name}")
    return found


# ==== which nodes, and what of each ===================================================================================
def address_key(node):
    text = node["NodeManagerAddress"]
    parts = text.split(".")
    return (0, tuple(int(x) for x in parts)) if len(parts) == 4 and all(x.isdigit() for x in parts) else (1, text)


def names_of(node):
    return {node.get("NodeName", ""), node["NodeManagerHostname"], node["NodeManagerHostname"].split(".")[0], node["NodeManagerAddress"],
            node["NodeID"]} - {""}


def free_of():
    try:
        from ray._private.state import available_resources_per_node
        return available_resources_per_node()
    except Exception:  # its place is no promise of Ray's; without it the sentence says less
        return {}


def choose(nodes, a):
    """The nodes of the run, by address: those named, or the first so many, or all. Where Ray has GPUs, those that have some."""
    nodes = sorted(nodes, key=address_key)
    if a.nodes:
        wanted, chosen = a.nodes.split(","), []
        for name in wanted:
            found = [n for n in nodes if name in names_of(n)]
            if len(found) != 1:
                raise Refused(f"--nodes: {name} is {'no node' if not found else 'the name of several nodes'} of this Ray cluster; it has "
                              + ", ".join(sorted(min(names_of(n), key=len) for n in nodes)))
            chosen.append(found[0])
        return chosen
    with_gpus = [n for n in nodes if n["Resources"].get("GPU", 0) >= 1]
    nodes = with_gpus or [n for n in nodes if n["Resources"].get("CPU", 0) >= 1] or nodes
    if a.num_nodes and a.num_nodes > len(nodes):
        raise Refused(f"--num-nodes={a.num_nodes}: this Ray cluster has {len(nodes)} nodes{' with GPUs' if with_gpus else ''}")
    return nodes[:a.num_nodes] if a.num_nodes else nodes


def share(node, a, logical):
    """(cores, devices) of a node: all of it, or with --node-gpus so many devices and their part of the cores."""
    cpus, gpus = float(int(node["Resources"].get("CPU", 0))), int(node["Resources"].get("GPU", 0))
    if a.node_gpus is not None and not logical:
        if a.node_gpus > gpus:
            raise Refused(f"--node-gpus={a.node_gpus}: {node['NodeManagerAddress']} has GPU {gpus}")
        cpus = float(max(1, int(cpus * a.node_gpus / gpus))) if gpus and cpus else cpus
        gpus = a.node_gpus
    return cpus, gpus


def table(nodes, shares, free):
    rows = []
    for n, (cpus, gpus) in zip(nodes, shares):
        has = free.get(n["NodeID"])
        for what, ask in (("GPU", gpus), ("CPU", cpus)):
            if ask and has is not None and has.get(what, 0) < ask:
                rows.append(f"{n['NodeManagerAddress']} lacks {what}: {amount(ask)} asked, {amount(has.get(what, 0))} of "
                            f"{amount(n['Resources'].get(what, 0))} free")
    return "; ".join(rows)


# Runs a program that is killed when this process ends: the thread that starts it is the main one.
WITH_US = ("import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
           "if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])")


class Run:
    def __init__(self, a, words):
        self.a, self.words = a, words
        self.group, self.actors, self.own, self.train = None, [], [], None
        self.stopped = threading.Event()
        self.files = {} if a.programs else programs_of(PACKAGE)
        self.head = Daemon(a.programs, PACKAGE, self.files)  # before Ray is asked for anything: its programs stay from here on
        self.own.append(self.head)

    def take_signals(self):
        signal.signal(signal.SIGTERM, lambda *_: self.stopped.set())
        signal.signal(signal.SIGINT, lambda *_: self.stopped.set())

    def connect(self):
        fault("connect")
        self.name = f"furlong-{secrets.token_hex(4)}"
        try:
            with quiet():
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level="warning", namespace=self.name)
        except Exception as e:
            raise Refused(f"this Python's Ray {ray.__version__} does not get into the cluster of Ray {a_version(self.a)}: {str(e).splitlines()[0][:300]}") from None
        self.take_signals()  # Ray has put handlers of its own there
        self.me = ray.get_runtime_context().get_node_id()
        return [n for n in ray.nodes() if n["Alive"]]

    def reserve(self, nodes):
        self.nodes = choose(nodes, self.a)
        self.logical = not any(n["Resources"].get("GPU", 0) >= 1 for n in nodes)
        self.shares = [share(n, self.a, self.logical) for n in self.nodes]
        if self.logical:  # devices in name alone, as many as the run needs
            each = self.a.node_gpus if self.a.node_gpus is not None else -(-self.a.devices // len(self.nodes))
            self.gpus = [each] * len(self.nodes)
            say(f"this Ray cluster has no GPU: {each} logical devices a node")
        else:
            self.gpus = [g for _, g in self.shares]
        if sum(self.gpus) < self.a.devices:
            raise Refused(f"the run needs {self.a.devices} GPUs; this Ray cluster gives {sum(self.gpus)}: "
                          + ", ".join(f"{n['NodeManagerAddress']} {g}" for n, g in zip(self.nodes, self.gpus)))
        bundles = []
        for n, (cpus, gpus) in zip(self.nodes, self.shares):
            bundle = {f"node:{n['NodeManagerAddress']}": 0.001}  # its own: a node without a core to give has it too
            bundle.update({"CPU": cpus} if cpus else {}, **({"GPU": gpus} if gpus else {}))
            bundles.append(bundle)
        try:
            self.group = placement_group(bundles, strategy="STRICT_SPREAD", name=self.name,
                                         bundle_label_selector=[{ID: n["NodeID"]} for n in self.nodes])
        except TypeError:
            raise Refused(f"Ray {ray.__version__} is too old: its placement groups cannot be pinned to nodes (bundle_label_selector)") from None
        fault("group")
        began, said = time.monotonic(), ""
        while not self.group.wait(1):
            self.go_on()
            lacks = table(self.nodes, self.shares, free_of())
            if time.monotonic() - began > self.a.join_timeout:
                raise Refused(f"Ray has not given the nodes after {self.a.join_timeout} s: {lacks or 'it does not say what is missing'}")
            if lacks != said and time.monotonic() - began > 3:
                say(f"waiting for Ray: {lacks}")
                said = lacks

    def start_head(self):
        token = secrets.token_hex(32)
        ip = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == self.me)
        self.info = self.head.start(["furlong-head", "--private", "--until-idle", f"--node-ip-address={ip}", "--port=0", "--dashboard-host=127.0.0.1",
                                     "--dashboard-port=0"], token, clean_env())
        self.token, self.ip = token, ip
        fault("head")

    def start_nodes(self):
        address = self.info["address"]
        kind = ray.remote(FurlongNode)
        waits, taken = [], set()
        for i, (n, (cpus, gpus), devices) in enumerate(zip(self.nodes, self.shares, self.gpus)):
            name = n["NodeManagerHostname"]
            name = name if name not in taken else f"{name}-{i}"
            taken.add(name)
            actor = kind.options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=i)).remote()
            self.actors.append(actor)
            waits.append(actor.start.remote(self.a.programs, self.files, address, self.token, n["NodeManagerAddress"], name, cpus, devices, self.logical))
        if not any(n["NodeID"] == self.me for n in self.nodes):  # the head's own node runs the driver of the run
            self.own.append(Daemon(self.head.programs, None, {}))
            self.own[-1].start(node_argv(address, self.ip, f"{os.uname().nodename}-driver", 0, 0), self.token, clean_env())
        wait_s = max(ACTOR_S, self.a.join_timeout)
        due = time.monotonic() + wait_s
        for n, wait in zip(self.nodes, waits):
            while not ray.wait([wait], timeout=1)[0]:
                self.go_on()
                if time.monotonic() > due:
                    raise Refused(f"the worker daemon of {n['NodeManagerAddress']} is not there after {wait_s} s: Ray has not started its actor")
            try:
                why = ray.get(wait)
            except ray.exceptions.RayError as e:
                why = str(e).strip().splitlines()[0]
            if why:
                raise Refused(f"{n['NodeManagerAddress']}: {why}")
        say(f"{len(self.nodes)} nodes: " + ", ".join(f"{n['NodeManagerAddress']} {g} {'logical devices' if self.logical else 'GPUs'}"
                                                       for n, g in zip(self.nodes, self.gpus)))
        fault("daemons")

    def follow(self):
        env = clean_env()
        env["FURLONG_TOKEN_PATH"] = f"{self.head.folder}/token"
        if os.environ.get("FURLONG_STATE_DIR"):  # where this node keeps records of runs
            env["FURLONG_STATE_DIR"] = os.environ["FURLONG_STATE_DIR"]
        cwd = self.a.cwd if self.a.cwd and os.path.isdir(self.a.cwd) else None
        self.train = subprocess.Popen([sys.executable, "-c", WITH_US, str(os.getpid()), f"{self.head.programs}/furlong", "train",
                                       f"--address={self.info['http']}", *self.words], env=env, stdin=subprocess.DEVNULL, cwd=cwd)
        fault("run")
        gone = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.train.wait(0.2)
            if self.stopped.is_set():
                self.train.terminate()
                self.stopped.clear()
            if gone is None and self.head.line(0):
                gone = time.monotonic()
            if gone and time.monotonic() - gone > HEAD_S:  # it ends with its run: nobody starts it again
                self.train.kill()
                self.train.wait()
                raise Refused(f"the head of the run ended before the run had: {self.head.over['why']}")

    def go_on(self):
        if self.stopped.is_set():
            raise Refused("stopped")

    def give_back(self):
        """Everything, in the order in which each needs the others no more."""
        if self.train and self.train.poll() is None:
            self.train.kill()
        for d in self.own:
            d.leave()
        asked = [(a, a.end.remote()) for a in self.actors]
        for a, end in asked:
            try:
                ray.get(end, timeout=GONE_S)
            except Exception as e:  # its guard does what is left, when the actor is no more
                say(f"a worker daemon did not say that it ended: {str(e).splitlines()[0][:200]}")
            ray.kill(a)
        for d in self.own:
            d.end()
        if self.group:
            remove_placement_group(self.group)
            due = time.monotonic() + 10
            while placement_group_table(self.group).get("state") != "REMOVED" and time.monotonic() < due:
                time.sleep(0.1)


def a_version(a):
    return a.cluster_version or "an unknown version"


def flags(argv):
    at = argv.index("--") if "--" in argv else len(argv)
    p = argparse.ArgumentParser(prog="bootstrap.py")
    p.add_argument("--devices", type=int, default=1)
    p.add_argument("--nodes")
    p.add_argument("--num-nodes", type=int)
    p.add_argument("--node-gpus", type=int)
    p.add_argument("--join-timeout", type=int, default=300)
    p.add_argument("--programs")
    p.add_argument("--cwd")
    p.add_argument("--cluster-version")
    return p.parse_args(argv[:at]), argv[at + 1:]


def main(argv):
    a, words = flags(argv)
    run, code = None, 1
    try:
        run = Run(a, words)
        run.take_signals()
        run.reserve(run.connect())
        run.start_head()
        run.start_nodes()
        run.go_on()
        code = run.follow()
        code = code if code >= 0 else 128 - code
    except Refused as e:
        say(str(e))
    finally:
        if run:
            run.give_back()
        if ray.is_initialized():
            ray.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
