// Navigation, keyboard keys, and updates of running runs.

const KEYS = [
  ["← →", "previous or next episode"],
  ["j k", "next or previous turn"],
  ["l m e r a d", "colour by logprob, mask, entropy, ratio, advantage or difference"],
  ["s", "show the messages"],
  ["/", "filter the list, or search in an episode"],
  ["u", "go up"],
  ["n p", "next or previous token, after a click on one"],
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

const address = () => location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
const onEpisode = () => Boolean(document.querySelector(".ep"));

function render() {
  const [kind, a, b, c, d, token] = address();
  state.box = -1;
  state.token = d === "t" ? +token : null;
  state.repaint = null;
  showing = null;
  if (kind === "r" && runs[+a]) return b === "e" ? pageEpisode(+a, +c) : pageRun(+a);
  if (kind === "compare" && runs[+a] && runs[+b]) return pageCompare(+a, +b);
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
  if (next) go(`#/r/${runs.indexOf(run)}/e/${next.i}`);
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
  const box = document.getElementById("search");
  if (box) box.value = "";
  if (again) again();
}

function click(selector) {
  const node = document.querySelector(selector);
  if (node) node.click();
}

function focus(id) {
  const node = document.getElementById(id);
  if (node) node.focus();
}

const ANYWHERE = {
  t: toggleTheme,
  "?": showKeys,
  Escape: clear,
  u: () => go(onEpisode() && address()[0] === "r" ? "#/r/" + address()[1] : "#/"),
};
const IN_EPISODE = {
  ArrowRight: () => moveEpisode(1),
  ArrowLeft: () => moveEpisode(-1),
  j: () => moveBox(1),
  k: () => moveBox(-1),
  n: () => state.token !== null && chooseToken(state.token + 1),
  p: () => state.token !== null && chooseToken(Math.max(0, state.token - 1)),
  c: () => click("#copy-json"),
  "/": () => focus("search"),
};
const IN_LISTS = { "/": () => focus("filter"), Enter: () => click(".vrow") };

function keyed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (typing && event.key !== "Escape") return;
  if (typing) event.target.blur();
  const tab = onEpisode() && TAB_KEYS[event.key];
  const act = tab
    ? () => chooseTab(tab)
    : ANYWHERE[event.key] || (onEpisode() ? IN_EPISODE : IN_LISTS)[event.key];
  if (!act || (event.key === "Enter" && event.target !== document.body)) return;
  act();
  event.preventDefault();
}

// ---- updates of running runs, which the live server sends
function takeNews(event) {
  const news = JSON.parse(event.data);
  const index = runs.findIndex((run) => run.id === news.id);
  if (index < 0) runs.unshift(news);
  else {
    news.vocab = { ...runs[index].vocab, ...news.vocab };
    runs[index] = news;
  }
  const reading = onEpisode() || (document.activeElement && document.activeElement.id === "filter");
  if (!reading) renderInPlace();
}

function renderInPlace() {
  const offset = (node) => (node ? node.scrollTop : 0);
  const outer = document.scrollingElement.scrollTop;
  const inner = offset(document.querySelector(".vlist"));
  render();
  document.scrollingElement.scrollTop = outer;
  const list = document.querySelector(".vlist");
  if (list) list.scrollTop = inner;
}

startTheme();
document.addEventListener("keydown", keyed);
window.addEventListener("hashchange", render);
if (page.live && window.EventSource)
  new EventSource("events?page=" + page.number + pass).onmessage = takeNews;
render();
