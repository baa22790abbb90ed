"""The exit codes that the command line's page promises, for every verb, and the words of each refusal.

0 means that the command did what it was asked, 1 that the answer is no or that something failed on the way,
2 that something on the command line was wrong, and 130 that Ctrl-C stopped it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from agentenv.cli import VERBS
from agentenv.envs import registry
from agentenv.runs.store import RunWriter
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
    "unscored.py": """
import agentenv as ae


class Unscored(ae.ToolEnv):
    tasks = [{}]

    def start(self):
        return "Go."

    def reward(self):
        return None
""",
    "slip.py": "x = 1\nclass Slip(object)\n    pass\n",
    "raises.py": "import agentenv\nundefined_name\n",
    "empty.py": "",
    "plural.py": "import agentenv as ae\n@ae.tools\ndef f(): ...\n",
    "lacks.py": "import no_such_package\n",
    "near.py": "import agentenv as ae\nclass A(ae.Toolenv): ...\n",
    "wrong.py": "import agentenv as ae\nae.register('a/B-v0', ae.ToolEnv, tasks=[{}], max_turn=3)\n",
    "none.py": "import agentenv as ae\nclass A(ae.ToolEnv): ...\nae.register('test/None-v0', A, tasks=[])\n",
    "rows.py": "import agentenv as ae\nclass A(ae.ToolEnv): ...\nae.register('test/R-v0', A, tasks='r.jsonl')\n",
    "odd_tool.py": "import agentenv as ae\n@ae.tool\ndef f(a: any) -> int:\n    'Do.'\n",
    "stops.py": "raise SystemExit(0)\n",
    "turns.py": (
        "import agentenv as ae\nclass A(ae.ToolEnv): ...\nae.register('a/C-v0', A, tasks=[{}], max_turns='3')\n"
    ),
    "open.toml": "[limits\nmax_turns=2\n",
    "nested.toml": "[runner.limits]\nmax_turns=2\n",
    "broken.json": '{"a": 1',
    "empty.jsonl": "",
    "list.json": "[1]",
    "inspect.json": '{"eval": {}, "samples": []}',
    "none.json": '{"messages": []}',
    "elf.json": '{"messages": [{"role": "elf"}]}',
    "half.jsonl": '{"messages": 1}\nnonsense',
    "nine.json": '{"schema_version": "9", "steps": []}',
    "afile": "",
    "hollow/config.json": '{"model_type": "llama"}',
    "full/mine.txt": "",
    "bare/readme.txt": "",
}
# One line a case: the command, where `CALC` and `ADDER` are environments and `last` is a run in which all
# episodes failed, and words of the error.
WRONG = [
    ("nope", ""),
    ("evl", "did you mean 'eval'"),
    ("--bogus", "see agentenv --help"),
    ("list --nope", ""),
    ("runs", "there are no runs in runs/"),
    ("runs nothing", ""),
    ("new 9", ""),
    ("new shop --dir list.json", ""),
    ("new full", "not empty"),
    ("new mine --from no.py", "no file"),
    ("new mine --from countdown/Nothing-v0", "unknown"),
    ("new mine --from CALC", "does not define Calculator"),
    ("check nope/X-v0", ""),
    ("check slip.py", ""),
    ("check CALC --only nope", ""),
    ("check calculator --only fuzz", ""),
    ("check CALC -o env.nope=1", ""),
    ("check CALC -o max_trns=2", "did you mean 'limits.max_turns'"),
    ("check ADDER:Addr", "did you mean 'Adder'"),
    ("eval", "name at least one environment"),
    ("eval agentenv/Calcluator-v0", "did you mean 'agentenv/Calculator-v0'"),
    ("eval nofile.py", "no file 'nofile.py'"),
    ("eval openai:gpt-4o", "is a model, and not an environment"),
    ("eval slip", "did you mean 'slip.py'?"),
    ("eval ./slop.py", "did you mean 'slip.py'?"),
    ("eval slip.py", "slip.py:2: class Slip(object)"),
    ("eval empty.py", "defines an environment class"),
    ("eval none.py", "test/None-v0 has no tasks in its split 'train'"),
    ("eval rows.py", "a path begins in the working directory"),
    ("eval ADDER -m hf:./nomodel", "./nomodel"),
    ("eval ADDER -m hf:./hollow", "no weights"),
    ("eval ADDER -m gpt", "names no engine"),
    ("eval ADDER -m openai/gpt-4o", "did you mean openai:gpt-4o,"),
    ("eval ADDER -m gpt-4o", "did you mean openai:gpt-4o,"),
    ("eval ADDER -m SmolLM2-135M", "did you mean smollm2?"),
    ("eval ADDER -m smolm2", "did you mean smollm2?"),
    ("eval ADDER -m localhost:8000", "did you mean http://localhost:8000/v1?"),
    ("eval ADDER -m http//localhost:8000/v1", "did you mean http://localhost:8000/v1?"),
    ("eval ADDER -o x.y=1", ""),
    ("eval ADDER -o env.digits=2", "cannot be made with ['digits']"),
    ("eval ADDER -o max_trns=3", "did you mean 'limits.max_turns' (Largest number of assistant turns)"),
    ("eval ADDER -o max_turns=many", "max_turns"),
    ("eval ADDER -o sampling.grammar=x", "unknown setting 'sampling.grammar'"),
    ("eval ADDER -k 0", "'-k' / '--episodes'"),
    ("eval ADDER -n -3", "-n 0 plays all tasks"),
    ("eval ADDER -n many", "give a number of tasks"),
    ("eval ADDER --split nope", "no split 'nope'"),
    ("eval ADDER --config missing.toml", ""),
    ("eval ADDER --resume gone", "no run 'gone'"),
    ("eval ADDER --max-turns 3", "-o limits.max_turns=VALUE"),
    ("eval ADDER --temperature 0", "-o sampling.temperature=VALUE"),
    ("eval ADDER --modell mock", "--model"),
    ("eval ADDER --spilt test", "fix: see agentenv eval --help"),
    ("eval odd_tool.py", "fix: correct the tool that is named above"),
    ("eval stops.py --fail-under 0.5", "SystemExit(0) where: stops.py:1 fix: put what is to run"),
    ("eval turns.py", "not '3' where: turns.py:3 fix: correct that line"),
    ("eval ADDER --config open.toml", "fix: correct that place of the file"),
    ("eval ADDER --config nested.toml", "limits is a section of its own: [limits] in a file"),
    ("eval ADDER --tasks a.jsonl", "a file of tasks is named in the environment"),
    ("eval --resume imported", "run imported is not an evaluation"),
    ("train --resume nope", ""),
    ("train --resume last", "agentenv eval --resume"),
    ("train ADDER", "no model to train"),
    ("train ADDER -m ./nomodel", "./nomodel"),
    ("train ADDER -m ./hollow", "no weights"),
    ("train ADDER -m mock", "no weights to train"),
    ("train ADDER -m ./hollow -o learning_rat=1", "did you mean 'train.learning_rate'"),
    ("train ADDER -m ./hollow -o env.digts=2", "takes no such arguments"),
    ("train ADDER -m ./hollow -k 1", "num_generations=1 (-k 1) can never train"),
    ("train ADDER -m ./hollow -o loss.epsilom=1", "did you mean 'epsilon' (Lower clip"),
    ("train ADDER --lr 1", "-o train.learning_rate=VALUE"),
    ("view gone", "no run 'gone'"),
    ("view .", ""),
    ("view last#99", ""),
    ("view --sort luck", "cannot sort"),
    ("replay last", ""),
    ("replay nope#1", ""),
    ("replay last#99", ""),
    ("replay last#0 -m mock", "--from-turn"),
    ("diff last", "agentenv diff [OPTIONS] BEFORE AFTER; see agentenv diff --help"),
    ("diff nope last", ""),
    ("diff ./full last", "fix: `agentenv runs` lists the runs; copy all files of one"),
    ("diff last last", "no task has a score in both runs"),
    ("rescore nope --reward fails.py:good", ""),
    ("rescore last --reward fails.py:nope", ""),
    ("rescore last --reward nothing", ""),
    ("rescore last --reward gone.py:f", ""),
    ("rescore last --reward json:gone", ""),
    ("export nope", ""),
    ("export last --as nope", ""),
    ("import missing.json", "cannot read missing.json: No such file"),
    ("import missing.json", "name a file that has episodes"),
    ("import bare", "there is no .json file in bare"),
    ("import broken.json", ""),
    ("import empty.jsonl", ""),
    ("import list.json", "not a JSON object"),
    ("import inspect.json", "logs of Inspect are not read"),
    ("import none.json", "has no list `messages`"),
    ("import elf.json", "no known role"),
    ("import half.jsonl", "line 2, column 1 is not JSON"),
    ("import nine.json", "not ATIF"),
    ("serve", "serve needs MODEL, --env ENV or --capture MODEL"),
    ("serve model --env demo/Echo-v0", "serve needs MODEL, --env ENV or --capture MODEL"),
    ("serve --capture mock --env x", "serve needs MODEL, --env ENV or --capture MODEL"),
    ("serve no-such-model", "'no-such-model'"),
    ("serve --env nope/X-v0", ""),
    ("serve --env CALC --host 0.0.0.0 --no-token", "it has no token"),
    ("serve --env CALC --token of-sixteen-and-more --no-token", "exclude each other"),
    ("sandbox serve --backend nope", ""),
    ("sandbox serve --protocol x", "unknown sandbox protocol 'x'"),
    ("sandbox serve --host 0.0.0.0 --no-token", "it has no token"),
    ("sandbox serve --token of-sixteen-and-more --no-token", "exclude each other"),
    ("plan -m .", "config of"),
    ("plan -m . --gpus eight", ""),
    ("plan -m nomodel", "a Hub id is written OWNER/NAME"),
    ("doctor -m nonsense", ""),
    ("doctor -m list.json", ""),
    ("doctor -m openai:m -o engine.temper=1", ""),
    ("doctor smollm2", "a model is examined with agentenv doctor -m smollm2"),
    ("doctor scripted:hi", "agentenv doctor -m scripted:hi"),
]
NO = [
    ("check fails.py", ""),
    ("eval fails.py", ""),
    ("eval unscored.py", ""),
    ("eval raises.py", "undefined_name"),
    ("eval ADDER --runs-dir afile", "choose another directory with --runs-dir"),
    ("eval plural.py", "agentenv.tools is a package and cannot be called; did you mean tool?"),
    ("eval plural.py", "where: plural.py:2 in <module>"),
    ("eval lacks.py", "install that package for the Python that runs agentenv"),
    ("eval near.py", "has no attribute 'Toolenv'; did you mean 'ToolEnv'?"),
    ("eval wrong.py", "did you mean 'max_turns'?"),
    ("eval CALC -n 1 --fail-under 2", ""),
    ("export last --as sft", ""),
    ("rescore last --reward fails.py:good --json", ""),
    ("doctor -m openai:m -o engine.base_url=http://127.0.0.1:9/v1 -o engine.retry_s=0 -o engine.api_key=k",
     "openai:m at http://127.0.0.1:9/v1 does not answer"),
]  # fmt: skip
DONE = [
    "",
    "--version",
    "list",
    "eval CALC -n 1",
    "export last",
    "view last --output page.html",
    "diff last last",
]
DONE += ["new shop", "doctor"]


@pytest.fixture
def spoken(adder, tmp_path: Path, command):
    """Run a command, after the run that it names was played in an environment."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def call(line: str, played_in: str = "fails.py"):
        if "last" in line:
            command("eval", played_in, "-n", "1")
        if "imported" in line:
            RunWriter.create("x", kind="import", run_id="imported").close()
        words = line.replace("CALC", "agentenv/Calculator-v0").replace("ADDER", adder)
        return command(*shlex.split(words))

    return call


