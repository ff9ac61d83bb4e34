"""Heads to be driven side by side: a real Ray's, from PyPI, and ours. Each has a folder of its own, by which its processes are
found and ended: Ray's own `stop` ends whatever looks like Ray."""
import os
import signal
import socket
import subprocess
import sys
import time

RAYENV = os.environ.get("FURLONG_TEST_RAYENV") or os.path.expanduser("~/.cache/furlong-test/ray")
PYTHON = os.path.join(RAYENV, "bin", "python")
RAY = os.path.join(RAYENV, "bin", "ray")


def skip(why):
    print(f"1..0 # SKIP {why}")
    sys.exit(0)


def free_ports(n):
    """Above Ray's own range for workers, which it refuses."""
    out, held = [], []
    port = 21000 + os.getpid() % 4000
    while len(out) < n:
        port += 1
        s = socket.socket()
        try:
            s.bind(("127.0.0.1", port))
            held.append(s)
            out.append(port)
        except OSError:
            s.close()
    for s in held:
        s.close()
    return out


def why_none():
    """None: a real Ray is there now. Else why it cannot be had."""
    if os.path.exists(PYTHON) and subprocess.run([PYTHON, "-c", "import ray, aiohttp"], capture_output=True).returncode == 0:
        return None
    try:
        os.makedirs(os.path.dirname(RAYENV), exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", RAYENV], check=True, capture_output=True, timeout=120)
        p = subprocess.run([PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "ray[default]"], capture_output=True,
                           text=True, timeout=900)
    except (subprocess.SubprocessError, OSError) as e:
        return f"no virtual environment with Ray can be made here: {e}"
    lines = p.stderr.strip().splitlines()
    return f"Ray cannot be had from PyPI: {lines[-1] if lines else 'pip said nothing'}" if p.returncode else None


def need_ray():
    why = why_none()
    if why:
        skip(why)


class Head:
    """One that was started, and the processes that are to go with it."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "FURLONG_"))}
        self.env["HOME"] = os.path.join(folder, "home")
        os.makedirs(self.env["HOME"])
        self.pids = []

    def run(self, *words, **kw):
        return subprocess.run(words, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120, **kw)

    def ours(self):
        """Processes whose command line or environment names this folder."""
        out = []
        for pid in os.listdir("/proc"):
            if not pid.isdigit() or int(pid) == os.getpid():
                continue
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    line = f.read()
                with open(f"/proc/{pid}/environ", "rb") as f:
                    line += f.read()
            except OSError:
                continue
            if self.folder.encode() in line:
                out.append(int(pid))
        return out

    def end(self):
        for _ in range(3):
            for pid in self.ours():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            time.sleep(0.2)


def start_ray(folder):
    h = Head(folder)
    gcs, http, agent, client = free_ports(4)
    p = h.run(RAY, "start", "--head", f"--port={gcs}", f"--dashboard-port={http}", "--num-cpus=2",
              "--num-gpus=0", '--resources={"widget": 2}', "--disable-usage-stats", f"--temp-dir={folder}/t",
              f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}")
    h.address, h.gcs = f"http://127.0.0.1:{http}", f"127.0.0.1:{gcs}"
    h.why = None if p.returncode == 0 else (p.stderr or p.stdout)[-400:]
    return h


def start_ours(folder, build, version, commit):
    h = Head(folder)
    h.env.update(FURLONG_RUNTIME_DIR=f"{folder}/r", FURLONG_STATE_DIR=f"{folder}/s", FURLONG_RAY_VERSION=version,
                 FURLONG_RAY_COMMIT=commit, FURLONG_BIN_DIR=os.path.join(build, "bin"))
    gcs, http = free_ports(2)
    p = h.run(os.path.join(build, "bin", "furlong"), "start", "--head", "--port", str(gcs), "--dashboard-port", str(http), "--num-cpus",
              "2", "--num-gpus", "0", "--resources", '{"widget": 2}')
    h.address, h.gcs = f"http://127.0.0.1:{http}", f"127.0.0.1:{gcs}"
    h.why = None if p.returncode == 0 else (p.stderr or p.stdout)[-400:]
    return h
