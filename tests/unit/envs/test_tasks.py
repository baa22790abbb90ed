"""Task sets: sources, ids, splits and orders."""

import itertools
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentenv.core import Task, TaskError
from agentenv.envs import TaskSet

ROWS = [{"x": n} for n in range(6)]


def ids(tasks):
    return [task.id for task in tasks]


def endless():
    for n in itertools.count():
        yield {"n": n}


def first_rows(count):
    return ROWS[:count]


def rows():
    return ROWS


def seeded(seed):
    return {"seed": seed}


def test_ids_follow_the_content_and_not_the_place():
    forward, backward = TaskSet.of(ROWS), TaskSet.of(ROWS[::-1])
    assert ids(forward) == ids(backward)[::-1]
    assert len(set(ids(forward))) == 6

    same = ids(TaskSet.of([{"x": 1}, {"x": 1}, {"x": 1}]))
    assert len(set(same)) == 3
    assert same[1] == f"{same[0]}-2"

    told = TaskSet.of([{"id": 7, "x": 1}, {"id": "b", "x": 2}])
    assert ids(told) == ["7", "b"]
    assert told["b"].data["x"] == 2

    odd = [{"b": "é\ud83d", "a": [1.5, None]}, {"x": object()}, {"a": {"deep": True}}]
    assert ids(TaskSet.of(odd)) == ["e5c5b87d4e68", "row-1", "cd26d9651804"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([{"id": 1}, {"id": "1"}], "row 2: another row also has the id '1'"),
        ([{"x": 1}, 5], "row 2 is 5"),
        ([{3: 1}], "field name 3"),
        (7, "cannot be read as tasks"),
        ("tasks.txt", "neither the path of a .jsonl, .json, .csv or .parquet file"),
        ("tasks.xlsx", "convert the file to one of these kinds"),
        ("rows.jsonl.gz", "unpack the file"),
        (str(Path(__file__).parent), "name a file in this directory"),
        (lambda a, b: None, "takes no arguments, or one seed"),
        (lambda: 3, "not an iterable"),
        ("missing.jsonl", "cannot read the tasks"),
        ("hf:a/b", "cannot read the tasks in hf:a/b: a/b is not there"),
        ("saved", r"datasets\.load_from_disk\('.*saved'\)"),
    ],
)
def test_a_wrong_source_says_what_is_wrong(source, words, tmp_path, monkeypatch):
    def load_dataset(name, split):
        raise FileNotFoundError(f"{name} is not there")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    Path("saved").mkdir()
    Path("saved", "state.json").write_text("{}")

    with pytest.raises(TaskError, match=words):
        list(TaskSet.of(source))


NESTED = [{"x": 1, "words": ["a\u2028b", None], "more": {"y": None}}, {"x": None, "words": [], "more": None}]


def written(path, rows):
    """Write rows as a file of the kind that its suffix says."""
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) + "\n\n", encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "ROWS.JSONL"])
def test_files_hold_rows_with_nested_values_and_nulls(tmp_path, name):
    path = written(tmp_path / name, NESTED)

    assert [task.data for task in TaskSet.of(path)] == NESTED
    assert len(TaskSet.of(str(path))) == 2


