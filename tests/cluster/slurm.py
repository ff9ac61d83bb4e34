"""A private Slurm of two virtual nodes on this machine: munged, slurmctld, two slurmd, all in one folder."""
import contextlib
import os
import shutil
import signal
import socket
import subprocess

import harness
from harness import wait_for


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def slurm(root, nodes=2):
    """The environment for its commands."""
    if os.geteuid() != 0 or not all(shutil.which(x) for x in ("munged", "slurmctld", "slurmd", "sbatch")):
        raise harness.Skip("no Slurm here: slurm-wlm and munge, as root")
    os.chmod(root, 0o755)
    for d in ("munge", "state", *(f"spool{i}" for i in range(1, nodes + 1))):
        os.makedirs(f"{root}/{d}", mode=0o755)
    with open(f"{root}/munge/key", "wb") as f:
        f.write(os.urandom(128))
    os.chmod(f"{root}/munge/key", 0o400)
    os.chmod(f"{root}/munge", 0o755)
    ports = [free_port() for _ in range(nodes + 1)]
    conf = f"""ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
SlurmUser=root
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdSpoolDir={root}/spool-%n
StateSaveLocation={root}/state
SlurmctldLogFile={root}/ctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SelectType=select/cons_tres
""" + "".join(f"NodeName=n{i} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[i]} CPUs=1 State=UNKNOWN\n" for i in range(1, nodes + 1)) + \
        f"PartitionName=all Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"
    with open(f"{root}/slurm.conf", "w", encoding="ascii") as f:
        f.write(conf)
    env = {"SLURM_CONF": f"{root}/slurm.conf"}
    procs = []

    def run(*words):
        procs.append(subprocess.Popen(words, env={**os.environ, **env}, stdout=open(f"{root}/{os.path.basename(words[0])}-{len(procs)}.out", "w", encoding="utf-8"),
                                      stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
    try:
        run(shutil.which("munged"), "-F", "-f", "--key-file", f"{root}/munge/key", "--socket", f"{root}/munge/socket", "--pid-file",
            f"{root}/munge/pid", "--seed-file", f"{root}/munge/seed", "--log-file", f"{root}/munge/log")
        wait_for("munged", lambda: os.path.exists(f"{root}/munge/socket"))
        run(shutil.which("slurmctld"), "-D")
        for i in range(1, nodes + 1):
            run(shutil.which("slurmd"), "-D", "-N", f"n{i}")
        idle = lambda: subprocess.run(["sinfo", "-h", "-o", "%D %t"], env={**os.environ, **env}, capture_output=True, text=True).stdout
        wait_for("all nodes idle", lambda: idle().split() == [str(nodes), "idle"], 60)
        yield env
    finally:
        for p in reversed(procs):
            p.send_signal(signal.SIGTERM)
        for p in procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(timeout=20)
            if p.poll() is None:
                p.kill()
                p.wait()
