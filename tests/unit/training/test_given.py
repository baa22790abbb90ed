"""What a user passes to the trainer is made ours or refused in its constructor, before anything is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentenv.core import AgentEnvError, StoreError, TrainingFailed, UsageError
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.loop.callbacks import Callbacks
from helpers.training import tiny
from scenes import TOKENIZER, Lengths, numbered, saved_model, trainer


class Compiled(torch.nn.Module):
    """What `torch.compile` makes of a model, without its compiler."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = tiny()


ECHO = numbered(count=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("kind", ["transformers", "path", "str"])
def test_a_tokenizer_of_transformers_or_a_path_trains_and_is_saved(model, tmp_path, kind):
    tokenizer: Any = model if kind == "str" else Path(model)
    if kind == "transformers":
        tokenizer = AutoTokenizer.from_pretrained(model)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
    settings = {"num_generations": 2, "groups_per_step": 1, "max_steps": 1, "output_dir": str(tmp_path)}
    trainer = GRPOTrainer(
        GRPOConfig(model=model, **settings),
        tokenizer=tokenizer,
        envs=ECHO,
        limits={"max_turns": 1, "max_tokens_per_turn": 4},
    )

    trainer.train()

    saved = AutoTokenizer.from_pretrained(tmp_path / "checkpoints" / "step-1")
    assert saved.chat_template == AutoTokenizer.from_pretrained(model).chat_template


async def later(inputs: object) -> object:
    return inputs


REFUSED = {
    "config": ["a/model", 5, GRPOConfig(lora={"target_modules": ["no_layer"]}), GRPOConfig(device="cuda:7")],
    "model": [
        *(5, Lengths, object(), tiny().model, Compiled()),
        *(tiny().to("meta"), tiny().requires_grad_(requires_grad=False)),
    ],
    "tokenizer": [5, "/nowhere", Lengths, None],
    "engine": ["http://localhost:1/v1", Lengths(), 5],
    "engine_options": [[1], "fast"],
    "envs": [object(), Lengths, [Lengths()], 5, []],
    "tasks": [5, [1, 2], "nowhere.jsonl", lambda: 3, [{}, 5]],
    "eval_tasks": [5, {"n": 1}, [None]],
    "limits": [5, {"max_turn": 1}],
    "runner": ["fast", {"concurency": 1}],
    "advantage_fn": [3, "mean", lambda: 0, later],
    "loss_fn": [3, [abs], lambda inputs, more: 0, later],
    "callbacks": [print, {"on_metrics": print}],
}


@pytest.mark.parametrize(
    ("name", "given"), [(name, each) for name, values in REFUSED.items() for each in values]
)
def test_what_cannot_be_used_is_refused_before_anything_is_loaded_or_played(name, given):
    arguments: dict[str, Any] = {
        "config": GRPOConfig(),
        "model": tiny(),
        "tokenizer": TOKENIZER,
        "envs": ECHO,
    }

    with pytest.raises(AgentEnvError) as refused:
        GRPOTrainer(**(arguments | {name: given}))

    assert not isinstance(refused.value, TrainingFailed)


def test_a_callback_that_cannot_be_called_is_refused():
    with pytest.raises(UsageError, match="on_metrics must be a function, not the int 3"):
        Callbacks(on_metrics=3)


def test_a_directory_that_cannot_be_made_ends_the_run_before_it_plays(tmp_path):
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(StoreError, match=f"cannot make the directory {file} of the run: File exists"):
        trainer(file).train()


def test_held_out_tasks_of_which_none_is_scored_are_told_with_the_first_error(tmp_path, caplog):
    trainer(tmp_path, eval_tasks=[{"m": 1}], max_steps=1).train()

    assert "no held-out episode was scored; the first one: TaskError: " in caplog.text
    assert "lacks the field 'n'" in caplog.text
