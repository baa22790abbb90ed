// Parts that several pages share: the head, the filter, and the list of episodes.

const ROW_PX = 28;

function head(left, keys) {
  const theme = h(
    "button",
    { onclick: toggleTheme, title: "switch between light and dark (t)", "aria-label": "light or dark" },
    "◐",
  );
  const help = h("button", { onclick: showKeys, title: "show the keys (?)", "aria-label": "keys" }, "?");
  document.title =
    left
      .map((part) => part && part.textContent)
      .filter(Boolean)
      .join(" · ") + " · agentenv";
  const isNew = state.fresh !== null && address()[1] !== state.fresh && runs[state.fresh];
  const fresh = isNew && h("a", { href: "#/r/" + idOf(state.fresh), class: "pill ok" }, "new run ", isNew.id);
  return h("header", {}, left, fresh, span("keys", keys), theme, help);
}

const card = (title, value, more) =>
  div("card", div("dim", title), div("big", value), more && div("dim", more));
const section = (title, ...kids) => h("section", {}, h("h2", {}, title), ...kids);
const limits = (found) =>
  Number.isFinite(found.low) ? `${fix(found.low, 3)} to ${fix(found.high, 3)}` : "one task alone";

const TYPING_MS = 80;

function filterBox(again, placeholder = "filter: words, stop:max_turns, reward<0.5, tool:calc, error:…") {
  let waiting = 0;
  const filtered = () => {
    keepFilter();
    again();
  };
  const oninput = (event) => {
    state.filter = event.target.value;
    clearTimeout(waiting);
    waiting = setTimeout(filtered, TYPING_MS);
  };
  const onkeydown = (event) => {
    if (event.key !== "Enter") return;
    clearTimeout(waiting);
    filtered();
    openFirst();
  };
  keepFilter();
  const label = { "aria-label": "filter", placeholder, title: FILTER_HELP };
  return h("input", { id: "filter", type: "search", ...label, value: state.filter, oninput, onkeydown });
}

function filterBy(text) {
  state.filter = text;
  keepFilter();
  renderInPlace();
}

// ---- the list of episodes, which draws only the visible rows
// The columns of the list: their width, what they show, and the least width of the window that has them.
const COLUMNS = {
  place: ["52px", 700, (e) => span("dim", "#" + e.i)],
  step: ["44px", 900, (e) => span("num", stepOf(e) ?? "–")],
  role: ["92px", 900, (e) => span("dim", safe(e.o ?? ""))],
  task: [
    "minmax(110px, 2fr)",
    0,
    (e, run) => h("span", { title: taskTitle(run, e) }, safe(taskName(run, e))),
  ],
  member: ["62px", 900, (e) => span("num", e.m)],
  answer: ["minmax(70px, 1fr)", 500, (e) => h("span", { title: e.x || e.A }, safe(e.x || e.A))],
  expected: ["minmax(60px, 0.7fr)", 700, (e, run) => span("dim", safe(expectedOf(run, e)))],
  reward: ["58px", 0, (e) => span("num", fix(e.r, 3))],
  stop: ["170px", 700, (e) => span("", stopPill(e.s))],
  end: ["26px", 0, (e) => h("span", { title: e.s, class: kindOf(e.s) }, MARKS[kindOf(e.s)])],
  turns: ["46px", 1000, (e) => span("num", e.n)],
  tokens: ["58px", 1000, (e) => span("num", big(e.t))],
  time: ["70px", 900, (e) => span("num", seconds(e.q))],
};

function columnsOf(run) {
  const absent = {
    step: run.episodes.every((e) => stepOf(e) === null),
    role: run.episodes.every(isOwn),
    expected: run.tasks.every(([, expected]) => !expected),
    end: innerWidth >= COLUMNS.stop[1],
  };
  return Object.keys(COLUMNS).filter((name) => innerWidth >= COLUMNS[name][1] && !absent[name]);
}

function listRow(r, e, columns, top) {
  const href = `#/r/${idOf(r)}/e/${e.i}`;
  const cells = columns.map((name) => COLUMNS[name][2](e, runs[r]));
  return h("a", { class: "vrow", href, style: `top:${top}px` }, cells);
}

const NUMBERS = new Set(["step", "member", "reward", "turns", "tokens", "time"]);
const HEADS = { place: "#", answer: "answer or error", end: "" };

function virtualList(r, run) {
  const list = h("div", { class: "vlist", tabindex: 0 });
  const inner = div("inner");
  const columns = columnsOf(run);
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
    paint();
  };
  const sortBy = (name) => {
    state.desc = state.sort === name && !state.desc;
    state.sort = name;
    refill();
  };
  const names = columns.map((name) => {
    const about = { title: "sort by " + name, "aria-label": "sort by " + name };
    const kind = NUMBERS.has(name) ? "plain num" : "plain";
    return h("button", { class: kind, ...about, onclick: () => sortBy(name) }, HEADS[name] ?? name);
  });
  const widths = "--columns:" + columns.map((name) => COLUMNS[name][0]).join(" ");
  const box = h("div", { class: "list", style: widths }, div("vhead", names), list);
  list.append(inner);
  list.addEventListener("scroll", paint, { passive: true });
  refill();
  return { box, refill };
}
