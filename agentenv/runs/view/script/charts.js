// Charts: the sparkline, the curves of trainings (drawn by uPlot), the histogram, and the colour of a reward.

const path = (points) =>
  points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// Returns a scale from the range of some values to pixels; if all values are equal, they map to the middle.
function scale(values, from, to) {
  const low = lowest(values);
  const high = highest(values);
  return (v) => (high > low ? from + ((v - low) / (high - low)) * (to - from) : (from + to) / 2);
}

function spark(values) {
  const known = values.filter(there);
  if (known.length < 2) return span("dim", known.length ? fix(known[0]) : "–");
  const y = scale(known, 20, 2);
  const d = path(known.map((v, n) => [(n * 120) / (known.length - 1), y(v)]));
  const label = `from ${fix(known[0])} to ${fix(known[known.length - 1])}`;
  return svg(
    "svg",
    { width: 120, height: 22, role: "img", "aria-label": label },
    svg("path", { d, class: "line" }),
  );
}

// What the lines of a training in the terminal call these metrics.
const WORDS = {
  "groups/frac_mixed": "spread",
  "clip_ratio/region_mean": "clip",
  grad_norm: "grad",
  "mismatch/abs_max": "gap max",
  "completions/clipped_ratio": "truncated",
  "eval/success": "held-out success",
  "time/rollout": "play",
  "time/wait": "wait",
  "time/update": "update",
};

// ---- curves: each has series of values by step, of one run or of several
const CHART_PX = 150;
const CLICK_PX = 4;
const STEPS_APART = [1, 2, 5]
  .flatMap((n) => [n, 10 * n, 100 * n, 1e3 * n, 1e4 * n, 1e5 * n])
  .sort((a, b) => a - b);
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [12, 5]];
const NUM_COLOURS = DASHES.length;
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const UNITS = [
  [/(^|\/)(time|step_time)|_s$/, "s"],
  [/entropy/, "nats"],
  [/length|tokens/, "tokens"],
  [/frac|ratio\/clip|clip_ratio|clipped|_rate$|share|success|pass@/, "share"],
  [/^(logprobs|mismatch|kl)/, "nats"],
];
const unitOf = (key) => (UNITS.find(([shape]) => shape.test(key)) || ["", ""])[1];

// The exponential moving average, without a pull of the first values towards 0.
function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (!there(value)) return null;
    sum = sum * weight + value * (1 - weight);
    mass = mass * weight + 1 - weight;
    return sum / mass;
  });
}

function seriesOf(run, key, number = 0) {
  const points = run.metrics
    .map((m, n) => [m.step ?? n + 1, m[key]])
    .filter(([step, value]) => Number.isFinite(step) && Number.isFinite(value))
    .sort((a, b) => a[0] - b[0]);
  return { name: run.id, number, xs: points.map(([x]) => x), ys: points.map(([, y]) => y) };
}

// The values of all series at the steps of any of them; null where a series has none.
function aligned(series) {
  const xs = [...new Set(series.flatMap((one) => one.xs))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, n) => [x, n]));
  const columns = series.map((one) => {
    const ys = Array(xs.length).fill(null);
    one.xs.forEach((x, n) => (ys[at.get(x)] = one.ys[n]));
    return ys;
  });
  return [xs, ...columns];
}

// The range of an axis; values that are all equal lie inside it, not on its edge.
function rangeOf(u, low, high) {
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [-0.1, 1] : [Math.min(0, 1.5 * low), Math.max(0, 1.5 * low)];
}

function plotOptions(size, series, isLog, told, onStep) {
  const [dim, line] = [cssColour("--dim"), cssColour("--line")];
  const axis = {
    stroke: dim,
    grid: { stroke: line, width: 1 },
    ticks: { stroke: line },
    font: "11px system-ui",
  };
  const drawn = series.map(({ number, faint, xs }) => ({
    stroke: cssColour(`--c${number % NUM_COLOURS}`),
    alpha: faint ? 0.3 : 1,
    width: faint ? 1 : 1.8,
    dash: DASHES[number % DASHES.length],
    spanGaps: true,
    points: { show: xs.length < 2, size: 5 },
  }));
  const listen = (u) => {
    let pressed = 0;
    u.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    u.over.addEventListener("click", (event) => {
      const moved = Math.abs(event.clientX - pressed);
      if (there(u.cursor.idx) && moved < CLICK_PX) onStep(u.data[0][u.cursor.idx]);
    });
  };
  return {
    ...size,
    legend: { show: false },
    cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: rangeOf } },
    axes: [
      {
        ...axis,
        size: 28,
        incrs: STEPS_APART,
        values: (u, ticks) => ticks.map((tick, n) => (n ? tick : "step " + tick)),
      },
      { ...axis, size: 56, values: (u, ticks) => ticks.map((tick) => (there(tick) ? short(tick) : "")) },
    ],
    series: [{}, ...drawn],
    hooks: { setCursor: [(u) => told(u.cursor.idx)], ready: onStep ? [listen] : [] },
  };
}

