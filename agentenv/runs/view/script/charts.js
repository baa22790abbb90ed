// Charts: the sparkline, the metric curve, the histogram, and the colour of a reward.

const path = (points) =>
  points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// Returns a scale from the range of some values to pixels; if all values are equal, they map to the middle.
function scale(values, from, to) {
  const low = lowest(values);
  const high = highest(values);
  const at = (v) => (high > low ? from + ((v - low) / (high - low)) * (to - from) : (from + to) / 2);
  return { low, high, at };
}

function spark(values) {
  const known = values.filter(there);
  if (known.length < 2) return span("dim", known.length ? fix(known[0]) : "–");
  const y = scale(known, 20, 2);
  const d = path(known.map((v, n) => [(n * 120) / (known.length - 1), y.at(v)]));
  const label = `from ${fix(known[0])} to ${fix(known[known.length - 1])}`;
  return svg(
    "svg",
    { width: 120, height: 22, role: "img", "aria-label": label },
    svg("path", { d, class: "line" }),
  );
}

function curve(rows, key) {
  const points = rows
    .map((m, n) => [m.step ?? n + 1, m[key]])
    .filter((point) => typeof point[1] === "number");
  if (!points.length) return null;
  const width = 300;
  const height = 110;
  const x = scale(
    points.map((p) => p[0]),
    50,
    width - 8,
  );
  const y = scale(
    points.map((p) => p[1]),
    height - 20,
    10,
  );
  const last = points[points.length - 1];
  return div(
    "card chart",
    div("top", h("b", {}, key), span("dim", "last " + short(last[1]))),
    svg(
      "svg",
      { width, height, role: "img", "aria-label": `${key}, last ${short(last[1])}` },
      svg("line", { x1: 50, x2: width - 8, y1: height - 16, y2: height - 16, class: "axis" }),
      y.high > y.low && svgText(0, 14, short(y.high)),
      svgText(0, y.high > y.low ? height - 20 : height / 2 + 3, short(y.low)),
      svgText(50, height - 3, "step " + x.low),
      svg("text", { x: width - 8, y: height - 3, "text-anchor": "end" }, String(x.high)),
      svg("path", { class: "line", d: path(points.map((p) => [x.at(p[0]), y.at(p[1])])) }),
      svg("circle", { class: "dot", cx: x.at(last[0]), cy: y.at(last[1]), r: 2.5 }),
    ),
  );
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
  const part = [240 - 232 * x, 242 - 150 * x, 246 - 66 * x].map(Math.round);
  return { back: `rgb(${part.join(",")})`, ink: x > 0.8 ? "#fff" : "#111" };
}
