"""Write and read episodes as rows of OpenAI's chat format, and write rows for supervised fine-tuning."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from json import dumps
from typing import Any, cast
from unicodedata import normalize

from agentenv.core import (
    Message,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    UsageError,
    orphans_as_user,
    text_of,
    without_hints,
    without_provider_fields,
)
from agentenv.render import ChatTokenizer
from agentenv_bridges.formats.facts import episode_of, facts_of, turn_facts
from agentenv_bridges.formats.rendered import as_sampled, with_objects

__all__ = ["chat_turns", "from_openai", "is_answered", "to_openai", "to_sft"]

_log = logging.getLogger(__name__)
NO_TOKENS = "imported from a chat log: it has no sampled tokens and logprobs"
_COMMON = (
    "a about after all also always an and answer any are as at be because been before both but by call "
    "can check could did do does each first for from get give had has have he her here him his how i if "
    "in into is it its just last let like made make may me more most must my need never new next no not "
    "now number of on one only or other our out over please question reply right same say see she should "
    "so some step such sure t s take task than that the their them then there these they think this those "
    "to tool try up us use user using very want was we well were what when where which while who why will "
    "with word work would write yes you your"
)
COMMON = frozenset(_COMMON.split())
"""Words that tell nothing of a hint."""
WITHOUT_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]{2}")
"""Two letters of Thai, Lao, Burmese, Khmer, Japanese or Chinese."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def to_openai(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield one row for each episode, with `messages`, `tools`, and its facts in `metadata`.

    The facts are ids, rewards, turn rewards, stop reason, truncation and the task. An episode in which an
    agent led several conversations gives one row for each, whose facts have its number as `conversation`.
    """
    for trajectory in trajectories:
        facts = facts_of(trajectory)
        reasons = [turn.finish_reason for turn in trajectory.turns]
        by_turn = {"turn_rewards": trajectory.turn_rewards, "finish_reasons": reasons}
        if all(rewrite.tools is None for rewrite in trajectory.rewrites):
            yield {
                "messages": list(map(without_provider_fields, trajectory.messages)),
                "tools": list(trajectory.tools),
                "metadata": facts,
            }
            continue
        for number, (first, end, carried, said) in enumerate(_conversations(trajectory)):
            turns = {name: list(of_turns[first:end]) for name, of_turns in by_turn.items()}
            yield {
                "messages": list(map(without_provider_fields, [*carried, *said])),
                "tools": list(trajectory.tools_at(first)),
                "metadata": {**facts, **turns, "conversation": number},
            }


def to_sft(
    trajectories: Iterable[Trajectory],
    *,
    min_reward: float = 1.0,
    hint: str = "",
    tokenizer: ChatTokenizer | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield `messages` and `tools` of each episode that terminated with at least `min_reward`.

    Arguments of calls are objects, as most chat templates expect them: they quote a text once more.
    A condensed episode gives one row for each conversation that the model was shown. Turns that a row
    repeats from an earlier one have `weight` 0, so that each turn is learned once.

    Args:
        trajectories: the episodes.
        min_reward: lowest reward with which an episode is accepted.
        hint: text that only the teacher was shown, if its message does not mark it (`{"type": "text", "text":
            ..., "hint": True}`); marked parts are always left out. A row is left out with a warning if it
            still has three words in a row of a hint, outside what the model said, or one rare word or number
            of it, outside what the model and its tools said: a condenser may keep just that.
        tokenizer: the tokenizer of the episodes. Rows take the form that its chat template writes as it was
            sampled: with arguments as text, or with tools in the messages, where the template needs that. A
            row that it writes otherwise in any form is named in a warning.
    """
    for trajectory in trajectories:
        reward = trajectory.reward
        if trajectory.terminated and reward is not None and reward >= min_reward:
            phrases, words = _secrets(trajectory, hint)
            said = {text_of(message) for message in trajectory.messages if message["role"] == "assistant"}
            conversations = list(_shown(trajectory))
            for number, (first, shown) in enumerate(conversations):
                messages = [_without(hint, message) for message in orphans_as_user(shown)]
                heard = (text_of(message) for message in messages if message["role"] != "assistant")
                told = {text_of(message) for message in messages if message["role"] != "tool"} - said
                if leaked := phrases & _phrases(*heard) | words & _words(*told):
                    _log.warning(
                        "a row of member %d of %s is left out: it still has the words %r of the hint",
                        *(trajectory.member, trajectory.group_id, min(leaked)),
                    )
                    continue
                row = {"messages": messages, "tools": list(trajectory.tools_at(first))}
                whole = not (phrases | words) and len(conversations) == len(trajectory.sequences)
                sequence = trajectory.sequences[number] if whole else None
                # Tokens of images stand for pixels, which no row repeats.
                if tokenizer is None or sequence is None or sequence.images:
                    yield with_objects(row)
                    continue
                row, otherwise = as_sampled(row, sequence, tokenizer)
                if otherwise:
                    _log.warning(
                        "the row of member %d of %s is not what was sampled: %s",
                        *(trajectory.member, trajectory.group_id, otherwise),
                    )
                yield row


