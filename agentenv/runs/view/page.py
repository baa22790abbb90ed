"""Build the page: markup, style, script and data in one HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeAlias, runtime_checkable

from agentenv.core.errors import StoreError, UsageError
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.core.visible import logger
from agentenv.runs.store.reader import Run
from agentenv.runs.store.summary import EpisodeSummary
from agentenv.runs.store.writer import RunWriter
from agentenv.runs.view.data import episode_data, pack, page_json, run_json

__all__ = ["DEFAULT_BYTES", "Show", "build_page", "frame", "page_script", "show", "write_page"]

_log = logger(__name__)

DEFAULT_BYTES = 16_000_000
"""Most bytes of episode data in a page; episodes beyond that are listed without their tokens."""

SCRIPTS = (
    "dom",
    "words",
    "state",
    "figures",
    "charts",
    "grid",
    "parts",
    "runs",
    "run",
    "tokens",
    "messages",
    "family",
    "steps",
    "episode",
    "main",
)
"""Parts of the page's script, in the order in which they are joined; each part uses earlier ones."""


def asset(name: str) -> str:
    """Return the text of one of the viewer's files."""
    return resources.files("agentenv.runs.view").joinpath(name).read_text(encoding="utf-8")


def page_script() -> str:
    """Return the page's script; a function around all parts keeps their names out of the global scope."""
    licence = f"/*! uPlot draws the curves.\n{asset('vendor/uPlot.LICENSE')}*/\n{asset('vendor/uPlot.js')}"
    lines = "\n".join(asset(f"script/{name}.js") for name in SCRIPTS).split("\n")
    parts = "\n".join(
        line for line in lines if not line.lstrip().startswith("//")
    )  # readers have no use for it
    return f'"use strict";\n(() => {{\n{licence}\n{parts}}})();\n'


def frame(blocks: Iterable[str], *, connect: bool = False) -> str:
    """Return the page with these data blocks; its policy lets no other script run in it."""
    script, style = page_script(), asset("vendor/uPlot.css") + asset("viewer.css")
    allowed = base64.b64encode(sha256(script.encode()).digest()).decode()
    reach = "'self'" if connect else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {reach}; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=True)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>agentenv</title>",
            f"<style>{style}</style></head><body>",
            '<div id="app"></div><noscript>This page needs JavaScript.</noscript>',
            *blocks,
            f"<script>{script}</script>",
            "</body></html>\n",
        ]
    )


def build_page(
    runs: Sequence[Run],
    *,
    only: Sequence[EpisodeSummary] = (),
    sort: str = "",
    max_bytes: int = DEFAULT_BYTES,
) -> str:
    """Return the viewer of some runs as one HTML file.

    Args:
        runs: the runs to show, newest first.
        only: episodes of the first run that must be in the page; they are added before all others.
        sort: order of the episode list: `reward`, `tokens`, `time`, ...
        max_bytes: most bytes of episode data; the episodes with the lowest rewards are added first.
    """
    blocks: list[str] = []
    data: list[str] = []
    room = max_bytes
    for run in runs:
        packed, vocabulary = _episodes(run, only if run is runs[0] else (), room)
        text = run_json(run, vocabulary=vocabulary)
        if not text:
            continue
        for index, episode in packed.items():
            name = f"e{len(data)}-{index}"
            blocks.append(f'<script type="application/octet-stream" id="{name}">{episode}</script>')
            room -= len(episode)
        data.append(text)
    page = page_json(data, live=False, single=len(runs) == 1, sort=sort)
    return frame([f'<script type="application/json" id="page">{page}</script>', *blocks])


