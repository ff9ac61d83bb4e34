"""What deploy/ holds: the installer, the units, the manifests. The manifests are held to Kubernetes' own schema by the Python
package kubernetes-validate (FURLONG_TEST_KUBERNETES names its command; else it goes into a virtual environment that is
kept), and to what this project needs of them in any case."""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import harness
from harness import place

TOP = os.path.abspath(f"{os.path.dirname(os.path.abspath(__file__))}/../..")


def documents():
    try:
        import yaml
    except ImportError:
        raise harness.Skip("no PyYAML") from None
    with open(f"{TOP}/deploy/kubernetes/furlong.yaml", encoding="utf-8") as f:
        return [d for d in yaml.safe_load_all(f) if d]


def validator():
    place = os.path.expanduser("~/.cache/furlong-test/kubernetes")
    tool = f"{place}/bin/kubernetes-validate"
    if os.path.exists(tool):
        return tool
    try:
        subprocess.run([sys.executable, "-m", "venv", place], check=True, capture_output=True, timeout=60)
        subprocess.run([f"{place}/bin/pip", "install", "-q", "--disable-pip-version-check", "kubernetes-validate"], check=True,
                       capture_output=True, timeout=120)
    except (subprocess.SubprocessError, OSError) as e:
        raise harness.Skip(f"kubernetes-validate cannot be had from PyPI: {e}") from None
    return tool


def test_manifests_are_kubernetes():
    tool = os.environ.get("FURLONG_TEST_KUBERNETES") or shutil.which("kubernetes-validate") or validator()
    r = subprocess.run([tool, "--strict", f"{TOP}/deploy/kubernetes/furlong.yaml"], capture_output=True, text=True)
    assert r.returncode == 0 and r.stdout.count("passed") == len(documents()), r.stdout + r.stderr


def test_manifests_fit_together():
    docs = documents()
    by = {(d["kind"], d["metadata"]["name"]): d for d in docs}
    for (kind, name), d in by.items():
        if kind not in ("StatefulSet", "Job"):
            continue
        pod = d["spec"]["template"]["spec"]
        labels = d["spec"]["template"]["metadata"]["labels"]
        volumes = {v["name"] for v in pod["volumes"]} | {v["metadata"]["name"] for v in d["spec"].get("volumeClaimTemplates", [])}
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"], name
        for c in pod["containers"]:
            assert {m["name"] for m in c["volumeMounts"]} <= volumes, name
            words = c["command"][2].split(" exec furlong ")[1].split()
            r = subprocess.run([f"{harness.BIN}/furlong", *words[:1], "--help"], capture_output=True, text=True)
            for w in words[1:]:  # every flag is one that the program knows
                assert w.split("=")[0] in r.stdout, (name, w)
            env = {e["name"]: e.get("value") for e in c["env"]}
            assert len(env["FURLONG_RUNTIME_DIR"]) <= 40
            host = re.search(r"--address=(?:http://)?([a-z-]+):(\d+)", " ".join(words))
            if host:
                assert int(host[2]) in [p["port"] for p in by["Service", host[1]]["spec"]["ports"]], name
        if kind == "StatefulSet":
            assert d["spec"]["selector"]["matchLabels"] == labels
            assert by["Service", d["spec"]["serviceName"]]["spec"]["selector"] == labels


