"""An update in the middle of answers: a driver in this process, an example trainer, and furlong-sglang."""
import json
import os
import random
import struct
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.environ["FURLONG_HARNESS_DIR"])
from harness import BIN, SLOW, main, wait_for  # noqa: E402

import furlong  # noqa: E402

run = None
SIZE = 16384 * 128 * 4


def folders(d):
    """A model for the server, and a checkpoint that is version 1 of the trainer's."""
    head = json.dumps({"policy.table": {"dtype": "F32", "shape": [16384, 128], "data_offsets": [0, SIZE]}}).encode()
    head += b" " * (-len(head) % 8)
    os.makedirs(f"{d}/model")
    os.makedirs(f"{d}/ckpt")
    for path, data in {"model/model.safetensors": struct.pack("<Q", len(head)) + head + bytes(SIZE), "model/config.json": b"{}",
                       "ckpt/table.bin": struct.pack("<128f", *(random.Random(i).random() for i in range(128))) * 16384,
                       "ckpt/state.json": b'{"step":1,"version":1}\n'}.items():
        with open(f"{d}/{path}", "wb") as f:
            f.write(data)


def noted(d, path):
    with open(f"{d}/notes", encoding="utf-8") as f:
        return [n[1] for n in map(json.loads, f) if n[0] == path]


def test_answers_show_both_versions():
    with tempfile.TemporaryDirectory(prefix="fl-") as d:
        folders(d)
        layout = run.place({"trainer": 1, "rollout": 1})
        env = {"FAKE_WORLD": "1"}
        server = f"{sys.executable} {HERE}/stand_in.py --alone --step-s 0.05 --model-path {d}/model --notes {d}/notes"
        t = layout.launch("trainer", [f"{BIN}/example-trainer"], env, start=60 * SLOW)
        e = layout.launch("rollout", [f"{BIN}/furlong-sglang", f"--sglang-cmd={server}"], env, start=60 * SLOW)
        try:
            first = run.update(t, e, 0, budget=60)
            ask = {"id": "a", "prompts": ["ab1?a", "cd2?c"], "n": 2, "max_new_tokens": 60, "temperature": 1.0, "seed": 1}
            with run.asks() as asks:
                asks.start("rollout", 0, "generate", ask, budget=60 * SLOW, tag="a")
                wait_for("it runs", lambda: noted(d, "began"))
                t.ask_all("load", {"dir": f"{d}/ckpt"}, budget=30)
                second = run.update(t, e, 1, budget=60)
                answer = asks.next(60 * SLOW).result()
            spans = answer.json()["spans"]
            seen = {(s["version"], s["digest"]) for sample in spans for s in sample}
            assert seen == {(0, first["digest"]), (1, second["digest"])}, (seen, first, second)
            assert any(len(sample) == 2 and [s["version"] for s in sample] == [0, 1] for sample in spans), spans
            assert [n["flush_cache"] for n in noted(d, "/update_weights_from_tensor")] == [True, False]
            try:
                run.ask("rollout", 0, "generate", {**ask, "version": 0}, budget=30)
                raise AssertionError("a version that is gone was served")
            except furlong.Stale as why:
                assert "version 0 was asked for, this engine serves 1" in str(why), why
        finally:
            e.end()
            t.end()


if __name__ == "__main__":
    run = furlong.join()
    main(globals())
