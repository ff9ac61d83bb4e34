"""A process' seat in a Furlong run: calls, weights, memory that can go and come back.

    import furlong
    run = furlong.join()
    run.serve({"generate": lambda ev: {"texts": [...]}})
"""
from . import _core, arena, blob, driver, weights
from .errors import (Again, Cancelled, Corrupt, Denied, Error, Exhausted, Exists, Internal, Invalid, NotFound, Stale,
                     Timeout, Unreachable, Unsupported)
from .run import LATER, Answer, Asks, Done, Event, Run, current, join
from .weights import Shard, Weights

ABI = _core.ABI
__version__ = _core.__version__
__all__ = ["ABI", "Again", "Answer", "Asks", "Cancelled", "Corrupt", "Denied", "Done", "Error", "Event", "Exhausted",
           "Exists", "Internal", "Invalid", "LATER", "NotFound", "Run", "Shard", "Stale", "Timeout", "Unreachable",
           "Unsupported", "Weights", "arena", "blob", "current", "driver", "join", "weights"]