const lastOf = (values) => values.findLast(there);

// What stands at the right of a chart's head: the values under the pointer, or else the last ones.
function reading(series, data, index) {
  const at = there(index) ? `step ${data[0][index]}` : "last";
  const values = series
    .map((one, n) => [one, there(index) ? data[n + 1][index] : lastOf(data[n + 1])])
    .filter(([one, value]) => !one.faint && there(value));
  const several = values.length > 1;
  const words = values.map(([one, value]) =>
    h(
      "span",
      { style: several ? `color:var(--c${one.number % NUM_COLOURS})` : "" },
      ` ${one.label || ""}${short(value)}`,
    ),
  );
  return [at, words];
}

function curveCard(title, series, { onStep, unit = unitOf(title) } = {}) {
  const full = series.filter((one) => one.xs.length);
  if (!full.length) return null;
  const isLog = state.log && full.some((one) => one.ys.some((y) => y > 0));
  const clean = full.map((one) => ({ ...one, ys: isLog ? one.ys.map((y) => (y > 0 ? y : null)) : one.ys }));
  const weight = state.smooth;
  const drawn =
    weight > 0
      ? [
          ...clean.map((one) => ({ ...one, faint: true })),
          ...clean.map((one) => ({ ...one, ys: smoothed(one.ys, weight) })),
        ]
      : clean;
  const data = aligned(drawn);
  const told = span("dim");
  const tell = (index) => put(told, reading(drawn, data, index));
  tell(null);
  const label = `${title}, last ${full.map((one) => short(lastOf(one.ys))).join(", ")}`;
  const place = h("div", { class: "plot", role: "img", "aria-label": label });
  let plot = null;
  const fit = new ResizeObserver(([{ contentRect }]) => {
    const size = { width: Math.floor(contentRect.width), height: CHART_PX };
    if (size.width < 50) return;
    if (plot) plot.setSize(size);
    else plot = new uPlot(plotOptions(size, drawn, isLog, tell, onStep), data, place);
  });
  fit.observe(place);
  const name = h("b", { title }, safe(WORDS[title] || title));
  return div("card chart", div("top", span("", name, unit && span("dim", " " + unit)), told), place);
}

// ---- how the curves are drawn: smoothing and scale, for all charts of the page
function stepChooser(found, onStep) {
  const steps = onStep ? [...new Set(found[0].metrics.map((m, n) => m.step ?? n + 1))] : [];
  if (!steps.length) return null;
  const options = ["open a step", ...steps].map((step) => h("option", { value: step }, String(step)));
  const onchange = (event) => event.target.value && onStep(+event.target.value);
  return h("select", { "aria-label": "open a step", onchange }, options);
}

function curveControls(again, found, onStep) {
  const smooth = h("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: state.smooth,
    onchange: (event) => again((state.smooth = +event.target.value)),
  });
  const log = h("input", {
    type: "checkbox",
    checked: state.log,
    onchange: (event) => again((state.log = event.target.checked)),
  });
  return div(
    "tools dim",
    h("label", {}, "smoothing ", smooth),
    h("label", {}, log, " logarithmic"),
    stepChooser(found, onStep),
    span("", onStep ? "click a step for its episodes, " : "", "drag to zoom, double-click for all"),
  );
}

// What a training is for. All other curves are behind a click: these of its inside, the others by the first
// part of their name, and those that never change.
const FIRST_CURVES = ["eval/success", "reward"];
const INSIDE_CURVES = [
  "groups/frac_mixed",
  "entropy",
  "kl",
  "clip_ratio/region_mean",
  "grad_norm",
  "mismatch/abs_max",
  "staleness/mean",
  "staleness/max",
  "weights_version",
  "completions/mean_length",
  "completions/clipped_ratio",
  "tools/call_frequency",
  "tokens/trained",
  "step_time",
];

const metricNames = (found) =>
  [...new Set(found.flatMap((run) => run.metrics.flatMap(Object.keys)))].filter((key) => key !== "step");

function curveFold([title, keys, draw]) {
  const box = h("details", {}, h("summary", {}, `${title} (${keys.length})`));
  box.addEventListener("toggle", () => box.open && box.children.length === 1 && box.append(draw(keys)));
  return box;
}

