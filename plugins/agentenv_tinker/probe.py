"""Measure what a server of the Tinker API does, because servers differ and the protocol does not tell.

Adapters of their own are changed a few times by steps that are plain gradient descent: with a huge `eps`, and
betas of 0, AdamW divides each gradient by the same number. So the change of one token's log-probability shows
by which factor the server multiplied its gradient. Signs alternate, so that the token stays where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentenv.core import EngineError, TrainingFailed, logger
from agentenv.training.learners import Row
from agentenv_tinker.data import make_datum

__all__ = ["Traits", "known_traits", "probe"]

log = logger(__name__)

HUGE = 1e6
FIRST_RATE = 1e-5
AIM, ENOUGH = 0.05, 0.03
"""Change of the log-probability that steps aim at, and the least that is taken as measured."""
NEAR = 0.25
"""Largest distance of a measured factor from the one that it is taken for."""
TOKENS, MORE = 8, 7
FRESH_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Traits:
    """What a server does with the data of a step, its optimiser, and its sampling clients."""

    adds_tokens: bool = True
    """Whether it adds the losses of a datum's tokens; otherwise it takes their mean, over all inputs."""
    adds_data: bool = True
    """Whether it adds the losses of data; otherwise it takes their mean."""
    clips: bool = True
    """Whether it clips gradients as `grad_clip_norm` says."""
    keeps_samplers: bool = True
    """Whether a sampling client keeps its weights when training goes on."""

    def undo(self, row: Row, number: int) -> float:
        """Return the factor that makes the server's means sums.

        Args:
            row: the row of the datum.
            number: number of data of the step.
        """
        return (1 if self.adds_tokens else len(row.token_ids) - 1) * (1 if self.adds_data else number)

    def lines(self) -> list[str]:
        """Return what was found, in words."""
        return [
            f"tokens of a sequence: {'sum' if self.adds_tokens else 'mean'} of their losses",
            f"sequences of a step: {'sum' if self.adds_data else 'mean'}",
            "gradients are clipped" if self.clips else "grad_clip_norm is ignored",
            f"a sampling client {'keeps its' if self.keeps_samplers else 'gets later'} weights",
        ]


def known_traits(service: Any, vocab_size: int, cache: Path) -> Traits:
    """Return what a server does: measured within the last day, or else measured now and kept.

    Args:
        service: the server.
        vocab_size: number of the model's tokens.
        cache: file of the findings by server, model and release of the SDK. They are good for a day, because
            another program may have taken the server's address.
    """
    kept, name = _read(cache), service.identity
    try:
        traits, since = Traits(**kept[name]["traits"]), time.time() - float(kept[name]["at"])
    except (KeyError, TypeError, ValueError):
        traits, since = None, 0.0
    if traits is None or not 0 <= since < FRESH_S:
        log.info("%s is measured on adapters of its own, which takes six small steps", service.name)
        scratch = service.again()
        try:
            traits = probe(scratch, vocab_size)
        finally:
            scratch.close()
        _write(cache, _read(cache) | {name: {"at": time.time(), "traits": asdict(traits)}})
    return traits


