// The figures of the episodes that a filter selects; runs/report.py computes the same of a whole run.

const Z95 = 1.959963984540054;

// The 97.5 % quantile of Student's t distribution: G. W. Hill, Algorithm 396, CACM 13 (1970).
function studentT(degrees) {
  const n = degrees;
  const p = 0.05;
  if (n === 1) return 1 / Math.tan((p * Math.PI) / 2);
  if (n === 2) return Math.sqrt(2 / (p * (2 - p)) - 2);
  const a = 1 / (n - 0.5);
  const b = 48 / (a * a);
  let c = (((20700 * a) / b - 98) * a - 16) * a + 96.36;
  const d = ((94.5 / (b + c) - 3) / b + 1) * Math.sqrt((a * Math.PI) / 2) * n;
  let y = (d * p) ** (2 / n);
  if (y <= 0.05 + a) {
    const tail = 1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4);
    return Math.sqrt(n * (((tail * y - 1) * (n + 1)) / (n + 2) + 1 / y));
  }
  const x = -Z95;
  if (n < 5) c += 0.3 * (n - 4.5) * (x + 0.6);
  c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b;
  y = x * x;
  y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x;
  return Math.sqrt(n * Math.expm1(a * y * y));
}

function wilson(share, draws) {
  const z = Z95 * Z95;
  const centre = (share + z / (2 * draws)) / (1 + z / draws);
  const half = (Z95 * Math.sqrt((share * (1 - share)) / draws + z / (4 * draws * draws))) / (1 + z / draws);
  return { low: Math.max(0, centre - half), high: Math.min(1, centre + half) };
}

// A mean whose interval counts each task as one independent draw (runs/stats.py: clustered_mean).
function clusteredMean(tasks) {
  const groups = tasks.length === 1 ? tasks[0].map((value) => [value]) : tasks;
  const values = groups.flat();
  const [count, num] = [values.length, groups.length];
  const mu = mean(values);
  const squares = groups.map((group) => group.reduce((sum, value) => sum + value - mu, 0) ** 2);
  const variance = num > 1 ? ((num / (num - 1)) * squares.reduce((a, b) => a + b, 0)) / count ** 2 : 0;
  if (values.every((value) => value === 0 || value === 1)) {
    const draws = variance > 0 ? (mu * (1 - mu)) / variance : num;
    return { mean: mu, ...wilson(mu, Math.max(1, Math.min(draws, count))) };
  }
  const half = num > 1 ? studentT(num - 1) * Math.sqrt(variance) : Infinity;
  if (num === 1 || values.some((value) => value < 0 || value > 1))
    return { mean: mu, low: mu - half, high: mu + half };
  return { mean: mu, low: Math.max(0, mu - half), high: Math.min(1, mu + half) };
}

// The share of draws of k from n, of which `chosen` count, that are all among those that count.
function allOf(n, chosen, k) {
  let share = 1;
  for (let drawn = 0; drawn < k; drawn++) share *= Math.max(0, chosen - drawn) / (n - drawn);
  return share;
}

function passes(tasks, successAt) {
  const tried = tasks.map((rewards) => [rewards.length, rewards.filter((r) => r >= successAt).length]);
  const largest = highest(tried.map(([n]) => n));
  const ks = [...new Set([1, 2, 4, 8, 16, 32, 64, 128, largest])].filter((k) => k >= 1 && k <= largest);
  const [at, all] = [{}, {}];
  for (const k of ks.sort((a, b) => a - b)) {
    const whole = tried.filter(([n]) => n >= k);
    at[k] = mean(whole.map(([n, passed]) => 1 - allOf(n, n - passed, k)));
    all[k] = mean(whole.map(([n, passed]) => allOf(n, passed, k)));
  }
  return { pass_at: at, pass_all: all };
}

function countsOf(names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

function groupedBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (groups.has(key)) groups.get(key).push(item);
    else groups.set(key, [item]);
  }
  return groups;
}

const taskOf = (e) => e.e + "\n" + e.k;
const isScored = (e) => e.r !== null && !FAILED.has(e.s);

// The report of these episodes, in the shape of `run.report`; what only the whole run can say is absent.
function reportOf(run, episodes) {
  const scored = episodes.filter(isScored);
  const tasks = [...groupedBy(scored, taskOf).values()].map((members) => members.map((e) => e.r));
  const groups = tasks.filter((rewards) => rewards.length > 1);
  const parts = groupedBy(
    scored.flatMap((e) => Object.entries(e.R).filter(([, value]) => there(value))),
    ([name]) => name,
  );
  const successAt = run.report.success_at;
  return {
    num_tasks: new Set(episodes.map(taskOf)).size,
    num_scored: scored.length,
    reward: scored.length ? clusteredMean(tasks) : null,
    success_at: successAt,
    ...(scored.length ? passes(tasks, successAt) : { pass_at: {}, pass_all: {} }),
    majority: null,
    cost_usd: null,
    rewards: Object.fromEntries([...parts].map(([name, found]) => [name, mean(found.map(([, x]) => x))])),
    stop_reasons: Object.fromEntries(countsOf(episodes.map((e) => e.s))),
    num_groups: groups.length,
    num_groups_with_spread: groups.filter((rewards) => highest(rewards) > lowest(rewards)).length,
    total_tokens: episodes.reduce((sum, e) => sum + e.t, 0),
    truncated_share: mean(episodes.map((e) => +(kindOf(e.s) === "cut"))),
    errors: countsOf(episodes.map((e) => e.x).filter(Boolean)).map(([error, count]) => ({ error, count })),
  };
}

const RESAMPLES = 4000;
const MAX_DRAWS = 4e6;

// A generator of numbers from 0 to 1 that gives the same numbers each time (mulberry32).
function generator(seed) {
  let a = seed;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// The percentile bootstrap of paired differences, as `agentenv diff` computes it.
function bootstrapMean(values) {
  const draw = generator(1);
  const count = values.length;
  const times = Math.max(200, Math.min(RESAMPLES, Math.floor(MAX_DRAWS / count)));
  const means = Array.from({ length: times }, () => {
    let sum = 0;
    for (let n = 0; n < count; n++) sum += values[Math.floor(draw() * count)];
    return sum / count;
  }).sort((a, b) => a - b);
  const at = (share) => {
    const place = share * (times - 1);
    const low = Math.floor(place);
    return means[low] + (means[Math.min(low + 1, times - 1)] - means[low]) * (place - low);
  };
  return { mean: mean(values), low: at(0.025), high: at(0.975) };
}

// ---- the last step of a training, whose figures stand for the run
const lastReports = new WeakMap();

function lastReport(run) {
  if (!lastReports.has(run)) {
    const own = run.episodes.filter((e) => !e.o && e.w !== null);
    const steps = new Set(own.map((e) => e.w));
    const step = highest([...steps]);
    const episodes = own.filter((e) => e.w === step);
    const found = { step, steps: steps.size, count: episodes.length, report: reportOf(run, episodes) };
    lastReports.set(run, steps.size ? found : null);
  }
  return lastReports.get(run);
}

const headline = (run) => (lastReport(run) || run).report.reward;
