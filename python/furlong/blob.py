"""Safetensors images, read and written where they lie.

    image = blob.Image({"tokens": ("I32", (n,)), "logprobs": ("F32", (n,))})
    image["tokens"].numpy()[:] = ...        # written in place
    run.ask("trainer", 0, "train", body, image)

    blob.read(event.blob)["tokens"].torch() # no copy: memory of the blob
"""
import json

SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
         "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
_FORMATS = {"F64": "d", "I64": "q", "U64": "Q", "F32": "f", "I32": "i", "U32": "I", "F16": "e", "I16": "h", "U16": "H",
            "I8": "b", "U8": "B", "BOOL": "?"}
_NUMPY = {"F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2",
          "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "?"}
_TORCH = {"F64": "float64", "I64": "int64", "U64": "uint64", "F32": "float32", "I32": "int32", "U32": "uint32",
          "F16": "float16", "BF16": "bfloat16", "I16": "int16", "U16": "uint16", "F8_E4M3": "float8_e4m3fn",
          "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
HEADER_MAX = 100 << 20


def _count(shape):
    n = 1
    for x in shape:
        n *= x
    return n


class Tensor:
    """One tensor of an image: `dtype`, `shape`, and `raw`, the bytes where they lie."""

    __slots__ = ("name", "dtype", "shape", "raw")

    def __init__(self, name, dtype, shape, raw):
        self.name, self.dtype, self.shape, self.raw = name, dtype, tuple(shape), raw

    def memory(self):
        """A memoryview of one dimension with the type's own numbers; bf16 and fp8 have none and stay bytes."""
        return self.raw.cast(_FORMATS[self.dtype]) if self.dtype in _FORMATS else self.raw

    def numpy(self):
        import numpy
        if self.dtype not in _NUMPY:
            raise TypeError(f"{self.name}: numpy has no {self.dtype}")
        return numpy.frombuffer(self.raw, dtype=_NUMPY[self.dtype]).reshape(self.shape)

    def torch(self):
        import torch
        dtype = getattr(torch, _TORCH[self.dtype])
        if not len(self.raw):
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.raw, dtype=dtype).reshape(self.shape)

    def __repr__(self):
        return f"Tensor({self.name!r}, {self.dtype}, {self.shape})"


class Image(dict):
    """A new image: name -> Tensor, zeroed, to be written in place. Itself a buffer by `data`; calls take it as a blob.

    spec: name -> (dtype, shape). Wide types come first, so that every tensor lies at a multiple of its size; the
    first one at a multiple of 64."""

    def __init__(self, spec, metadata=None):
        super().__init__()
        order = sorted(spec, key=lambda name: (-SIZES[spec[name][0]], name))
        header, at = ({"__metadata__": metadata} if metadata else {}), 0
        for name in order:
            dtype, shape = spec[name]
            size = SIZES[dtype] * _count(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(len(text) + 8) % 64)
        self.data = memoryview(bytearray(8 + len(text) + at))
        self.data[:8] = len(text).to_bytes(8, "little")
        self.data[8:8 + len(text)] = text
        base = self.data[8 + len(text):]
        for name in order:
            h = header[name]
            self[name] = Tensor(name, h["dtype"], h["shape"], base[slice(*h["data_offsets"])])


def write(arrays, metadata=None):
    """An image that holds these arrays (numpy, torch on the host, or any buffer): one copy, into place."""
    found = {name: _array(name, a) for name, a in arrays.items()}
    image = Image({name: (dtype, shape) for name, (dtype, shape, _) in found.items()}, metadata)
    for name, (_, _, raw) in found.items():
        image[name].raw[:] = raw
    return image


def _array(name, a):
    kind = type(a).__module__.partition(".")[0]
    if kind == "torch":
        import torch
        a = a.detach().contiguous()
        names = {getattr(torch, v): k for k, v in _TORCH.items() if hasattr(torch, v)}
        if a.device.type != "cpu":
            raise TypeError(f"{name} lies on {a.device}: an image is host memory, give it as tensor.cpu()")
        raw = memoryview(a.reshape(-1).view(torch.uint8).numpy()) if a.numel() else memoryview(b"")
        return names[a.dtype], tuple(a.shape), raw
    m = memoryview(a)
    codes = {v: k for k, v in _FORMATS.items()}
    code = m.format.lstrip("@=<")
    code = {"l": "q" if m.itemsize == 8 else "i", "L": "Q" if m.itemsize == 8 else "I"}.get(code, code)
    if code not in codes:
        raise TypeError(f"{name}: an array of format {m.format!r} has no type of safetensors")
    if not m.c_contiguous:
        raise ValueError(f"{name} is not contiguous: give it as numpy.ascontiguousarray(...)")
    return codes[code], m.shape, m.cast("B") if m.nbytes else memoryview(b"")


def read(blob):
    """name -> Tensor over the memory of an image (a memoryview, bytes, or another buffer). Refuses by ValueError what
    does not fit the blob; `__metadata__` is left out."""
    m = memoryview(blob)
    m = m if m.format == "B" and m.ndim == 1 else m.cast("B")
    if len(m) < 8:
        raise ValueError(f"a safetensors image has at least 8 bytes, not {len(m)}")
    size = int.from_bytes(m[:8], "little")
    if size > min(HEADER_MAX, len(m) - 8):
        raise ValueError(f"a header of {size} bytes in an image of {len(m)}")
    try:
        header = json.loads(bytes(m[8:8 + size]))
    except ValueError as e:
        raise ValueError(f"the header is no JSON: {e}") from None
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    base, out = m[8 + size:], {}
    for name, h in header.items():
        if name != "__metadata__":
            out[name] = _tensor(name, h, base)
    return out


def _tensor(name, h, base):
    try:
        dtype, shape, (a, b) = h["dtype"], [int(x) for x in h["shape"]], h["data_offsets"]
        size = SIZES[dtype] * _count(shape)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{name}: an entry that cannot be read: {e!r}") from None
    if min(shape, default=0) < 0 or not 0 <= a <= b <= len(base) or b - a != size:
        raise ValueError(f"{name}: bytes {a} to {b} of {len(base)} for {dtype} {shape}")
    return Tensor(name, dtype, shape, base[a:b])


def buffer(blob):
    """What the library sends: the image's memory, or the buffer itself."""
    if isinstance(blob, Image):
        return blob.data
    if isinstance(blob, dict) or hasattr(blob, "detach"):
        raise TypeError(f"blob: a buffer is wanted, not a {type(blob).__name__}: give furlong.blob.write({{name: tensor}})")
    return blob
