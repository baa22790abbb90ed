// The grid of tasks and episodes, which has the width of the page and grows while it is scrolled.

const ROWS_AT_ONCE = 150;
const CELL_PX = [17, 64];
const NUMBER_PX = 36;

// Rewards are coloured from 0 to the best that is known, so that rewards of 0 everywhere look like 0.
function rewardRange(run, rewards) {
  const low = Math.min(0, lowest(rewards));
  return { low, high: Math.max(low, run.report.success_at, highest(rewards)) };
}

function heatCell(r, e, range, width) {
  const name = taskName(runs[r], e);
  const scored = e.r !== null;
  const colour = scored ? rewardColour(e.r, range.low, range.high) : null;
  const edge = kindOf(e.s) === "cut" ? "1px dashed var(--warnline)" : "1px solid var(--line)";
  const paint = colour ? `background:${colour.back};color:${colour.ink};border:${edge};` : "";
  return h(
    "a",
    {
      href: `#/r/${idOf(r)}/e/${e.i}`,
      title: `${name} #${e.m}: ${fix(e.r, 3)} ${e.s}`,
      "aria-label": `${name} ${e.m} ${fix(e.r)} ${e.s}`,
      class: scored ? "" : "fail-cell",
      style: `${paint}width:${width}px`,
    },
    scored && width >= NUMBER_PX && fix(e.r),
  );
}

function heat(r, run, episodes) {
  const groups = groupedBy(episodes, (e) => [e.e, e.k, e.g].join("\n"));
  const range = rewardRange(run, episodes.map((e) => e.r).filter(there));
  const rows = [...groups.values()];
  const largest = Math.max(1, highest(rows.map((group) => group.length)));
  const label = Math.min(360, 0.4 * innerWidth);
  const beside = innerWidth >= 1200 ? 422 : 0;
  const room = (innerWidth - 60 - beside - label) / largest - 1;
  const width = Math.floor(Math.max(CELL_PX[0], Math.min(CELL_PX[1], room)));
  const box = h("div", { class: "grid", tabindex: 0, style: `--label:${Math.floor(label)}px` });
  let at = 0;
  const more = () => {
    for (const group of rows.slice(at, at + ROWS_AT_ONCE)) {
      const first = group[0];
      const [at, role] = [stepOf(first), first.o ? first.o + " " : ""];
      const step = safe(role + (at === null ? "" : `step ${at}`) + (role || at !== null ? " · " : "")).join(
        "",
      );
      const cells = group.sort((a, b) => a.m - b.m).map((e) => heatCell(r, e, range, width));
      const words = h("span", { title: step + taskTitle(run, first) }, step, safe(taskName(run, first)));
      box.append(div("", words, cells));
    }
    at += ROWS_AT_ONCE;
  };
  const nearEnd = () => box.scrollTop + box.clientHeight > box.scrollHeight - 200;
  more();
  box.addEventListener("scroll", () => at < rows.length && nearEnd() && more(), { passive: true });
  const shades = [0, 0.25, 0.5, 0.75, 1].map((x) =>
    h("i", { class: "shade", style: `background:${rewardColour(x, 0, 1).back}` }),
  );
  const edges = "dashed edge: ended by a limit · hatched: no score";
  return [
    box,
    div("dim tools", span("", fix(range.low)), span("shades", shades), span("", fix(range.high)), edges),
  ];
}
