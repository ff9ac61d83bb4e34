/* The views. The part after # in the address names what is shown; each view refreshes what can be seen of it. */

const REFRESH_MS = 2000, LONG_POLL_MS = 25000, JOBS = 50, NODES = 24, ROWS = 10, WORKERS = 25, STEPS_KEPT = 2048;
const LOG_TAIL_BYTES = 256 << 10, LOG_KEPT_CHARS = 1 << 20, LINE_CHARS = 10000, MEMORY_TIGHT = 0.95;
const ENDS = ["SUCCEEDED", "FAILED", "STOPPED"], API = "/api/furlong", ids = encodeURIComponent;
const jobLink = (id) => h("a", { href: `#/jobs/${ids(id)}` }, name(id));

const query = (o) => Object.entries(o).filter(([, v]) => v !== "").map(([k, v]) => `${k}=${ids(v)}`).join("&");

function cell(label, attrs, ...what) {
  const none = what.length === 0 || what.every((x) => x === null || x === "" || x === DASH);
  const wide = { ...attrs, role: "cell", "data-label": label };
  if (none) wide.class = `${wide.class || ""} none`;
  return h("td", wide, ...(none ? [DASH] : what));
}

/* A list that is shown in pieces, with its filters; a changed filter begins at its front again. */
function listView({ path, key, count, what, list, empty, box, inputs, draw }) {
  const view = { first: 0, wake: () => {}, told: false };
  view.refresh = async (signal) => {
    const asked = Object.fromEntries(Object.entries(inputs).map(([k, id]) => [k, el(id).value.trim()]));
    const o = await askJson(`${path}?${query({ ...asked, first: view.first, count })}`, { signal });
    if (o.first > 0 && !o[key].length) { /* it has become shorter */
      view.first = 0;
      return 0;
    }
    draw(list, o);
    empty.hidden = o[key].length > 0;
    empty.textContent = o.total ? `No ${what} fit.` : `No ${what} yet.`;
    pager(box, { first: o.first, shown: o[key].length, found: o.found, total: o.total, count, what, turn(first) { view.first = first; view.wake(); } });
    if (view.told) say(`${whole(o.found)} of ${whole(o.total)} ${what} fit`);
    view.told = false;
    return REFRESH_MS;
  };
  let typing = 0;
  for (const id of Object.values(inputs)) {
    el(id).form.onsubmit = (e) => e.preventDefault();
    el(id).addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => { view.first = 0; view.told = true; view.wake(); }, 200);
    });
  }
  return view;
}

/* ---- the cluster, on every view: is the head well? ---- */
let term = null;

function drawNotices(st) {
  const notes = [];
  if (st.state === "RECOVERING") notes.push("The head started again and waits for its nodes to report; nothing is placed meanwhile.");
  if (st.state === "ENDING") notes.push("This cluster is being shut down.");
  if (st.journal_older) notes.push("The journal is older than what the nodes hold: what it does not know runs on and is left alone.");
  if (st.unknown) notes.push(`${whole(st.unknown)} leases or processes on the nodes are unknown to this head's journal.`);
  if (st.journal_note) notes.push(st.journal_note);
  sync(el("notices"), notes, (t) => t, (t) => h("p", {}, t));
}

const ORDER = ["RUNNING", "PENDING", "FAILED", "STOPPED", "SUCCEEDED", "READY", "JOINING", "SUSPECT", "LOST", "GONE"];
const counts = (o) => Object.entries(o).sort(([a], [b]) => ORDER.indexOf(a) - ORDER.indexOf(b)).map(([k, v]) => `${whole(v)} ${k}`).join(", ") || "none";
function amount(what, v) { return what.includes("memory") ? bytes(v) : v.toLocaleString("en-US", { maximumFractionDigits: 2 }); }

