"""Submitting: what arrives, what is refused and how, where the command runs, how it ends. Named by the cases of people in
trouble that they hold."""
import json
import os
import shutil
import subprocess
import time

import harness
from harness import hosts
from submitting import BOTH, job, jobs, shared, submit

WORDS = ["{'a':{'b':1}}", '{"a": "b c"}', "", '"', "back\\", "*", "two\nlines", "größe ✓"]
DUMP = "import sys; print('ARGV', *(x.encode('utf-8', 'surrogateescape').hex() or '-' for x in sys.argv[1:]))"


def p01_one_string_is_a_shell_line():
    p = shared()
    for program in BOTH:
        r = submit(p, program, "--", f"cd {p.root} && echo a > f1 && cat f1 | tr a b; echo again > f2", check=0)
        assert "\nb\n" in "\n" + r.out and open(f"{p.root}/f2", encoding="ascii").read() == "again\n", r
        r = submit(p, program, "--", "python3", "-c", "import sys; print('x y', len(sys.argv))", "a b", check=0)
        assert "x y 2\n" in r.out, r
    r = p.furlong("job", "submit", "--", "no-such-program", "a b")
    assert r.code == 127 and "not found" in r.out and "tried on the driver's node: no-such-program 'a b'" in r.err, r
    r = p.furlong("job", "submit", "--", "echo test; exit 127")  # a line whose own code it is
    assert r.code == 127 and "test\n" in r.out, r


def p02_words_arrive_byte_for_byte():
    p = shared()
    wanted = subprocess.run(["python3", "-c", DUMP, *WORDS], capture_output=True, text=True, check=True).stdout
    for program in BOTH:
        r = submit(p, program, "--", "python3", "-c", DUMP, *WORDS, check=0)
        assert wanted in r.out, (wanted, r)


def p03_the_whole_line_runs_in_one_place():
    """Submitted from another host than the head's: all parts of the line run on the head."""
    with hosts(2) as (head, other):
        named = lambda p, name: lambda args: ["ip", "netns", "exec", p.netns, "unshare", "--uts", "sh", "-c",
                                              f'hostname {name} && exec "$0" "$@"', f"{harness.BIN}/furlong", *map(str, args[1:])]
        head.argv, other.argv = named(head, "the-head"), named(other, "a-laptop")
        head.furlong("start", "--head", "--node-ip-address=10.77.0.1", "--num-gpus=0", check=0)
        r = other.furlong("job", "submit", "--address=http://10.77.0.1:8265", "--working-dir=/", "--", "hostname; hostname && hostname", check=0)
        assert r.out.split() == ["the-head"] * 3, r
        head.furlong("stop", check=0)


def packages(p):
    return sorted(f"{base}/{f}" for base, _, files in os.walk(f"{p.root}/s") for f in files if "_ray_pkg_" in f)


def fill(folder, files, each):
    os.makedirs(folder)
    for i in range(files):
        fd = os.open(f"{folder}/f{i}", os.O_CREAT | os.O_WRONLY)
        os.ftruncate(fd, each)  # holes: a size without a disk
        os.close(fd)


def p05_a_folder_that_is_too_large_is_refused_here():
    p = shared()
    wd = f"{p.root}/p05"
    fill(f"{wd}/.git/objects", 300, 1 << 20)  # never sent
    with open(f"{wd}/main.py", "w", encoding="ascii") as f:
        f.write("print('ran')")
    r = p.furlong("job", "submit", f"--upload={wd}", "--", "python3", "main.py", check=0)
    assert r.out == "ran\n", r
    fill(f"{wd}/wandb/run-1/files", 20000, 6144)
    fill(f"{wd}/data/raw", 3, 20 << 20)
    for name in "abcde":
        fill(f"{wd}/small-{name}", 1, ord(name) << 10)
    for program, flag in zip(BOTH, ("--upload", "--working-dir")):
        before, uploads = set(jobs(p)), packages(p)
        began = time.monotonic()
        r = submit(p, program, f"{flag}={wd}", "--", "true")
        took = time.monotonic() - began
        assert r.code == 1 and took < 2 * harness.SLOW, (took, r)
        lines = r.err.splitlines()
        assert "exceeds the maximum size: it has 18" in lines[-1] and "at most 100 MiB" in lines[-1], r
        shown = [x.split()[-1] for x in lines[lines.index("largest folders and files:") + 1:][:5]]
        assert shown == ["wandb/run-1/files/", "data/raw/", "small-e/", "small-d/", "small-c/"], r
        words = [x for x in lines if x.startswith("leave them out with: ")][0].split(": ", 1)[1]
        assert set(jobs(p)) == before and packages(p) == uploads, "something was sent"
        line = f"{' '.join(program)} --address={p.info('h')[0]['http']} {words} {flag}={wd} -- python3 main.py"
        q = subprocess.run(["bash", "-c", f'"$@" {line.split(" ", 1)[1]}', "sh", *p.argv([program[0]])], env=p.env, capture_output=True, text=True)
        assert q.returncode == 0 and "ran\n" in q.stdout, (line, q)  # the words help as they are
    shutil.rmtree(wd)


