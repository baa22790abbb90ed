"""Checks of an environment's rewards: the author's solution scores high, trivial policies score low."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, islice, takewhile
from statistics import fmean

from agentenv.core.episode_env import Task
from agentenv.core.fields import wanted_by
from agentenv.core.messages import Message, text_of
from agentenv.envs.advice import of_one_reward
from agentenv.envs.env import Env
from agentenv.envs.tool_env import ToolEnv
from agentenv.testing.checks.subject import Problem, Skipped, Subject, random_policy, too_long
from agentenv.testing.episodes import MessagePolicy, oracle_of

__all__ = ["check_leak", "check_oracle", "check_trivial"]

LONG_ANSWER = 3
"""Number of characters from which an answer is hardly in a text by chance."""
NO_ANSWER = "?"
"""A text that answers nothing: what it earns, too, is not earned by words."""
ODD = (
    "nan",
    "-inf",
    "1e999",
    "9" * 5_000,
    "[[]]",
    '{"answer": null}',
    "٣",
    "½",
    "\\boxed{",
    "\x00",
    "<answer>",
)
"""Answers on which parsers of answers fail, if they fail."""
_ANSWER_FIELDS = frozenset({"answer", "expected", "gold", "ground_truth", "label", "solution", "target"})


async def check_oracle(subject: Subject) -> str:
    """The author's oracle gets full marks on every task."""
    oracle = oracle_of(subject.entry)
    if oracle is None:
        raise Skipped("there is no oracle; write a function oracle(messages, task, rng) beside the class")
    marks, tasks = subject.entry.make().full_marks, subject.some_tasks()
    firsts = {task.id: subject.firsts.get(("oracle", task.id)) for task in tasks if subject.is_slow}
    known = [first for first in firsts.values() if first is not None]
    rest = [task for task in tasks if firsts.get(task.id) is None]
    episodes = await subject.play_each((oracle, task) for task in subject.in_time(rest, 1.5))
    played = [*known, *(episode for _, episode in episodes)]
    wrong = [episode for episode in played if episode.reward is None or abs(episode.reward - marks) > 1e-6]
    if wrong:
        worst = wrong[0]
        over = worst.reward is not None and worst.reward > marks
        raise Problem(
            f"the oracle gets {worst.reward} of {marks:g} on task {worst.task_id} (stop reason "
            f"{worst.stop_reason}), and {'other' if over else 'less'} than full marks on {len(wrong)} of "
            f"{len(played)}" + ("; set full_marks of the environment to the best reward" if over else "")
        )
    return f"full marks ({marks:g}) on {len(played)} of {len(played)} tasks{too_long(tasks, played)}"


async def check_trivial(subject: Subject) -> str:
    """Trivial policies score low."""
    entry, tasks = subject.entry, subject.some_tasks()
    env = entry.make()
    marks = env.full_marks
    limit = env.trivial_limit if subject.trivial_limit is None else subject.trivial_limit
    policies = await _trivial_policies(subject, tasks)
    # The constant is the right answer to the first task, so it is scored on the other tasks.
    played = await subject.play_each(
        (policy, task)
        for task in subject.in_time(tasks)
        for name, policy in policies.items()
        if name != "constant" or task is not tasks[0] or len(tasks) == 1
    )
    rewards = {
        name: [episode.reward or 0.0 for by, episode in played if by is policy]
        for name, policy in policies.items()
    }
    scores = {name: fmean(own) / marks for name, own in rewards.items() if own}
    # These raise what the reward raises.
    odd = ODD[:1] if subject.is_slow else ODD
    others = subject.in_time(list(islice(cycle(tasks), len(odd))), 1.4)
    await subject.play_each((says(text), task) for task, text in zip(others, odd, strict=False))
    if _rewards_nothing(env) and not any(scores.values()):
        raise Skipped("no episode got a reward; write reward(), or call add_turn_reward()")
    high = {name: score for name, score in scores.items() if score > limit}
    if high:
        scored = ", ".join(f"{name} {score:.2f}" for name, score in high.items())
        every = [reward for own in rewards.values() for reward in own]
        advice = of_one_reward(set(every), len(every))
        raise Problem(
            f"trivial policies score too high: {scored} of the full marks (at most {limit:g})"
            + (f"; {advice}" if advice else "")
        )
    return ", ".join(f"{name} {score:.2f}" for name, score in scores.items())


def _rewards_nothing(env: Env) -> bool:
    return isinstance(env, ToolEnv) and type(env).reward is ToolEnv.reward