def _read(cache: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(cache: Path, kept: dict[str, dict[str, Any]]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    except OSError as error:
        log.warning("what was measured cannot be kept in %s: %s", cache, error.strerror)


def probe(service: Any, vocab_size: int) -> Traits:
    """Measure what a server does.

    Args:
        service: the server.
        vocab_size: number of the model's tokens.

    Raises:
        EngineError: The server makes no adapters.
        TrainingFailed: It does with gradients or its optimiser what no known server does.
    """
    return _Probe(service, vocab_size).traits()


class _Probe:
    def __init__(self, service: Any, vocab_size: int) -> None:
        self._service = service
        self._ids = [(7 + 11 * number) % vocab_size for number in range(TOKENS)]
        self._longer = [*self._ids, *((5 + 13 * number) % vocab_size for number in range(MORE))]
        self._client: Any = service.trainer(8, 0)
        self._rate = FIRST_RATE

    def traits(self) -> Traits:
        sampler = self._service.call("sample", self._client.save_weights_and_get_sampling_client)
        before = self._sampled(sampler)
        one = self._response()
        now = self._sampled(sampler)
        keeps = before is not None and now is not None and abs(now - before) < ENOUGH / 2
        back = self._moved(self._data(-1.0)) / one
        double = self._moved(self._data(2.0)) / one
        if abs(back + 1) > NEAR or abs(double - 2) > 2 * NEAR:
            raise TrainingFailed(
                f"{self._service.name} moves a token by {one:.3g}, {back * one:.3g} and {double * one:.3g} "
                "for the advantages 1, -1 and 2: it ignores eps or the betas of AdamParams, or changes "
                "advantages, so no gradient on it can be proven exact",
                remedy="use a server that honours AdamParams; docs/training/tinker.md names those tried",
            )
        two = self._moved(self._data(-1.0) * 2) / -one
        more = self._moved(self._data(1.0, self._longer)) / one
        clipped = self._moved(self._data(-1.0), grad_clip_norm=1e-6) / -one
        return Traits(
            adds_tokens=self._either(
                more, {1.0: True, (TOKENS - 1) / (TOKENS + MORE - 1): False}, "more tokens"
            ),
            adds_data=self._either(two, {2.0: True, 1.0: False}, "two sequences"),
            clips=self._either(clipped, {0.0: True, 1.0: False}, "a clip"),
            keeps_samplers=keeps,
        )

    def _data(self, advantage: float, ids: Sequence[int] = ()) -> list[Callable[[float], Any]]:
        """Return data with one trained token, the last of the short sequence, given its log-probability."""
        place, tokens = TOKENS - 2, ids or self._ids

        def make(logprob: float) -> Any:
            values = {"logprobs": logprob, "advantages": advantage}
            spread = {name: np.zeros(len(tokens) - 1) for name in values}
            for name, value in values.items():
                spread[name][place] = value
            return make_datum(tokens, spread)

        return [make]

    def _response(self) -> float:
        """Return by how much the advantage 1 moves the token, at a rate that can be measured."""
        moved = 0.0
        for _ in range(6):
            moved = self._moved(self._data(1.0))
            if abs(moved) >= ENOUGH:
                return moved
            self._rate *= min(100.0, max(2.0, AIM / max(abs(moved), 1e-6)))
        raise TrainingFailed(
            f"{self._service.name} does not move a token that is trained with importance_sampling: its "
            f"log-probability changed by {moved:.2g}"
        )

    def _moved(self, data: Sequence[Callable[[float], Any]], **options: float) -> float:
        from tinker import types

        before, client = self._score(), self._client
        made = [make(before) for make in data]
        adam = {"learning_rate": HUGE * self._rate, "eps": HUGE, "beta1": 0.0, "beta2": 0.0, **options}
        self._service.call("train", lambda: client.forward_backward(made, "importance_sampling"))
        self._service.call("step", lambda: client.optim_step(types.AdamParams(**adam)))
        return self._score() - before

    def _score(self) -> float:
        datum = make_datum(self._ids, {"weights": np.ones(TOKENS - 1)})
        output = self._service.call("score", lambda: self._client.forward([datum], "cross_entropy"))
        return float(output.loss_fn_outputs[0]["logprobs"].to_numpy()[TOKENS - 2])

    def _sampled(self, sampler: Any) -> float | None:
        """Return the token's log-probability by a sampling client; None if the server tells none."""
        try:
            return self._service.logprobs(sampler, [self._ids])[0][-1]
        except EngineError:
            return None

    def _either(self, found: float, known: Mapping[float, bool], what: str) -> bool:
        nearest = min(known, key=lambda value: abs(value - found))
        if abs(nearest - found) > NEAR:
            told = " or ".join(f"{value:.2g}" for value in known)
            raise TrainingFailed(
                f"{self._service.name} multiplies the gradient by {found:.3g} for {what}, instead of by "
                f"{told}, so no gradient on it can be proven exact"
            )
        return known[nearest]
