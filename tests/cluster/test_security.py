"""docs/security.md: its commands as they stand, and what it says of tokens, browsers and packages, asked of a head."""
import contextlib
import http.client
import io
import json
import os
import re
import shutil
import ssl
import stat
import subprocess
import zipfile

from harness import BIN, SLOW, Result, Skip, hosts, main, place, saying

DOC = f"{os.path.dirname(os.path.abspath(__file__))}/../../docs/security.md"


def blocks():
    """{heading: [[(where, lines)]]} of the document's commands."""
    found, heading = {}, ""
    with open(DOC, encoding="utf-8") as f:
        text = f.read()
    for m in re.finditer(r"^## ([^\n]*)$|^```sh\n(.*?)^```$", text, re.M | re.S):
        if m[1]:
            heading = m[1]
            continue
        parts = []
        for line in m[2].splitlines():
            if line.startswith("# on "):
                parts.append((line, []))
            else:
                parts[-1][1].append(line)
        found.setdefault(heading, []).append(parts)
    return found


@contextlib.contextmanager
def book(n=2):
    """Two hosts that share the folder in which the commands are typed, and the token file."""
    with hosts(n) as places:
        folder = os.path.dirname(places[0].root)
        os.makedirs(f"{folder}/bin")
        for name in ("furlong", "ray"):
            os.symlink(f"{BIN}/furlong", f"{folder}/bin/{name}")
        yield folder, places


