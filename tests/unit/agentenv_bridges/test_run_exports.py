"""A stored run in the formats of others: each row and log is right, and its real consumer reads it."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentenv.cli import main
from agentenv.core import (
    EpisodeError,
    Rewrite,
    StopReason,
    TokenSequence,
    TokenSpan,
    ToolCall,
    ToolErrorKind,
    ToolResult,
    Trajectory,
    Turn,
    UsageError,
)
from agentenv.runs.store import RunInfo, RunStatus, RunWriter, find_run
from agentenv_bridges import (
    from_openai,
    from_prime_rl,
    from_trl,
    from_verl,
    to_atif,
    to_inspect,
    to_openai,
    to_prime_rl,
    trl_samples,
)
from scenes import TOKENIZER, language_model


def episode(
    member: int = 0, reward: float | None = 1.0, env_id: str = "x/Double-v0", **values: Any
) -> Trajectory:
    call = ToolCall("c1", "double", '{"x": 21}')
    broken = ToolCall("c2", "double", "{x")
    spans = (
        TokenSpan("prompt", (1, 2)),
        TokenSpan("model", (3, 4), (-0.1, -0.2), 0, 0),
        TokenSpan("env", (5, 6), None, None, 0),
        TokenSpan("model", (7, 8, 9), (-0.3, -0.4, -0.5), 0, 1),
    )
    messages = (
        {"role": "system", "content": "Be short."},
        {"role": "assistant", "content": "An example."},
        {"role": "user", "content": "Double 21."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "easy",
            "tool_calls": [call.to_message(), broken.to_message()],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "double", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "name": "double", "content": "not JSON"},
        {"role": "assistant", "content": "42"},
    )
    results = (
        ToolResult("c1", "double", "42"),
        ToolResult("c2", "double", "not JSON", error_kind=ToolErrorKind.INVALID_JSON),
    )
    turns = (
        Turn(0, messages[3], "stop", 2, start=2, tool_calls=(call, broken), tool_results=results),
        Turn(1, messages[6], "stop", 3, start=6, reward=reward or 0.0),
    )
    fields = {"stop_reason": StopReason.FINAL_ANSWER, "rewards": {"right": reward}, **values}
    return Trajectory(
        env_id=env_id, task_id="t0", seed=2**60, group_id="g", member=member, turns=turns,
        sequences=(TokenSequence(spans),), messages=messages, reward=reward, task={"x": 21}, **fields,
    )  # fmt: skip


def failed(member: int) -> Trajectory:
    return episode(
        member,
        None,
        stop_reason=StopReason.ERROR,
        error=EpisodeError("env", "ValueError", "broke", "Traceback"),
        untrainable_reason="broke",
    )


def info(**values: Any) -> RunInfo:
    return replace(RunInfo.start("r1", "eval", model="m", seed=3), **values)


def export(root: Path, shape: str, episodes: Sequence[Trajectory], *, code: int = 0) -> Path:
    with RunWriter.create("x", runs_dir=root, run_id="r1", model="m") as writer:
        for one in episodes:
            writer.append(one)
        writer.write_vocabulary({number: chr(ord("a") + number) for number in range(10)})
    assert run("export", "r1", "--runs-dir", root, "--as", shape, "--output", root / "out") == code
    return root / "out"


def run(*words: object) -> int:
    """Run a command; return its code."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return int(stop.value.code or 0)


