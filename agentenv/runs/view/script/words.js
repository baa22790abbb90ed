// Numbers and outcomes as text, and text from models and tools made safe to show.

const fix = (x, digits = 2) => (!there(x) ? "–" : typeof x === "number" ? x.toFixed(digits) : String(x));
const sign = (x) => (there(x) ? (x >= 0 ? "+" : "−") + Math.abs(x).toFixed(2) : "");
const counted = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;
const percent = (x) => (100 * x).toFixed(0) + " %";
const mean = (xs) => xs.reduce((a, b) => a + b, 0) / xs.length;
// Math.min(...xs) would fail, because a long training has more rewards than a call may have arguments.
const lowest = (xs) => xs.reduce((a, b) => Math.min(a, b), Infinity);
const highest = (xs) => xs.reduce((a, b) => Math.max(a, b), -Infinity);
const clip = (text, most) => (text && text.length > most ? text.slice(0, most) + " …" : text || "");

function seconds(s) {
  if (!there(s)) return "–";
  if (s < 1) return (s * 1000).toFixed(s < 0.01 ? 2 : 0) + " ms";
  return s < 100 ? s.toFixed(2) + " s" : (s / 60).toFixed(1) + " min";
}

function duration(s) {
  if (s < 100) return s.toFixed(0) + " s";
  return s < 6000 ? (s / 60).toFixed(0) + " min" : (s / 3600).toFixed(1) + " h";
}

function big(n) {
  if (n >= 1e6) return (n / 1e6).toFixed(1) + " M";
  return n >= 1e4 ? (n / 1e3).toFixed(0) + " k" : String(n);
}

function short(x) {
  if (Number.isInteger(x)) return String(x);
  return Math.abs(x) >= 0.01 && Math.abs(x) < 1e4 ? x.toFixed(3) : x.toExponential(1);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}

// ---- outcomes: an "ok" episode ended by itself, a limit ended a "cut" one, a "fail" has no outcome
const ENDED = new Set(["final_answer", "env_terminated", "env_done", "user_done"]);
const FAILED = new Set(["aborted", "error"]);
const MARKS = { ok: "✓ ", cut: "✂ ", fail: "✕ " };

const kindOf = (stop) => (ENDED.has(stop) ? "ok" : FAILED.has(stop) ? "fail" : "cut");
const stopPill = (stop) =>
  h("span", { class: "pill " + kindOf(stop), title: stop }, MARKS[kindOf(stop)] + stop);

// ---- control characters and characters that change the direction would hide or reorder text, so their
// code is shown instead
const ODD =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function named(character) {
  const code = character.charCodeAt(0);
  if (code < 32) return String.fromCharCode(0x2400 + code);
  const title = "a character that hides or reorders text";
  return h("span", { class: "odd", title }, "U+" + code.toString(16).toUpperCase().padStart(4, "0"));
}

function safe(text) {
  const out = [];
  let end = 0;
  for (const found of String(text).matchAll(ODD)) {
    out.push(text.slice(end, found.index), named(found[0]));
    end = found.index + found[0].length;
  }
  out.push(end ? text.slice(end) : text);
  return out;
}
