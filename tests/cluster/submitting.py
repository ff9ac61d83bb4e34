"""What tests of jobs share: one cluster for those that leave it as it was, both names of the command, a job's record."""
import atexit
import os
import shutil
import tempfile

import harness
from harness import Place

BOTH = (("furlong", "job", "submit"), ("ray", "job", "submit"))
_shared = []


def shared():
    """A cluster of two devices for those that leave it as it was; one head for all of them."""
    if not _shared:
        p = Place(tempfile.mkdtemp(prefix="fl-", dir="/tmp"))
        atexit.register(shutil.rmtree, p.root, ignore_errors=True)
        atexit.register(p.end)
        p.start_head("--num-gpus=2", "--num-cpus=4")
        by_name(p)
        _shared.append(p)
    return _shared[0]


def by_name(p):
    """The same binary by Ray's name: p.call("ray", ...)."""
    os.makedirs(f"{p.root}/ray", exist_ok=True)
    if not os.path.lexists(f"{p.root}/ray/ray"):
        os.symlink(f"{harness.BIN}/furlong", f"{p.root}/ray/ray")
    plain = p.argv
    ours, theirs = f"{harness.BIN}/furlong", f"{p.root}/ray/ray"
    p.argv = lambda args: [theirs if x == ours else x for x in plain(["furlong", *args[1:]])] if args[0] == "ray" else plain(args)
    return p


def submit(p, program, *args, **kw):
    """program: of BOTH. Ray's name is given the address, as it has no file of ours to look at."""
    at = [f"--address={p.info('h')[0]['http']}"] if program[0] == "ray" else []
    return p.run(*program, *at, *args, **kw)


def jobs(p):
    return {j["submission_id"]: j for j in p.furlong("job", "list", "--json", check=0).json()}


def job(p, name):
    return p.furlong("job", "status", name, "--json", check=0).json()
