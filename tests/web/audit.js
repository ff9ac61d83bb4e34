/* Run in the page: what somebody who cannot see it, or not well, would meet. Returns a list of sentences. */
const said = [], shown = (e) => e.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
const label = (e) => `<${e.tagName.toLowerCase()}${e.id ? ` id=${e.id}` : ""}> ${(e.textContent || "").trim().slice(0, 40)}`;

function rgb(text) {
  const m = /^rgba?\(([\d.]+),? ([\d.]+),? ([\d.]+)(?:[,/ ]+([\d.]+))?\)$/.exec(text);
  return m ? { c: [+m[1], +m[2], +m[3]], a: m[4] === undefined ? 1 : +m[4] } : null;
}
function behind(e) {
  for (let at = e; at; at = at.parentElement) {
    const c = rgb(getComputedStyle(at).backgroundColor);
    if (c && c.a === 1) return c.c;
  }
  return [255, 255, 255];
}
function light(c) {
  const [r, g, b] = c.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ratio(a, b) {
  const [x, y] = [light(a), light(b)];
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
}

/* Text: 4.5 to 1; 3 to 1 where it is large. */
let looked = 0;
for (const e of document.querySelectorAll("body *")) {
  if (!shown(e) || e.closest(".sr, script, style")) continue;
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
  const style = getComputedStyle(e), c = rgb(e instanceof SVGElement ? style.fill : style.color), size = parseFloat(style.fontSize);
  const wanted = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700) ? 3 : 4.5, got = c && ratio(c.c, behind(e));
  looked++;
  if (!c) said.push(`no colour is known of ${label(e)}`);
  else if (got < wanted) said.push(`contrast ${got.toFixed(2)} of ${label(e)}, ${wanted} is wanted`);
}
if (looked < 10) said.push(`only ${looked} pieces of text were looked at`);
/* What is drawn: 3 to 1 against what lies behind it. */
for (const e of document.querySelectorAll("svg .curve, svg .area, .rail div, input, select, button")) {
  if (!shown(e)) continue;
  const style = getComputedStyle(e), kind = e.matches(".curve") ? style.stroke : e.matches(".area") ? style.fill : e.matches(".rail div") ? style.backgroundColor : style.borderColor;
  const c = rgb(kind);
  if (c && !e.matches("[type=range]") && ratio(c.c, behind(e.matches(".rail div") ? e.closest(".meter") : e.parentElement)) < 3)
    said.push(`contrast ${ratio(c.c, behind(e.parentElement)).toFixed(2)} of a drawn ${label(e)} ${e.getAttribute("class") || ""}`);
}
/* Names of what can be used. */
for (const e of document.querySelectorAll("a, button, input, select, [role=img], [role=region], summary, nav, section, dialog, table")) {
  if (!shown(e)) continue;
  const by = (e.getAttribute("aria-labelledby") || "").split(" ").filter(Boolean);
  for (const id of by) if (!document.getElementById(id)) said.push(`${label(e)} is named by ${id}, which is not there`);
  const name = e.getAttribute("aria-label") || by.map((id) => document.getElementById(id)?.textContent).join(" ")
    || (e.labels?.length ? e.labels[0].textContent : "") || (e.matches("a, button, summary") ? e.textContent : "") || e.querySelector?.(":scope > caption")?.textContent;
  if (!(name || "").trim()) said.push(`no name: ${label(e)}`);
}
/* Headings go down one level at a time; one h1. */
let level = 0;
const heads = [...document.querySelectorAll("h1, h2, h3, h4")].filter(shown);
for (const e of heads) {
  if (+e.tagName[1] > level + 1) said.push(`${label(e)} follows a heading of level ${level}`);
  level = +e.tagName[1];
}
if (heads.filter((e) => e.tagName === "H1").length !== 1) said.push("not one h1");
for (const t of document.querySelectorAll("table"))
  if (shown(t) && t.querySelectorAll("tbody tr").length) {
    if (!t.querySelector("thead th[scope=col]")) said.push(`${label(t)} has no head`);
    for (const r of t.querySelectorAll("tbody tr")) if (!r.querySelector("th[scope=row]")) { said.push(`a row without a head: ${label(r)}`); break; }
  }
const all = [...document.querySelectorAll("[id]")].map((e) => e.id), twice = all.filter((id, i) => all.indexOf(id) !== i);
if (twice.length) said.push(`ids twice: ${twice}`);
if (document.querySelectorAll("[tabindex]").length && [...document.querySelectorAll("[tabindex]")].some((e) => e.tabIndex > 0)) said.push("an order of focus of its own");
for (const e of document.querySelectorAll("a, button, input, select, summary")) { /* large enough to be hit */
  const box = e.getBoundingClientRect();
  if (shown(e) && getComputedStyle(e).display !== "inline" && !e.closest(".skip, label") && box.height > 0 && box.height < 24) said.push(`${box.height.toFixed(0)} px high: ${label(e)}`);
}
if (document.documentElement.scrollWidth > innerWidth) said.push(`the page is ${document.documentElement.scrollWidth} px wide in a window of ${innerWidth}`);
return said;
