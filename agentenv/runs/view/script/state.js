// The data of the page, the choices of the reader, and the episodes that these choices select.

const page = JSON.parse(document.getElementById("page").textContent);
const runs = page.runs;
const root = document.getElementById("app");
const state = {
  tab: "logprob",
  sort: page.sort || "place",
  desc: false,
  filter: "",
  picked: new Set(),
  box: -1,
  search: "",
};
const MAX_KEPT = 60;
const kept = new Map();

async function unpack(node) {
  const raw = Uint8Array.from(atob(node.textContent.trim()), (c) => c.charCodeAt(0));
  const text = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(text).json();
}

// A live page sends the server's token with every request.
const pass = "&token=" + encodeURIComponent(page.token || "");

async function ask(r, i) {
  const got = await fetch("episode?run=" + encodeURIComponent(runs[r].id) + "&place=" + i + pass);
  if (!got.ok) return null;
  const data = await got.json();
  Object.assign(runs[r].vocab, data.vocab || {});
  return data;
}

// The tokens of an episode; null if the page does not contain them.
async function payload(r, i) {
  const key = runs[r].id + "/" + i;
  if (kept.has(key)) return kept.get(key);
  const node = document.getElementById(`e${r}-${i}`);
  const data = node ? await unpack(node) : page.live ? await ask(r, i) : null;
  kept.set(key, data);
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
  return data;
}

// ---- filter and order
const words = () => state.filter.split(/\s+/).filter(Boolean);
const has = (text, part) => text.toLowerCase().includes(part.toLowerCase());
const matches = (text) => words().every((word) => has(text, word));
const COMPARE = { "<": (a, b) => a < b, ">": (a, b) => a > b, "=": (a, b) => a === b };
const toolFailed = (use, text) => use[2] && has(use[2] + " " + use[3], text);

const QUESTIONS = [
  [/^reward([<>=])(-?[\d.]+)$/, (e, how, value) => e.r !== null && COMPARE[how](e.r, +value)],
  [/^stop:(.*)$/, (e, stop) => e.s.startsWith(stop)],
  [/^step:(\d+)$/, (e, step) => e.w === +step],
  [/^role:(.*)$/, (e, role) => (e.o ?? "").startsWith(role)],
  [/^tool:(.*)$/, (e, name) => e.T.some((use) => use[0].startsWith(name))],
  [/^error:(.*)$/, (e, text) => has(e.x, text) || e.T.some((use) => toolFailed(use, text))],
];

function asked(e, word) {
  for (const [shape, answer] of QUESTIONS) {
    const found = shape.exec(word);
    if (found) return answer(e, ...found.slice(1));
  }
  return has([e.k, e.g, e.e, e.s, e.x, e.A].join(" "), word);
}

const SORTS = {
  place: (e) => e.i,
  step: (e) => e.w ?? 0,
  task: (e) => e.k,
  member: (e) => e.m,
  reward: (e) => e.r ?? -Infinity,
  stop: (e) => e.s,
  turns: (e) => e.n,
  tokens: (e) => e.t,
  time: (e) => e.q ?? 0,
};

function ordered(run) {
  const key = SORTS[state.sort] || SORTS.place;
  const way = state.desc ? -1 : 1;
  const asking = words();
  const found = run.episodes.filter((e) => asking.every((word) => asked(e, word)));
  return found.sort((a, b) => (key(a) < key(b) ? -way : key(a) > key(b) ? way : a.i - b.i));
}

// ---- groups
const groupOf = (run, e) =>
  run.episodes.filter((o) => o.g === e.g && o.k === e.k && o.e === e.e).sort((a, b) => a.m - b.m);

// The advantages that the trainer used; for an evaluation, those that GRPO would use.
function advantages(group) {
  if (group.some((e) => e.w !== null || e.a !== null))
    return { of: (e) => e.a, text: "advantage: as the trainer used it" };
  const rewards = group.filter((e) => e.r !== null && !FAILED.has(e.s)).map((e) => e.r);
  if (rewards.length < 2)
    return {
      of: () => null,
      text: rewards.length ? "only one scored episode, so no advantage" : "no scored episode",
    };
  const mu = mean(rewards);
  const sd = Math.sqrt(rewards.reduce((sum, r) => sum + (r - mu) ** 2, 0) / (rewards.length - 1));
  const of = (e) => (e.r === null ? null : sd === 0 ? 0 : (e.r - mu) / sd);
  return { of, text: `reward μ ${fix(mu)} s ${fix(sd)} · advantage = (r−μ)/s, from the rewards` };
}

function spreadOf(group) {
  const rewards = group.filter((e) => e.r !== null).map((e) => e.r);
  if (rewards.length < 2) return "";
  return Math.max(...rewards) > Math.min(...rewards)
    ? "reward spread ok"
    : "no reward spread: this group adds no gradient";
}
