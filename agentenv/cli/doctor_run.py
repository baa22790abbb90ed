"""`agentenv doctor RUN`: verify the stored episodes of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentenv.cli.answer import print_json
from agentenv.cli.options import refuse_model
from agentenv.core.errors import RunNotFound, UsageError

if TYPE_CHECKING:
    from agentenv.runs.store.reader import Run
    from agentenv.runs.verify.findings import Verification

__all__ = ["verify"]

SHOWN = 3
"""Number of findings that are printed for each check; `--json` has all of them."""
_MODES = ("strict", "ignore", "off")


def verify(
    run: str,
    runs_dir: str,
    *,
    model: str,
    tokenizer: str,
    drift: str,
    weights_version: int | None,
    as_json: bool,
) -> bool:
    """Verify a run and print what was found; return whether everything agrees.

    Args:
        run: name of the run.
        runs_dir: directory of the runs.
        model: model that recomputes the log-probabilities; empty if they are not to be checked.
        tokenizer: directory of the tokenizer; empty for the run's own.
        drift: what a difference from a full render means.
        weights_version: version of the weights that the model has.
        as_json: print one JSON object.
    """
    from agentenv.runs.verify.findings import summary_of
    from agentenv.runs.verify.verify import verify_run

    refuse_model(run, "a run", f"agentenv doctor -m {run}")
    if drift not in _MODES:
        raise UsageError(f"--drift {drift} is unknown", remedy=f"use one of {', '.join(_MODES)}")
    stored = _stored(run, runs_dir)
    renderer, unknown = _renderer(stored.info, tokenizer)
    missing = {"tokens": unknown} if unknown else {}
    if weights_version is None and stored.info.kind == "train":
        weights_version = 0  # the model that the training began with
    found = verify_run(
        stored,
        renderer,
        drift=drift,  # pyright: ignore[reportArgumentType] - checked above
        score=_score(model) if model else None,
        versions=None if weights_version is None else (weights_version,),
    )
    if model and not found.checked["logprobs"]:
        version = "" if weights_version is None else f" by weights of version {weights_version}"
        missing["logprobs"] = f"the policy sampled no tokens{version}; --weights-version names another"
    if as_json:
        facts = {
            "run": stored.id,
            "ok": not found.wrong,
            "episodes": found.num_episodes,
            "expected": stored.info.expected_episodes,
            "checks": summary_of(found),
            "not_checked": missing,
            "findings": [asdict(finding) for finding in found.findings],
        }
        print_json(facts)
    else:
        lacking = stored.terms[len(stored.info.terms) :]
        print(f"run {stored.id}: {', '.join(lacking) or f'{found.num_episodes} episodes'}")
        _show(found, summary_of(found), missing)
    return not found.wrong


def _stored(run: str, runs_dir: str) -> Run:
    from agentenv.runs.store.reader import find_run

    try:
        return find_run(run, runs_dir)
    except RunNotFound as error:
        remedy = f"{error.remedy}; a model is examined with agentenv doctor -m {run}"
        raise RunNotFound(error.message, remedy=remedy) from None


def _show(found: Verification, lines: Mapping[str, str], missing: Mapping[str, str]) -> None:
    for check, text in lines.items():
        findings = found.of(check)
        mark = "WRONG" if any(finding.wrong for finding in findings) else "-" if findings else "ok"
        print(f"  {mark:6}{check:14}{text}")
        for finding in findings[:SHOWN]:
            print(f"        {finding}")
        if len(findings) > SHOWN:
            print(f"        ... and {len(findings) - SHOWN} more; --json has them all")
    for check, why in missing.items():
        print(f"  {'-':6}{check:14}not checked: {why}")


def _renderer(info: Any, tokenizer: str) -> tuple[Any, str]:
    """Return the run's renderer, or None and the reason why there is none."""
    from agentenv.runs.recorded import renderer_of

    try:
        return renderer_of(info, tokenizer), ""
    except UsageError as error:
        return None, str(error)


def _score(model: str) -> Callable[[Any, Sequence[Any]], list[list[float]]]:
    """Load a model; return the function that computes the log-probabilities of turns."""
    from agentenv.engine.hf.score import TokenScorer
    from agentenv.engine.interface import Sampling

    scorer = TokenScorer.load(model)

    def score(sequence: Any, turns: Sequence[Any]) -> list[list[float]]:
        names = ("temperature", "top_p", "top_k", "min_p")
        settings = [{name: turn.sampling[name] for name in names if name in turn.sampling} for turn in turns]
        parts = [
            (turn.start, turn.end, Sampling(**given), sequence.supports_of(turn.start, turn.end))
            for turn, given in zip(turns, settings, strict=True)
        ]
        return scorer.score(sequence.token_ids, parts, sequence.images)

    return score
