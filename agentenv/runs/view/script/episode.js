// The page of one episode, next to the episodes of its group.

const MAX_RAW_CHARS = 400000;
const MAX_OUTCOME_CHARS = 600;

// ---- what was asked, what was answered and what it was worth
const textOf = (content) =>
  typeof content === "string"
    ? content
    : Array.isArray(content)
      ? content.map((piece) => (piece && typeof piece.text === "string" ? piece.text : "")).join("")
      : "";

function outcome(run, e, ep) {
  const isAsked = (message) => !["system", "developer"].includes(message.role);
  const first = ep.messages.find(isAsked);
  const question = first && first.role !== "assistant" ? textOf(first.content) : questionOf(run, e);
  const last = ep.messages.findLast((message) => message.role === "assistant");
  const expected = expectedOf(run, e);
  const line = (name, ...words) => [h("dt", {}, name), h("dd", {}, words)];
  const long = (text) => safe(clip(text.trim(), MAX_OUTCOME_CHARS));
  return h(
    "dl",
    { class: "outcome" },
    line("task", long(question) || "–", " ", span("dim", safe(e.k))),
    line("answer", long(last ? textOf(last.content).replace(THOUGHT, "") : "") || "–"),
    expected && line("expected", safe(expected)),
    line("reward", h("b", {}, fix(e.r, 3)), " ", stopPill(e.s)),
  );
}

function groupCard(r, e, longest, advantage, chosen) {
  const bar = e.p.map(([source, n]) =>
    h("i", { class: source, style: `width:${(100 * n) / longest}%`, title: `${source} ${n}` }),
  );
  const kind = advantage > 0 ? "good" : advantage < 0 ? "bad" : "dim";
  const top = div(
    "top",
    span("", h("b", {}, "#" + e.m), span("dim", ` r ${fix(e.r)} · ${big(e.t)} tok`)),
    h("b", { class: kind }, sign(advantage)),
  );
  return h(
    "a",
    {
      class: "mem" + (chosen ? " on" : ""),
      href: `#/r/${idOf(r)}/e/${e.i}`,
      "aria-current": chosen ? "true" : null,
    },
    top,
    div("bar", bar),
    e.A && h("div", { class: "said", title: e.A }, safe(e.A)),
    stopPill(e.s),
    e.u && !FAILED.has(e.s) && div("dim", "not trainable"),
  );
}

function groupCards(r, group, chosen) {
  const longest = Math.max(1, ...group.map((e) => e.t));
  const advantage = advantages(group);
  return h(
    "nav",
    { class: "left" },
    div("dim", advantage.text),
    group.map((e) => groupCard(r, e, longest, advantage.of(e), e.i === chosen)),
  );
}

function groupPill(group) {
  const cut = group.filter((e) => kindOf(e.s) === "cut").length;
  const spread = spreadOf(group);
  const words = [cut > 0 && `✂ ${cut} of ${group.length} truncated`, spread].filter(Boolean).join(" · ");
  return words && span("pill " + (cut || spread.startsWith("no") ? "cut" : "ok"), words);
}

// ---- the right column
const fact = (name, value, kind = "") => h("tr", {}, h("td", {}, name), h("td", { class: kind }, value));
const facts = (title, rows) => [h("h3", {}, title), h("table", {}, rows)];

function rewardFacts(run, e, ep, group) {
  const weights = run.weights || {};
  const weight = (name) => (there(weights[name]) && weights[name] !== 1 ? ` × ${weights[name]}` : "");
  const parts = Object.entries(e.R).map(([name, value]) => fact(safe(name), fix(value, 3) + weight(name)));
  return facts("Reward", [
    parts,
    fact(h("b", {}, "total"), h("b", {}, fix(e.r, 3))),
    fact("group advantage", sign(advantages(group).of(e)) || "–"),
    ep.turns.length > 1 && fact("by turn", ep.turns.map((turn) => fix(turn.reward)).join("  ")),
  ]);
}

