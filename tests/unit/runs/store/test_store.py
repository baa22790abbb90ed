"""Run directories: exact round trips, crashes, locks, full disks, and reading at scale."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import (
    CallStatus,
    EpisodeError,
    RoutedExperts,
    StopReason,
    StoreError,
    Supports,
    TokenSequence,
    TokenSpan,
    ToolCall,
    ToolErrorKind,
    ToolResult,
    Trajectory,
    Turn,
    UsageError,
)
from agentenv.render import byte_tokenizer
from agentenv.runner.outputs import FullOutputs
from agentenv.runs.store import (
    Run,
    RunStatus,
    RunWriter,
    answer_key,
    decode_trajectory,
    encode_trajectory,
    find_run,
    list_runs,
    summarize,
)
from agentenv.runs.store import index as store_index
from agentenv.runs.store.codec import dumps, encode_line, loads
from agentenv.runs.store.index import new_summaries
from agentenv.runs.store.summary import index_line
from helpers.episodes import episode
from helpers.sample_runs import log_metrics

TESTS = Path(__file__).parents[3]


def written(root: Path, *episodes: Trajectory, name: str = "run") -> Run:
    with RunWriter.create("x", runs_dir=root, run_id=name) as writer:
        for one in episodes:
            writer.append(one)
    return Run(writer.path)


def continued(run: Run, *episodes: Trajectory) -> Run:
    with RunWriter.resume(run.path) as writer:
        for one in episodes:
            writer.append(one)
    return Run(run.path)


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def in_a_process(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code that has a `writer` of the run "run", and `episode`."""
    head = f"""
        import os, resource, signal, sys
        sys.path.insert(0, {str(TESTS)!r})
        from agentenv.core import StoreError
        from agentenv.runs.store import RunWriter
        from helpers.episodes import episode
        writer = RunWriter.create("x", runs_dir={str(root)!r}, run_id="run")
    """
    code = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


# What is written is read ---------------------------------------------------------------------

