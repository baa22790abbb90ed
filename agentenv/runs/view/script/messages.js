// The tab "messages": what was said, with tool errors, images, and long parts folded.

const FOLD_CHARS = 1500;
const PREVIEW_CHARS = 160;
const IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[a-zA-Z0-9+/=\s]+$/;
const THOUGHT = /^\s*<(think|thinking|reasoning)>([\s\S]*?)<\/\1>\s*/;

const preview = (text) => clip(text.replace(/\s+/g, " ").trim(), PREVIEW_CHARS);
const copyButton = (text, what) =>
  h("button", { class: "copy", "aria-label": "copy " + what, onclick: () => copy(text) }, "copy");

function fold(title, body, open = false) {
  return h("details", { class: "fold", open }, h("summary", {}, title), body);
}

// Text that is JSON is shown in lines; what is long is folded behind its beginning.
function foldedText(text) {
  const shown = pretty(text);
  const body = h("pre", { dir: "auto" }, safe(shown));
  if (shown.length <= FOLD_CHARS) return body;
  const kind = shown === text ? "" : "JSON · ";
  return fold([`${kind}${big(text.length)} characters: `, span("dim", safe(preview(text)))], body);
}

// Only images that are in the page are shown; nothing is loaded from elsewhere.
function imagePart(piece) {
  const url = String((piece.image_url && (piece.image_url.url || piece.image_url)) || "");
  if (IMAGE.test(url)) return h("img", { src: url, alt: "image in the message", class: "shown" });
  return div("dim mark", "image, not loaded: ", safe(clip(url, 200)));
}

function contentNodes(content) {
  if (!there(content) || content === "") return [];
  if (!Array.isArray(content)) {
    return [foldedText(typeof content === "string" ? content : JSON.stringify(content))];
  }
  return content.map((piece) => {
    if (piece && piece.type === "image_url") return imagePart(piece);
    return foldedText(piece && typeof piece.text === "string" ? piece.text : JSON.stringify(piece));
  });
}

function thoughtNodes(text) {
  if (!text) return null;
  const title = [`thinking, ${big(text.length)} characters: `, span("dim", safe(preview(text)))];
  return fold(title, h("pre", { class: "dim", dir: "auto" }, safe(text)));
}

function callNode(call) {
  const { name, arguments: given } = call.function;
  return div(
    "call",
    div("callhead", span("", "→ ", h("b", {}, safe(name))), copyButton(String(given), "the arguments")),
    foldedText(String(given)),
  );
}

// ---- what the message was in the episode
const hasUser = (ep) => ep.metrics.user_turns > 0;

function roleTitle(ep, message) {
  if (message.role === "user") {
    if (!hasUser(ep)) return "USER · observation";
    const before = ep.messages.slice(0, ep.messages.indexOf(message));
    return before.some((one) => one.role === "assistant") ? "USER · simulated" : "USER · opening";
  }
  if (message.role === "tool") return ["TOOL ", safe(message.name || "")];
  return safe(String(message.role).toUpperCase());
}

// The last assistant messages are the turns; messages before them belong to the prompt.
function turnsOfMessages(ep) {
  const said = ep.messages.filter((message) => message.role === "assistant");
  const skipped = said.length - ep.turns.length;
  if (skipped < 0) return new Map(); // messages were left out, so nothing says which turn is whose
  return new Map(said.map((message, n) => [message, ep.turns[n - skipped]]).filter(([, turn]) => turn));
}

function resultsById(ep) {
  return new Map(ep.turns.flatMap((turn) => turn.tool_results.map((result) => [result.tool_call_id, result])));
}

function resultMarks(result) {
  if (!result) return null;
  const detail = result.detail && fold("detail, not shown to the model", h("pre", {}, safe(result.detail)));
  return [result.trimmed && trimMark(result), detail];
}

function tokenLink(ep, turn, base) {
  if (!turn || !ep.sequences.length) return null;
  const place = firstPlace(ep, turn);
  return h("a", { class: "copy", href: `${base}/t/${place}` }, `tokens ${place}+${turn.num_tokens}`);
}

