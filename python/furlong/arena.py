"""Memory at an address that stays the same while its content goes and comes back, by tag."""
import os

from . import _core
from .weights import _shape_entry

TAGS = {"weights": _core.TAG_WEIGHTS, "kv_cache": _core.TAG_KV, "cuda_graph": _core.TAG_GRAPH,
        "optimizer": _core.TAG_OPTIMIZER, "default": _core.TAG_DEFAULT}
KEEPS = {"drop": _core.KEEP_NOT, "in_place": _core.KEEP_IN, "disk": _core.KEEP_DISK, "host": _core.KEEP_HOST}


def tags_of(tags):
    """The library's number for one name or several."""
    names = [tags] if isinstance(tags, str) else tags
    for name in names:
        if name not in TAGS:
            raise ValueError(f"no tag {name!r}: {', '.join(TAGS)}")
    return sum({TAGS[name] for name in names})


class Arena:
    """run.arena. All memory of a tag goes with an offload event of that tag, and is back before the onload event."""

    def __init__(self, run):
        self._run = run

    def empty(self, shape, dtype="F32", tag="default", device=-1):
        """Zeroed memory as a view: torch.from_dlpack(it), numpy.asarray(it). It is given back with the last view of
        it. device: -1 host, else an index into run.devices."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return self._run._alloc(tags_of(tag), device, [_shape_entry("arena", dtype, shape)])

    def keep(self, tags, how, folder=None):
        """What offload does with the content: "drop", "in_place", "disk" (in `folder`, else the run's), "host"."""
        if how not in KEEPS:
            raise ValueError(f"no way to keep {how!r}: {', '.join(KEEPS)}")
        self._run._keep(tags_of(tags), KEEPS[how], folder)

    def offload(self, tags):
        """By hand what an offload event does by itself; a dict of seconds and bytes."""
        return self._run._move(tags_of(tags), True)

    def onload(self, tags):
        return self._run._move(tags_of(tags), False)


_TORCH = {"weights": "_weights", "kv_cache": "_kv_cache", "cuda_graph": "_cuda_graph",
          "optimizer": "_optimizer", "default": ""}


def torch_pool(tag):
    """A torch.cuda.MemPool whose memory is the arena's: `with torch.cuda.use_mem_pool(torch_pool("weights")): ...`. It
    goes and comes back with its tag, and engines map it as it is."""
    import torch
    if tag not in _TORCH:
        raise ValueError(f"no tag {tag!r}: {', '.join(_TORCH)}")
    library = os.path.join(os.path.dirname(_core.__file__), "libfurlong.so.1")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library, "furlong_torch_alloc" + _TORCH[tag], "furlong_torch_free")
    pool = torch.cuda.MemPool(allocator.allocator())
    pool.furlong_allocator = allocator  # lives as long as the pool
    return pool
