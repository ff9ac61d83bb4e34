"""Bodies as callers give them: bytes as they are, everything else as JSON."""
import json
import math

from .errors import Invalid


def pack(body):
    if body is None or isinstance(body, (bytes, bytearray, memoryview)):
        return body
    try:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain).encode()
    except ValueError as e:
        at = None if "Circular" in str(e) else _unwritable(body, "")
        if at is None:
            raise
        raise Invalid(f"{at}, and JSON has no such number: give None for it") from None


def _plain(o):
    """A number that came out of torch or numpy: a loss, a norm."""
    if getattr(o, "ndim", None) == 0 and hasattr(o, "item"):
        return o.item()
    raise TypeError(f"Object of type {type(o).__name__} is not JSON serializable")


def _unwritable(o, at):
    """Where a NaN or an infinity is; None: nowhere."""
    if getattr(o, "ndim", None) == 0 and hasattr(o, "item"):
        o = o.item()
    if isinstance(o, float):
        return None if math.isfinite(o) else f"{at or 'the body'} is {o}"
    inside = o.items() if isinstance(o, dict) else enumerate(o) if isinstance(o, (list, tuple)) else ()
    found = (_unwritable(x, f"{at}.{k}" if at else str(k)) for k, x in inside)
    return next((x for x in found if x), None)


def unpack(body):
    return json.loads(body) if body else None
