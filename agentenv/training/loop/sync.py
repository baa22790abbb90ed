"""Bring the learner's weights to the engine that plays.

The in-process engine shares the model, so nothing is copied and only its caches are dropped. With
`max_ahead` the engine has a copy of the model, and the parameters are copied to it between two of its
forward passes: unfinished completions continue with the new weights, and each token carries its version.
vLLM reads the weights from a directory and is then checked: on a few completions its log-probabilities must
be equal to those of the learner.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import platform
import re
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2s
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from agentenv.core.errors import AgentEnvError, UsageError
from agentenv.engine.factory import check_options, load_engine
from agentenv.engine.interface import Engine, Sampling, features_of, policy_of
from agentenv.engine.labels import run_of_adapters
from agentenv.engine.listed import names_servers
from agentenv.engine.weights import (
    HoldsModel,
    SharesServers,
    SyncReport,
    WeightReader,
    check_sync,
    push_weights,
)
from agentenv.render.renderer import Renderer
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.training.learners.learner import BringsWeights
from agentenv.training.learners.torch.adapters import adapter_of, adapter_ranks, base_changing
from agentenv.training.learners.torch.learner import TorchLearner
from agentenv.training.learners.torch.shards import whole, whole_weights
from agentenv.training.loop.event_loop import beside_the_loop

__all__ = ["WeightSync", "held_still", "open_engine", "push", "shares_model", "sync_engine"]

CHECK_TOKENS = 16
CHECK_QUESTIONS = (
    "Say hello.",
    "What is 2 + 3?",
    # Longer than a block of the prefix cache, so that the check detects a cache filled with old weights.
    "Which number is missing? " + " ".join(str(number) for number in range(100, 220) if number != 171),
)


def open_engine(
    learner: TorchLearner,
    engine: Engine | None,
    *,
    model_name: str,
    tokenizer: ChatTokenizer | None = None,
    options: Mapping[str, Any] | None = None,
) -> Engine:
    """Return the engine that plays: the user's, the one named in the options, or one on the learner's model.

    Args:
        learner: the learner whose weights the engine uses.
        engine: the engine that the user passed, if any.
        model_name: path or id that the model was loaded from.
        tokenizer: tokenizer of an engine on the learner's model, which needs it for stop strings.
        options: keyword arguments of an engine that this function makes.

    Raises:
        UsageError: The engine returns no tokens and log-probabilities to train on, shares a model that it
            must not share, cannot take the adapter, does not accept an option, or does not tell the experts
            to replay.
    """
    served = learner.config.engine if engine is None else isinstance(policy_of(engine), WeightReader)
    if served and (kind := base_changing(learner.model)):
        raise UsageError(
            f"the adapter ({kind}) has changed the base model, and servers would put it on the original one",
            remedy="save it with peft's path_initial_model_for_weight_conversion, or play in this process",
        )
    opened = _open(learner, engine, model_name, tokenizer, options)
    if learner.config.stream.router_replay and not features_of(opened).experts:
        raise UsageError(
            f"router_replay is set, but {opened.name} does not tell to which experts it sent the tokens",
            remedy="start a vLLM server with --enable-return-routed-experts, make the engine with "
            "return_routed_experts=True, or set router_replay=False",
        )
    return opened


def _open(
    learner: TorchLearner,
    engine: Engine | None,
    model_name: str,
    tokenizer: ChatTokenizer | None,
    options: Mapping[str, Any] | None,
) -> Engine:
    config = learner.config
    if learner.world.sharded and (shares_model(engine, learner.model) or not (engine or config.engine)):
        raise UsageError(
            f"a sharded (fsdp={config.fsdp}) model cannot sample in its own process",
            remedy="pass engine= with a copy of the model in each process, or name a server "
            "(engine='http://...')",
        )
    if engine is None:
        given = dict(options or {})
        if config.engine:
            return _named_engine(learner, model_name, given)
        return _own_engine(learner, model_name, tokenizer, given)
    if options:
        raise UsageError(
            f"engine options {sorted(options)} cannot be applied to {engine.name}, which exists already",
            remedy="set them where you make the engine",
        )
    if config.plays_ahead and shares_model(engine, learner.model):
        raise UsageError(
            f"{engine.name} cannot play ahead: it samples from the very model in training",
            remedy="pass no engine, or one with weights of its own",
        )
    return engine


def _own_engine(
    learner: TorchLearner, model_name: str, tokenizer: ChatTokenizer | None, options: dict[str, Any]
) -> Engine:
    from agentenv.engine.hf.engine import TransformersEngine

    name = f"hf:{model_name}"
    check_options(TransformersEngine, name, options)
    # The trainer switches adapters, masks and modes of the model, so it must not run during a decode.
    model = copy.deepcopy(learner.model) if learner.config.plays_ahead else learner.model
    options = {"name": name, "seed": learner.config.seed, **_telling(learner), **options}
    engine = TransformersEngine(model, tokenizer, **options)
    engine.weights_updated(learner.weights_version)
    return engine


def _named_engine(learner: TorchLearner, model_name: str, options: dict[str, Any]) -> Engine:
    name = learner.config.engine
    if names_servers(name):
        connect = importlib.import_module("agentenv.engine.vllm.connect").connect
        check_options(connect, name, options)
        engine, tokenizer = connect(name, **{"tokenizer": model_name, **options})
        reason = "it returns no token ids" if tokenizer is None else features_of(engine).untrainable
        if reason:
            raise UsageError(f"{name} can be evaluated but not trained on: {reason}")
        engine.see(ChatTokenizer.load(str(tokenizer)).images)
        return engine
    if not name.startswith("vllm:"):
        raise UsageError(
            f"engine {name!r} takes no weights from a trainer", remedy="use http://... or vllm:PATH"
        )
    if learner.world.size > 1:
        raise UsageError(
            f"engine {name!r} cannot be used by {learner.world.size} training processes",
            remedy="use a server, http://.../v1",
        )
    ranks = adapter_ranks(learner.model)
    lora: dict[str, Any] = {"lora": True, "max_lora_rank": max(16, *ranks)} if ranks else {}
    loaded: Any = load_engine(name, **{**lora, **_telling(learner), **options}).engine
    return loaded


def _telling(learner: TorchLearner) -> dict[str, Any]:
    """Return the option with which an engine of this process tells the experts, if they are replayed."""
    return {"return_routed_experts": True} if learner.config.stream.router_replay else {}


def shares_model(engine: Engine | None, model: Any) -> bool:
    """Return whether an engine samples from this very model."""
    policy = None if engine is None else policy_of(engine)
    return isinstance(policy, HoldsModel) and policy.model is model


@contextmanager
def held_still(engine: Engine | None, learner: TorchLearner) -> Generator[None]:
    """Hold the engine's requests in this context, so that none runs while the shared weights change."""
    policy = None if engine is None else policy_of(engine)
    if not (isinstance(policy, HoldsModel) and policy.model is learner.model):
        yield
        return
    # A function, because the version is known only after the update: a gradient that is not finite keeps it.
    with policy.updating(lambda: learner.weights_version):
        yield


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def sync_engine(engine: Engine, learner: TorchLearner) -> None:
    """Copy the new weights to an engine in this process that has a model of its own."""
    policy = policy_of(engine)
    if not isinstance(policy, HoldsModel):
        raise UsageError(f"{policy.name} has no way to take new weights, so it cannot be used for training")
    if policy.model is learner.model:
        return
    held = dict(policy.model.named_parameters())
    trained = {name: value for name, value in learner.model.named_parameters() if value.requires_grad}
    unknown = [name for name, value in trained.items() if name not in held or held[name].shape != value.shape]
    if unknown:
        raise UsageError(
            f"{policy.name} holds another model than the trainer: it has no parameter {unknown[0]!r} of the "
            "same shape"
        )
    with policy.updating(learner.weights_version):
        for name, value in trained.items():
            held[name].copy_(whole(value))