texts = st.text(max_size=30)
names = st.text(min_size=1, max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
tokens = st.integers(0, 150_000)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(names, json_values, max_size=2)
figures = st.dictionaries(names, numbers, max_size=2)
calls = st.builds(ToolCall, names, names, texts, st.sampled_from(CallStatus), texts)
results = st.builds(
    ToolResult,
    *(names, names, texts | st.just([{"type": "text", "text": "x"}])),
    *(st.none() | st.sampled_from(ToolErrorKind), texts, st.floats(0, 9), st.booleans()),
    st.none() | st.integers(0, 99),
)


@st.composite
def spans(draw):
    ids = tuple(draw(st.lists(tokens, max_size=6)))
    source = draw(st.sampled_from(["prompt", "model", "env", "other"]))
    if source != "model":
        return TokenSpan(source, ids, None, None, draw(st.integers(-1, 4)))
    values = tuple(draw(st.lists(st.floats(-50.0, 0.0), min_size=len(ids), max_size=len(ids))))
    others = [draw(st.sets(tokens, max_size=3)) for _ in ids] if draw(st.booleans()) else None
    supports = others and Supports.of([{id_, *more} for id_, more in zip(ids, others, strict=True)])
    version = draw(st.none() | st.integers(0, 9))
    return TokenSpan("model", ids, values, version, draw(st.integers(0, 4)), supports or None)


@st.composite
def token_sequences(draw):
    sequence = TokenSequence(tuple(draw(st.lists(spans(), max_size=3))))
    if len(sequence) < 2 or not draw(st.booleans()):
        return sequence
    kind = np.dtype(draw(st.sampled_from(["uint8", "uint16"])))
    rows = st.lists(st.integers(0, 200), min_size=6, max_size=6)
    ids = np.array([draw(rows) for _ in range(len(sequence) - 1)], kind).reshape(-1, 3, 2)
    return replace(sequence, routed_experts=RoutedExperts.of(ids))


@st.composite
def turns(draw, sequences):
    index = draw(st.integers(0, max(0, len(sequences) - 1)))
    made = tuple(draw(st.lists(calls, max_size=2)))
    given = tuple(replace(draw(results), tool_call_id=call.id, name=call.name) for call in made)
    return Turn(
        index=draw(st.integers(0, 5)),
        message={"role": "assistant", "content": draw(st.none() | texts)},
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        num_tokens=len(sequences[index]) if sequences else draw(st.integers(0, 50)),
        sequence=index,
        tool_calls=made,
        tool_results=given,
        reward=draw(numbers),
        sampling=draw(json_objects),
        timings=draw(figures),
    )


@st.composite
def trajectories(draw):
    sequences = draw(st.lists(token_sequences(), max_size=2))
    played = draw(st.lists(turns(sequences), max_size=3))
    sampled = sum(sequence.num_trained_tokens for sequence in sequences)
    if sequences and sum(turn.num_tokens for turn in played) < sampled:
        sequences, played = [], []
    stop = draw(st.sampled_from(StopReason))
    error = EpisodeError("env", draw(names), draw(texts), draw(texts), draw(st.booleans()))
    return Trajectory(
        env_id=draw(names),
        task_id=draw(texts),
        seed=draw(st.integers(0, 2**63)),
        group_id=draw(names),
        stop_reason=stop,
        member=draw(st.integers(0, 9)),
        attempt=draw(st.integers(0, 2)),
        turns=tuple(played),
        sequences=tuple(sequences),
        messages=({"role": "user", "content": draw(texts)},),
        reward=draw(st.none() | numbers),
        rewards=draw(st.dictionaries(names, st.none() | numbers, max_size=2)),
        error=error if stop.failed else None,
        untrainable_reason=draw(names) if stop.failed else draw(texts),
        task=draw(json_objects),
        tools=({"type": "function"},),
        metrics=draw(figures),
        timings=draw(figures),
    )


@given(trajectory=trajectories())
@settings(max_examples=40)
def test_a_trajectory_survives_the_disk_exactly_and_its_index_has_its_summary(trajectory, tmp_path_factory):
    plain, line = dumps(encode_trajectory(trajectory)), encode_line(trajectory)
    run = written(tmp_path_factory.mktemp("runs"), trajectory)
    (summary,) = run.summaries

    assert decode_trajectory(json.loads(plain)) == decode_trajectory(loads(line)) == run.load(0) == trajectory
    assert dumps(encode_trajectory(run.load(0))) == plain
    assert summary == summarize(trajectory, offset=0, size=summary.size)
    assert plain.isascii()
    assert line.isascii()
    assert "\n" not in plain
    assert line.find(b"\n") == len(line) - 1


def test_numbers_of_numpy_are_written_as_numbers():
    ids, logprobs = np.arange(3), np.array([-0.25, -1e-7, -0.0])
    span = TokenSpan("model", tuple(ids), tuple(logprobs), 3, 0)
    line = encode_line(episode(tokens=3, sequences=(TokenSequence((TokenSpan("prompt", (1, 2, 3)), span)),)))

    stored = decode_trajectory(loads(line)).sequences[0]
    assert stored.token_ids == [1, 2, 3, 0, 1, 2]
    assert stored.spans[1].logprobs == tuple(float(logprob) for logprob in logprobs)


def with_experts(*more: TokenSpan) -> Trajectory:
    made = episode(tokens=3)
    spans = (*more, *made.sequences[0].spans)
    ids = np.zeros((sum(map(len, spans)) - 1, 3, 2), "uint8")
    return replace(made, sequences=(TokenSequence(spans, RoutedExperts.of(ids)),))


def test_ids_that_do_not_fit_the_packed_form_are_written_as_a_list():
    big = episode(turns=(), sequences=(TokenSequence((TokenSpan("env", (1, 2**32)),)),))
    line = loads(encode_line(big))
    experts = with_experts(TokenSpan("prompt", (2**40,)))

    assert line["sequences"] == [[{"source": "env", "token_ids": [1, 2**32]}]]
    assert decode_trajectory(line) == big
    assert b"routed_experts" not in encode_line(big)
    assert decode_trajectory(loads(encode_line(experts))) == experts


def with_messages(text: str) -> Trajectory:
    """An episode of one turn, whose messages are also in the turn."""
    said = {"role": "assistant", "content": ""}
    result = ToolResult("c1", "look", text)
    turn = Turn(0, said, "stop", 0, tool_results=(result,))
    messages = ({"role": "user", "content": "Look."}, said, result.to_message(), {"role": "user"})
    return episode(turns=(turn,), sequences=(), messages=messages)


def test_a_message_that_a_turn_has_too_is_written_once():
    one = with_messages("x" * 1000)
    line = encode_line(one)
    back = decode_trajectory(loads(line))

    assert line.count(b"x" * 1000) == 1
    assert loads(line)["messages"] == [{"role": "user", "content": "Look."}, 0, 1, {"role": "user"}]
    assert back == one
    assert [list(message) for message in back.messages] == [list(message) for message in one.messages]


@pytest.mark.parametrize(
    "change", [{"content": "y"}, {"content": "x", "image": 1}, {"tool_call_id": "c9", "content": "x"}]
)
def test_a_message_unlike_that_of_its_turn_is_written_whole(change):
    one = with_messages("x")
    messages = [dict(message) for message in one.messages]
    messages[2] |= change
    changed = replace(one, messages=tuple(messages))

    line = loads(encode_line(changed))

    assert line["messages"][2] == messages[2]
    assert decode_trajectory(line) == changed


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


CYCLE: dict = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({3, 1, 2}, [1, 2, 3]),
        (b"x", "b'x'"),
        (Path("x"), repr(Path("x"))),
        ((1, 2), [1, 2]),
        ({1: "a"}, {"1": "a"}),
        ({(1, 2): "x"}, {"(1, 2)": "x"}),
        ("é\u2028", "é\u2028"),
        ("\ud800", "\ud800"),
        (1e-7, 1e-7),
        (Broken(), "<a Broken that cannot be written>"),
    ],
)
def test_a_value_beyond_json_is_written_as_the_nearest_plain_value(value, read):
    line = encode_line(replace(episode(metrics={"m": -0.0}), task={"a": value}))

    assert line.isascii()
    assert json.loads(line)["task"] == json.loads(dumps({"a": value})) == {"a": read}
    assert repr(json.loads(line)["metrics"]) == "{'m': -0.0}"