def test_trl_rows_label_exactly_what_was_sampled():
    (row,) = trl_samples([episode(), failed(1)])
    steps = to_atif(episode())["steps"]

    assert row["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row["labels"] == [-100, -100, 3, 4, -100, -100, 7, 8, 9]
    assert row["prompt_ids"] + row["completion_ids"] == row["input_ids"]
    assert row["env_mask"] == [1, 1, 0, 0, 1, 1, 1]
    assert row["logprobs"] == [-0.1, -0.2, 0.0, 0.0, -0.3, -0.4, -0.5]
    assert row["env_reward"] == 1.0
    assert "metrics" not in steps[1]  # an example in the prompt is no turn
    assert steps[3]["metrics"]["completion_token_ids"] == [3, 4]


@pytest.mark.parametrize(
    ("shape", "count"),
    [("trl", 2), ("verl", 2), ("slime", 3), ("prime-rl", 3), ("openai", 3), ("sft", 1)],
)
def test_export_writes_one_line_for_each_row_that_fits(tmp_path, shape, count, capsys):
    path = export(tmp_path, shape, [episode(0), episode(1, 0.0), failed(2)])

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == count
    assert f"{count} " in capsys.readouterr().out

    if shape == "verl":
        export(tmp_path / "none", shape, [failed(0)], code=1)
        assert "none of the 1 episodes can be written as" in capsys.readouterr().out


def test_an_inspect_log_counts_episodes_of_a_task_as_epochs_and_keeps_failures_apart(tmp_path):
    played = [episode(0), episode(1, 0.0), failed(2)]
    log = to_inspect(played, info())["x/Double-v0"]
    path = export(tmp_path, "inspect", [*played, episode(env_id="x/Other-v0")])

    assert [sample["epoch"] for sample in log["samples"]] == [1, 2, 3]
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (3, 2)
    score = next(one for one in log["results"]["scores"] if one["name"] == "reward")
    counted = (score["metrics"]["mean"]["value"], score["scored_samples"], score["unscored_samples"])
    assert counted == (0.5, 2, 1)
    assert log["samples"][2]["error"]["message"] == "ValueError: broke"
    names = sorted(file.name for file in path.iterdir())
    assert [name.split("_")[1] for name in names] == ["x-Double-v0", "x-Other-v0"]
    # What Inspect's viewer lists (inspect_ai/log/_file.py: log_file_pattern).
    assert all(re.match(r"^\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}.*\.json$", name) for name in names)


def test_an_inspect_sample_keeps_messages_calls_errors_and_what_was_given():
    (sample,) = to_inspect([episode()], info())["x/Double-v0"]["samples"]
    said = sample["messages"][3]

    assert [message["role"] for message in sample["input"]] == ["system", "assistant", "user"]
    assert said["content"][0] == {"type": "reasoning", "reasoning": "easy"}
    assert said["tool_calls"][0]["arguments"] == {"x": 21}
    assert "{x" in said["tool_calls"][1]["parse_error"]
    assert sample["messages"][5]["error"]["type"] == "parsing"
    assert "error" not in sample["messages"][4]
    assert sample["output"]["choices"][0]["message"]["content"] == "42"
    assert sample["model_usage"]["m"] == {"input_tokens": 8, "output_tokens": 5, "total_tokens": 13}


@pytest.mark.parametrize(
    ("reason", "kind"),
    [(StopReason.MAX_TURNS, "turn"), (StopReason.DEADLINE, "time"), (StopReason.MAX_TOOL_CALLS, "custom")],
)
def test_an_inspect_sample_names_the_limit_that_cut_it(reason, kind):
    (sample,) = to_inspect([episode(stop_reason=reason)], info())["x/Double-v0"]["samples"]

    assert sample["limit"]["type"] == kind
    assert sample["limit"]["reason"] == reason.value


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is None, reason="inspect_ai is not installed")
def test_inspect_reads_the_logs(tmp_path):
    from inspect_ai.log import read_eval_log

    cut = episode(1, 0.0, stop_reason=StopReason.CONTEXT_LENGTH)
    path = export(tmp_path, "inspect", [episode(), cut, failed(2)]) / "x_Double-v0.json"
    log = read_eval_log(str(path))

    assert log.status == "success"
    assert [sample.scores["reward"].value for sample in log.samples[:2]] == [1.0, 0.0]
    assert log.samples[0].messages[3].tool_calls[0].function == "double"
    assert log.samples[1].limit.type == "context"
    assert log.samples[2].error.message == "ValueError: broke"
    stopped = to_inspect(
        [episode()], info(status=RunStatus.FAILED, note="gone", closed="2026-01-01T00:00:00+00:00")
    )
    (tmp_path / "failed.json").write_text(json.dumps(stopped["x/Double-v0"]))
    assert read_eval_log(str(tmp_path / "failed.json")).error.message == "gone"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_trl_trains_on_the_rows_as_they_are_labelled(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    from transformers import PreTrainedTokenizerFast

    path = export(tmp_path, "trl", [episode(0), episode(1)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER.backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TOKENIZER.chat_template
    with warnings.catch_warnings(action="ignore"):
        from trl import SFTConfig, SFTTrainer

        trainer = SFTTrainer(
            language_model(),
            SFTConfig(
                output_dir=str(tmp_path / "out-trl"), max_steps=1, use_cpu=True, bf16=False, report_to=[],
                save_strategy="no", per_device_train_batch_size=2,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )  # fmt: skip
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.train()

    assert batch["input_ids"].tolist()[0] == rows[0]["input_ids"]
    assert batch["labels"].tolist()[0] == rows[0]["labels"]
    assert trainer.state.log_history[-1]["train_loss"] > 0


@pytest.mark.parametrize("shape", ["openai", "trl", "verl", "slime", "prime-rl"])
def test_an_episode_that_was_cut_is_imported_as_one(tmp_path, shape, capsys):
    path = export(tmp_path, shape, [episode(stop_reason=StopReason.MAX_TURNS), episode(1, 0.0)])

    assert run("import", path, "--runs-dir", tmp_path) == 0
    cut, whole = find_run(capsys.readouterr().out.partition("   run ")[2].split()[0], str(tmp_path))
    assert (cut.stop_reason, cut.truncated, cut.turn_rewards) == (StopReason.MAX_TURNS, True, (0.0, 1.0))
    assert (whole.stop_reason, whole.reward) == (StopReason.FINAL_ANSWER, 0.0)
    assert cut.sequences == (() if shape == "openai" else episode().sequences)


def test_rows_of_a_trainer_are_imported_with_the_text_of_a_tokenizer(tmp_path):
    TOKENIZER.backend.save(str(tmp_path / "tokenizer.json"))
    ids = TOKENIZER.encode("ask"), TOKENIZER.encode("yes<|im_end|>")
    row = {"prompt_ids": ids[0], "completion_ids": ids[1], "logprobs": [-0.5] * len(ids[1])}
    (tmp_path / "rows.json").write_text(json.dumps([row | {"env_reward": 1.0}]))

    rows = tmp_path / "rows.json"
    assert run("import", rows, "--tokenizer", tmp_path, "--runs-dir", tmp_path) == 0
    (one,) = find_run("last", str(tmp_path))
    assert one.messages == (
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "yes<|im_end|>"},
    )
    assert one.sequences[0].loss_mask == [False] * 3 + [True] * len(ids[1])


def test_a_slime_export_without_the_texts_of_tokens_says_what_is_missing(tmp_path, capsys):
    with RunWriter.create("x", runs_dir=tmp_path, run_id="r1", model="m") as writer:
        writer.append(episode())

    assert run("export", "r1", "--runs-dir", tmp_path, "--as", "slime") == 2
    assert "--tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, StopReason.FINAL_ANSWER),
        ({"truncated": True}, StopReason.GENERATION_LENGTH),
        ({"finish_reason": "length"}, StopReason.GENERATION_LENGTH),
        ({"stop_reason": "final_answer", "truncated": True}, StopReason.GENERATION_LENGTH),
        ({"stop_reason": "deadline"}, StopReason.DEADLINE),
    ],
)
def test_a_chat_log_that_was_cut_is_no_final_answer(row, reason):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]

    (one,) = from_openai([{"messages": messages, **row}])
    (ends_on_a_result,) = from_openai([{"messages": next(to_openai([episode()]))["messages"][:-1]}])

    assert one.stop_reason is reason
    assert ends_on_a_result.truncated