function alignmentFacts(e, ep) {
  const parts = ep.sequences.flat();
  if (!parts.length)
    return [h("h3", {}, "Alignment"), h("p", { class: "dim" }, "no tokens: the engine returns only text")];
  const count = (source) =>
    parts.filter((part) => part.s === source).reduce((sum, part) => sum + part.ids.length, 0);
  const ids = parts.reduce((sum, part) => sum + part.ids.length, 0);
  const trained = count("model");
  const logprobs = parts.reduce((sum, part) => sum + (part.s === "model" ? (part.lp || []).length : 0), 0);
  const sampled = ep.turns.reduce((sum, turn) => sum + turn.num_tokens, 0);
  const agree = logprobs === trained && ids === e.t && trained + count("other") <= sampled;
  return facts("Alignment", [
    fact("token_ids", ids),
    fact("loss_mask", ids),
    fact("logprobs of sampled tokens", logprobs),
    fact("trained tokens", `${trained} (${ids ? percent(trained / ids) : "–"})`),
    fact("turns sampled", sampled),
    fact("lengths agree", h("b", { class: agree ? "good" : "bad" }, agree ? "✓ yes" : "✕ no")),
    ep.sequences.length > 1 && fact("contexts", ep.sequences.length),
  ]);
}

function timeFacts(ep) {
  const rows = Object.entries(ep.timings).map(([name, s]) => fact(name.replace(/_s$/, ""), seconds(s)));
  return facts("Time", rows.length ? rows : fact("not recorded", ""));
}

function stopFacts(e, ep) {
  const error = ep.error;
  return [
    h("h3", {}, "Why it stopped"),
    div("", stopPill(e.s)),
    error && div("code", safe(`${error.boundary}: ${error.type}: ${error.message}`)),
    error &&
      error.traceback &&
      h("details", {}, h("summary", {}, "traceback"), div("code", safe(error.traceback))),
    e.u && h("p", { class: "dim" }, "not trainable: ", safe(e.u)),
    ep.wrong.map((text) => div("warn mark", span("pill fail", "✕ record"), " ", safe(text))),
  ];
}

function reproduce(run, e, ep) {
  const python = `from agentenv.runs import find_run\nepisode = find_run("${run.id.replace(/["\\]/g, "")}").load(${e.i})`;
  return [
    h("h3", {}, "Reproduce"),
    div("code", `agentenv replay ${run.id}#${e.i}`),
    div("code", python),
    div(
      "tools",
      h("button", { id: "copy-json", onclick: () => copy(JSON.stringify(ep, null, 1)) }, "copy JSON"),
      h("button", { onclick: () => copy(python) }, "copy Python"),
    ),
  ];
}

function rightColumn(run, e, ep, group) {
  const metrics = Object.entries(ep.metrics).map(([name, value]) =>
    fact(safe(name), typeof value === "number" ? short(value) : value),
  );
  return h(
    "aside",
    { class: "right" },
    rewardFacts(run, e, ep, group),
    alignmentFacts(e, ep),
    timeFacts(ep),
    stopFacts(e, ep),
    h("h3", {}, "Task"),
    div("code", safe(clip(JSON.stringify(ep.task, null, 1), 3000))),
    metrics.length > 0 && facts("Metrics", metrics),
    reproduce(run, e, ep),
  );
}

// ---- the centre
function tabBar(ep, group, repaint) {
  const note = (ep && ep.ann) || {};
  const missing = {
    entropy: !note.entropy && "the trainer recorded none for this episode",
    ratio: !note.new_logprobs && "the trainer recorded none for this episode",
    advantage: !note.advantages && !there(note.advantage) && "the trainer recorded none for this episode",
    diff: group.length < 2 && "the group has one episode",
  };
  const choose = (name) => {
    state.tab = name;
    repaint();
  };
  const button = (name) =>
    h(
      "button",
      {
        class: state.tab === name ? "on" : "",
        role: "tab",
        "aria-selected": String(state.tab === name),
        disabled: Boolean(missing[name]),
        title: missing[name] || LEGENDS[name] || "",
        onclick: () => choose(name),
      },
      name,
    );
  return h("div", { class: "tabs", role: "tablist" }, TABS.map(button));
}

function searchBox(repaint) {
  const typed = async (event) => {
    state.search = event.target.value;
    await repaint();
    const hit = document.querySelector(".hit");
    if (hit) hit.scrollIntoView({ block: "center" });
  };
  const keys = (event) => event.key === "Escape" && event.target.blur();
  return h("input", {
    id: "search",
    type: "search",
    placeholder: "search",
    "aria-label": "search in the episode",
    value: state.search,
    onchange: typed,
    onkeydown: keys,
  });
}

