"""Texts that users wrote are UTF-8, or refused with the line and with what to do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.cli.import_ import read_rows
from agentenv.core import UsageError
from agentenv.core.files import json_lines, user_text
from agentenv.engine import load_engine
from agentenv.envs.tasks import TaskSet
from agentenv_worlds.math.env import rows as questions

LATIN = '{"text": "plain"}\n{"text": "caf\u00e9"}\n'.encode("latin-1")


def tasks_of(path):
    return list(TaskSet.of(path))


READERS = [
    *(lambda path: list(read_rows(path)), lambda path: load_engine(f"scripted:{path}"), tasks_of),
]


@pytest.mark.parametrize("read", [user_text, *READERS])
def test_a_file_in_latin_1_is_refused_with_its_line_and_what_to_do(read, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LATIN)

    with pytest.raises(UsageError, match=r"rows.jsonl, line 2 is not UTF-8 text: .* 0xe9") as refused:
        read(path)
    assert "iconv -f LATIN1" in refused.value.remedy

    path.write_text('{"text": "plain"}\n', encoding="utf-16")
    with pytest.raises(UsageError, match="iconv -f UTF-16"):
        tasks_of(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(rows=st.lists(VALUES, max_size=4), escaped=st.booleans())
def test_lines_have_the_values_that_json_reads(rows, escaped, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "drawn.jsonl"
    lines = [json.dumps(row, ensure_ascii=escaped) for row in rows]
    path.write_text("\n \n".join(lines), encoding="utf-8")

    read = list(json_lines(path))

    assert repr([value for _, value in read]) == repr([json.loads(line) for line in lines])
    assert [number for number, _ in read] == [2 * index + 1 for index in range(len(rows))]


@pytest.mark.parametrize("written", ['{"a": "\\ud83d"}', "[" * 300 + "]" * 300, '{"n": 1e999}'])
def test_lines_that_the_fast_reader_refuses_are_read_by_json(written, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(written)

    assert [value for _, value in json_lines(path)] == [json.loads(written)]


@pytest.mark.parametrize("read", [*READERS, questions])
def test_what_is_no_json_is_named_with_its_line_and_column(read, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1?", "answer": 2}\n\n{"question": oh}\n')

    with pytest.raises(UsageError, match=r"rows\.jsonl, line 3, column 14 is not JSON"):
        read(path)


@pytest.mark.parametrize("read", [lambda path: list(read_rows(path)), tasks_of, questions])
def test_lines_end_at_line_breaks_alone_and_a_byte_order_mark_is_no_text(read, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"question": "a\u2028b\u0085c\u001d", "answer": 1}, ensure_ascii=False)
    path.write_text("\ufeff" + f"{row}\r\n" * 2, encoding="utf-8")

    assert len(read(path)) == 2
