"""Random requests at a head: it stays, nothing is a 500 but where Ray gives one, and what it answers has the shape that
docs/protocol.md gives. FURLONG_TEST_SEED and FURLONG_TEST_REQUESTS change which and how many."""
import http.client
import json
import os
import random
import re
import socket
import urllib.parse

import harness
from harness import place, wait_for

SEED = int(os.environ.get("FURLONG_TEST_SEED", "1"))
COUNT = int(os.environ.get("FURLONG_TEST_REQUESTS", "1500"))
TEXT, INT, NUM, BOOL, LIST, DICT = str, int, (int, float), bool, list, dict
WRAPPED = {"result": BOOL, "msg": TEXT, "data": DICT}
JOB = {"type": TEXT, "submission_id": TEXT, "status": TEXT, "entrypoint": TEXT, "message": (str, type(None)), "metadata": (dict, type(None)), "runtime_env": (dict, type(None))}
# method, path, query names, members of a good answer (a list: of its items; None: no JSON), statuses besides 200 and 4xx
ROUTES = [
    ("GET", "/api/version", [], {"version": TEXT, "ray_version": TEXT, "ray_commit": TEXT}, []),
    ("POST", "/api/jobs/", [], {"submission_id": TEXT}, []),
    ("GET", "/api/jobs/", [], [JOB], []),
    ("GET", "/api/jobs/{id}", [], JOB, []),
    ("DELETE", "/api/jobs/{id}", [], {"deleted": BOOL}, []),
    ("POST", "/api/jobs/{id}/stop", [], {"stopped": BOOL}, []),
    ("GET", "/api/jobs/{id}/logs", [], {"logs": TEXT}, []),
    ("GET", "/api/jobs/{id}/logs/tail", [], None, []),
    ("GET", "/api/packages/gcs/{package}", [], None, [500]),  # Ray: a name without a known ending
    ("PUT", "/api/packages/gcs/{package}", [], None, [500]),
    ("GET", "/api/v0/{kind}", ["limit", "detail", "filter_keys", "filter_predicates", "filter_values", "timeout", "exclude_driver"], WRAPPED, []),
    ("GET", "/api/v0/{kind}/summarize", ["summary_by"], WRAPPED, []),
    ("GET", "/api/v0/tasks/timeline", ["download"], [], []),
    ("GET", "/api/v0/logs", ["node_id", "node_ip", "glob"], WRAPPED, []),
    ("GET", "/api/v0/logs/file", ["node_id", "node_ip", "filename", "lines", "submission_id"], None, []),
    ("GET", "/nodes", ["view"], WRAPPED, [500]),  # Ray: an unknown view
    ("GET", "/nodes/{id}", [], WRAPPED, []),
    ("GET", "/api/cluster_status", ["format"], {"result": BOOL}, []),
    ("GET", "/api/gcs_healthz", [], None, [503]),
    ("GET", "/api/local_raylet_healthz", [], None, [503]),
    ("GET", "/api/grafana_health", [], None, [500]),
    ("GET", "/api/prometheus_health", [], None, [500]),
    ("GET", "/usage_stats_enabled", [], WRAPPED, []),
    ("GET", "/timezone", [], DICT, []),
    ("GET", "/api/component_activities", [], DICT, []),
    ("GET", "/api/authentication_mode", [], {"authentication_mode": TEXT}, []),
    ("POST", "/api/authenticate", [], None, []),
    ("GET", "/api/furlong/version", [], {"furlong_version": TEXT}, []),
    ("GET", "/api/furlong/jobs/", [], [JOB], []),
    ("GET", "/api/furlong/jobs/{id}", [], {**JOB, "driver_attempt": INT, "id": TEXT}, []),
    ("GET", "/api/furlong/jobs/{id}/log", ["offset"], None, []),
    ("GET", "/api/furlong/jobs/{id}/steps", ["from"], {"steps": LIST, "next": INT, "state": TEXT}, []),
    ("GET", "/api/furlong/status", [], {"cluster": TEXT, "term": INT, "state": TEXT, "uptime_s": NUM, "nodes": DICT, "resources": DICT, "jobs": DICT,
                                        "waiting": LIST, "unknown": INT}, []),
    ("GET", "/api/furlong/nodes", [], [{"id": TEXT, "name": TEXT, "address": TEXT, "state": TEXT, "labels": DICT, "resources": DICT, "devices": LIST}], []),
    ("GET", "/api/furlong/workers", [], LIST, []),
    ("GET", "/api/furlong/groups", [], LIST, []),
    ("GET", "/api/furlong/leases", [], LIST, []),
    ("GET", "/api/furlong/devices", [], LIST, []),
    ("GET", "/api/furlong/explain/{id}", [], {"decision": TEXT, "text": TEXT}, []),
    ("GET", "/api/furlong/browse/jobs", ["first", "count", "find", "status"], DICT, []),
    ("GET", "/api/furlong/browse/jobs/{id}", ["first", "count"], DICT, []),
    ("GET", "/api/furlong/browse/nodes", ["first", "count", "find", "state", "order"], DICT, []),
    ("GET", "/metrics", [], None, []),
    ("GET", "/", [], None, []),
]
WORDS = ["", "a", "0", "1", "-1", "1e9", "99999999999999999999", "true", "null", "%00", "%2e%2e%2f", "..", "\u00e9", "%ff", "'", "\"", "<b>", "a b", "x" * 300, "state",
         "=", "!=", "RUNNING", "jobs", "nodes", "actors", "tasks", "summary", "hostNameList", "NaN", "gcs", "%", "%zz", "/", "?", "#", "{}", "[]", "\t"]
