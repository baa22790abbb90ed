"""What many tests play: environments, models without weights, tiny ones, and ways to play and train them.

Settings are passed by their names alone: `play(Tools(), script, max_turns=3, retries=1)` sets a limit and an
option of the runner, and `trainer(beta=0.1, on_metrics=see)` an option of the training and a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from agentenv.core import Message, RunLimits, Trajectory, TrajectoryGroup
from agentenv.engine import ChatCompletion, ScriptedEngine, Usage
from agentenv.envs import EnvSpec, ToolEnv, registry
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
_LIMITS = {field.name for field in fields(RunLimits)}
_OPTIONS = {field.name for field in fields(RunnerOptions)} - {"condenser", "user", "score", "done_policy"}
_OF_EPISODE = {"seed", "env_id", "group_id", "member", "user", "score", "done_policy"}


# Environments -----------------------------------------------------------------------------


class Go(ToolEnv):
    """Says "go", takes any answer, and rewards it with 1."""

    def start(self) -> str:
        return "go"

    def reward(self) -> float:
        return 1.0


class Tools(Go):
    """Has a tool that echoes, one that prints as much as it is asked to, and one that doubles a number."""

    def start(self) -> str:
        self.ran: list[object] = []
        return "go"

    @tool
    def echo(self, text: str) -> str:
        "Say it back."
        self.ran.append(text)
        return text

    @tool
    def show(self, size: int) -> str:
        "Print."
        self.ran.append(size)
        return "x" * size

    @tool
    def double(self, number: int) -> int:
        "Double a number."
        self.ran.append(number)
        return 2 * number


class Lengths(ToolEnv):
    """Rewards answers by their lengths, so that the groups of a random model differ."""

    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10


def spec_of(env: Callable[..., Any], tasks: Any = None, **options: Any) -> EnvSpec:
    """An environment under the name of its class, with one task without fields unless others are given."""
    name = getattr(env, "__name__", "Made")
    return EnvSpec.of(f"test/{name}-v0", env, tasks=[{}] if tasks is None else tasks, **options)


def numbered(env: type[ToolEnv] = Lengths, count: int = 6, **options: Any) -> EnvSpec:
    """An environment whose tasks have the numbers from 0 on."""
    return spec_of(env, [{"n": n} for n in range(count)], **options)


@contextmanager
def registered(spec: EnvSpec) -> Iterator[str]:
    """Let an environment be found by its name, for as long as the block goes on."""
    registry.add(spec)
    try:
        yield spec.id
    finally:
        registry.remove(spec.id)


# Models without weights ---------------------------------------------------------------------


class Chat:
    """A chat API that gives these answers one after the other, the last one for ever, and keeps what it heard.

    An answer is a text, a message, or a function from the messages to one of them.
    """

    name, max_context_tokens = "chat", None

    def __init__(self, *answers: str | Message | Callable[[list[Message]], str | Message]) -> None:
        self.answers, self.heard = answers, list[list[Message]]()
        self.offered = list[str]()
        """Names of the tools that the last request offered."""

    async def chat(
        self, messages: Any, tools: Any, sampling: Any, *, deadline_s: Any = None
    ) -> ChatCompletion:
        self.heard.append([dict(message) for message in messages])
        self.offered = [tool["function"]["name"] for tool in tools or ()]
        said = self.answers[min(len(self.heard), len(self.answers)) - 1]
        said = said(messages) if callable(said) else said
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        return ChatCompletion(message, Usage(10, 5), "stop")

    async def close(self) -> None:
        pass


# Playing ------------------------------------------------------------------------------------


def runner(model: Any = "done", *, renderer: Renderer = RENDERER, **settings: Any) -> Runner:
    """A runner that waits for no second attempt.

    Args:
        model: turns of a script, a text that is said every time, a function from request to turn, or an engine.
        renderer: the renderer, unless the model is a chat API.
        settings: limits, options and arguments of the runner by their names.
    """
    limits = RunLimits(**{name: settings.pop(name) for name in _LIMITS & settings.keys()})
    options = {"retry_wait_s": 0.0} | {name: settings.pop(name) for name in _OPTIONS & settings.keys()}
    if isinstance(model, str | list | tuple) or not hasattr(model, "close"):
        turns, again = ([model], True) if isinstance(model, str) else (model, False)
        model = ScriptedEngine(turns, tokenizer=renderer.tokenizer, repeat_last=again)
    reads = None if hasattr(model, "chat") else renderer
    return Runner(model, reads, limits, options=RunnerOptions(**options), **settings)


async def play(env: Any, model: Any = "done", task: Any = None, **settings: Any) -> Trajectory:
    """Play one episode, also with arguments of `run_episode`."""
    given = {name: settings.pop(name) for name in _OF_EPISODE & settings.keys()}
    return await runner(model, **{"retries": 0, **settings}).run_episode(env, task or {}, **given)


async def groups_of(
    playing: Runner,
    spec: EnvSpec | type,
    tasks: Iterable[Any] | None = None,
    group_size: int = 1,
    **options: Any,
) -> list[TrajectoryGroup]:
    """Play a group for each task, and return the groups in the order in which they ended."""
    spec = spec if isinstance(spec, EnvSpec) else spec_of(spec)
    tasks = spec.task_set() if tasks is None else tasks
    return [group async for group in playing.run_groups(spec, tasks, group_size, **options)]


# Training -----------------------------------------------------------------------------------


def language_model(seed: int = 0, **sizes: float) -> Any:
    """A random model of one layer, or of the sizes that are given, for the bytes of `TOKENIZER`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    config = {"vocab_size": TOKENIZER.vocab_size, "initializer_range": 0.2, **small, **sizes}
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


def saved_model(path: Path, seed: int = 0, **sizes: float) -> str:
    """Write a random model with its tokenizer to a directory; return the directory."""
    from agentenv.training.loop import save_tokenizer

    language_model(seed, **sizes).save_pretrained(path)
    save_tokenizer(TOKENIZER, path)
    return str(path)


def trainer(path: Path | None = None, *, model: Any = None, kind: Any = None, **settings: Any) -> Any:
    """A trainer of a tiny model, which plays `Lengths` in turns of four tokens unless told otherwise.

    Args:
        path: where the run writes.
        model: the model in training.
        kind: a class in the place of `GRPOTrainer`.
        settings: options of the training, arguments of the trainer and callbacks, by their names.
    """
    from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer

    told = {name: settings.pop(name) for name in [*settings] if name.startswith("on_")}
    own = ("engine", "envs", "tasks", "rollout", "runner", "limits", "advantage_fn", "loss_fn", "tokenizer")
    given = {
        "envs": numbered(),
        "tokenizer": TOKENIZER,
        "limits": RunLimits(max_turns=1, max_tokens_per_turn=4),
    }
    given |= {name: settings.pop(name) for name in own if not isinstance(settings.get(name), str | None)}
    if not isinstance(settings.get("eval_tasks", 0), int):
        given["eval_tasks"] = settings.pop("eval_tasks")
    options = {"groups_per_step": 2, "num_generations": 2, "max_steps": 3, "learning_rate": 0.02, **settings}
    options |= {} if path is None else {"output_dir": str(path)}
    options = {name: value for name, value in options.items() if value is not None or name not in own}
    made = language_model() if model is None else model
    return (kind or GRPOTrainer)(GRPOConfig(**options), model=made, callbacks=Callbacks(**told), **given)
