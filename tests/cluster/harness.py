"""What a cluster test needs: a place of its own, the programs as a user runs them, and TAP at the end.

A test is a function whose name begins with test_, or with p and a number: the case of people in trouble that it holds. It
gets a Place. Nothing here waits for a while: wait_for() looks
until a condition holds or its deadline is over, and then says what was last seen."""
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

BIN = os.environ["FURLONG_BIN_DIR"]
SLOW = float(os.environ.get("FURLONG_TEST_SLOW", "1"))  # sanitizers: deadlines are that much longer
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Skip(Exception):
    """This machine cannot show it; the text says why."""


class Result:
    def __init__(self, args, code, out, err):
        self.args, self.code, self.out, self.err = args, code, out, err

    def __str__(self):
        return f"{' '.join(self.args)}: exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    def json(self):
        return json.loads(self.out)


def wait_for(what, look, seconds=20):
    """The first true value of look(); its last value is in the failure."""
    end = time.monotonic() + seconds * SLOW
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < end, f"not within {seconds} s: {what}; last seen: {seen!r}"
        time.sleep(0.02)


def start_time(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
            return f.read().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(root):
    """By the runtime folder in the environment; keepers have none, but their spec's path."""
    mark, path, found = f"FURLONG_RUNTIME_DIR={root}/r".encode(), f"{root}/r/".encode(), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                cmd = f.read()
            with open(f"/proc/{pid}/environ", "rb") as f:
                ours = mark in f.read().split(b"\0") or (b"furlong-keep" in cmd and path in cmd)
            if ours and alive(pid) and int(pid) != os.getpid():
                found.append((int(pid), cmd.replace(b"\0", b" ").decode(errors="replace").strip()))
    return found


def kill_all(root):
    for pid, _ in processes_of(root):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class Guard:
    """Ends what a test started when the test itself is killed: a process that reads the names of places until the
    test is no more."""
    pipe = None

    @classmethod
    def start(cls):
        cls.pipe = subprocess.Popen([sys.executable, __file__, "--guard"], stdin=subprocess.PIPE, text=True,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True).stdin

    @classmethod
    def knows(cls, root):
        if cls.pipe:
            cls.pipe.write(root + "\n")
            cls.pipe.flush()

    @staticmethod
    def run():
        roots = [line.strip() for line in sys.stdin]
        for root in roots:
            if os.path.isdir(root) and not os.environ.get("FURLONG_TEST_KEEP"):
                kill_all(root)
                shutil.rmtree(root, ignore_errors=True)


def together(cells, at_once=3):
    """Runs (function, arguments) side by side: most of a cluster's time is waiting. The first failure counts."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda c: c[0](*c[1:]), cells))


class Place:
    """One host as far as Furlong can tell: runtime and state folders of its own, and a network namespace if given."""

    def __init__(self, root, netns=None, name=None):
        self.root, self.netns, self.name = root, netns, name
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("FURLONG_", "RAY_", "MILES_"))}
        self.env.update(HOME=root, FURLONG_RUNTIME_DIR=f"{root}/r", FURLONG_STATE_DIR=f"{root}/s", FURLONG_BIN_DIR=BIN)
        self.children = []
        Guard.knows(root)
        os.makedirs(root, exist_ok=True)

    def argv(self, args):
        args = [f"{BIN}/{args[0]}", *map(str, args[1:])]
        return ["ip", "netns", "exec", self.netns, *args] if self.netns else args

    def spawn(self, *args, env=None, **kw):
        kw.setdefault("stdout", subprocess.PIPE)
        kw.setdefault("stderr", subprocess.PIPE)
        p = subprocess.Popen(self.argv(args), env={**self.env, **(env or {})}, text=True, cwd=self.root,
                             stdin=subprocess.DEVNULL, **kw)
        self.children.append(p)
        return p

    def run(self, *args, env=None, seconds=60, check=None):
        """Runs to its end; check: the exit code it must have."""
        p = self.spawn(*args, env=env)
        try:
            out, err = p.communicate(timeout=seconds * SLOW)
        except subprocess.TimeoutExpired:
            p.kill()
            out, err = p.communicate()
            raise AssertionError(f"not over after {seconds} s: " + str(Result(args, p.returncode, out, err))) from None
        r = Result(args, p.returncode, out, err)
        assert check is None or r.code == check, f"exit {check} wanted: {r}"
        return r

    def furlong(self, *args, **kw):
        return self.run("furlong", *args, **kw)

    def info(self, kind):
        """The json files of daemons that run here, by kind 'h' (heads) or 'n' (nodes)."""
        found, base = [], f"{self.root}/r"
        for d in sorted(os.listdir(base)) if os.path.isdir(base) else []:
            path = f"{base}/{d}/{'head' if kind == 'h' else 'node'}.json"
            if d.startswith(kind + "-") and os.path.exists(path):
                with contextlib.suppress(ValueError, FileNotFoundError), open(path, encoding="utf-8") as f:
                    j = json.load(f)
                    j["dir"] = f"{base}/{d}"
                    if str(j["start_time"]) == start_time(j["pid"]):
                        found.append(j)
        return found

    def start_head(self, *args, nodes=True, **kw):
        kw.setdefault("check", 0)
        self.furlong("start", "--head", "--port=0", "--dashboard-port=0", *([] if nodes else ["--num-gpus=0"]), *args, **kw)
        return self.info("h")[0]

    def http(self, path, body=None, method=None, raw=False):
        url = self.info("h")[0]["http"]
        url = (url if url.startswith("http") else "http://" + url) + path
        req = urllib.request.Request(url, method=method, data=None if body is None else json.dumps(body).encode(),
                                     headers={"Content-Type": "application/json"} if body is not None else {})
        with _opener.open(req, timeout=20 * SLOW) as r:
            data = r.read()
        return data if raw else json.loads(data)

    def processes(self):
        """(pid, command line) of every process of this place."""
        return processes_of(self.root)

    def left_behind(self):
        """Whatever a clean end must not leave: processes, sockets, runtime files, temporary files."""
        left = [f"process {pid}: {cmd}" for pid, cmd in self.processes()]
        for base, _, files in os.walk(f"{self.root}/r"):
            left += [f"file {base}/{f}" for f in files]
        left += [f"temporary {base}/{f}" for base, _, files in os.walk(self.root) for f in files if ".tmp" in f]
        return left

    def end(self):
        """Ends what this test started and forgot, by its id."""
        kill_all(self.root)
        for p in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.communicate(timeout=5)


@contextlib.contextmanager
def saying(what):
    """A failure inside says in which row of a table it was."""
    try:
        yield
    except AssertionError as e:
        raise AssertionError(f"{what}: {e}") from None


@contextlib.contextmanager
def place():
    root = tempfile.mkdtemp(prefix="fl-", dir="/tmp")
    p = Place(root)
    try:
        yield p
    finally:
        p.end()
        if not os.environ.get("FURLONG_TEST_KEEP"):
            shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def hosts(n):
    """n Places with an address each (10.77.0.1 ...), in network namespaces on one bridge."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise Skip("network namespaces need root and iproute2")
    tag = f"fl{os.getpid() % 100000}"
    ip = lambda *a: subprocess.run(["ip", *a], check=True, capture_output=True, text=True)
    made, root = [], tempfile.mkdtemp(prefix="fl-", dir="/tmp")
    try:
        ip("netns", "add", f"{tag}b")
        made.append(f"{tag}b")
        ip("-n", f"{tag}b", "link", "add", "name", "hub", "type", "bridge")
        ip("-n", f"{tag}b", "link", "set", "hub", "up")
        places = []
        for i in range(1, n + 1):
            ns = f"{tag}n{i}"
            ip("netns", "add", ns)
            made.append(ns)
            ip("-n", f"{tag}b", "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", ns)
            ip("-n", f"{tag}b", "link", "set", f"v{i}", "master", "hub", "up")
            ip("-n", ns, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            ip("-n", ns, "link", "set", "eth0", "up")
            ip("-n", ns, "link", "set", "lo", "up")
            ip("-n", ns, "route", "add", "default", "dev", "eth0")
            if shutil.which("ethtool"):  # partial checksums over veth stop TCP on some kernels
                subprocess.run(["ip", "netns", "exec", ns, "ethtool", "-K", "eth0", "tx", "off"], capture_output=True)
            places.append(Place(f"{root}/{i}", netns=ns, name=f"n{i}"))
            places[-1].env["FURLONG_TOKEN_PATH"] = f"{root}/token"
    except subprocess.CalledProcessError as e:
        for ns in made:
            subprocess.run(["ip", "netns", "del", ns], capture_output=True)
        shutil.rmtree(root, ignore_errors=True)
        raise Skip(f"no network namespaces here: {e.stderr.strip()}") from None
    try:
        yield places
    finally:
        for p in places:
            p.end()
        for ns in made:
            subprocess.run(["ip", "netns", "del", ns], capture_output=True)
        if not os.environ.get("FURLONG_TEST_KEEP"):
            shutil.rmtree(root, ignore_errors=True)


def main(names):
    """Runs the tests of a module's names, or those named on the command line; prints TAP."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of a test are ours to reap
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a runner's deadline: places end what they started
    Guard.start()
    tests = [(k, f) for k, f in names.items() if re.match(r"test_|p\d+_", k) and callable(f)]
    only = sys.argv[1:]
    if only:
        tests = [t for t in tests if t[0] in only or t[0][5:] in only]
    print(f"1..{len(tests)}", flush=True)
    bad = 0
    for i, (name, test) in enumerate(tests, 1):
        try:
            test()
            print(f"ok {i} - {name}", flush=True)
        except Skip as e:
            print(f"ok {i} - {name} # SKIP {e}", flush=True)
        except SystemExit:
            raise
        except BaseException:  # noqa: the next test shall run all the same
            bad += 1
            print(f"not ok {i} - {name}", flush=True)
            print("".join("# " + line + "\n" for line in traceback.format_exc().splitlines()), end="", flush=True)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    sys.exit(1 if bad else 0)


if __name__ == "__main__" and sys.argv[1:] == ["--guard"]:
    Guard.run()