function drawCluster(st) {
  const facts = [
    { label: "State", state: st.state }, { label: "Nodes", text: counts(st.nodes) }, { label: "Jobs", text: counts(st.jobs) },
    { label: "Head has served", text: `${lasting(st.uptime_s * 1000)}, start ${st.term}` }, { label: "Nodes join at", text: st.address || DASH },
    { label: "Cluster id", text: st.cluster.slice(0, 8) },
  ];
  sync(el("cluster-facts"), facts, (f) => f.label, (f) => fact(f.label, f.state ? state(f.state) : f.text));
  const first = ["GPU", "CPU", "memory", "object_store_memory"], rank = (k) => (first.indexOf(k) + 1 || 9) + k;
  const meters = Object.entries(st.resources).filter(([k]) => !k.startsWith("node:"))
    .sort(([a], [b]) => rank(a) < rank(b) ? -1 : 1).slice(0, 24);
  el("resources-part").hidden = !meters.length;
  sync(el("resources"), meters, ([k]) => k, ([k, r]) => h("li", {},
    meter(k === "memory" ? "memory" : k, r.used, r.total, `${amount(k, r.used)} of ${amount(k, r.total)}`)));
  el("waiting-part").hidden = !st.waiting.length;
  const more = st.waiting.length - 20, waiting = st.waiting.slice(0, 20);
  if (more > 0) waiting.push({ more });
  sync(el("waiting"), waiting, (w) => (w.group || "") + (w.job || "more"), (w) => w.more
    ? h("li", { class: "soft" }, `… and ${whole(w.more)} more`) : h("li", {}, jobLink(w.job), `: ${w.what}. `, name(w.why)));
}

const jobsView = listView({
  path: `${API}/browse/jobs`, key: "jobs", count: JOBS, what: "jobs", list: el("jobs"), empty: el("jobs-empty"), box: el("jobs-pager"),
  inputs: { find: "jobs-find", status: "jobs-status" },
  draw(list, o) {
    el("jobs-table").hidden = !o.jobs.length;
    const rows = o.jobs.map((j) => ({ ...j, took: j.start_time ? lasting((j.end_time || o.now_ms) - j.start_time) : "" }));
    sync(list, rows, (j) => j.submission_id, (j) => h("tr", { role: "row" },
      h("th", { scope: "row", role: "rowheader" }, jobLink(j.submission_id)), cell("Status", {}, state(j.status)), cell("Started", {}, when(j.start_time)),
      cell("Took", { class: "n" }, j.took), cell("Exit", { class: "n" }, j.exit_code === null ? null : String(j.exit_code)),
      cell("Command", { class: "cut", title: plain(j.entrypoint) }, name(j.entrypoint))));
  },
});

/* ---- nodes ---- */
function processItem(p) {
  const who = `${p.role} ${p.rank}`, pid = p.pid ? ` · pid ${p.pid}` : "";
  return h("li", {}, name(who), p.job ? " of " : "", p.job ? jobLink(p.job) : null, h("span", { class: "soft" }, pid, p.state === "LIVE" || p.state === "RUNNING" ? "" : ` · ${p.state.toLowerCase()}`));
}

function deviceItem(d) {
  const about = [d.memory_bytes ? bytes(d.memory_bytes) : null, d.logical ? "logical" : null].filter(Boolean).join(" · ");
  const uuid = d.uuid && d.uuid !== d.id ? h("p", { class: "procs uuid soft", title: plain(d.uuid) }, name(d.uuid)) : null;
  const held = d.leases && !d.processes.length ? h("p", { class: "procs soft" }, "given away, no process yet") : null;
  return h("li", { class: d.leases || d.processes.length ? "used" : null }, h("span", { class: "id" }, "GPU ", name(d.id)), about ? h("span", { class: "soft" }, ` ${about}`) : null, d.slowed ? h("span", { class: "error" }, " slowed by heat or the power brake") : null, uuid,
    d.processes.length ? h("ul", { class: "procs" }, ...d.processes.map(processItem)) : held || h("p", { class: "procs soft" }, "free"));
}

