"""The seat of a process in a run, and what comes to it."""
import atexit
import contextlib
import json
import os
import threading
import traceback

from . import _core, _data
from .blob import buffer, read
from .errors import BY_STATUS, Cancelled, Error, Internal, Unsupported

_core._check()  # in every interpreter that imports this: the module itself is loaded once
_NEVER_REFUSED = ("pause", "commit")  # to the library any answer is a yes: see furlong_weights_commit()
LATER = object()  # a handler's answer: it keeps the event and answers it itself
_current = None
_lock = threading.Lock()


class Event(_core.Event):
    """Something to answer, once: reply(), refuse(), or weights.commit(). An event that is dropped is refused.

    what     "call", "pause", "commit", "resume", "offload", "onload", "squeeze", "stop"
    method   of a call; sender "rollout 3 on gpu-b"; budget seconds left, None: no limit
    body     bytes; json() of it. blob: a memoryview of the received memory, good for as long as it is held
    version, bytes, tags: of commit, squeeze, offload and onload"""

    def json(self):
        return _data.unpack(self.body)

    def tensors(self):
        """The blob as a safetensors image: name -> Tensor, not copied."""
        return read(self.blob)

    def reply(self, body=None, blob=None):
        """body: bytes, or anything JSON takes. blob: a buffer or an Image; a large one is sent from where it lies."""
        self._reply(_data.pack(body), buffer(blob))

    def refuse(self, why):
        """why: an Error keeps its status; other exceptions and texts become FL_INTERNAL with their name."""
        if isinstance(why, Error):
            self._refuse(why.status, str(why))
        else:
            self._refuse(Internal.status,
                         f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else str(why))


class Answer:
    """body: bytes; json() of it. blob: a memoryview of the received memory; tensors() over it."""

    __slots__ = ("body", "blob")

    def __init__(self, body, blob):
        self.body, self.blob = body, blob

    def json(self):
        return _data.unpack(self.body)

    def tensors(self):
        return read(self.blob)


class Done:
    """An ask that came back: tag, and result() which is an Answer or raises what it was refused with."""

    __slots__ = ("tag", "error", "_answer")

    def __init__(self, tag, status, text, answer):
        self.tag = tag
        self.error = BY_STATUS[status](text) if status else None
        self._answer = Answer(*answer) if answer else None

    def result(self):
        if self.error:
            raise self.error
        return self._answer


