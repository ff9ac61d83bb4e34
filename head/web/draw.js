/* Drawing: elements from text (never from markup), rows that stay where they are, numbers, plots. */

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attrs, children) {
  for (const [k, v] of Object.entries(attrs || {}))
    if (v !== null && v !== undefined && v !== false) node.setAttribute(k, v === true ? "" : v);
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}
const h = (tag, attrs, ...children) => fill(document.createElement(tag), attrs, children);
const s = (tag, attrs, ...children) => fill(document.createElementNS(SVG, tag), attrs, children);
/* What others chose: signs that cannot be seen, or that turn the direction of what follows, are shown by their number. */
const plain = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
  (c) => `⟦${c.codePointAt(0).toString(16).padStart(4, "0")}⟧`);
const name = (text) => h("bdi", {}, plain(text));

/* Makes old look as fresh does, touching only what differs: focus, selection and scrolling stay where they are. */
function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name: k } of [...old.attributes]) if (!fresh.hasAttribute(k)) old.removeAttribute(k);
  for (const { name: k, value: v } of fresh.attributes)
    if (k === "style") old.style.cssText = fresh.style.cssText; /* as an attribute the page's policy refuses it */
    else if (old.getAttribute(k) !== v) old.setAttribute(k, v);
  const news = [...fresh.childNodes];
  while (old.childNodes.length > news.length) old.lastChild.remove();
  news.forEach((c, i) => old.childNodes[i] ? patch(old.childNodes[i], c) : old.append(c));
  return undefined;
}

/* Children of parent, one for each item, found again by their key. */
function sync(parent, items, keyOf, make) {
  const old = parent.kept || new Map(), kept = new Map();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item), text = JSON.stringify(item);
    const have = kept.has(key) ? {} : old.get(key) || {};
    if (!have.node) have.node = make(item);
    else if (have.text !== text) patch(have.node, make(item));
    have.text = text;
    if (have.node === at) at = at.nextElementSibling;
    else parent.insertBefore(have.node, at);
    kept.set(key, have);
  }
  while (at) {
    const next = at.nextElementSibling;
    at.remove();
    at = next;
  }
  parent.kept = kept;
}

