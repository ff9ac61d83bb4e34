from . import arena as arena, blob as blob, driver as driver, weights as weights
from .errors import (Again as Again, Cancelled as Cancelled, Corrupt as Corrupt, Denied as Denied, Error as Error,
                     Exhausted as Exhausted, Exists as Exists, Internal as Internal, Invalid as Invalid,
                     NotFound as NotFound, Stale as Stale, Timeout as Timeout, Unreachable as Unreachable,
                     Unsupported as Unsupported)
from .run import (LATER as LATER, Answer as Answer, Asks as Asks, Done as Done, Event as Event, Run as Run,
                  current as current, join as join)
from .weights import Shard as Shard, Weights as Weights

ABI: int
__version__: str
__all__ = ["ABI", "Again", "Answer", "Asks", "Cancelled", "Corrupt", "Denied", "Done", "Error", "Event", "Exhausted",
           "Exists", "Internal", "Invalid", "LATER", "NotFound", "Run", "Shard", "Stale", "Timeout", "Unreachable",
           "Unsupported", "Weights", "arena", "blob", "current", "driver", "join", "weights"]
