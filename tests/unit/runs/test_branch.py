"""Branches: several continuations of a recorded episode from one of its turns, as a group."""

from __future__ import annotations

import itertools
import json
from contextlib import aclosing

import pytest

from agentenv.cli import main
from agentenv.core import StopReason, UsageError
from agentenv.engine import ChatCompletion, MockEngine, ScriptedEngine, Usage
from agentenv.envs import ToolEnv, register, registry
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.runs import find_run, verify_episode
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
FIRST = [tool_call("roll"), tool_call("roll"), tool_call("roll"), "done"]


class Dice(ToolEnv):
    """Rolls by the seed, or by chance."""

    chance = False
    counter = itertools.count()

    def start(self, sides: int) -> str:
        self.sides = sides
        return f"roll {sides}"

    @tool
    def roll(self) -> str:
        "Roll."
        return str(next(Dice.counter) if self.chance else int(self.np_random.integers(self.sides)))

    def reward(self, answer: str) -> float:
        return float(len(answer))


@pytest.fixture
def entry():
    yield register("branch/Dice-v0", Dice, tasks=[{"sides": 1000}, {"sides": 10}])
    registry.remove("branch/Dice-v0")


async def recorded(entry, *, engine=None):
    runner = Runner(engine or ScriptedEngine(FIRST, tokenizer=TOKENIZER), RENDERER, run_seed=3)
    async with aclosing(runner.run_groups(entry, [{"sides": 1000}])) as groups:
        (group,) = [group async for group in groups]
        return group.trajectories[0]


async def branches(entry, records, from_turn, *, size=4, engine=None, seed=5, **settings):
    engine = engine or MockEngine(TOKENIZER)
    renderer = RENDERER if not hasattr(engine, "chat") else None
    runner = Runner(engine, renderer, run_seed=seed)
    playing = runner.run_branches(entry, records, size, from_turn=from_turn, **settings)
    async with aclosing(playing):
        return [group async for group in playing]


@pytest.mark.parametrize("turn", [0, 1, 3])
async def test_the_members_share_the_turns_before_and_part_after_them(entry, turn):
    record = await recorded(entry)

    (group,) = await branches(entry, [record], turn)

    prefix = record.sequences[0].token_ids[: record.turns[turn].start]
    assert [member.member for member in group] == [0, 1, 2, 3]
    assert {member.metrics["shared_turns"] for member in group} == {turn}
    for member in group:
        sequence = member.sequences[0]
        assert sequence.token_ids[: len(prefix)] == prefix
        assert not any(sequence.loss_mask[: len(prefix)])
        assert all(
            turn <= index for index, on in zip(sequence.turn_index, sequence.loss_mask, strict=True) if on
        )
        assert [each.message for each in member.turns[:turn]] == [
            each.message for each in record.turns[:turn]
        ]
        assert member.trainable
        assert not verify_episode(member, RENDERER).wrong
    assert len({member.turns[turn].sampling["seed"] for member in group}) == 4
    assert len({tuple(member.sequences[0].token_ids) for member in group}) > 1


async def test_the_same_seed_gives_the_same_branches_and_another_seed_others(entry):
    record = await recorded(entry)

    first, again, other = [
        [member.sequences for member in group]
        for seed in (5, 5, 6)
        for group in await branches(entry, [record], 1, seed=seed)
    ]

    assert first == again
    assert first != other


async def test_a_branch_of_the_first_turn_does_not_repeat_the_record(entry):
    record = await recorded(entry, engine=MockEngine(TOKENIZER))

    (group,) = await branches(entry, [record], 0, size=1, seed=3, engine=MockEngine(TOKENIZER))

    assert group.trajectories[0].turns[0].sampling["seed"] != record.turns[0].sampling["seed"]


async def test_an_environment_that_answers_otherwise_aborts_the_branch(entry):
    record = await recorded(entry)
    Dice.chance = True
    try:
        (group,) = await branches(entry, [record], 2, size=2)
    finally:
        Dice.chance = False

    assert {member.stop_reason for member in group} == {StopReason.ABORTED}
    assert "is not the recorded one" in group.trajectories[0].error.message


class Talks:
    """An engine that only speaks text."""

    name, max_context_tokens = "talks", None

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        return ChatCompletion({"role": "assistant", "content": f"hm {sampling.seed}"}, Usage(10, 5), "stop")

    async def close(self):
        pass


async def test_a_chat_engine_goes_on_from_a_record_and_tokens_need_tokens(entry):
    record = await recorded(entry)

    (group,) = await branches(entry, [record], 2, size=2, engine=Talks())

    assert [member.messages[:5] for member in group] == [record.messages[:5]] * 2
    assert len({member.answer for member in group}) == 2
    with pytest.raises(UsageError, match="has no tokens"):
        await branches(entry, list(group), 1)


@pytest.mark.parametrize("turn", [-1, 4])
async def test_a_turn_that_the_episode_does_not_have_is_refused(entry, turn):
    with pytest.raises(UsageError, match="has 4 turns"):
        await branches(entry, [await recorded(entry)], turn)


ENV = '''
import agentenv as ae


class Counts(ae.ToolEnv):
    """Count."""

    def start(self, want: int) -> str:
        return f"Say {want}."

    @ae.tool
    def double(self, x: int) -> int:
        """Double a number."""
        return 2 * x

    def reward(self, answer: str, want: int) -> float:
        return float(str(want) in answer)


ae.register("branch/Counts-v0", Counts, tasks=[{"want": n} for n in range(3)])
'''


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0)


def test_the_command_branches_each_episode_that_has_the_turn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counts.py").write_text(ENV)
    (tmp_path / "said.json").write_text(json.dumps([tool_call("double", x=1), "1"]))
    run("eval", "counts.py", "-m", "scripted:said.json", "-n", "3", "-o", "concurrency=1", "--json")
    source = find_run("last")
    capsys.readouterr()

    words = ("replay", source.id, "--from-turn", "1", "-m", "scripted:2", "--seed", "4")
    assert run(*words, "-k", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert run("replay", f"{source.id}#0", "--from-turn", "1", "-m", "scripted:2", "-k", "1") == 0
    shown = capsys.readouterr().out
    assert run(*words[:2], "-k", "2", "-m", "mock") == 2
    assert run("replay", source.id, "--from-turn", "7", "-k", "2", "-m", "mock") == 2

    stored = find_run(told["run"])
    assert stored.info.kind == "branch"
    assert stored.info.config["branched_from"] == source.id
    assert len(stored) == 6
    assert [group["recorded"] for group in told["groups"]] == [0.0, 1.0, 0.0]
    assert [group["branches"] for group in told["groups"]] == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert "recorded 0.000   branches 0.000" in shown
    registry.remove("branch/Counts-v0")
