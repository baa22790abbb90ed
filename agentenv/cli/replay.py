"""`agentenv replay`: play a stored episode's actions again, or branch episodes at one of their turns."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import JsonOption, RunsDirOption, TrustOption, in_runs_dir
from agentenv.core.loops import run_blocking
from agentenv.core.trajectory import TrajectoryGroup
from agentenv.runs.branch import Branching
from agentenv.runs.store.writer import RunWriter

__all__ = ["run"]


def run(
    run: str = typer.Argument(..., metavar="RUN", help="The run; RUN#EPISODE also names the episode."),
    episode: str = typer.Option("", "--episode", help="Index of the episode (12), or task/member."),
    from_turn: int | None = typer.Option(
        None, "--from-turn", help="Go on with a model after this many recorded turns, as a new run."
    ),
    branches: int = typer.Option(
        0,
        "-k",
        "--branches",
        help="Go on this often from the turn (1); without an episode, from each one that has such a turn.",
    ),
    seed: int = typer.Option(0, "--seed", help="Seed of the branches."),
    model: str = typer.Option("", "-m", "--model", help="Model that continues; the run's own if empty."),
    env: str = typer.Option("", "--env", help="Environment to play in; the run's own if empty."),
    tokenizer: str = typer.Option("", "--tokenizer", help="Directory of the run's tokenizer."),
    trust: bool = TrustOption,
    runs_dir: str = RunsDirOption,
    as_json: bool = JsonOption,
) -> None:
    """Send a stored episode's messages to its environment again, and compare the answers.

    With --from-turn, a model goes on from that turn, -k times, as a group of a new run.
    """
    from agentenv.cli.trust import announce
    from agentenv.runs.store.reader import find_run
    from agentenv.runs.store.trust import names_parts

    name, _, index = run.partition("#")
    episode = episode or index
    _check_arguments(run, episode, from_turn, branches, model)
    stored = find_run(name, runs_dir)
    if not env or (from_turn is not None and not model) or names_parts(stored.info.config):
        # The environment, the model or a part of the runner is the one that the run names.
        announce(stored.info, trust=trust, purpose="replaying" if from_turn is None else "branching")
    if from_turn is None:
        replaying = _Replay(stored.info, env, tokenizer)
        raise typer.Exit(_replay(replaying, stored.load(stored.find(episode)), as_json=as_json))

    from agentenv.runs.branch import Branching

    branching = Branching(
        source=stored,
        from_turn=from_turn,
        group_size=branches or 1,
        seed=seed,
        episode=episode,
        model=model,
        env=env,
        tokenizer=tokenizer,
    )
    raise typer.Exit(branch(branching, runs_dir, as_json=as_json))


def _check_arguments(run: str, episode: str, from_turn: int | None, branches: int, model: str) -> None:
    """Check that the command names the episode and the turn that it needs."""
    from agentenv.core.errors import UsageError

    if not (episode or branches):
        raise UsageError(f"{run!r} names no episode", remedy="add --episode 12 or --episode TASK/MEMBER")
    if from_turn is None and (model or branches):
        option = "-k" if branches else "-m"
        raise UsageError(
            f"{option} continues from a turn, but no turn is named", remedy="name the turn with --from-turn"
        )


def _replay(replaying: _Replay, old: Any, *, as_json: bool) -> int:
    """Replay an episode and print what was said; return 1 if the environment answers otherwise."""
    again = run_blocking(replaying.play(old))
    new, difference = again.trajectory, again.difference
    if as_json:
        result = {
            "same": again.same,
            "difference": "" if difference is None else str(difference),
            "reward": [old.reward, new.reward],
        }
        print_json(result)
    else:
        for message in new.messages:
            print(_line(message))
        print(f"stored:   reward {old.reward}  {old.stop_reason.value}")
        print(f"replayed: reward {new.reward}  {new.stop_reason.value}")
        print("the same" if difference is None else f"differs: {difference}")
    return 0 if again.same else 1


@dataclass(frozen=True)
class _Replay:
    """What replays an episode; the run's own environment or tokenizer is used where one is empty."""

    info: Any
    env: str
    tokenizer: str

    async def play(self, old: Any) -> Any:
        from agentenv.core.limits import RunLimits
        from agentenv.core.settings import build
        from agentenv.envs.registry import spec
        from agentenv.runner.options import RunnerOptions
        from agentenv.runner.watchdog import own_pool
        from agentenv.runs.recorded import env_of, renderer_of
        from agentenv.runs.replay import replay_episode

        config = self.info.config
        entry = spec(self.env) if self.env else env_of(self.info, old.env_id)
        kwargs = {} if self.env else dict(config.get("env") or {})
        options = build(RunnerOptions, dict(config.get("runner") or {}))
        async with AsyncExitStack() as stack:
            sandbox = await own_pool(entry.sandbox, stack)
            return await replay_episode(
                old,
                entry.make(**kwargs),
                renderer_of(self.info, self.tokenizer) if old.sequences else None,
                limits=build(RunLimits, dict(config.get("limits") or {})).stricter(entry.limits),
                options=options,
                user=entry.user if options.user is None else None,
                done_policy=options.done_policy or entry.done_policy,
                sandbox=sandbox,
            )


def _line(message: Any) -> str:
    from agentenv.core.messages import text_of

    calls = "".join(
        f" → {call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls", ())
    )
    return f"{message['role']:>9}  {' '.join((text_of(message) + calls).split())[:160]}"


def branch(branching: Branching, runs_dir: str, *, as_json: bool) -> int:
    """Play branches and print the results; return 1 if every branch failed, otherwise 0.

    Args:
        branching: what to play.
        runs_dir: directory of the new run.
        as_json: print one JSON object.
    """
    live = branching.load_model()
    with branching.new_run(runs_dir) as writer:
        groups = run_blocking(branching.play(live, writer))
    _report(branching, writer, groups, runs_dir, as_json=as_json)
    return int(all(summary.stop_reason.failed for summary in writer.summaries))


def _report(
    branching: Branching, writer: RunWriter, groups: list[TrajectoryGroup], runs_dir: str, *, as_json: bool
) -> None:
    from agentenv.cli.tables import print_report
    from agentenv.runs.report import report_on

    source, turn = branching.source.id, branching.from_turn
    recorded = {
        f"{summary.group_id}/{summary.member}@turn-{turn}": summary.reward for summary in branching.episodes
    }
    rewards = {group.group_id: [member.reward for member in group] for group in groups}
    report = report_on(writer.summaries)
    if as_json:
        rows = [{"group_id": name, "recorded": recorded[name], "branches": rewards[name]} for name in rewards]
        facts = {"run": writer.id, "from": source, "groups": rows, **report.as_json()}
        print_json(facts)
        return
    print(f"branches of {source}   run {writer.id}")
    for name, values in rewards.items():
        print(f"  {name}   recorded {_number(recorded[name])}   branches {' '.join(map(_number, values))}")
    print_report(report, run=writer.id + in_runs_dir(runs_dir))


def _number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"
