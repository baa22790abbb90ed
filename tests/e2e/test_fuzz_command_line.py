"""The command line with hostile values in every place that a person, a file, an environment or a run can set.

Whatever stands there, a command ends with one of the codes that are promised, writes nothing that a terminal
would obey, and explains an error in three lines. `make test` tries a share of the values in every place,
`make test-exhaustive` all of them.
"""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from pathlib import Path

import pytest

from agentenv.cli import VERBS, main
from agentenv.envs import registry
from helpers.chat_server import chat_server
from helpers.hostile import ACTING, TEXTS, Terminal, json_values

CALCULATOR = "agentenv/Calculator-v0"
HOSTILE_ENV = """
import agentenv as ae

TEXT = {text}


class Hostile(ae.ToolEnv):
    def start(self):
        raise RuntimeError(TEXT)


class Poor(ae.ToolEnv):
    def start(self):
        return "go" + TEXT

    def reward(self):
        raise LookupError(TEXT)


ae.register("fuzz/Hostile-v0", Hostile, tasks=[{{"id": "a"}}], override=True)
ae.register("fuzz/Poor-v0", Poor, tasks=[{{"id": TEXT or "a", "answer": TEXT}}], override=True)


def good(answer):
    raise ValueError(TEXT)
"""
PLACES = [
    ("{}",),
    ("--{}",),
    ("list", "{}"),
    ("new", "{}"),
    ("new", "shop", "--dir", "{}/x"),
    ("check", "{}"),
    ("check", CALCULATOR, "--only", "{}"),
    ("check", CALCULATOR, "--seed", "{}"),
    ("check", CALCULATOR, "-o", "env.{}=1"),
    ("eval", "{}"),
    ("eval", CALCULATOR, "-m", "{}"),
    ("eval", CALCULATOR, "-m", "hf:{}"),
    ("eval", CALCULATOR, "-m", "http://127.0.0.1:9/{}"),
    ("eval", CALCULATOR, "-n", "{}"),
    ("eval", CALCULATOR, "--split", "{}"),
    ("eval", CALCULATOR, "-o", "{}"),
    ("eval", CALCULATOR, "-o", "{}=1"),
    ("eval", CALCULATOR, "-n", "1", "-o", "sampling.temperature={}"),
    ("eval", CALCULATOR, "-n", "1", "-o", "limits.max_turns={}"),
    ("eval", CALCULATOR, "-n", "1", "-o", "runner.score={}"),
    ("eval", CALCULATOR, "--config", "{}"),
    ("eval", CALCULATOR, "--tokenizer", "{}"),
    ("eval", "--resume", "{}"),
    ("eval", CALCULATOR, "-n", "1", "--runs-dir", "{}/x"),
    ("eval", CALCULATOR, "-n", "1", "--fail-under", "{}"),
    ("train", CALCULATOR, "-m", "{}"),
    ("train", CALCULATOR, "--demos", "{}"),
    ("train", CALCULATOR, "-o", "{}=1"),
    ("train", "--resume", "{}"),
    ("plan", "-m", "{}"),
    ("plan", "-m", ".", "--gpus", "{}"),
    ("plan", "-m", ".", "--context", "{}"),
    ("view", "{}", "--no-browser"),
    ("view", "last#{}", "--no-browser"),
    ("view", "--sort", "{}"),
    ("view", "last", "--output", "{}/x"),
    ("replay", "last#{}"),
    ("replay", "last", "--episode", "{}"),
    ("replay", "last#0", "--env", "{}"),
    ("runs", "{}"),
    ("runs", "-n", "{}"),
    ("runs", "--runs-dir", "{}"),
    ("diff", "last", "{}"),
    ("rescore", "last", "--reward", "{}"),
    ("export", "last", "--as", "{}"),
    ("export", "last", "--output", "{}/x"),
    ("import", "{}"),
    ("serve", "--env", "{}"),
    ("serve", "--capture", "{}", "--port", "1"),
    ("sandbox", "serve", "--backend", "{}"),
    ("doctor", "{}"),
    ("doctor", "-m", "{}"),
]
TOML = ["x = {}", "model = {}", "[limits]\nmax_turns = {}", "[env]\ndigits = {}", "[sampling]\ntop_p = {}"]
INFO = ["id", "kind", "model", "seed", "config", "versions", "created", "closed", "note", "schema_version"]
INFO += ["expected_episodes", "env_ids", "status", "directory", "signature"]
EPISODE = ["env_id", "task_id", "group_id", "member", "stop_reason", "seed", "reward", "rewards", "turns"]
EPISODE += ["task", "messages", "error", "metrics", "timings", "sequences", "answer", "untrainable_reason"]
SUMMARY = ["task_id", "member", "stop_reason", "reward", "rewards", "metrics", "timings", "tools", "parts"]
SUMMARY += [
    "error",
    "answer",
    "num_turns",
    "total_tokens",
    "offset",
    "size",
    "env_id",
    "group_id",
    "question",
]
SUMMARY += ["sampled_tokens", "trained_tokens", "branch_of", "expected", "where", "num_trimmed"]
USAGES = ["{}", '{"prompt_tokens": {}}', '{"cost": {}, "completion_tokens": {}}']
USAGES += ['{"prompt_tokens_details": {}}', '{"completion_tokens_details": {"reasoning_tokens": {}}}']
READERS = [
    ("view", "--no-browser", "--output", "page.html"),
    ("export", "RUN"),
    ("runs",),
    ("diff", "RUN", "RUN"),
    ("doctor", "RUN"),
    ("eval", "--resume", "RUN"),
    ("replay", "RUN#0"),
    ("rescore", "RUN", "--reward", "good.py:good"),
]
EVERY = 23
"""`make test` tries one of so many combinations: a prime, so that it meets every place and every value."""