class WeightSync:
    """Keeps the weights of the engine that plays equal to the learner's.

    Args:
        learner: the learner whose weights are brought to the engine.
        engine: the engine that plays.
        renderer: renderer of the model, for the questions of the check.
        tell: told the version of weights that were pushed to servers, and the name of this training, for
            other processes that use the servers.
    """

    def __init__(
        self,
        learner: Any,
        engine: Engine,
        renderer: Renderer,
        tell: Callable[[int, str], Awaitable[None]] | None = None,
    ) -> None:
        self._learner, self._engine, self._renderer, self._tell = learner, engine, renderer, tell
        self._version: int | None = None
        self._run = ""
        self._check: asyncio.Task[SyncReport] | None = None
        self._may_score: asyncio.Event | None = None

    async def follow(self) -> dict[str, float]:
        """Bring the weights to the engine, unless it has them already, and check that they arrived.

        Returns:
            Metrics of the check; empty if there was none.

        Raises:
            EngineError: The engine refused the weights, or samples from weights other than the learner's.
            UsageError: Another training uses the engine.
            AgentEnvError: The process that brings the weights to a server failed.
        """
        await self.bring()
        return await self.checked()

    async def rest(self) -> None:
        """Have the engine free its memory, if it can, until the next weights are brought."""
        await features_of(policy_of(self._engine)).rest()

    async def bring(self) -> None:
        """Bring the weights to the engine as `follow` does, but only begin the check.

        The completions of the check may queue behind those of the episodes that are being played, and nothing
        needs to wait for them before the next update.
        """
        if isinstance(self._learner, BringsWeights):
            policy: Any = policy_of(self._engine)
            policy.renew = partial(beside_the_loop, partial(self._learner.bring, policy))
            await policy.renew()
            return
        version = self._learner.weights_version
        policy = policy_of(self._engine)
        if isinstance(policy, HoldsModel):
            if policy.trained_by not in (None, self):
                raise UsageError(
                    f"{policy.name} plays for another training, which still runs",
                    remedy="give each training an engine of its own, or one vLLM server to adapters of both",
                )
            policy.trained_by = self
        await features_of(policy).wake(self._version != version)
        if self._version == version:
            # Episodes may have failed because another training has the servers now, which no push would show.
            await self._require_own(policy)
            return
        if isinstance(policy, WeightReader):
            await self._push_and_check(policy, version)
        else:
            await beside_the_loop(partial(sync_engine, self._engine, self._learner))
        self._version = version

    async def _require_own(self, engine: object) -> None:
        failure: AgentEnvError | None = None
        if not self._run or not isinstance(engine, SharesServers):
            return
        if self._learner.world.rank == 0:
            try:
                await engine.claim(self._run)
            except AgentEnvError as error:
                failure = error
        await beside_the_loop(partial(self._learner.world.settle, failure))

    async def _push_and_check(self, engine: Any, version: int) -> None:
        adapter, world = adapter_of(self._learner.model), self._learner.world
        if not self._run:
            own = run_name(self._learner.config.output_dir)
            own = own if adapter is None else run_of_adapters(own)
            names = await beside_the_loop(partial(world.gather, [own]))
            self._run = names[0]  # that of the process which pushes
        await push(self._learner, engine, adapter, self._run)
        if isinstance(engine, SharesServers):
            engine.follow(self._run, version)
        else:
            engine.weights_version = version
        if self._tell is not None:
            await self._tell(version, self._run)
        self._may_score = asyncio.Event()
        self._check = asyncio.create_task(self._compare(engine, version, adapter, self._may_score))

    async def checked(self) -> dict[str, float]:
        """Finish the check of the last weights, if there is one; this must be done before the next update.

        The completions are scored now: with a sharded model all processes must do it at the same time.

        Raises:
            EngineError: The engine samples from weights other than the learner's.
        """
        if self._check is None or self._may_score is None:
            return {}
        self._may_score.set()
        report = await self._check
        self._check = None
        report.require()
        return {"sync/k3": report.k3, "sync/frac_outside": report.outside}

    async def stop(self) -> None:
        """Cancel a check that was not finished, and let another training have the engine."""
        policy = policy_of(self._engine)
        if isinstance(policy, HoldsModel) and policy.trained_by is self:
            policy.trained_by = None
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)
            self._check = None

    async def _compare(
        self, engine: Any, version: int, adapter: str | None, may_score: asyncio.Event
    ) -> SyncReport:
        learner, config = self._learner, self._learner.config

        async def score(prompt: Sequence[int], completion: Sequence[int]) -> Sequence[float]:
            await may_score.wait()
            return await beside_the_loop(partial(_score, learner, prompt, completion))

        return await check_sync(
            engine,
            score,
            self._check_prompts(engine),
            sampling=Sampling(
                temperature=config.sampling.temperature,
                max_tokens=CHECK_TOKENS,
                seed=version,
                adapter=adapter,
            ),
            stop_token_ids=self._renderer.stop_token_ids,
        )

    def _check_prompts(self, engine: Engine) -> list[list[int]]:
        bounds = (self._learner.policy.max_length, engine.max_context_tokens)
        room = max(1, min([limit for limit in bounds if limit], default=1 << 20) - CHECK_TOKENS)
        asked = [self._renderer.start([{"role": "user", "content": text}]) for text in CHECK_QUESTIONS]
        # With at least as many requests as servers, each idle server gets one and is checked too.
        number = max(len(asked), len(features_of(engine).servers()))
        return [prompt[-room:] for prompt in islice(cycle(asked), number)]