def p06_one_limit_on_every_path():
    p = shared()
    http = p.info("h")[0]["http"].split("//")[-1]
    assert "at most 100 MiB" in p.furlong("job", "submit", "--help", check=0).out
    for mib, wanted in ((99, True), (101, False), (499, False), (501, False)):
        wd = f"{p.root}/p06-{mib}"
        fill(wd, 1, mib << 20)
        for program, flag in zip(BOTH, ("--upload", "--working-dir")):
            r = submit(p, program, f"{flag}={wd}", "--no-wait", "--", "true", seconds=120)
            assert (r.code == 0) == wanted, (mib, r)
            assert wanted or "at most 100 MiB" in r.err, r
        # the same bytes by hand: refused by their length, before they are sent
        c = http_connection(http)
        c.putrequest("PUT", f"/api/packages/gcs/_ray_pkg_{mib:016x}.zip")
        c.putheader("Content-Length", str((mib << 20) + 200))
        c.endheaders()
        if wanted:
            piece = bytes(1 << 20)
            for _ in range(mib):
                c.send(piece)
            c.send(bytes(200))
        a = c.getresponse()
        assert (a.status == 200) == wanted and (wanted or a.status == 413), (mib, a.status, a.read())
        c.close()
        shutil.rmtree(wd)


def http_connection(at):
    import http.client
    return http.client.HTTPConnection(at, timeout=60 * harness.SLOW)


def p07_mistakes_in_an_environment_are_named():
    p = shared()
    before = set(jobs(p))
    rows = (  # text, words of the one line
        ('{"pypi": ["torch"]}', ["'pypi' is not known", "env_vars, working_dir"]),
        ('{"env_vars": {"N": 3}}', ["env_vars.N", "a number", "a text is wanted"]),
        ('{"env_vars": {"A": "1",}}', ["line 1, column 24"]),
        ("{'env_vars': {}}", ["line 1, column 2", "double quotes"]))
    said = set()
    for text, words in rows:
        r = p.furlong("job", "submit", f"--runtime-env-json={text}", "--", "true")
        assert r.code == 2 and r.err.count("\n") == 1 and all(w in r.err for w in words), (words, r)
        said.add(r.err)
    assert len(said) == len(rows) and set(jobs(p)) == before
    code, answer = post(p, "/api/jobs/", {"entrypoint": "true", "runtime_env": {"pypi": ["torch"]}})
    assert code == 400 and "pypi" in answer and set(jobs(p)) == before, (code, answer)


def post(p, path, body):
    c = http_connection(p.info("h")[0]["http"].split("//")[-1])
    c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    a = c.getresponse()
    return a.status, a.read().decode()


def p08_the_same_environment_in_three_ways():
    p = shared()
    env = {"env_vars": {"A": "x: y", "LINES": "one\ntwo\n", "N": "12", "YES": "yes"}, "config": {"setup_timeout_seconds": 30}, "excludes": ["*.bin", "/data/"]}
    yaml = "# as people write it\nenv_vars:\n  A: 'x: y'\n  LINES: |\n    one\n    two\n  N: \"12\"\n  YES: \"yes\"\n" \
           "config: {setup_timeout_seconds: 30}\nexcludes:\n  - '*.bin'\n  - /data/\n"
    for name, text in (("e.json", json.dumps(env)), ("e.yaml", yaml), ("j.yaml", json.dumps(env)), ("bad.yaml", "env_vars:\n  A: [1\nB: 2\n"),
                       ("number.yaml", "env_vars:\n  N: 12\n")):
        with open(f"{p.root}/{name}", "w", encoding="utf-8") as f:
            f.write(text)
    if "YAML is not read by this build" in p.furlong("job", "submit", "--no-wait", f"--runtime-env={p.root}/e.yaml", "--", "true").err:
        raise harness.Skip("built without libyaml: JSON alone is read")
    for program in BOTH:
        kept = []
        for how in (f"--runtime-env-json={json.dumps(env)}", f"--runtime-env={p.root}/e.json", f"--runtime-env={p.root}/e.yaml", f"--runtime-env={p.root}/j.yaml"):
            name = f"p08-{program[0]}-{len(kept)}"
            submit(p, program, how, f"--submission-id={name}", "--", "true", check=0)
            kept.append(job(p, name)["runtime_env"])
        assert all(k == kept[0] for k in kept) and {**kept[0], "env_vars": {k: v for k, v in kept[0]["env_vars"].items() if k in env["env_vars"]}} == env, kept
    for name, words in (("bad.yaml", ["bad.yaml", "line 3"]), ("number.yaml", ["env_vars.N", "a text is wanted"])):
        r = p.furlong("job", "submit", f"--runtime-env={p.root}/{name}", "--", "true")
        assert r.code == 2 and all(w in r.err for w in words), r


if __name__ == "__main__":
    harness.main(dict(globals()))
