"""long_torch.py BUILD RIG - the example in PyTorch, against transformers and under whole clusters.

Needs an interpreter with torch, numpy, tokenizers and transformers: $FURLONG_TORCH_PYTHON, else BUILD/torch-venv, which is made
from PyPI when it can be reached."""
import functools
import json
import os
import re
import signal
import subprocess
import sys

build, rig = map(os.path.abspath, sys.argv[1:3])
del sys.argv[1:3]
here = os.path.dirname(os.path.abspath(__file__))
source = os.path.dirname(os.path.dirname(here))
example = os.path.join(source, "examples", "torch_grpo")
sys.path.insert(0, os.path.join(here, "..", "cluster"))
from harness import SLOW, Skip, main, place, wait_for  # noqa: E402
from runs import Run  # noqa: E402

NEEDS = "import torch, numpy, tokenizers, transformers"


@functools.lru_cache(None)
def python():
    """The interpreter, or why there is none."""
    if SLOW != 1:
        raise Skip("torch is not built for the sanitizers")
    given = os.environ.get("FURLONG_TORCH_PYTHON")
    made = os.path.join(build, "torch-venv")
    path = given or os.path.join(made, "bin", "python3")
    if not os.path.exists(path) and not given:
        r = subprocess.run([sys.executable, "-m", "venv", made], capture_output=True, text=True)
        if r.returncode == 0:
            try:
                r = subprocess.run([path, "-m", "pip", "install", "-q", "torch", "numpy", "transformers"], capture_output=True,
                                   text=True, timeout=900)
            except subprocess.TimeoutExpired:
                raise Skip("PyPI did not give torch within 900 s") from None
        if r.returncode:
            raise Skip(f"no torch from PyPI: {(r.stderr.strip() or r.stdout.strip()).splitlines()[-1]}")
    r = subprocess.run([path, "-c", NEEDS], capture_output=True, text=True)
    if r.returncode:
        raise Skip(f"{path} cannot {NEEDS}: {(r.stderr.strip().splitlines() or ['?'])[-1]}")
    return path


def script(text, *args):
    """Runs a few lines with the example's folder at hand; its output."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.join(build, "python"), example]), "PYTHONDONTWRITEBYTECODE": "1"}
    r = subprocess.run([python(), "-c", text, *args], capture_output=True, text=True, env=env, timeout=300)
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout


def make_model(folder, *flags):
    script("import sys, runpy; sys.argv = ['make_model.py', *sys.argv[1:]]; runpy.run_path(sys.argv[0] and "
           f"{os.path.join(example, 'make_model.py')!r}, run_name='__main__')", folder, *flags)
    return folder


COMPARE = """
import sys, torch, hf, model
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
c = hf.Config(folder)
mine = model.Qwen3(c)
hf.load(mine, folder)
ref = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
torch.manual_seed(1)
tokens = torch.randint(0, c.vocab, (3, 17))
with torch.no_grad():
    a, b = ref(tokens).logits, mine(tokens)
    caches = [model.Cache(c, 3, 17, a) for _ in range(c.layers)]
    at = torch.arange(17).expand(3, 17)
    parts = [mine(tokens[:, :5], at[:, :5], caches)] + [mine(tokens[:, i:i + 1], at[:, i:i + 1], caches) for i in range(5, 17)]
assert a.std() > 0.01
assert (a - b).abs().max() < 1e-5 * a.abs().max(), (a - b).abs().max()
assert (torch.cat(parts, 1) - b).abs().max() < 1e-5 * a.abs().max()
theirs, ours = AutoTokenizer.from_pretrained(folder), hf.Tokenizer(folder, c)
ids = ours.encode("a7g5?a")
assert theirs("a7g5?a", add_special_tokens=False).input_ids == ids and ours.decode(ids + [*c.ends]) == "a7g5?a", ids
hf.save(mine, folder + ".saved", folder, {})
again = AutoModelForCausalLM.from_pretrained(folder + ".saved", dtype=torch.float32)
with torch.no_grad():
    assert torch.equal(again(tokens).logits, a)
"""


def test_logits_equal_those_of_transformers():
    with place() as p:
        for name, flags in {"untied": ["--seed=3"], "tied": ["--seed=4", "--tied"]}.items():
            script(COMPARE, make_model(f"{p.root}/{name}", *flags))


SHARDED = """
import json, os, sys, torch, hf, model
from transformers import Qwen3Config, Qwen3ForCausalLM
folder = sys.argv[1]
torch.manual_seed(2)
theirs = Qwen3ForCausalLM(Qwen3Config(vocab_size=320, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False, rope_theta=1e6)).to(torch.bfloat16)
theirs.save_pretrained(folder, max_shard_size="100KB")
assert os.path.exists(os.path.join(folder, "model.safetensors.index.json"))
c = hf.Config(folder)
mine = model.Qwen3(c)
hf.load(mine, folder)
tokens = torch.randint(0, 320, (2, 40))
with torch.no_grad():
    a, b = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits, mine(tokens)
