"""A private sshd in the network namespace of each host, and a client's configuration that knows them by name."""
import contextlib
import os
import shutil
import signal
import subprocess

import harness
from harness import wait_for


def _key(path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


@contextlib.contextmanager
def sshd(places, root):
    """The words that FURLONG_SSH takes; each Place of places[1:] can be logged in to by its name, n2, n3, ..."""
    binary = shutil.which("sshd") or "/usr/sbin/sshd"
    if not os.path.exists(binary) or not shutil.which("ssh"):
        raise harness.Skip("no sshd and ssh here: openssh-server, openssh-client")
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    _key(f"{root}/host")
    _key(f"{root}/user")
    known, config, servers = [], [], []
    with open(f"{root}/host.pub", encoding="ascii") as f:
        public = " ".join(f.read().split()[:2])
    for i, p in enumerate(places[1:], 2):
        keep = [f"{k}={v}" for k, v in p.env.items() if k.startswith("FURLONG_") or k in ("PATH", "HOME")]
        shutil.copy(f"{root}/user.pub", f"{root}/authorized{i}")
        with open(f"{root}/sshd{i}", "w", encoding="ascii") as f:
            f.write(f"Port 2222\nListenAddress 10.77.0.{i}\nHostKey {root}/host\nAuthorizedKeysFile {root}/authorized{i}\nUsePAM no\n"
                    f"StrictModes no\nPidFile none\nLogLevel ERROR\nSetEnv " + " ".join(f'"{x}"' for x in keep) + "\n")
        servers.append(subprocess.Popen(["ip", "netns", "exec", p.netns, binary, "-D", "-e", "-f", f"{root}/sshd{i}"],
                                        stdout=subprocess.DEVNULL, stderr=open(f"{root}/sshd{i}.log", "w", encoding="ascii")))
        known.append(f"[10.77.0.{i}]:2222 {public}\n")
        config.append(f"Host n{i} 10.77.0.{i}\n  HostName 10.77.0.{i}\n  Port 2222\n")
    with open(f"{root}/known", "w", encoding="ascii") as f:
        f.writelines(known)
    with open(f"{root}/config", "w", encoding="ascii") as f:
        f.write("".join(config) + f"Host *\n  IdentityFile {root}/user\n  UserKnownHostsFile {root}/known\n  User root\n")
    try:
        for i, p in enumerate(places[1:], 2):
            wait_for(f"sshd on n{i}", lambda p=p, i=i: subprocess.run(
                ["ip", "netns", "exec", places[0].netns, "bash", "-c", f"echo >/dev/tcp/10.77.0.{i}/2222"], capture_output=True).returncode == 0)
        yield f"ssh -F {root}/config"
    finally:
        for s in servers:
            s.send_signal(signal.SIGTERM)
            s.wait()