def test_a_csv_file_holds_text(tmp_path):
    (tmp_path / "rows.csv").write_bytes('\ufeffx,said\r\n1,"a, ""b""\nc"\r\n2\r\n'.encode())

    rows = [task.data for task in TaskSet.of(tmp_path / "rows.csv")]

    assert rows == [{"x": "1", "said": 'a, "b"\nc'}, {"x": "2", "said": None}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("bad.jsonl", '{"x": 1}\n{"x": \n', "line 2, column 7 is not JSON"),
        ("bad.json", '[{"x": 1},\n {"x" 2}]', "line 2, column 7 is not JSON"),
        ("bad.json", '{"x": 1}', "holds dict and not a list"),
        ("bad.csv", "x,y\n1,2\n1,2,3\n", "line 3 has more than 2 cells"),
        ("bad.csv", "x,y,x\n1,2,3\n", "several columns with the name 'x'"),
        ("bad.csv", 'x\n"1\n', "line 1 is not CSV"),
        ("bad.csv", "x;y\n1;2\n", "seem to be separated by ';'; separate the cells by commas"),
        ("bad.csv", "x\ty\n1\t2\n", "a single column, .* separate the cells by commas"),
        ("bad.json", '{"x": 1}\n{"x": 2}\n', "give its name the ending .jsonl"),
        ("bad.jsonl", "\n", r"bad.jsonl holds no tasks"),
        ("bad.csv", "x,y\n", r"bad.csv holds no tasks"),
        ("bad.parquet", "PAR1", "cannot read the tasks in .* write the file again"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)

    with pytest.raises(TaskError, match=words):
        list(TaskSet.of(tmp_path / name))


def test_tables_have_their_rows():
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    rows = [{"x": 1, "said": "a", "parts": [{"n": 1}]}, {"x": 2, "said": None, "parts": None}]

    for table in (pandas.DataFrame(rows), pyarrow.Table.from_pylist(rows)):
        assert [dict(task.data) for task in TaskSet.of(table)] == rows


def test_splits_are_chosen_by_name():
    tasks = TaskSet.of({"train": ROWS[:4], "test": rows})

    assert tasks.splits == ("train", "test")
    assert (len(tasks), len(tasks.split("test"))) == (4, 6)
    with pytest.raises(TaskError, match="did you mean 'test'"):
        tasks.split("tset")


def test_a_function_of_a_seed_is_endless_and_reproducible():
    tasks = TaskSet.of(seeded)

    assert (tasks.endless, tasks.num_tasks) == (True, None)
    assert ids(tasks.take(3)) == ["seed-0", "seed-1", "seed-2"]
    assert tasks["seed-41"] == tasks[41] == Task("seed-41", {"seed": 41})
    assert ids(itertools.islice(tasks.shuffle(1), 5)) == ids(itertools.islice(tasks.shuffle(1), 5))
    assert tasks.sample(3) == tasks.sample(3)
    with pytest.raises(TypeError, match="no known end"):
        len(tasks)


def test_a_finite_generator_has_a_length_and_an_endless_one_has_none():
    finite, infinite = TaskSet.of(row for row in ROWS), TaskSet.of(endless)

    assert len(finite) == 6
    assert infinite.endless
    assert ids(infinite.take(4)) == ids(infinite.take(4))
    assert len(list(itertools.islice(infinite, 10_005))) == 10_005
    assert infinite.sample(1) == TaskSet.of(endless).sample(1)


def test_a_task_set_survives_json_where_its_source_has_a_name():
    for source in (ROWS, rows, seeded, partial(first_rows, 3), {"train": ROWS[:2], "test": rows}):
        tasks = TaskSet.of(source)
        again = TaskSet.from_record(json.loads(json.dumps(tasks.record())))
        assert ids(again.take(2)) == ids(tasks.take(2))
        assert again == tasks
    with pytest.raises(TaskError, match="cannot be imported by name"):
        TaskSet.of(lambda: ROWS).record()
    with pytest.raises(TaskError, match="generator"):
        TaskSet.of(row for row in ROWS).record()


@pytest.mark.engine
def test_hugging_face_datasets_are_tasks_as_objects_and_by_name(tmp_path):
    datasets = pytest.importorskip("datasets", reason="UNTESTED: datasets is not installed")
    rows = [{"question": f"q{n}", "answer": str(n)} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = TaskSet.of({"train": datasets.Dataset.from_list(rows)})
    named = TaskSet.of({"train": f"hf:{tmp_path}:train"})

    assert [task.data for task in made] == rows
    assert [task.id for task in made] == [task.id for task in named]
    assert made[2].data == {"question": "q2", "answer": "2"}