assert (a - b).abs().max() < 1e-4 * a.abs().max(), (a - b).abs().max()
"""


def test_a_folder_of_transformers_in_several_files():
    with place() as p:
        script(SHARDED, f"{p.root}/theirs")


AS_PUBLISHED = """
import json, os, sys, torch, engine, hf, model
from transformers import Qwen3Config, Qwen3ForCausalLM
folder, tied = sys.argv[1], sys.argv[2] == "tied"
theirs = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, eos_token_id=7)).to(torch.bfloat16)
theirs.save_pretrained(folder)
with open(f"{folder}/config.json") as f:
    c = json.load(f)
assert c.pop("head_dim") == 128
with open(f"{folder}/config.json", "w") as f:
    json.dump({**c, "rope_scaling": None}, f)
with open(f"{folder}/generation_config.json", "w") as f:
    json.dump({"eos_token_id": [7, 3]}, f)
c = hf.Config(folder)
mine = model.Qwen3(c)
hf.load(mine, folder)
tokens = torch.randint(0, 64, (2, 40))
with torch.no_grad():
    a, b = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits, mine(tokens)
assert (a - b).abs().max() < 1e-4 * a.abs().max(), (a - b).abs().max()
for token, done in {7: True, 3: True, 4: False}.items():
    s = engine.Sequence(type("Request", (), {"most": 5}), [1], 0)
    s.add(token, 0.0, (1, "d"), c.ends)
    assert s.done == done, token
"""


def test_a_folder_as_it_is_published():
    """Several tokens end an answer, the head's size is left to its default, the head is the embedding or its own."""
    with place() as p:
        for tied in ("tied", "untied"):
            script(AS_PUBLISHED, f"{p.root}/{tied}", tied)


def test_what_is_not_qwen3_is_refused():
    rows = {"model_type": ("llama", "model_type is 'llama'"), "attention_bias": (True, "attention biases"),
            "hidden_size": (32, "config.json makes"), "num_hidden_layers": (3, "lacks ['model.layers.2"),
            "rope_scaling": ({"rope_type": "yarn"}, "rope_type 'yarn'")}
    with place() as p:
        folder = make_model(f"{p.root}/m")
        with open(f"{folder}/config.json", encoding="utf-8") as f:
            good = json.load(f)
        for key, (value, part) in rows.items():
            with open(f"{folder}/config.json", "w", encoding="utf-8") as f:
                json.dump({**good, key: value}, f)
            said = script("import sys, hf, model\ntry:\n f = sys.argv[1]; hf.load(model.Qwen3(hf.Config(f)), f)\nexcept SystemExit as e: "
                          "print(e)", folder)
            assert part in said, f"{key}: {said}"


def test_tensors_are_not_copied():
    env = {**os.environ, "PYTHONPATH": os.path.join(build, "python")}
    r = subprocess.run([rig, python(), os.path.join(here, "torch_views.py")], capture_output=True, text=True, env=env, timeout=120)
    assert r.returncode == 0 and "views ok" in r.stdout, r.stdout + r.stderr


def test_p121_tensors_of_any_strides():
    env = {**os.environ, "PYTHONPATH": os.path.join(build, "python")}
    r = subprocess.run([rig, python(), os.path.join(here, "torch_strides.py")], capture_output=True, text=True, env=env, timeout=120)
    assert r.returncode == 0 and "ok 2 - p121" in r.stdout, r.stdout + r.stderr


def test_a_step_that_raises_is_taken_back():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.join(build, "python"), example]), "OMP_NUM_THREADS": "1"}
    with place() as p:
        r = subprocess.run([rig, python(), os.path.join(here, "torch_taken_back.py"), make_model(f"{p.root}/m")], capture_output=True,
                           text=True, env=env, timeout=200)
        assert r.returncode == 0 and "taken back" in r.stdout, r.stdout + r.stderr


def commands(folder):
    words = lambda name, *more: " ".join([python(), os.path.join(example, name), "--hf-checkpoint", folder, *more])
    return ["--trainer-cmd=" + words("trainer.py", "--lr=3e-3"), "--rollout-cmd=" + words("engine.py")]


