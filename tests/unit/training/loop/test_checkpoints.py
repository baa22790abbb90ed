"""A kill or a full disk while a checkpoint is written leaves one that can be loaded; merged weights return."""

from __future__ import annotations

import os
import pickle
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from agentenv.core import StoreError, UsageError
from agentenv.render import ChatTokenizer
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.loop import last_checkpoint
from helpers.moe import tiny_moe
from helpers.training import group, tiny, trainer_of
from scenes import saved_model


class Killed(BaseException):
    """Ends the work as a kill does: nothing is cleaned up."""


@contextmanager
def killed_before_renaming(monkeypatch, suffix: str):
    """Raise before the rename of a path that ends with the suffix."""
    rename = Path.replace

    def replace(self, target):
        if self.name.endswith(suffix):
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(Killed):
            yield


@contextmanager
def files_up_to(size: int):
    """Let no file grow beyond the size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", ["step-1", ".partial"])
def test_a_kill_between_the_renames_leaves_a_checkpoint_to_resume_from(tmp_path, monkeypatch, suffix):
    trainer = trainer_of(output_dir=str(tmp_path))
    trainer.step([group("a", [0.0, 1.0, 0.3])])
    saved = trainer.save_step()
    with killed_before_renaming(monkeypatch, suffix):
        trainer.save_step()

    again = trainer_of(tiny(seed=1), output_dir=str(tmp_path))
    found = last_checkpoint(tmp_path)
    assert found is not None
    again.resume(found)
    again.resume(saved)

    assert all(map(torch.equal, again.model.parameters(), trainer.model.parameters()))
    assert again.steps_done == 1


def test_checkpoints_behind_a_link_are_not_resumed_from(tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "step-1").mkdir(parents=True)
    (theirs / "step-1" / "trainer_state.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(theirs)

    with pytest.raises(StoreError, match="is a link"):
        last_checkpoint(tmp_path / "run")


def test_a_resumed_training_computes_with_as_many_threads_as_before(tmp_path, monkeypatch):
    """Sums of floats depend on the number of threads, which is that of the cores that are free at a start."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("agentenv.training.loop.checkpoint.usable_cores", lambda: 3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        saved = trainer_of(output_dir=str(tmp_path)).save_step()
        torch.set_num_threads(1)
        trainer_of(output_dir=str(tmp_path)).resume(saved)

        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_kills_left_is_removed_by_the_next_checkpoint(tmp_path, monkeypatch):
    trainer = trainer_of(output_dir=str(tmp_path))
    for trainer.grpo.steps_done in (1, 2):
        trainer.save_step()
        with killed_before_renaming(monkeypatch, ".partial"):
            trainer.save_step()

    trainer.grpo.steps_done = 3
    trainer.save_step()

    kept = {
        path.name: (path / "trainer_state.json").is_file() for path in (tmp_path / "checkpoints").iterdir()
    }
    assert kept == {"step-1": True, "step-2": True, "step-3": True}


@pytest.mark.parametrize("full_at", ["model.safetensors", "trainer_state.pt"])
def test_a_full_disk_is_a_store_error_and_keeps_the_older_checkpoint(tmp_path, full_at):
    trainer = trainer_of(output_dir=str(tmp_path))
    trainer.step([group("a", [0.0, 1.0, 0.3])])
    path = trainer.save_step()
    size = (path / full_at).stat().st_size - 4096

    with files_up_to(size), pytest.raises(StoreError, match="cannot write the checkpoint"):
        trainer.save_step()

    assert [left.name for left in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    trainer.resume(path)


class Acts:
    """Makes a directory as soon as it is read from a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_checkpoint_that_somebody_changed_runs_no_code_and_is_one_clear_error(tmp_path):
    trainer = trainer_of(output_dir=str(tmp_path))
    path = trainer.save_step()
    (path / "trainer_state.pt").write_bytes(pickle.dumps(Acts(tmp_path / "acted"), protocol=2))

    with pytest.raises(UsageError, match="cannot be read: UnpicklingError") as raised:
        trainer.resume(path)

    assert "remove it" in str(raised.value.remedy)
    assert not (tmp_path / "acted").exists()


def test_a_file_in_the_place_of_a_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "mine").write_text("notes")

    with pytest.raises(StoreError, match="cannot write the checkpoint"):
        trainer_of().save(tmp_path / "mine")

    assert (tmp_path / "mine").read_text() == "notes"


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, named = [], []
    monkeypatch.setattr(
        "os.fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
    )
    rename = Path.replace

    def replace(self, target):
        named.extend(synced)
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    trainer_of().save(tmp_path / "new")

    assert {"model.safetensors", "trainer_state.pt", "trainer_state.json", ".new.partial"} <= set(named)
    assert synced[-1] == tmp_path.name


def test_experts_that_are_merged_in_memory_and_apart_on_disk_are_resumed(tmp_path):
    trainer = trainer_of(tiny_moe())
    trainer.step([group("a", [0.0, 1.0, 0.3])])
    trainer.save(tmp_path / "saved")
    again = trainer_of(tiny_moe())

    again.resume(tmp_path / "saved")

    kept = dict(again.model.named_parameters())
    assert any("experts.gate_up_proj" in name for name in kept)
    assert all(torch.equal(kept[name], one) for name, one in trainer.model.named_parameters())
    for one in (trainer, again):
        one.step([group("b", [0.0, 1.0, 0.7])])
    assert all(torch.equal(kept[name], one) for name, one in trainer.model.named_parameters())


def test_the_experts_of_another_model_are_refused(tmp_path):
    trainer_of(tiny_moe()).save(tmp_path / "saved")

    with pytest.raises(UsageError, match="another model's weights"):
        trainer_of(tiny_moe(num_experts=8)).resume(tmp_path / "saved")


def test_a_training_without_environments_saves_the_tokenizer_beside_its_model(tmp_path):
    source = saved_model(tmp_path / "model")
    trainer = GRPOTrainer(GRPOConfig(model=source, learning_rate=1e-3))

    directory = trainer.save(tmp_path / "saved")

    assert ChatTokenizer.load(directory).encode("abc") == ChatTokenizer.load(source).encode("abc")
