// One step of a training, what changed between two steps, and two episodes side by side.

const MOST_GROUPS = 5;
const PASS_KS = [1, 2, 4, 8, 16, 32, 64];

const isOwn = (e) => !e.o;
const rewardsByStep = (run) =>
  groupedBy(
    run.episodes.filter((e) => isOwn(e) && e.w !== null && isScored(e)),
    (e) => e.w,
  );

function stepsWithEpisodes(run) {
  const steps = new Set(run.episodes.map(stepOf).filter(there));
  return [...steps].sort((a, b) => a - b);
}

// pass@k of each step, because the policy of one step is not that of another.
function passCard(run, onStep) {
  const steps = [...rewardsByStep(run)].sort((a, b) => a[0] - b[0]);
  const found = steps.map(([step, episodes]) => {
    const tasks = [...groupedBy(episodes, (e) => e.g).values()].map((members) => members.map((e) => e.r));
    return [step, passes(tasks, run.report.success_at).pass_at];
  });
  const series = PASS_KS.map((k) => found.filter(([, at]) => there(at[k])).map(([step, at]) => [step, at[k]]))
    .map((points, n) => ({
      label: `@${PASS_KS[n]} `,
      xs: points.map(([x]) => x),
      ys: points.map(([, y]) => y),
    }))
    .filter((one) => one.xs.length)
    .slice(0, NUM_COLOURS)
    .map((one, number) => ({ ...one, number }));
  return series.length > 0 && curveCard("pass@k of each step", series, { onStep, unit: "share" });
}

// ---- the groups of a step
function groupRows(r, groups, range) {
  return groups.map((group) => {
    const rewards = group.filter(isScored).map((e) => e.r);
    const [first] = group;
    return row([
      h("span", { title: taskTitle(runs[r], first) }, safe(taskName(runs[r], first))),
      num(rewards.length ? fix(mean(rewards), 3) : "–"),
      h(
        "td",
        {},
        div(
          "grid plain",
          div(
            "",
            group.sort((a, b) => a.m - b.m).map((e) => heatCell(r, e, range, 40)),
          ),
        ),
      ),
    ]);
  });
}

function groupSections(r, episodes) {
  const range = rewardRange(runs[r], episodes.map((e) => e.r).filter(there));
  const average = (group) => mean([0, ...group.filter(isScored).map((e) => e.r)]);
  const all = [...groupedBy(episodes, (e) => [e.e, e.k, e.g].join("\n")).values()];
  all.sort((a, b) => average(b) - average(a));
  const of = (title, groups) =>
    section(title, div("scroll", table(["task", ["mean"], "episodes"], groupRows(r, groups, range))));
  if (all.length <= 2 * MOST_GROUPS) return of("groups, best first", all);
  return [
    of("best groups", all.slice(0, MOST_GROUPS)),
    of("worst groups", all.slice(-MOST_GROUPS).reverse()),
    h("p", { class: "dim" }, `${all.length - 2 * MOST_GROUPS} groups lie between`),
  ];
}

function stepMetrics(run, step) {
  const at = run.metrics.findIndex((m, n) => (m.step ?? n + 1) === step);
  if (at < 0) return null;
  const before = run.metrics[at - 1] || {};
  const lines = Object.entries(run.metrics[at])
    .filter(([key, value]) => key !== "step" && typeof value === "number")
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([key, value]) =>
      row([safe(key), num(short(value)), num(there(before[key]) ? short(before[key]) : "–")]),
    );
  const shown = table(["metric", ["this step"], ["the one before"]], lines);
  return h("details", {}, h("summary", {}, `all metrics of step ${step}`), div("scroll", shown));
}

