"""What a format can hold comes back: each is written, passed through its real reader, and read again."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agentenv.core import (
    EpisodeError,
    SequenceBuilder,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from agentenv_bridges import (
    from_atif,
    from_openai,
    from_prime_rl,
    from_slime,
    from_trl,
    from_verl,
    slime_samples,
    split_sequence,
    to_atif,
    to_openai,
    to_prime_rl,
    trl_samples,
    verl_samples,
)
from helpers.host_classes import verls_output

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
numbers = st.floats(-4, 4).map(lambda value: round(value, 3))
arguments = st.sampled_from(['{"x": 21}', '{"x":21}', "{}", "{x", "[1]"])
FAILED = {StopReason.ABORTED, StopReason.ERROR}


@st.composite
def message_lists(draw):
    """Draw a conversation, and the calls and results of each of its turns."""
    messages: list[Any] = []
    if draw(st.booleans()):
        messages += [{"role": "system", "content": draw(words)}, {"role": "assistant", "content": "example"}]
    messages.append({"role": "user", "content": draw(words)})
    turns: list[tuple[Any, tuple[ToolCall, ...], tuple[ToolResult, ...]]] = []
    for number in range(draw(st.integers(0, 4))):
        names = draw(st.lists(st.sampled_from(["f", "g"]), max_size=2))
        calls = tuple(ToolCall(f"c{number}.{n}", name, draw(arguments)) for n, name in enumerate(names))
        message: Any = {"role": "assistant", "content": draw(words)}
        if draw(st.booleans()):
            message["reasoning_content"] = "so"
        if calls:
            message["tool_calls"] = [call.to_message() for call in calls]
        results = tuple(ToolResult(call.id, call.name, draw(words)) for call in calls)
        turns.append((message, calls, results))
        messages += [message, *(result.to_message() for result in results)]
        if not calls and draw(st.booleans()):
            messages.append({"role": "user", "content": draw(words)})
    return messages, turns


@st.composite
def episodes(draw, failures: bool = True, rewritten: bool = True):
    messages, said = draw(message_lists())
    builders: list[SequenceBuilder] = []
    turns: list[Turn] = []
    for index, (message, calls, results) in enumerate(said):
        if not builders or (rewritten and draw(st.booleans())):
            builders.append(SequenceBuilder())
            builders[-1].append("prompt", draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
        elif draw(st.booleans()):
            builders[-1].append("env", draw(st.lists(st.integers(0, 9), max_size=4)), turn=index - 1)
        start, size = len(builders[-1]), draw(st.integers(1, 4))
        if draw(st.integers(0, 3)):
            middle = draw(st.integers(1, size))
            ranges = [(2, 0, middle), (3, middle, size)] if middle < size else [(2, 0, size)]
            logprobs = [draw(st.floats(-20, 0)) for _ in range(size)]
            builders[-1].append_completion([7] * size, logprobs, ranges, turn=index)
        else:
            builders[-1].append("other", [8] * size, turn=index)
        finish_reason = draw(st.sampled_from(["stop", "length"]))
        turns.append(
            Turn(
                index,
                message,
                finish_reason,
                size,
                len(builders) - 1,
                start,
                calls,
                results,
                reward=draw(numbers),
            )
        )
    if builders:
        builders[-1].append("env", draw(st.lists(st.integers(0, 9), max_size=3)), turn=len(turns) - 1)
    stop = draw(st.sampled_from([reason for reason in StopReason if failures or reason not in FAILED]))
    failed = stop in FAILED
    return Trajectory(
        env_id="e/E-v0",
        task_id=draw(st.sampled_from(["t", "é/1"])),
        seed=draw(st.integers(0, 2**60)),
        group_id="g",
        stop_reason=stop,
        member=draw(st.integers(0, 3)),
        turns=tuple(turns),
        sequences=tuple(builder.freeze() for builder in builders),
        messages=tuple(messages),
        reward=None if failed else draw(numbers),
        rewards={"right": draw(st.none() | numbers)},
        error=EpisodeError("env", "ValueError", "broke") if failed else None,
        untrainable_reason="broke" if failed else "",
        task={"x": draw(st.integers(0, 5))},
    )


def same_facts(new: Trajectory, old: Trajectory) -> None:
    names = ("env_id", "task_id", "seed", "group_id", "member", "stop_reason", "terminated", "truncated")
    names += ("reward", "rewards", "turn_rewards", "task", "error")
    assert {name: getattr(new, name) for name in names} == {name: getattr(old, name) for name in names}
    assert [turn.finish_reason for turn in new.turns] == [turn.finish_reason for turn in old.turns]


def rows_of(old: Trajectory) -> list[int]:
    """Return the numbers of the sequences that rows are made of: those with trained tokens, if there are any."""
    numbers = range(len(old.sequences))
    return [number for number in numbers if any(old.sequences[number].loss_mask)] or list(numbers)


def as_written(sequence: Any) -> Any:
    """Return the sequence as a prompt and a response hold it: up to the last sampled token."""
    return sequence.cut(len(split_sequence(sequence)))


def same_tokens(new: Trajectory, old: Trajectory) -> None:
    rows = rows_of(old)
    assert list(new.sequences) == [as_written(old.sequences[number]) for number in rows]
    for mine, theirs in zip(new.turns, old.turns, strict=True):
        if theirs.sequence not in rows:
            continue
        row = rows.index(theirs.sequence)
        if theirs.end <= len(new.sequences[row]):
            assert (mine.num_tokens, mine.sequence, mine.start) == (theirs.num_tokens, row, theirs.start)
    assert new.trainable == old.trainable


def through_json(rows: Any) -> Any:
    return json.loads(json.dumps(rows))


quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(episodes())
def test_openai_rows_come_back(old):
    openai = pytest.importorskip("openai.types.chat")
    (row,) = through_json(list(to_openai([old])))
    TypeAdapter(list[openai.ChatCompletionMessageParam]).validate_python(row["messages"])

    (new,) = from_openai([row])

    same_facts(new, old)
    assert (new.messages, new.tools) == (old.messages, old.tools)
    assert [turn.message for turn in new.turns] == [turn.message for turn in old.turns]
    assert [turn.tool_results for turn in new.turns] == [turn.tool_results for turn in old.turns]


@quick
@given(episodes())
def test_atif_documents_come_back(old):
    atif = pytest.importorskip("atif")
    document = atif.Trajectory.model_validate(through_json(to_atif(old))).to_json_dict()

    (new,) = from_atif([document])

    same_facts(new, old)
    assert new.messages == old.messages
    assert [turn.tool_calls for turn in new.turns] == [turn.tool_calls for turn in old.turns]
    ends = [max([turn.end for turn in old.turns if turn.sequence == n]) for n in range(len(old.sequences))]
    assert list(new.sequences) == [old.sequences[n].cut(end) for n, end in enumerate(ends)]
    for mine, theirs in zip(new.turns, old.turns, strict=True):
        assert (mine.num_tokens, mine.sequence, mine.start) == (
            theirs.num_tokens,
            theirs.sequence,
            theirs.start,
        )


@quick
@given(st.lists(episodes(failures=False), min_size=1, max_size=3))
def test_trl_rows_come_back_from_a_data_set(olds):
    datasets = pytest.importorskip("datasets")
    olds = [old for old in olds if old.sequences]
    rows = datasets.Dataset.from_list(through_json(list(trl_samples(olds)))).to_list()

    news = list(from_trl(rows))

    for new, old in zip(news, olds, strict=True):
        same_facts(new, old)
        same_tokens(new, old)


VERL = verls_output()


@quick
@given(episodes(failures=False, rewritten=False))
def test_verl_samples_come_back_from_verls_class(old):
    rows = through_json(list(verl_samples([old])))
    taken = rows if VERL is None else [VERL(**row).model_dump(exclude_unset=True) for row in rows]
    assert [row["extra_fields"]["turn_scores"] for row in rows] == [list(old.turn_rewards)] * len(rows)

    news = list(from_verl(taken))

    assert len(news) == bool(old.sequences)
    for new in news:
        same_facts(new, old)
        same_tokens(new, old)


@quick
@given(st.lists(episodes(), min_size=1, max_size=4))
def test_slime_samples_come_back_and_groups_keep_their_size(olds):
    olds = [replace(old, task_id="t", member=place) for place, old in enumerate(olds)]

    ((*entries,),) = slime_samples([TrajectoryGroup(tuple(olds))], lambda ids: "".join(map(str, ids)))

    assert len(entries) == len(olds)
    flat = [sample for entry in entries for sample in (entry if isinstance(entry, list) else [entry])]
    for sample in flat:
        size = sample["response_length"]
        assert sample["response"] == "".join(map(str, sample["tokens"][len(sample["tokens"]) - size :]))
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == size
    news = list(from_slime(through_json(flat)))
    for new, old in zip(news, olds, strict=True):
        same_facts(new, old)
        same_tokens(new, old)


def wire_episode() -> Any:
    """Return verifiers' class of an episode record; None if verifiers is not installed."""
    if importlib.util.find_spec("verifiers") is None:
        return None
    return importlib.import_module("verifiers.v1.episode").WireEpisode


