"""Episodes with images on the token path: whole images, exact budgets, one file a hash, refusals in words."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from PIL import Image as Pillow

import agentenv as ae
from agentenv.core import Message, TrajectoryGroup, UsageError
from agentenv.core.images import hash_of
from agentenv.engine import Sampling, ScriptedEngine, TextModel
from agentenv.envs import ToolEnv
from agentenv.render import Renderer
from agentenv.runner import FunctionUser, UserTurn
from agentenv.runs import Run, RunWriter, verify_episode, verify_run
from agentenv.runs.store.images import settings_of
from agentenv.runs.view.data import episode_data
from agentenv.tools import Image, tool
from agentenv_bridges import slime_samples, to_atif, to_prime_rl, trl_samples, verl_samples
from helpers.seeing import png, text, tokenizer_of
from scenes import RENDERER, TOKENIZER, Go, play

FIRST, SECOND = png(1, 40, 30), png(2, 40, 30)


class Gallery(ToolEnv):
    """A picture to begin with, and one of the same size behind a tool."""

    sends_images = True

    def start(self) -> list[Message]:
        return [{"role": "user", "content": [text("What is it?"), Image(FIRST).to_part()]}]

    @tool
    def turn_page(self) -> list[object]:
        """Show the next picture."""
        return ["the next page", Image(SECOND)]

    def reward(self, answer: str) -> float:
        return float("noise" in answer)


CALL = '<tool_call>{"name": "turn_page", "arguments": {}}</tool_call>'
SCRIPT = [CALL, "It is noise."]


async def played(env=Gallery, script=SCRIPT, **settings):
    return await play(env(), script, **settings)


def stored(directory, *records):
    """Write episodes to a run, and return its writer."""
    with RunWriter.create("gallery", runs_dir=directory) as writer:
        for record in records:
            writer.append(record)
    return writer


class Sideways(Gallery):
    """A transparent picture, which no two loaders show alike."""

    def start(self) -> list[Message]:
        file = io.BytesIO()
        Pillow.new("RGBA", (40, 30), (200, 10, 90, 100)).save(file, "PNG")
        return [{"role": "user", "content": [text("What?"), Image(file.getvalue()).to_part()]}]


async def test_a_run_gives_back_the_picture_that_the_model_saw(tmp_path):
    record = await played(Sideways, ["It is noise."])

    read = Run(stored(tmp_path, record).path).load(0)

    assert read == record
    [image] = read.sequences[0].images
    assert image.data == record.sequences[0].images[0].data
    pixels = Pillow.open(io.BytesIO(image.data))
    assert (pixels.mode, pixels.getpixel((0, 0))) == ("RGB", (233, 159, 190))
    assert verify_episode(read, RENDERER).wrong == ()


async def test_an_episode_keeps_its_images_beside_its_tokens():
    record = await played()

    assert (record.stop_reason, record.reward) == ("final_answer", 1.0)
    (sequence,) = record.sequences
    assert [image.sha256 for image in sequence.images] == [hash_of(FIRST), hash_of(SECOND)]
    assert [span.source for span in sequence.spans if span.images] == ["prompt", "env"]
    assert verify_episode(record, RENDERER).wrong == ()


async def test_a_run_has_each_file_once_and_gives_it_back(tmp_path):
    record = await played()
    with RunWriter.create("gallery", runs_dir=tmp_path) as writer:
        writer.keep_texts(TOKENIZER.backend, {"family": "x", "patch_size": 14})
        writer.append(record)
        writer.append(replace(record, member=1))
    settings = json.loads((writer.path / "images" / "processor.json").read_text())
    assert settings == {"family": "x", "patch_size": 14}
    found = verify_run(Run(writer.path), RENDERER)
    assert any("images were prepared with" in one.detail for one in found.wrong)
    names = {path.name for path in (writer.path / "images").iterdir()}
    assert names == {"processor.json", *(f"{hash_of(data)}.png" for data in (FIRST, SECOND))}
    assert (writer.path / "images" / f"{hash_of(FIRST)}.png").read_bytes() == FIRST
    line = (writer.path / "trajectories.jsonl").read_text().splitlines()[0]
    assert "base64" not in line
    assert json.loads(line)["sequences"][0]["images"][0][2] == hash_of(FIRST)

    read = Run(writer.path).load(0)
    assert read == record
    assert [image.data for image in read.sequences[0].images] == [FIRST, SECOND]
    shown = episode_data(read)["sequences"][0][0]["im"]
    assert shown[0][:2] == (read.sequences[0].images[0].offset, 16)
    assert shown[0][2].startswith("data:image/png;base64,")


async def test_a_resumed_run_keeps_the_settings_of_its_processor(tmp_path):
    record = await played()
    with RunWriter.create("gallery", runs_dir=tmp_path) as writer:
        writer.keep_texts(TOKENIZER.backend, {"family": "x", "patch_size": 14})
        writer.append(record)
    assert "transformers" in Run(writer.path).info.versions

    with RunWriter.resume(writer.path) as again:
        with pytest.raises(UsageError, match=r"'patch_size': 14.* are .*'patch_size': 16"):
            again.keep_texts(TOKENIZER.backend, {"family": "x", "patch_size": 16})
        again.keep_texts(TOKENIZER.backend, {"family": "x", "patch_size": 14})
    with RunWriter.resume(writer.path) as again:  # imports and branches tell no settings
        third = png(3, 40, 30)
        first = {"role": "user", "content": [Image(third).to_part()]}
        again.append(replace(record, member=1, messages=(first, *record.messages[1:])))
    assert settings_of(writer.path) == {"family": "x", "patch_size": 14}
    assert (writer.path / "images" / f"{hash_of(third)}.png").exists()


async def test_a_file_that_was_changed_is_found_and_not_trained(tmp_path):
    writer = stored(tmp_path, await played())
    (writer.path / "images" / f"{hash_of(SECOND)}.png").write_bytes(FIRST)

    read = Run(writer.path).load(0)
    assert [image.data for image in read.sequences[0].images] == [FIRST, b""]
    found = verify_episode(read, RENDERER)
    assert any("is missing or was changed" in one.detail for one in found.wrong)


async def test_another_image_of_the_same_size_is_found_by_verification():
    record = await played()
    messages = json.loads(json.dumps(list(record.messages)))
    messages[0]["content"][1] = Image(SECOND).to_part()
    found = verify_episode(replace(record, messages=tuple(messages)), RENDERER)
    assert any(one.check == "prompt" for one in found.wrong)


async def test_an_image_that_does_not_fit_is_left_out_whole_and_said():
    record = await played(max_tool_output_tokens=20)
    (result,) = record.turns[0].tool_results
    assert result.trimmed  # 16 tokens are the image's, so four are left for text
    assert [part["type"] for part in result.content][-1] == "image_url"
    assert len(record.sequences[0].images) == 2

    record = await played(max_tool_output_tokens=10)
    (result,) = record.turns[0].tool_results
    assert result.trimmed
    assert "base64" not in json.dumps(result.content)
    assert len(record.sequences[0].images) == 1

    spans = (await played()).sequences[0].spans
    room = sum(map(len, spans[:3])) - 15  # the text of 13 tokens may go, and then the image must
    record = await played(max_context_tokens=room, min_answer_tokens=1)
    (result,) = record.turns[0].tool_results
    assert result.trimmed
    assert len(record.sequences[0].images) == 1
    assert len(record.sequences[0]) <= room


async def test_a_first_prompt_counts_its_image():
    whole = len((await played()).sequences[0].spans[0])
    record = await played(max_context_tokens=whole - 1)
    assert (record.stop_reason, len(record.turns)) == ("context_length", 0)


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
async def test_the_tokens_of_a_family_are_counted_exactly(family):
    codec = tokenizer_of(family)
    record = await played(renderer=Renderer(codec))
    lengths = [image.length for image in record.sequences[0].images]
    assert lengths == [len(codec.images.prepare(40, 30).ids)] * 2


@pytest.mark.parametrize("model", ["mock", "oracle", "random", "policy:agentenv_envs.pictures:oracle"])
def test_engines_without_a_model_play_environments_with_images(model, tmp_path):
    result = ae.evaluate("agentenv/Pictures-v0", model, num_tasks=4, runs_dir=tmp_path)
    records = [record for group in result.groups for record in group]
    assert all(record.error is None and record.sequences[0].images for record in records)
    assert not model.endswith("oracle") or all(record.reward == 1.0 for record in records)


async def test_a_user_shows_an_image_among_the_tokens():
    def show(messages, task):
        return UserTurn("See.", images=[Image(SECOND)]) if len(messages) == 2 else None

    record = await play(Go(), ["Show me.", "noise"], user=FunctionUser(show))

    (sequence,) = record.sequences
    assert [image.sha256 for image in sequence.images] == [hash_of(SECOND)]
    assert [span.source for span in sequence.spans if span.images] == ["env"]
    assert verify_episode(record, RENDERER).wrong == ()


async def test_formats_of_token_ids_refuse_images():
    record = await played()
    exports = (
        *(
            lambda export=export: list(export([record]))
            for export in (trl_samples, verl_samples, to_prime_rl)
        ),
        lambda: list(slime_samples([TrajectoryGroup((record,))], str)),
        lambda: to_atif(record),
    )
    for export in exports:
        with pytest.raises(UsageError, match="has images among its tokens"):
            export()


async def test_a_question_with_an_image_reaches_a_model():
    engine = ScriptedEngine(["noise"], tokenizer=TOKENIZER)
    said = [{"role": "user", "content": [text("what?"), Image(FIRST).to_part()]}]
    answer = await TextModel(engine, RENDERER).ask(said, Sampling())
    assert answer.message["content"] == "noise"