def run_name(output_dir: str) -> str:
    """Return a name of a training that no other one has, and that it has again when it is resumed here."""
    path = Path(output_dir).resolve()
    place = blake2s(f"{platform.node()} {path}".encode(), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', path.name)}-{place}"


async def push(learner: TorchLearner, engine: Any, adapter: str | None, run: str = "") -> None:
    """Push the weights from the first process; the others wait for it, and raise if it fails."""
    world, weights = learner.world, None
    if world.sharded:
        weights = await beside_the_loop(partial(whole_weights, learner.model, keep=world.rank == 0))
    failure: AgentEnvError | None = None
    if world.rank == 0:
        try:
            shared: object = engine
            if run and isinstance(shared, SharesServers):
                await shared.claim(run)
            await push_weights(
                engine,
                learner.model,
                version=learner.weights_version,
                directory=Path(learner.config.output_dir) / "weights",
                adapter=adapter,
                state_dict=weights,
            )
        except AgentEnvError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the push has failed, whatever it raised
            # The other processes wait for this one, so they must be told of every failure.
            failure = AgentEnvError(f"the weights could not be pushed: {type(error).__name__}: {error}")
            failure.__cause__ = error
    # The others wait here until the weights are pushed, and their episodes go on meanwhile.
    await beside_the_loop(partial(world.settle, failure))


def _score(learner: TorchLearner, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    """Score tokens in the simplest way.

    It uses no cache, no packing and none of the training code, so that it can check them.
    """
    ids_1T = torch.tensor([[*prompt, *completion]], device=learner.policy.device)
    with torch.no_grad():
        logits_NV = learner.model(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs_NV = (logits_NV.float() / learner.config.sampling.temperature).log_softmax(-1)
    return logprobs_NV.gather(1, ids_1T[0, len(prompt) :, None])[:, 0].tolist()
