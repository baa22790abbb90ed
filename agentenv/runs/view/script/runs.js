// The pages of several runs: the list, and the comparison of two runs.

// The reward curve of a training; an evaluation has one policy, and so no curve.
const rewardSeries = (run) =>
  run.metrics.map((m) => m.reward ?? m["reward/mean"]).filter((x) => typeof x === "number");

function pick(r) {
  if (!state.picked.delete(r)) state.picked.add(r);
  if (state.picked.size > NUM_COLOURS) state.picked.delete([...state.picked][0]);
  render();
}

// A training's reward is that of its last step.
const termsOf = (run) => safe([...(lastReport(run) ? ["the last step"] : []), ...run.report.terms].join(" · "));

const stepsOf = (run) => highest(run.metrics.map((m, n) => m.step ?? n + 1));

// Seconds from the start of a run to its end, or until now; null if nobody recorded its end.
function lasted(run) {
  const end = run.closed ? Date.parse(run.closed) : run.status === "running" ? Date.now() : NaN;
  const s = (end - Date.parse(run.created)) / 1000;
  return s >= 0 ? s : null;
}

function pickBox(run, r) {
  const name = "compare " + run.id;
  const onchange = () => pick(r);
  return h("input", { type: "checkbox", checked: state.picked.has(r), "aria-label": name, onchange });
}

function episodesOf(run) {
  const done = run.episodes.length;
  return run.expected && run.expected !== done ? `${done}/${run.expected}` : done;
}

// The columns of the list of runs: the head (in brackets over numbers), the least width of the window that
// has the column, and the cell.
const RUN_COLUMNS = [
  ["", 0, pickBox],
  ["run", 0, (run, r) => link("#/r/" + idOf(r), run.id)],
  ["kind", 1000, (run) => run.kind],
  ["environment", 700, (run) => safe(run.envs.join(", "))],
  ["model", 700, (run) => safe(run.model)],
  [["episodes"], 700, (run) => num(episodesOf(run))],
  [["steps"], 1000, (run) => num(run.metrics.length ? stepsOf(run) : "")],
  [["reward"], 0, (run) => num(headline(run) ? fix(headline(run).mean, 3) : "–")],
  ["95 %", 500, (run) => span("num dim", headline(run) ? limits(headline(run)) : "")],
  ["curve", 1000, (run) => (run.metrics.length ? spark(rewardSeries(run)) : "")],
  [["duration"], 1000, (run) => num(there(lasted(run)) ? duration(lasted(run)) : "–")],
  ["status", 0, (run) => run.status],
  ["terms of the reward", 1400, (run) => span("dim", termsOf(run))],
  ["made", 900, (run) => span("dim num", run.created.slice(0, 16).replace("T", " "))],
];

// The order of two runs in time; changes are shown from the older one to the newer one.
const older = (a, b) => (a.created + a.id < b.created + b.id ? -1 : 1);

function pageRuns() {
  const rows = div("scroll");
  const columns = RUN_COLUMNS.filter(([, width]) => innerWidth >= width);
  const refill = () => {
    const about = (run) => [run.id, run.model, run.kind, ...run.envs].join(" ");
    const shown = runs.map((run, r) => [run, r]).filter(([run]) => matches(about(run)));
    shown.sort(([a], [b]) => older(b, a));
    const lines = shown.map(([run, r]) => row(columns.map(([, , cell]) => cell(run, r))));
    put(
      rows,
      table(
        columns.map(([name]) => name),
        lines,
      ),
    );
  };
  const both = [...state.picked].sort((a, b) => older(runs[a], runs[b]));
  const compare =
    both.length > 1 &&
    h("button", { onclick: () => go("#/compare/" + both.map(idOf).join("/")) }, `compare ${both.length}`);
  const none = !runs.length && h("p", { class: "dim" }, "There are no runs yet; agentenv eval makes one.");
  refill();
  put(
    root,
    head([h("b", {}, "runs"), span("sub", counted(runs.length, "run"))], "/ filter · ? keys"),
    h(
      "main",
      {},
      div(
        "tools",
        filterBox(refill, "filter: words of the run, its model or environment"),
        span("dim", "select runs to compare them"),
        compare,
      ),
      rows,
      none,
    ),
  );
}

// ---- the comparison of two runs
function scoredByTask(run) {
  const found = new Map();
  for (const e of run.episodes) {
    const key = e.e + "\n" + e.k;
    if (e.r !== null) found.set(key, [...(found.get(key) || []), e]);
  }
  return found;
}

