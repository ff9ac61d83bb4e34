"""A driver's program: PyTorch's tensors of any strides, in host memory and, where PyTorch has a device, in the device's. TAP."""
import sys
import traceback

import numpy
import torch

import furlong

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}


def layouts(device):
    """name -> tensor; transposed, sliced, expanded, of every type."""
    base = torch.arange(96, dtype=torch.float32, device=device).reshape(8, 12)
    out = {"expanded": torch.arange(5.0, device=device).expand(3, 5), "plain": base.clone(),
           "grad": torch.randn(4, 6, requires_grad=True, device=device).t(), "one": torch.tensor(2.5, device=device),
           "empty": torch.empty(0, 7, device=device), "no columns": torch.empty(3, 0, device=device, dtype=torch.bfloat16)}
    for word, kind in TYPES.items():
        out[f"{word} transposed"] = base.to(kind).t()
        out[f"{word} sliced"] = base.to(kind)[1:7:2, 3:11:3]
    return out


def raw(w, name):
    """The bytes that were given, in the host's memory."""
    return bytes(torch.from_dlpack(w.data(name).raw()).cpu().numpy())


def of(tensor):
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())


def p121_tensors_of_any_strides(run, device):
    rows = layouts(device)
    rows["shard"] = furlong.Shard(rows["plain"][:, :6], (8, 12), (0, 6))
    if device == "cpu":
        rows["numpy"] = numpy.arange(12, dtype=numpy.float32).reshape(3, 4).T
        rows["numpy, no columns"] = numpy.empty((3, 0), dtype=numpy.float32)
    before = torch.cuda.memory_allocated() if device != "cpu" else 0
    w = run.weights.offer(rows, set="strides")
    assert device == "cpu" or torch.cuda.memory_allocated() == before, "a copy in between was left"
    for name, t in rows.items():
        t = t.data if isinstance(t, furlong.Shard) else t
        t = torch.from_numpy(numpy.ascontiguousarray(t)) if name.startswith("numpy") else t
        assert raw(w, name) == of(t), name
    w.publish(0)
    w.drop()


def p121_what_is_strided_is_not_taken_as_it_lies(run, device):
    try:
        run.weights.offer({"s": torch.zeros(8, 12, device=device).t()}, set="s", in_place=True)
        raise AssertionError("a strided tensor was taken as it lies")
    except furlong.Invalid as e:
        assert "not contiguous" in str(e), e


def main():
    run = furlong.join()
    tests = [(f, d) for d in ["cpu"] + (["cuda:0"] if run.devices and torch.cuda.is_available() else [])
             for f in (p121_tensors_of_any_strides, p121_what_is_strided_is_not_taken_as_it_lies)]
    failed = 0
    print(f"1..{len(tests)}")
    for i, (f, device) in enumerate(tests, 1):
        try:
            f(run, device)
            print(f"ok {i} - {f.__name__} {device}")
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"not ok {i} - {f.__name__} {device}")
    run.leave()
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
