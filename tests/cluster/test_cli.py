"""The command line as a user meets it: a cluster that stays, jobs, logs, and what is said about bad input."""
import json
import os
import signal
import socket
import threading

import harness
from harness import place, wait_for


def test_options_from_a_file():
    with place() as p:
        with open(f"{p.root}/node.json", "w", encoding="utf-8") as f:
            json.dump({"num-gpus": 3, "node-name": "from-the-file", "block": None}, f)
        p.start_head(f"--config={p.root}/node.json", "--node-name=from-the-line")
        n, = p.furlong("list", "nodes", "--json", check=0).json()
        assert n["name"] == "from-the-line" and n["resources"]["GPU"]["total"] == 3, n
        p.furlong("stop", check=0)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_start_status_stop():
    with place() as p:
        p.start_head("--num-gpus=2")
        s = p.furlong("status", "--json", check=0).json()
        assert s["state"] == "READY", s
        nodes = p.furlong("list", "nodes", "--json", check=0).json()
        assert len(nodes) == 1, nodes
        text = p.furlong("status", check=0).out
        assert "2" in text and "GPU" in text, text
        p.furlong("stop", check=0)
        assert p.left_behind() == []
        assert p.furlong("status").code == 1


def test_second_head_is_refused_and_harms_nothing():
    with place() as p:
        h = p.start_head()
        port = h["address"].rsplit(":", 1)[1]
        r = p.furlong("start", "--head", f"--port={port}", "--dashboard-port=0", f"--state-dir={p.root}/other")
        assert r.code == 1 and port in r.err, r
        r = p.furlong("start", "--head", "--port=0", "--dashboard-port=0")
        assert r.code == 1 and str(h["pid"]) in r.err, r
        assert p.furlong("status", "--json", check=0).json()["state"] == "READY"


def test_a_start_that_is_interrupted_leaves_nothing():
    nobody = f"127.0.0.1:{free_port()}"
    waits = "furlong-node --ready-fd"
    run = ["train", "--num-nodes=3", "--head-ip=127.0.0.1", "--join-timeout=300"]
    for name, words, seen, signum in (
            ("a node, before there is a head", ["start", f"--address={nobody}", "--wait=300"], waits, signal.SIGTERM),
            ("the same, in the foreground", ["start", f"--address={nobody}", "--wait=300", "--block"], waits, signal.SIGINT),
            ("its terminal is closed", ["start", f"--address={nobody}", "--wait=300"], waits, signal.SIGHUP),
            ("a run that waits for nodes", run, "1/3 nodes", signal.SIGINT)):
        with place() as p, open(f"{p.root}/err", "w+", encoding="utf-8") as err:
            c = p.spawn("furlong", *words, stderr=err)
            said = lambda: open(f"{p.root}/err", encoding="utf-8").read() + "".join(f"{cmd}\n" for _, cmd in p.processes())
            wait_for(name, lambda: seen in said())
            c.send_signal(signum)
            c.communicate(timeout=30 * harness.SLOW)
            assert c.returncode == 128 + signum, (name, c.returncode, said())
            assert f"{signum.name} came while waiting for" in said(), (name, said())
            assert p.left_behind() == [], (name, p.left_behind())


def test_job_exit_code_and_output():
    with place() as p:
        p.start_head()
        r = p.furlong("job", "submit", "--", "sh", "-c", "echo to out; echo to err >&2; exit 7")
        assert r.code == 7, r
        assert "to out" in r.out and "to err" in r.out, r
        jobs = p.furlong("job", "list", "--json", check=0).json()
        assert [j["status"] for j in jobs] == ["FAILED"], jobs
        assert jobs[0]["exit_code"] == 7, jobs
        r = p.furlong("job", "submit", "--", "true", check=0)
        logs = p.furlong("job", "logs", jobs[0]["submission_id"], check=0)
        assert logs.out == "to out\nto err\n" or sorted(logs.out.splitlines()) == ["to err", "to out"], logs


def test_job_stop_ends_the_whole_tree():
    with place() as p:
        p.start_head()
        sub = p.spawn("furlong", "job", "submit", "--", "sh", "-c",
                      "setsid sh -c 'trap \"\" TERM; echo $$ > deep; while :; do sleep 0.1; done' & "
                      f"echo $$ > {p.root}/top; cd {p.root}; wait")
        top = int(wait_for("the job's process", lambda: os.path.exists(f"{p.root}/top") and open(f"{p.root}/top").read().strip()))
        job = wait_for("the job", lambda: p.furlong("job", "list", "--json").json())[0]["submission_id"]
        p.furlong("job", "stop", job, check=0)
        sub.communicate(timeout=30 * harness.SLOW)
        assert not harness.alive(top)
        wait_for("the tree's end", lambda: not [c for _, c in p.processes() if "sleep" in c or "trap" in c])
        assert p.furlong("job", "list", "--json").json()[0]["status"] == "STOPPED"


