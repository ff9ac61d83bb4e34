"""Run by long_torch.py as a driver: FOLDER of a model. A train that raises half way leaves a trainer that goes on; with
`trainer` in front it is that trainer, whose memory ends in the middle of every second step."""
import os
import sys

import torch

import furlong


def train_body(version):
    tokens = torch.tensor([1, 2, 3, 4] * 4, dtype=torch.int32)
    return {"step": version - 1, "version": version, "epochs": 1}, furlong.blob.write({
        "tokens": tokens, "lengths": torch.tensor([4] * 4, dtype=torch.int32),
        "prompt_lengths": torch.tensor([2] * 4, dtype=torch.int32), "logprobs": torch.zeros(16),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5])})


def trainer():
    import trainer as example
    steps = 0

    class Failing(example.torch.optim.AdamW):
        def step(self, *args):
            nonlocal steps
            super().step(*args)
            steps += 1
            if steps % 2 == 0:
                raise torch.OutOfMemoryError("out of memory")

    example.torch.optim.AdamW = Failing
    t = example.Trainer(furlong.join(), example.options())
    first = {k: p.detach().clone() for k, p in t.params.items()}
    same = lambda: all(torch.equal(p, first[k]) for k, p in t.params.items())
    t.run.serve({"train": t.train, "save": t.save, "load": t.load, "state": t.state,
                 "first": lambda ev: {"same": same(), "version": t.weights.version}})


def driver(folder):
    run = furlong.join()

    def refused(kind, words, *what):
        try:
            run.ask("trainer", 0, *what, budget=60)
        except kind as e:
            assert words in str(e), e
            return
        raise AssertionError(f"{what[0]} was taken")

    ask = lambda *what: run.ask("trainer", 0, *what, budget=60).json()
    g = run.place({"trainer": 1, "rollout": 1}).launch(
        "trainer", [sys.executable, os.path.abspath(__file__), "trainer", "--hf-checkpoint", folder], {"FAKE_WORLD": "1"}, start=120)
    assert ask("train", *train_body(1))["step"] == 0 and not ask("first")["same"]
    refused(furlong.Internal, "out of memory", "train", *train_body(2))
    assert ask("first")["version"] == 1
    for what in ("train", *train_body(2)), ("save", {"dir": f"{folder}/saved", "step": 1}), ("state", {}):
        refused(furlong.Invalid, "cut short while it wrote", *what)
    assert ask("load", {"dir": ""}) == {"step": 0, "version": 0}
    assert ask("first") == {"same": True, "version": 0}, "the first weights"
    assert ask("state")["version"] == 0
    assert ask("train", *train_body(1))["step"] == 0 and ask("first") == {"same": False, "version": 1}
    g.end()
    run.leave()
    print("taken back")


if sys.argv[1] == "trainer":
    del sys.argv[1]
    trainer()
else:
    driver(sys.argv[1])