KINDS = ["jobs", "nodes", "actors", "tasks", "objects", "workers", "placement_groups", "runtime_envs", "cluster_events"]


def quoted(r, text):
    """Sometimes as it should be, sometimes as it comes, without what ends a request line."""
    text = urllib.parse.quote(text, safe="%") if r.random() < 0.5 else text
    return re.sub(r"[\x00-\x20\x7f]", "%20", text).encode("utf-8").decode("latin-1")


def some_json(r, depth=0):
    kinds = [lambda: r.choice(WORDS), lambda: r.randint(-2**63, 2**63 - 1), lambda: r.random() * 10**r.randint(-300, 300), lambda: None, lambda: True, lambda: "\x00\u2028\ud83d\ude00"]
    if depth < 4:
        kinds += [lambda: [some_json(r, depth + 1) for _ in range(r.randint(0, 3))], lambda: {r.choice(WORDS): some_json(r, depth + 1) for _ in range(r.randint(0, 3))}] * 2
    return r.choice(kinds)()


def submission(r):
    """A good one with some of it spoilt."""
    good = {"entrypoint": "true", "submission_id": f"r{r.randint(0, 10**9)}", "metadata": {"a": "b"}, "runtime_env": {"env_vars": {"A": "1"}},
            "entrypoint_num_cpus": 0, "entrypoint_num_gpus": 0, "entrypoint_memory": 0, "entrypoint_resources": {"none": 1}, "entrypoint_label_selector": {"rack": "none"},
            "furlong": {"driver_restarts": 0}}
    body = {k: v for k, v in good.items() if r.random() < 0.5}
    for _ in range(r.randint(0, 2)):
        body[r.choice([*good, "runtime_env", "no_such_member"])] = some_json(r)
    if r.random() < 0.3:
        body["runtime_env"] = {r.choice(["env_vars", "working_dir", "py_modules", "pip", "conda", "excludes", "x"]): some_json(r)}
    return body


def body_of(r, method, path):
    if method == "GET":
        return None
    if path == "/api/jobs/":
        text = json.dumps(submission(r)).encode()
    elif method == "PUT":
        return r.choice([b"", b"PK\x03\x04", b"PK\x05\x06" + b"\x00" * 18, r.randbytes(r.randint(1, 3000))])
    else:
        text = json.dumps(some_json(r)).encode()
    if r.random() < 0.25:  # JSON that is none
        at = r.randrange(len(text) + 1)
        text = r.choice([text[:at], text[:at] + r.randbytes(3) + text[at:], b"[" * 3000, b"\xff\xfe" + text])
    return text


def fits(shape, value):
    if shape is None:
        return True
    if isinstance(shape, list):
        return isinstance(value, list) and (not shape or all(fits(shape[0], v) for v in value))
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(k in value and fits(s, value[k]) for k, s in shape.items())
    return isinstance(value, shape) and not (shape is INT and isinstance(value, bool))


def parsed(data):
    try:
        return json.loads(data)
    except ValueError:
        return None


def look(route, path, status, kind, data):
    """What is wrong with an answer, or None."""
    method, pattern, _, shape, more = route
    if not (status == 200 or 400 <= status < 500 or status in more):
        return "this status is none of its"
    if status >= 400 and path.startswith("/api/furlong/"):
        return None if fits({"error": TEXT}, parsed(data)) else "an error of ours says what in \"error\""
    if status >= 400 or shape is None:
        return None if data or status != 400 else "a 400 that says nothing"
    if "json" not in kind:
        return f"JSON is of another type than {kind}"
    return None if fits(shape, parsed(data)) else f"not of the shape {shape}"


class Line(http.client.HTTPConnection):
    def _encode_request(self, request):
        return request.encode("latin-1")  # bytes as they come


class Client:
    def __init__(self, p):
        self.host, self.port = re.sub(r"^http://", "", p.info("h")[0]["http"]).split(":")
        self.line = None

    def ask(self, method, path, body, headers):
        for _ in range(2):  # a server may close an idle connection
            fresh = self.line is None
            if fresh:
                self.line = Line(self.host, int(self.port), timeout=30 * harness.SLOW)
            try:
                self.line.putrequest(method, path, skip_accept_encoding=True)
                for k, v in headers.items():
                    self.line.putheader(k, v)
                if body is not None:
                    self.line.putheader("Content-Length", str(len(body)))
                self.line.endheaders(body)
                r = self.line.getresponse()
                data = r.read()
                if r.will_close:
                    self.line = None
                return r.status, r.getheader("Content-Type", ""), data
            except (ConnectionError, http.client.BadStatusLine) as e:
                self.line = None
                assert not fresh, e
        raise AssertionError("two connections were closed")