STEPS = ["--rollout-batch-size=32", "--n-samples-per-prompt=8", "--seed=7", "--ci-test"]
ENV = {"PYTHONPATH": os.path.join(build, "python"), "OMP_NUM_THREADS": "1"}


def mean(xs):
    return sum(xs) / len(xs)


def rising(steps, n):
    rewards = [s["reward_mean"] for s in steps]
    assert len(rewards) == n and mean(rewards[-10:]) > mean(rewards[:10]) + 0.1, rewards


def readme_pair(folder):
    """The three files of python/README.md, as they stand there."""
    with open(os.path.join(source, "python", "README.md"), encoding="utf-8") as f:
        blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", f.read(), re.S | re.M)
    assert [name for name, _ in blocks] == ["policy.py", "engine.py", "trainer.py"], blocks
    os.makedirs(folder)
    for name, text in blocks:
        with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
            f.write(text)
    return [f"--trainer-cmd={python()} {folder}/trainer.py", f"--rollout-cmd={python()} {folder}/engine.py"]


def test_the_pair_of_the_readme_learns():
    with place() as p:
        pair = readme_pair(f"{p.root}/pair")
        run = Run(p, "--num-rollout=60", "--seed=7", *pair, env=ENV)
        run.go(seconds=200)
        rising(run.steps(), 60)
        short = ["--rollout-batch-size=8", "--n-samples-per-prompt=4", "--seed=7", "--eval-interval=0"]
        saved = Run(p, "--num-rollout=3", "--save-interval=2", *short, *pair, name="saved", env=ENV)
        saved.go()
        on = Run(p, "--num-rollout=5", f"--load={saved.dir}/checkpoints", "--colocate", "--actor-num-gpus-per-node=2", *short, *pair, name="on",
                 env=ENV)
        on.go()
        whole = Run(p, "--num-rollout=5", *short, *pair, name="whole", env=ENV)
        whole.go()
        assert on.digests() == whole.digests()[3:], (on.digests(), whole.digests())
        assert not p.left_behind(), p.left_behind()


def test_a_split_run_learns():
    with place() as p:
        run = Run(p, "--num-rollout=60", *STEPS, *commands(make_model(f"{p.root}/m")), env=ENV)
        run.go(seconds=300)
        rising(run.steps(), 60)
        assert not p.left_behind(), p.left_behind()


def test_a_colocated_run_with_two_ranks_learns():
    with place() as p:
        run = Run(p, "--num-rollout=60", "--colocate", "--actor-num-gpus-per-node=2", *STEPS,
                  *commands(make_model(f"{p.root}/m")), env=ENV)
        run.go(seconds=300)
        rising(run.steps(), 60)


def test_the_built_in_trainer_reads_the_same_folder():
    """Its log probabilities before the first step are the PyTorch engine's, and it learns with it."""
    with place() as p:
        for name, flags in {"untied": [], "tied": ["--tied", "--seed=4"]}.items():
            folder = make_model(f"{p.root}/{name}", *flags)
            run = Run(p, "--num-rollout=3", *STEPS, f"--hf-checkpoint={folder}", commands(folder)[1], name=f"run-{name}", env=ENV)
            run.go(seconds=200)
            gaps = [s["train_rollout_logprob_abs_diff"] for s in run.steps()]
            assert len(gaps) == 3 and max(gaps) < 1e-5, gaps
            saved = f"{run.dir}/checkpoints/step_00000003"
            script("import sys, hf, model; c = hf.Config(sys.argv[1]); hf.load(model.Qwen3(c), sys.argv[1])", saved)


def test_a_killed_trainer_goes_on_from_its_checkpoint():
    with place() as p:
        run = Run(p, "--num-rollout=30", "--save-interval=5", *STEPS, *commands(make_model(f"{p.root}/m")), env=ENV)
        driver = run.start()
        run.wait_step(12, seconds=120)
        pid = wait_for("the trainer", lambda: [x for x, c in p.processes() if c.startswith(python()) and "trainer.py" in c])
        os.kill(pid[0], signal.SIGKILL)
        out, err = driver.communicate(timeout=240)
        assert driver.returncode == 0, out + err
        last = run.steps()[-1]
        assert last["step"] == 29, last
        saved = sorted(os.listdir(f"{run.dir}/checkpoints"))
        assert "step_00000030" in saved and not [x for x in saved if x.endswith(".part")], saved
        script(COMPARE, f"{run.dir}/checkpoints/step_00000030")


if __name__ == "__main__":
    main(globals())
