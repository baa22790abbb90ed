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

function histogram(values) {
  if (!values.length) return h("p", { class: "dim" }, "no episode has a reward");
  const low = lowest(values);
  const high = highest(values);
  const bins = high > low ? 20 : 1;
  const counts = Array(bins).fill(0);
  for (const v of values) counts[Math.min(bins - 1, Math.floor(((v - low) / (high - low || 1)) * bins))]++;
  const most = Math.max(...counts);
  const wide = 320 / Math.max(bins, 4);
  const bars = counts.map((count, n) =>
    svg("rect", {
      x: 4 + n * wide,
      y: 102 - (count / most) * 86,
      width: wide - 1,
      height: (count / most) * 86,
      class: "column",
    }),
  );
  return svg(
    "svg",
    { width: 330, height: 120, role: "img", "aria-label": `rewards from ${fix(low)} to ${fix(high)}` },
    bars,
    svgText(4, 116, fix(low)),
    bins > 1 && svg("text", { x: 324, y: 116, "text-anchor": "end" }, fix(high)),
    svgText(4, 10, `at most ${most} episodes`),
  );
}

// From light to dark blue, so that the order is visible without colour vision too.
function rewardColour(r, low, high) {
  const x = high > low ? (r - low) / (high - low) : 1;
  return `rgb(${Math.round(240 - 232 * x)},${Math.round(242 - 150 * x)},${Math.round(246 - 66 * x)})`;
}
