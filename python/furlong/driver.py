"""What the job's own process does: places the roles, starts them, calls all of them, moves weights."""
import json
import os

from . import _data
from .run import Answer


class Layout:
    """The ranks that the flags describe, reserved. Given back when it is collected and its groups have ended."""

    def __init__(self, core):
        self._core = core

    def count(self, role):
        return self._core.count(role)

    def describe(self):
        """group, master, roles with every rank's node, address and devices, and the flags that were derived."""
        return json.loads(self._core._json())

    def print(self, fd=1):
        self._core.print(fd)

    def launch(self, role, argv, env=None, restarts=0, backoff=0.1, backoff_max=10.0, start=300.0, cwd=None, wait=True):
        """One process per rank; returns when all have joined, or with wait=False when they are started:
        Group.wait() then, so that roles start side by side. restarts: by the head, for each member."""
        words = [os.fsencode(a) for a in argv]
        extra = [os.fsencode(f"{k}={v}") for k, v in (env or {}).items()]
        return Group(self._core._launch(role, words, extra, restarts, backoff, backoff_max, start, cwd, wait))


class Group:
    """The processes of one role, also over restarts."""

    def __init__(self, core):
        self._core = core

    def __len__(self):
        return len(self._core)

    def member(self, i):
        """rank, attempt, state ("starting", "live", "ended"), node, why."""
        return self._core.member(i)

    @property
    def members(self):
        return [self._core.member(i) for i in range(len(self._core))]

    def wait(self, budget=None):
        """Until all are live and, after an update, hold a version."""
        self._core._wait(budget)

    def restart(self, budget=None):
        self._core._restart(budget)

    def end(self):
        """Asks every member to stop, then by force; returns when all have ended."""
        self._core.end()

    def ask_all(self, method, body=None, blob=None, budget=None):
        """The same call to every member, in lane 0; their answers in order of rank. Raises if one failed."""
        from .blob import buffer
        return [Answer(*a) for a in self._core._ask_all(method, _data.pack(body), buffer(blob), budget)]


def update(run, source, target, version, set="policy", mode=None, least_engines=0, budget=120.0, slots=0,
           bucket_bytes=0, dir=None):
    """Moves a published version from one group to another: a dict of version, digest, bytes, seconds, who was left."""
    r = run._update(source._core, target._core, version, set, mode, least_engines, budget, slots, bucket_bytes, dir)
    r["digest"] = "%016x%016x" % r["digest"]
    return r
