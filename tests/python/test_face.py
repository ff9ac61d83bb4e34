"""The face as programs use it: a driver in this process, under the rig's daemon, and real workers (worker.py)."""
import array
import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "..", "cluster"))
from harness import SLOW, Skip, main, wait_for  # noqa: E402

import furlong  # noqa: E402

run = None
UPDATES = 1000 if SLOW == 1 else 100


@contextlib.contextmanager
def workers(what, n=1, role="rollout", **kw):
    layout = run.place({"trainer": n, "rollout": n})
    g = layout.launch(role, [sys.executable, os.path.join(here, "worker.py"), *what.split()], {"FAKE_WORLD": str(n)},
                      start=60 * SLOW, **kw)
    try:
        yield g
    finally:
        g.end()


def raises(kind, part, do):
    try:
        got = do()
    except kind as e:
        assert type(e) is kind and part in str(e), f"{type(e).__name__}: {e}"
        return e
    raise AssertionError(f"{kind.__name__} wanted, got {got!r}")


def test_the_seat():
    assert (run.role, run.rank, run.world, run.attempt) == ("driver", 0, 1, 1), vars(run)
    assert run.devices == ("GPU-0", "GPU-1") and run.master_port == 29500 and run.node == "gpu-a"
    assert furlong.current() is run and not run.left
    raises(furlong.Unsupported, "joined already", furlong.join)


def test_an_ask_and_its_answer():
    with workers("serve", 2) as g:
        assert [g.member(i)["state"] for i in range(len(g))] == ["live", "live"]
        for rank in (0, 1):
            who = run.ask("rollout", rank, "who", budget=10).json()
            assert (who["rank"], who["world"], who["from"][:8]) == (rank, 2, "driver 0"), who
        a = run.ask("rollout", 0, "echo", {"x": ["ü", 1.5]}, b"", budget=10)
        assert a.json() == {"x": ["ü", 1.5]} and len(a.blob) == 0
        big = os.urandom(3 << 20)
        blob = run.ask("rollout", 1, "echo", b"raw", big, budget=10).blob
        gc.collect()
        assert blob == big and not blob.readonly  # the answer is gone, its memory is not
        assert [x.json()["rank"] for x in g.ask_all("who", budget=10)] == [0, 1]
        image = furlong.blob.Image({"t": ("I32", (3,))})
        image["t"].memory()[:] = memoryview(b"\1\0\0\0\2\0\0\0\3\0\0\0").cast("i")
        back = run.ask("rollout", 0, "echo", None, image, budget=10).tensors()
        assert list(back["t"].memory()) == [1, 2, 3] and back["t"].shape == (3,)


def test_refusals_carry_status_and_words():
    with workers("serve"):
        ask = lambda *a, **k: run.ask("rollout", 0, *a, budget=10, **k)
        e = raises(furlong.Stale, "version 3 was asked for, 5 serves", lambda: ask("old"))
        assert e.status == 7
        raises(furlong.Internal, "ValueError: no such thing as 'y'", lambda: ask("boom", {"x": "'y'"}))
        raises(furlong.Internal, "TypeError: Object of type object is not JSON", lambda: ask("bad"))
        raises(furlong.Unsupported, "no call 'nothing' here", lambda: ask("nothing"))
        raises(furlong.Internal, "dropped without an answer", lambda: ask("drop"))
        assert ask("twice").json() == {"first": True}
        assert "answered already" in ask("held").json()[0]
        assert "driver" in ask("denied").json()["refused"]
        raises(furlong.NotFound, "no such rank", lambda: run.ask("critic", 0, "who", budget=5))
        raises(furlong.Invalid, "at most", lambda: ask("echo", b"x" * (furlong._core.BODY_MAX + 1)))
        raises(TypeError, "blob: bytes or another contiguous buffer", lambda: ask("echo", None, 7))
        raises(ValueError, "seconds", lambda: run.ask("rollout", 0, "who", budget=-1))
        raises(furlong.Timeout, "hold", lambda: run.ask("rollout", 0, "hold", budget=0.1))


