"""Rank 0 of a torch process group, for furlong-sglang: python3 -m furlong_sglang.group

Run by the Python that the SGLang server runs in, so that both have one NCCL; on a device that no rank of the server
has (CUDA_VISIBLE_DEVICES). Commands come as lines of JSON on descriptor 3, each is answered by one line."""
import array
import json
import os
import socket
import sys
import threading

from .arena import mapped, view

FD, DEADLINE_S = 3, 600


class Commands:
    """Lines with, now and then, a descriptor beside them."""

    def __init__(self, fd):
        self.sock, self.text, self.fds = socket.socket(fileno=fd), b"", array.array("i")

    def __iter__(self):
        while True:
            while b"\n" not in self.text:
                more, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 1)
                if not more:
                    return
                self.text += more
                self.fds.extend(fds)
            line, self.text = self.text.split(b"\n", 1)
            yield json.loads(line)

    def answer(self, error):
        self.sock.sendall((json.dumps({"error": error[:1500]}) + "\n").encode())


class Rank0:
    def __init__(self, backend):
        import torch
        import torch.distributed

        self.torch, self.backend, self.group = torch, backend, None
        self.device = "cuda:0" if backend == "nccl" else "cpu"

    def init(self, c):
        from sglang.srt.utils import init_custom_process_group

        self.group = init_custom_process_group(backend=self.backend, init_method=f"tcp://{c['address']}:{c['port']}",
                                               world_size=c["world"], rank=0, group_name=c["group"])

    def send(self, c, memory):
        """In the order of the list: the engine's ranks receive in it. Two copies ahead of the wire at most."""
        ahead = []
        for dtype, shape, offset in zip(c["dtypes"], c["shapes"], c["offsets"]):
            tensor = view(memory, dtype, shape, offset).to(self.device)
            ahead.append((self.torch.distributed.broadcast(tensor, src=0, group=self.group, async_op=True), tensor))
            if len(ahead) > 2:
                ahead.pop(0)[0].wait()
        for work, _ in ahead:
            work.wait()
        if self.backend == "nccl":
            self.torch.cuda.synchronize()


def main():
    commands, rank = Commands(FD), None
    for c in commands:
        late = threading.Timer(DEADLINE_S, os._exit, [1])  # NCCL does not notice a peer that died
        late.daemon = True
        late.start()
        try:
            rank = rank or Rank0(os.environ.get("FURLONG_SGLANG_BACKEND", "nccl"))
            if c["do"] == "init":
                rank.init(c)
            else:
                with mapped(commands.fds.pop()) as memory:
                    rank.send(c, memory)
            commands.answer("")
        except Exception as e:  # noqa: the adapter says it, and takes another way
            commands.answer(f"{type(e).__name__}: {e}")
        finally:
            late.cancel()


if __name__ == "__main__":
    sys.exit(main())
