"""A stage plays one member of one group; groups, single episodes and resumed runs are made of that."""

from __future__ import annotations

import pytest

from agentenv.core import EngineUnavailable, UsageError
from agentenv.envs import ToolEnv
from agentenv.runner import GroupPolicy, User, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import groups_of, runner, spec_of


class Counting(ToolEnv):
    made = closed = 0

    def __init__(self, word: str = "go") -> None:
        type(self).made += 1
        self.word = word

    def start(self) -> str:
        return self.word

    def close(self) -> None:
        type(self).closed += 1


TASKS = [{"id": name} for name in "abc"]
SPEC = spec_of(Counting, TASKS)


@pytest.fixture(autouse=True)
def _anew():
    Counting.made = Counting.closed = 0


async def test_a_member_played_on_a_stage_is_the_member_of_its_group():
    groups = await groups_of(runner(run_seed=7), SPEC, group_size=2)
    by_group = {group.group_id: group for group in groups}
    playing = runner(run_seed=7)

    async with playing.stage(SPEC) as stage:
        jobs = list(stage.jobs(TASKS))
        alone = [await stage.play(job, 1) for job in reversed(jobs)]

    for record in alone:
        twin = by_group[record.group_id][1]
        assert (record.seed, record.member, record.messages) == (twin.seed, 1, twin.messages)
        assert record.turns[0].sampling == twin.turns[0].sampling
        assert record.sequences == twin.sequences
    assert playing.ledger.outcomes == {"final_answer": 3}


async def test_a_stage_takes_arguments_of_the_environment_and_closes_what_it_made():
    async with runner().stage(SPEC, env_kwargs={"word": "hello"}) as stage:
        (job, *_) = stage.jobs(TASKS)
        record = await stage.play(job)

    assert record.messages[0]["content"] == "hello"
    assert (Counting.made, Counting.closed) == (1, 1)


async def test_a_stage_plays_again_what_infrastructure_broke_and_counts_it_once():
    tries = []

    def script(request):
        tries.append(request)
        if len(tries) == 1:
            raise EngineUnavailable("down")
        return "done"

    playing = runner(script, retries=1)

    async with playing.stage(SPEC) as stage:
        record = await stage.play(next(stage.jobs(TASKS)))

    assert (record.attempt, record.stop_reason) == (1, "final_answer")
    assert (playing.ledger.submitted, playing.ledger.retried) == (1, 1)
    assert (Counting.made, Counting.closed) == (2, 2)


async def test_members_that_an_earlier_run_finished_are_not_played_again():
    whole = await groups_of(runner(), SPEC, group_size=3)
    name = "test/Counting-v0:{}".format
    finished = {(name("a"), 0), (name("a"), 2), *((name("b"), member) for member in range(3))}

    rest = await groups_of(runner(), SPEC, group_size=3, finished=finished)

    played = {group.group_id: [one.member for one in group] for group in rest}
    assert played == {name("a"): [1], name("c"): [0, 1, 2]}
    twins = {group.group_id: group.trajectories for group in whole}
    for group in rest:
        for one in group:
            assert one.turns[0].sampling == twins[one.group_id][one.member].turns[0].sampling


async def test_a_refill_of_a_group_that_goes_on_gets_a_number_of_its_own():
    def script(request):
        if "/1/" in request.session_id:
            raise ValueError("no")
        return "done"

    policy = GroupPolicy(on_failed="refill", max_refills=1)
    finished = {("test/Counting-v0:a", 0)}

    (group,) = await groups_of(
        runner(script, retries=0), SPEC, TASKS[:1], 2, policy=policy, finished=finished
    )

    assert [one.member for one in group] == [1, 2]


def test_groups_that_cannot_be_are_refused_when_they_are_asked_for():
    with pytest.raises(UsageError, match="group_size"):
        runner().run_groups(SPEC, TASKS, 0)


class Working(ToolEnv):
    def start(self, words: list) -> str:
        self.words = words
        return "go"

    @tool
    def work(self) -> str:
        "Do it."
        return "ok"

    def reward(self) -> float:
        return float(self.words == ["a"])


class Destroys(User):
    """Changes whatever it gets."""

    async def start(self, task, *, seed):
        task["words"].clear()
        task.clear()

    async def respond(self, messages):
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["name"] = "broken"
            message["content"] = "broken"
        messages.clear()
        return UserTurn("bye", done=True)


def choose(task):
    task["words"].append("b")
    return Destroys()


async def test_a_user_that_changes_what_it_gets_changes_no_record():
    spec = spec_of(Working, [{"words": ["a"]}], user=choose)

    (group,) = await groups_of(runner([tool_call("work"), "done"], concurrency=1), spec, group_size=2)

    for record in group:
        assert (record.stop_reason, record.reward) == ("user_done", 1.0)
        assert record.task == {"words": ["a"]}
        told = [message["content"] for message in record.messages]
        assert told == ["go", "", "ok", "done", "bye"]
        assert record.messages[1]["tool_calls"][0]["function"]["name"] == "work"


async def test_one_environment_is_not_played_again_after_it_was_begun():
    def script(request):
        raise EngineUnavailable("down")

    playing = runner(script, retries=3)

    record = await playing.run_episode(Working(), {"words": []})

    assert (record.stop_reason, record.attempt, playing.ledger.retried) == ("aborted", 0, 0)