ODD = {
    "values nested without end": {"task": {"cycle": CYCLE, "deep": json.loads("[" * 900 + "]" * 900)}},
    "token ids": {"sequences": (TokenSequence((TokenSpan("prompt", (True, False, 2)),)),), "turns": ()},
    "task id": {"task_id": True},
    "group id": {"group_id": 7},
    "member": {"member": True},
}


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
def test_odd_values_do_not_lose_their_episode_nor_break_the_close(tmp_path, values):
    run = written(tmp_path, replace(episode(0), **values))

    assert (run.status, len(list(run))) == (RunStatus.FINISHED, 1)
    assert "cycle" not in str(values) or "nested too deep" in str(run.load(0).task["cycle"])


DAMAGED = [
    *({"token_ids": ids} for ids in ("no base64!", "AAAA", 3)),
    {"logprobs": ""},
    *({"spans": [span]} for span in (["model", 2, 0, 0], ["prompt", 3, 0, 0], ["model", -1, 0, 0])),
    *({"spans": spans} for spans in ([["model", "3", 0, 0]], [["model"]], 5)),
    *({"routed_experts": experts} for experts in ("x", {"ids": "!"})),
    {"routed_experts": {"ids": "AAAA", "layers": 0, "choices": 1, "width": 1}},
    *({"messages": messages} for messages in ([7], [-1])),
]


