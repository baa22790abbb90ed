"""Prepare the data of the page: a small row for every episode, and tokens for the chosen episodes."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from math import isfinite
from typing import Any

import numpy as np
from pydantic_core import to_json

from agentenv.core.images import ImageTokens, suffix_of
from agentenv.core.sequence import TokenSpan
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.core.visible import logger
from agentenv.runs.report import report_on
from agentenv.runs.store.codec import dumps, loads
from agentenv.runs.store.reader import Run
from agentenv.runs.store.summary import EpisodeSummary
from agentenv.runs.verify.findings import Verification
from agentenv.runs.verify.record import check_record

__all__ = ["episode_data", "pack", "page_json", "run_data", "run_json", "safe_json"]

_log = logger(__name__)


def safe_json(value: object) -> str:
    """Return JSON that a browser can read, without NaN and without text that would end a script element."""
    return _safe_bytes(value).decode()


def _safe_bytes(value: object) -> bytes:
    try:
        text = to_json(value, inf_nan_mode="strings")
    except ValueError:  # values that are not JSON, lone surrogates, cycles
        text = json.dumps(_finite(loads(dumps(value))), separators=(",", ":")).encode()
    return text.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else to_json(value, inf_nan_mode="strings").decode().strip('"')
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def pack(value: object) -> str:
    """Return a value as compressed text, for a data block of the page."""
    # Negative window bits make a raw deflate stream, which the browser's "deflate-raw" decodes. Level 1 takes
    # half the time of the default, for 6 % more bytes.
    compressor = zlib.compressobj(1, zlib.DEFLATED, -15)
    data = compressor.compress(_safe_bytes(value)) + compressor.flush()
    return base64.b64encode(data).decode()


def run_data(
    run: Run, *, vocabulary: Mapping[int, str], summaries: Sequence[EpisodeSummary] | None = None
) -> dict[str, Any]:
    """Return everything that the page shows of a run, except the tokens."""
    episodes = run.summaries if summaries is None else summaries
    notes = run.annotations()
    # What the trainer was shown, and what it was tested on, are no results of the training.
    own = [episode for episode in episodes if "role" not in _note_of(episode, notes)]
    report = report_on(own, success_at=_success_at(run), terms=run.terms)
    tasks: dict[tuple[str, str], int] = {}
    rows = [_row(index, episode, notes, tasks) for index, episode in enumerate(episodes)]
    return {
        "id": run.id,
        "kind": run.info.kind,
        "status": run.status.value,
        "created": run.info.created,
        "closed": run.info.closed,
        "model": run.info.model,
        "seed": run.info.seed,
        "envs": list(run.info.env_ids),
        "note": run.info.note,
        "config": run.info.config,
        "weights": run.info.reward_weights,
        "versions": run.info.versions,
        "expected": run.info.expected_episodes,
        "damaged": run.num_damaged,
        "report": report.as_json(),
        "made": run.info.made_of,
        "metrics": run.metrics(),
        "workers": run.workers(),
        "servers": run.servers(),
        "vocab": {str(key): text for key, text in vocabulary.items()},
        "tasks": list(tasks),
        "episodes": rows,
    }


def run_json(run: Run, *, vocabulary: Mapping[int, str]) -> str:
    """Return `run_data` as JSON; empty if the run cannot be shown, which then hides no other run."""
    try:
        return safe_json(run_data(run, vocabulary=vocabulary))
    except Exception as error:  # noqa: BLE001 - anything may stand in a run that somebody else wrote
        _log.warning("run %s is left out: %s: %s", run.path, type(error).__name__, error)
        return ""


def _success_at(run: Run) -> float:
    value = run.info.config.get("success_at", 1.0)
    return float(value) if isinstance(value, (int, float)) else 1.0


def _row(
    index: int,
    episode: EpisodeSummary,
    notes: Mapping[str, Mapping[str, Any]],
    tasks: dict[tuple[str, str], int],
) -> dict[str, Any]:
    """Return an episode's row; its keys are single letters, because a page may have very many rows.

    The text of a task stands once in the page, in the order of `tasks`, and each row has its number.
    """
    note = _note_of(episode, notes)
    return {
        "i": index,
        "e": episode.env_id,
        "k": episode.task_id,
        "g": episode.group_id,
        "m": episode.member,
        "s": episode.stop_reason.value,
        "r": episode.reward,
        "R": episode.rewards,
        "n": episode.num_turns,
        "t": episode.total_tokens,
        "p": episode.parts,
        "x": episode.error,
        "u": episode.untrainable_reason,
        "A": episode.said,
        "Q": tasks.setdefault((episode.question, episode.expected), len(tasks)),
        "T": episode.tools,
        "a": note.get("advantage"),
        "w": note.get("step"),
        "o": note.get("role"),
        "q": episode.timings.get("total_s"),
        **_branch(episode),
    }


def _branch(episode: EpisodeSummary) -> dict[str, Any]:
    """Return the member that sampled a branch's first turns, and their number; nothing for other episodes."""
    if episode.branch_of is None:
        return {}
    return {"b": [episode.branch_of, int(episode.metrics.get("shared_turns", 0))]}


