"""The core of environments and Gymnasium's front of it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from agentenv.core import Action, Context, EnvironmentMisuse, UsageError
from agentenv.envs import Chat, Env, Text, make
from agentenv.sandbox import Session, create


class Countdown(Env):
    """Counts down; each message is one step."""

    tasks = tuple({"n": n} for n in range(2, 7))

    def __init__(self):
        self.finished = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.task.get("n", 3)
        return f"{self.left} to go, luck {self.np_random.integers(100)}", {}

    def step(self, action: str):
        self.left -= 1
        return f"{self.left} to go", 0.5, self.left == 0, False, {"said": action}

    def finish(self, stop_reason):
        self.finished.append(stop_reason)
        return 10.0


class AsyncCountdown(Countdown):
    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    async def step(self, action: str):
        await asyncio.sleep(0)
        return super().step(action)

    async def finish(self, stop_reason):
        await asyncio.sleep(0)
        return super().finish(stop_reason)


class Odd(Env):
    """Begins with "go"."""

    def reset(self, *, seed=None, options=None):
        return "go", {}

    def step(self, action): ...


SAID = Action.of({"role": "assistant", "content": "x"})


async def begun(env, task=None):
    await env.begin(task or {"n": 3}, seed=1, context=Context())
    return env


class Talk(Env):
    """Speaks in chat messages."""

    observation_space = Chat()

    def reset(self, *, seed=None, options=None):
        return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "naïve\nhello"}], {}

    def step(self, action):
        return [{"role": "user", "content": f"You said {action['content']!r}"}], 0.0, False, False, {}


both = pytest.mark.parametrize("kind", [Countdown, AsyncCountdown])


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
@pytest.mark.parametrize("kind", [Countdown, AsyncCountdown, Talk])
def test_gymnasiums_own_checker_passes(kind):
    check_env(make(kind), skip_render_check=True)


def test_a_step_that_calls_its_base_class_in_a_thread_pool_is_that_step():
    class Pooled(Countdown):
        def step(self, action: str):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(super().step, action).result(timeout=60)

    env = make(Pooled)
    env.reset(options={"task": {"n": 2}})

    assert [env.step("a")[0], env.step("b")[:2]] == ["1 to go", ("0 to go", 10.5)]


@both
def test_reset_without_a_task_draws_one_by_seed(kind):
    first, second = make(kind), make(kind)

    drawn = [first.reset(seed=seed)[0] for seed in range(20)]

    assert drawn == [second.reset(seed=seed)[0] for seed in range(20)]
    assert len({text.split()[0] for text in drawn}) > 1


@both
def test_the_end_adds_the_finish_reward_once(kind):
    env = make(kind)
    env.reset(options={"task": {"n": 2}})

    rewards = [env.step("a")[1], env.step("b")[1]]

    assert rewards == [0.5, 10.5]
    assert env.unwrapped.finished == ["env_terminated"]


@both
def test_step_after_the_end_and_before_reset_raises(kind):
    env = make(kind)
    with pytest.raises(EnvironmentMisuse, match="before reset"):
        env.step("a")
    env.reset(options={"task": {"n": 1}})
    env.step("a")
    with pytest.raises(EnvironmentMisuse, match="after the end"):
        env.step("a")
    env.reset(options={"task": {"n": 1}})
    assert env.step("a")[2]


@both
async def test_the_core_finishes_exactly_once_however_often_it_is_ended(kind):
    """Also at the same time."""
    with pytest.raises(EnvironmentMisuse, match="begun"):
        await kind().end("max_turns")
    env = await begun(kind())
    await env.advance(SAID)

    first, again = await asyncio.gather(env.end("max_turns"), env.end("deadline"), return_exceptions=True)
    last = await env.end("final_answer")

    assert env.finished == ["max_turns"]
    assert last.reward == 10.0
    assert last is first
    assert isinstance(again, EnvironmentMisuse)


async def test_a_finish_that_raises_is_not_called_again():
    class Broken(Countdown):
        def finish(self, stop_reason):
            super().finish(stop_reason)
            raise ZeroDivisionError("no")

    env = await begun(Broken())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await env.end("max_turns")
    assert env.finished == ["max_turns"]


async def test_front_inside_a_loop_and_inside_the_core_of_another_environment():
    """Whose methods run in another thread than the loop's."""
    threads = []

    class Outer(Odd):
        def reset(self, *, seed=None, options=None):
            threads.append(threading.current_thread())
            self.inner = make(AsyncCountdown)
            return self.inner.reset(seed=seed, options={"task": {"n": 1}})

        def step(self, action: str):
            return self.inner.step(action)

    env = make(Outer)
    env.reset(seed=1)

    assert env.step("a")[:3] == ("0 to go", 10.5, True)
    assert (await (await begun(Outer())).advance(SAID)).reward == 10.5
    assert threading.current_thread() not in threads


def test_sync_front_called_from_the_private_loop_raises_instead_of_hanging():
    class Outer(Odd):
        async def reset(self, *, seed=None, options=None):
            return make(Countdown).reset(seed=seed)

    with pytest.raises(EnvironmentMisuse, match="await"):
        make(Outer).reset(seed=1)


async def test_system_prompt_comes_first_and_only_once():
    class Prompted(Talk):
        system_prompt = "Be short."

    class Plain(Countdown):
        system_prompt = "Be short."

    talk = await Prompted().begin({}, seed=0, context=Context())
    plain = await Plain().begin({"n": 2}, seed=0, context=Context())

    assert [m["role"] for m in talk.messages] == ["system", "user"]
    assert plain.messages[0] == {"role": "system", "content": "Be short."}
    assert plain.messages[1]["role"] == "user"


