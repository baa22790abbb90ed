"""The exit codes that the command line's page promises, for every verb.

0 means that the command did what it was asked, 1 that the answer is no or that something failed on the way,
2 that something on the command line was wrong, and 130 that Ctrl-C stopped it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from agentenv.cli import VERBS, main
from agentenv.envs import registry
from agentenv.runs.view.server import LiveServer

FILES = {
    "fails.py": """
import agentenv as ae


class Fails(ae.ToolEnv):
    def start(self):
        raise RuntimeError("no table")


ae.register("codes/Fails-v0", Fails, tasks=[{"id": "a"}])


def good():
    return 1.0
""",
    "typo.py": "def f(:\n",
    "raises.py": "import agentenv\nundefined_name\n",
    "broken.json": '{"a": 1',
    "empty.jsonl": "",
    "list.json": "[1]",
}
CALCULATOR = "agentenv/Calculator-v0"
WRONG = [
    ("nope",),
    ("list", "--nope"),
    ("runs", "nothing like this"),
    ("new", "9"),
    ("new", "shop", "--dir", "list.json"),
    ("check", "nope/X-v0"),
    ("check", "typo.py"),
    ("check", CALCULATOR, "--only", "nope"),
    ("check", "calculator", "--only", "fuzz"),
    ("check", CALCULATOR, "-o", "env.nope=1"),
    ("eval",),
    ("eval", "nope/X-v0"),
    ("eval", "missing.py"),
    ("eval", "typo.py"),
    ("eval", CALCULATOR, "-m", "nonsense"),
    ("eval", CALCULATOR, "-o", "x.y=1"),
    ("eval", CALCULATOR, "-o", "env.nope=1"),
    ("eval", CALCULATOR, "--config", "missing.toml"),
    ("eval", CALCULATOR, "--split", "nope"),
    ("eval", "--resume", "nope"),
    ("train", "--resume", "nope"),
    ("train", CALCULATOR, "-m", "nope"),
    ("view", "nope"),
    ("view", "."),
    ("view", "last#99"),
    ("view", "--sort", "nope"),
    ("replay", "last"),
    ("replay", "nope#1"),
    ("replay", "last#99"),
    ("diff", "nope", "last"),
    ("rescore", "nope", "--reward", "fails.py:good"),
    ("rescore", "last", "--reward", "fails.py:nope"),
    ("export", "nope"),
    ("export", "last", "--as", "nope"),
    ("import", "missing.json"),
    ("import", "broken.json"),
    ("import", "empty.jsonl"),
    ("import", "list.json"),
    ("serve",),
    ("serve", "--env", "nope/X-v0"),
    ("sandbox", "serve", "--backend", "nope"),
    ("plan", "-m", "."),
    ("plan", "-m", ".", "--gpus", "eight"),
    ("doctor", "-m", "nonsense"),
    ("doctor", "-m", "list.json"),
]
NO = [
    ("check", "fails.py"),
    ("eval", "fails.py"),
    ("eval", "raises.py"),
    ("eval", CALCULATOR, "-n", "1", "--fail-under", "2"),
    ("export", "last", "--as", "sft"),
    ("rescore", "last", "--reward", "fails.py:good", "--json"),
]
DONE = [
    (),
    ("--version",),
    ("list",),
    ("eval", CALCULATOR, "-n", "1"),
    ("export", "last"),
    ("view", "last", "--output", "page.html"),
    ("diff", "last", "last"),
    ("new", "shop"),
    ("doctor",),
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def test_every_verb_is_tried():
    assert {words[0] for words in [*WRONG, *NO, *DONE] if words} >= set(VERBS)


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_what_is_wrong_on_the_line_gives_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    if "last" in " ".join(words):
        code_of("eval", "fails.py")
        capsys.readouterr()

    assert code_of(*words) == 2
    assert [line[:7] for line in capsys.readouterr().err.splitlines()[-3:]] == [
        "error: ",
        "where: ",
        "  fix: ",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("diff", "last"), "agentenv diff [OPTIONS] BEFORE AFTER; see agentenv diff --help"),
        (("eval", CALCULATOR, "-k", "0"), "Invalid value for '-k' / '--episodes'"),
        (("diff", "last", "last"), "no task has a score in both runs"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_in_words_of_the_command(words, says, capsys: pytest.CaptureFixture[str]):
    code_of("eval", "fails.py")
    capsys.readouterr()

    assert code_of(*words) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", NO, ids=" ".join)
def test_an_answer_of_no_gives_1(words: tuple[str, ...]):
    if "last" in words:
        code_of("eval", "fails.py")

    assert code_of(*words) == 1


@pytest.mark.parametrize("words", DONE, ids=" ".join)
def test_what_was_done_gives_0(words: tuple[str, ...]):
    if "last" in words:
        code_of("eval", CALCULATOR, "-n", "1")

    assert code_of(*words) == 0


def test_a_list_with_an_environment_that_cannot_be_loaded_gives_1(monkeypatch, capsys):
    monkeypatch.setattr(registry, "_errors", {CALCULATOR: "ImportError: no module"})
    registry.clear()

    assert code_of("list", "--load", "calculator", "--json") == 1
    assert [row["error"] for row in json.loads(capsys.readouterr().out)["environments"]] == [
        "ImportError: no module"
    ]


def test_a_viewer_that_ctrl_c_stops_gives_130(monkeypatch):
    def stopped(self: LiveServer, port: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "listening", stopped)

    assert code_of("view", "--live", "--no-browser") == 130


def test_a_template_that_is_refused_gives_1(tmp_path: Path):
    data = Path(__file__).parents[2] / "data" / "tokenizers" / "qwen3"
    model = tmp_path / "model"
    shutil.copytree(data, model)

    assert code_of("doctor", "-m", str(model)) == 0

    (model / "chat_template.jinja").write_text("{{ raise_exception('go away') }}")
    assert code_of("doctor", "-m", str(model)) == 1
