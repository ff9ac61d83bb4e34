"""What Prometheus scrapes: Ray's names of processes, the daemons' own counts, where to scrape; and the log as a stream."""
import json
import re
import urllib.request

import harness
from harness import hosts, main, place, wait_for


def scrape(p):
    """{name: [(labels, value)]} of /metrics; every family stands in one piece, with its type before it."""
    found, families, typed = {}, [], set()
    for line in p.http("/metrics", raw=True).decode().splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        if line.startswith("#"):
            continue
        m = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)", line)
        assert m, line
        family = re.sub(r"_(bucket|sum|count)$", "", m[1]) if m[1] not in typed else m[1]
        assert family in typed, line
        if not families or families[-1] != family:
            assert family not in families, f"{family} in two pieces"
            families.append(family)
        found.setdefault(m[1], []).append((dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', m[2] or "")), float(m[3])))
    return found


def test_processes_have_rays_names():
    with place() as p:
        p.start_head("--num-gpus=0", "--node-name=here")
        p.furlong("job", "submit", "--no-wait", "--", "exec sleep 1000", check=0)
        driver = lambda: [x for x in scrape(p).get("ray_component_rss_mb", []) if x[0]["Component"] == "ray::driver"]
        wait_for("the driver among the processes", driver, 30)
        seen = scrape(p)
        pids = {c: {x[0]["pid"] for x in seen["ray_component_rss_mb"] if x[0]["Component"] == c} for c in ("gcs", "raylet", "ray::driver")}
        assert pids["gcs"] == {str(p.info("h")[0]["pid"])} and pids["raylet"] == {str(p.info("n")[0]["pid"])}, pids
        (pid,) = pids["ray::driver"]
        with open(f"/proc/{pid}/cmdline", encoding="utf-8") as f:
            assert "sleep" in f.read()
        for name in ("cpu_percentage", "rss_mb", "uss_mb", "mem_shared_bytes", "num_fds"):
            rows = seen[f"ray_component_{name}"]
            assert len(rows) == 3 and all(x[1] >= 0 for x in rows), (name, rows)
            assert all({"ip", "Version", "SessionName", "IsHeadNode", "RayNodeType", "Component", "pid"} <= set(x[0]) for x in rows), rows
        rss, uss = (dict((x[0]["Component"], x[1]) for x in seen[f"ray_component_{n}"]) for n in ("rss_mb", "uss_mb"))
        assert all(0 < uss[c] < rss[c] for c in ("gcs", "raylet")), (rss, uss)
        assert [x[1] for x in seen["ray_component_num_fds"] if x[0]["Component"] == "raylet"][0] > 3


def test_each_daemon_is_scraped_by_the_head():
    with hosts(2) as (head, other):
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--dashboard-host=127.0.0.1", "--num-gpus=0", "--node-name=n1", check=0)
        other.furlong("start", "--address=10.77.0.1:6379", "--num-gpus=0", "--node-name=n2", "--wait=30", check=0)
        ask = lambda: head.run("furlong", "status", "--json").code  # the namespace is the test's, not this process's
        assert ask() == 0
        code = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8265/metrics').read().decode())"
        text = lambda: harness.subprocess.run(["ip", "netns", "exec", head.netns, harness.sys.executable, "-c", code], capture_output=True, text=True).stdout
        joins = lambda: dict(re.findall(r'furlong_node_joins_total\{node="(n\d)"\} (\d+)', text()))
        assert wait_for("both daemons", lambda: joins() == {"n1": "1", "n2": "1"}, 20)


def test_where_to_scrape_is_told_in_rays_file():
    with place() as p:
        tmp = f"{p.root}/ray-root"
        harness.os.makedirs(tmp)
        head = p.start_head("--num-gpus=0", env={"RAY_TMPDIR": tmp})
        for base in (tmp, f"{p.root}/s"):
            with open(f"{base}/prom_metrics_service_discovery.json", encoding="utf-8") as f:
                assert json.load(f) == [{"labels": {"job": "ray", "__scheme__": "http"}, "targets": [head["http"].split("://")[1]]}]


def test_a_log_is_streamed_to_its_end():
    with place() as p:
        head = p.start_head("--num-gpus=0")
        flag = f"{p.root}/go"
        p.furlong("job", "submit", "--no-wait", "--submission-id=j1", "--", f"for i in 1 2 3; do echo line $i; done; while ! test -e {flag}; do sleep 0.1; done; echo last", check=0)
        log = lambda: p.http("/api/jobs/j1/logs")["logs"]
        wait_for("its first lines", lambda: "line 3\n" in log())
        opened = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"{head['http']}/api/v0/logs/stream?submission_id=j1&lines=2", timeout=60 * harness.SLOW)
        first = opened.readline() + opened.readline()
        assert first == b"line 2\nline 3\n", first
        with open(flag, "w", encoding="ascii"):
            pass
        assert opened.read() == b"last\n"  # and it ends, since the job has
        again = p.http("/api/v0/logs/stream?filename=job-driver-j1.log&lines=-1", raw=True).decode()
        assert again.endswith("line 1\nline 2\nline 3\nlast\n"), again
        try:
            p.http("/api/v0/logs/stream?submission_id=nope")
            raise AssertionError("a log that is not there was streamed")
        except urllib.error.HTTPError as e:
            assert e.code == 404


if __name__ == "__main__":
    main(dict(globals()))
