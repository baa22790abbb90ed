"""Episodes for the trainers of others keep the length rules of their formats; their own classes take them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import (
    EpisodeError,
    SequenceBuilder,
    StopReason,
    Supports,
    Trajectory,
    TrajectoryGroup,
    Turn,
    UsageError,
)
from agentenv.core.messages import chat_call
from agentenv.envs.rewards.reward import Reward
from agentenv_bridges import (
    from_atif,
    from_slime,
    slime_samples,
    split_sequence,
    to_atif,
    to_prime_rl,
    trl_samples,
    verl_samples,
    write_parquet,
)
from helpers.host_classes import verls_output

FAILED = {
    "stop_reason": StopReason.ABORTED,
    "error": EpisodeError("engine", "E", "gone"),
    "untrainable_reason": "gone",
    "reward": None,
}
spans = st.lists(st.tuples(st.sampled_from(["model", "env", "other"]), st.integers(0, 5)), max_size=6)


def sequence_of(parts):
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    for source, length in parts:
        sampled = {"logprobs": [-0.5] * length, "weights_version": 4} if source == "model" else {}
        builder.append(source, [7] * length, turn=0, **sampled)
    return builder.freeze()


def episode(*parts, **fields) -> Trajectory:
    sequence = sequence_of(parts)
    turn = Turn(0, {"role": "assistant", "content": "yes"}, "stop", sequence.num_trained_tokens, start=3)
    messages = ({"role": "user", "content": "hi"}, turn.message)
    values = {"stop_reason": StopReason.FINAL_ANSWER, "reward": 1.0, "sequences": (sequence,), **fields}
    return Trajectory("e/E-v0", "t", 0, "g", **{"turns": (turn,), "messages": messages, **values})


def letters(token_ids):
    return "".join(chr(ord("a") + token) for token in token_ids)


def slime_of(*episodes):
    """Return slime's samples of one group."""
    (samples,) = slime_samples([TrajectoryGroup(episodes)], letters)
    return json.loads(json.dumps(samples))


@given(spans)
def test_a_split_puts_every_sampled_token_into_the_response(parts):
    sequence = sequence_of(parts)

    split = split_sequence(sequence)

    whole = split.prompt_ids + split.response_ids
    assert whole == sequence.token_ids[: len(whole)]
    assert len(split.response_ids) == len(split.loss_mask) == len(split.logprobs)
    assert sum(split.loss_mask) == sequence.num_trained_tokens
    if split.response_ids:
        assert split.loss_mask[0]
        assert split.loss_mask[-1]


@pytest.mark.engine
def test_verl_takes_the_samples_in_its_own_class():
    output = verls_output()
    if output is None:
        pytest.skip("verl is not installed")
    (sample,) = verl_samples([episode(("model", 2), ("env", 3), ("model", 1))])

    taken = output(**json.loads(json.dumps(sample)))

    assert set(sample) <= set(output.model_fields)
    assert (taken.response_mask, taken.reward_score, taken.num_turns) == ([1, 1, 0, 0, 0, 1], 1.0, 2)


def test_verl_samples_are_masked_and_over_a_limit_refused_and_not_cut():
    (sample,) = verl_samples([episode(("model", 2), ("env", 3), ("model", 1), ("env", 2))])

    assert sample["response_mask"] == [1, 1, 0, 0, 0, 1]
    assert sample["response_logprobs"] == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    assert sample["prompt_ids"] == [1, 2, 3]
    json.dumps(sample)
    with pytest.raises(UsageError, match=r"has 4 tokens, and verl's limit is 3"):
        list(verl_samples([episode(("model", 4))], response_length=3))
    assert list(verl_samples([episode(("model", 4), reward=None)])) == []


def test_slime_samples_keep_whole_groups_with_the_text_of_their_tokens_and_mask_failures():
    nothing = replace(episode(member=2, **FAILED), sequences=(), turns=())
    samples = slime_of(episode(("model", 2), ("env", 1)), episode(("model", 3), member=1, **FAILED), nothing)
    good, bad, none = samples

    assert (good["status"], good["response"], good["response_length"]) == ("completed", "hh", 2)
    assert good["prompt"] == [{"role": "user", "content": "hi"}]
    assert (bad["status"], bad["loss_mask"]) == ("aborted", [0, 0, 0])
    for sample in (good, bad):
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"]
        assert len(sample["tokens"]) == 3 + sample["response_length"]
    assert (none["status"], none["remove_sample"], none["tokens"]) == ("aborted", True, [])
    assert [(sample["index"], sample["rollout_id"]) for sample in samples] == [(0, 0), (1, 1), (2, 2)]
    assert [sample["reward"] for sample in samples] == [1.0, 0.0, 0.0]  # one tensor is made of them
    assert [one.reward for one in from_slime(samples[:2], decode=letters)] == [1.0, None]


