// Navigation, keyboard keys, and updates of running runs.

const KEYS = [
  ["← →", "previous or next episode, or step"],
  ["j k", "next or previous turn"],
  ["l m e r a d", "colour by logprob, mask, entropy, ratio, advantage or difference"],
  ["s", "show the messages"],
  ["/", "filter the list, or search in an episode"],
  ["u", "go up"],
  ["n p", "next or previous token"],
  ["c", "copy the episode as JSON"],
  ["t", "switch between light and dark"],
  ["Esc", "clear the filter or the search"],
];
const TAB_KEYS = {
  l: "logprob",
  m: "mask",
  e: "entropy",
  r: "ratio",
  a: "advantage",
  d: "diff",
  s: "messages",
};

function go(hash) {
  location.hash = hash;
}

// The parts of the address. Runs stand in it by their ids, so that a link keeps its meaning when runs are added.
function address() {
  const [kind, ...rest] = location.hash.split("?")[0].replace(/^#\/?/, "").split("/").filter(Boolean);
  const isRun = { r: (n) => n === 0, compare: () => true, side: (n) => n % 2 === 0 }[kind] || (() => false);
  return [kind, ...rest.map((part, n) => (isRun(n) ? runAt(part) : part))].filter(there);
}

const wantedFilter = () => location.hash.split("?")[1];

// The filter holds for one list, its steps and its episodes, and stands in the list's address.
function readFilter() {
  const [kind, r] = address();
  const list = kind === "r" ? r : kind || (page.single && runs.length === 1 ? 0 : "all");
  const text = wantedFilter();
  if (text !== undefined) state.filter = decoded(text);
  else if (list !== state.list) state.filter = "";
  state.list = list;
}

const onEpisode = () => Boolean(document.querySelector(".ep"));

function render() {
  const [kind, a, b, c, d, token] = address();
  readFilter();
  state.box = -1;
  state.token = d === "t" ? +token : null;
  state.repaint = null;
  showing = null;
  state.recolour = state.moveStep = null;
  if (kind === "r" && runs[+a]) {
    if (b === "e") return pageEpisode(+a, +c);
    if (b === "step") return pageStep(+a, +c);
    return b === "steps" ? pageSteps(+a, +c, +d) : pageRun(+a);
  }
  const chosen = address().slice(1);
  if (kind === "compare" && chosen.length > 1 && chosen.every((r) => runs[r])) return pageCompare(chosen);
  if (kind === "side" && runs[+a] && runs[+c]) return pageSide([+a, +b], [+c, +d]);
  if (!page.single || runs.length !== 1) return pageRuns();
  const alone = !page.live && runs[0].episodes.length === 1 && !runs[0].metrics.length;
  return alone ? pageEpisode(0, 0) : pageRun(0);
}

// ---- actions of the keys
const THEME = "agentenv-theme";

function useTheme(name) {
  document.documentElement.dataset.theme = name;
}

function startTheme() {
  let chosen = null;
  try {
    chosen = localStorage.getItem(THEME);
  } catch {
    // A page in a sandboxed frame has no storage.
  }
  useTheme(chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
}

function toggleTheme() {
  useTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  if (state.recolour) state.recolour();
  try {
    localStorage.setItem(THEME, document.documentElement.dataset.theme);
  } catch {
    // A page in a sandboxed frame has no storage.
  }
}

function showKeys() {
  const rows = KEYS.map(([key, what]) => h("tr", {}, h("td", {}, h("b", {}, key)), h("td", {}, what)));
  const box = h(
    "dialog",
    {},
    h("table", {}, rows),
    h("form", { method: "dialog" }, h("button", {}, "close")),
  );
  document.body.append(box);
  box.showModal();
  box.addEventListener("close", () => box.remove());
}

function moveEpisode(by) {
  const [kind, a, b, c] = address();
  const run = kind === "r" ? runs[+a] : runs[0];
  const at = b === "e" ? +c : 0;
  const list = ordered(run);
  const index = Math.max(
    0,
    list.findIndex((e) => e.i === at),
  );
  const next = list[Math.max(0, Math.min(list.length - 1, index + by))];
  if (next) go(`#/r/${idOf(runs.indexOf(run))}/e/${next.i}`);
}

function moveBox(by) {
  const boxes = [...document.querySelectorAll(".centre .box")];
  if (!boxes.length) return;
  state.box = Math.max(0, Math.min(boxes.length - 1, state.box + by));
  boxes.forEach((box, n) => box.classList.toggle("now", n === state.box));
  boxes[state.box].scrollIntoView({ block: "start", behavior: "instant" });
}

function chooseTab(name) {
  state.tab = name;
  if (state.repaint) state.repaint();
}

function clear() {
  if (state.token !== null) return chooseToken(null);
  const again = state.search ? state.repaint : state.filter ? render : null;
  state.search = state.filter = "";
  keepFilter();
  const box = document.getElementById("search");
  if (box) box.value = "";
  if (again) again();
}

// The first token of the chosen box, or else of the first one.
function firstToken() {
  const box = document.querySelector(".box.now") || document.querySelector(".centre .box");
  const chunk = box && box.querySelector(".chunk");
  return chunk ? +chunk.dataset.from : null;
}

function click(selector) {
  const node = document.querySelector(selector);
  if (node) node.click();
}

// The first row of a list: an episode, or a run.
const openFirst = () => click(".vrow, .scroll .row a");

function focus(id) {
  const node = document.getElementById(id);
  if (node) node.focus();
}

const ANYWHERE = {
  t: toggleTheme,
  "?": showKeys,
  Escape: clear,
  u: () => go(address()[0] === "r" && address()[2] ? "#/r/" + idOf(address()[1]) : "#/"),
  ArrowRight: () => state.moveStep && state.moveStep(1),
  ArrowLeft: () => state.moveStep && state.moveStep(-1),
};
const IN_EPISODE = {
  ArrowRight: () => moveEpisode(1),
  ArrowLeft: () => moveEpisode(-1),
  j: () => moveBox(1),
  k: () => moveBox(-1),
  n: () => chooseToken(state.token === null ? firstToken() : state.token + 1),
  p: () => state.token !== null && chooseToken(Math.max(0, state.token - 1)),
  c: () => click("#copy-json"),
  "/": () => focus("search"),
};
const IN_LISTS = { "/": () => focus("filter"), Enter: openFirst };

function keyed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (typing && event.key !== "Escape") return;
  if (typing) event.target.blur();
  const tab = onEpisode() && TAB_KEYS[event.key];
  const act = tab
    ? () => chooseTab(tab)
    : (onEpisode() ? IN_EPISODE : IN_LISTS)[event.key] || ANYWHERE[event.key];
  if (!act || (event.key === "Enter" && event.target !== document.body)) return;
  act();
  event.preventDefault();
}

// ---- updates of running runs, which the live server sends
const RETRY_MS = 1000;
let later = 0;

// The indexes of the runs that the page shows; null for the list of all.
function shownRuns() {
  const [kind, ...rest] = address();
  if (kind === "r") return [+rest[0]];
  if (kind === "compare") return rest.map(Number);
  if (kind === "side") return [+rest[0], +rest[2]];
  return page.single && runs.length === 1 ? [0] : null;
}

// A new run comes last, so that what is drawn keeps its indexes; the list is sorted by time.
function takeNews(event) {
  const news = JSON.parse(event.data);
  const shown = shownRuns();
  const known = runs.findIndex((run) => run.id === news.id);
  if (known < 0) {
    if (shown && !address().length) history.replaceState(null, "", "#/r/" + idOf(0));
    state.fresh = runs.push(news) - 1;
  } else {
    news.vocab = { ...runs[known].vocab, ...news.vocab };
    runs[known] = news;
  }
  if (known < 0) return refresh();
  if (!shown || shown.includes(known)) refresh();
}

// Draws the page again, unless its reader is at something that this would take away; then it tries later.
function refresh() {
  clearTimeout(later);
  if (onEpisode() || document.querySelector(".side")) return;
  const typing = document.activeElement && document.activeElement.id === "filter";
  if (typing || document.querySelector(".plot:hover, dialog[open]")) later = setTimeout(refresh, RETRY_MS);
  else renderInPlace();
}

const SCROLLED = ".vlist, .grid, .scroll";
const summaryOf = (fold) => fold.querySelector("summary").textContent.replace(/[\d.,]+/g, "#");

// What has the focus, in words that find it in a page that was drawn again.
function focused() {
  const node = document.activeElement;
  if (!node || node === document.body) return null;
  if (node.id) return "#" + node.id;
  const href = node.getAttribute("href");
  return href ? `a[href="${CSS.escape(href)}"]` : null;
}

function renderInPlace() {
  const outer = document.scrollingElement.scrollTop;
  const inner = [...document.querySelectorAll(SCROLLED)].map((node) => [node.scrollLeft, node.scrollTop]);
  const open = new Set([...document.querySelectorAll("details[open]")].map(summaryOf));
  const focus = focused();
  render();
  for (const fold of document.querySelectorAll("details")) if (open.has(summaryOf(fold))) fold.open = true;
  document.querySelectorAll(SCROLLED).forEach((node, n) => inner[n] && node.scrollTo(...inner[n]));
  document.scrollingElement.scrollTop = outer;
  const node = focus && document.querySelector(focus);
  if (node) node.focus({ preventScroll: true });
}

startTheme();
document.addEventListener("keydown", keyed);
window.addEventListener("hashchange", render);
for (const [, width] of [...Object.values(COLUMNS), ...RUN_COLUMNS])
  // a turned phone has other columns
  if (width)
    matchMedia(`(min-width: ${width}px)`).addEventListener("change", () => onEpisode() || renderInPlace());
if (page.live && window.EventSource)
  new EventSource("events?page=" + page.number + pass).onmessage = takeNews;
render();