function nodeItem(n) {
  const labels = Object.entries(n.labels).map(([k, v]) => `${k}=${v}`).join(", ");
  const cpu = n.total.CPU === undefined ? "" : ` · ${n.total.CPU} CPU`, id = `node-${n.id}`;
  const in_use = Math.max(0, n.memory_total - n.memory_available);
  const memory = n.memory_available === null ? h("p", { class: "soft sub" }, "Memory: not reported yet")
    : meter(`Memory, ${bytes(n.memory_available)} available`, in_use, n.memory_total, `${bytes(in_use)} of ${bytes(n.memory_total)}`, MEMORY_TIGHT);
  return h("li", { class: "node" },
    h("div", { class: "head" }, h("h2", { id }, name(n.name)), state(n.state)),
    h("p", { class: "sub" }, name(n.address), `${cpu} · load ${n.load.toFixed(2)} · heard ${n.age}`, labels ? " · " : "", labels ? name(labels) : "", n.why ? h("span", { class: "error" }, " ", name(n.why)) : null),
    memory,
    n.devices.length ? h("h3", {}, "Devices") : null,
    n.devices.length ? h("ul", { class: "devices" }, ...n.devices.map(deviceItem)) : null,
    n.others.length ? h("h3", {}, n.devices.length ? "Processes without a device" : "Processes") : null,
    n.others.length ? h("ul", { class: "procs" }, ...n.others.map(processItem)) : null);
}

const nodesView = listView({
  path: `${API}/browse/nodes`, key: "nodes", count: NODES, what: "nodes", list: el("nodes"), empty: el("nodes-empty"), box: el("nodes-pager"),
  inputs: { find: "nodes-find", state: "nodes-state", order: "nodes-order" },
  draw(list, o) { /* an age that changes with every beat would make every card new each time */
    const beat = (s) => s < 5 ? "now" : `${lasting(s * 1000)} ago`;
    sync(list, o.nodes.map((n) => ({ ...n, age: beat(n.beat_age_s), beat_age_s: 0 })), (n) => n.id, nodeItem);
  },
});

/* ---- one job ---- */
const PHASES = [
  { name: "rollout", keys: ["rollout"] }, { name: "train", keys: ["train"] }, { name: "weights update", keys: ["update_weights"] },
  { name: "memory", keys: ["engine_release", "wake_up", "sleep", "finalize_and_resume_engines"] }, { name: "save", keys: ["save_model"] },
  { name: "eval", keys: ["eval"] },
];
const perf = (r, what) => r[`perf/${what}_time`];
const phase = (p) => (r) => p.keys.some((k) => isNumber(perf(r, k))) ? p.keys.reduce((sum, k) => sum + (perf(r, k) || 0), 0) : null;
const other = (r) => !isNumber(perf(r, "step")) ? null : Math.max(0, perf(r, "step") - PHASES.reduce((sum, p) => sum + (phase(p)(r) || 0), 0));
const updated = (r) => Boolean(r.transfer_mode) || r["perf/update_weights_bytes"] > 0;
const ofUpdate = (what) => (r) => updated(r) ? perf(r, what) : null;

const plots = [
  { title: "Reward", unit: "", series: [{ name: "training", get: (r) => r.reward_mean }, { name: "held out", get: (r) => r.eval_reward_mean }] },
  { title: "Time of a step", unit: "s", stacked: true, series: [...PHASES.map((p) => ({ name: p.name, get: phase(p), text: seconds })), { name: "other", get: other, text: seconds, look: 6 }] },
  { title: "Weights update", unit: "s", series: [{ name: "whole", get: ofUpdate("update_weights"), text: seconds }, { name: "move", get: ofUpdate("update_weights_move"), text: seconds }, { name: "engines' pause", get: ofUpdate("update_weights_pause"), text: seconds }] },
  { title: "Gap of log probabilities, trainer to engine", unit: "", series: [{ name: "mean difference", get: (r) => r.train_rollout_logprob_abs_diff }] },
].map((p) => new Plot(el("plots"), p));

