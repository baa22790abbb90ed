// The page of one run: figures, warnings, curves, tables, grid and list of episodes.

const ks = (values, mark) =>
  Object.keys(values)
    .map((k) => `${mark}${k} ${fix(values[k])}`)
    .join("  ");

function figureCards(run, report, count) {
  const { reward } = report;
  const most = run.expected && report === run.report ? "/" + run.expected : "";
  const tokens = there(report.total_tokens)
    ? card("tokens", big(report.total_tokens), "read and sampled")
    : card("tokens", big(report.sampled_tokens), `sampled; ${big(report.prompt_tokens)} read`);
  return div(
    "cards",
    card("reward", reward ? fix(reward.mean, 3) : "–", reward && "95 % " + limits(reward)),
    card("episodes", count + most, `${report.num_tasks} tasks, ${report.num_scored} scored`),
    card(
      "pass@k",
      ks(report.pass_at, "@") || "–",
      `pass${ks(report.pass_all, "^") || "^k –"} · at reward ≥ ${report.success_at}`,
    ),
    report.majority !== null && card("majority", fix(report.majority), "most frequent answer passes"),
    card("groups", `${report.num_groups_with_spread}/${report.num_groups}`, "have reward spread"),
    tokens,
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

// The curves of a training; a click on one leads to the episodes of the step.
function curves(r, run) {
  const onStep = (step) => go(`#/r/${idOf(r)}/step/${step}`);
  return curveSection([run], onStep, () => [passCard(run, onStep)]);
}

// The success on held-out tasks before the first step, at its best during the training, and after the last step.
function heldOut(run) {
  const prefixes = metricNames([run])
    .filter((key) => /^eval(\/.+)?\/success$/.test(key))
    .map((key) => key.slice(0, -"/success".length));
  const rows = prefixes.map((prefix) => {
    const scored = run.metrics.filter((m) => Number.isFinite(m[prefix + "/success"]));
    const at = (m) => m[prefix + "/success"];
    const cardOf = (when, m) => {
      const interval = `95 % ${limits({ low: m[prefix + "/success_low"], high: m[prefix + "/success_high"] })}`;
      const env = prefix === "eval" ? "" : " · " + prefix.slice("eval/".length);
      return card(safe(when + env), fix(at(m), 3), `${interval} · ${counted(m[prefix + "/tasks"], "task")}`);
    };
    const [first, ...others] = scored;
    const last = others.pop();
    const best = others.reduce((a, b) => (a && at(a) >= at(b) ? a : b), null);
    return div(
      "cards",
      cardOf(first.step ? `after step ${first.step}` : "before the first step", first),
      best && cardOf(`best during it, step ${best.step}`, best),
      last && cardOf(`after step ${last.step}`, last),
    );
  });
  return rows.length > 0 && section("held-out success", rows);
}

function stopTable(report) {
  const stops = Object.entries(report.stop_reasons);
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
  const columns = ["tool", ["calls"], ["p50"], ["p95"], "errors", "most frequent"];
  const found = section("tools", div("scroll", table(columns, rows)));
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
    const died = [
      worker.deaths > 0 && `${worker.deaths} workers died, ${worker.replayed} episodes played again`,
      worker.retired > 0 && `${worker.retired} replaced because of hung threads`,
    ]
      .filter(Boolean)
      .join("; ");
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
  const head = [
    "worker",
    "node, process",
    ["live"],
    ["done"],
    ["bytes"],
    ["CPU"],
    ["loop delay p99"],
    ["threads"],
    "waits for",
  ];
  const found = section("workers", div("scroll", table(head, rows)));
  found.className = "wide";
  return rows.length > 0 && found;
}

function serverTable(run) {
  const rows = (run.servers ?? []).map((server) =>
    row(
      [
        safe(server.server),
        num(server.sessions),
        num(server.in_flight),
        num(server.version ?? "–"),
        num(server.failures),
        num(`${server.used} of ${server.processes}`),
        span("dim", safe(server.problem)),
      ],
      "",
    ),
  );
  const head = ["server", ["episodes"], ["in flight"], ["weights"], ["failures"], ["used by"], "problem"];
  const found = section("servers", div("scroll", table(head, rows)));
  found.className = "wide";
  return rows.length > 0 && found;
}

function failureTable(report) {
  const rows = report.errors.map((failure) => {
    const word = failure.error.split(/\s+/).slice(0, 2).join(" error:");
    const show = { class: "plain", title: failure.where, onclick: () => filterBy("error:" + word) };
    return row([num(failure.count + " ×"), h("button", show, safe(failure.error))]);
  });
  return rows.length > 0 && section("failures", table([], rows));
}

function rewardSection(run, report, episodes) {
  const parts = Object.entries(report.rewards)
    .map(([name, value]) => `${name} ${fix(value, 3)}`)
    .join("   ");
  const rewards = episodes.map((e) => e.r).filter(there);
  const bars = histogram(rewards, rewardRange(run, rewards));
  return section("rewards", bars, parts && h("p", { class: "dim" }, "means: ", safe(parts)));
}

// The figures of a training are those of its last step: the policies of all steps have no mean.
function lastStep(r, run) {
  const last = lastReport(run);
  if (!last) return null;
  const words = [link(`#/r/${idOf(r)}/step/${last.step}`, "step " + last.step), `, the last of ${last.steps}`];
  return [h("p", { class: "dim" }, "figures of ", words), figureCards(run, last.report, last.count)];
}

// Buttons that select what was trained on, held out or shown, where a run has more than one of them.
function roleButtons(run) {
  const roles = [...new Set(run.episodes.map((e) => e.o).filter(there))];
  if (!roles.length) return null;
  const button = (name, text) => h("button", { onclick: () => filterBy(text) }, safe(name));
  const count = (role) => run.episodes.filter((e) => e.o === role).length;
  return [
    button("all", "role:"),
    button("trained on", "role:trained"),
    roles.map((role) => button(`${role} ${count(role)}`, "role:" + role)),
  ];
}

// What follows the filter: the figures, histogram, stop reasons and failures beside the list and the grid.
function episodeSections(r, run, figures, count) {
  const [tables, below] = [div("two"), div("two")];
  const grid = section("task × episode");
  const list = virtualList(r, run);
  const refill = () => {
    const all = !words().length;
    const found = selected(run);
    const shown = found.some(isOwn) ? found.filter(isOwn) : found;
    const report = all ? run.report : reportOf(run, shown);
    const own = all ? run.episodes.filter(isOwn) : shown;
    count.textContent = `${found.length} of ${run.episodes.length} episodes`;
    put(figures, (found.length > 0 && all && lastStep(r, run)) || figureCards(run, report, own.length));
    put(
      tables,
      rewardSection(run, report, own),
      stopTable(report),
      failureTable(report),
      all && timeTable(run.report),
    );
    put(below, all && [toolTable(run.report), workerTable(run), serverTable(run)]);
    put(grid, h("h2", {}, "task × episode"), found.length > 0 && heat(r, run, found));
    list.refill();
  };
  refill();
  const beside = div("", figures, notices(run), tables);
  return { refill, sections: [div("beside", beside, div("", section("episodes", list.box), grid)), below] };
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
    safe([` · ${run.model}`, ...run.report.terms, `seed ${run.seed}`, run.status].join(" · ")),
  );
  const top = head(
    [up, h("b", {}, safe(run.envs.join(", ") || run.id)), about],
    "/ filter · Enter open · ? keys",
  );
  if (!run.episodes.length && !run.metrics.length) return put(root, top, emptyRun(run));
  const settings = JSON.stringify({ config: run.config, versions: run.versions }, null, 1);
  const [figures, count] = [div(""), h("span", { class: "dim", role: "status" })];
  const episodes = run.episodes.length > 0 && episodeSections(r, run, figures, count);
  const body = h(
    "main",
    {},
    heldOut(run),
    curves(r, run),
    episodes && div("tools filter", filterBox(episodes.refill), count, roleButtons(run)),
    episodes ? episodes.sections : notices(run),
    h("details", {}, h("summary", {}, "configuration"), div("code", safe(settings))),
  );
  put(root, top, body);
}
