"""Weights and memory on a device, as Python sees them; the device is a fake, whose memory is the host's."""
import contextlib
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "..", "cluster"))
from harness import SLOW, main  # noqa: E402

import furlong  # noqa: E402

run = None


@contextlib.contextmanager
def workers(what, role):
    layout = run.place({"trainer": 1, "rollout": 1})
    g = layout.launch(role, [sys.executable, os.path.join(here, "worker.py"), *what.split()], {"FAKE_WORLD": "1"}, start=60 * SLOW)
    try:
        yield g
    finally:
        g.end()


def test_the_seat_has_a_device():
    assert len(run.devices) == 1 and run.devices[0].startswith("GPU-6675726c"), run.devices


def test_weights_go_from_device_to_device():
    digest = set()
    for trainer in ("trainer", "trainer --device", "trainer --in-place"):
        on = "--device" if trainer != "trainer" else ""
        with workers(trainer, "trainer") as t, workers(f"engine {on}", "rollout") as e:
            for v in range(1, 4):
                t.ask_all("train", {"version": v}, budget=60)
                r = run.update(t, e, v, budget=60)
                s = e.ask_all("look", budget=20)[0].json()
                assert s["version"] == v and all(x == [v, v] for x in s["ends"].values()), s
            digest.add(r["digest"])
    assert len(digest) == 1, digest


def test_memory_of_a_device():
    x = run.arena.empty((1 << 10,), "F32", "optimizer", device=0)
    memoryview(x).cast("B")[:4] = b"abcd"
    at = x.pointer
    assert run.arena.offload("optimizer")["backed_bytes"] >= 4096
    run.arena.onload("optimizer")
    assert x.pointer == at and bytes(memoryview(x).cast("B")[:4]) == b"abcd"
    del x


class Tensor:
    """As torch's, as far as offer() looks."""

    def __init__(self, view):
        self.view, self.shape, self.room = view, view.shape, view.nbytes

    def __dlpack__(self):
        return self.view.__dlpack__()

    def data_ptr(self):
        return self.view.pointer

    def untyped_storage(self):
        return type("Storage", (), {"nbytes": lambda _: self.room})()


def test_a_tensor_that_went_elsewhere_is_not_published():
    make = lambda: run.arena.empty((8,), "F32", "weights", device=0)
    x = Tensor(make())
    w = run.weights.offer({"x": (x.view.pointer, "F32", (8,))}, set="by pointer", in_place=True)
    w.publish(1)
    w.drop()
    w = run.weights.offer({"x": x}, set="own", in_place=True)
    w.publish(1)
    w.begin(2)
    was, x.view = x.view, make()  # x.data = ...
    for part in ("lies at", "made smaller"):
        try:
            w.publish(2)
            raise AssertionError("old bytes under a new number")
        except furlong.Invalid as e:
            assert "x lay at" in str(e) and part in str(e), e
        x.view, x.room = was, 0  # x.untyped_storage().resize_(0)
    x.room = was.nbytes
    w.publish(2)
    assert w.version == 2
    w.drop()
    del was, x


def test_what_raises_is_taken_back():
    def write(w, byte, raises=None):
        memoryview(w.data("x")).cast("B")[:] = bytes([byte]) * 8
        if raises:
            raise raises

    read = lambda view: bytes(memoryview(view).cast("B"))
    for slots in (2, 1):
        w = run.weights.offer({"x": (b"12345678", "F32", (2,))}, set="taken back", device=0, slots=slots)
        w.publish(0)
        with w.begin(1) as same:
            assert same is w
            write(w, 1)
        assert w.version == 1 and read(w.last("x")) == b"\1" * 8
        for why in (ValueError("out of memory"), KeyboardInterrupt()):
            try:
                with w.begin(2):
                    write(w, 2, why)
                raise AssertionError("it was swallowed")
            except (ValueError, KeyboardInterrupt) as e:
                assert e is why
            assert read(w.data("x")) == read(w.last("x")) == (b"\1" if slots == 2 else b"\2") * 8
        for do, words in ((w.abandon, "no version is begun"), (lambda: w.publish(2), "without begin")):
            try:
                do()
                raise AssertionError("nothing was begun")
            except furlong.Invalid as e:
                assert words in str(e), e
        with w.begin(3):
            write(w, 3)
        assert w.version == 3 and read(w.last("x")) == b"\3" * 8
        try:
            with w.begin(4):
                write(w, 4)
                w.publish(5)  # another than the one begun
        except furlong.Invalid as e:
            assert "version 4 was begun" in str(e), e
        with w.begin(5):
            write(w, 5)
        w.drop()


def test_where_weights_lie_is_said():
    w = run.weights.offer({"x": (b"12345678", "F32", (2,))}, set="one", device=0, slots=1)
    assert bytes(memoryview(w.data("x")).cast("B")) == b"12345678"
    w.drop()
    try:
        run.weights.offer({"x": (b"12345678", "F32", (2,))}, set="two", device=0, in_place=True)
        raise AssertionError("host memory was given as a device's")
    except furlong.Invalid as e:
        assert "x is to be given where it lies" in str(e), e
    try:
        run.weights.accept({"x": ("F32", (2,))}, set="three", fixed_addresses=True)
        raise AssertionError("host memory has fixed addresses")
    except furlong.Unsupported as e:
        assert "fixed addresses" in str(e), e
    run.weights.accept({"x": ("F32", (2,))}, set="three", fixed_addresses=True, device=0).drop()


if __name__ == "__main__":
    run = furlong.join()
    main(globals())