def hostile_model(folder):
    """A folder of a model whose weights' header points past the end of the file."""
    os.makedirs(folder)
    with open(f"{folder}/config.json", "w", encoding="utf-8") as f:
        json.dump({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
                   "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
                   "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True}, f)
    head = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99999999]}}'
    with open(f"{folder}/model.safetensors", "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head + bytes(16))
    return folder


def test_bad_input():
    with place() as p:
        lines = f"{p.root}/p.jsonl"
        with open(lines, "w", encoding="utf-8") as f:
            f.write('{"input": "a", "label": "b"}\n{"input": 3}\n')
        broken = f"{p.root}/b.jsonl"
        with open(broken, "w", encoding="utf-8") as f:
            f.write('{"input": "a", "label": "b"}\nnot json\n')
        slip = f"{p.root}/slip.json"
        with open(slip, "w", encoding="utf-8") as f:
            f.write('{"num-rolout": 3}')
        hostile = hostile_model(f"{p.root}/hf")
        busy = socket.socket()
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        rows = [  # arguments, exit code, words of the sentence
            (["trian"], 2, ["trian", "train"]),
            (["train", "--num-rolout=3"], 2, ["--num-rolout", "--num-rollout"]),
            (["train", f"--config={slip}"], 2, [slip, "--num-rolout", "--num-rollout"]),
            (["train", "--config=/nowhere/f.json"], 2, ["/nowhere/f.json"]),
            (["train", "--num-rollout=-1"], 2, ["--num-rollout", "-1"]),
            (["train", "--num-rollout=many"], 2, ["--num-rollout", "many"]),
            (["train", "--update-weight-transfer-mode=teleport"], 2, ["teleport", "broadcast"]),
            (["train", "--prompt-data=/nowhere/p.jsonl"], 2, ["--prompt-data", "/nowhere/p.jsonl"]),
            (["train", "--hf-checkpoint=/nowhere/hf"], 2, ["--hf-checkpoint", "/nowhere/hf/config.json"]),
            (["train", f"--hf-checkpoint={hostile}"], 2, ["--hf-checkpoint", f"{hostile}/model.safetensors", "tensor a has data_offsets 0 to 99999999"]),
            (["train", "--trainer-cmd=/nowhere/t --flag"], 2, ["--trainer-cmd", "'/nowhere/t --flag'", "not found", "127"]),
            (["train", "--rollout-cmd=/etc/passwd"], 2, ["--rollout-cmd", "'/etc/passwd'", "126"]),
            (["train", "--run-dir=/proc/nowhere"], 1, ["--run-dir", "/proc/nowhere"]),
            (["train", f"--prompt-data={lines}", "--num-rollout=1"], 2, ["line 2", "label", "--label-key"]),
            (["train", f"--prompt-data={broken}", "--num-rollout=1"], 2, ["line 2", "JSON"]),
            (["train", "--colocate", "--update-weight-transfer-mode=p2p"], 2, ["p2p", "--colocate"]),
            (["train", "--colocate", "--update-weight-transfer-mode=disk-delta"], 2, ["disk-delta", "--colocate"]),
            (["train", "--colocate-memory-peak-device=gpu", "--no-offload-train"], 2, ["--no-offload-train"]),
            (["train", "--train-backend=megatron"], 2, ["megatron", "--trainer-cmd"]),
            (["train", "--async", "--colocate"], 2, ["--async", "--colocate"]),
            (["start", "--head", "--port=0", f"--dashboard-port={busy.getsockname()[1]}"], 1, [str(busy.getsockname()[1])]),
            (["start", "--head", "--port=0", "--dashboard-port=0", "--node-ip-address=203.0.113.9"], 1, ["203.0.113.9"]),
            (["start", "--head", "--port=0", "--dashboard-port=0", "--num-gpus=many"], 2, ["--num-gpus", "many"]),
            (["start", "--head", "--port=0", "--dashboard-port=0", "--resources={"], 2, ["--resources", "column 1"]),
            (["status", "--address=nowhere"], 2, ["nowhere", "HOST:PORT"]),
            (["start", "--address=127.0.0.1:1", "--wait=0"], 1, ["127.0.0.1:1"]),
            (["job", "list", "--address=http://127.0.0.1:1"], 1, ["127.0.0.1:1"]),
            (["job", "logs"], 2, ["job"]),
            (["status"], 1, ["furlong start --head"]),
        ]
        for args, code, words in rows:
            r = p.furlong(*args)
            assert r.code == code, f"exit {code} wanted: {r}"
            missing = [w for w in words if w not in r.out + r.err]
            assert not missing, f"{missing} missing in: {r}"
        assert p.left_behind() == []


def test_bad_files_are_found_before_a_cluster_is_started():
    with place() as p:
        lines, run = f"{p.root}/p.jsonl", f"{p.root}/run"
        with open(lines, "w", encoding="utf-8") as f:
            f.write('{"input": "a", "label": "b"}\n{"input": 3}\n')
        hostile = hostile_model(f"{p.root}/hf")
        rows = [([f"--prompt-data={lines}"], ["--prompt-data", "line 2", "--label-key"]),
                (["--eval-prompt-data=/nowhere/e.jsonl"], ["--eval-prompt-data", "/nowhere/e.jsonl"]),
                ([f"--hf-checkpoint={hostile}"], ["--hf-checkpoint", "tensor a"]),
                (["--load=/nowhere/c"], ["--load", "/nowhere/c"]),
                (["--rollout-max-response-len=64"], ["--max-position-embeddings"])]
        for flags, words in rows:
            r = p.furlong("train", "--num-rollout=1", f"--run-dir={run}", *flags, check=2)
            assert r.out == "" and "job " not in r.err and r.err.startswith("furlong train: "), r
            assert all(w in r.err for w in words), (words, r)
            assert not os.path.exists(run), os.listdir(run)
        os.mkfifo(f"{p.root}/pipe")  # its lines are there once, and are the driver's
        threading.Thread(target=lambda: open(f"{p.root}/pipe", "w", encoding="utf-8").write('{"input": "a", "label": "b"}\n' * 8), daemon=True).start()
        p.furlong("train", "--num-rollout=1", f"--run-dir={p.root}/piped", f"--prompt-data={p.root}/pipe", "--rollout-batch-size=4",
                  "--n-samples-per-prompt=2", "--rollout-max-response-len=1", check=0)
        p.env["MILES_EXTRA_ARGS"] = "--num-gpus=2 --num-rollout=1"  # of the command, and of the run
        p.furlong("train", f"--run-dir={p.root}/more", "--rollout-batch-size=4", "--n-samples-per-prompt=2", check=0)
        del p.env["MILES_EXTRA_ARGS"]
        short = ["--num-rollout=1", "--rollout-batch-size=4", "--n-samples-per-prompt=2", "--save-interval=1", f"--run-dir={run}"]
        p.furlong("train", *short, check=0)
        r = p.furlong("train", *short, check=2)
        assert r.out == "" and "of an earlier run: --load" in r.err, r


def test_more_gpus_than_exist():
    with place() as p:
        p.start_head("--num-gpus=2")
        r = p.furlong("train", "--actor-num-gpus-per-node=3", "--rollout-num-gpus=2", "--num-rollout=1")
        assert r.code == 2, r
        text = r.out + r.err
        assert "5" in text and "2" in text and "GPU" in text, r
        assert p.furlong("list", "leases", "--json").json() == []


def test_a_machine_with_too_few_devices():
    """The sentence speaks in flags that the user has: nobody gave --num-gpus."""
    with place() as p:
        p.env["FURLONG_GPU"] = "fake"
        r = p.furlong("train", "--num-rollout=1", check=2)
        assert ("furlong train: 1 for trainers and 1 for engines need 2 devices: this machine shows 1; ask for fewer, or "
                "let both take turns by --colocate" in r.err), r
        r = p.furlong("train", "--num-rollout=1", "--colocate", "--actor-num-gpus-per-node=2", "--rollout-num-gpus=2", check=2)
        assert "2 for trainers and 2 for engines need 2 devices: this machine shows 1; ask for fewer\n" in r.err, r
        r = p.furlong("train", "--num-rollout=1", "--num-gpus=2", check=2)
        assert "furlong train: --num-gpus=2: this machine shows 1; give at most so many, or leave it out" in r.err, r
        assert p.left_behind() == []


def test_explain_replays_a_placement():
    with place() as p:
        p.start_head("--num-gpus=2")
        p.furlong("train", "--num-rollout=1", "--rollout-batch-size=4", check=0)
        job = p.furlong("job", "list", "--json").json()[0]["submission_id"]
        text = p.furlong("explain", job, check=0).out
        assert "trainer" in text and "rollout" in text, text


def test_every_verb_has_help():
    with place() as p:
        top = p.furlong("--help", check=0).out
        for verb in ["start", "stop", "status", "train", "job", "logs", "list", "explain"]:
            assert verb in top
            r = p.furlong(verb, "--help", check=0)
            assert len(r.out) > 200 and r.err == "", r


if __name__ == "__main__":
    harness.main(dict(globals()))
