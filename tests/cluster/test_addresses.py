"""Addresses and ports: which one a node has, how it is asked for, who has a port. Named by the cases of people in trouble
that they hold."""
import contextlib
import os
import socket
import subprocess

import harness
from harness import hosts, place, wait_for
from runs import SMALL

SPLIT = ["--actor-num-nodes=1", "--actor-num-gpus-per-node=1", "--rollout-num-gpus=1", "--num-gpus-per-node=2"]


def log_of(p, name="node"):
    with open(f"{p.root}/s/logs/furlong-{name}.log", encoding="utf-8") as f:
        return f.read()


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def with_hosts_file(p, text):
    """The place with an /etc/hosts of its own."""
    path = f"{p.root}-hosts"
    with open(path, "w", encoding="ascii") as f:
        f.write(text)
    plain = p.argv
    p.argv = lambda args: ["unshare", "-m", "--propagation", "private", "sh", "-c", f'mount --bind {path} /etc/hosts && exec "$0" "$@"', *plain(args)]
    return p


def p22_a_wildcard_is_no_address():
    with hosts(2) as (head, other):
        for asked in ("0.0.0.0", "::"):
            head.furlong("start", "--head", f"--node-ip-address={asked}", "--num-gpus=0", "--node-name=n1", check=0)
            assert head.info("h")[0]["address"] == "10.77.0.1:6379" and head.info("n")[0]["address"] == "10.77.0.1", (asked, head.info("h"))
            r = other.furlong("start", "--address=10.77.0.1:6379", f"--node-ip-address={asked}", "--num-gpus=1", "--node-name=n2", "--wait=30", check=0)
            assert "node n2 at 10.77.0.2" in r.out, r
            head.furlong("job", "submit", "--working-dir=/", "--entrypoint-num-gpus=1", "--", "echo $FURLONG_NODE_IP", check=0)
            for p in (other, head):
                p.furlong("stop", check=0)
        ip("-n", head.netns, "route", "del", "default")  # a network of its own: others are there, a way out is not
        head.furlong("start", "--head", "--node-ip-address=0.0.0.0", "--num-gpus=0", check=0)
        assert head.info("h")[0]["address"] == "10.77.0.1:6379", head.info("h")
        head.furlong("stop", check=0)
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", check=0)
        r = other.furlong("start", "--address=10.77.0.1:6379", "--node-ip-address=127.0.0.1", "--num-gpus=1", "--wait=5")
        assert r.code != 0 and "127.0.0.1 is loopback, which no other node reaches" in r.err and not other.processes(), r
        head.furlong("stop", check=0)


def p40_names_and_literals_are_addresses():
    """Head, engine and trainer come up whichever way the node's address is written; who fails early is shown at once."""
    with hosts(1) as (p,):
        ip("-n", p.netns, "addr", "add", "fd77::1/64", "dev", "eth0", "nodad")
        with_hosts_file(p, "127.0.0.1 localhost\n::1 localhost\n10.77.0.1 gpu1 gpu1.example.org\n")
        for n, (asked, address) in enumerate((("gpu1", "10.77.0.1"), ("gpu1.example.org", "10.77.0.1"), ("10.77.0.1", "10.77.0.1"), ("::1", "::1"), ("[::1]", "::1"),
                                             ("fd77::1", "fd77::1"))):
            p.furlong("start", "--head", f"--node-ip-address={asked}", "--num-gpus=2", "--node-name=n1", check=0)
            assert p.info("n")[0]["address"] == address, (asked, p.info("n"))
            p.furlong("train", "--num-rollout=1", "--rollout-batch-size=4", "--n-samples-per-prompt=2", *SPLIT, f"--run-dir={p.root}/run{n}", check=0)
            p.furlong("stop", check=0)
        r = p.furlong("train", *SMALL, *SPLIT, "--rollout-cmd", "echo invalid socket address syntax >&2; exit 1", "--start-timeout=300", seconds=30)
        assert r.code != 0 and "invalid socket address syntax" in r.out + r.err, r