def test_several_in_flight():
    with workers("serve", 2), run.asks(8) as asks:
        raises(furlong.NotFound, "no ask", lambda: asks.next(0))
        asks.start("rollout", 0, "hold", tag="held")
        for i in range(7):
            asks.start("rollout", i % 2, "echo", {"i": i}, bytes([i]) * 1000, budget=10, tag=i)
        raises(furlong.Again, "8 asks", lambda: asks.start("rollout", 1, "who"))
        got = {}
        while len(got) < 7:
            d = asks.next(10)
            got[d.tag] = d.result()
        assert sorted(got) == list(range(7)) and all(a.json() == {"i": i} and a.blob == bytes([i]) * 1000 for i, a in got.items())
        assert asks.next(0.01) is None and len(asks) == 1
        run.ask("rollout", 0, "release", lane=1, budget=10)
        assert [d.result().json() for d in asks] == [{"released": True}]
        asks.start("rollout", 0, "old", tag=1)
        d = asks.next(10)
        assert isinstance(d.error, furlong.Stale)
        raises(furlong.Stale, "5 serves", d.result)
        asks.start("rollout", 0, "hold")
        wait_for("it is held", lambda: run.ask("rollout", 0, "held", lane=1, budget=10).json() == [{"unwanted": False}])
        asks.close()
        raises(furlong.Cancelled, "closed", lambda: asks.next(0))
        wait_for("the cancelled call is not wanted",
                 lambda: run.ask("rollout", 0, "held", lane=1, budget=10).json() == [{"unwanted": True}])


@contextlib.contextmanager
def alarm(seconds):
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupts_end_waits():
    with workers("serve") as g:
        for what, do in {"next": run.next, "ask": lambda: run.ask("rollout", 0, "hold"),
                         "ask_all": lambda: g.ask_all("hold", budget=3 * SLOW)}.items():
            at = time.monotonic()
            try:
                with alarm(0.1):
                    do()
            except KeyboardInterrupt:
                assert time.monotonic() - at < 2 * SLOW, what
            else:
                raise AssertionError(f"{what} was not interrupted")
        wait_for("asks given up are cancelled",
                 lambda: {"unwanted": True} in run.ask("rollout", 0, "held", lane=1, budget=10).json())
        run.ask("rollout", 0, "release", lane=1, budget=10)


