"""Texts that users wrote are UTF-8, or refused with the line and with what to do."""

import json

import pytest

from agentenv.cli.import_ import read_rows
from agentenv.core import UsageError
from agentenv.core.files import user_text
from agentenv.engine import load_engine
from agentenv.envs.tasks import TaskSet

LATIN = '{"text": "plain"}\n{"text": "caf\u00e9"}\n'.encode("latin-1")


def tasks_of(path):
    return list(TaskSet.of(path))


@pytest.mark.parametrize(
    "read",
    [user_text, lambda path: list(read_rows(path)), lambda path: load_engine(f"scripted:{path}"), tasks_of],
)
def test_a_file_in_latin_1_is_refused_with_its_line_and_what_to_do(read, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LATIN)

    with pytest.raises(UsageError, match=r"rows.jsonl, line 2 is not UTF-8 text: .* 0xe9") as refused:
        read(path)

    assert "iconv" in refused.value.remedy


@pytest.mark.parametrize("read", [lambda path: list(read_rows(path)), tasks_of])
def test_lines_end_at_line_breaks_alone_and_a_byte_order_mark_is_no_text(read, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"text": "a\u2028b\u0085c"}, ensure_ascii=False)
    path.write_text("\ufeff" + f"{row}\r\n" * 2, encoding="utf-8")

    assert len(read(path)) == 2
