"use strict";
// Rules: text from models and tools only ever enters the page as text nodes; no HTML is built from data.
(() => {
const page = JSON.parse(document.getElementById("page").textContent);
const runs = page.runs;
const root = document.getElementById("app");
const state = { tab: "logprob", sort: "place", desc: false, filter: "", picked: new Set(), turn: -1, search: "" };
const cache = new Map();

function h(tag, attrs, ...kids) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const kid of kids.flat(9)) if (kid !== null && kid !== undefined && kid !== false) node.append(kid);
  return node;
}
function svg(tag, attrs, ...kids) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attrs || {})) node.setAttribute(name, value);
  for (const kid of kids.flat(9)) node.append(kid);
  return node;
}
const put = (node, ...kids) => node.replaceChildren(...kids.flat(9).filter((kid) => kid !== null && kid !== undefined && kid !== false));
const fix = (x, n = 2) => (x === null || x === undefined ? "–" : typeof x === "number" ? x.toFixed(n) : String(x));
const sign = (x) => (x === null || x === undefined ? "" : (x >= 0 ? "+" : "−") + Math.abs(x).toFixed(2));
const pct = (x) => (100 * x).toFixed(0) + " %";
const secs = (s) => (s === null || s === undefined ? "–" : s < 1 ? (s * 1000).toFixed(s < 0.01 ? 2 : 0) + " ms" : s < 100 ? s.toFixed(2) + " s" : (s / 60).toFixed(1) + " min");
const big = (n) => (n >= 1e6 ? (n / 1e6).toFixed(1) + " M" : n >= 1e4 ? (n / 1e3).toFixed(0) + " k" : String(n));
const mean = (xs) => xs.reduce((a, b) => a + b, 0) / xs.length;
const ENDED = new Set(["final_answer", "env_terminated", "env_done", "user_done"]);
const FAILED = new Set(["aborted", "error"]);
const kindOf = (stop) => (ENDED.has(stop) ? "ok" : FAILED.has(stop) ? "fail" : "cut");
const stopPill = (stop) => h("span", { class: "pill " + kindOf(stop), title: stop }, { ok: "✓ ", cut: "✂ ", fail: "✕ " }[kindOf(stop)] + stop);

// Control and direction-changing characters would hide or reorder text: each is shown by its name.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/;
function safe(text) {
  const out = [];
  let plain = "";
  for (const c of text) {
    if (ODD.test(c) && [...c].length === 1 && c.codePointAt(0) < 0x10000) {
      if (plain) out.push(plain);
      plain = "";
      const code = c.codePointAt(0);
      out.push(code < 32 ? String.fromCharCode(0x2400 + code) : h("span", { class: "odd", title: "a character that hides or reorders text" }, "U+" + code.toString(16).toUpperCase().padStart(4, "0")));
    } else plain += c;
  }
  if (plain) out.push(plain);
  return out;
}

async function payload(r, i) {
  const key = runs[r].id + "/" + i;
  if (cache.has(key)) return cache.get(key);
  let data = null;
  const node = document.getElementById("e" + r + "-" + i);
  if (node) {
    const raw = Uint8Array.from(atob(node.textContent.trim()), (c) => c.charCodeAt(0));
    data = await new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).json();
  } else if (page.live) {
    const got = await fetch("episode?run=" + encodeURIComponent(runs[r].id) + "&place=" + i);
    if (got.ok) { data = await got.json(); Object.assign(runs[r].vocab, data.vocab || {}); }
  }
  cache.set(key, data);
  if (cache.size > 60) cache.delete(cache.keys().next().value);
  return data;
}

// ---- small pictures
function spark(values, w = 120, height = 22) {
  const points = values.filter((v) => v !== null);
  if (points.length < 2) return h("span", { class: "dim" }, points.length ? fix(points[0]) : "–");
  const lo = Math.min(...points), hi = Math.max(...points), span = hi - lo || 1;
  const d = points.map((v, i) => (i ? "L" : "M") + ((i * w) / (points.length - 1)).toFixed(1) + " " + (height - 2 - ((v - lo) / span) * (height - 4)).toFixed(1)).join("");
  return svg("svg", { width: w, height, role: "img", "aria-label": `from ${fix(points[0])} to ${fix(points[points.length - 1])}` }, svg("path", { d, class: "ln" }));
}
function curve(rows, key) {
  const pts = rows.map((m, i) => [m.step ?? i, m[key]]).filter((p) => typeof p[1] === "number");
  if (pts.length < 2) return null;
  const w = 320, t = 110, xs = pts.map((p) => p[0]), ys = pts.map((p) => p[1]);
  const x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys), y1 = Math.max(...ys);
  const X = (x) => 38 + ((x - x0) / (x1 - x0 || 1)) * (w - 44), Y = (y) => t - 16 - ((y - y0) / (y1 - y0 || 1)) * (t - 26);
  const text = (x, y, s) => { const n = svg("text", { x, y }); n.textContent = s; return n; };
  return h("div", { class: "card" }, h("b", {}, key), svg("svg", { width: w, height: t, role: "img", "aria-label": key },
    svg("line", { x1: 38, x2: w - 6, y1: t - 16, y2: t - 16, class: "ax" }), text(0, 14, fix(y1, 3)), text(0, t - 16, fix(y0, 3)), text(38, t - 3, "step " + x0), text(w - 50, t - 3, "step " + x1),
    svg("path", { class: "ln", d: pts.map((p, i) => (i ? "L" : "M") + X(p[0]).toFixed(1) + " " + Y(p[1]).toFixed(1)).join("") })));
}
function histogram(values) {
  if (!values.length) return h("p", { class: "dim" }, "no episode has a reward");
  const lo = Math.min(...values), hi = Math.max(...values), bins = Math.min(20, new Set(values).size === 1 ? 1 : 20);
  const counts = Array(bins).fill(0);
  for (const v of values) counts[Math.min(bins - 1, Math.floor(((v - lo) / (hi - lo || 1)) * bins))]++;
  const w = 330, t = 120, most = Math.max(...counts), bw = (w - 10) / bins;
  const text = (x, y, s) => { const n = svg("text", { x, y }); n.textContent = s; return n; };
  return svg("svg", { width: w, height: t, role: "img", "aria-label": "rewards" }, counts.map((c, i) => svg("rect", { x: 4 + i * bw, y: t - 18 - (c / most) * (t - 34), width: Math.max(1, bw - 1), height: (c / most) * (t - 34), class: "hb" })),
    text(2, t - 4, fix(lo)), text(w - 34, t - 4, fix(hi)), text(2, 10, "most: " + most));
}
function rewardColour(r, lo, hi) {
  const x = hi > lo ? (r - lo) / (hi - lo) : 1;
  return `rgb(${Math.round(240 - 232 * x)},${Math.round(242 - 150 * x)},${Math.round(246 - 66 * x)})`;
}

