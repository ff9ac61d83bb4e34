"""One rollout engine: continuous batching by PyTorch, over furlong. See trainer.py for the command line.

A decode step takes every running sequence one token further; requests come in, and weights change hands, between two
steps. The weights that it serves from are the plane's own memory."""
import argparse
import hashlib
import os

import torch

import furlong
import hf
from model import Cache, Qwen3


def options():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--hf-checkpoint", required=True,
                   help="folder with config.json and tokenizer.json; weights come from the trainer")
    p.add_argument("--max-running", type=int, default=256, help="sequences in one step")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="the trainer's")
    p.add_argument("--fixed-addresses", action="store_true", help="weights stay where they are over all versions")
    p.add_argument("--fake-device", action="store_true", help="weights lie on a device of FURLONG_GPU=fake")
    return p.parse_args()


class Sequence:
    def __init__(self, request, prompt, key):
        self.request, self.n_prompt, self.tokens = request, len(prompt), list(prompt)
        self.logprobs, self.spans, self.done = [0.0] * len(prompt), [], False
        # the same answer wherever and with whomever it is generated
        seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
        self.random = torch.Generator().manual_seed(seed)

    def add(self, token, logprob, serves, ends):
        self.tokens.append(token)
        self.logprobs.append(logprob)
        version, digest = serves
        if self.spans and self.spans[-1]["version"] == version and self.spans[-1]["digest"] == digest:
            self.spans[-1]["tokens"] += 1
        else:
            self.spans.append({"tokens": 1, "version": version, "digest": digest})
        self.done = token in ends or len(self.tokens) - self.n_prompt >= self.request.most


class Request:
    def __init__(self, ev, body, tokenizer):
        self.ev, self.id = ev, body["id"]
        self.most, self.temperature = body["max_new_tokens"], body["temperature"]
        n, first = body.get("n", 1), body.get("first", 0)
        if "prompts" in body:
            prompts = [tokenizer.encode(text) for text in body["prompts"]]
        else:
            t = {k: v.torch() for k, v in ev.tensors().items()}
            prompts = [x.tolist() for x in t["tokens"].split(t["prompt_lengths"].tolist())]
        if not all(prompts):
            raise furlong.Invalid(f"generate {self.id}: prompt {[bool(p) for p in prompts].index(False)} has no token")
        self.sequences = [Sequence(self, p, (body.get("seed", 0), body.get("step", 0), first + i, k))
                          for i, p in enumerate(prompts) for k in range(n)]

    def answer(self, tokenizer):
        seqs = self.sequences
        lengths = torch.tensor([len(s.tokens) for s in seqs], dtype=torch.int32)
        image = furlong.blob.write({
            "tokens": torch.tensor([t for s in seqs for t in s.tokens], dtype=torch.int32), "lengths": lengths,
            "prompt_lengths": torch.tensor([s.n_prompt for s in seqs], dtype=torch.int32),
            "logprobs": torch.tensor([x for s in seqs for x in s.logprobs], dtype=torch.float32)})
        self.ev.reply({"id": self.id, "texts": [tokenizer.decode(s.tokens[s.n_prompt:]) for s in seqs],
                       "spans": [s.spans for s in seqs], "idle_s": 0.0}, image)


