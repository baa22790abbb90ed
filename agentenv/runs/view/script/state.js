// The data of the page, the choices of the reader, and the episodes that these choices select.

const page = JSON.parse(document.getElementById("page").textContent);
const runs = page.runs;
const root = document.getElementById("app");
const state = {
  tab: "logprob",
  sort: page.sort || "place",
  desc: false,
  filter: "",
  list: "",
  picked: new Set(),
  box: -1,
  token: null,
  episode: "",
  smooth: 0,
  log: false,
  recolour: null,
  moveStep: null,
  fresh: null,
  search: "",
};
const idOf = (r) => encodeURIComponent(runs[r].id);

// The index of the run with this id; a number alone is the place in the page.
function runAt(id) {
  const found = runs.findIndex((run) => encodeURIComponent(run.id) === id || run.id === id);
  return found < 0 && /^\d+$/.test(id) ? +id : found;
}

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

// ---- what a task was: the beginning of its first observation, and its answer where the task names one
const questionOf = (run, e) => (run.tasks[e.Q] || ["", ""])[0];
const expectedOf = (run, e) => (run.tasks[e.Q] || ["", ""])[1];
const naming = new WeakMap();
const MIN_SHARED_CHARS = 24;

// The words with which all questions of the run begin, and the questions that several tasks share.
function namesOf(run) {
  if (naming.has(run)) return naming.get(run);
  const [first, ...rest] = [...new Set(run.tasks.map(([question]) => String(question)))];
  let shared = rest.length ? first.length : 0;
  for (const text of rest) while (!text.startsWith(first.slice(0, shared))) shared--;
  shared = shared < MIN_SHARED_CHARS ? 0 : first.lastIndexOf(" ", shared) + 1;
  const [owner, several] = [new Map(), new Set()];
  for (const e of run.episodes) {
    const task = e.e + "\n" + e.k;
    const question = questionOf(run, e);
    if (owner.has(question) && owner.get(question) !== task) several.add(question);
    owner.set(question, task);
  }
  naming.set(run, { shared, several });
  return naming.get(run);
}

// A line that tells this task from the others; its id alone if the run has no text of it.
function taskName(run, e) {
  const question = String(questionOf(run, e));
  if (!question) return e.k;
  const { shared, several } = namesOf(run);
  const words = shared && question.length > shared ? "… " + question.slice(shared) : question;
  return several.has(question) ? `${e.k} · ${words}` : words;
}

const taskTitle = (run, e) => [e.k, questionOf(run, e)].filter(Boolean).join(": ");

// The run whose episodes this run continues.
const sourceOf = (run) => (run.config && run.config.branched_from) || "";

// The step whose policy played an episode; held-out episodes name it in their group.
const HELD_OUT = /^held-out-(\d+):/;

function stepOf(e) {
  const found = e.o ? HELD_OUT.exec(e.g) : null;
  return found ? +found[1] : e.w;
}

// ---- filter and order
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function keepFilter() {
  const path = location.hash.split("?")[0] || "#/";
  const hash = path + (state.filter ? "?" + encodeURIComponent(state.filter) : "");
  try {
    if (hash !== (location.hash || "#/")) history.replaceState(null, "", hash);
  } catch {
    // A page inside another one has no address of its own.
  }
}

const words = () => state.filter.split(/\s+/).filter(Boolean);
const has = (text, part) => text.toLowerCase().includes(part.toLowerCase());
const matches = (text) => words().every((word) => has(text, word));
const COMPARE = {
  "<": (a, b) => a < b,
  ">": (a, b) => a > b,
  "<=": (a, b) => a <= b,
  ">=": (a, b) => a >= b,
  "=": (a, b) => a === b,
};
const FILTER_HELP =
  "words that must all occur, or stop:max_turns  reward<0.5  reward>=1  tool:calc  error:field  step:3  " +
  "role:held-out";
const toolFailed = (use, text) => use[2] && has(use[2] + " " + use[3], text);

const QUESTIONS = [
  [/^reward([<>]=?|=)(-?[\d.]+)$/, (e, how, value) => e.r !== null && COMPARE[how](e.r, +value)],
  [/^stop:(.*)$/, (e, stop) => e.s.startsWith(stop)],
  [/^step:(\d+)$/, (e, step) => stepOf(e) === +step],
  [/^role:(.*)$/, (e, role) => (e.o ?? "trained").startsWith(role)],
  [/^tool:(.*)$/, (e, name) => e.T.some((use) => use[0].startsWith(name))],
  [/^error:(.*)$/, (e, text) => has(e.x, text) || e.T.some((use) => toolFailed(use, text))],
];

function asked(run, e, word) {
  for (const [shape, answer] of QUESTIONS) {
    const found = shape.exec(word);
    if (found) return answer(e, ...found.slice(1));
  }
  return has([e.k, e.g, e.e, e.s, e.x, e.A, questionOf(run, e), expectedOf(run, e)].join(" "), word);
}

const SORTS = {
  place: (e) => e.i,
  step: (e) => stepOf(e) ?? 0,
  task: (e, run) => taskName(run, e),
  member: (e) => e.m,
  reward: (e) => e.r ?? -Infinity,
  stop: (e) => e.s,
  end: (e) => e.s,
  role: (e) => e.o ?? "",
  answer: (e) => e.x || e.A,
  expected: (e, run) => expectedOf(run, e),
  turns: (e) => e.n,
  tokens: (e) => e.t,
  time: (e) => e.q ?? 0,
};

// The episodes that the filter asks for; what the model was shown stands apart, unless the filter names roles.
function selected(run) {
  const asking = words();
  const apart = !asking.some((word) => word.startsWith("role:"));
  const found = run.episodes.filter((e) => asking.every((word) => asked(run, e, word)));
  const others = found.filter((e) => e.o !== "demonstration");
  return apart && others.length ? others : found;
}

function ordered(run) {
  const key = SORTS[state.sort] || SORTS.place;
  const way = state.desc ? -1 : 1;
  const found = selected(run);
  const keys = new Map(found.map((e) => [e, key(e, run)]));
  return found.sort((a, b) => {
    const [left, right] = [keys.get(a), keys.get(b)];
    return left < right ? -way : left > right ? way : a.i - b.i;
  });
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