// The number of first tokens shared with another episode of the group; -1 outside the tab "diff".
async function shared(r, e, ep, group) {
  if (state.tab !== "diff" || group.length < 2) return -1;
  const other = await payload(r, group.find((member) => member.i !== e.i).i);
  if (!other) return -1;
  const [ours, theirs] = [ep, other].map((episode) => episode.sequences.flat().flatMap((part) => part.ids));
  let common = 0;
  while (common < Math.min(ours.length, theirs.length) && ours[common] === theirs[common]) common++;
  return common;
}

function endMark(e) {
  if (ENDED.has(e.s)) return null;
  const truncated = kindOf(e.s) === "cut";
  return div(
    "warn",
    truncated ? "✂ " : "✕ ",
    "the episode ended here: ",
    h("b", {}, e.s),
    ` (terminated false, truncated ${truncated})`,
  );
}

// A run of branches names the run whose episodes it continues.
function branchSource(run) {
  const source = sourceOf(run);
  if (!source) return null;
  const r = runs.findIndex((other) => other.id === source);
  return [" · branched from ", r < 0 ? safe(source) : link("#/r/" + idOf(r), safe(source))];
}

function lacking(run, e) {
  const words = "This page lacks the tokens of this episode. This command makes a page that has them: ";
  return [h("p", { class: "dim" }, words), div("code", `agentenv view ${run.id}#${e.i}`)];
}

async function centreOf(r, e, ep, group) {
  const run = runs[r];
  if (!ep) return lacking(run, e);
  if (state.tab === "raw json")
    return [div("box raw", safe(clip(JSON.stringify(ep, null, 1), MAX_RAW_CHARS)))];
  if (state.tab === "messages" || !ep.sequences.length)
    return [branchTree(ep), messageBoxes(ep, `#/r/${idOf(r)}/e/${e.i}`), endMark(e)];
  const legend =
    LEGENDS[state.tab] && div("dim legend", LEGENDS[state.tab], " · grey and hatched: not trained");
  return [branchTree(ep), legend, tokenBoxes(ep, run.vocab, await shared(r, e, ep, group)), endMark(e)];
}

let showing = null;

async function pageEpisode(r, i) {
  const run = runs[r];
  const e = run.episodes[i];
  if (!e)
    return put(root, head([link("#/r/" + idOf(r), run.id)], "u up"), h("main", {}, "This episode does not exist."));
  const group = groupOf(run, e);
  const ticket = (showing = {});
  state.episode = `#/r/${idOf(r)}/e/${i}`;
  const ep = await payload(r, i);
  if (ticket !== showing) return;
  const centre = h("article", { class: "centre", tabindex: -1, onclick: clickToken });
  const search = searchBox(() => repaint());
  const repaint = async () => {
    const body = await centreOf(r, e, ep, group);
    const bar = tabBar(ep, group, repaint);
    bar.append(search);
    put(centre, ep && outcome(run, e, ep), familyTree(r, e), bar, body);
    if (state.token !== null && centre.isConnected) chooseToken(state.token);
  };
  await repaint();
  if (ticket !== showing) return;
  const role = e.o ? `${e.o} · ` : "";
  const step = stepOf(e);
  const where = span(
    "sub",
    link("#/r/" + idOf(r), run.id),
    branchSource(run),
    step !== null && [" · ", link(`#/r/${idOf(r)}/step/${step}`, "step " + step)],
    safe(` · ${role}task ${e.k} · ${counted(group.length, "episode")}`),
  );
  const keys = "← → episode · j k turn · l m e r d colours · / search · ? keys";
  const left = groupCards(r, group, i);
  const right = ep ? rightColumn(run, e, ep, group) : h("aside", { class: "right" });
  put(root, head([h("b", {}, safe(e.e)), where, groupPill(group)], keys), div("ep", left, centre, right));
  state.repaint = repaint;
  left.querySelector(".on").scrollIntoView({ block: "nearest" });
  if (state.token !== null) showToken(state.token);
}
