"""Run by long_torch.py as a driver: tensors of torch and numpy go in by one copy and come out by none."""
import numpy
import torch

import furlong

run = furlong.join()
kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.uint8]
first = {str(k): (torch.arange(24) - 3).reshape(2, 3, 4).to(torch.float32).abs().to(k) for k in kinds}
first["grad"] = torch.randn(5, 7, requires_grad=True)
first["numpy"] = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
first["scalar"] = torch.tensor(2.5)
w = run.weights.offer(first)
assert w.names == list(first)
for name, t in first.items():
    view = w.data(name)
    raw = view.dtype.startswith("F8")
    got = torch.from_dlpack(view) if not raw else torch.frombuffer(memoryview(view).cast("B"), dtype=t.dtype).reshape(t.shape)
    want = torch.from_numpy(t) if name == "numpy" else t.detach()
    assert got.data_ptr() == view.pointer and got.dtype == want.dtype and got.shape == want.shape, name
    assert torch.equal(got.view(torch.uint8) if raw else got, want.view(torch.uint8) if raw else want), name
    del got, view
a = numpy.asarray(w.data("grad"))
t = torch.from_dlpack(w.data("grad"))
t.fill_(3)
assert a[4, 6] == 3 and a.flags.writeable
try:
    w.drop()
    raise AssertionError("dropped under a view")
except furlong.Invalid as e:
    assert "2 views" in str(e), e
del a, t
w.drop()
x = run.arena.empty((3, 5), "BF16", "optimizer")
y = torch.from_dlpack(x)
y[2, 4] = 1.5
at = y.data_ptr()
del x
assert torch.from_dlpack(run.arena.empty((3, 5), "BF16", "optimizer")).data_ptr() != at and y[2, 4] == 1.5
image = furlong.blob.write({"a": torch.arange(5, dtype=torch.bfloat16), "b": numpy.ones((2, 2)), "none": torch.empty(0, 3)})
back = furlong.blob.read(image.data)
assert back["a"].torch().tolist() == [0, 1, 2, 3, 4] and back["b"].numpy().sum() == 4 and back["none"].torch().shape == (0, 3)
back["b"].numpy()[0, 0] = 9
assert image["b"].torch()[0, 0] == 9
del y
run.leave()
print("views ok")
