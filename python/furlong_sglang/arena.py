"""The adapter's memory, mapped: which tensor lies where, and a word back."""
import json
import mmap
import os
import socket

NAME = "FURLONG_SGLANG_SOCKET"
DEADLINE_S = 60.0


class Refused(Exception):
    """The adapter is not there, or is somebody else's."""


class Version:
    """One version of the weights, until it is left as a context."""

    def __init__(self, sock, memory, head):
        self.sock, self.memory, self.version, self.table = sock, memory, head["version"], head["tensors"]

    def tensors(self):
        """(name, tensor) for each; the tensors lie in the mapped memory: read only, copy what you keep."""
        for t in self.table:
            yield t["name"], view(self.memory, t["dtype"], t["shape"], t["offset"])

    def say(self, error):
        """The outcome of this rank, which the adapter waits for."""
        line = json.dumps({"rank": _rank(), "error": error[:1500] if error else ""}) + "\n"
        with self.sock:
            self.sock.sendall(line.encode())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.memory.close()
        except BufferError:  # a view lives on in a traceback: goes with it
            pass


def view(memory, dtype, shape, offset):
    """A tensor over mapped bytes, which are not copied."""
    import torch

    count = 1
    for n in shape:
        count *= n
    if not count:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset).reshape(shape)


def mapped(fd):
    """All of a descriptor's memory, read only; the descriptor is closed."""
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)


def fetch(name=None):
    """Asks the adapter for the version that it is loading now."""
    name = name or os.environ.get(NAME, "")
    if not name.startswith("@"):
        raise Refused(f"{NAME} is not set: the server was not started for furlong-sglang")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(DEADLINE_S)
        sock.connect("\0" + name[1:])
        uid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], "little")
        if uid not in (os.geteuid(), 0):
            raise Refused(f"{name} belongs to user {uid}")
        word, fds, _, _ = socket.recv_fds(sock, 1, 2)
        if word != b"F" or len(fds) != 2:
            for fd in fds:
                os.close(fd)
            raise Refused("the adapter is loading nothing now")
        memory = mapped(fds[0])
        with mapped(fds[1]) as head:
            return Version(sock, memory, json.loads(head[:]))
    except BaseException:
        sock.close()
        raise


def _rank():
    try:
        import torch

        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    except (ImportError, AttributeError):
        return 0