def _secrets(trajectory: Trajectory, hint: str) -> tuple[set[str], set[str]]:
    """Return the phrases, and the rare words, of an episode's hints that the task itself does not have."""
    contents = [message.get("content") for message in trajectory.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    marked = [part.get("text", "") for part in parts if part.get("hint")]
    first = list(takewhile(lambda message: message["role"] != "assistant", trajectory.messages))
    task = [_without(hint, message) for message in first]
    # What remains of a hint that does not stand there as a whole must not be taken for words of the task.
    own = list(map(text_of, task)) if task != first else []
    return _phrases(hint, *marked) - _phrases(*own), _words(hint, *marked) - _words(*own) - COMMON


def _words(*texts: str) -> set[str]:
    """Return all words and numbers in texts; `1,234` is the number 1234.

    Where a script has no spaces, each two letters that follow each other count as a word as well.
    """
    found = set(re.findall(r"\w+", re.sub(r"(?<=\d)[,_](?=\d)", "", _plain("\n".join(texts)))))
    pairs = (word[place : place + 2] for word in found for place in range(len(word)))
    return found | set(filter(WITHOUT_SPACES.fullmatch, pairs))


def _plain(text: str) -> str:
    """Return a text in which letters that look the same are the same."""
    return normalize("NFKC", text).casefold()


def _phrases(*texts: str) -> set[str]:
    """Return all sequences of three words in texts."""
    words = [re.findall(r"\w+", _plain(text)) for text in texts]
    return {" ".join(three) for said in words for three in zip(said, said[1:], said[2:], strict=False)}


def _shown(trajectory: Trajectory) -> Iterator[tuple[int, list[Any]]]:
    """Yield the conversations that the model was shown, from one condensation to the next, by first turn."""
    if not trajectory.rewrites:
        yield 0, list(trajectory.messages)
        return
    for first, _, carried, said in _conversations(trajectory):
        # The last observation before a condensation is part of the condensed conversation, so this row ends
        # with the assistant message before it.
        last = max(index for index, message in enumerate(said) if message["role"] == "assistant")
        old = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in carried]
        yield first, [*old, *said[: last + 1]]


def _conversations(
    trajectory: Trajectory,
) -> Iterator[tuple[int, int, Sequence[Message], Sequence[Message]]]:
    """Yield the turns of each conversation (the first, and the one after the last) and its messages.

    The messages are those with which a conversation after the first begins, and those that follow.
    """
    whole = trajectory.messages
    said = [index for index, message in enumerate(whole) if message["role"] == "assistant"]
    # The first observation may contain assistant messages as examples; those are not turns.
    said = [*said[len(said) - len(trajectory.turns) :], len(whole)]
    firsts = [0, *(rewrite.turn for rewrite in trajectory.rewrites), len(trajectory.turns)]
    carried: list[tuple[Message, ...]] = [(), *(rewrite.messages for rewrite in trajectory.rewrites)]
    for number, messages in enumerate(carried):
        first, end = firsts[number], firsts[number + 1]
        # The first messages may be condensed, and nothing may be said between two condensations.
        if first < end:
            yield first, end, messages, whole[said[first] if number else 0 : said[end]]


def _without(hint: str, message: Any) -> Any:
    message = without_provider_fields(without_hints(message))
    content = message.get("content")
    if not hint or message["role"] == "assistant":
        return message
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return {**message, "content": [_part_without(hint, part) for part in parts]}
    if not isinstance(content, str) or hint not in content:
        return message
    return {**message, "content": content.replace(hint, "").strip()}


def _part_without(hint: str, part: Any) -> Any:
    return {**part, "text": part["text"].replace(hint, "")} if isinstance(part.get("text"), str) else part


def from_openai(rows: Iterable[Mapping[str, Any]], *, env_id: str = "import/Chat-v0") -> Iterator[Trajectory]:
    """Yield an episode for each row with `messages`; other facts are read from `metadata` or from the row.

    A row without a stop reason is an episode that ended with `final_answer` if its last message is a text of
    the model. Otherwise, it was cut: the stop reason is `max_turns`, or `generation_length` if the row says
    `truncated` or the finish reason `length`.

    Raises:
        UsageError: A row has no messages, or a message has an unknown role; the error names the row.
    """
    for number, row in enumerate(rows):
        facts, messages = _checked(row, number)
        text = dumps(messages, sort_keys=True, default=str)
        yield episode_of(
            facts,
            env_id=env_id,
            task_id=blake2b(text.encode(), digest_size=6).hexdigest(),
            turns=chat_turns(messages, facts),
            messages=messages,
            tools=tuple(row.get("tools") or ()),
            untrainable_reason=NO_TOKENS,
            answered=is_answered(messages),
        )


def _checked(row: Mapping[str, Any], number: int) -> tuple[Mapping[str, Any], list[Message]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"row {number} has no list `messages`; its keys are {sorted(map(str, row))}")
    for index, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UsageError(f"row {number}, message {index} has no known role: {message!r:.120}")
    metadata = row.get("metadata")
    facts = cast("Mapping[str, Any]", metadata) if isinstance(metadata, dict) else row
    return facts, cast("list[Message]", messages)


def is_answered(messages: Sequence[Message]) -> bool:
    """Return whether the conversation ends with a text of the model."""
    last = messages[-1] if messages else {"role": "user"}
    return last["role"] == "assistant" and not last.get("tool_calls")


def chat_turns(messages: Sequence[Message], facts: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a conversation, with their calls, results and rewards.

    If the facts have a reward for each turn, assistant messages before that many last ones are examples in
    the first observation.
    """
    results = {message.get("tool_call_id", ""): message for message in messages if message["role"] == "tool"}
    said = [message for message in messages if message["role"] == "assistant"]
    rewards = facts.get("turn_rewards")
    if isinstance(rewards, list):
        said = said[max(0, len(said) - len(cast("list[object]", rewards))) :]
    turns: list[Turn] = []
    for index, (message, (reward, finish_reason)) in enumerate(
        zip(said, turn_facts(facts, len(said)), strict=True)
    ):
        calls = tuple(map(ToolCall.from_message, message.get("tool_calls") or ()))
        answers = tuple(
            ToolResult(call.id, call.name, text_of(results[call.id])) for call in calls if call.id in results
        )
        turns.append(
            Turn(index, message, finish_reason, 0, tool_calls=calls, tool_results=answers, reward=reward)
        )
    return turns
