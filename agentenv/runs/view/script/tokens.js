// The tokens as they were sampled: one box for each span, with colours that the reader chooses.

const CHUNK = 800;
const TABS = ["logprob", "entropy", "mask", "ratio", "advantage", "diff", "messages", "raw json"];
const TOKEN_TABS = new Set(TABS.slice(0, 6));
const LEGENDS = {
  logprob: "red: unlikely when it was sampled (−logprob, darkest at 6)",
  entropy: "violet: the policy was unsure (entropy in nats, darkest at 5)",
  mask: "blue: in the loss mask, so trained",
  ratio: "red: likelier after the update than when sampled; blue: less likely (darkest at a factor of 2)",
  advantage: "green: positive advantage; red: negative, as used in the loss",
  diff: "pale: the same as in another episode of the group",
};

// A token may contain only a part of a character, so bytes are joined before they are decoded.
function tokenTexts(part, vocab) {
  const decoder = new TextDecoder("utf-8");
  const last = part.ids.length - 1;
  return part.ids.map((id, n) => {
    const piece = vocab[id];
    if (piece === undefined) return decoder.decode() + `⟨${id}⟩`;
    return decoder.decode(
      Uint8Array.from(piece, (c) => c.charCodeAt(0)),
      { stream: n < last },
    );
  });
}

const shade = (colour, share, most = 0.62) =>
  `background:rgba(var(--${colour}),${(0.03 + most * Math.min(share, 1)).toFixed(3)})`;
const towards = (value, up, down, full) => shade(value > 0 ? up : down, Math.abs(value) / full);

const COLOURS = {
  logprob: (info) => shade("heat", -info.lp / 6),
  diff: (info) => shade("heat", -info.lp / 6),
  entropy: (info) => there(info.entropy) && shade("violet", info.entropy / 5),
  ratio: (info) => there(info.new) && towards(info.new - info.lp, "heat", "cool", Math.log(2)),
  advantage: (info) => there(info.advantage) && towards(info.advantage, "credit", "heat", 2),
  mask: () => "background:rgba(var(--cool),.22)",
};

function tip(info, part) {
  if (part.s !== "model") return `mask 0 (not trained), ${part.s}  id ${info.id}`;
  const facts = [`logp ${fix(info.lp, 4)}`, `p ${fix(Math.exp(info.lp), 4)}`];
  if (there(info.entropy)) facts.push(`H ${fix(info.entropy, 3)}`);
  if (there(info.new)) facts.push(`ratio ${fix(Math.exp(info.new - info.lp), 4)}`);
  if (there(info.advantage)) facts.push(`advantage ${fix(info.advantage, 3)}`);
  return [...facts, `id ${info.id}`].join("  ");
}

const isControl = (text) => /^<[|｜].*[|｜]>$|^<\/?[a-z_]+>$/i.test(text);

function tokenNode(text, info, part) {
  const kinds = ["t"];
  if (info.same) kinds.push("same");
  if (part.s !== "model") kinds.push("off");
  if (isControl(text)) kinds.push("ctl");
  if (state.search && has(text, state.search)) kinds.push("hit");
  const style = part.s === "model" && COLOURS[state.tab] ? COLOURS[state.tab](info) : "";
  const lines = text.split("\n").flatMap((line, n) => (n ? ["⏎\n", safe(line)] : safe(line)));
  if (info.place === state.token) kinds.push("chosen");
  const place = { "data-place": info.place };
  return h("span", { class: kinds.join(" "), style, title: tip(info, part), ...place }, lines);
}

// An image stands in the place of its tokens.
function imageNode([at, size, url], base) {
  const range = `image, tokens ${big(base + at)} to ${big(base + at + size - 1)} (${big(size)})`;
  const picture = IMAGE.test(url) && h("img", { src: url, alt: range, class: "shown" });
  return div("dim mark", picture || "its file is missing: ", range);
}

// Long spans are drawn only when they become visible.
const watcher = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting || !target.draw) continue;
      target.draw();
      watcher.unobserve(target);
    }
  },
  { rootMargin: "600px" },
);

// `view` has the index of the span's first token in the episode, and the number of shared tokens.
function tokenChunks(part, view, vocab) {
  const texts = tokenTexts(part, vocab);
  const note = view.note;
  const at = (values, place) => (values ? values[place] : undefined);
  const nodes = (from) =>
    texts.slice(from, from + CHUNK).flatMap((text, n) => {
      const own = from + n;
      const place = view.base + own;
      const shown = (part.im || []).find(([at, size]) => own >= at && own < at + size);
      if (shown) return own === shown[0] ? imageNode(shown, view.base) : [];
      const info = { id: part.ids[own], place, lp: at(part.lp, own), same: place < view.common };
      info.entropy = at(note.entropy, place);
      info.new = at(note.new_logprobs, place);
      info.advantage = at(note.advantages, place) ?? note.advantage;
      const split = place === view.common && place > 0 && div("split", "↯ first token that differs");
      return [split, tokenNode(text, info, part)];
    });
  const chunks = [];
  for (let from = 0; from < texts.length; from += CHUNK) {
    const chunk = h("div", { class: "chunk", "data-from": view.base + from });
    chunk.draw = () => {
      chunk.style.minHeight = "";
      put(chunk, nodes(from));
      chunk.draw = null;
    };
    if (texts.length > CHUNK) {
      chunk.style.minHeight = Math.ceil(Math.min(CHUNK, texts.length - from) / 12) + "em";
      watcher.observe(chunk);
    } else chunk.draw();
    chunks.push(chunk);
  }
  return chunks;
}