def test_random_requests():
    r = random.Random(SEED)
    with place() as p:
        p.start_head("--num-gpus=1")
        p.furlong("job", "submit", "--submission-id=here", "--", "echo hello", check=0)
        pids = [d["pid"] for k in "hn" for d in p.info(k)]
        c, seen, found = Client(p), {}, []
        for n in range(COUNT):
            route = r.choice(ROUTES)
            method, pattern, names = route[:3]
            ids = ["here", *WORDS] if r.random() < 0.5 else ["here"]
            if method in ("DELETE", "POST"):
                ids = WORDS
            path = pattern.replace("{id}", quoted(r, r.choice(ids)) or "-").replace("{kind}", r.choice([*KINDS, quoted(r, r.choice(WORDS)) or "-"]))
            path = path.replace("{package}", r.choice(["_ray_pkg_0123456789abcdef.zip", quoted(r, r.choice(WORDS)) or "-"]))
            query = "&".join(f"{r.choice([*names, 'other'])}={quoted(r, r.choice([*WORDS, *KINDS]))}" for _ in range(r.randint(0, 3)) if names)
            headers = {"Content-Type": r.choice(["application/json", "text/plain", ""])} if r.random() < 0.9 else {"Accept": "x" * 2000, "Range": "bytes=-1"}
            known = "?" not in path and urllib.parse.unquote(path).count("/") == pattern.count("/")  # else it is another route's, or nobody's
            body = body_of(r, method, pattern)
            asked = f"request {n} of seed {SEED}: {method} {path}{'?' + query if query else ''} {body!r:.200}"
            with harness.saying(asked):
                status, kind, data = c.ask(method, path + ("?" + query if query else ""), body, headers)
                seen.setdefault((method, pattern), set()).add(status)
                wrong = look(route, path, status, kind, data) if known else (None if status < 500 or status in route[4] else "a 5xx")
            if wrong:
                found.append(f"{asked}: {wrong}: {status} {kind} {data!r:.300}")
            assert len(found) < 8, "\n".join(found)
        assert not found, "\n".join(found)
        never = {x[:2] for x in ROUTES} - {k for k, v in seen.items() if 200 in v}
        assert len(never) < len(ROUTES) / 3, f"too few ever answered 200, all but {sorted(never)}"
        assert [d["pid"] for k in "hn" for d in p.info(k)] == pids, "a daemon is another"
        p.furlong("job", "submit", "--", "true", check=0)
        p.furlong("stop", check=0)


def test_ids_that_are_no_text():
    with place() as p:
        p.start_head("--num-gpus=0")
        c = Client(p)
        for asked, said in (("%e2%82%ac", "\u20ac"), ("a%2Bb", "a+b"), ("%00", "%00"), ("a%00b", "a%00b"), ("%ff", "%ff"), ("%e2%82", "%e2%82"), ("%e2%82x", "%e2%82x"),
                            ("%zz", "%zz"), ("%", "%"), ("\xff", "?"), ("%ed%a0%80", "%ed%a0%80")):
            status, _, data = c.ask("GET", f"/api/furlong/jobs/{asked}", None, {})
            assert status == 404 and json.loads(data)["error"] == f"Job {said} does not exist", (asked, status, data)
        p.furlong("stop", check=0)


def test_random_bytes():
    """What is no HTTP at all, cut anywhere: 4xx, an end, or a wait for the rest; and the next one is served."""
    r = random.Random(SEED)
    line = b"POST /api/jobs/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 21\r\n\r\n{\"entrypoint\":\"true\"}"
    with place() as p:
        j = p.start_head("--num-gpus=0")
        host, port = re.sub(r"^http://", "", j["http"]).split(":")
        for n in range(COUNT // 10):
            at = r.randrange(len(line))
            text = r.choice([line[:at], line[:at] + r.randbytes(r.randint(1, 40)) + line[at:], r.randbytes(200), b"\x16\x03\x01" + r.randbytes(60),
                             line.replace(b"21", r.choice([b"-1", b"99999999999999999999", b"2x", b""])), line.replace(b"Content-Length: 21", b"Transfer-Encoding: chunked")])
            with harness.saying(f"bytes {n} of seed {SEED}: {text!r:.200}"), socket.create_connection((host, int(port)), timeout=30 * harness.SLOW) as s:
                s.sendall(text)
                s.settimeout(0.01)
                try:
                    got = s.recv(65536)
                except (ConnectionResetError, TimeoutError):
                    continue
                status = int(got.split()[1]) if got.startswith(b"HTTP/") else 0
                assert status in (0, 200) or 400 <= status < 500 or status in (501, 505), got[:300]
        wait_for("the head answers", lambda: p.http("/api/version"))
        assert p.info("h")[0]["pid"] == j["pid"]
        p.furlong("stop", check=0)


if __name__ == "__main__":
    harness.main(globals())