@pytest.mark.parametrize("changes", DAMAGED, ids=str)
def test_a_damaged_line_is_a_value_error(changes):
    line = loads(encode_line(with_experts()))
    (line if "messages" in changes else line["sequences"][0]).update(changes)

    with pytest.raises(ValueError, match=r"."):
        decode_trajectory(line)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 0.1, "b": 1e-320, "c": 123456789012345678901234567890}',
        "[1.0, 1, -0.0, NaN, Infinity]",
        '"\\ud800 lone"',
        '"\\u2028 \\u00e9"',
        '{"a": 1, "a": 2}',
        "[" * 300 + "]" * 300,
        " 5 ",
        *("", "{", "[1,]", "nul", "[" * 100_000),
    ],
    ids=lambda text: text[:9],
)
def test_json_is_read_as_pythons_own_parser_reads_it(text):
    try:
        read = repr(json.loads(text))
    except (ValueError, RecursionError):
        with pytest.raises(ValueError, match=r"."):
            loads(text)
    else:
        assert repr(loads(text)) == repr(loads(text.encode())) == read


# Older layouts -------------------------------------------------------------------------------


def test_a_run_of_layout_version_1_is_read_and_continued(tmp_path):
    run = written(tmp_path, episode(0))
    plain = dumps(encode_trajectory(episode(0)))  # as version 1 wrote it
    (run.path / "trajectories.jsonl").write_text(plain + "\n")
    (run.path / "index.jsonl").unlink()
    line = {"episode": "g0#0", "advantage": 0.5, "entropy": [0.25]}
    (run.path / "annotations.jsonl").write_text(json.dumps(line) + "\n")
    edit(run.path / "run.json", schema_version=1)

    assert list(Run(run.path)) == [episode(0)]
    assert Run(run.path).note(run.summaries[0])["entropy"] == [0.25]
    assert list(continued(run, episode(1))) == [episode(0), episode(1)]
    assert json.loads((run.path / "run.json").read_text())["schema_version"] == 2

    edit(run.path / "run.json", schema_version=99)
    with pytest.raises(StoreError, match="layout version 99"):
        Run(run.path)
    assert list_runs(tmp_path) == []


def test_run_of_the_first_layout_opens_for_ever():
    run = Run(TESTS / "golden" / "run-layout-1")

    assert run.info.model == "mock"
    assert [one.reward for one in run.summaries] == [1.0, 0.0]
    assert run.load(0).sequences[0].num_trained_tokens == 6


# Names and directories -----------------------------------------------------------------------


def test_runs_are_listed_and_found_by_beginning_and_last(tmp_path):
    for name in ("shop", "calc"):
        with RunWriter.create(name, runs_dir=tmp_path, run_id=f"1-{name}", model="mock", seed=7):
            pass

    assert {run.id for run in list_runs(tmp_path)} == {"1-shop", "1-calc"}
    assert find_run("1-sh", tmp_path).id == "1-shop"
    assert find_run("calc", tmp_path).info.seed == 7
    assert find_run("last", tmp_path).id == "1-calc"  # made later, though in the same second
    with pytest.raises(StoreError, match="fits 2 runs"):
        find_run("1-", tmp_path)
    with pytest.raises(StoreError, match="no run 'zzz'"):
        find_run("zzz", tmp_path)
    shutil.move(tmp_path / "1-shop", tmp_path / "two")
    assert Run(tmp_path / "two").id == "two"


