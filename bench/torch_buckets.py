#!/usr/bin/env python3
"""Weights from a trainer's process to an engine's, as PyTorch programs send them: the same tensors, the same machine.

    torch_buckets.py [--big] [--rounds N] [--device cpu]

flattened buckets: tensors are copied into a bucket of 512 MiB (gather), the bucket travels as torch.multiprocessing makes it
(an IPC handle of its memory), and the engine copies each tensor out; the trainer waits for each bucket and frees it, as
colocated updates of SGLang do. a handle per tensor: the same without buckets. a broadcast per tensor: torch.distributed with
NCCL, on two devices. limit: one plain copy of the bytes, device or peer. ms are medians of the rounds after 3; the bytes are
compared at the end. JSON lines. Exit 1: bytes were wrong.
"""
import argparse
import json
import os
import statistics
import sys
import time
from io import BytesIO
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as mp

BUCKET, WARM = 512 << 20, 3
SHAPES = {"0.6B": (28, 1024, 2048, 1024, 3072, 151936, 128, True), "8B": (36, 4096, 4096, 1024, 12288, 151936, 128, False),
          "tiny": (2, 256, 512, 256, 768, 8192, 128, True)}


def numels(name):
    layers, hidden, q, kv, ffn, vocab, head, tied = SHAPES[name]
    layer = [q * hidden, kv * hidden, kv * hidden, hidden * q, ffn * hidden, ffn * hidden, hidden * ffn, hidden, hidden, head, head]
    return [vocab * hidden] + layer * layers + [hidden] + ([] if tied else [vocab * hidden])


def tensors(name, device, fill):
    made = []
    generator = torch.Generator(device=device).manual_seed(7)
    for n in numels(name):
        t = torch.empty(n, dtype=torch.bfloat16, device=device)
        made.append(t.normal_(generator=generator) if fill else t.fill_(0))
    return made


def sync(device):
    if device != "cpu":
        torch.cuda.synchronize(device)


def pack(thing):
    out = BytesIO()
    ForkingPickler(out, 2).dump(thing)
    return out.getvalue()


def sums(ts):
    return [int(t.view(torch.int16).to(torch.int64).sum()) for t in ts]


def buckets_of(ts):
    group, size = [], 0
    for i, t in enumerate(ts):
        if group and size + t.numel() * 2 > BUCKET:
            yield group
            group, size = [], 0
        group.append(i)
        size += t.numel() * 2
    yield group


def engine(name, device, conn, rank_env):
    if device != "cpu":
        torch.cuda.set_device(device)
    ts = tensors(name, device, False)
    conn.send("ready")
    group = None
    while True:
        what, arg = conn.recv()
        if what == "bucket":
            flat = ForkingPickler.loads(arg[0])
            at = 0
            for i in arg[1]:
                ts[i].copy_(flat[at:at + ts[i].numel()])
                at += ts[i].numel()
            sync(device)
            del flat
            conn.send("done")
        elif what == "handle":
            for i, t in enumerate(ForkingPickler.loads(arg)):
                ts[i].copy_(t)
            sync(device)
            conn.send("done")
        elif what == "join":
            group = join(rank_env, 1)
            conn.send("done")
        elif what == "broadcast":
            for t in ts:
                torch.distributed.broadcast(t, 0, group=group)
            sync(device)
            conn.send("done")
        elif what == "sums":
            conn.send(sums(ts))
            for t in ts:
                t.fill_(0)
        else:
            leave(group)
            return


def join(env, rank):
    os.environ.update(env)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2)
    return torch.distributed.group.WORLD


def leave(group):
    if group:
        torch.distributed.destroy_process_group()


def by_buckets(ts, conn, device):
    gather = send = 0.0
    for group in buckets_of(ts):
        begin = time.perf_counter()
        flat = torch.cat([ts[i].view(-1) for i in group])
        sync(device)
        gathered = time.perf_counter()
        conn.send(("bucket", (pack(flat), group)))
        conn.recv()
        send += time.perf_counter() - gathered
        gather += gathered - begin
        del flat
    return gather, send


def by_handles(ts, conn, device):
    begin = time.perf_counter()
    conn.send(("handle", pack(ts)))
    conn.recv()
    return 0.0, time.perf_counter() - begin


def by_broadcasts(ts, conn, device):
    begin = time.perf_counter()
    conn.send(("broadcast", None))
    for t in ts:
        torch.distributed.broadcast(t, 0)
    sync(device)
    conn.recv()
    return 0.0, time.perf_counter() - begin


def limit_ms(ts, device, far):
    if device == "cpu":
        return None
    n = sum(t.numel() for t in ts)
    a, b = (torch.empty(n, dtype=torch.bfloat16, device=d) for d in (device, far))
    took = []
    for _ in range(WARM + 10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        b.copy_(a, non_blocking=True)
        end.record()
        end.synchronize()
        sync(far)
        took.append(begin.elapsed_time(end))
    return statistics.median(took[WARM:])


def measure(what, how, ts, conn, device, far, name, rounds):
    took, gather = [], []
    for i in range(WARM + rounds):
        begin = time.perf_counter()
        g, _ = how(ts, conn, device)
        took.append((time.perf_counter() - begin) * 1e3)
        gather.append(g * 1e3)
    conn.send(("sums", None))
    right = conn.recv() == sums(ts)
    limit, mid = limit_ms(ts, device, far), statistics.median(took[WARM:])
    print(json.dumps({"name": f"{name} PyTorch, {what}", "bytes": sum(t.numel() for t in ts) * 2, "ms": round(mid, 3),
                      "max_ms": round(max(took[WARM:]), 3), "cold_ms": round(took[0], 3),
                      "gather_ms": round(statistics.median(gather[WARM:]), 3), "limit": "one plain copy",
                      "limit_ms": limit and round(limit, 4), "ratio": limit and round(mid / limit, 2), "right": right}), flush=True)
    return right


def pair(name, device, far, ways, rounds):
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000), "NCCL_NVLS_ENABLE": "0"}
    here, there = mp.Pipe()
    ts = tensors(name, device, True)
    child = mp.Process(target=engine, args=(name, far, there, env), daemon=True)
    child.start()
    assert here.recv() == "ready"
    right, group = True, None
    for what, how in ways:
        if how is by_broadcasts:
            here.send(("join", None))
            group = join(env, 0)
            here.recv()
        right = measure(what, how, ts, here, device, far, name, rounds) and right
    here.send(("end", None))
    leave(group)
    child.join(20)
    return right


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--big", action="store_true")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--device", default="cuda:0")
    a = p.parse_args()
    mp.set_start_method("spawn")
    right = True
    for name in ["tiny"] if a.tiny else ["0.6B", "8B"] if a.big else ["0.6B"]:
        ways = [("flattened buckets", by_buckets), ("a handle per tensor", by_handles)]
        right = pair(name, a.device, a.device, ways, a.rounds) and right
        if a.device != "cpu" and torch.cuda.device_count() > 1:
            ways = [("flattened buckets, two devices", by_buckets), ("a broadcast per tensor", by_broadcasts)]
            right = pair(name, "cuda:0", "cuda:1", ways, a.rounds) and right
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