// ---- pages
function bar(left, keys) {
  return h("header", {}, left, h("span", { class: "keys" }, keys), h("button", { onclick: toggleTheme, title: "light or dark (t)" }, "◐"), h("button", { onclick: help, title: "keys (?)" }, "?"));
}
function pageRuns() {
  const rows = runs.map((run, r) => ({ run, r })).filter(({ run }) => matches(run.id + " " + run.model + " " + run.envs.join(" ") + " " + run.kind));
  const body = h("main", {}, h("div", { class: "tools" }, filterBox(render), h("span", { class: "dim" }, "tick two runs to compare them"),
    state.picked.size === 2 && h("button", { onclick: () => go("#/compare/" + [...state.picked].sort((a, b) => a - b).join("/")) }, "compare")),
    h("table", {}, h("tr", {}, ["", "run", "environment", "model", "episodes", "reward", "", "status", "made"].map((x) => h("th", {}, x))),
      rows.map(({ run, r }) => h("tr", { class: "row" }, h("td", {}, h("input", { type: "checkbox", checked: state.picked.has(r), "aria-label": "compare " + run.id, onchange: () => { state.picked.has(r) ? state.picked.delete(r) : state.picked.add(r); if (state.picked.size > 2) state.picked.delete([...state.picked][0]); render(); } })),
        h("td", {}, h("a", { href: "#/r/" + r }, run.id)), h("td", {}, safe(run.envs.join(", "))), h("td", {}, safe(run.model)),
        h("td", { class: "num" }, run.expected && run.expected !== run.episodes.length ? run.episodes.length + "/" + run.expected : run.episodes.length),
        h("td", { class: "num" }, run.report.reward ? fix(run.report.reward.mean, 3) : "–"), h("td", {}, spark(rewardSeries(run))),
        h("td", {}, run.status), h("td", { class: "dim" }, run.created.slice(0, 16).replace("T", " "))))),
    !runs.length && h("p", { class: "dim" }, "There are no runs yet: agentenv eval makes one."));
  put(root, bar([h("b", {}, "runs"), h("span", { class: "sub" }, runs.length + " runs")], "/ filter · ? keys"), body);
}
function rewardSeries(run) {
  const series = run.metrics.map((m) => m.reward ?? m["reward/mean"]).filter((x) => typeof x === "number");
  if (series.length > 1) return series;
  const rewards = run.episodes.map((e) => e.r).filter((x) => x !== null), size = Math.max(1, Math.ceil(rewards.length / 24)), out = [];
  for (let i = 0; i < rewards.length; i += size) out.push(mean(rewards.slice(i, i + size)));
  return out;
}
function filterBox(again) {
  return h("input", { id: "filter", type: "search", placeholder: "filter: words, stop:max_turns, reward<0.5, tool:calc, error:…", value: state.filter,
    oninput: (event) => { state.filter = event.target.value; again(); const box = document.getElementById("filter"); box.focus(); box.setSelectionRange(99, 99); } });
}
const matches = (text) => state.filter.toLowerCase().split(/\s+/).filter(Boolean).every((word) => text.toLowerCase().includes(word));
function episodeMatches(e) {
  return state.filter.split(/\s+/).filter(Boolean).every((word) => {
    let m;
    if ((m = /^reward([<>=])(-?[\d.]+)$/.exec(word))) return e.r !== null && (m[1] === "<" ? e.r < +m[2] : m[1] === ">" ? e.r > +m[2] : e.r === +m[2]);
    if ((m = /^stop:(.*)$/.exec(word))) return e.s.startsWith(m[1]);
    if ((m = /^tool:(.*)$/.exec(word))) return e.T.some((t) => t[0].startsWith(m[1]));
    if ((m = /^error:(.*)$/.exec(word))) return e.x.toLowerCase().includes(m[1].toLowerCase()) || e.T.some((t) => t[2] && (t[2] + " " + t[3]).toLowerCase().includes(m[1].toLowerCase()));
    return (e.k + " " + e.g + " " + e.e + " " + e.s + " " + e.x + " " + e.A).toLowerCase().includes(word.toLowerCase());
  });
}
const SORTS = { place: (e) => e.i, task: (e) => e.k, member: (e) => e.m, reward: (e) => e.r ?? -Infinity, stop: (e) => e.s, turns: (e) => e.n, tokens: (e) => e.t, time: (e) => e.q ?? 0 };
function ordered(run) {
  const key = SORTS[state.sort] || SORTS.place, sgn = state.desc ? -1 : 1;
  return run.episodes.filter(episodeMatches).sort((a, b) => (key(a) < key(b) ? -sgn : key(a) > key(b) ? sgn : a.i - b.i));
}
function virtualList(r, run) {
  const list = h("div", { class: "vlist", tabindex: 0 }), inner = h("div", { style: "position:relative" }), ROW = 28;
  const count = h("span", { class: "dim" });
  let shown = [];
  const paint = () => {
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 6), to = Math.min(shown.length, from + Math.ceil(460 / ROW) + 14);
    inner.replaceChildren(...shown.slice(from, to).map((e, n) => h("a", { class: "vrow", href: `#/r/${r}/e/${e.i}`, style: `top:${(from + n) * ROW}px` },
      h("span", { class: "dim" }, "#" + e.i), h("span", {}, safe(e.k)), h("span", {}, e.m), h("span", { class: "num" }, fix(e.r, 3)), h("span", {}, stopPill(e.s)), h("span", { class: "num" }, e.n), h("span", { class: "num" }, big(e.t)), h("span", { class: "num" }, secs(e.q)), h("span", { class: "dim" }, safe(e.x || e.A)))));
  };
  const fill = () => { shown = ordered(run); inner.style.height = shown.length * ROW + "px"; count.textContent = `${shown.length} of ${run.episodes.length}`; paint(); };
  list.append(inner);
  list.addEventListener("scroll", paint, { passive: true });
  const head = h("div", { class: "vhead" }, ["place", "task", "member", "reward", "stop", "turns", "tokens", "time"].map((name) => h("span", { role: "button", tabindex: 0, onclick: () => { state.desc = state.sort === name ? !state.desc : false; state.sort = name; fill(); } }, name)), h("span", {}, "answer or error"));
  fill();
  const filter = filterBox(fill);
  return [h("div", { class: "tools" }, filter, count), head, list];
}
function pageRun(r) {
  const run = runs[r], rep = run.report, rewards = run.episodes.map((e) => e.r).filter((x) => x !== null);
  if (!run.episodes.length && !run.metrics.length) {
    put(root, bar([h("a", { href: "#/" }, "runs"), h("b", {}, run.id)], ""), h("main", {}, h("p", { class: "dim" }, "This run has no finished episode yet" + (run.status === "running" ? "." : ": it was " + run.status + ".")), run.note && h("p", {}, safe(run.note))));
    return;
  }
  const card = (title, value, more) => h("div", { class: "card" }, h("div", { class: "dim" }, title), h("div", { class: "big" }, value), more && h("div", { class: "dim" }, more));
  const passes = Object.keys(rep.pass_at).map((k) => `@${k} ${fix(rep.pass_at[k])}`).join("  "), all = Object.keys(rep.pass_all).map((k) => `^${k} ${fix(rep.pass_all[k])}`).join("  ");
  const cards = h("div", { class: "cards" },
    card("reward", rep.reward ? fix(rep.reward.mean, 3) : "–", rep.reward && `95 % ${fix(rep.reward.low, 3)} to ${fix(rep.reward.high, 3)}`),
    card("episodes", `${run.episodes.length}${run.expected ? "/" + run.expected : ""}`, `${rep.num_tasks} tasks, ${rep.num_scored} scored`),
    card("pass@k", passes || "–", "pass" + (all || "^k –") + ` · at reward ≥ ${rep.success_at}`), rep.majority !== null && card("majority", fix(rep.majority), "most frequent answer passes"),
    card("groups", `${rep.num_groups_with_spread}/${rep.num_groups}`, "have reward spread"), card("tokens", big(rep.sampled_tokens), `sampled; ${big(rep.prompt_tokens)} read`), card("truncated", pct(rep.truncated_share), "cut by a limit"),
    rep.cost_usd !== null && card("cost", "$" + fix(rep.cost_usd, 4)));
  const most = Math.max(1, ...Object.values(rep.stop_reasons));
  const stops = h("table", {}, Object.entries(rep.stop_reasons).map(([stop, n]) => h("tr", { class: "row" }, h("td", {}, h("a", { href: "#/r/" + r, onclick: (ev) => { ev.preventDefault(); state.filter = "stop:" + stop; render(); document.querySelector(".vlist").scrollIntoView(); } }, stopPill(stop))), h("td", { style: "width:50%" }, h("div", { class: "bar" }, h("i", { class: "model", style: `width:${(100 * n) / most}%` }))), h("td", { class: "num" }, n))));
  const tools = h("table", {}, h("tr", {}, ["tool", "calls", "p50", "p95", "errors", "most frequent"].map((x) => h("th", {}, x))), rep.tools.map((t) => h("tr", {}, h("td", {}, safe(t.name)), h("td", { class: "num" }, t.num_calls), h("td", { class: "num" }, secs(t.p50_s)), h("td", { class: "num" }, secs(t.p95_s)), h("td", {}, Object.entries(t.errors).map(([k, n]) => `${k} ${n}`).join(", ")), h("td", { class: "dim" }, safe(t.example)))));
  const failures = h("table", {}, rep.errors.map((f) => h("tr", { class: "row" }, h("td", { class: "num" }, f.count + " ×"), h("td", {}, h("a", { href: "#/r/" + r, onclick: (ev) => { ev.preventDefault(); state.filter = "stop:" + (run.episodes.find((e) => e.x === f.error) || { s: "error" }).s; render(); } }, safe(f.error))))));
  const total = Object.values(rep.time_s).reduce((a, b) => a + b, 0);
  const times = h("table", {}, Object.entries(rep.time_s).sort((a, b) => b[1] - a[1]).map(([k, s]) => h("tr", {}, h("td", {}, k), h("td", { style: "width:50%" }, h("div", { class: "bar" }, h("i", { class: "model", style: `width:${(100 * s) / total}%` }))), h("td", { class: "num" }, pct(s / total)))));
  const curves = [...new Set(run.metrics.flatMap((m) => Object.keys(m)))].filter((k) => k !== "step").map((k) => curve(run.metrics, k)).filter(Boolean);
  put(root, bar([runs.length > 1 && h("a", { href: "#/" }, "runs"), h("b", {}, safe(run.envs.join(", ") || run.id)), h("span", { class: "sub" }, "run ", h("b", { style: "font-size:13px" }, run.id), safe(` · ${run.model} · seed ${run.seed} · ${run.status}`))], "/ filter · Enter open · ? keys"),
    h("main", {}, cards, rep.warnings.map((w) => h("div", { class: "warn" }, "! ", safe(w.replace(/: look at them with `agentenv view RUN`/, "")))), run.note && h("div", { class: "warn" }, safe(run.note)), run.damaged > 0 && h("div", { class: "warn" }, run.damaged + " damaged lines were left out"),
      curves.length > 0 && [h("h2", {}, "training"), h("div", { class: "cards" }, curves)],
      run.episodes.length > 0 && [h("div", { class: "two" }, h("section", {}, h("h2", {}, "rewards"), histogram(rewards), Object.keys(rep.rewards).length > 0 && h("p", { class: "dim" }, "means: ", safe(Object.entries(rep.rewards).map(([k, v]) => `${k} ${fix(v, 3)}`).join("   ")))), h("section", {}, h("h2", {}, "why episodes stopped"), stops),
        rep.tools.length > 0 && h("section", { class: "wide" }, h("h2", {}, "tools"), tools), total > 0 && h("section", {}, h("h2", {}, "time"), times), rep.errors.length > 0 && h("section", {}, h("h2", {}, "failures"), failures), h("section", {}, h("h2", {}, "task × episode"), heat(r, run))),
        h("h2", {}, "episodes"), virtualList(r, run)],
      h("details", {}, h("summary", {}, "configuration"), h("div", { class: "code" }, safe(JSON.stringify({ config: run.config, versions: run.versions }, null, 1))))));
}
function heat(r, run) {
  const tasks = new Map();
  for (const e of run.episodes) { const key = e.e + "\n" + e.k + "\n" + e.g; if (!tasks.has(key)) tasks.set(key, []); tasks.get(key).push(e); }
  const rewards = run.episodes.map((e) => e.r).filter((x) => x !== null), lo = Math.min(0, ...rewards), hi = Math.max(lo, ...rewards);
  const rows = [...tasks.values()], box = h("div", { class: "grid" });
  let at = 0;
  const more = () => { box.append(...rows.slice(at, at + 150).map((es) => h("div", {}, h("span", { title: es[0].k }, safe(es[0].k)), es.slice().sort((a, b) => a.m - b.m).map((e) => h("a", { href: `#/r/${r}/e/${e.i}`, title: `${e.k} #${e.m}: ${fix(e.r, 3)} ${e.s}`, "aria-label": `${e.k} ${e.m} ${fix(e.r, 2)}`, class: e.r === null ? "fail-cell" : "", style: e.r === null ? "" : `background:${rewardColour(e.r, lo, hi)};border:1px solid ${kindOf(e.s) === "cut" ? "var(--warnline)" : "var(--line)"}` }))))); at += 150; };
  more();
  box.addEventListener("scroll", () => { if (at < rows.length && box.scrollTop + box.clientHeight > box.scrollHeight - 200) more(); }, { passive: true });
  return [box, h("p", { class: "dim" }, `light ${fix(lo)} to dark ${fix(hi)} · amber edge: cut by a limit · hatched: no score`)];
}
function pageCompare(a, b) {
  const A = runs[a], B = runs[b], sums = (run) => { const out = new Map(); for (const e of run.episodes) if (e.r !== null) { const k = e.e + "\n" + e.k; out.set(k, [...(out.get(k) || []), e]); } return out; };
  const x = sums(A), y = sums(B), rows = [...x.keys()].filter((k) => y.has(k)).map((k) => ({ k, p: mean(x.get(k).map((e) => e.r)), q: mean(y.get(k).map((e) => e.r)), i: x.get(k)[0].i, j: y.get(k)[0].i })).sort((u, v) => u.q - u.p - (v.q - v.p));
  const d = rows.map((o) => o.q - o.p), better = d.filter((v) => v > 1e-9).length, worse = d.filter((v) => v < -1e-9).length;
  put(root, bar([h("a", { href: "#/" }, "runs"), h("b", {}, "compare"), h("span", { class: "sub" }, A.id + " → " + B.id)], ""), h("main", {}, rows.length ? h("p", {}, `mean ${fix(mean(rows.map((o) => o.p)), 3)} → ${fix(mean(rows.map((o) => o.q)), 3)} (${sign(mean(d))}) · ${better} tasks better · ${worse} worse · ${d.length - better - worse} same`) : h("p", { class: "dim" }, "the runs have no task in common"),
    h("p", { class: "dim" }, "Intervals: ", h("span", { class: "code" }, `agentenv diff ${A.id} ${B.id}`)),
    h("table", {}, h("tr", {}, ["task", A.id, B.id, "change"].map((t) => h("th", {}, t))), rows.slice(0, 2000).map((o) => h("tr", { class: "row" }, h("td", {}, safe(o.k.split("\n")[1])), h("td", {}, h("a", { href: `#/r/${a}/e/${o.i}` }, fix(o.p, 3))), h("td", {}, h("a", { href: `#/r/${b}/e/${o.j}` }, fix(o.q, 3))), h("td", { class: o.q > o.p ? "good" : o.q < o.p ? "bad" : "dim" }, (o.q > o.p ? "▲ " : o.q < o.p ? "▼ " : "") + sign(o.q - o.p)))))));
}