@pytest.mark.parametrize(
    ("name", "model", "ends"),
    [
        ("demo/Shelves-v0", "smollm2", "-shelves-smollm2"),
        ("shop.py", "hf:/models/SmolLM2-135M-Instruct/", "-shop-smollm2-135m-instruct"),
        ("a", "tinker:Qwen/Qwen3-8B@http://host:1", "-a-qwen3-8b"),
        ("a", "policy:desk.py:clerk", "-a-clerk"),
        ("a", "http://127.0.0.1:8000/v1", "-a"),
        ("a", "", "-a"),
    ],
)
def test_a_run_is_named_by_its_time_environment_and_model(tmp_path, name, model, ends):
    with RunWriter.create(name, runs_dir=tmp_path, model=model) as writer:
        pass

    assert re.fullmatch(r"\d{4}-\d{4}" + re.escape(ends), writer.id)


@pytest.mark.parametrize("run_id", ["../x", "a/b", "/tmp/x", "..", ".", "a\\b", "a\0b"])
def test_a_run_id_is_the_name_of_one_directory(tmp_path, run_id):
    with pytest.raises(UsageError, match="is not the name of one directory"):
        RunWriter.create("x", runs_dir=tmp_path / "runs", run_id=run_id)
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "runs").write_text("")
    with pytest.raises(StoreError, match="cannot make the run directory"):
        RunWriter.create("x", runs_dir=tmp_path / "runs")


@pytest.mark.parametrize("what", ["removed", "moved", "replaced"])
def test_an_episode_that_would_be_lost_with_its_directory_is_an_error_at_once(tmp_path, what):
    writer = RunWriter.create("x", runs_dir=tmp_path, run_id="one")
    writer.append(episode(0))
    if what == "removed":
        shutil.rmtree(tmp_path / "one")
    else:
        (tmp_path / "one").rename(tmp_path / "two")
    if what == "replaced":
        shutil.copytree(tmp_path / "two", tmp_path / "one")

    with pytest.raises(StoreError, match="was removed, moved or replaced"):
        writer.append(episode(1))
    with suppress(StoreError):
        writer.close()


# Groups, notes and texts ---------------------------------------------------------------------


def test_groups_come_back_with_members_in_order(tmp_path):
    run = written(tmp_path, *(episode(task, member) for task, member in [(0, 1), (1, 0), (0, 0), (1, 1)]))

    groups = [[(one.task_id, one.member) for one in group] for group in run.groups()]

    assert groups == [[("t0", 0), ("t0", 1)], [("t1", 0), ("t1", 1)]]


def test_metrics_notes_and_vocabulary_come_back_and_notes_on_tokens_lie_apart(tmp_path):
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        log_metrics(writer, {"step": 1, "reward": 0.5})
        first, second = writer.append(episode(0)), writer.append(episode(1))
        writer.annotate(episode(0), step=1, advantage=0.7, entropy=[0.5, 0.25])
        writer.annotate(episode(1), step=1, advantage=-0.7, entropy=[1.0])
        writer.write_vocabulary({7: "a", 3: "\xe4"})

    run = Run(writer.path)

    assert run.metrics() == [{"step": 1, "reward": 0.5}]
    assert run.vocabulary() == {3: "\xe4", 7: "a"}
    assert run.annotations()["g0#0"]["advantage"] == 0.7
    assert "entropy" not in run.annotations()["g0#0"]
    assert run.note(first)["entropy"] == [0.5, 0.25]
    assert run.note(second) == {"episode": "g1#0", "step": 1, "advantage": -0.7, "entropy": [1.0]}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("The result is 1,391.", "1391"),
        ("so 2.50", "2.5"),
        (r"thus \boxed{x+1} as said", "x+1"),
        ("  Go  LEFT ", "go left"),
        ("", ""),
    ],
)
def test_answers_are_compared_by_their_value(text, key):
    assert answer_key(text) == key


def test_a_killed_run_shows_the_text_of_every_token_it_has(tmp_path):
    backend = byte_tokenizer().backend
    writer = RunWriter.create("x", runs_dir=tmp_path, run_id="killed")
    writer.keep_texts(backend)
    first = episode(0)
    writer.append(first)
    ids = {token for sequence in first.sequences for token in sequence.token_ids}

    assert ids
    assert Run(writer.path).vocabulary().keys() == ids

    with (writer.path / "vocab.jsonl").open("ab") as file:
        file.write(b'{"9": "ha')
    writer._release()
    with RunWriter.resume(writer.path) as again:
        again.keep_texts(backend)
        again.append(episode(1))
    run = Run(writer.path)

    assert ids <= run.vocabulary().keys()
    assert not (run.path / "vocab.jsonl").exists()


