"use strict";
/* Asking the head: the token, whether it answers, and loops that go on whatever happens. */

const TOKEN_KEY = "furlong-token";
const ANSWER_MS = 15000; /* beyond what a long poll waits by itself */
const AGAIN_MS = [500, 1000, 2000, 5000];

class Away extends Error {} /* no answer: it will be asked again */
class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

const el = (id) => document.getElementById(id);
const pause = (ms, signal) => new Promise((done) => {
  const timer = setTimeout(done, ms);
  signal?.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
});

function say(text) { /* to those who listen; used when something ended or was asked for, never for each refresh */
  el("said").textContent = text;
}

const token = {
  asking: null,
  get() {
    try { return sessionStorage.getItem(TOKEN_KEY) || this.text || ""; } catch { return this.text || ""; }
  },
  set(text) {
    this.text = text;
    try { sessionStorage.setItem(TOKEN_KEY, text); } catch { /* no storage: until this page is left */ }
  },
  /* One question however many requests were refused; used is the token that they showed. */
  ask(used, why) {
    if (used !== this.get()) return Promise.resolve();
    this.asking ??= new Promise((done) => {
      const dialog = el("token");
      el("token-why").textContent = why;
      el("token-text").value = "";
      el("token-form").onsubmit = (e) => {
        e.preventDefault();
        this.set(el("token-text").value.trim());
        this.asking = null;
        dialog.close();
        done();
      };
      dialog.oncancel = (e) => e.preventDefault();
      dialog.showModal();
      el("token-text").focus();
    });
    return this.asking;
  },
};

const connection = {
  since: null,
  seen: false,
  show(text, lost) {
    const p = el("connection");
    p.classList.toggle("lost", lost);
    if (p.textContent !== text) p.textContent = text;
  },
  up() {
    this.since = null;
    this.seen = true;
    this.show("Live", false);
  },
  lost() {
    this.since ??= new Date();
    const t = this.since.toLocaleTimeString();
    this.show(this.seen ? `No answer since ${t}: shown is what was known then` : `The head does not answer (since ${t})`, true);
  },
};

/* The answer's Response. Throws Away, or Refused with the head's own sentence; AbortError when signal was aborted. */
async function ask(path, { signal, waits = 0 } = {}) {
  for (;;) {
    const shown = token.get(), stop = new AbortController();
    const late = setTimeout(() => stop.abort(), waits + ANSWER_MS);
    const end = () => stop.abort();
    signal?.addEventListener("abort", end);
    try {
      const r = await fetch(path, { headers: shown ? { Authorization: `Bearer ${shown}` } : {}, cache: "no-store", signal: stop.signal });
      const body = new Uint8Array(await r.arrayBuffer());
      connection.up();
      if (r.ok) return { headers: r.headers, body };
      let text = new TextDecoder().decode(body.slice(0, 2000));
      try { text = JSON.parse(text).error; } catch { /* plain words */ }
      text ||= `${r.status} ${r.statusText}`;
      if (r.status !== 401 && !(r.status === 403 && shown)) throw new Refused(r.status, text);
      await token.ask(shown, r.status === 401 ? "From other hosts it answers to holders of the cluster's token." : `The token was refused: ${text}.`);
    } catch (e) {
      if (e instanceof Refused) throw e;
      if (signal?.aborted) throw new DOMException("", "AbortError");
      connection.lost();
      throw new Away();
    } finally {
      clearTimeout(late);
      signal?.removeEventListener("abort", end);
    }
  }
}

async function askJson(path, how) {
  return JSON.parse(new TextDecoder().decode((await ask(path, how)).body));
}

function shown(signal) { /* when somebody can see this page */
  return document.hidden ? new Promise((done) => {
    document.addEventListener("visibilitychange", done, { once: true });
    signal?.addEventListener("abort", done, { once: true });
  }) : Promise.resolve();
}

/* Runs turn again and again until signal: turn gives the pause in ms until its next one, or null when all is said. */
async function forever(signal, turn) {
  let failed = 0;
  while (!signal.aborted) {
    let next;
    try {
      await shown(signal);
      next = await turn(signal);
      failed = 0;
    } catch (e) {
      if (signal.aborted) return;
      if (!(e instanceof Away || e instanceof Refused)) console.error(e);
      next = AGAIN_MS[Math.min(failed++, AGAIN_MS.length - 1)];
    }
    if (next === null) return;
    await pause(next, signal);
  }
}