// ---- one episode, among its group
const groupOf = (run, e) => run.episodes.filter((o) => o.g === e.g && o.k === e.k && o.e === e.e).sort((a, b) => a.m - b.m);
function advantages(group) {
  const noted = group.filter((e) => e.a !== null);
  if (noted.length) return { of: (e) => e.a, text: "advantage: as the trainer used it" };
  const rs = group.filter((e) => e.r !== null && !FAILED.has(e.s)).map((e) => e.r);
  if (rs.length < 2) return { of: () => null, text: rs.length ? "one scored episode: no advantage" : "no scored episode" };
  const m = mean(rs), sd = Math.sqrt(rs.reduce((t, v) => t + (v - m) ** 2, 0) / (rs.length - 1));
  return { of: (e) => (e.r === null || sd === 0 ? (e.r === null ? null : 0) : (e.r - m) / sd), m, sd, text: `reward μ ${fix(m)} s ${fix(sd)} · advantage = (r−μ)/s, from the rewards` };
}
function cardsOf(r, run, group, chosen) {
  const longest = Math.max(1, ...group.map((e) => e.t)), adv = advantages(group);
  const cut = group.filter((e) => kindOf(e.s) === "cut").length;
  return h("nav", { class: "left" }, h("div", { class: "dim" }, adv.text), cut > 0 && h("div", {}, h("span", { class: "pill cut" }, `✂ ${cut} of ${group.length} truncated`)), adv.sd === 0 && h("div", { class: "warn" }, "no reward spread: this group gives no gradient"),
    group.map((e) => { const a = adv.of(e); return h("a", { class: "mem" + (e.i === chosen ? " on" : ""), href: `#/r/${r}/e/${e.i}`, "aria-current": e.i === chosen ? "true" : null }, h("div", { class: "top" }, h("span", {}, h("b", {}, "#" + e.m), h("span", { class: "dim" }, ` r ${fix(e.r)} · ${big(e.t)} tok`)), h("b", { class: a > 0 ? "good" : a < 0 ? "bad" : "dim" }, sign(a))),
      h("div", { class: "bar" }, e.p.map(([source, n]) => h("i", { class: source, style: `width:${(100 * n) / longest}%`, title: `${source} ${n}` }))), stopPill(e.s), e.u && !FAILED.has(e.s) && h("div", { class: "dim" }, "not trainable")); }));
}
function tokenTexts(span, vocab) {
  const decoder = new TextDecoder("utf-8");
  const out = span.ids.map((id, n) => { const piece = vocab[id]; if (piece === undefined) return decoder.decode(new Uint8Array(0)) + `⟨${id}⟩`; return decoder.decode(Uint8Array.from(piece, (c) => c.charCodeAt(0)), { stream: n < span.ids.length - 1 }); });
  return out;
}
function paintToken(text, info, span) {
  const cls = ["t"];
  let style = "";
  if (info.same) cls.push("same");
  if (span.s !== "model") cls.push("off");
  else if (state.tab === "logprob" || state.tab === "diff") style = `background:rgba(var(--heat),${(0.03 + 0.62 * Math.min(-info.lp / 6, 1)).toFixed(3)})`;
  else if (state.tab === "entropy" && info.en !== undefined) style = `background:rgba(var(--ent),${(0.03 + 0.6 * Math.min(info.en / 5, 1)).toFixed(3)})`;
  else if (state.tab === "ratio" && info.nl !== undefined) { const d = Math.max(-1, Math.min(1, (info.nl - info.lp) / 0.7)); style = `background:rgba(var(${d > 0 ? "--heat" : "--cool"}),${Math.abs(d * 0.7).toFixed(3)})`; }
  else if (state.tab === "mask") style = "background:rgba(var(--cool),.22)";
  if (/^<[|｜].*[|｜]>$|^<\/?[a-z_]+>$/i.test(text)) cls.push("ctl");
  if (state.search && text.toLowerCase().includes(state.search.toLowerCase())) cls.push("hit");
  const tip = span.s === "model" ? `logp ${fix(info.lp, 4)}  p ${fix(Math.exp(info.lp), 4)}` + (info.en !== undefined ? `  H ${fix(info.en, 3)}` : "") + (info.nl !== undefined ? `  ratio ${fix(Math.exp(info.nl - info.lp), 4)}` : "") : `mask 0 (not trained), ${span.s}`;
  const parts = text.split("\n"), kids = [];
  parts.forEach((part, n) => { if (n) kids.push("⏎\n"); kids.push(...safe(part)); });
  return h("span", { class: cls.join(" "), style, title: `${tip}  id ${info.id}` }, kids);
}
const watcher = new IntersectionObserver((entries) => { for (const one of entries) if (one.isIntersecting && one.target.fill) { one.target.fill(); one.target.fill = null; watcher.unobserve(one.target); } }, { rootMargin: "600px" });
function tokenBox(span, base, ep, seq, vocab, common) {
  const turn = ep.turns[span.t], pre = h("pre", {}), ann = ep.ann || {};
  const lp = span.lp || [], meanLp = lp.length ? mean(lp) : null;
  let title = span.s.toUpperCase();
  if (span.s === "model" || span.s === "other") title = "ASSISTANT · TURN " + (span.t + 1);
  else if (span.s === "env" && turn && turn.tool_calls.length) title = "TOOL " + turn.tool_calls.map((c) => `${c.name}(${c.arguments})`).join("  ");
  else if (span.s === "env") title = "ENVIRONMENT · AFTER TURN " + (span.t + 1);
  const ms = span.s === "env" && turn ? turn.tool_results.reduce((t, x) => t + x.duration_s, 0) : 0;
  const facts = `loss mask ${span.s === "model" ? 1 : 0} · ${span.ids.length} tokens` + (meanLp !== null ? ` · mean logp ${fix(meanLp)}` : "") + (span.v !== null ? ` · weights ${span.v}` : "") + (ms ? ` · ${secs(ms)}` : "") + (span.s === "other" ? " · sampled by another model" : "");
  const texts = tokenTexts(span, vocab), SIZE = 800;
  for (let from = 0; from < texts.length; from += SIZE) {
    const chunk = h("div", { class: "chunk", style: texts.length > SIZE ? `min-height:${Math.ceil(Math.min(SIZE, texts.length - from) / 12)}em` : "" });
    chunk.fill = () => { chunk.style.minHeight = ""; chunk.replaceChildren(...texts.slice(from, from + SIZE).flatMap((text, n) => { const k = from + n, at = base + k; const last = seq === ep.sequences.length - 1; const one = paintToken(text, { id: span.ids[k], lp: lp[k], en: last && ann.entropy ? ann.entropy[at] : undefined, nl: last && ann.new_logprobs ? ann.new_logprobs[at] : undefined, same: at < common }, span); return at === common && common > 0 ? [h("div", { class: "split" }, "↯ first token that differs"), one] : [one]; })); };
    if (texts.length <= SIZE) { chunk.fill(); chunk.fill = null; } else watcher.observe(chunk);
    pre.append(chunk);
  }
  const marks = span.s === "env" && turn ? turn.tool_results.flatMap((x) => [x.trimmed && h("div", { class: "warn", style: "margin:6px 9px" }, "✂ output of ", safe(x.name), ` was shortened to fit` + (x.full_chars ? `: ${big(x.full_chars)} characters in full` : "")), x.error_kind && h("div", { class: "warn", style: "margin:6px 9px" }, h("span", { class: "pill fail" }, "✕ " + x.error_kind), " ", safe(x.name))]) : [];
  return h("section", { class: "box " + span.s, "data-turn": span.t, id: `s${seq}-${base}` }, h("h4", {}, safe(title.length > 400 ? title.slice(0, 400) + "…" : title), h("span", {}, facts)), pre, marks);
}
function messageBoxes(ep) {
  return ep.messages.map((m) => h("section", { class: "box " + (m.role === "assistant" ? "model" : m.role === "tool" ? "env" : "prompt") }, h("h4", {}, m.role.toUpperCase(), h("span", {}, safe(m.name || ""))), m.reasoning_content && h("pre", { class: "dim", dir: "auto" }, safe(m.reasoning_content)), h("pre", { dir: "auto" }, safe(typeof m.content === "string" ? m.content : m.content ? JSON.stringify(m.content, null, 1) : "")), (m.tool_calls || []).map((c) => h("pre", {}, "→ ", h("b", {}, safe(c.function.name)), " ", safe(pretty(c.function.arguments))))));
}
function pretty(text) { try { return JSON.stringify(JSON.parse(text), null, 1); } catch { return text; } }
function rightOf(run, e, ep, group) {
  const row = (a, b, cls) => h("tr", {}, h("td", {}, a), h("td", { class: cls || "" }, b)), adv = advantages(group), a = adv.of(e);
  const seqs = ep.sequences, ids = seqs.flat().reduce((t, s) => t + s.ids.length, 0), lps = seqs.flat().filter((s) => s.s === "model").reduce((t, s) => t + (s.lp || []).length, 0), trained = seqs.flat().filter((s) => s.s === "model").reduce((t, s) => t + s.ids.length, 0), sampled = ep.turns.reduce((t, x) => t + x.num_tokens, 0), others = seqs.flat().filter((s) => s.s === "other").reduce((t, s) => t + s.ids.length, 0);
  const ok = lps === trained && ids === e.t && trained + others <= sampled, total = ep.timings.total_s;
  const where = `from agentenv.store import find_run\nepisode = find_run("${run.id.replace(/["\\]/g, "")}").load(${e.i})`;
  return h("aside", { class: "right" }, h("h3", {}, "Reward"), h("table", {}, Object.entries(e.R).map(([k, v]) => row(safe(k), fix(v, 3))), row(h("b", {}, "total"), h("b", {}, fix(e.r, 3))), row("group advantage", sign(a) || "–"), ep.turns.length > 1 && row("by turn", ep.turns.map((t) => fix(t.reward)).join("  "))),
    h("h3", {}, "Alignment"), seqs.length ? h("table", {}, row("token_ids", ids), row("loss_mask", ids), row("logprobs of sampled tokens", lps), row("trained tokens", `${trained} (${ids ? pct(trained / ids) : "–"})`), row("turns sampled", sampled), row("lengths agree", h("b", { class: ok ? "good" : "bad" }, ok ? "✓ yes" : "✕ no")), seqs.length > 1 && row("contexts", seqs.length)) : h("p", { class: "dim" }, "no tokens: the engine only speaks text"),
    h("h3", {}, "Time"), h("table", {}, Object.entries(ep.timings).map(([k, v]) => row(k.replace(/_s$/, ""), secs(v))), !total && !Object.keys(ep.timings).length && row("not recorded", "")),
    h("h3", {}, "Why it stopped"), h("div", {}, stopPill(e.s)), ep.error && h("div", { class: "code" }, safe(`${ep.error.boundary}: ${ep.error.type}: ${ep.error.message}`)), ep.error && ep.error.traceback && h("details", {}, h("summary", {}, "traceback"), h("div", { class: "code" }, safe(ep.error.traceback))), e.u && h("p", { class: "dim" }, "not trainable: ", safe(e.u)),
    h("h3", {}, "Task"), h("div", { class: "code" }, safe(clip(JSON.stringify(ep.task, null, 1), 3000))), Object.keys(ep.metrics).length > 0 && [h("h3", {}, "Metrics"), h("table", {}, Object.entries(ep.metrics).map(([k, v]) => row(safe(k), Number.isInteger(v) ? v : fix(v, 3))))],
    h("h3", {}, "Reproduce"), h("div", { class: "code" }, `agentenv replay ${run.id}#${e.i}`), h("div", { class: "code" }, where), h("div", { class: "tools" }, h("button", { onclick: () => copy(JSON.stringify(ep, null, 1)) }, "copy JSON"), h("button", { onclick: () => copy(where) }, "copy Python")));
}
const clip = (text, n) => (text && text.length > n ? text.slice(0, n) + " …" : text || "");
function copy(text) {
  const area = h("textarea", { style: "position:fixed;opacity:0" });
  area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
}
let showing = null;
async function pageEpisode(r, i) {
  const run = runs[r], e = run.episodes[i];
  if (!e) { put(root, bar([h("a", { href: "#/r/" + r }, run.id)], ""), h("main", {}, "there is no such episode")); return; }
  const group = groupOf(run, e), ticket = (showing = {}), ep = await payload(r, i);
  if (ticket !== showing) return;
  const left = cardsOf(r, run, group, i);
  const head = bar([h("a", { href: "#/r/" + r }, run.id), h("b", {}, safe(e.e)), h("span", { class: "sub" }, safe(`task ${e.k} · group ${e.g} · ${group.length} episodes`)), ], "← → episode · j k turn · m mask · e entropy · d diff · / search");
  const centre = h("article", { class: "centre", tabindex: -1 });
  const tabs = ["logprob", "entropy", "mask", "ratio", "diff", "messages", "raw json"];
  const has = { entropy: ep && ep.ann && ep.ann.entropy, ratio: ep && ep.ann && ep.ann.new_logprobs, diff: group.length > 1 };
  const paint = async () => {
    const buttons = h("div", { class: "tabs", role: "tablist" }, tabs.map((name) => h("button", { class: state.tab === name ? "on" : "", role: "tab", "aria-selected": String(state.tab === name), disabled: has[name] === undefined ? false : !has[name], title: name in has && !has[name] ? (name === "diff" ? "the group has one episode" : "the trainer noted none for this episode") : "", onclick: () => { state.tab = name; paint(); } }, name)), state.search && h("span", { class: "pill cut" }, "search: " + state.search));
    if (!ep) { put(centre, buttons, h("p", { class: "dim" }, "This page holds only a part of the run's episodes, and not this one. Make one with it: "), h("div", { class: "code" }, `agentenv view ${run.id}#${i}`)); return; }
    let common = -1;
    if (state.tab === "diff" && group.length > 1) {
      const other = group.find((o) => o.i !== i), b = await payload(r, other.i);
      if (b) { const p = ep.sequences.flat().flatMap((s) => s.ids), q = b.sequences.flat().flatMap((s) => s.ids); common = 0; while (common < p.length && common < q.length && p[common] === q[common]) common++; }
    }
    if (state.tab === "messages" || (!ep.sequences.length && state.tab !== "raw json")) put(centre, buttons, ...messageBoxes(ep));
    else if (state.tab === "raw json") { const text = JSON.stringify(ep, null, 1); put(centre, buttons, h("div", { class: "box raw" }, safe(clip(text, 400000)))); }
    else put(centre, buttons, ...ep.sequences.flatMap((spans, seq) => { let base = 0; const boxes = spans.map((span) => { const box = tokenBox(span, base, ep, seq, run.vocab, seq === ep.sequences.length - 1 ? common : -1); base += span.ids.length; return box; }); return ep.sequences.length > 1 ? [h("h2", {}, `context ${seq + 1} of ${ep.sequences.length}`), ...boxes] : boxes; }), !ENDED.has(e.s) && h("div", { class: "warn" }, FAILED.has(e.s) ? "✕ " : "✂ ", "the episode ended here: ", h("b", {}, e.s), ` (terminated ${ENDED.has(e.s)}, truncated ${kindOf(e.s) === "cut"})`));
  };
  await paint();
  if (ticket !== showing) return;
  const grid = h("div", { class: "ep" }, left, centre, ep ? rightOf(run, e, ep, group) : h("aside", { class: "right" }));
  put(root, head, grid);
  state.repaint = paint;
  const on = left.querySelector(".on");
  if (on) on.scrollIntoView({ block: "nearest" });
}

