"""Verify stored episodes: their spans, messages, tokens and log-probabilities must agree.

The checks, by name:

- `record`: turns, spans, messages, tool results and rewards of the record agree with each other.
- `digest`: the record is the one that the run stored.
- `parse`: the sampled ids of each turn are read as the turn's message and tool calls.
- `prompt`: the tokens before the first turn of a sequence are what its messages render to.
- `observation`: the tokens between two turns are what the messages between them render to.
- `tokenisation`: whether the text of the sampled ids encodes to the same ids. A model may sample other
  tokens for the same text, so a difference is only reported.
- `drift`: whether a full render of the messages gives the tokens that the model saw.
- `logprobs`: the recorded log-probabilities are those that a model computes for the same tokens.

`record` and `digest` need nothing but the record, `logprobs` needs a model, and the others need the run's
renderer. Episodes that were stored before there were digests are not checked for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentenv.core.errors import AgentEnvError, StoreError
from agentenv.core.sequence import TokenSequence
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.render.renderer import Renderer
from agentenv.runs.store.images import settings_of
from agentenv.runs.store.reader import Run
from agentenv.runs.verify.findings import Finding, Verification
from agentenv.runs.verify.record import check_digest, check_record
from agentenv.runs.verify.tokens import Drift, check_tokens

__all__ = ["Score", "verify_episode", "verify_run"]


def verify_episode(
    record: Trajectory,
    renderer: Renderer | None = None,
    *,
    drift: Drift = "ignore",
    score: Score | None = None,
    versions: Sequence[int] | None = None,
    tolerance: float = 0.1,
) -> Verification:
    """Check one episode and return what was found.

    Args:
        record: the episode.
        renderer: the renderer of its run; without it only `record` and `logprobs` are checked.
        drift: what a difference from a full render means.
        score: recomputes log-probabilities; without it they are not checked.
        versions: weights versions of the spans whose log-probabilities are checked; None means all.
        tolerance: largest mean difference of the log-probabilities of a turn that still agrees.
    """
    checks = Verification(num_episodes=1)
    check_record(record, checks)
    check_digest(record, checks)
    if checks.of("record") or not record.sequences:
        return checks  # the other checks read the parts that disagree here
    if renderer is not None:
        check_tokens(record, renderer, drift, checks)
    if score is not None:
        check_logprobs(record, score, versions, tolerance, checks)
    return checks


def verify_run(
    run: Run,
    renderer: Renderer | None = None,
    *,
    drift: Drift = "ignore",
    score: Score | None = None,
    versions: Sequence[int] | None = None,
    tolerance: float = 0.1,
) -> Verification:
    """Check all episodes of a run; the arguments are those of `verify_episode`.

    Args:
        run: the run.
        renderer: its renderer, which `agentenv.runs.renderer_of(run.info)` returns.
        drift: see `verify_episode`, also for the arguments that follow.
        score: recomputes log-probabilities.
        versions: weights versions whose log-probabilities are checked.
        tolerance: largest mean difference of the log-probabilities of a turn.
    """
    total = Verification()
    if run.num_damaged:
        total.add("record", None, f"{run.num_damaged} lines of {run.id} are no episodes")
    recorded, now = settings_of(run.path), {} if renderer is None else renderer.tokenizer.image_settings
    if recorded and now and recorded != now:
        total.add("record", None, f"images were prepared with {recorded}, and the model's settings are {now}")
    for summary in run.summaries:
        try:
            checks = verify_episode(
                run.load(summary), renderer, drift=drift, score=score, versions=versions, tolerance=tolerance
            )
        except (StoreError, TypeError, ValueError, AttributeError, KeyError) as error:
            # Anything may stand in a file, also values of other types than the record has.
            checks = Verification(num_episodes=1)
            checks.add("record", None, f"it cannot be checked: {type(error).__name__}: {error}")
        name = f"{summary.task_id}/{summary.member}"
        checks.findings = [
            Finding(each.check, each.turn, each.detail, each.wrong, name) for each in checks.findings
        ]
        _merge(total, checks)
    return total


def _merge(total: Verification, checks: Verification) -> None:
    total.findings += checks.findings
    total.checked.update(checks.checked)
    total.num_episodes += checks.num_episodes
    total.difference += checks.difference
    total.largest_difference = max(total.largest_difference, checks.largest_difference)


Score: TypeAlias = Callable[[TokenSequence, Sequence[Turn]], Sequence[Sequence[float]]]
"""Computes the log-probabilities of the sampled tokens of some turns, given their sequence."""


def check_logprobs(
    record: Trajectory, score: Score, versions: Sequence[int] | None, tolerance: float, checks: Verification
) -> None:
    """Compare the recorded log-probabilities with those that `score` computes; see `verify_episode`."""
    for number, sequence in enumerate(record.sequences):
        turns = [
            turn
            for turn in record.turns
            if turn.sequence == number and _may_be_scored(turn, sequence, versions)
        ]
        if not turns:
            continue
        try:
            scored = score(sequence, turns)
        except AgentEnvError as error:
            checks.add("logprobs", None, f"sequence {number} cannot be scored: {error}")
            continue
        recorded = sequence.logprobs
        for turn, values in zip(turns, scored, strict=True):
            _compare(turn, recorded[turn.start : turn.end], values, tolerance, checks)


def _compare(
    turn: Turn, recorded: Sequence[float], scored: Sequence[float], tolerance: float, checks: Verification
) -> None:
    differences = [abs(old - new) for old, new in zip(recorded, scored, strict=True)]
    checks.checked["logprobs"] += len(differences)
    checks.difference += sum(differences)
    checks.largest_difference = max(checks.largest_difference, *differences)
    mean = sum(differences) / len(differences)
    if not mean <= tolerance:  # also true for nan
        worst = max(range(len(differences)), key=differences.__getitem__)
        checks.add(
            "logprobs",
            turn.index,
            f"they differ by {mean:.3g} on average over {len(differences)} tokens; most at token "
            f"{turn.start + worst}: recorded {recorded[worst]:.4f}, recomputed {scored[worst]:.4f}",
        )


def _may_be_scored(turn: Turn, sequence: TokenSequence, versions: Sequence[int] | None) -> bool:
    """Return whether the policy sampled the turn, with weights of these versions and known settings.

    What a grammar left is known only from the supports.
    """
    spans = [span for span in sequence.spans if span.turn == turn.index and span.source in {"model", "other"}]
    fits = versions is None or all(span.weights_version in versions for span in spans)
    known = bool(turn.sampling) and (
        not turn.sampling.get("grammar") or sequence.supports_of(turn.start, turn.end) is not None
    )
    return bool(turn.num_tokens) and fits and all(span.trained for span in spans) and known