function legend(found) {
  if (found.length < 2) return null;
  const mark = (n) => {
    const dash = DASHES[n % DASHES.length].join(" ");
    const line = {
      x1: 0,
      x2: 26,
      y1: 6,
      y2: 6,
      style: `stroke:var(--c${n % NUM_COLOURS})`,
      "stroke-dasharray": dash,
    };
    return svg("svg", { width: 28, height: 12, class: "swatch" }, svg("line", line));
  };
  return div(
    "tools",
    found.map((run, n) => span("", mark(n), " ", link("#/r/" + idOf(runs.indexOf(run)), run.id))),
  );
}

// Whether a curve has the same value at every step of each run.
function isFlat(found, key) {
  const curves = found.map((run) => seriesOf(run, key).ys).filter((ys) => ys.length);
  return curves.every((ys) => ys.length > 1 && ys.every((y) => y === ys[0]));
}

// The curves of one run, or of several over each other; `inside` are further cards of the training's inside.
function curveSection(found, onStep, inside = () => []) {
  const keys = metricNames(found);
  if (!keys.length) return null;
  const box = div("");
  const cardOf = (key) =>
    curveCard(
      key,
      found.map((run, n) => seriesOf(run, key, n)),
      { onStep },
    );
  const draw = (names) => div("charts", names.map(cardOf));
  const chosen = FIRST_CURVES.filter((key) => keys.includes(key));
  const main = chosen.length ? chosen : keys;
  const flat = keys.filter((key) => !main.includes(key) && isFlat(found, key)).sort();
  const moving = keys.filter((key) => !main.includes(key) && !flat.includes(key)).sort();
  const folds = [];
  const fold = (title, names, drawn = draw) => names.length && folds.push([title, names, drawn]);
  const within = INSIDE_CURVES.filter((key) => moving.includes(key));
  fold("inside the training", within, (names) => div("charts", inside(), names.map(cardOf)));
  const rest = groupedBy(
    moving.filter((key) => !within.includes(key)),
    (key) => key.split("/")[0],
  );
  const singles = [...rest].filter(([, names]) => names.length === 1).flatMap(([, names]) => names);
  for (const [title, names] of rest) if (names.length > 1) fold(title, names);
  fold("others", singles);
  fold("flat", flat);
  const again = () => {
    const open = [...box.querySelectorAll("details[open] > summary")].map((one) => one.textContent);
    put(box, div("charts", main.map(cardOf)), div("folds", folds.map(curveFold)));
    for (const one of box.querySelectorAll("details"))
      one.open = open.includes(one.querySelector("summary").textContent);
  };
  again();
  state.recolour = again;
  return h("section", {}, h("h2", {}, "training"), legend(found), curveControls(again, found, onStep), box);
}

const BINS = 20;

// The columns go from 0 to the best reward that is known, in all runs alike; a click filters by a column.
function histogram(values, { low, high }) {
  if (!values.length) return h("p", { class: "dim" }, "no episode has a reward");
  const size = (high - low || 1) / BINS;
  const counts = Array(BINS).fill(0);
  for (const v of values) counts[Math.max(0, Math.min(BINS - 1, Math.floor((v - low) / size + 1e-9)))]++;
  const most = Math.max(...counts);
  const column = (count, n) => {
    const [from, to] = [low + n * size, low + (n + 1) * size].map((x) => +x.toPrecision(6));
    const last = n === BINS - 1;
    const title = `${count} episodes with a reward of ${from} to ${to}`;
    const onclick = () => filterBy(`reward>=${from}` + (last ? "" : ` reward<${to}`));
    const bar = h("i", { style: `height:${count ? Math.max(2, (100 * count) / most) : 0}%` });
    return h("button", { class: "column", title, "aria-label": title, disabled: !count, onclick }, bar);
  };
  const half = (low + high) / 2;
  return div(
    "histogram",
    div("dim", `most in a column: ${most} episodes`),
    div("columns", counts.map(column)),
    div("ends dim", span("", fix(low)), span("", fix(half)), span("", fix(high))),
  );
}

// From light to dark blue, so that the order is visible without colour vision too.
function rewardColour(r, low, high) {
  const x = high > low ? Math.max(0, Math.min(1, (r - low) / (high - low))) : 0;
  const back = `color-mix(in srgb, var(--most) ${Math.round(100 * x)}%, var(--least))`;
  return { back, ink: `var(--on-${x > 0.8 ? "most" : x > 0.45 ? "middle" : "least"})` };
}