// ---- moving about
function go(hash) { location.hash = hash; }
function parts() { return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean); }
function render() {
  const [kind, a, b, c] = parts();
  state.turn = -1; state.repaint = null; showing = null;
  if (kind === "r" && runs[+a] && b === "e") return pageEpisode(+a, +c);
  if (kind === "r" && runs[+a]) return pageRun(+a);
  if (kind === "compare" && runs[+a] && runs[+b]) return pageCompare(+a, +b);
  return runs.length === 1 && page.single ? (!page.live && runs[0].episodes.length === 1 && !runs[0].metrics.length ? pageEpisode(0, 0) : pageRun(0)) : pageRuns();
}
function toggleTheme() {
  const now = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = now;
  try { localStorage.setItem("agentenv-theme", now); } catch { /* file pages may have no storage */ }
}
function help() {
  const keys = [["← →", "previous, next episode"], ["j k", "next, previous turn"], ["l m e r d", "colours: logprob, mask, entropy, ratio, difference"], ["s", "messages"], ["/", "filter, or search in an episode"], ["u", "up"], ["c", "copy the episode as JSON"], ["t", "light or dark"], ["Esc", "clear"]];
  const box = h("dialog", {}, h("table", {}, keys.map(([k, v]) => h("tr", {}, h("td", {}, h("b", {}, k)), h("td", {}, v)))), h("form", { method: "dialog" }, h("button", {}, "close")));
  document.body.append(box); box.showModal(); box.addEventListener("close", () => box.remove());
}
function step(delta) {
  const [, a, b, c] = parts();
  const run = runs[+a] || runs[0], at = b === "e" ? +c : 0, list = ordered(run), here = list.findIndex((e) => e.i === at);
  const next = list[Math.max(0, Math.min(list.length - 1, (here < 0 ? 0 : here) + delta))];
  if (next) go(`#/r/${runs.indexOf(run)}/e/${next.i}`);
}
function turnBy(delta) {
  const boxes = [...document.querySelectorAll(".centre .box")];
  if (!boxes.length) return;
  state.turn = Math.max(0, Math.min(boxes.length - 1, state.turn + delta));
  boxes.forEach((box, n) => box.classList.toggle("now", n === state.turn));
  boxes[state.turn].scrollIntoView({ block: "start", behavior: "instant" });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName), episode = parts()[2] === "e" || !!document.querySelector(".ep");
  if (event.key === "Escape") { if (typing) event.target.blur(); state.search = ""; if (state.filter) { state.filter = ""; render(); } else if (state.repaint) state.repaint(); return; }
  if (typing) return;
  const tab = { l: "logprob", m: "mask", e: "entropy", r: "ratio", d: "diff", s: "messages" }[event.key];
  if (tab && episode) { state.tab = tab; if (state.repaint) state.repaint(); }
  else if (event.key === "ArrowRight" || event.key === "ArrowLeft") { if (episode) step(event.key === "ArrowRight" ? 1 : -1); else return; }
  else if (event.key === "j" || event.key === "k") turnBy(event.key === "j" ? 1 : -1);
  else if (event.key === "t") toggleTheme();
  else if (event.key === "?") help();
  else if (event.key === "u") go(episode && parts()[0] === "r" ? "#/r/" + parts()[1] : "#/");
  else if (event.key === "c" && episode) { const buttons = [...document.querySelectorAll(".right button")]; if (buttons[0]) buttons[0].click(); }
  else if (event.key === "/") { if (episode) { const text = prompt("search in this episode", state.search); if (text !== null) { state.search = text; if (state.repaint) state.repaint().then(() => { const hit = document.querySelector(".hit"); if (hit) hit.scrollIntoView({ block: "center" }); }); } } else { const box = document.getElementById("filter"); if (box) box.focus(); } }
  else if (event.key === "Enter" && !episode) { const first = document.querySelector(".vrow"); if (first) first.click(); return; }
  else return;
  event.preventDefault();
});
window.addEventListener("hashchange", render);
try { const kept = localStorage.getItem("agentenv-theme"); document.documentElement.dataset.theme = kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"); } catch { document.documentElement.dataset.theme = "light"; }
if (page.sort) { state.sort = page.sort; }
if (page.live && window.EventSource) {
  const source = new EventSource("events?page=" + page.number);
  source.onmessage = (event) => {
    const news = JSON.parse(event.data), place = runs.findIndex((run) => run.id === news.id);
    if (place < 0) runs.unshift(news); else { news.vocab = { ...runs[place].vocab, ...news.vocab }; runs[place] = news; }
    const box = document.activeElement;
    if (!document.querySelector(".ep") && !(box && box.id === "filter")) { const top = document.scrollingElement.scrollTop, list = document.querySelector(".vlist"), inner = list ? list.scrollTop : 0; render(); document.scrollingElement.scrollTop = top; const again = document.querySelector(".vlist"); if (again) again.scrollTop = inner; }
  };
}
render();
})();
