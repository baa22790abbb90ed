"""The learner on a server of the Tinker API: our loss, the server's weights and optimiser.

The gradient goes the linear way, which is exact for every loss of log-probabilities: a forward pass returns
the log-probabilities, our own code computes the loss and its derivative g with respect to them, and the
server's importance sampling at the ratio 1 gets them back as the advantages -g. Servers with the same API
differ in their own losses, and the probe does not have to trust one of them; see `probe`.

No step is lost or made twice. After each step of the training the state is saved at the server. A call that
fails leaves the server in a state that nobody knows, because its answer may have been lost after the work was
done. So the learner goes back to the last saved state, with a client of its own, and makes the updates since
then once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from agentenv.core import AgentEnvError, EngineUnavailable, UsageError, logger
from agentenv.training import GRPOConfig
from agentenv.training.learners import LossFn, Meter, Row, Scores, ScoresRows, rows_loss
from agentenv.training.learners.torch import World
from agentenv_tinker.adapter import fetch_adapter
from agentenv_tinker.data import datum_of, logprobs_of
from agentenv_tinker.probe import Traits
from agentenv_tinker.refuse import refuse_unable

__all__ = ["TinkerLearner"]

log = logger(__name__)

T = TypeVar("T")

WAITS_S = (5.0, 15.0, 30.0, 60.0, 120.0, 240.0)
"""Waits between attempts to go on after a failed call. SkyRL keeps the place of a client that has gone for
five minutes."""
KEPT_S = 7 * 24 * 3600
"""How long the server keeps the states that only a failed call needs."""
NORMS = ("grad_norm", "skyrl.ai/grad_norm", "grad_norm:mean", "gradient_norm")
"""Names that servers give the norm of the gradient before clipping."""


class TinkerLearner:
    """Trains adapters on a server of the Tinker API; see `agentenv.training.learners.Learner`.

    Args:
        service: the server (`agentenv_tinker.Service`).
        config: the run's options.
        traits: what the probe found.
        vocab_size: size of the model's vocabulary.
        max_length: length of the longest sequence that the model accepts, if it is known.
        teacher: what asks a teacher on servers, if any.

    Raises:
        UsageError: An option asks for what the server cannot do.
        EngineError: The server makes no adapters.
    """

    adapter: str | None = None
    torn = False
    """Whether weights are half new: never, because what was broken off is undone by going back."""

    def __init__(
        self,
        service: Any,
        config: GRPOConfig,
        *,
        traits: Traits,
        vocab_size: int,
        max_length: int | None = None,
        teacher: ScoresRows | None = None,
    ) -> None:
        rank = refuse_unable(config, traits, service.name)
        self.config, self.traits, self.world = config, traits, World(torch.device("cpu"))
        self.vocab_size, self.max_length = vocab_size, max_length
        self._service = service
        self.weights_version = 0
        self.reference: ScoresRows | None = teacher
        if config.loss.has_kl and teacher is None:
            self.reference = _BaseModel(service)
        self._optimizer_config = config
        self._state = ""
        # Invariant: the server has the weights of `_state` after these updates, unless `_broken` says that a
        # call failed or was broken off.
        self._updates: list[tuple[list[Any], dict[str, float]]] = []
        self._pending: list[Any] = []
        self._nan = self._broken = False
        self._stepped = False
        """Whether the server's optimiser has a state."""
        self._begin = lambda: self._saved(service.trainer(rank, config.seed))
        self._client: Any = None

    # The algorithm's calls -----------------------------------------------------------------

    def score(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens under the current weights."""
        return self._score(rows, _data_to_score(rows)) if rows else []

    def _score(self, rows: Sequence[Row], data: list[Any]) -> list[Tensor]:
        def ask() -> list[Tensor]:
            self._service.spent.trained += _tokens(data)
            output = self._service.call("score", lambda: self._client.forward(data, "cross_entropy"))
            return logprobs_of(self._service.name, output, rows)

        return self._surely(ask)

    def forward_backward(
        self, rows: Sequence[Row], meter: Meter, *, loss_fn: LossFn | None = None, moved: bool = False
    ) -> tuple[float, list[Scores]]:
        """Compute the loss of the rows and its gradient, which `optim_step` sends to the server."""
        data = _data_to_score(rows)
        scores = self._score(rows, data)
        logprobs_N = torch.cat(scores).requires_grad_()
        sizes = [row.num_trained for row in rows]
        with torch.enable_grad():
            loss, tell = rows_loss(rows, logprobs_N, self.config, loss_fn=loss_fn)
            (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
        tell(meter, moved=moved)
        self._nan = not bool(gradient_N.isfinite().all())
        self._pending = []
        if not self._nan and bool(gradient_N.any()):
            parts = gradient_N.split(sizes)
            self._pending = [
                datum_of(
                    row, {"logprobs": new_n, "advantages": -part * self.traits.undo(row, len(rows))}, like
                )
                for row, new_n, part, like in zip(rows, scores, parts, data, strict=True)
            ]
        return float(loss.detach()), [Scores(new_n) for new_n in scores]

    def optim_step(self, rate: float) -> float | None:
        """Apply the gradient; return its norm before clipping, or None if the server does not tell it."""
        data, self._pending = self._pending, []
        if not data:
            return float("nan") if self._nan else 0.0
        c = self._optimizer_config.optimizer
        adam = {
            "learning_rate": rate,
            "beta1": c.adam_beta1,
            "beta2": c.adam_beta2,
            "eps": c.adam_epsilon,
            "weight_decay": c.weight_decay,
            "grad_clip_norm": c.max_grad_norm if self.traits.clips else 0.0,
        }
        norm = self._surely(lambda: self._apply(data, adam))
        self._updates.append((data, adam))
        self._stepped = True
        self.weights_version += 1
        return norm

    @contextmanager
    def separate_optimizer(self, config: GRPOConfig) -> Generator[None]:
        """Step with another optimiser in this context; the usual one starts afresh afterwards."""
        self._fresh_optimizer()
        self._optimizer_config = config
        try:
            yield
        finally:
            self._optimizer_config = self.config
            self._fresh_optimizer()

    def _apply(self, data: list[Any], adam: Mapping[str, float]) -> float | None:
        from tinker import types

        self._broken = True  # until the answers are here
        self._service.spent.trained += _tokens(data)
        client = self._client
        sent = self._service.submit("train", lambda: client.forward_backward(data, "importance_sampling"))
        # Both are queued before the first is waited for, because the service works in cycles.
        told = self._service.submit("step", lambda: client.optim_step(types.AdamParams(**adam)))
        sent()
        metrics: Mapping[str, float] = told().metrics or {}
        self._broken = False
        return next((float(metrics[name]) for name in NORMS if name in metrics), None)

    # Weights ---------------------------------------------------------------------------------

    def bring(self, engine: Any) -> None:
        """Give an engine a sampling client of the weights as they are now, and save the state."""
        if engine.weights_version == self.weights_version and not engine.failures and not self._broken:
            return
        self.mark()
        call = self._service.call
        sampler = self._surely(lambda: call("sample", self._client.save_weights_and_get_sampling_client))
        engine.use(sampler, self.weights_version)

    def mark(self) -> None:
        """Save the state, to which the learner goes back when a later call fails."""
        if self._state and not self._updates:
            return
        before, self._state = self._state, self._surely(lambda: self._saved(self._client)[1])
        self._updates.clear()
        if "recovery-" in before:
            with suppress(AgentEnvError):  # the server deletes it later
                self._service.forget(before)

    def _saved(self, client: Any, kind: str = "recovery", ttl_s: int | None = KEPT_S) -> tuple[Any, str]:
        """Save the state of a client; return the client and the path."""
        save = partial(client.save_state, self._name(kind), ttl_seconds=ttl_s)
        return client, str(self._service.call("save its state", save).path)

    def _name(self, kind: str) -> str:
        # Another run, or the same one resumed, may have the same model at the server.
        return f"{kind}-{self.weights_version}-{uuid4().hex[:8]}"

    def _fresh_optimizer(self) -> None:
        if not self._stepped:
            return
        self.mark()
        self._client, self._state = _patiently(
            lambda: self._saved(self._service.trainer_from(self._state, optimizer=False))
        )
        self._stepped = False

    def save_files(self, directory: Path) -> dict[str, Any]:
        """Save the state at the server and the adapter in a directory; return what `load_files` needs."""
        state = self._surely(lambda: self._saved(self._client, "checkpoint", None)[1])
        name, call = self._name("adapter"), self._service.call
        sampler = self._surely(
            lambda: call("save adapters", lambda: self._client.save_weights_for_sampler(name)).path
        )
        fetch_adapter(self._service, self._client, sampler, name, directory)
        spent = self._service.spent.counts()
        return {"server": self._service.name, "state": state, "sampler": sampler, "spent": spent}

    def load_files(self, record: Mapping[str, Any]) -> None:
        """Go on from a state that `save_files` saved.

        Raises:
            UsageError: It is the state of another model.
        """
        from_model = str(record.get("server", "")).partition("@")[0]
        if from_model != f"tinker:{self._service.model}":
            raise UsageError(f"the checkpoint is of {from_model or 'no server'}, not of {self._service.name}")
        self._client = _patiently(lambda: self._service.trainer_from(str(record["state"])))
        self._state, self._updates, self._stepped = str(record["state"]), [], True
        for name, count in record.get("spent", {}).items():
            setattr(self._service.spent, name, count)

    # Failures --------------------------------------------------------------------------------

    def _surely(self, ask: Callable[[], T]) -> T:
        """Return what a call returns; after a failure, go back to the last state and ask again."""
        if self._client is None:  # a resumed training has the client of its state, and needs no other
            self._client, self._state = _patiently(self._begin)

        def attempt() -> T:
            try:
                if self._broken:
                    self._go_back()
                return ask()
            except EngineUnavailable:
                self._broken = True
                raise

        return _patiently(attempt)

    def _go_back(self) -> None:
        """Make a client of the last saved state, and the updates since then."""
        self._service.reconnect()
        self._client = self._service.trainer_from(self._state)
        for data, adam in self._updates:
            self._apply(data, adam)
        self._broken = False


class _BaseModel:
    """The reference: the base model, which scores whole rows as prompts."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._sampler: Any = None

    def score(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens under the base model."""
        self._sampler = self._sampler or self._service.sampler()
        scored = self._service.logprobs(self._sampler, [row.token_ids for row in rows])
        return [
            torch.tensor(logprobs, dtype=torch.float64)[row.positions_n - 1]
            for row, logprobs in zip(rows, scored, strict=True)
        ]


def _patiently(work: Callable[[], T]) -> T:
    """Do work that may fail while a server is away, starts again, or has no place yet for another client."""
    for wait in WAITS_S:
        try:
            return work()
        except EngineUnavailable as error:
            log.warning("%s; it is tried again in %.0f s", error.message, wait)
            time.sleep(wait)
    return work()


def _data_to_score(rows: Sequence[Row]) -> list[Any]:
    return [datum_of(row, {"weights": torch.ones(row.num_trained)}) for row in rows]


def _tokens(data: Sequence[Any]) -> int:
    return sum(one.model_input.length for one in data)
