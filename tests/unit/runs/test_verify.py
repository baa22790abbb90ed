"""The verifier of stored runs finds planted disagreements, and nothing in runs as they are played."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from agentenv.core import StopReason, TokenSequence
from agentenv.core.episode_env import TaskFields
from agentenv.engine import Completion, ScriptedEngine
from agentenv.envs import ToolEnv
from agentenv.runner import DropToolOutputs
from agentenv.runs import RunWriter, evaluate, verify_episode, verify_run
from agentenv.runs.store import Run
from agentenv.runs.store.codec import digest_of
from agentenv.runs.view.data import episode_data
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import RENDERER, TOKENIZER, play

THINKING = "<think>hm</think>" + tool_call("echo", text="b")
SPACED = '<tool_call>{"name":"echo","arguments":{"text":"a"}}</tool_call>'


DOUBLE_SPACED = '<tool_call>{"name": "echo", "arguments": {"text":  "a"}}</tool_call>'


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


async def played(*script, engine=None, env=None, **settings):
    model = engine or list(script) or [tool_call("echo", text="a"), "done"]
    return await play(env or Echo(), model, {"words": 3}, **{"max_tool_output_tokens": 80, **settings})


def stored(root, *records):
    """Write records to a run, and return it."""
    with RunWriter.create("x", runs_dir=root, model="scripted:x") as writer:
        for record in records:
            writer.append(record)
    return Run(writer.path)


def checks(found) -> set[str]:
    return {finding.check for finding in found.wrong}


class Broken(Echo):
    async def advance(self, action):
        raise RuntimeError("no")


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
    failed = await played(env=Broken())

    found = verify_episode(record, RENDERER, drift="off")

    assert not found.findings
    assert found.checked["parse"] == len(record.turns)
    assert found.checked["observation"] == len(record.turns) - 1
    assert failed.stop_reason is StopReason.ERROR
    assert not verify_episode(failed, RENDERER).findings


async def test_rewritten_and_condensed_histories_have_no_disagreement():
    script = (tool_call("echo", text="a"), THINKING, THINKING, SPACED, "done")

    rewritten = await played(*script, history="rewrite")
    condensed = await played(
        *script,
        max_context_tokens=1000,
        max_tool_output_tokens=None,
        condenser=DropToolOutputs(at=0.4, min_chars=50),
    )

    assert len(rewritten.sequences) > 1
    assert condensed.rewrites
    for record in (rewritten, condensed):
        found = verify_episode(record, RENDERER)
        assert not found.wrong
        assert found.checked["prompt"] == len(record.sequences)


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


def _without_stop(record):
    """The last sampled token is gone, and every number fits that."""
    spans = list(record.sequences[0].spans)
    last = spans[-1]
    spans[-1] = replace(last, token_ids=last.token_ids[:-1], logprobs=last.logprobs[:-1])
    turns = (record.turns[0], replace(record.turns[1], num_tokens=record.turns[1].num_tokens - 1))
    return replace(record, sequences=(TokenSequence(tuple(spans)),), turns=turns)


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
    "a removed stop token": (_without_stop, "parse", 1),
    "another end": (lambda record: replace(record, stop_reason=StopReason.MAX_TURNS), "record", 1),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_disagreement_is_found(name):
    plant, check, turn = PLANTED[name]
    record = plant(await played())

    found = verify_episode(record, RENDERER)

    assert checks(found) == {check}
    assert turn in {finding.turn for finding in found.wrong}


def _with_span(record, change):
    """The record with another first span of the model, which a function makes from it."""
    spans = list(record.sequences[0].spans)
    place = next(place for place, span in enumerate(spans) if span.trained)
    spans[place] = change(spans[place])
    return replace(record, sequences=(TokenSequence(tuple(spans)),))


def _spaced_call(record):
    """White space in a call, in its tokens, its message and the call: nothing but a digest can tell."""
    other = '<tool_call>{"name": "echo",  "arguments": {"text": "a"}}</tool_call>'
    swapped = []

    def change(span):
        said = TOKENIZER.decode(span.token_ids)
        assert DOUBLE_SPACED in said
        swapped.extend(RENDERER.tokenizer.encode(said.replace(DOUBLE_SPACED, other)))
        return replace(span, token_ids=tuple(swapped))

    changed = _with_span(record, change)
    (read,) = RENDERER.bind(record.tools).parse(swapped).tool_calls
    call = replace(read, id=record.turns[0].tool_calls[0].id)
    message = {**record.turns[0].message, "tool_calls": [call.to_message()]}
    turned = _with_turn(changed, 0, message=message, tool_calls=(call,))
    return _with_message(turned, 1, **message)


def _other_logprob(record):
    """The trainer divides by it, and no message or token shows it."""
    return _with_span(
        record, lambda span: replace(span, logprobs=(span.logprobs[0] - 0.125, *span.logprobs[1:]))
    )


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
    (record,) = stored(tmp_path, await played(DOUBLE_SPACED, "done"))
    assert not verify_episode(record, RENDERER).wrong

    changed = ONLY_THE_DIGEST_TELLS[name](record)

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
    (read,) = stored(tmp_path, odd)

    assert read.digest
    assert read.digest == digest_of(read)


def test_scores_of_other_rewards_are_no_change_of_the_record(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def half(answer):\n    return 0.5\n")
    name = evaluate("agentenv/Calculator-v0", "oracle", num_tasks=1, runs_dir="runs").run.id

    assert command("rescore", name, "--reward", "mine.py:half").code == 0
    assert command("doctor", "last").code == 0


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


async def test_a_run_is_verified_from_disk_and_the_command_ends_with_1(tmp_path, command):
    record = await played()
    good, bad = stored(tmp_path, record), stored(tmp_path, _other_word(record))

    assert not verify_run(good, RENDERER).wrong
    told = [command("doctor", str(run.path), "--json") for run in (good, bad)]

    assert [said.code for said in told] == [0, 1]
    assert told[0].json["ok"]
    assert [finding["check"] for finding in told[1].json["findings"]] == ["parse"]


async def test_the_command_says_what_it_could_not_check(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    with RunWriter.create("x", kind="train", model="nowhere") as writer:
        writer.append(
            await played(engine=ScriptedEngine([SPACED, "done"], tokenizer=TOKENIZER, weights_version=3))
        )
    scorer = SimpleNamespace(
        score=lambda token_ids, parts, images: [[0.0] * (end - start) for start, end, *_ in parts]
    )
    monkeypatch.setattr("agentenv.engine.hf.score.TokenScorer.load", lambda model: scorer)
    monkeypatch.setattr("agentenv.runs.recorded.renderer_of", lambda info, tokenizer: RENDERER)

    told = command("doctor", "last", "-m", "hf:x", "--json").json
    of_version = command("doctor", "last", "-m", "hf:x", "--json", "--weights-version", "3").json

    assert "version 0" in told["not_checked"]["logprobs"]
    assert "logprobs" not in told["checks"]
    assert of_version["not_checked"] == {}
    assert of_version["checks"]["logprobs"]


@pytest.mark.parametrize("damage", ["a line", "a type"])
async def test_damage_is_a_disagreement_and_no_crash(tmp_path, damage):
    record = await played()
    run = stored(tmp_path, record, replace(record, member=1))
    file = run.path / "trajectories.jsonl"
    if damage == "a line":
        file.write_bytes(file.read_bytes().replace(b'"sequences":[', b'"sequences":{', 1))
    else:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines[0]["turns"][0]["reward"] = "much"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run.path / "index.jsonl").unlink()

    assert checks(verify_run(Run(run.path))) == {"record"}


@pytest.mark.parametrize("model", ["mock", "oracle", "random"])
def test_runs_of_players_without_a_model_are_verified_to_the_token(model, tmp_path, command):
    run = evaluate("agentenv/Calculator-v0", model, num_tasks=2, runs_dir=tmp_path).run
    said = command("doctor", str(run.path), "--json")

    assert said.code == 0
    assert said.json["not_checked"].keys() <= {"logprobs"}
    assert {"record", "prompt", "observation"} <= said.json["checks"].keys()


async def test_the_viewer_shows_what_disagrees_in_a_record():
    record = await played()

    assert episode_data(record)["wrong"] == []
    assert episode_data(replace(record, reward=9.0))["wrong"] == [
        "the turn rewards sum to 4.0, but the reward is 9.0"
    ]
    assert episode_data(_with_message(record, 2, content="x"))["wrong"] == [
        "turn 0: the messages after it do not begin with its tool results"
    ]