const STEP_COLUMNS = [
  ["Step", (r) => whole(r.step)], ["Reward", (r) => figure(r.reward_mean)], ["Held out", (r) => figure(r.eval_reward_mean)],
  ["Length", (r) => figure(r.response_len_mean, 1)], ["Version", (r) => whole(r.weights_version)], ["Whole", (r) => fixed(perf(r, "step"))],
  ...PHASES.map((p) => [p.name[0].toUpperCase() + p.name.slice(1), (r) => fixed(phase(p)(r))]),
  ["Log-prob gap", (r) => figure(r.train_rollout_logprob_abs_diff)], ["Clean", (r) => r.clean === false ? "no" : r.clean ? "yes" : DASH],
  ["Why not", (r) => Object.entries(r.unclean_why || {}).map(([k, v]) => plain(`${k}: ${v}`)).join("; ")],
];
const predicted = (r) => perf(r, "update_weights_predicted");
const rate = (r) => { const t = perf(r, "update_weights_move"), b = r["perf/update_weights_bytes"]; return t > 0 && b > 0 ? `${bytes(b / t)}/s` : DASH; };
const UPDATE_COLUMNS = [
  ["Step", (r) => whole(r.step)], ["Version", (r) => whole(r.weights_version)], ["Mode", (r) => plain(r.transfer_mode || DASH)], ["Bytes", (r) => bytes(r["perf/update_weights_bytes"])],
  ["Predicted", (r) => seconds(predicted(r))], ["Moved in", (r) => seconds(perf(r, "update_weights_move"))],
  ["Of predicted", (r) => predicted(r) > 0 ? `${(perf(r, "update_weights_move") / predicted(r)).toFixed(2)} ×` : DASH], ["Rate", rate],
  ["Engines' pause", (r) => seconds(perf(r, "update_weights_pause"))], ["Whole", (r) => seconds(perf(r, "update_weights"))], ["Engines updated", (r) => whole(r.engines_updated)],
  ["Left behind", (r) => whole(r.engines_left_behind)], ["Who and why", (r) => plain(r.unclean_why?.update_weights || "")],
];
const LEFT = new Set(["Mode", "Clean", "Why not", "Who and why"]);

function drawHead(head, columns) {
  if (!head.childElementCount)
    head.append(h("tr", {}, ...columns.map(([t]) => h("th", { scope: "col", class: LEFT.has(t) ? null : "n" }, t))));
}

function drawRows(body, box, rows, columns, view, what, shownStep) {
  const n = rows.length, first = Math.min(view.first, Math.max(0, n - 1)), piece = rows.slice(first, first + ROWS);
  sync(body, piece.map((r) => ({ r: columns.map(([, get]) => get(r)), shown: r.step === shownStep })), (x) => x.r[0], (x) =>
    h("tr", { class: x.shown ? "shown" : null }, ...x.r.map((v, i) => h(i ? "td" : "th", { scope: i ? null : "row", class: columns[i][0] === "Why not" || columns[i][0] === "Who and why" ? "why" : LEFT.has(columns[i][0]) ? null : "n" }, v))));
  pager(box, { first, shown: piece.length, found: n, total: n, count: ROWS, what, turn(f) { view.first = f; view.draw(); } });
}

/* Output of programs as it would look in the end: without colours, and of a line that was overwritten the last. */
function readable(line) {
  const bare = line.replace(/\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-_])/g, "").replace(/\r+$/, "");
  const last = plain(bare.slice(bare.lastIndexOf("\r") + 1));
  return last.length > LINE_CHARS ? `${last.slice(0, LINE_CHARS)} … and ${whole(last.length - LINE_CHARS)} more characters` : last;
}

class LogView {
  constructor(id) {
    this.path = `${API}/jobs/${ids(id)}/log`;
    this.box = el("log");
    this.box.replaceChildren(this.rest = document.createTextNode(""));
    this.decoder = new TextDecoder();
    this.at = null;
    this.open = "";
    this.chars = 0;
    el("log-note").textContent = "";
    this.box.onscroll = () => {
      const end = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 8;
      if (!end && this.box.scrollTop < this.top) el("log-follow").checked = false;
      if (end) el("log-follow").checked = true;
      this.top = this.box.scrollTop;
    };
  }

  note(text) {
    el("log-note").textContent = text;
  }

  add(text) {
    const lines = (this.open + text).split("\n");
    this.open = lines.pop().slice(-LOG_KEPT_CHARS); /* a line without an end has one here */
    if (lines.length) {
      const node = document.createTextNode(lines.map(readable).join("\n") + "\n");
      this.box.insertBefore(node, this.rest);
      this.chars += node.length;
      while (this.chars > LOG_KEPT_CHARS && this.box.childNodes.length > 2) {
        this.chars -= this.box.firstChild.length;
        this.box.firstChild.remove();
        this.note("The end of the log; furlong job logs gives all of it.");
      }
    }
    this.rest.data = readable(this.open);
    this.end();
  }

