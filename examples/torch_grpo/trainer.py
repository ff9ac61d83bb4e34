"""One trainer rank: group-relative policy gradient with a clipped ratio, by PyTorch, over furlong.

    furlong train --trainer-cmd "python3 examples/torch_grpo/trainer.py --hf-checkpoint FOLDER" \\
                  --rollout-cmd "python3 examples/torch_grpo/engine.py --hf-checkpoint FOLDER"

Parameters live where the plane publishes them: gradients are computed from the version published last, the optimizer
writes into the next one, and there is no third copy. Several ranks share a batch and sum gradients (gloo on CPUs, NCCL
on GPUs)."""
import argparse
import contextlib
import io
import json
import os
import time

import torch
import torch.distributed as dist

import furlong
import hf
from model import Qwen3, log_probs


def options():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--hf-checkpoint", required=True, help="folder with config.json, safetensors, tokenizer.json")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--clip-grad", type=float, default=1.0)
    p.add_argument("--eps-clip", type=float, default=0.2)
    p.add_argument("--eps-clip-high", type=float, default=0.28)
    p.add_argument("--entropy-coef", type=float, default=0.01)
    p.add_argument("--temperature", type=float, default=1.0, help="the engine's")
    p.add_argument("--micro-batch", type=int, default=0,
                   help="samples in one forward pass; 0: as many as have 1 GiB of logits, 64 at most")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--give", default="slots", choices=("slots", "arena", "own"),
                   help="slots: parameters become the plane's memory; arena: they stay where they are, in memory that "
                        "engines map; own: the same in PyTorch's own memory")
    p.add_argument("--fake-device", action="store_true", help="weights lie on a device of FURLONG_GPU=fake")
    return p.parse_args()


LOGITS_BYTES = 1 << 30  # of a pass, in float32; log_probs() and its gradients hold five times that at their peak (measured)


class Batch:
    """The samples of this rank: sample s where s mod world = rank. Views of the received blob until they are padded."""

    def __init__(self, ev):
        t = {k: v.torch() for k, v in ev.tensors().items()}
        self.lengths, self.prompts = t["lengths"].tolist(), t["prompt_lengths"].tolist()
        self.advantages = t["advantages"]
        ends = torch.cumsum(t["lengths"], 0).tolist()
        if not ends or ends[-1] != len(t["tokens"]):
            raise furlong.Invalid(f"train: lengths add up to {ends[-1] if ends else 0} of {len(t['tokens'])} tokens")
        self.tokens = [t["tokens"][e - n:e] for e, n in zip(ends, self.lengths)]
        self.logprobs = [t["logprobs"][e - n:e] for e, n in zip(ends, self.lengths)]
        self.n_tokens = ends[-1]

    def padded(self, chosen, device):
        """tokens, the engine's log probabilities, which places are answers, advantages; places are of tokens 1, 2,
        ..."""
        most = max(self.lengths[s] for s in chosen)
        tokens, old = torch.zeros(len(chosen), most, dtype=torch.long), torch.zeros(len(chosen), most - 1)
        answer = torch.zeros(len(chosen), most - 1, dtype=torch.bool)
        for row, s in enumerate(chosen):
            n = self.lengths[s]
            tokens[row, :n] = self.tokens[s]
            old[row, :n - 1] = self.logprobs[s][1:]
            answer[row, self.prompts[s] - 1:n - 1] = True
        return tokens.to(device), old.to(device), answer.to(device), self.advantages[chosen].to(device)


