"""Ports: one table a node, outside the range of outgoing connections; who has which. Named by the cases of people in
trouble that they hold."""
import contextlib
import os
import resource
import socket
import subprocess
import sys

import harness
from harness import hosts, place, wait_for
from seats import Seats
from submitting import job

ENGINE = """
import os, socket, sys
held = [socket.create_server(("127.0.0.1", int(os.environ["FURLONG_PORT_" + n]))) for n in sys.argv[2:]]
os.write(1, f"bound {' '.join(str(s.getsockname()[1]) for s in held)}\\n".encode())
open(sys.argv[1]).read()
"""


def engine(p):
    with open(f"{p.root}/engine.py", "w", encoding="ascii") as f:
        f.write(ENGINE)
    os.mkfifo(f"{p.root}/until")
    return f"python3 {p.root}/engine.py {p.root}/until "


def let_go(p):
    """Every engine that waits ends."""
    with contextlib.suppress(OSError):
        os.close(os.open(f"{p.root}/until", os.O_WRONLY | os.O_NONBLOCK))


def ports(p, what=lambda r: True):
    return [r for r in p.furlong("list", "ports", "--json", check=0).json() if what(r)]


def ephemeral():
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as f:
        return range(int(f.read().split()[0]), 65536)


@contextlib.contextmanager
def alone():
    """A host whose ports nobody else's engines bind between two looks, where network namespaces can be had."""
    with contextlib.ExitStack() as stack:
        try:
            p = stack.enter_context(hosts(1))[0]
        except harness.Skip:
            p = stack.enter_context(place())
        yield p


def bind_all(p, numbers):
    line = "import socket, sys; held = [socket.create_server(('127.0.0.1', int(n))) for n in sys.argv[1:]]"
    where = ["ip", "netns", "exec", p.netns] if p.netns else []
    subprocess.run([*where, sys.executable, "-c", line, *map(str, numbers)], check=True)


def p48_many_engines_and_not_one_port_twice():
    with alone() as p:
        p.start_head("--num-gpus=65")
        for turn in range(20):  # by a placement: a block in a row for each engine, and where trainers meet
            s = Seats(p, "--actor-num-nodes=1", "--actor-num-gpus-per-node=1", "--rollout-num-gpus=64", "--num-gpus-per-node=65", launch=(), name=f"s{turn}")
            s.up()
            own = ports(p, lambda r: r.get("job") == f"s{turn}" and r["role"] == "rollout")
            meet = ports(p, lambda r: r.get("job") == f"s{turn}" and r["name"] == "trainers' meeting")
            taken = [n for r in own for n in range(r["port"], r["port"] + 4)] + [r["port"] for r in meet]
            assert len(own) == 64 and len(meet) == 1 and len(set(taken)) == 257, (len(own), meet, sorted(taken))
            bind_all(p, taken)  # each of them can be had, all at once
            s.end()
        line = engine(p)
        for i in range(16):  # by name: processes that bind what they were given
            p.furlong("job", "submit", f"--submission-id=e{i}", "--no-wait", "--ports=http,nccl,init", "--", line + "HTTP NCCL INIT", check=0)
        wait_for("all engines", lambda: len([i for i in range(16) if "bound" in p.furlong("job", "logs", f"e{i}", check=0).out]) == 16, 60)
        named = ports(p, lambda r: (r.get("job") or "").startswith("e"))
        assert len({r["port"] for r in named}) == 48 and {r["name"] for r in named} == {"http", "nccl", "init"}, named
        let_go(p)


def p49_outgoing_connections_take_none_of_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = min(5000, (hard - 200) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * n + 200), hard))
    with place() as p, contextlib.ExitStack() as held:
        p.start_head("--num-gpus=0")
        line = engine(p)
        server = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        for i in range(n):
            held.enter_context(socket.create_connection(server.getsockname()))
            held.enter_context(server.accept()[0])
            if i % (n // 16) == 0 and i // (n // 16) < 16:
                p.furlong("job", "submit", f"--submission-id=e{i // (n // 16)}", "--no-wait", "--ports=http,nccl", "--", line + "HTTP NCCL", check=0)
        wait_for("all engines", lambda: len([i for i in range(16) if "bound" in p.furlong("job", "logs", f"e{i}", check=0).out]) == 16, 60)
        given = [r["port"] for r in ports(p, lambda r: (r.get("job") or "").startswith("e"))]
        assert len(set(given)) == 32 and not set(given) & set(ephemeral()), given
        let_go(p)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def p50_a_taken_port_is_found_before_anything_runs():
    with place() as p:
        p.start_head("--num-gpus=0")
        with subprocess.Popen(["python3", "-c", "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); __import__('sys').stdin.read()"],
                              stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as other:
            port = int(other.stdout.readline())
            r = p.furlong("job", "submit", f"--ports=nccl,http={port}", "--", f"touch {p.root}/ran")
            assert r.code == 1 and f"port {port} (http)" in r.err and f"taken by pid {other.pid} (python3 -c import socket" in r.err, r
            assert not os.path.exists(f"{p.root}/ran")
            other.communicate("")
        r = p.furlong("job", "submit", f"--ports=http={port}", "--", "echo $FURLONG_PORT_HTTP", check=0)
        assert r.out == f"{port}\n", r
        line = engine(p)
        p.furlong("job", "submit", "--submission-id=first", "--no-wait", f"--ports=http={port}", "--", line, check=0)  # has not bound it
        wait_for("the first", lambda: job(p, "first")["status"] == "RUNNING")
        r = p.furlong("job", "submit", f"--ports=http={port}", "--", "true")
        assert r.code == 1 and f"port {port} (http)" in r.err and "given to other work" in r.err, r
        for bad in ("a b", "http=0", "http=70000", "http,HTTP"):
            r = p.furlong("job", "submit", f"--ports={bad}", "--", "true")
            assert r.code == 2 and "furlong.ports" in r.err, r
        let_go(p)


def p124_side_cars_have_ports_too():
    with place() as p:
        p.start_head("--num-gpus=0")
        line = engine(p)
        for name in ("one", "two"):
            p.furlong("job", "submit", f"--submission-id={name}", "--no-wait", "--ports=http,metrics", "--", f"{line}METRICS & {line}HTTP & wait", check=0)
        for name in ("one", "two"):
            wait_for("engine and side-car", lambda: p.furlong("job", "logs", name, check=0).out.count("bound") == 2)
        rows = ports(p, lambda r: r.get("job") in ("one", "two"))
        assert sorted((r["job"], r["name"]) for r in rows) == [(j, n) for j in ("one", "two") for n in ("http", "metrics")], rows
        assert len({r["port"] for r in rows}) == 4 and all(r["role"] == "driver" and r["pid"] for r in rows), rows
        said = [int(x.split()[1]) for name in ("one", "two") for x in p.furlong("job", "logs", name, check=0).out.splitlines()]
        assert sorted(said) == sorted(r["port"] for r in rows), (said, rows)
        text = p.furlong("list", "ports", check=0).out
        assert "metrics" in text and "commands and browsers" in text and "worker daemons" in text, text
        let_go(p)
        for name in ("one", "two"):
            wait_for("its end", lambda: job(p, name)["status"] == "SUCCEEDED")
        assert not ports(p, lambda r: r.get("job") in ("one", "two"))
        p.furlong("stop", check=0)


if __name__ == "__main__":
    harness.main(dict(globals()))
