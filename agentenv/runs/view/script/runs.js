// The pages of several runs: the list, and the comparison of two runs.

// The reward curve of a training, or of the episodes of an evaluation in their order.
function rewardSeries(run) {
  const logged = run.metrics.map((m) => m.reward ?? m["reward/mean"]).filter((x) => typeof x === "number");
  if (logged.length > 1) return logged;
  const rewards = run.episodes.map((e) => e.r).filter(there);
  const size = Math.max(1, Math.ceil(rewards.length / 24));
  const parts = [];
  for (let n = 0; n < rewards.length; n += size) parts.push(mean(rewards.slice(n, n + size)));
  return parts;
}

function pick(r) {
  if (!state.picked.delete(r)) state.picked.add(r);
  if (state.picked.size > 2) state.picked.delete([...state.picked][0]);
  render();
}

function runRow(run, r) {
  const name = "compare " + run.id;
  const box = h("input", {
    type: "checkbox",
    checked: state.picked.has(r),
    "aria-label": name,
    onchange: () => pick(r),
  });
  const done = run.episodes.length;
  return row([
    box,
    link("#/r/" + r, run.id),
    run.kind,
    safe(run.envs.join(", ")),
    safe(run.model),
    num(run.expected && run.expected !== done ? `${done}/${run.expected}` : done),
    num(run.report.reward ? fix(run.report.reward.mean, 3) : "–"),
    spark(rewardSeries(run)),
    run.status,
    span("dim", run.created.slice(0, 16).replace("T", " ")),
  ]);
}

function pageRuns() {
  const rows = div("scroll");
  const refill = () => {
    const shown = runs.map((run, r) => [run, r]);
    const left = shown.filter(([run]) => matches([run.id, run.model, run.kind, ...run.envs].join(" ")));
    put(
      rows,
      table(
        columns,
        left.map(([run, r]) => runRow(run, r)),
      ),
    );
  };
  const both = [...state.picked].sort((a, b) => a - b);
  const compare =
    both.length === 2 && h("button", { onclick: () => go("#/compare/" + both.join("/")) }, "compare");
  const columns = ["", "run", "", "environment", "model", ["episodes"], ["reward"], "", "status", "made"];
  const none = !runs.length && h("p", { class: "dim" }, "There are no runs yet; agentenv eval makes one.");
  refill();
  put(
    root,
    head([h("b", {}, "runs"), span("sub", runs.length + " runs")], "/ filter · ? keys"),
    h(
      "main",
      {},
      div("tools", filterBox(refill), span("dim", "select two runs to compare them"), compare),
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

function changeCell(change) {
  const kind = change > 0 ? "good" : change < 0 ? "bad" : "dim";
  const mark = change > 0 ? "▲ " : change < 0 ? "▼ " : "";
  return h("td", { class: kind }, mark + sign(change));
}

function pageCompare(a, b) {
  const [before, after] = [runs[a], runs[b]];
  const found = pairs(before, after);
  const changes = found.map((pair) => pair.q - pair.p);
  const better = changes.filter((change) => change > 1e-9).length;
  const worse = changes.filter((change) => change < -1e-9).length;
  const same = changes.length - better - worse;
  const words = found.length
    ? `mean ${fix(mean(found.map((one) => one.p)), 3)} → ${fix(mean(found.map((one) => one.q)), 3)}` +
      ` (${sign(mean(changes))}) · ${better} tasks better · ${worse} worse · ${same} same`
    : "the runs have no task in common";
  const lines = found
    .slice(0, 2000)
    .map((one) =>
      row([
        h("span", { title: one.title }, safe(one.task)),
        num(link(`#/r/${a}/e/${one.i}`, fix(one.p, 3))),
        num(link(`#/r/${b}/e/${one.j}`, fix(one.q, 3))),
        changeCell(one.q - one.p),
      ]),
    );
  put(
    root,
    head(
      [link("#/", "runs"), h("b", {}, "compare"), span("sub", `${before.id} → ${after.id}`)],
      "u up · ? keys",
    ),
    h(
      "main",
      {},
      h("p", {}, words),
      h("p", { class: "dim" }, "Intervals: ", span("code", `agentenv diff ${before.id} ${after.id}`)),
      table(["task", before.id, after.id, "change"], lines),
    ),
  );
}