async def test_text_action_is_given_to_a_step_annotated_str_and_a_message_otherwise():
    class Takes(Odd):
        def step(self, action):
            return str(type(action).__name__), 0.0, False, False, {}

    class TakesText(Takes):
        def step(self, action: str):
            return super().step(action)

    for kind, name in ((Takes, "dict"), (TakesText, "str")):
        result = await (await begun(kind(), {})).advance(SAID)
        assert result.messages[0]["content"] == name
    assert isinstance(TakesText().action_space, Text)


async def test_tool_messages_of_a_plain_environment_become_results_in_call_order():
    class Own(Odd):
        def step(self, action):
            calls = action["tool_calls"]
            answers = [
                {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}
                for call in reversed(calls[:2])
            ]
            return [*answers, {"role": "user", "content": "more?"}], 0.0, False, False, {}

    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": f"f{n}", "arguments": "{}"}}
        for n in range(3)
    ]
    asked = Action.of({"role": "assistant", "content": None, "tool_calls": calls})
    result = await (await begun(Own(), {})).advance(asked)

    told = [(one.tool_call_id, one.is_error) for one in result.tool_results]
    assert told == [("c0", False), ("c1", False), ("c2", True)]
    assert [m["content"] for m in result.messages] == ["more?"]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (("a", 0.0, False, {}), "terminated, truncated"),
        (("a", float("nan"), False, False, {}), "finite"),
        (("a", "much", False, False, {}), "number"),
        (("a", 0.0, False, False, None), "info"),
        ((3, 0.0, False, False, {}), "text or chat"),
        (([{"role": "assistant", "content": "I"}], 0.0, False, False, {}), "only the model"),
    ],
)
async def test_a_step_of_the_wrong_shape_says_what_is_wrong(returned, words):
    wrong = type("Wrong", (Odd,), {"step": lambda self, action: returned})

    env = await begun(wrong(), {})
    with pytest.raises(EnvironmentMisuse, match=words):
        await env.advance(SAID)


async def test_the_task_of_an_episode_is_a_copy():
    class Eater(Odd):
        def reset(self, *, seed=None, options=None):
            options["task"]["food"].clear()
            return "gone", {}

    row = {"food": [1, 2]}
    await begun(Eater(), row)

    assert row == {"food": [1, 2]}


async def test_restore_goes_back_any_number_of_times():
    env = await begun(Countdown(), {"n": 5})
    context = env.context
    env.pair = [env.finished, env.finished]
    context.state["seen"] = [1]
    saved = env.snapshot()

    ends = []
    for _ in range(2):
        env.finished.append("changed")
        context.state["seen"].append(2)
        answers = [await env.advance(SAID) for _ in range(2)]
        ends.append([a.messages for a in answers])
        env.restore(saved)

    assert ends[0] == ends[1]
    assert (env.left, env.finished) == (5, [])
    assert env.pair[0] is env.pair[1]
    assert env.context is context
    assert context.state == {"seen": [1]}


async def test_snapshot_names_what_it_cannot_copy():
    """Such as a lock, and a session of a sandbox, whose state is elsewhere."""
    env = await begun(Countdown())
    session = type("Open", (Session,), {})
    session.__abstractmethods__ = frozenset()
    env.context.state["session"] = session()
    with pytest.raises(UsageError, match=r"context\.state\['session'\] cannot be copied"):
        env.snapshot()

    env.context.state.clear()
    env.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"Countdown\.lock"):
        env.snapshot()


async def test_an_environment_with_a_sandbox_of_its_own_is_restored_and_keeps_the_sandbox():
    env = await begun(Countdown())
    env.own = env.context.sandbox = own = create("none", size=1)
    env.held, env.files = [own], {"a.py": "1"}
    env.context.state["seen"] = [own]
    saved = env.snapshot()

    env.files["a.py"] = "2"
    env.restore(saved)

    assert env.files == {"a.py": "1"}
    held = (env.own, *env.held, env.context.sandbox, *env.context.state["seen"])
    assert all(one is own for one in held)


def test_close_is_the_authors_and_may_be_called_twice():
    closed = []

    class Closing(Countdown):
        async def close(self):
            closed.append(1)

    env = make(Closing)
    env.close()
    env.close()

    assert closed == [1, 1]


def test_the_environment_ends_or_truncates_the_episode_itself():
    class Done(Countdown):
        def is_done(self):
            return self.left <= 3

    class Cut(Countdown):
        def step(self, action: str):
            return "cut", 1.0, False, True, {}

    env = make(Done)
    env.reset(options={"task": {"n": 5}})
    assert env.step("a")[2] is False

    ends = [env.step("b")]
    env = make(Cut)
    env.reset(seed=0)
    ends.append(env.step("a"))

    assert [(*values[1:4], values[4]["stop_reason"]) for values in ends] == [
        (10.5, True, False, "env_done"),
        (11.0, False, True, "env_truncated"),
    ]


def test_wrappers_of_gymnasium_hold_it():
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.wrappers.TimeLimit(make(Countdown), 2))
    env.reset(options={"task": {"n": 9}})
    env.step("a")
    *_, terminated, truncated, info = env.step("b")

    assert (terminated, truncated) == (False, True)
    assert info["episode"]["r"] == 1.0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_vector_environments_in_processes_hold_it():
    vector = gymnasium.vector.AsyncVectorEnv(
        [lambda: make(Countdown), lambda: make(AsyncCountdown)], shared_memory=False
    )
    try:
        first, _ = vector.reset(seed=4)
        _, rewards, *_ = vector.step(("a", "b"))
    finally:
        vector.close()

    assert len(first) == 2
    assert list(rewards) == [0.5, 0.5]