  end() {
    if (el("log-follow").checked) this.box.scrollTop = this.box.scrollHeight;
    this.top = this.box.scrollTop;
  }

  async turn(signal, size) {
    if (this.at === null) { /* from the last part on */
      this.at = Math.max(0, size - LOG_TAIL_BYTES);
      this.cut = this.at > 0;
      if (this.cut) this.note(`The last ${bytes(LOG_TAIL_BYTES)} of ${bytes(size)}; furlong job logs gives all of it.`);
    }
    const { headers, body } = await ask(`${this.path}?offset=${this.at}&wait_ms=${LONG_POLL_MS}`, { signal, waits: LONG_POLL_MS });
    const next = Number(headers.get("X-Furlong-Offset"));
    if (next - body.length > this.at) this.note("Older output was given back; the log begins here.");
    this.at = next;
    let text = this.decoder.decode(body, { stream: true });
    if (this.cut && text) { /* begins in the middle of a line */
      text = text.slice(text.indexOf("\n") + 1);
      this.cut = false;
    }
    if (text) this.add(text);
    const over = ENDS.includes(headers.get("X-Furlong-State"));
    if (!body.length && over && !this.open && !this.chars) this.note("It wrote nothing.");
    return !body.length && over ? null : 0;
  }
}

class JobView {
  constructor(id, signal) {
    Object.assign(this, { id, first: 0, steps: new Map(), from: 0, rows: [], shownAt: -1, explained: null, status: null });
    this.stepsView = { first: 0, draw: () => this.drawSteps() };
    this.updatesView = { first: 0, draw: () => this.drawSteps() };
    for (const box of ["steps-part", "updates-part", "job-error"]) el(box).hidden = true;
    for (const box of ["steps-empty", "updates-empty", "job-body"]) el(box).hidden = false;
    for (const box of ["job-facts", "groups", "explain", "workers"]) { el(box).kept = new Map(); el(box).replaceChildren(); }
    el("job-name").replaceChildren(name(id));
    el("step").oninput = () => { this.shownAt = +el("step").value >= this.rows.length - 1 ? -1 : +el("step").value; this.drawSteps(); };
    for (const p of plots) p.pick = (i) => { this.shownAt = i >= this.rows.length - 1 ? -1 : i; this.drawSteps(); };
    this.log = new LogView(id);
    this.signal = signal;
  }

  /* Facts and processes, again and again; log and steps are followed once the first facts are there. */
  async refresh(signal) {
    let o;
    try {
      o = await askJson(`${API}/browse/jobs/${ids(this.id)}?${query({ first: this.first, count: WORKERS })}`, { signal });
    } catch (e) {
      if (!(e instanceof Refused)) throw e;
      el("job-error").textContent = e.status === 404 ? "This head knows no such job. It may have been forgotten: a head keeps the last 1,024 that have ended." : e.message;
      el("job-error").hidden = false;
      el("job-body").hidden = this.status === null;
      throw e;
    }
    el("job-error").hidden = true;
    el("job-body").hidden = false;
    this.again ||= this.term !== undefined && this.term !== o.term;
    this.term = o.term;
    this.drawFacts(o);
    this.drawWorkers(o);
    this.explain(o, signal).catch(() => {}); /* asked again with the next change */
    if (!this.following) {
      this.following = true;
      forever(this.signal, (s) => this.log.turn(s, o.log_bytes));
      forever(this.signal, (s) => this.stepTurn(s));
    }
    return REFRESH_MS;
  }

  drawFacts(o) {
    const over = o.end_time !== null;
    if (this.status && this.status !== o.status) say(`Job ${this.id}: ${o.status}`);
    this.status = o.status;
    document.title = `${this.id} · ${o.status} · Furlong`;
    const facts = [
      ["Status", o.status], ["Started", when(o.start_time)], [over ? "Took" : "Runs for", o.start_time ? lasting((o.end_time || o.now_ms) - o.start_time) : DASH],
      ["Exit code", o.exit_code === null ? DASH : String(o.exit_code)], ["Driver's attempt", String(o.driver_attempt)], ["Driver at", o.driver_address || DASH],
      ["Run folder", o.run_dir], ["Command", o.entrypoint], ["Message", o.message],
    ];
    sync(el("job-facts"), facts.filter(([, v]) => v), (f) => f[0], ([k, v]) => {
      const f = fact(k, k === "Status" ? state(v) : k === "Command" ? h("code", {}, name(v)) : name(v));
      if (["Command", "Message", "Run folder"].includes(k)) f.className = "wide";
      if (k === "Message") f.lastChild.className = o.status === "FAILED" ? "error" : "";
      return f;
    });
  }

