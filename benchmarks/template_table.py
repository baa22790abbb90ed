"""Print the template doctor's verdicts on folders of chat templates as a Markdown table.

    python benchmarks/template_table.py trl=PATH/chat_templates llama.cpp=PATH/models/templates

Each template is used with the tests' Qwen3 vocabulary instead of its model's own; the control tokens that
the template writes are added to that vocabulary.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentenv.cli.proof import proved
from agentenv.render import Renderer

_spec = importlib.util.spec_from_file_location(
    "chat_cases", Path(__file__).parents[1] / "tests" / "helpers" / "chat_cases.py"
)
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

NOTES = (
    ("no usable tool turns: ", "no tool turns"),
    ("drops earlier thinking", "drops earlier thinking"),
    ("written as JSON", "results as JSON strings"),
    ("lose white space", "content stripped"),
    ("changed by the template", "content changed"),
    ("one call per turn", "one call a turn"),
    ("does not describe the tools", "tools not shown"),
    ("no grammar can parse", "call format unknown"),
    ("with tools", "tools move to the last user turn"),
    ("not a stop token of the model", "stop token added"),
)


def short(text: str, length: int = 110) -> str:
    """Return a text as a table cell."""
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= length else text[: length - 1] + "…"


def verdict_of(file: Path) -> tuple[str, str, str, str, str]:
    """Return the verdict, the format of calls, why it is not `fast`, what is lost, and `yes` for pictures."""
    source = file.read_text(encoding="utf-8")
    renderer = Renderer(cases.tokenizer_for(source))
    report = renderer.report
    said = [*report.reasons, *report.warnings]
    notes = [note for mark, note in NOTES if any(mark in text for text in said)]
    detail = "" if report.verdict == "fast" else "; ".join(notes)
    if report.verdict in {"refused", "no_tool_role"} and report.reasons:
        detail = "; ".join(
            [report.reasons[0].removeprefix("the template has no usable tool turns: "), *notes[1:]]
        )
    grammar = report.grammar if report.verdict in {"fast", "history"} else ""
    turns = proved(renderer) if report.verdict != "refused" else ()
    lost = ", ".join(what for what, why in turns if why)
    pictures = "yes" if re.search(r"""["']image""", source) else ""
    return report.verdict, short(grammar), short(detail), lost, pictures


def table(rows: Mapping[tuple[str, str, str, str, str], Sequence[str]]) -> str:
    """Return a Markdown table with one row for all templates of which the doctor says the same."""
    lines = [
        "| verdict | tool calls | notes | not read back | pictures | templates |",
        "|---|---|---|---|---|---|",
    ]
    for (*cells, _), names in sorted(((*row, ""), names) for row, names in rows.items()):
        lines.append(f"| {' | '.join(cells)} | {', '.join(joined(names))} |")
    return "\n".join(lines)


def joined(names: Sequence[str]) -> list[str]:
    """Return the names in order, with a template and its variant for training as one name."""
    return [
        f"{name}[_training]" if f"{name}_training" in names else name
        for name in sorted(names)
        if name.removesuffix("_training") not in set(names) - {name}
    ]


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    rows: defaultdict[tuple[str, str, str, str, str], list[str]] = defaultdict(list)
    for argument in sys.argv[1:]:
        source, _, folder = argument.rpartition("=")
        for file in sorted(Path(folder).rglob("*.jinja")):
            rows[verdict_of(file)].append(f"{source}/{file.stem}")
    print(table(rows))
    verdicts: Counter[str] = Counter()
    for (verdict, *_), names in rows.items():
        verdicts[verdict] += len(names)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
