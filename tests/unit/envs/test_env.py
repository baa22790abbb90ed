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
        await asyncio.sleep(0)
        return super().reset(seed=seed, options=options)

    async def step(self, action: str):
        await asyncio.sleep(0)
        return super().step(action)

    async def finish(self, stop_reason):
        await asyncio.sleep(0)
        return super().finish(stop_reason)


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


def test_methods_stay_what_the_author_wrote():
    assert Countdown.step is vars(Countdown)["step"]
    assert asyncio.run(AsyncCountdown.finish(make(AsyncCountdown).unwrapped, "x")) == 10.0


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
    env = kind()
    await env.begin({"n": 3}, seed=1, context=Context())
    await env.advance(Action.of({"role": "assistant", "content": "x"}))

    outcomes = [await env.end("max_turns"), await env.end("final_answer")]

    assert env.finished == ["max_turns"]
    assert outcomes[0] is outcomes[1]
    assert outcomes[0].reward == 10.0


async def test_a_finish_that_raises_is_not_called_again():
    class Broken(Countdown):
        def finish(self, stop_reason):
            super().finish(stop_reason)
            raise ZeroDivisionError("no")

    env = Broken()
    await env.begin({"n": 3}, seed=1, context=Context())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await env.end("max_turns")
    assert env.finished == ["max_turns"]


async def test_concurrent_ends_run_finish_once():
    env = AsyncCountdown()
    await env.begin({"n": 3}, seed=1, context=Context())

    await asyncio.gather(env.end("max_turns"), env.end("deadline"), return_exceptions=True)

    assert env.finished == ["max_turns"]


async def test_end_without_an_episode_is_misuse():
    with pytest.raises(EnvironmentMisuse, match="begun"):
        await Countdown().end("max_turns")


async def test_sync_methods_run_off_the_event_loop():
    seen = []

    class Where(Countdown):
        def step(self, action: str):
            seen.append(threading.current_thread())
            return super().step(action)

    env = Where()
    await env.begin({"n": 3}, seed=1, context=Context())
    await env.advance(Action.of({"role": "assistant", "content": "x"}))

    assert seen[0] is not threading.current_thread()


def test_front_works_inside_a_running_loop():
    async def main():
        env = make(AsyncCountdown)
        env.reset(options={"task": {"n": 1}})
        return env.step("a")

    assert asyncio.run(main())[1] == 10.5


def test_front_inside_the_core_of_another_environment():
    class Outer(Env):
        def reset(self, *, seed=None, options=None):
            self.inner = make(AsyncCountdown)
            return self.inner.reset(seed=seed, options={"task": {"n": 1}})

        def step(self, action: str):
            return self.inner.step(action)

    env = make(Outer)
    env.reset(seed=1)

    assert env.step("a")[:3] == ("0 to go", 10.5, True)


def test_sync_front_called_from_the_private_loop_raises_instead_of_hanging():
    class Outer(Env):
        async def reset(self, *, seed=None, options=None):
            return make(Countdown).reset(seed=seed)

        def step(self, action): ...

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
    class Takes(Env):
        def reset(self, *, seed=None, options=None):
            return "go", {}

        def step(self, action):
            return str(type(action).__name__), 0.0, False, False, {}

    class TakesText(Takes):
        def step(self, action: str):
            return super().step(action)

    for kind, name in ((Takes, "dict"), (TakesText, "str")):
        env = kind()
        await env.begin({}, seed=0, context=Context())
        result = await env.advance(Action.of({"role": "assistant", "content": "x"}))
        assert result.messages[0]["content"] == name
    assert isinstance(TakesText().action_space, Text)


async def test_tool_messages_of_a_plain_environment_become_results_in_call_order():
    class Own(Env):
        def reset(self, *, seed=None, options=None):
            return "go", {}

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
    env = Own()
    await env.begin({}, seed=0, context=Context())
    result = await env.advance(Action.of({"role": "assistant", "content": None, "tool_calls": calls}))

    assert [r.tool_call_id for r in result.tool_results] == ["c0", "c1", "c2"]
    assert [r.is_error for r in result.tool_results] == [False, False, True]
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
    class Wrong(Env):
        def reset(self, *, seed=None, options=None):
            return "go", {}

        def step(self, action):
            return returned

    env = Wrong()
    await env.begin({}, seed=0, context=Context())
    with pytest.raises(EnvironmentMisuse, match=words):
        await env.advance(Action.of({"role": "assistant", "content": "x"}))


