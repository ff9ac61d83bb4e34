"""Runs one daemon of Furlong for somebody who may die without a word, and leaves nothing of it behind.

Its source comes to it on standard input (daemon.py: Daemon), then two JSON objects, one a line, then silence:

    {"package": FOLDER or null, "files": {NAME: BYTES}}    the programs are taken from there, into a folder of its own
    {"argv": [PROGRAM, ARG...], "token": text, "env": {...}}    and this one is run

The end of its input is the starter's end. Standard output: {"folder": path}, what the daemon says on its --ready-fd, and
{"ended": CODE, "why": text} once the daemon, its workers and that folder are gone. Without the last line it was killed
itself: the daemon then ends as well, and the starter sweeps.

It is nobody's child and leads a session of its own: what Ray ends together with a worker, or with a job's command, is
not this. When the starter ends, in whatever way, the daemon is stopped, then killed; its workers end with it or by their keepers.
The standard library alone, so that it costs 10 MB and no import of Ray."""
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

# The program that reads this one from its standard input and becomes it; its name is for those who look at processes.
READ = ("import os; name = 'guard.py'; n = int(os.read(0, 8)); s = b''\n"
        "while len(s) < n: s += os.read(0, n - len(s)) or os._exit(1)\n"
        "exec(compile(s, name, 'exec'))")
STOP_S, KEEPERS_S = 15, 12  # a daemon ends its workers in 10 s; keepers without a daemon after --orphan-timeout=5
ORPHAN_S = 5
WHOLE_S = 30
TAIL_BYTES = 600


def belongs(pid, folder):
    """By its runtime folder in the environment; keepers have no environment, but a path below it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            if f"{folder}/r/".encode() in f.read():
                return True
        with open(f"/proc/{pid}/environ", "rb") as f:
            return f"FURLONG_RUNTIME_DIR={folder}/r".encode() in f.read().split(b"\0")
    except OSError:
        return False


def left_of(folder):
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid() and belongs(pid, folder)]


def sweep(folder):
    """Keepers that lost their daemon end by themselves; what has not after a while is killed."""
    due = time.monotonic() + KEEPERS_S
    while (pids := left_of(folder)) and time.monotonic() < due:
        time.sleep(0.05)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    while left_of(folder) and time.monotonic() < due + 5:
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def take(source, to, size):
    """True: it is there, whole. A link, so that it stays when others take the source away; a copy on another disk."""
    try:
        if os.stat(source).st_size != size:
            return False
        os.makedirs(os.path.dirname(to), exist_ok=True)
        with contextlib.suppress(OSError):
            os.link(source, to)
            return os.stat(to).st_size == size
        shutil.copy2(source, to)
        return os.stat(to).st_size == size
    except FileNotFoundError:
        return False


def take_all(package, files, into):
    """Nodes of one machine may share the folder that Ray unpacks the package into, and each of them unpacks it anew."""
    due, left = time.monotonic() + WHOLE_S, dict(files)
    while left and time.monotonic() < due:
        for name, size in list(left.items()):
            if take(f"{package}/{name}", f"{into}/{name}", size):
                del left[name]
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{into}/{name}")
        if left:
            time.sleep(0.1)
    if left:
        raise RuntimeError(f"{package} is not whole after {WHOLE_S} s: it lacks {min(left)}")


def with_parent():
    """PR_SET_PDEATHSIG: a daemon whose guard was killed shall not stay; this process has one thread."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def tail(path):
    with contextlib.suppress(OSError), open(path, "rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL_BYTES))
        return f.read().decode(errors="replace").strip()
    return ""


def start(spec, folder):
    os.mkdir(f"{folder}/r", 0o700)
    os.mkdir(f"{folder}/s", 0o700)
    fd = os.open(f"{folder}/token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, spec["token"].encode())
    os.close(fd)
    env = {**spec["env"], "FURLONG_RUNTIME_DIR": f"{folder}/r", "FURLONG_STATE_DIR": f"{folder}/s",
           "FURLONG_TOKEN_PATH": f"{folder}/token"}
    ready = os.dup(1)
    try:
        with open(f"{folder}/log", "ab") as log:
            return subprocess.Popen([*spec["argv"], f"--ready-fd={ready}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env,
                                    pass_fds=(ready,), start_new_session=True, preexec_fn=with_parent)
    finally:
        os.close(ready)


def watch(child):
    """Until the starter or the daemon has ended, whichever is first."""
    over = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(1))
    fd = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(fd, select.POLLIN)
    while not over:
        for at, _ in poll.poll(1000):
            if at == fd or os.read(0, 4096) == b"":
                over.append(1)
    os.close(fd)


def say(what):
    with contextlib.suppress(OSError):  # nobody may read any more
        os.write(1, (json.dumps(what) + "\n").encode())


def hear():
    """One line; None: the starter has ended."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    return json.loads(line)


def run():
    folder = tempfile.mkdtemp(prefix="furlong-run-", dir="/tmp")  # short: sockets lie below it
    code, why = None, ""
    try:
        first = hear()
        if first and first["package"]:
            take_all(first["package"], first["files"], f"{folder}/p")
        say({"folder": folder})
        spec = hear()
        if spec:
            child = start(spec, folder)
            watch(child)
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    child.kill()
            code = child.wait()
            why = tail(f"{folder}/log")
    except Exception as e:  # whoever reads shall know
        why = f"{type(e).__name__}: {e}"
    finally:
        sweep(folder)
        say({"ended": code, "why": why})


def main():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    os.setsid()
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    os.chdir("/")
    run()


if __name__ == "__main__":
    main()
