// The page of one run: figures, warnings, curves, tables, grid and list of episodes.

// The most important curves of a training; all others are shown after a click.
const MAIN_CURVES = [
  "reward",
  "eval/success",
  "groups/frac_mixed",
  "entropy",
  "kl",
  "clip_ratio/region_mean",
  "grad_norm",
  "mismatch/abs_max",
  "completions/mean_length",
  "completions/clipped_ratio",
  "tools/call_frequency",
  "tokens/trained",
  "step_time",
];

const card = (title, value, more) =>
  div("card", div("dim", title), div("big", value), more && div("dim", more));
const section = (title, ...kids) => h("section", {}, h("h2", {}, title), ...kids);

function figureCards(run) {
  const report = run.report;
  const ks = (values, mark) =>
    Object.keys(values)
      .map((k) => `${mark}${k} ${fix(values[k])}`)
      .join("  ");
  const reward = report.reward;
  return div(
    "cards",
    card(
      "reward",
      reward ? fix(reward.mean, 3) : "–",
      reward && `95 % ${fix(reward.low, 3)} to ${fix(reward.high, 3)}`,
    ),
    card(
      "episodes",
      run.episodes.length + (run.expected ? "/" + run.expected : ""),
      `${report.num_tasks} tasks, ${report.num_scored} scored`,
    ),
    card(
      "pass@k",
      ks(report.pass_at, "@") || "–",
      `pass${ks(report.pass_all, "^") || "^k –"} · at reward ≥ ${report.success_at}`,
    ),
    report.majority !== null && card("majority", fix(report.majority), "most frequent answer passes"),
    card("groups", `${report.num_groups_with_spread}/${report.num_groups}`, "have reward spread"),
    card("tokens", big(report.sampled_tokens), `sampled; ${big(report.prompt_tokens)} read`),
    card("truncated", percent(report.truncated_share), "ended by a limit"),
    report.cost_usd !== null && card("cost", "$" + fix(report.cost_usd, 4)),
  );
}

function notices(run) {
  const warnings = run.report.warnings.map((text) =>
    text.replace(/: look at them with `agentenv view RUN`/, ""),
  );
  return [
    warnings.map((text) => div("warn", "! ", safe(text))),
    run.note && div("warn", safe(run.note)),
    run.damaged > 0 && div("warn", run.damaged + " damaged lines were left out"),
  ];
}

function curves(run) {
  const keys = [...new Set(run.metrics.flatMap((m) => Object.keys(m)))].filter((key) => key !== "step");
  const chosen = MAIN_CURVES.filter((key) => keys.includes(key));
  const first = chosen.length ? chosen : keys;
  const draw = (names) =>
    div(
      "cards",
      names.map((key) => curve(run.metrics, key)),
    );
  const rest = keys.filter((key) => !first.includes(key)).sort();
  const more = h("details", {}, h("summary", {}, `${rest.length} more curves`));
  more.addEventListener("toggle", () => more.open && more.children.length === 1 && more.append(draw(rest)));
  return keys.length > 0 && section("training", draw(first), rest.length > 0 && more);
}

function stopTable(run) {
  const stops = Object.entries(run.report.stop_reasons);
  const most = Math.max(1, ...stops.map(([, count]) => count));
  const rows = stops.map(([stop, count]) => {
    const filter = h("button", { class: "plain", onclick: () => filterBy("stop:" + stop) }, stopPill(stop));
    return row([filter, shareBar(count / most), num(count)]);
  });
  return section("why episodes stopped", table([], rows));
}

function toolTable(report) {
  const rows = report.tools.map((tool) => {
    const errors = Object.entries(tool.errors)
      .map(([kind, count]) => `${kind} ${count}`)
      .join(", ");
    return row(
      [
        safe(tool.name),
        num(tool.num_calls),
        num(seconds(tool.p50_s)),
        num(seconds(tool.p95_s)),
        errors,
        span("dim", safe(tool.example)),
      ],
      "",
    );
  });
  const found = section("tools", table(["tool", "calls", "p50", "p95", "errors", "most frequent"], rows));
  found.className = "wide";
  return rows.length > 0 && found;
}

