"""Bodies as callers give them: bytes as they are, everything else as JSON."""
import json


def pack(body):
    if body is None or isinstance(body, (bytes, bytearray, memoryview)):
        return body
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def unpack(body):
    return json.loads(body) if body else None