class Trainer:
    def __init__(self, run, args):
        self.run, self.args, self.device = run, args, torch.device(args.device)
        self.config = hf.Config(args.hf_checkpoint)
        on_gpu = self.device.type == "cuda"
        self.pools = {tag: furlong.arena.torch_pool(tag) for tag in ("weights", "optimizer") if on_gpu}
        with self.memory("weights" if args.give == "arena" else None):
            self.model = Qwen3(self.config).to(self.device, getattr(torch, args.dtype))
        hf.load(self.model, args.hf_checkpoint)
        if run.world > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo",
                                    rank=run.rank, world_size=run.world,
                                    init_method=f"tcp://{run.master_addr}:{run.master_port}")
        self.params = dict(self.model.named_parameters())
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        self.weights = run.weights.offer(self.params, stream=stream, in_place=args.give != "slots",
                                         device=0 if on_gpu or args.fake_device else None)
        if args.give == "slots":
            self.look("data")
        self.optimizer = self.new_optimizer()
        self.weights.publish(0)
        self.step = self.version = 0
        self.last = None
        self.begun = self.torn = False

    def new_optimizer(self):
        return torch.optim.AdamW(self.params.values(), lr=self.args.lr, betas=(0.9, 0.99), weight_decay=0.0)

    def memory(self, tag):
        """What is allocated inside lies in the arena, and goes and comes back with its tag."""
        return torch.cuda.use_mem_pool(self.pools[tag]) if self.pools and tag else contextlib.nullcontext()

    def look(self, which):
        """The parameters become the plane's memory; nothing is copied."""
        for name, p in self.params.items():
            p.data = torch.from_dlpack(getattr(self.weights, which)(name))

    def begin(self, version, wait):
        """The next version starts from what was published last."""
        at = time.monotonic()
        self.weights.begin(version, wait=wait or 120.0)
        self.begun = True
        if self.args.give != "slots":
            return time.monotonic() - at
        with torch.no_grad():
            for name, p in self.params.items():
                to = torch.from_dlpack(self.weights.data(name))
                if to.data_ptr() != p.data_ptr():
                    to.copy_(p)
                p.data = to
        return time.monotonic() - at

    def publish(self, version):
        at = time.monotonic()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.weights.publish(version)
        self.begun = self.torn = False
        self.version = version
        return time.monotonic() - at

    @contextlib.contextmanager
    def writing(self):
        """Around what begins a version and publishes it. What raises between the two is taken back; the optimizer, and
        with one slot the parameters, may have taken half a step by then: only load() makes them whole again."""
        try:
            yield
        except BaseException:
            if self.begun:
                self.begun, self.torn = False, True
                with contextlib.suppress(furlong.Error):  # the run was left: what raised is what counts
                    self.weights.abandon()
                if self.args.give == "slots":
                    self.look("data")
            raise

    def whole(self, what):
        if self.torn:
            raise furlong.Invalid(f"{what}: the last train or load was cut short while it wrote; load a checkpoint")

    # ---- train ----
    def train(self, ev):
        self.whole("train")
        with self.writing():
            return self.train_batch(ev.json(), Batch(ev), ev.budget)

    def train_batch(self, call, batch, budget):
        args = self.args
        n, version = len(batch.lengths), call["version"]
        size = call.get("minibatch") or n
        parts = [range(at, min(at + size, n)) for _ in range(call.get("epochs", 1)) for at in range(0, n, size)]
        said = {"step": call["step"], "version": version, "tokens": batch.n_tokens, "begin_s": 0.0, "log_probs_s": 0.0}
        at, sums = time.monotonic(), torch.zeros(4, dtype=torch.float64)
        for i, part in enumerate(parts):
            self.optimizer.zero_grad(set_to_none=True)
            got = self.gradient(batch, [s for s in part if s % self.run.world == self.run.rank], len(part))
            sums += got
            if i == 0:
                gap = got
                said["begin_s"] = self.begin(version, budget)
            norm = torch.nn.utils.clip_grad_norm_(self.params.values(), args.clip_grad or float("inf"))
            with self.memory(None if self.optimizer.state else "optimizer"):  # the first step makes its states
                self.optimizer.step()
            self.run.progress(i + 1, len(parts))
        said["train_s"] = time.monotonic() - at - said["begin_s"]
        said["publish_s"] = self.publish(version)
        loss, gap_sum, entropy, tokens = sums.tolist()
        said |= {"loss": loss, "grad_norm": float(norm), "logprob_abs_diff": gap[1].item() / max(gap[3].item(), 1),
                 "entropy": entropy / max(tokens, 1)}
        self.step, self.last = call["step"] + 1, said
        self.run.metric("perf/actor_train_time", said["train_s"])
        return said

    def gradient(self, batch, mine, whole):
        """Adds up this rank's share and sums over the ranks: loss, |gap|, entropy, tokens."""
        sums = torch.zeros(4, dtype=torch.float64)
        rows = self.args.micro_batch or min(64, max(1, LOGITS_BYTES // (max(batch.lengths) * self.config.vocab * 4)))
        for at in range(0, len(mine), rows):
            chosen = mine[at:at + rows]
            tokens, old, answer, advantage = batch.padded(chosen, self.device)
            logp, entropy = log_probs(self.model, tokens, self.args.temperature)
            ratio, a = torch.exp(logp - old), advantage[:, None]
            held = ratio.clamp(1 - self.args.eps_clip, 1 + self.args.eps_clip_high)
            each = -torch.minimum(ratio * a, held * a) - self.args.entropy_coef * entropy
            loss = ((each * answer).sum(1) / answer.sum(1).clamp(min=1)).sum() / whole
            loss.backward()
            with torch.no_grad():
                sums += torch.tensor([loss, ((logp - old).abs() * answer).sum(), (entropy * answer).sum(),
                                      answer.sum()],
                                     dtype=torch.float64)
        for p in self.params.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.run.world > 1:
            flat = torch.cat([p.grad.reshape(-1) for p in self.params.values()])
            dist.all_reduce(flat)
            for p, g in zip(self.params.values(), flat.split([p.numel() for p in self.params.values()])):
                p.grad.copy_(g.view_as(p))
            sums = sums.to(self.device)
            dist.all_reduce(sums)
        return sums.cpu()

    # ---- the other calls ----
    def save(self, ev):
        self.whole("save")
        call, at, size = ev.json(), time.monotonic(), 0
        if self.run.rank == 0:
            state = io.BytesIO()
            torch.save(self.optimizer.state_dict(), state)
            seat = json.dumps({"step": call["step"], "version": self.version})
            size = hf.save(self.model, call["dir"], self.args.hf_checkpoint,
                           {"optimizer.pt": state.getvalue(), "state.json": seat.encode()})
        return {"bytes": size, "seconds": time.monotonic() - at}

    def load(self, ev):
        folder = ev.json()["dir"]
        state = {"step": 0, "version": 0}
        if folder:
            with open(os.path.join(folder, "state.json"), encoding="utf-8") as f:
                state = json.load(f)
        with self.writing():
            self.begin(state["version"], ev.budget)
            hf.load(self.model, folder or self.args.hf_checkpoint)
            self.optimizer = self.new_optimizer()
            if folder:
                state_dict = torch.load(os.path.join(folder, "optimizer.pt"), map_location="cpu")
                with self.memory("optimizer"):  # else it would stay on the device when the trainer sleeps
                    self.optimizer.load_state_dict(state_dict)
            self.publish(state["version"])
        self.step = state["step"]
        return {"step": self.step, "version": self.version}

    def clear_memory(self, ev):
        self.drop_gradients(ev)
        return {"left_bytes": sum(p.numel() * p.element_size() for p in self.params.values()) * 4}

    def drop_gradients(self, ev):
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def state(self, ev):
        self.whole("state")
        return {"step": self.step, "version": self.version, "last": self.last}

    def serve(self):
        self.run.serve({"train": self.train, "save": self.save, "load": self.load, "state": self.state,
                        "clear_memory": self.clear_memory, "offload": self.drop_gradients})


if __name__ == "__main__":
    given = options()
    torch.manual_seed(0)
    run = furlong.join()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // run.local_world))
    Trainer(run, given).serve()
