"""Weights that move: a trainer offers them, engines accept them.

    w = run.weights.offer(model.state_dict())      # copied into the plane's memory once
    w.publish(0)
    with w.begin(1):                               # published at its end, abandoned if it raises
        ...write w.data(name)...

    w = run.weights.accept({name: ("BF16", shape)})
    w.commit(event)                                # then w.data(name) serves the new version

What data() and last() give is a view: torch.from_dlpack(view), numpy.asarray(view), view.pointer. Its memory is the
plane's own: good until the next begin() of a trainer, of an engine until the commit after the next one has begun."""
import contextlib
import operator

from . import _core
from .errors import Error, Invalid

NAME_MAX = 512  # bytes
TYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "U8")
_FLOAT8 = {"torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2"}
_SAME_TYPE = {prefix + name: same for prefix in ("", "torch.") for name, same in (
    ("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"),
    ("float8_e5m2", "F8_E5M2"), ("int64", "I64"), ("int32", "I32"), ("uint8", "U8"), ("bool", "U8"))}


class Shard:
    """A box of a whole tensor: `data` (or a (dtype, shape) pair) lies at `at` of a tensor of `shape`."""

    def __init__(self, data, shape, at):
        self.data, self.shape, self.at = data, tuple(shape), tuple(at)


def _shape_entry(name, dtype, shape):
    return (name, None, _type(name, dtype), _sizes(name, shape), None, None)


def _name(name):
    if not isinstance(name, str):
        raise TypeError(f"a tensor's name is text, not {name!r}")
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= NAME_MAX or "\0" in name or any(0xd800 <= ord(c) < 0xe000 for c in name):
        raise Invalid(f"a tensor's name is 1 to {NAME_MAX} bytes of UTF-8 without NUL, not {size}: {name[:40]!r}")
    return name


def _type(name, dtype):
    """The name that travels: "BF16" as it is, and what torch and numpy call the same."""
    found = dtype if dtype in TYPES else _SAME_TYPE.get(getattr(dtype, "__name__", str(dtype)))
    if not found:
        raise Invalid(f"{name}: no type {str(dtype)!r} travels, only {' '.join(TYPES)}: give it as one of them")
    return found


def _sizes(name, shape, what="a shape"):
    try:
        sizes = tuple(operator.index(n) for n in ((shape,) if isinstance(shape, int) else shape))
    except TypeError:
        raise TypeError(f"{name}: {what} is whole numbers, one a dimension, not {shape!r}") from None
    if min(sizes, default=0) < 0:
        raise Invalid(f"{name}: {what} has no negative numbers: {sizes}")
    return sizes


def _dense(name, t, needs_data):
    """A tensor of torch whose bytes mean its values."""
    if getattr(t, "is_meta", False) and needs_data:
        raise Invalid(f"{name} lies on meta and has no values: give it after they were loaded, or as (dtype, shape)")
    if "strided" not in str(getattr(t, "layout", "strided")) or getattr(t, "is_quantized", False):
        raise Invalid(f"{name} is of layout {t.layout} and type {t.dtype}: give a dense tensor of its values")
    return t.detach()


def _entry(name, t, needs_data):
    whole = None
    if isinstance(t, Shard):
        whole, t = t, t.data
    if isinstance(t, (tuple, list)):
        if len(t) not in (2, 3):
            raise TypeError(f"{name}: (dtype, shape) or (data, dtype, shape) is wanted, not {len(t)} things")
        data, dtype, shape = (None, *t) if len(t) == 2 else t
        dtype, shape = _type(name, dtype), _sizes(name, shape)
    elif t is None or isinstance(t, (int, float, str)):
        raise TypeError(f"{name}: a tensor or (dtype, shape) is wanted, not {t!r}")
    else:
        data, dtype, shape = t, None, tuple(t.shape) if hasattr(t, "shape") else None
        if hasattr(t, "detach"):
            data = _dense(name, t, needs_data)
            dtype = _FLOAT8.get(str(t.dtype))
            if dtype:
                import torch
                data = data.view(torch.uint8)
    if whole is None:
        return (name, data, dtype, shape, None, None)
    if shape is None:
        raise TypeError(f"{name}: a shard needs data with a shape, or (dtype, shape)")
    return (name, data, dtype, _sizes(name, whole.shape), _sizes(name, whole.at, "the place of a shard"), tuple(shape))


def _pairs(named):
    """As a list: a generator is read once."""
    try:
        pairs = list(named.items() if hasattr(named, "items") else named)
    except TypeError:
        pairs = [named]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError("pairs of name and tensor are wanted, as of model.named_parameters() or model.state_dict(), "
                            f"not a {type(pair).__name__}")
    seen = set()
    for name, _ in pairs:
        if _name(name) in seen:
            raise Invalid(f"{name}: this name comes twice")
        seen.add(name)
    return pairs


def _entries(pairs, needs_data):
    return [_entry(name, t, needs_data) for name, t in pairs]


def _strided(t):
    """Transposed, sliced, expanded: its bytes do not lie one after the other."""
    t = t.data if isinstance(t, Shard) else t
    if hasattr(t, "is_contiguous"):
        return not t.is_contiguous()
    return hasattr(t, "flags") and hasattr(t, "__array__") and not t.flags.c_contiguous


def _copy_strided(view, t):
    """Straight to where it belongs, without a copy of it in between."""
    t = t.data if isinstance(t, Shard) else t
    if not hasattr(t, "detach"):
        import numpy
        numpy.asarray(view)[...] = t
        return
    import torch
    if str(t.dtype) in _FLOAT8:  # no DLPack for these
        torch.from_dlpack(view.raw()).reshape(t.shape).copy_(t.detach().view(torch.uint8))
    else:
        torch.from_dlpack(view).copy_(t.detach())