def _note_of(episode: EpisodeSummary, notes: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    return notes.get(f"{episode.group_id}#{episode.member}", {})


def episode_data(trajectory: Trajectory, note: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the data of one episode: all fields of its record, by their names."""
    error = trajectory.error
    return {
        **_fields(trajectory, "digest", "other_seats"),
        "sequences": [[_span(span) for span in sequence.spans] for sequence in trajectory.sequences],
        "turns": [_turn(turn) for turn in trajectory.turns],
        "rewrites": [_fields(rewrite) for rewrite in trajectory.rewrites],
        "tools": trajectory.all_tools,
        "seed": str(trajectory.seed),  # JavaScript would round it
        "error": None if error is None else asdict(error),
        "ann": note or {},
        "wrong": _wrong(trajectory),
    }


def _fields(value: Any, *without: str) -> dict[str, Any]:
    """Return the fields of a dataclass, so that a new one is in the page without further ado."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name not in without}


def _wrong(trajectory: Trajectory) -> list[str]:
    """Return where parts of the record disagree, as `agentenv doctor RUN` finds it without a tokenizer."""
    checks = Verification()
    try:
        check_record(trajectory, checks)
    except Exception as error:  # noqa: BLE001 - anything may stand in a run that somebody else wrote
        return [f"the record cannot be checked: {type(error).__name__}: {error}"]
    return [
        finding.detail if finding.turn is None else f"turn {finding.turn}: {finding.detail}"
        for finding in checks.wrong
    ]


def _span(span: TokenSpan) -> dict[str, Any]:
    return {
        "s": span.source,
        "t": span.turn,
        "v": span.weights_version,
        "ids": span.token_ids,
        **({"im": [_image(image) for image in span.images]} if span.images else {}),
        "lp": None if span.logprobs is None else np.asarray(span.logprobs, float).round(4).tolist(),
    }


def _image(image: ImageTokens) -> tuple[int, int, str]:
    """Return the place of an image, its number of tokens, and its file as a data URL if it is at hand."""
    kind = {"jpg": "jpeg"}.get(suffix := suffix_of(image.data), suffix)
    url = f"data:image/{kind};base64,{base64.b64encode(image.data).decode()}" if kind else ""
    return image.offset, image.length, url


def _turn(turn: Turn) -> dict[str, Any]:
    # The conversation has the message already.
    return {
        **_fields(turn, "message"),
        "tool_calls": [_fields(call, "values") for call in turn.tool_calls],
        "tool_results": [_fields(result) for result in turn.tool_results],
    }


def page_json(runs: Sequence[str], **values: object) -> str:
    """Return the content of the page's data block; each run is the text that `run_json` returned."""
    return f'{{"runs":[{",".join(runs)}],{safe_json(values)[1:]}'
