"""Train on an environment with TRL's `GRPOTrainer`.

With `rollout_func(spec)` agentenv's runner plays the episodes on TRL's model, in the same process. TRL gets
the exact token ids, the sampler's logprobs, a mask over tool output and the reward.

    spec = agentenv.spec("agentenv/Calculator-v0")
    GRPOTrainer(model, environment_reward, args, Dataset.from_list(task_rows(spec)),
                rollout_func=rollout_func(spec, limits=RunLimits(max_turns=3)))

With `environment_factory(spec)` TRL plays the episodes in its own tool loop, also on vLLM. The environment
provides task, tools and reward. TRL must be able to parse tool calls of the model's chat template.

    GRPOTrainer(model, environment_reward, args, Dataset.from_list(environment_rows(spec)),
                environment_factory=environment_factory(spec))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, groupby, islice
from typing import Any

from agentenv.core import RunLimits, Task, Trajectory, UsageError, run_sync, text_of
from agentenv.engine import Completion, Engine, Sampling, features_of, room_for
from agentenv.envs import EnvSpec
from agentenv.render import Renderer
from agentenv.runner import Runner
from agentenv_bridges.trainers.live import only_row
from agentenv_bridges.trainers.trl_methods import TrlEnvironment, environment_class

__all__ = [
    "environment_factory",
    "environment_reward",
    "environment_rows",
    "rollout_func",
    "task_rows",
]

MARK = "agentenv task "
CUT = (
    "TRL trains probabilities among the whole vocabulary, which cannot be compared with those of tokens that "
    "were sampled from a cut distribution (top_p, top_k or min_p)"
)
COLUMNS = (
    *("prompt_ids", "completion_ids", "logprobs", "env_mask"),
    *("env_reward", "stop_reason", "truncated", "turn_rewards"),
)
"""What a `rollout_func` returns. TRL passes all but the first three to reward functions."""


def task_rows(spec: EnvSpec, *, split: str | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """Return rows for TRL's `train_dataset` and `rollout_func`.

    The prompt of a row only names a task; the runner writes the real prompt.

    Args:
        spec: specification of the environment.
        split: split of its tasks; None means the default split.
        limit: limit of the number of rows; None means all tasks.
    """
    tasks = islice(spec.task_set(split), limit)
    return [{"prompt": [{"role": "user", "content": MARK + task.id}], "task_id": task.id} for task in tasks]


def environment_reward(
    completions: Sequence[Any],
    env_reward: Sequence[float | None] = (),
    environments: Sequence[Any] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the environment's rewards. This is a reward function for TRL.

    Args:
        completions: completions of the model, as messages.
        env_reward: column that `rollout_func` adds.
        environments: objects that `environment_factory` made; this function ends their episodes.
    """
    if environments is None:
        return list(env_reward)
    return [
        env._finish(completion)  # noqa: SLF001 - a public method would be a tool to TRL
        for env, completion in zip(environments, completions, strict=True)
    ]