  drawWorkers(o) {
    el("workers-table").hidden = !o.workers.length;
    el("workers-empty").hidden = o.workers.length > 0;
    sync(el("workers"), o.workers, (w) => `${w.role} ${w.rank}`, (w) => h("tr", { role: "row" },
      h("th", { scope: "row", role: "rowheader" }, name(`${w.role} ${w.rank}`)), cell("State", {}, state(w.state)), cell("Node", {}, w.node && name(w.node)),
      cell("Devices", {}, plain(w.devices.join(", "))), cell("Pid", { class: "n" }, w.pid && String(w.pid)), cell("Attempt", { class: "n" }, String(w.attempt)),
      cell("Peak memory", { class: "n" }, w.peak_bytes ? bytes(w.peak_bytes) : null), cell("Last end", {}, w.why && name(w.why))));
    pager(el("workers-pager"), { first: o.first, shown: o.workers.length, found: o.workers_found, total: o.workers_found, count: WORKERS, what: "processes", turn: (f) => { this.first = f; current.wake(); } });
    sync(el("groups"), o.groups, (g) => g.id, (g) => h("div", {}, h("h3", {}, g.driver ? "The driver's own resources" : "Placement group ", g.driver ? null : h("code", {}, g.id.slice(0, 8))),
      h("p", {}, state(g.state), ` ${whole(g.bundles)} ${g.bundles === 1 ? "bundle" : "bundles"}`, g.why ? ". " : "", g.why ? name(g.why) : ""), g.layout ? h("pre", { tabindex: "0", role: "region", "aria-label": "Layout" }, plain(g.layout)) : null));
  }

  async explain(o, signal) { /* a replay of the solver: only when something about it has changed */
    const now = JSON.stringify([o.term, o.status, o.decisions, o.groups.map((g) => [g.id, g.state, g.why])]);
    if (this.explained === now) return;
    this.explained = now;
    const none = "This job asked for no placement, or no decision is kept any more.";
    let list = [];
    try {
      if (o.decisions) list = (await askJson(`${API}/explain/${ids(this.id)}`, { signal })).decisions;
    } catch (e) {
      this.explained = null;
      throw e;
    }
    sync(el("explain"), list.length ? list.slice(-5).reverse() : [{ none }], (d) => d.none ? "none" : `${d.group} ${d.seq}`, (d) => d.none ? h("p", { class: "soft" }, d.none)
      : h("div", {}, h("p", {}, h("strong", {}, d.decision), ` at record ${whole(d.seq)}. Asked: ${d.asked}.${d.same ? "" : " This head's solver decides otherwise than it did then."}`),
        h("pre", { tabindex: "0", role: "region", "aria-label": `Decision at record ${d.seq}` }, plain(d.text || "No reasons were kept."))));
  }

  async stepTurn(signal) {
    const o = await askJson(`${API}/jobs/${ids(this.id)}/steps?from=${this.from}&wait_ms=${LONG_POLL_MS}`, { signal, waits: LONG_POLL_MS });
    /* A head that started again counts anew: what is here stays, and what it has is read from its front. */
    const back = this.again || o.next < this.from;
    this.again = false;
    this.from = back ? 0 : o.next;
    for (const r of o.steps)
      if (isNumber(r.step)) this.steps.set(r.step, r);
    if (o.steps.length) {
      this.rows = [...this.steps.values()].sort((a, b) => a.step - b.step).slice(-STEPS_KEPT);
      this.drawSteps();
    }
    if (back) return 0;
    return !o.steps.length && ENDS.includes(o.state) ? null : 0;
  }