// Other steps whose episodes have a task in common with this one.
function stepLinks(r, run, step) {
  const tasks = new Set(run.episodes.filter((e) => stepOf(e) === step).map(taskOf));
  const others = new Set(run.episodes.filter((e) => tasks.has(taskOf(e))).map(stepOf));
  others.delete(step);
  others.delete(null);
  const sorted = [...others].sort((a, b) => a - b);
  if (!sorted.length) return null;
  const ends = sorted.length > 8 ? [...sorted.slice(0, 4), ...sorted.slice(-4)] : sorted;
  const to = (other) =>
    link(`#/r/${idOf(r)}/steps/${Math.min(step, other)}/${Math.max(step, other)}`, "step " + other);
  return h(
    "p",
    {},
    "The same tasks, side by side with ",
    ends.map((other) => [to(other), "  "]),
  );
}

function stepHead(r, title) {
  const run = runs[r];
  return head(
    [link("#/r/" + idOf(r), run.id), h("b", {}, title), span("sub", safe(`${run.envs.join(", ")} · ${run.model}`))],
    "← → step · u up · ? keys",
  );
}

function pageStep(r, step) {
  const run = runs[r];
  const steps = stepsWithEpisodes(run);
  const here = run.episodes.filter((e) => stepOf(e) === step);
  const own = here.filter(isOwn);
  const others = groupedBy(
    here.filter((e) => !isOwn(e)),
    (e) => e.o,
  );
  const at = steps.indexOf(step);
  const to = (other, words) => there(other) && link(`#/r/${idOf(r)}/step/${other}`, words);
  const turn = div(
    "tools",
    to(steps[at - 1], `← step ${steps[at - 1]}`),
    to(steps[at + 1], `step ${steps[at + 1]} →`),
  );
  state.moveStep = (by) => there(steps[at + by]) && go(`#/r/${idOf(r)}/step/${steps[at + by]}`);
  put(
    root,
    stepHead(r, "step " + step),
    h(
      "main",
      {},
      turn,
      here.length === 0 && h("p", { class: "dim" }, "No episode of this step is in the run."),
      own.length > 0 && [figureCards(run, reportOf(run, own), own.length), groupSections(r, own)],
      [...others].map(([role, episodes]) => section(`${role} at this step`, heat(r, run, episodes))),
      stepLinks(r, run, step),
      stepMetrics(run, step),
    ),
  );
}

// ---- two steps: the tasks that both played, by the change of their mean reward
function pageSteps(r, a, b) {
  const run = runs[r];
  const [before, after] = [a, b].map((step) => ({
    ...run,
    episodes: run.episodes.filter((e) => stepOf(e) === step),
  }));
  put(
    root,
    stepHead(r, `step ${a} and step ${b}`),
    h("main", {}, comparison(before, after, { names: [`step ${a}`, `step ${b}`], at: [r, r] })),
  );
}

// ---- two episodes
async function pageSide(left, right) {
  const ticket = (showing = {});
  const sides = [left, right].map(([r, i]) => ({ r, run: runs[r], e: runs[r].episodes[i] }));
  const data = await Promise.all(sides.map(({ r, e }) => (e ? payload(r, e.i) : null)));
  if (ticket !== showing) return;
  const column = ({ r, run, e }, ep) => {
    if (!e) return div("side", "This episode does not exist.");
    const step = stepOf(e);
    const title = link(`#/r/${idOf(r)}/e/${e.i}`, run.id, step === null ? "" : ` · step ${step}`, ` · #${e.i}`);
    return div(
      "side",
      h("h2", {}, title),
      ep ? [outcome(run, e, ep), messageBoxes(ep, `#/r/${idOf(r)}/e/${e.i}`), endMark(e)] : lacking(run, e),
    );
  };
  const ids = data.map((ep) =>
    ep && ep.sequences.length ? ep.sequences[0].flatMap((part) => part.ids) : null,
  );
  const common = ids[0] && ids[1] && sharedLength(ids[0], ids[1]);
  const words =
    there(common) && common !== false && h("p", { class: "dim" }, `The first ${common} tokens agree.`);
  put(
    root,
    head([link("#/", "runs"), h("b", {}, "side by side")], "u up · ? keys"),
    h(
      "main",
      {},
      words,
      div(
        "sides",
        sides.map((side, n) => column(side, data[n])),
      ),
    ),
  );
}