def test_slime_counts_an_episode_with_two_contexts_once():
    parts = ("model", 2)
    turns = tuple(
        Turn(n, {"role": "assistant", "content": "a"}, "stop", 2, sequence=n, start=3) for n in (0, 1)
    )
    one = replace(episode(parts), sequences=(sequence_of([parts]),) * 2, turns=turns)

    (first, second), third = slime_of(one, episode(parts, member=1))

    assert [first["rollout_id"], second["rollout_id"], third["rollout_id"]] == [0, 0, 1]
    assert [first["index"], second["index"], third["index"]] == [0, 1, 2]


def group() -> TrajectoryGroup:
    """A good member, one that failed and one that was cut."""
    parts = ("model", 2)
    failed = episode(parts, member=1, **FAILED)
    return TrajectoryGroup((episode(parts), failed, episode(parts, stop_reason=StopReason.MAX_TURNS)))


def test_slimes_own_samples_hold_the_export_and_a_number_as_reward():
    slime = pytest.importorskip("slime.utils.types", exc_type=ImportError)
    import torch

    samples = [slime.Sample.from_dict(row) for row in slime_of(*group())]

    rewards = [sample.get_reward_value(SimpleNamespace(reward_key=None)) for sample in samples]
    assert torch.tensor(rewards, dtype=torch.float).tolist() == [1.0, 0.0, 1.0]
    assert [sample.remove_sample for sample in samples] == [False, True, False]
    assert [sample.status.value for sample in samples] == ["completed", "aborted", "truncated"]
    assert all(sample.response_length == len(sample.loss_mask) for sample in samples)


def test_verifiers_own_episodes_hold_the_export_for_prime_rl():
    verifiers = pytest.importorskip("verifiers.v1", exc_type=ImportError)

    rows = [json.loads(json.dumps(row)) for row in to_prime_rl(group())]
    traces = [verifiers.WireEpisode.model_validate(row).traces[0] for row in rows]

    assert [trace.reward for trace in traces] == [1.0, 0.0, 1.0]
    assert [trace.is_truncated for trace in traces] == [False, False, True]
    (branch,) = traces[0].branches
    assert list(branch.token_ids) == [1, 2, 3, 7, 7]
    assert [bool(one) for one in branch.sampled_mask] == [False] * 3 + [True] * 2
    assert list(branch.logprobs)[-2:] == [-0.5, -0.5]


def cut_episode() -> Trajectory:
    """An episode whose second completion was sampled from a cut distribution."""
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    builder.append("model", [7], logprobs=[-0.5], turn=0)
    builder.append("env", [4, 4], turn=0)
    kept = Supports.of([(5, 8), (6,), (9, 10, 11)])
    builder.append("model", [5, 6, 9], logprobs=[-0.5, 0.0, -1.0], turn=1, supports=kept)
    said = [Turn(n, {"role": "assistant", "content": "x"}, "stop", (1, 3)[n], 0, (3, 6)[n]) for n in (0, 1)]
    first, second = ({"role": "user", "content": text} for text in ("hi", "and"))
    messages = (first, said[0].message, second, said[1].message)
    return episode(turns=tuple(said), sequences=(builder.freeze(),), messages=messages)


@pytest.mark.parametrize(
    ("whose", "write"),
    [
        ("TRL", trl_samples),
        ("verl", verl_samples),
        ("slime", lambda episodes: slime_samples([TrajectoryGroup(tuple(episodes))], str)),
        ("prime-rl", to_prime_rl),
    ],
    ids=["trl", "verl", "slime", "prime-rl"],
)
def test_trainers_without_supports_are_not_given_tokens_of_a_cut_distribution(whose, write):
    with pytest.raises(UsageError, match=f"format of {whose} does not say which tokens"):
        list(write([cut_episode()]))

    # What is not trained on does no harm.
    list(write([replace(cut_episode(), untrainable_reason="a test")]))


def test_atif_and_tables_hold_the_support_of_each_token(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    (back,) = from_atif([json.loads(json.dumps(to_atif(cut_episode())))])

    write_parquet([cut_episode(), replace(episode(("model", 2)), task_id="u")], tmp_path / "x.parquet")

    assert back.trainable
    supports = [span.supports for span in cut_episode().sequences[0].spans]
    assert [span.supports for span in back.sequences[0].spans] == supports
    cut, whole = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert cut["supports"] == [[], [], [], [], [], [], [5, 8], [6], [9, 10, 11]]
    assert len(cut["supports"]) == len(cut["token_ids"])
    assert whole["supports"] is None


def test_arguments_that_are_too_deep_to_be_read_are_kept_as_text():
    deep, seen = "[" * 100_000, []
    called = {"role": "assistant", "content": "", "tool_calls": [chat_call("call_1", "find", deep)]}
    messages = ({"role": "user", "content": "hi"}, called)

    def score(completions):  # as a reward function of TRL
        seen.extend(completions)
        return [1.0]

    asyncio.run(Reward(score).score({"messages": messages}, {}))

    assert deep in json.dumps(to_atif(episode(("model", 2), messages=messages)))
    assert seen[0][0]["tool_calls"][0]["function"]["arguments"] == deep