def share(places, values, verbs=("",)):
    """All combinations; those that `make test` does not try are for `make test-exhaustive`."""
    return [
        pytest.param(*combination, marks=pytest.mark.exhaustive if number % EVERY else (), id=str(number))
        for number, combination in enumerate(itertools.product(places, values, verbs))
    ]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("good.py").write_text("def good(answer):\n    return 1.0\n")
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, which each test copies."""
    root = tmp_path_factory.mktemp("good")
    assert played(["eval", CALCULATOR, "-n", "1", "--runs-dir", str(root)])[0] == 0
    return next(path for path in root.iterdir() if path.is_dir())


def played(words: list[str], encoding: str = "utf-8") -> tuple[int, str]:
    """Run a command on a strict terminal; return its code and what it showed."""
    terminal = Terminal(encoding=encoding)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("sys.stdout", terminal)
        patch.setattr("sys.stderr", terminal)
        with pytest.raises(SystemExit) as left:
            main(words)
    return int(left.value.code or 0), terminal.shown


def judge(code: int, shown: str) -> None:
    """Check what is promised of every command."""
    assert code in {0, 1, 2, 130}
    assert not ACTING.search(shown.replace("\r\n", "\n")), shown
    assert "Traceback (most recent call last)" not in shown
    if code == 2:
        assert [line[:7] for line in shown.splitlines()[-3:]] == ["error: ", "where: ", "  fix: "]


def test_every_verb_is_tried():
    assert {words[0] for words in PLACES} >= set(VERBS)


@pytest.mark.parametrize(("place", "text", "_"), share(PLACES, TEXTS))
def test_words(place: tuple[str, ...], text: str, _: str, a_run: Path):
    shutil.copytree(a_run, Path("runs") / a_run.name)

    judge(*played([word.replace("{}", text) for word in place]))


@pytest.mark.parametrize(("line", "value", "_"), share(TOML, json_values()))
def test_settings_in_a_file(line: str, value: str, _: str):
    Path("c.toml").write_text(line.replace("{}", value), encoding="utf-8", errors="surrogatepass")

    judge(*played(["eval", CALCULATOR, "-n", "1", "--config", "c.toml"]))


@pytest.mark.parametrize(("field", "value", "words"), share(INFO, json_values(), READERS))
def test_what_a_run_says_of_itself(field: str, value: str, words: tuple[str, ...], a_run: Path):
    for name in ("good", "strange"):
        shutil.copytree(a_run, Path("runs") / name)
    file = Path("runs/strange/run.json")
    known = {**json.loads(file.read_text()), field: "@@"}
    file.write_text(json.dumps(known).replace('"@@"', value))

    code, shown = played([word.replace("RUN", "strange") for word in words])

    judge(code, shown)
    assert code == 0 or words[0] != "view"


@pytest.mark.parametrize(("field", "value", "words"), share(EPISODE, json_values(), READERS))
def test_what_an_episode_holds(field: str, value: str, words: tuple[str, ...], a_run: Path):
    shutil.copytree(a_run, "runs/strange")
    Path("runs/strange/index.jsonl").unlink()
    file = Path("runs/strange/trajectories.jsonl")
    known = {**json.loads(file.read_text()), field: "@@"}
    file.write_text(json.dumps(known).replace('"@@"', value) + "\n")

    code, shown = played([word.replace("RUN", "strange") for word in words])

    judge(code, shown)
    assert code == 0 or words[0] != "view"


@pytest.mark.parametrize(("field", "value", "words"), share(SUMMARY, json_values(), READERS))
def test_what_the_index_of_a_run_holds(field: str, value: str, words: tuple[str, ...], a_run: Path):
    shutil.copytree(a_run, "runs/strange")
    file = Path("runs/strange/index.jsonl")
    known = {**json.loads(file.read_text()), field: "@@"}
    file.write_text(json.dumps(known).replace('"@@"', value) + "\n")

    code, shown = played([word.replace("RUN", "strange") for word in words])

    judge(code, shown)
    assert code == 0 or words[0] != "view"


@pytest.mark.parametrize(("usage", "value", "_"), share(USAGES, json_values()))
def test_what_a_server_counts(usage: str, value: str, _: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with chat_server(usage=usage.replace("{}", value)) as url:
        code, shown = played(
            ["eval", CALCULATOR, "-n", "1", "-m", "openai:m", "-o", f"engine.base_url={url}"]
        )
    judge(code, shown)
    assert code == 0 or "deep" in shown or "digits" in shown or "EngineError" in shown, shown

    assert played(["view", "last", "--no-browser", "--output", "page.html"])[0] == 0


@pytest.mark.parametrize(("entry", "text", "encoding"), share(("Hostile", "Poor"), TEXTS, ("utf-8", "ascii")))
def test_what_an_environment_raises_and_says(entry: str, text: str, encoding: str):
    Path("hostile.py").write_text(HOSTILE_ENV.format(text=ascii(text)))

    code, shown = played(["eval", f"hostile.py:fuzz/{entry}-v0", "-k", "2"], encoding)

    judge(code, shown)
    assert "2 episodes" in shown or "no episode has a score" in shown


@pytest.mark.parametrize(("shape", "value", "_"), share(["{}", '{{"messages": {}}}'], json_values()))
def test_rows_to_import(shape: str, value: str, _: str):
    Path("rows.jsonl").write_text(shape.replace("{}", value).replace("{{", "{").replace("}}", "}") + "\n")

    judge(*played(["import", "rows.jsonl"]))