async def test_the_task_of_an_episode_is_a_copy():
    class Eater(Env):
        def reset(self, *, seed=None, options=None):
            options["task"]["food"].clear()
            return "gone", {}

        def step(self, action): ...

    row = {"food": [1, 2]}
    await Eater().begin(row, seed=0, context=Context())

    assert row == {"food": [1, 2]}


async def test_restore_goes_back_any_number_of_times():
    env, context = Countdown(), Context()
    await env.begin({"n": 5}, seed=3, context=context)
    env.pair = [env.finished, env.finished]
    context.state["seen"] = [1]
    saved = env.snapshot()

    ends = []
    for _ in range(2):
        env.finished.append("changed")
        context.state["seen"].append(2)
        answers = [await env.advance(Action.of({"role": "assistant", "content": "x"})) for _ in range(2)]
        ends.append([a.messages for a in answers])
        env.restore(saved)

    assert ends[0] == ends[1]
    assert env.left == 5
    assert env.finished == []
    assert env.pair[0] is env.pair[1]
    assert env.context is context
    assert context.state == {"seen": [1]}


def test_snapshot_names_what_it_cannot_copy():
    wrapped = make(Countdown)
    wrapped.reset(seed=1)
    env = wrapped.unwrapped
    env.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"Countdown\.lock"):
        env.snapshot()


class Sandboxed(Countdown):
    """An environment that made a sandbox itself and keeps its files in its own attributes."""

    def __init__(self):
        super().__init__()
        self._own = create("none", size=1)
        self.held = [self._own]


async def test_an_environment_with_a_sandbox_of_its_own_is_restored_and_keeps_the_sandbox():
    env, context = Sandboxed(), Context()
    await env.begin({"n": 5}, seed=3, context=context)
    context.sandbox = own = env._own
    context.state["seen"] = [own]
    env.files = {"a.py": "1"}
    saved = env.snapshot()

    env.files["a.py"] = "2"
    env.restore(saved)

    assert env.files == {"a.py": "1"}
    assert env._own is own
    assert env.held[0] is own
    assert context.sandbox is own
    assert context.state["seen"] == [own]


async def test_an_open_session_is_named_because_its_state_cannot_be_copied():
    env, context = Sandboxed(), Context()
    await env.begin({"n": 5}, seed=3, context=context)
    opened = type("Open", (Session,), {})
    opened.__abstractmethods__ = frozenset()
    context.state["session"] = opened()
    with pytest.raises(UsageError, match=r"context\.state\['session'\] cannot be copied"):
        env.snapshot()


def test_close_is_the_authors_and_may_be_called_twice():
    closed = []

    class Closing(Countdown):
        async def close(self):
            closed.append(1)

    env = make(Closing)
    env.close()
    env.close()

    assert closed == [1, 1]


def test_done_after_a_step_ends_the_episode():
    class Done(Countdown):
        def is_done(self):
            return self.left <= 3

    env = make(Done)
    env.reset(options={"task": {"n": 5}})

    assert env.step("a")[2] is False
    _, reward, terminated, truncated, info = env.step("b")
    assert (terminated, truncated, info["stop_reason"]) == (True, False, "env_done")
    assert reward == 10.5


def test_truncation_by_the_environment_is_truncation():
    class Cut(Countdown):
        def step(self, action: str):
            return "cut", 1.0, False, True, {}

    env = make(Cut)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("a")

    assert (terminated, truncated, info["stop_reason"], reward) == (False, True, "env_truncated", 11.0)


def test_wrappers_of_gymnasium_hold_it():
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.wrappers.TimeLimit(make(Countdown), 2))
    env.reset(options={"task": {"n": 9}})
    env.step("a")
    *_, terminated, truncated, info = env.step("b")

    assert (terminated, truncated) == (False, True)
    assert info["episode"]["r"] == 1.0


def test_vector_environments_hold_it():
    vector = gymnasium.vector.SyncVectorEnv([lambda: make(Countdown)] * 3)
    observations, _ = vector.reset(seed=4)
    observations, rewards, *_ = vector.step(("a", "b", "c"))
    vector.close()

    assert len(observations) == 3
    assert list(rewards) == [0.5, 0.5, 0.5]


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