function titleOf(part, turn, withUser) {
  if (part.s === "model" || part.s === "other") return "ASSISTANT · TURN " + (part.t + 1);
  if (part.s !== "env") return part.s.toUpperCase();
  const calls = turn ? turn.tool_calls.map((call) => `${call.name}(${call.arguments})`) : [];
  if (calls.length) return "TOOL " + calls.join("  ");
  return (withUser ? "USER · AFTER TURN " : "ENVIRONMENT · AFTER TURN ") + (part.t + 1);
}

function factsOf(part, turn, view) {
  const facts = [`loss mask ${part.s === "model" ? 1 : 0}`, `${part.ids.length} tokens`];
  if (part.lp && part.lp.length) facts.push(`mean logp ${fix(mean(part.lp))}`);
  if (part.s === "model" && view.note.entropy && part.ids.length) {
    facts.push(`mean entropy ${fix(mean(view.note.entropy.slice(view.base, view.base + part.ids.length)))}`);
  }
  if (part.v !== null) facts.push(`weights ${part.v}`);
  if (part.s === "other") facts.push("sampled by another model");
  const spent =
    part.s === "env" && turn ? turn.tool_results.reduce((sum, one) => sum + one.duration_s, 0) : 0;
  if (spent) facts.push(seconds(spent));
  return facts.join(" · ");
}

function trimMark(result) {
  const left = typeof result.content === "string" ? result.content.length : 0;
  const size = result.full_chars
    ? `: ${big(result.full_chars)} characters, of which the model read ${big(left)}`
    : "";
  const file = result.full_output && [" · the whole output is in ", h("code", {}, safe(result.full_output))];
  return div("warn mark", "✂ output of ", safe(result.name), " trimmed here", size, file);
}

const errorMark = (result) =>
  div("warn mark", span("pill fail", "✕ " + result.error_kind), " ", safe(result.name));

function tokenBox(part, ep, view, vocab) {
  const turn = ep.turns[part.t];
  const title = safe(clip(titleOf(part, turn, hasUser(ep)), 400));
  const results = part.s === "env" && turn ? turn.tool_results : [];
  const marks = results.map((one) => [one.trimmed && trimMark(one), one.error_kind && errorMark(one)]);
  return h(
    "section",
    { class: "box " + part.s, "data-turn": part.t },
    h("h4", {}, title, h("span", {}, factsOf(part, turn, view))),
    h("pre", {}, tokenChunks(part, view, vocab)),
    marks,
  );
}

function tokenBoxes(ep, vocab, common) {
  let base = 0;
  return ep.sequences.flatMap((parts, number) => {
    const boxes = parts.map((part) => {
      const view = { base, common, note: ep.ann || {} };
      base += part.ids.length;
      return tokenBox(part, ep, view, vocab);
    });
    const title = ep.sequences.length > 1 && h("h2", {}, `context ${number + 1} of ${ep.sequences.length}`);
    return [title, ...boxes];
  });
}

// ---- one token: its numbers without a pointer, and an address that leads to it
const sequenceStart = (ep, number) =>
  ep.sequences
    .slice(0, number)
    .reduce((sum, parts) => sum + parts.reduce((n, part) => n + part.ids.length, 0), 0);
const firstPlace = (ep, turn) => sequenceStart(ep, turn.sequence) + turn.start;

function tokenAt(place) {
  const chunks = [...document.querySelectorAll(".chunk")];
  const chunk = chunks.findLast((one) => +one.dataset.from <= place);
  if (chunk && chunk.draw) chunk.draw();
  return chunk ? chunk.querySelector(`[data-place="${place}"]`) : null;
}

function tokenBar(node, place) {
  const close = h("button", { "aria-label": "close", onclick: () => chooseToken(null) }, "✕");
  const link = h("button", { onclick: () => copy(location.href) }, "copy link");
  const text = span(
    "t",
    [...node.childNodes].map((kid) => kid.cloneNode(true)),
  );
  return h(
    "div",
    { class: "tokenbar", role: "status" },
    `token ${place} `,
    text,
    span("dim", node.title),
    link,
    close,
  );
}

// Chooses a token of the drawn episode, or none; the address then names it.
function chooseToken(place) {
  for (const old of document.querySelectorAll(".t.chosen, .tokenbar")) {
    if (old.classList.contains("tokenbar")) old.remove();
    else old.classList.remove("chosen");
  }
  const node = place === null ? null : tokenAt(place);
  state.token = node ? place : null;
  nameToken();
  if (!node) return;
  node.classList.add("chosen");
  node.scrollIntoView({ block: "nearest" });
  document.querySelector(".centre").append(tokenBar(node, place));
}

function nameToken() {
  const token = state.token === null ? "" : "/t/" + state.token;
  try {
    history.replaceState(null, "", state.episode + token);
  } catch {
    // The address of a page in a sandboxed frame cannot be changed.
  }
}

async function showToken(place) {
  if (!TOKEN_TABS.has(state.tab)) {
    state.tab = "logprob";
    await state.repaint();
  }
  chooseToken(place);
}

function clickToken(event) {
  const node = event.target.closest("[data-place]");
  if (node && getSelection().isCollapsed) chooseToken(+node.dataset.place);
}