def environment_rows(
    spec: EnvSpec, *, split: str | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return rows for TRL's `train_dataset` and `environment_factory`, with system prompt and task id.

    The environment's `reset` writes the first observation after the row's last message.

    Args:
        spec: specification of the environment.
        split: split of its tasks; None means the default split.
        limit: limit of the number of rows; None means all tasks.
    """
    system = str(getattr(spec.make(), "system_prompt", ""))
    before = [{"role": "system", "content": system}] if system else []
    prompt = [*before, {"role": "user", "content": ""}]
    return [{"prompt": prompt, "task_id": task.id} for task in islice(spec.task_set(split), limit)]


def environment_factory(
    spec: EnvSpec, *, split: str | None = None, limits: RunLimits | None = None, seed: int = 0
) -> type[TrlEnvironment]:
    """Return an `environment_factory`: a class whose objects play the environment in TRL's own tool loop.

    TRL, not the runner, limits turns and tokens (`max_tool_calling_iterations`, `max_completion_length`);
    `limits` apply to the tools. A failed episode is logged and gets no reward. Environments that answer the
    model's text need `rollout_func`.

    Args:
        spec: specification of the environment.
        split: split of its tasks, as passed to `environment_rows`.
        limits: limits of the tools.
        seed: seed of the run.

    Raises:
        UsageError: TRL's tool loop cannot play the environment.
    """
    return environment_class(spec, spec.task_set(split), limits=limits, seed=seed)


def rollout_func(
    spec: EnvSpec, *, split: str | None = None, limits: RunLimits | None = None, seed: int = 0
) -> Callable[[Sequence[Any], Any], dict[str, list[Any]]]:
    """Return a `rollout_func` that plays an environment with agentenv's runner on TRL's model.

    TRL passes `env_reward`, `stop_reason`, `truncated` and `turn_rewards` to reward functions, as lists with
    an entry for each episode.

    TRL's `max_completion_length` also applies: an episode ends when its completion, including tool output,
    reaches it. Without `limits` it is the limit of a turn, too.

    Args:
        spec: specification of the environment.
        split: split of its tasks, as passed to `task_rows`.
        limits: limits of the episodes.
        seed: seed of the run.

    Raises:
        UsageError: The returned function raises this if TRL's `top_p`, `top_k` or `min_p` truncate the
            distribution.
    """
    tasks = spec.task_set(split)
    calls = count(1)

    def play(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        from agentenv.engine.hf import TransformersEngine, apply_soft_cap, attention_of, base_model

        sampling = _sampling(trainer.args)
        length = trainer.args.max_completion_length
        held = limits or RunLimits(max_tokens_per_turn=length)
        model = trainer.accelerator.unwrap_model(trainer.model)
        was_training = model.training
        apply_soft_cap(base_model(model))  # for good: TRL must compute with the cap that the engine applies
        implementation = attention_of(model.config)
        model.eval()
        engine = TransformersEngine(model, name="trl")
        engine.weights_updated(trainer.state.global_step)
        renderer = Renderer(trainer.processing_class)
        bounded = engine if length is None else _Bounded(engine, length)
        runner = Runner(bounded, renderer, held, sampling=sampling, run_seed=seed)
        try:
            chosen = [(tasks[name], len(list(same))) for name, same in groupby(map(_task_id, prompts))]
            played = run_sync(_play(runner, spec, chosen, next(calls)))
        finally:
            engine.shutdown()
            if implementation:  # without a name the engine has left the attention as it was
                model.set_attn_implementation(implementation)
            model.train(was_training)
        return _columns(played, renderer)

    return play


def _sampling(args: Any) -> Sampling:
    """Return the sampling settings of TRL's configuration.

    Raises:
        UsageError: A setting truncates the distribution.
    """
    sampling = Sampling(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k or 0, min_p=args.min_p or 0.0
    )
    if reason := sampling.untrainable_reason or (sampling.is_cut and CUT):
        raise UsageError(reason, remedy="leave these out of TRL's GRPOConfig")
    length = args.max_completion_length
    return sampling if length is None else replace(sampling, max_tokens=length)


class _Bounded:
    """Engine that limits the tokens after the first prompt of each episode, including tool output."""

    def __init__(self, engine: Engine, max_completion: int) -> None:
        self.name = engine.name
        self.weights_version = engine.weights_version
        self.max_context_tokens = engine.max_context_tokens
        self._engine = engine
        self._max_completion = max_completion
        self.features = replace(features_of(engine), images=False, stream=None)
        self._prompts: dict[str | None, int] = {}
        """Length of the first prompt of each running episode, by session id."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        end = self._prompts.setdefault(session_id, len(prompt_ids)) + self._max_completion
        room = room_for(self.name, prompt_ids, sampling.token_limit, end)
        return await self._engine.generate(
            prompt_ids,
            replace(sampling, max_tokens=room),
            stop_token_ids=stop_token_ids,
            session_id=session_id,
            deadline_s=deadline_s,
        )

    async def release(self, session_id: str) -> None:
        self._prompts.pop(session_id, None)
        await self._engine.release(session_id)

    async def close(self) -> None:
        await self._engine.close()


async def _play(
    runner: Runner, spec: EnvSpec, chosen: Sequence[tuple[Task, int]], call: int
) -> list[Trajectory]:
    async def play_task(number: int, task: Task, size: int) -> list[Trajectory]:
        # The round index is different for each call and row, so that a repeated task gets new seeds.
        played = runner.run_groups(spec, [task], size, round_index=call * 10_000 + number)
        return [member async for group in played for member in group]

    plays = (play_task(number, task, size) for number, (task, size) in enumerate(chosen))
    return [member for group in await asyncio.gather(*plays) for member in group]


def _task_id(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else text_of(prompt[-1])
    if not text.startswith(MARK):
        raise UsageError(
            f"the prompt {text!r:.100} names no task", remedy="make the dataset with task_rows(spec)"
        )
    return text.removeprefix(MARK)


def _columns(played: Sequence[Trajectory], renderer: Renderer) -> dict[str, list[Any]]:
    """Return TRL's columns; an episode that cannot be trained becomes one masked token without a reward."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for one in played:
        row = only_row(one, "TRL", renderer)
        columns["prompt_ids"].append(row.prompt_ids)
        columns["completion_ids"].append(row.response_ids)
        columns["logprobs"].append(row.logprobs)
        columns["env_mask"].append([int(trained) for trained in row.loss_mask])
        columns["env_reward"].append(one.reward if any(row.loss_mask) else None)
        columns["stop_reason"].append(one.stop_reason.value)
        columns["truncated"].append(one.truncated)
        columns["turn_rewards"].append(list(one.turn_rewards))
    return columns
