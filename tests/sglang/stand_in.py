#!/usr/bin/env python3
"""A stand-in for an SGLang server: its HTTP API as far as fields.py goes, over the tiny model of the examples.

--fault NAME[:N] makes it fail from its Nth generate (or, for weights, its Nth update) on; the names are in FAULTS."""
import argparse
import array
import base64
import http.server
import importlib
import json
import math
import os
import pickle
import random
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import fields  # noqa: beside this file

ROWS, WORDS = 16384, 128
FAULTS = {"die", "hang", "500", "no-json", "not-what-was-asked", "version", "abort", "slow-start", "never-healthy",
          "die-at-start", "loader-fails", "no-loader-rank", "disk-refused", "die-in-update", "deaf", "old-release", "no-group",
          "assert-at-start", "reset"}
MASK = (1 << 64) - 1


class Model:
    """policy.table of examples/policy.h: log-odds by rows that the state points at."""

    def __init__(self, folder):
        self.table, self.version, self.lock = None, "default", threading.Lock()
        self.load_folder(folder)

    def load_folder(self, folder):
        with open(f"{folder}/model.safetensors", "rb") as f:
            head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            start, end = head["policy.table"]["data_offsets"]
            assert head["policy.table"]["dtype"] == "F32" and end - start == ROWS * WORDS * 4, head
            f.seek(f.tell() + start)
            table = array.array("f", f.read(end - start))
        assert os.path.exists(f"{folder}/config.json"), "SGLang takes the folder for a model"
        self.table = table

    def load_weights(self, named):
        """As a model of SGLang: an iterator of (name, tensor)."""
        for name, tensor in named:
            assert name == "policy.table" and tuple(tensor.shape) == (ROWS, WORDS), (name, tensor.shape)
            self.table = array.array("f", tensor.tobytes())

    def next(self, tokens, prompt, at, temperature):
        end = (tokens[prompt - 1] + 128 * (at - prompt) + (7919 * tokens[at - 1] if at > prompt else 0)) & 0xffffffff
        p = [0.0] * WORDS
        for i in range(min(prompt - 1, 64)):
            x = ((tokens[i] * 128 + tokens[i + 1] + 16411 * i) * 2654435761 ^ end * 2246822519) & 0xffffffff
            row = ((x ^ x >> 15) * 2654435761 & 0xffffffff) >> 18
            for w, v in enumerate(self.table[row * WORDS:(row + 1) * WORDS]):
                p[w] += v / temperature
        top = max(p)
        p = [math.exp(v - top) for v in p]
        total = sum(p)
        return [v / total for v in p]


