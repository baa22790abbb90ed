"""`agentenv replay`: play a stored episode's actions again and see whether it comes out the same."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import typer

from agentenv.cli.options import JsonOption, RunsDirOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    episode: str = typer.Argument(..., metavar="RUN#EPISODE", help="RUN#12, or RUN#task/member."),
    env: str = typer.Option("", "--env", help="Environment to play in; the run's own if empty."),
    runs_dir: str = RunsDirOption,
    as_json: bool = JsonOption,
) -> None:
    """Give an environment a stored episode's messages again, and compare what it answers."""
    from agentenv.errors import UsageError
    from agentenv.store import find_run

    name, mark, place = episode.partition("#")
    if not mark:
        raise UsageError(f"{episode!r} names no episode; write RUN#12 or RUN#task/member")
    stored = find_run(name, runs_dir)
    old = stored.load(stored.find(place))
    new = asyncio.run(play_again(old, env or _source(stored, old.env_id)))
    difference = compare_outcomes(old, new)
    if as_json:
        result = {"same": not difference, "difference": difference, "reward": [old.reward, new.reward]}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        for message in new.messages:
            print(_line(message))
        print(f"stored:   reward {old.reward}  {old.stop_reason.value}")
        print(f"replayed: reward {new.reward}  {new.stop_reason.value}")
        print(f"differs: {difference}" if difference else "the same")
    raise typer.Exit(1 if difference else 0)


def _source(stored: Any, env_id: str) -> str:
    """Return how the run's user named the environment: a file, where it is in no registry."""
    from agentenv.registry import registry

    named = [str(one) for one in stored.info.config.get("envs", ())]
    return env_id if env_id in registry or len(named) != 1 else named[0]


async def play_again(old: Any, env: str) -> Any:
    """Return the episode that an environment makes of a stored one's assistant messages."""
    from agentenv.engine.scripted import ScriptedEngine, ScriptedTurn
    from agentenv.registry import spec
    from agentenv.render import Renderer
    from agentenv.render.tokenizer import byte_tokenizer
    from agentenv.runner import Runner
    from agentenv.tasks import Task

    entry = spec(env)
    tokenizer: Any = byte_tokenizer()
    script = [
        ScriptedTurn(message=turn.message, finish_reason="length" if turn.finish_reason == "length" else None)
        for turn in old.turns
    ]
    engine = ScriptedEngine(script, tokenizer=tokenizer)
    runner = Runner(engine, Renderer(tokenizer), entry.limits)
    return await runner.run_episode(
        entry.make(),
        Task(old.task_id, dict(old.task)),
        seed=old.seed,
        env_id=old.env_id,
        group_id=old.group_id,
        member=old.member,
        user=entry.user,
        done_policy=entry.done_policy,
    )


def compare_outcomes(old: Any, new: Any) -> str:
    """Return the first thing in which two episodes differ, in words; empty if they agree."""
    from agentenv.messages import text_of

    for place, (ours, theirs) in enumerate(zip(old.messages, new.messages, strict=False)):
        if (ours["role"], text_of(ours)) != (theirs["role"], text_of(theirs)):
            return f"message {place} ({ours['role']}): {text_of(ours)!r:.100} became {text_of(theirs)!r:.100}"
    if len(old.messages) != len(new.messages):
        return f"{len(old.messages)} messages became {len(new.messages)}"
    if old.reward != new.reward:
        return f"reward {old.reward} became {new.reward}"
    return ""


def _line(message: Any) -> str:
    from agentenv.messages import text_of

    calls = "".join(
        f" → {call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls", ())
    )
    return f"{message['role']:>9}  {' '.join((text_of(message) + calls).split())[:160]}"
