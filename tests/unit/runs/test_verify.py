"""The verifier of stored runs finds planted disagreements, and nothing in runs as they are played."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from agentenv.cli import main
from agentenv.core import RunLimits, StopReason, TokenSequence
from agentenv.core.episode_env import TaskFields
from agentenv.engine import Completion, ScriptedEngine
from agentenv.envs import ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import DropToolOutputs, Runner, RunnerOptions
from agentenv.runs import RunWriter, evaluate, find_run, verify_episode, verify_run
from agentenv.runs.store import Run
from agentenv.runs.store.codec import digest_of
from agentenv.runs.view.data import episode_data
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
THINKING = "<think>hm</think>" + tool_call("echo", text="b")
SPACED = '<tool_call>{"name":"echo","arguments":{"text":"a"}}</tool_call>'


class Echo(ToolEnv):
    """Repeats what it is told."""

    def start(self, words: int) -> str:
        return f"echo {words}"

    @tool
    def echo(self, text: str) -> str:
        "Echo."
        return text * 60

    def reward(self, answer: str) -> float:
        return float(len(answer))


async def played(*script, limits=None, options=None, engine=None, **settings):
    runner = Runner(
        engine or ScriptedEngine(list(script) or [tool_call("echo", text="a"), "done"], tokenizer=TOKENIZER),
        RENDERER,
        limits or RunLimits(max_tool_output_tokens=80),
        options=options or RunnerOptions(),
        **settings,
    )
    return await runner.run_episode(Echo(), {"words": 3})


def checks(found) -> set[str]:
    return {finding.check for finding in found.wrong}


@pytest.mark.parametrize(
    "script",
    [
        (tool_call("echo", text="a"), THINKING, "done"),
        ("<tool_call>[1]</tool_call>", "<tool_call>{", tool_call("nothing"), "done"),
        (tool_call("echo", text="a") + tool_call("echo", text="b"), "done"),
    ],
)
async def test_an_episode_as_it_was_played_has_no_disagreement(script):
    record = await played(*script)

    found = verify_episode(record, RENDERER, drift="off")

    assert not found.findings
    assert found.checked["parse"] == len(record.turns)
    assert found.checked["observation"] == len(record.turns) - 1


async def test_rewritten_and_condensed_histories_have_no_disagreement():
    script = (tool_call("echo", text="a"), THINKING, THINKING, SPACED, "done")

    rewritten = await played(*script, options=RunnerOptions(history="rewrite"))
    condensed = await played(
        *script, limits=RunLimits(max_context_tokens=1000), condenser=DropToolOutputs(at=0.4, min_chars=50)
    )

    assert len(rewritten.sequences) > 1
    assert condensed.rewrites
    for record in (rewritten, condensed):
        found = verify_episode(record, RENDERER)
        assert not found.wrong
        assert found.checked["prompt"] == len(record.sequences)


async def test_an_episode_that_failed_in_its_environment_has_no_disagreement():
    class Broken(Echo):
        @tool
        def echo(self, text: str) -> str:
            "Echo."
            return text

        async def advance(self, action):
            raise RuntimeError("no")

    runner = Runner(ScriptedEngine([tool_call("echo", text="a")], tokenizer=TOKENIZER), RENDERER)
    record = await runner.run_episode(Broken(), {"words": 3})

    assert record.stop_reason is StopReason.ERROR
    assert not verify_episode(record, RENDERER).findings


def _with_turn(record, number, **values):
    turns = list(record.turns)
    turns[number] = replace(turns[number], **values)
    return replace(record, turns=tuple(turns))


def _with_message(record, index, **values):
    messages = list(record.messages)
    messages[index] = {**messages[index], **values}
    return replace(record, messages=tuple(messages))


def _with_token(record, source):
    spans = list(record.sequences[0].spans)
    place = next(place for place, span in enumerate(spans) if span.source == source)
    ids = spans[place].token_ids
    spans[place] = replace(spans[place], token_ids=(*ids[:-3], ids[-3] ^ 1, *ids[-2:]))
    return replace(record, sequences=(TokenSequence(tuple(spans)),))


def _result(record, content):
    result = replace(record.turns[0].tool_results[0], content=content)
    return _with_message(_with_turn(record, 0, tool_results=(result,)), 2, content=content)


def _other_word(record):
    said = {"role": "assistant", "content": "gone"}
    return _with_message(_with_turn(record, 1, message=said), 3, content="gone")


PLANTED = {
    "a reward": (lambda record: replace(record, reward=9.0), "record", None),
    "a missing message": (lambda record: replace(record, messages=record.messages[:-1]), "record", None),
    "a message": (lambda record: _with_message(record, 3, content="gone"), "record", None),
    "a result in the messages": (lambda record: _with_message(record, 2, content="x"), "record", 0),
    "no result": (lambda record: _with_turn(record, 0, tool_results=()), "record", 0),
    "a shifted turn": (lambda record: _with_turn(record, 1, start=record.turns[1].start - 1), "record", 1),
    "a sequence": (lambda record: _with_turn(record, 1, index=3), "record", 1),
    "what the model said": (_other_word, "parse", 1),
    "what the tool said": (lambda record: _result(record, "other"), "observation", 1),
    "a token of the prompt": (lambda record: _with_token(record, "prompt"), "prompt", 0),
    "a token of a result": (lambda record: _with_token(record, "env"), "observation", 1),
    "the first message": (lambda record: _with_message(record, 0, content="echo 4"), "prompt", 0),
}


def _without_stop(record):
    """The last sampled token is gone, and every number fits that."""
    spans = list(record.sequences[0].spans)
    last = spans[-1]
    spans[-1] = replace(last, token_ids=last.token_ids[:-1], logprobs=last.logprobs[:-1])
    turns = (record.turns[0], replace(record.turns[1], num_tokens=record.turns[1].num_tokens - 1))
    return replace(record, sequences=(TokenSequence(tuple(spans)),), turns=turns)


PLANTED |= {
    "a removed stop token": (_without_stop, "parse", 1),
    "another reason of the end": (
        lambda record: replace(record, stop_reason=StopReason.MAX_TURNS),
        "record",
        1,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_disagreement_is_found(name):
    plant, check, turn = PLANTED[name]
    record = plant(await played())

    found = verify_episode(record, RENDERER)

    assert checks(found) == {check}
    assert turn in {finding.turn for finding in found.wrong}


def _spaced_call(record):
    """White space in a call, in its tokens, its message and the call: nothing but a digest can tell."""
    text = '<tool_call>{"name": "echo", "arguments": {"text":  "a"}}</tool_call>'
    other = '<tool_call>{"name": "echo",  "arguments": {"text": "a"}}</tool_call>'
    spans = list(record.sequences[0].spans)
    place = next(place for place, span in enumerate(spans) if span.trained)
    said = TOKENIZER.decode(spans[place].token_ids)
    assert text in said
    swapped = RENDERER.tokenizer.encode(said.replace(text, other))
    spans[place] = replace(spans[place], token_ids=tuple(swapped))
    (read,) = RENDERER.bind(record.tools).parse(swapped).tool_calls
    call = replace(read, id=record.turns[0].tool_calls[0].id)
    message = {**record.turns[0].message, "tool_calls": [call.to_message()]}
    changed = replace(record, sequences=(TokenSequence(tuple(spans)),))
    turned = _with_turn(changed, 0, message=message, tool_calls=(call,))
    return _with_message(turned, 1, **message)


def _other_logprob(record):
    """The trainer divides by it, and no message or token shows it."""
    spans = list(record.sequences[0].spans)
    place = next(place for place, span in enumerate(spans) if span.trained)
    first, *rest = spans[place].logprobs
    spans[place] = replace(spans[place], logprobs=(first - 0.125, *rest))
    return replace(record, sequences=(TokenSequence(tuple(spans)),))


ONLY_THE_DIGEST_TELLS = {
    "a log-probability": _other_logprob,
    "rewards of turns at an equal sum": lambda record: _with_turn(
        _with_turn(record, 0, reward=1.0), 1, reward=record.turns[1].reward - 1.0
    ),
    "the environment": lambda record: replace(record, env_id="other/Echo-v0"),
    "a named part of the reward": lambda record: replace(record, rewards={"style": 1.0}),
    "the seed": lambda record: replace(record, seed=record.seed + 1),
    "a metric": lambda record: replace(record, metrics={**record.metrics, "turns": 9.0}),
    "white space in a call": _spaced_call,
}


@pytest.mark.parametrize("name", ONLY_THE_DIGEST_TELLS)
async def test_a_record_that_was_changed_after_it_was_stored_is_found(name, tmp_path):
    text = '<tool_call>{"name": "echo", "arguments": {"text":  "a"}}</tool_call>'
    with RunWriter.create("x", runs_dir=tmp_path, model="scripted:x") as writer:
        writer.append(await played(text, "done"))
    (stored,) = Run(writer.path)
    assert not verify_episode(stored, RENDERER).wrong

    changed = ONLY_THE_DIGEST_TELLS[name](stored)

    assert checks(verify_episode(changed, RENDERER)) == {"digest"}
    assert not verify_episode(replace(changed, digest=""), RENDERER).wrong


async def test_numbers_and_containers_of_other_types_have_the_digest_of_what_is_read(tmp_path):
    record = await played()
    odd = replace(
        _with_turn(record, 0, reward=np.float64(0.0)),
        task=TaskFields("t", {}),
        rewards={"a": np.float64(2.0), "b": np.int64(1)},
        metrics={**record.metrics, "x": np.float32(0.1)},
        tools=list(record.tools),
        rewrites=[],
        messages=[{**message, 1: (1, {2})} for message in record.messages],
    )
    with RunWriter.create("x", runs_dir=tmp_path, model="scripted:x") as writer:
        writer.append(odd)

    (stored,) = Run(writer.path)

    assert stored.digest
    assert stored.digest == digest_of(stored)


def test_scores_of_other_rewards_are_no_change_of_the_record(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def half(answer):\n    return 0.5\n")
    name = evaluate("agentenv/Calculator-v0", "oracle", num_tasks=1, runs_dir="runs").run.id
    for words in (["rescore", name, "--reward", "mine.py:half"], ["doctor", "last"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert not stop.value.code, capsys.readouterr()


async def test_ids_that_encode_otherwise_are_reported_for_their_turn_and_are_not_wrong():
    written = tool_call("echo", text="a")
    spelled = tuple(byte for byte in written.encode() if byte < 256)  # <tool_call> letter by letter

    class Spells(ScriptedEngine):
        async def generate(self, prompt_ids, sampling, **request):
            done = await super().generate(prompt_ids, sampling, **request)
            if len(self.requests) > 1:
                return done
            ids = (*spelled, done.token_ids[-1])
            return Completion(ids, (-1.0,) * len(ids), "stop", replayed=True)

    record = await played(engine=Spells([written, "done"], tokenizer=TOKENIZER))

    found = verify_episode(record, RENDERER, drift="off")

    assert [finding.turn for finding in found.of("tokenisation")] == [0]
    assert not found.wrong


@pytest.mark.parametrize(("drift", "shown", "wrong"), [("strict", 1, 1), ("ignore", 1, 0), ("off", 0, 0)])
async def test_drift_is_wrong_shown_or_left_alone(drift, shown, wrong):
    record = await played(SPACED, "done")

    found = verify_episode(record, RENDERER, drift=drift)

    assert len(found.of("drift")) == shown
    assert len(found.wrong) == wrong
    if shown:
        assert "in the model tokens of turn 0" in found.of("drift")[0].detail


@pytest.mark.parametrize(
    ("shift", "versions", "wrong", "checked"),
    [(0.0, None, 0, 2), (0.5, None, 2, 2), (float("nan"), None, 2, 2), (0.5, (1,), 0, 0), (0.5, (0,), 2, 2)],
)
async def test_logprobs_are_compared_per_turn_and_version(shift, versions, wrong, checked):
    record = await played()
    recorded = record.sequences[0].logprobs

    def score(sequence, turns):
        return [[value + shift for value in recorded[turn.start : turn.end]] for turn in turns]

    found = verify_episode(record, score=score, versions=versions)

    assert len(found.wrong) == wrong
    assert found.checked["logprobs"] == (record.num_sampled_tokens if checked else 0)


async def test_a_run_is_verified_from_disk_and_the_command_ends_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record = await played()
    for name, stored in (("good", record), ("bad", _other_word(record))):
        with RunWriter.create(name, runs_dir="runs", model="scripted:x") as writer:
            writer.append(stored)

    assert not verify_run(find_run("good"), RENDERER).wrong
    codes = []
    for name in ("good", "bad"):
        with pytest.raises(SystemExit) as stop:
            main(["doctor", name, "--json"])
        codes.append(stop.value.code or 0)
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())

    assert codes == [0, 1]
    assert good["ok"]
    assert [finding["check"] for finding in bad["findings"]] == ["parse"]


async def test_the_command_says_what_it_could_not_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with RunWriter.create("x", runs_dir="runs", kind="train", model="nowhere") as writer:
        engine = ScriptedEngine([SPACED, "done"], tokenizer=TOKENIZER, weights_version=3)
        writer.append(await played(engine=engine))
    scorer = SimpleNamespace(
        score=lambda token_ids, parts, images: [[0.0] * (end - start) for start, end, *_ in parts]
    )
    monkeypatch.setattr("agentenv.engine.hf.score.TokenScorer.load", lambda model: scorer)
    monkeypatch.setattr("agentenv.runs.recorded.renderer_of", lambda info, tokenizer: RENDERER)
    told = []
    for words in ((), ("--weights-version", "3")):
        with pytest.raises(SystemExit):
            main(["doctor", "last", "-m", "hf:x", "--json", *words])
        told.append(json.loads(capsys.readouterr().out))

    assert "version 0" in told[0]["not_checked"]["logprobs"]
    assert "logprobs" not in told[0]["checks"]
    assert told[1]["not_checked"] == {}
    assert told[1]["checks"]["logprobs"]


async def test_a_damaged_line_is_a_disagreement(tmp_path):
    record = await played()
    with RunWriter.create("x", runs_dir=tmp_path, model="scripted:x") as writer:
        writer.append(record)
        writer.append(replace(record, member=1))
    file = writer.path / "trajectories.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"sequences":[', b'"sequences":{', 1))

    assert checks(verify_run(find_run(writer.path.name, tmp_path))) == {"record"}


@pytest.mark.parametrize("model", ["mock", "oracle", "random"])
def test_runs_of_players_without_a_model_are_verified_to_the_token(model, tmp_path, capsys):
    evaluate("agentenv/Calculator-v0", model, num_tasks=2, runs_dir=tmp_path)

    with pytest.raises(SystemExit) as stop:
        main(["doctor", "last", "--runs-dir", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)

    assert not stop.value.code
    assert told["not_checked"].keys() <= {"logprobs"}
    assert {"record", "prompt", "observation"} <= told["checks"].keys()


async def test_the_viewer_shows_what_disagrees_in_a_record():
    record = await played()

    assert episode_data(record)["wrong"] == []
    assert episode_data(replace(record, reward=9.0))["wrong"] == [
        "the turn rewards sum to 4.0, but the reward is 9.0"
    ]
    assert episode_data(_with_message(record, 2, content="x"))["wrong"] == [
        "turn 0: the messages after it do not begin with its tool results"
    ]


async def test_values_of_other_types_are_a_disagreement_and_no_crash(tmp_path):
    with RunWriter.create("x", runs_dir=tmp_path, model="scripted:x") as writer:
        writer.append(await played())
    file = writer.path / "trajectories.jsonl"
    line = json.loads(file.read_text())
    line["turns"][0]["reward"] = "much"
    file.write_text(json.dumps(line) + "\n")
    (writer.path / "index.jsonl").unlink()

    assert checks(verify_run(find_run(writer.path.name, tmp_path))) == {"record"}
