"""A recorded episode is played again, whole or from one of its turns, and what plays otherwise is found out."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core import StopReason, Supports, UsageError
from agentenv.engine import Completion, MockEngine, Sampling, ScriptedEngine
from agentenv.envs import ToolEnv, registry
from agentenv.runs import find_run, replay_episode, verify_episode
from agentenv.testing import tool_call, tool_call_message
from agentenv.tools import tool
from scenes import RENDERER, TOKENIZER, Chat, groups_of, play, runner, spec_of

CUT = {"max_tool_output_tokens": 60}
ROLL = tool_call("roll")


class Dice(ToolEnv):
    """Rolls by the seed."""

    def start(self, sides: int) -> str:
        self.sides = sides
        return f"roll {sides}"

    def number(self) -> int:
        return int(self.np_random.integers(self.sides))

    @tool
    def roll(self) -> str:
        "Roll."
        return f"{self.number()} " + "." * 100

    def reward(self, answer: str) -> float:
        return float(len(answer))


class Unfair(Dice):
    counter = itertools.count(100)

    def number(self) -> int:
        return next(self.counter)


class Kinder(Dice):
    def reward(self, answer: str) -> float:
        return 99.0


async def record(env=None, model=(ROLL, ROLL, "done"), **settings):
    return await play(env or Dice(), model, {"sides": 1000}, run_seed=3, **{**CUT, **settings})


async def again(first, env=None, renderer=RENDERER, limits=CUT, **settings):
    given = runner(**limits, **settings)
    return await replay_episode(
        first,
        env or Dice(),
        renderer,
        limits=given.limits,
        **({"options": given.options} if settings else {}),
    )


async def assert_replayed(first, **settings):
    found = await again(first, **settings)

    assert found.same
    for part in ("sequences", "messages", "reward", "trainable"):
        assert getattr(found.trajectory, part) == getattr(first, part)
    return found.trajectory


# Whole --------------------------------------------------------------------------------------


async def test_an_episode_with_a_rewritten_history_plays_again_to_the_same_sequences():
    script = ["<think>hm</think>" + ROLL, ROLL.replace('", "', '","'), "done"]
    first = await record(model=script, history="rewrite")

    assert len(first.sequences) > 1
    await assert_replayed(first, history="rewrite")
    assert (await again(first)).difference.what == "tokens"


async def test_a_nondeterministic_environment_is_reported_at_its_first_difference():
    first = await record(Unfair())

    found = await again(first, Unfair())

    assert not found.same
    assert (found.difference.what, found.difference.turn) == ("message", 1)
    assert found.difference.recorded == first.messages[2]
    assert "differs after 1 turns" in str(found.difference)

    rolled = await record()
    wrong = {**rolled.messages[4], "content": "7"}
    changed = replace(rolled, messages=(*rolled.messages[:4], wrong, *rolled.messages[5:]))
    assert (await again(changed)).difference.turn == 2


async def test_other_limits_show_as_a_difference_and_a_changed_reward_too():
    first = await record()

    await assert_replayed(first)
    assert (await again(first, limits={})).difference.what == "message"
    assert (await again(first, Kinder())).difference.what == "turn_rewards"


async def test_versions_and_foreign_tokens_are_replayed_as_they_were():
    ids = (*TOKENIZER.encode(ROLL), 258)

    class Mixed(ScriptedEngine):
        async def generate(self, prompt_ids, sampling, **request):
            self.requests.append(prompt_ids)
            if len(self.requests) == 1:
                return Completion(ids, (-0.5,) * len(ids), "stop", ((1, 0, 5), (2, 5, len(ids))))
            return Completion((104, 258), (), "stop", sampled_by_policy=False)

    await assert_replayed(await record(model=Mixed([], tokenizer=TOKENIZER)))


async def test_an_episode_without_tokens_is_replayed_too():
    first = await record(model=Chat(tool_call_message("roll"), "done"))

    assert first.sequences == ()
    assert "only speaks text" in first.untrainable_reason
    await assert_replayed(first, renderer=None)


class Kept(ScriptedEngine):
    """Returns the support of each token, if it is asked for it."""

    async def generate(self, prompt_ids, sampling, **request):
        done = await super().generate(prompt_ids, sampling, **request)
        if not sampling.wants_support:
            return done
        return replace(done, supports=Supports.of({token, 3, 9} for token in done.token_ids))


@pytest.mark.parametrize("keep", [True, False])
async def test_a_replay_of_a_cut_distribution_has_its_supports_or_says_that_it_has_none(keep):
    engine = Kept([ROLL, "done"], tokenizer=TOKENIZER)
    first = await record(model=engine, sampling=Sampling(top_p=0.9, keep_support=keep))

    replayed = await assert_replayed(first)

    assert replayed.trainable is keep
    assert [span.supports is not None for span in first.sequences[0].spans if span.trained] == [keep] * 2
    assert keep or "keep_support" in replayed.untrainable_reason


# From a turn: several continuations, as a group ---------------------------------------------


async def recorded(model=(ROLL, ROLL, ROLL, "done")):
    (group,) = await groups_of(runner(model, run_seed=3), DICE, [{"sides": 1000}])
    return group.trajectories[0]


DICE = spec_of(Dice, [{"sides": 1000}, {"sides": 10}])


async def branches(records, from_turn, *, size=4, model=None, seed=5, entry=DICE):
    playing = runner(model or MockEngine(TOKENIZER), run_seed=seed, retries=0)
    return [group async for group in playing.run_branches(entry, records, size, from_turn=from_turn)]


@pytest.mark.parametrize("turn", [0, 1, 3])
async def test_the_members_share_the_turns_before_and_part_after_them(turn):
    first = await recorded()

    (group,) = await branches([first], turn)

    prefix = first.sequences[0].token_ids[: first.turns[turn].start]
    said = [each.message for each in first.turns[:turn]]
    assert [member.member for member in group] == [0, 1, 2, 3]
    assert {member.metrics["shared_turns"] for member in group} == {turn}
    for member in group:
        sequence = member.sequences[0]
        trained = zip(sequence.turn_index, sequence.loss_mask, strict=True)
        assert sequence.token_ids[: len(prefix)] == prefix
        assert not any(sequence.loss_mask[: len(prefix)])
        assert all(turn <= index for index, on in trained if on)
        assert [each.message for each in member.turns[:turn]] == said
        assert member.trainable
        assert not verify_episode(member, RENDERER).wrong
    assert len({member.turns[turn].sampling["seed"] for member in group}) == 4
    assert len({tuple(member.sequences[0].token_ids) for member in group}) > 1


async def test_the_same_seed_gives_the_same_branches_and_another_seed_others():
    """And a branch of the first turn does not repeat the record."""
    first = await recorded(MockEngine(TOKENIZER))
    made = [group for seed in (5, 5, 6, 3) for group in await branches([first], 0, size=2, seed=seed)]

    one, same, other, _ = [[member.sequences for member in group] for group in made]

    assert one == same != other
    assert made[-1][0].turns[0].sampling["seed"] != first.turns[0].sampling["seed"]
    for turn in (-1, 4):
        with pytest.raises(UsageError, match="has 4 turns"):
            await branches([await recorded()], turn)


async def test_an_environment_that_answers_otherwise_aborts_the_branch():
    (group,) = await branches([await recorded()], 2, size=2, entry=spec_of(Unfair, [{"sides": 1000}]))

    assert {member.stop_reason for member in group} == {StopReason.ABORTED}
    assert "is not the recorded one" in group.trajectories[0].error.message


async def test_a_chat_engine_goes_on_from_a_record_and_tokens_need_tokens():
    first = await recorded()

    (group,) = await branches([first], 2, size=2, model=Chat("hm", "ah"))

    assert [member.messages[:5] for member in group] == [first.messages[:5]] * 2
    assert {member.answer for member in group} == {"hm", "ah"}
    with pytest.raises(UsageError, match="has no tokens"):
        await branches(list(group), 1)


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


def test_the_command_branches_each_episode_that_has_the_turn(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("counts.py").write_text(ENV)
    Path("said.json").write_text(json.dumps([tool_call("double", x=1), "1"]))
    command("eval", "counts.py", "-m", "scripted:said.json", "-n", "3", "-o", "concurrency=1", "--json")
    source = find_run("last").id

    words = ("--from-turn", "1", "-m", "scripted:2")
    told = command("replay", source, *words, "--seed", "4", "-k", "2", "--json").json
    one = command("replay", f"{source}#0", *words, "-k", "1")
    registry.remove("branch/Counts-v0")

    stored = find_run(told["run"])
    assert (stored.info.kind, stored.info.config["branched_from"], len(stored)) == ("branch", source, 6)
    assert [group["recorded"] for group in told["groups"]] == [0.0, 1.0, 0.0]
    assert [group["branches"] for group in told["groups"]] == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert one.code == 0
    assert "recorded 0.000   branches 0.000" in one.out
    assert command("replay", source, "-k", "2", "-m", "mock").code == 2
    assert command("replay", source, "--from-turn", "7", "-k", "2", "-m", "mock").code == 2
