"""Chromium through chromedriver, spoken to by plain HTTP (the WebDriver protocol)."""
import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from harness import SLOW, Skip

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Shift": "\ue008", "Left": "\ue012", "Up": "\ue013", "Right": "\ue014",
        "Down": "\ue015", "Space": " ", "Escape": "\ue00c", "Home": "\ue011", "End": "\ue010"}
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def programs():
    """chromedriver's and chromium's paths, installed from Debian when they are not here. Skip says why not."""
    if not shutil.which("chromedriver") or not shutil.which("chromium"):
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise Skip("chromium and chromium-driver are not here, and installing them needs root and apt-get")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        get = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium", "chromium-driver", "fonts-dejavu-core"]
        for args in (["apt-get", "update", "-q"], get):
            done = subprocess.run(args, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode:
                raise Skip(f"{' '.join(args[:2])} failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return shutil.which("chromedriver"), shutil.which("chromium")


class Browser:
    def __init__(self, at, session):
        self.at, self.session = at, session

    def call(self, method, path, body=None):
        data = None if body is None and method == "GET" else json.dumps(body or {}).encode()
        req = urllib.request.Request(f"{self.at}/session/{self.session}{path}", data=data, method=method)
        try:
            with _opener.open(req, timeout=60 * SLOW) as r:
                return json.loads(r.read())["value"]
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{method} {path}: {json.loads(e.read())['value']['message']}") from None

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def js(self, script, *args):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector):
        return self.js("const e = document.querySelector(arguments[0]); return e && e.checkVisibility() ? e.innerText : ''", selector)

    def texts(self, selector):
        return self.js("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector)

    def wait(self, what, script, *args, seconds=20):
        """The first true value of a script's `return ...`."""
        end = time.monotonic() + seconds * SLOW
        while True:
            got = self.js(script, *args)
            if got:
                return got
            assert time.monotonic() < end, f"not within {seconds} s: {what}; the page says:\n{self.text('body')[:3000]}"
            time.sleep(0.05)

    def wait_text(self, selector, text, seconds=20):
        return self.wait(f"{text!r} in {selector}", "const e = document.querySelector(arguments[0]);"
                         "return Boolean(e && e.checkVisibility() && e.innerText.includes(arguments[1]))", selector, text, seconds=seconds)

    def keys(self, *names):
        """Presses and releases each of them, as a person would."""
        actions = []
        for n in names:
            shift, key = n.startswith("Shift+"), n.removeprefix("Shift+")
            value = KEYS.get(key, key)
            if shift:
                actions.append({"type": "keyDown", "value": KEYS["Shift"]})
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
            if shift:
                actions.append({"type": "keyUp", "value": KEYS["Shift"]})
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def type(self, selector, text):
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self.call("POST", f"/element/{found}/clear")
        if text:
            self.call("POST", f"/element/{found}/value", {"text": text})

    def click(self, selector):
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self.call("POST", f"/element/{found}/click")

    def cdp(self, cmd, **params):
        return self.call("POST", "/goog/cdp/execute", {"cmd": cmd, "params": params})

    def size(self, width, height=900):
        """The page's own width, whatever the window's smallest one is."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, scheme, motion="no-preference"):
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme},
                                                         {"name": "prefers-reduced-motion", "value": motion}])

    def shot(self, path, whole=True):
        got = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        with open(path, "wb") as f:
            f.write(base64.b64decode(got["data"]))

    def complaints(self):
        """What stands in the console since the last look: errors of scripts, refused styles, failed requests."""
        return [f"{x['level']}: {x['message']}" for x in self.call("POST", "/se/log", {"type": "browser"})]


@contextlib.contextmanager
def browser(netns=None):
    driver, chromium = programs()
    folder = tempfile.mkdtemp(prefix="fl-web-", dir="/tmp")
    into = ["ip", "netns", "exec", netns] if netns else []
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    env.update(HOME=folder, TMPDIR=folder)
    p = subprocess.Popen([*into, driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True)
    b = None
    try:
        port, said = None, ""
        for line in p.stdout:
            said += line
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                port = int(found[1])
                break
        if not port:
            raise Skip(f"chromedriver does not start: {said.strip()[-300:]}")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server",
                 f"--user-data-dir={folder}/profile", "--window-size=1440,900", "--lang=en-US"]
        wants = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"},
                                                  "goog:chromeOptions": {"binary": chromium, "args": flags}}}}
        at = f"http://127.0.0.1:{port}"
        req = urllib.request.Request(f"{at}/session", data=json.dumps(wants).encode())
        try:
            with _opener.open(req, timeout=60 * SLOW) as r:
                b = Browser(at, json.loads(r.read())["value"]["sessionId"])
        except urllib.error.HTTPError as e:
            raise Skip(f"chromium does not start: {json.loads(e.read())['value']['message'][:300]}") from None
        yield b
    finally:
        if b:
            with contextlib.suppress(Exception):
                b.call("DELETE", "")
        p.terminate()
        p.wait(10)
        p.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