def test_a_foreign_trace_with_branches_trains_a_shared_node_once():
    def node(parent, role, ids):
        sampled = role == "assistant"
        given = {"parent": parent, "message": {"role": role, "content": role}, "sampled": sampled}
        given |= {"token_ids": ids, "mask": [sampled] * len(ids)}
        return given | {"logprobs": [-0.5] * len(ids) if sampled else []}

    nodes = [
        node(None, "user", [1]), node(0, "assistant", [2, 3]), node(1, "user", [4]), node(2, "assistant", [5]),
        node(1, "user", [6]), node(4, "assistant", [7]),
    ]  # fmt: skip
    trace = {"nodes": nodes, "rewards": {"a": {"score": 2.0, "weight": 0.5}}, "stop_condition": "max_turns"}

    (one,) = from_prime_rl([{"traces": [trace], "group": {"id": "g"}}])

    assert [sequence.token_ids for sequence in one.sequences] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    assert [sequence.loss_mask for sequence in one.sequences] == [
        [False, True, True, False, True],
        [False, False, False, False, True],
    ]
    turns = [(turn.sequence, turn.start, turn.num_tokens) for turn in one.turns]
    assert turns == [(0, 1, 2), (0, 4, 1), (1, 4, 1)]
    assert [message["role"] for message in one.messages] == ["user", "assistant"] + ["user", "assistant"] * 2
    assert (one.reward, one.truncated, one.group_id) == (1.0, True, "g")
    assert one.turn_rewards == (0.0, 0.0, 1.0)


