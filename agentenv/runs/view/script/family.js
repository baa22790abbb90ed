// Episodes that go on from a turn of another one: its branches, in the same group of a training, or in a run of
// their own.

const BRANCHES = /^(.*)\/(\d+)@turn-\d+$/;
const MAX_RELATIVES = 200;
const indexes = new WeakMap();

// The episodes of a run by what their relatives know of them: group and member, or the group alone.
function indexOf(run) {
  if (!indexes.has(run)) {
    const byName = new Map(run.episodes.map((e) => [e.g + "/" + e.m, e]));
    const branched = groupedBy(
      run.episodes.filter((e) => e.b),
      (e) => (sourceOf(run) ? BRANCHES.exec(e.g)?.slice(1, 3).join("/") : e.g + "/" + e.b[0]),
    );
    indexes.set(run, { byName, branched });
  }
  return indexes.get(run);
}

// The episode that sampled the first turns of this one; null if there is none, or the page does not have it.
function parentOf({ r, e }) {
  if (!e.b) return null;
  const source = sourceOf(runs[r]);
  const at = source ? runs.findIndex((run) => run.id === source) : r;
  const name = source ? BRANCHES.exec(e.g)?.slice(1, 3).join("/") : e.g + "/" + e.b[0];
  const found = at >= 0 && indexOf(runs[at]).byName.get(name);
  return found && found !== e ? { r: at, e: found } : null;
}

function branchesOf({ r, e }) {
  const own = sourceOf(runs[r]) ? [] : [r];
  const others = runs.flatMap((run, n) => (sourceOf(run) === runs[r].id ? [n] : []));
  return [...own, ...others].flatMap((n) => {
    const found = indexOf(runs[n]).branched.get(e.g + "/" + e.m) ?? [];
    return found.map((branch) => ({ r: n, e: branch }));
  });
}

function rootOf(member) {
  let [root, above] = [member, parentOf(member)];
  for (let steps = 0; above && steps < MAX_RELATIVES; steps++) [root, above] = [above, parentOf(above)];
  return root;
}

function familyLine({ r, e }, chosen, away) {
  const turn = e.b && span("dim", ` from turn ${e.b[1] + 1}`);
  const elsewhere = r !== away && span("dim", " in ", runs[r].id);
  const here = r === chosen.r && e.i === chosen.e.i;
  const words = [h("b", {}, "#" + e.m), ` r ${fix(e.r)} `, turn, elsewhere];
  const to = { href: `#/r/${idOf(r)}/e/${e.i}`, "aria-current": here ? "true" : null, title: e.x || e.A };
  return [h("a", to, words), " ", h("span", { class: kindOf(e.s), title: e.s }, MARKS[kindOf(e.s)])];
}

// The tree of an episode and all that branched off it, and off its branches; nothing if there are none.
function familyTree(r, e) {
  const chosen = { r, e };
  const root = rootOf(chosen);
  let room = MAX_RELATIVES;
  const node = (member, away) => {
    room--;
    const below = room > 0 ? branchesOf(member).slice(0, room) : [];
    const rewards = below.map((branch) => branch.e.r).filter(there);
    const sum = rewards.length > 1 && div("dim", `${below.length} branches, mean ${fix(mean(rewards))}`);
    const kids = below.length > 0 && h("ul", {}, below.map((branch) => node(branch, member.r)));
    return h("li", {}, familyLine(member, chosen, away), sum, kids);
  };
  const tree = node(root, r);
  const alone = root.e === e && !tree.querySelector("ul");
  return !alone && h("nav", { class: "tree family", "aria-label": "branches" }, h("ul", {}, tree));
}