PRIME_RL = wire_episode()


@quick
@given(episodes())
def test_prime_rl_records_come_back(old):
    (record,) = through_json(list(to_prime_rl([old], model="m")))
    if PRIME_RL is not None:
        taken = PRIME_RL.model_validate(record)
        (trace,) = taken.traces
        assert trace.is_truncated == old.truncated or old.turns[-1].finish_reason == "length"
        assert (trace.reward, trace.has_error) == (old.reward or 0.0, old.stop_reason in FAILED)
        for branch, sequence in zip(trace.branches, old.sequences, strict=False):
            size = len(branch.token_ids)
            assert size >= len(split_sequence(sequence))
            assert branch.token_ids == sequence.token_ids[:size]
            assert branch.sampled_mask == sequence.loss_mask[:size]
            assert branch.logprobs == sequence.logprobs[:size]
        record = through_json(taken.to_record(float_decimals=None))

    (new,) = from_prime_rl([record])

    same_facts(new, old)
    assert (new.messages, new.tools) == (old.messages, old.tools)
    assert [turn.message for turn in new.turns] == [turn.message for turn in old.turns]
    for mine, theirs in zip(new.sequences, old.sequences, strict=True):
        assert mine == theirs.cut(len(mine))
        assert len(mine) >= len(split_sequence(theirs))
    for mine, theirs in zip(new.turns, old.turns, strict=True):
        assert (mine.num_tokens, mine.sequence, mine.start) == (
            theirs.num_tokens,
            theirs.sequence,
            theirs.start,
        )