# Crashes, damage, and other writers ----------------------------------------------------------


def test_half_written_line_is_left_out_and_cut_off_on_resume(tmp_path):
    run = written(tmp_path, episode(0), episode(1))
    path = run.path / "trajectories.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + dumps(encode_trajectory(episode(2))).encode()[:-20])

    assert [one.task_id for one in Run(run.path).summaries] == ["t0", "t1"]
    continued(run)
    assert path.read_bytes() == whole
    assert list(continued(run, episode(2))) == [episode(0), episode(1), episode(2)]

    path.write_bytes(path.read_bytes() + b'{"env_id": "x"}\n')  # damage in the middle costs itself alone
    (run.path / "index.jsonl").unlink()
    assert list(continued(run, episode(3))) == [episode(number) for number in range(4)]


@pytest.mark.parametrize(
    "damage",
    {
        "missing": lambda lines: b"",
        "short": lambda lines: b"".join(lines[:2]),
        "half": lambda lines: b"".join(lines[:2]) + lines[2][:9],
        "garbage": lambda lines: b"nonsense\n",
        "stale": lambda lines: b"".join(lines).replace(b'"size":', b'"size":1'),
    }.items(),
    ids=lambda case: case[0],
)
def test_index_is_rebuilt_from_the_episodes(tmp_path, damage):
    played = [episode(task, tokens=task + 1) for task in range(4)]
    run = written(tmp_path, *played)
    index = run.path / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(damage[1](lines))
    if damage[0] == "missing":
        index.unlink()

    assert list(Run(run.path)) == played
    assert len(continued(run, episode(4))) == 5
    assert index.read_bytes().splitlines(keepends=True)[:4] == lines


def test_later_attempt_replaces_an_aborted_one(tmp_path):
    error = EpisodeError("engine", "EngineUnavailable", "503")
    lost = episode(0, reward=None, stop_reason=StopReason.ABORTED, error=error, untrainable_reason="aborted")
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        writer.append(lost)
        writer.append(episode(1))
        assert {key[1] for key in writer.finished} == {"t1"}
        writer.append(episode(0, attempt=1))

    assert [(one.task_id, one.attempt) for one in Run(writer.path).summaries] == [("t0", 1), ("t1", 0)]


def test_second_writer_of_a_run_is_refused(tmp_path):
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        with pytest.raises(StoreError, match="another process"):
            RunWriter.resume(writer.path)
        assert Run(writer.path).status is RunStatus.RUNNING

    assert Run(writer.path).status is RunStatus.FINISHED
    RunWriter.resume(writer.path).close()


def test_killed_process_leaves_an_interrupted_run_that_resumes(tmp_path):
    done = in_a_process(tmp_path, "writer.append(episode(0)); os.kill(os.getpid(), signal.SIGKILL)")
    run = Run(tmp_path / "run")

    assert done.returncode == -9, done.stderr
    assert run.status is RunStatus.INTERRUPTED
    assert list(run) == [episode(0)]
    assert list(continued(run, episode(1))) == [episode(0), episode(1)]


