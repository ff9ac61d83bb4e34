#!/usr/bin/env python3
"""PyTorch's memory in the arena: tensors keep address and content over offload and onload. Usage: torch_arena.py LIBFURLONG"""
import ctypes
import json
import sys
import time

import torch
from torch.cuda.memory import CUDAPluggableAllocator

WEIGHTS, KV, GRAPH, OPTIMIZER, DEFAULT = 1, 2, 4, 8, 16


class Moved(ctypes.Structure):
    _fields_ = [("setup_s", ctypes.c_double), ("copy_s", ctypes.c_double), ("dropped", ctypes.c_uint64),
                ("kept", ctypes.c_uint64), ("written", ctypes.c_uint64), ("backed", ctypes.c_uint64)]


def main():
    path = sys.argv[1]
    lib = ctypes.CDLL(path)
    lib.furlong_torch_error.restype = ctypes.c_char_p
    allocators = {tag: CUDAPluggableAllocator(path, "furlong_torch_alloc_" + name, "furlong_torch_free")
                  for tag, name in ((OPTIMIZER, "optimizer"), (KV, "kv_cache"))}
    pools = {tag: torch.cuda.MemPool(a.allocator()) for tag, a in allocators.items()}

    def moved(how, tags):
        out = Moved()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if how(tags, ctypes.byref(out)) != 0:
            sys.exit("torch_arena: " + lib.furlong_torch_error().decode())
        return out, time.perf_counter() - begin

    with torch.cuda.use_mem_pool(pools[OPTIMIZER]):
        states = [torch.randn(n, device="cuda") for n in (1 << 28, 12345, 1 << 26)]
    with torch.cuda.use_mem_pool(pools[KV]):
        cache = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    sums = [s.double().sum().item() for s in states]
    addresses = [s.data_ptr() for s in states] + [cache.data_ptr()]
    free_before = torch.cuda.mem_get_info()[0]
    for turn in ("cold", "warm"):
        out, out_s = moved(lib.furlong_torch_offload, OPTIMIZER | KV)
        free_out = torch.cuda.mem_get_info()[0]
        back, back_s = moved(lib.furlong_torch_onload, OPTIMIZER | KV)
        same = [s.double().sum().item() for s in states] == sums
        cache.fill_(3)
        right = same and addresses == [s.data_ptr() for s in states] + [cache.data_ptr()] and int(cache[-1]) == 3
        print(json.dumps({"name": f"torch offload and onload, {turn}", "right": right, "backed_bytes": out.backed,
                          "dropped_bytes": out.dropped, "freed_bytes": free_out - free_before, "offload_ms": round(out_s * 1e3, 3),
                          "onload_ms": round(back_s * 1e3, 3)}))
        if not right or free_out - free_before < out.backed + out.dropped - (8 << 20):
            return 1
    return 0


sys.exit(main())