def test_every_verb_is_tried():
    assert {line.split()[0] for line in [*dict([*WRONG, *NO]), *DONE] if line} >= set(VERBS)


@pytest.mark.parametrize(("line", "says"), WRONG, ids=str)
def test_what_is_wrong_on_the_line_gives_2_and_three_lines_and_no_run(line, says, spoken, tmp_path):
    said = spoken(line)

    assert said.code == 2
    assert says in " ".join(said.err.split())
    assert [part.split(":")[0].strip() for part in said.err.splitlines()[-3:]] == ["error", "where", "fix"]
    assert "last" in line or "imported" in line or not (tmp_path / "runs").exists()
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(("line", "says"), NO, ids=str)
def test_an_answer_of_no_gives_1(line, says, spoken):
    said = spoken(line)

    assert said.code == 1
    assert says in said.err


@pytest.mark.parametrize("line", DONE)
def test_what_was_done_gives_0(line, spoken):
    assert spoken(line, "agentenv/Calculator-v0").code == 0


def test_a_wrong_training_is_told_before_torch_is_loaded(adder):
    code = (
        "import sys; from agentenv.cli import main\n"
        "for words in (['--steps', '-1'], ['--demos', './gone.py:x'], ['-o', 'limits.max_turns=0'], ['-k', '1']):\n"
        f"    try: main(['train', {adder!r}, '-m', 'smollm2', *words])\n"
        "    except SystemExit: print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [
        "max_steps must be 0 or more, not -1",
        "there is no file './gone.py'",
        "max_turns must be at least 1",
        "num_generations=1 (-k 1) can never train",
    ]

    assert shown.stdout.split() == ["False"] * 4
    assert all(words in shown.stderr for words in said)