def test_full_disk_keeps_whole_episodes_and_says_what_to_do(tmp_path):
    done = in_a_process(
        tmp_path,
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            for task in range(1000):
                writer.append(episode(task, tokens=100))
        except StoreError as error:
            print(task, error)
        """,
    )
    count, _, message = done.stdout.partition(" ")

    assert "--resume run" in message
    assert f"{count} finished episodes are kept" in message
    assert list(Run(tmp_path / "run")) == [episode(task, tokens=100) for task in range(int(count))]
    assert (tmp_path / "run" / "trajectories.jsonl").read_bytes().endswith(b"\n")


@pytest.mark.parametrize("name", ["metrics.jsonl", "annotations.jsonl", "token_annotations.jsonl"])
def test_half_a_line_beside_the_episodes_is_cut_off_on_resume(tmp_path, name):
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        summary = writer.append(episode(0))
        log_metrics(writer, {"step": 1})
        writer.annotate(episode(0), step=1, entropy=[0.5])
    with (writer.path / name).open("a") as file:
        file.write('{"half')

    with RunWriter.resume(writer.path) as again:
        log_metrics(again, {"step": 2})
        again.annotate(episode(0), step=2, entropy=[0.75])

    run = Run(writer.path)
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert run.note(summary) == {"episode": "g0#0", "step": 2, "entropy": [0.75]}


@pytest.mark.skipif(os.geteuid() != 0, reason="UNTESTED: only root can become another user")
def test_another_user_sees_that_a_run_is_being_written():
    with tempfile.TemporaryDirectory() as root, RunWriter.create("run", runs_dir=root) as writer:
        Path(root).chmod(0o755)
        os.seteuid(65534)
        try:
            with pytest.raises(PermissionError):
                (writer.path / "mine").touch()
            status = Run(writer.path).status
        finally:
            os.seteuid(0)

    assert status is RunStatus.RUNNING


# Hostile directories -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"id": "x", "status": "odd"}',
        '{"id": "x", "env_ids": 3}',
        '{"id": "x", "created": 5}',
        '{"id": ["x"]}',
        '{"id": "x", "config": []}',
    ],
    ids=lambda text: text[:40],
)
def test_broken_description_is_one_clear_error_and_left_out_of_lists(tmp_path, text):
    written(tmp_path, name="good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(text)
    told: list[Exception] = []

    with pytest.raises(StoreError, match="restore it from a copy, or delete"):
        Run(tmp_path / "bad")

    assert [run.id for run in list_runs(tmp_path, on_broken=told.append)] == ["good"]
    assert len(told) == 1


MADE = '"env_id": "e", "task_id": "t", "seed": 0, "group_id": "g", "stop_reason": "final_answer"'
TURN = (
    '{"index": 0, "message": {"role": "assistant"}, "finish_reason": "stop", "num_tokens": 1, "sequence": 99}'
)
HOSTILE_LINES = {
    "deep": "[" * 100_000,
    "deep field": '{"messages": ' + "[" * 100_000,
    "messages": '{"messages": [5], "turns": [{"message": 5}]}',
    "turn without a sequence": f'{{{MADE}, "turns": [{TURN}], "sequences": [[]]}}',
    "rewards": f'{{{MADE}, "rewards": 5}}',
    "number": "5",
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
@pytest.mark.parametrize("file", ["trajectories.jsonl", "index.jsonl", "metrics.jsonl", "annotations.jsonl"])
def test_a_hostile_line_costs_only_itself(tmp_path, file, line):
    run = written(tmp_path, episode(0), episode(1))
    with (run.path / file).open("a") as opened:
        opened.write(line + "\n")

    again = Run(run.path)

    assert [one.task_id for one in again] == ["t0", "t1"]
    assert again.num_damaged == int(file == "trajectories.jsonl")
    assert len(again.metrics()) <= 1
    assert again.annotations() == {}


FILES = ["run.json", "trajectories.jsonl", "index.jsonl", "metrics.jsonl"]


@pytest.mark.parametrize("file", [*FILES, "vocab.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, file):
    run = written(tmp_path, episode(0))
    (run.path / file).unlink(missing_ok=True)
    os.mkfifo(run.path / file)

    runs = list_runs(tmp_path)

    assert [one.id for one in runs] == ([] if file == "run.json" else ["run"])
    for one in runs:
        assert len(one) == int(file != "trajectories.jsonl")
        assert one.metrics() == []
        assert one.vocabulary() == {}


FILES += ["annotations.jsonl", "token_annotations.jsonl", "workers.jsonl", "servers.jsonl", "run.lock"]


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize("file", FILES)
def test_a_run_is_written_to_regular_files_alone(tmp_path, file, kind):
    run = written(tmp_path, episode(0))
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b'{"step": 1}\nnot a line of a run')
    before = theirs.read_bytes()
    (run.path / file).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run.path / file)
    else:
        (run.path / file).symlink_to(theirs)

    with pytest.raises(StoreError, match=r"is a link|regular file"):
        continued(run, episode(1))

    assert theirs.read_bytes() == before


def test_images_of_a_run_are_not_written_through_a_link(tmp_path):
    run = written(tmp_path, episode(0))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (run.path / "images").symlink_to(theirs)

    with RunWriter.resume(run.path) as writer, pytest.raises(StoreError, match="is a link"):
        writer._keep_image(f"{0:064}.png", b"data")

    assert list(theirs.iterdir()) == []


@pytest.mark.parametrize("linked", ["outputs", "outputs/a"])
def test_full_outputs_of_a_run_are_not_written_through_a_link(tmp_path, linked):
    theirs, link = tmp_path / "theirs", tmp_path / "run" / linked
    theirs.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(theirs)

    assert FullOutputs(tmp_path / "run" / "outputs").keep("a", 0, 0, "much") == ""
    assert list(theirs.iterdir()) == []


# Reading at scale ----------------------------------------------------------------------------


class CountedFile(io.BufferedReader):
    """A file that counts the bytes that were asked of it."""

    bytes_read = 0

    def read(self, size=-1):
        CountedFile.bytes_read += len(data := super().read(size))
        return data

    def readline(self, size=-1):
        CountedFile.bytes_read += len(data := super().readline(size))
        return data


def test_long_episodes_are_listed_by_their_index_and_loaded_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(store_index, "reading", lambda path: CountedFile(io.FileIO(path)))
    one = episode(0, tokens=3000)
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        summary = writer.append(one)
        line = (writer.path / "trajectories.jsonl").read_bytes()
        with (writer.path / "trajectories.jsonl").open("ab") as file:
            file.writelines([line] * 999)
        with (writer.path / "index.jsonl").open("ab") as file:
            for place in range(1, 1_000):
                file.write(index_line(replace(summary, member=place, offset=place * len(line))))

    run, CountedFile.bytes_read = Run(writer.path), 0
    assert len(run.summaries) == 1_000
    listed = CountedFile.bytes_read
    assert replace(run.load(999), member=0) == one
    loaded = CountedFile.bytes_read - listed

    assert listed < (writer.path / "index.jsonl").stat().st_size + len(line)
    assert loaded == len(line)


def test_new_summaries_are_those_after_an_offset_and_whole_lines_only(tmp_path):
    assert new_summaries(tmp_path, 0) == ([], 0)
    with RunWriter.create("x", runs_dir=tmp_path, run_id="x") as writer:
        writer.append(episode(0))
        first, offset = new_summaries(writer.path, 0)
        with (writer.path / "index.jsonl").open("ab") as file:
            file.write(b'{"env_id": ')
        assert new_summaries(writer.path, offset) == ([], offset)

    assert [summary.task_id for summary in first] == ["t0"]
    assert offset > 0


def test_of_a_sparse_file_no_more_is_read_than_a_line_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr(store_index, "MAX_LINE_BYTES", 1 << 20)
    file = written(tmp_path, episode()).path / "trajectories.jsonl"
    whole = file.stat().st_size
    os.truncate(file, 20 << 30)

    assert len(Run(file.parent)) > 0
    assert list(store_index.whole_lines(file, whole)) == []
    with pytest.raises(StoreError, match="no line of a run"):
        store_index.end_of_whole_lines(file)
