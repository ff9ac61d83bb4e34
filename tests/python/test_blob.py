"""Safetensors images in place."""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from harness import main  # noqa: E402

from furlong import blob  # noqa: E402


def raw_image(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_written_in_place_and_read_in_place():
    image = blob.Image({"small": ("U8", (3,)), "wide": ("I64", (2, 2)), "none": ("F32", (0,)), "one": ("F32", ())}, {"format": "pt"})
    image["wide"].memory()[:] = memoryview(bytes(range(32))).cast("q")
    image["small"].raw[:] = b"xyz"
    base = 8 + int.from_bytes(image.data[:8], "little")
    assert base % 64 == 0
    back = blob.read(image.data)
    assert bytes(back["wide"].raw) == bytes(range(32)) and bytes(back["small"].raw) == b"xyz"
    assert back["none"].shape == (0,) and back["one"].shape == () and len(back["one"].raw) == 4
    back["small"].raw[0] = ord("a")
    assert bytes(image["small"].raw) == b"ayz"  # the same memory
    assert set(back) == {"small", "wide", "none", "one"}


def test_arrays_go_in_by_one_copy():
    a = memoryview(bytearray(24)).cast("i")
    a[0], a[5] = 7, -1
    image = blob.write({"a": a, "b": b"raw"})
    assert list(blob.read(image.data)["a"].memory()) == list(a) and image["b"].dtype == "U8"
    for bad, kind in ((memoryview(a)[::2], ValueError), ([1, 2], TypeError)):
        try:
            blob.write({"a": bad})
        except kind:
            continue
        raise AssertionError(f"{bad!r} was taken")


ROWS = [  # name, image, what the refusal says
    ("empty", b"", "at least 8 bytes"),
    ("header longer than the blob", (99).to_bytes(8, "little") + b"{}", "a header of 99 bytes"),
    ("no JSON", raw_image(b"{x"), "no JSON"),
    ("no object", raw_image([1]), "no object"),
    ("no offsets", raw_image({"a": {"dtype": "F32", "shape": [1]}}), "cannot be read"),
    ("unknown type", raw_image({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "cannot be read"),
    ("past the end", raw_image({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(4)), "bytes 4 to 8 of 4"),
    ("wrong size", raw_image({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "bytes 0 to 4"),
    ("negative", raw_image({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, bytes(4)), "bytes 4 to 0"),
    ("two negatives", raw_image({"a": {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]}}, bytes(4)), "bytes 0 to 4"),
    ("offsets of text", raw_image({"a": {"dtype": "F32", "shape": [1], "data_offsets": "ab"}}, bytes(4)), ""),
]


def test_bad_images_are_refused():
    for name, image, part in ROWS:
        try:
            blob.read(image)
        except (ValueError, TypeError) as e:
            assert part in str(e), f"{name}: {e}"
        else:
            raise AssertionError(f"{name} was taken")


if __name__ == "__main__":
    main(globals())