function timeTable(report) {
  const spent = Object.entries(report.time_s).sort((a, b) => b[1] - a[1]);
  const total = spent.reduce((sum, [, s]) => sum + s, 0);
  const rows = spent.map(([what, s]) => row([what, shareBar(s / total), num(percent(s / total))], ""));
  return total > 0 && section("time", table([], rows));
}

function workerTable(run) {
  const rows = (run.workers ?? []).map((worker) => {
    const waits = Object.entries(worker.waits ?? {})
      .map(([what, wait]) => `${what} ${wait.episodes} (${seconds(wait.longest_s)})`)
      .join(", ");
    const died = worker.deaths > 0 && `${worker.deaths} workers died, ${worker.replayed} episodes played again`;
    return row(
      [
        safe(worker.worker),
        safe(`${worker.node ?? "?"} ${worker.pid ?? ""}`),
        num(worker.live ?? "–"),
        num(worker.done ?? "–"),
        num(there(worker.rss_mb) ? big(worker.rss_mb * 1e6) : "–"),
        num(there(worker.cpu_s) ? seconds(worker.cpu_s) : "–"),
        num(there(worker.lag_p99_s) ? seconds(worker.lag_p99_s) : "–"),
        num(worker.abandoned ? `${worker.threads} (${worker.abandoned} hang)` : (worker.threads ?? "–")),
        span("dim", safe(worker.silent ? "does not answer" : died || waits)),
      ],
      "",
    );
  });
  const head = ["worker", "node, process", "live", "done", "bytes", "CPU", "loop delay p99", "threads", "waits for"];
  const found = section("workers", table(head, rows));
  found.className = "wide";
  return rows.length > 0 && found;
}

function failureTable(run) {
  const rows = run.report.errors.map((failure) => {
    const word = failure.error.split(/\s+/).slice(0, 2).join(" error:");
    const filter = h(
      "button",
      { class: "plain", onclick: () => filterBy("error:" + word) },
      safe(failure.error),
    );
    return row([num(failure.count + " ×"), filter]);
  });
  return rows.length > 0 && section("failures", table([], rows));
}

function rewardSection(run) {
  const parts = Object.entries(run.report.rewards)
    .map(([name, value]) => `${name} ${fix(value, 3)}`)
    .join("   ");
  const rewards = run.episodes.map((e) => e.r).filter(there);
  return section("rewards", histogram(rewards), parts && h("p", { class: "dim" }, "means: ", safe(parts)));
}

function episodeSections(r, run) {
  if (!run.episodes.length) return null;
  return [
    div(
      "two",
      rewardSection(run),
      stopTable(run),
      toolTable(run.report),
      workerTable(run),
      timeTable(run.report),
      failureTable(run),
      section("task × episode", heat(r, run)),
    ),
    h("h2", {}, "episodes"),
    virtualList(r, run),
  ];
}

function emptyRun(run) {
  const how = run.status === "running" ? "." : `: it was ${run.status}.`;
  return h("main", {}, h("p", { class: "dim" }, "This run has no finished episode yet" + how), notices(run));
}

function pageRun(r) {
  const run = runs[r];
  const up = runs.length > 1 && link("#/", "runs");
  const about = span(
    "sub",
    "run ",
    h("strong", {}, run.id),
    safe(` · ${run.model} · seed ${run.seed} · ${run.status}`),
  );
  const top = head(
    [up, h("b", {}, safe(run.envs.join(", ") || run.id)), about],
    "/ filter · Enter open · ? keys",
  );
  if (!run.episodes.length && !run.metrics.length) return put(root, top, emptyRun(run));
  const settings = JSON.stringify({ config: run.config, versions: run.versions }, null, 1);
  const body = h(
    "main",
    {},
    run.episodes.length > 0 && figureCards(run),
    notices(run),
    curves(run),
    episodeSections(r, run),
    h("details", {}, h("summary", {}, "configuration"), div("code", safe(settings))),
  );
  put(root, top, body);
}