class Engine:
    def __init__(self, run, args):
        self.run, self.args, self.device = run, args, torch.device(args.device)
        self.config = hf.Config(args.hf_checkpoint)
        self.tokenizer = hf.Tokenizer(args.hf_checkpoint, self.config)
        dtype = getattr(torch, args.dtype)
        with torch.device("meta"):
            self.model = Qwen3(self.config).to(dtype).requires_grad_(False)
        self.params = dict(self.model.named_parameters())
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else None
        self.weights = run.weights.accept(self.params, stream=stream, fixed_addresses=args.fixed_addresses,
                                          device=0 if stream is not None or args.fake_device else None)
        self.owners = {name: (module, leaf) for name in self.params for path, _, leaf in [name.rpartition(".")]
                       for module in [self.model.get_submodule(path)]}
        self.like = torch.empty(0, dtype=dtype, device=self.device)
        self.waiting, self.running, self.caches = [], [], None
        self.paused, self.serves = False, None

    # ---- weights ----
    def look(self):
        """Parameters are the plane's memory of the version that serves; nothing is copied."""
        version = self.weights.version
        self.serves = None if version is None else (version, self.weights.digest)
        for name, (module, leaf) in self.owners.items():
            data = self.like if version is None else torch.from_dlpack(self.weights.data(name))
            setattr(module, leaf, torch.nn.Parameter(data, requires_grad=False))

    def commit(self, ev):
        self.weights.commit(ev)
        self.look()

    def offload(self, ev):
        if ev.tags & furlong.arena.TAGS["weights"]:  # none may be looked at when this is answered
            self.serves = None
            for module, leaf in self.owners.values():
                setattr(module, leaf, torch.nn.Parameter(self.like, requires_grad=False))
        if ev.tags & furlong.arena.TAGS["kv_cache"]:
            self.caches = None

    def pause(self, ev):
        self.paused = ev.what == "pause"
        ev.reply()
        self.look()  # an update with one slot takes them at PAUSE

    # ---- generate ----
    def generate(self, ev):
        body = ev.json()
        version = None if self.serves is None else self.serves[0]
        for key, bad in {"version": lambda want: version != want,
                         "version_at_least": lambda want: (version or 0) < want}.items():
            if key in body and (version is None or bad(body[key])):
                raise furlong.Stale(f"{key} {body[key]} was asked for, {'none' if version is None else version} serves")
        if version is None:
            raise furlong.Stale("no weights serve yet")
        request = Request(ev, body, self.tokenizer)
        longest = max(s.n_prompt for s in request.sequences) + request.most
        if longest > self.config.max_len:
            raise furlong.Invalid(f"generate {request.id}: {longest} tokens, the model takes {self.config.max_len}")
        self.waiting += request.sequences
        return furlong.LATER

    def step(self):
        """One token for every running sequence; whether there is more to do."""
        if self.paused or self.serves is None or not (self.waiting or self.running):
            return False
        room = self.args.max_running - len(self.running)
        admitted, self.waiting = self.waiting[:room], self.waiting[room:]
        self.running += admitted
        with torch.inference_mode():
            self.decode(fresh=bool(admitted))
        finished = [s for s in self.running if s.done]
        if finished:
            self.keep([i for i, s in enumerate(self.running) if not s.done])
        for request in {id(s.request): s.request for s in finished}.values():
            if all(s.done for s in request.sequences):
                request.answer(self.tokenizer)
        return bool(self.waiting or self.running)

    def keep(self, rows):
        self.running = [self.running[i] for i in rows]
        for c in self.caches or ():
            c.k, c.v = c.k[rows], c.v[rows]

    def decode(self, fresh):
        seqs = self.running
        if fresh or self.caches is None:  # who came in, or lost its cache, is read from its start
            length = max(s.n_prompt + s.request.most for s in seqs)
            self.caches = [Cache(self.config, len(seqs), length, self.like) for _ in range(self.config.layers)]
            most = max(len(s.tokens) for s in seqs)
            tokens = torch.tensor([s.tokens + [0] * (most - len(s.tokens)) for s in seqs])
            at = torch.arange(most).expand_as(tokens)
        else:
            tokens = torch.tensor([[s.tokens[-1]] for s in seqs])
            at = torch.tensor([[len(s.tokens) - 1] for s in seqs])
        logits = self.model(tokens.to(self.device), at.to(self.device), self.caches)
        last = torch.tensor([(at[i] == len(s.tokens) - 1).nonzero()[0, 0] for i, s in enumerate(seqs)])
        logits = logits[torch.arange(len(seqs)), last.to(self.device)].float().cpu()
        scale = torch.tensor([s.request.temperature or 1.0 for s in seqs])
        logp = torch.log_softmax(logits / scale[:, None], -1)
        drawn = torch.stack([torch.rand(logp.shape[1], generator=s.random) for s in seqs])
        greedy = torch.tensor([s.request.temperature == 0 for s in seqs])
        gumbel = -torch.log(-torch.log(drawn.clamp(1e-20, 1 - 1e-7)))
        chosen = torch.where(greedy[:, None], logp, logp + gumbel).argmax(-1)
        for s, token, p in zip(seqs, chosen.tolist(), logp.gather(1, chosen[:, None])[:, 0].tolist()):
            s.add(token, p, self.serves, self.tokenizer.ends)

    def serve(self):
        self.run.serve({"generate": self.generate, "commit": self.commit, "offload": self.offload, "pause": self.pause,
                        "resume": self.pause}, idle=self.step)


if __name__ == "__main__":
    given = options()
    run = furlong.join()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // run.local_world))
    Engine(run, given).serve()