class Server:
    def __init__(self, args):
        self.args = args
        name, _, nth = (args.fault or "none").partition(":")
        assert name in FAULTS | {"none"}, name
        self.fault, self.nth = name, int(nth or 1)
        self.model = Model(args.model_path)
        self.model_path = args.model_path
        self.generated = self.updated = self.running = 0
        self.groups = {}
        self.chance, self.draws = random.Random(126), {}
        self.out, self.since = set(), time.monotonic()
        self.steps = threading.Condition()  # paused, and who waits for the next step
        self.paused = False
        self.count_lock = threading.Lock()

    def strikes(self, name, nth):
        return self.fault == name and nth >= self.nth

    def lost(self, request):
        """One in N at random (the same draws each time), twice: libcurl tries a lost connection once more by itself."""
        with self.count_lock:
            if request not in self.draws:
                self.draws[request] = 2 if self.chance.randrange(self.nth) == 0 else 0
            self.draws[request] -= 1
            lost = self.draws[request] >= 0
        if lost:
            self.note(["reset", self.draws[request]])
        return lost

    def note(self, what):
        if self.args.notes:
            with open(self.args.notes, "a", encoding="utf-8") as f:
                f.write(json.dumps(what) + "\n")

    # ---- generate ----------------------------------------------------------------------------------------
    def one(self, prompt, params, ask):
        tokens = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        n, at, logprobs, spans, text = len(tokens), len(tokens), [], [], ""
        seed = params.get("sampling_seed", 1)
        temperature = params["temperature"]
        while at < n + params["max_new_tokens"]:
            with self.steps:
                while self.paused:
                    self.steps.wait()
            if self.args.step_s:
                time.sleep(self.args.step_s)
            with self.model.lock:
                assert not self.out & {"weights", "kv_cache"}, "generate while memory is released"
                version = self.model.version
                p = self.model.next(tokens, n, at, temperature or 1)
            if temperature == 0:
                word = p.index(max(p))
            else:
                seed = (seed * 6364136223846793005 + 1442695040888963407) & MASK
                left, word = (seed >> 11) / (1 << 53), WORDS - 1
                for w, v in enumerate(p):
                    left -= v
                    if left < 0:
                        word = w
                        break
            if at == n and self.args.step_s:
                self.note(["began", prompt])
            tokens.append(word)
            logprobs.append([math.log(max(p[word], 1e-30)), word, None])
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": at - n, "end": at - n})
            spans[-1]["end"] += 1
            at += 1
            if word == 0:
                break
            text += chr(word)
        meta = {"id": "x", "finish_reason": {"type": "stop"}, "prompt_tokens": n, "weight_version": version,
                "completion_tokens": at - n, "cached_tokens": 0}
        made = {"text": text, "output_ids": tokens[n:], "meta_info": meta}
        if ask.get("return_logprob"):
            meta["output_token_logprobs"] = logprobs
            if ask.get("logprob_start_len") == 0:
                meta["input_token_logprobs"] = [[None if i == 0 else -1.0, t, None] for i, t in enumerate(tokens[:n])]
        if self.fault != "old-release":
            meta["weight_versions"] = spans
            if ask.get("return_prompt_token_ids"):
                made["prompt_token_ids"] = tokens[:n]
        return made

    def generate(self, ask):
        with self.count_lock:
            self.generated += 1
            nth = self.generated
            self.running += 1
        try:
            params = ask["sampling_params"]
            prompts = ask["text"] if "text" in ask else ask["input_ids"]
            assert isinstance(prompts, list) and isinstance(params, list) and len(prompts) == len(params)
            for p in params:
                assert set(p) <= fields.SAMPLING, f"sampling_params {set(p) - fields.SAMPLING}"
            if self.strikes("die", nth):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.strikes("hang", nth) or self.strikes("deaf", nth):
                time.sleep(3600)
            if self.fault == "reset" and self.lost(json.dumps(ask, sort_keys=True)):
                return 0, "reset"
            if self.strikes("500", nth):
                return 500, {"error": {"message": "CUDA error: an illegal memory access was encountered"}}
            if self.strikes("no-json", nth):
                return 200, b"<html>502 Bad Gateway</html>"
            made = [self.one(p, q, ask) for p, q in zip(prompts, params)]
            self.note(["spans", max(len(m["meta_info"].get("weight_versions", [0])) for m in made)])
            if self.strikes("not-what-was-asked", nth):
                made.pop()
            if self.strikes("version", nth):
                for m in made:
                    m["meta_info"]["weight_version"] = "41"
                    m["meta_info"].pop("weight_versions", None)
            if self.fault == "abort" and nth == self.nth:
                made[0]["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
            return 200, made
        finally:
            with self.count_lock:
                self.running -= 1

    # ---- life and weights ----------------------------------------------------------------------------------
    def pause(self, ask):
        assert ask.get("mode", "abort") in fields.PAUSES
        with self.steps:
            self.paused = True
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def go_on(self, _):
        with self.steps:
            self.paused = False
            self.steps.notify_all()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def move(self, ask, out):
        assert self.args.enable_memory_saver, "without --enable-memory-saver SGLang's adapter does nothing"
        tags = set(ask["tags"] or fields.TAGS)
        assert tags <= fields.TAGS, tags
        assert not tags & self.out if out else tags <= self.out, f"{'release' if out else 'resume'} {tags}, out: {self.out}"
        assert not out or not self.running, "release while requests run"
        self.out = self.out | tags if out else self.out - tags
        return 200, None

    def updating(self, ask, how):
        self.updated += 1
        assert "weights" not in self.out, "update while weights are released"
        assert self.paused, "an update that has to wait for running requests"
        assert not (ask["flush_cache"] and self.running), "SGLang: Cache flush failed after updating weights"
        if self.strikes("die-in-update", self.updated):
            os._exit(3)
        with self.model.lock:
            answer = how()
            if answer[1]["success"]:
                self.model.version = ask["weight_version"]
        return answer

    def from_disk(self, ask):
        if self.strikes("disk-refused", self.updated + 1):
            self.updated += 1
            return 400, {"success": False, "message": "Failed to get weights iterator: no such folder.", "num_paused_requests": 0}

        def how():
            self.model.load_folder(ask["model_path"])
            self.model_path = ask["model_path"]
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        return self.updating(ask, how)

    def from_tensor(self, ask):
        def how():
            named = [pickle.loads(base64.b64decode(x)) for x in ask["serialized_named_tensors"]]
            assert len(named) == self.args.tp_size and ask["load_format"] in self.args.custom_weight_loader
            module, _, function = ask["load_format"].rpartition(".")
            model = self.model
            if self.strikes("loader-fails", self.updated):
                class Fails:
                    def load_weights(self, named):
                        raise RuntimeError("shape of lm_head.weight")
                model = Fails()
            if not self.strikes("no-loader-rank", self.updated):
                getattr(importlib.import_module(module), function)(model, named[0])
            return 200, {"success": True, "message": "Success"}
        return self.updating(ask, how)

    def group_init(self, ask):
        from sglang.srt.utils import init_custom_process_group

        if self.fault == "no-group":
            return 400, {"success": False, "message": "Failed to initialize custom process group: NCCL version mismatch."}
        self.groups[ask["group_name"]] = init_custom_process_group(
            ask["backend"], f"tcp://{ask['master_address']}:{ask['master_port']}", ask["world_size"], ask["rank_offset"],
            ask["group_name"])
        return 200, {"success": True, "message": "Succeeded to initialize custom process group."}

    def group_destroy(self, ask):
        ok = self.groups.pop(ask["group_name"], None)
        return (200 if ok else 400), {"success": bool(ok), "message": "The group to be destroyed does not exist."}

    def from_group(self, ask):
        import torch

        def how():
            named = []
            for name, dtype, shape in zip(ask["names"], ask["dtypes"], ask["shapes"]):
                named.append((name, torch.empty(shape, dtype=getattr(torch, dtype))))
                torch.distributed.broadcast(named[-1][1], src=0, group=self.groups[ask["group_name"]], async_op=True).wait()
            self.model.load_weights(named)
            return 200, {"success": True, "message": "Succeeded to update parameter online."}
        return self.updating(ask, how)

    def model_info(self, _):
        if self.fault == "deaf" and self.generated:
            time.sleep(3600)
        return 200, {"model_path": self.model_path, "weight_version": self.model.version, "is_generation": True}

    def server_info(self, _):
        return 200, {"version": "0.0.stand-in", "tp_size": self.args.tp_size, "pp_size": 1, "dp_size": 1,
                     "enable_memory_saver": self.args.enable_memory_saver, "custom_weight_loader": self.args.custom_weight_loader}

    def health(self, _):
        late = {"slow-start": 1.5, "never-healthy": 1e9}.get(self.fault, 0)
        return (200 if time.monotonic() - self.since > late else 503), b""

    def flush(self, _):
        ok = not self.running
        return (200 if ok else 400), (b"Cache flushed.\n" if ok else b"Flush cache failed.\n")

    def ways(self):
        return {"/generate": self.generate, "/pause_generation": self.pause, "/continue_generation": self.go_on,
                "/release_memory_occupation": lambda a: self.move(a, True),
                "/resume_memory_occupation": lambda a: self.move(a, False),
                "/update_weights_from_disk": self.from_disk, "/update_weights_from_tensor": self.from_tensor,
                "/init_weights_update_group": self.group_init, "/destroy_weights_update_group": self.group_destroy,
                "/update_weights_from_distributed": self.from_group, "/flush_cache": self.flush, "/model_info": self.model_info, "/server_info": self.server_info,
                "/health": self.health}

    def answer(self, path, ask):
        way = self.ways().get(path)
        if not way:
            return 404, {"detail": "Not Found"}
        if path in fields.REQUESTS and not set(ask) <= fields.REQUESTS[path][1]:
            return 422, {"detail": f"{path}: {sorted(set(ask) - fields.REQUESTS[path][1])}"}
        if path != "/model_info":  # the look that comes by time
            self.note([path, {k: v for k, v in ask.items() if k not in ("text", "input_ids", "sampling_params")}])
        try:
            return way(ask)
        except (AssertionError, KeyError, OSError) as e:
            self.note(["broken", path, f"{type(e).__name__}: {e}"])
            return 400, {"error": {"message": f"{type(e).__name__}: {e}"}}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def serve(self):
        size = int(self.headers.get("Content-Length") or 0)
        ask = json.loads(self.rfile.read(size)) if size else {}
        status, made = self.server.house.answer(self.path.split("?")[0], ask)
        if made == "reset":  # as a connection that is lost: no answer, and RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        body = made if isinstance(made, bytes) else json.dumps(made).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = serve

    def log_message(self, *_):
        pass


class Http(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model-path", required=True)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--tp-size", type=int, default=1)
    p.add_argument("--enable-memory-saver", action="store_true")
    p.add_argument("--custom-weight-loader", nargs="*", default=[])
    p.add_argument("--fault")
    p.add_argument("--alone", action="store_true")
    p.add_argument("--notes")
    p.add_argument("--step-s", type=float, default=0)
    args = p.parse_args()
    if args.fault == "die-at-start":
        sys.exit("ValueError: The memory capacity is unbalanced.")
    assert args.fault != "assert-at-start", "Only hook_mode=preload supports pauseable CUDA Graph"
    # as SGLang's schedulers: a process in a session of its own
    if not args.alone:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    http_server = Http((args.host, args.port), Handler)
    http_server.house = Server(args)
    if not args.port:
        print(f"stand-in pid={os.getpid()} port={http_server.server_port}", flush=True)
    http_server.serve_forever()


if __name__ == "__main__":
    main()
