"""The page in Chromium: shown, followed, used by keyboard alone, at three widths, past restarts of the head.

Usage: test_chromium.py SERVE [TEST...]; with FURLONG_TEST_SHOTS=FOLDER its pictures are kept there."""
import contextlib
import ctypes
import http.server
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import harness
from browser import browser
from harness import Skip, place, wait_for
from runs import SMALL, Run

SERVE = sys.argv.pop(1)
SHOTS = os.environ.get("FURLONG_TEST_SHOTS")
HERE = os.path.dirname(os.path.abspath(__file__))
WIDTHS = (360, 800, 1440)
EVIL = "<img src=x onerror"
with open(f"{HERE}/audit.js", encoding="utf-8") as f:
    AUDIT = f.read()


@contextlib.contextmanager
def crowd(nodes, jobs):
    """The address of a head with so many nodes and jobs in its tables, and nothing behind them."""
    with tempfile.TemporaryDirectory(prefix="fl-crowd-", dir="/tmp") as folder:
        p = subprocess.Popen([SERVE, folder, str(nodes), str(jobs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            url = p.stdout.readline().strip()
            assert url, f"{SERVE} ended: {p.wait(10)}"
            yield url
        finally:
            p.stdin.close()
            p.wait(20)
            p.stdout.close()


def shot(b, name):
    if SHOTS:
        os.makedirs(SHOTS, exist_ok=True)
        b.shot(f"{SHOTS}/{name}.png")


def quiet(b, but=()):
    """Nothing in the console but what is expected."""
    said = [x for x in b.complaints() if not any(y in x for y in but)]
    assert not said, said


def open_view(b, url, view, text):
    b.open("about:blank")
    b.open(f"{url}/#/{view}")
    b.wait_text("main", text)


def test_an_empty_cluster_says_so():
    with crowd(0, 0) as url, browser() as b:
        for w in WIDTHS:
            b.size(w)
            open_view(b, url, "", "No jobs yet.")
            b.wait("the state", "return document.querySelector('#cluster-facts').innerText.includes('READY')")
            assert b.js(AUDIT) == [], (w, b.js(AUDIT))
            shot(b, f"empty-{w}")
            open_view(b, url, "nodes", "No nodes yet.")
            assert b.js(AUDIT) == [], (w, b.js(AUDIT))
        open_view(b, url, "jobs/nothing", "knows no such job")
        quiet(b, ["404"])


def test_every_view_at_every_width_can_be_read_and_heard():
    views = {"cluster": ("", "1 to 50 of 1,000"), "nodes": ("nodes", "1 to 24 of 2,000"), "job": ("jobs/train-live", "1 to 10 of 61"),
             "failed": ("jobs/job-2", "It wrote nothing.")}
    with crowd(2000, 1000) as url, browser() as b:
        for scheme in ("light", "dark"):
            b.scheme(scheme, "reduce" if scheme == "dark" else "no-preference")
            for w in WIDTHS:
                b.size(w)
                for name, (view, text) in views.items():
                    open_view(b, url, view, text)
                    said = b.js(AUDIT)
                    assert said == [], (name, scheme, w, said[:20])
                    shot(b, f"{name}-{scheme}-{w}")
        b.js("document.querySelector('#metrics-part')?.setAttribute('open', '')")
        moving = b.js("return [...document.querySelectorAll('*')].filter(e => parseFloat(getComputedStyle(e).transitionDuration) > 0).length")
        assert moving == 0, f"{moving} elements move although that is not wanted"
        quiet(b)


def test_what_others_chose_is_text():
    with crowd(30, 20) as url, browser() as b:
        for view, text in (("", "job-2"), ("nodes", f"n3 {EVIL}"), ("jobs/job-2", EVIL), ("jobs/train-live", f"furlong: {EVIL}")):
            open_view(b, url, view, text)
            b.js("document.querySelector('#metrics-part').open = true")
            time.sleep(0.2)
            assert b.js("return document.images.length + document.querySelectorAll('body script').length") == 1, "markup came alive"
            assert b.js("return [...document.querySelectorAll('main b, main i')].length") == 0
            assert "owned" not in b.js("return document.title")
            assert "\u202e" not in b.js("return document.body.innerText"), "a turn of direction is not shown"
        b.wait_text("#explain", "asked for no placement")
        b.wait_text("#updates", "share")
        assert "red text" in b.text("#log") and "\x1b" not in b.text("#log") and "10%" not in b.text("#log"), b.text("#log")
        assert "<b>key</b>" in b.text("#metrics"), b.text("#metrics")
        quiet(b)


def test_devices_carry_their_processes():
    with crowd(3, 5) as url, browser() as b:
        open_view(b, url, "nodes", "n0")
        first = b.texts(".node")[0]
        assert "trainer 0 of train-live" in first and "rollout 1 of train-live" in first, first
        assert "available" in first and "of 512 GiB" in first, first
        assert "driver 0 of train-live" in b.texts(".node")[1]
        assert "free" in b.texts(".node")[2]


def test_lists_are_found_and_turned():
    with crowd(2000, 1000) as url, browser() as b:
        open_view(b, url, "", "1 to 50 of 1,000")
        b.click("#jobs-pager button:nth-of-type(2)")
        b.wait_text("#jobs-pager", "51 to 100 of 1,000")
        assert b.texts("#jobs tr")[0].startswith("job-950"), b.texts("#jobs tr")[0]
        b.type("#jobs-find", "number=77")
        b.wait_text("#jobs-pager", "1 to 11 of 11 found of 1,000")
        b.wait("the count is told", "return document.querySelector('#said').textContent.includes('11 of 1,000 jobs')")
        b.type("#jobs-find", "no such thing")
        b.wait_text("#jobs-empty", "No jobs fit.")
        open_view(b, url, "nodes", "1 to 24 of 2,000")
        b.js("const s = document.querySelector('#nodes-order'); s.value = 'memory'; s.dispatchEvent(new Event('input'))")
        b.wait("least memory first", "return document.querySelector('.node h2')?.innerText === 'n11'")
        assert b.js("return document.querySelectorAll('.rail.tight').length") == 1
        assert b.js("return document.querySelectorAll('*').length") < 5000


def test_the_keyboard_is_enough():
    with crowd(30, 80) as url, browser() as b:
        open_view(b, url, "", "1 to 50 of 80")
        b.keys("Tab")
        assert b.js("return document.activeElement.id") == "skip" and b.text("#skip") == "Skip to the content"
        order = []
        for _ in range(6):
            b.keys("Tab")
            order.append(b.js("const e = document.activeElement; return e.id || e.textContent.trim()"))
            assert b.js("const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2"), order
        assert order == ["Furlong", "Cluster", "Nodes", "jobs-find", "jobs-status", "train-live"], order
        b.keys("Enter")
        b.wait_text("#job-name", "train-live")
        assert b.js("return document.activeElement.id") == "job-name", "a new view begins at its heading"
        b.wait_text("#step-said", "step 60, the newest")
        b.js("document.querySelector('#step').focus()")
        b.keys("Left", "Left")
        b.wait_text("#step-said", "step 58")
        heard = b.js("return document.querySelector('#step').getAttribute('aria-valuetext')")
        assert heard.startswith("step 58, reward 0.853"), heard
        b.js("document.querySelector('#metrics-part summary').focus()")
        b.keys("Enter")
        b.wait_text("#metrics", "perf/update_weights_bytes")
        b.js("[...document.querySelectorAll('.jumps a')].find(a => a.textContent === 'Log').focus()")
        b.keys("Enter")
        assert b.js("return document.activeElement.id") == "log-h"
        b.keys("Tab", "Space")
        assert b.js("return document.querySelector('#log-follow').checked") is False
        b.keys("Tab", "Tab")
        assert b.js("return document.activeElement.id") == "log", "a box that scrolls can be reached"
        open_view(b, url, "", "1 to 50 of 80")
        b.js("document.querySelector('#jobs-pager button:nth-of-type(2)').focus()")
        b.keys("Enter")
        b.wait_text("#jobs-pager", "51 to 80 of 80")
        assert b.js("return document.activeElement.textContent") == "Next", "the focus stays where it was"
        b.keys("Shift+Tab", "Enter")
        b.wait_text("#jobs-pager", "1 to 50 of 80")


def test_a_refresh_moves_nothing():
    with crowd(3, 5) as url, browser() as b:
        open_view(b, url, "", "train-live")
        b.js("document.querySelector('#jobs a').focus(); window.kept = document.activeElement")
        took = b.js("return document.querySelector('#jobs td[data-label=Took]').textContent")
        b.js("const r = document.createRange(); r.selectNodeContents(document.querySelector('#jobs a')); getSelection().addRange(r)")
        b.js("window.asked = 0; const f = fetch; fetch = (...a) => { if (String(a[0]).includes('browse')) window.asked++; return f(...a) }")
        b.wait("two refreshes", "return window.asked >= 2")
        assert took and b.js("return document.activeElement === window.kept && window.kept.isConnected")
        assert b.js("return String(getSelection())") == "train-live"


def test_a_run_is_followed_to_its_end():
    with place() as p, browser() as b:
        head = p.start_head("--num-gpus=4")
        url = head["http"]
        b.size(1440)
        open_view(b, url, "", "No jobs yet.")
        b.js("window.here = true")
        run = Run(p, "--num-rollout=100", "--seed=7")
        train = run.start()
        b.wait_text("#jobs", "RUNNING")
        b.click("#jobs a")
        b.wait("steps", "return +document.querySelector('#step').max >= 3", seconds=60)
        b.wait_text("#workers", "trainer 0")
        b.wait_text("#log", "reward", seconds=60)
        before = b.js("return +document.querySelector('#step').max")
        b.wait("more steps come by themselves", "return +document.querySelector('#step').max > arguments[0] + 3", before, seconds=60)
        out, err = train.communicate(timeout=120 * harness.SLOW)
        assert train.returncode == 0, err
        b.wait_text("#job-facts", "SUCCEEDED")
        b.wait("the end is told", "return document.querySelector('#said').textContent.includes('SUCCEEDED')")
        last = run.steps()[-1]
        b.wait_text("#step-said", f"step {last['step']}, the newest")
        row = b.js("return document.querySelector('#steps tr').innerText")
        assert f"{last['reward_mean']:.3f}" in row and f"{last['perf/step_time']:.3f}" in row, (row, last)
        b.wait_text("#log", out.strip().splitlines()[-1][:60])
        b.wait_text("#explain", "placed")
        update = b.js("return document.querySelector('#updates tr').innerText")
        assert last["transfer_mode"] in update, update
        drawn = b.js("return [...document.querySelectorAll('#plots figure')].map(f => f.querySelectorAll('svg[role=img] path').length)")
        assert all(n > 0 for n in drawn), drawn
        assert b.js("return window.here === true"), "the page was loaded again"
        assert b.js(AUDIT) == [], b.js(AUDIT)
        shot(b, "run-1440")
        quiet(b)
        p.furlong("stop", check=0)


def next_head(p, head):
    """Another head on the journal and the ports of one that was killed."""
    wait_for("the head is gone", lambda: not harness.alive(head["pid"]))
    ports = [f"--port={head['address'].rsplit(':', 1)[1]}", f"--dashboard-port={head['http'].rsplit(':', 1)[1]}"]
    p.spawn("furlong-head", "--node-ip-address=127.0.0.1", *ports, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_run_that_ended_before_this_head_is_shown():
    with place() as p, browser() as b:
        head = p.start_head("--num-gpus=2")
        run = Run(p, *SMALL)
        run.go()
        os.kill(head["pid"], signal.SIGKILL)
        next_head(p, head)
        wait_for("it serves", lambda: p.info("h"))
        open_view(b, head["http"], "", "SUCCEEDED")
        b.click("#jobs a")
        b.wait_text("#step-said", "step 2, the newest")
        assert f"{run.steps()[1]['reward_mean']:.3f}" in b.text("#steps")
        b.wait_text("#explain", "placed")
        b.wait_text("#log", "held-out prompts")
        p.furlong("stop", check=0)


def test_no_step_is_missed_while_the_head_is_away():
    with place() as p, browser() as b:
        head = p.start_head("--num-gpus=2")
        run = Run(p, "--num-rollout=150", "--seed=7")
        train = run.start()
        open_view(b, head["http"], "", "RUNNING")
        b.click("#jobs a")
        b.wait("steps", "return +document.querySelector('#step').max >= 20", seconds=60)
        os.kill(head["pid"], signal.SIGKILL)
        b.wait_text("#connection", "No answer since")
        next_head(p, head)
        train.communicate(timeout=120 * harness.SLOW)
        assert train.returncode == 0
        b.wait_text("#step-said", "step 149, the newest", seconds=60)
        b.wait_text("#steps-pager", "1 to 10 of 150")
        p.furlong("stop", check=0)


def test_a_long_log_is_shown_from_its_last_part():
    with place() as p, browser() as b:
        url = p.start_head("--num-gpus=0")["http"]
        p.http("/api/jobs/", {"entrypoint": "seq -f 'line %.0f of very many' 1 100000; printf 'no end of line'", "submission_id": "chatty"})
        wait_for("the job", lambda: p.http("/api/jobs/chatty")["status"] == "SUCCEEDED", 60)
        open_view(b, url, "jobs/chatty", "SUCCEEDED")
        b.wait_text("#log", "line 100000 of very many\nno end of line")
        lines = b.text("#log").splitlines()
        first = int(lines[0].split()[1])
        assert lines[0] == f"line {first} of very many" and len(lines) == 100000 - first + 2, (lines[0], len(lines))
        assert b.text("#log-note").startswith("The last 256 KiB of 2.3 MiB"), b.text("#log-note")
        assert b.js("const e = document.querySelector('#log'); return e.scrollTop + e.clientHeight >= e.scrollHeight - 8"), "the end is in view"
        b.js("const e = document.querySelector('#log'); e.scrollTop = 0")
        b.wait("who scrolls back is left there", "return !document.querySelector('#log-follow').checked")
        quiet(b)
        p.furlong("stop", check=0)


def test_what_waits_says_why():
    with place() as p, browser() as b:
        url = p.start_head("--num-gpus=2")["http"]
        for name in ("first", "second"):
            p.http("/api/jobs/", {"entrypoint": "while [ ! -e stop ]; do sleep 0.1; done", "submission_id": name, "entrypoint_num_gpus": 2, "furlong": {"cwd": p.root}})
        open_view(b, url, "", "Waiting for a place")
        b.wait_text("#waiting", "second: the driver's resources")
        b.wait("a full cluster", "return [...document.querySelectorAll('#resources li')].some(e => e.innerText.includes('2 of 2'))")
        shot(b, "waiting-1440")
        b.click("#waiting a")
        b.wait_text("#groups", "PENDING")
        b.wait_text("#explain", "waiting")
        b.js("location.hash = '#/nodes'")
        b.wait_text("#nodes", "driver 0 of first")
        shot(b, "held-1440")
        with open(f"{p.root}/stop", "w", encoding="ascii"):
            pass
        p.furlong("stop", check=0)


def test_the_head_may_go_and_come_back():
    with place() as p, browser() as b:
        head = p.start_head("--num-gpus=2")
        url = head["http"]
        ask = {"entrypoint": "i=0; while [ ! -e stop ]; do i=$((i+1)); echo line $i; sleep 0.1; done; echo the last line", "submission_id": "long",
               "furlong": {"cwd": p.root}}
        p.http("/api/jobs/", ask)
        open_view(b, url, "jobs/long", "RUNNING")
        b.wait_text("#log", "line 5\n")
        b.js("window.here = true; document.querySelector('#log-follow').focus()")
        os.kill(head["pid"], signal.SIGKILL)
        b.wait_text("#connection", "No answer since")
        assert "line 5\n" in b.text("#log") and "RUNNING" in b.text("#job-facts"), "what was known stays"
        shot(b, "away-1440")
        next_head(p, head)
        b.wait_text("#connection", "Live", seconds=30)
        b.wait("it is told", "return document.querySelector('#said').textContent === 'The head started again'", seconds=30)
        seen = int(b.js("return [...document.querySelector('#log').innerText.matchAll(/^line (\\d+)$/gm)].pop()[1]"))
        b.wait_text("#log", f"line {seen + 20}\n", seconds=30)
        with open(f"{p.root}/stop", "w", encoding="ascii"):
            pass
        b.wait_text("#log", "the last line")
        b.wait_text("#job-facts", "SUCCEEDED")
        numbers = [int(x.split()[1]) for x in b.text("#log").splitlines() if x.startswith("line ")]
        assert numbers == list(range(1, len(numbers) + 1)), "no line twice, none missing"
        assert b.js("return window.here === true && document.activeElement.id === 'log-follow'")
        quiet(b, ["ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE"])
        p.furlong("stop", check=0)


@contextlib.contextmanager
def own_network():
    """A network of this process' own with one address that is not loopback; what is started in it lives in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    old = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.geteuid() != 0 or libc.unshare(0x40000000) != 0:  # CLONE_NEWNET
            raise Skip("a network of its own needs root")
        try:
            for args in (("link", "set", "lo", "up"), ("addr", "add", "10.77.0.1/32", "dev", "lo")):
                subprocess.run(["ip", *args], check=True, capture_output=True)
            yield "10.77.0.1"
        finally:
            assert libc.setns(old, 0x40000000) == 0
    finally:
        os.close(old)


def test_beyond_loopback_the_token_is_asked_once():
    with own_network() as address, place() as p, browser() as b:
        head = p.start_head(f"--node-ip-address={address}", f"--dashboard-host={address}", "--num-gpus=1")
        with open(head["token_path"], encoding="ascii") as f:
            token = f.read().strip()
        b.open(head["http"])
        b.wait("the question", "return document.querySelector('#token').open")
        assert b.js("return document.activeElement.id") == "token-text"
        assert b.js(AUDIT) == [] or all("h1" in x or "pieces" in x for x in b.js(AUDIT)), b.js(AUDIT)
        shot(b, "token-1440")
        b.type("#token-text", "0123")
        b.keys("Enter")
        b.wait_text("#token-why", "refused")
        b.type("#token-text", token)
        b.keys("Enter")
        b.wait_text("#cluster-facts", "READY")
        assert not b.js("return document.querySelector('#token').open")
        assert token not in b.js("return location.href + document.body.innerHTML")
        b.call("POST", "/refresh")
        b.wait_text("#cluster-facts", "READY")
        assert not b.js("return document.querySelector('#token').open"), "asked once"
        assert b.js("return sessionStorage.length") == 1 and b.js("return localStorage.length") == 0
        p.furlong("stop", check=0)


class Other(http.server.BaseHTTPRequestHandler):
    """Another site: a page with ours in a frame, and a link to it."""
    inside = ""

    def do_GET(self):
        page = f"<!doctype html><title>other</title><iframe src='{self.inside}/'></iframe><a href='{self.inside}/'>there</a>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_):
        pass


def test_another_site_may_link_and_not_frame():
    with crowd(1, 1) as url, browser() as b, http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as site:
        Other.inside = url
        threading.Thread(target=site.serve_forever, daemon=True).start()
        b.open(f"http://localhost:{site.server_port}/")
        b.call("POST", "/frame", {"id": 0})
        b.wait("the frame is refused", "return location.href.startsWith('chrome-error:') || /another site/.test(document.body?.innerText)")
        assert b.js("return document.querySelector('#main')") is None
        b.call("POST", "/frame", {"id": None})
        b.click("a")
        b.wait_text("#jobs", "train-live")
        site.shutdown()


if __name__ == "__main__":
    harness.main(dict(globals()))