class Asks:
    """Several asks in flight from one thread; each comes back exactly once, in any order."""

    def __init__(self, core):
        self._core = core

    def start(self, role, rank, method, body=None, blob=None, budget=None, lane=0, tag=None):
        """Raises Again when `bound` are in flight. A blob is borrowed until its ask comes back."""
        self._core._start(role, rank, method, _data.pack(body), buffer(blob), budget, lane, tag)

    def next(self, wait=None):
        """The next one that came back; None: none in `wait` seconds. NotFound: none is in flight."""
        got = self._core._next(wait)
        return None if got is None else Done(*got)

    def __len__(self):
        return len(self._core)

    def __iter__(self):
        """All that are in flight, as they come."""
        while len(self._core):
            yield self.next()

    def close(self):
        """Cancels what is in flight."""
        self._core.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Run(_core.Run):
    """A seat: role, rank, world, local_rank, local_world, node, address, job, attempt, run_dir, devices (UUIDs),
    master_addr and master_port. Made by join()."""

    def _open(self):
        from .arena import Arena
        from .weights import Plane
        self.__dict__.update(self._seat())
        self.weights = Plane(self)
        self.arena = Arena(self)

    def next(self, lane=0, wait=None):
        """The next event of a lane; None: nothing came in `wait` seconds (0: a look only, None: no limit)."""
        return self._next(Event, lane, wait)

    def serve(self, handlers, lane=0, idle=None):
        """Answers events until a stop has been answered, or the run is left.

        handlers  by method of a call, or by "pause", "commit", "resume", "offload", "onload", "squeeze", "stop". What
                  one returns is the answer: None, JSON, bytes, (body, blob), or LATER. An exception refuses the call;
                  one that is no furlong.Error is shown on stderr too, with its traceback. Events without a handler are
                  answered empty, calls without one refused. "pause" and "commit" cannot be refused: what their handlers
                  raise leaves serve(), for an engine that has not stopped, or does not serve what it says, must end;
                  its next attempt is filled.
        idle      called when nothing waits, between any two events; it returns whether it has more to do"""
        busy = idle is not None
        while True:
            try:
                ev = self._next(Event, lane, 0 if busy else None)
            except Cancelled:
                return  # another thread leaves the run
            if ev is None:
                busy = bool(idle())
                continue
            busy = idle is not None
            what = ev.what
            self._serve_one(handlers.get(ev.method if what == "call" else what), ev)
            ev = None  # its blob is not held while the next one is waited for
            if what == "stop":
                return

    @staticmethod
    def _serve_one(handler, ev):
        if handler is None:
            if ev.what == "call":
                ev.refuse(Unsupported(f"no call {ev.method!r} here"))
            else:
                ev.reply((0).to_bytes(8, "little") if ev.what == "squeeze" else None)
            return
        try:
            got = handler(ev)
            if got is LATER or ev.answered:
                return
            if ev.what == "squeeze":
                got = int(got or 0).to_bytes(8, "little")
            ev.reply(*(got if isinstance(got, tuple) else (got,)))
        except Exception as e:  # noqa: whoever asked hears of it, whatever it is
            if ev.answered or ev.what in _NEVER_REFUSED:
                raise
            if not isinstance(e, Error):
                traceback.print_exc()  # who asked gets its last line; where it was is known here alone
            ev.refuse(e)
        except BaseException as e:  # sys.exit(), Ctrl-C: on its way out of serve()
            if not ev.answered and ev.what not in _NEVER_REFUSED:
                with contextlib.suppress(Error):  # it has left the run: that refused the call
                    ev.refuse(e)
            raise

    def ask(self, role, rank, method, body=None, blob=None, budget=None, lane=0):
        """Calls the process that holds that rank of that role and waits for its answer. Made at most once. Ctrl-C
        cancels it."""
        return Answer(*self._ask(role, rank, method, _data.pack(body), buffer(blob), budget, lane))

    def asks(self, bound=64):
        return Asks(self._asks(bound))

    def place(self, flags):
        """Driver: room for all roles that the flags describe. flags: name -> value, True for a bare flag."""
        from .driver import Layout
        items = flags.items() if hasattr(flags, "items") else flags
        return Layout(self._place([(k, None if v is True or v is None else str(v)) for k, v in items]))

    def update(self, source, target, version, **how):
        """Driver: see driver.update()."""
        from .driver import update
        return update(self, source, target, version, **how)

    def step_record(self, record):
        """Driver: one JSON object a step, for those who follow. Never waits."""
        self._step_record(record if isinstance(record, str) else json.dumps(record))

    def leave(self):
        """Refuses what is unanswered and goes. Comes by itself when the interpreter ends. Refused while views of
        weights or arena memory are held: their memory would go."""
        self._leave(False)
        _forget(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        from .errors import Invalid
        try:
            self.leave()
        except Invalid:
            pass  # views are held: at the interpreter's end

    def __repr__(self):
        d = self.__dict__
        return f"<{d.get('role')} {d.get('rank')} of {d.get('world')} on {d.get('node')}>"


def _forget(run):
    global _current
    with _lock:
        if _current is run:
            _current = None


def _leave_at_exit():
    run = _current
    if run is not None:
        run._leave(True)


def join():
    """Takes the seat that the daemon prepared for this process. Once a process; Unsupported: not started by one."""
    global _current
    run = _core.join(Run)
    run._open()
    with _lock:
        _current = run
    return run


def current():
    """The run that this process has joined; None: none."""
    return _current


# Before the interpreter goes: threads that wait inside the library come out, and nothing is answered half.
atexit.register(_leave_at_exit)
os.register_at_fork(after_in_child=lambda: globals().update(_current=None))