def _core_dtype(name, data):
    return _type(name, getattr(data, "dtype", type(data).__name__))


def _spec_entries(named):
    """Type and shape alone: an engine's memory is filled by the first update."""
    return [(name, None, dtype or _core_dtype(name, data), shape, at, length)
            for name, data, dtype, shape, at, length in _entries(_pairs(named), False)]


def _device(device, stream):
    if device is None:
        return -1 if stream is None else 0
    return device


class _Lent:
    """Tensors that are given where they lie, and where that is: one whose storage was exchanged (p.data = ..., set_(),
    resize_(), a sharding framework that frees what it gathered) is written elsewhere from then on, and the memory that
    engines read would keep its old bytes under a new number."""

    def __init__(self, named):
        self._at = []
        for name, t in named:
            t = t.data if isinstance(t, Shard) else t
            if hasattr(t, "data_ptr"):
                self._at.append((name, t, t.data_ptr(), self._room(t)))

    @staticmethod
    def _room(t):
        return t.untyped_storage().nbytes() if hasattr(t, "untyped_storage") else 0

    def check(self, version):
        for name, t, at, room in self._at:
            now = t.data_ptr()
            if now != at or self._room(t) < room:
                raise Invalid(f"publish of version {version}: {name} lay at {at:#x} when it was offered in place, and "
                              + (f"lies at {now:#x} now" if now != at else "its storage was made smaller since")
                              + ": offer the set anew, or write into the tensor that was offered")


class _Begun:
    """What begin() gives, for `with`."""

    def __init__(self, weights, version):
        self._weights, self._version = weights, version

    def __enter__(self):
        return self._weights

    def __exit__(self, kind, why, trace):
        if kind is None:
            try:
                return self._weights.publish(self._version)
            except BaseException:
                self._take_back()
                raise
        self._take_back()

    def _take_back(self):
        with contextlib.suppress(Error):  # published meanwhile, dropped, the run was left: what raised is what counts
            self._weights.abandon()


class Weights:
    """One set, offered or accepted."""

    def __init__(self, core, lent=()):
        self._core, self._lent = core, _Lent(lent)

    @property
    def names(self):
        return self._core.names

    def __len__(self):
        return len(self._core.names)

    def data(self, name):
        """The version in hand (trainer), the one that serves (engine); None while none does. By name or number."""
        return self._core.data(name)

    def last(self, name):
        """The version published last; of an engine, as data()."""
        return self._core.last(name)

    @property
    def version(self):
        """None: none yet, or none that serves."""
        v = self._core._version()
        return v and v[0]

    @property
    def digest(self):
        """Of all ranks' tensors together, 32 hex digits; an engine knows it. None with no version."""
        v = self._core._version()
        return v and f"{v[1]:016x}{v[2]:016x}"

    def begin(self, version, wait=120.0):
        """Trainer: returns when nobody reads what will be written. Write all of data() before publish(). As a context
        it publishes at its end, or abandons what raised."""
        self._core._begin(version, wait)
        return _Begun(self, version)

    def publish(self, version):
        """Trainer: whole, and frozen until the next begin()."""
        self._lent.check(version)
        self._core._publish(version)

    def abandon(self):
        """Trainer: takes begin() back; another may follow. With two slots data() is last() again; with one what was
        published is gone, and all of data() is to be written for the next version."""
        self._core.abandon()

    def commit(self, event):
        """Engine: answers a commit event; data() is the new version's."""
        self._core.commit(event)

    def drop(self):
        """Leaves the plane. Refused while views of it are held."""
        self._core.drop()
        self._lent = _Lent(())  # they are the program's alone again


class Plane:
    """run.weights"""

    def __init__(self, run):
        self._run = run

    def offer(self, named, set="policy", slots=0, fixed_addresses=False, stream=None, device=None, in_place=False):
        """named: name -> tensor with its first values (torch, numpy, a buffer, anything with DLPack), a Shard,
        (dtype, shape) for zeros, or (pointer, dtype, shape). Any strides: what does not lie contiguous is copied to
        where it will.

        The weights lie where these tensors do, or on `device`, an index into run.devices (PyTorch's own, where the
        process sees its own devices alone). stream: the CUstream on which they are written, as a number
        (torch.cuda.current_stream().cuda_stream); publish() waits for it, else for the whole device.

        in_place: the tensors themselves are what is given, between publish() and begin() they must not change; nothing
        is copied in. Those of arena.torch_pool() are mapped by engines as they lie, PyTorch's own by IPC handle, what
        has none (expandable segments) goes through a buffer; the log says which."""
        named = _pairs(named)
        found = _entries(named, True)
        strided = {} if in_place else {name: t for name, t in named if _strided(t)}
        for t in strided.values():
            t = t.data if isinstance(t, Shard) else t
            if device is None and getattr(t, "is_cuda", False):
                device = t.device.index
        entries = [e if e[0] not in strided else (e[0], None, e[2] or _core_dtype(e[0], e[1]), *e[3:])
                   for e in found]
        w = Weights(self._run._weights(True, set, entries, slots, fixed_addresses, stream, False, None,
                                       _device(device, stream), in_place), named if in_place else ())
        for name, t in strided.items():
            _copy_strided(w.data(name), t)
        return w

    def accept(self, named, set="policy", slots=0, fixed_addresses=False, stream=None, device=None, check_equal=False,
               local_dir=None):
        """named: name -> (dtype, shape), a Shard of that, or a tensor whose type and shape are taken.

        device, stream: as of offer(); a stream alone means device 0, neither means host memory. fixed_addresses:
        data() stays where it is over all versions, for captured CUDA graphs."""
        return Weights(self._run._weights(False, set, _spec_entries(named), slots, fixed_addresses, stream, check_equal,
                                          local_dir, _device(device, stream), False))