  drawSteps() {
    const rows = this.rows, at = this.shownAt < 0 || this.shownAt >= rows.length ? rows.length - 1 : this.shownAt, shownStep = rows[at];
    el("steps-part").hidden = !rows.length;
    el("steps-empty").hidden = rows.length > 0;
    if (!rows.length) return;
    const range = el("step"), text = `step ${shownStep.step}${at === rows.length - 1 ? ", the newest" : ""}`;
    range.max = rows.length - 1;
    range.value = at;
    range.setAttribute("aria-valuetext", `${text}, reward ${figure(shownStep.reward_mean)}, ${figure(perf(shownStep, "step"))} s`);
    el("step-said").textContent = text;
    for (const p of plots) p.show(rows, at);
    const newest = [...rows].reverse(), epochs = newest.filter(updated);
    drawHead(el("steps-head"), STEP_COLUMNS);
    drawRows(el("steps"), el("steps-pager"), newest, STEP_COLUMNS, this.stepsView, "steps", shownStep.step);
    el("updates-part").hidden = !epochs.length;
    el("updates-empty").hidden = epochs.length > 0;
    drawHead(el("updates-head"), UPDATE_COLUMNS);
    drawRows(el("updates"), el("updates-pager"), epochs, UPDATE_COLUMNS, this.updatesView, "weight updates", shownStep.step);
    if (el("metrics-part").open) this.drawMetrics(shownStep);
    el("metrics-part").ontoggle = () => this.drawMetrics(rows[at]);
  }

  drawMetrics(r) {
    const all = Object.entries(r).filter(([, v]) => v !== null && typeof v !== "object").slice(0, 500);
    sync(el("metrics"), all, ([k]) => k, ([k, v]) => h("tr", {}, h("th", { scope: "row" }, name(k)), h("td", { class: "n" }, isNumber(v) ? String(+v.toPrecision(6)) : name(v))));
  }
}

/* ---- which view ---- */
let current = null;

function route() {
  const path = location.hash.slice(1), job = /^\/jobs\/([^/]+)$/.exec(path);
  if (path && !path.startsWith("/")) return; /* a place on this page */
  let id = null;
  try { id = job && decodeURIComponent(job[1]); } catch { /* not ours: the list is shown */ }
  const which = id ? "job" : path === "/nodes" ? "nodes" : "cluster", before = current;
  before?.stop.abort();
  const stop = new AbortController();
  for (const v of ["cluster", "nodes", "job"]) el(`view-${v}`).hidden = v !== which;
  for (const a of document.querySelectorAll("header nav a"))
    if (a.dataset.view === which) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  document.title = { cluster: "Furlong", nodes: "Nodes · Furlong", job: `${id} · Furlong` }[which];
  const view = which === "job" ? new JobView(id, stop.signal) : which === "nodes" ? nodesView : jobsView;
  let nap = null, woken = false;
  current = { stop, which, wake: () => { woken = true; nap?.abort(); } };
  view.wake = current.wake;
  if (before) {
    scrollTo(0, 0);
    el(`view-${which}`).querySelector("h1").focus({ preventScroll: true });
  }
  forever(stop.signal, async (signal) => { /* a nap that ends early when somebody turned a page or typed */
    woken = false;
    const ms = await view.refresh(signal);
    nap = new AbortController();
    if (!woken) await pause(ms, AbortSignal.any([nap.signal, signal]));
    return 0;
  });
}

for (const a of document.querySelectorAll(".jumps a, .skip"))
  a.addEventListener("click", (e) => { /* the address goes on naming the view */
    e.preventDefault();
    const to = el(a.getAttribute("href").slice(1));
    to.scrollIntoView();
    to.focus({ preventScroll: true });
  });
el("log-wrap").onchange = () => el("log").classList.toggle("wrap", el("log-wrap").checked);
el("log-follow").onchange = () => { if (el("log-follow").checked) el("log").scrollTop = el("log").scrollHeight; };
addEventListener("hashchange", route);
route();
forever(new AbortController().signal, async (signal) => {
  const st = await askJson(`${API}/status`, { signal });
  if (term !== null && st.term !== term) say("The head started again");
  term = st.term;
  drawNotices(st);
  if (current.which === "cluster") drawCluster(st);
  return REFRESH_MS;
});