async def check_leak(subject: Subject) -> str:
    """The first observation does not contain the answer."""
    oracle, tasks = oracle_of(subject.entry), subject.few_tasks()
    env = subject.entry.make()
    hidden = _hidden_fields(env)
    talks = env.ends_on_text or subject.entry.user is not None
    tried = 0
    short: list[tuple[str, str]] = []
    said: list[tuple[str, str]] = []
    for task in tasks:
        known = subject.firsts.get(("oracle", task.id)) if subject.is_slow else None
        shown = "\n".join(map(text_of, known.shown if known else await _reset(subject, env, task)))
        secrets = [str(task.data[name]) for name in task.data if name in hidden]
        if oracle is not None and talks:
            played = await subject.play_first("oracle", oracle, task)
            said_last = (m for m in reversed(played.messages) if m["role"] == "assistant" and text_of(m))
            answer = text_of(next(said_last, {"role": "assistant", "content": ""}))
            earned, nothing = (await subject.play(says(answer), task)).reward or 0.0, 0.0
            with suppress(Exception):  # of a reward that cannot read it, which another check finds
                nothing = (await subject.play(says(NO_ANSWER), task)).reward or 0.0 if earned else 0.0
            # Where the reward is for what was done, or left undone, words such as "Done." are no secret.
            if earned >= (played.reward or 0.0) and not 0.0 < earned <= nothing:
                said.append((answer, shown))
                secrets.append(answer)
        for secret in secrets:
            tried += 1
            if len(secret) < LONG_ANSWER:
                short.append((secret, shown))
            elif _is_in(secret, shown):
                raise Problem(f"the first observation of task {task.id} contains the answer {secret!r:.80}")
    await env.shutdown()
    _check_over_all(short, "their short answer")
    _check_over_all(_what_varies(said), "what varies in the oracle's answers")
    if not tried:
        why = "the model's text does not end an episode" if oracle else "there is no oracle"
        raise Skipped(f"no task field is known to contain an answer, and {why}")
    return f"none of {tried} answers is in a first observation"


async def _reset(subject: Subject, env: Env, task: Task) -> Sequence[Message]:
    """Return the first observation of a task."""
    async with subject.context() as context:
        return (await env.begin(task.data, seed=subject.seed_of(task), context=context)).messages


def says(text: str) -> MessagePolicy:
    """Return a policy that answers with this text at once."""
    return lambda messages, task, rng: text


def _what_varies(said: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return, for each answer, what is left without the words with which all answers begin and end."""
    answers = [re.findall(r"\w+|[^\w\s]", answer) for answer, _ in said]
    start = _num_shared(answers)
    end = _num_shared([words[start:][::-1] for words in answers])
    kept = [" ".join(words[start : len(words) - end]) for words in answers]
    return [(secret, shown) for secret, (_, shown) in zip(kept, said, strict=True)]


def _num_shared(texts: Sequence[Sequence[str]]) -> int:
    """Return the number of words with which all texts begin."""
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False)))


def _check_over_all(answers: Sequence[tuple[str, str]], what: str) -> None:
    """Check answers that may be in a text by chance, over all tasks together.

    Raises:
        Problem: Nearly every first observation contains its own answer, and few contain another task's.
    """
    others = sorted({secret for secret, _ in answers if secret.strip()})
    if len(others) < 3 or len(answers) < 5:
        return
    own = [_is_in(secret, shown) for secret, shown in answers]
    chance = [_is_in(other, shown) for secret, shown in answers for other in others if other != secret]
    if fmean(own) >= 0.9 and fmean(chance) <= 0.3:
        raise Problem(
            f"{sum(own)} of {len(own)} first observations contain {what}, such as "
            f"{answers[0][0]!r:.80}, but only {fmean(chance):.0%} contain that of another task; take it "
            "out of the text"
        )


def _is_in(secret: str, shown: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", shown) is not None


def _hidden_fields(env: Env) -> set[str]:
    """Return the task fields that the model must not see.

    Their names are usual for answers, or the reward reads them and `start` does not.
    """
    if not isinstance(env, ToolEnv):
        return set(_ANSWER_FIELDS)
    wanted = wanted_by(env.start)
    if wanted.takes_rest or "task" in wanted.names:
        return set(_ANSWER_FIELDS)
    return set(_ANSWER_FIELDS) | (wanted_by(env.reward).names - wanted.names)


async def _trivial_policies(subject: Subject, tasks: Sequence[Task]) -> dict[str, MessagePolicy]:
    oracle, constant = oracle_of(subject.entry), "42"
    if oracle is not None:
        messages = (await subject.play_first("oracle", oracle, tasks[0])).messages
        texts = [text_of(message) for message in messages if message["role"] == "assistant"]
        constant = next((text for text in reversed(texts) if text), constant)
    policies: dict[str, MessagePolicy] = {
        "empty": lambda messages, task, rng: "",
        "constant": lambda messages, task, rng: constant,
        "echo": lambda messages, task, rng: next(
            (text_of(message) for message in reversed(messages) if message["role"] == "user"), ""
        ),
    }
    if subject.is_slow:
        policies = {"empty": policies["empty"]}
    if subject.entry.make().tool_schemas:
        policies["tool spam"] = random_policy(subject.entry.make())
    return policies
