"""What a person wrote about a run."""

from __future__ import annotations

import json

import pytest

from agentenv.core import UsageError
from agentenv.runs.store import Run, UserNote
from helpers.sample_runs import episode, write_run


def test_note_is_read_back_and_survives_the_writer_of_the_run(tmp_path):
    path = write_run(tmp_path, "a", [episode(0, 0)]).path

    UserNote("a first try", ("base", "lr")).write(path)

    assert Run(path).user_note == UserNote("a first try", ("base", "lr"))
    assert Run(path).info.note == ""


@pytest.mark.parametrize("text", ["[", "[]", "5", '{"tags": 5}', '{"tags": ["two words"]}', "[" * 100_000])
def test_a_broken_note_is_no_note(tmp_path, text):
    (tmp_path / "note.json").write_text(text)

    assert UserNote.read(tmp_path) == UserNote()


@pytest.mark.parametrize(
    ("note", "says"),
    [
        ({"text": "x" * 2001}, "2,001 characters"),
        ({"tags": ("a b",)}, "one word"),
        ({"tags": ("",)}, "one word"),
        ({"tags": ("x" * 41,)}, "at most 40"),
        ({"tags": tuple(f"t{n}" for n in range(21))}, "at most 20"),
    ],
)
def test_a_note_has_bounds(note, says):
    with pytest.raises(UsageError, match=says):
        UserNote(**note)


def test_file_of_a_note_is_plain_json(tmp_path):
    UserNote("why", ("x",)).write(tmp_path)

    assert json.loads((tmp_path / "note.json").read_text()) == {"text": "why", "tags": ["x"]}
