// Helpers that make elements. Text from models and tools enters the page only as text nodes; no HTML is made
// from data.

const there = (kid) => kid !== null && kid !== undefined && kid !== false;

function fill(node, kids) {
  node.append(...kids.flat(9).filter(there));
  return node;
}

function put(node, ...kids) {
  node.replaceChildren(...kids.flat(9).filter(there));
}

function h(tag, attributes, ...kids) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (!there(value)) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  return fill(node, kids);
}

const div = (kind, ...kids) => h("div", { class: kind }, ...kids);
const span = (kind, ...kids) => h("span", { class: kind }, ...kids);
const link = (href, ...kids) => h("a", { href }, ...kids);

function svg(tag, attributes, ...kids) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  return fill(node, kids);
}

function svgText(x, y, words) {
  return svg("text", { x, y }, words);
}

// A head in brackets stands over numbers.
function table(head, rows) {
  const top =
    head.length > 0 &&
    h(
      "tr",
      {},
      head.map((name) => (Array.isArray(name) ? h("th", { class: "num" }, name) : h("th", {}, name))),
    );
  return h("table", {}, top, rows);
}

function row(cells, kind = "row") {
  return h(
    "tr",
    { class: kind },
    cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : h("td", {}, cell))),
  );
}

const num = (...kids) => h("td", { class: "num" }, ...kids);

// All bars of a table have the same scale.
const shareBar = (share) =>
  h("td", { class: "half" }, div("bar", h("i", { class: "model", style: `width:${100 * share}%` })));

function copy(text) {
  const area = h("textarea", { class: "offscreen" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