def type_in(folder, p, lines, check=0):
    env = {**p.env, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    own_name = ["unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', p.name]  # as hosts have
    r = subprocess.run(["ip", "netns", "exec", p.netns, *own_name, "sh", "-ec", "\n".join(lines)], env=env, cwd=folder, capture_output=True, text=True,
                       timeout=120 * SLOW, stdin=subprocess.DEVNULL)
    r = Result(lines, r.returncode, r.stdout, r.stderr)
    assert r.code == check, r
    return r


def run_block(folder, places, parts):
    """Each part where it says it belongs; what the last one printed."""
    for where, lines in parts:
        r = type_in(folder, places[0 if "on the head" in where else 1], lines)
    return r


def test_tokens_as_the_page_has_them():
    cluster, rays = blocks()["Tokens"]
    with book() as (folder, places):
        r = run_block(folder, places, cluster)
        assert "2 READY" in r.out, r
        assert stat.S_IMODE(os.stat(f"{folder}/token").st_mode) == 0o600
        r = type_in(folder, places[1], ["FURLONG_TOKEN_PATH=/nowhere furlong status --address=http://10.77.0.1:8265"], check=1)
        assert "token" in r.err, r
    with book(1) as (folder, places):
        r = run_block(folder, places, rays)
        assert "hello" in r.out, r
        made = f"{places[0].root}/.ray/auth_token"
        assert stat.S_IMODE(os.stat(made).st_mode) == 0o600 and stat.S_IMODE(os.stat(os.path.dirname(made)).st_mode) == 0o700
        with open(made, encoding="ascii") as f:
            assert re.fullmatch("[0-9a-f]{64}", f.read())
        r = type_in(folder, places[0], ["RAY_AUTH_TOKEN=wrong ray job list"], check=1)
        assert "Invalid authentication token" in r.err, r


def test_tls_as_the_page_has_it():
    if not shutil.which("openssl"):
        raise Skip("no openssl here to make certificates with")
    flags, variables = blocks()["TLS"]
    with book() as (folder, places):
        r = run_block(folder, places, flags)
        assert "hello" in r.out and "https://10.77.0.1:8265" in r.out, r
        for p in reversed(places):
            type_in(folder, p, ["furlong stop"])
        r = run_block(folder, places, variables)
        assert "Ray runtime started." in r.out, r


def test_a_head_without_a_token_does_not_start_in_token_mode():
    with place() as p:
        r = p.furlong("start", "--head", "--port=0", "--dashboard-port=0", "--num-gpus=0", env={"RAY_AUTH_MODE": "token"})
        assert r.code == 1 and "no authentication token was found" in r.err, r
        r = p.furlong("start", "--head", "--port=0", "--dashboard-port=0", "--num-gpus=0", env={"RAY_AUTH_MODE": "tokens"})
        assert r.code != 0 and "token or disabled" in r.err, r


def ask(head, method, path, headers=None, body=None, ca=None):
    """(status, headers, body); nothing is added to what is given."""
    scheme, at = head["http"].split("://")
    c = http.client.HTTPSConnection(at, timeout=20 * SLOW, context=ssl.create_default_context(cafile=ca)) if scheme == "https" else \
        http.client.HTTPConnection(at, timeout=20 * SLOW)
    try:
        c.request(method, path, body, headers or {})
        r = c.getresponse()
        return r.status, dict(r.getheaders()), r.read()
    finally:
        c.close()


def test_who_may_ask():
    token = "a" * 64
    good, bad = {"Authorization": f"Bearer {token}"}, {"Authorization": "Bearer " + "b" * 64}
    missing, invalid, browser = (401, b"Missing authentication token"), (403, b"Invalid authentication token"), (405, b"browser traffic")
    rows = [  # name, method, path, headers, status and what is said
        ("no token", "GET", "/api/version", {}, missing),
        ("a wrong one", "GET", "/api/version", bad, invalid),
        ("without its scheme", "GET", "/api/version", {"Authorization": token}, invalid),
        ("the right one", "GET", "/api/version", good, (200, b"ray_version")),
        ("Ray's other header", "GET", "/api/version", {"X-Ray-Authorization": f"Bearer {token}"}, (200, b"")),
        ("a cookie", "GET", "/api/version", {"Cookie": f"ray-authentication-token={token}"}, (200, b"")),
        ("a wrong one, and a good cookie", "GET", "/api/version", {**bad, "Cookie": f"ray-authentication-token={token}"}, invalid),
        ("metrics", "GET", "/metrics", {}, missing),
        ("submit", "POST", "/api/jobs/", {}, missing),
        ("shut down", "POST", "/api/furlong/shutdown", bad, invalid),
        ("the mode is open", "GET", "/api/authentication_mode", {}, (200, b"token")),
        ("health is open", "GET", "/api/gcs_healthz", {}, (200, b"success")),
        *((f"a browser's {method}", method, path, {**good, **mark}, browser) for method, path in
          (("POST", "/api/jobs/"), ("PUT", "/api/packages/gcs/_ray_pkg_1.zip"), ("DELETE", "/api/jobs/x"), ("PATCH", "/api/jobs/x"))
          for mark in ({"User-Agent": "Mozilla/5.0"}, {"Sec-Fetch-Site": "same-origin"}, {"Origin": "null"})),
        *((f"another name, {method}", method, "/api/version", {**good, "Host": "evil.example"}, (403, b"no name of this server"))
          for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE")),
        ("another page's script", "GET", "/api/jobs/", {**good, "Origin": "http://evil.example"}, (403, b"another site")),
        ("a large body", "POST", "/api/jobs/", {**good, "Content-Length": str(2 << 20)}, (413, b"")),
        ("a large package", "PUT", "/api/packages/gcs/_ray_pkg_1.zip", {**good, "Content-Length": str(101 << 20)}, (413, b"")),
    ]
    with place() as p:
        head = p.start_head("--num-gpus=0", env={"RAY_AUTH_TOKEN": token})
        for name, method, path, headers, (status, says) in rows:
            with saying(name):
                got, _, body = ask(head, method, path, headers)
                assert got == status and (method == "HEAD" or says in body), (got, body)


def test_a_cookie_over_tls_is_for_tls_alone():
    from certs import Authority
    with place() as p:
        p.env.update(Authority(p.root).certify("here", "127.0.0.1"), FURLONG_TLS="all")
        head = p.start_head("--num-gpus=0", env={"RAY_AUTH_TOKEN": "a" * 64})
        status, headers, _ = ask(head, "POST", "/api/authenticate", {"Authorization": "Bearer " + "a" * 64}, ca=p.env["RAY_TLS_CA_CERT"])
        assert status == 200 and "HttpOnly" in headers["Set-Cookie"] and headers["Set-Cookie"].endswith("; Secure"), headers


def test_a_package_stays_in_its_folder():
    with place() as p:
        head = p.start_head("--num-gpus=0")
        for i, (name, link) in enumerate((("../out", None), ("/tmp/out-of-" + os.path.basename(p.root), None), ("a/../../out", None), ("link", "../../..")), 1):
            data = io.BytesIO()
            with zipfile.ZipFile(data, "w") as z:
                z.writestr("inside", "x")
                info = zipfile.ZipInfo(name)
                if link:
                    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
                z.writestr(info, link or "x")
            uri = f"_ray_pkg_{i:016x}.zip"
            assert ask(head, "PUT", f"/api/packages/gcs/{uri}", body=data.getvalue())[0] == 200
            job = {"entrypoint": "echo ran", "runtime_env": {"working_dir": f"gcs://{uri}"}, "submission_id": f"j{i}"}
            assert ask(head, "POST", "/api/jobs/", {"Content-Type": "application/json"}, json.dumps(job))[0] == 200
            r = p.furlong("logs", "--follow", f"j{i}")
            with saying(name):
                said = ask(head, "GET", f"/api/jobs/j{i}")[2].decode()
                assert '"FAILED"' in said and ("leads out" in said or "outside" in said or "runtime_env" in said), (said, r)
        assert not [f for _, _, files in os.walk(p.root) for f in files if f == "out"]
        assert not os.path.exists("/tmp/out-of-" + os.path.basename(p.root))


if __name__ == "__main__":
    main(dict(globals()))