def _episodes(run: Run, only: Sequence[EpisodeSummary], room: int) -> tuple[dict[int, str], dict[int, str]]:
    """Return the packed episodes that have room, by index, and the texts of their token ids."""
    packed: dict[int, str] = {}
    used: set[int] = set()
    try:
        vocabulary = run.vocabulary()
        indices = {summary.key: index for index, summary in enumerate(run.summaries)}
        for summary in _first(run, only):
            if room <= 0:
                break
            try:
                trajectory = run.load(summary)
            except StoreError:
                continue
            text = pack(episode_data(trajectory, run.note(summary)))
            packed[indices[summary.key]] = text
            room -= len(text)
            used |= _ids(trajectory)
    except Exception as error:  # noqa: BLE001 - anything may stand in a run that somebody else wrote
        _log.warning("run %s is shown without its tokens: %s: %s", run.path, type(error).__name__, error)
        return {}, {}
    return packed, {key: vocabulary[key] for key in used if key in vocabulary}


def _ids(trajectory: Trajectory) -> set[int]:
    spans = [span.token_ids for sequence in trajectory.sequences for span in sequence.spans]
    return set[int]().union(*spans)


def _first(run: Run, only: Sequence[EpisodeSummary]) -> Iterable[EpisodeSummary]:
    """Yield the episodes in the order in which they are added: required, failed, then by reward."""
    yield from only
    required = {summary.key for summary in only}
    rest = [summary for summary in run.summaries if summary.key not in required]
    yield from sorted(rest, key=lambda summary: (summary.reward is not None, summary.reward or 0.0))


def write_page(path: str | Path, page: str) -> Path:
    """Write a page to a file and return its path.

    Raises:
        StoreError: The file cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot write {target}: {error.strerror or error}", remedy="choose another file with --output"
        ) from error
    return target


class Show:
    """A page of the viewer, which notebooks display and `save` writes to a file."""

    def __init__(self, page: str) -> None:
        self.page = page

    def save(self, path: str | Path) -> Path:
        """Write the page to a file."""
        return write_page(path, self.page)

    def _repr_html_(self) -> str:
        """Return the page in a frame, so that the page and the notebook cannot affect each other."""
        source = html.escape(self.page, quote=True)
        style = "width:100%;height:640px;border:0"
        return f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="{style}"></iframe>'


@runtime_checkable
class Stored(Protocol):
    """A result that may be in a run, as those of `evaluate` and `train` may."""

    @property
    def run(self) -> Run | None:
        """The run; None if it is in memory, or another process has it."""
        ...


@runtime_checkable
class InMemory(Protocol):
    """A result that may have its episodes in memory, as that of `evaluate` may."""

    @property
    def groups(self) -> Sequence[TrajectoryGroup]:
        """The episodes in groups; empty if they are in a run."""
        ...


Episodes: TypeAlias = (
    Stored | InMemory | TrajectoryGroup | Trajectory | Sequence[Trajectory] | Sequence[TrajectoryGroup]
)


def show(what: Run | Episodes, *, tokenizer: Any = None) -> Show:
    """Return the viewer of a run, of the result of an evaluation or training, or of trajectories.

    Args:
        what: a run, a result, a group, groups, or trajectories.
        tokenizer: the `ChatTokenizer` that decodes the tokens of trajectories that are not in a run.

    Raises:
        UsageError: There is nothing to show.
    """
    if isinstance(what, Run):
        return Show(build_page([what]))
    if isinstance(what, Stored) and what.run is not None:
        return Show(build_page([what.run]))
    trajectories = _trajectories(what)
    if not trajectories:
        raise UsageError(
            "there are no episodes to show", remedy="show a run, a result, a group or trajectories"
        )
    with TemporaryDirectory() as root:
        with RunWriter.create("view", kind="import", runs_dir=root, run_id="trajectories") as writer:
            if tokenizer is not None:
                writer.keep_texts(tokenizer.backend)
            for trajectory in trajectories:
                writer.append(trajectory)
        return Show(build_page([Run(writer.path)]))


def _trajectories(what: Episodes) -> list[Trajectory]:
    if isinstance(what, Trajectory):
        return [what]
    if isinstance(what, InMemory):
        return _trajectories(what.groups)
    if isinstance(what, Stored):
        return []
    parts = [[part] if isinstance(part, Trajectory) else list(part) for part in what]
    return [trajectory for part in parts for trajectory in part]