def test_debug_shows_the_traceback_and_keeps_the_exit_code(adder, command):
    said = command("eval", adder, "--split", "nope", "--debug")

    assert said.code == 2
    assert "Traceback (most recent call last)" in said.err
    assert "error: " in said.err


def test_a_list_with_an_environment_that_cannot_be_loaded_gives_1(monkeypatch, command):
    monkeypatch.setattr(registry, "_errors", {"agentenv/Calculator-v0": "ImportError: no module"})
    registry.clear()
    said = command("list", "--load", "calculator", "--json")

    assert said.code == 1
    assert [row["error"] for row in said.json["environments"]] == ["ImportError: no module"]


def test_a_viewer_that_ctrl_c_stops_gives_130(monkeypatch, command):
    def stopped(self: LiveServer, port: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "listening", stopped)

    assert command("view", "--live", "--no-browser").code == 130


def test_a_template_that_is_refused_gives_1(tmp_path: Path, command):
    model = tmp_path / "model"
    shutil.copytree(Path(__file__).parents[2] / "data" / "tokenizers" / "qwen3", model)

    assert command("doctor", "-m", str(model)).code == 0

    (model / "chat_template.jinja").write_text("{{ raise_exception('go away') }}")
    assert command("doctor", "-m", str(model)).code == 1


def test_an_export_without_an_episode_says_what_the_episodes_lack(adder, spoken, command):
    assert "1 have no score" in spoken("export last --as trl").out

    played = command("eval", adder, "-m", "scripted:I do not know.", "-n", "2")
    assert played.code == 0, played
    assert "2 have a reward below 1, which --min-reward sets" in command("export", "last", "--as", "sft").out
