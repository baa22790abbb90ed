"""A run as one table: each episode is a row, whatever its texts and ids are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agentenv.core import EpisodeError, StopReason, StoreError, TokenSequence, TokenSpan
from agentenv.runs import Run, RunWriter
from agentenv_bridges import write_parquet
from helpers.episodes import episode

parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")


def test_a_finished_run_can_be_written_as_parquet_and_is_closed_without_pyarrow(tmp_path):
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        for task in range(3):
            writer.append(episode(task, tokens=task + 1))

    assert not list(tmp_path.rglob("*.parquet"))
    write_parquet(Run(writer.path), tmp_path / "episodes.parquet")
    rows = parquet.read_table(tmp_path / "episodes.parquet").to_pylist()

    assert [row["task_id"] for row in rows] == ["t0", "t1", "t2"]
    assert rows[2]["token_ids"] == episode(2, tokens=3).sequences[0].token_ids
    assert rows[2]["loss_mask"] == episode(2, tokens=3).sequences[0].loss_mask
    assert json.loads(rows[0]["messages"]) == list(episode(0).messages)


WRITES = """
import sys
from pathlib import Path
from pyarrow import parquet
from agentenv.runs import Run
from agentenv_bridges import write_parquet

root = Path(sys.argv[1])
write_parquet(Run(root), root / "again.parquet")
assert "pandas" not in sys.modules
print(parquet.read_table(root / "again.parquet").to_pylist()[0]["error"])
"""


def test_parquet_takes_broken_text_and_imports_no_pandas(tmp_path):
    lost = EpisodeError("env", "ValueError", "half a pair \ud800")
    failed = {"stop_reason": StopReason.ERROR, "error": lost, "untrainable_reason": "failed"}
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        writer.append(episode(0, reward=None, **failed))
    command = [sys.executable, "-c", WRITES, str(writer.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "half a pair ?"


ODD = {
    "token ids": {"sequences": (TokenSequence((TokenSpan("prompt", (True, False, 2)),)),), "turns": ()},
    "task id": {"task_id": True},
    "group id": {"group_id": 7},
    "member": {"member": True},
}


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
def test_ids_of_another_type_have_their_row_and_what_does_not_fit_is_a_store_error(tmp_path, values):
    assert write_parquet([episode(0, **values)], tmp_path / "table.parquet") == 1
    with pytest.raises(StoreError, match=r"table\.parquet"):
        write_parquet([episode(0, seed=-1)], tmp_path / "table.parquet")