def p41_the_hosts_name_does_not_count():
    """The name leads to 127.0.1.1, as on Debian: the address is the source of the way to the head; an explicit one wins."""
    with hosts(2) as (head, other):
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", "--node-name=n1", check=0)
        ip("-n", other.netns, "addr", "add", "10.88.0.2/24", "dev", "eth0")
        with_hosts_file(other, f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n")
        r = other.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=0", "--node-name=n2", check=0)
        assert "node n2 at 10.77.0.2 (eth0, the source of the way to the head)" in r.out, r
        assert "own address=10.77.0.2 interface=eth0: the source of the way to the head" in log_of(other)
        other.furlong("stop", check=0)
        r = other.furlong("start", "--address=10.77.0.1:6379", "--node-ip-address=10.99.0.1", "--node-name=n9")
        assert r.code != 0 and "no interface of this host has it" in r.err, r
        r = other.furlong("start", "--address=10.77.0.1:6379", f"--node-ip-address={os.uname().nodename}", "--node-name=n9")
        assert r.code != 0 and "is loopback" in r.err, r
        r = other.furlong("doctor", "--address=10.77.0.1:6379", "--json", "--no-devices")
        found = {x["check"]: x for x in r.json()}
        assert found["address"]["state"] == "ok" and found["address"]["text"].startswith("10.77.0.2 on eth0"), found
        assert found["head"]["state"] == "ok", found
        head.furlong("stop", check=0)
        r = other.furlong("doctor", "--address=10.77.0.1:6379", "--json", "--no-devices")
        assert r.code == 1 and [x["state"] for x in r.json() if x["check"] == "head"] == ["fail"], r


def p44_addresses_of_ipv6():
    with hosts(2) as (head, other):
        for i, p in enumerate((head, other), 1):
            ip("-n", p.netns, "addr", "add", f"fd00::{i}/64", "dev", "eth0", "nodad")
        with_hosts_file(other, "fd00::1 the-head\n")
        head.furlong("start", "--head", "--node-ip-address=fd00::1", "--port=5000", "--num-gpus=0", "--node-name=n1", check=0)
        assert head.info("h")[0]["address"] == "[fd00::1]:5000" and head.info("h")[0]["http"] == "http://[fd00::1]:8265"
        for address in (["--address=[fd00::1]:5000"], ["--address=fd00::1", "--port=5000"], ["--address=the-head:5000"]):
            r = other.furlong("start", *address, "--num-gpus=0", "--node-name=n2", "--wait=30", check=0)
            assert "node n2 at fd00::2" in r.out, r
            other.furlong("stop", check=0)
        r = other.furlong("job", "submit", "--address=[fd00::1]:8265", "--working-dir=/", "--", "echo there", check=0)
        assert r.out == "there\n", r
        for address in (":5000", "5000"):
            r = other.furlong("start", f"--address={address}")
            assert r.code == 2 and "HOST:PORT, [IPv6]:PORT, or HOST and --port" in r.err, r
        head.furlong("stop", check=0)


def p45_p43_one_setting_for_all_nodes():
    """A fabric of its own whose interfaces have another name on each node: named by its subnet, the same on every node."""
    with hosts(2) as places:
        head, other = places
        for p, name, i in ((head, "a0", 1), (other, "b0", 2)):
            ip("-n", p.netns, "link", "add", name, "type", "veth", "peer", "name", f"{name}p")
            ip("-n", p.netns, "addr", "add", f"10.78.0.{i}/24", "dev", name)
            ip("-n", p.netns, "link", "set", name, "up")
        ip("-n", head.netns, "link", "set", "a0p", "netns", other.netns)  # the direct cable
        ip("-n", other.netns, "link", "add", "name", "cable", "type", "bridge")
        for name in ("cable", "a0p", "b0p"):
            if name != "cable":
                ip("-n", other.netns, "link", "set", name, "master", "cable")
            ip("-n", other.netns, "link", "set", name, "up")
        for p in places:
            p.env["FURLONG_NODE_IP"] = "10.78.0.0/24"
        head.furlong("start", "--head", "--node-ip-address=10.78.0.0/24", "--num-gpus=0", "--node-name=n1", check=0)
        r = other.furlong("start", "--address=10.78.0.1:6379", "--num-gpus=1", "--node-name=n2", "--wait=30", check=0)
        assert "node n2 at 10.78.0.2 (b0, in --node-ip-address=10.78.0.0/24)" in r.out, r
        show = 'echo "$FURLONG_NODE_IP $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $SGLANG_HOST_IP $VLLM_HOST_IP $MILES_HOST_IP"'
        for flags, wanted in (([], "10.78.0.1 =a0 a0 10.78.0.1 10.78.0.1 10.78.0.1"), (["--off-head"], "10.78.0.2 =b0 b0 10.78.0.2 10.78.0.2 10.78.0.2")):
            r = head.furlong("job", "submit", "--working-dir=/", *flags, "--", show, check=0)
            assert r.out.strip() == wanted, r
        listen = "import os, socket, sys; s = socket.create_server((sys.argv[1], 0)); print('up', flush=True); open(sys.argv[2]).read()"
        for name, address in (("good", "10.78.0.2"), ("stray", "10.77.0.2")):  # as a queue that looked for an address by itself
            os.mkfifo(f"{other.root}/{name}")
            head.furlong("job", "submit", f"--submission-id={name}", "--no-wait", "--working-dir=/", "--off-head", "--", "python3", "-c", listen, address, f"{other.root}/{name}", check=0)
            wait_for("its socket", lambda: "up" in head.furlong("job", "logs", name, check=0).out)
            found = [x for x in other.furlong("doctor", "--json", "--no-devices").json() if x["check"] == "sockets"]
            wanted = ["ok"] if name == "good" else ["warn"]
            assert [x["state"] for x in found] == wanted and (name == "good" or "listens at 10.77.0.2" in found[0]["text"]), found
            if name == "good":
                head.furlong("job", "stop", name, check=0)
        head.furlong("job", "stop", "stray", check=0)
        other.furlong("stop", check=0)
        r = other.furlong("start", "--address=10.78.0.1:6379", "--node-ip-address=lo", "--node-name=n2")
        assert r.code != 0 and "is loopback" in r.err, r
        r = other.furlong("start", "--address=10.78.0.1:6379", "--node-ip-address=10.79.0.0/24", "--node-name=n2")
        assert r.code != 0 and "no address of this host is in it" in r.err and "10.78.0.2 (b0)" in r.err, r
        head.furlong("stop", check=0)


def p47_adapters_and_their_frames():
    """doctor names each adapter with its rate and MTU, and what to do where the MTU is small for the rate."""
    if os.geteuid() != 0:
        raise harness.Skip("a mount namespace needs root")
    with place() as p:
        card = f"{p.root}/class/infiniband/rocep1s0f"
        for k, (state, mtu) in enumerate((("4: ACTIVE", 1500), ("4: ACTIVE", 9000), ("1: DOWN", 1500))):
            for file, text in (("ports/1/state", state), ("ports/1/rate", "200 Gb/sec (4X HDR)"), (f"device/net/enp1s0f{k}/mtu", mtu)):
                os.makedirs(os.path.dirname(f"{card}{k}/{file}"), exist_ok=True)
                with open(f"{card}{k}/{file}", "w", encoding="ascii") as f:
                    f.write(f"{text}\n")
        plain = p.argv
        p.argv = lambda args: ["unshare", "-m", "--propagation", "private", "sh", "-c", f'mount --bind {p.root}/class /sys/class && exec "$0" "$@"', *plain(args)]
        found = sorted((x["text"], x["state"], x["remedy"]) for x in p.furlong("doctor", "--json", "--no-devices").json() if x["check"] == "fabric")
        assert found == [("rocep1s0f0 port 1 (enp1s0f0): 200 Gb/s with an MTU of 1500, which reaches a fraction of that", "warn",
                          "ip link set enp1s0f0 mtu 9000, on each node and on the switch between"),
                         ("rocep1s0f1 port 1 (enp1s0f1): 200 Gb/s, MTU 9000", "ok", ""),
                         ("rocep1s0f2 port 1 (enp1s0f2) is down: nothing goes that way", "ok", "")], found


def p47_the_fabric_test_of_a_gb10():
    raise harness.Skip("no GB10 here: the rate that two of them reach on a cable cannot be had in namespaces, and doctor does not measure one: it names adapters, rates and MTUs")


if __name__ == "__main__":
    harness.main(dict(globals()))