function messageBox(ep, message, { turn, result, base }) {
  const kinds = { assistant: "model", tool: "env" };
  const failed = result && result.error_kind;
  const content = String(message.content ?? "");
  const thought = typeof message.content === "string" ? THOUGHT.exec(message.content) : null;
  const rest = thought ? message.content.slice(thought[0].length) : message.content;
  const spent = result && result.duration_s ? span("", seconds(result.duration_s)) : null;
  const ends = { length: "✂ cut at its length", content_filter: "✂ withheld by a filter" };
  const cut = turn && ends[turn.finish_reason] && span("pill cut", ends[turn.finish_reason]);
  const own = message.provider_specific_fields;
  return h(
    "section",
    { class: `box ${kinds[message.role] || "prompt"}${failed ? " failed" : ""}` },
    h(
      "h4",
      {},
      h("b", {}, roleTitle(ep, message), turn && ` · TURN ${ep.turns.indexOf(turn) + 1}`),
      spent,
      failed && span("pill fail", "✕ " + result.error_kind),
      cut,
      span(
        "actions",
        tokenLink(ep, turn, base),
        content && copyButton(copied(message.content), "the message"),
      ),
    ),
    thoughtNodes(message.reasoning_content),
    thought && thoughtNodes(thought[2].trim()),
    contentNodes(rest),
    (message.tool_calls || []).map(callNode),
    own && fold("what else the API said, which goes back to it", h("pre", {}, safe(copied(own)))),
    resultMarks(result),
  );
}

const copied = (content) => (typeof content === "string" ? content : JSON.stringify(content, null, 1));

// How a request of an agent with a loop of its own differs from what was recorded before.
const FORKS = new Map([
  ["new", "another conversation"],
  ["edited", "its history has replies that the model did not give"],
  ["forked", "goes on from an earlier reply"],
  ["parallel", "goes on from a reply while another request does"],
]);

function rewriteBox(rewrite) {
  const shown = rewrite.messages.map((message) =>
    div("", h("b", {}, safe(message.role)), " ", foldedText(copied(message.content ?? ""))),
  );
  const { length } = rewrite.messages;
  const why = FORKS.has(rewrite.cause) ? `${rewrite.cause}: ${FORKS.get(rewrite.cause)}` : rewrite.cause;
  const title = `the model then saw ${length} messages instead of those above (${why})`;
  return div("warn", fold(safe(title), shown));
}

// `base` is the address of the episode.
function messageBoxes(ep, base) {
  const turns = turnsOfMessages(ep);
  const results = resultsById(ep);
  return ep.messages.map((message) => {
    const turn = turns.get(message);
    const rewrites = turn ? ep.rewrites.filter((rewrite) => rewrite.turn === ep.turns.indexOf(turn)) : [];
    const result = message.role === "tool" ? results.get(message.tool_call_id) : null;
    return [rewrites.map(rewriteBox), messageBox(ep, message, { turn, result, base })];
  });
}

// ---- the tree of an episode's sequences: what each shares with an earlier one, and where it leaves it
const MAX_BRANCHES = 64;

function sharedLength(left, right) {
  const most = Math.min(left.length, right.length);
  let n = 0;
  while (n < most && left[n] === right[n]) n++;
  return n;
}

function branches(ep) {
  const ids = ep.sequences.slice(0, MAX_BRANCHES).map((parts) => parts.flatMap((part) => part.ids));
  const found = [];
  ids.forEach((own, n) => {
    let [parent, shared] = [-1, 0];
    for (let m = 0; m < n; m++) {
      const length = sharedLength(own, ids[m]);
      if (length > shared) [parent, shared] = [m, length];
    }
    const first = ep.turns.findIndex((turn) => turn.sequence === n);
    const rewrite = n > 0 && ep.rewrites.find((one) => one.turn === first);
    // The record of an agent says what a sequence took over; equal beginnings of others are a coincidence.
    if (rewrite && FORKS.has(rewrite.cause)) {
      [parent, shared] = [rewrite.parent ?? -1, rewrite.shared_tokens];
      if (parent >= ids.length) parent = -1;
    }
    found.push({ n, parent, shared, length: own.length, cause: rewrite ? rewrite.cause : "" });
  });
  return found;
}

function branchTree(ep) {
  if (ep.sequences.length < 2) return null;
  const found = branches(ep);
  const kids = groupedBy(found, (branch) => branch.parent);
  const line = (branch) => {
    const { n, parent, shared, length, cause } = branch;
    const words =
      parent < 0 ? `${length} tokens` : `${shared} tokens of ${parent + 1}, then ${length - shared} own`;
    const jump = () => showToken(sequenceStart(ep, n) + (parent < 0 ? 0 : Math.min(shared, length - 1)));
    const below = kids.get(n);
    return h(
      "li",
      {},
      h(
        "button",
        { class: "plain", onclick: jump },
        h("b", {}, "context " + (n + 1)),
        cause && h("span", { class: "pill", title: FORKS.get(cause) || "condensed" }, safe(cause)),
        span("dim", " " + words),
      ),
      below && h("ul", {}, below.map(line)),
    );
  };
  const left = ep.sequences.length - found.length;
  return h(
    "nav",
    { class: "tree", "aria-label": "contexts of the episode" },
    h("ul", {}, (kids.get(-1) || []).map(line)),
    left > 0 && div("dim", `${left} more contexts`),
  );
}