/* ---- numbers as people read them ---- */
const DASH = "–";
const isNumber = (v) => typeof v === "number" && Number.isFinite(v);
const whole = (v) => isNumber(v) ? v.toLocaleString("en-US") : DASH;
function figure(v, digits = 3) {
  if (!isNumber(v)) return DASH;
  const a = Math.abs(v);
  if (a !== 0 && (a < 0.001 || a >= 1e6)) return v.toExponential(2);
  return a >= 1000 ? v.toLocaleString("en-US", { maximumFractionDigits: 1 }) : v.toFixed(digits);
}
const fixed = (v) => isNumber(v) ? v.toFixed(3) : DASH; /* in a column, one below the other */
function bytes(v) {
  if (!isNumber(v)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  for (; Math.abs(v) >= 1024 && i < units.length - 1; i++) v /= 1024;
  return `${i && v < 100 ? v.toFixed(1) : Math.round(v)} ${units[i]}`;
}
function seconds(v) { /* of one thing that was measured */
  if (!isNumber(v)) return DASH;
  return v >= 1 ? `${v.toFixed(2)} s` : v >= 0.001 ? `${(v * 1e3).toFixed(1)} ms` : `${(v * 1e6).toFixed(0)} µs`;
}
function lasting(ms) { /* of jobs and heads */
  const t = Math.max(0, Math.round(ms / 1000)), d = Math.floor(t / 86400), hr = Math.floor(t / 3600) % 24, m = Math.floor(t / 60) % 60;
  if (t < 60) return `${t} s`;
  return d ? `${d} d ${hr} h` : hr ? `${hr} h ${m} min` : `${m} min ${t % 60} s`;
}
function when(ms) {
  if (!isNumber(ms)) return DASH;
  const d = new Date(ms), p = (v) => String(v).padStart(2, "0");
  return `${d.getFullYear()}-${p(d.getMonth() + 1)}-${p(d.getDate())} ${p(d.getHours())}:${p(d.getMinutes())}:${p(d.getSeconds())}`;
}

const STATE_LOOK = {
  RUNNING: "go", LIVE: "go", READY: "good", SUCCEEDED: "good", PLACED: "good", FAILED: "bad", LOST: "bad", REFUSED: "bad",
  SUSPECT: "warn", STOPPING: "warn", UNKNOWN: "warn", STOPPED: "warn", RECOVERING: "warn",
};
const state = (text) => h("span", { class: `state ${STATE_LOOK[text] || "idle"}` }, text);

function fact(label, ...value) {
  return h("div", {}, h("dt", {}, label), h("dd", {}, ...value));
}

/* A bar that is a picture of the text beside it, so it is hidden from those who hear that text. */
function meter(label, used, total, text, tight = 2) { /* tight: from which part on it is a trouble */
  const part = total > 0 ? Math.min(1, used / total) : 0, bar = h("div", {});
  bar.style.setProperty("width", `${(part * 100).toFixed(1)}%`);
  return h("div", { class: "meter" }, h("div", { class: "top" }, h("span", {}, name(label)), h("span", {}, text)),
    h("div", { class: `rail${part > tight ? " tight" : ""}`, "aria-hidden": "true" }, bar));
}

/* Previous and next under a list; turn(first) shows another piece of it. */
function pager(box, { first, shown: n, found, total, count, what, turn }) {
  if (!box.made) {
    const button = (text, by) => {
      const b = h("button", { type: "button" }, text);
      b.onclick = () => b.getAttribute("aria-disabled") === "true" || box.turn(Math.max(0, box.first + by * box.count));
      return b;
    };
    box.made = { back: button("Previous", -1), on: button("Next", 1), text: h("span", {}) };
    box.append(h("nav", { class: "pager", "aria-label": `Pages of ${what}` }, box.made.back, box.made.on, box.made.text));
  }
  Object.assign(box, { turn, first, count, hidden: found <= count && first === 0 && found === total });
  box.made.back.setAttribute("aria-disabled", String(first === 0));
  box.made.on.setAttribute("aria-disabled", String(first + n >= found));
  const of = found === total ? whole(found) : `${whole(found)} found of ${whole(total)}`;
  const text = n ? `${whole(first + 1)} to ${whole(first + n)} of ${of}` : `none of ${of}`;
  if (box.made.text.textContent !== text) box.made.text.textContent = text;
}

/* ---- plots ---- */
function ticks(low, high, about) {
  const span = high - low || Math.abs(high) || 1, raw = span / about, unit = 10 ** Math.floor(Math.log10(raw));
  const by = unit * [1, 2, 5, 10].find((m) => m * unit >= raw), out = [];
  for (let v = Math.ceil(low / by - 1e-9) * by; v <= high + by * 1e-6; v += by) out.push(Math.abs(v) < by * 1e-6 ? 0 : v);
  return out;
}

/* One figure: lines, or areas on top of each other, over the same steps; a legend with the values of the step shown. */
class Plot {
  constructor(box, { title, unit, series, stacked }) {
    Object.assign(this, { title, unit, series, stacked });
    this.svg = s("svg", { role: "img" });
    this.legend = h("ul", { class: "legend" });
    this.keys = series.map((one, i) => {
      const value = h("span", {}), mark = stacked
        ? s("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" }, s("rect", { width: 16, height: 10, class: `f${one.look ?? i}` }))
        : s("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" }, s("line", { x1: 0, y1: 5, x2: 16, y2: 5, class: `curve s${one.look ?? i} dash${i}` }));
      this.legend.append(h("li", {}, mark, `${one.name} `, value));
      return value;
    });
    this.figure = h("figure", {}, h("h3", {}, unit ? `${title}, ${unit}` : title), this.svg, h("figcaption", {}, this.legend));
    box.append(this.figure);
    new ResizeObserver(() => this.draw()).observe(this.figure);
    this.svg.onpointermove = (e) => this.pick && this.point(e);
    this.svg.onpointerdown = this.svg.onpointermove;
  }

  show(steps, at) {
    Object.assign(this, { steps, at });
    this.draw();
  }

  point(e) { /* the step under the pointer */
    const box = this.svg.getBoundingClientRect(), { left, wide, x0, x1 } = this.frame || {};
    if (!wide || !this.steps?.length) return;
    const step = x0 + (e.clientX - box.left - left) / wide * (x1 - x0);
    let best = 0;
    this.steps.forEach((r, i) => { if (Math.abs(r.step - step) < Math.abs(this.steps[best].step - step)) best = i; });
    this.pick(best);
  }

  range(values) {
    let low = 0, high = -Infinity;
    for (const row of values) for (const v of row) if (isNumber(v)) { low = Math.min(low, v); high = Math.max(high, v); }
    if (!Number.isFinite(high)) high = 1;
    return high > low ? [low, high] : [low, low + 1];
  }

  draw() {
    const { svg, series, stacked } = this, steps = this.steps?.filter((r) => !stacked || series.some((one) => isNumber(one.get(r)))), width = svg.clientWidth || this.figure.clientWidth - 24, height = 180;
    if (!steps?.length || width < 40) return;
    const values = steps.map((r) => {
      let sum = 0;
      return series.map((one) => { const v = one.get(r); return stacked ? (sum += isNumber(v) ? v : 0) : v; });
    });
    const [low, high] = this.range(values), left = 52, right = 8, top = 8, bottom = 22;
    const x0 = steps[0].step, x1 = steps.length > 1 ? steps[steps.length - 1].step : x0 + 1;
    const wide = width - left - right, tall = height - top - bottom;
    const x = (v) => (left + (v - x0) / (x1 - x0) * wide).toFixed(1), y = (v) => (top + (high - v) / (high - low) * tall).toFixed(1);
    this.frame = { left, wide, x0, x1 };
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const parts = [];
    for (const v of ticks(low, high, 4))
      parts.push(s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
        s("text", { x: left - 6, y: +y(v) + 4, "text-anchor": "end" }, Math.abs(v) < 1e-3 && v !== 0 ? v.toExponential(0) : String(+v.toPrecision(3))));
    for (const v of ticks(x0, x1, Math.max(2, Math.min(8, wide / 80))))
      if (Number.isInteger(v)) parts.push(s("text", { x: x(v), y: height - 6, "text-anchor": "middle" }, String(v)));
    series.forEach((one, i) => parts.push(...(stacked ? this.area(steps, values, i, x, y, one.look ?? i) : this.curve(steps, values, i, x, y, one.look ?? i))));
    const at = this.steps[this.at]?.step;
    if (at >= x0 && at <= x1) parts.push(s("line", { class: "cursor", x1: x(at), x2: x(at), y1: top, y2: top + tall }));
    svg.replaceChildren(...parts);
    this.tell(this.steps, low, high);
  }

  curve(steps, values, i, x, y, look) {
    let d = "", pen = false, single = null, n = 0;
    steps.forEach((r, k) => {
      const v = values[k][i];
      if (!isNumber(v)) return; /* measured now and then: joined over what lies between */
      d += `${pen ? "L" : "M"}${x(r.step)} ${y(v)}`;
      single = [x(r.step), y(v)];
      pen = true;
      n++;
    });
    if (!n) return [];
    return n === 1 ? [s("circle", { class: `dot f${look}`, cx: single[0], cy: single[1], r: 4 })] : [s("path", { class: `curve s${look} dash${i}`, d })];
  }

  area(all, values, i, x, y, look) {
    const steps = all.length > 1 ? all : [all[0], { step: all[0].step + 1 }];
    const row = (k) => values[Math.min(k, values.length - 1)];
    const up = steps.map((r, k) => `${x(r.step)} ${y(row(k)[i])}`), down = steps.map((r, k) => `${x(r.step)} ${y(i ? row(k)[i - 1] : 0)}`).reverse();
    return [s("path", { class: `area f${look}`, d: `M${up.join("L")}L${down.join("L")}Z` })];
  }

  tell(steps, low, high) {
    const at = steps[this.at] || steps[steps.length - 1];
    this.series.forEach((one, i) => {
      const text = one.text ? one.text(one.get(at)) : figure(one.get(at));
      if (this.keys[i].textContent !== text) this.keys[i].textContent = text;
    });
    const label = `${this.title}: steps ${steps[0].step} to ${steps[steps.length - 1].step}, from ${figure(low)} to ${figure(high)}${this.unit ? ` ${this.unit}` : ""}. The table of steps has all values.`;
    if (this.svg.getAttribute("aria-label") !== label) this.svg.setAttribute("aria-label", label);
  }
}