def test_a_condensed_episode_is_a_prime_rl_trace_with_a_path_for_each_context():
    rewrite = Rewrite(1, "condensed", ({"role": "user", "content": "in short: double 21"},))
    spans = (TokenSpan("prompt", (9,)), TokenSpan("model", (7, 8, 9), (-0.3, -0.4, -0.5), 0, 1))
    old = episode()
    turns = (old.turns[0], replace(old.turns[1], sequence=1, start=1))
    sequences = (old.sequences[0].cut(6), TokenSequence(spans))
    old = replace(old, turns=turns, sequences=sequences, rewrites=(rewrite,))

    (record,) = to_prime_rl([old])
    (new,) = from_prime_rl([json.loads(json.dumps(record))])

    roots = [node for node in record["traces"][0]["nodes"] if node["parent"] is None]
    assert [root["message"]["content"] for root in roots] == ["Be short.", "in short: double 21"]
    assert (new.messages, new.sequences) == (old.messages, old.sequences)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"completion_ids": [3]}, "row 1 has 1 response tokens, but a mask of 2 and 2 logprobs"),
        ({"logprobs": [0.5, -0.1]}, "row 1 cannot be read"),
        ({"prompt_ids": None}, "row 1 cannot be read"),
        ({"spans": {"source": ["model"]}}, "row 1 has `spans` that cannot be read"),
        (
            {"spans": {"source": ["env"], "turn": [0], "length": [2], "weights_version": [None]}},
            "row 1 has 4 tokens, but its spans describe 2",
        ),
    ],
)
def test_a_row_whose_lists_disagree_is_named(change, says):
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "env_mask": [1, 1], "logprobs": [-0.1, -0.1]}

    with pytest.raises(UsageError, match=says):
        list(from_trl([row, row | change]))


def test_rows_of_others_without_logprobs_are_not_trained_on():
    row = {"prompt_ids": [1], "response_ids": [3, 4, 5], "response_mask": [1, 0, 1], "reward_score": 1.0}

    first, second = from_verl([row, row])

    assert (first.trainable, first.reward, first.sequences[0].loss_mask) == (False, 1.0, [False] * 4)
    assert [(turn.start, turn.num_tokens) for turn in first.turns] == [(1, 1), (3, 1)]
    assert first.task_id != second.task_id


def test_words_of_others_in_the_places_of_our_facts_are_ignored():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    odd = {"seed": "x", "member": "first", "reward": "good", "error": "none", "rewards": 3}

    (one,) = from_openai([{"messages": messages, **odd}])
    (failed,) = from_openai([{"messages": messages, **odd, "stop_reason": "aborted"}])

    assert (one.seed, one.member, one.reward, one.stop_reason) == (0, 0, None, StopReason.FINAL_ANSWER)
    assert failed.error is not None
    assert failed.error.message == "none"
