// Parts that several pages share: the head, the filter, the list of episodes, and the grid.

const ROW_PX = 28;

function head(left, keys) {
  const theme = h("button", { onclick: toggleTheme, title: "switch between light and dark (t)" }, "◐");
  const help = h("button", { onclick: showKeys, title: "show the keys (?)" }, "?");
  return h("header", {}, left, span("keys", keys), theme, help);
}

function filterBox(again) {
  const typed = (event) => {
    state.filter = event.target.value;
    again();
    const box = document.getElementById("filter");
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  };
  const placeholder = "filter: words, stop:max_turns, reward<0.5, tool:calc, error:…";
  return h("input", { id: "filter", type: "search", placeholder, value: state.filter, oninput: typed });
}

function filterBy(text) {
  state.filter = text;
  render();
  const list = document.querySelector(".vlist");
  if (list) list.scrollIntoView({ block: "center" });
}

// ---- the list of episodes, which draws only the visible rows
const COLUMNS = ["place", "task", "member", "reward", "stop", "turns", "tokens", "time"];

function listRow(r, e, columns, top) {
  const cells = {
    place: () => span("dim", "#" + e.i),
    step: () => span("num", e.w ?? "–"),
    task: () => span("", safe(e.k)),
    member: () => span("num", e.m),
    reward: () => span("num", fix(e.r, 3)),
    stop: () => span("", stopPill(e.s)),
    turns: () => span("num", e.n),
    tokens: () => span("num", big(e.t)),
    time: () => span("num", seconds(e.q)),
  };
  const href = `#/r/${r}/e/${e.i}`;
  return h(
    "a",
    { class: "vrow", href, style: `top:${top}px` },
    columns.map((name) => cells[name]()),
    span("dim", safe(e.x || e.A)),
  );
}

function virtualList(r, run) {
  const list = h("div", { class: "vlist", tabindex: 0 });
  const inner = div("inner");
  const count = span("dim");
  const columns = run.episodes.some((e) => e.w !== null) ? ["place", "step", ...COLUMNS.slice(1)] : COLUMNS;
  let shown = [];
  const paint = () => {
    const from = Math.max(0, Math.floor(list.scrollTop / ROW_PX) - 6);
    const rows = shown.slice(from, from + Math.ceil(460 / ROW_PX) + 20);
    put(
      inner,
      rows.map((e, n) => listRow(r, e, columns, (from + n) * ROW_PX)),
    );
  };
  const refill = () => {
    shown = ordered(run);
    inner.style.height = shown.length * ROW_PX + "px";
    count.textContent = `${shown.length} of ${run.episodes.length}`;
    paint();
  };
  const sortBy = (name) => {
    state.desc = state.sort === name && !state.desc;
    state.sort = name;
    refill();
  };
  const names = columns.map((name) =>
    h("span", { role: "button", tabindex: 0, onclick: () => sortBy(name) }, name),
  );
  const box = div(
    "list" + (columns.includes("step") ? " with-step" : ""),
    div("vhead", names, span("", "answer or error")),
    list,
  );
  list.append(inner);
  list.addEventListener("scroll", paint, { passive: true });
  refill();
  return [div("tools", filterBox(refill), count), box];
}

// ---- the grid of tasks and episodes, which grows while it is scrolled
function heatCell(r, e, low, high) {
  const scored = e.r !== null;
  const edge = kindOf(e.s) === "cut" ? "var(--warnline)" : "var(--line)";
  return h("a", {
    href: `#/r/${r}/e/${e.i}`,
    title: `${e.k} #${e.m}: ${fix(e.r, 3)} ${e.s}`,
    "aria-label": `${e.k} ${e.m} ${fix(e.r)}`,
    class: scored ? "" : "fail-cell",
    style: scored ? `background:${rewardColour(e.r, low, high)};border:1px solid ${edge}` : "",
  });
}

function heat(r, run) {
  const groups = new Map();
  for (const e of run.episodes) {
    const key = [e.e, e.k, e.g].join("\n");
    groups.set(key, [...(groups.get(key) || []), e]);
  }
  const rewards = run.episodes.map((e) => e.r).filter(there);
  const low = Math.min(0, lowest(rewards));
  const high = Math.max(low, highest(rewards));
  const rows = [...groups.values()];
  const box = div("grid");
  let at = 0;
  const more = () => {
    for (const group of rows.slice(at, at + 150)) {
      const cells = group.sort((a, b) => a.m - b.m).map((e) => heatCell(r, e, low, high));
      box.append(div("", h("span", { title: group[0].k }, safe(group[0].k)), cells));
    }
    at += 150;
  };
  const nearEnd = () => box.scrollTop + box.clientHeight > box.scrollHeight - 200;
  more();
  box.addEventListener("scroll", () => at < rows.length && nearEnd() && more(), { passive: true });
  return [
    box,
    h(
      "p",
      { class: "dim" },
      `light ${fix(low)} to dark ${fix(high)} · amber edge: ended by a limit · hatched: no score`,
    ),
  ];
}
