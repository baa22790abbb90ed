"""A server of the Tinker API as the engine and the learner see it; no other module calls the SDK's clients.

The SDK changes between releases: some methods return a future, a coroutine or the result itself, and a failed
result raises `ValueError` as well as errors of its own. Here each call returns its result or raises an
`EngineError`. The SDK retries what a network loses by itself, so that what fails here has failed for good.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from threading import Thread
from typing import Any

from agentenv.core import DependencyMissing, EngineError, EngineUnavailable, UsageError
from agentenv.engine import check_answers

__all__ = ["Service", "Spent", "parse_model"]

FINAL = {
    "AuthenticationError",
    "BillingError",
    "PermissionDeniedError",
    "BadRequestError",
    "UnprocessableEntityError",
}
"""Errors of the SDK that come again however often one asks."""
FORM = "tinker:MODEL or tinker:MODEL@http://HOST:PORT"


def parse_model(model: str) -> tuple[str, str]:
    """Return the base model and the server's address that a model string names; no address is the service.

    Args:
        model: the model string, with or without `tinker:`.

    Raises:
        UsageError: It names no model.
    """
    name, at, url = model.removeprefix("tinker:").partition("@http")
    if not name or (at and not url.startswith(("://", "s://"))):
        raise UsageError(f"{model!r} names no model", remedy=f"write {FORM}")
    return name, f"http{url}".rstrip("/") if at else ""


@dataclass(slots=True)
class Spent:
    """Tokens that the server was asked to compute, in the terms in which services charge for them."""

    prefilled: int = 0
    """Tokens of prompts, those of the server's cache included."""
    cached: int = 0
    """Of these, tokens that the server reports as found in its cache."""
    sampled: int = 0
    trained: int = 0
    """Tokens of forward and of forward and backward passes of the training."""
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    """Price of a million tokens, for `prefilled`, `sampled` and `trained`."""

    def __post_init__(self) -> None:
        known = self.counts()
        if wrong := [name for name in self.prices if name not in known]:
            raise UsageError(
                f"there is no price of {wrong[0]!r}", remedy=f"the prices are {', '.join(known)}"
            )

    def counts(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        return {name: value for name, value in asdict(self).items() if name != "prices"}

    def metrics(self) -> dict[str, float]:
        """Return what was spent so far; `spent/cost` if there are prices."""
        counts = self.counts()
        metrics = {f"spent/{name}_tokens": float(value) for name, value in counts.items()}
        if self.prices:
            full = {**counts, "prefilled": counts["prefilled"] - counts["cached"]}
            prices = {"cached": self.prices.get("prefilled", 0.0), **self.prices}
            metrics["spent/cost"] = sum(price * full[name] for name, price in prices.items()) / 1e6
        return metrics


class Service:
    """A server of the Tinker API and one of its models.

    Args:
        model: name of the base model at the server.
        url: address of the server; empty means Thinking Machines' service.
        prices: price of a million tokens; see `Spent`.

    Raises:
        DependencyMissing: The SDK is not installed.
        EngineUnavailable: Nothing answers at the address.
        UsageError: The service is asked for without a key.
    """

    def __init__(self, model: str, url: str = "", *, prices: Mapping[str, float] | None = None) -> None:
        DependencyMissing.require("tinker", extra="tinker", purpose="tinker: models")
        if not url and not os.environ.get("TINKER_API_KEY"):
            raise UsageError(
                "TINKER_API_KEY is not set, which Thinking Machines' service asks for",
                remedy=f"set it, or name a server of your own: tinker:{model}@http://HOST:PORT",
            )
        self.model, self.url = model, url
        self.name = f"tinker:{model}" + (f"@{url}" if url else "")
        self.spent = Spent(prices=prices or {})
        if url:
            check_answers(self.name, url)
        self._client = self.call("connect", self._connect)

    def _connect(self) -> Any:
        import tinker

        if not self.url:
            return tinker.ServiceClient()
        # Servers of one's own check no key, but the SDK wants one of this form.
        key = os.environ.get("TINKER_API_KEY") or "tml-none"
        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def again(self) -> Service:
        """Return another connection, whose clients have a session of their own, with the same account."""
        other = Service(self.model, self.url)
        other.spent = self.spent
        return other

    def reconnect(self) -> None:
        """Begin a session of its own: the server may have forgotten the old one, or keep what it holds."""
        self.close()
        self._client = self.call("connect", self._connect)

    def close(self) -> None:
        """End the session, so that the server gives its clients' places to others."""
        old = self._client
        with suppress(Exception):  # the server may have gone, and gives the places away in time
            _aside(lambda: _result(old.close("success") if hasattr(old, "close") else old.holder.close()))

    def call(self, what: str, work: Callable[[], Any]) -> Any:
        """Return what a call of the SDK returns, or the result of the future that it returns.

        Raises:
            EngineUnavailable: The server cannot be reached, or the call failed for good.
        """
        try:
            return _aside(lambda: _result(work()))
        except Exception as error:
            raise self.failure(what, error) from error

    def submit(self, what: str, work: Callable[[], Any]) -> Callable[[], Any]:
        """Make a call of the SDK at once; return a function that waits for its result, as `call` does."""
        try:
            future = _aside(work)
        except Exception as error:
            raise self.failure(what, error) from error
        return lambda: self.call(what, lambda: future)

    def failure(self, what: str, error: BaseException) -> EngineError:
        """Return an exception of the SDK as one of ours."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        kind = EngineError if type(error).__name__ in FINAL else EngineUnavailable
        return kind(f"{self.name} could not {what}: {text}")

    @property
    def identity(self) -> str:
        """What the findings of a probe belong to: server, model, and release of the SDK."""
        return f"{self.url or 'service'} {self.model} tinker {version('tinker')}"

    def context_length(self) -> int | None:
        """Return the longest context of the model, as far as the server tells."""
        told = self.call("tell its models", self._client.get_server_capabilities).supported_models
        lengths = {one.model_name: one.max_context_length for one in told}
        if lengths and self.model not in lengths:
            names = ", ".join(map(str, lengths))
            raise UsageError(
                f"{self.url or 'the service'} has no model {self.model}", remedy=f"it has {names}"
            )
        return lengths.get(self.model)

    # Clients -------------------------------------------------------------------------------

    def trainer(self, rank: int, seed: int) -> Any:
        """Return a training client of new adapters."""
        given = {"base_model": self.model, "rank": rank, "seed": seed}
        return self.call("make adapters", lambda: self._client.create_lora_training_client(**given))

    def trainer_from(self, state: str, *, optimizer: bool = True) -> Any:
        """Return a training client of a saved state, with or without the state of its optimiser."""
        name = "create_training_client_from_state" + ("_with_optimizer" if optimizer else "")
        return self.call(f"load {state}", lambda: getattr(self._client, name)(state))

    def sampler(self, weights: str = "") -> Any:
        """Return a sampling client of saved weights; of the base model if none are named."""
        given = {"model_path": weights} if weights else {"base_model": self.model}
        return self.call("sample", lambda: self._client.create_sampling_client(**given))

    def logprobs(self, sampler: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return, for each sequence, 0 for its first token and the log-probability of each other one.

        Servers differ in whether they return an empty value for the first token.

        Raises:
            EngineError: The server returned another number of them.
        """
        from tinker import types

        asked = [
            self.submit(
                "score tokens", partial(sampler.compute_logprobs, types.ModelInput.from_ints(list(ids)))
            )
            for ids in sequences
        ]
        found: list[list[float]] = []
        for ids, wait in zip(sequences, asked, strict=True):
            self.spent.prefilled += len(ids)
            told = wait() or ()
            if len(told) not in {len(ids), len(ids) - 1}:
                raise EngineError(f"{self.name} returned {len(told)} log-probabilities for {len(ids)} tokens")
            found.append([0.0, *map(float, told[len(told) - len(ids) + 1 :])])
        return found

    def files_of(self, trainer: Any, path: str, name: str) -> Mapping[str, str]:
        """Return addresses of the files of saved weights, by name; one without a name is a tar file of all.

        Args:
            trainer: the training client, which saves them once more for releases of the SDK without archives.
            path: the saved weights.
            name: name for these files.
        """
        files = self._client.create_rest_client()
        if hasattr(files, "get_checkpoint_archive_url"):
            # The SDK's own reading of paths refuses those of SkyRL, tinker://RUN/NAME without a kind.
            run, _, checkpoint = path.removeprefix("tinker://").partition("/")
            asked = partial(files.get_checkpoint_archive_url, run, checkpoint)
            return {"": self.call("tell where its files are", asked).url}
        outside = self.call("save its files", lambda: trainer.save_weights_external(name)).path
        return self.call("tell where its files are", lambda: files.get_external_weights_urls(outside)).urls

    def forget(self, path: str) -> None:
        """Delete saved weights."""
        files = self._client.create_rest_client()
        self.call(f"delete {path}", lambda: files.delete_checkpoint_from_tinker_path(path))


def _aside(work: Callable[[], Any]) -> Any:
    """Do work in a thread of its own and wait for it: the SDK refuses to block a thread with an event loop.

    An interrupted wait leaves the thread, which neither keeps the process alive nor holds up the next call.
    """
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            done.set_exception(error)

    Thread(target=run, name="tinker", daemon=True).start()
    return done.result()


def _result(made: Any) -> Any:
    """Return the result of a future of any release of the SDK; what is no future is returned itself."""
    return made.result() if hasattr(made, "result") and callable(made.result) else made