def test_threads():
    with workers("serve", 2):
        wrong, ticks = [], [0]

        def many(k):
            for i in range(200 if SLOW == 1 else 40):
                a = run.ask("rollout", (k + i) % 2, "echo", {"k": k, "i": i}, b"%d" % i, budget=20)
                if a.json() != {"k": k, "i": i} or a.blob != b"%d" % i:
                    wrong.append((k, i))

        threads = [threading.Thread(target=many, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong, wrong[:3]
        waiting = threading.Thread(target=lambda: run.ask("rollout", 0, "hold"))
        waiting.start()
        while waiting.is_alive():
            ticks[0] += 1
            if ticks[0] == 1000:  # this thread runs while that one waits
                wait_for("it is held", lambda: run.ask("rollout", 0, "held", lane=1, budget=10).json())
                run.ask("rollout", 0, "release", lane=1, budget=10)
                waiting.join(10)
        assert ticks[0] >= 1000


def test_a_thousand_updates():
    with workers("trainer", role="trainer") as t, workers("engine", 2) as e:
        look = lambda: [a.json() for a in e.ask_all("look", budget=20)]
        assert look() == [{"version": None, "data": True}] * 2
        before = None
        for v in range(1, UPDATES + 1):
            if v == UPDATES // 10:
                before = [t.ask_all("memory")[0].json()["kib"]] + [a.json()["kib"] for a in e.ask_all("memory")]
            t.ask_all("train", {"version": v}, budget=60)
            r = run.update(t, e, v, budget=60)
            assert (r["version"], r["committed"], r["left_behind"], r["first_behind"]) == (v, 2, 0, ""), r
            if v % 50 in (0, 1):
                for s in look():
                    assert s["version"] == v and s["digest"] == r["digest"] and s["readonly"], s
                    assert all(x == [v, v] for x in s["ends"].values()) and s["commits"] == v, s
        after = [t.ask_all("memory")[0].json()["kib"]] + [a.json()["kib"] for a in e.ask_all("memory")]
        grown = [b - a for a, b in zip(before, after)]
        assert SLOW > 1 or max(grown) < 2048, f"KiB grown in {UPDATES * 9 // 10} updates: {grown} from {before}"
        m = t.ask_all("misuse")[0].json()
        assert m["write"].startswith("TypeError") and "views of these weights" in m["drop"], m
        assert "views of weights" in m["leave"] and m["begun"].startswith("Invalid") and m["name"] == "KeyError: 'z'", m
        assert m["number"].startswith("IndexError"), m
        assert m["commit"] == "Invalid: policy: misuse is no COMMIT of these weights", m
        raises(furlong.Invalid, "999999", lambda: run.update(t, e, 999999, budget=10))


def test_a_trainer_that_published_nothing():
    """It answers calls, so nothing is still to be loaded: the same update would fail the same way."""
    with workers("trainer --mute", role="trainer") as t, workers("engine") as e:
        assert t.ask_all("who") and e.ask_all("look")
        text = 'trainer 0 on gpu-a has offered "policy" and published no version of it: publish the first one before answering a call'
        raises(furlong.Invalid, text, lambda: run.update(t, e, 0, budget=2.0 * SLOW))
        assert e.ask_all("look")[0].json()["version"] is None


def test_a_commit_that_fails_ends_the_engine():
    """It would go on with the old weights in its hands and the new number on them."""
    with workers("trainer", role="trainer") as t, workers("engine", restarts=2) as e:
        t.ask_all("train", {"version": 1}, budget=60)
        run.update(t, e, 1, budget=60)
        first = e.member(0)["attempt"]
        e.ask_all("break", budget=20)
        t.ask_all("train", {"version": 2}, budget=60)
        with contextlib.suppress(furlong.Error):  # it may be gone before the update is over
            run.update(t, e, 2, budget=60)
        wait_for("its next attempt", lambda: e.member(0)["attempt"] > first and e.member(0)["state"] == "live")
        e.wait(60)
        s = e.ask_all("look", budget=20)[0].json()
        assert (s["version"], s["commits"]) == (2, 1) and all(x == [2, 2] for x in s["ends"].values()), s


def test_tensors_that_differ():
    with workers("trainer", role="trainer") as t, workers("engine --other") as e:
        assert t.ask_all("who") and e.ask_all("look")[0].json()["version"] is None  # both sides are in the plane
        raises(furlong.Invalid, "b", lambda: run.update(t, e, 0, budget=20))
        assert e.ask_all("look")[0].json()["version"] is None


class Unreadable:
    shape = (2,)

    def __init__(self, why):
        self.why = why

    def __dlpack__(self):
        raise self.why

    def __dlpack_device__(self):
        return 1, 0


class Like:  # as tensors of torch say what they are
    shape, layout, is_meta, dtype = (2,), "strided", False, "torch.float32"

    def __init__(self, **said):
        self.__dict__.update(said)

    def detach(self):
        return memoryview(bytes(8)).cast("f")


def test_what_is_no_set_of_tensors():
    """What a first program gets wrong: one sentence with the tensor's name, and nothing is half offered."""
    pairs = "pairs of name and tensor are wanted, as of model.named_parameters() or model.state_dict(), not a "
    two = ("F32", (2,))
    rows = [
        (TypeError, pairs + "Like", [Like()]),  # model.parameters()
        (TypeError, pairs + "Like", Like()),  # the model itself
        (TypeError, pairs + "NoneType", None),
        (TypeError, pairs + "str", "abc"),
        (TypeError, pairs + "tuple", [("x", Like(), 1)]),
        (TypeError, "a tensor's name is text, not 5", {5: two}),
        (furlong.Invalid, "name is 1 to 512 bytes of UTF-8 without NUL, not 600: 'nnn", {"n" * 600: two}),
        (furlong.Invalid, "without NUL, not 0: ''", {"": two}),
        (furlong.Invalid, "without NUL, not 3: 'a\\x00b'", {"a\0b": two}),
        (furlong.Invalid, "without NUL, not 4: 'a\\ud800'", {"a\ud800": two}),
        (TypeError, "x: a tensor or (dtype, shape) is wanted, not None", {"x": None}),
        (TypeError, "x: a tensor or (dtype, shape) is wanted, not 3", {"x": 3}),  # is no pointer
        (TypeError, "x: a tensor or (dtype, shape) is wanted, not True", {"x": True}),
        (TypeError, "x: a tensor or (dtype, shape) is wanted, not 1.5", {"x": furlong.Shard(1.5, (2,), (0,))}),
        (TypeError, "x: (dtype, shape) or (data, dtype, shape) is wanted, not 4 things", {"x": (1, 2, 3, 4)}),
        (TypeError, "x: a shape is whole numbers, one a dimension, not (2.0,)", {"x": ("F32", (2.0,))}),
        (furlong.Invalid, "x: a shape has no negative numbers: (-1,)", {"x": ("F32", (-1,))}),
        (furlong.Invalid, "x: the place of a shard has no negative numbers: (-1,)", {"x": furlong.Shard(two, (4,), (-1,))}),
        (furlong.Invalid, "x: no type 'float64' travels, only F32 F16 BF16", {"x": ("float64", (2,))}),
        (furlong.Invalid, "x lies on meta and has no values: give it after", {"x": Like(is_meta=True)}),
        (furlong.Invalid, "x is of layout torch.sparse_coo and type torch.float32: give a dense", {"x": Like(layout="torch.sparse_coo")}),
        (furlong.Invalid, "x: it cannot be read where it lies: it lies elsewhere", {"x": Unreadable(BufferError("it lies elsewhere"))}),
        (KeyboardInterrupt, "", {"x": Unreadable(KeyboardInterrupt())}),  # Ctrl-C is no fault of the tensor
        (furlong.Invalid, "x: it cannot be read where it lies: a bytes-like object", {"x": object()}),
    ]
    for kind, text, named in rows:
        raises(kind, text, lambda: run.weights.offer(named, set="first"))
    for dtype in ("float32", "torch.float32", "F32"):
        w = run.weights.offer((x for x in [("one", (dtype, 3)), ("two", Like())]), set="first")
        assert [(w.data(n).dtype, w.data(n).shape) for n in w.names] == [("F32", (3,)), ("F32", (2,))], dtype
        w.drop()
    Like.detach = lambda self: self
    w = run.weights.accept({"x": Like(is_meta=True)}, set="first")  # type and shape are all that is asked
    w.drop()


def test_where_a_handler_failed():
    class Asked:
        what, method, answered = "call", "train", False

        def refuse(self, why):
            self.refused, self.answered = why, True

        reply = None

    def fail(e):
        raise e

    for e, shown in ((ValueError("no such step"), True), (furlong.Stale("version 3 is asked for"), False)):
        said, ev = io.StringIO(), Asked()
        with contextlib.redirect_stderr(said):
            run._serve_one(lambda _: fail(e), ev)
        assert ev.refused is e
        assert ("ValueError: no such step" in said.getvalue() and "in fail" in said.getvalue()) == shown, said.getvalue()
    ev = Asked()
    raises(SystemExit, "3", lambda: run._serve_one(lambda _: sys.exit(3), ev))
    assert isinstance(ev.refused, SystemExit)  # and is not just dropped
    ev = Asked()
    ev.refuse = lambda why: fail(furlong.Cancelled("the run was left"))
    raises(SystemExit, "3", lambda: run._serve_one(lambda _: sys.exit(3), ev))


class Scalar:  # as a loss of torch, a mean of numpy
    ndim = 0

    def __init__(self, value):
        self.item = lambda: value


def test_bodies():
    pack = furlong._data.pack
    assert pack({"loss": Scalar(0.5), "n": [Scalar(3)]}) == b'{"loss":0.5,"n":[3]}'
    nan, inf = float("nan"), float("inf")
    for body, at in (({"loss": nan}, "loss is nan"), ({"a": [1, {"b": -inf}]}, "a.1.b is -inf"), (inf, "the body is inf"),
                     ({"loss": Scalar(nan)}, "loss is nan")):
        raises(furlong.Invalid, at + ", and JSON has no such number: give None for it", lambda: pack(body))
    circle = []
    circle.append(circle)
    raises(ValueError, "Circular", lambda: pack(circle))
    raises(TypeError, "type set is not JSON", lambda: pack({"x": {1}}))
    for wrong in ({"tokens": b"1"}, Like()):
        raises(TypeError, "give furlong.blob.write({name: tensor})", lambda: run.ask("rollout", 0, "who", None, wrong))


class Number:  # as those of numpy
    def __init__(self, n):
        self.n = n

    def __index__(self):
        return self.n


def test_numbers_of_versions():
    w = run.weights.offer({"x": ("F32", (2,))}, set="counted")
    for call in (w.begin, w.publish):
        for bad in (-1, 1 << 64, -5):  # not taken modulo
            raises(ValueError, f"version: a whole number from 0 to 2^64 - 1 is wanted, not {bad}", lambda: call(bad))
        for bad in ("1", 1.5, None):
            raises(TypeError, f"version: a whole number from 0 to 2^64 - 1 is wanted, not {bad!r}", lambda: call(bad))
    w.publish(Number(3))
    w.begin(Number(4))
    w.publish(4)
    assert w.version == 4
    raises(ValueError, "done: a whole number", lambda: run.progress(-1, 3))
    raises(TypeError, "total: a whole number", lambda: run.progress(1, 3.5))
    w.drop()


def test_bad_tensors():
    offer = lambda named: run.weights.offer(named, set="bad")
    raises(furlong.Invalid, "no type 'F33'", lambda: offer({"x": ("F33", (2,))}))
    raises(furlong.Invalid, "8 bytes, its type and shape make 12", lambda: offer({"x": (b"12345678", "F32", (3,))}))
    raises(furlong.Invalid, "at most 8", lambda: offer({"x": ("F32", (1,) * 9)}))
    raises(TypeError, "a shard needs data with a shape", lambda: run.weights.accept({"x": furlong.Shard(object(), (4,), (0,))}))
    raises(furlong.Invalid, "format 'd'", lambda: offer({"x": memoryview(bytes(16)).cast("d")}))
    raises(furlong.Invalid, "a set's name", lambda: run.weights.offer({"x": ("F32", (2,))}, set=""))
    raises(furlong.Unsupported, "device", lambda: run.weights.offer({"x": ("F32", (2,))}, stream=1))
    raises(furlong.Invalid, "this seat has 2", lambda: run.weights.offer({"x": ("F32", (2,))}, device=2))
    raises(furlong.Unsupported, "in_place", lambda: run.weights.offer({"x": (b"1234", "F32", (1,))}, in_place=True))
    raises(furlong.Invalid, "x: this name comes twice", lambda: offer([("x", ("F32", (2,))), ("x", ("F32", (2,)))]))
    w = offer({"whole": ("BF16", (4, 2)), "part": furlong.Shard((bytes(range(16)), "F32", (2, 2)), (4, 2), (2, 0))})
    assert w.names == ["whole", "part"] and w.data("part").shape == (2, 2) and w.data(0).dtype == "BF16"
    assert bytes(memoryview(w.data("part")).cast("B")) == bytes(range(16)) and memoryview(w.data("whole")).format == "H"
    capsule = w.data("part").__dlpack__()
    assert "dltensor" in repr(capsule) and w.data("part").__dlpack_device__() == (1, 0)
    raises(furlong.Invalid, "1 views", w.drop)
    del capsule  # nobody took it: it gives its view back
    w.drop()
    raises(furlong.Cancelled, "dropped", lambda: w.data(0))


def test_memory_that_goes_and_comes_back():
    a = run.arena
    x, y = a.empty((1 << 18,), "F32", "kv_cache"), a.empty(1000, "U8", "optimizer")
    memoryview(x).cast("B")[:4] = b"abcd"
    memoryview(y)[:4] = b"efgh"
    at = x.pointer
    a.keep("optimizer", "disk")
    moved = a.offload(["kv_cache", "optimizer"])
    assert moved["dropped_bytes"] >= 4096 and moved["written_bytes"] >= 1000, moved
    a.onload(["kv_cache", "optimizer"])
    assert x.pointer == at and bytes(memoryview(x).cast("B")[:4]) == bytes(4) and bytes(memoryview(y)[:4]) == b"efgh"
    raises(ValueError, "no tag 'weight'", lambda: a.offload("weight"))
    raises(furlong.Unsupported, "device", lambda: a.empty(8, device=0))
    raises(furlong.Exhausted, "", lambda: a.empty(1 << 46, "U8"))
    a.keep("optimizer", "in_place")


def test_a_forked_child_has_no_seat():
    sent, got = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = ""
        for do in (lambda: run.ask("rollout", 0, "who", budget=1), lambda: run.metric("loss", 1.0), lambda: run.progress(1, 2),
                   lambda: run.next(wait=0), lambda: run.arena.empty(4), lambda: run.step_record({})):
            try:
                do()
                said += "taken\n"
            except furlong.Unsupported as e:
                said += f"{e}\n"
        os.write(got, said.encode())
        os._exit(0)
    os.close(got)
    with os.fdopen(sent) as f:
        said = f.read().splitlines()
    assert len(said) == 6 and all("forked child" in x for x in said), said
    assert os.waitpid(pid, 0)[1] == 0
    with workers("serve"):
        assert run.ask("rollout", 0, "who", budget=10).json()["rank"] == 0


OTHERS = """
import _xxsubinterpreters as sub
def other():
    i = sub.create()
    try:
        sub.run_string(i, "import furlong")
        print("taken")
    except sub.RunFailedError as e:
        print("main interpreter" in str(e), e)
    sub.destroy(i)
other()
import furlong
other()
try:
    furlong.join()
except furlong.Unsupported:
    print("whole")
"""


def test_other_interpreters_are_refused():
    if sys.version_info >= (3, 12):
        raise Skip("this release refuses by itself")
    env = {k: v for k, v in os.environ.items() if not k.startswith("FURLONG_SEAT")}
    r = subprocess.run([sys.executable, "-c", OTHERS], capture_output=True, text=True, env=env)
    assert [x.split()[0] for x in r.stdout.splitlines()] == ["True", "True", "whole"], r.stdout + r.stderr


def test_the_run_is_left_at_exit():
    layout = run.place({"trainer": 1, "rollout": 1})
    for what, why in {"quits": "exit code 0", "interrupted": "exit code 7"}.items():
        g = layout.launch("rollout", [sys.executable, os.path.join(here, "worker.py"), what], {"FAKE_WORLD": "1"}, start=60 * SLOW)
        wait_for(f"{what} ends", lambda: g.member(0)["state"] == "ended")
        assert g.member(0)["why"] == why, g.member(0)
        g.end()
        raises(furlong.Cancelled, "ended", lambda: g.member(0))


def test_the_run_is_left_under_a_begin():
    """A thread waits without limit for what nobody grants: the process ends, and is not killed for it."""
    with workers("trainer", role="trainer") as t:
        with workers("engine") as e:
            t.ask_all("train", {"version": 1}, budget=60)
            run.update(t, e, 1, budget=60)
        assert t.ask_all("hurry", {"version": 2}, budget=20)[0].json() == {"late": True}
        t.ask_all("stuck", {"version": 2}, budget=20)  # the engines have ended, and who coordinates them
        wait_for("it ends", lambda: t.member(0)["state"] == "ended")
        assert t.member(0)["why"] == "exit code 0", t.member(0)


def test_a_train_that_fails_leaves_a_trainer_that_loads():
    """The built-in one, whose second write fails."""
    layout = run.place({"trainer": 1, "rollout": 1})
    g = layout.launch("trainer", [os.path.join(os.environ["FURLONG_BIN_DIR"], "furlong-trainer"), "--alphabet=616263", "--vocab-size=4"],
                      {"FAKE_WORLD": "1", "FURLONG_FAULT": "trainer.write:2=fail"}, start=60 * SLOW)
    ints = lambda name, *x: (name, memoryview(array.array("i", x)))
    floats = lambda name, *x: (name, memoryview(array.array("f", x)))
    batch = furlong.blob.write(dict([ints("tokens", 1, 2, 3, 3, 2, 1), ints("lengths", 3, 3), ints("prompt_lengths", 1, 1),
                                     floats("logprobs", *[0.0] * 6), floats("advantages", 1.0, -1.0)]))
    ask = lambda what, body, blob=None: run.ask("trainer", 0, what, body, blob, budget=30 * SLOW).json()
    train = lambda v: ask("train", {"step": v - 1, "version": v, "epochs": 1}, batch)
    assert train(1)["version"] == 1
    raises(furlong.Unreachable, "write weights of version 2", lambda: train(2))
    for what, body in ("train", {"step": 1, "version": 2}), ("save", {"dir": "/nowhere", "step": 1}), ("state", {}):
        raises(furlong.Invalid, "cut short while it wrote", lambda: ask(what, body, batch))
    assert ask("load", {"dir": ""}) == {"step": 0, "version": 0}
    assert ask("state", {})["version"] == 0
    assert train(1)["version"] == 1
    g.end()


def test_no_time_left_is_not_no_limit():
    with workers("trainer", role="trainer") as t, workers("serve") as e:  # which accepts nothing
        at = time.monotonic()
        raises(furlong.Timeout, "", lambda: run.update(t, e, 0, budget=0.0))
        assert time.monotonic() - at < 20 * SLOW


def test_nothing_is_dropped_under_a_thread():
    w = run.weights.offer({"x": ("F32", (64 << 20,))}, set="large", slots=1)
    view = w.data("x")  # with it, and nobody inside, drop() is Invalid
    side = threading.Thread(target=w.publish, args=(1,))
    refused = 0
    side.start()
    while side.is_alive():
        try:
            w.drop()
        except furlong.Again:
            refused += 1
        except furlong.Invalid:
            continue
    side.join()
    assert refused and w.version == 1, refused
    del view
    w.drop()


def test_what_is_watched():
    run.metric("perf/x", 1.5)
    run.progress(3, 10)
    run.step_record({"step": 0, "reward": 0.5})
    layout = run.place({"trainer": 1, "rollout": 2, "colocate": True})
    assert layout.count("rollout") == 2 and layout.describe()["roles"]["rollout"][1]["rank"] == 1
    raises(furlong.Invalid, "33 devices asked", lambda: run.place({"trainer": 33}))
    quits = [sys.executable, "-c", "raise SystemExit(3)"]
    raises(furlong.Unreachable, "", lambda: layout.launch("trainer", quits, {"FAKE_WORLD": "1"}, start=20 * SLOW))
    g = layout.launch("trainer", quits, {"FAKE_WORLD": "1"}, wait=False)
    raises(furlong.Unreachable, "exit code 3", lambda: g.wait(20 * SLOW))
    g.end()


if __name__ == "__main__":
    run = furlong.join()
    main(globals())