def test_a_slurm_task_that_is_ended_ends_in_order():
    """srun ends the tasks of a failed job with SIGTERM: a node's task then has no say in the job's exit code, the first one
    ends the run and the cluster."""
    for procid, wanted in (("1", 0), ("0", 143)):
        with place() as p:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            os.makedirs(f"{p.root}/bin")
            os.makedirs(f"{p.root}/job")
            with open(f"{p.root}/bin/scontrol", "w", encoding="ascii") as f:
                f.write("#!/bin/sh\necho n1\n")
            with open(f"{p.root}/bin/rm", "w", encoding="ascii") as f:  # the signal may come this late
                f.write("#!/bin/sh\nkill -TERM 0\nexec /bin/rm \"$@\"\n")
            for name in ("scontrol", "rm"):
                os.chmod(f"{p.root}/bin/{name}", 0o755)
            env = {**p.env, "PATH": f"{p.root}/bin:{os.environ['PATH']}", "FURLONG": f"{harness.BIN}/furlong", "FURLONG_PORT": str(port),
                   "FURLONG_NODE_GPUS": "1", "FURLONG_JOB_DIR": f"{p.root}/job", "HEAD_ADDR": "127.0.0.1", "SLURM_TMPDIR": p.root,
                   "SLURM_JOB_ID": f"{os.getpid()}", "SLURM_PROCID": procid, "SLURMD_NODENAME": f"n{procid}", "SLURM_JOB_NODELIST": "n[0-1]"}
            mine = f"/tmp/fl-{os.getpid()}-{procid}"
            with open(f"{p.root}/out", "w+", encoding="utf-8") as out:
                task = subprocess.Popen(["bash", f"{TOP}/deploy/slurm/furlong.sbatch", "--role"], env=env, cwd=p.root, stdout=out, stderr=out,
                                        start_new_session=True)
                said = lambda: open(f"{p.root}/out", encoding="utf-8").read()
                daemons = lambda: subprocess.run(["pgrep", "-f", f"furlong-(head|node).*{port}"], capture_output=True).stdout
                try:
                    harness.wait_for("the task waits", lambda: "1/2 nodes" in said() if procid == "0" else daemons())
                    os.killpg(task.pid, signal.SIGTERM)
                    code = task.wait(timeout=60 * harness.SLOW)
                finally:
                    if task.poll() is None:
                        os.killpg(task.pid, signal.SIGKILL)
                        task.wait()
            assert code == wanted, (procid, code, said())
            assert "SIGTERM came while waiting for" in said(), said()
            harness.wait_for("no daemon", lambda: not daemons(), 10)
            assert not os.path.exists(mine), mine


def test_units_are_systemds():
    tool = shutil.which("systemd-analyze")
    for unit in ("furlong-head.service", "furlong-node.service"):
        with open(f"{TOP}/deploy/systemd/{unit}", encoding="utf-8") as f:
            text = f.read()
        line = re.search(r"(?m)^ExecStart=/usr/local/bin/(\S+) (.*)$", text)
        r = subprocess.run([f"{harness.BIN}/{line[1]}", "--help"], capture_output=True, text=True)
        for w in line[2].split():
            assert w.split("=")[0] in r.stdout, (unit, w)
        if tool:
            with place() as p:  # the programs of this build stand where the units name them
                with open(f"{p.root}/{unit}", "w", encoding="utf-8") as f:
                    f.write(text.replace("/usr/local/bin", harness.BIN))
                r = subprocess.run([tool, "verify", f"{p.root}/{unit}"], capture_output=True, text=True)
                assert r.returncode == 0 and unit not in r.stderr, r.stderr


def test_install():
    """The installed programs find their own; Ray's name is in a folder of its own."""
    with place() as p:
        subprocess.run([f"{TOP}/deploy/install", f"{p.root}/inst", os.path.dirname(harness.BIN)], check=True, capture_output=True)
        assert os.listdir(f"{p.root}/inst/ray/bin") == ["ray"] and "ray" not in os.listdir(f"{p.root}/inst/bin")
        env = {**p.env, "PATH": f"{p.root}/inst/ray/bin:/usr/bin:/bin"}
        del env["FURLONG_BIN_DIR"]
        r = subprocess.run(["ray", "--version"], env=env, capture_output=True, text=True)
        assert r.stdout.startswith("ray, version 2.60.0"), r
        r = subprocess.run([f"{p.root}/inst/bin/furlong", "train", "--num-rollout=1", "--rollout-batch-size=4", f"--run-dir={p.root}/run"], env=env,
                           capture_output=True, text=True, timeout=120)
        assert r.returncode == 0, r.stderr
        own = subprocess.run(["readelf", "-d", f"{p.root}/inst/bin/furlong-trainer"], capture_output=True, text=True)
        assert own.returncode != 0 or "$ORIGIN/../lib" in own.stdout, own.stdout


def test_scripts_are_shells():
    for script in ("install", "slurm/furlong.sbatch"):
        r = subprocess.run(["bash", "-n", f"{TOP}/deploy/{script}"], capture_output=True, text=True)
        assert r.returncode == 0, r.stderr
        assert os.access(f"{TOP}/deploy/install", os.X_OK)


if __name__ == "__main__":
    harness.main(dict(globals()))