function pairs(before, after) {
  const left = scoredByTask(before);
  const right = scoredByTask(after);
  const of = (found) => mean(found.map((e) => e.r));
  const both = [...left.keys()].filter((key) => right.has(key));
  const rows = both.map((key) => {
    const [ours, theirs] = [left.get(key), right.get(key)];
    const [task, title] = [taskName(before, ours[0]), taskTitle(before, ours[0])];
    return { task, title, p: of(ours), q: of(theirs), i: ours[0].i, j: theirs[0].i };
  });
  return rows.sort((a, b) => a.q - a.p - (b.q - b.p));
}

// A run without what its trainer was shown and tested on.
const results = (run) => ({ ...run, episodes: run.episodes.filter((e) => !e.o) });

function changeCell(change) {
  const kind = change > 0 ? "good" : change < 0 ? "bad" : "dim";
  const mark = change > 0 ? "▲ " : change < 0 ? "▼ " : "";
  return h("td", { class: "num " + kind }, mark + sign(change));
}

function differenceCard(changes) {
  const found = bootstrapMean(changes);
  const limits = `95 % ${sign(found.low)} to ${sign(found.high)}, paired over ${counted(changes.length, "task")}`;
  return card("change of the mean reward", sign(found.mean), limits);
}

function sideLink(left, right) {
  const href = "#/side/" + [left, right].map(([r, i]) => `${idOf(r)}/${i}`).join("/");
  return h("a", { href, "aria-label": "side by side" }, innerWidth < 500 ? "⇄" : "side by side");
}

// What changed from one run to another, or from one step to another: `at` are the indexes of their runs.
function comparison(before, after, { names, at }) {
  const found = pairs(before, after);
  const changes = found.map((pair) => pair.q - pair.p);
  const better = changes.filter((change) => change > 1e-9).length;
  const worse = changes.filter((change) => change < -1e-9).length;
  const same = changes.length - better - worse;
  if (!found.length) return h("p", {}, "They have no task in common.");
  const means = [found.map((one) => one.p), found.map((one) => one.q)].map((values) => fix(mean(values), 3));
  const lines = found
    .slice(0, 2000)
    .map((one) =>
      row([
        h("span", { title: one.title }, safe(one.task)),
        num(link(`#/r/${idOf(at[0])}/e/${one.i}`, fix(one.p, 3))),
        num(link(`#/r/${idOf(at[1])}/e/${one.j}`, fix(one.q, 3))),
        changeCell(one.q - one.p),
        sideLink([at[0], one.i], [at[1], one.j]),
      ]),
    );
  return [
    div("cards", differenceCard(changes)),
    h("p", {}, `mean ${means.join(" → ")} · ${counted(better, "task")} better · ${worse} worse · ${same} same`),
    div("scroll", table(["task", [names[0]], [names[1]], ["change"], ""], lines)),
  ];
}

// What is not the same in two runs besides the model, as `agentenv diff` tells it.
function notTheSame(before, after) {
  const [ours, theirs] = [before.made, after.made];
  const both = Object.keys(ours).length && Object.keys(theirs).length;
  const parts = both ? [...new Set([...Object.keys(ours), ...Object.keys(theirs)])].sort() : [];
  const found = parts.filter((name) => ours[name] !== theirs[name]);
  const lacks = (run, other) => run.report.terms.filter((term) => !other.report.terms.includes(term)).join(", ");
  const terms = [lacks(before, after) || "nothing", lacks(after, before) || "nothing"];
  const known = before.report.terms.length && after.report.terms.length;
  if (known && terms.some((term) => term !== "nothing")) found.push(`the terms (${terms.join(" against ")})`);
  return found.length > 0 && h("p", { class: "warn" }, safe(`not the same in both runs: ${found.join("; ")}`));
}

// Two runs are compared task by task; the curves of two or more are drawn over each other.
function pageCompare(chosen) {
  const found = chosen.map((r) => runs[r]);
  const names = found.map((run) => run.id);
  put(
    root,
    head(
      [link("#/", "runs"), h("b", {}, "compare"), span("sub", names.join(found.length > 2 ? ", " : " → "))],
      "u up · ? keys",
    ),
    h(
      "main",
      {},
      curveSection(found, null),
      found.length === 2 && notTheSame(...found),
      found.length === 2 && section("task by task", comparison(...found.map(results), { names, at: chosen })),
    ),
  );
}
