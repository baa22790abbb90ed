"""Samples for verl and slime keep the length rules of their formats."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

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

spans = st.lists(st.tuples(st.sampled_from(["model", "env", "other"]), st.integers(0, 5)), max_size=6)


def sequence_of(parts):
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    for source, length in parts:
        logprobs = [-0.5] * length if source == "model" else None
        builder.append(
            source, [7] * length, logprobs=logprobs, weights_version=4 if logprobs else None, turn=0
        )
    return builder.freeze()


def episode(parts, **fields) -> Trajectory:
    sequence = sequence_of(parts)
    turn = Turn(0, {"role": "assistant", "content": "yes"}, "stop", sequence.num_trained_tokens)
    messages = ({"role": "user", "content": "hi"}, turn.message)
    values = {"stop_reason": StopReason.FINAL_ANSWER, "reward": 1.0, **fields}
    return Trajectory(
        "e/E-v0", "t", 0, "g", turns=(turn,), sequences=(sequence,), messages=messages, **values
    )


@given(spans)
def test_a_split_puts_every_sampled_token_into_the_response(parts):
    sequence = sequence_of(parts)

    split = split_sequence(sequence)

    assert (
        split.prompt_ids + split.response_ids
        == sequence.token_ids[: len(split.prompt_ids + split.response_ids)]
    )
    assert len(split.response_ids) == len(split.loss_mask) == len(split.logprobs)
    assert sum(split.loss_mask) == sequence.num_trained_tokens
    if split.response_ids:
        assert split.loss_mask[0]
        assert split.loss_mask[-1]


def test_verl_samples_have_masks_as_long_as_responses():
    (sample,) = verl_samples([episode([("model", 2), ("env", 3), ("model", 1), ("env", 2)])])

    assert sample["response_mask"] == [1, 1, 0, 0, 0, 1]
    assert sample["response_logprobs"] == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    assert sample["prompt_ids"] == [1, 2, 3]
    json.dumps(sample)


@pytest.mark.engine
def test_verl_takes_the_samples_in_its_own_class():
    output = verls_output()
    if output is None:
        pytest.skip("verl is not installed")
    (sample,) = verl_samples([episode([("model", 2), ("env", 3), ("model", 1)])])

    taken = output(**json.loads(json.dumps(sample)))

    assert set(sample) <= set(output.model_fields)
    assert (taken.response_mask, taken.reward_score, taken.num_turns) == ([1, 1, 0, 0, 0, 1], 1.0, 2)


def test_verl_samples_over_a_limit_are_refused_not_cut():
    with pytest.raises(UsageError, match=r"has 4 tokens, and verl's limit is 3"):
        list(verl_samples([episode([("model", 4)])], response_length=3))


def test_verl_leaves_out_what_cannot_be_trained():
    assert list(verl_samples([episode([("model", 4)], reward=None)])) == []


def letters(token_ids):
    return "".join(chr(ord("a") + token) for token in token_ids)


def test_the_response_of_a_slime_sample_is_the_text_of_its_tokens():
    ((sample,),) = slime_samples([TrajectoryGroup((episode([("model", 2), ("env", 1)]),))], letters)

    assert (sample["response"], sample["response_length"]) == ("hh", 2)


def test_a_slime_group_keeps_members_that_failed_before_they_sampled():
    error = EpisodeError("env", "E", "gone")
    values = {"stop_reason": StopReason.ERROR, "error": error, "untrainable_reason": "gone", "reward": None}
    nothing = replace(episode([("model", 2)]), sequences=(), turns=(), member=1, **values)

    ((good, bad),) = slime_samples([TrajectoryGroup((episode([("model", 2)]), nothing))], letters)

    assert (good["rollout_id"], bad["rollout_id"]) == (0, 1)
    assert (bad["status"], bad["remove_sample"], bad["tokens"], bad["response_length"]) == (
        "aborted",
        True,
        [],
        0,
    )


def test_slime_samples_keep_whole_groups_and_mask_failures():
    error = EpisodeError("engine", "E", "gone")
    failed = {"stop_reason": StopReason.ABORTED, "error": error, "untrainable_reason": "gone", "reward": None}
    group = TrajectoryGroup((episode([("model", 2), ("env", 1)]), episode([("model", 3)], **failed)))

    ((good, bad),) = slime_samples([group], letters)

    assert good["status"] == "completed"
    assert bad["status"] == "aborted"
    assert bad["loss_mask"] == [0, 0, 0]
    for sample in (good, bad):
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"]
        assert len(sample["tokens"]) == 3 + sample["response_length"]
    assert [good["index"], bad["index"]] == [good["rollout_id"], bad["rollout_id"]] == [0, 1]
    assert good["prompt"] == [{"role": "user", "content": "hi"}]
    json.dumps([good, bad])


def test_slime_makes_one_tensor_of_the_rewards_of_a_group_with_a_failure():
    torch = pytest.importorskip("torch")
    error = EpisodeError("engine", "E", "gone")
    failed = {"stop_reason": StopReason.ABORTED, "error": error, "untrainable_reason": "gone", "reward": None}
    good, bad = episode([("model", 2)]), episode([("model", 3)], **failed)

    (samples,) = slime_samples([TrajectoryGroup((good, bad))], letters)

    rewards = torch.tensor([sample["reward"] for sample in samples], dtype=torch.float)
    assert rewards.tolist() == [good.reward, 0.0]
    assert [one.reward for one in from_slime(samples, decode=letters)] == [good.reward, None]


def test_slime_counts_an_episode_with_two_contexts_once():
    parts = [("model", 2)]
    one = replace(episode(parts), sequences=(sequence_of(parts), sequence_of(parts)), turns=(
        Turn(0, {"role": "assistant", "content": "a"}, "stop", 2, start=3),
        Turn(1, {"role": "assistant", "content": "b"}, "stop", 2, sequence=1, start=3),
    ))  # fmt: skip

    groups = [TrajectoryGroup((one, replace(episode(parts), member=1)))]
    (((first, second), third),) = slime_samples(groups, letters)

    assert [first["rollout_id"], second["rollout_id"], third["rollout_id"]] == [0, 0, 1]
    assert [first["index"], second["index"], third["index"]] == [0, 1, 2]


def cut_episode() -> Trajectory:
    """An episode whose second completion was sampled from a cut distribution."""
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    builder.append("model", [7], logprobs=[-0.5], turn=0)
    builder.append("env", [4, 4], turn=0)
    kept = Supports.of([(5, 8), (6,), (9, 10, 11)])
    builder.append("model", [5, 6, 9], logprobs=[-0.5, 0.0, -1.0], turn=1, supports=kept)
    said = [Turn(n, {"role": "assistant", "content": "x"}, "stop", (1, 3)[n], 0, (3, 6)[n]) for n in (0, 1)]
    messages = ({"role": "user", "content": "hi"}, said[0].message, {"role": "user", "content": "and"})
    return Trajectory(
        "e/E-v0", "t", 0, "g", StopReason.FINAL_ANSWER, turns=tuple(said), reward=1.0,
        sequences=(builder.freeze(),), messages=(*messages, said[1].message),
    )  # fmt: skip


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
    episode = cut_episode()

    with pytest.raises(UsageError, match=f"format of {whose} does not say which tokens"):
        list(write([episode]))

    # What is not trained on does no harm.
    list(write([replace(episode, untrainable_reason="a test")]))


def test_atif_holds_supports_and_gives_them_back():
    episode = cut_episode()

    (back,) = from_atif([json.loads(json.dumps(to_atif(episode)))])

    assert back.trainable
    assert [span.supports for span in back.sequences[0].spans] == [
        span.supports for span in episode.sequences[0].spans
    ]


def test_a_table_holds_the_support_of_each_token(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")

    write_parquet([cut_episode(), replace(episode([("model", 2)]), task_id="u")], tmp_path / "x.parquet")

    cut, whole = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert cut["supports"] == [[], [], [], [], [], [], [5, 8], [6], [9, 10, 11]]
    assert len(cut["supports"]) == len(cut["token_ids"])
    assert whole["supports"] is None


def test_arguments_that_are_too_deep_to_be_read_are_kept_as_text():
    deep = "[" * 100_000
    called = {"role": "assistant", "content": "", "tool_calls": [chat_call("call_1", "find", deep)]}
    old = replace(episode([("model", 2)]), messages=({"role": "user", "content": "hi"}, called))

    document = to_atif(old)

    assert deep in json.dumps(document)
    assert from_messages(called)[0]["tool_calls"][0]["function"]["arguments"] == deep


def from_messages(message):
    """Return the completions that a reward function of TRL gets for a conversation that ends so."""
    asked = [{"role": "user", "content": "hi"}, message]
    seen = []

    def score(completions):
        seen.extend(completions)
        return [1.0]

    asyncio.run(Reward(score).score({"messages": asked}, {}))
    return seen[0]
